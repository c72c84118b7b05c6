"""docs/cli.md against the command line itself, and docs/operations.md against what is said."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from weightvc import errors
from weightvc_cli import habits
from weightvc_cli.main import COMMANDS, SECTIONS, cli
from weightvc_cli.settings import Settings

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_and_their_options_are_described(name: str) -> None:
    assert f"| `{name}" in DOCS or f"### {name} " in DOCS or f", {name} " in DOCS
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            assert any(f"`{o}" in DOCS or f" {o} " in DOCS or f" {o}`" in DOCS for o in option.opts), option.opts


def test_every_exit_status_is_described() -> None:
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.WeightvcError)
    }
    for code in codes | {0, 2, 130, 141}:
        assert f"\n| {code} | " in DOCS


# docs/operations.md: what each message means

MAINTENANCE = ("protocol/collect", "protocol/expire", "protocol/orphans", "protocol/pins", "protocol/clock")
MAINTENANCE += ("protocol/repair", "protocol/rebuild", "protocol/swap", "retention")
ELSEWHERE = ["No space left on device"]
"""What the system says."""
PLAIN = (
    "seconds, 0 at least",
    "lives from 1 to",
    "there is no policy to save",
    "open it",
    "run `weightvc init` again",
)
"""What is in messages that say all there is to say."""


def texts(tree: ast.AST) -> list[str]:
    """Each text of a module, with … for what is filled in."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            out.append("".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values))
    return out


def messages(tree: ast.AST) -> list[str]:
    """The texts of the errors that a module raises."""
    raised = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name) and node.func.id in KINDS
    ]
    return [texts(one)[0] for one in raised if texts(one)]


KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def rows() -> list[list[str]]:
    """Each message of the table, as the pieces that stand in it word for word."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = text.partition("\n## Messages\n")[2].partition("\n## ")[0]
    said = [one for line in table.splitlines() for one in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert len(said) > 20
    return [
        [piece.strip() for piece in re.split(r"…|\bKEY\b|\bn\b|pin/|AccessDenied:", one) if piece.strip()]
        for one in said
    ]


def test_each_message_of_the_table_is_one_that_is_said() -> None:
    folder = Path(errors.__file__).parent
    known = [said for path in folder.rglob("*.py") for said in texts(ast.parse(path.read_text()))] + ELSEWHERE
    for pieces in rows():
        assert any(all(piece in said for piece in pieces) for said in known), pieces


@pytest.mark.parametrize("module", MAINTENANCE)
def test_each_message_of_maintenance_is_in_the_table(module: str) -> None:
    table = rows()
    found = messages(ast.parse((Path(errors.__file__).parent / f"{module}.py").read_text()))
    assert found
    for said in found:
        assert any(one in said for one in PLAIN) or any(all(piece in said for piece in row) for row in table), said


# The help

EXAMPLE = re.compile(r"^ +(weightvc .*)$", re.M)


def examples(text: str) -> list[list[str]]:
    """The words of each example of a help text, as a shell has them, without the command and where output goes."""
    block = text.partition("Examples:\n")[2].partition("\n\n")[0]
    return [shlex.split(line)[1:] for line in EXAMPLE.findall(re.sub(r" >.*", "", block))]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_examples_that_can_be_typed(name: str) -> None:
    context = click.Context(cli, obj=Settings())
    command = cli.get_command(context, name)
    assert command is not None
    found = examples(command.get_help(click.Context(command, parent=context, info_name=name)))
    assert found or name == "completion"
    for first, *args in found:
        assert first == name
        command.make_context(name, args, parent=context)


def test_the_first_help_has_examples_that_can_be_typed() -> None:
    context = click.Context(cli, obj=Settings())
    found = examples(cli.get_help(context))
    assert len(found) > 3
    for name, *args in found:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, args, parent=context)


def test_every_command_stands_under_a_heading() -> None:
    listed = [module for modules in SECTIONS.values() for module in modules]
    assert sorted(listed) == sorted(set(COMMANDS.values()))


# What git has

ADVICE = [*habits.COMMANDS.values(), *habits.OPTIONS.values()]


def test_habits_of_git_are_none_here_and_lead_to_what_is() -> None:
    assert not set(habits.COMMANDS) & set(COMMANDS)
    for name, option in habits.OPTIONS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert not any(option in one.opts for one in command.params), (name, option)
    for said in ADVICE:
        for line in re.findall(r"`weightvc ([^`]*)`", said):
            if line == "--help":
                continue
            command = cli.get_command(click.Context(cli), line.split()[0])
            assert command is not None, said
            known = {one for option in command.params for one in option.opts}
            assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", line)) <= known, said
