"""The further ways to a version, in its entry of the catalogue."""

from dataclasses import replace
from typing import Any

import pytest

from tests.objects.test_hostile import COMMIT, ID, name_of
from weightvc.errors import Corrupt
from weightvc.objects import catalogue
from weightvc.objects.catalogue import Way
from weightvc.objects.version import Edge

WAY = {"manifest": name_of("manifest"), "packs": 2, "edges": [[ID, 7, 3], [None, 9, 4]], "bytes": 20}


def test_ways_come_back_as_they_were_and_an_entry_without_them_says_nothing() -> None:
    entry = catalogue.from_json({**COMMIT, "ways": [WAY, {**WAY, "packs": 0}]}, "the object")
    assert entry.place is not None
    assert entry.place.ways[0] == Way(name_of("manifest"), 2, (Edge(ID, 7, 3), Edge(None, 9, 4)), 20)
    assert [way.packs for way in entry.place.all_ways] == [COMMIT["packs"], 2, 0]
    assert entry.place.all_ways[0].edges == (Edge(ID, 5, 2),)
    assert catalogue.to_json(entry) == {**COMMIT, "ways": [WAY, {**WAY, "packs": 0}]}
    assert catalogue.to_json(replace(entry, place=replace(entry.place, ways=()))) == COMMIT


@pytest.mark.parametrize(
    "ways",
    [
        5,
        [5],
        [{}],
        *[[{**WAY, field: value}] for field, value in [
            ("manifest", "../x"), ("manifest", name_of("pack")), ("packs", -1), ("edges", [[ID, 1]]), ("bytes", None)
        ]],
    ],
)  # fmt: skip
def test_a_way_that_is_none_is_corrupt(ways: Any) -> None:
    with pytest.raises(Corrupt, match="the object"):
        catalogue.from_json({**COMMIT, "ways": ways}, "the object")
