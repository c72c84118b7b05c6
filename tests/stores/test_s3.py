"""S3 against a real server: identities, prefixes, and what a listing may show."""

import base64
import hashlib
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.kit.servers import BUCKET, Place, Server
from weightvc.errors import AccessDenied, KeyNotFound
from weightvc.stores import Got, open_store


def test_the_reader_can_get_and_nothing_else(s3_place: Place) -> None:
    store, reader = s3_place.open(), s3_place.open_reader()
    etag = store.put("kind/k", b"value")
    assert reader.get("kind/k") == Got(b"value", etag, 5)
    assert reader.get("kind/k", start=1, length=2) == Got(b"al", etag, 5)
    assert reader.get("kind/k", length=0) == Got(b"", etag, 5)
    assert reader.get("kind/k", unless_etag=etag) is None
    for call in (
        lambda: reader.put("kind/l", b""),
        lambda: reader.create("kind/l", b""),
        lambda: reader.swap("kind/k", b"", etag),
        lambda: list(reader.list()),
    ):
        with pytest.raises(AccessDenied):
            call()
    assert isinstance(reader.delete(["kind/k"])["kind/k"], AccessDenied)
    assert store.get("kind/k") == Got(b"value", etag, 5)


def test_wrong_credentials(s3_place: Place) -> None:
    with pytest.raises(AccessDenied, match="check the secret key"):
        s3_place.open(secret_key="wrong").get("k")
    with pytest.raises(AccessDenied, match="check the access key"):
        s3_place.open(access_key="nobody").get("k")


def test_spellings_of_one_place_and_its_sibling(s3_server: Server) -> None:
    base = s3_server.place().url
    stores = [open_store(base + tail, **s3_server.options) for tail in ("/p", "/p/", "//p", "//p//")]
    sibling = open_store(f"{base}/p2", **s3_server.options)
    assert {store.url for store in stores} == {f"{base}/p/"}
    for i, store in enumerate(stores):
        store.put(f"k{i}", b"x")
    sibling.put("k0", b"sibling")
    for store in stores:
        assert [one.key for one in store.list()] == ["k0", "k1", "k2", "k3"]
    assert stores[0].delete(one.key for one in stores[1].list()) == {}
    assert list(stores[2].list()) == []
    got = sibling.get("k0")
    assert got is not None
    assert got.data == b"sibling"


def test_no_such_bucket(s3_server: Server) -> None:
    store = open_store("s3://no-such-bucket/p", **s3_server.options)
    with pytest.raises(KeyNotFound):
        store.get("k")
    with pytest.raises(KeyNotFound, match="no-such-bucket"):
        list(store.list())


def test_large_object(s3_place: Place) -> None:
    data = bytes(range(256)) * (20 << 12)  # 20 MiB: a first part and a rest
    store = s3_place.open()
    etag = store.put("pack", data)
    got = store.get("pack")
    assert got is not None
    assert (got.data == data, got.etag, got.size) == (True, etag, len(data))


def test_objects_lie_where_the_url_says(s3_place: Place, s3_server: Server) -> None:
    s3_place.open().put("kind/k", b"value")
    prefix = s3_place.url.removeprefix(f"s3://{BUCKET}/")
    assert s3_server.client().get_object(Bucket=BUCKET, Key=f"{prefix}/kind/k")["Body"].read() == b"value"


def test_a_writer_that_dies_before_the_body_leaves_what_was_there(s3_place: Place) -> None:
    """SeaweedFS stores an empty object for a head without a body, unless the head says what the body's digest is."""
    store = s3_place.open()
    store.put("root", b"old")
    heads = []
    client = store._client()
    client.meta.events.register("before-send.s3.PutObject", lambda request, **_: heads.append(request.headers))
    store.put("other", b"new")
    digest = heads[0]["Content-MD5"].decode()
    assert digest == base64.b64encode(hashlib.md5(b"new").digest()).decode()
    there = urlsplit(
        client.generate_presigned_url(
            "put_object", Params={"Bucket": store.bucket, "Key": f"{store.prefix}root", "ContentMD5": digest}
        )
    )
    with socket.create_connection((there.hostname, there.port)) as dying:
        head = f"PUT {there.path}?{there.query} HTTP/1.1\r\nHost: {there.netloc}\r\nContent-MD5: {digest}\r\n"
        dying.sendall(f"{head}Content-Length: 3\r\n\r\n".encode())
    time.sleep(0.5)
    assert bytes(store.get("root").data) == b"old"
