"""Every code block of README.md and docs/: each runs as it stands, or is read as what it says that it is."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightvc
from tests.kit import pages
from tests.kit.servers import Server

TYPED: Final = {
    "README.md": ("weightvc init  ", "import torch", "import contextlib"),  # tests/test_readme.py
    "docs/operations.md": ("--rebuild-root", "/other/aside"),  # tests/cli/test_operations.py
}
"""Blocks that tests of their own run, by something that stands in them."""
PLACES: Final = r"(?<![\w.:/])/(?=(local|srv|shared|models|var/log)/)"
"""Roots of a host, which are in the test's directory here."""
CODE: Final = re.compile(
    r"weightvc |export |pip |python3? |import |from \w+ import|set -|\$ |\[\w+\]$|\w+ = \w+\.\w+\("
)
"""How a line of code begins."""
BUCKETS: Final = ("bucket", "near")


def saved(path: Path, step: int) -> Path:
    """A checkpoint: step by step, one in a hundred of its elements differs."""
    path.mkdir(parents=True, exist_ok=True)
    where = np.arange(1 << 14) % 100 < step % 100
    save_file({"w": np.where(where, 1, 2).astype(np.float16)}, path / "model.safetensors")
    return path


def committed(url: str, steps: range) -> None:
    with weightvc.init(url, exist_ok=True) as repository:
        for step in steps:
            repository.commit(saved(Path("made"), step), step=step)


def cli() -> Iterator[None]:
    saved(Path("out"), 1)
    yield


def operations() -> Iterator[None]:
    committed("s3://bucket/policy", range(8994, 9001))
    Path("var/log").mkdir(parents=True)
    os.environ["WEIGHTVC_REPO"] = "s3://bucket/policy"
    yield
    assert Path("var/log/weightvc.jsonl").read_text().count('"ok": true') == 1
    assert weightvc.open("s3://near/policy").resolve("main").step == 9000


def rollout() -> Iterator[None]:
    committed("s3://bucket/policy", range(4))
    yield
    assert Path("local/slots/current/model.safetensors").exists()


def trainers() -> Iterator[None]:
    saved(Path("checkpoint"), 1)
    os.environ.update(WEIGHTVC_REPO="policy", n="9")
    yield
    with weightvc.open("policy") as repository:
        assert [version.step for version in repository.log()] == list(range(9, -1, -1))
        (other,) = [name for name in repository.branches() if name != "main"]
        assert repository.resolve(other).step == 11


def migration() -> Iterator[None]:
    steps = (100, 200, 300)
    for step in steps:
        saved(Path(f"runs/checkpoint-{step}"), step // 100)
        Path(f"runs/checkpoint-{step}/optimizer.pt").write_bytes(b"left out")
        Path(f"runs/checkpoint-{step}/trainer_state.json").write_text("{}")
    with weightvc.init("slime") as repository:
        for step in steps:
            repository.commit(f"runs/checkpoint-{step}", step=step, exclude=["optimizer.*", "*.json"])
        for made in weightvc.Export(repository, "shared/delta-updates").run():
            assert made.full is (made.number == 1)
    Path("models").mkdir()
    Path("shared/delta-updates/weight_v000001").rename("models/policy-hf")
    yield
    held = [Path(f"runs/checkpoint-{step}/model.safetensors").read_bytes() for step in steps]
    assert [Path(f"plain/checkpoint-{step}/model.safetensors").read_bytes() for step in steps] == held
    with weightvc.open("policy") as first, weightvc.open("from-slime") as second:
        assert [version.tree for version in first.log()] == [version.tree for version in second.log()]
        assert [version.tree for version in first.log("again", n=3)] == [version.tree for version in first.log()]


def tutorial() -> Iterator[None]:
    yield
    with weightvc.open("policy") as repository:
        assert [version.step for version in repository.log(n=3)] == [16, 19, 18]
        with pytest.raises(weightvc.Expired):
            repository.load("main@{step=9}")
    with weightvc.open("s3://bucket/policy") as repository:
        assert repository.resolve().step == 26
        assert repository.verify("slots/current", "main").ok


SCENES: Final[dict[str, Callable[[], Iterator[None]]]] = {
    "docs/cli.md": cli,
    "docs/migration.md": migration,
    "docs/operations.md": operations,
    "docs/rollout.md": rollout,
    "docs/trainers.md": trainers,
    "docs/tutorial.md": tutorial,
}
"""What a page takes for granted, and what there is when it has run."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Server) -> Path:
    """An empty working directory and a home, with the buckets of the pages, empty too, where boto3 looks."""
    for name in [name for name in os.environ if name.startswith(("WEIGHTVC_", "AWS_"))]:
        monkeypatch.delenv(name)
    client = s3_server.client()
    for bucket in BUCKETS:
        if bucket not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=bucket)
        for listed in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for found in listed.get("Contents", ()):
                client.delete_object(Bucket=bucket, Key=found["Key"])
    key, secret = s3_server.ADMIN
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pages.ROOT), *sys.path]))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def described(page: str) -> list[pages.Block]:
    return [block for block in pages.blocks(page) if block.runs]


@pytest.mark.parametrize("page", [page for page in pages.pages() if described(page)])
def test_a_page_runs(page: str, place: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in TYPED.get(page, ()):
        assert len([block for block in described(page) if typed in block.text]) == 1, typed
    words = {PLACES: f"{place}/", "http://127.0.0.1:8333": s3_server.endpoint_url}
    words |= dict(zip(("=tutorial", "=only-here"), (f"={one}" for one in s3_server.ADMIN)))
    before = dict(os.environ)
    scene = SCENES.get(page, lambda: iter([None]))()
    try:
        next(scene)
        done = subprocess.run(
            [sys.executable, "-m", "tests.kit.pages", page, json.dumps(words), json.dumps(TYPED.get(page, ()))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout
        next(scene, None)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("page", pages.pages())
def test_its_blocks_are_what_they_say(page: str) -> None:
    for block in pages.blocks(page):
        pages.check(block)
    for line in pages.indented(page):
        assert not CODE.match(line), f"{page}: fence this, and say what it is: {line}"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "a = ("),
        ("sh", "if true"),
        ("sh", "weightvc comit out"),
        ("sh", "weightvc commit out --stepp 1"),
        ("sh", "last=$(weightvc show main --jsn | jq -r .id)"),
        ("sh", "A=1 weightvc log -n"),
        ("sh", "pip install '.[rocm]'"),
        ("sh", "python benchmarks/none.py"),
        ("ini", "[Service]\nExecStart=/usr/bin/weightvc follow main --intoo x"),
        ("yaml", "a: [weightvc, maintain, --jsn]"),
        ("yaml", "a: [b"),
        ("cron", "17 * * * * flock -n /run/lock/weightvc weightvc maintian"),
        ("cron", "hourly weightvc maintain"),
        ("bash", "true"),
        ("", "true"),
    ],
)
def test_what_is_wrong_is_seen(language: str, text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017
        pages.check(pages.Block("page", 1, language, text))
