"""What --json prints, against the table of docs/cli.md: no field more, and none less."""

import json
import re
from pathlib import Path
from typing import Any

import click

import weightvc
from tests.cli.conftest import Shell, checkpoint, weights
from weightvc.protocol import pins
from weightvc_cli.main import COMMANDS, cli

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def table() -> tuple[dict[str, set[str]], dict[tuple[str, str], set[str]]]:
    """The documented fields, by command; and those of objects inside, by command and field."""
    fields: dict[str, set[str]] = {}
    inside: dict[tuple[str, str], set[str]] = {}
    text = DOCS.partition("\n| command | fields |\n|---|---|\n")[2].partition("\n\n")[0]
    for line in text.splitlines():
        left, right = line.strip("| ").split(" | ")
        while (bare := re.sub(r"\([^()]*\)", "", right)) != right:
            right = bare
        found = set(re.findall(r"`(\w+)`", right))
        if more := re.match(r"all of `(\w+)`", right):
            found = found - {more[1]} | fields[more[1]]
        names, _, commands = left.partition(" of ")
        for name in re.findall(r"`([^`]+)`", names):
            if commands:
                inside |= {(command, name): found for command in re.findall(r"`([^`]+)`", commands)}
            else:
                fields[name] = found
    return fields, inside


def told(shell: Shell) -> dict[str, list[Any]]:
    """What each command prints, by its name in the table."""
    said: dict[str, list[Any]] = {}

    def run(name: str, *args: str, code: int = 0) -> None:
        done = shell.run(*args, "--json", code=code)
        for line in done.stdout.splitlines():
            value = json.loads(line)
            said.setdefault(name, []).extend(value if isinstance(value, list) else [value])

    run("init", "init", "near")
    for step in (2, 1):  # so that there are five versions, and something to compact
        run("commit", "commit", f"{step}.safetensors", "-m", "more")
    run("revert", "revert", "main~1")
    run("checkout", "checkout", "main", "held")
    run("pull", "pull", "main", "--into", "held")
    run("status", "status", "held")
    run("verify", "verify", "held")
    run("reset", "reset", "main", "main", "-m", "here")
    run("branch NAME", "branch", "new")
    run("branch", "branch")
    run("branch -d", "branch", "-d", "new")
    run("branch --restore", "branch", "--restore", "new")
    run("branch --default", "branch", "--default", "main")
    run("tag NAME", "tag", "v2")
    run("tag", "tag")
    run("tag -d", "tag", "-d", "v2")
    run("reflog", "reflog")
    run("compact", "compact")
    run("log", "log")
    run("show", "show", "main~1")  # which compaction gave a further way
    run("ls", "ls")
    run("ls --files", "ls", "--files")
    run("diff", "diff", "main~1", "main")
    run("density", "density", "main~1", "main")
    run("audit", "audit")
    run("audit", "audit", "--dtype", "fp32")  # of which bf16 is tried too
    run("plan", "plan", "nothing", "main")
    run("mirror", "mirror", ".weightvc", "near")
    run("follow", "follow", "--into", "slots", "--updates", "1")
    run("export", "export", "main", "served")
    checkpoint(shell.cwd / "in" / "step_10.safetensors", **weights(9))
    run("import", "import", "in", "-b", "imported")
    run("expire", "expire", "--keep-last", "1", "--dry-run")
    run("expire --forget", "expire", "--forget", "--dry-run")
    with weightvc.open(shell.cwd / ".weightvc", cache=None) as repository:
        pins.Holder(repository.store, begin=0).take()
    run("gc", "gc", "--dry-run", "--grace", "0s")
    run("maintain", "maintain")
    run("doctor", "doctor", "--read-only")
    (shell.cwd / ".weightvc" / "root").unlink()
    run("fsck", "fsck", "--rebuild-root")
    for manifest in (shell.cwd / ".weightvc" / "manifest").iterdir():
        manifest.write_bytes(b"")
    run("fsck", "fsck", "--no-cache", code=7)
    return said


def test_the_fields_are_those_documented(shell: Shell, history: dict[str, str]) -> None:
    fields, inside = table()
    said = told(shell)
    assert set(said) == set(fields), "a command without a line in the table, or a line without a command"
    for name, values in said.items():
        assert values, name
        for value in values:
            assert set(value) == fields[name], name
    for (name, field), wanted in inside.items():
        found = [value[field] for value in said[name] if value[field] is not None]
        found = [one for value in found for one in (value if isinstance(value, list) else [value])]
        assert found, (name, field)
        for one in found:
            assert set(one) == wanted, (name, field)
    (done,) = said["maintain"]
    assert set(done["gc"]) == fields["gc"] - {"dry_run"}
    assert set(done["compact"]) == fields["compact"]


def test_all_that_report_are_in_the_table() -> None:
    fields = {name.split()[0] for name in table()[0]}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert (name in fields) == any("--json" in option.opts for option in command.params), name
