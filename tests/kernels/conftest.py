"""Where real checkpoints lie, for those who have them."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def chain() -> tuple[Path, Path]:
    """Paths of a bf16 base and of its AdamW steps ("k/tensor/at" and "k/tensor/bits"), from WEIGHTVC_CHAIN."""
    folder = os.environ.get("WEIGHTVC_CHAIN")
    if not folder:
        pytest.skip("WEIGHTVC_CHAIN is not set")
    return Path(folder, "base.safetensors"), Path(folder, "adamw.safetensors")
