"""Context payloads and tables that earlier versions wrote: every later version has to read them, for ever.

golden/context.json is append-only. It gets the cases that it lacks by
`PYTHONPATH=. python tests/kernels/test_context_golden.py`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import plain_context
import pytest

from tests.kit.blocks import golden
from weightvc_kernels import context
from weightvc_kernels.context_tables import FORMS

FILE = Path(__file__).parent / "golden" / "context.json"


def cases() -> dict[str, tuple[str, bytes, bytes]]:
    """Dtype, old and new block by the case's name."""
    out: dict[str, tuple[str, bytes, bytes]] = {}
    for dtype, form in FORMS.items():
        old, new = golden(dtype, form.lane)
        for name in ("few steps", "some noise", "many steps", "one change"):
            out[f"{name} {dtype}"] = (dtype, old.tobytes(), new[name].tobytes())
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
