"""URLs and options: what they open, what is refused, and that credentials show nowhere."""

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.kit.stub import Status, Stub
from weightvc.errors import AccessDenied, BadName, Refused, WeightvcError
from weightvc.stores import open_store
from weightvc.stores.local import LocalStore
from weightvc.stores.memory import MemoryStore
from weightvc.stores.remote import RemoteStore
from weightvc.stores.s3 import S3Store


def test_memory_is_shared_by_name() -> None:
    store = open_store("memory://test-open")
    assert isinstance(store, MemoryStore)
    store.put("k", b"v")
    assert open_store("memory://test-open/").get("k") is not None
    assert list(open_store("memory://test-open-2").list()) == []


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(tmp_path / "a b").put("k", b"v")
    for url in ("a b", "./a b/", f"{tmp_path}/a b", f"file://{tmp_path}/a%20b", f"FILE://localhost{tmp_path}/a%20b"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == f"{tmp_path}/a b"
        assert store.get("k") is not None


def test_others_go_through_fsspec(tmp_path: Path) -> None:
    assert isinstance(open_store("https://example.invalid/repo"), RemoteStore)
    assert isinstance(open_store("local://" + str(tmp_path)), RemoteStore)


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("s3://bucket", "s3://bucket/"),
        ("s3://bucket/", "s3://bucket/"),
        ("s3://bucket//a///b", "s3://bucket/a/b/"),
        ("S3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a?endpoint_url=http://127.0.0.1:1&region=eu-west-1&secret_key=hush", "s3://bucket/a/"),
    ],
)
def test_s3_urls(url: str, want: str) -> None:
    store = open_store(url)
    assert isinstance(store, S3Store)
    assert store.url == want


def test_an_address_opens_it_again_and_has_no_secret() -> None:
    said = {"endpoint_url": "http://127.0.0.1:1", "region": "eu-west-1", "profile": "a&b", "anonymous": True}
    store = open_store("s3://bucket/a", **said, access_key="key", secret_key="hush", session_token="hush")
    assert store.address == (
        "s3://bucket/a/?endpoint_url=http://127.0.0.1:1&region=eu-west-1&profile=a%26b&anonymous=true"
    )
    assert open_store(store.address).address == store.address
    assert open_store("s3://bucket/a").address == "s3://bucket/a/"
    assert open_store("memory://a").address == "memory://a"


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "file://host/share",
        "s3://",
        "s3:///key",
        "s3://b/a/../c",
        "s3://b/a b",
        "s3://key:hush@bucket/p",
        "s3://bucket/p?endpoint_url=http://key:hush@host",
        "s3://bucket/p?attempts=many",
        "no-such-scheme://x",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(BadName) as caught:
        open_store(url)
    assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_unknown_options_are_named() -> None:
    with pytest.raises(Refused, match=r"'endpoint'.*endpoint_url"):
        open_store("s3://bucket/p?endpoint=http://127.0.0.1:1")
    with pytest.raises(Refused, match="'region'"):
        open_store("memory://x", region="eu-west-1")


def test_credentials_show_nowhere(stub: Stub) -> None:
    store = open_store(
        f"s3://weights/p?endpoint_url={stub.endpoint_url}&access_key=visible&secret_key=hush&session_token=quiet",
        attempts=1,
    )
    stub.fault(Status(403), times=1)
    stub.fault(Status(500), times=None)
    shown = [store.url, repr(store), str(store)]
    for call in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.create("k", b"")):
        with pytest.raises(WeightvcError) as caught:
            call()
        shown.append("".join(traceback.format_exception(caught.value)))
    for text in shown:
        assert "hush" not in text
        assert "quiet" not in text
        assert "visible" not in text
    assert stub.log[0].headers["x-amz-security-token"] == "quiet", "the options in the URL were used"


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://bucket/p", endpoint_url="http://127.0.0.1:9")
    for call in (lambda: store.get("k"), lambda: store.create("k", b"")):
        with pytest.raises(AccessDenied, match="set up credentials"):
            call()
    with pytest.raises(AccessDenied, match="nobody"):
        open_store("s3://bucket/p", profile="nobody").get("k")


def test_endpoint_from_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 reads it; a host name shows whether the path style was kept, which other servers need."""
    port = stub.endpoint_url.rpartition(":")[2]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    open_store("s3://weights/p").put("k", b"v")
    assert stub.objects == {"p/k": b"v"}


def test_anonymous(stub: Stub) -> None:
    open_store(f"s3://weights/p?endpoint_url={stub.endpoint_url}&anonymous=true").put("k", b"v")
    assert "authorization" not in stub.log[0].headers


def test_importing_costs_nothing() -> None:
    heavy = "{'boto3', 'fsspec', 'torch', 'numpy', 'numba'}"
    code = f"import sys, weightvc, weightvc.stores, weightvc.stores.probe; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_pickles_keep_the_options(stub: Stub) -> None:
    store = stub.place("p").open()
    store.put("k", b"v")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("k").data == b"v"
    assert again.stats.writes == 0
