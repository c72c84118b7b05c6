"""Fixtures that all tests may use. Servers start when the first test asks, once a process."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.kit.ceph import Ceph
from tests.kit.rclone import Rclone
from tests.kit.seaweed import Seaweed
from tests.kit.servers import Place, Server
from tests.kit.stub import Stub

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("weightvc", deadline=None)
settings.load_profile("weightvc")


_SERVERS: dict[str, type[Server]] = {"seaweed": Seaweed, "ceph": Ceph}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--s3", choices=_SERVERS, help="run only the tests that use a real S3 server, with this one (all: seaweed)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--s3"):
        return
    kept = [item for item in items if _uses_s3(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _uses_s3(item)])
    items[:] = kept


def _uses_s3(item: pytest.Item) -> bool:
    """A test asks for the server, or one of its parameters is "s3"."""
    call = getattr(item, "callspec", None)
    return "s3_server" in getattr(item, "fixturenames", ()) or (call is not None and "s3" in call.params.values())


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A real S3 server: SeaweedFS, or the one that --s3 names. Under pytest-xdist each worker has its own."""
    with _SERVERS[request.config.getoption("--s3") or "seaweed"]() as server:
        yield server


@pytest.fixture
def s3_place(s3_server: Server) -> Place:
    """A fresh prefix in a real S3 server: `.url`, `.options`, `.reader_options`, `.open()`, `.open_reader()`."""
    return s3_server.place()


@pytest.fixture(scope="session")
def rclone() -> Iterator[Rclone]:
    """An S3 server that ignores conditions."""
    with Rclone() as server:
        yield server


@pytest.fixture
def stub() -> Iterator[Stub]:
    """An S3 server that misbehaves on demand; see tests/kit/stub.py."""
    with Stub() as server:
        yield server
