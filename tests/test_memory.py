"""The measure of memory that tests go by: it sees what is taken, whatever was taken before."""

import numpy as np
import pytest

from tests.kit import memory


def test_what_is_taken_is_seen_after_more_was_taken() -> None:
    many = [np.ones(1 << 20, np.uint8) for _ in range(64)]
    del many
    with memory.at_most(16 << 20):
        pass
    with memory.at_most(16 << 20):
        np.ones(4 << 20, np.uint8).sum()
    with pytest.raises(AssertionError, match="16777216 at most"):
        _take(32, 16 << 20)


def _take(count: int, most: int) -> None:
    with memory.at_most(most):
        held = [np.ones(1 << 20, np.uint8) for _ in range(count)]
    del held
