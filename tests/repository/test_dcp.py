"""torch.distributed.checkpoint: what it saves is a version of the gathered model, and it loads any version."""

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner

import weightvc
from tests.kit import faults
from tests.kit.ranks import processes
from tests.kit.weights import Bits, held, tensor
from weightvc import errors
from weightvc.dcp import Reader, Writer
from weightvc.errors import BadFile, BadTensor, BranchMoved, Conflict, NotPublished, RefNotFound, Refused
from weightvc.ranks import Alone
from weightvc.repository import Repository

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*elements changed")


def model(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {
        "columns": torch.randn(6, 40),
        "cube": torch.randn(4, 6, 10).bfloat16(),
        "empty": torch.empty(0, 3),
        "even": torch.randn(16, 9).half(),
        "few": torch.randn(2, 3),
        "fp8": torch.randn(8, 6).to(torch.float8_e4m3fn),
        "integers": torch.arange(60).reshape(10, 6) * (step + 1),
        "norm": torch.randn(33).bfloat16(),
        "plain": torch.randn(5),
        "scalar": torch.tensor(float(step)),
        "uneven": torch.randn(13, 7),
    }


def mesh_of(world: int) -> tuple[Any, dict[str, Any]]:
    """A mesh of all ranks, and placements of the model's tensors on it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    if world == 4:
        shards: dict[str, Any] = {
            "columns": (Replicate(), Shard(1)),
            "cube": (Shard(1), Shard(2)),
            "integers": (Shard(0), Shard(1)),
            "norm": (Replicate(), Replicate()),
        }
        return init_device_mesh("cpu", (2, 2)), shards
    return init_device_mesh("cpu", (world,)), {"columns": (Shard(1),), "cube": (Shard(2),), "norm": (Replicate(),)}


def sharded(tensors: dict[str, torch.Tensor], world: int) -> dict[str, Any]:
    """As DTensors, but for two of them."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, placements = mesh_of(world)
    whole = (Shard(0),) * mesh.ndim
    return {
        name: value
        if name in ("plain", "scalar")
        else viewed(distribute_tensor(plain(value), mesh, placements.get(name, whole)), value.dtype)
        for name, value in tensors.items()
    }


def plain(value: torch.Tensor) -> torch.Tensor:
    """As bytes, if it is of a dtype that gloo does not move."""
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value


def viewed(value: Any, dtype: torch.dtype) -> Any:
    """A DTensor of the same bits."""
    from torch.distributed.tensor import DTensor

    local, how = value.to_local().view(dtype), {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, **how)


def bits(value: Any) -> bytes:
    """The bytes of a tensor, gathered."""
    if hasattr(value, "full_tensor"):
        value = viewed(value, plain(value.to_local()).dtype).full_tensor()
    return bytes(value.contiguous().flatten().view(torch.uint8).numpy())


def same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return {name: bits(value) for name, value in found.items()} == {name: bits(v) for name, v in wanted.items()}


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def told(tmp_path: Path, world: int) -> list[Any]:
    """What the processes of a job have returned."""
    return [json.loads((tmp_path / f"result{rank}").read_text()) for rank in range(world)]


def failures(call: Callable[[], object]) -> dict[int, BaseException]:
    """Of each rank that failed, the error, as all ranks hear of it."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


def failure(call: Callable[[], object]) -> BaseException:
    (one,) = failures(call).values()
    return one


@pytest.fixture
def url(tmp_path: Path) -> str:
    weightvc.init(tmp_path / "repository", cache=None)
    return str(tmp_path / "repository")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_save_is_the_version_of_the_gathered_model(tmp_path, url, world):
    def work(rank: int) -> list[str]:
        repository = weightvc.open(url, cache=None)
        made = []
        for step in range(3):
            writer = Writer(repository, step=step, message="m", metadata={"a": 1}, run="r")
            dcp.save(sharded(model(step // 2), world), storage_writer=writer)
            assert writer.version is not None
            made.append(writer.version.id)
        return made

    assert processes(world, tmp_path, work) == [0] * world
    plain = weightvc.open(url, cache=None)
    versions = list(plain.log())[::-1]
    assert told(tmp_path, world) == [[version.id for version in versions]] * world
    assert [(v.step, v.message, v.run, v.metadata) for v in versions] == [(i, "m", "r", {"a": 1}) for i in range(3)]
    for step, version in enumerate(versions):
        expected = plain.commit(model(step // 2), branch="plain")
        assert (version.tree, version.layout) == (expected.tree, None)
        assert same(plain.load(version), model(step // 2))
    place = plain.entry(versions[1]).place
    assert place is not None
    assert place.edges[0].changed == 0
    assert plain.fsck(read_data=1).ok


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_any_version_is_loaded_by_any_number_of_ranks(tmp_path, url, world, cached):
    """Versions that plain commits made, over patches; into DTensors, and into plain tensors."""
    plain = weightvc.open(url, cache=None)
    for step in range(3):
        plain.commit(model(step), step=step)

    def work(rank: int) -> None:
        repository = weightvc.open(url, cache=tmp_path / "cache" if cached else None)
        for ref, step in (("main", 2), ("main~1", 1)):
            for into in (sharded(blank(model(step)), world), blank(model(step))):
                reader = Reader(repository, ref)
                dcp.load(into, storage_reader=reader)
                assert same(into, model(step))
                assert reader.version == repository.resolve(ref)

    assert processes(world, tmp_path, work) == [0] * world


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (4, 2), (2, 4)])
def test_another_number_of_ranks_loads_the_same_bits(tmp_path, url, saving, loading):
    def save(rank: int) -> None:
        dcp.save({"model": sharded(model(7), saving)}, storage_writer=Writer(weightvc.open(url, cache=None)))

    def load(rank: int) -> None:
        state = {"model": sharded(blank(model(7)), loading)}
        dcp.load(state, storage_reader=Reader(weightvc.open(url, cache=None)))
        assert same(state["model"], model(7))

    for folder, world, work in (("save", saving, save), ("load", loading, load)):
        (tmp_path / folder).mkdir()
        assert processes(world, tmp_path / folder, work) == [0] * world


def test_fsdp_and_strided_shards(tmp_path, url):
    """Modules of FSDP2, whose shards are uneven; and what it and tensor parallelism make together."""

    def net(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))

    def work(rank: int) -> None:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        repository = weightvc.open(url, cache=None)
        saved, loaded = net(1), net(2)
        for one in (saved, loaded):
            fully_shard(one, mesh=init_device_mesh("cpu", (4,)))
        weights, optimizer = get_state_dict(saved, torch.optim.AdamW(saved.parameters()))
        writer = Writer(repository, keys=["model"], names=lambda key: key.removeprefix("model."))
        dcp.save({"model": weights, "optim": optimizer}, storage_writer=writer)
        state = get_model_state_dict(loaded)
        dcp.load(state, storage_reader=Reader(repository))
        assert same(state, net(1).state_dict())
        mesh, whole = init_device_mesh("cpu", (2, 2)), torch.arange(80.0).reshape(16, 5)
        strided = distribute_tensor(whole, mesh, (_StridedShard(0, split_factor=2), Shard(0)))
        dcp.save({"w": strided}, storage_writer=Writer(repository, branch="strided"))
        dcp.load({"w": strided.zero_()}, storage_reader=Reader(repository, "strided"))
        assert torch.equal(strided.full_tensor(), whole)

    assert processes(4, tmp_path, work) == [0] * 4
    plain = weightvc.open(url, cache=None)
    assert plain.resolve().tree == plain.commit(net(1).state_dict(), branch="plain").tree
    assert torch.equal(plain.load("strided")["w"], torch.arange(80.0).reshape(16, 5))


def test_a_rank_reads_little_more_than_its_own(tmp_path, url):
    torch.manual_seed(1)
    weights = {"w": torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)}
    weightvc.open(url, cache=None).commit(weights)

    def work(rank: int) -> int:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        repository = weightvc.open(url, cache=None)
        into = {"w": distribute_tensor(torch.zeros_like(weights["w"]), init_device_mesh("cpu", (4,)), [Shard(0)])}
        dcp.load(into, storage_reader=Reader(repository))
        assert torch.equal(into["w"].to_local(), weights["w"].chunk(4)[rank])
        return repository.stats.bytes_read

    assert processes(4, tmp_path, work) == [0] * 4
    assert all(4 << 20 < nbytes < 5 << 20 for nbytes in told(tmp_path, 4))


@pytest.mark.parametrize("where", ["weightvc.dcp.open_parts", "weightvc.protocol.shares.Share.make"])
def test_a_rank_that_is_killed_leaves_no_version_and_the_next_save_works(tmp_path, url, where, monkeypatch):
    """As it begins, and as it codes its part."""

    def work(rank: int, kill: bool) -> str:
        repository = weightvc.open(url, cache=None)
        dcp.save(sharded(model(0), 2), storage_writer=Writer(repository, step=0))
        if kill and rank == 1:
            monkeypatch.setattr(where, lambda *_: faults.die())
        try:
            dcp.save(sharded(model(1), 2), storage_writer=Writer(repository, step=1))
        except BaseException as error:
            return type(error).__name__
        return "published"

    for folder, kill, steps in (("one", True, [0]), ("two", False, [1, 0, 0])):
        (tmp_path / folder).mkdir()
        ended = processes(2, tmp_path / folder, lambda rank, kill=kill: work(rank, kill))
        assert ended[1] == (-9 if kill else 0)
        assert [version.step for version in weightvc.open(url, cache=None).log()] == steps
    assert told(tmp_path / "two", 2) == ["published"] * 2


def test_a_rank_that_fails_is_heard_of_by_all_and_the_next_save_works(tmp_path, url):
    class Bad(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ZeroDivisionError("no luck")

    def work(rank: int) -> list[list[str]]:
        repository = weightvc.open(url, cache=None)
        said = []
        for step in range(3):
            planner = Bad() if step == 1 and rank == 1 else None
            writer = Writer(repository, step=step)
            try:
                dcp.save(sharded(model(step), 2), storage_writer=writer, planner=planner)
            except CheckpointException as error:
                assert writer.version is None
                said.append([f"{type(one[0]).__name__} {one[0]}" for _, one in sorted(error.failures.items())])
        return said

    assert processes(2, tmp_path, work) == [0, 0]
    assert [version.step for version in weightvc.open(url, cache=None).log()] == [2, 0]
    for ((zero, one),) in told(tmp_path, 2):
        assert zero.startswith("NotPublished")
        assert "rank 1 failed (ZeroDivisionError" in zero
        assert one == "ZeroDivisionError no luck"


def test_what_moved_the_branch_is_heard_of_by_all(tmp_path, url):
    def work(rank: int) -> list[str]:
        repository = weightvc.open(url, cache=None)
        dcp.save(sharded(model(0), 2), storage_writer=Writer(repository))
        if rank == 0:
            weightvc.open(url, cache=None).commit(model(5))
        found = failures(lambda: dcp.save(sharded(model(1), 2), storage_writer=Writer(repository)))
        moved = found[0]
        assert isinstance(moved, BranchMoved)
        return [moved.branch, type(found[1]).__name__]

    assert processes(2, tmp_path, work) == [0, 0]
    assert told(tmp_path, 2) == [["main", "NotPublished"]] * 2


def test_objects_are_side_files_and_come_back(tmp_path, url):
    """Also where the key is no path, and where replicas say the same."""
    kept = {"step": 7, "a/b": [1, 2], "Ä": None, "nested": {"sampler": {"seed": [3, 4]}}}

    def work(rank: int) -> None:
        repository = weightvc.open(url, cache=None)
        for _ in range(2):
            dcp.save({**kept, "model": sharded(model(3), 2)}, storage_writer=Writer(repository))
        state: dict[str, Any] = {"step": 0, "a/b": None, "Ä": 1, "nested": {"sampler": {"seed": None}}}
        state["model"] = sharded(blank(model(3)), 2)
        dcp.load(state, storage_reader=Reader(repository, objects=True))
        assert same(state.pop("model"), model(3))
        assert state == kept

    assert processes(2, tmp_path, work) == [0, 0]
    plain = weightvc.open(url, cache=None)
    files = plain.files()
    assert sorted(files) == [
        "dcp/%C3%84.pt",
        "dcp/a%2Fb.pt",
        "dcp/nested.sampler.seed.pt",
        "dcp/step.pt",
        "model.safetensors",
    ]
    bare = {f"model.{name}": value for name, value in model(3).items()}
    assert plain.resolve().tree == plain.commit(bare, branch="plain").tree
    # They lie there as any version's files do.
    plain.checkout("main", tmp_path / "out")
    assert torch.load(tmp_path / "out" / "dcp" / "step.pt") == 7
    assert plain.verify(tmp_path / "out").ok
    again = plain.commit(tmp_path / "out", branch="again")
    assert (again.tree, again.layout) == (plain.resolve("main").tree, plain.resolve("main").layout)
    first, second = plain.entry("main~1").place, plain.entry("main").place
    assert first is not None
    assert second is not None
    assert first.layout == second.layout
    assert plain.fsck(read_data=1).ok


def test_objects_are_bytes_that_nobody_unpickles_unless_asked_to(repository: Repository):
    class Marks:
        def __reduce__(self) -> Any:
            return exec, ("import weightvc; weightvc.dcp.unpickled = True",)

    dcp.save({"w": torch.ones(2), "o": Marks()}, storage_writer=Writer(repository))
    state = {"w": torch.zeros(2), "o": None}
    refused = failure(lambda: dcp.load(state, storage_reader=Reader(repository)))
    assert isinstance(refused, Refused)
    assert "objects=True" in str(refused)
    assert not hasattr(weightvc.dcp, "unpickled")

    given = []

    class Keeps(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            given.append(value.getvalue())

    dcp.load(state, storage_reader=Reader(repository, objects=True), planner=Keeps())
    assert given == [repository.cat("main", "dcp/o.pt")]
    assert not hasattr(weightvc.dcp, "unpickled")
    # A file cannot stand for a tensor.
    files = {"w": torch.full((2,), 3.0)}
    dcp.save(files, storage_writer=Writer(repository, branch="evil"), planner=_AlsoBytes("w"))
    dcp.load({"w": state["w"]}, storage_reader=Reader(repository, "evil", objects=True))
    assert state["w"].tolist() == [3, 3]


class _AlsoBytes(DefaultSavePlanner):
    """Saves an object at a tensor's key as well."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def create_global_plan(self, all_plans: Any) -> Any:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem

        plans, metadata = super().create_global_plan(all_plans)
        plans[0].items.append(WriteItem(MetadataIndex(self.key), dcp.planner.WriteItemType.BYTE_IO))
        return plans, metadata

    def lookup_object(self, index: Any) -> Any:
        return super().lookup_object(index) if index.offset is not None else "an object"


def test_a_state_dict_of_objects_alone(repository: Repository):
    dcp.save({"step": 3}, storage_writer=Writer(repository))
    state = {"step": 0}
    dcp.load(state, storage_reader=Reader(repository, objects=True))
    assert state == {"step": 3}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_an_optimizers_state_is_published_only_if_it_is_named(repository: Repository):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, optimizer = trained()
    states = get_optimizer_state_dict(net, optimizer)
    for state in (
        {"model": net.state_dict(), "optim": states},
        {"app": {"model": net.state_dict(), "optimizer": states}},
        {"optimizer_0": states},
        dict(states),
        {"mine": optimizer.state_dict()},
    ):
        refused = failure(lambda state=state: dcp.save(state, storage_writer=Writer(repository)))
        assert isinstance(refused, Refused)
        assert "keys=" in str(refused)
    assert repository.branches() == {}
    state = {"model": net.state_dict(), "optim": states}
    dcp.save(state, storage_writer=Writer(repository, keys=["model"]))
    assert sorted(repository.load()) == ["model.bias", "model.weight"]
    dcp.save(state, storage_writer=Writer(repository, keys=["model", "optim"]))
    assert "optim.state.weight.exp_avg" in repository.load()
    net, optimizer = torch.nn.Linear(4, 3), torch.optim.AdamW(net.parameters())
    target = {"model": {"weight": torch.zeros(3, 4)}, "optim": {"state": {"weight": {"exp_avg": torch.zeros(3, 4)}}}}
    dcp.load(target, storage_reader=Reader(repository))
    assert torch.equal(target["optim"]["state"]["weight"]["exp_avg"], states["state"]["weight"]["exp_avg"])  # type: ignore[index]


def test_keys_are_whole_parts_and_are_there(repository: Repository):
    state = {"model": torch.ones(2), "model2": torch.ones(3), "a": {"b": torch.ones(4), "c": torch.ones(5)}}
    dcp.save(state, storage_writer=Writer(repository, keys=["model", "a.b"]))
    assert sorted(repository.load()) == ["a.b", "model"]
    refused = failure(lambda: dcp.save(state, storage_writer=Writer(repository, keys=["model", "modle"])))
    assert isinstance(refused, Refused)
    assert "'modle'" in str(refused)
    with pytest.raises(Refused, match="list"):
        Writer(repository, keys="model")


def test_a_planner_that_caches_its_plans(repository: Repository):
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"model": {"w": torch.full((4,), float(step))}, "optim": {"m": torch.ones(4)}}
        dcp.save(state, storage_writer=Writer(repository, keys=["model"]), planner=planner)
        assert repository.load()["model.w"].tolist() == [step] * 4
    for keys in (["model", "optim"], None):
        writer = Writer(repository, keys=keys)
        refused = failure(lambda writer=writer: dcp.save(state, storage_writer=writer, planner=planner))
        assert isinstance(refused, Refused)
        assert "enable_plan_caching" in str(refused)


def test_names_and_dtype(repository: Repository):
    state = {"model": {"w": torch.randn(4, 3), "v": torch.arange(3)}}

    def short(key: str) -> str:
        return key.removeprefix("model.")

    dcp.save(state, storage_writer=Writer(repository, names=short, dtype="bfloat16"))
    assert repository.resolve().tree == repository.commit(state["model"], branch="plain", dtype="bfloat16").tree
    into = {"model": {"w": torch.zeros(4, 3), "v": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(into, storage_reader=Reader(repository, names=lambda name: f"model.{name}"))
    # As dcp has it: what is stored is converted to what is there.
    assert torch.equal(into["model"]["w"], state["model"]["w"].bfloat16().float())
    assert torch.equal(into["model"]["v"], state["model"]["v"])
    refused = failure(lambda: dcp.save(state, storage_writer=Writer(repository, names=lambda _: "w")))
    assert isinstance(refused, BadTensor)
    assert "'model.w' and 'model.v' the same" in str(refused)
    refused = failure(lambda: dcp.load(into, storage_reader=Reader(repository, names=lambda _: "w")))
    assert isinstance(refused, Refused)
    with pytest.raises(Refused, match="int8"):
        Writer(repository, dtype="int8")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("F8_E5M2", (3, 5)),
        ("F8_E8M0", (7,)),
        ("F4", (3, 8)),
        ("F4", (6,)),
        ("BF16", (2, 3, 4)),
        ("C64", (3,)),
        ("BOOL", (5,)),
        ("F64", ()),
        ("U16", (2, 0, 3)),
    ],
)
def test_every_bit_of_every_dtype(repository: Repository, dtype: str, shape: tuple[int, ...]):
    """NaN payloads as well."""
    repository.commit(Bits({("", "w"): tensor(dtype, shape, 3)}))
    into = {"w": torch.empty_like(repository.load()["w"])}
    dcp.load(into, storage_reader=Reader(repository))
    dcp.save(into, storage_writer=Writer(repository, branch="back"))
    assert held(repository, "back") == held(repository, "main")
    if len(shape) == 2 and dtype != "F4":
        across = torch.empty(shape[::-1], dtype=into["w"].dtype).t()
        dcp.load({"w": across}, storage_reader=Reader(repository))
        assert bits(across) == bits(into["w"])


def test_what_torch_has_no_tensor_for_is_refused_where_it_is_asked_for(repository: Repository):
    repository.commit(Bits({("", "odd"): tensor("F6_E2M3", (4,), 1), ("", "w"): tensor("U8", (3,), 1)}))
    state = {"w": torch.zeros(3, dtype=torch.uint8)}
    dcp.load(state, storage_reader=Reader(repository))
    assert bytes(state["w"].numpy()) == held(repository)["", "w"].data
    state["odd"] = torch.zeros(3)
    assert isinstance(failure(lambda: dcp.load(state, storage_reader=Reader(repository))), BadTensor)


def test_a_checkpoint_directory_and_components(repository: Repository, tmp_path: Path):
    from safetensors.torch import save_file

    (tmp_path / "ckpt").mkdir()
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "ckpt" / "model.safetensors")
    (tmp_path / "ckpt" / "config.json").write_text("{}")
    repository.commit(tmp_path / "ckpt")
    into = {"w": torch.zeros(2, 3)}
    dcp.load(into, storage_reader=Reader(repository))
    assert into["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    repository.commit({"": {"w": torch.ones(2)}, "draft": {"w": torch.zeros(3)}}, branch="two")
    into = {"w": torch.ones(3)}
    dcp.load(into, storage_reader=Reader(repository, "two", component="draft"))
    assert into["w"].tolist() == [0, 0, 0]
    absent = failure(lambda: dcp.load(into, storage_reader=Reader(repository, "two", component="other")))
    assert isinstance(absent, errors.TensorNotFound)


def test_a_state_dict_that_the_version_does_not_fit(repository: Repository):
    repository.commit({"w": torch.ones(3), "more": torch.ones(1)})
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"v": torch.ones(3)}, storage_reader=Reader(repository))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.ones(4)}, storage_reader=Reader(repository))
    state = {"v": torch.ones(3), "w": torch.zeros(3)}
    dcp.load(state, storage_reader=Reader(repository), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["w"].tolist() == [1, 1, 1]


def test_without_a_state_dict(repository: Repository):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    repository.commit(model(1))
    state: dict[str, Any] = {}
    _load_state_dict(state, Reader(repository), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert same(state, model(1))


def test_errors_of_a_load_are_of_their_kinds(repository: Repository):
    repository.commit({"w": torch.ones(3)})
    absent = failure(lambda: dcp.load({"w": torch.ones(3)}, storage_reader=Reader(repository, "nowhere")))
    assert isinstance(absent, RefNotFound)


def test_a_branch_that_moves_while_ranks_load(tmp_path, url):
    """All get the version that rank 0 found; a rank that was planning for other tensors is told."""
    plain = weightvc.open(url, cache=None)
    for step in range(2):
        plain.commit({"w": torch.full((4,), float(step))}, step=step)
    plain.commit({"w": torch.full((4,), 9.0), "v": torch.ones(1)}, step=9)

    def work(rank: int) -> list[Any]:
        repository = weightvc.open(url, cache=None)
        out: list[Any] = []
        for refs in (("main~2", "main~1"), ("main~1", "main~2")):
            state = {"w": torch.zeros(4)}
            reader = Reader(repository, refs[rank])
            dcp.load(state, storage_reader=reader)
            assert reader.version is not None
            out += [reader.version.step, state["w"].tolist()]
        reader = Reader(repository, ("main", "main~1")[rank])
        found = failures(lambda: dcp.load({"w": torch.zeros(4)}, storage_reader=reader))
        assert [*found] == [1]
        assert isinstance(found[1], Conflict)
        return out

    assert processes(2, tmp_path, work) == [0, 0]
    assert told(tmp_path, 2) == [[0, [0] * 4, 1, [1] * 4]] * 2


def test_what_was_loaded_is_what_the_next_commit_goes_on_from(repository: Repository):
    repository.commit({"w": torch.ones(3)})
    mine = weightvc.open(repository.url, cache=None)
    dcp.load({"w": torch.ones(3)}, storage_reader=Reader(mine, "main"))
    repository.commit({"w": torch.zeros(3)})
    moved = failure(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=Writer(mine)))
    assert isinstance(moved, BranchMoved)


def test_async_save(tmp_path, url):
    def work(rank: int) -> list[str]:
        import torch.distributed as dist

        group = dist.new_group(backend="gloo")
        repository = weightvc.open(url, cache=None)
        made = []
        for step in range(2):
            state = sharded(model(step), 2)
            writer = Writer(repository, step=step, ranks=group)
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
            for value in state.values():
                (value.to_local() if hasattr(value, "to_local") else value).zero_()
            future.result()
            assert writer.version is not None
            made.append(writer.version.tree)
        return made

    assert processes(2, tmp_path, work) == [0, 0]
    plain = weightvc.open(url, cache=None)
    trees = [plain.commit(model(step), branch="plain").tree for step in range(2)]
    assert told(tmp_path, 2) == [trees] * 2


def test_a_writer_stays_in_its_process(repository: Repository):
    with pytest.raises(Refused, match="THREAD"):
        pickle.dumps(Writer(repository))


def test_ranks_that_dcp_counts_otherwise(tmp_path, url):
    def work(rank: int) -> str:
        import torch.distributed as dist

        repository = weightvc.open(url, cache=None)
        state = {"w": torch.ones(3)}
        for more in ({"no_dist": True}, {"use_collectives": False}):
            with pytest.raises(BaseException) as caught:
                dcp.save(state, storage_writer=Writer(repository), **more)
            assert "Refused" in repr(caught.value)
        pairs = [dist.new_group([0, 1]), dist.new_group([2])]
        mine = pairs[rank == 2]
        found = failures(lambda: dcp.save(state, storage_writer=Writer(repository), process_group=mine))
        assert all(isinstance(one, Refused) and "ranks=" in str(one) for one in found.values())
        assert repository.branches() == {}
        dist.barrier()
        writer = Writer(repository, ranks=mine, branch=f"of{rank == 2}")
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, process_group=mine)
        alone = Writer(repository, ranks=Alone(), branch=f"alone{rank}")
        dcp.save({"w": torch.ones(3)}, storage_writer=alone, no_dist=True)
        return str(writer.version.tree) if writer.version else ""

    assert processes(3, tmp_path, work) == [0] * 3
    assert len({*told(tmp_path, 3)}) == 1
    assert sorted(weightvc.open(url, cache=None).branches()) == ["alone0", "alone1", "alone2", "ofFalse", "ofTrue"]


def test_checkpoint_ids_are_refused(repository: Repository):
    repository.commit({"w": torch.ones(3)})
    for call in (
        lambda: dcp.save({"w": torch.ones(3)}, storage_writer=Writer(repository), checkpoint_id="x"),
        lambda: dcp.load({"w": torch.ones(3)}, storage_reader=Reader(repository), checkpoint_id="x"),
    ):
        with pytest.raises(Refused, match="checkpoint_id"):
            call()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transform": weightvc.Transform("same", "1", dict)}, r"transform= .* pieces: give dcp\.save\(\)"),
        ({"dtype": "int8"}, "int8"),
        ({"step": -1}, "step=-1"),
        ({"branch": "a//b"}, "a//b"),
        ({"on_conflict": "rebase"}, r"'on_conflict': give options of Repository\.commit_sharded\(\)"),
        ({"keys": "model"}, "keys='model'"),
    ],
)
def test_what_a_writer_cannot_be_made_with(repository: Repository, options: Any, says: str):
    with pytest.raises(Refused, match=says):
        Writer(repository, **options)
    with pytest.raises(Refused, match="give a Repository"):
        Writer(repository.url)  # type: ignore[arg-type]


def test_an_object_that_is_too_large(repository: Repository, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weightvc.dcp.FILE_LIMIT", 1000)
    refused = failure(lambda: dcp.save({"o": "x" * 2000}, storage_writer=Writer(repository)))
    assert isinstance(refused, BadFile)
    assert repository.branches() == {}


def test_a_planner_whose_tensors_are_not_as_it_planned(repository: Repository):
    class Halves(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object[:1]

    refused = failure(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=Writer(repository), planner=Halves()))
    assert isinstance(refused, BadTensor)


def test_errors_cross_from_process_to_process():
    """As dcp sends them: by pickles, with what they know."""
    for error in (
        BranchMoved("m", branch="b", expected="x", head=None),
        NotPublished("n", failures=[("rank 1", RuntimeError("r"))]),
        errors.Unavailable("u"),
        errors.Fenced("f", branch="b", epoch=1, claimed=2),
        errors.EngineError("e", engine="g", call="c", serves=None),
        errors.GroupSplit("s", holds={"h": None}),
        errors.GroupNotReady("s", reasons={"h": "r"}),
        Refused("r"),
    ):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert {*vars(back)} == {*vars(error)}
        assert back.exit_code == error.exit_code


def test_torch_is_imported_with_it_alone():
    code = "import sys, weightvc; assert 'torch' not in sys.modules; weightvc.dcp; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_save_is_a_mix_of_two_steps(tmp_path, url):
    """Ranks whose writers say different steps; and one rank's writer that was refused, whose loop goes on."""

    def work(rank: int) -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        repository = weightvc.open(url, cache=None)
        said = []

        def save(value: int, **options: Any) -> None:
            state = {"w": DTensor.from_local(torch.full((4,), float(value)), mesh, [Shard(0)])}
            try:
                dcp.save(state, storage_writer=Writer(repository, **options))
            except CheckpointException as error:
                said.extend(f"{type(one[0]).__name__} {one[0]}" for _, one in sorted(error.failures.items()))

        save(50 + rank, step=50 + rank)
        save(1, step=1, metadata={"loss": rank + 0.5})
        if rank == 1:
            with pytest.raises(Refused):
                Writer(repository, metadata={"loss": float("nan")})
            save(3)
        else:
            save(2)
        return said

    assert processes(2, tmp_path, work) == [0, 0]
    zero, one = told(tmp_path, 2)
    assert zero == one
    assert ["(step=51 on rank 1; step=50 on rank 0)" in said for said in zero[:2]] == [True, True]
    assert ["Refused ranks are out of step (at call" in said for said in zero[2:]] == [True, True]
    plain = weightvc.open(url, cache=None)
    (version,) = plain.log()
    assert (version.step, version.metadata) == (1, {"loss": 0.5})
    assert plain.load(version)["w"].tolist() == [1] * 8
