"""The README's examples, run as they stand."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightvc
from tests.kit.pages import ROOT, blocks

HOUSE = ("", "weightvc", "weightvc/engines", "cli/weightvc_cli", "kernels/weightvc_kernels", "tests/stores")
"""Where the paths of CONTRIBUTING.md begin."""


def python() -> list[str]:
    """The trainer, and the rollout host."""
    return [block.text for block in blocks("README.md", "python")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, as a home of its own too, with the command on the path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for name in ("WEIGHTVC_REPO", "WEIGHTVC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_trainer_trains_and_the_rollout_host_follows(place: Path) -> None:
    trainer, host = python()
    run(sys.executable, "-c", trainer)
    assert run(sys.executable, "-c", host) == "now at step 9\n"
    with weightvc.open("policy", cache=None) as repository:
        assert [version.step for version in repository.log()] == list(range(9, -1, -1))
        patch = repository.entry().place
        assert patch is not None
        assert patch.edges[-1].source is not None
        assert repository.verify("served").ok
        assert {str(tensor.dtype) for tensor in repository.load().values()} == {"torch.bfloat16"}


def test_the_host_waits_and_the_trainer_can_go_on(place: Path) -> None:
    trainer, host = python()
    with subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE, text=True) as waiting:
        try:
            for _ in range(2):
                run(sys.executable, "-c", trainer)
            said, _ = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
    assert waiting.returncode == 0
    assert said.endswith("now at step 9\n")
    with weightvc.open("policy", cache=None) as repository:
        assert [version.step for version in repository.log()] == 2 * list(range(9, -1, -1))


@pytest.mark.parametrize(
    "function",
    [weightvc.init, weightvc.open, weightvc.Repository.commit, weightvc.Repository.commit_async],
)
def test_the_reference_has_all_arguments(function: object) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "options")]  # type: ignore[arg-type]
    for name in names:
        assert re.search(rf"\b{name}\b", text), name


def test_the_reference_has_all_public_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in weightvc.__all__:
        assert re.search(rf"\b{name}\b", text), name
    for name in vars(weightvc.Repository):
        assert name.startswith("_") or re.search(rf"`{name}\b|, `{name}\b", text), name


def test_the_quick_start(place: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    for name in ("checkpoint-100", "checkpoint-101"):
        (place / name).mkdir()
        save_file({"w": bits}, place / name / "model.safetensors")
        bits = bits ^ (np.arange(bits.size) % 100 == 0)
    (commands,) = [block.text for block in blocks("README.md", "sh") if "checkpoint-100" in block.text]
    said = run("bash", "-euo", "pipefail", "-c", commands)
    assert "weights is version" in said
    with weightvc.open(".weightvc", cache=None) as repository:
        assert [version.step for version in repository.log()] == [100, 101, 100]
        assert (
            repository.resolve("main").tree == repository.resolve("main~2").tree != repository.resolve("main~1").tree
        )
    held = (place / "weights" / "model.safetensors").read_bytes()
    assert held == (place / "checkpoint-101" / "model.safetensors").read_bytes()


def test_its_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
            assert "://" in link or (ROOT / link.partition("#")[0]).exists(), link


def test_the_house_is_laid_out_as_described() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = re.findall(r"\b((?:weightvc|cli|kernels|tests|docs)/[\w./]*\w|\w+\.py)\b", text)
    assert len(places) > 30
    for place in places:
        assert any((ROOT / folder / place).exists() for folder in HOUSE), place
