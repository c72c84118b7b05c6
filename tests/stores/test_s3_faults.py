"""S3 when the server or the network misbehaves: nothing bad is taken for good, and no write is guessed."""

import multiprocessing
import os

import pytest

from tests.kit.servers import free_ports
from tests.kit.stub import (
    Body,
    Call,
    Cut,
    Drop,
    Hang,
    IgnoreConditions,
    IgnoreRange,
    Late,
    Status,
    Stub,
    WrongRange,
)
from weightvc.errors import (
    AccessDenied,
    KeyExists,
    KeyNotFound,
    PreconditionFailed,
    StateUnknown,
    Unavailable,
    UnsafeStore,
)
from weightvc.stores import Got, Store, open_store

DATA = os.urandom(100_000)


@pytest.fixture
def store(stub: Stub) -> Store:
    opened: Store = stub.place("p").open()
    return opened


# -- conditional writes: one attempt, and an honest answer ------------------------------------------------


def test_a_full_bucket_is_no_matter_of_rights(stub: Stub) -> None:
    """Ceph and others answer 403 where a quota is used up."""
    store = stub.place().open(attempts=2, backoff=0.001)
    stub.fault(Status(403, "QuotaExceeded"), operation="PutObject", times=3)
    for write in (
        lambda: store.put("k", b"v"),
        lambda: store.create("root", b"v"),
        lambda: store.swap("root", b"v", "0" * 32),
    ):
        with pytest.raises(Unavailable, match="is full"):
            write()
    stub.fault(Status(507, "InsufficientStorage"), operation="PutObject")
    with pytest.raises(Unavailable, match="is full"):
        store.put("k", b"v")
    assert not stub.objects


def test_swap_applied_but_reply_lost(stub: Stub, store: Store) -> None:
    etag = store.create("root", b"v1")
    stub.clear()
    stub.fault(Drop(after_apply=True), operation="PutObject")
    with pytest.raises(StateUnknown, match=r"root.*read it again"):
        store.swap("root", b"v2", etag)
    assert stub.count("PutObject") == 1, "sent once: a repeat would meet its own reply"
    got = store.get("root")
    assert got is not None
    assert got.data == b"v2"


def test_swap_dropped_before_it_was_applied(stub: Stub, store: Store) -> None:
    etag = store.create("root", b"v1")
    stub.fault(Drop(), operation="PutObject")
    with pytest.raises(StateUnknown):
        store.swap("root", b"v2", etag)
    assert store.get("root") == Got(b"v1", etag, 2)
    assert store.swap("root", b"v2", etag)  # the same body with the same ETag is what decides it


def test_create_applied_but_reply_lost(stub: Stub, store: Store) -> None:
    stub.fault(Drop(after_apply=True), operation="PutObject")
    with pytest.raises(StateUnknown):
        store.create("root", b"v1")
    with pytest.raises(KeyExists):
        store.create("root", b"v1")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_swap_answered_by_a_server_error(stub: Stub, store: Store, status: int) -> None:
    etag = store.create("root", b"v1")
    stub.clear()
    stub.fault(Status(status), operation="PutObject", times=3)
    for _ in range(3):
        with pytest.raises(StateUnknown, match=str(status)):
            store.swap("root", b"v2", etag)
    assert stub.count("PutObject") == 3
    stub.fault(Status(409), operation="PutObject")
    with pytest.raises(Unavailable, match="409"):
        store.swap("root", b"v2", etag)
    assert store.get("root") == Got(b"v1", etag, 2)


def test_swap_that_lands_late(stub: Stub, store: Store) -> None:
    etag = store.create("root", b"v1")
    stub.fault(Late(), operation="PutObject")
    with pytest.raises(StateUnknown):
        store.swap("root", b"late", etag)
    assert store.get("root") == Got(b"v1", etag, 2)
    newer = store.swap("root", b"v2", etag)
    assert stub.release() == 1
    assert store.get("root") == Got(b"v2", newer, 2), "its condition no longer held"


def test_swap_timed_out(stub: Stub) -> None:
    store = stub.place("p").open(read_timeout=0.2)
    etag = store.create("root", b"v1")
    stub.fault(Hang(1.0), operation="PutObject")
    with pytest.raises(StateUnknown, match="reply was lost"):
        store.swap("root", b"v2", etag)


@pytest.mark.parametrize("status", [409, 429])
def test_create_surely_not_written(stub: Stub, store: Store, status: int) -> None:
    stub.fault(Status(status), operation="PutObject")
    with pytest.raises(Unavailable, match=str(status)):
        store.create("root", b"v1")
    assert stub.objects == {}


def test_nobody_listens(stub: Stub) -> None:
    (port,) = free_ports(1)
    store = stub.place("p").open(endpoint_url=f"http://127.0.0.1:{port}", attempts=2)
    with pytest.raises(Unavailable, match="cannot connect"):
        store.create("root", b"")
    with pytest.raises(Unavailable, match="cannot connect"):
        store.swap("root", b"", "etag")
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list())):
        with pytest.raises(Unavailable, match="2 attempts"):
            call()
    assert isinstance(store.delete(["k"])["k"], Unavailable)


def test_conditions_not_implemented(stub: Stub, store: Store) -> None:
    stub.fault(Status(501), operation="PutObject")
    with pytest.raises(UnsafeStore, match="no conditional writes"):
        store.create("root", b"")


def test_missing_key_is_a_failed_precondition(stub: Stub, store: Store) -> None:
    with pytest.raises(PreconditionFailed, match="no longer"):  # the stub answers 404, as S3 does
        store.swap("root", b"", "0" * 32)


def test_if_match_is_bare(stub: Stub, store: Store) -> None:
    etag = store.create("root", b"v1")
    store.swap("root", b"v2", etag)
    assert '"' not in etag
    assert stub.log[-1].headers["if-match"] == etag
    assert stub.log[0].headers["if-none-match"] == "*"


# -- reads: exact bytes or an error -----------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 60_000, 99_999])
@pytest.mark.parametrize("ranged", [False, True])
def test_body_cut_short(stub: Stub, store: Store, nbytes: int, ranged: bool) -> None:
    etag = store.put("pack", DATA)
    span = {"start": 0, "length": len(DATA)} if ranged else {}
    cut = stub.fault(Cut(nbytes), operation="GetObject", times=2)
    assert store.get("pack", **span) == Got(DATA, etag, len(DATA))
    assert cut.done == 2
    stub.fault(Cut(nbytes), operation="GetObject", times=None)
    with pytest.raises(Unavailable, match="pack"):
        store.get("pack", **span)


@pytest.mark.parametrize(("start", "length"), [(0, 10), (10, 50_000), (99_990, 100), (99_999, None), (200_000, 5)])
def test_range_ignored(stub: Stub, store: Store, start: int, length: int | None) -> None:
    etag = store.put("pack", DATA)
    stub.fault(IgnoreRange(), operation="GetObject", times=None)
    want = DATA[start:] if length is None else DATA[start : start + length]
    assert store.get("pack", start=start, length=length) == Got(want, etag, len(DATA))


def test_range_ignored_and_cut(stub: Stub, store: Store) -> None:
    etag = store.put("pack", DATA)
    stub.fault(IgnoreRange(), operation="GetObject")
    stub.fault(Cut(60_000), operation="GetObject")
    assert store.get("pack", start=50_000, length=50_000) == Got(DATA[50_000:], etag, len(DATA))


def test_wrong_range(stub: Stub, store: Store) -> None:
    etag = store.put("pack", DATA)
    stub.fault(WrongRange(), operation="GetObject")
    assert store.get("pack", start=10, length=5) == Got(DATA[10:15], etag, len(DATA))
    stub.fault(WrongRange(), operation="GetObject", times=None)
    with pytest.raises(Unavailable, match="asked for bytes 10-14"):
        store.get("pack", start=10, length=5)


@pytest.mark.parametrize("action", [Status(503), Status(500), Status(429), Drop()])
def test_reads_are_repeated(stub: Stub, store: Store, action: Status | Drop) -> None:
    etag = store.put("k", b"v")
    stub.fault(action, operation="GetObject", times=5)
    before = store.stats.reads
    assert store.get("k") == Got(b"v", etag, 1)
    assert store.stats.reads - before == 6, "each attempt counts"


def test_missing_once(stub: Stub, store: Store) -> None:
    store.put("k", b"v")
    stub.fault(Status(404), operation="GetObject")
    with pytest.raises(KeyNotFound, match="'k'"):
        store.get("k")
    assert store.get("k") is not None


def test_denied_is_not_missing(stub: Stub, store: Store) -> None:
    stub.fault(Status(403), times=None)
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: store.swap("k", b"", "etag"),
        lambda: list(store.list()),
    ):
        with pytest.raises(AccessDenied, match="ListBucket"):
            call()
    assert isinstance(store.delete(["k"])["k"], AccessDenied)
    assert len(stub.log) == 6, "no use in repeating"


def test_no_such_bucket(stub: Stub) -> None:
    store = open_store("s3://elsewhere/p", **stub.options)
    for call in (
        lambda: store.get("k"),
        lambda: store.put("k", b""),
        lambda: store.create("k", b""),
        lambda: store.swap("k", b"", "etag"),
        lambda: list(store.list()),
    ):
        with pytest.raises(KeyNotFound, match="no bucket 'elsewhere'"):
            call()
    assert isinstance(store.delete(["k"])["k"], KeyNotFound)


# -- large objects ----------------------------------------------------------------------------------------

LARGE = os.urandom(1 << 20) * 70 + b"end"  # 16 MiB, then 32 + 22 MiB in parallel


def test_large_object_in_parts(stub: Stub, store: Store) -> None:
    etag = store.put("pack", LARGE)
    got = store.get("pack")
    assert got is not None
    assert got.data == LARGE
    assert (got.etag, got.size) == (etag, len(LARGE))
    reads = [one for one in stub.log if one.operation == "GetObject"]
    assert [one.headers.get("if-match") for one in reads] == [None, etag, etag]
    part = store.get("pack", start=5, length=50 << 20)
    assert part is not None
    assert part.data == LARGE[5 : 5 + (50 << 20)]


def test_large_object_with_faults(stub: Stub, store: Store) -> None:
    store.put("pack", LARGE)
    stub.fault(Cut(1 << 20), operation="GetObject", after=1)
    stub.fault(IgnoreRange(), operation="GetObject", after=2)
    got = store.get("pack")
    assert got is not None
    assert got.data == LARGE


def test_large_object_when_ranges_are_ignored(stub: Stub, store: Store) -> None:
    store.put("pack", LARGE)
    stub.fault(IgnoreRange(), operation="GetObject", times=None)
    got = store.get("pack")
    assert got is not None
    assert got.data == LARGE
    assert stub.count("GetObject") == 1


@pytest.mark.parametrize("then", [None, IgnoreConditions()], ids=["refused", "If-Match ignored"])
def test_large_object_that_changes_while_it_is_read(stub: Stub, store: Store, then: IgnoreConditions | None) -> None:
    store.put("pack", LARGE)
    other = LARGE[::-1]
    stub.fault(Call(lambda: stub.objects.update({"p/pack": other}), then), operation="GetObject", after=1)
    stub.fault(IgnoreConditions(), operation="GetObject", times=None if then else 0)
    got = store.get("pack")
    assert got is not None
    assert got.data == other, "never a mix"


# -- listings and deletes ---------------------------------------------------------------------------------


def test_listing_error_on_page_two(stub: Stub) -> None:
    store = stub.place("p").open(page_size=2)
    for i in range(5):
        store.put(f"b/{i}", b"")
    fault = stub.fault(Status(503), operation="ListObjectsV2", after=1, times=2)
    assert [one.key for one in store.list()] == [f"b/{i}" for i in range(5)], "repeated until it is complete"
    assert fault.done == 2
    for action, error in ((Status(500), Unavailable), (Status(403), AccessDenied), (Drop(), Unavailable)):
        stub.clear()
        stub.fault(action, operation="ListObjectsV2", after=1, times=None)
        with pytest.raises(error):
            list(store.list())


@pytest.mark.parametrize("body", [b"", b"<html>sign in</html>", b"<ListBucketResult><Contents><Key>p/a</Ke"])
def test_what_is_no_listing_is_not_an_empty_one(stub: Stub, store: Store, body: bytes) -> None:
    store.put("k", b"")
    stub.fault(Body(body), operation="ListObjectsV2", times=None)
    with pytest.raises(Unavailable):
        list(store.list())


@pytest.mark.parametrize(
    "token", ["", "<NextContinuationToken>again</NextContinuationToken>"], ids=["no token", "one token for ever"]
)
def test_listing_without_end(stub: Stub, store: Store, token: str) -> None:
    page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
    stub.fault(Body(page.encode()), operation="ListObjectsV2", times=None)
    with pytest.raises(Unavailable, match="there is more, but not where"):
        list(store.list())
    assert stub.count("ListObjectsV2") <= 2


def test_listing_of_something_else(stub: Stub, store: Store) -> None:
    item = "<Contents><Key>p2/a</Key><Size>0</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{item}</ListBucketResult>"
    stub.fault(Body(page.encode()), operation="ListObjectsV2")
    with pytest.raises(Unavailable, match="not under the prefix"):
        list(store.list())


def test_foreign_objects_are_left_out(stub: Stub, store: Store) -> None:
    store.put("ours", b"")
    stub.objects["p/"] = stub.objects["p/a folder/"] = stub.objects["p/.DS_Store"] = b""
    assert [one.key for one in store.list()] == ["ours"]


def test_deletes_carry_an_md5_in_batches(stub: Stub, store: Store) -> None:
    for i in range(1005):
        stub.objects[f"p/k/{i}"] = b""
    stub.objects["p2/k/0"] = b""
    assert store.delete([f"k/{i}" for i in range(1005)]) == {}
    assert list(stub.objects) == ["p2/k/0"]
    assert stub.count("DeleteObjects") == 2
    assert all("content-md5" in one.headers for one in stub.log)


def test_deletes_that_fail(stub: Stub, store: Store) -> None:
    store.put("a", b"")
    partly = (
        b"<DeleteResult><Error><Key>p/a</Key><Code>SlowDown</Code></Error>"
        b"<Error><Key>p/b</Key><Code>AccessDenied</Code></Error>"
        b"<Error><Key>p/c</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    stub.fault(Body(partly), operation="DeleteObjects")
    failed = store.delete(["a", "b", "c", "d"])
    assert list(failed) == ["b"], "a was asked again, c was not there"
    assert isinstance(failed["b"], AccessDenied)
    assert stub.objects == {}
    stub.fault(Status(503), operation="DeleteObjects", times=None)
    assert {key: type(error) for key, error in store.delete(["x", "y"]).items()} == {
        "x": Unavailable,
        "y": Unavailable,
    }


def test_nothing_is_sent_in_aws_chunks(stub: Stub, store: Store) -> None:
    """The stub answers 501 to them, as some servers do."""
    etag = store.put("k", os.urandom(1 << 20))
    store.create("r", b"1")
    store.swap("k", b"2", etag)
    assert all("x-amz-trailer" not in one.headers for one in stub.log)
    assert all("x-amz-checksum-crc32" not in one.headers for one in stub.log)


# -- connections ------------------------------------------------------------------------------------------


def test_connections_are_kept(stub: Stub, store: Store) -> None:
    etag = store.put("k", DATA)
    for _ in range(3):
        store.get("k")
        store.get("k", start=5, length=10)
        store.get("k", unless_etag=etag)
        list(store.list())
    assert {one.connection for one in stub.log} == {1}


def test_a_forked_child_connects_anew(stub: Stub, store: Store) -> None:
    """Two processes on one connection would read each other's replies."""
    store.put("k", b"v")
    process = multiprocessing.get_context("fork").Process(target=store.get, args=("k",))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    store.get("k")
    parent, child, later = (one.connection for one in stub.log)
    assert child != parent == later
