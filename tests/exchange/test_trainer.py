"""The commands that docs/trainers.md has for a trainer that cannot be changed, beside a real one."""

import shlex
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Shell, shell
from tests.kit.pages import blocks

__all__ = ["shell"]


def documented() -> list[str]:
    """The arguments of the line for a Trainer, without those that have it go on for ever."""
    (block,) = [block for block in blocks("docs/trainers.md", "sh") if "import out" in block.text]
    words = shlex.split(block.text.replace("\\\n", " "), comments=True)
    return [word for word in words[1:] if word != "--follow"]


@pytest.fixture
def trained(shell: Shell) -> Path:
    """The checkpoints of three steps, as the Trainer of transformers saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    row = torch.arange(8)
    where = shell.cwd / "out"
    Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            where, max_steps=3, save_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True,
            learning_rate=1e-3, disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for _ in range(8)],
    ).train()  # fmt: skip
    return where


def test_what_a_trainer_of_transformers_saves_is_exported_as_deltas(shell: Shell, trained: Path) -> None:
    assert (trained / "checkpoint-3" / "trainer_state.json").exists()
    shell.run("init")
    shell.run(*documented())
    assert [one["step"] for one in shell.json("log")] == [3, 2, 1]
    rows = shell.out("export", "main", "served").splitlines()
    assert [": whole, " in row for row in rows] == [True, False, False]
    # What an engine needs is there.
    assert {"config.json", "model.safetensors"} <= {
        path.name for path in (shell.cwd / "served/weight_v000001").iterdir()
    }
