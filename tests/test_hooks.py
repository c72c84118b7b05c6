"""Hooks, in the libraries that call them."""

import logging
import re
import secrets
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weightvc
from weightvc import hooks
from weightvc.errors import BadTensor, Fenced, NotPublished, Refused, Unavailable
from weightvc.repository import Repository


@pytest.fixture
def repository() -> Repository:
    return weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)


def trained(repository: Repository, source: Any, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Steps of an optimizer with the hook; the weights after each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    handle = hooks.post_step(optimizer, repository, model if source == "module" else source(model), **more)
    out = []
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append({name: value.clone() for name, value in model.state_dict().items()})
    handle.remove()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    repository.flush()
    return out


def test_each_step_of_an_optimizer_is_a_version(repository):
    expected = trained(repository, "module", 4, first=7)
    assert [version.step for version in repository.log()] == [10, 9, 8, 7]
    for step, weights in enumerate(expected, 7):
        loaded = repository.load(f"main@{{step={step}}}")
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_some_steps_of_what_a_function_gives(repository):
    expected = trained(repository, lambda model: lambda: {"served": model.weight}, 5, every=2, dtype="bfloat16")
    assert [version.step for version in repository.log()] == [4, 2, 0]
    assert torch.equal(repository.load()["served"], expected[4]["weight"].bfloat16())


def test_what_fails_does_not_end_the_training(repository, caplog):
    put, left, lock = repository.store.put, [2], threading.Lock()

    def fails_twice(*arguments: Any) -> Any:
        with lock:
            left[0] -= 1
            if left[0] >= 0:
                raise Unavailable("no network")
        return put(*arguments)

    repository.store.put = fails_twice
    expected = trained(repository, "module", 6)
    said = " ".join(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    lost = [int(step) for step in re.findall(r"step (\d+) was not published", said)]
    published = [version.step for version in repository.log()][::-1]
    assert published[-1] == 5
    assert lost
    assert sorted([*published, *lost]) == list(range(6))
    assert torch.equal(repository.load()["weight"], expected[5]["weight"])


def test_another_trainer_ends_it(repository):
    trained(repository, "module", 1)
    weightvc.open(repository.url, cache=None).claim()
    with pytest.raises(NotPublished) as caught:
        trained(repository, "module", 3, first=1)
    assert isinstance(caught.value.failures[0][1], Fenced)
    assert [version.step for version in repository.log()] == [0]


def test_what_cannot_be_is_refused(repository):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    hooks.post_step(optimizer, repository, {"n": None})
    with pytest.raises(BadTensor, match="NoneType"):
        optimizer.step()


@pytest.mark.parametrize("hook", ["post_step", "trainer_callback", "WeightTransfer"])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"step": 3}, "step"),
        ({"first": "a"}, "first"),
        ({"first": -1}, "first"),
        ({"source": 3}, "source|a builtins.int cannot be committed"),
        ({"repository": "s3://bucket/policy"}, "s3://bucket/policy.*Repository"),
        ({"dtyp": "bfloat16"}, "dtyp.*options of Repository.commit_async"),
        ({"dtype": "bf17"}, "bf17"),
        ({"names": "hff"}, "names"),
        ({"codec": "best"}, "codec='best'"),
        ({"queue": 0}, "queue=0"),
        ({"when_full": "drop"}, "when_full='drop'"),
        ({"metadata": [1]}, r"metadata=\[1\]"),
        ({"transform": 3}, "transform=3"),
        ({"branch": "a//b"}, "a//b"),
    ],
)
def test_arguments_are_refused_when_the_hook_is_made(repository, hook, more, says):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    given = {"repository": repository, **more}
    if hook == "post_step":
        given = {"source": {}, **given, "optimizer": optimizer}
    if hook == "WeightTransfer":
        given = {"step": lambda: 1, **given}
    with pytest.raises(Refused, match=says):
        getattr(hooks, hook)(**given)
    optimizer.step()
    assert repository.branches() == {}


def test_names_are_for_modules(repository):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(Refused, match="`names`"):
        hooks.post_step(optimizer, repository, {"w": torch.ones(2)}, names="as-is")
    with pytest.raises(Refused, match="`names`"):
        hooks.WeightTransfer(repository, lambda: 1, names="as-is")
    hooks.post_step(optimizer, repository, torch.nn.Linear(2, 2), names="as-is", first=np.int64(3))
    optimizer.step()
    repository.flush()
    assert repository.resolve().step == 3


def test_a_trainer_of_transformers(repository: Repository, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    row = torch.arange(8)
    trainer = Trainer(
        model,
        TrainingArguments(
            tmp_path, max_steps=4, per_device_train_batch_size=1, report_to=[], use_cpu=True, learning_rate=0.01,
            save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for _ in range(8)],
        callbacks=[hooks.trainer_callback(repository, every=2, dtype="bfloat16", run="sft")],
    )  # fmt: skip
    trainer.train()
    assert [(version.step, version.run) for version in repository.log()] == [(4, "sft"), (2, "sft")]
    # As save_pretrained writes it: with its config, and without the tied lm_head.
    assert "config.json" in repository.files()
    repository.checkout("main", tmp_path / "served")
    served = LlamaForCausalLM.from_pretrained(tmp_path / "served")
    assert served.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(served.state_dict()[name], value.bfloat16()), name
    assert "lm_head.weight" not in repository.load()
