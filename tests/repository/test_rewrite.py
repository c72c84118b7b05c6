"""Entries of the catalogue that are written anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import weightvc
from tests.kit import history
from weightvc.errors import Corrupt
from weightvc.objects import frame, key
from weightvc.objects.catalogue import Entry, SegmentRef, Way
from weightvc.objects.root import RING, Root
from weightvc.objects.version import Edge
from weightvc.protocol import rewrite, swap
from weightvc.repository import Repository


@pytest.fixture
def long(memory_url: str) -> tuple[Repository, list[str]]:
    """A repository of 10,001 versions (two full segments, one that is not, and a tail), and their ids."""
    repository = weightvc.init(memory_url, cache=None)
    first = repository.commit({"w": np.zeros(4, np.float16)})
    ids = [first.id, *history.extend(repository.store, 10_000)]
    return weightvc.open(memory_url, cache=None), ids


def gaining(ids: set[str]) -> rewrite.Edit:
    def edit(entry: Entry) -> Entry | None:
        if entry.new not in ids or entry.place is None:
            return None
        way = Way(entry.place.manifest, 0, (Edge(None, 1, 1),), 1)
        return replace(entry, place=replace(entry.place, ways=(*entry.place.ways, way)))

    return edit


def rewrite_now(repository: Repository, edit: rewrite.Edit) -> Root:
    root = repository.refresh()
    transaction = key.Transaction(root.sequence)

    def make(root: Root) -> Root:
        tail, segments = rewrite.rewritten(repository._shelf, root, transaction, edit)
        return root.next(tail=tail, segments=segments)

    return swap.change(repository._shelf, make, transaction).root


def test_only_segments_with_a_changed_entry_are_written(long: tuple[Repository, list[str]]) -> None:
    repository, ids = long
    before = repository.refresh()
    written = repository.stats.writes
    wanted = {ids[4200], ids[4300], ids[10_000]}  # two in the second segment, one in the tail
    after = rewrite_now(repository, gaining(wanted))
    assert repository.stats.writes == written + 2  # the segment, and the root
    assert [new == old for new, old in zip(after.segments, before.segments, strict=True)] == [True, False, True]
    again = weightvc.open(repository.url, cache=None)
    log = list(again.entries())
    assert [entry.new for entry in log] == ids[::-1]
    assert {entry.new for entry in log if entry.place and entry.place.ways} == wanted
    assert after.ring == (*before.ring, after.ring[-1])[-RING:]


def test_a_segment_that_was_written_is_not_written_again(long: tuple[Repository, list[str]]) -> None:
    repository, ids = long
    root = repository.refresh()
    done: dict[str, tuple[SegmentRef, ...]] = {}
    transaction = key.Transaction(root.sequence)
    first = rewrite.rewritten(repository._shelf, root, transaction, gaining({ids[5], ids[10_000]}), done)
    written = repository.stats.writes
    again = rewrite.rewritten(repository._shelf, root, transaction, gaining({ids[5], ids[10_000]}), done)
    assert repository.stats.writes == written
    assert again == first
    assert first[0] != root.tail


def test_nothing_is_written_where_nothing_changes(long: tuple[Repository, list[str]]) -> None:
    repository, _ = long
    root = repository.refresh()
    written = repository.stats.writes
    found = rewrite.rewritten(repository._shelf, root, key.Transaction(root.sequence), lambda _: None)
    assert found == (root.tail, root.segments)
    assert repository.stats.writes == written


def test_a_writer_in_between_loses_nothing(
    long: tuple[Repository, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, ids = long
    other = weightvc.open(repository.url, cache=None)
    made: list[str] = []
    swapping = swap._swap

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(swap, "_swap", swapping)
        made.append(other.branch("beside", ids[5]).id)
        return swapping(*arguments)

    monkeypatch.setattr(swap, "_swap", late)
    rewrite_now(repository, gaining({ids[7]}))
    again = weightvc.open(repository.url, cache=None)
    assert made == [again.branches()["beside"]]
    place = again.entry(ids[7]).place
    assert place is not None
    assert len(place.ways) == 1


def test_a_segment_that_outgrows_its_limit_becomes_two(
    long: tuple[Repository, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, ids = long
    head, _ = frame.decode(frame.SEGMENT, repository.store.get(repository.refresh().segments[0].key).data, "it")
    assert len(list(repository.entries())) == 10_001  # all segments are at hand
    with monkeypatch.context() as small:
        small.setitem(frame.HEAD_LIMITS, frame.SEGMENT, len(frame.canonical(head)) + 10)
        after = rewrite_now(repository, gaining({ids[7]}))
    assert [ref.count for ref in after.segments] == [2048, 2048, 4096, 1801]
    assert [entry.new for entry in weightvc.open(repository.url, cache=None).entries()] == ids[::-1]


def test_a_segment_that_cannot_be_read_is_told(long: tuple[Repository, list[str]]) -> None:
    repository, ids = long
    name = repository.refresh().segments[0].key
    repository.store.put(name, b"rotten")
    with pytest.raises(Corrupt, match=name):
        rewrite_now(weightvc.open(repository.url, cache=None), gaining({ids[9000]}))


def test_a_newest_entry_with_a_long_message_of_another_writer_can_be_rewritten(repository: Repository) -> None:
    made = repository.commit({"w": np.zeros(4, np.float16)})
    transaction = key.Transaction(repository.refresh().sequence)
    swap.change(
        repository._shelf,
        lambda root: replace(root.next(), tail=(replace(root.tail[0], author="a" * 300),)),
        transaction,
    )
    rewrite_now(repository, gaining({made.id}))
