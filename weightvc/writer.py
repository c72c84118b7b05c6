"""The writer: one version whose tensors come one after the other, in any order, and may be forgotten once added."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightvc.errors import BadTensor, Refused, StoreError
from weightvc.objects.version import Version
from weightvc.protocol.spool import Reader, Spool
from weightvc.sources.base import Layout, Source, TensorInfo
from weightvc.sources.cast import cast, target
from weightvc.sources.header import shown
from weightvc.sources.memory import check_components, open_tensors


class Writer:
    """Made by Repository.writer(); a context, at the end of which the version is committed, and is `version`.

    What is added is kept in memory while it is little, and in an unlinked file beyond: in the cache's directory, or
    where temporary files go.
    """

    def __init__(self, commit: Callable[[Source], Version], *, directory: Path | None, dtype: Any) -> None:
        """`commit` makes the version of a source; `directory` is where the file lies. Raises Refused for `dtype`."""
        if dtype is not None:
            target(dtype)
        self.version: Version | None = None
        """The version, once it is published."""
        self._commit = commit
        self._dtype = dtype
        self._kept: dict[tuple[str, str], tuple[TensorInfo, Reader | None]] = {}
        self._spool = Spool(directory)
        self._over = False
        self._lock = threading.Lock()

    def add(self, name: str, tensor: Any, component: str = "") -> None:
        """Add a copy of a torch tensor or numpy array, which may change then. Threads may add at once.

        Raises BadTensor for what cannot be kept, and for a name that was added before; Refused once the block is
        over; StoreError where there is no space.
        """
        opened = open_tensors({component: {name: tensor}} if component else {name: tensor}, f"add({name!r:.200})")
        source = opened if self._dtype is None else cast(opened, self._dtype)
        (info,) = source.tensors
        with self._lock:
            if self._over:
                raise Refused(f"tensor {shown(name)} was added after the end of its block: nothing is kept of it")
            if (component, name) in self._kept:
                where = f" of component {component!r}" if component else ""
                raise BadTensor(f"tensor {shown(name)}{where} was added twice: add each once")
            self._kept[component, name] = info, None
        try:
            reader = self._spool.keep(source.read(0, 0, info.nbytes))
        except OSError as error:
            raise StoreError(f"tensor {shown(name)} could not be kept: {error}: make space, or set TMPDIR") from error
        self._kept[component, name] = info, reader

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._lock:
            self._over = True
        try:
            if kind is None:
                self.version = self._commit(self._source())
        finally:
            self._spool.close()

    def _source(self) -> "_Added":
        if not self._kept:
            raise Refused("nothing was added: a version without tensors is made by commit({})")
        check_components({component: None for component, _ in self._kept}, "the writer")
        tensors: list[TensorInfo] = []
        readers: list[Reader] = []
        for info, reader in (self._kept[name] for name in sorted(self._kept)):
            if reader is None:
                raise Refused(f"tensor {shown(info.name)} was not added whole: see the error that add() raised")
            tensors.append(info)
            readers.append(reader)
        return _Added(tensors, readers)


class _Added:
    """What was added, as a source."""

    def __init__(self, tensors: Sequence[TensorInfo], readers: Sequence[Reader]) -> None:
        self.tensors = tensors
        self.layout: Layout | None = None
        self._readers = readers

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of `tensors[index]`."""
        data = self._readers[index](start, stop)
        return data if isinstance(data, memoryview) else bytes(data)

    def read_run(self, first: int, last: int) -> bytes:
        """Canonical bytes of `tensors[first:last]`, one after the other."""
        return b"".join([self._readers[i](0, self.tensors[i].nbytes) for i in range(first, last)])

    def check(self) -> None:
        """Nobody changes it."""

    def close(self) -> None:
        """The writer lets go of it."""
