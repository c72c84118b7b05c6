"""Real consecutive training steps, for those who have them: WEIGHTVC_CHAIN names the directory.

minilm/base.safetensors         a bf16 model
minilm/OPTIMIZER.safetensors    step k, tensor t: "k/t/at" (flat positions, uint32) and "k/t/bits" (what the
                                elements there became, uint16), against step k - 1
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def file(name: str, folder: str | Path | None = None) -> Path:
    """A file of the chain, of WEIGHTVC_CHAIN's if no other: "base", "adamw" or "muon". Skips the test without any."""
    folder = folder or os.environ.get("WEIGHTVC_CHAIN")
    if not folder:
        import pytest  # what is no test names its folder

        pytest.skip("WEIGHTVC_CHAIN is not set")
    return Path(folder, "minilm", f"{name}.safetensors")


def versions(optimizer: str, steps: int, folder: str | Path | None = None) -> Iterator[bytes]:
    """The base and so many steps after it, each a whole safetensors file."""
    raw = bytearray(file("base", folder).read_bytes())
    changes = load_file(file(optimizer, folder))
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    yield bytes(raw)
    for step in range(1, steps + 1):
        for name, entry in header.items():
            if f"{step}/{name}/at" in changes:
                first, end = entry["data_offsets"]
                bits = np.frombuffer(raw, np.uint16, (end - first) // 2, start + first)
                bits[changes[f"{step}/{name}/at"]] = changes[f"{step}/{name}/bits"]
        yield bytes(raw)
