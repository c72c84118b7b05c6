"""The command to run first when something is wrong: doctor."""

import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli.output import as_json, counted, shown
from weightvc_cli.settings import Settings, Size, json_option, repository_option

if TYPE_CHECKING:
    from weightvc.doctor import Finding

LARGEST: Final = 64 << 20
"""Bytes that an object may have."""
_WIDE: Final = 11


@click.command()
@click.argument("url", required=False)
@click.option("--read-only", is_flag=True, help="Write nothing for a try.")
@click.option(
    "--size", type=Size(), default="16M", metavar="SIZE", help="The object that throughput is measured by (16M)."
)
@json_option
@repository_option
@click.pass_obj
def doctor(settings: Settings, url: str | None, read_only: bool, size: int) -> None:
    """Look what is wrong, and say what mends it.

    Looks at the store (rights, clock, conditional writes, speed, what the bucket's owner has set), at the
    repository in it, and at this host. Whatever it writes for a try it deletes again.

    \b
    Examples:
      weightvc doctor s3://bucket/policy
      weightvc doctor --read-only --json
    """
    if url == "":
        raise click.UsageError("the URL is empty")
    if not 1 <= size <= LARGEST:
        raise click.UsageError(f"--size {size}: from 1 byte to {LARGEST}, which no object passes")
    if url is not None:
        settings.repo = url
    # What was written for a try goes as well where the process is told to end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with settings.open() as repository:
        found = list(_printed(settings, repository.examine(read_only=read_only, nbytes=size)))
        problems = [one for one in found if one.state == "problem"]
        if settings.json:
            fields = {"url": repository.url, "ok": not problems, "findings": [_as_json(one) for one in found]}
            click.echo(as_json(fields))
        elif not problems:
            warned = sum(one.state == "warning" for one in found)
            click.echo(f"no problem, {counted(warned, 'warning')}")
        if problems:
            first = problems[0]
            assert first.error is not None
            more = f"; {counted(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
            mend = f": {first.mend}" if first.mend else ""
            raise first.error(f"{first.check}: {first.says}{mend}{more}")


def _printed(settings: Settings, found: "Iterable[Finding]") -> "Iterator[Finding]":
    """The findings, each printed as it comes: what follows may take its time."""
    for one in found:
        if not settings.json:
            state = "-" if one.state == "skipped" else one.state
            click.echo(f"{state:8} {one.check:{_WIDE}} {shown(one.says)}")
            if one.mend:
                click.echo(f"{'':8} {'':{_WIDE}} mend: {shown(one.mend)}")
        yield one


def _as_json(one: "Finding") -> dict[str, Any]:
    fields = asdict(one)
    error = fields.pop("error")
    return fields | {
        "error": None if error is None else error.__name__,
        "exit_code": 0 if error is None else error.exit_code,
    }
