"""Context payloads and tables that earlier versions wrote: every later version has to read them, for ever.

golden/context.json is append-only. `python tests/kernels/test_context_golden.py` adds the cases that it lacks.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import plain_context
import pytest

from weightvc_kernels import context
from weightvc_kernels.context_tables import FORMS

FILE = Path(__file__).parent / "golden" / "context.json"


def stream(name: str, size: int) -> bytes:
    """`size` pseudo-random bytes that depend on `name` alone, on any machine and any numpy."""
    return hashlib.shake_256(name.encode()).digest(size)


def cases() -> dict[str, tuple[str, bytes, bytes]]:
    """Dtype, old and new block by the case's name."""
    out: dict[str, tuple[str, bytes, bytes]] = {}
    for dtype, form in FORMS.items():
        unsigned = np.dtype(f"u{form.lane}")
        count = 9000 // form.lane
        old = np.frombuffer(stream(f"old {dtype}", count * form.lane), unsigned)
        noise = np.frombuffer(stream(f"noise {dtype}", count * form.lane), unsigned)
        dice = np.frombuffer(stream(f"dice {dtype}", 4 * count), np.uint32) >> 16
        one_up = np.where(dice % 2, 1, 2 ** (8 * form.lane) - 1).astype(unsigned)
        for name, new in (
            ("few steps", np.where(dice < 600, old + one_up, old)),
            ("some noise", np.where(dice < 3000, noise, old)),
            ("many steps", np.where(dice < 40000, old + one_up, old)),
            ("one change", np.where(np.arange(count) == count - 9, noise, old)),
        ):
            out[f"{name} {dtype}"] = (dtype, old.tobytes(), new.astype(unsigned).tobytes())
    return out


GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
CASES = cases()


@pytest.mark.parametrize("name", GOLDEN)
def test_old_payloads_still_decode(name: str) -> None:
    entry = GOLDEN[name]
    dtype, old, new = CASES[name]
    assert hashlib.sha256(old + new).hexdigest() == entry["sha256"], "the case itself has changed"
    tables, payload = bytes.fromhex(entry["tables"]), bytes.fromhex(entry["payload"])
    model = context.Model(tables, dtype)
    assert context.decode(model, payload, old).tobytes() == new
    assert plain_context.decode(tables, dtype, payload, old) == new
    # The tables are the writer's choice; given them, the payload is not.
    assert context.encode(model, old, new) == payload


def test_every_case_is_kept() -> None:
    assert set(GOLDEN) == set(CASES)


def add_missing() -> None:
    """Write the payloads of new cases; what is there stays as it is."""
    for name, (dtype, old, new) in CASES.items():
        tables = context.tables(context.sample(old, new, dtype, 1), dtype)
        payload = context.encode(context.Model(tables, dtype), old, new)
        digest = hashlib.sha256(old + new).hexdigest()
        GOLDEN.setdefault(name, {"sha256": digest, "tables": tables.hex(), "payload": payload.hex()})
    FILE.write_text(json.dumps(GOLDEN, indent=1) + "\n")


if __name__ == "__main__":
    add_missing()
