import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weightvc
from tests.kit.garbage import Clock
from weightvc.repository import Repository


@pytest.fixture
def memory_url() -> str:
    """A fresh place in memory."""
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture(params=["memory", "local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A fresh place in each kind of store: its URL and the options to open it."""
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}", {}
    if request.param == "local":
        return str(tmp_path / "repository"), {}
    found = request.getfixturevalue("s3_place")
    return found.url, found.options


@pytest.fixture
def again(place: tuple[str, dict[str, Any]]) -> Iterator[Callable[..., Repository]]:
    """Open the repository, made at `place`, once more, without a cache unless told."""
    url, options = place
    opened = [weightvc.init(url, cache=None, **options)]

    def one(**more: Any) -> Repository:
        opened.append(weightvc.open(url, **{"cache": None, **options, **more}))
        return opened[-1]

    yield one
    for repository in opened:
        repository.close()


@pytest.fixture
def repository(memory_url: str) -> Repository:
    """An empty repository in memory, without a cache."""
    return weightvc.init(memory_url, cache=None, author="test")


@pytest.fixture
def clock(repository: Repository) -> Clock:
    """The clock of the store of `repository`, which stands still until it is moved."""
    return Clock(repository)
