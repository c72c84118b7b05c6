"""Consecutive optimizer steps through the installed command, on a local directory and on real S3.

The chains are real ones where WEIGHTVC_CHAIN says that there are some, else a made one of the same kind.
"""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import weightvc
from tests.cli.conftest import Shell
from tests.kit import chain
from tests.kit.servers import Place

STEPS = 10


def made_chain() -> Iterator[bytes]:
    """float32 masters under steps of 1e-6, rounded to bf16: what AdamW does to the bits."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    masters = {
        "embed.weight": rng.normal(0, 0.05, (6000, 384)),
        "layer.up.weight": rng.normal(0, 0.05, (1536, 384)),
        "layer.up.bias": rng.normal(0, 0.05, 1536),
        "norm.weight": rng.normal(1, 0.02, 384),
    }
    direction = {name: rng.normal(0, 1, w.shape) for name, w in masters.items()}
    for _ in range(STEPS + 1):
        yield save(
            {name: w.astype(np.float32).astype(ml_dtypes.bfloat16) for name, w in masters.items()}, {"format": "pt"}
        )
        for name, w in masters.items():
            direction[name] = 0.9 * direction[name] + 0.1 * rng.normal(0, 1, w.shape)
            w += 1e-6 * np.sign(direction[name])


def versions(name: str) -> Iterator[bytes]:
    """The chain's versions, each a whole safetensors file."""
    return made_chain() if name == "made" else chain.versions(name, STEPS)


@pytest.fixture(params=["local", "s3"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """A shell whose repository lies in a directory, or on real S3."""
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    cwd.mkdir()
    shell = Shell(home, cwd)
    shell.env["WEIGHTVC_REPO"] = str(tmp_path / "repository")
    if request.param == "s3":
        place: Place = request.getfixturevalue("s3_place")
        shell.env |= {
            "WEIGHTVC_REPO": place.url,
            "AWS_ACCESS_KEY_ID": str(place.options["access_key"]),
            "AWS_SECRET_ACCESS_KEY": str(place.options["secret_key"]),
            "AWS_ENDPOINT_URL": str(place.options["endpoint_url"]),
            "AWS_REGION": "us-east-1",
        }
    shell.run("init", shell.env["WEIGHTVC_REPO"])
    return shell


@pytest.mark.parametrize("name", ["adamw", "muon", "made"])
def test_every_step_comes_back_to_the_bit_and_is_small(shell: Shell, name: str) -> None:
    if name == "made" and os.environ.get("WEIGHTVC_CHAIN"):
        pytest.skip("the real chains are at hand")
    source = shell.cwd / "source.safetensors"
    bases, patches = 0, []
    for step, data in enumerate(versions(name)):
        source.write_bytes(data)
        done = shell.run("commit", "-m", f"step {step}", "--step", str(step), "--json", "--stats", str(source))
        stats = json.loads(done.stderr)["stats"]
        if step:
            assert stats["writes"] == 2
            assert stats["reads"] <= 3
    for version in shell.json("log"):
        (edge,) = version["edges"]
        if edge["from"] is None:
            bases += edge["bytes"]
            assert edge["bytes"] < 0.72 * len(data)
        else:
            patches.append(edge["bytes"] / edge["changed"])
    assert len(patches) == STEPS
    print(
        f"{name}: base {bases / len(data):.3f} of raw, {min(patches):.3f} to {max(patches):.3f} B a changed element"
    )
    # What only the context codec gets to: others take 1.1 to 1.6.
    assert max(patches) < (1.03 if name == "muon" else 0.92 if name == "adamw" else 2.0)

    # A host with a cache of its own goes forward, one step at a time; another one jumps about without a cache.
    follower = Shell(shell.cwd / "follower", shell.cwd)
    follower.env = shell.env | {"WEIGHTVC_CACHE": str(shell.cwd / "follower")}
    for step, data in enumerate(versions(name)):
        done = follower.run("pull", f"main@{{step={step}}}", "--into", "held", "--stats", "--json")
        assert (shell.cwd / "held/model.safetensors").read_bytes() == data
        if step:
            assert json.loads(done.stderr)["stats"]["reads"] == 2
        if step in (0, 3, 10):
            shell.run("checkout", "--no-cache", f"main@{{step={step}}}", f"alone-{step}")
            assert (shell.cwd / f"alone-{step}/model.safetensors").read_bytes() == data
    assert follower.json("verify", "held")["ok"]


@pytest.mark.parametrize("name", ["adamw", "made"])
def test_one_tree_digest_for_a_dict_a_file_and_shards(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load, save_file

    data = next(versions(name))
    tensors: dict[str, Any] = load(data)
    (tmp_path / "file.safetensors").write_bytes(data)
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, held in files.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    pickled = io.BytesIO()
    __import__("torch").save(tensors, pickled)
    (tmp_path / "file.pt").write_bytes(pickled.getvalue())
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        made = [
            repository.commit(source)
            for source in (tensors, tmp_path / "file.safetensors", folder, tmp_path / "file.pt")
        ]
        assert len({version.tree for version in made}) == 1
        assert all(edge.changed == 0 for edge in repository.entry().place.edges)
        repository.checkout("main~1", tmp_path / "out")
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
