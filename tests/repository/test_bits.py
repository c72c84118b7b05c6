"""What a commit reads is what a reader gets, bit for bit."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest

import weightvc
from tests.kit.weights import Bits, Tensor, bf, file_bytes, flipped, held, lying, tensor
from weightvc.errors import BadTensor
from weightvc.objects import dtypes
from weightvc.objects.schema import CHUNK, Schema
from weightvc.repository import Repository
from weightvc.sources.base import TensorInfo


def patch(repository: Repository, ref: str = "HEAD"):
    """The patch edge of a version."""
    return next(edge for edge in repository.entry(ref).place.edges if edge.source is not None)


def test_zero_signs_and_nan_payloads_are_changes(repository):
    old, new = bf(0x0000, 0x7FC0, 0x3F80, 0x7F81), bf(0x8000, 0x7FC1, 0x7FC0, 0xFFC0)
    repository.commit(Bits({("", "w"): old}))
    first = repository.commit(Bits({("", "w"): new}))
    assert patch(repository).changed == 4
    assert held(repository) == {("", "w"): new}
    second = repository.commit(Bits({("", "w"): new}))
    assert (patch(repository).changed, patch(repository).nbytes) == (0, 0)
    assert (second.tree, second.id != first.id) == (first.tree, True)


def test_each_kind_of_change_reaches_the_reader(repository, tmp_path):
    base = {("", name): tensor("F16", (4,), i) for i, name in enumerate("abcd")}
    steps = []

    def step(change, metadata=None):
        weights = dict(steps[-1][0]) if steps else dict(base)
        change(weights)
        steps.append((weights, metadata))

    step(lambda w: None)
    step(lambda w: w.pop(("", "a")))
    step(lambda w: w.update({("", "z"): w.pop(("", "b"))}))
    step(lambda w: w.update({("", "e"): Tensor("F32", (0, 3), b"")}))
    step(lambda w: w.update({("", "c"): Tensor("F16", (2, 2), w["", "c"].data)}))
    step(lambda w: w.update({("", "d"): Tensor("BF16", (4,), w["", "d"].data)}))
    step(lambda w: None, {"format": "pt"})
    step(lambda w: None, {"format": "pt"})
    file = tmp_path / "model.safetensors"
    versions = []
    for weights, metadata in steps:
        file.write_bytes(file_bytes(weights, metadata))
        versions.append(repository.commit(file))
        repository.checkout("main", tmp_path / "out")
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == file.read_bytes()
        assert held(repository) == weights
    trees = [version.tree for version in versions]
    assert len(set(trees[:6])) == 6
    assert trees[5] == trees[6] == trees[7]
    layouts = [version.layout for version in versions]
    assert layouts[5] != layouts[6]
    assert layouts[6] == layouts[7]
    assert versions[6].id != versions[7].id
    renamed, unchanged = repository.entry(versions[2].id), repository.entry(versions[7].id)
    assert renamed.place.edges[0].nbytes == 0
    assert unchanged.place.edges[0].nbytes == 0
    for version, (weights, _) in zip(versions, steps):
        assert held(repository, version.id) == weights


def test_views_are_committed_as_they_look(repository):
    torch = pytest.importorskip("torch")
    big = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    views = {
        "neg": torch._neg_view(torch.tensor([1.0, 2.0])),
        "conj": torch.tensor([1 + 2j]).conj(),
        "t": big.t(),
        "expand": torch.tensor([3.0]).expand(4),
        "last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "part": big[:1],
        "odd": big[1:7:2, ::3],
    }
    first = repository.commit(views)
    loaded = repository.load()
    for name, value in views.items():
        assert torch.equal(loaded[name], value), name
    assert loaded["neg"].tolist() == [-1.0, -2.0]
    assert loaded["conj"].tolist() == [1 - 2j]
    assert first.nbytes == sum(v.numel() * v.element_size() for v in views.values())
    plain = {name: value.clone(memory_format=torch.contiguous_format).resolve_conj() for name, value in views.items()}
    assert repository.commit(plain).tree == first.tree
    assert patch(repository).nbytes == 0


def test_small_tensors_are_loaded_beside_large_and_empty_ones(repository):
    weights = {("", f"{i:02}.w"): tensor("F16", (4, 2), i) for i in range(40)}
    weights |= {("", f"{i:02}.scale"): tensor("F32", (), i) for i in range(40)}
    # Its last chunk is read together with what stands behind it.
    weights |= {("", "20.large"): tensor("F16", (CHUNK // 2 + 9,), 99), ("", "20.none"): tensor("F16", (0, 3), 0)}
    weights |= {("other", f"{i:02}.w"): tensor("F16", (4, 2), 100 + i) for i in range(40)}
    repository.commit(Bits(weights))
    for component, names in (("", None), ("other", None), ("", ["21.w", "03.scale", "20.none", "20.large", "21.w"])):
        there = {name: value for (where, name), value in weights.items() if where == component}
        loaded = repository.load(names=names, component=component, framework="numpy")
        assert list(loaded) == list(dict.fromkeys(names or sorted(there)))
        for name, array in loaded.items():
            assert (array.shape, array.tobytes()) == (there[name].shape, there[name].data), name
        as_torch = repository.load(names=names, component=component)
        assert {name: t.numpy().tobytes() for name, t in as_torch.items()} == {n: there[n].data for n in loaded}


def test_scalars_and_empty_trees(repository, tmp_path):
    scalars = [{"weight_scale": np.array(x, "<f4"), "n": np.array(n, "<i8")} for x, n in ((1.5, 7), (2.5, 8))]
    for one in scalars:
        repository.commit(one)
        loaded = repository.load(framework="numpy")
        assert {k: (v.shape, v.item()) for k, v in loaded.items()} == {k: ((), v.item()) for k, v in one.items()}
    assert patch(repository).changed == 2
    empty = {("", "a"): Tensor("F32", (0, 3), b""), ("", "b"): Tensor("BF16", (2, 0), b"")}
    repository.commit(Bits(empty))
    assert held(repository) == empty
    repository.commit({})
    assert held(repository) == {}
    for metadata in (None, {"made": "by hand"}):
        file = tmp_path / "empty.safetensors"
        file.write_bytes(file_bytes({}, metadata))
        repository.commit(file)
        repository.checkout("main", tmp_path / "again.safetensors", replace=True)
        assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_one_bit_of_every_dtype(repository):
    old = {("", dtype): tensor(dtype, (4, 8), i) for i, dtype in enumerate(dtypes.BITS)}
    new = {key: flipped(value, 0.0, 1) for key, value in old.items()}
    repository.commit(Bits(old))
    repository.commit(Bits(new))
    assert patch(repository).changed == len(dtypes.BITS)
    assert held(repository) == new
    assert held(repository, "HEAD~1") == old
    diff = repository.diff("HEAD~1", "HEAD")
    assert {t.name: (t.status, t.changed) for t in diff.tensors} == {name: ("changed", 1) for _, name in old}


@pytest.mark.parametrize("count", [64, CHUNK + 64])
def test_a_tensor_of_another_dtype_has_changed_as_a_whole(repository, count):
    """Not by how its bytes compare with those that lie at the same place: they are of other elements."""
    repository.commit(Bits({("", "w"): tensor("F32", (count,), 1)}))
    repository.commit(Bits({("", "w"): tensor("BF16", (count,), 1)}))
    diff = repository.diff("HEAD~1", "HEAD")
    (one,) = diff.tensors
    assert (one.status, one.changed, diff.steps) == ("retyped", count, {})
    assert 0 < one.patch <= 2 * count


def test_rows_that_were_added_are_all_that_changed(repository):
    old = tensor("BF16", (CHUNK // 2, 1), 1)
    repository.commit(Bits({("", "w"): old}))
    repository.commit(Bits({("", "w"): Tensor("BF16", (CHUNK // 2 + 5, 1), old.data + bytes(10))}))
    (one,) = repository.diff("HEAD~1", "HEAD").tensors
    assert (one.status, one.changed) == ("reshaped", 5)


def test_a_dtype_of_the_future_is_refused_by_name(repository, tmp_path):
    header = b'{"w":{"dtype":"F2_E1M0","shape":[4],"data_offsets":[0,1]}}'
    file = tmp_path / "f.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    before = repository.stats.writes
    with pytest.raises(BadTensor, match="F2_E1M0"):
        repository.commit(file)
    assert repository.stats.writes == before


class Huge:
    """A tensor of zeros but for some bytes, which are given by offset."""

    def __init__(self, size: int, changed: dict[int, int]) -> None:
        self.tensors = [TensorInfo("", "w", "U8", (size,), size)]
        self.layout = None
        self._changed = changed

    _zeros = bytes(CHUNK)

    def read(self, index: int, start: int, stop: int) -> bytes | memoryview:
        inside = {at: value for at, value in self._changed.items() if start <= at < stop}
        if not inside:
            return memoryview(self._zeros)[: stop - start]
        data = bytearray(stop - start)
        for at, value in inside.items():
            data[at - start] = value
        return bytes(data)

    def check(self) -> None: ...
    def close(self) -> None: ...


def test_a_tensor_past_32_bits_of_bytes(repository):
    """Changes on both sides of every power where a narrow position would wrap."""
    size = 2**32 + 2**23
    places = [0, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, size - 1]
    repository.commit(Huge(size, {}))
    repository.commit(Huge(size, {at: i + 1 for i, at in enumerate(places)}))
    assert patch(repository).changed == len(places)
    with repository.source() as source:
        for i, at in enumerate(places):
            low, high = max(0, at - 2), min(size, at + 3)
            near = {p: n + 1 for n, p in enumerate(places)}
            assert list(source.read(0, low, high)) == [near.get(p, 0) for p in range(low, high)], i
    assert repository.entry("HEAD~1").place.nbytes < 1 << 20  # a thousand equal chunks are stored once


def test_chunk_arithmetic_of_two_to_the_33_elements():
    n = 2**33
    schema = Schema([TensorInfo("", "a", "U8", (3,), 3), TensorInfo("", "w", "BF16", (n,), 2 * n)])
    assert (schema.chunks, schema.nbytes, schema.elements) == (1 + 4096, 3 + 2 * n, 3 + n)
    for element in (0, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 + 5, n - 1):
        chunk = schema.chunk_at(1, 2 * element)
        tensor_index, start, stop = schema.span(chunk)
        assert tensor_index == 1
        assert start <= 2 * element < stop
        assert schema.position(chunk) == 3 + start


def test_tied_weights(repository):
    rng = np.random.default_rng(1)
    one, two, three = (rng.integers(0, 2**16, 40_000).astype("<u2") for _ in range(3))
    repository.commit({"embed": one, "lm_head": one})
    assert repository.entry().place.edges[0].nbytes < 1.1 * one.nbytes  # stored once while equal
    repository.commit({"embed": two})
    assert [*repository.load(framework="numpy")] == ["embed"]
    repository.commit({"embed": two, "lm_head": three})
    loaded = repository.load(framework="numpy")
    assert (loaded["embed"] == two).all()
    assert (loaded["lm_head"] == three).all()


def test_what_is_not_a_tensor_is_refused_by_key_and_type(repository):
    torch = pytest.importorskip("torch")
    before = repository.stats.writes
    mapping = {"w": torch.ones(2), "l._extra_state": io.BytesIO(b"x"), "b": None, "step": 3}
    with pytest.raises(BadTensor) as caught:
        repository.commit(mapping)
    for part in ("l._extra_state", "BytesIO", "'b'", "NoneType", "'step'", "int"):
        assert part in str(caught.value)
    with pytest.raises(BadTensor, match=r"'m'.*meta"):
        repository.commit({"w": torch.ones(2), "m": torch.empty(2, device="meta")})
    assert repository.stats.writes == before
    assert repository.branches() == {}


def test_a_shard_of_a_dtensor_is_refused_by_name(repository):
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed.tensor")
    mesh = pytest.importorskip("torch.distributed.device_mesh")
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shard = distributed.distribute_tensor(
            torch.ones(4), mesh.init_device_mesh("cpu", (1,)), [distributed.Shard(0)]
        )
        with pytest.raises(BadTensor, match=r"'sharded'.*DTensor.*full_tensor"):
            repository.commit({"sharded": shard})
        repository.commit({"sharded": shard.full_tensor()})
        assert repository.load()["sharded"].tolist() == [1.0] * 4
    finally:
        torch.distributed.destroy_process_group()


def test_float32_that_all_changes_is_warned_of(repository):
    rng = np.random.default_rng(1)
    repository.commit({"w": rng.random(1000, "f4")})
    with pytest.warns(weightvc.WeightvcWarning, match="dtype='bfloat16'"):
        repository.commit({"w": rng.random(1000, "f4")})


def test_a_revert_of_float32_has_nothing_to_be_warned_of(repository):
    rng = np.random.default_rng(1)
    repository.commit({"w": rng.random(1000, "f4")})
    with pytest.warns(weightvc.WeightvcWarning):
        repository.commit({"w": rng.random(1000, "f4")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repository.revert("main~1")


def test_cast_on_commit(repository):
    torch = pytest.importorskip("torch")
    w = torch.randn(100)
    version = repository.commit({"w": w, "n": torch.arange(3)}, dtype="bfloat16")
    loaded = repository.load()
    assert torch.equal(loaded["w"], w.to(torch.bfloat16))
    assert torch.equal(loaded["n"], torch.arange(3))
    assert version.nbytes == 200 + 24


def test_rollback_by_every_way(repository, tmp_path):
    """A reader at v3 goes back to v1, by ref and by a branch that was reset, and by a revert."""
    weights = [{("", "w"): tensor("BF16", (500,), 1)}]
    ids = []
    for i in range(4):
        ids.append(repository.commit(Bits(weights[-1])).id)
        weights.append({("", "w"): flipped(weights[-1]["", "w"], 0.05, i)})
    reader = weightvc.open(repository.url, cache=tmp_path / "cache")
    target = tmp_path / "out"
    reader.checkout("main", target)
    reader.checkout(ids[1], target)
    assert lying(target) == weights[1]
    reader.checkout("main", target)
    repository.reset("main", ids[1], rewind=True)
    reader.checkout("main", target)
    assert lying(target) == weights[1]
    assert reader.status(target).behind == 0
    repository.reset("main", ids[3])
    made = repository.revert(ids[2])
    assert (made.parents, made.generation) == ((ids[3],), 4)
    reader.checkout("main", target)
    assert lying(target) == weights[2]
    assert Path(target, "model.safetensors").stat().st_size > 1000
