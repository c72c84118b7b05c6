"""Garbage collection: what is deleted, when, and above all what is not."""

import contextlib
import os
import secrets
import time
from dataclasses import replace
from unittest.mock import ANY

import pytest

import weightvc
from tests.kit.faults import Killed
from tests.kit.garbage import HOUR, START, dead, forget, gc, names, orphan, read_all, shelf, step
from tests.kit.weights import Bits, held, tiny_format
from weightvc.errors import Corrupt, KeyNotFound, Refused
from weightvc.objects import frame, key
from weightvc.objects import root as roots
from weightvc.protocol import collect, compact, live, pins, swap

# When


def test_an_upload_of_a_killed_writer_goes_after_two_grace_periods(repository, clock):
    repository.commit(Bits(START))
    name = orphan(repository)
    repository.commit(Bits(step(1)))
    assert gc(repository).condemned.objects.total() == 0  # first seen
    clock.later(HOUR - 1)
    assert gc(repository).condemned.objects.total() == 0
    clock.later(1)
    assert gc(repository).condemned.objects == {"pack": 1}
    clock.later(HOUR - 1)
    assert gc(repository).deleted.objects.total() == 0
    assert name in names(repository)
    clock.later(1)
    assert gc(repository).deleted.objects == {"pack": 1}
    assert name not in names(repository)
    read_all(repository)


def test_at_once_without_a_grace_period(again):
    repository = again()
    repository.commit(Bits(START))
    repository.commit(Bits(step(1)))
    orphans = {orphan(repository) for _ in range(3)}
    result = gc(repository, 0, force=True)
    assert result.deleted.objects["pack"] == 3
    assert not orphans & names(repository)
    assert dead(repository) == set()
    assert held(again()) == step(1)
    # There is nothing to do, and nothing is done.
    sequence = again().refresh().sequence
    for _ in range(2):
        result = gc(again(), 0, force=True)
        assert (result.condemned.objects.total(), result.deleted.objects.total()) == (0, 0)
    assert again().refresh().sequence == sequence
    assert again().commit(Bits(START)).generation == 2
    read_all(again())


def test_an_object_that_was_named_until_just_now_stays_for_a_grace_period(repository, clock):
    """Case 36: old as it is, it was seen to be named by nothing only now."""
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    mine = repository.entry(old).place.manifest
    orphan(repository, 1)
    gc(repository, force=True)
    clock.later(30 * 24 * HOUR)
    repository.commit(Bits(step(2)), branch="main")
    source = repository.source(old, whole=True)
    forget(repository, old.id)
    assert gc(repository, force=True).condemned.objects["manifest"] == 1
    for _ in range(6):
        clock.later(HOUR / 6 - 1)
        gc(repository, force=True)
        assert mine in names(repository)
    assert source.read(0, 0, 800) == step(1)["", "w"].data
    clock.later(6)
    gc(repository, force=True)
    assert mine not in names(repository)
    read_all(repository)


def test_notes_do_not_keep_a_list_from_growing_old(repository, clock):
    """Runs far more frequent than the grace period, writers that are busy all the time."""
    repository.commit(Bits(START))
    first = orphan(repository)
    for i in range(40):
        repository.commit(Bits(step(i)))
        orphan(repository)
        gc(repository, force=True)
        clock.later(HOUR / 12)
        if i == 26:
            assert first not in names(repository)
    page = collect.read_page(shelf(repository), repository.refresh())
    assert len(page.noted) <= collect.NOTES + 2
    read_all(repository)


def test_a_note_of_a_time_to_come_is_none(repository, clock):
    """A store whose clock was a day ahead in one run is collected as ever once it is right."""
    repository.commit(Bits(START))
    name = orphan(repository)
    repository.commit(Bits(step(1)))
    clock.later(24 * HOUR)
    gc(repository)
    clock.later(-24 * HOUR)
    gc(repository)
    for _ in range(4):
        clock.later(HOUR)
        gc(repository)
    assert name not in names(repository)
    read_all(repository)


def test_an_idle_repository_is_left_alone(repository, clock):
    repository.commit(Bits(START))
    for _ in range(5):
        gc(repository)
        clock.later(HOUR)
    assert repository.refresh().sequence == 2


def asleep(repository, meanwhile):
    """A sight of a run that stood still after it had read the root, while something happened."""
    sleeper = weightvc.open(repository.url, cache=None)
    put = sleeper.store.put

    def late(name, data):
        meanwhile()
        return put(name, data)

    sleeper.store.put = late
    return collect.look(sleeper.store)


def test_a_run_that_stood_still_condemns_no_more_than_what_began_before_it(repository, clock):
    """Another one has noted a later root meanwhile, and its note has grown old."""
    repository.commit(Bits(START))
    late = []

    def meanwhile() -> None:
        repository.commit(Bits(step(1)))
        late.append(orphan(repository))
        repository.commit(Bits(step(2)))
        gc(repository)  # notes that root
        clock.later(HOUR)

    sight = asleep(repository, meanwhile)
    marked = collect.mark(shelf(repository), repository.refresh(), sight, grace=HOUR)
    assert marked.horizon <= sight.before.sequence
    assert marked.dead == ()
    assert gc(repository).condemned.objects == {"pack": 1}  # one that looked just now


def test_a_run_leaves_the_list_of_one_that_came_after_its_listing(repository):
    """So the lists that somebody may be working through all lie in the store."""
    repository.commit(Bits(START))
    mine = orphan(repository, 1)
    repository.branch("moved")
    lease = pins.Holder(repository.store, names=[mine])
    lease.take()
    sight = collect.look(repository.store)
    theirs = orphan(repository, 1)  # which that listing has not
    repository.branch("again")
    collect.condemn(shelf(repository), collect.look(repository.store), swap.must_read(repository.store), grace=0)
    lease.release()
    root = repository.refresh()
    assert collect.read_page(shelf(repository), root).dead == (theirs,)
    marked, left = collect.condemn(shelf(repository), sight, swap.must_read(repository.store), grace=0)
    assert (marked.dead, marked.note) == ((), False)
    assert left == root
    gc(repository, 0)
    assert not {mine, theirs} & names(repository)


# What


def test_every_kind_goes_that_nothing_names(repository, tmp_path):
    with tiny_format():
        (tmp_path / "d").mkdir()
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"w": np.arange(200, dtype=np.float32)}, tmp_path / "d" / "model.safetensors")
        (tmp_path / "d" / "vocab.txt").write_bytes(secrets.token_bytes(100_000))
        gone = repository.commit(tmp_path / "d", branch="gone", expect="")
        for i in range(12):
            repository.commit(Bits(step(i)))
            repository.tag(f"t{i}")
        forget_later = set(live.named(repository.entry(gone)))
        kinds = {name.partition("/")[0] for name in forget_later}
        assert kinds == {"manifest", "schema", "layout", "file"}

        def make(root):
            from weightvc.protocol.rewrite import rewritten

            def edit(entry):
                if entry.new == gone.id and entry.place is not None:
                    return replace(entry, op="expired", place=None)
                return None

            transaction = key.Transaction(root.sequence)
            tail, segments = rewritten(repository._shelf, root, transaction, edit)
            branches = {n: i for n, i in root.branches.items() if n != "gone"}
            return root.next(tail=tail, segments=segments, branches=branches)

        swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
        deleted = gc(repository, 0, force=True).deleted.objects
        assert {"manifest", "schema", "layout", "file", "pack", "segment", "page"} <= set(deleted)
        assert not forget_later & names(repository)
        assert dead(repository) == set()
        read_all(repository)


def test_what_is_not_ours_is_never_touched(place, again):
    repository = again()
    repository.commit(Bits(START))
    foreign = [
        "notes.txt",
        "pack/abc",
        "manifest/" + "0" * 64,
        "pin/mine",
        "probe/other",
        "root.d/x",
        "rooty",
        "x/y/z",
    ]
    for name in foreign:
        repository.store.put(name, b"mine")
    orphan(repository)
    result = gc(repository, 0, force=True)
    assert set(foreign) <= names(repository)
    assert result.foreign.objects.total() == len(foreign)


def test_a_sibling_whose_name_begins_alike_is_not_seen(place, tmp_path):
    """Case 38: p, p/ and p2."""
    url, options = place
    if url.startswith("memory"):
        pytest.skip("names in memory have no prefixes")
    first = weightvc.init(f"{url}/p", cache=None, **options)
    second = weightvc.init(f"{url}/p2", cache=None, **options)
    for one in (first, second):
        one.commit(Bits(START))
        one.commit(Bits(step(1)))
        orphan(one)
    before = names(second)
    for spelling in ("p", "p/", "/p"):
        opened = weightvc.open(f"{url}/{spelling}", cache=None, **options)
        gc(opened, 0, force=True)
        read_all(opened)
        assert dead(opened) == set()
    assert names(second) == before
    read_all(second)


def test_probes_and_half_written_files_go_by_age(tmp_path):
    repository = weightvc.init(tmp_path / "r", cache=None)
    repository.commit(Bits(START))
    probe, young = (f"probe/{secrets.token_hex(16)}-{i}" for i in range(2))
    repository.store.put(probe, b"x")
    repository.store.put(young, b"x")
    half, fresh = tmp_path / "r" / "pack" / ".tmp-1-a", tmp_path / "r" / ".tmp-2-b"
    half.parent.mkdir(exist_ok=True)
    for path in (half, fresh):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * collect.DAY
    for path in (tmp_path / "r" / probe, half):
        os.utime(path, (long_ago, long_ago))
    result = gc(repository, 0)
    assert (result.deleted.objects["probe"], result.deleted.objects["temporary"]) == (1, 1)
    assert (half.exists(), fresh.exists()) == (False, True)
    assert names(repository) >= {young}
    assert probe not in names(repository)


# Refusals


def test_no_branches_is_a_mistake(repository):
    gc(repository, 0)  # nothing was ever committed
    repository.commit(Bits(START))
    orphan(repository)
    repository.branch("b")

    def make(root):
        return root.next(branches={})

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
    before = names(repository)
    with pytest.raises(Refused, match="no branches"):
        gc(repository, 0)
    assert names(repository) == before
    gc(repository, 0, force=True)


def test_much_that_nobody_let_go_of_is_a_mistake(repository):
    with tiny_format():
        repository.commit(Bits(START))
        old = repository.commit(Bits(step(1)), branch="old", expect="", base=True)
        manifest = repository.entry(old).place.manifest
        forget(repository, old.id)
        before = names(repository)
        with pytest.raises(Refused, match="--force"):
            gc(repository, 0)
        assert names(repository) == before
        gc(repository, 0, force=True)
        assert manifest not in names(repository)


@pytest.mark.parametrize("kind", ["manifest 1", "manifest 2"])
def test_a_manifest_that_cannot_be_read_may_be_of_a_lost_version(repository, kind):
    """Of no version, or of a newer weightvc's: nobody can say that the catalogue leads to it."""
    with tiny_format():
        repository.commit(Bits(START))
        old = repository.commit(Bits(step(1)), branch="old", expect="", base=True)
        manifest = repository.entry(old).place.manifest
        forget(repository, old.id)
        repository.store.put(manifest, frame.encode(frame.MANIFEST, {"weightvc": kind, "pad": "x" * 4000}))
        before = names(repository)
        with pytest.raises(Refused, match="--force"):
            gc(repository, 0)
        assert names(repository) == before


def test_a_list_that_holds_a_part_of_it_makes_it_no_smaller(repository, monkeypatch):
    """Otherwise a lost history went list by list, each a small share."""
    for i in range(6):
        repository.commit(Bits(step(i)), branch=f"b{i}", expect="", base=True)
    heads = repository.branches()
    for i in range(4):
        forget(repository, heads[f"b{i}"])
    monkeypatch.setattr(collect, "LIST", 1)
    before = names(repository)
    with pytest.raises(Refused, match="--force"):
        gc(repository, 0)
    assert names(repository) == before


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_what_came_after_an_older_root_is_counted_at_once_and_not_as_the_horizon_passes_it(repository, kept):
    """It began at that root, or later: each run could have a little of it, and no run much."""
    root = None
    for i in range(7):
        repository.commit(Bits(step(i)), base=True)
        if i + 1 == kept:
            root = repository.store.get(key.ROOT).data
    assert root is not None
    repository.store.put(key.ROOT, root)
    before = names(repository)
    with pytest.raises(Refused, match="--force"):
        gc(repository, 0)
    for _ in range(10):
        with contextlib.suppress(Refused):
            gc(repository, 1e-6)
    assert {name for name in before if name.startswith(("manifest/", "pack/"))} <= names(repository)


def test_uploads_without_a_manifest_were_never_published(repository):
    """A writer that was killed at its first, large upload: nothing that could be lost."""
    made = repository.commit(Bits(START))
    name = orphan(repository, 1, size=10 * repository.entry(made).place.nbytes)
    gc(repository, 0)
    assert name not in names(repository)
    assert held(repository) == START


def test_ways_of_a_compaction_that_was_killed_are_no_lost_versions(repository, monkeypatch):
    """All of them lead to versions that the catalogue reaches without."""
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)), branch="main")
        before = dead(repository)

        def killed(*_):
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(compact.Compaction, "_publish", killed)
            with pytest.raises(Killed):
                repository.compact(base_every=4, share=1, reverse=True)
        assert len([name for name in dead(repository) - before if name.startswith("manifest/")]) > 5
        repository.branch("moved")
        gc(repository, 0)
        assert dead(repository) == set()
        read_all(weightvc.open(repository.url, cache=None))
        # Versions that the root lost beside them are seen all the same.
        with monkeypatch.context() as patched:
            patched.setattr(compact.Compaction, "_publish", killed)
            with pytest.raises(Killed):
                repository.compact(base_every=4, share=1, reverse=True)
        for i in range(20):
            forget(repository, repository.commit(Bits(step(20 + i)), branch="lost", expect="", base=True).id)
        with pytest.raises(Refused, match="--force"):
            gc(repository, 0)


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(repository, clock):
    repository.commit(Bits(START))
    orphan(repository, 1)
    repository.commit(Bits(step(1)))
    for _ in range(3):
        before = names(repository), repository.refresh()
        said = gc(repository, dry_run=True)
        assert (names(repository), weightvc.open(repository.url, cache=None).refresh()) == before
        done = gc(repository)
        assert said.condemned == done.condemned
        assert said.deleted == done.deleted
        clock.later(HOUR)
    assert done.deleted.objects["pack"] == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_a_dry_run_without_a_grace_period_says_all_that_a_run_would_do(again, pinned):
    """Which takes a run several lists, each with what the one before it left."""
    repository = again()
    for i in range(3):
        repository.commit(Bits(step(i)))
    orphan(repository, 1)
    with contextlib.ExitStack() as stack:
        if pinned:
            stack.enter_context(pins.Holder(repository.store, begin=repository.refresh().sequence))
        repository.tag("t")
        orphan(repository)  # at the root that there is: condemned by the second list
        sequence = again().refresh().sequence
        before = names(repository)
        said = gc(repository, 0, dry_run=True)
        assert names(repository) == before
        assert said.sequence == again().refresh().sequence == sequence
        done = gc(repository, 0)
    for what in ("deleted", "condemned", "held", "young", "waiting", "pinned"):
        told, did = getattr(said, what), getattr(done, what)
        # But for the lists that the run made on its way.
        assert told.objects["page"] <= did.objects["page"]
        for tally in (told, did):
            del tally.objects["page"], tally.bytes["page"]
        assert told == did, what
    assert said.deleted.objects["pack"] == 2 - pinned
    assert said.held.objects["pack"] == pinned
    assert [pin.name for pin in said.pins] == [pin.name for pin in done.pins]


def test_a_dry_run_that_begins_again_counts_nothing_twice(repository, monkeypatch):
    """Another collector was faster than it read what a root names."""
    repository.commit(Bits(START))
    orphan(repository)
    repository.branch("moved")
    said, real, calls = gc(repository, 0, dry_run=True), collect.mark, []

    def mark(*given, **options):
        calls.append(given)
        if len(calls) == 2:
            raise KeyNotFound("a segment")
        return real(*given, **options)

    monkeypatch.setattr(collect, "mark", mark)
    assert gc(repository, 0, dry_run=True) == replace(said, now=ANY)
    assert len(calls) == 4


def test_a_dry_run_deletes_no_more_lists_than_a_run(repository, monkeypatch):
    monkeypatch.setattr(collect, "LIST", 1)
    monkeypatch.setattr(collect, "ROUNDS", 3)
    repository.commit(Bits(START))
    for _ in range(5):
        orphan(repository)
    repository.branch("moved")
    said = gc(repository, 0, dry_run=True)
    done = gc(repository, 0)
    assert (done.condemned.objects["pack"], done.deleted.objects["pack"]) == (3, 2)
    for what in ("condemned", "deleted", "young"):
        assert getattr(said, what).objects["pack"] == getattr(done, what).objects["pack"]


def test_a_dry_run_counts_what_was_left_lying(tmp_path):
    repository = weightvc.init(tmp_path / "r", cache=None)
    repository.commit(Bits(START))
    pins.Holder(repository.store, begin=1).take()
    repository.store.put(f"probe/{secrets.token_hex(16)}-x", b"x")
    (tmp_path / "r" / "pack").mkdir(exist_ok=True)
    (tmp_path / "r" / "pack" / ".tmp-1-a").write_bytes(b"half")
    long_ago = time.time() - 2 * collect.DAY
    for path in (tmp_path / "r").rglob("*"):
        if path.is_file() and path.name != "root":
            os.utime(path, (long_ago, long_ago))
    before = names(repository)
    said = gc(repository, dry_run=True)
    assert names(repository) == before
    assert (tmp_path / "r" / "pack" / ".tmp-1-a").exists()
    assert said.deleted.objects == {"pin": 1, "probe": 1, "temporary": 1}
    assert gc(repository).deleted == said.deleted


def test_a_list_that_a_root_names_is_not_deleted(repository, clock):
    """A root that was put back by hand: what is on its list may be named."""
    repository.commit(Bits(START))
    old = repository.commit(Bits(step(1)), branch="old", expect="")
    entry = repository.entry(old)
    orphan(repository, 1)
    gc(repository, force=True)
    clock.later(HOUR)
    forget(repository, old.id)
    gc(repository, force=True)

    def make(root):
        return root.next(tail=(*root.tail, entry))

    swap.change(repository._shelf, make, key.Transaction(repository.refresh().sequence))
    clock.later(HOUR)
    with pytest.raises(Corrupt, match="by hand"):
        gc(repository, force=True)
    assert entry.place.manifest in names(repository)


def test_the_newest_copies_of_the_root_keep_their_segments(repository, clock):
    with tiny_format():
        for i in range(9):
            repository.commit(Bits(step(i)))
        seen = swap.must_read(repository.store)
        repository.store.put(key.copy(seen.root.sequence, seen.root.write), roots.encode(seen.root))
        named = {ref.key for ref in seen.root.segments}
        for i in range(9):
            repository.commit(Bits(step(i)))
        gc(repository, 0, force=True)
        assert named <= names(repository)
        for _ in range(2):
            seen = swap.must_read(repository.store)
            repository.store.put(key.copy(seen.root.sequence, seen.root.write), roots.encode(seen.root))
            repository.branch(secrets.token_hex(4))
        gc(repository, 0, force=True)
        assert not named & names(repository)
