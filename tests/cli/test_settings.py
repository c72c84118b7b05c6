"""What a command imports, and how a progress bar draws itself."""

import io
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.cli.conftest import Shell
from weightvc_cli import settings
from weightvc_cli.output import percent, share, shown, size, times

HEAVY = ("numpy", "torch", "boto3", "numba", "fsspec", "s3fs")


def _loaded(shell: Shell, code: str) -> list[str]:
    probe = f"import sys\n{code}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=shell.cwd, env=shell.env, capture_output=True, text=True, check=True
    )
    return list(eval(done.stdout.splitlines()[-1]))


def test_reading_history_imports_nothing_heavy(shell: Shell, history: dict[str, str]) -> None:
    assert _loaded(shell, "import weightvc_cli.main") == []
    run = "from weightvc_cli.main import cli, Settings\ncli.main({!r}, standalone_mode=False, obj=Settings())"
    for args in (["--help"], ["log"], ["log", "--graph"], ["branch"], ["tag"], ["reflog"]):
        assert _loaded(shell, run.format(args)) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with settings.progress("commit") as bar:
        assert bar is None


def test_a_bar_waits_a_second_and_clears_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, now = _Terminal(), 100.0
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(settings.time, "monotonic", lambda: now)
    with settings.progress("commit") as bar:
        assert bar is not None
        bar(10, 100)
        assert terminal.getvalue() == ""
        now = 102.0
        bar(50, 100)
        assert "commit [###############               ]  50%  50 B of 100 B, 25 B/s" in terminal.getvalue()
        before = terminal.getvalue()
        now = 102.05
        bar(60, 100)
        assert terminal.getvalue() == before
    assert terminal.getvalue().endswith("\r\x1b[K")


COMPILES = """
import sys
import numpy
import weightvc_cli.main
from weightvc_kernels import context_kernels, hashes, pieces

def run(settings):
    settings.json = "--json" in sys.argv
    pieces.gather(*numpy.zeros((2, hashes.MANY), numpy.int64))

weightvc_cli.main._run = run
weightvc_cli.main.main()
"""
"""A command that has to compile the smallest of the kernels, and else does nothing."""


def _said(shell: Shell, kept: Path, *args: str, terminal: bool = True) -> str:
    """What a command that compiles writes to stderr, where `kept` has what was compiled."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    with open(ours, "rb", buffering=0) as end:
        try:
            done = subprocess.run(
                [sys.executable, "-c", COMPILES, *args],
                env=shell.env | {"NUMBA_CACHE_DIR": str(kept)},
                stderr=theirs,
                check=False,
            )
            os.write(theirs, b".")  # so that there is something to read
            assert done.returncode == 0
            return end.read(1 << 16).decode().removesuffix(".")
        finally:
            os.close(theirs)


def test_that_code_is_compiled_is_said_once_on_a_terminal(shell: Shell, tmp_path: Path) -> None:
    said = _said(shell, tmp_path / "kept")
    assert said.count("compiling code for this machine") == 1
    assert "`python -m weightvc_kernels`" in said
    assert _said(shell, tmp_path / "kept") == ""
    assert _said(shell, tmp_path / "others", "--json") == ""
    assert _said(shell, tmp_path / "piped", terminal=False) == ""


def test_numbers_are_short() -> None:
    assert [size(n) for n in (0, 999, 1000, 9_994, 99_940, 999_499, 999_500, 253_000, 45_426_432, 2e12, 5e15)] == [
        "0 B",
        "999 B",
        "1.00 KB",
        "9.99 KB",
        "99.9 KB",
        "999 KB",
        "1.00 MB",
        "253 KB",
        "45.4 MB",
        "2.00 TB",
        "5000 TB",
    ]
    assert [share(p) for p in (0, 0.00929, 1)] == ["0 %", "0.929 %", "100 %"]
    assert [percent(p) for p in (0, 0.00929, 1)] == ["0.000 %", "0.929 %", "100.000 %"]
    assert [times(r) for r in (1.52, 9.94, 176.4)] == ["1.5x", "9.9x", "176x"]
    assert shown("a\x1b\té\n") == "a\\x1b\\té\\n"


def test_a_size_is_bytes_or_has_a_unit(shell: Shell, history: dict[str, str]) -> None:
    sizes = {"2000000": 2 * 10**6, "500M": 5 * 10**8, "40g": 4 * 10**10, "1TB": 10**12}
    assert {text: settings.Size().convert(text, None, None) for text in sizes} == sizes
    for bad in ("", "G", "1.5G", "-1", "1X"):
        with pytest.raises(click.BadParameter, match="write 500M"):
            settings.Size().convert(bad, None, None)
    shell.run("checkout", "main", "out", "--cache-limit", "50M")
    assert "no size" in shell.fails(2, "checkout", "main", "out", "--cache-limit", "much")
    shell.env["WEIGHTVC_CACHE_LIMIT"] = "much"
    assert "WEIGHTVC_CACHE_LIMIT: 'much'" in shell.fails(2, "checkout", "main", "out")
    shell.env["WEIGHTVC_CACHE_LIMIT"] = "1K"
    assert "cache_limit=1000" in shell.fails(8, "checkout", "main", "out")
