"""Following a branch, with tensors and with directories."""

import asyncio
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightvc
from tests.kit import faults
from tests.kit.stub import Call, Status, Stub
from weightvc.client import waits
from weightvc.protocol import workspace
from weightvc.repository import Repository
from weightvc.targets import Directory, Slots

Made = Callable[..., Repository]


def weights(step: int) -> dict[str, np.ndarray]:
    out = np.arange(5000, dtype=np.float32)
    out[step] = -1
    return {"w": out}


def commit(repository: Repository, step: int) -> weightvc.Version:
    return repository.commit(weights(step), step=step)


def test_the_newest_comes_and_those_between_do_not(again: Made) -> None:
    writer, target = again(), {"w": np.zeros(5000, np.float32)}
    client = weightvc.Client(again(), into=target)
    seen = []
    commit(writer, 0)
    for update in client.follow(every=0.01):
        assert update.stage().staged
        update.activate()
        seen.append((update.version.step, update.lag))
        assert np.array_equal(target["w"], weights(update.version.step or 0)["w"])
        if len(seen) == 1:
            for step in (1, 2, 3):
                commit(writer, step)
        elif len(seen) == 2:
            writer.revert("main~3")
        else:
            break
    assert seen == [(0, None), (3, 3), (0, 1)]


def test_an_update_that_is_let_go_comes_again_and_lag_is_allowed(again: Made) -> None:
    writer, target = again(), {"w": np.zeros(5000, np.float32)}
    client = weightvc.Client(again(), into=target)
    first = commit(writer, 0)
    updates = client.follow(every=0.01, max_lag=2)
    assert next(updates).version.id == first.id
    again_offered = next(updates)
    assert again_offered.version.id == first.id
    again_offered.activate()
    commit(writer, 1)
    threading.Timer(0.2, commit, (writer, 2)).start()
    late = next(updates)
    assert (late.version.step, late.lag) == (2, 2)


def test_a_branch_that_was_reset_is_followed_back(again: Made) -> None:
    writer, target = again(), {"w": np.zeros(5000, np.float32)}
    versions = [commit(writer, step) for step in range(3)]
    client = weightvc.Client(again(), into=target)
    client.pull("main")
    writer.reset("main", versions[0].id, rewind=True)
    update = next(client.follow(every=0.01))
    assert (update.version.id, update.lag) == (versions[0].id, None)
    update.activate()
    assert np.array_equal(target["w"], weights(0)["w"])


def test_watch_moves_the_target_and_wakes_who_waits(again: Made) -> None:
    writer, target = again(), {"w": np.zeros(5000, np.float32)}
    client = weightvc.Client(again(), into=target)
    with client.watch(every=0.01):
        assert not client.wait_for("main@{step=1}", timeout=0.05)
        versions = [commit(writer, step) for step in range(2)]
        assert client.wait_for(versions[1], timeout=30)
    assert np.array_equal(target["w"], weights(1)["w"])
    assert client.at_least(versions[0])
    later = commit(writer, 2)
    assert not client.at_least(later)


def test_watch_goes_on_after_a_failure_and_tells_what_ended_it(again: Made) -> None:
    writer = again()
    commit(writer, 0)
    client = weightvc.Client(again(), into={"w": np.zeros(5000, np.float32)})
    calls = []

    def fail(update: weightvc.Update) -> None:
        calls.append(update)
        if len(calls) == 1:
            raise weightvc.Unavailable("the network is away")
        raise ValueError("a bug")

    watch = client.watch("main", fail, every=0.01)
    end = time.monotonic() + 30
    while watch.error is None and time.monotonic() < end:
        time.sleep(0.01)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="a bug"):
        watch.stop()


def test_watch_ends_where_it_has_no_rights(again: Made) -> None:
    commit(again(), 0)

    def deny(update: weightvc.Update) -> None:
        raise weightvc.AccessDenied("no")

    watch = weightvc.Client(again(), into={"w": np.zeros(5000, np.float32)}).watch("main", deny, every=0.01)
    watch._thread.join(30)
    with pytest.raises(weightvc.AccessDenied):
        watch.stop()


def test_only_a_branch_is_followed(again: Made) -> None:
    writer = again()
    version = commit(writer, 0)
    writer.tag("v1", "main")
    client = weightvc.Client(again(), into={"w": np.zeros(5000, np.float32)})
    for ref in ("v1", version.id, version.short, "main~0", "main@{step=0}"):
        with pytest.raises(weightvc.BadName, match="only a branch can be followed"):
            next(client.follow(ref, every=0.01))
    for ref in ("main", "HEAD", "@"):
        assert next(client.follow(ref, every=0.01)).version == version


def test_a_directory_is_replaced_as_a_whole(again: Made, tmp_path: Path) -> None:
    writer = again()
    versions = [commit(writer, step) for step in range(3)]
    place = tmp_path / "served"
    client = weightvc.Client(again(), into=place)
    assert isinstance(client.target, Directory)
    client.pull(versions[0])
    update = client.stage(versions[2])
    assert writer.verify(place, versions[0]).ok
    update.activate()
    assert writer.verify(place, versions[2]).ok
    assert client.verify() == []
    assert sorted(os.listdir(tmp_path)) == sorted({"served", "repository"} & set(os.listdir(tmp_path)) | {"served"})
    held = client.current()
    assert held is not None
    assert held.id == versions[2].id
    assert writer.status(place).changed == []
    (place / "mine").write_text("x")
    with pytest.raises(weightvc.Refused, match="mine"):
        client.pull(versions[1])
    assert writer.verify(place, versions[2]).foreign == ["mine"]


def test_slots_keep_the_version_in_the_path(again: Made, tmp_path: Path) -> None:
    writer = again()
    versions = [commit(writer, step) for step in range(5)]
    slots = Slots(tmp_path / "served")
    client = weightvc.Client(again(), into=slots)
    for step in (0, 1, 2, 3):
        update = client.pull(versions[step])
        assert update.path == str(slots.path / versions[step].short)
        assert os.readlink(slots.path / "current") == versions[step].short
        assert writer.verify(slots.path / "current", versions[step]).ok
        assert client.verify() == []
    kept = {p.name for p in slots.path.iterdir()} - {"current"}
    assert versions[3].short in kept
    assert versions[2].short in kept
    assert len(kept) <= 3
    staged = client.stage(versions[4])
    assert slots.holds == versions[3].id
    staged.activate()
    assert slots.holds == versions[4].id
    # Back into a slot that is still there: read and not built, unless it is not what it was.
    there = (slots.path / versions[3].short).stat().st_ino
    client.pull(versions[3])
    assert (slots.path / versions[3].short).stat().st_ino == there
    assert writer.verify(slots.path / "current", versions[3]).ok
    client.pull(versions[4])
    with (slots.path / versions[3].short / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    client.pull(versions[3])
    assert (slots.path / versions[3].short).stat().st_ino != there
    assert writer.verify(slots.path / "current", versions[3]).ok


def test_slots_that_killed_processes_left_half_built_go(again: Made, tmp_path: Path) -> None:
    writer = again()
    versions = [commit(writer, step) for step in range(2)]
    slots = Slots(tmp_path / "served")
    client = weightvc.Client(again(), into=slots)
    client.pull(versions[0])
    dead = slots.path / f"{workspace.prefix(slots.path / versions[1].short)}0"
    (dead / "new").mkdir(parents=True)
    (dead / "new" / "model.safetensors").write_bytes(b"half")
    with workspace.Workspace(slots.path / ("0" * 12)) as living:
        client.pull(commit(writer, 2))
        assert living.new.is_dir()
    assert not any(".weightvc-" in path.name for path in slots.path.iterdir())


def test_a_slot_is_removed_as_a_whole_or_not_at_all(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def begun(path: Path, **_: object) -> None:
        (found,) = Path(path).rglob(".weightvc")
        found.unlink()
        raise Killed

    versions = [commit(repository, step) for step in range(5)]
    place = tmp_path / "served"
    client = weightvc.Client(repository, into=Slots(place))
    for version in versions[:3]:
        client.pull(version)
    with monkeypatch.context() as patched:
        patched.setattr("weightvc.protocol.workspace.shutil.rmtree", begun)
        with pytest.raises(Killed):
            client.pull(versions[3])
    for slot in place.glob("?" * 12):
        assert repository.verify(slot, slot.name).ok
    client.pull(versions[0])
    assert client.verify() == []
    client.pull(versions[4])
    assert not [path for path in place.iterdir() if path.name.startswith(f".{versions[0].short}")]


def test_half_a_slot_is_built_again(repository: Repository, tmp_path: Path) -> None:
    versions = [commit(repository, step) for step in range(2)]
    client = weightvc.Client(repository, into=Slots(tmp_path / "served"))
    for version in versions:
        client.pull(version)
    (tmp_path / "served" / versions[0].short / ".weightvc").unlink()
    client.pull(versions[0])
    assert client.verify() == []


def test_the_next_slot_is_made_from_the_one_in_use(again: Made, tmp_path: Path) -> None:
    writer = again()
    versions = [commit(writer, step) for step in range(3)]
    client = weightvc.Client(again(), into=Slots(tmp_path / "served"))
    client.pull(versions[1])
    assert client.pull(versions[2]).timings.requests <= 2


@pytest.mark.parametrize("kind", [Directory, Slots])
def test_what_others_were_staged_over_is_refused(
    again: Made, tmp_path: Path, kind: type[Directory] | type[Slots]
) -> None:
    writer = again()
    versions = [commit(writer, step) for step in range(5)]
    target = kind(tmp_path / "served")
    client = weightvc.Client(again(), into=target)
    client.pull(versions[0])
    first, *_, last = [client.stage(version) for version in versions[1:]]
    with pytest.raises(weightvc.Conflict, match="stage it again"):
        first.activate()
    assert client.current() == versions[0]
    assert client.verify() == []
    last.activate()
    assert client.current() == versions[4]
    first.stage().activate()
    assert client.current() == versions[1]
    assert client.verify() == []


def test_bad_arguments(again: Made, tmp_path: Path) -> None:
    client = weightvc.Client(again())
    for call in (
        lambda: client.stage("main"),
        lambda: client.verify(),
        lambda: next(client.follow(every=0)),
        lambda: next(client.follow(every="1")),  # type: ignore[arg-type]
        lambda: next(client.follow(every=float("nan"))),
        lambda: next(client.follow(max_lag=0)),
        lambda: next(client.follow(max_lag=None)),  # type: ignore[arg-type]
        lambda: next(client.follow(None)),  # type: ignore[arg-type]
        lambda: next(client.follow("main~1")),
        lambda: client.wait_for("main", timeout="soon"),  # type: ignore[arg-type]
        lambda: weightvc.Client(again(), into=tmp_path, names={}),
        lambda: weightvc.Client(again(), into=3),
    ):
        with pytest.raises(weightvc.Refused):
            call()
    with pytest.raises(weightvc.NotFound):
        weightvc.Client(again(), into=tmp_path / "x").pull("main")
    assert not (tmp_path / "x").exists()


def test_the_parts_of_a_pull_are_told(again: Made, tmp_path: Path) -> None:
    writer = again()
    for step in range(2):
        commit(writer, step)
    for into in ({"w": np.zeros(5000, np.float32)}, tmp_path / "served", Slots(tmp_path / "slots")):
        client = weightvc.Client(again(), into=into)
        for ref in ("main~1", "main"):
            timings = client.pull(ref).timings
            parts = (timings.resolve, timings.fetch, timings.decode, timings.verify, timings.apply)
            assert all(part > 0 for part in parts)
            assert all(part <= timings.stage + timings.activate for part in parts[1:])
            assert timings.age > 0
            assert timings.nbytes > 0
            assert client.timings is timings


def test_a_store_that_is_away_is_waited_for(stub: Stub) -> None:
    place = stub.place()
    writer = weightvc.init(place.url, cache=None, **place.options)
    client = weightvc.Client(place.url, cache=None, into={"w": np.zeros(5000, np.float32)}, **place.options)
    version = commit(writer, 0)
    client.pull()
    stub.fault(Status(503), operation="GetObject", key="root", times=20)
    assert client.wait_for(version, timeout=60)
    stub.clear()
    stub.fault(Status(503), operation="GetObject", key="root", times=None)
    with pytest.raises(weightvc.Unavailable):
        client.wait_for("main", timeout=0.1)
    stub.clear()
    stub.fault(Status(403, "AccessDenied"), operation="GetObject", key="root", times=None)
    with pytest.raises(weightvc.AccessDenied):
        client.wait_for("main", timeout=60)


def test_who_waits_on_a_store_that_hangs_does_not_hold_up_who_moves_the_target(stub: Stub) -> None:
    place = stub.place()
    writer = weightvc.init(place.url, cache=None, **place.options)
    commit(writer, 0)
    client = weightvc.Client(place.url, cache=None, into={"w": np.zeros(5000, np.float32)}, **place.options)
    client.pull()
    staged = client.stage(commit(writer, 1))
    asked, go_on = threading.Event(), threading.Event()
    stub.fault(Call(lambda: (asked.set(), go_on.wait(60))), operation="GetObject", key="root")
    found = []
    waiting = threading.Thread(target=lambda: found.append(client.wait_for("main", timeout=60)))
    waiting.start()
    assert asked.wait(60)
    staged.activate()
    go_on.set()
    waiting.join()
    assert found == [True]


def test_a_forked_child_is_told_to_make_its_own(tmp_path: Path) -> None:
    writer = weightvc.init(tmp_path / "repository", cache=None)
    versions = [commit(writer, step) for step in range(2)]
    client = weightvc.Client(writer.url, cache=None, into={"w": np.zeros(5000, np.float32)})
    client.pull(versions[0])
    staged = client.stage(versions[1])

    def work() -> list[str]:
        said = []
        client._lock.acquire()  # as a thread might have held it, that the child has not
        calls = (client.pull, client.current, client.verify, staged.activate, lambda: client.at_least("main"))
        for call in (*calls, lambda: next(client.follow())):
            with pytest.raises(weightvc.Refused) as refused:
                call()
            said.append(str(refused.value))
        target = {"w": np.zeros(5000, np.float32)}
        weightvc.Client(writer.url, cache=None, into=target).pull()
        assert np.array_equal(target["w"], weights(1)["w"])
        return said

    result = tmp_path / "result"
    assert faults.wait(faults.fork(work, result)) == 0
    assert result.read_text().count("make another one here") == 6
    staged.activate()
    assert client.current() == versions[1]


def test_coroutines_use_it(tmp_path: Path) -> None:
    writer = weightvc.init(tmp_path / "repository", cache=None)
    versions = [commit(writer, step) for step in range(4)]
    target = {"w": np.zeros(5000, np.float32)}
    client = weightvc.Client(writer.url, cache=None, into=target)

    async def work() -> None:
        waiting = asyncio.create_task(asyncio.to_thread(client.wait_for, versions[3], 60))
        await asyncio.gather(*(asyncio.to_thread(client.pull, version) for version in versions[:3]))
        held = await asyncio.to_thread(client.current)
        assert held in versions[:3]
        assert await asyncio.to_thread(client.verify) == []
        update = await asyncio.to_thread(client.stage, "main")
        await asyncio.to_thread(update.activate)
        assert await waiting

    asyncio.run(work())
    assert np.array_equal(target["w"], weights(3)["w"])


def test_a_slot_that_somebody_removed_is_built_again(repository: Repository, tmp_path: Path) -> None:
    version = commit(repository, 0)
    client = weightvc.Client(repository, into=Slots(tmp_path / "served"))
    client.pull(version)
    shutil.rmtree(tmp_path / "served" / version.short)
    assert client.current() is None
    client.pull(version)
    assert client.verify() == []


@pytest.mark.parametrize("used", [True, False])
def test_what_an_engine_leaves_in_a_slot_is_in_nobodys_way(
    repository: Repository, tmp_path: Path, used: bool
) -> None:
    """Some keep an index of the weights beside them."""
    versions = [commit(repository, step) for step in range(2)]
    client = weightvc.Client(repository, into=Slots(tmp_path / "served"))
    client.pull(versions[0])
    slot = tmp_path / "served" / versions[0].short
    (slot / "index.cache").write_text("x")
    if not used:
        client.pull(versions[1])
    client.pull(versions[0])
    assert repository.verify(slot, versions[0]).foreign == ["index.cache"]
    client.pull(versions[1])
    (slot / "model.safetensors").write_bytes(b"x")
    client.pull(versions[0])
    assert repository.verify(slot, versions[0]).tensors == []


@pytest.mark.parametrize("spelling", ["./{}", "{}/", "{parent}/{}"])
def test_a_link_that_an_operator_turned_names_the_slot_in_use(
    repository: Repository, tmp_path: Path, spelling: str
) -> None:
    versions = [commit(repository, step) for step in range(4)]
    slots = Slots(tmp_path / "served")
    client = weightvc.Client(repository, into=slots)
    for version in versions[:2]:
        client.pull(version)
    link = slots.path / "current"
    link.unlink()
    link.symlink_to(spelling.format(versions[0].short, parent=slots.path))
    assert slots.holds == versions[0].id
    update = client.stage(versions[2])
    assert repository.verify(link, versions[0]).ok
    update.activate()
    assert slots.holds == versions[2].id


def test_what_stands_where_the_link_should_be_is_named(repository: Repository, tmp_path: Path) -> None:
    versions = [commit(repository, step) for step in range(2)]
    client = weightvc.Client(repository, into=Slots(tmp_path / "served"))
    client.pull(versions[0])
    link = tmp_path / "served" / "current"
    link.unlink()
    link.mkdir()
    before = sorted(os.listdir(link.parent))
    with pytest.raises(weightvc.Refused, match="served/current is no link"):
        client.pull(versions[1])
    assert sorted(os.listdir(link.parent)) == before


def test_watch_may_be_stopped_by_what_it_calls(repository: Repository) -> None:
    commit(repository, 0)
    client = weightvc.Client(repository, into={"w": np.zeros(5000, np.float32)})
    watches: list[weightvc.Watch] = []
    ready = threading.Event()

    def last(update: weightvc.Update) -> None:
        update.activate()
        ready.wait()
        watches[0].stop()

    watches.append(client.watch("main", last, every=0.01))
    ready.set()
    watches[0].stop()
    assert client.at_least("main")


@pytest.mark.parametrize("error", [weightvc.Expired, weightvc.Corrupt])
def test_watch_goes_on_where_a_version_cannot_be_had(repository: Repository, error: type[Exception]) -> None:
    """The branch's head may be another one by the next look."""
    commit(repository, 0)
    client = weightvc.Client(repository, into={"w": np.zeros(5000, np.float32)})
    calls: list[weightvc.Update] = []

    def fail_once(update: weightvc.Update) -> None:
        calls.append(update)
        if len(calls) == 1:
            raise error("this one")
        update.activate()

    with client.watch("main", fail_once, every=0.01):
        assert client.wait_for("main", timeout=30)
    assert len(calls) == 2


def test_a_version_of_another_repository_is_none_that_was_asked_for(repository: Repository, tmp_path: Path) -> None:
    other = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
    commit(other, 1)
    slots = Slots(tmp_path / "served")
    weightvc.Client(other, into=slots).pull("main")
    commit(repository, 0)
    client = weightvc.Client(repository, into=slots)
    assert not client.at_least("main")
    client.pull("main")
    assert client.at_least("main")


@pytest.mark.parametrize("lost", [".weightvc", "model.safetensors"])
def test_the_slot_in_use_is_mended_by_the_next_pull(repository: Repository, tmp_path: Path, lost: str) -> None:
    version = commit(repository, 0)
    client = weightvc.Client(repository, into=Slots(tmp_path / "served"))
    client.pull(version)
    (tmp_path / "served" / "current" / lost).unlink()
    client.pull(version)
    assert client.verify() == []
    assert client.current() == version


def test_what_fails_again_and_again_is_tried_more_and_more_rarely() -> None:
    assert [waits(1, failures) for failures in (0, 1, 2, 3, 6, 10**6)] == [1, 1, 2, 4, 30, 30]
    assert [waits(60, failures) for failures in (0, 1, 9)] == [60, 60, 60]
