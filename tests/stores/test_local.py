"""The local directory: modes, leftovers, full disks, rights, and writers in several processes."""

import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightvc.errors import AccessDenied, BadName, KeyNotFound, PreconditionFailed, Unavailable
from weightvc.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "repo")


def files(store: LocalStore) -> list[str]:
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())


def test_modes_follow_the_umask(store: LocalStore) -> None:
    before = os.umask(0o002)
    try:
        store.put("a/b", b"")
        store.create("c", b"")
    finally:
        os.umask(before)
    assert (store.root / "a/b").stat().st_mode & 0o777 == 0o664
    assert (store.root / "c").stat().st_mode & 0o777 == 0o664
    assert (store.root / "a").stat().st_mode & 0o777 == 0o775


def test_leftovers_of_a_killed_writer_do_not_show(store: LocalStore) -> None:
    etag = store.create("a/k", b"v1")
    (store.root / "a" / ".tmp-1-dead").write_bytes(b"half")
    (store.root / ".tmp-2-dead").write_bytes(b"half")
    assert [one.key for one in store.list()] == ["a/k"]
    assert store.swap("a/k", b"v2", etag)
    with pytest.raises(BadName):
        store.get("a/.tmp-1-dead")


def test_foreign_files_are_left_out(store: LocalStore) -> None:
    store.put("k", b"")
    (store.root / "with space").write_bytes(b"")
    (store.root / "é").write_bytes(b"")
    assert [one.key for one in store.list()] == ["k"]


@contextmanager
def no_room_for_more_than(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room(store: LocalStore) -> None:
    etag = store.create("k", b"old")
    with no_room_for_more_than(1000):
        for call in (
            lambda: store.put("k", bytes(2000)),
            lambda: store.create("l", bytes(2000)),
            lambda: store.swap("k", bytes(2000), etag),
        ):
            with pytest.raises(Unavailable, match="cannot write"):
                call()
    assert files(store) == [".lock", "k"], "no temporary file is left"
    assert store.swap("k", bytes(2000), etag)


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Nobody may use `folder`, and we are not root."""
    mode = folder.stat().st_mode
    user = os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(mode)


def test_no_rights(store: LocalStore) -> None:
    store.put("a/k", b"v")
    with without_rights(store.root):
        for call in (
            lambda: store.get("a/k"),
            lambda: store.put("a/l", b""),
            lambda: store.create("l", b""),
            lambda: store.swap("a/k", b"", "etag"),
            lambda: list(store.list()),
        ):
            with pytest.raises(AccessDenied, match="right"):
                call()
        assert isinstance(store.delete(["a/k"])["a/k"], AccessDenied)
    assert store.get("a/k") is not None


def test_folder_that_cannot_be_listed() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which is closed to other users
        os.chmod(folder, 0o755)
        store = LocalStore(folder)
        store.put("a/k", b"")
        store.put("b/k", b"")
        with without_rights(store.root / "b"), pytest.raises(AccessDenied):
            list(store.list())


def test_a_file_where_a_folder_is_needed(store: LocalStore) -> None:
    store.put("a", b"")
    with pytest.raises(BadName, match="choose another name"):
        store.put("a/b", b"")
    with pytest.raises(KeyNotFound):
        store.get("a/b")
    assert list(store.list("a/")) == []
    store.put("c/d", b"")
    with pytest.raises(BadName):
        store.put("c", b"")
    with pytest.raises(KeyNotFound):
        store.get("c")


def test_etag_is_of_the_content(store: LocalStore) -> None:
    first = store.create("k", b"one")
    second = store.swap("k", b"two", first)
    assert store.swap("k", b"one", second) == first
    large = store.put("large", bytes(2 << 20))
    assert store.put("large", bytes(2 << 20)) != large
    with pytest.raises(PreconditionFailed):
        store.swap("large", b"", large)


def _add(root: str, times: int) -> None:
    store = LocalStore(root)
    for _ in range(times):
        while True:
            got = store.get("n")
            assert got is not None
            try:
                store.swap("n", b"%d" % (int(got.data) + 1), got.etag)
                break
            except PreconditionFailed:
                pass


def test_writers_in_several_processes_lose_no_update(store: LocalStore) -> None:
    store.create("n", b"0")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add, args=(store.url, 10)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    got = store.get("n")
    assert got is not None
    assert got.data == b"40"
    assert files(store) == [".lock", "n"]
