"""Liveness: what the root names, and nothing else; what later writers name is spared."""

import secrets
from dataclasses import replace

import numpy as np
import pytest

import weightvc
from tests.kit.weights import Bits, flipped, tensor, tiny_format
from weightvc.errors import Corrupt
from weightvc.objects import catalogue, frame, key
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import live, swap

START = {("", "w"): tensor("BF16", (3000,), 0)}


def listed(repository: weightvc.Repository) -> set[str]:
    return {one.key for one in repository.store.list()}


def test_everything_that_was_published_is_alive_and_nothing_else(repository, tmp_path):
    with tiny_format():
        weights = START
        for step in range(12):
            repository.commit(Bits(weights), step=step, base=step % 5 == 0)
            weights = {("", "w"): flipped(weights["", "w"], 0.3, step)}
        (tmp_path / "d").mkdir()
        from safetensors.numpy import save_file

        save_file({"w": np.arange(9, dtype=np.float32)}, tmp_path / "d" / "model.safetensors")
        (tmp_path / "d" / "vocab.txt").write_bytes(secrets.token_bytes(100_000))
        repository.commit(tmp_path / "d", branch="other", expect="")
        repository.tag("v1")
        repository.tag("v2")
        root = repository.refresh()
        found = live.of_root(repository._shelf, root)
        kinds = {name.partition("/")[0] for name in listed(repository) if name != "root"}
        assert kinds == {"manifest", "pack", "schema", "layout", "file", "segment", "page"}
        dead = {name for name in listed(repository) if name not in found}
        # Segments and pages that the root no longer names; all else is of some version.
        assert {name.partition("/")[0] for name in dead} == {"segment", "page"}
        assert {ref.key for ref in root.segments} | {root.tags} == {
            name for name in listed(repository) - dead if name.startswith(("segment/", "page/"))
        }
        assert found.names <= listed(repository)


def test_what_later_writers_name_is_alive(repository):
    repository.commit(Bits(START))
    make = key.Transaction(1)
    names = [make.key(kind, b"x") for kind in ("page", "manifest", "file", "pack")]
    root = repository.refresh()
    last = replace(root.tail[-1], extra={"alternatives": [{"at": names[1]}, [names[2]]], "n": 5})
    root = replace(root, extra={"index": {"by step": names[0]}}, tail=(*root.tail[:-1], last))
    found = live.of_root(repository._shelf, root)
    assert set(names[:3]) <= found.names
    assert names[3] in found  # the pack is of the transaction of a manifest that is named
    assert key.Transaction(1).key("pack", b"x") not in found
    with pytest.raises(Corrupt):
        assert "foreign/thing" in found


def test_a_page_that_cannot_be_read_keeps_anything_from_being_called_dead(repository):
    repository.commit(Bits(START))
    repository.tag("v1")
    root = repository.refresh()
    assert root.tags is not None
    repository.store.put(root.tags, frame.header(frame.PAGE))
    with pytest.raises(Corrupt):
        live.of_root(weightvc.open(repository.url, cache=None)._shelf, swap.must_read(repository.store).root)


def test_what_a_segment_names_is_what_its_entries_name(repository, tmp_path):
    """It is read without reading the entries."""
    first = repository.commit(Bits(START), message="manifest/" + "0" * 64 + ".1-" + "0" * 32 + "-0")
    for step in range(3):
        repository.commit(Bits({("", "w"): flipped(START["", "w"], 0.3, step)}), base=True)
    repository.compact(share=1)
    repository.reset("main", "main~1", rewind=True, message=key.Transaction(1).key("pack", b"x"))
    repository.expire(Policy({"*": Rules(last=1)}, 0))
    entries = list(repository.refresh().tail)
    assert {entry.op for entry in entries} == {"commit", "expired", "reset"}
    later = key.Transaction(1).key("file", b"x")
    entries[0] = replace(entries[0], extra={"more": [{later: 1}]})
    found = catalogue.decode_keys(catalogue.encode_segment(entries), "a segment")
    assert found == catalogue.keys_of(entries)
    places = [entry.place for entry in entries if entry.place is not None]
    named = {name for place in places for name in (place.schema, *(way.manifest for way in place.all_ways))}
    assert found.names == {later, *named}
    assert found.released == {one for entry in entries for one in entry.released} != set()
    assert first.id not in found.names


@pytest.mark.parametrize("value", [5, None, "manifest/x", ["a"], {}])
def test_an_entry_that_names_what_is_no_key_is_corrupt(repository, value):
    repository.commit(Bits(START))
    fields = catalogue.to_json(repository.refresh().tail[0])
    for bad in ({**fields, "manifest": value}, {**fields, "files": [value]}, {**fields, "ways": [value]}):
        data = frame.encode(frame.SEGMENT, {"entries": [fields, bad], "weightvc": "segment 1"})
        with pytest.raises(Corrupt, match="segment 7"):
            catalogue.decode_keys(data, "segment 7")
