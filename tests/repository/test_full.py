"""A store in which nothing fits any more, and how room is made there."""

import os
import time
from collections.abc import Iterator

import pytest

import weightvc
from tests.kit.faults import Full
from tests.kit.garbage import names, step
from tests.kit.weights import Bits, held, tiny_format
from weightvc.errors import Unavailable
from weightvc.objects import key
from weightvc.objects.retention import Rules
from weightvc.protocol import collect, swap
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository


@pytest.fixture(autouse=True)
def _tiny() -> Iterator[None]:
    with tiny_format():
        yield


def fill(again, count: int = 6) -> list[str]:
    return [again().commit(Bits(step(i)), base=True).id for i in range(count)]


def full(repository: Repository, more: int = 0) -> Repository:
    """The repository in a store that has room for `more` bytes."""
    store = Full(repository.store, 0)
    store.capacity = store.used() + more
    return Repository(store, None, author="test")


def condemn(repository: Repository) -> set[str]:
    """Let go of three versions and condemn what they had; its keys."""
    repository.expire(Rules(last=3))
    shelf = Shelf(repository.store, None)
    marked, _ = collect.condemn(shelf, collect.look(shelf.store), swap.must_read(shelf.store), grace=0)
    return set(marked.dead)


def test_what_an_earlier_run_condemned_makes_room_for_the_next(again):
    """A run begins by writing; where that is in vain, what is ripe goes first, for which nothing is written."""
    ids = fill(again)
    listed = condemn(again())
    assert len([name for name in listed if name.startswith("manifest/")]) == 3
    stuck = full(again())
    with pytest.raises(Unavailable):
        stuck.commit(Bits(step(9)))
    done = stuck.gc(grace=0)
    assert done.deleted.objects["manifest"] == 3
    assert not listed & names(again())
    assert not list(again().store.list("probe/"))
    stuck.commit(Bits(step(9)))
    for number, ident in enumerate(ids[3:], 3):
        assert held(again(), ident) == step(number)
    assert again().fsck(read_data=1).ok


def test_the_job_that_does_it_all_makes_room_for_its_next_run(memory_url):
    """It lets go of versions before it collects, which fails where nothing can be written."""
    repository = weightvc.init(memory_url, cache=None)
    fill(lambda: repository)
    listed = condemn(repository)
    repository.expire(Rules(last=2), save=True)
    stuck = full(repository)
    with pytest.raises(Unavailable):
        stuck.maintain(grace=0)
    assert not listed & names(repository)
    assert stuck.maintain(grace=0).collection is not None
    assert repository.fsck(read_data=1).ok


def test_nothing_goes_that_is_not_ripe(again):
    fill(again)
    assert condemn(again())
    stuck = full(again())
    before = names(again())
    for options in ({"grace": 3600}, {"grace": 0, "dry_run": True}):
        with pytest.raises(Unavailable, match="probe/"):
            stuck.gc(**options)
    assert names(again()) == before


def test_a_list_ripens_though_nothing_can_be_written(tmp_path):
    """The store's clock cannot be asked, so this host's tells the time."""
    repository = weightvc.init(tmp_path, cache=None)
    fill(lambda: repository)
    condemn(repository)
    page = repository.refresh().collector
    then = time.time() - 3600
    os.utime(tmp_path / page, (then, then))
    stuck = full(repository)
    with pytest.raises(Unavailable):
        stuck.gc(grace=3700)
    assert stuck.gc(grace=3600).deleted.objects["manifest"] == 3


def test_a_store_that_cannot_be_written_and_has_no_list_says_why(again):
    fill(again)
    with pytest.raises(Unavailable, match="probe/"):
        full(again()).gc(grace=0)


def test_an_object_that_lies_on_another_disk_meanwhile(tmp_path):
    """What operations.md says to do where nothing is condemned yet: a link in an object's place makes room."""
    repository = weightvc.init(tmp_path / "r", cache=None)
    ids = fill(lambda: repository)
    places = [repository.entry(ident).place.manifest for ident in ids]
    packs = {
        number: one
        for number, place in enumerate(places)
        for one in repository.store.list("pack/")
        if key.parse(one.key).transaction == key.parse(place).transaction
    }
    for number in (0, 5):  # of a version that goes, and of one that stays
        pack = tmp_path / "r" / packs[number].key
        pack.rename(tmp_path / pack.name)
        pack.symlink_to(tmp_path / pack.name)
    assert held(repository, ids[0]) == step(0)
    repository.expire(Rules(last=3))
    repository.gc(grace=0)
    gone, kept = (tmp_path / "r" / packs[number].key for number in (0, 5))
    assert not gone.is_symlink()
    assert kept.is_symlink()
    os.replace(tmp_path / kept.name, kept)
    assert repository.fsck(read_data=1).ok
    assert held(repository, ids[5]) == step(5)
