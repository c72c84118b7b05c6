"""The kernels for CUDA devices, as far as a machine without one can tell.

Numba's simulator runs the tests of tests/kernels/device, in a process of their own. It runs Python, without types, so
where numba-cuda is installed (pip install 'weightvc[cuda]') every kernel is compiled as well; that needs no GPU.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
def test_they_compile_for_hopper(lane: int) -> None:
    """And without floats, which a slip in the types of indices would bring in."""
    from numba import cuda, types

    from weightvc_kernels import cuda_kernels as kernels

    lanes, masks = (types.Integer.from_bitwidth(bits, False)[::1] for bits in (8 * lane, 64 // lane))
    words, positions, counts = types.uint64[::1], types.int64[::1], types.int32[::1]
    made = kernels.made(lane, 256)
    signatures = {
        made.mark: (lanes, lanes, words, words, masks, counts, types.int64),
        made.scatter: (lanes, lanes, masks, positions, types.int64, positions, lanes, lanes),
        kernels.scanned(256): (counts, positions),
        kernels.inspect: (positions, lanes, lanes, counts, types.int64),
        kernels.put: (lanes, positions, lanes),
    }
    for kernel, signature in signatures.items():
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=(9, 0))
        assert ".f32" not in ptx
        assert ".f64" not in ptx
