"""Transforms: what a function makes of the tensors is what is committed, at one moment, and said to be."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import weightvc
from tests.kit.pages import blocks
from weightvc import Transform, hooks
from weightvc.errors import BadName, BadTensor, Refused
from weightvc.repository import Repository


@pytest.fixture
def repository(request: pytest.FixtureRequest) -> Repository:
    return weightvc.init(f"memory://{request.node.name}", cache=None)


def halved(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {f"served.{name}": tensor / 2 for name, tensor in tensors.items()}


HALF = Transform("half", "1", halved)


def test_what_is_committed_is_what_the_function_gives(repository: Repository) -> None:
    given: list[Mapping[str, Any]] = []

    def function(tensors: Mapping[str, Any]) -> dict[str, Any]:
        given.append(tensors)
        return {"sum": tensors["a"] + tensors["b"], "b": tensors["b"]}

    weights = {"a": torch.ones(4), "b": torch.nn.Parameter(torch.arange(4.0))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # float32 is what this one serves
        for step in range(2):
            made = repository.commit(
                weights, step=step, metadata={"lr": 1}, transform=Transform("sum", "v2", function)
            )
            weights["a"] = weights["a"] + 1
    assert made.metadata == {"lr": 1, "transform": "sum", "transform_version": "v2"}
    served = repository.load()
    assert served.keys() == {"sum", "b"}
    assert torch.equal(served["sum"], torch.arange(4.0) + 2)
    # The trainer's own, without what would record gradients.
    assert given[0]["b"].data_ptr() == weights["b"].data_ptr()
    assert not given[0]["b"].requires_grad
    assert repository.diff("main~1", "main").changed == 4


@pytest.mark.parametrize("names", ["as-is", "hf", lambda name: name.upper()])
def test_a_module_is_named_first(repository: Repository, names: Any) -> None:
    model = torch.nn.Linear(2, 3)
    repository.commit(model, names=names, transform=HALF)
    served, named = repository.load(), str.upper if callable(names) else str
    assert served.keys() == {f"served.{named(name)}" for name in ("weight", "bias")}
    assert torch.equal(served[f"served.{named('weight')}"], model.weight / 2)


def test_a_model_of_transformers_is_given_as_it_saves_itself(repository: Repository) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    repository.commit_async(model, transform=HALF).result()
    served = repository.load()
    stacked = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    for expert in range(2):
        assert torch.equal(
            served[f"served.model.layers.0.mlp.experts.{expert}.down_proj.weight"], stacked[expert] / 2
        )
    assert list(repository.files()) == ["model.safetensors"]


def test_files_and_arrays_and_components(repository: Repository, tmp_path: Path) -> None:
    for component in ("vae", "unet"):
        (tmp_path / component).mkdir()
        save_file({"w": torch.full((3,), float(len(component)))}, tmp_path / component / "model.safetensors")
    (tmp_path / "model_index.json").write_text("{}")

    def function(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{component}.{name}": value for component, part in parts.items() for name, value in part.items()}

    repository.commit(tmp_path, transform=Transform("flat", "1", function))
    assert {name: value.tolist() for name, value in repository.load().items()} == {
        "vae.w": [3] * 3,
        "unet.w": [4] * 3,
    }
    repository.commit(
        repository.load(), transform=Transform("split", "1", lambda flat: {"unet": {"w": flat["unet.w"]}})
    )
    assert repository.load(component="unet")["w"].tolist() == [4] * 3
    repository.commit({"w": np.ones(3, np.float16)}, transform=HALF)
    assert repository.load(framework="numpy")["served.w"].tolist() == [0.5] * 3
    with repository.source("main") as source:
        repository.commit(source, transform=Transform("back", "1", lambda t: {"w": t["served.w"] * 2}))
    assert repository.load(framework="numpy")["w"].tolist() == [1] * 3


def test_a_version_is_of_one_step_whatever_the_trainer_does_then(repository: Repository) -> None:
    weights = {"w": torch.zeros(40, 40), "norm": torch.zeros(40)}
    shared = Transform(
        "w8", "1", lambda t: {"w": t["w"].to(torch.float8_e4m3fn), "norm": t["norm"], "n": t["norm"][3:]}
    )
    for step in range(6):
        for tensor in weights.values():
            tensor.fill_(step)
        repository.commit_async(weights, step=step, transform=shared, queue=6)
        for tensor in weights.values():
            tensor.fill_(-1)
    repository.flush()
    for step in range(6):
        served = repository.load(f"main@{{step={step}}}")
        assert {name: set(value.float().flatten().tolist()) for name, value in served.items()} == (
            {name: {step} for name in ("w", "norm", "n")}
        )


def test_a_revert_says_it_too_and_a_plain_commit_does_not(repository: Repository) -> None:
    weights = {"w": torch.ones(2)}
    repository.commit(weights, metadata={"lr": 1}, transform=HALF)
    repository.commit(weights)
    assert repository.resolve().metadata == {}
    assert repository.revert("main~1").metadata == {"transform": "half", "transform_version": "1"}
    assert repository.revert("main~1").metadata == {}


def test_hooks_take_one(repository: Repository) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks.post_step(optimizer, repository, model, transform=HALF)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    repository.flush()
    assert torch.equal(repository.load()["served.bias"], model.bias / 2)
    hooks.WeightTransfer(repository, lambda: 1, transform=HALF).send_weights(iter(model.named_parameters()))
    repository.flush()
    assert torch.equal(repository.load()["served.weight"], model.weight / 2)
    assert {version.metadata["transform"] for version in repository.log()} == {"half"}


@pytest.mark.parametrize(
    ("gives", "error", "says"),
    [
        (lambda t: None, Refused, "what transform 'odd' gave is a NoneType"),
        (lambda t: list(t.items()), Refused, "is a list: let it give a mapping"),
        (lambda t: {}, Refused, "is empty"),
        (lambda t: {"w": 3}, BadTensor, "what transform 'odd' gave has what cannot be kept: 'w'"),
        (lambda t: {3: t["w"]}, BadTensor, "a name of type int"),
        (lambda t: {"w": t["w"].to_sparse()}, BadTensor, "sparse"),
        (lambda t: {"../w": {"w": t["w"]}}, BadName, "what transform 'odd' gave"),
        (lambda t: t["v"], KeyError, "v"),
    ],
)
@pytest.mark.parametrize("call", ["commit", "commit_async"])
def test_what_it_may_not_give(repository: Repository, call: str, gives: Any, error: Any, says: str) -> None:
    weights = {"w": torch.ones(2)}
    with pytest.raises(error, match=says):
        getattr(repository, call)(weights, step=0, transform=Transform("odd", "1", gives))
    assert not repository.branches()
    getattr(repository, call)(weights, step=1, transform=HALF)
    repository.flush()
    assert [version.step for version in repository.log()] == [1]


@pytest.mark.parametrize("call", ["commit", "commit_async"])
def test_what_does_not_go_together(repository: Repository, call: str) -> None:
    commit = getattr(repository, call)
    for transform in (halved, "half", ("half", "1", halved), lambda t: t):
        with pytest.raises(Refused, match=r"no name and no version: give weightvc\.Transform"):
            commit({"w": torch.ones(2)}, transform=transform)
    with pytest.raises(Refused, match="dtype"):
        commit({"w": torch.ones(2)}, transform=HALF, dtype="bfloat16")
    with pytest.raises(Refused, match="'transform_version', which the transform says"):
        commit({"w": torch.ones(2)}, transform=HALF, metadata={"transform_version": "1"})
    assert not repository.branches()


@pytest.mark.parametrize(
    ("name", "version", "function", "says"),
    [
        ("", "1", halved, "name=''"),
        (None, "1", halved, "name=None"),
        ("fp8", " ", halved, "version=' '"),
        ("fp8", 1, halved, "version=1"),
        ("fp8", "1", {}, "no function"),
    ],
)
def test_it_has_a_name_a_version_and_a_function(name: Any, version: Any, function: Any, says: str) -> None:
    with pytest.raises(Refused, match=says):
        Transform(name, version, function)


# The example of docs/trainers.md


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example has defined, once it has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (block,) = [block for block in blocks("docs/trainers.md", "python") if "float8" in block.text]
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    exec(compile(block.text, "docs/trainers.md", "exec"), namespace)
    return namespace


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]


def test_the_example_serves_fused_float8(example: dict[str, Any], tmp_path: Path) -> None:
    with weightvc.open(tmp_path / "quantised", cache=None) as repository:
        assert [version.step for version in repository.log()] == [2, 1, 0]
        assert repository.resolve().metadata == {"transform": "fp8-blocks-qkv", "transform_version": "1"}
        served = repository.load()
        shapes = {name: (str(value.dtype), tuple(value.shape)) for name, value in served.items()}
        assert shapes == {
            "norm.weight": ("torch.bfloat16", (256,)),
            "o_proj.weight": ("torch.float8_e4m3fn", (256, 256)),
            "o_proj.weight_scale_inv": ("torch.float32", (2, 2)),
            "qkv_proj.weight": ("torch.float8_e4m3fn", (768, 256)),
            "qkv_proj.weight_scale_inv": ("torch.float32", (6, 2)),
        }
        trained = torch.cat([example["layer"][f"{part}_proj"].weight.detach() for part in "qkv"])
        # After the last commit there was one more step, of 1e-6.
        gone = dequantised(served["qkv_proj.weight"], served["qkv_proj.weight_scale_inv"]) - trained
        assert gone.abs().max() <= trained.abs().max() * 2**-4 + 2e-6
        assert 0 < repository.diff("main~1", "main").density < 0.05


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 256), (200, 70), (256, 384)])
def test_the_examples_quantiser(example: dict[str, Any], shape: tuple[int, int], ue8m0: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).unsqueeze(1)
    values, scales = example["quantised"](weight.bfloat16(), ue8m0)
    weight = weight.bfloat16().float()
    assert values.shape == shape
    assert values.is_contiguous()
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert scales.dtype == (torch.float8_e8m0fnu if ue8m0 else torch.float32)
    for (row, column), scale in np.ndenumerate(scales.float().numpy()):
        block = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        largest = weight[block].abs().max().item()
        least = np.float32(largest) / np.float32(448)
        assert scale == (2.0 ** np.ceil(np.log2(np.float64(least))) if ue8m0 else least)
        exact = weight[block].double() / float(scale)
        # To half a unit in the last of three bits; below 2^-6, of the subnormals.
        bound = torch.maximum(exact.abs().log2().floor().exp2(), torch.tensor(2.0**-6)) * 2**-4
        assert ((values[block].double() - exact).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("ue8m0", [False, True])
def test_the_examples_quantiser_at_the_edges(example: dict[str, Any], ue8m0: bool) -> None:
    weight = torch.zeros(256, 128)
    weight[128:] = 448 * 2.0**-9
    values, scales = example["quantised"](weight, ue8m0)
    assert scales.flatten().tolist() == [1, 2.0**-9]
    assert torch.equal(dequantised(values, scales), weight)
