"""Payload sizes and speed of the codecs: bytes a changed element, and GB/s of one model's bytes.

python benchmarks/blocks.py OLD.safetensors NEW.safetensors [OLD NEW …]     pairs of checkpoints
python benchmarks/blocks.py                                                 generated bf16, 0.4 % changed

--threads N     threads that share the blocks (1)
--repeat N      runs, of which the fastest counts (3)
--block MIB     block size in MiB (4)
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import weightvc_kernels as wk
from weightvc.objects.dtypes import lane as lane_of

Block = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]
NAMES = {wk.RAW: "raw", wk.PLANES: "planes", wk.SPARSE: "sparse", wk.DENSE: "dense"}


def tensors(path: Path) -> Iterator[tuple[str, str, npt.NDArray[np.uint8]]]:
    """Name, dtype and bytes of every tensor of a trusted safetensors file."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry["dtype"], data[start + begin : start + end].copy()


def pair(old: Path, new: Path, size: int) -> list[Block]:
    """Blocks of two checkpoints with the same tensors."""
    before = {name: data for name, _, data in tensors(old)}
    return [
        (before[name][at : at + size], data[at : at + size], lane_of(dtype))
        for name, dtype, data in tensors(new)
        for at in range(0, data.size, size)
    ]


def generated(size: int) -> list[Block]:
    """64 MiB of normally distributed bf16, 0.4 % of them moved by one step."""
    rng = np.random.default_rng(1)
    bits = (rng.normal(0, 0.02, 1 << 25).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    moved = bits.copy()
    at = np.flatnonzero(rng.random(bits.size) < 0.004)
    moved[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), at.size)
    old, new = bits.view(np.uint8), moved.view(np.uint8)
    return [(old[o : o + size], new[o : o + size], 2) for o in range(0, old.size, size)]


def timed(pool: ThreadPoolExecutor, repeat: int, work: Callable[..., Any], *columns: Any) -> tuple[float, list[Any]]:
    """Seconds of the fastest of `repeat` runs over all blocks, and the results of the last."""
    best, results = float("inf"), []
    for _ in range(repeat):
        start = time.perf_counter()
        results = list(pool.map(work, *columns))
        best = min(best, time.perf_counter() - start)
    return best, results


def report(title: str, blocks: list[Block], pool: ThreadPoolExecutor, repeat: int) -> None:
    """Print one pair's line for patches and one for the new state by itself."""
    old, new, lane = zip(*blocks)
    total = sum(block.size for block in new)

    def speed(seconds: float) -> str:
        return f"{total / seconds / 1e9:.2f} GB/s"

    seconds, coded = timed(pool, repeat, wk.encode_patch, old, new, lane)
    codecs, payloads, changes = zip(*coded)
    changed, stored = sum(changes), sum(map(len, payloads))
    lanes = sum(block.size // width for block, width in zip(new, lane))
    print(f"{title}: {total / 1e6:.1f} MB, {changed} of {lanes} elements changed ({changed / lanes:.3%})")
    back, results = timed(pool, repeat, wk.decode_patch, codecs, payloads, old, lane)
    assert all(np.array_equal(a, b) for a, b in zip(results, new)), "decode differs"
    # Whatever an in-place decode meets, its time is the same; the copies of `old` are made outside the clock.
    copies = [block.copy() for block in old]
    place, _ = timed(pool, 1, wk.decode_patch_into, codecs, payloads, copies, lane)
    kinds = ", ".join(f"{NAMES[kind]} {n}" for kind, n in sorted(Counter(codecs).items()))
    print(f"  patch  {stored} bytes, {stored / max(changed, 1):.3f} B/change ({kinds})")
    print(f"         encode {speed(seconds)}, decode to a copy {speed(back)}, in place {speed(place)}")

    seconds, coded = timed(pool, repeat, wk.encode_whole, new, lane)
    codecs, payloads = zip(*coded)
    sizes = [block.size for block in new]
    back, results = timed(pool, repeat, wk.decode_whole, codecs, payloads, sizes, lane)
    assert all(np.array_equal(a, b) for a, b in zip(results, new)), "decode differs"
    share = sum(map(len, payloads)) / total
    print(f"  whole  {share:.4f} of raw, encode {speed(seconds)}, decode {speed(back)}")


def main() -> None:
    """Read the arguments and report on every pair."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--block", type=float, default=4, metavar="MIB")
    args = parser.parse_args()
    if len(args.checkpoints) % 2:
        parser.error("checkpoints come in pairs: OLD NEW")
    size = int(args.block * (1 << 20)) // 8 * 8
    with ThreadPoolExecutor(args.threads) as pool:
        for old, new in zip(args.checkpoints[::2], args.checkpoints[1::2]):
            report(f"{old.parent.name}/{old.name} → {new.name}", pair(old, new, size), pool, args.repeat)
        if not args.checkpoints:
            report("generated bf16", generated(size), pool, args.repeat)


if __name__ == "__main__":
    main()
