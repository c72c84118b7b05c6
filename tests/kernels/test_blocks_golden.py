"""Payloads that earlier versions wrote: every later version has to read them, for ever.

golden/payloads.json is append-only. It gets the cases that it lacks by
`PYTHONPATH=. python tests/kernels/test_blocks_golden.py`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_codec import decode as plain_decode

import weightvc_kernels as wk
from tests.kit.blocks import stream

FILE = Path(__file__).parent / "golden" / "payloads.json"


def cases() -> dict[str, tuple[int, bytes, bytes]]:
    """Lane, old and new block by the case's name; a case of one block has an `old` of zeros."""
    out: dict[str, tuple[int, bytes, bytes]] = {}
    for lane in (1, 2, 4, 8):
        dtype = np.dtype(f"u{lane}")
        # Integers with a skewed top byte, as weights have it.
        old = np.frombuffer(stream(f"old {lane}", 2000 * lane), dtype).copy()
        top = np.frombuffer(stream(f"top {lane}", 2000), np.uint8) % 5 + 60
        shift = 8 * lane - 8
        old = (old & dtype.type((1 << shift) - 1)) | (top.astype(dtype) << dtype.type(shift))
        noise = np.frombuffer(stream(f"noise {lane}", 2000 * lane), dtype)
        dice = np.frombuffer(stream(f"dice {lane}", 4000), np.uint16)
        one_up = np.where(dice % 2, 1, 2 ** (8 * lane) - 1).astype(dtype)

        def case(name: str, new: Any, old: Any = old, lane: int = lane) -> None:
            out[f"{name} {lane}"] = (lane, old.tobytes(), new.astype(f"u{lane}").tobytes())

        case("whole", old, np.zeros_like(old))
        case("whole noise", noise, np.zeros_like(old))
        case("few steps", np.where(dice < 600, old + one_up, old))
        case("few masks", np.where(dice < 2000, old ^ dtype.type(0x14), old))
        case("few noise", np.where(dice < 2000, noise, old))
        case("one change", np.where(np.arange(2000) == 1234, noise, old))
        case("many steps", np.where(dice < 30000, old + one_up, old))
        case("all steps", old + one_up * dtype.type(3))
        case("all masks", old ^ (dtype.type(0x28) * (dice % 2).astype(dtype)))
    return out


GOLDEN: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("name", GOLDEN)
def test_old_payloads_still_decode(name: str) -> None:
    entry = GOLDEN[name]
    lane, old, new = cases()[name]
    assert lane == entry["lane"]
    assert hashlib.sha256(old + new).hexdigest() == entry["sha256"], "the case itself has changed"
    payload = bytes.fromhex(entry["payload"])
    assert wk.decode_patch(entry["codec"], payload, old, lane).tobytes() == new
    assert plain_decode(entry["codec"], payload, old, lane) == new


def test_every_case_and_codec_is_kept() -> None:
    assert set(GOLDEN) == set(cases())
    assert {entry["codec"] for entry in GOLDEN.values()} == {wk.RAW, wk.PLANES, wk.SPARSE, wk.DENSE}
    for codec in (wk.SPARSE, wk.DENSE):
        modes = {entry["payload"][:2] for entry in GOLDEN.values() if entry["codec"] == codec}
        assert modes == {"00", "01"}


def add_missing() -> None:
    """Write the payloads of new cases; what is there stays as it is."""
    for name, (lane, old, new) in cases().items():
        whole = name.startswith("whole")
        codec, payload = wk.encode_whole(new, lane) if whole else wk.encode_patch(old, new, lane)[:2]
        digest = hashlib.sha256(old + new).hexdigest()
        entry = {"lane": lane, "codec": codec, "sha256": digest, "payload": payload.hex()}
        GOLDEN.setdefault(name, entry)
    FILE.write_text(json.dumps(GOLDEN, indent=1) + "\n")


if __name__ == "__main__":
    add_missing()
