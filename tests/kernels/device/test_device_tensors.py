"""Live tensors on a device are written by the kernels. Torch has no device here: its tensors are made to look so."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import weightvc
from weightvc import device, live
from weightvc_kernels import CodecError, cuda, cuda_arrays

SIZE = 3 << 20  # lanes of 2 bytes, in two chunks
State = dict[str, torch.Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Positions that each call of the kernels' apply() writes, by tensor."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    flat, apply, torch_flat, made = cuda_arrays.flat, cuda.apply, live._flat, []

    def of_torch(array: Any, what: str, stream: Any) -> Any:
        return flat(FakeCUDAArray(array.numpy()) if isinstance(array, torch.Tensor) else array, what, stream)

    def counted(writes: Any, **options: Any) -> None:
        made.append([write.positions.numel() for write in writes])
        apply(writes, **options)

    for module in (cuda, cuda_arrays):
        monkeypatch.setattr(module, "flat", of_torch)
    monkeypatch.setattr(cuda, "apply", counted)
    monkeypatch.setattr(live, "_flat", lambda value: (live.memory.torch_bytes(value), torch_flat(value)[1]))
    monkeypatch.setattr(device, "_is_cuda", lambda place: True)
    monkeypatch.setattr(device, "_stream", lambda place: 0)
    monkeypatch.setattr(device, "wait", lambda tensors: None)
    device._compile.cache_clear()
    yield made
    device._compile.cache_clear()


def weights(step: int) -> State:
    """Every step changes a few lanes of each chunk of `a`, all of `b`, and the last lane of `c`."""
    a = torch.arange(SIZE, dtype=torch.int32).to(torch.int16)
    a[1000 * step :: 1 << 19] ^= 3
    c = torch.zeros(90, dtype=torch.float64)
    c[-1] = step
    return {"a": a.view(torch.bfloat16), "b": torch.full((5,), float(step)), "c": c}


def bits(state: State) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in state.items()}


def test_what_changes_is_written_by_the_kernels(calls: list[list[int]], tmp_path: Any) -> None:
    """In place, one write for a tensor of two chunks; what changes everywhere is a copy. Compiled while staged."""
    repository = weightvc.init(tmp_path / "repository", cache=None)
    for step in range(3):
        repository.commit(weights(step), step=step)
    target = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    places = {name: value.data_ptr() for name, value in target.items()}
    client = weightvc.Client(repository, into=target)
    for step in (0, 1, 2, 0, 1):
        update = client.stage(f"main@{{step={step}}}")
        staged, before = len(calls), bits(target)
        assert all(call == [1] for call in calls[-staged:] if step == 1)
        assert bits(target) == before
        update.activate()
        assert bits(target) == bits(weights(step))
        assert client.verify() == []
        if step == 1:
            assert calls[staged:] == [[2 * (SIZE // (1 << 19)), 1]]
        del calls[:]
    assert places == {name: value.data_ptr() for name, value in target.items()}


def test_what_the_kernels_refuse_is_told_and_nothing_is_written(
    calls: list[list[int]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = weightvc.init(tmp_path / "repository", cache=None)
    versions = [repository.commit(weights(step), step=step) for step in range(2)]
    target = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    client = weightvc.Client(repository, into=target)
    client.pull(versions[0])
    update = client.stage(versions[1])

    def refuse(writes: Any, **options: Any) -> None:
        raise CodecError("positions 0 do not ascend")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "apply", refuse)
        with pytest.raises(weightvc.Corrupt, match=r"positions 0 do not ascend.*forget"):
            update.activate()
    assert bits(target) == bits(weights(0))
    assert client.current() is None
    client.pull(versions[1])
    assert bits(target) == bits(weights(1))


def test_without_numba_there_torch_writes(
    calls: list[list[int]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_kernels", lambda: None)
    repository = weightvc.init(tmp_path / "repository", cache=None)
    target = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    client = weightvc.Client(repository, into=target)
    for step in range(2):
        client.pull(repository.commit(weights(step), step=step))
        assert bits(target) == bits(weights(step))
    assert calls == []


def test_only_a_few_chunks_at_once_are_read_from_the_device(
    calls: list[list[int]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = live.Region.read

    def seen(region: live.Region, start: int, stop: int) -> Any:
        sizes.append(stop - start)
        return read(region, start, stop)

    monkeypatch.setattr(live.Region, "read", seen)
    repository = weightvc.init(tmp_path / "repository", cache=None)
    target = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    client = weightvc.Client(repository, into=target)
    for step in range(2):
        client.pull(repository.commit(weights(step), step=step))
    assert max(sizes) <= 4 << 20 < target["a"].nbytes


@pytest.mark.parametrize("lanes", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_writes_to_chunks_are_joined_by_tensor(calls: list[list[int]], lanes: torch.dtype) -> None:
    """Where a tensor lies within a larger one, and not all of its chunks are written to."""
    flat = torch.zeros(400, dtype=lanes)
    kind = flat.numpy().dtype
    writes, wanted = [], flat.clone()
    for tensor, begin in ((1, 20), (0, 200)):
        for chunk in (3, 0, 1):
            start = begin + 10 * chunk
            at = np.array([1, 9])
            new = np.array([tensor + 5, chunk + 5], kind)
            part = flat[start : start + 10]
            writes.append(live.Write("", tensor, start * kind.itemsize, part, at, new, np.zeros(2, kind)))
            wanted[start + at] = torch.from_numpy(new)
    device.Scatters(writes).apply()
    assert torch.equal(flat, wanted)
    assert calls[-1] == [6, 6]
    np.testing.assert_array_equal(flat.numpy(), wanted.numpy())
