"""Sources at s3:// URLs, against a real server."""

import json
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.numpy

from tests.kit.servers import BUCKET
from weightvc.errors import AccessDenied, BadFile
from weightvc.sources import open_source

from .contents import content, files

ONE = safetensors.numpy.save({"a": np.arange(50_000, dtype="<f4"), "b": np.array(7, "<i8")})
TWO = safetensors.numpy.save({"c": np.arange(5, dtype="u1")})


@pytest.fixture
def sign_in(s3_server, monkeypatch):
    """Have s3fs use the server as the given identity."""
    s3fs = pytest.importorskip("s3fs")

    def as_identity(options):
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
        monkeypatch.setenv("AWS_DEFAULT_REGION", options["region"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_key"])

    as_identity(s3_server.options)
    yield as_identity
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def folder(s3_server, sign_in):
    """A prefix with a sharded checkpoint in it: its path, its files, and a function that writes."""
    prefix = f"in-{secrets.token_hex(6)}"
    client = s3_server.client()

    def put(path: str, data: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path}", Body=data)

    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}).encode()
    kept = {"1.safetensors": ONE, "2.safetensors": TWO, "m.safetensors.index.json": index, "sub/e": b""}
    for path, data in kept.items():
        put(path, data)
    return prefix, kept, put


def test_a_prefix_and_a_key(folder):
    prefix, kept, _ = folder
    source = open_source(f"s3://{BUCKET}/{prefix}")
    assert files(source) == kept
    assert list(content(source)) == [("", "a"), ("", "b"), ("", "c")]
    expected = np.arange(50_000, dtype="<f4").tobytes()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: source.read(0, at, min(at + 7001, len(expected))), range(0, 200_000, 7001)))
    assert b"".join(parts) == expected
    source.check()
    single = open_source(f"s3://{BUCKET}/{prefix}/2.safetensors")
    assert files(single) == {"model.safetensors": TWO}
    single.check()


@pytest.mark.parametrize("change", ["other", "longer", "gone"])
def test_a_change_is_noticed_without_a_cached_listing(folder, s3_server, change):
    prefix, _, put = folder
    whole = open_source(f"s3://{BUCKET}/{prefix}")
    single = open_source(f"s3://{BUCKET}/{prefix}/2.safetensors")
    if change == "gone":
        s3_server.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/2.safetensors")
    else:
        put("2.safetensors", TWO[:-1] + b"\xff" if change == "other" else TWO + b"x")
    for source in (whole, single):
        with pytest.raises(BadFile, match=r"2\.safetensors"):
            source.check()


def test_a_new_file_is_seen_by_the_next_open(folder):
    prefix, kept, put = folder
    open_source(f"s3://{BUCKET}/{prefix}").close()
    put("x.json", b"{}")
    assert files(open_source(f"s3://{BUCKET}/{prefix}")) == {**kept, "x.json": b"{}"}


def test_nothing_there_and_not_allowed(folder, s3_server, sign_in):
    prefix, _, _ = folder
    for url in (f"s3://{BUCKET}/{prefix}/none", f"s3://{BUCKET}/{prefix}-none", "s3://no-such-bucket-here/x"):
        with pytest.raises(BadFile, match=url):
            open_source(url)
    sign_in({**s3_server.options, "secret_key": "wrong"})
    with pytest.raises(AccessDenied, match=prefix):
        open_source(f"s3://{BUCKET}/{prefix}")
