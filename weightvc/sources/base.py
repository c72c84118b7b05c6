"""What a commit reads from: tensors by name, their canonical bytes by range, and how the source lay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from weightvc.objects.tensor import TensorInfo

__all__ = ["Layout", "LayoutFile", "ReadsRuns", "Source", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """One file of a checkpoint: its path relative to the root, with "/" between parts.

    A side file has its bytes in `content`. A weights file has there what precedes the tensor data: the 8 length
    bytes and the raw header, padding included. `size` is the size of the whole file in bytes.
    """

    path: str
    size: int
    content: bytes
    weights: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a checkpoint as they lay, in byte order of their paths."""

    files: tuple[LayoutFile, ...] = field(default=())


class Source(Protocol):
    """Something that can be committed. Threads may read it at once."""

    tensors: Sequence[TensorInfo]
    """All tensors, sorted by (component, name) in byte order of UTF-8; no (component, name) twice."""

    layout: Layout | None
    """How the files lay, or None for tensors in memory."""

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of `tensors[index]` (contiguous, little-endian)."""
        ...

    def check(self) -> None:
        """Raise BadFile if what was read has changed since the source was opened."""
        ...

    def close(self) -> None:
        """Release files; idempotent."""
        ...


@runtime_checkable
class ReadsRuns(Protocol):
    """A source that can read many small tensors at once."""

    def read_run(self, first: int, last: int) -> memoryview | bytes:
        """Canonical bytes of `tensors[first:last]`, one after the other."""
        ...
