"""fsck names every bad or missing object, who needs it, and which versions suffer; what is whole it calls whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weightvc
from tests.kit.forge import Forge
from tests.kit.weights import Bits, Weights, flipped, held, tensor, tiny_format, write_shards
from weightvc.errors import Corrupt, KeyNotFound, NotFound, Refused
from weightvc.objects import frame, key, manifest
from weightvc.objects import root as roots
from weightvc.objects.catalogue import Way
from weightvc.objects.manifest import Manifest
from weightvc.objects.schema import Schema
from weightvc.objects.version import Edge
from weightvc.protocol import commit, rewrite, state, swap
from weightvc.protocol.stock import digest_of
from weightvc.repository import Repository
from weightvc.stores import Store, open_store

GOLDEN = Path(__file__).parents[1] / "golden" / "repositories"
WEIGHTS: Weights = {("", "w"): tensor("BF16", (200,), 0), ("", "x"): tensor("F32", (40,), 1)}


def weights(number: int) -> Weights:
    return {k: flipped(v, 0.2, number) for k, v in WEIGHTS.items()}


def flip(data: bytes) -> bytes:
    at = random.Random(1).randrange(len(data))
    return data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes] | None] = {
    "empty": lambda data: b"",
    "spaces": lambda data: b" " * len(data),
    "NULs": lambda data: bytes(len(data)),
    "cut short": lambda data: data[: len(data) // 2],
    "one bit flipped": flip,
    "missing": None,
}
damaged = pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)


def spoil(store: Store, name: str, damage: Callable[[bytes], bytes] | None) -> bytes:
    """Damage an object behind everybody's back; returns what it was."""
    got = store.get(name)
    assert got is not None
    if damage is None:
        store.delete([name])
    else:
        store.put(name, damage(got.data))
    return got.data


def listed(store: Store, kind: str) -> list[str]:
    """Keys of a kind, the oldest transaction first."""
    return sorted((one.key for one in store.list(f"{kind}/")), key=lambda name: key.parse(name).begin)


def fresh(url: str, **options: Any) -> Repository:
    return weightvc.open(url, cache=None, **options)


def reads(url: str, idents: list[str], **options: Any) -> list[int]:
    """Which versions can be read, and are what they should be."""
    out = []
    for number, ident in enumerate(idents):
        try:
            assert held(fresh(url, **options), ident) == weights(number)
        except (Corrupt, NotFound):
            continue
        out.append(number)
    return out


def numbers(sufferers: Any) -> list[int | None]:
    return [one.step for one in sufferers]


@pytest.fixture
def store(memory_url: str) -> Iterator[Store]:
    """Nine versions in tiny packs, a segment and a tag."""
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        for i in range(9):
            repository.commit(Bits(weights(i)), step=i)
            if i == 0:
                repository.tag("v1")
        assert len(repository.refresh().segments) == 1
        yield open_store(memory_url)


@pytest.fixture
def idents(store: Store) -> list[str]:
    return [version.id for version in fresh(store.url).log()][::-1]


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_whole_repository(again, tmp_path, share):
    with tiny_format():
        repository = again()
        for i in range(4):
            repository.commit(Bits(weights(i)), step=i, base=i == 2)
        write_shards(tmp_path / "in", WEIGHTS, 2)
        (tmp_path / "in" / "tokenizer.json").write_bytes(random.Random(1).randbytes(100_000))
        repository.commit(tmp_path / "in")
        repository.tag("v1")
        objects = {one.key: one.size for one in repository.store.list()}
        repository.store.put(f"pack/{'0' * 64}.1-{'0' * 32}-0", b"an upload of a writer that was killed")
        repository.store.put("notes/mine", b"not ours")
        reader = again()
        writes = reader.stats.writes
        report = reader.fsck(read_data=share, seed=3)
        assert report.ok
        assert (report.damages, report.lost, report.notes, report.needed) == ([], [], [], [])
        assert report.versions == 5
        assert report.unreferenced == 1
        assert report.unreferenced_bytes == 37
        assert report.sequence == reader.refresh().sequence
        named = [name for name in objects if not name.startswith(("lost/", "root.d/", "probe/"))]
        # The segment that the tail was moved into is there once, since nothing grew beyond it.
        assert report.objects == len(named)
        assert report.nbytes == sum(objects[name] for name in named)
        assert report.seed == 3
        if share == 1:
            assert report.trees_built == 6
            assert report.objects_read == len(named) - 1  # the root has no key
        assert reader.stats.writes == writes


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_what_earlier_versions_wrote_is_whole(name, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path / "repository")
    report = weightvc.fsck(tmp_path / "repository", read_data=1, cache=None)
    assert report.ok, report.damages
    assert report.notes == []
    assert report.trees_built >= report.versions


def test_an_empty_repository(memory_url):
    weightvc.init(memory_url, cache=None)
    report = weightvc.fsck(memory_url, read_data=1, cache=None)
    assert report.ok
    assert (report.versions, report.objects, report.unreferenced) == (0, 1, 0)


def test_it_costs_one_listing_and_the_catalogue(store):
    reader = fresh(store.url)
    before = reader.stats.reads
    assert reader.fsck().ok
    assert reader.stats.lists == 1
    assert reader.stats.reads - before <= 4  # the root twice, a segment, the page of tags


@damaged
def test_root(store, idents, damage):
    good = spoil(store, key.ROOT, damage)
    report = weightvc.fsck(store.url, cache=None)
    assert [found.key for found in report.damages] == ["root"]
    assert report.sequence is None
    assert not report.ok
    assert "--rebuild-root" in report.needed[0]
    store.put(key.ROOT, good)
    assert weightvc.fsck(store.url, cache=None).ok
    assert reads(store.url, idents) == list(range(9))


@damaged
def test_page(store, idents, damage):
    (page,) = listed(store, "page")
    spoil(store, page, damage)
    report = fresh(store.url).fsck()
    assert [(found.key, found.referred, found.lost) for found in report.damages] == [(page, ("root",), ())]
    assert report.lost == []
    assert reads(store.url, idents) == list(range(9))


@damaged
def test_segment(store, idents, damage):
    """The versions whose records are lost are named by their manifests; those that need none of them read on."""
    repository = fresh(store.url)
    repository.commit(Bits(weights(9)), step=9, base=True)
    repository.commit(Bits(weights(10)), step=10)
    (segment,) = [ref.key for ref in repository.refresh().segments]
    count = repository.refresh().segments[0].count
    spoil(store, segment, damage)
    report = fresh(store.url).fsck(read_data=1)
    (found,) = report.damages
    assert (found.key, found.referred) == (segment, ("root",))
    assert report.lost_entries == count
    kept = [e.version.step for e in fresh(store.url).refresh().tail if e.version]
    assert kept[-2:] == [9, 10]
    assert numbers(found.lost) == list(range(9))
    assert numbers(report.lost) == list(range(9))
    assert report.unreferenced is None
    assert reads(store.url, [*idents, *[fresh(store.url).resolve(r).id for r in ("main~1", "main")]]) == [9, 10]


@damaged
@pytest.mark.parametrize(
    ("kind", "which"), [("schema", 0), ("manifest", 0), ("manifest", 4), ("manifest", -1), ("pack", 0), ("pack", -1)]
)
def test_objects_of_versions(store, idents, damage, kind, which):
    name = listed(store, kind)[which]
    spoil(store, name, damage)
    report = fresh(store.url).fsck(read_data=1)
    (found,) = report.damages
    assert found.key == name
    assert ("missing" in found.fault) == (damage is None)
    suffering = [] if not found.lost else [one.step for one in found.lost]
    assert suffering == {0: list(range(9)), 4: [4, 5, 6, 7, 8], -1: [8]}[which]
    assert [one.id for one in found.lost] == [idents[number] for number in suffering]
    assert {(one.branch, one.generation - (one.step or 0)) for one in found.lost} == {("main", 0)}
    assert found.elsewhere == found.files == ()
    assert report.lost == list(found.lost)
    if kind == "pack":
        assert [one.partition("/")[0] for one in found.referred] == ["manifest"]
    else:
        assert found.referred[0].removeprefix("version ") == idents[suffering[0]]
    assert reads(store.url, idents) == [number for number in range(9) if number not in suffering]
    # Without reading, whatever changed the size is found; bytes that turned in place are not.
    quick = fresh(store.url).fsck()
    same = damage is not None and len(damage(b"x" * 100)) == 100
    assert [one.key for one in quick.damages] == ([] if same else [name])


@damaged
@pytest.mark.parametrize("kind", ["layout", "file"])
def test_files_of_versions(memory_url, damage, kind, tmp_path):
    repository = weightvc.init(memory_url, cache=None)
    write_shards(tmp_path / "in", WEIGHTS, 2)
    (tmp_path / "in" / "tokenizer.json").write_bytes(random.Random(1).randbytes(100_000))
    made = repository.commit(tmp_path / "in")
    repository.commit(Bits(WEIGHTS))
    (name,) = listed(repository.store, kind)
    spoil(repository.store, name, damage)
    report = fresh(memory_url).fsck(read_data=1)
    (found,) = report.damages
    assert found.key == name
    assert [one.id for one in found.files] == [made.id]
    assert found.lost == found.elsewhere == ()
    assert report.lost == []
    assert held(fresh(memory_url), made.id) == WEIGHTS


def add_way(url: str, ident: str, *, base: bool = True) -> str:
    """Give a version one more manifest, as compaction does: a base. Returns its key."""
    repository = fresh(url)
    shelf, seen = repository._shelf, swap.must_read(repository.store)
    transaction = key.Transaction(seen.root.sequence)
    with repository.source(ident, whole=True) as source:
        build = commit.Build(
            shelf, source, source.tree.schema, None, transaction, base=True, codec="small", progress=None
        )
        tree, stream, _ = build.run()
        old = source.manifest
    assert stream is not None
    made = Manifest(
        old.version, old.branch, old.schema, old.schema_digest, old.layout, old.files, tree.digests, stream, None
    )
    name = shelf.put(transaction, "manifest", manifest.encode(made))
    size = sum(one.size for one in repository.store.list() if transaction.id in one.key)
    way = Way(name, len(stream.packs), (Edge(None, stream.nbytes, made.version.elements),), size)

    def edit(entry):
        if entry.new != ident or entry.place is None:
            return None
        return replace(entry, place=replace(entry.place, ways=(*entry.place.ways, way)))

    tail, segments = rewrite.rewritten(shelf, seen.root, transaction, edit)
    repository.store.swap(key.ROOT, roots.encode(seen.root.next(tail=tail, segments=segments)), seen.etag)
    return name


@damaged
def test_another_way(store, idents, damage):
    """Version 4 has a base beside its patch: without the patch it, and what was made on it, still have a way."""
    add_way(store.url, idents[4])
    whole = fresh(store.url).fsck(read_data=1)
    assert whole.ok
    assert whole.trees_built == 10
    patch = fresh(store.url).entry(idents[4]).place.manifest
    spoil(store, patch, damage)
    report = fresh(store.url).fsck(read_data=1)
    (found,) = report.damages
    assert found.key == patch
    assert numbers(found.elsewhere) == [4]
    assert found.lost == ()
    assert report.lost == []
    # And the other way around: what is lost below it is not missed above.
    first = fresh(store.url).entry(idents[0]).place.manifest
    spoil(store, first, damage)
    report = fresh(store.url).fsck(read_data=1)
    assert numbers(report.lost) == [0, 1, 2, 3]
    assert [(found.key, numbers(found.lost), numbers(found.elsewhere)) for found in report.damages] == sorted(
        [(first, [0, 1, 2, 3], [4]), (patch, [], [4])]
    )


def test_two_ways_that_lead_to_each_other(store, idents):
    """A circle of patches is no way."""
    spoil(store, fresh(store.url).entry(idents[3]).place.manifest, None)
    seen = swap.must_read(store)
    repository = fresh(store.url)

    def edit(entry):
        if entry.new != idents[4]:
            return None
        place = entry.place
        way = Way(place.manifest, place.packs, (Edge(idents[5], 10, 1),), 10)
        return replace(entry, place=replace(place, ways=(way,)))

    shelf = repository._shelf
    tail, segments = rewrite.rewritten(shelf, seen.root, key.Transaction(seen.root.sequence), edit)
    store.swap(key.ROOT, roots.encode(seen.root.next(tail=tail, segments=segments)), seen.etag)
    assert numbers(fresh(store.url).fsck().lost) == [3, 4, 5, 6, 7, 8]


def test_what_the_catalogue_says_of_a_manifest(store, idents):
    """Right digests, and nonsense in them: the manifest is named."""

    def edges(entry):
        entry["edges"][0][1] += 1

    Forge(store.url).rewrite(entry=edges)
    report = fresh(store.url).fsck(read_data=1)
    (found,) = report.damages
    assert found.key == fresh(store.url).entry().place.manifest
    assert "edges" in found.fault
    assert numbers(found.lost) == [8]


def test_a_patch_that_gives_other_weights(memory_url):
    with tiny_format():
        repository = weightvc.init(memory_url, cache=None)
        repository.commit(Bits(weights(0)), step=0)
        one = {("", "w"): weights(0)["", "w"], ("", "x"): weights(1)["", "x"]}
        repository.commit(Bits(one), step=1)

        def record(fields):
            fields["tree"] = digest_of(Bits(weights(2)))

        def digests(head, sections):
            source = Bits(weights(2))
            schema = Schema(source.tensors)
            data = b"".join(bytes(source.read(i, 0, t.nbytes)) for i, t in enumerate(source.tensors))
            sections[0] = frame.digests(data, schema.positions)

        Forge(memory_url).rewrite(record=record, manifest=digests)
        assert fresh(memory_url).fsck().ok
        report = fresh(memory_url).fsck(read_data=1)
        (found,) = report.damages
        assert found.key == fresh(memory_url).entry().place.manifest
        assert "not what its digest says" in found.fault
        assert numbers(found.lost) == [1]


def test_what_is_not_catalogued(store, idents):
    seen = swap.must_read(store)
    new = seen.root.next(branches={**seen.root.branches, "exp": "0" * 64})
    store.swap(key.ROOT, roots.encode(new), seen.etag)
    (found,) = fresh(store.url).fsck().damages
    assert found.key == "root"
    assert "'exp'" in found.fault


def test_what_was_collected_while_we_looked(store, idents):
    """The root that was read names a manifest that a newer one let go of: it is not missed."""
    add_way(store.url, idents[8])
    way = fresh(store.url).entry(idents[8]).place.ways[0].manifest

    class Moving(type(store)):
        moved = False

        def list(self, prefix=""):
            if not self.moved:
                self.moved = True
                seen = swap.must_read(store)
                tail = [
                    replace(e, place=replace(e.place, ways=())) if e.new == idents[8] else e for e in seen.root.tail
                ]
                store.swap(key.ROOT, roots.encode(seen.root.next(tail=tuple(tail))), seen.etag)
                store.delete([way])
            return super().list(prefix)

    assert Repository(Moving(store.url.removeprefix("memory://")), None).fsck().ok


def test_a_share_is_chosen_by_the_seed(store):
    def some(seed: int) -> tuple[int, int]:
        report = fresh(store.url).fsck(read_data=0.4, seed=seed)
        assert report.ok
        return report.objects_read, report.trees_built

    assert some(1) == some(1)
    assert len({some(seed) for seed in range(12)}) > 1
    whole = fresh(store.url).fsck(read_data=1)
    assert all(some(seed)[1] <= whole.trees_built for seed in range(4))
    assert fresh(store.url).fsck(read_data=0.4).seed != fresh(store.url).fsck(read_data=0.4).seed
    pack = listed(store, "pack")[-1]
    spoil(store, pack, flip)
    found = [len(fresh(store.url).fsck(read_data=0.3, seed=seed).damages) for seed in range(20)]
    assert 0 < sum(found) < 20
    assert found == [len(fresh(store.url).fsck(read_data=0.3, seed=seed).damages) for seed in range(20)]


def test_a_codec_of_the_future_is_noted(store, monkeypatch):
    monkeypatch.setattr(state, "KNOWN", range(1))
    report = fresh(store.url).fsck(read_data=1)
    assert report.ok
    assert any("codec" in note for note in report.notes)


def test_nothing_there(memory_url):
    with pytest.raises(KeyNotFound, match="weightvc init"):
        weightvc.fsck(memory_url, cache=None)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range(store, share):
    with pytest.raises(Refused, match="share"):
        fresh(store.url).fsck(read_data=share)


def test_the_cache_is_not_asked(store, tmp_path):
    """What this host has says nothing of the store; and nothing bad is put into its cache."""
    repository = weightvc.open(store.url, cache=tmp_path / "cache")
    assert held(repository) == weights(8)
    good = spoil(store, listed(store, "manifest")[0], flip)
    (found,) = weightvc.open(store.url, cache=tmp_path / "cache").fsck(read_data=1).damages
    store.put(found.key, good)
    assert held(weightvc.open(store.url, cache=tmp_path / "cache"), "main~8") == weights(0)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".fsck")]
