from tests.repository.conftest import again, memory_url, place, repository

__all__ = ["again", "memory_url", "place", "repository"]
