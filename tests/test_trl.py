"""Publishing from TRL: its own AsyncGRPOTrainer, with a rollout worker that has no engine."""

import inspect
import itertools
import logging
import os
import queue
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

import weightvc
from tests.kit.servers import free_ports
from weightvc.errors import BadTensor, Fenced, NotPublished, Refused, Unavailable
from weightvc.hooks import WeightTransfer
from weightvc.repository import Repository

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

SAMPLES = 3
"""Samples of a step."""


def attention(
    module: Any, query: Any, key: Any, value: Any, _: Any, *, scaling: float, tree_kv_index: Any, **tree: Any
) -> tuple[Any, None]:
    """TRL's attention over a packed row, which it has for GPUs alone: each segment sees the path that leads to it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1)[0].index_select(1, tree_kv_index) for one in (key, value))
    out = torch.empty_like(query[0])
    ends, lasts = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
    for (start, stop), (first, last) in zip(itertools.pairwise(ends), itertools.pairwise(lasts)):
        scores = query[0, :, start:stop] @ key[:, first:last].transpose(1, 2) * scaling
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(last - first - (stop - start) + 1)
        out[:, start:stop] = scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, first:last]
    return out.transpose(0, 1).unsqueeze(0), None


class Rollouts:
    """A RolloutWorkerProtocol of samples that were drawn before, each as new as it is asked for."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        self.told: list[int] = []
        self.error: Exception | None = None
        self._random = np.random.default_rng(0)
        self._groups = itertools.count()

    def start(self) -> None:
        self._fill(1)

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.told.append(model_version)
        self._fill(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise self.error or RuntimeError("nothing was drawn")

    def _fill(self, model_version: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        group = next(self._groups)
        for i in range(4 * SAMPLES if self.error is None else 0):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=self._random.integers(2, 32, 8),
                    completion_mask=np.array([0] * 4 + [1] * 4),
                    old_log_probs=np.full(8, -3.5, np.float32),
                    advantage=(-1.0) ** i,
                    model_version=model_version,
                    group_id=group,
                    metrics={"reward": 0.0},
                )
            )


class Weights(TrainerCallback):
    """The parameters after each step."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.of[state.global_step] = {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.fixture
def repository() -> Repository:
    return weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def trainer_of(
    model: Path, out: Path, repository: Repository, steps: int, *, options: Any = None, trl: Any = None, **more: Any
) -> Any:
    """A trainer that publishes to a repository, with an attention that a CPU has."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, "<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    settings = {
        "max_steps": steps, "per_device_train_batch_size": SAMPLES, "token_budget": 0, "report_to": "none",
        "learning_rate": 0.01, "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1,
    }  # fmt: skip
    trainer: Any = AsyncGRPOTrainer(
        str(model),
        args=AsyncGRPOConfig(str(out), **{**settings, **(trl or {})}),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * SAMPLES}),
        processing_class=tokenizer,
        weight_transfer=WeightTransfer(repository, lambda: trainer.state.global_step, **(options or {})),
        **{"rollout_worker": Rollouts(), **more},
    )
    AttentionInterface.register("tree_fa3", attention)  # over its own, which it registers when it is made
    return trainer


Make = Callable[..., Any]


@pytest.fixture
def make(model: Path, tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a trainer that publishes to the repository."""
    # By which it would look up how fast a GPU is.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "cpu")

    def trainer(steps: int = 4, **more: Any) -> Any:
        return trainer_of(model, tmp_path / "out", repository, steps, **more)

    return trainer


def fails(*_: Any) -> Any:
    """What a store does that is away."""
    raise Unavailable("no network")


def steps(repository: Repository) -> list[int | None]:
    return [version.step for version in repository.log()][::-1]


def test_it_has_what_trl_calls():
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    calls = {name: call for name, call in vars(WeightTransferProtocol).items() if not name.startswith("_")}
    assert calls
    for name, call in calls.items():
        assert inspect.signature(getattr(WeightTransfer, name)).parameters.keys() == (
            inspect.signature(call).parameters.keys()
        )


def test_each_weight_sync_is_a_version(make: Make, repository: Repository) -> None:
    weights = Weights()
    trainer = make(5, options={"dtype": "bfloat16", "run": "rl"}, trl={"weight_sync_steps": 2}, callbacks=[weights])
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert steps(repository) == [0, 2, 4]
    assert trainer.rollout_worker.told == [1, 2, 3]
    assert {version.run for version in repository.log()} == {"rl"}
    for step in (0, 2, 4):
        served, held = repository.load(f"main@{{step={step}}}"), before if step == 0 else weights.of[step]
        assert served.keys() == held.keys()
        for name, value in held.items():
            assert torch.equal(served[name], value.bfloat16()), name
    assert repository.diff("main~2", "main").changed > 0


def test_adapters_are_merged_in_what_is_published(make: Make, repository: Repository) -> None:
    from peft import LoraConfig

    trainer = make(2, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trainer.train()
    assert steps(repository) == [0, 1, 2]
    served = repository.load()
    assert not [name for name in served if "lora" in name or "base_layer" in name]
    merged = trainer.model.merge_and_unload().state_dict()
    for name, value in served.items():
        assert torch.equal(value, merged[name]), name
    changed = {tensor.name for tensor in repository.diff("main~2", "main").tensors if tensor.changed}
    assert changed == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qv"}


def test_a_run_that_starts_again_goes_on_with_its_steps(make: Make, repository: Repository, tmp_path: Path) -> None:
    make(2, trl={"save_strategy": "steps", "save_steps": 2}).train()
    repository.claim()
    make(3).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert steps(repository) == [0, 1, 2, 2, 3]
    assert repository.diff("main~2", "main~1").changed == 0


def test_another_trainer_ends_it(make: Make, repository: Repository) -> None:
    class Claims(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                repository.flush()
                weightvc.open(repository.url, cache=None).claim()

    trainer = make(20, callbacks=[Claims()])
    with pytest.raises(NotPublished) as caught:
        trainer.train()
    assert isinstance(caught.value.failures[0][1], Fenced)
    assert trainer.state.global_step < 20
    assert steps(repository) == [0, 1]


@pytest.mark.parametrize("last", [2, 20])
def test_what_is_not_published_ends_the_training(make: Make, repository: Repository, last: int) -> None:
    put = repository.store.put

    class Cuts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                repository.flush()
                repository.store.put = fails

    trainer = make(last, callbacks=[Cuts()])
    with pytest.raises(NotPublished, match="step 2 was not published: no network"):
        trainer.train()
    assert trainer.state.global_step <= 5
    repository.store.put = put
    assert steps(repository) == [0, 1]
    make(1).train()
    assert steps(repository) == [0, 1, 0, 1]


def test_what_ends_the_training_is_heard_of_first(
    make: Make, repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(20)
    trainer.rollout_worker.error = RuntimeError("the worker has died")
    repository.store.put = fails
    with pytest.raises(RuntimeError, match="the worker has died"):
        trainer.train()
    assert "step 0 was not published" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
    repository.flush()


def rank(model: str, out: str, url: str) -> None:
    """One of two ranks, which have half of each parameter; run in a process of its own."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.cuda.get_device_name = lambda *_: "cpu"
    torch.set_num_threads(1)
    with weightvc.open(url, cache=None) as repository:
        trainer = trainer_of(Path(model), Path(out), repository, 1)
        fully_shard(trainer.model)
        assert all(isinstance(value, DTensor) for value in trainer.model.parameters())
        for step in range(2):
            trainer.state.global_step = step
            trainer._sync_weight()
            with torch.no_grad():
                for value in trainer.model.parameters():
                    value.add_(1)
        assert trainer.accelerator.num_processes == 2
        if trainer.accelerator.is_main_process:
            trainer.weight_transfer.destroy()


def test_what_ranks_have_shards_of_is_published_whole(model: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        command = "import sys; from tests.test_trl import rank; rank(*sys.argv[1:])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", command, model, tmp_path / "out", tmp_path / "repository"],
                env={
                    **os.environ, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
                },
                cwd=Path(__file__).parents[1],
            )
            for i in range(2)
        ]  # fmt: skip
        try:
            assert [one.wait(200) for one in ranks] == [0, 0]
        finally:
            for one in ranks:
                one.kill()
        assert steps(repository) == [0, 1]
        held = dict(Qwen2ForCausalLM.from_pretrained(model).named_parameters())
        for step in range(2):
            served = repository.load(f"main@{{step={step}}}")
            assert served.keys() == held.keys()
            for name, value in held.items():
                assert torch.equal(served[name], value + step), name


def test_what_cannot_be_kept_is_refused_once_all_was_gathered(repository: Repository) -> None:
    gathered = []

    def tensors(first: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (("a", first), ("b", torch.ones(2)), ("a", first)):
            gathered.append(name)
            yield name, tensor

    transfer = WeightTransfer(repository, lambda: 0)
    with pytest.raises(BadTensor, match="more than one tensor of a name: a"):
        transfer.send_weights(tensors(torch.ones(2)))
    assert gathered == ["a", "b", "a"]
    with pytest.raises(BadTensor, match="sparse"):
        transfer.send_weights(iter([("a", torch.ones(2).to_sparse())]))
    assert not repository.branches()


def test_what_has_no_meaning_is_refused(repository: Repository) -> None:
    for step, more in ((3, {}), (lambda: 0, {"dtype": "int3"})):
        with pytest.raises(Refused):
            WeightTransfer(repository, step, **more)
    with pytest.raises(Refused, match="whole number"):
        WeightTransfer(repository, lambda: 1.5).send_weights(iter([("w", torch.ones(2))]))
