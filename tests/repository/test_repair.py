"""Repair puts back what was lost, from a cache, a copy, a checkout or another way, and invents nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightvc
from tests.kit.faults import Faulty, Killed
from tests.kit.weights import Bits, files_below, held, tiny_format, write_shards
from tests.repository.test_fsck import (
    DAMAGE,
    WEIGHTS,
    add_way,
    damaged,
    flip,
    fresh,
    listed,
    numbers,
    reads,
    spoil,
    weights,
)
from weightvc.errors import BadFile, Corrupt, KeyNotFound, WeightvcError
from weightvc.objects import frame, key
from weightvc.repository import Repository
from weightvc.stores import Store, open_store

twice = pytest.mark.parametrize("damage", [None, flip], ids=["missing", "one bit flipped"])


def copy_of(store: Store, target: Path) -> Path:
    """All objects of a repository in a directory."""
    for one in store.list():
        path = target / one.key
        path.parent.mkdir(parents=True, exist_ok=True)
        got = store.get(one.key)
        assert got is not None
        path.write_bytes(got.data)
    return target


def whole(url: str, **options) -> None:
    report = fresh(url, **options).fsck(read_data=1)
    assert report.ok, report.damages


@pytest.fixture
def store(memory_url: str, tmp_path: Path) -> Iterator[Store]:
    """Nine versions in tiny packs, a segment, a tag, and files."""
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        for i in range(9):
            repository.commit(Bits(weights(i)), step=i)
            if i == 0:
                repository.tag("v1")
        write_shards(tmp_path / "in", WEIGHTS, 2)
        (tmp_path / "in" / "tokenizer.json").write_bytes(random.Random(1).randbytes(100_000))
        repository.commit(tmp_path / "in", branch="files")
        yield open_store(memory_url)


@pytest.fixture
def idents(store: Store) -> list[str]:
    return [version.id for version in fresh(store.url).log("main")][::-1]


KINDS = ["segment", "page", "manifest", "pack", "schema", "layout", "file"]


@damaged
@pytest.mark.parametrize("kind", KINDS)
def test_from_a_copy(store, idents, damage, kind, tmp_path):
    """The bytes are put back under the key that holds their digest: nothing else changes, the root neither."""
    copy = copy_of(store, tmp_path / "copy")
    before = {one.key: store.get(one.key).data for one in store.list()}
    name = listed(store, kind)[0]
    if kind == "segment":
        name = fresh(store.url).refresh().segments[0].key
    spoil(store, name, damage)
    report = fresh(store.url).fsck(read_data=1, repair=True, sources=[copy])
    assert report.ok
    assert [line.partition(" ")[0] for line in report.repaired] == [name]
    assert {one.key: store.get(one.key).data for one in store.list()} == before
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)


def test_everything_at_once_from_a_copy(store, idents, tmp_path):
    copy = copy_of(store, tmp_path / "copy")
    names = [one.key for one in store.list() if "/" in one.key]
    for name in names:
        spoil(store, name, None)
    report = fresh(store.url).fsck(repair=True, sources=[copy])
    assert report.ok
    whole(store.url)
    assert reads(store.url, idents) == list(range(9))


def test_a_copy_that_is_bad_is_of_no_use(store, idents, tmp_path):
    copy = copy_of(store, tmp_path / "copy")
    name = listed(store, "manifest")[4]
    spoil(store, name, flip)
    (copy / name).write_bytes(flip((copy / name).read_bytes()))
    report = fresh(store.url).fsck(read_data=1, repair=True, sources=[copy])
    assert [found.key for found in report.damages] == [name]
    assert report.repaired == []
    assert name in report.needed[0]
    assert idents[4][:12] in report.needed[0]
    assert (copy / name).exists()


SHARED = ["manifest", "schema", "layout", "file", "segment", "page"]


@pytest.mark.parametrize("kind", SHARED)
def test_from_the_cache_of_each_store(place, kind, tmp_path):
    from_the_cache(*place, DAMAGE["empty"], kind, tmp_path)


@damaged
@pytest.mark.parametrize("kind", SHARED)
def test_from_the_cache(memory_url, damage, kind, tmp_path):
    from_the_cache(memory_url, {}, damage, kind, tmp_path)


def from_the_cache(url, options, damage, kind, tmp_path):
    """A remote object is damaged; the same weights are committed again; a fresh reader cannot read; repair puts the
    object back from what the writer still has; and nobody's cache has anything bad."""
    cache = tmp_path / "cache"
    with tiny_format():
        repository = weightvc.init(url, cache=cache, **options)
        write_shards(tmp_path / "in", WEIGHTS, 2)
        (tmp_path / "in" / "tokenizer.json").write_bytes(random.Random(1).randbytes(100_000))
        first = repository.commit(tmp_path / "in")
        repository.tag("v1")
        for i in range(5):
            repository.commit(Bits(weights(i)), step=i)
        list(repository.log())
        name = listed(repository.store, kind)[0]
        if kind == "segment":
            name = repository.refresh().segments[-1].key
        spoil(repository.store, name, damage)
        again = repository.commit(Bits(weights(4)), step=5)
        readers = tmp_path / "readers"
        try:
            weightvc.open(url, cache=readers, **options).checkout(first.id, tmp_path / "out")
        except (Corrupt, KeyNotFound):
            pass
        else:
            assert kind == "page"
        report = weightvc.open(url, cache=readers, **options).fsck(read_data=1)
        assert [found.key for found in report.damages] == [name]
        mended = weightvc.open(url, cache=cache, **options).fsck(read_data=1, repair=True)
        assert mended.ok
        assert [line.partition(" ")[0] for line in mended.repaired] == [name]
        whole(url, **options)
        for held_by in (readers, cache, None):
            reader = weightvc.open(url, cache=held_by, **options)
            assert held(reader, again.id) == weights(4)
            reader.checkout(first.id, tmp_path / f"out-{held_by and held_by.name}")
            assert files_below(tmp_path / f"out-{held_by and held_by.name}") == files_below(tmp_path / "in")
        for path in (tmp_path / "readers" / "objects").rglob("*"):
            if path.is_file():
                key.check(str(path.relative_to(tmp_path / "readers" / "objects")), path.read_bytes())


@twice
@pytest.mark.parametrize(("kind", "which"), [("manifest", 0), ("pack", 0), ("manifest", 4)])
def test_from_a_checkout(store, idents, damage, kind, which, tmp_path):
    """A version's weights are stored whole again, under fresh names, and all that is made on them reads again."""
    fresh(store.url).checkout(idents[which], tmp_path / "out")
    name = listed(store, kind)[which]
    spoil(store, name, damage)
    sequence = fresh(store.url).refresh().sequence
    report = fresh(store.url).fsck(read_data=1, repair=True, sources=[tmp_path / "out"])
    assert report.ok, report
    assert report.lost == []
    assert idents[which][:12] in report.repaired[0]
    now = fresh(store.url)
    assert now.refresh().sequence == sequence + 1
    assert reads(store.url, idents) == list(range(9))
    entry = now.entry(idents[which])
    assert [edge.source for edge in entry.place.edges] == [None]
    assert key.parse(name).transaction in entry.released
    assert key.parse(entry.place.manifest).begin >= sequence
    whole(store.url)
    for ident in idents:
        assert now.resolve(ident).id == ident


def test_from_a_checkout_of_files(store, tmp_path):
    """A layout and its files come from a checkout, too; the weights are as they were."""
    for kind in ("layout", "file", "schema"):
        name = listed(store, kind)[0]
        spoil(store, name, None)
    report = fresh(store.url).fsck(repair=True, sources=[tmp_path / "in"])
    assert report.ok, report
    fresh(store.url).checkout("files", tmp_path / "out")
    assert files_below(tmp_path / "out") == files_below(tmp_path / "in")
    whole(store.url)


def test_files_that_another_zstd_wrote(store, tmp_path, monkeypatch):
    """Where the bytes come out otherwise, the version is stored anew with them, under fresh names."""
    entry = fresh(store.url).entry("files")
    for name in (entry.place.layout, *entry.place.files, entry.place.manifest):
        spoil(store, name, None)
    monkeypatch.setattr(frame, "compress", lambda data, level=3, old=frame.compress: old(data, 19))
    report = fresh(store.url).fsck(repair=True, sources=[tmp_path / "in"])
    assert report.ok, report
    assert fresh(store.url).entry("files").place.layout != entry.place.layout
    fresh(store.url).checkout("files", tmp_path / "out")
    assert files_below(tmp_path / "out") == files_below(tmp_path / "in")
    whole(store.url)


def test_other_weights_are_of_no_use(store, idents, tmp_path):
    fresh(store.url).checkout(idents[1], tmp_path / "out")
    spoil(store, fresh(store.url).entry(idents[0]).place.manifest, flip)
    before = fresh(store.url).refresh()
    report = fresh(store.url).fsck(read_data=1, repair=True, sources=[tmp_path / "out"])
    assert numbers(report.lost) == [0]
    assert idents[1][:12] in report.repaired[0]
    assert any(idents[0][:12] in line for line in report.needed)
    assert fresh(store.url).refresh().branches == before.branches
    assert reads(store.url, idents) == list(range(1, 9))


def test_a_source_that_cannot_be_used(store, tmp_path):
    sequence = fresh(store.url).refresh().sequence
    spoil(store, listed(store, "manifest")[0], None)
    with pytest.raises(BadFile, match="nowhere"):
        fresh(store.url).fsck(repair=True, sources=[tmp_path / "nowhere"])
    (tmp_path / "in" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(BadFile):
        fresh(store.url).fsck(repair=True, sources=[tmp_path / "in"])
    assert fresh(store.url).refresh().sequence == sequence


@twice
def test_by_another_way(store, idents, damage):
    """What is bad is no longer named; the way that is whole comes first; no weights are written."""
    way = add_way(store.url, idents[4])
    patch = fresh(store.url).entry(idents[4]).place.manifest
    spoil(store, patch, damage)
    writer = fresh(store.url)
    report = writer.fsck(read_data=1, repair=True)
    assert report.ok
    entry = fresh(store.url).entry(idents[4])
    assert entry.place.manifest == way
    assert entry.place.ways == ()
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)


@twice
def test_a_base_that_its_own_patch_replaces(memory_url, damage):
    """A version was stored whole beside its patch, and the base is bad: it is written again from the patch."""
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        idents = [repository.commit(Bits(weights(i)), step=i, base=i == 2).id for i in range(4)]
        with repository.source(idents[2]) as source:
            base = source.manifest.base.packs[1][0]
        spoil(repository.store, base, damage)
        assert numbers(fresh(memory_url).fsck(read_data=1).damages[0].elsewhere) == [2]
        report = fresh(memory_url).fsck(read_data=1, repair=True)
        assert report.ok, report
        assert reads(memory_url, idents) == list(range(4))
        whole(memory_url)


def test_the_same_weights_in_another_version(store, idents):
    repository = fresh(store.url)
    back = repository.revert(idents[3], base=True)
    spoil(store, repository.entry(idents[3]).place.manifest, None)
    report = fresh(store.url).fsck(repair=True)
    assert report.ok
    assert back.short in report.repaired[0]
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)


def test_a_tree_in_the_cache(store, idents, tmp_path):
    cache = tmp_path / "cache"
    held(weightvc.open(store.url, cache=cache), idents[0])
    weightvc.open(store.url, cache=cache).checkout(idents[0], tmp_path / "out")
    assert [path.name for path in (cache / "trees").iterdir()]
    for path in (cache / "objects").rglob("*"):
        if path.is_file():
            path.unlink()
    spoil(store, fresh(store.url).entry(idents[0]).place.manifest, None)
    # A tree that has rotted is found out before anything is published.
    (tree,) = (cache / "trees").iterdir()
    good = tree.read_bytes()
    tree.write_bytes(flip(good))
    report = weightvc.open(store.url, cache=cache).fsck(repair=True)
    assert not report.ok
    assert report.repaired == []
    assert any("other" in note for note in report.notes)
    tree.write_bytes(good)
    report = weightvc.open(store.url, cache=None).fsck(repair=True, sources=[cache])
    assert report.ok
    assert reads(store.url, idents) == list(range(9))


@twice
def test_a_segment_from_manifests(store, idents, damage):
    """Without a copy of it, the versions that others were made on are catalogued again."""
    repository = fresh(store.url)
    segments = repository.refresh().segments
    for name in listed(store, "segment"):
        if name not in {ref.key for ref in segments}:
            store.delete([name])  # those that it took the place of
    before = [version.id for version in repository.log("main")]
    spoil(store, segments[-1].key, damage)
    report = fresh(store.url).fsck(repair=True)
    assert report.ok, report
    assert [version.id for version in fresh(store.url).log("main")] == before
    assert fresh(store.url).branches() == repository.branches()
    assert reads(store.url, idents) == list(range(9))
    whole(store.url)
    fresh(store.url).commit(Bits(weights(9)))


def test_a_segment_from_those_that_it_replaced(store, idents):
    """The operations that an older segment still says come back with their reflog."""
    repository = fresh(store.url)
    repository.branch("exp", idents[2])
    for i in range(9, 13):
        repository.commit(Bits(weights(i)), step=i)
    reflog = [(e.op, e.new) for e in repository.reflog("main")]
    spoil(store, repository.refresh().segments[-1].key, flip)
    report = fresh(store.url).fsck(repair=True)
    assert report.ok, report
    assert [(e.op, e.new) for e in fresh(store.url).reflog("main")] == reflog


@twice
def test_tags_from_operations(store, idents, damage):
    repository = fresh(store.url)
    repository.tag("v2", idents[5])
    repository.tag("gone", idents[1])
    repository.delete_tag("gone")
    tags = repository.tags()
    spoil(store, repository.refresh().tags, damage)
    report = fresh(store.url).fsck(repair=True)
    assert report.ok
    assert fresh(store.url).tags() == tags
    with pytest.raises(weightvc.Conflict):
        fresh(store.url).tag("gone", idents[2])


def test_nothing_to_repair_writes_nothing(store):
    writer = fresh(store.url)
    assert writer.fsck(read_data=1, repair=True).ok
    assert writer.stats.writes == 0


def test_a_commit_meanwhile(store, idents, tmp_path):
    """The swap of a repair that another writer was faster than is made again on top."""
    fresh(store.url).checkout(idents[0], tmp_path / "out")
    spoil(store, fresh(store.url).entry(idents[0]).place.manifest, None)

    class Busy(type(store)):
        done = 0

        def swap(self, name, data, etag):
            if self.done < 2:
                self.done += 1
                fresh(store.url).commit(Bits({}), branch=f"other{self.done}")
            return super().swap(name, data, etag)

    busy = Repository(Busy(store.url.removeprefix("memory://")), None)
    report = busy.fsck(repair=True, sources=[tmp_path / "out"])
    assert report.ok
    assert {"other1", "other2", "main"} <= fresh(store.url).branches().keys()
    assert reads(store.url, idents) == list(range(9))


def test_killed_at_every_request(memory_url, tmp_path):
    """The old state or the new one; what could be read can be read; and the next repair mends the rest."""
    with tiny_format():
        k = 0
        while True:
            url = f"{memory_url}-{k}"
            repository = weightvc.init(url, cache=None)
            idents = [repository.commit(Bits(weights(i)), step=i).id for i in range(7)]
            repository.tag("v1", idents[0])
            repository.checkout(idents[3], tmp_path / f"out{k}")
            names = [repository.entry(idents[3]).place.manifest, repository.refresh().tags]
            for name in names:
                spoil(repository.store, name, None)
            store = Faulty(open_store(url), k, "kill before")
            sources = [tmp_path / f"out{k}"]
            try:
                Repository(store, None).fsck(repair=True, sources=sources)
                done = k >= len(store.operations)
            except (Killed, WeightvcError):
                done = False
            readable = reads(url, idents)
            assert readable in ([0, 1, 2], list(range(7)))
            assert fresh(url).fsck(repair=True, sources=sources).ok
            assert reads(url, idents) == list(range(7))
            assert fresh(url).tags() == {"v1": idents[0]}
            whole(url)
            if done:
                break
            k += 1
        assert k > 10


def test_on_each_store(place, again, tmp_path):
    url, options = place
    with tiny_format():
        repository = again()
        idents = [repository.commit(Bits(weights(i)), step=i).id for i in range(7)]
        repository.checkout(idents[2], tmp_path / "out")
        copy = copy_of(repository.store, tmp_path / "copy")
        for index, name in enumerate(listed(repository.store, "pack")[-2:]):
            spoil(repository.store, name, (lambda data: b"") if index else None)
        spoil(repository.store, repository.entry(idents[2]).place.manifest, lambda data: b" " * len(data))
        assert not fresh(url, **options).fsck(read_data=1).ok
        report = again().fsck(read_data=1, repair=True, sources=[tmp_path / "out"])
        assert len(report.damages) == 2
        assert len(report.lost) >= 1
        assert again().fsck(read_data=1, repair=True, sources=[copy]).ok
        assert reads(url, idents, **options) == list(range(7))
