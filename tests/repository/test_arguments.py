"""What may be given where: versions for refs, numpy's integers for steps, a place that is a repository already."""

from pathlib import Path

import numpy as np
import pytest

import weightvc


def _weights(value: int) -> dict[str, np.ndarray]:
    return {"w": np.full(8, value, np.uint16)}


def test_a_version_is_a_ref(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        first = repository.commit(_weights(1))
        second = repository.commit(_weights(2), expect=first)
        side = repository.commit(_weights(3), branch=None, parents=[first])
        assert side.parents == (first.id,)
        assert repository.resolve(first) == first
        assert repository.entry(first).new == first.id
        assert [version.id for version in repository.log(second)] == [second.id, first.id]
        assert {entry.new for entry in repository.entries([second, side])} == {first.id, second.id, side.id}
        assert repository.load(first, framework="numpy")["w"][0] == 1
        assert repository.tensor(second, "w", framework="numpy")[0] == 2
        assert b"".join(repository.tensor_bytes(side, "w")) == b"\x03\0" * 8
        assert repository.diff(first, second).changed == 8
        assert repository.tag("v1", first) == repository.branch("old", first) == first
        repository.checkout(first, tmp_path / "out")
        assert repository.verify(tmp_path / "out", first).ok
        assert repository.cat(first, "model.safetensors") == (tmp_path / "out" / "model.safetensors").read_bytes()
        assert repository.revert(first).tree == first.tree
        repository.reset("main", first, rewind=True, expect=repository.resolve())
        with pytest.raises(weightvc.BranchMoved):
            repository.commit(_weights(4), expect=second)
        with pytest.raises(weightvc.TensorNotFound, match=f"weightvc ls {first.short}`"):
            repository.tensor(first, "nothing")
    with weightvc.init(tmp_path / "other", cache=None) as other, pytest.raises(weightvc.RefNotFound):
        other.resolve(first)


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), np.array(7)])
def test_a_step_may_be_any_integer(tmp_path: Path, step: object) -> None:
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        assert repository.commit(_weights(1), step=step).step == 7  # type: ignore[arg-type]
        assert repository.resolve("main@{step=7}").step == 7


@pytest.mark.parametrize("step", [True, np.True_, 7.0, np.float32(7), "7", np.int64(-1)])
def test_a_step_is_nothing_else(tmp_path: Path, step: object) -> None:
    with (
        weightvc.init(tmp_path / "repository", cache=None) as repository,
        pytest.raises(weightvc.Refused, match="whole number"),
    ):
        repository.commit(_weights(1), step=step)  # type: ignore[arg-type]


def test_init_opens_what_is_there_if_that_is_right(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "repository", cache=None, exist_ok=True) as repository:
        made = repository.commit(_weights(1))
    with weightvc.init(tmp_path / "repository", cache=None, exist_ok=True) as repository:
        assert repository.resolve() == made
    with pytest.raises(weightvc.KeyExists):
        weightvc.init(tmp_path / "repository", cache=None)


def test_the_module_lists_its_names() -> None:
    assert set(dir(weightvc)) == {*weightvc.__all__, "__version__"}
    assert all(hasattr(weightvc, name) for name in dir(weightvc))
