"""Fixtures that all tests may use. Servers start when the first test asks, once a process."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.kit.rclone import Rclone
from tests.kit.seaweed import Seaweed
from tests.kit.servers import Place
from tests.kit.stub import Stub

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("weightvc", deadline=None)
settings.load_profile("weightvc")


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """A SeaweedFS server: real S3. Under pytest-xdist each worker has its own."""
    with Seaweed() as server:
        yield server


@pytest.fixture
def s3_place(seaweed: Seaweed) -> Place:
    """A fresh prefix in a real S3 server: `.url`, `.options`, `.reader_options`, `.open()`, `.open_reader()`."""
    return seaweed.place()


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
