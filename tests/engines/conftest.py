"""A repository, a client that keeps slots, and versions of a small model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import weightvc
from tests.kit.engines import digest
from tests.repository.conftest import memory_url, repository
from weightvc.repository import Repository
from weightvc.targets import Slots

__all__ = ["host", "memory_url", "repository"]


def weights(step: int) -> dict[str, torch.Tensor]:
    """A model's; a step changes a few elements of two tensors, NaN-free."""
    generator = torch.Generator().manual_seed(0)
    found = {
        "embed": torch.randn(64, 8, generator=generator).bfloat16(),
        "k": torch.randn(4, 8, generator=generator).bfloat16(),
        "norm": torch.ones(8),
        "q": torch.randn(8, 8, generator=generator).bfloat16(),
        "scale": torch.arange(4, dtype=torch.int32),
    }
    if step:
        found["embed"].view(-1)[step : step + 5] = -float(step)
        found["k"].view(-1)[-step] = float(step)
    return found


@dataclass
class Host:
    """A rollout host: its client, and what it may commit."""

    client: weightvc.Client
    repository: Repository
    slots: Slots

    def commit(self, step: int, content: dict[str, torch.Tensor] | None = None) -> weightvc.Version:
        return self.repository.commit(weights(step) if content is None else content, step=step)

    def update(self, ref: str = "main") -> weightvc.Update:
        return self.client.update(ref)


@pytest.fixture
def host(repository: Repository, tmp_path: Path) -> Host:
    slots = Slots(tmp_path / "slots")
    return Host(weightvc.Client(repository, into=slots), repository, slots)


def of(step: int) -> str:
    """The digest of a step's weights."""
    return digest(weights(step))


Commit = Callable[[int], weightvc.Version]
