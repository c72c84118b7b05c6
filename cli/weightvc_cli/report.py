"""The command that draws: report."""

import os
from importlib import import_module

import click

from weightvc_cli.completion import paths_of
from weightvc_cli.files import check_writable, write_atomically
from weightvc_cli.output import counted, size
from weightvc_cli.settings import Settings, repository_option


@click.command()
@click.argument("url", required=False, shell_complete=paths_of)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The file to write.",
)
@click.option(
    "-n",
    "--max-count",
    metavar="N",
    type=click.IntRange(1),
    default=10_000,
    help="The newest versions drawn (10000).",
)
@click.option(
    "--sample",
    metavar="N",
    type=click.IntRange(0, 64),
    default=8,
    help="The newest versions whose weights are read (8).",
)
@click.option(
    "--metrics",
    multiple=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="What jobs and hosts wrote; as often as needed.",
)
@repository_option
@click.pass_obj
def report(
    settings: Settings, url: str | None, path: str, max_count: int, sample: int, metrics: tuple[str, ...]
) -> None:
    """Draw the history as one HTML file.

    Shows versions, what they changed and took, by layer and step, what is stored, and what a cold pull costs. With
    --metrics also pulls and lag, from files of `follow --json`, and what jobs found, from their --metrics and
    --prometheus. The file needs no network, and may be mailed. It needs bokeh, of the extra `report`.

    \b
    Examples:
      weightvc report -o report.html
      weightvc report s3://bucket/policy --metrics maintain.jsonl --metrics host-1.jsonl
    """
    from weightvc.errors import Refused

    if url == "":
        raise click.UsageError("the URL is empty")
    if url is not None:
        settings.repo = url
    try:
        import_module("bokeh")
    except ImportError:
        raise Refused("bokeh, which draws the report, is not installed: pip install 'weightvc[report]'") from None
    check_writable(path, os.path.dirname(path) or ".")
    with settings.open() as repository:
        facts = repository.report(count=max_count, sample=sample, metrics=metrics)
    from weightvc.protocol.checkout import local_errors
    from weightvc_cli.page import render

    text = render(facts)
    with local_errors(path):
        write_atomically(path, text)
    for note in facts.notes:
        settings.note(note)
    click.echo(f"{path}: {counted(len(facts.rows), 'version')}, {size(len(text.encode()))}")
