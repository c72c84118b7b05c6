"""An engine that functions move."""

import pytest
import torch

import weightvc
from tests.engines.conftest import Host, of, weights
from tests.kit.engines import digest
from weightvc.engines import Callback


def test_a_function_is_given_each_version(host: Host) -> None:
    seen: list[tuple[str, str | None]] = []

    def load(update: weightvc.Update) -> None:
        assert host.slots.holds != update.version.id
        seen.append((update.version.id, update.path))

    engine = Callback(
        load, pause=lambda mode: seen.append(("pause", mode)), resume=lambda: seen.append(("go on", ""))
    )
    assert engine.serving() is None
    version = host.commit(0)
    pause = engine.activate(host.update())
    assert seen == [("pause", "retract"), (version.id, str(host.slots.path / version.short)), ("go on", "")]
    assert engine.serving() == host.slots.holds == version.id
    assert (pause.way, pause.total) == ("callback", pause.reload + pause.swap)
    assert not engine.behind(host.client)


def test_live_tensors_are_written_in_the_pause(host: Host) -> None:
    served = {name: torch.zeros_like(value) for name, value in weights(0).items()}
    client = weightvc.Client(host.repository, into=served)
    moments: list[str] = []
    engine = Callback(
        pause=lambda mode: moments.append(digest(served)), resume=lambda: moments.append(digest(served)), mode="drain"
    )
    for step in range(2):
        host.commit(step)
        engine.activate(client.update("main"))
    assert moments[1:] == [of(0), of(0), of(1)]


def test_what_a_function_raises_is_told_and_the_engine_goes_on(host: Host) -> None:
    first = host.commit(0)
    calls: list[str] = []
    broken = False

    def load(update: weightvc.Update) -> None:
        if broken:
            raise OSError("no such device")

    engine = Callback(load, resume=lambda: calls.append("resume"), name="mine")
    engine.activate(host.update())
    second = host.commit(1)
    broken = True
    with pytest.raises(weightvc.EngineError, match=r"mine: load failed .*no such device") as caught:
        engine.activate(host.update())
    assert (caught.value.call, caught.value.serves) == ("load", None)
    assert engine.serving() is None
    assert engine.behind(host.client)
    assert calls == ["resume"] * 2
    assert host.slots.holds == first.id
    broken = False
    engine.activate(host.update())
    assert host.slots.holds == engine.serving() == second.id


def test_a_pause_that_fails_changes_nothing(host: Host) -> None:
    first = host.commit(0)
    loads: list[str] = []
    engine = Callback(lambda update: loads.append(update.version.id))
    engine.activate(host.update())
    host.commit(1)
    engine._stop = lambda mode: 1 / 0
    with pytest.raises(weightvc.EngineError, match="pause failed") as caught:
        engine.activate(host.update())
    assert caught.value.serves == engine.serving() == first.id
    assert loads == [first.id]


def test_modes_are_checked() -> None:
    for options in ({"mode": "in_place"}, {"mode": "abort"}):
        with pytest.raises(weightvc.Refused):
            Callback(**options)  # type: ignore[arg-type]
    Callback(mode="in_place", cache_keys=True)
