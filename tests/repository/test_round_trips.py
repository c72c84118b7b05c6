"""Whatever is committed comes back: key set, dtype, shape and raw bytes, over any history and with any cache."""

import random
import secrets
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weightvc
from tests.kit.weights import (
    Bits,
    Tensor,
    changed,
    contents,
    file_bytes,
    held,
    lying,
    tensor,
    tiny_format,
    trees,
    write_shards,
)
from weightvc.objects import dtypes
from weightvc.repository import Repository

pytestmark = pytest.mark.filterwarnings("ignore::weightvc.WeightvcWarning")
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def damage(directory: Path, seed: int) -> None:
    """Flip, cut, empty or delete some files of a cache."""
    rng = random.Random(seed)
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        data = path.read_bytes()
        match rng.choice(["keep", "flip", "cut", "zero", "delete"]):
            case "flip" if data:
                at = rng.randrange(len(data))
                path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "zero":
                path.write_bytes(bytes(len(data)))
            case "delete":
                path.unlink()


def history(data: st.DataObject, repository: Repository, cache: Path | None, seed: int) -> None:
    model = {}
    weights = data.draw(trees())
    for _ in range(data.draw(st.integers(2, 4))):
        version = repository.commit(Bits(weights), base=data.draw(st.booleans()))
        model[version.id] = weights
        weights = data.draw(changed(weights))
        if cache is not None:
            seed += 1
            damage(cache, seed)
    for ident in data.draw(st.permutations(list(model))):
        assert held(repository, ident) == model[ident]
    fresh = weightvc.open(repository.url, cache=None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        for ident in data.draw(st.permutations(list(model))):
            if model[ident]:
                repository.checkout(ident, target)
                assert lying(target) == model[ident]
                assert repository.verify(target).ok
            assert held(fresh, ident) == model[ident]


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache that rots"])
def test_any_history_comes_back_exactly(cached):
    @SLOW
    @given(st.data(), st.integers(0, 1 << 20), st.booleans())
    def check(data, seed, tiny):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) if cached else None
            url = f"memory://{secrets.token_hex(8)}"
            if tiny:
                with tiny_format():
                    history(data, weightvc.init(url, cache=cache), cache, seed)
            else:
                history(data, weightvc.init(url, cache=cache), cache, seed)

    check()


def test_loads_as_torch_and_numpy(repository):
    """Everything that torch has comes back as that dtype, with the same bits."""
    torch = pytest.importorskip("torch")
    weights = {
        ("", dtype): tensor(dtype, (3, 4), i)
        for i, dtype in enumerate(dtypes.BITS)
        if not dtype.startswith(("F6", "BOOL"))
    }
    weights["", "BOOL"] = Tensor("BOOL", (2,), b"\1\0")
    weights["", "scalar"] = tensor("F32", (), 1)
    weights["", "empty"] = tensor("F16", (0, 3), 1)
    repository.commit(Bits(weights))
    loaded = repository.load()
    assert set(loaded) == {name for _, name in weights}
    for name, value in loaded.items():
        want = weights["", name]
        assert value.element_size() * value.numel() == len(want.data)
        if want.data:
            flat = value.reshape(-1).view(torch.uint8)
            assert bytes(flat.numpy()) == want.data
        if want.dtype != "F4":
            assert tuple(value.shape) == want.shape
    names = [name for name in loaded if name != "F4"]
    for name, array in repository.load(names=names, framework="numpy").items():
        assert (array.shape, array.tobytes()) == (weights["", name].shape, weights["", name].data)
    assert repository.commit(loaded).tree == repository.resolve("HEAD~1").tree


def test_one_tree_from_dict_file_and_shards(repository, tmp_path):
    torch = pytest.importorskip("torch")
    arrays = {"a": np.arange(12, dtype="<f4").reshape(3, 4), "b": np.array(7, "<i8"), "c": np.zeros((0, 3), "<f2")}
    weights = {
        ("", k): Tensor({"a": "F32", "b": "I64", "c": "F16"}[k], v.shape, v.tobytes()) for k, v in arrays.items()
    }
    (tmp_path / "one.safetensors").write_bytes(file_bytes(weights, {"format": "pt"}))
    write_shards(tmp_path / "shards", weights, 3)
    sources = [
        arrays,
        {k: torch.from_numpy(v.copy()) for k, v in arrays.items()},
        Bits(weights),
        tmp_path / "one.safetensors",
        tmp_path / "shards",
    ]
    versions = [repository.commit(source) for source in sources]
    assert len({version.tree for version in versions}) == 1
    assert len({version.id for version in versions}) == 5
    assert [entry.place.edges[0].nbytes for entry in repository.entries()][:-1] == [0] * 4


def test_parts_of_a_version(repository):
    """tensor() and load(names) read what they are asked for, rows included."""
    with tiny_format():
        weights = {("", "w"): tensor("F32", (50, 3), 1), ("", "v"): tensor("BF16", (20,), 2)}
        repository.commit(Bits(weights))
        rows = repository.tensor("HEAD", "w", rows=slice(7, 31), framework="numpy")
        assert (rows.shape, rows.tobytes()) == ((24, 3), weights["", "w"].data[7 * 12 : 31 * 12])
        assert repository.tensor("HEAD", "w", rows=slice(-2, None), framework="numpy").shape == (2, 3)
        assert set(repository.load(names=["v"])) == {"v"}
        with pytest.raises(weightvc.TensorNotFound, match="nope"):
            repository.load(names=["nope"])
        with pytest.raises(weightvc.TensorNotFound):
            repository.tensor("HEAD", "w", component="draft")


def test_a_version_of_another_repository_commits_as_it_is(repository, memory_url):
    """A version is a source: read from one repository, committed to another, same tree and layout."""
    other = weightvc.init(f"{memory_url}-other", cache=None)
    weights = {("", "w"): tensor("BF16", (100,), 1), ("draft", "w"): tensor("F8_E4M3", (9,), 2)}
    first = repository.commit(Bits(weights))
    with repository.source(first.id) as source:
        second = other.commit(source)
    assert (second.tree, second.layout) == (first.tree, first.layout)
    with other.source(second.id) as source:
        assert contents(source) == weights
