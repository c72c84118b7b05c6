from pathlib import Path

import pytest

from tests.kit import chain as real


@pytest.fixture
def chain() -> tuple[Path, Path]:
    """Paths of a bf16 base and of its AdamW steps ("k/tensor/at" and "k/tensor/bits"), from WEIGHTVC_CHAIN."""
    return real.file("base"), real.file("adamw")
