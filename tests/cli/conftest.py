"""The real command, run in a directory of its own with a home and a cache of its own."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.kit.servers import Place

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


def command() -> list[str]:
    """The installed command, or the module where no script was installed."""
    script = Path(sys.executable).parent / "weightvc"
    return [str(script)] if script.exists() else [sys.executable, "-m", "weightvc_cli"]


def checkpoint(path: Path, **tensors: bytes) -> Path:
    """Write a safetensors file of flat BF16 tensors from their raw bytes."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [at, at + len(data)]}
        at += len(data)
    return raw(path, json.dumps(header).encode(), b"".join(tensors.values()))


def raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    """Write a safetensors file of any header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def weights(step: int) -> dict[str, bytes]:
    """Tensors `w` (64 elements, of which element `step` differs from step 0) and `b`."""
    w = bytearray(b"\x80\x3f" * 64)
    if step:
        w[2 * step] = 0x81
    return {"b": b"\x00\x40" * 4, "w": bytes(w)}


def on_s3(place: Place) -> dict[str, str]:
    """The environment of a command on an S3 server."""
    return {
        "WEIGHTVC_REPO": place.url,
        "AWS_ACCESS_KEY_ID": str(place.options["access_key"]),
        "AWS_SECRET_ACCESS_KEY": str(place.options["secret_key"]),
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": str(place.options["endpoint_url"]),
    }


class Shell:
    """Runs weightvc in `cwd`."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.cwd = cwd
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIGHTVC_", "AWS_"))}
        self.env = kept | {
            "HOME": str(home),
            "WEIGHTVC_CACHE": str(home / "cache"),
            "WEIGHTVC_AUTHOR": "tester@host",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def run(
        self,
        *args: str | Path,
        code: int = 0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        umask: int = 0o022,
    ) -> subprocess.CompletedProcess[str]:
        """Run, and check the exit status."""
        done = subprocess.run(
            [*command(), *map(str, args)],
            cwd=cwd or self.cwd,
            env=self.env | (env or {}),
            capture_output=True,
            text=True,
            umask=umask,
            timeout=120,
        )
        assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
        return done

    def out(self, *args: str | Path, **options: Any) -> str:
        """What it prints, which must not be accompanied by anything on stderr."""
        done = self.run(*args, **options)
        assert done.stderr == ""
        return done.stdout

    def json(self, *args: str | Path, **options: Any) -> Any:
        """What it prints with --json."""
        return json.loads(self.out(*args, "--json", **options))

    def fails(self, code: int, *args: str | Path, **options: Any) -> str:
        """The one line on stderr of a command that fails, without the prefix."""
        done = self.run(*args, code=code, **options)
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("weightvc: ")
        assert done.stdout == ""
        return lines[0].removeprefix("weightvc: ")

    @contextmanager
    def running(
        self, *args: str | Path, env: dict[str, str] | None = None
    ) -> Iterator[tuple["subprocess.Popen[str]", IO[str], IO[str]]]:
        """A command that goes on, with its stdout and stderr; it is killed at the end, whatever happens."""
        with subprocess.Popen(
            [*command(), *map(str, args)],
            cwd=self.cwd,
            env=self.env | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background inherit that interrupts are ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield process, process.stdout, process.stderr
            finally:
                process.kill()

    def commit(self, step: int, *args: str) -> str:
        """Commit weights(step) and return the version's id."""
        path = checkpoint(self.cwd / f"{step}.safetensors", **weights(step))
        made = self.json("commit", path, "-m", f"message {step}", "--step", str(step), *args)
        return str(made["id"])


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A shell in an empty directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    return Shell(tmp_path / "home", tmp_path / "here")


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    base = tmp_path_factory.mktemp("history")
    (base / "here").mkdir()
    shell = Shell(base / "home", base / "here")
    shell.run("init")
    ids = {"base": shell.commit(0)}
    shell.run("branch", "exp")
    ids["main1"] = shell.commit(1)
    ids["exp1"] = shell.commit(2, "-b", "exp")
    ids["merge"] = shell.commit(3, "--parent", "exp")
    shell.run("tag", "v1", "exp")
    return base / "here", ids


@pytest.fixture
def history(shell: Shell, _template: tuple[Path, dict[str, str]]) -> dict[str, str]:
    """Ids of versions in a repository ./.weightvc of `shell`: base, main1 and exp1 on top, merge of both on main.

    N.safetensors are the files that were committed; exp1 has the tag v1.
    """
    shutil.copytree(_template[0], shell.cwd, dirs_exist_ok=True)
    return dict(_template[1])


@pytest.fixture
def follow(shell: Shell) -> Callable[[str, int], None]:
    """Change the file in a checked-out directory to weights(step)."""

    def change(directory: str, step: int) -> None:
        checkpoint(shell.cwd / directory / "model.safetensors", **weights(step))

    return change
