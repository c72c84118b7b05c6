"""What somebody at a terminal gets beside the text: colours, and a pager for what is long."""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import click

LANES: Final = ("red", "green", "yellow", "blue", "magenta", "cyan")
"""Colours of a graph's columns, from the left, and again."""


def plain() -> bool:
    """Whether colours are unwanted (https://no-color.org), or the terminal does not know them."""
    return bool(os.environ.get("NO_COLOR")) or _dumb()


def _dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


def ident(text: str) -> str:
    """A version's id, in its colour. Like all colours here, click.echo() takes it away where no terminal is."""
    return click.style(text, fg="yellow")


def pointers(names: Sequence[str]) -> str:
    """What points at a version: "HEAD -> main", "main", "tag: v1"."""
    return f"{ident('(')}{ident(', ').join(map(_pointer, names))}{ident(')')}"


def _pointer(name: str) -> str:
    if name.startswith("tag: "):
        return click.style(name, fg="yellow", bold=True)
    head, arrow, branch = name.rpartition(" -> ")
    said = click.style(branch, fg="green", bold=True)
    return click.style(head + arrow, fg="cyan", bold=True) + said if arrow else said


def lanes(row: str) -> str:
    """A row of a graph, each column in a colour of its own; the stars are versions, and stay as they are."""
    return "".join(
        char if char in " *" else click.style(char, fg=LANES[i // 2 % len(LANES)]) for i, char in enumerate(row)
    )


def write(lines: Iterable[str], *, pager: bool) -> None:
    """Print lines; at a terminal, and if `pager` is true, by the pager that WEIGHTVC_PAGER or PAGER names, else less.

    As in git, less is told by LESS=FRX, unless LESS is set, to show what fits on the screen and end. Raises
    click.UsageError for a pager whose quotes do not match.
    """
    found = _pager() if pager else None
    rest = iter(lines)
    # Before the pager opens, so that an error is told on the terminal as it was.
    first = next(rest, None)
    if first is None:
        return
    if found is None:
        for line in chain([first], rest):
            click.echo(line)
        return
    os.environ["PAGER"] = found
    os.environ.setdefault("LESS", "FRX")
    # click ends the text with a newline of its own.
    click.echo_via_pager(chain([first], (f"\n{line}" for line in rest)), color=not plain())


def _pager() -> str | None:
    """The pager's command line, or None for none."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or _dumb():
        return None
    for name in ("WEIGHTVC_PAGER", "PAGER"):
        if (told := os.environ.get(name)) is not None:
            try:
                words = shlex.split(told)
            except ValueError as error:
                raise click.UsageError(f"{name} cannot be read as a command ({error}): {told}") from None
            return told if words and words != ["cat"] else None
    return "less"
