"""Long chains, changing schemas, and reads that go wrong in the middle."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightvc
from weightvc import worktree
from weightvc.errors import Conflict, Corrupt, Unavailable
from weightvc.objects import frame, manifest
from weightvc.protocol import spool, swap


def exact(url: Any, ref: str, wanted: dict[str, Any]) -> None:
    """A cold reader without a cache gets exactly these arrays."""
    with weightvc.open(url, cache=None) as reader:
        got = reader.load(ref, framework="numpy")
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            assert got[name].tobytes() == array.tobytes()


def growing(step: int) -> dict[str, Any]:
    """Small tensors, to which one is added in the middle at each step."""
    numbers = [0, *range(500 - step, 500), 501]
    return {f"t{i:05d}": np.full(64, i, np.float16) for i in numbers}


def test_a_tensor_more_at_every_step(tmp_path: Path) -> None:
    with weightvc.init(tmp_path / "repository", cache=tmp_path / "cache") as repository:
        for step in range(200):
            repository.commit(growing(step), step=step)
        bases = [entry for entry in repository.entries() if any(e.source is None for e in entry.place.edges)]
        assert 10 < len(bases) < 40  # a base where the schema has changed eight times, and else none
    for step in (199, 150, 9, 8, 7):
        exact(tmp_path / "repository", f"main@{{step={step}}}", growing(step))


def test_names_that_change_places_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of 32 tensors, whose sources would lie in as many blocks of the version before, and so on.
    monkeypatch.setattr(manifest, "BLOCK", 64 << 10)
    count, order, made = 600, list(range(600)), []
    with weightvc.init(tmp_path / "repository", cache=tmp_path / "cache") as repository:
        for step in range(9):
            made.append({f"v{step}_{place:06d}": np.full(500, i, np.float32) for place, i in enumerate(order)})
            repository.commit(made[-1], step=step)
            order = [order[(place * 7 + 1) % count] for place in range(count)]
    for step in range(9):
        exact(tmp_path / "repository", f"main@{{step={step}}}", made[step])


def test_a_chain_that_outgrows_memory_is_spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "IN_MEMORY", 1000)
    monkeypatch.setattr(manifest, "INLINE", 20_000)
    rng = np.random.default_rng(0)
    w = rng.integers(0, 1 << 16, 1 << 17, np.uint16)
    with weightvc.init(tmp_path / "repository", cache=tmp_path / "cache") as repository:
        repository.commit({"w": w})
        for step in range(8):
            at = rng.choice(w.size, 40_000 >> step, replace=False)
            w[at] ^= 1  # large patches in packs, small ones in manifests
            repository.commit({"w": w})
        assert {bool(entry.place.packs) for entry in repository.entries(n=8)} == {True, False}
    exact(tmp_path / "repository", "main", {"w": w})
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_file()]


def test_many_references_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LONE", 8)
    tensors = {f"w{i:05d}": np.full(8, 7, np.uint8) for i in range(3000)}
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        repository.commit(tensors)
        assert manifest.REF in repository.source().manifest.base.codecs
    exact(tmp_path / "repository", "main", tensors)


def test_tensors_that_change_during_a_commit_make_a_version_that_reads(tmp_path: Path) -> None:
    w = np.random.default_rng(0).integers(0, 1 << 16, 8 << 20, np.uint16)
    with weightvc.init(tmp_path / "repository", cache=tmp_path / "cache") as repository:
        repository.commit({"w": w})
        done = threading.Event()

        def train() -> None:
            rng = np.random.default_rng(1)
            while not done.is_set():
                w[rng.integers(0, w.size, 1000)] += 1

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            versions = [repository.commit({"w": w}) for _ in range(3)]
        finally:
            done.set()
            trainer.join()
        for version in versions:
            with weightvc.open(tmp_path / "repository", cache=None) as reader:
                assert reader.load(version.id)["w"].shape == w.shape


def test_a_parent_that_cannot_be_read_is_told_and_the_branch_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(0, 1 << 16, 1 << 16, np.uint16) for name in ("a", "b")}
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        with monkeypatch.context() as small:
            small.setattr(manifest, "INLINE", 1000)
            repository.commit(tensors)
        (pack,) = (tmp_path / "repository/pack").iterdir()
        pack.write_bytes(pack.read_bytes()[:-100])
        tensors = {name: w ^ 1 for name, w in tensors.items()}
        with pytest.warns(weightvc.WeightvcWarning, match="could not be read"):
            repository.commit(tensors)
        with pytest.raises(Corrupt, match="pack/"):
            repository.load("main~1")
    exact(tmp_path / "repository", "main", tensors)


def test_a_segment_that_rots_stops_no_writer(tmp_path: Path) -> None:
    url = tmp_path / "repository"
    with weightvc.init(url, cache=None) as repository:
        for step in range(75):
            repository.commit({"w": np.full(4, step, np.float16)}, base=True)
        (segment,) = repository.refresh().segments
    (url / segment.key).write_bytes(b"")
    with weightvc.open(url, cache=None) as repository:
        for step in range(80):
            repository.commit({"w": np.full(4, step, np.float16)}, step=step)
        assert repository.refresh().segments[0].key == segment.key
        assert len(repository.refresh().segments) == 2
        assert [version.step for version in repository.log(n=80)] == list(range(80))[::-1]
        with pytest.raises(Corrupt, match=segment.key):
            list(repository.log())


@pytest.mark.parametrize("damage", ["touched", "truncated", "unreadable"])
def test_a_directory_that_is_damaged_while_it_is_used_heals(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, held = tmp_path / "source", tmp_path / "held"
    source.mkdir()
    w = np.arange(3 << 20, dtype=np.float32)
    from safetensors.numpy import save_file

    repository = weightvc.init(tmp_path / "repository", cache=None)
    for step in range(2):
        w[5] = step
        save_file({"w": w}, source / "model.safetensors")
        repository.commit(source)
    repository.checkout("main~1", held)
    really, pread = worktree._open, os.pread

    def opened(target: Path) -> Any:
        found = really(target)
        file = target / "model.safetensors"
        if damage == "touched":
            os.utime(file)
        elif damage == "truncated":
            os.truncate(file, 1000)
        else:

            def failing(descriptor: int, size: int, at: int) -> bytes:
                if os.readlink(f"/proc/self/fd/{descriptor}") == str(file) and at > 4096:
                    raise OSError(5, "Input/output error")
                return pread(descriptor, size, at)

            monkeypatch.setattr(os, "pread", failing)
        return found

    monkeypatch.setattr(worktree, "_open", opened)
    repository.checkout("main", held, replace=True)
    assert (held / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> weightvc.Repository:
    """A repository of two versions whose bytes all lie in packs."""
    monkeypatch.setattr(manifest, "INLINE", 0)
    repository = weightvc.init(tmp_path / "repository", cache=None)
    w = np.random.default_rng(0).integers(0, 1 << 16, 1 << 16, np.uint16)
    repository.commit({"w": w})
    repository.commit({"w": w ^ 1})
    return repository


def test_a_network_that_fails_costs_no_cached_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path, monkeypatch)
    reader = weightvc.open(tmp_path / "repository", cache=tmp_path / "cache")
    reader.load("main~1")
    get = reader.store.get
    monkeypatch.setattr(reader.store, "get", lambda key, **k: fail() if key.startswith("pack/") else get(key, **k))

    def fail() -> Any:
        raise Unavailable("timed out")

    with pytest.raises(Unavailable):
        reader.load("main")
    assert len(list((tmp_path / "cache/trees").iterdir())) == 1
    monkeypatch.undo()
    before = reader.stats.bytes_read
    reader.load("main")
    assert reader.stats.bytes_read - before < 64 << 10  # the patch, not the base


@pytest.mark.parametrize("what", ["rows", "names", "all"])
def test_a_range_that_comes_damaged_is_read_again(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path, monkeypatch)
    reader = weightvc.open(tmp_path / "repository", cache=None)
    get, times = reader.store.get, iter([True])

    def damaged(key: str, **k: Any) -> Any:
        got = get(key, **k)
        if got is not None and key.startswith("pack/") and next(times, False):
            data = bytearray(got.data)
            data[len(data) // 2] ^= 1
            got = replace(got, data=bytes(data))
        return got

    monkeypatch.setattr(reader.store, "get", damaged)
    if what == "rows":
        assert len(reader.tensor("main", "w", rows=slice(0, 10))) == 10
    else:
        assert reader.load("main", ["w"] if what == "names" else None)["w"].shape == (1 << 16,)
    assert next(times, None) is None


def test_edges_that_go_round_in_a_circle_are_corrupt(tmp_path: Path) -> None:
    url = tmp_path / "repository"
    with weightvc.init(url, cache=None) as repository:
        ids = [repository.commit({"w": np.full(4, step, np.float16)}).id for step in range(2)]
    head, _ = frame.decode(frame.ROOT, (url / "root").read_bytes(), "root")
    for entry, other in zip(head["tail"], reversed(ids), strict=True):
        entry["edges"] = [[other, 10, 1]]
    (url / "root").write_bytes(frame.encode(frame.ROOT, head))
    with weightvc.open(url, cache=None) as reader, pytest.raises(Corrupt, match="circle"):
        reader.load()


def test_a_repository_made_anew_during_a_commit_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, w = tmp_path / "repository", np.zeros(4, np.float16)
    repository = weightvc.init(url, cache=None)
    repository.commit({"w": w})
    change = swap.change

    def late(*args: Any) -> Any:
        monkeypatch.setattr(swap, "change", change)
        shutil.rmtree(url)
        with weightvc.init(url, cache=None) as other:
            for step in range(3):
                other.commit({"w": w + step})
        return change(*args)

    monkeypatch.setattr(swap, "change", late)
    with pytest.raises(Conflict, match="another repository"):
        repository.commit({"w": w + 9}, branch="new")
    with weightvc.open(url, cache=None) as reader:
        assert list(reader.branches()) == ["main"]
