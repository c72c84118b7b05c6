"""Versions whose tensors come one by one: all of them, or nothing."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

import weightvc
from weightvc.errors import BadName, BadTensor, BranchMoved, Fenced, Refused, StoreError
from weightvc.protocol import spool


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(300, 200),
        "layers.0": torch.randn(100, 7).t(),
        "layers.1": torch.randn(100, 7).bfloat16(),
        "layers.10": torch.randn(3),
        "norm": torch.ones(()),
        "none": torch.empty(0, 4),
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("in_memory", [0, 1 << 20])
def test_it_is_the_version_that_commit_makes(memory_url, tmp_path, monkeypatch, dtype, in_memory):
    monkeypatch.setattr(spool, "IN_MEMORY", in_memory)
    repository = weightvc.init(memory_url, cache=tmp_path / "cache")
    parent = None
    for seed in (0, 1):
        expected = repository.commit(tensors(seed), branch="other", dtype=dtype)
        with repository.writer("main", step=seed, message="m", run="r", metadata={"a": 1}, dtype=dtype) as out:
            for name, tensor in reversed(tensors(seed).items()):
                out.add(name, tensor)
                if not tensor.is_contiguous() or tensor.numel():
                    tensor.zero_()
            assert repository.branches().get("main") == parent
        assert out.version == repository.resolve("main")
        assert (out.version.tree, out.version.nbytes) == (expected.tree, expected.nbytes)
        assert (out.version.step, out.version.message, out.version.run) == (seed, "m", "r")
        assert out.version.metadata == {"a": 1}
        assert list(out.version.parents) == ([] if parent is None else [parent])
        edges = [repository.entry(ref).place.edges for ref in ("main", "other")]
        assert [[(edge.nbytes, edge.changed) for edge in one] for one in edges] == 2 * [
            [(edge.nbytes, edge.changed) for edge in edges[0]]
        ]
        parent = out.version.id


def test_components_and_arrays(repository):
    with repository.writer() as out:
        out.add("w", np.arange(5, dtype=np.int32), component="draft")
        out.add("w", np.arange(6, dtype=">i2"))
    assert repository.load(framework="numpy")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert repository.load(component="draft", framework="numpy")["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_name_that_comes_twice_ends_it_and_nothing_is_published(repository):
    first = repository.commit(tensors(0), step=0)
    written = repository.stats.writes
    out = repository.writer(step=1)

    def export() -> None:
        with out:
            for name, tensor in [*tensors(1).items(), ("norm", torch.zeros(()))]:
                out.add(name, tensor)

    with pytest.raises(BadTensor, match="'norm' was added twice"):
        export()
    assert out.version is None
    assert (repository.resolve(), repository.stats.writes) == (first, written)
    with repository.writer(step=2) as out:
        for name, tensor in tensors(2).items():
            out.add(name, tensor)
    assert out.version.parents == (first.id,)


@pytest.mark.parametrize(
    ("name", "tensor", "component", "error", "says"),
    [
        ("w", torch.ones(2, device="meta"), "", BadTensor, "meta"),
        ("w", 3, "", BadTensor, "int"),
        ("__metadata__", torch.ones(2), "", BadTensor, "keeps for itself"),
        ("w", torch.ones(2), "../x", BadName, r"\.\."),
        (3, torch.ones(2), "", BadTensor, "type int"),
    ],
)
def test_what_cannot_be_kept_is_refused_when_it_comes(repository, name, tensor, component, error, says):
    out = repository.writer()

    def export() -> None:
        with out:
            out.add("kept", torch.ones(2))
            with pytest.raises(error, match=says):
                out.add(name, tensor, component)

    # Whoever passes over that does not publish what lacks it.
    with pytest.raises(Refused, match=f"{name!r}.* was not added"):
        export()
    assert out.version is None
    assert repository.branches() == {}


def test_a_name_that_came_twice_is_not_passed_over(repository):
    def export() -> None:
        with repository.writer() as out:
            out.add("w", torch.ones(2))
            with pytest.raises(BadTensor, match="added twice"):
                out.add("w", torch.zeros(2))

    with pytest.raises(Refused, match="'w' was not added"):
        export()
    assert repository.branches() == {}


def test_what_is_added_outside_of_the_block_is_refused(repository):
    out = repository.writer("main")
    with pytest.raises(Refused, match="'a' was added outside of its `with` block"):
        out.add("a", torch.ones(2))
    with pytest.raises(Refused, match="'a' was not added"), out:
        out.add("b", torch.ones(2))
    with pytest.raises(Refused, match="one version"), out:
        pass
    assert repository.branches() == {}


def test_components_that_cannot_be_folders_together(repository):
    with pytest.raises(BadName, match="component"), repository.writer() as out:  # noqa: PT012
        out.add("w", torch.ones(2), component="Draft")
        out.add("w", torch.ones(2), component="draft")
    assert repository.branches() == {}


def test_nothing_and_too_late(repository):
    with pytest.raises(Refused, match="nothing was added"), repository.writer() as out:
        pass
    with pytest.raises(Refused, match="after the end"):
        out.add("w", torch.ones(2))
    assert repository.branches() == {}


def test_arguments_are_refused_before_anything_is_exported(repository):
    for more in ({"step": -1}, {"codec": "x"}, {"on_conflict": "x"}, {"branch": "a//b"}, {"dtype": "int8"}):
        with pytest.raises(Refused):
            repository.writer(**more)


def test_who_is_fenced_off_hears_of_it_at_once(repository, memory_url):
    repository.commit(tensors(0))
    weightvc.open(memory_url, cache=None).claim()
    with pytest.raises(Fenced):
        repository.writer()


def test_the_branch_moved_meanwhile(repository, memory_url):
    repository.commit(tensors(0))
    with pytest.raises(BranchMoved), repository.writer(step=1) as out:  # noqa: PT012
        out.add("w", torch.ones(2))
        other = weightvc.open(memory_url, cache=None).commit(tensors(1))
    assert (out.version, repository.resolve()) == (None, other)
    with repository.writer(step=1, on_conflict="rebase") as out:
        out.add("w", torch.ones(2))
    assert out.version.parents == (other.id,)


def test_it_follows_what_was_committed_behind(repository):
    with repository.writer(step=1) as out:
        repository.commit_async(tensors(0), step=0)
        out.add("w", torch.ones(2))
    assert [version.step for version in repository.log()] == [1, 0]


def test_no_space(memory_url, tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 0)
    repository = weightvc.init(memory_url, cache=tmp_path / "cache")

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Refused, match="'b' was not added"), repository.writer() as out:  # noqa: PT012
        out.add("a", torch.ones(2))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match="'b' could not be kept"):
                out.add("b", torch.ones(2))
    assert repository.branches() == {}
    assert [path for path in Path(tmp_path, "cache").rglob("*") if path.is_file()] == []


def test_threads_add_at_once(repository):
    weights = {f"w{i}": torch.full((1000,), float(i)) for i in range(40)}
    with repository.writer() as out, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: out.add(*item), weights.items()))
    assert out.version.tree == repository.commit(weights, branch="other").tree
