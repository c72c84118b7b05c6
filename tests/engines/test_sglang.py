"""SGLang: it serves exactly a version's bits, whatever fails, and no prefix of other weights."""

import base64
import io
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import pytest
import torch

import weightvc
from tests.engines.conftest import Host, of, weights
from tests.kit.engines import SGLangServer, digest
from weightvc.engines import SGLang

CALLS = [
    "/model_info",
    "/pause_generation",
    "/flush_cache",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/continue_generation",
]
FAULTS = [(call, fault) for call in CALLS for fault in ("500", "false", "die", "late", "hang")]
FAULTS += [("/update_weights_from_disk", "half")]


@pytest.fixture
def engine() -> Iterator[SGLangServer]:
    with SGLangServer() as server:
        yield server


def adapter(engine: SGLangServer, **options: Any) -> SGLang:
    return SGLang(engine.url, **{"timeout": 5.0, "load_timeout": 5.0, **options})


@pytest.mark.parametrize(("mode", "keys"), [("retract", False), ("drain", False), ("in_place", True)])
def test_it_serves_each_version_and_says_so(engine: SGLangServer, host: Host, mode: str, keys: bool) -> None:
    moved = adapter(engine, mode=mode, cache_keys=keys)
    assert moved.serving() is None
    for step in range(3):
        version = host.commit(step)
        update = host.update().stage()
        pause = moved.activate(update)
        assert engine.digest() == of(step)
        assert engine.version == moved.serving() == version.id
        assert host.client.current() == version
        assert not engine.paused
        assert (pause.mode, pause.way) == (mode, "disk")
        assert pause.reload > 0
        assert pause.swap > 0
        assert pause.total == pause.reload + pause.swap
    assert engine.calls[-1][0] == "/model_info"
    loads = [body for path, body in engine.calls if path == "/update_weights_from_disk"]
    assert [body["model_path"] for body in loads] == [str(host.slots.path / v.short) for v in _versions(host)]
    assert {body["flush_cache"] for body in loads} == {False}


def _versions(host: Host) -> list[weightvc.Version]:
    return list(host.repository.log())[::-1]


def test_retracted_requests_go_on_with_the_new_weights_and_no_old_prefix_is_found(
    engine: SGLangServer, host: Host
) -> None:
    moved = adapter(engine, mode="retract")
    for step in range(2):
        host.commit(step)
        if step:
            request = engine.begin("a")
        moved.activate(host.update())
    assert engine.end(request) == {of(1)}
    assert engine.ask("a") == {of(1)}


def test_in_place_keeps_requests_and_keys_keep_prefixes_apart(engine: SGLangServer, host: Host) -> None:
    with pytest.raises(weightvc.Refused, match="cache_keys=True"):
        adapter(engine, mode="in_place")
    moved = adapter(engine, mode="in_place", cache_keys=True)
    first = host.commit(0)
    moved.activate(host.update())
    engine.ask("a", first.id)
    request = engine.begin("a", first.id)
    second = host.commit(1)
    moved.activate(host.update())
    assert engine.end(request) == {of(0), of(1)}
    assert engine.ask("a", second.id) == {of(1)}
    # What the keys are for: this stand-in would find the old prefix without.
    assert engine.ask("a", first.id) == {of(0), of(1)}


def test_drain_waits_for_requests_that_have_begun(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine, mode="drain")
    host.commit(0)
    moved.activate(host.update())
    request = engine.begin("a")
    host.commit(1)
    threading.Timer(0.2, engine.end, (request,)).start()
    pause = moved.activate(host.update())
    assert request.by == {of(0)}
    assert pause.drain > 0
    assert engine.ask("a") == {of(1)}


def test_drain_gives_up_and_serves_on(engine: SGLangServer, host: Host) -> None:
    first = host.commit(0)
    adapter(engine, mode="drain").activate(host.update())
    request = engine.begin("a")
    host.commit(1)
    with pytest.raises(weightvc.EngineError, match="requests were in work") as caught:
        adapter(engine, mode="drain", load_timeout=0.1).activate(host.update())
    assert (caught.value.serves, caught.value.paused) == (first.id, False)
    assert engine.end(request) == {of(0)}
    assert (engine.digest(), engine.paused, moved_to(host)) == (of(0), False, first.id)


def moved_to(host: Host) -> str | None:
    return host.slots.holds


def test_a_release_that_does_not_flush_retracted_requests_is_told_of(host: Host) -> None:
    with SGLangServer(flushes_retracted=False) as engine:
        first = host.commit(0)
        moved = adapter(engine, mode="retract")
        moved.activate(host.update())
        engine.begin("a")
        host.commit(1)
        with pytest.raises(weightvc.EngineError, match="does not flush") as caught:
            moved.activate(host.update())
        assert caught.value.serves == first.id
        assert (engine.digest(), engine.paused, engine.version) == (of(0), False, first.id)


@pytest.mark.parametrize(("call", "fault"), FAULTS)
def test_a_failure_in_any_call_leaves_a_version_or_says_that_it_is_not_known(
    engine: SGLangServer, host: Host, call: str, fault: str
) -> None:
    patient = adapter(engine)
    moved = adapter(engine, timeout=0.4, load_timeout=0.4) if fault == "hang" else patient
    first, old = host.commit(0), of(0)
    patient.activate(host.update())
    second, new = host.commit(1), of(1)
    update = host.update().stage()
    engine.faults[call] = fault
    with pytest.raises(weightvc.EngineError) as caught:
        moved.activate(update)
    error = caught.value
    assert call in error.call
    assert (error.engine, error.exit_code) == (f"SGLang {engine.url}", 10)
    assert moved_to(host) == first.id
    assert {error.serves, None} <= {first.id, second.id, None}
    if call not in ("/update_weights_from_disk", "/continue_generation"):
        assert engine.digest() == old
        assert error.serves in (first.id, None)
    if error.serves is not None and error.paused is False:
        assert engine.digest() == (old if error.serves == first.id else new)
        assert not engine.paused
    if error.serves is None:
        assert error.paused is not False
        assert "not known" in str(error)
    # With the fault gone, the next try gets there, whatever state that was.
    engine.release()
    del engine.faults[call]
    patient.activate(host.update())
    assert (engine.digest(), engine.version, engine.paused) == (new, second.id, False)
    assert moved_to(host) == second.id
    assert engine.ask("a") == {new}


def test_a_failed_load_is_taken_back(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    first = host.commit(0)
    moved.activate(host.update())
    second = host.commit(1)
    update = host.update().stage()
    loads = []

    plain = engine.do

    def once(method: str, path: str, query: Any, body: Any, *, half: bool) -> tuple[int, Any]:
        if path == "/update_weights_from_disk":
            loads.append(body["weight_version"])
            half = len(loads) == 1
        return plain(method, path, query, body, half=half)

    engine.do = once  # type: ignore[method-assign]
    with pytest.raises(weightvc.EngineError, match="was loaded again") as caught:
        moved.activate(update)
    assert loads == [second.id, first.id]
    assert (caught.value.serves, caught.value.paused) == (first.id, False)
    assert (engine.digest(), engine.version, engine.paused) == (of(0), first.id, False)


def test_half_a_load_is_known_to_whoever_comes_next(engine: SGLangServer, host: Host) -> None:
    host.commit(0)
    adapter(engine).activate(host.update())
    second = host.commit(1)
    engine.faults["/update_weights_from_disk"] = "half"
    with pytest.raises(weightvc.EngineError, match="stays paused") as caught:
        adapter(engine).activate(host.update())
    assert (caught.value.serves, caught.value.paused) == (None, True)
    assert engine.paused
    del engine.faults["/update_weights_from_disk"]
    other = adapter(engine)  # as of another process, which has no memory of it
    assert other.serving() is None
    assert other.behind(host.client)
    assert other.activate(host.update()).way == "disk"
    assert (engine.digest(), engine.version, engine.paused) == (of(1), second.id, False)


@pytest.mark.parametrize("mark", ["marked", "404"])
@pytest.mark.parametrize("mode", ["retract", "drain"])
@pytest.mark.parametrize("call", ["/pause_generation", "/flush_cache"])
def test_half_a_load_never_generates(engine: SGLangServer, host: Host, mode: str, mark: str, call: str) -> None:
    """Neither where the next try fails before its load."""
    if mark == "404":
        engine.faults["/update_weight_version"] = "404"
    moved = adapter(engine, mode=mode)
    host.commit(0)
    moved.activate(host.update())
    host.commit(1)
    engine.faults["/update_weights_from_disk"] = "half"
    with pytest.raises(weightvc.EngineError, match="stays paused"):
        moved.activate(host.update())
    del engine.faults["/update_weights_from_disk"]
    before = engine.paths().count("/continue_generation")
    engine.faults[call] = "500"
    with pytest.raises(weightvc.EngineError, match="stays paused") as caught:
        moved.activate(host.update())
    assert (caught.value.serves, caught.value.paused) == (None, True)
    assert engine.paused
    assert engine.paths().count("/continue_generation") == before
    del engine.faults[call]
    moved.activate(host.update())
    assert (engine.digest(), engine.paused) == (of(1), False)


def test_a_version_that_cannot_be_asked_for_at_the_end(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    version = host.commit(0)
    plain = engine.go_on

    def then() -> None:
        plain()
        engine.faults["/model_info"] = "500"

    engine.go_on = then  # type: ignore[method-assign]
    with pytest.raises(weightvc.EngineError, match="the weights are in") as caught:
        moved.activate(host.update())
    assert (caught.value.serves, caught.value.paused, moved_to(host)) == (version.id, False, None)
    engine.go_on = plain  # type: ignore[method-assign]
    engine.faults.clear()
    assert moved.activate(host.update()).way == "none"
    assert moved_to(host) == version.id


def test_a_server_that_is_not_there(engine: SGLangServer, host: Host) -> None:
    first = host.commit(0)
    moved = adapter(engine)
    moved.activate(host.update())
    host.commit(1)
    engine.stop()
    with pytest.raises(weightvc.EngineError, match="cannot be reached") as caught:
        moved.activate(host.update())
    assert caught.value.serves is None
    assert moved_to(host) == first.id
    assert not moved.behind(host.client)


def test_an_old_server_has_another_name_for_it_and_no_mark(host: Host) -> None:
    with SGLangServer(old=True) as engine:
        engine.faults["/update_weight_version"] = "404"
        moved = adapter(engine)
        version = host.commit(0)
        moved.activate(host.update())
        assert moved.serving() == version.id
        engine.faults["/update_weights_from_disk"] = "half"
        host.commit(1)
        with pytest.raises(weightvc.EngineError):
            moved.activate(host.update())
        assert moved.serving() is None  # it says otherwise
        assert engine.version == version.id


def test_a_server_that_was_started_again_is_brought_back(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    version = host.commit(0)
    moved.activate(host.update())
    engine.weights, engine.version = {"embed": torch.zeros(1)}, "default"
    stop = threading.Event()
    for update in host.client.follow(every=0.01, stop=stop, also=moved.behind):
        moved.activate(update)
        stop.set()
    assert (engine.digest(), engine.version) == (of(0), version.id)


def test_a_thread_goes_on_after_a_failure(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    version = host.commit(0)
    engine.faults["/flush_cache"] = "500"
    with host.client.watch("main", moved.activate, every=0.01, also=moved.behind):
        while "/continue_generation" not in engine.paths():
            time.sleep(0.01)
        engine.faults.clear()
        assert host.client.wait_for(version, timeout=60)
    assert engine.digest() == of(0)


def test_a_pause_that_somebody_left_is_ended(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    host.commit(0)
    moved.activate(host.update())
    engine.paused = True
    assert moved.activate(host.update()).way == "none"
    assert not engine.paused


def test_somebody_else_moves_it_too(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine)
    host.commit(0)
    plain = engine.go_on

    def other() -> None:
        plain()
        engine.version = "step 7"

    engine.go_on = other  # type: ignore[method-assign]
    with pytest.raises(weightvc.EngineError, match="says that it serves another"):
        moved.activate(host.update())
    assert moved_to(host) is None


def test_the_key_is_sent_and_not_shown(host: Host) -> None:
    with SGLangServer(key="secret-1") as engine:
        host.commit(0)
        adapter(engine, key="secret-1").activate(host.update())
        assert engine.digest() == of(0)
        with pytest.raises(weightvc.EngineError, match="API key") as caught:
            adapter(engine, key="secret-2").serving()
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"url": "ftp://x"},
        {"url": "http://"},
        {"url": "http://h:x"},
        {"url": "http://u:p@h"},
        {"url": "http://h/?a=b"},
        {"mode": "abort"},
        {"key": "a\nb"},
        {"timeout": 0},
        {"tp": 0},
    ],
)
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(weightvc.Refused):
        SGLang(**{"url": "http://127.0.0.1:1", **options})


def test_a_directory_whose_path_is_used_again_is_refused(engine: SGLangServer, host: Host, tmp_path: Any) -> None:
    host.commit(0)
    client = weightvc.Client(host.repository, into=tmp_path / "served")
    with pytest.raises(weightvc.Refused, match="Slots"):
        adapter(engine).activate(client.update("main"))


# By shared memory


class Serializer:
    """As SGLang's: a pickle that holds the names of shared memory, in base64."""

    @staticmethod
    def serialize(named: Any, output_str: bool = False) -> str:
        out = io.BytesIO()
        ForkingPickler(out).dump(named)
        assert output_str
        return base64.b64encode(out.getvalue()).decode()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.utils"].MultiprocessingSerializer = Serializer  # type: ignore[attr-defined]


@pytest.mark.usefixtures("sglang")
def test_changed_tensors_are_handed_over(engine: SGLangServer, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightvc.engines.sglang.BUCKET", 100)  # a call a tensor
    moved = adapter(engine, tensors=True, tp=2, load_format="my.loader")
    ways = []
    for step in range(3):
        version = host.commit(step)
        ways.append(moved.activate(host.update()).way)
        assert engine.digest() == of(step)
        assert engine.version == version.id
    assert ways == ["disk", "tensors", "tensors"]
    sent = [body for path, body in engine.calls if path == "/update_weights_from_tensor"]
    assert [body.get("weight_version") is not None for body in sent] == [False, True] * 2
    assert {len(body["serialized_named_tensors"]) for body in sent} == {2}
    assert {body["load_format"] for body in sent} == {"my.loader"}
    assert {body["flush_cache"] for body in sent} == {False}
    assert engine.taken[1:] == [["embed"], ["k"]] * 2


@pytest.mark.usefixtures("sglang")
def test_half_of_the_tensors_came(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine, tensors=True)
    first = host.commit(0)
    moved.activate(host.update())
    second = host.commit(1)
    engine.faults["/update_weights_from_tensor"] = "half"
    with pytest.raises(weightvc.EngineError, match="was loaded again") as caught:
        moved.activate(host.update())
    assert caught.value.serves == first.id
    assert engine.digest() == of(0)
    engine.faults.clear()
    assert moved.activate(host.update()).way == "tensors"
    assert (engine.digest(), engine.version) == (of(1), second.id)


@pytest.mark.usefixtures("sglang")
def test_a_version_of_other_shapes_comes_from_the_directory(engine: SGLangServer, host: Host) -> None:
    moved = adapter(engine, tensors=True)
    host.commit(0)
    moved.activate(host.update())
    grown = {**weights(0), "norm": torch.ones(2, 4)}
    host.commit(1, grown)
    pause = moved.activate(host.update())
    assert (pause.way, pause.why) == ("disk", "names, dtypes or shapes changed")
    assert engine.digest() == digest(grown)


@pytest.mark.usefixtures("sglang")
def test_another_process_can_read_what_is_handed_over() -> None:
    from weightvc.engines.sglang import _serializer

    value = torch.arange(1000, dtype=torch.int32)
    text = _serializer()([("a", value)])
    code = (
        "import base64, json, pickle, sys, torch\n"
        "(name, value), = pickle.loads(base64.b64decode(sys.stdin.read()))\n"
        "print(json.dumps([name, int(value.sum())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["a", int(value.sum())]


def test_a_failure_on_this_side_is_taken_back_too(engine: SGLangServer, host: Host) -> None:
    def broken(named: Sequence[tuple[str, torch.Tensor]]) -> str:
        raise MemoryError("no shared memory")

    moved = adapter(engine, tensors=True, serialize=broken)
    first = host.commit(0)
    moved.activate(host.update())
    host.commit(1)
    with pytest.raises(weightvc.EngineError, match="no shared memory") as caught:
        moved.activate(host.update())
    assert (caught.value.serves, engine.digest(), engine.paused) == (first.id, of(0), False)


def test_without_sglang_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(weightvc.Refused, match="install sglang"):
        SGLang("http://127.0.0.1:1", tensors=True)


def test_a_serializer_of_ones_own(engine: SGLangServer, host: Host) -> None:
    def mine(named: Sequence[tuple[str, torch.Tensor]]) -> str:
        return base64.b64encode(pickle.dumps(list(named))).decode()

    moved = adapter(engine, tensors=True, serialize=mine)
    for step in range(2):
        host.commit(step)
        moved.activate(host.update())
    assert engine.digest() == of(1)


def test_a_server_that_hangs_is_given_up(engine: SGLangServer) -> None:
    engine.faults["/model_info"] = "hang"
    with pytest.raises(weightvc.EngineError, match=r"no answer within 0\.2 s"):
        adapter(engine, timeout=0.2).serving()


def test_an_engine_that_takes_marks_and_keeps_none(
    engine: SGLangServer, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that was answered with 200 is no proof: half of a version must not generate for that."""
    do = engine.do

    def deaf(method: str, path: str, *rest: Any, **more: Any) -> tuple[int, Any]:
        return (200, {"success": True}) if path == "/update_weight_version" else do(method, path, *rest, **more)

    monkeypatch.setattr(engine, "do", deaf)
    moved = adapter(engine)
    host.commit(0)
    moved.activate(host.update())
    host.commit(1)
    engine.faults["/update_weights_from_disk"] = "half"
    with pytest.raises(weightvc.EngineError) as caught:
        moved.activate(host.update())
    assert caught.value.paused
    engine.faults = {"/flush_cache": "500"}
    with pytest.raises(weightvc.EngineError) as caught:
        moved.activate(host.update())
    assert caught.value.paused
    assert engine.paused
    engine.faults.clear()
    moved.activate(host.update())
    assert engine.digest() == of(1)
    assert not engine.paused


def test_an_answer_that_nests_without_an_end(engine: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "do", lambda *_, **__: (200, "[" * 200_000))
    assert adapter(engine).serving() is None
