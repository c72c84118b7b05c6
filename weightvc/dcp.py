"""torch.distributed.checkpoint: what it saves is published as a version, and any version can be loaded by it.

    dcp.save(model.state_dict(), storage_writer=weightvc.dcp.Writer(repository, step=step))
    dcp.load(state_dict, storage_reader=weightvc.dcp.Reader(repository, "main"))

To dcp, each tensor of a version is one chunk. What is no tensor dcp gives as bytes, a pickle: that is a side file of
the version, `dcp/KEY.pt`, and is given back as it is. Nothing here unpickles it.
"""

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote, unquote

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from weightvc.errors import BadFile, BadTensor, Conflict, NotFound, Refused, WeightvcError
from weightvc.history import HEAD, Ref, version_of
from weightvc.objects.layout import FILE_LIMIT
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.version import Version
from weightvc.protocol.stored import VersionSource
from weightvc.publishing import check_sharded
from weightvc.ranks import Ranks, open_ranks
from weightvc.sources.cast import target
from weightvc.sources.memory import torch_kind
from weightvc.sources.shards import Part, Shards, open_parts
from weightvc.worktree import no_component

if TYPE_CHECKING:
    from weightvc.repository import Repository

_FOLDER: Final = "dcp/"
_SUFFIX: Final = ".pt"
_OPTIMIZER: Final = re.compile(
    r"(optim|optimizer|optimizers)(_.*)?|param_groups|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer"
)
"""Parts of keys that optimizers' states have, in the state dicts of torch and of those who build on it."""
_LANES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: as what elements are copied, so that no kernel can be missing for a rare dtype, or touch a NaN."""


class Writer(StorageWriter):
    """A storage_writer for dcp.save() and dcp.async_save(): what is saved is one version of a branch.

    Every rank makes one, with a Repository of its own. It is committed as commit_sharded() commits: the tree is that
    of the gathered tensors, and where a rank fails there is no version.
    """

    def __init__(
        self,
        repository: "Repository",
        *,
        keys: Iterable[str] | None = None,
        names: Callable[[str], str] | None = None,
        ranks: Any = None,
        **options: Any,
    ) -> None:
        """`options` are those of Repository.commit_sharded(), but no transform, since dcp hands over pieces of
        tensors. All ranks give the same, but for `message` and `metadata`, of which rank 0's are used.

        `keys` are the keys of the state dict that are published, each with all below it ("model" has "model.norm");
        the others are left out. Without it, all are published, and a state dict with an optimizer's state is refused:
        that changes wholly in each step, so name it if you mean it. `names` says how a key's tensor is called in the
        version. `ranks` are the processes that call dcp.save(): give the group that it gets as process_group, or if
        that moves nothing between CPUs, another one of the same ranks.
        Raises Refused (and its kinds).
        """
        self.version: Version | None = None
        """What the last save has published."""
        self._repository = repository
        self._asked = check_sharded(repository, options)
        self._dtype = options.get("dtype")
        if self._dtype is not None:
            target(self._dtype)
        if self._asked.transform is not None:
            raise Refused(
                "transform= is for whole tensors, and dcp hands over pieces: give dcp.save() what the transform's "
                "function makes of the state dict, or use Repository.commit_sharded(transform=)"
            )
        if isinstance(keys, str):
            raise Refused(f"keys={keys!r:.100}: give a list of keys")
        self._keys = None if keys is None else tuple(keys)
        self._names = names or _same
        self._given = ranks
        self._ranks: Ranks | None = None
        self._number = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew. Raises Refused for a checkpoint_id."""
        _no_id(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """It is never found by a checkpoint_id alone."""
        return False

    def __reduce__(self) -> NoReturn:
        raise Refused("a weightvc.dcp.Writer stays in its process: leave async_save at AsyncCheckpointerType.THREAD")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Find the ranks. Raises Refused if they are not those that dcp knows of."""
        self.version = None
        self._number = self._repository._next_call()
        if not kwargs.get("use_collectives", True):
            raise Refused("use_collectives=False: a version is made by all ranks together, leave it True")
        self._ranks = open_ranks(self._given)
        if kwargs.get("rank", self._ranks.rank) != self._ranks.rank:
            raise self._other_ranks(f"this process is rank {kwargs['rank']}", f"{self._ranks.rank}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave out what is not to be published. Raises Refused for what nobody asked for and nobody can mean."""
        if self._keys is not None:
            chosen = [item for item in plan.items if _below(item.index.fqn, self._keys)]
            return replace(plan, items=chosen, storage_data=self._keys)
        found = sorted({item.index.fqn for item in plan.items if _is_optimizer(item.index.fqn)})
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise Refused(
                f"the state dict has an optimizer's state ({found[0]!r:.200}{more}), which changes wholly in each "
                'step: say what is published, as in keys=["model"], and name it there as well if you mean it'
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check what all ranks have. Raises Refused."""
        assert self._ranks is not None
        if len(plans) != self._ranks.world:
            raise self._other_ranks(f"{len(plans)} ranks save", f"{self._ranks.world}")
        # A planner that caches its plans gives empty ones for those that are as before.
        if self._keys is not None and all(plan.usable for plan in plans):
            there = {item.index.fqn for plan in plans for item in plan.items}
            for key in self._keys:
                if not any(_below(one, [key]) for one in there):
                    raise Refused(f"keys={list(self._keys)!r:.300}: the state dict has nothing at {key!r:.200}")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Commit what all ranks have: it is published once this returns on all. Raises as commit_sharded() does."""
        assert self._ranks is not None
        results: list[WriteResult] = []
        self.version = self._repository._commit_shards(
            lambda: self._shards(plan, planner, results),
            self._ranks,
            lambda: self._asked,
            self._number,
            replicas=False,
        )
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: the version says what it has."""

    def _shards(self, plan: SavePlan, planner: SavePlanner, results: list[WriteResult]) -> Shards:
        """What this rank has of the version."""
        if plan.storage_data != self._keys:
            # Else what it leaves out would be lost in silence.
            raise Refused(
                f"the planner goes by a plan that it made for keys={plan.storage_data!r:.200}, and this writer has "
                f"keys={self._keys!r:.200}: give it enable_plan_caching=False"
            )
        parts: list[Part] = []
        files: dict[str, bytes] = {}
        called: dict[str, str] = {}
        for item in plan.items:
            key, value = item.index.fqn, planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                if not isinstance(value, io.BytesIO):
                    raise BadFile(f"{key!r:.200} is to be written as bytes, and the planner gives {type(value)}")
                data = files[_path(key)] = value.getvalue()
                if len(data) > FILE_LIMIT:
                    raise BadFile(f"{key!r:.200} has {len(data)} bytes, {FILE_LIMIT} at most: leave it out by keys=")
                size = len(data)
            else:
                part = _part(item, self._names(key), value)
                if called.setdefault(part.name, key) != key:
                    both = f"{called[part.name]!r:.200} and {key!r:.200}"
                    raise BadTensor(f"names= calls {both} the same, {part.name!r:.200}: give each a name of its own")
                parts.append(part)
                size = part.value.nbytes
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=None))
        return open_parts(parts, self._dtype, files)

    def _other_ranks(self, dcp: str, ours: str) -> Refused:
        given = "torch.distributed's default group has" if self._given is None else "ranks= has"
        return Refused(
            f"{dcp} as dcp.save() counts, {ours} as {given} it: give the process_group of dcp.save() as ranks= "
            "(with no_dist=True, weightvc.ranks.Alone())"
        )


class Reader(StorageReader):
    """A storage_reader for dcp.load(): of any version, whoever committed it, into a state dict sharded in any way.

    Every rank makes one, with a Repository of its own; all read the version that rank 0 finds.
    """

    def __init__(
        self,
        repository: "Repository",
        ref: Ref = HEAD,
        *,
        component: str = "",
        names: Callable[[str], str] | None = None,
        objects: bool = False,
    ) -> None:
        """`names` says which key of the state dict has the tensor of a name, if not that name: the inverse of the
        writer's. `component` is of which tensors are loaded. `objects` says that what was saved beside tensors may be
        loaded too: dcp's planner unpickles it, which runs what the pickle says, so say so only where you trust
        everybody who can commit."""
        self.version: Version | None = None
        """What the last load has read."""
        self._repository = repository
        self._ref = ref
        self._component = component
        self._names = names or _same
        self._objects = objects
        self._schema: Schema | None = None
        self._tensors: dict[str, int] = {}
        self._remembered: str | None = None
        self._failure: WeightvcError | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin anew. Raises Refused for a checkpoint_id."""
        _no_id(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """It is never found by a checkpoint_id alone."""
        return False

    def read_metadata(self) -> Metadata:
        """What the version has, in dcp's words."""
        self._failure = None
        try:
            return self._described()
        except WeightvcError as error:
            # dcp would make an assertion of it, which is all that the caller would see.
            self._failure = error
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what read_metadata() has met."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which version this rank has seen."""
        assert self.version is not None
        return replace(plan, storage_data=self.version.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let all read what rank 0 has seen: the branch may be moving."""
        return [replace(plan, storage_data=plans[0].storage_data) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank is to have. Raises Refused for objects, BadTensor, Corrupt, StoreError."""
        refs = self._repository._refs()
        entry = refs.resolve(plan.storage_data).entry
        self.version = version_of(entry)
        assert self._schema is not None
        wanted = self._wanted(plan, self._schema)
        # Who takes most of it fetches packs whole.
        most = 2 * sum(one.stop - one.start for one in wanted) >= self.version.nbytes
        with self._repository._open(refs, entry, whole=most) as source:
            if source.tree.schema.digest != self._schema.digest:
                raise Conflict(
                    f"rank 0 found version {self.version.short}, which has other tensors than the one that this rank "
                    "found: load again, or name a version by its id"
                )
            self._read_objects(plan, planner, source)
            _read_tensors(wanted, planner, source)
        if self._remembered is not None:
            self._repository._remember(self._remembered, self.version.id)
        return _done(None)

    def _described(self) -> Metadata:
        refs = self._repository._refs()
        found = refs.resolve(self._ref)
        self.version = version_of(found.entry)
        self._remembered = found.branch
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        with self._repository._open(refs, found.entry, whole=False) as source:
            self._schema = schema = source.tree.schema
            chosen = [i for i, tensor in enumerate(schema.tensors) if tensor.component == self._component]
            if not chosen and (schema.tensors or self._component):
                raise no_component(self.version, self._component, schema)
            self._tensors = {self._names(schema.tensors[i].name): i for i in chosen}
            if len(self._tensors) != len(chosen):
                raise Refused("names= calls several tensors of the version the same: give each a key of its own")
            known |= {key: BytesStorageMetadata() for key in _objects(source)}
            # Tensors last: no file can stand for one.
            known |= {key: _metadata(schema.tensors[i]) for key, i in self._tensors.items()}
        return Metadata(known)

    def _wanted(self, plan: LoadPlan, schema: Schema) -> "list[_Wanted]":
        """What of which tensor is to be read."""
        out = []
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                i = self._tensors[item.storage_index.fqn]
                out.append(_Wanted(item, i, schema.tensors[i]))
        return out

    def _read_objects(self, plan: LoadPlan, planner: LoadPlanner, source: VersionSource) -> None:
        """Give the planner the bytes of what is no tensor."""
        items = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        there = _objects(source) if items else {}
        for item in items:
            key = item.storage_index.fqn
            if key in self._tensors:
                info = source.tensors[self._tensors[key]]
                torch_kind(info.dtype, info.shape)
            if not self._objects:
                raise Refused(
                    f"{key!r:.200} is no tensor: dcp's planner unpickles it, which runs what the pickle says. Give "
                    "objects=True if you trust everybody who can commit here, or leave it out of the state dict"
                )
            if key not in there:
                raise NotFound(f"the version has nothing at {key!r:.200}: load again")
            planner.load_bytes(item, io.BytesIO(there[key]))


class _Wanted:
    """A part of a tensor that is wanted, in whole rows, until all bytes of these are there."""

    def __init__(self, item: ReadItem, index: int, info: TensorInfo) -> None:
        self.index = index
        self._item = item
        self._kind, self._shape = torch_kind(info.dtype, info.shape)
        self.start, self.stop = 0, info.nbytes
        if self._shape:
            row = info.nbytes // max(1, self._shape[0])
            self.start = item.storage_offsets[0] * row
            self.stop = self.start + item.lengths[0] * row
            self._shape = (item.lengths[0], *self._shape[1:])
        self._left = self.stop - self.start
        self._buffer = bytearray()

    def take(self, at: int, data: memoryview) -> None:
        """Take what is wanted of the tensor's bytes from `at` on."""
        low, high = max(self.start, at), min(self.stop, at + len(data))
        if low < high:
            self._buffer = self._buffer or bytearray(self.stop - self.start)
            self._buffer[low - self.start : high - self.start] = data[low - at : high - at]
            self._left -= high - low

    def give(self, planner: LoadPlanner) -> bool:
        """Put it where the planner wants it, once it is there, and say whether it is."""
        if self._left:
            return False
        into = planner.resolve_tensor(self._item).detach()
        lane = _LANES[self._kind.itemsize]
        rows = torch.frombuffer(self._buffer, dtype=lane) if self._buffer else torch.empty(0, dtype=lane)
        part = rows.reshape(self._shape)
        for dim in range(1, part.dim()):
            part = part.narrow(dim, self._item.storage_offsets[dim], self._item.lengths[dim])
        if into.shape != part.shape:
            raise BadTensor(f"{self._item.dest_index.fqn!r:.200}: {list(part.shape)} read, for {list(into.shape)}")
        if into.dtype == self._kind:
            into.view(lane).copy_(part)
        else:
            into.copy_(part.contiguous().view(self._kind))
        planner.commit_tensor(self._item, into)
        self._buffer = bytearray()
        return True


def _read_tensors(wanted: "Iterable[_Wanted]", planner: LoadPlanner, source: VersionSource) -> None:
    """Read each block that has some of it once, and give each part away as soon as it is there."""
    waiting: dict[int, list[_Wanted]] = {}
    for one in wanted:
        if not one.give(planner):  # of no bytes
            waiting.setdefault(one.index, []).append(one)
    spans = [(one.index, one.start, one.stop) for several in waiting.values() for one in several]
    for tensor, at, data in source.parts(spans):
        for one in waiting.get(tensor, []):
            one.take(at, data)
        waiting[tensor] = [one for one in waiting.get(tensor, []) if not one.give(planner)]


def _metadata(info: TensorInfo) -> TensorStorageMetadata | BytesStorageMetadata:
    """What dcp's planner is to know of a tensor: it is one chunk."""
    try:
        kind, shape = torch_kind(info.dtype, info.shape)
    except BadTensor:
        # It is asked for as bytes then, and only then refused.
        return BytesStorageMetadata()
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=kind), size, [chunk])


def _part(item: WriteItem, name: str, value: Any) -> Part:
    """What the planner gives for an item. Raises BadTensor if it is not what the plan says."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if not isinstance(value, torch.Tensor) or value.shape != chunk.sizes:
        what = list(value.shape) if isinstance(value, torch.Tensor) else type(value)
        raise BadTensor(f"{item.index.fqn!r:.200}: the plan says {list(chunk.sizes)}, and the planner gives {what}")
    box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return Part(name, tuple(item.tensor_data.size), box, value.detach())


def _path(key: str) -> str:
    """The side file of what is no tensor."""
    return _FOLDER + quote(key, safe="", errors="surrogatepass") + _SUFFIX


def _objects(source: VersionSource) -> dict[str, bytes]:
    """By key: the bytes of what is no tensor."""
    layout = source.layout
    return {
        unquote(file.path[len(_FOLDER) : -len(_SUFFIX)], errors="surrogatepass"): file.content
        for file in (layout.files if layout is not None else ())
        if file.path.startswith(_FOLDER) and file.path.endswith(_SUFFIX) and not file.weights
    }


def _is_optimizer(key: str) -> bool:
    return any(_OPTIMIZER.fullmatch(part) for part in key.split("."))


def _below(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of `keys`, or below it."""
    return any(key == one or key.startswith(one + ".") for one in keys)


def _same(name: str) -> str:
    return name


def _no_id(checkpoint_id: Any) -> None:
    if checkpoint_id is not None:
        raise Refused(
            f"checkpoint_id={checkpoint_id!r:.100}: leave it out; the repository and the branch, step or ref are the "
            "Writer's or the Reader's"
        )


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
