"""The kernels for CUDA devices, as far as a machine without one can tell.

Numba's simulator runs the tests of tests/kernels/device, in a process of their own. It runs Python, without types, so
where numba-cuda is installed (pip install 'weightvc[cuda]') every kernel is compiled as well; that needs no GPU.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.timeout(900)
def test_in_the_simulator() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "device")],
        env=environment | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout, run.stdout
    assert "skipped" not in run.stdout, run.stdout


def test_they_are_imported_on_demand() -> None:
    code = "import sys, weightvc_kernels; assert not {'numba', 'blake3'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="weightvc[cuda] is not installed")
@pytest.mark.parametrize("lane", [1, 2, 4, 8])
def test_they_compile_for_hopper(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without floats, which a slip in the types of indices would bring in."""
    import numba.cuda.dispatcher
    from numba import cuda, types

    from weightvc_kernels import cuda_kernels, cuda_rice_kernels

    # What a kernel calls is compiled for the device that is there.
    hopper = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: hopper)
    made, rice = cuda_kernels.made(lane, 256), cuda_rice_kernels.made(lane)
    lanes, masks = (types.Integer.from_bitwidth(bits, False)[::1] for bits in (8 * lane, 64 // lane))
    words, longs, ints = types.uint64[::1], types.int64[::1], types.int32[::1]
    rows, prices, counts = types.int64[:, ::1], types.uint32[:, ::1], types.uint32[:, :, ::1]
    long, yes = types.int64, types.boolean
    signatures = {
        made.mark: (lanes, lanes, words, words, masks, ints, long),
        made.scatter: (lanes, lanes, masks, longs, long, longs, lanes, lanes),
        cuda_kernels.scanned(256): (ints, longs),
        cuda_kernels.inspect: (longs, lanes, lanes, ints, long),
        cuda_kernels.put: (lanes, longs, lanes),
        cuda_rice_kernels.clear: (words,),
        cuda_rice_kernels.parameters: (longs, rows, ints, prices, longs, longs),
        cuda_rice_kernels.settle: (counts, prices, types.int32[:, ::1], rows),
        cuda_rice_kernels.index: (words, rows, rows, ints),
        cuda_rice_kernels.places: (words, rows, ints, rows, longs, ints),
        cuda_rice_kernels.gather: (lanes, long, longs, long, long, lanes),
        cuda_rice_kernels.scatter: (lanes, long, longs, long, long, lanes),
        rice.tally: (lanes, lanes, rows, ints, counts),
        rice.pack: (longs, lanes, lanes, rows, ints, rows, longs, rows, words, yes),
        rice.values: (words, rows, ints, rows, lanes, lanes, ints),
    }
    for kernel, signature in signatures.items():
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=(9, 0))
        assert ".f32" not in ptx
        assert ".f64" not in ptx
