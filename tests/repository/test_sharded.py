"""Commits by many ranks: the version of the whole model, or none."""

import json
import random
import re
import threading
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

import weightvc
from tests.kit import faults
from tests.kit.faults import Faulty, Killed
from tests.kit.ranks import Job, processes
from tests.kit.weights import Bits, Weights, flipped, held, tensor, tiny_format
from weightvc.errors import BadTensor, BranchMoved, Fenced, NotPublished, Refused, Unavailable
from weightvc.objects import dtypes
from weightvc.objects.tensor import TensorInfo
from weightvc.options import Sharded
from weightvc.repository import Repository
from weightvc.sharding import Sharding
from weightvc.sources.shards import Offered, Shards


class Part:
    """What a rank has, cut out of whole tensors by other means than the code under test."""

    def __init__(self, boxes: dict[str, list[Any]], weights: Weights) -> None:
        self.offered: list[Offered] = []
        self.data: list[bytes] = []
        for name, of_tensor in boxes.items():
            whole = weights["", name]
            width = dtypes.bits(whole.dtype) // 8
            array = np.frombuffer(whole.data, f"V{width}").reshape(whole.shape)
            info = TensorInfo("", name, whole.dtype, whole.shape, len(whole.data))
            for box in of_tensor:
                self.offered.append(Offered(info, box))
                self.data.append(array[tuple(slice(*one) for one in box)].tobytes())

    def read(self, index: int, start: int, stop: int) -> memoryview:
        return memoryview(self.data[index])[start:stop]

    @property
    def shards(self) -> Shards:
        return Shards(self.offered, self)  # type: ignore[arg-type]


def cut(shape: tuple[int, ...], chance: random.Random) -> list[Any]:
    """Boxes that a tensor consists of."""
    cuts = []
    for extent in shape:
        inner = sorted(chance.sample(range(1, extent), min(extent - 1, chance.randrange(3)))) if extent > 1 else []
        borders = [0, *inner, extent]
        cuts.append(list(pairwise(borders)))
    return list(product(*cuts))


def dealt(weights: Weights, world: int, seed: int) -> list[dict[str, list[Any]]]:
    """Boxes of all tensors for each rank, by chance; some of them on several."""
    chance = random.Random(seed)
    out: list[dict[str, list[Any]]] = [{} for _ in range(world)]
    for (_, name), whole in weights.items():
        for box in cut(whole.shape, chance):
            for rank in chance.sample(range(world), chance.choice([1, 1, 1, min(2, world)])):
                out[rank].setdefault(name, []).append(box)
    return out


START: Weights = {
    ("", "bias"): tensor("F32", (7,), 1),
    ("", "cube"): tensor("BF16", (5, 6, 7), 2),
    ("", "embed"): tensor("BF16", (31, 12), 3),
    ("", "empty"): tensor("F32", (0, 3), 4),
    ("", "scalar"): tensor("F32", (), 5),
    ("", "tiny"): tensor("U8", (3, 1), 6),
    ("", "wide"): tensor("F8_E4M3", (4, 130), 7),
}
"""In the tiny format, shards end in the middle of chunks, and blocks have chunks of several tensors."""


class Rank:
    """A rank with a repository of its own, from commit to commit."""

    def __init__(self, url: str) -> None:
        self.repository = weightvc.open(url, cache=None, author="rank")
        self.sharding = Sharding()

    def commit(self, ranks: Any, part: Part, **more: Any) -> Any:
        labels = "sharded", more.pop("step", None), None, None
        replicas = more.pop("replicas", True)
        asked = Sharded("main", labels, more.pop("base", False), more.pop("codec", "small"), None, None)
        assert not more
        return self.sharding.commit(self.repository, lambda: part.shards, ranks, lambda: asked, 1, replicas=replicas)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    from weightvc.protocol import shares

    monkeypatch.setattr(shares, "LEAST", 100)
    with tiny_format():
        yield


@pytest.fixture
def url(memory_url: str) -> str:
    weightvc.init(memory_url, cache=None)
    return memory_url


def publish(url: str, weights: Weights, world: int, seed: int, job: list[Rank] | None = None, **more: Any) -> Any:
    parts = [Part(boxes, weights) for boxes in dealt(weights, world, seed)]
    members = job or [Rank(url) for _ in range(world)]
    results = Job(world).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank], **more))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert len({result.id for result in results}) == 1
    return results[0]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("codec", ["small", "fast"])
def test_it_is_the_version_of_the_whole(url, world, codec):
    """By ranks that have any parts, the same in every step or others; also where tensors come and go."""
    members = [Rank(url) for _ in range(world)]
    plain = weightvc.open(url, cache=None)
    weights, last, parent = START, START, None
    for step in range(5):
        seed = world if step < 3 else 100 + step
        version = publish(url, weights, world, seed, members, step=step, codec=codec, base=step == 2)
        expected = plain.commit(Bits(weights), branch="plain", codec=codec, base=step == 2)
        assert (version.tree, version.elements) == (expected.tree, expected.elements)
        assert list(version.parents) == ([parent] if parent else [])
        assert held(plain, version.id) == weights
        mine, others = (plain.entry(one).place for one in (version, expected))
        assert [edge.changed for edge in mine.edges] == [edge.changed for edge in others.edges]
        stored = [one for one in plain.store.list() if one.key.split("/")[0] == "pack"]
        named = mine.manifest.rpartition(".")[2].split("-")[1]
        assert sum(named in one.key for one in stored) == mine.packs
        parent, last = version.id, weights
        weights = {key: flipped(value, 0.2, step) for key, value in weights.items()}
        if step == 2:
            del weights["", "bias"]
            weights["", "later"] = tensor("F16", (40, 5), 9)
    assert plain.fsck(read_data=1).ok
    # What ranks have put there is alive, and is copied, as what one process has.
    plain.reset("plain", "plain~4", rewind=True)
    plain.gc(grace=0, force=True)
    plain.gc(grace=0, force=True)
    weightvc.init(f"{url}-mirror", cache=None)
    weightvc.mirror(url, f"{url}-mirror", cache=None)
    for place in (url, f"{url}-mirror"):
        copy = weightvc.open(place, cache=None)
        assert copy.fsck(read_data=1).ok
        assert held(copy, parent) == last


def test_what_changed_little_is_small(url):
    members = [Rank(url) for _ in range(3)]
    large = {("", "w"): tensor("BF16", (64, 300), 1), ("", "x"): tensor("BF16", (64, 301), 2)}
    publish(url, large, 3, 1, members)
    large = {key: flipped(value, 0.001, 1) for key, value in large.items()}
    written = [member.repository.stats.reads for member in members]
    version = publish(url, large, 3, 1, members)
    (edge,) = members[0].repository.entry(version).place.edges
    assert edge.nbytes < 2000
    # What each has is compared with what it kept: the manifest and the root are all that is read.
    assert all(member.repository.stats.reads - before <= 4 for member, before in zip(members, written))


def test_ranks_may_differ_between_runs(url):
    weights = START
    for step, world in enumerate((2, 3, 1, 4)):
        publish(url, weights, world, step, step=step)
        assert held(weightvc.open(url, cache=None)) == weights
        weights = {key: flipped(value, 0.1, step) for key, value in weights.items()}


def whole(shape: tuple[int, ...]) -> Any:
    return tuple((0, extent) for extent in shape)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([[((0, 4), (0, 2))], [((0, 4), (2, 3))]], "bytes 6 to 8 are on no rank"),
        ([[((0, 2), (0, 4))], [((1, 4), (0, 4))]], "on two ranks"),
        ([[((0, 4), (0, 4))], [((1, 4), (0, 4))]], "on two ranks"),
        ([[], [((0, 2), (0, 4))]], "bytes 16 to 32 are on no rank"),
    ],
)
def test_parts_that_are_nowhere_or_twice(url, boxes, says):
    weights = {("", "w"): tensor("BF16", (4, 4), 1)}
    members = [Rank(url) for _ in range(2)]
    parts = [Part({"w": box} if box else {}, weights) for box in boxes]
    results = Job(2).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank]))
    assert all(isinstance(result, BadTensor) and says in str(result) for result in results), results
    assert members[0].repository.branches() == {}


def test_ranks_that_differ_about_a_tensor(url):
    members = [Rank(url) for _ in range(2)]
    parts = [Part({"w": [whole(shape)]}, {("", "w"): tensor("BF16", shape, 1)}) for shape in ((4, 4), (2, 8))]
    results = Job(2).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank]))
    assert all(isinstance(result, BadTensor) and "[2, 8] on rank 1" in str(result) for result in results), results


def test_the_same_part_twice_is_written_once_or_refused(url):
    weights = {("", f"w{i}"): tensor("U8", (500,), i) for i in range(9)}
    members = [Rank(url) for _ in range(3)]
    parts = [Part({name: [((0, 500),)] for _, name in weights}, weights) for _ in range(3)]
    refused = Job(3).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank], replicas=False))
    assert all(isinstance(result, BadTensor) and "by ranks 0 and 1" in str(result) for result in refused), refused
    before = sum(member.repository.stats.bytes_written for member in members)
    members = [Rank(url) for _ in range(3)]
    Job(3).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank]))
    assert held(members[0].repository) == weights
    packed = [one.size for one in members[0].repository.store.list("pack/")]
    assert before < sum(packed) < 9 * 500 + 600
    assert len({member.repository.stats.writes > 0 for member in members}) == 1


def test_one_rank_that_fails_ends_it_for_all(url):
    publish(url, START, 3, 1)
    for at in range(12):
        members = [Rank(url) for _ in range(3)]
        bad = members[1].repository
        bad.store = bad._shelf.store = Faulty(bad.store, at, "fail")
        parts = [Part(boxes, {k: flipped(v, 0.9, at) for k, v in START.items()}) for boxes in dealt(START, 3, 1)]
        results = Job(3).run(
            lambda ranks, members=members, parts=parts: members[ranks.rank].commit(ranks, parts[ranks.rank])
        )
        if not any(isinstance(result, BaseException) for result in results):
            break
        assert isinstance(results[1], Unavailable)
        for other in (results[0], results[2]):
            assert isinstance(other, NotPublished)
            assert "rank 1 failed (Unavailable" in str(other)
        assert held(weightvc.open(url, cache=None)) == START
    assert at > 3


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_before_any_exchange_leaves_no_version(url, dead):
    first = publish(url, START, 3, 1)
    reader = weightvc.open(url, cache=None)
    changed = {key: flipped(value, 0.9, 5) for key, value in START.items()}
    exchange = 0
    while True:
        members = [Rank(url) for _ in range(3)]
        parts = [Part(boxes, changed) for boxes in dealt(START, 3, 1)]
        results = Job(3).run(
            lambda ranks, members=members, parts=parts: members[ranks.rank].commit(ranks, parts[ranks.rank]),
            {dead: exchange},
        )
        if not isinstance(results[dead], Killed):
            break
        assert all(isinstance(result, threading.BrokenBarrierError | Killed) for result in results)
        published = reader.resolve() != first
        # Who dies once all have given their receipts may be too late to keep rank 0 from publishing.
        assert not published or exchange == 5
        exchange += 1
        if published:
            assert held(reader) == changed
            changed = {key: flipped(value, 0.9, 6) for key, value in START.items()}
    assert exchange == 6


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_at_any_request_leaves_no_version(url, dead):
    """Killed at its k-th operation on the store: the root is as before, unless it was rank 0's swap that was last."""
    publish(url, START, 2, 1)
    reader = weightvc.open(url, cache=None)
    changed = {key: flipped(value, 0.9, 5) for key, value in START.items()}
    k = 0
    while True:
        members = [Rank(url) for _ in range(2)]
        bad = members[dead].repository
        bad.store = bad._shelf.store = Faulty(bad.store, k, "kill before")
        parts = [Part(boxes, changed) for boxes in dealt(START, 2, 1)]

        def work(ranks: Any, members: list[Rank] = members, parts: list[Part] = parts) -> Any:
            return members[ranks.rank].commit(ranks, parts[ranks.rank])

        results = Job(2).run(work)
        if not isinstance(results[dead], Killed):
            break
        assert held(reader) == START
        k += 1
    assert k >= 3
    assert held(reader) == changed


def test_somebody_else_moves_the_branch(url):
    members = [Rank(url) for _ in range(2)]
    publish(url, START, 2, 1, members)
    other = weightvc.open(url, cache=None).commit(Bits(START), step=9)
    parts = [Part(boxes, START) for boxes in dealt(START, 2, 1)]
    results = Job(2).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank]))
    assert isinstance(results[0], BranchMoved)
    assert isinstance(results[1], NotPublished)
    assert weightvc.open(url, cache=None).resolve() == other


def test_a_job_that_was_replaced_is_fenced_off(url):
    members = [Rank(url) for _ in range(2)]
    members[0].repository.claim()
    publish(url, START, 2, 1, members)
    weightvc.open(url, cache=None).claim()
    parts = [Part(boxes, START) for boxes in dealt(START, 2, 1)]
    results = Job(2).run(lambda ranks: members[ranks.rank].commit(ranks, parts[ranks.rank]))
    assert isinstance(results[0], Fenced)
    assert "Fenced" in str(results[1])


def test_what_is_kept_is_not_believed(url):
    """Wrong bytes in a rank's memory are found by their digests, and read from the store instead."""
    members = [Rank(url) for _ in range(2)]
    publish(url, START, 2, 1, members)
    kept = members[1].sharding._kept
    kept._held = {at: bytes(len(data)) for at, data in kept._held.items()}
    changed = {key: flipped(value, 0.2, 5) for key, value in START.items()}
    publish(url, changed, 2, 1, members)
    assert held(weightvc.open(url, cache=None)) == changed


# Through torch.distributed


def model(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {
        "columns": torch.randn(6, 40),
        "cube": torch.randn(4, 6, 10),
        "even": torch.randn(16, 9),
        "few": torch.randn(2, 3),
        "integers": torch.arange(60).reshape(10, 6) * (step + 1),
        "norm": torch.randn(33),
        "plain": torch.randn(5),
        "strided": torch.randn(16, 5),
        "uneven": torch.randn(13, 7),
    }


def sharded(tensors: dict[str, torch.Tensor], world: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        placements: dict[str, Any] = {
            "columns": (Replicate(), Shard(1)),
            "cube": (Shard(1), Shard(2)),
            "even": (Shard(0), Shard(0)),
            "few": (Shard(0), Shard(0)),
            "integers": (Shard(0), Shard(1)),
            "norm": (Replicate(), Replicate()),
            "strided": (_StridedShard(0, split_factor=2), Shard(0)),
            "uneven": (Shard(0), Shard(0)),
        }
    else:
        mesh = init_device_mesh("cpu", (world,))
        placements = {"columns": (Shard(1),), "cube": (Shard(-1),), "norm": (Replicate(),)}
    out: dict[str, Any] = {"plain": tensors["plain"]}
    for name, value in tensors.items():
        if name != "plain":
            out[name] = distribute_tensor(value, mesh, placements.get(name, (Shard(0),)))
            assert torch.equal(out[name].full_tensor(), value)
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
def test_dtensors_are_the_version_of_the_gathered_model(tmp_path, world):
    url = str(tmp_path / "repository")
    plain = weightvc.init(url, cache=None)

    def work(rank: int) -> list[str]:
        repository = weightvc.open(url, cache=None)
        made = []
        for step in range(3):
            tensors = sharded(model(step // 2), world)
            version = repository.commit_sharded(tensors, step=step, message="m", dtype="bfloat16")
            made.append(version.id)
        repository.close()
        return made

    assert processes(world, tmp_path, work) == [0] * world
    versions = list(plain.log())[::-1]
    assert [version.step for version in versions] == [0, 1, 2]
    for step, version in enumerate(versions):
        expected = plain.commit(model(step // 2), branch="plain", dtype="bfloat16")
        assert version.tree == expected.tree
        loaded = plain.load(version)
        for name, value in model(step // 2).items():
            assert torch.equal(loaded[name], value.bfloat16() if value.is_floating_point() else value)
    assert plain.entry(versions[1]).place.edges[0].changed == 0


def test_a_rank_that_is_killed_leaves_no_version(tmp_path):
    url = str(tmp_path / "repository")
    plain = weightvc.init(url, cache=None)

    def work(rank: int) -> str:
        repository = weightvc.open(url, cache=None)
        repository.commit_sharded(sharded(model(0), 2), step=0)
        if rank == 1:
            repository.store.put = lambda *_: faults.die()
        try:
            repository.commit_sharded(sharded(model(1), 2), step=1)
        except Exception as error:
            return type(error).__name__
        return "published"

    assert processes(2, tmp_path, work)[1] == -9
    assert [version.step for version in plain.log()] == [0]


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    url = str(tmp_path / "repository")
    plain = weightvc.init(url, cache=None)

    def work(rank: int) -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        mesh = init_device_mesh("cpu", (2,))
        repository = weightvc.open(url, cache=None)
        said = []
        for tensors in (
            {"p": DTensor.from_local(torch.ones(3), mesh, [Partial()])},
            {"w": torch.ones(3), "n": None} if rank else {"w": torch.ones(3)},
            {"__metadata__": torch.ones(2)},
        ):
            try:
                repository.commit_sharded(tensors)
            except (BadTensor, NotPublished) as error:
                said.append(f"{type(error).__name__} {error}")
        return said

    assert processes(2, tmp_path, work) == [0, 0]
    assert plain.branches() == {}
    zero, one = (json.loads((tmp_path / f"result{rank}").read_text()) for rank in range(2))
    assert "'p'" in zero[0]
    assert "Partial" in zero[0]
    assert zero[1].startswith("NotPublished")
    assert "rank 1 failed (BadTensor" in zero[1]
    assert "NoneType" in one[1]
    assert "__metadata__" in one[2]


def test_without_torch_distributed_it_is_one_process(repository: Repository):
    version = repository.commit_sharded({"w": torch.ones(3)}, step=1)
    assert version.tree == repository.commit({"w": torch.ones(3)}, branch="plain").tree
    with pytest.raises(Refused, match="ranks"):
        repository.commit_sharded({"w": torch.ones(3)}, ranks=3)


# Writers of many ranks


def exported(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {f"layers.{i}": torch.randn(9, 11) for i in range(6)}


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (torch.nn.Linear(2, 2), Refused, r"Linear.*give model\.state_dict\(\)"),
        ("a.safetensors", Refused, "str is no mapping.*give a mapping"),
        (None, Refused, "NoneType is no mapping"),
        ([("a", torch.ones(2))], Refused, "list is no mapping"),
        ({"a": 3, "b": torch.ones(2)}, BadTensor, "^this rank has what cannot be kept: 'a': a int"),
        ({"draft": {"w": torch.ones(2)}}, BadTensor, "^this rank has what cannot be kept: 'draft': a dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(repository: Repository, given, error, says):
    with pytest.raises(error, match=says):
        repository.commit_sharded(given)
    assert repository.branches() == {}


def test_a_rank_may_have_nothing(repository: Repository):
    version = repository.commit_sharded({})
    assert version.tree == repository.commit({}, branch="plain").tree


def test_ranks_export_different_tensors_and_parts_of_them(url):
    members = [Rank(url).repository for _ in range(3)]
    plain = weightvc.open(url, cache=None)
    for step in range(2):
        weights = exported(step)

        def work(ranks: Any, step: int = step, weights: dict[str, torch.Tensor] = weights) -> Any:
            with members[ranks.rank].writer(step=step, dtype="bfloat16", ranks=ranks) as out:
                for i, (name, value) in enumerate(weights.items()):
                    if i == 0:
                        rows = slice(3 * ranks.rank, 3 * ranks.rank + 3)
                        out.add(name, value[rows, :6], shape=(9, 11), at=(rows.start, 0))
                        out.add(name, value[rows, 6:], shape=(9, 11), at=(rows.start, 6))
                    elif i % 2 == ranks.rank:  # the last rank has nothing more
                        out.add(name, value)
                        out.add(name, value, component="copy")
            return out.version

        results = Job(3).run(work)
        assert len({result.id for result in results}) == 1, results
        copies = dict(list(weights.items())[1:])
        expected = plain.commit({"": weights, "copy": copies}, branch="plain", dtype="bfloat16")
        assert (results[0].tree, results[0].step) == (expected.tree, step)
        assert plain.resolve("main") == results[0]


@pytest.mark.parametrize("fault", ["twice", "raises", "bad part"])
def test_what_ends_the_block_of_one_rank_ends_those_of_all(url, fault):
    members = [Rank(url).repository for _ in range(3)]

    def work(ranks: Any) -> None:
        with members[ranks.rank].writer(ranks=ranks) as out:
            out.add(f"w{ranks.rank}", torch.ones(4))
            if ranks.rank == 1:
                if fault == "raises":
                    raise ZeroDivisionError("no luck")
                if fault == "twice":
                    out.add("w0", torch.ones(4))
                if fault == "bad part":
                    out.add("part", torch.ones(4), shape=(6,), at=(3,))

    results = Job(3).run(work)
    said = {"twice": "by ranks 0 and 1", "raises": "no luck", "bad part": "does not lie in it"}[fault]
    assert all(said in str(result) for result in results), results
    kinds = [type(result) for result in results]
    if fault == "twice":
        assert kinds == [BadTensor] * 3
    else:
        assert kinds == [NotPublished, ZeroDivisionError if fault == "raises" else BadTensor, NotPublished]
    assert members[0].branches() == {}


def test_parts_are_for_ranks(url):
    from weightvc.ranks import Alone

    repository = Rank(url).repository

    def export(shape: Any, at: Any, **more: Any) -> None:
        with repository.writer(**more) as out:
            out.add("w", torch.ones(2), shape=shape, at=at)

    with pytest.raises(Refused, match="ranks="):
        export((4,), (0,))
    for shape, at in (((4,), (0, 0)), ((4,), None), (None, (0,)), ((4, 4), (0, 0)), ((4,), (-1,))):
        with pytest.raises(BadTensor):
            export(shape, at, ranks=Alone())
    with pytest.raises(Refused, match="on_conflict"):
        repository.writer(ranks=Alone(), on_conflict="rebase")
    with repository.writer(ranks=Alone()) as out:
        for half in range(2):
            out.add("w", torch.full((2,), float(half)), shape=(4,), at=(2 * half,))
    assert repository.load()["w"].tolist() == [0, 0, 1, 1]


# What ranks have to agree about


MIX = pytest.mark.parametrize(
    "bad",
    [
        {"metadata": {"loss": float("nan")}},
        {"metadata": {"a": object()}},
        {"step": -1},
        {"codec": "x"},
        {"dtype": "int3"},
        {"branch": "a..b"},
        {"run": 5},
        {"transform": 5},
    ],
)


def told(tmp_path: Any, world: int) -> list[Any]:
    """What processes returned."""
    return [json.loads((tmp_path / f"result{rank}").read_text()) for rank in range(world)]


def test_no_version_is_a_mix_of_two_steps(tmp_path):
    """One rank's argument is refused, and its loop goes on; or a rank leaves a call out."""
    url = str(tmp_path / "repository")
    plain = weightvc.init(url, cache=None)

    def work(rank: int) -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        repository = weightvc.open(url, cache=None)
        said = []

        def commit(step: int, **more: Any) -> None:
            local = torch.full((4,), float(step))
            try:
                repository.commit_sharded({"w": DTensor.from_local(local, mesh, [Shard(0)])}, step=step, **more)
            except weightvc.WeightvcError as error:
                said.append(f"{type(error).__name__} {error}")

        for step in (1, 2):
            commit(step, metadata={"loss": float("nan") if rank and step == 1 else rank + 0.5}, message=f"of {rank}")
        for step in (3,) if rank == 0 else (4,):  # rank 1 is ahead, and tries again when rank 0 has come there
            commit(step)
        commit(4)
        return said

    assert processes(2, tmp_path, work) == [0, 0]
    zero, one = told(tmp_path, 2)
    assert zero[0].startswith("NotPublished")
    assert "rank 1 failed (Refused: " in zero[0]
    assert one[0].startswith("Refused")
    assert zero[1:] == one[1:]
    assert "(step=4 on rank 1; step=3 on rank 0)" in zero[1]
    versions = list(plain.log())[::-1]
    assert [(version.step, plain.load(version)["w"].tolist()) for version in versions] == [(2, [2] * 8), (4, [4] * 8)]
    assert (versions[0].metadata, versions[0].message) == ({"loss": 0.5}, "of 0")


@MIX
@pytest.mark.parametrize("how", ["commit_sharded", "writer"])
def test_what_one_rank_asks_wrongly_all_hear_of(url, bad, how):
    members = [Rank(url).repository for _ in range(3)]

    def work(ranks: Any) -> Any:
        said = []
        for step in range(2):
            asked = {"step": step, **(bad if ranks.rank == 1 and step == 0 else {})}
            tensors = {f"w{ranks.rank}": torch.full((4,), float(step))}
            try:
                if how == "writer":
                    with members[ranks.rank].writer(ranks=ranks, **asked) as out:
                        out.add_all(tensors)
                    said.append(out.version)
                else:
                    said.append(members[ranks.rank].commit_sharded(tensors, ranks=ranks, **asked))
            except weightvc.WeightvcError as error:
                said.append(error)
        return said

    for rank, (failed, version) in enumerate(Job(3).run(work)):
        assert isinstance(failed, Refused if rank == 1 else NotPublished), failed
        assert rank == 1 or "rank 1 failed (" in str(failed)
        assert version.step == 1
        assert {value.unique().item() for value in members[0].load(version).values()} == {1.0}
    assert len(list(members[0].log())) == 1


@pytest.mark.parametrize("how", ["commit_sharded", "writer"])
@pytest.mark.parametrize(
    ("zero", "one", "says"),
    [
        ({"step": 10}, {"step": 11}, r"\(step=11 on rank 1; step=10 on rank 0\).*ahead"),
        ({"step": 10}, {}, r"\(step=None on rank 1; step=10 on rank 0\)"),
        (
            {"run": "a"},
            {"run": "b", "base": True},
            r"\(run='b', base=True on rank 1; run='a', base=False on rank 0\)",
        ),
        ({}, {"branch": "other"}, r"branch='other' on rank 1"),
        ({}, {"codec": "fast"}, r"codec='fast' on rank 1"),
        ({"dtype": "bf16"}, {"dtype": "float16"}, r"\(dtype=F16 on rank 1; dtype=BF16 on rank 0\)"),
    ],
)
def test_ranks_that_ask_for_different_versions_are_refused(url, how, zero, one, says):
    members = [Rank(url).repository for _ in range(3)]

    def work(ranks: Any) -> Any:
        asked = one if ranks.rank == 1 else zero
        tensors = {f"w{ranks.rank}": torch.ones(4)}
        if how == "commit_sharded":
            return members[ranks.rank].commit_sharded(tensors, ranks=ranks, **asked)
        with members[ranks.rank].writer(ranks=ranks, **asked) as out:
            out.add_all(tensors)
        return None

    results = Job(3).run(work)
    assert len({str(result) for result in results}) == 1
    for result in results:
        assert isinstance(result, Refused)
        assert re.search(says, str(result)), result
    assert members[0].branches() == {}


def test_a_commit_beside_a_writer_is_refused(url):
    members = [Rank(url).repository for _ in range(2)]

    def work(ranks: Any) -> Any:
        if ranks.rank:
            return members[1].commit_sharded({"b": torch.ones(2)}, ranks=ranks, step=1)
        with members[0].writer(ranks=ranks, step=1) as out:
            out.add("a", torch.ones(2))
        return None

    results = Job(2).run(work)
    assert all("(by=commit_sharded on rank 1; by=writer on rank 0)" in str(result) for result in results), results


def test_what_may_be_spelled_in_several_ways(url):
    members = [Rank(url).repository for _ in range(2)]
    given: list[dict[str, Any]] = [{"dtype": "bf16", "step": 3}, {"dtype": torch.bfloat16, "step": np.int64(3)}]
    results = Job(2).run(
        lambda ranks: members[ranks.rank].commit_sharded({"w": torch.ones(2)}, ranks=ranks, **given[ranks.rank])
    )
    assert [result.step for result in results] == [3, 3]


class Interrupted:
    """Ranks of which one is interrupted, once, where it comes to its exchange number `at`."""

    def __init__(self, ranks: Any, at: int) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        self._ranks, self._left = ranks, at

    def exchange(self, parcels: Any) -> Any:
        self._left -= 1
        if self._left == 0 and self.rank == 1:
            raise KeyboardInterrupt
        return self._ranks.exchange(parcels)


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("step", [None, 5])
def test_a_call_that_was_interrupted_on_one_rank(url, at, step):
    """That rank calls again. What the others are in the middle of is no part of that."""
    members = [Rank(url).repository for _ in range(3)]

    def work(ranks: Any) -> Any:
        ranks = Interrupted(ranks, at)
        said = []
        for _ in range(4):
            try:
                tensors = {f"w{ranks.rank}": torch.ones(4)}
                said.append(members[ranks.rank].commit_sharded(tensors, ranks=ranks, step=step))
                break
            except (KeyboardInterrupt, Refused) as error:
                said.append(error)
                if "open the repository anew" in str(error):
                    members[ranks.rank] = Rank(url).repository
        return said

    zero, one, two = Job(3).run(work)
    assert [str(error) for error in zero[:-1]] == [str(error) for error in two[:-1]]
    assert [str(error) for error in zero[:-1]] == [str(error) for error in one[1:-1]]
    assert len({result[-1].id for result in (zero, one, two)}) == 1
    refused = [str(error) for error in zero[:-1]]
    if at > 1:
        assert f"(in exchange 1 of a call on rank 1, {at} on rank 0)" in refused[0]
    if step is None:
        assert "(at call" in refused[-1]
    assert len(refused) == (at > 1) + (step is None)


def test_a_rank_that_begins_anew_joins_by_its_step(url):
    """Its repository has made no call, those of the others have."""
    members = [Rank(url).repository for _ in range(2)]

    def work(ranks: Any, step: int | None) -> Any:
        return members[ranks.rank].commit_sharded({f"w{ranks.rank}": torch.ones(4)}, ranks=ranks, step=step)

    Job(2).run(lambda ranks: work(ranks, 1))
    members[1] = Rank(url).repository
    results = Job(2).run(lambda ranks: work(ranks, None))
    assert all("(at call 1 of its repository on rank 1, at call 2 on rank 0)" in str(one) for one in results), results
    assert [one.step for one in Job(2).run(lambda ranks: work(ranks, 2))] == [2, 2]
