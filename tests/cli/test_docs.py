"""docs/cli.md against the command line itself."""

from pathlib import Path

import click
import pytest

from weightvc import errors
from weightvc_cli.main import COMMANDS, cli

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
