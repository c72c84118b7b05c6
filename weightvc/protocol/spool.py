"""A spool: patch bytes of a long chain, in memory while they are few and in an unlinked file beyond."""

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from weightvc.objects.frame import Buffer

IN_MEMORY: Final = 64 << 20
"""Bytes held in memory at most."""

Reader = Callable[[int, int], Buffer]
"""Gives bytes [start, stop) of what was kept."""


def _unlinked(directory: Path | None) -> int:
    if directory is not None:
        # A cache that cannot be written is none.
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                return os.dup(file.fileno())
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Spool:
    """Keeps buffers until it is closed. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` is where the file goes once it is needed; None for the system's place for such files."""
        self._directory = directory
        self._descriptor = -1
        self._held = self._end = 0
        self._lock = threading.Lock()

    def keep(self, data: Buffer) -> Reader:
        """Keep a buffer and return what reads it. Raises OSError where the disk is full."""
        size = len(data)
        with self._lock:
            if self._held + size <= IN_MEMORY:
                self._held += size
                copy = bytes(data)
                return lambda start, stop: memoryview(copy)[start:stop]
            if self._descriptor < 0:
                self._descriptor = _unlinked(self._directory)
            origin, self._end = self._end, self._end + size
        view, at = memoryview(data), origin
        while view:
            done = os.pwrite(self._descriptor, view, at)
            view, at = view[done:], at + done
        return lambda start, stop: os.pread(self._descriptor, stop - start, origin + start)

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
