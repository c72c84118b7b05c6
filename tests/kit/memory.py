"""How much memory a piece of work takes beyond what the process has."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Fail if the work within ever holds so many bytes more than there were before it.

    What the allocator keeps of what was held before goes back to the system first: it would be taken again unseen.
    Then the system's peak is put back, which may be far higher. Skips where that cannot be done.
    """
    if sys.platform != "linux":
        pytest.skip("the peak of memory can be put back on Linux alone")
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be put back here: {error}")
    before = status("VmRSS")
    yield
    taken = status("VmHWM") - before
    assert taken < nbytes, f"{taken} bytes more than before, {nbytes} at most are allowed"


def status(name: str) -> int:
    """Bytes that Linux says of this process: VmRSS, what it has in memory now; VmHWM, what it had there at most."""
    return 1024 * int(STATUS.read_text().partition(f"{name}:")[2].split()[0])
