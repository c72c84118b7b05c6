"""What a commit's `codec` asks for is what its patch is made of, and any reader reads it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import weightvc
import weightvc_kernels as kernels
from tests.kit.weights import Bits, Tensor, flipped, held, tensor
from weightvc.errors import Refused
from weightvc.objects import dtypes, manifest
from weightvc.protocol import coder
from weightvc.repository import Repository
from weightvc_cli import work

RNG = np.random.default_rng(1)
NORMAL = RNG.normal(0, 0.02, 300_000).astype(np.float32)
UPDATE = RNG.normal(0, 1, 300_000).astype(np.float32)


def f32(size: float) -> Tensor:
    """Weights after an update of about this size."""
    return Tensor("F32", (NORMAL.size,), (NORMAL + np.float32(size) * UPDATE).tobytes())


def bf16(size: float) -> Tensor:
    """The same, rounded down to bf16."""
    bits = np.frombuffer(f32(size).data, np.uint32) >> 16
    return Tensor("BF16", (NORMAL.size,), bits.astype(np.uint16).tobytes())


def stream(repository: Repository) -> tuple[Counter[int], int, list[str]]:
    """How many blocks of each codec the newest patch has, its bytes, and the dtypes with tables."""
    place = repository.entry("HEAD").place
    assert place is not None
    patch = repository._shelf.manifest(place.manifest).patch
    assert patch is not None
    return Counter(patch.stream.codecs), patch.stream.nbytes, list(patch.tables)


@pytest.mark.parametrize("policy", coder.POLICIES)
def test_every_dtype_comes_back(repository: Repository, policy: str, tmp_path: Path) -> None:
    weights = {("", dtype): tensor(dtype, (40, 32), i) for i, dtype in enumerate(sorted(dtypes.BITS))}
    repository.commit(Bits(weights))
    for share in (0.001, 0.05, 1.0):
        weights = {key: flipped(one, share, 3) for key, one in weights.items()}
        repository.commit(Bits(weights), codec=policy)
        assert held(repository) == weights
        repository.checkout("HEAD", tmp_path / "out")
    assert repository.verify(tmp_path / "out").ok


def test_without_a_policy_it_is_the_smallest(repository: Repository) -> None:
    """By a commit and by what the command line gives it."""
    repository.commit(Bits({("", "a"): bf16(0), ("", "b"): f32(0)}))
    repository.commit(Bits({("", "a"): bf16(3e-7), ("", "b"): f32(1e-6)}))
    codecs, _, tables = stream(repository)
    assert codecs == {manifest.CONTEXT: 2}
    assert tables == ["BF16", "F32"]
    (option,) = (option for option in work.commit.params if option.name == "codec")
    assert option.default == "small"


def test_policies_in_one_chain(repository: Repository) -> None:
    made = [repository.commit(Bits({("", "w"): bf16(0)}))]
    sizes = [1e-7 * k for k in range(1, 7)]
    for i, size in enumerate(sizes):
        made.append(repository.commit(Bits({("", "w"): bf16(size)}), codec=coder.POLICIES[i % 3]))
    for version, size in zip(made[1:], sizes):
        assert held(repository, version.id) == {("", "w"): bf16(size)}


def test_fast_is_rice_without_tables(repository: Repository) -> None:
    repository.commit(Bits({("", "a"): bf16(0), ("", "b"): f32(0), ("", "c"): tensor("I64", (9,), 1)}))
    weights = {("", "a"): bf16(3e-7), ("", "b"): f32(1e-6), ("", "c"): flipped(tensor("I64", (9,), 1), 0.1, 2)}
    repository.commit(Bits(weights), codec="fast")
    codecs, _, tables = stream(repository)
    assert codecs[manifest.RICE] >= 2
    assert manifest.CONTEXT not in codecs
    assert tables == []
    assert held(repository) == weights


def test_fast_in_a_small_tree(repository: Repository) -> None:
    old = tensor("BF16", (2000,), 1)
    repository.commit(Bits({("", "w"): old}))
    for policy, wanted in (("fast", manifest.RICE), ("auto", kernels.SPARSE), ("small", kernels.SPARSE)):
        old = flipped(old, 0.01, 1)
        repository.commit(Bits({("", "w"): old}), codec=policy)
        assert stream(repository)[0] == {wanted: 1}


@pytest.mark.parametrize("policy", coder.POLICIES)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8", "I64", "F8_E4M3"])
def test_never_more_than_the_chunk_whole(
    repository: Repository, policy: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "CONTEXT_FROM", 0)
    count = 50_000
    old = tensor(dtype, (count,), 1)
    repository.commit(Bits({("", "w"): old}))
    for share in (0.01, 0.0001, 0.5, 1.0):
        old = flipped(old, share, 4)
        repository.commit(Bits({("", "w"): old}), codec=policy)
        codecs, nbytes, _ = stream(repository)
        assert nbytes <= len(old.data)
        if share == 0.01 and policy == "small":
            assert (manifest.CONTEXT in codecs) == kernels.context.supports(dtype)
    repository.commit(Bits({("", "w"): tensor(dtype, (count,), 2)}), codec=policy)
    assert stream(repository)[1] <= len(old.data)


def test_auto_is_fast_where_that_costs_little(memory_url: str, tmp_path: Path) -> None:
    repository = weightvc.init(memory_url, cache=tmp_path)
    old = {("", "a"): bf16(0), ("", "b"): f32(0)}
    new = {("", "a"): bf16(3e-7), ("", "b"): f32(1e-6)}
    repository.commit(Bits(old))
    sizes = {}
    for policy in coder.POLICIES:
        repository.commit(Bits(new), codec=policy)
        codecs, sizes[policy], tables = stream(repository)
        if policy == "auto":
            # Dense float32 takes a few per cent more, and sparse bf16 a third.
            assert codecs == {manifest.CONTEXT: 1, manifest.RICE: 1}
            assert tables == ["BF16"]
        repository.commit(Bits(old), codec=policy)
    assert sizes["small"] < sizes["auto"] < sizes["fast"]
    assert sizes["auto"] <= sizes["small"] * (coder.MARGIN + 1) / coder.MARGIN


def test_checks_are_of_the_lanes_that_change(repository: Repository) -> None:
    old, new = bf16(0), bf16(3e-7)
    repository.commit(Bits({("", "w"): old}))
    repository.commit(Bits({("", "w"): new}), codec="fast")
    place = repository.entry("HEAD").place
    assert place is not None
    patch = repository._shelf.manifest(place.manifest).patch
    assert patch is not None
    assert patch.stream.codecs == [manifest.RICE]
    changes = kernels.rice.Changes(patch.stream.inline, NORMAL.size, 2)
    assert patch.stream.checks == [manifest.check(np.frombuffer(old.data, np.uint16)[changes.at].tobytes())]


@pytest.mark.parametrize("policy", ["zip", "", "SMALL", None, 7, ["fast"]])
def test_other_policies_are_refused(repository: Repository, policy: object) -> None:
    before = repository.refresh()
    with pytest.raises(Refused, match="give one of small, fast, auto"):
        repository.commit(Bits({("", "w"): tensor("U8", (3,), 1)}), codec=policy)  # type: ignore[arg-type]
    assert repository.refresh() == before
