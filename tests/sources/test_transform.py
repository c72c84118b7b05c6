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
from tests.kit.ranks import Job, processes
from weightvc import Transform, hooks
from weightvc.errors import BadName, BadTensor, NotPublished, Refused
from weightvc.ranks import Alone
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


# What comes tensor by tensor, or from many ranks


def fused(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """k and v become one, and what is large gets a scale."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("k"):
            out[f"{name}v"] = torch.cat([tensor, tensors[name.removesuffix("k") + "v"]])
        elif name.endswith("w"):
            out[f"{name}_scale"] = tensor.abs().amax()
            out[name] = (tensor / out[f"{name}_scale"]).to(torch.float8_e4m3fn)
        elif not name.endswith("v"):
            out[name] = tensor
    return out


FUSED = Transform("fused", "3", fused)


def trained(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("0.k", "0.v", "0.w", "1.k", "1.v", "1.w")
    return {**{name: torch.randn(16, 24) + 1e-3 * step for name in names}, "norm": torch.ones(8)}


def buckets(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: weights[name] for name in weights if name.startswith(layer)} for layer in ("1", "0")]


def test_a_writer_serves_what_it_makes_of_each_tensor_and_bucket(repository: Repository) -> None:
    for step in range(2):
        weights = trained(step)
        expected = repository.commit(weights, branch="whole", transform=FUSED)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # float32 is what this one serves
            with repository.writer(step=step, metadata={"lr": 1}, transform=FUSED) as out:
                for bucket in buckets(weights):
                    out.add_all(bucket)
                    for tensor in bucket.values():
                        tensor.zero_()
                out.add("norm", weights["norm"])
        assert out.version is not None
        assert (out.version.tree, out.version.step) == (expected.tree, step)
        assert out.version.metadata == {"lr": 1, "transform": "fused", "transform_version": "3"}
    changes = [[edge.changed for edge in repository.entry(ref).place.edges] for ref in ("main", "whole")]
    assert changes[0] == changes[1]


def test_a_writer_gives_it_components_as_they_were_added(repository: Repository) -> None:
    given: list[Any] = []

    def function(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        given.append(tensors)
        return tensors

    with repository.writer(transform=Transform("same", "1", function)) as out:
        out.add("w", torch.nn.Parameter(torch.ones(2)), component="draft")
        out.add_all({"draft": {"v": np.zeros(2)}, "": {"w": torch.zeros(2)}})
        out.add_all({})
    assert [{part: [*some] for part, some in one.items()} for one in given[:2]] == [
        {"draft": ["w"]},
        {"": ["w"], "draft": ["v"]},
    ]
    assert not given[0]["draft"]["w"].requires_grad
    assert given[2] == {}
    assert (*repository.load(component="draft"),) == ("v", "w")


@pytest.mark.parametrize(
    ("adds", "error", "says"),
    [
        (lambda out: out.add("0.v", torch.ones(2)), Refused, r"gave of tensor '0\.v' is empty: .* by add_all\(\)"),
        (
            lambda out: out.add_all({"0.v": torch.ones(2), "1.v": torch.ones(2)}),
            Refused,
            "of the bucket of '0.v', '1.v'",
        ),
        (lambda out: out.add("0.k", torch.ones(2)), KeyError, "0.v"),
        (lambda out: out.add("norm", torch.ones(2)), BadTensor, "'norm' was added twice"),
        (lambda out: out.add("0.w_scale", torch.ones(())) or out.add("0.w", torch.ones(2)), BadTensor, "'0.w_scale'"),
        (lambda out: out.add("0.w", torch.ones(2), shape=(4,), at=(2,)), Refused, "a transform is for whole tensors"),
        (lambda out: out.add_all(torch.nn.Linear(2, 2)), Refused, "a Linear is no bucket"),
    ],
)
def test_what_a_writer_cannot_serve_is_not_published(
    repository: Repository, adds: Any, error: type[Exception], says: str
) -> None:
    def export() -> None:
        with repository.writer(transform=FUSED, ranks=Alone()) as out:
            out.add("norm", torch.ones(2))
            with pytest.raises(error, match=says):
                adds(out)

    # Whoever passes over that does not publish what lacks it.
    with pytest.raises(Refused, match="was not added"):
        export()
    assert not repository.branches()


def test_ranks_serve_what_each_makes_of_what_it_has(repository: Repository) -> None:
    members = [weightvc.open(repository.url, cache=None) for _ in range(3)]
    for step in range(2):
        weights = trained(step)
        parts = [*buckets(weights), {"norm": weights["norm"]}]
        expected = repository.commit(weights, branch="whole", transform=FUSED)

        def write(ranks: Any, step: int = step, parts: Any = parts) -> Any:
            with members[ranks.rank].writer("written", step=step, transform=FUSED, ranks=ranks) as out:
                out.add_all(parts[ranks.rank])
            return out.version

        def commit(ranks: Any, step: int = step, parts: Any = parts) -> Any:
            return members[ranks.rank].commit_sharded(parts[ranks.rank], step=step, transform=FUSED, ranks=ranks)

        for work in (write, commit):
            results = Job(3).run(work)
            assert len({result.id for result in results}) == 1, results
            assert results[0].tree == expected.tree
            assert results[0].metadata == {"transform": "fused", "transform_version": "3"}


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        ([FUSED, Transform("fused", "4", fused)], r"\(transform=fused 4 on rank 1; transform=fused 3 on rank 0\)"),
        ([FUSED, None], r"\(transform=none on rank 1; transform=fused 3 on rank 0\)"),
        ([None, FUSED], r"\(transform=fused 3 on rank 1; transform=none on rank 0\)"),
        ([Transform("none", "1", lambda _: {})] * 2, "'none' gave is empty on all ranks"),
    ],
)
def test_ranks_call_the_same(repository: Repository, transforms: Any, says: str) -> None:
    members = [weightvc.open(repository.url, cache=None) for _ in range(2)]

    def commit(ranks: Any) -> Any:
        tensors = {f"norm{ranks.rank}": torch.ones(3)}
        return members[ranks.rank].commit_sharded(tensors, transform=transforms[ranks.rank], ranks=ranks)

    for error in Job(2).run(commit):
        with pytest.raises(Refused, match=says):
            raise error
    assert not repository.branches()


def test_where_the_function_of_one_rank_fails_all_hear_of_it(repository: Repository) -> None:
    members = [weightvc.open(repository.url, cache=None) for _ in range(2)]

    def commit(ranks: Any) -> Any:
        return members[ranks.rank].commit_sharded(
            {f"{ranks.rank}.k" if ranks.rank else "n": torch.ones(3)}, transform=FUSED, ranks=ranks
        )

    first, second = Job(2).run(commit)
    assert (type(first), type(second)) == (NotPublished, KeyError)
    assert not repository.branches()


def test_what_is_done_to_a_shard_is_done_to_the_whole_tensor(tmp_path: Path, example: dict[str, Any]) -> None:
    """By operations of DTensor: also scales of blocks that no shard has whole."""
    plain = weightvc.init(tmp_path / "repository", cache=None)
    serve = Transform("fp8-blocks-qkv", "1", example["serve"])

    def model(step: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        names = [f"{part}_proj.weight" for part in "qkvo"]
        return {**{name: torch.randn(160, 140) + 1e-3 * step for name in names}, "norm": torch.ones(9)}

    def work(rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        repository = weightvc.open(plain.url, cache=None)
        for step in range(3):
            # By rows, as FSDP has it; o by columns, as tensor parallelism has it; or anyhow.
            places = [[Shard(0)] * 4, [*[Shard(0)] * 3, Shard(1)], [Shard(1), Shard(0), Replicate(), Shard(1)]][step]
            tensors = {
                name: torch.nn.Parameter(distribute_tensor(value, mesh, [place]))
                for (name, value), place in zip(model(step).items(), [*places, Shard(0)], strict=True)
            }
            repository.commit_sharded(tensors, step=step, transform=serve)
        repository.close()

    assert processes(2, tmp_path, work) == [0, 0]
    versions = list(plain.log())[::-1]
    assert [version.step for version in versions] == [0, 1, 2]
    for step, version in enumerate(versions):
        assert version.tree == plain.commit(model(step), branch="plain", transform=serve).tree
        assert version.metadata == {"transform": "fp8-blocks-qkv", "transform_version": "1"}


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
