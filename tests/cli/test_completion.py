"""What Tab offers, by the protocol of click and in a real bash."""

import subprocess

import pytest

from tests.cli.conftest import Shell, command
from tests.kit.stub import Stub


def offered(shell: Shell, line: str, **env: str) -> list[str]:
    """What is offered for the last word of a line, as bash gets it. Nothing else may be said."""
    words = line.split(" ")
    env |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_WEIGHTVC_COMPLETE": "bash_complete"}
    return shell.out(env=env).split()


def test_commands_options_and_names(shell: Shell, history: dict[str, str]) -> None:
    assert offered(shell, "weightvc re") == ["plain,reflog", "plain,reset", "plain,revert", "plain,report"]
    assert "plain,--oneline" in offered(shell, "weightvc log --o")
    assert offered(shell, "weightvc log ") == ["plain,HEAD", "plain,exp", "plain,main", "plain,v1"]
    assert offered(shell, "weightvc log main e") == ["plain,exp"]
    assert offered(shell, "weightvc reset m") == ["plain,main"]
    assert offered(shell, "weightvc tag -d ") == ["plain,v1"]
    assert offered(shell, "weightvc commit x -b e") == ["plain,exp"]
    for line in ("weightvc commit ", "weightvc checkout main ", "weightvc diff ./", "weightvc log -r "):
        assert offered(shell, line)[0].startswith("file,")
    assert offered(shell, "weightvc diff e") == ["plain,exp"]


@pytest.mark.parametrize(
    "line",
    ["weightvc comit x", "weightvc stash p", "weightvc help lo", "weightvc log --nothing m", "weightvc log -n x"],
)
def test_a_line_that_is_wrong_is_no_error(shell: Shell, history: dict[str, str], line: str) -> None:
    for one in offered(shell, line):
        assert one.startswith(("plain,", "file,"))


def test_where_there_is_no_repository_or_none_that_can_be_read(shell: Shell, history: dict[str, str]) -> None:
    assert offered(shell, "weightvc log m", WEIGHTVC_REPO="elsewhere") == []
    (shell.cwd / ".weightvc" / "root").write_bytes(b"nonsense")
    assert offered(shell, "weightvc log m") == []


def test_no_store_is_asked_over_the_network(shell: Shell, stub: Stub) -> None:
    url = f"s3://bucket/policy?endpoint_url={stub.endpoint_url}"
    assert offered(shell, f"weightvc log -r {url} m") == []
    assert offered(shell, "weightvc log m", WEIGHTVC_REPO=url) == []
    assert not stub.log


def test_in_bash(shell: Shell, history: dict[str, str]) -> None:
    script = (
        'eval "$(weightvc completion bash)"\n'
        "complete -p weightvc\n"
        "COMP_WORDS=(weightvc show ma); COMP_CWORD=2\n"
        "_weightvc_completion weightvc\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    # The command by its name, whatever it is in this environment.
    script_file = shell.cwd / "bin" / "weightvc"
    script_file.parent.mkdir()
    script_file.write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    script_file.chmod(0o755)
    env = shell.env | {"PATH": f"{script_file.parent}:{shell.env['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=shell.cwd, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "complete -o nosort -F _weightvc_completion weightvc\nmain\n"


def test_scripts_for_other_shells(shell: Shell) -> None:
    assert shell.out("completion", "zsh").startswith("#compdef weightvc\n")
    assert "complete --no-files --command weightvc" in shell.out("completion", "fish")
    assert "bash" in shell.fails(2, "completion", "tcsh")
