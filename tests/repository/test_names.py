"""Names of refs and tensors, and paths of files: the same rules on every store, and nothing written outside."""

import json
import unicodedata

import pytest

import weightvc
from tests.kit.weights import Bits, file_bytes, held, lying, tensor
from weightvc.errors import BadFile, BadName, BranchMoved, Conflict, Corrupt, RefNotFound, Refused, TensorNotFound

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
    for name in REFUSED:
        with pytest.raises(BadName):
            repository.branch(name, heads["exp"])
        with pytest.raises(BadName):
            repository.tag(name, heads["exp"])
        if name != "HEAD":  # which means the default branch there
            with pytest.raises(BadName):
                repository.commit(Bits(WEIGHTS), branch=name)
    assert again().branches() == heads  # and no two collided
    for name, ident in heads.items():
        repository.delete_branch(name)  # no tag may have a branch's name
        repository.tag(name, ident)
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
    for ref in (
        "main@{x=1}",
        "best@{1}",
        "main~x",
        "main@{1",
        "main@{-1}",
        "main@{\u00b2}",
        f"main@{{{'9' * 5000}}}",
    ):
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


def test_a_tag_and_a_branch_never_share_a_name(repository):
    """The tag could not be reached."""
    with pytest.raises(Conflict, match="'main' is a branch"):
        repository.tag("main", repository.commit(Bits(WEIGHTS), branch="other").id)  # unborn, but HEAD means it
    repository.commit(Bits(WEIGHTS))
    repository.tag("v1")
    for work in (
        lambda: repository.tag("other", "main", force=True),
        lambda: repository.branch("v1", "main"),
        lambda: repository.commit(Bits(WEIGHTS), branch="v1"),
    ):
        with pytest.raises(Conflict, match="choose another name"):
            work()
    assert (set(repository.branches()), set(repository.tags())) == ({"main", "other"}, {"v1"})


def test_the_default_branch_is_not_deleted(repository):
    repository.commit(Bits(WEIGHTS))
    with pytest.raises(Refused, match="--default"):
        repository.delete_branch("main")
    repository.branch("next")
    repository.set_default_branch("next")
    repository.delete_branch("main")
    assert repository.resolve().id == repository.branches()["next"]


def test_a_branch_that_moved_says_how_to_go_on(repository):
    repository.commit(Bits(WEIGHTS))
    other = weightvc.open(repository.url, cache=None)
    new = other.commit(Bits(WEIGHTS))
    with pytest.raises(BranchMoved, match=r"--rebase.*on_conflict='rebase'.*load") as caught:
        repository.commit(Bits(WEIGHTS))
    assert caught.value.head == new.id
    repository.load(framework="numpy")
    assert repository.commit(Bits(WEIGHTS)).parents == (new.id,)
    newest = other.commit(Bits(WEIGHTS), on_conflict="rebase")
    assert repository.commit(Bits(WEIGHTS), on_conflict="rebase").parents == (newest.id,)
    with pytest.raises(BranchMoved, match="expect the new head"):
        repository.reset("main", "main", expect="main~1")


def test_a_branch_that_moves_in_the_last_instant_says_so_too(repository, monkeypatch):
    from weightvc.protocol import commit

    repository.commit(Bits(WEIGHTS))
    other = weightvc.open(repository.url, cache=None)
    upload = commit.upload

    def late(*arguments, **options):
        monkeypatch.setattr(commit, "upload", upload)
        made = upload(*arguments, **options)
        other.commit(Bits(WEIGHTS))
        return made

    monkeypatch.setattr(commit, "upload", late)
    with pytest.raises(BranchMoved, match="--rebase"):
        repository.commit(Bits(WEIGHTS))


@pytest.mark.parametrize("text", [5, None, ..., "\ud800", b"x"], ids=ascii)
def test_words_that_are_no_text_are_refused(repository, text):
    repository.commit(Bits(WEIGHTS))
    before = repository.refresh()
    for work in (
        lambda: repository.branch("b", message=text),
        lambda: repository.reset("main", "main", message=text),
        lambda: repository.commit(Bits(WEIGHTS), message=text),
    ):
        with pytest.raises(Refused, match="message"):
            work()
    if text is not None:
        with pytest.raises(Refused, match="author"):
            weightvc.open(repository.url, cache=None, author=text)
    assert repository.refresh() == before


def test_options_that_mean_nothing_are_refused(repository):
    repository.commit(Bits({**WEIGHTS, ("part", "v"): WEIGHTS["", "w"]}))
    for work in (
        lambda: repository.commit(Bits(WEIGHTS), on_conflict="rebse"),
        lambda: repository.load(framework="jax"),
        lambda: repository.tensor("main", "w", framework="jax"),
        lambda: repository.tensor("main", "w", rows=5),
        lambda: repository.tensor("main", "w", rows=slice("a", "b")),
        lambda: repository.tensor("main", "w", rows=slice(0, 4, 2)),
    ):
        with pytest.raises(Refused):
            work()
    with pytest.raises(TensorNotFound, match=r"'nope'.*'', 'part'"):
        repository.load(component="nope", framework="numpy")
    assert list(repository.load(component="part", framework="numpy")) == ["v"]
    assert list(repository.load(names="w", framework="numpy")) == ["w"]
    repository.commit(Bits({("unet", "w"): WEIGHTS["", "w"]}))
    with pytest.raises(TensorNotFound, match="unet"):
        repository.load(framework="numpy")
    repository.commit({})
    assert repository.load(framework="numpy") == {}
    assert len(list(repository.log())) == 3


def test_a_page_of_tags_that_names_no_versions_is_corrupt(repository):
    from weightvc.objects import key, root
    from weightvc.protocol import swap
    from weightvc.protocol.refs import encode_tags

    repository.commit(Bits(WEIGHTS))
    repository.tag("v1")
    for tags in ({"v1": 5}, {"v1": "main"}, {"v1": None}):
        seen = swap.must_read(repository.store)
        page = repository._shelf.put(key.Transaction(seen.root.sequence), "page", encode_tags(tags, {}))
        repository.store.swap(key.ROOT, root.encode(seen.root.next(tags=page)), seen.etag)
        with pytest.raises(Corrupt, match="tags"):
            weightvc.open(repository.url, cache=None).resolve("v1")


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
        with pytest.raises((Refused, Corrupt)):
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
