"""Liveness: what the root names, and nothing else; what later writers name is spared."""

import secrets
from dataclasses import replace

import numpy as np
import pytest

import weightvc
from tests.kit.weights import Bits, flipped, tensor, tiny_format
from weightvc.errors import Corrupt
from weightvc.objects import frame, key
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
