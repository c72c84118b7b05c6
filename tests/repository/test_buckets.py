"""Buckets that somebody has set up in a way of their own: with versioning, with a quota."""

import secrets

import pytest

import weightvc
from tests.kit.ceph import Ceph
from tests.kit.weights import Bits, flipped, held, tensor
from weightvc.errors import StateUnknown, Unavailable, UnsafeStore
from weightvc.objects.retention import Rules

START = {("", "w"): tensor("BF16", (3000,), 0)}


def step(number: int):
    return {("", "w"): flipped(START["", "w"], 0.1, number)}


@pytest.fixture
def bucket(s3_server) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    s3_server.client().create_bucket(Bucket=name)
    return name


def versioning(s3_server, bucket: str, status: str) -> None:
    s3_server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})


def test_versioning_is_turned_on(s3_server, bucket):
    """On Ceph conditions no longer hold there, on SeaweedFS they do."""
    repository = weightvc.init(f"s3://{bucket}/p", cache=None, **s3_server.options)
    first = repository.commit(Bits(START))
    versioning(s3_server, bucket, "Enabled")
    if not isinstance(s3_server, Ceph):
        repository.commit(Bits(step(1)))
        weightvc.init(f"s3://{bucket}/q", cache=None, **s3_server.options)
        return
    with pytest.raises(UnsafeStore, match="parallel writers win one create"):
        weightvc.init(f"s3://{bucket}/q", cache=None, **s3_server.options)
    with pytest.raises(StateUnknown, match="not the object that was read"):
        repository.commit(Bits(step(1)))
    assert [version.id for version in repository.log()] == [first.id]
    assert held(repository) == START
    versioning(s3_server, bucket, "Suspended")
    repository.commit(Bits(step(1)))
    again = weightvc.open(f"s3://{bucket}/p", cache=None, **s3_server.options)
    assert held(again) == step(1)
    assert [version.id for version in again.log()][1:] == [first.id]


def test_collection_frees_nothing_where_the_bucket_keeps_versions(s3_server, bucket):
    if isinstance(s3_server, Ceph):
        pytest.skip("no repository can be made in such a bucket of Ceph")
    versioning(s3_server, bucket, "Enabled")
    repository = weightvc.init(f"s3://{bucket}/p", cache=None, **s3_server.options)
    for i in range(3):
        repository.commit(Bits(step(i)), base=True)
    gone = repository.entry(repository.resolve("main~2").id).place.manifest
    repository.expire(Rules(last=1))
    assert repository.gc(grace=0, force=True).deleted.objects["manifest"] == 2
    assert gone not in {one.key for one in repository.store.list()}
    client = s3_server.client()
    kept = client.list_object_versions(Bucket=bucket, Prefix=f"p/{gone}")["Versions"]
    assert len(kept) == 1
    assert held(repository) == step(2)


def test_a_full_bucket(s3_server, bucket):
    """Nothing is published, nothing is lost, reading goes on; with more room so do commits."""
    if not isinstance(s3_server, Ceph):
        pytest.skip("SeaweedFS has no quota that S3 can see")

    def quota(size: int) -> None:
        for order in (["set", "--max-size", str(size)], ["enable"]):
            s3_server.run(
                "radosgw-admin", "quota", *order, "--quota-scope", "bucket", "--uid", "admin", "--bucket", bucket
            )

    repository = weightvc.init(f"s3://{bucket}/p", cache=None, **s3_server.options)
    first = repository.commit(Bits(START))
    quota(4096)  # less than there is
    with pytest.raises(Unavailable, match="is full"):
        repository.commit(Bits(step(1)))
    assert [version.id for version in repository.log()] == [first.id]
    assert held(repository) == START
    quota(1 << 30)
    repository.commit(Bits(step(1)))
    assert held(weightvc.open(f"s3://{bucket}/p", cache=None, **s3_server.options)) == step(1)
