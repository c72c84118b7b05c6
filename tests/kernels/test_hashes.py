"""blake3 of many pieces at once, against the library's."""

import subprocess
import sys
from itertools import pairwise

import blake3
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightvc_kernels import hashes
from weightvc_kernels.hash_kernels import LANES, LIMIT

# Where the number of blocks changes, and with it the flags of the last one, or the padding.
SIZES = st.one_of(
    st.sampled_from([0, 1, 3, 4, 63, 64, 65, 127, 128, 129, LIMIT - 1, LIMIT, LIMIT + 1, 5000]), st.integers(0, 1200)
)


def of_library(data: bytes, cuts: list[int]) -> bytes:
    return b"".join(blake3.blake3(data[a:b]).digest() for a, b in pairwise(cuts))


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@given(st.lists(SIZES, max_size=3 * LANES), st.integers(0, 5))
@example([LIMIT] * LANES, 0)
@example([64] * (2 * LANES + 1), 1)
@example([], 0)
def test_pieces_have_the_digests_that_the_library_gives(sizes: list[int], first: int) -> None:
    cuts = [first, *(first + np.cumsum(sizes, dtype=int)).tolist()]
    data = random_bytes(cuts[-1] + 3)
    assert hashes.digests(data, cuts) == of_library(data, cuts)


@pytest.mark.parametrize("size", range(0, LIMIT + 1, 31))
def test_every_length_among_others(size: int) -> None:
    cuts = np.cumsum([0, size, 100, size, LIMIT, size]).tolist()
    data = random_bytes(cuts[-1])
    for held in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert hashes.digests(held, cuts) == of_library(data, cuts)


@pytest.mark.parametrize("cuts", [[0, 11], [-1, 5], [4, 3, 8]])
def test_pieces_outside_of_the_data_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        hashes.digests(bytes(10), cuts)


def test_numba_is_not_loaded_for_them() -> None:
    code = (
        "import sys\n"
        "from itertools import accumulate, repeat\n"
        "from weightvc.objects import frame\n"
        "cuts = list(accumulate(repeat(7, 5000), initial=0))\n"
        "one = frame.digests(bytes(35000), cuts)\n"
        "assert not {'numba', 'torch'} & set(sys.modules)\n"
        "import weightvc_kernels.context_kernels\n"
        "assert frame.digests(bytes(35000), cuts) == one\n"
        "assert 'weightvc_kernels.hash_kernels' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
