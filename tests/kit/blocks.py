"""Blocks of lanes for tests of codecs: bits that are easily got wrong, changes to them, and damage to payloads."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Lanes = npt.NDArray[np.unsignedinteger]

# Zeros, subnormals, infinities, NaNs, and the ends of the integers that steps are taken in.
SPECIAL = {
    1: [0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7C, 0xFC, 0x81],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7FFF, 0xFFC0, 0xFFFF],
    4: [0, 0x80000000, 1, 0x80000001, 0x3F800000, 0x7F800000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF],
    8: [0, 1 << 63, 1, (1 << 63) + 1, 0x7FF << 52, (0x7FF << 52) + 1, (1 << 63) - 1, (1 << 64) - 1],
}


def changed(old: Lanes, where: npt.NDArray[np.bool_], kind: str, seed: int) -> Lanes:
    """`old` with other bits at `where`."""
    rng = np.random.default_rng(seed)
    new, n, width = old.copy(), int(where.sum()), 8 * old.itemsize
    if kind == "step":
        new[where] += rng.choice(np.array([1, 2**width - 1], old.dtype), n)
    elif kind == "far":
        new[where] += (2.0 ** rng.uniform(0, width - 1, n)).astype(old.dtype)
    elif kind == "bit":
        new[where] ^= old.dtype.type(1) << rng.integers(0, width, n).astype(old.dtype)
    elif kind == "special":
        new[where] = rng.choice(np.array(SPECIAL[old.itemsize], old.dtype), n)
    else:
        new[where] = rng.integers(0, 2**width, n, old.dtype)
    return new


def sample(lane: int, density: float, count: int) -> tuple[Lanes, Lanes]:
    """An old and a new block of `count` lanes; steps of any length, the same on every call."""
    rng = np.random.default_rng(lane)
    old = rng.integers(0, 2 ** (8 * lane), count, f"u{lane}")
    new = old.copy()
    at = rng.random(count) < density
    new[at] += (2.0 ** rng.uniform(0, 8 * lane - 1, int(at.sum()))).astype(old.dtype)
    return old, new


def damage(data: st.DataObject, whole: bytes, most: int = 3) -> bytes:
    """`whole` with up to `most` faults."""
    out = bytearray(whole)
    for _ in range(data.draw(st.integers(1, most))):
        at = data.draw(st.integers(0, len(out) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "insert", "repeat", "zero"]))
        if kind == "flip":
            out[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            out[at] = data.draw(st.sampled_from([0, 1, 127, 128, 254, 255]))
        elif kind == "cut":
            del out[max(1, at) :]
        elif kind == "insert":
            out[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        elif kind == "repeat":
            out += out[at:]
        else:
            out[at : at + 8] = bytes(len(out[at : at + 8]))
    return bytes(out)


def stream(name: str, size: int) -> bytes:
    """`size` pseudo-random bytes that depend on `name` alone, on any machine and any numpy."""
    return hashlib.shake_256(name.encode()).digest(size)


def golden(dtype: str, lane: int) -> tuple[Lanes, dict[str, Lanes]]:
    """An old block, and new ones by the names of golden cases, as `stream` makes them: they never change."""
    unsigned = np.dtype(f"u{lane}")
    count = 9000 // lane
    old = np.frombuffer(stream(f"old {dtype}", count * lane), unsigned)
    noise = np.frombuffer(stream(f"noise {dtype}", count * lane), unsigned)
    dice = np.frombuffer(stream(f"dice {dtype}", 4 * count), np.uint32) >> 16
    one_up = np.where(dice % 2, 1, 2 ** (8 * lane) - 1).astype(unsigned)
    new = {
        "few steps": np.where(dice < 600, old + one_up, old),
        "some noise": np.where(dice < 3000, noise, old),
        "many steps": np.where(dice < 40000, old + one_up, old),
        "all steps": old + one_up,
        "one change": np.where(np.arange(count) == count - 9, noise, old),
    }
    return old, {name: block.astype(unsigned) for name, block in new.items()}
