"""Snapshots: what a source holds at one moment, copied, so that whoever trains on does not change what is committed.

Tensors in main memory are copied before take() returns, rounded on the way if they are cast. Those on a CUDA device
are copied, and rounded, there, in the stream that is current: what the trainer enqueues after that changes nothing.
They cross the bus in a stream of their own, into pinned memory, while the trainer computes.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from weightvc.sources import cast as casting
from weightvc.sources.base import Layout, Source, TensorInfo
from weightvc.sources.files import FileSource
from weightvc.sources.memory import MemorySource, is_torch, torch_bytes
from weightvc.sources.module import SavedSource

if TYPE_CHECKING:
    import torch

PIECE: Final = 4 << 20
"""Bytes that are read at once of what is not copied by torch, and of many small tensors together."""
SMALL: Final = 64 << 10
"""Bytes below which tensors are copied many at once."""


class Arenas:
    """Buffers for snapshots, kept for the next ones: new memory is slow to write to, and pinned memory to get."""

    def __init__(self) -> None:
        self._free: list[tuple[int, bool, Any]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool) -> Any:
        """A buffer of `nbytes`: a flat uint8 tensor of torch."""
        import torch

        with self._lock:
            for i, (size, kind, buffer) in enumerate(self._free):
                if (size, kind) == (nbytes, pinned):
                    del self._free[i]
                    return buffer
            # What is committed has changed: nobody will ask for these again.
            self._free.clear()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def give(self, buffer: Any, *, pinned: bool) -> None:
        """Let the next snapshot have a buffer."""
        with self._lock:
            self._free.append((buffer.numel(), pinned, buffer))

    def clear(self) -> None:
        """Let go of all buffers that are not in use."""
        with self._lock:
            self._free.clear()


class Snapshot:
    """What a source held when it was taken; made by take()."""

    def __init__(self, source: Source, arenas: Arenas, *, pinned: bool) -> None:
        """Room for what `source` has; fill() it."""
        self.tensors: Sequence[TensorInfo] = source.tensors
        self.layout: Layout | None = source.layout
        self.offsets: list[int] = list(accumulate(map(itemgetter(4), source.tensors), initial=0))
        """Where each tensor begins in `buffer`, and its end."""
        self.buffer: Any = arenas.take(self.offsets[-1], pinned=pinned)
        self.copied: Sequence[torch.cuda.Event] = ()
        """Events after which the buffer is filled."""
        self._data = memoryview(self.buffer.numpy())
        self._arenas = arenas
        self._pinned = pinned

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of `tensors[index]`."""
        self._wait()
        at = self.offsets[index]
        return self._data[at + start : at + stop]

    def read_run(self, first: int, last: int) -> memoryview | bytes:
        """Canonical bytes of `tensors[first:last]`, one after the other."""
        self._wait()
        return self._data[self.offsets[first] : self.offsets[last]]

    def _wait(self) -> None:
        for event in self.copied:
            event.synchronize()

    def check(self) -> None:
        """Nobody changes it."""

    def close(self) -> None:
        """Let the next snapshot have the room; idempotent."""
        if self.buffer is not None:
            self._wait()
            self._arenas.give(self.buffer, pinned=self._pinned)
            self.buffer, self._data = None, memoryview(b"")


def take(source: Source, dtype: Any, arenas: Arenas) -> Source:
    """`source` as it is now, cast to `dtype` if that is given: a copy, which is to be closed, as `source` still is.

    Of files nothing is copied, since nobody trains on them: `source` itself is returned, or what casts it. If they
    change before they are committed, that is refused.
    Raises Refused for a dtype that is not known; MemoryError, or what torch raises where there is no memory.
    """
    whole = source if dtype is None else casting.cast(source, dtype)
    if isinstance(source, FileSource | SavedSource):
        return whole
    values = [source.value(i) for i in range(len(source.tensors))] if isinstance(source, MemorySource) else []
    apart = {i for i, value in enumerate(values) if is_torch(value) and value.is_cuda}
    made = Snapshot(whole, arenas, pinned=bool(apart))
    try:
        _fill(made, source, whole, values, apart)
        if apart:
            made.copied = _fill_from_devices(made, whole, [(i, values[i]) for i in sorted(apart)])
    except BaseException:
        made.close()
        raise
    return made


def _fill(made: Snapshot, source: Source, whole: Source, values: list[Any], apart: set[int]) -> None:
    """Copy all tensors but those `apart`."""
    into = memoryview(made.buffer.numpy())
    count, i = len(made.tensors), 0
    while i < count:
        old, new, at = source.tensors[i], made.tensors[i], made.offsets[i]
        last = i + 1
        if i in apart:
            pass
        elif old.dtype == new.dtype and isinstance(source, MemorySource):
            if new.nbytes < SMALL:
                while last < count and last not in apart and _joins(made, source, i, last):
                    last += 1
                into[at : made.offsets[last]] = source.read_run(i, last)
            elif (
                is_torch(value := values[i]) and value.is_contiguous() and not value.is_conj() and not value.is_neg()
            ):
                # torch copies in as many threads as it computes with.
                made.buffer[at : at + new.nbytes].copy_(torch_bytes(value))
            else:
                into[at : at + new.nbytes] = source.read(i, 0, new.nbytes)
        else:
            done = 0
            if old.dtype != new.dtype and values and is_torch(values[i]):
                done = casting.round_into(values[i], made.buffer[at : at + new.nbytes], new.dtype)
            _read_into(made, whole, i, done)
        i = last


def _read_into(made: Snapshot, whole: Source, index: int, done: int) -> None:
    """Copy what is left of a tensor, a piece at a time."""
    into, at, nbytes = memoryview(made.buffer.numpy()), made.offsets[index], made.tensors[index].nbytes
    for start in range(done, nbytes, PIECE):
        stop = min(start + PIECE, nbytes)
        into[at + start : at + stop] = whole.read(index, start, stop)


def _joins(made: Snapshot, source: Source, first: int, last: int) -> bool:
    """Whether a small tensor is copied with those from `first` on."""
    new = made.tensors[last]
    together = made.offsets[last + 1] - made.offsets[first]
    return new.nbytes < SMALL and together <= PIECE and source.tensors[last].dtype == new.dtype


def _fill_from_devices(made: Snapshot, whole: Source, values: list[tuple[int, Any]]) -> list["torch.cuda.Event"]:
    """Copy tensors of CUDA devices. Returns events, one a device, after which that is done."""
    import torch

    events = []
    for device in {value.device: None for _, value in values}:
        with torch.cuda.device(device):
            aside, copies = torch.cuda.Stream(), []  # type: ignore[no-untyped-call]
            for i, value in values:
                if value.device == device:
                    try:
                        copies.append((i, _copied(value, made.tensors[i].dtype)))
                    except torch.OutOfMemoryError:
                        # It crosses the bus at once, a piece at a time, and the trainer waits.
                        _read_into(made, whole, i, 0)
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for i, copy in copies:
                    made.buffer[made.offsets[i] : made.offsets[i + 1]].copy_(copy, non_blocking=True)
                    # Its memory is given away once it has crossed the bus, not before.
                    copy.record_stream(aside)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(aside)
            events.append(event)
    return events


def _copied(value: Any, dtype: str) -> Any:
    """A tensor's bytes in a dtype, copied where it lies."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    plain = casting.rounded(plain, dtype)
    return torch_bytes(plain.clone() if plain.data_ptr() == value.data_ptr() else plain)
