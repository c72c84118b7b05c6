from tests.engines.conftest import host, memory_url, repository

__all__ = ["host", "memory_url", "repository"]
