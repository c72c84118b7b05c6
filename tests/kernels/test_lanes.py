"""Which lanes differ: by numpy, and by the compiled pass once numba is loaded."""

import subprocess
import sys

import numpy as np
import pytest

from weightvc_kernels import lanes


@pytest.mark.parametrize("lane", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0, 1e-4, 0.01, 0.5, 1])
def test_the_compiled_pass_finds_what_numpy_finds(lane: int, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightvc_kernels import context_kernels  # noqa: F401

    assert lanes.compiled()
    rng = np.random.default_rng(lane)
    monkeypatch.setattr(lanes, "_PIECE", 1 << 12)
    monkeypatch.setattr(lanes, "_local", type("Room", (), {})())
    for size in (lanes.MANY, lanes.MANY + 1, lanes.MANY + 31, 3 * lanes.MANY + 63):
        for first in (0, 1, 3):
            old = np.frombuffer(rng.bytes((size + first) * lane), lanes.dtype_of(lane))[first:]
            new = old.copy()
            chosen = rng.random(size) < density
            new[chosen] ^= lanes.dtype_of(lane).type(1 << 8 * lane - 1)
            at = lanes.changed(old, new)
            assert at.dtype == np.int64
            assert at.tolist() == np.flatnonzero(chosen).tolist()


def test_numba_is_not_loaded_for_it() -> None:
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from weightvc_kernels import lanes\n"
        "old, new = np.zeros((2, 1 << 20), np.uint16)\n"
        "new[77] = 1\n"
        "assert lanes.changed(old, new).tolist() == [77]\n"
        "assert not {'numba', 'torch'} & set(sys.modules)\n"
        "import weightvc_kernels.context_kernels\n"
        "assert lanes.changed(old, new).tolist() == [77]\n"
        "assert 'weightvc_kernels.lanes_kernels' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
