"""The golden repository of what retention and collection write; tests/golden/make.py wrote it."""

import json
import shutil
from pathlib import Path

import pytest

import weightvc
from tests.kit.weights import held
from weightvc.errors import Expired
from weightvc.objects import catalogue, key
from weightvc.objects import root as roots
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import collect, live, pins

GOLDEN = Path(__file__).parents[1] / "golden" / "retention"


@pytest.fixture
def golden(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "repository", copy_function=shutil.copyfile)
    expected = json.loads((tmp_path / "repository" / "expected.json").read_text())
    (tmp_path / "repository" / "expected.json").unlink()
    return weightvc.open(tmp_path / "repository", cache=None), expected


def sums(weights) -> list[str]:
    import hashlib

    return [hashlib.sha256(tensor.data).hexdigest() for _, tensor in sorted(weights.items())]


def test_what_is_kept_is_read_and_the_rest_is_expired(golden):
    repository, expected = golden
    assert repository.branches() == expected["branches"]
    assert repository.tags() == expected["tags"]
    log = {version.id for version in repository.log()}
    entries = {entry.new: entry for entry in repository._refs().catalogue if entry.version is not None}
    kinds = set()
    for wanted in expected["versions"]:
        entry = entries[wanted["id"]]
        kinds.add((entry.op, entry.expired is not None))
        if wanted["id"] in expected["kept"]:
            assert sums(held(repository, wanted["id"])) == [one["sha256"] for one in wanted["tensors"]]
        else:
            with pytest.raises(Expired):
                held(repository, wanted["id"])
        assert wanted["id"] in log or wanted["message"]
        assert entry.version.step == wanted["step"]
    assert kinds == {("commit", False), ("commit", True), ("expired", True)}


def test_root_page_pins_and_copy_say_what_they_said(golden):
    repository, _ = golden
    root = repository.refresh()
    assert roots.decode(roots.encode(root), "it") == root
    assert repository.policy() == Policy({"*": Rules(last=1, meta={"keep": True}), "exp": Rules(within=86400)}, None)
    page = collect.read_page(repository._shelf, root)
    assert page.noted == ((4, 1_767_225_600_000_000), (9, 1_767_225_601_000_000))
    assert page.since == 1_767_225_602_000_000
    (dead,) = page.dead
    assert dead in {one.key for one in repository.store.list()}
    assert root.horizon == 4
    found = pins.read(repository.store, 0)
    assert sorted((pin.begin, len(pin.versions)) for pin in found.held if pin.begin) == [(7, 0)]
    head = repository.entry("main")
    (lease,) = [pin for pin in found.held if pin.begin is None]
    assert lease.names == set(live.named(head))
    assert lease.versions == {head.new}
    (copy,) = [one.key for one in repository.store.list("root.d/")]
    assert key.COPY.fullmatch(copy)
    assert roots.decode(repository.store.get(copy).data, copy) == root
    for entry in root.tail:
        assert catalogue.from_json(catalogue.to_json(entry), "it") == entry


def test_the_collector_goes_on_from_there(golden):
    repository, expected = golden
    (dead,) = collect.read_page(repository._shelf, repository.refresh()).dead
    repository.gc()
    left = {one.key for one in repository.store.list()}
    assert dead not in left
    repository.gc(grace=0, force=True)
    for ident in expected["kept"]:
        held(repository, ident)
