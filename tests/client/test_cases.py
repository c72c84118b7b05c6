"""What has gone wrong for others who pull weights, against the client: all kinds of target, disk and a server."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightvc
from tests.kit import faults
from tests.kit.stub import Hang, Stub
from tests.kit.weights import tiny_format
from weightvc.protocol import checkout
from weightvc.targets import Directory, Slots

Weights = dict[str, np.ndarray[Any, Any]]
SIZE = 1_000


def weights(step: int) -> Weights:
    """Every step changes all of a and some of b."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 16, SIZE).astype(np.uint16), rng.integers(0, 1 << 16, SIZE).astype(np.uint16)
    b[step] ^= 1
    return {"a": a + np.uint16(step), "b": b}


@pytest.fixture
def remote(stub: Stub) -> tuple[str, dict[str, Any]]:
    """A place in an S3 server that misbehaves on demand."""
    place = stub.place()
    return place.url, place.options


def published(remote: tuple[str, dict[str, Any]], steps: int, **options: Any) -> list[weightvc.Version]:
    url, more = remote
    with weightvc.init(url, cache=None, **more) as writer:
        return [writer.commit(weights(step), step=step, **options) for step in range(steps)]


def test_eight_engines_of_a_host_pull_once(stub: Stub, remote: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """Each pulls a version from nothing, and the next one; everything but the root is fetched once."""
    url, options = remote
    with tiny_format():
        versions = published(remote, 2)
        stub.fault(Hang(0.02), operation="GetObject", times=None)
        weightvc.Client(url, cache=None, into=weights(7), **options).pull()  # what is imported here is so in children
        before = len(stub.log)

        def work() -> None:
            target = {name: np.zeros_like(value) for name, value in weights(0).items()}
            client = weightvc.Client(url, cache=tmp_path / "cache", into=target, **options)
            for step, version in enumerate(versions):
                client.pull(version)
                assert all(np.array_equal(target[name], value) for name, value in weights(step).items())

        children = [faults.fork(work, tmp_path / f"result{i}") for i in range(8)]
        assert [faults.wait(child) for child in children] == [0] * 8
    asked = [request.key for request in stub.log[before:] if not request.key.endswith("/root")]
    assert sum("/pack/" in key for key in asked) > 4
    assert len(asked) == len(set(asked))


# Directories: killed, or the disk full, at any moment


def read(path: Path) -> Weights:
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def history(tmp_path: Path) -> tuple[str, list[weightvc.Version]]:
    url = str(tmp_path / "repository")
    return url, published((url, {}), 2)


@pytest.mark.parametrize("fault", [faults.die, faults.full_disk])
@pytest.mark.parametrize("way", ["swap", "two renames", "slots"])
def test_at_any_file_operation_it_is_the_old_version_or_the_new(
    history: tuple[str, list[weightvc.Version]],
    tmp_path: Path,
    way: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases 21 and 29, and what was held is usable all the time; then the next pull gets the new one."""
    url, versions = history
    kind: Any = Slots if way == "slots" else Directory
    full = fault is faults.full_disk
    if way == "two renames":
        monkeypatch.setattr(checkout, "_rename_exchange", lambda one, other: False)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # nothing here tells whether it was done, and it is slow
    k, ends = 0, set()
    while True:
        place = tmp_path / f"{k}" / "served"
        weightvc.Client(url, cache=None, into=kind(place)).pull(versions[0])
        there = {path.name for path in place.parent.iterdir()}

        def work(place: Path = place, k: int = k) -> str:
            client = weightvc.Client(url, cache=None, into=kind(place))
            faults.die_at_file_operation(k, fault)
            try:
                client.pull(versions[1])
            except weightvc.Unavailable as error:
                return "full" if "make space" in str(error) else str(error)
            return "done"

        status = faults.wait(faults.fork(work, tmp_path / "result"))
        assert status == 0 if full else status in (0, -9)
        ended = "killed" if status else json.loads((tmp_path / "result").read_text())
        assert ended in ("killed", "full", "done")
        client = weightvc.Client(url, cache=None, into=kind(place))
        held = client.current()
        assert held in versions
        current = place if kind is Directory else place / "current"
        step = versions.index(held)
        assert same(read(current), weights(step))
        assert client.verify() == []
        if ended != "killed":
            # Nothing is left lying about. (What was staged whole may be, and is used.)
            assert {path.name for path in place.parent.iterdir()} - {".served.next"} == there
            assert not any(".weightvc-" in path.name for path in place.iterdir())
        ends.add(step)
        client.pull(versions[1])
        assert same(read(current), weights(1))
        assert client.verify() == []
        assert {path.name for path in place.parent.iterdir()} == there
        assert not any(".weightvc-" in path.name for path in place.iterdir())
        if ended == "done":
            break
        k += 1
    assert k >= 8
    assert ends == {0, 1}
