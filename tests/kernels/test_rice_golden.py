"""RICE payloads that earlier versions wrote: every later version has to read them, for ever.

golden/rice.json is append-only. It gets the cases that it lacks by
`PYTHONPATH=. python tests/kernels/test_rice_golden.py`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import plain_rice
import pytest

import weightvc_kernels as wk
from tests.kit.blocks import golden
from weightvc_kernels import rice

FILE = Path(__file__).parent / "golden" / "rice.json"
LANES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I32": 4, "C64": 8}


def cases() -> dict[str, tuple[str, bytes, bytes]]:
    """Dtype, old and new block by the case's name."""
    out: dict[str, tuple[str, bytes, bytes]] = {}
    for dtype, lane in LANES.items():
        old, new = golden(dtype, lane)
        out.update((f"{name} {dtype}", (dtype, old.tobytes(), block.tobytes())) for name, block in new.items())
    return out


GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
CASES = cases()


@pytest.mark.parametrize("name", GOLDEN)
def test_old_payloads_still_decode(name: str) -> None:
    entry = GOLDEN[name]
    dtype, old, new = CASES[name]
    assert hashlib.sha256(old + new).hexdigest() == entry["sha256"], "the case itself has changed"
    payload, lane = bytes.fromhex(entry["payload"]), LANES[dtype]
    assert wk.decode_patch(wk.RICE, payload, old, lane).tobytes() == new
    assert plain_rice.decode(payload, lane, old) == new


def test_every_case_is_kept() -> None:
    assert set(GOLDEN) == set(CASES)


def add_missing() -> None:
    """Write the payloads of new cases; what is there stays as it is."""
    for name, (dtype, old, new) in CASES.items():
        payload = rice.encode(old, new, dtype, LANES[dtype])
        digest = hashlib.sha256(old + new).hexdigest()
        GOLDEN.setdefault(name, {"sha256": digest, "payload": payload.hex()})
    FILE.write_text(json.dumps(GOLDEN, indent=1) + "\n")


if __name__ == "__main__":
    add_missing()
