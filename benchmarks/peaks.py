"""How much memory a scheme takes, measured in a process of its own."""

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pairs import Bytes, Pair, Span
from schemes import SCHEMES

T = TypeVar("T")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD = -3


def peaks(title: str, old: Path, new: Path, least: int, threads: int, names: list[str]) -> dict[str, int]:
    """Bytes that each scheme takes at most beyond the two models, payloads included. Empty where Linux is not."""
    if not _CLEAR.exists():
        return {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_peaks, title, old, new, least, threads, names).result()


def _peaks(title: str, old: Path, new: Path, least: int, threads: int, names: list[str]) -> dict[str, int]:
    # What is freed goes back at once. Else a scheme would be given what the one before had, or pay for its holes.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    pair = Pair(title, old, new, least)
    target, found = pair.old.copy(), {}
    with ThreadPoolExecutor(threads) as pool:
        for name in names:
            scheme = SCHEMES[name](pair, pool)
            if not scheme.once:
                # Imports, and what stays for good, are no scheme's own.
                scheme.decode(scheme.encode()[1], target, _nothing)
                target[:] = pair.old
            growth, (stored, coded) = _growth(scheme.encode)
            # The payload was held before: it counts for the decoder too.
            later, made = _growth(lambda scheme=scheme, coded=coded: scheme.decode(coded, target, _nothing))
            found[name] = max(growth, later + stored)
            del coded, made
            target[:] = pair.old
    return found


def _nothing(data: Bytes, span: Span) -> None:
    pass


def _growth(work: Callable[[], T]) -> tuple[int, T]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _field("VmRSS")
    _CLEAR.write_text("5")
    result = work()
    return _field("VmHWM") - before, result


def _field(name: str) -> int:
    found: Any = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return 1024 * int(found[1])
