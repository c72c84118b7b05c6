"""vLLM: its workers load versions from the slots, sparse where that is certain to be right, else whole."""

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightvc
from tests.engines.conftest import Host, of, weights
from tests.kit import vllm
from tests.kit.engines import VLLMServer, digest
from weightvc.engines import VLLM, changes
from weightvc.engines.vllm import FOLDER, register

Content = dict[str, torch.Tensor]
CALLS = [
    "/weight_info",
    "/pause",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
]
LOADS = CALLS[4:8]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend, as the factory of the stand-in finds it."""
    factory = vllm.install(monkeypatch)
    register()
    module, name = factory.registry["weightvc"]
    return getattr(importlib.import_module(module), name)


def start(
    backend: Any, content: Content | None = None, odd: dict[str, str] | None = None, workers: int = 2
) -> VLLMServer:
    """A server with workers for a model of this form."""
    like = weights(0) if content is None else content
    return VLLMServer([vllm.Worker(vllm.Model(like, odd), backend) for _ in range(workers)])


def adapter(engine: VLLMServer, **options: Any) -> VLLM:
    return VLLM(engine.url, **{"timeout": 5.0, "load_timeout": 5.0, **options})


def reloads(engine: VLLMServer) -> list[int]:
    """How often each worker has loaded a version as a whole."""
    return [worker.model.events.count("reload") for worker in engine.workers]


def test_the_plugin_may_be_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = vllm.install(monkeypatch)
    register()
    register()
    assert factory.registry == {"weightvc": ("weightvc.engines.vllm_backend", "WeightvcEngine")}


@pytest.mark.parametrize(("mode", "keys"), [("retract", False), ("drain", False), ("in_place", True)])
def test_it_serves_each_version_the_first_whole_and_then_changes(
    backend: Any, host: Host, mode: str, keys: bool
) -> None:
    with start(backend) as engine:
        moved = adapter(engine, mode=mode, cache_keys=keys)
        ways = []
        for step in range(4):
            version = host.commit(step)
            pause = moved.activate(host.update())
            ways.append(pause.way)
            assert engine.digest() == of(step)
            assert engine.version == moved.serving() == version.id
            assert host.client.current() == version
            assert not engine.paused
            assert pause.total == pause.reload + pause.swap
        assert ways == ["disk", "changes", "changes", "changes"]
        assert reloads(engine) == [1, 1]
        told = [body for path, body in engine.calls if path == "/update_weights"]
        assert told == [{"update_info": {"version": version.id}} for version in list(host.repository.log())[::-1]]


def test_back_again_is_a_change_too(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine)
        for step in (0, 1, 2):
            host.commit(step)
            moved.activate(host.update())
        host.repository.revert("main~1")
        assert moved.activate(host.update()).way == "changes"
        assert engine.digest() == of(1)
        assert reloads(engine) == [1, 1]


def test_requests_and_prefixes(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        host.commit(0)
        adapter(engine).activate(host.update())
        request = engine.begin("a")
        host.commit(1)
        adapter(engine, mode="retract").activate(host.update())
        assert engine.end(request) == {of(1)}
        assert engine.ask("a") == {of(1)}
        second = host.repository.resolve("main")
        engine.ask("b", second.id)
        third = host.commit(2)
        adapter(engine, mode="in_place", cache_keys=True).activate(host.update())
        assert engine.ask("b", third.id) == {of(2)}
        host.commit(3)
        adapter(engine, mode="drain").activate(host.update())
        assert engine.ask("b", third.id) == {of(3)}
    with pytest.raises(weightvc.Refused, match="cache_keys=True"):
        VLLM("http://127.0.0.1:1", mode="in_place")


# What goes whole


def changed(content: Content, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Content:
    return {**content, name: change(content[name].clone())}


def put(value: float, at: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("embed", put(math.nan), "NaN"),
        ("norm", put(math.nan), "NaN"),
        ("scale", put(7), "I32"),
        ("norm", lambda tensor: tensor.to(torch.float64), "dtypes or shapes"),
        ("embed", lambda tensor: torch.randn(tensor.shape).bfloat16(), "most of the elements"),
    ],
)
def test_what_marks_cannot_tell_goes_whole(
    backend: Any, host: Host, name: str, change: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    old = weights(0)
    new = changed(weights(1), name, change)
    with start(backend, new) as engine:
        moved = adapter(engine)
        host.commit(0, old)
        if old[name].dtype == new[name].dtype:
            moved.activate(host.update())
        else:
            host.client.pull("main")
        before = reloads(engine)
        host.commit(1, new)
        pause = moved.activate(host.update())
        assert pause.way == "disk"
        assert why in pause.why
        assert engine.digest() == digest(new)
        assert reloads(engine) == [count + 1 for count in before]


def test_fp8_goes_whole(backend: Any, host: Host) -> None:
    old = {**weights(0), "w8": torch.zeros(256).to(torch.float8_e4m3fn)}
    new = changed(old, "w8", lambda tensor: put(3)(tensor.view(torch.uint8)).view(torch.float8_e4m3fn))
    with start(backend, old) as engine:
        moved = adapter(engine)
        host.commit(0, old)
        moved.activate(host.update())
        host.commit(1, new)
        pause = moved.activate(host.update())
        assert (pause.way, pause.why) == ("disk", "'w8' changed, which is F8_E4M3")
        assert engine.digest() == digest(new)
        # Where it stays as it is, what else changed may come alone.
        host.commit(2, changed(new, "norm", put(9)))
        assert moved.activate(host.update()).way == "changes"
        assert engine.digest() == digest(changed(new, "norm", put(9)))


def test_a_tensor_that_has_a_nan_already_goes_whole(backend: Any, host: Host) -> None:
    """Also where the NaN itself does not change: in the worker it could not be told from a mark that was left."""
    old = weights(0)
    old["norm"].view(torch.int32)[3] = 0x7F800F0F  # with a payload
    states = [old, changed(old, "norm", put(5, at=6)), changed(old, "norm", put(1, at=3))]
    with start(backend, old) as engine:
        moved = adapter(engine)
        for step, state in enumerate(states):
            host.commit(step, state)
            moved.activate(host.update())
            assert engine.digest() == digest(state)
        assert reloads(engine) == [3, 3]
        host.commit(3, changed(states[2], "norm", put(8, at=7)))
        moved.activate(host.update())
        assert engine.digest() == digest(changed(states[2], "norm", put(8, at=7)))
        assert reloads(engine) == [3, 3]  # there is no NaN any more


def test_minus_zero_is_a_change(backend: Any, host: Host) -> None:
    old = changed(weights(0), "norm", put(0.0))
    new = changed(old, "norm", put(-0.0))
    with start(backend) as engine:
        moved = adapter(engine)
        for step, state in enumerate((old, new)):
            host.commit(step, state)
            moved.activate(host.update())
        assert engine.digest() == digest(new) != digest(old)
        assert reloads(engine) == [1, 1]


@pytest.mark.parametrize("odd", ["setitem", "shape"])
def test_a_loader_that_does_not_copy_plainly_goes_whole_from_then_on(
    backend: Any, host: Host, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(backend, odd={"embed": odd}) as engine, caplog.at_level(logging.WARNING, "weightvc"):
        moved = adapter(engine)
        for step in range(3):
            host.commit(step)
            moved.activate(host.update())
            assert engine.digest() == of(step)
        assert reloads(engine) == [3, 3]
        assert len(caplog.records) == 2  # once a worker
        assert "as a whole" in caplog.text


def test_a_vllm_without_the_sparse_loader(backend: Any, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = importlib.import_module("vllm.model_executor.model_loader")
    monkeypatch.delattr(loader, "checkpoint_weight_patch")
    monkeypatch.setitem(importlib.sys.modules, "vllm.model_executor.model_loader.checkpoint_weight_patch", None)  # type: ignore[attr-defined]
    with start(backend) as engine:
        moved = adapter(engine)
        for step in range(2):
            host.commit(step)
            moved.activate(host.update())
            assert engine.digest() == of(step)
        assert reloads(engine) == [2, 2]


def test_a_worker_that_holds_another_version_loads_whole(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine)
        for step in range(2):
            host.commit(step)
            moved.activate(host.update())
        engine.workers[1] = vllm.Worker(vllm.Model(weights(0)), backend)  # started again by itself
        host.commit(2)
        moved.activate(host.update())
        assert engine.digest() == of(2)
        assert reloads(engine) == [1, 1]


def test_changes_may_be_switched_off(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine, changes=False)
        for step in range(2):
            host.commit(step)
            assert moved.activate(host.update()).way == "disk"
        assert reloads(engine) == [2, 2]


# Failures


@pytest.mark.parametrize("fault", ["500", "die", "late", "hang"])
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_in_any_call_leaves_a_version_or_says_that_it_is_not_known(
    backend: Any, host: Host, call: str, fault: str
) -> None:
    with start(backend) as engine:
        moved = adapter(engine, timeout=0.4, load_timeout=0.4) if fault == "hang" else adapter(engine)
        first = host.commit(0)
        moved.activate(host.update())
        second = host.commit(1)
        update = host.update().stage()
        engine.faults[call] = fault
        with pytest.raises(weightvc.EngineError) as caught:
            moved.activate(update)
        error = caught.value
        assert call in error.call
        assert host.slots.holds == first.id
        if call not in (*LOADS, "/resume"):
            assert engine.digest() == of(0)
        if error.serves is not None and error.paused is False:
            assert engine.digest() == of(0 if error.serves == first.id else 1)
            assert not engine.paused
        if error.serves is None:
            assert error.paused is not False
        engine.release()
        del engine.faults[call]
        before = reloads(engine)
        moved.activate(host.update())
        assert (engine.digest(), engine.version, engine.paused) == (of(1), second.id, False)
        if error.serves is None and call in LOADS:
            assert reloads(engine) != before


def test_half_an_update_is_mended_by_a_whole_one(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine)
        host.commit(0)
        moved.activate(host.update())
        second = host.commit(1)
        engine.faults["/update_weights"] = "half"
        with pytest.raises(weightvc.EngineError, match="stays paused") as caught:
            moved.activate(host.update())
        assert (caught.value.serves, caught.value.paused, engine.paused) == (None, True, True)
        assert engine.version.startswith("moving:")
        del engine.faults["/update_weights"]
        other = adapter(engine)
        assert other.serving() is None
        other.activate(host.update())
        assert (engine.digest(), engine.version, engine.paused) == (of(1), second.id, False)


def test_a_worker_that_cannot_load_is_taken_back(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine)
        first = host.commit(0)
        moved.activate(host.update())
        host.commit(1, {**weights(1), "new.one": torch.ones(3)})
        with pytest.raises(weightvc.EngineError, match="was loaded again") as caught:
            moved.activate(host.update())
        assert (caught.value.serves, caught.value.paused) == (first.id, False)
        assert (engine.digest(), engine.version, engine.paused) == (of(0), first.id, False)


def test_a_host_without_the_slot_says_so(backend: Any, tmp_path: Path) -> None:
    worker = vllm.Worker(vllm.Model(weights(0)), backend)
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine"):
        worker.update_weights({"version": "0" * 64})
    worker.init_weight_transfer_engine({"directory": str(tmp_path)})
    with pytest.raises(ValueError, match="stage it here"):
        worker.update_weights({"version": "0" * 64})


def test_a_worker_that_failed_does_not_build_on_what_it_held(backend: Any, host: Host) -> None:
    worker = vllm.Worker(vllm.Model(weights(0)), backend)
    worker.init_weight_transfer_engine({"directory": str(host.slots.path)})
    worker.start_weight_update()
    updates = []
    for step in range(2):
        host.commit(step)
        updates.append(host.client.pull("main"))
    slots = [Path(update.path) for update in updates]
    ids = [update.version.id for update in updates]
    worker.update_weights({"version": ids[0]})
    assert changes.write(*slots, *ids) == ""
    worker.model.odd = {"k": "raise"}
    with pytest.raises(KeyError):
        worker.update_weights({"version": ids[1]})
    worker.model.odd = {}
    worker.engine._sparse = True
    before = worker.model.events.count("reload")
    worker.update_weights({"version": ids[1]})
    assert worker.model.events.count("reload") == before + 1
    assert digest(worker.model.checkpoint()) == of(1)


# The file of changes


def test_positions_beyond_int32_are_int64(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changes.position_type((2**31,)) == "<i4"
    assert changes.position_type((2**31 + 1,)) == "<i8"
    assert changes.position_type((128, 4096, 4097)) == "<i8"  # stacked experts
    monkeypatch.setattr(changes, "INT32", 400)
    monkeypatch.setattr(changes, "PIECE", 64)
    slots = []
    for step in range(2):
        host.commit(step)
        slots.append(Path(host.client.pull("main").path or ""))
    assert changes.write(*slots, "a" * 64, "b" * 64) == ""
    found = changes.read(changes.file_of(slots[1], "a" * 64, "b" * 64), "a" * 64, "b" * 64)
    assert found is not None
    assert {change.name: change.positions.dtype.str for change in found} == {"embed": "<i8", "k": "<i4"}
    for change in found:
        old, new = weights(0)[change.name].view(-1), weights(1)[change.name].view(-1)
        old[torch.from_numpy(change.positions.copy()).long()] = torch.from_numpy(
            change.values.view("<i2").copy()
        ).view(torch.bfloat16)
        assert torch.equal(old.view(torch.int16), new.view(torch.int16))
    assert changes.read(changes.file_of(slots[1], "a" * 64, "b" * 64), "c" * 64, "b" * 64) is None
    assert changes.read(slots[1] / "none", "a" * 64, "b" * 64) is None


def test_one_file_of_changes_is_kept(backend: Any, host: Host) -> None:
    with start(backend) as engine:
        moved = adapter(engine)
        for step in range(4):
            host.commit(step)
            moved.activate(host.update())
        kept = list((host.slots.path / FOLDER).iterdir())
        assert len(kept) == 1
        # The slots do not take it for somebody's.
        assert host.client.verify() == []
