"""Names of refs and tensors, and paths of files: the same rules on every store, and nothing written outside."""

import json
import unicodedata

import pytest

import weightvc
from tests.kit.weights import Bits, file_bytes, held, lying, tensor
from weightvc.errors import BadFile, BadName, Conflict, RefNotFound, Refused

ACCEPTED = ["exp", "exp/1", "A", "a", "v1.2", "x=y+z", "a-b", "_", "HEADs", "123", "a" * 120, "lock"]
REFUSED = [
    "", "//", "a//b", "/a", "a/", ".", "..", "a/..", "a/../b", ".a", "a/.b", "a.", "a..b", "a\\b", "a\nb", "a b",
    "é", unicodedata.normalize("NFD", "é"), "x.lock", "a.lock/b", "-x", "a/-x", "HEAD", "head", "@", "a@{1}", "a~1",
    "a^", "a:b", "a*", "a\0", "0" * 64, "A" * 64, "a" * 121, "\u202e", "refs/heads/\u0430",
]  # fmt: skip
WEIGHTS = {("", "w"): tensor("BF16", (4,), 0)}


def test_every_store_takes_the_same_names(place, again):
    repository = again()
    heads = {}
    for i, name in enumerate(ACCEPTED):
        heads[name] = repository.commit(Bits(WEIGHTS), branch=name, message=str(i)).id
        repository.tag(name, name)
    for name in REFUSED:
        with pytest.raises(BadName):
            repository.branch(name, heads["exp"])
        with pytest.raises(BadName):
            repository.tag(name, heads["exp"])
        if name != "HEAD":  # which means the default branch there
            with pytest.raises(BadName):
                repository.commit(Bits(WEIGHTS), branch=name)
    assert again().branches() == heads  # and no two collided
    assert again().tags() == heads


def test_what_refs_mean(repository):
    ids = [repository.commit(Bits(WEIGHTS), step=i, run="ab"[i % 2]).id for i in range(5)]
    repository.tag("best", "main~3")
    repository.branch("exp", "main~1")
    side = repository.commit(Bits(WEIGHTS), branch="exp", step=9)
    expected = {
        "HEAD": ids[4], "@": ids[4], "main": ids[4], "main~": ids[3], "main^": ids[3], "main~2": ids[2],
        "main~1~1": ids[2], "main^^": ids[2], "main~0": ids[4], "best": ids[1], "best~1": ids[0], ids[2]: ids[2],
        ids[2][:12]: ids[2], "main@{0}": ids[4], "main@{1}": ids[3], "main@{step=3}": ids[3], "@{step=3}": ids[3],
        "main@{run=a}": ids[4], "main@{run=b,step=1}": ids[1], "main@{step=3}~1": ids[2], "exp": side.id,
        "exp@{1}": ids[3], "exp@{step=4}": None, "main~5": None, "main@{5}": None, "nope": None, "feedfeedfeed": None,
    }  # fmt: skip
    for ref, ident in expected.items():
        if ident is None:
            with pytest.raises(RefNotFound):
                repository.resolve(ref)
        else:
            assert repository.resolve(ref).id == ident, ref
    for ref in ("main@{x=1}", "best@{1}", "main~x", "main@{1", "main@{-1}"):
        with pytest.raises((BadName, RefNotFound)):
            repository.resolve(ref)
    merged = repository.commit(Bits(WEIGHTS), parents=["exp"])
    assert merged.parents == (ids[4], side.id)
    assert {version.id for version in repository.log()} == {*ids, side.id, merged.id}


def test_branches_and_tags_are_kept_from_mistakes(repository):
    first, second = (repository.commit(Bits(WEIGHTS), message=str(i)) for i in range(2))
    repository.tag("v1", first.id)
    repository.tag("v1", first.id)
    with pytest.raises(Conflict, match="v1"):
        repository.tag("v1", second.id)
    repository.delete_tag("v1")
    with pytest.raises(Conflict, match="before it was deleted"):
        repository.tag("v1", second.id)
    repository.tag("v1", second.id, force=True)
    with pytest.raises(Refused, match="rewind"):
        repository.reset("main", first.id)
    with pytest.raises(Conflict, match="exists"):
        repository.branch("main", first.id)
    repository.branch("b", first.id)
    repository.reset("b", "main")
    assert repository.delete_branch("b") == second.id
    with pytest.raises(RefNotFound, match="'b'"):
        repository.delete_branch("b")
    assert [entry.op for entry in repository.reflog("b")] == ["delete", "reset", "branch"]
    repository.set_default_branch("main")
    with pytest.raises(RefNotFound):
        repository.set_default_branch("b")


def test_tensor_names_are_never_paths(repository, tmp_path):
    """Empty, hostile, huge, and names that differ in case or Unicode form alone: all are kept exactly."""
    names = ["", "../../x", "a\0b", "n" * 5000, "Case", "case", unicodedata.normalize("NFC", "é")]
    names += [unicodedata.normalize("NFD", "é"), "/etc/x", "a/b", "C:\\x", "\u202e", "__proto__", " ", "\n"]
    weights = {("", name): tensor("BF16", (3,), i) for i, name in enumerate(names)}
    repository.commit(Bits(weights))
    assert held(repository) == weights
    repository.checkout("main", tmp_path / "in" / "side" / "out")
    assert lying(tmp_path / "in" / "side" / "out") == weights
    assert set(repository.load(framework="numpy")) == set(names)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["in/side/out/.weightvc", "in/side/out/model.safetensors"]
    assert repository.commit(tmp_path / "in" / "side" / "out").tree == repository.resolve("main~1").tree


PATHS = ["../../s.safetensors", "/etc/x", "a\\..\\b", "C:x", "a\0b", "a/../../b", "./x", "", "a//b"]


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_an_index_are_refused_at_commit(repository, tmp_path, path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(file_bytes(WEIGHTS))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"w": path}}))
    with pytest.raises((BadFile, BadName)):
        repository.commit(folder)
    assert repository.branches() == {}


def test_a_link_that_leads_out_is_refused_at_commit(repository, tmp_path):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(file_bytes(WEIGHTS))
    (folder / "link").symlink_to("../secret")
    with pytest.raises(BadFile, match="link"):
        repository.commit(folder)


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_a_stored_layout_are_refused_at_checkout(repository, tmp_path, path):
    """A hostile repository cannot make a reader write elsewhere."""
    from weightvc.sources.base import Layout, LayoutFile

    class Hostile(Bits):
        layout = Layout((LayoutFile(path, 4, b"evil"),))

    hostile = Hostile({})
    hostile.layout = Layout((LayoutFile(path, 4, b"evil"),))
    try:
        repository.commit(hostile)
    except Refused:
        return
    target = tmp_path / "a" / "b" / "c" / "out"
    with pytest.raises(BadName):
        weightvc.open(repository.url, cache=None).checkout("main", target)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not target.exists()


def test_paths_that_collide_are_refused(repository, tmp_path):
    from weightvc.sources.base import Layout, LayoutFile

    for pair in (("A", "a"), ("é", unicodedata.normalize("NFD", "é")), ("a", "a/b"), ("x", "x")):
        source = Bits({})
        source.layout = Layout(tuple(LayoutFile(path, 1, b"x") for path in pair))
        made = repository.commit(source, branch=None)
        with pytest.raises(Refused):
            repository.checkout(made.id, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_metadata_that_json_changes_is_refused(repository):
    good = {"lr": 1e-6, "n": 2**60, "é": ["x", None, True, {"a": 0.1}]}
    assert dict(repository.commit(Bits(WEIGHTS), metadata=good).metadata) == good
    assert dict(weightvc.open(repository.url, cache=None).resolve().metadata) == good
    for bad in ({"x": float("nan")}, {"x": (1, 2)}, {1: "x"}, {"x": b"x"}, {"x": "y" * 20_000}, {"x": "\ud800"}):
        with pytest.raises(Refused):
            repository.commit(Bits(WEIGHTS), metadata=bad)
    for labels in ({"step": -1}, {"step": 1.5}, {"step": True}, {"run": 3}, {"message": None}):
        with pytest.raises(Refused):
            repository.commit(Bits(WEIGHTS), **labels)
    assert len(list(repository.log())) == 1
