"""The writer: one version whose tensors come one after the other, in any order, and may be forgotten once added."""

import contextlib
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

from weightvc.errors import BadTensor, Refused, StoreError
from weightvc.objects import dtypes
from weightvc.objects.version import Version
from weightvc.protocol.spool import Reader, Spool
from weightvc.sources.base import Layout, Source, TensorInfo
from weightvc.sources.cast import cast, target
from weightvc.sources.header import shown
from weightvc.sources.memory import check_components, open_tensors
from weightvc.sources.shards import Box, Offered
from weightvc.sources.transform import Transform


class Writer:
    """Made by Repository.writer(); a context, at the end of which the version is committed, and is `version`.

    What is added is kept in memory while it is little, and in an unlinked file beyond: in the cache's directory, or
    where temporary files go.
    """

    def __init__(
        self,
        commit: Callable[[Callable[[], "Added"]], Version],
        *,
        directory: Path | None,
        dtype: Any,
        transform: Transform | None,
        apart: bool,
    ) -> None:
        """`commit` makes the version of what it is given to call, which raises what ended the block; `directory` is
        where the file lies; `apart` says that there may be parts of tensors. Raises Refused for `dtype`."""
        if dtype is not None:
            target(dtype)
        self.version: Version | None = None
        """The version, once it is published."""
        self._commit = commit
        self._dtype = dtype
        self._transform = transform
        self._apart = apart
        self._kept: dict[tuple[str, str, Box], tuple[TensorInfo, Reader]] = {}
        # What add() was called for, and has not kept: it failed, or is not done yet.
        self._missing: list[str] = []
        self._spool = Spool(directory)
        self._state: Literal["new", "open", "over"] = "new"
        self._lock = threading.Lock()

    def add(
        self,
        name: str,
        tensor: Any,
        component: str = "",
        *,
        shape: Sequence[int] | None = None,
        at: Sequence[int] | None = None,
    ) -> None:
        """Add a copy of a torch tensor or numpy array, which may change then. Threads may add at once.

        With ranks, it may be a part of a tensor: of the one of this `shape`, from the element `at` on, in each
        dimension. A transform is given this tensor alone, and no parts. Raises BadTensor for what cannot be kept, and
        for a name (or a part) that was added before; Refused outside of the block; StoreError where there is no
        space; and what the transform raises. Once it has raised, nothing is published.
        """
        what = _named(name, component)
        given = {component: {name: tensor}} if component else {name: tensor}
        self._add(what, given, f"add({name!r:.200})", shape, at)

    def add_all(self, tensors: Mapping[str, Any]) -> None:
        """Add copies of several whole tensors, `{name: tensor}` (or of components to such mappings), as add() does.

        A transform is given all of them together: what it makes one tensor of, or needs to see at once.
        """
        some = ", ".join(f"{name!r:.100}" for name in islice(tensors, 3)) if isinstance(tensors, Mapping) else ""
        self._add(f"the bucket of {some or 'no tensors'}", tensors, "add_all()", None, None)

    def _add(
        self,
        what: str,
        given: Mapping[str, Any],
        where: str,
        shape: Sequence[int] | None,
        at: Sequence[int] | None,
    ) -> None:
        with self._lock:
            self._missing.append(what)
            if self._state != "open":
                when = "after the end" if self._state == "over" else "outside"
                raise Refused(
                    f"{what} was added {when} of its `with` block: nothing is kept of it: "
                    "add it in the block, at the end of which all is published"
                )
        if not isinstance(given, Mapping):
            raise Refused(f"a {type(given).__name__} is no bucket: give add_all() a mapping of names to tensors")
        source: Source = open_tensors(given, where)
        if self._transform is not None:
            if shape is not None or at is not None:
                raise Refused(
                    f"{what}: a transform is for whole tensors, and this is a part of one: add it whole, or add what "
                    "is served to a writer without transform="
                )
            source = self._transform.apply(source, what)
        elif self._dtype is not None:
            source = cast(source, self._dtype)
        for i, part in enumerate(source.tensors):
            info, box = self._placed(part, shape, at)
            try:
                reader = self._spool.keep(source.read(i, 0, part.nbytes))
            except OSError as error:
                raise StoreError(f"{what} could not be kept: {error}: make space, or set TMPDIR") from error
            with self._lock:
                if (part.component, part.name, box) in self._kept:
                    raise BadTensor(f"{_named(part.name, part.component)} was added twice: add each once")
                self._kept[part.component, part.name, box] = info, reader
        with self._lock:
            self._missing.remove(what)

    def _placed(
        self, part: TensorInfo, shape: Sequence[int] | None, at: Sequence[int] | None
    ) -> tuple[TensorInfo, Box]:
        """The whole tensor that a part belongs to, and where."""
        if shape is None and at is None:
            return part, tuple((0, extent) for extent in part.shape)
        whole = tuple(map(operator.index, shape or ()))
        first = tuple(map(operator.index, at or ()))
        what = f"tensor {shown(part.name)}: a part of shape {list(part.shape)} at {list(first)} of {list(whole)}"
        if not self._apart:
            raise Refused(f"{what}: parts are for a writer with ranks: add whole tensors, or give ranks=")
        if not len(whole) == len(first) == len(part.shape):
            raise BadTensor(f"{what}: give shape and at, a number for each dimension")
        box = tuple((start, start + extent) for start, extent in zip(first, part.shape, strict=True))
        if any(not 0 <= start <= stop <= extent for (start, stop), extent in zip(box, whole, strict=True)):
            raise BadTensor(f"{what} does not lie in it")
        return part._replace(shape=whole, nbytes=dtypes.nbytes(part.dtype, whole)), box

    def __enter__(self) -> "Writer":
        if self._state != "new":
            raise Refused("a writer makes one version: ask for another one for the next")
        self._state = "open"
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with self._lock:
            self._state = "over"
        try:
            if error is None:
                self.version = self._commit(self._added)
            elif self._apart and isinstance(error, Exception):
                # The other ranks wait for this one.
                raise_again(self._commit, error)
        finally:
            self._spool.close()

    def _added(self) -> "Added":
        with self._lock:
            if self._missing:
                missing = ", ".join(self._missing[:10])
                raise Refused(f"{missing} was not added, so nothing is published: see the error that add() raised")
        if not self._kept and not self._apart:
            raise Refused("nothing was added: a version without tensors is made by commit({})")
        check_components({component: None for component, _, _ in self._kept}, "the writer")
        ordered = [(self._kept[name], name[2]) for name in sorted(self._kept)]
        return Added([Offered(info, box) for (info, _), box in ordered], [reader for (_, reader), _ in ordered])


def raise_again(commit: Callable[[Callable[[], "Added"]], Version], error: Exception) -> None:
    """Let all ranks hear of an error of this one. Whatever they say, it is what the caller is to hear of."""

    def fail() -> NoReturn:
        raise error

    with contextlib.suppress(Exception):
        commit(fail)


def _named(name: str, component: str) -> str:
    return f"tensor {name!r:.200}" + (f" of component {component!r:.200}" if component else "")


class Added:
    """What was added, as a source, and as what a rank has."""

    def __init__(self, offered: Sequence[Offered], readers: Sequence[Reader]) -> None:
        self.offered = offered
        self.tensors: Sequence[TensorInfo] = [tensor for tensor, _ in offered]
        self.layout: Layout | None = None
        self.files: Mapping[str, bytes] = {}
        self._readers = readers

    def read(self, index: int, start: int, stop: int) -> memoryview | bytes:
        """Canonical bytes [start, stop) of what was added as number `index`, in order of names."""
        data = self._readers[index](start, stop)
        return data if isinstance(data, memoryview) else bytes(data)

    def read_run(self, first: int, last: int) -> bytes:
        """Canonical bytes of `tensors[first:last]`, one after the other."""
        return b"".join([self._readers[i](0, self.tensors[i].nbytes) for i in range(first, last)])

    def check(self) -> None:
        """Nobody changes it."""

    def close(self) -> None:
        """The writer lets go of it."""
