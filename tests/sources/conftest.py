import pytest


@pytest.fixture
def write(tmp_path):
    """Write a file of raw bytes below tmp_path and return its path."""

    def writer(path: str, data: bytes):
        full = tmp_path / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data)
        return full

    return writer
