"""The kernels for CUDA devices on a bf16 pair that is there already: diff, apply, RICE encode, and decode with apply.

python benchmarks/gpu.py

--mb N [N …]    size of the weights in 10^6 bytes (250 2000)
--share F       of the weights that change, by one step (0.005)
--repeat N      rounds; medians count (9)
--json PATH     write the figures there too

It needs an NVIDIA GPU with memory for some four times the weights, and pip install 'weightvc[cuda]'. Times are of the
calls, from the host, until the device has done all: what the host does and the copies of payloads are in them; the
first call, which compiles, is not. GB/s are of the weights, one side of the pair. A copy within the device, which
reads and writes them once, is what memory can do.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def pair(lanes: int, share: float) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """bf16 weights of a usual spread, and the same after a small step, uint16 [lanes] each."""
    rng = np.random.default_rng(0)
    some = (rng.standard_normal(1 << 24, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    old = np.resize(some.astype(np.uint16), lanes)
    new = old.copy()
    at = np.unique(rng.integers(0, lanes, int(lanes * share)))
    new[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), at.size)
    return old, new


def timed(call: Callable[[], Any], repeat: int, before: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of `repeat` calls, each after `before`, the first call left out."""
    from numba import cuda as device

    seconds = []
    for _ in range(repeat + 1):
        before()
        device.synchronize()
        begin = time.perf_counter()
        call()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def measure(nbytes: int, share: float, repeat: int, block: int = 4 << 20) -> dict[str, float]:
    """What each of the calls takes, in seconds, and what the payloads have, for weights of so many bytes."""
    from numba import cuda as device

    from weightvc_kernels import cuda, cuda_rice

    before, after = pair(nbytes // 2, share)
    old, new, target = device.to_device(before), device.to_device(after), device.to_device(before)
    changes = int(np.count_nonzero(before != after))
    del before, after
    (found,) = cuda.diff([(old, new)])
    (blocks,) = cuda_rice.encode([(old, new)], "BF16", block=block)
    writes = [cuda.Write(target, found.positions, found.new)]
    checked = [cuda.Write(target, found.positions, found.new, cuda.check_of(found.old.copy_to_host()))]

    def restore() -> None:
        target.copy_to_device(old)

    figures = {
        "copy": timed(restore, repeat),
        "diff": timed(lambda: cuda.diff([(old, new)]), repeat),
        "apply": timed(lambda: cuda.apply(writes), repeat, restore),
        "apply, checked": timed(lambda: cuda.apply(checked), repeat, restore),
        "encode": timed(lambda: cuda_rice.encode([(old, new)], "BF16", block=block), repeat),
        "decode, checked": timed(lambda: cuda_rice.decode_into(blocks, [target]), repeat, restore),
    }
    if cuda.diff([(target, new)])[0].positions.size:
        raise SystemExit("decoded weights differ from the encoded ones: these figures mean nothing")
    payload = sum(len(block.payload) for block in blocks)
    return figures | {"changes": changes, "payload": payload}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[250, 2000])
    parser.add_argument("--share", type=float, default=0.005)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from numba import cuda as device

    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") != "0":
        sys.exit("NUMBA_ENABLE_CUDASIM is set: a simulator's times say nothing of a GPU. Unset it.")
    if not device.is_available():
        sys.exit("No CUDA device was found. This benchmark needs an NVIDIA GPU, its driver, and weightvc[cuda].")
    name = device.get_current_device().name
    print(
        f"{name.decode() if isinstance(name, bytes) else name}, {options.share:.2%} of bf16 weights change by a step"
    )
    results: dict[int, dict[str, float]] = {}
    for megabytes in options.mb:
        results[megabytes] = figures = measure(megabytes * 10**6, options.share, options.repeat)
        changes, payload = int(figures.pop("changes")), int(figures.pop("payload"))
        print(f"\n{megabytes} MB: {changes:,} changes, {payload:,} bytes, {payload / max(1, changes):.3f} a change")
        for what, seconds in figures.items():
            print(f"  {what:16} {seconds * 1e3:9.3f} ms {megabytes / 1e3 / seconds:9.1f} GB/s")
        figures |= {"changes": changes, "payload": payload}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
