"""These tests run where NUMBA_ENABLE_CUDASIM says on what: 1, numba's simulator; 0, a GPU.

It has to be said before numba is imported, so tests/kernels/test_cuda.py runs them in a process of their own.
"""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") not in {"0", "1"}:
    collect_ignore_glob = ["test_*.py"]

_lock = threading.Lock()


def _array(self: Any, shape: int, dtype: Any) -> Any:
    """A shared array, one a line of a kernel. The simulator's own is made twice if two threads ask at once."""
    frame = sys._getframe(1)
    with _lock:
        kind = np.dtype(str(dtype))
        return self._allocations.setdefault((frame.f_code, frame.f_lineno), np.empty(shape, kind))


def _call(kernel: Any, *arguments: Any) -> Any:
    """A device function shares the globals of the kernel that calls it: the simulator need not change them again."""
    return kernel.fn(*arguments) if kernel._device else _launch(kernel, *arguments)


_launch: Any = None


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few threads a block, so that small arrays have many blocks: the simulator makes an OS thread of each."""
    from weightvc_kernels import cuda_arrays

    monkeypatch.setattr(cuda_arrays, "THREADS", 4)
    if os.environ["NUMBA_ENABLE_CUDASIM"] == "1":
        from numba.cuda.simulator import kernel, kernelapi

        global _launch
        _launch = _launch or kernel.FakeCUDAKernel.__call__
        monkeypatch.setattr(kernelapi.FakeCUDAShared, "array", _array)
        monkeypatch.setattr(kernel.FakeCUDAKernel, "__call__", _call)
        # Kernels get numpy arrays as they are, not wrapped for what only arrays of records need: three times as fast.
        monkeypatch.setattr(kernel, "FakeWithinKernelCUDAArray", lambda array: array._ary)
    # The simulator's threads spin while they wait for each other: at the usual 5 ms a launch takes seconds.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)
