"""Recovery with what maintenance does: real copies of the root, real lists of the dead, real further ways."""

from __future__ import annotations

import random

import pytest

import weightvc
from tests.kit.weights import Bits, held, tiny_format
from tests.repository.test_fsck import flip, numbers, reads, spoil, weights
from tests.repository.test_rebuild import fresh_lazy as fresh
from weightvc.objects import key
from weightvc.protocol import live

collect = pytest.importorskip("weightvc.protocol.collect")
retention = pytest.importorskip("weightvc.objects.retention")


@pytest.fixture
def repository(memory_url):
    with tiny_format():
        made = weightvc.init(memory_url, cache=None)
        for i in range(12):
            made.commit(Bits(weights(i)), step=i)
        yield made


def whole(url: str) -> None:
    report = fresh(url).fsck(read_data=1)
    assert report.ok, report.damages


def named(url: str) -> set[str]:
    opened = fresh(url)
    alive = live.of_root(opened._shelf, opened.refresh())
    return {
        one.key for one in opened.store.list() if one.key == key.ROOT or ("/" in one.key and _alive(one.key, alive))
    }


def _alive(name: str, alive: live.Live) -> bool:
    try:
        return name in alive
    except weightvc.Corrupt:
        return False


def test_the_ways_of_compaction(repository):
    """They are read and compared as others are; and where a base is lost, they lead around it or to it."""
    url = repository.url
    idents = [version.id for version in repository.log()][::-1]
    repository.compact(base_every=4, reverse=True)
    report = fresh(url).fsck(read_data=1)
    assert report.ok
    edges = sum(len(way.edges) for entry in repository.entries() for way in entry.place.all_ways)
    assert report.trees_built == edges > 12
    first = repository.entry(idents[0]).place.manifest
    spoil(repository.store, first, None)
    lost = numbers(fresh(url).fsck().lost)
    assert 11 not in lost
    assert reads(url, idents) == [number for number in range(12) if number not in lost]
    report = fresh(url).fsck(repair=True)
    assert report.ok == (not lost)
    assert reads(url, idents) == [number for number in range(12) if number not in lost]


def test_collection_after_a_root_was_rebuilt(repository):
    """An old copy, and since then versions expired, and were condemned, and half of them deleted. What the new root
    names is never collected, however often the collector runs; and what is left reads."""
    url = repository.url
    repository.copy_root()
    (copy,) = [one.key for one in repository.store.list("root.d/")]
    repository.commit(Bits(weights(12)), step=12, base=True)
    repository.commit(Bits(weights(13)), step=13)
    repository.expire(retention.Rules(last=2))
    sight = collect.look(repository.store)
    before = {one.key for one in repository.store.list()}
    for _ in range(3):
        repository.gc(grace=0, force=True, dry_run=True)
    assert {one.key for one in repository.store.list()} == before
    collect.condemn(repository._shelf, sight, collect.swap.must_read(repository.store), grace=0, force=True)
    page = collect.read_page(repository._shelf, repository.refresh())
    assert len(page.dead) > 3
    doomed = [name for name in page.dead if name.startswith(("manifest", "pack"))]
    random.Random(1).shuffle(doomed)
    repository.store.delete(doomed[::2])  # a collector is at work, and knows the rest
    spoil(repository.store, key.ROOT, flip)
    for one in list(repository.store.list("root.d/")):
        if one.key != copy:
            repository.store.delete([one.key])
    made = fresh(url).rebuild_root(adopt=True)
    assert made.copy == copy
    assert not named(url) & set(page.dead)
    repository.store.delete(doomed)
    whole(url)
    assert held(fresh(url), "main@{step=12}") == weights(12)
    assert held(fresh(url), "main") == weights(13)
    kept = named(url)
    for _ in range(4):
        fresh(url).gc(grace=0, force=True)
        assert kept - {name for name in kept if name.startswith(("page/", "root"))} <= {
            one.key for one in repository.store.list()
        }
    whole(url)
    fresh(url).commit(Bits(weights(14)), step=14)
    assert held(fresh(url), "main") == weights(14)


def test_maintain_and_lose_the_root(repository):
    url = repository.url
    idents = [version.id for version in repository.log()][::-1]
    repository.maintain()
    spoil(repository.store, key.ROOT, lambda data: b"")
    made = fresh(url).rebuild_root(adopt=True)
    assert made.copy is not None
    assert made.copy.startswith("root.d/")
    assert reads(url, idents) == list(range(12))
    whole(url)
    fresh(url).maintain()
    whole(url)
    assert [version.id for version in fresh(url).log()] == idents[::-1]


def test_collection_refuses_and_repair_lets_it_go_on(repository):
    url = repository.url
    spoil(repository.store, repository.refresh().segments[-1].key, flip)
    with pytest.raises(weightvc.Corrupt):
        fresh(url).gc(grace=0)
    assert fresh(url).fsck(repair=True).ok
    fresh(url).gc(grace=0)
    whole(url)


def test_the_collector_begins_anew_where_its_page_is_bad(repository):
    url = repository.url
    repository.store.put(f"pack/{'0' * 64}.{repository.refresh().sequence}-{'0' * 32}-0", b"left behind")
    repository.gc()
    page = fresh(url).refresh().collector
    assert page is not None
    spoil(repository.store, page, flip)
    report = fresh(url).fsck()
    assert [found.key for found in report.damages] == [page]
    assert fresh(url).fsck(repair=True).ok
    fresh(url).gc(grace=0)
    whole(url)
