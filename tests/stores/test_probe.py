"""The probe accepts stores that keep the conditions and refuses those that do not, with the reason."""

import json
from pathlib import Path

import pytest

from tests.kit.rclone import Rclone
from tests.kit.servers import Place, free_ports
from tests.kit.stub import Body, Drop, IgnoreConditions, Late, Status, Stub
from weightvc.errors import AccessDenied, Unavailable, UnsafeStore
from weightvc.stores import open_store
from weightvc.stores.probe import probe
from weightvc.stores.remote import RemoteStore


def test_a_real_server_is_accepted(s3_place: Place) -> None:
    store = s3_place.open()
    assert probe(store) == {"conditional": "probed", "writers": 4, "rounds": 3}
    assert list(store.list()) == [], "it cleans up"


def test_what_is_conditional_is_not_touched(tmp_path: Path) -> None:
    store = open_store(tmp_path / "repo")
    assert json.dumps(probe(store)) == '{"conditional": "by construction"}'
    assert not (tmp_path / "repo").exists()


def test_rclone_is_refused(rclone: Rclone) -> None:
    store = rclone.place().open()
    with pytest.raises(UnsafeStore, match="Use a store with"):
        probe(store)
    assert list(store.list()) == []


def test_conditions_ignored(stub: Stub) -> None:
    stub.fault(IgnoreConditions(), operation="PutObject", times=None)
    with pytest.raises(UnsafeStore, match="let 4 of 4 parallel writers win one create-if-absent"):
        probe(stub.place().open())


def test_only_if_match_ignored(stub: Stub) -> None:
    """The four creates and the one after them are kept, the swaps are not."""
    stub.fault(IgnoreConditions(), operation="PutObject", after=5, times=None)
    with pytest.raises(UnsafeStore, match="win one swap"):
        probe(stub.place().open(), rounds=1)
    assert not stub.objects


def test_only_an_old_etag_accepted(stub: Stub) -> None:
    stub.fault(IgnoreConditions(), operation="PutObject", after=9)
    with pytest.raises(UnsafeStore, match="swap from an old ETag"):
        probe(stub.place().open(), rounds=1)


def test_only_create_over_an_object_accepted(stub: Stub) -> None:
    stub.fault(IgnoreConditions(), operation="PutObject", after=4)
    with pytest.raises(UnsafeStore, match="create of a key that exists"):
        probe(stub.place().open(), rounds=1)


def test_only_swap_of_a_deleted_key_accepted(stub: Stub) -> None:
    stub.fault(IgnoreConditions(), operation="PutObject", after=10)
    with pytest.raises(UnsafeStore, match="deleted key"):
        probe(stub.place().open(), rounds=1)


def test_a_lost_reply_may_have_won(stub: Stub) -> None:
    stub.fault(Drop(after_apply=True), operation="PutObject")  # the first to arrive: it wins, unheard
    assert probe(stub.place().open())["conditional"] == "probed"


def test_a_lost_write_has_not_won(stub: Stub) -> None:
    stub.fault(Drop(), operation="PutObject")
    assert probe(stub.place().open())["conditional"] == "probed"


def test_a_late_write_is_refused_by_its_condition(stub: Stub) -> None:
    stub.fault(Late(delay=0.01), operation="PutObject", times=2)
    assert probe(stub.place().open())["conditional"] == "probed"


def test_server_errors_are_not_a_verdict(stub: Stub) -> None:
    stub.fault(Status(503), operation="PutObject", times=None)
    with pytest.raises(Unavailable, match="could not be probed"):
        probe(stub.place().open())


def test_listing_that_misses_what_was_written(stub: Stub) -> None:
    empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    stub.fault(Body(empty), operation="ListObjectsV2")
    with pytest.raises(UnsafeStore, match="does not list"):
        probe(stub.place().open())


def test_a_reader_cannot_probe(s3_place: Place) -> None:
    with pytest.raises(AccessDenied):
        probe(s3_place.open_reader())


def test_out_of_reach(stub: Stub) -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unavailable):
        probe(stub.place().open(endpoint_url=f"http://127.0.0.1:{port}", attempts=1))


def test_other_urls_have_no_conditions(tmp_path: Path) -> None:
    with pytest.raises(UnsafeStore, match="single_writer"):
        probe(RemoteStore(f"file://{tmp_path}"))
