"""What somebody at a terminal sees: the installed command behind a pseudo terminal."""

import os
import re
import shutil
import subprocess
import termios
import threading

import pytest

from tests.cli.conftest import Shell, checkpoint, command, weights

PAGER = "sh -c 'echo \"paged, LESS=$LESS\"; cat'"
"""A pager that says that it ran."""


class Terminal:
    """Runs weightvc with a terminal of 24 lines for its input and output."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        # What the tests' own surroundings say must not matter.
        kept = {k: v for k, v in shell.env.items() if k not in ("NO_COLOR", "PAGER", "LESS", "LV")}
        self.env = kept | {"TERM": "xterm"}

    def run(self, *args: str, keys: bytes = b"", code: int = 0, **env: str) -> str:
        """What the terminal shows in the end; `keys` are typed once it has shown something."""
        master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        with subprocess.Popen(
            [*command(), *args],
            cwd=self.shell.cwd,
            env=self.env | env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=lambda: os.login_tty(slave),
        ) as process:
            os.close(slave)
            impatient = threading.Timer(60, process.kill)
            impatient.start()
            shown = b""
            try:
                while data := _read(master):
                    if not shown:
                        os.write(master, keys)
                    shown += data
            finally:
                impatient.cancel()
                os.close(master)
        assert process.returncode == code, (args, process.returncode, shown)
        return shown.decode().replace("\r\n", "\n")


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # nobody has the terminal open any more
        return b""


@pytest.fixture
def terminal(shell: Shell, history: dict[str, str]) -> Terminal:
    """A terminal in the repository `history`."""
    return Terminal(shell)


def test_colours_on_a_terminal_alone(terminal: Terminal, history: dict[str, str]) -> None:
    shown = terminal.run("--no-pager", "log", "--graph", "--oneline")
    plain = terminal.shell.out("log", "--graph", "--oneline")
    assert f"\x1b[33m{history['main1'][:12]}\x1b[0m [step 1] message 1\n" in shown
    assert "\x1b[36m\x1b[1mHEAD -> \x1b[0m\x1b[32m\x1b[1mmain\x1b[0m" in shown
    assert "\x1b[33m\x1b[1mtag: v1\x1b[0m" in shown
    assert "\x1b[31m|\x1b[0m\x1b[31m\\\x1b[0m" in shown
    assert "\x1b" not in plain
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert terminal.run("--no-pager", "log", "--graph", "--oneline", **env) == plain
    assert terminal.run("--no-pager", "log", "--oneline", NO_COLOR="").count("\x1b[33m") > 4


@pytest.mark.parametrize("args", [["log"], ["show"], ["ls"], ["reflog"], ["diff", "main~1", "main"]])
def test_a_pager_shows_what_may_be_long(terminal: Terminal, args: list[str]) -> None:
    plain = terminal.shell.out(*args)
    assert terminal.run(*args, WEIGHTVC_PAGER=PAGER, NO_COLOR="1") == f"paged, LESS=FRX\n{plain}"
    assert terminal.run(*args, "--no-pager", WEIGHTVC_PAGER=PAGER, NO_COLOR="1") == plain
    assert terminal.run("--no-pager", *args, WEIGHTVC_PAGER=PAGER, NO_COLOR="1") == plain


def test_which_pager(terminal: Terminal) -> None:
    plain = terminal.shell.out("log", "--oneline")

    def shown(**env: str) -> str:
        return terminal.run("log", "--oneline", **{"NO_COLOR": "1"} | env)

    assert shown(PAGER=PAGER, LESS="S") == f"paged, LESS=S\n{plain}"
    assert "\x1b[33m" in shown(PAGER=PAGER, NO_COLOR="")
    for none in (
        {"PAGER": PAGER, "WEIGHTVC_PAGER": ""},
        {"PAGER": PAGER, "WEIGHTVC_PAGER": "cat"},
        {"PAGER": ""},
        {"PAGER": PAGER, "TERM": "dumb"},
        {"PAGER": "no-such-pager"},
    ):
        assert shown(**none) == plain, none
    said = terminal.run("log", "--oneline", code=2, WEIGHTVC_PAGER="less '")
    assert "WEIGHTVC_PAGER cannot be read as a command" in said


def test_no_pager_without_a_terminal_or_anything_to_show(terminal: Terminal) -> None:
    assert "paged" not in terminal.shell.out("log", env={"PAGER": PAGER, "TERM": "xterm"})
    assert terminal.run("log", "-n", "0", PAGER=PAGER) == ""
    said = terminal.run("log", "nothing", PAGER=PAGER, code=3)
    assert said.startswith("weightvc: 'nothing' is no branch")


def test_a_pager_that_is_left_early_is_no_error(shell: Shell) -> None:
    shell.run("init")
    path = checkpoint(shell.cwd / "0.safetensors", **weights(0))
    shell.run("commit", path, "-m", "\n".join("a" for _ in range(2000)))
    terminal = Terminal(shell)
    shown = terminal.run("log", PAGER="head -2", NO_COLOR="1")
    assert shown.count("\n") == 2
    assert shown.startswith("version ")


@pytest.mark.skipif(shutil.which("less") is None, reason="needs less")
def test_less_is_left_by_q_and_leaves_by_itself_where_all_fits(terminal: Terminal) -> None:
    shown = terminal.run("log", keys=b"q")
    assert "version " in shown
    assert "message 0" not in shown, "all of it was shown: it was not paged"
    short = terminal.shell.out("log", "--oneline")
    shown = terminal.run("log", "--oneline", NO_COLOR="1")
    assert short in re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b[=>]|\r", "", shown)
