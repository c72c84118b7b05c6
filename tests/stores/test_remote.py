"""Other URLs through fsspec: reading works, writing needs a promise, errors are told apart."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from weightvc.errors import AccessDenied, KeyNotFound, Unavailable, UnsafeStore
from weightvc.stores import open_store
from weightvc.stores.remote import RemoteStore


class _Files(SimpleHTTPRequestHandler):
    """Files of a directory; no ranges, as Python's server has none; 403 under closed/."""

    def do_GET(self) -> None:
        if self.path.startswith("/closed/"):
            self.send_error(403)
        else:
            super().do_GET()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_writes_need_a_promise(tmp_path: Path) -> None:
    store = RemoteStore(f"file://{tmp_path}")
    etag = store.put("k", b"v")
    for call in (lambda: store.create("l", b""), lambda: store.swap("k", b"", etag)):
        with pytest.raises(UnsafeStore, match="single_writer=True"):
            call()
    assert not store.conditional


def test_reads_over_http(http: str, tmp_path: Path) -> None:
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "small").write_bytes(b"small")
    large = bytes(range(256)) * 8192
    (tmp_path / "kind" / "large").write_bytes(large)
    store = open_store(http)
    got = store.get("kind/small", start=1, length=2)
    assert got is not None
    assert (got.data, got.size) == (b"ma", 5)
    assert store.get("kind/small", unless_etag=got.etag) is None
    part = store.get("kind/large", start=1_000_000, length=1000)
    assert part is not None
    assert (part.data, part.size) == (large[1_000_000:1_001_000], len(large)), "though the range was ignored"
    with pytest.raises(KeyNotFound):
        store.get("kind/missing")
    with pytest.raises(AccessDenied):
        store.get("closed/k")
    with pytest.raises(Unavailable, match="cannot be listed"):
        list(store.list())


def test_nobody_listens() -> None:
    with pytest.raises(Unavailable):
        open_store("http://127.0.0.1:9/x").get("k")


def test_nobody_listens_where_it_is_connected_at_once() -> None:
    with pytest.raises(Unavailable, match=r"ftp://127\.0\.0\.1 does not answer"):
        open_store("ftp://me:secret@127.0.0.1:9/x")


def test_listing_error_is_raised(tmp_path: Path) -> None:
    """fsspec's own find() would leave out the folder that cannot be listed."""
    store = RemoteStore(f"file://{tmp_path}", single_writer=True)
    store.put("a/k", b"")
    store.put("b/k", b"")

    def ls(path: str, detail: bool = True, **_: object) -> object:
        if path.endswith("/b"):
            raise OSError("input/output error")
        return original(path, detail=detail)

    original = store._fs.ls
    store._fs.ls = ls
    try:
        with pytest.raises(Unavailable, match="input/output error"):
            list(store.list())
    finally:
        store._fs.ls = original
