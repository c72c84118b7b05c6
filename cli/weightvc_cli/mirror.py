"""Command of a region or a provider that is fed once: mirror."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import click

from weightvc_cli.completion import paths_of
from weightvc_cli.output import as_json, counted, size
from weightvc_cli.rollout import noted
from weightvc_cli.settings import Settings, json_option, progress, store_options
from weightvc_cli.signals import stopped_by

if TYPE_CHECKING:
    from weightvc.protocol.mirror import Mirrored
    from weightvc.repository import Repository


@click.command()
@click.argument("source", metavar="SRC", shell_complete=paths_of)
@click.argument("target", metavar="DST", shell_complete=paths_of)
@click.option("-b", "--branch", metavar="NAME", default="HEAD", show_default=True, help="The branch to mirror.")
@click.option("--last", metavar="N", type=click.IntRange(1), help="Copy only the newest N versions; records of all.")
@click.option("--every", metavar="SECONDS", type=float, help="Go on, and look at SRC every so many seconds.")
@json_option
@store_options
@click.pass_obj
def mirror(settings: Settings, source: str, target: str, branch: str, last: int | None, every: float | None) -> None:
    """Copy what a branch needs from one repository to another.

    SRC and DST are URLs or paths; DST is a repository already (`weightvc init DST`). Versions keep their ids, every
    object is checked before it is written, and the branch moves last. What DST has is not copied again. A reset of
    the branch in SRC is followed, and stands in DST's reflog; where DST has versions of its own on the branch, it is
    refused. S3 servers that differ are named in the URLs: s3://bucket/policy?endpoint_url=…&profile=…. With --every
    it ends at SIGTERM or Ctrl-C; it may be killed at any moment.

    \b
    Examples:
      weightvc mirror s3://here/policy s3://there/policy --every 5
      weightvc mirror policy 's3://there/policy?endpoint_url=https://s3.example.com'
    """
    from weightvc.mirroring import Mirror

    if settings.repo is not None:
        raise click.UsageError("SRC and DST say which repositories: leave -r out")
    with _opened(settings, source) as here, _opened(settings, target) as there:
        mirroring = Mirror(here, there, branch=branch, last=last)
        if every is None:
            _report(settings, mirroring.run())
            return
        with noted(settings), stopped_by(signal.SIGTERM) as stop:
            for done in mirroring.follow(every=every, stop=stop):
                if done.changed:
                    _report(settings, done)


@contextmanager
def _opened(settings: Settings, url: str) -> "Iterator[Repository]":
    """One side: what its URL says of a server counts, and the options of the command for what it does not say."""
    import weightvc

    options = settings.options()
    said = parse_qs(url.partition("?")[2]) if url.startswith("s3://") else ("endpoint_url", "region", "profile")
    settings.opened = url
    options = {name: value for name, value in options.items() if name not in said}
    with progress("mirror") as bar, weightvc.open(url, lazy=True, progress=bar, **options) as repository:
        try:
            yield repository
        finally:
            settings.print_stats(repository)


def _report(settings: Settings, done: "Mirrored") -> None:
    if settings.json:
        fields = {
            "branch": done.branch,
            "id": done.head.id,
            "step": done.head.step,
            "old": done.old,
            "versions": done.versions,
            "records": done.records,
            "ways": done.ways,
            "objects": done.objects,
            "bytes": done.nbytes,
            "rewound": done.rewound,
        }
        click.echo(as_json(fields))
        return
    what = [counted(done.versions, "version")] if done.versions else []
    what += [counted(done.ways, "further way")] if done.ways else []
    what += [f"{counted(done.records, 'record')} alone"] if done.records else []
    copied = f"{', '.join(what)}, {size(done.nbytes)}" if what else "nothing to copy"
    moved = "" if done.old == done.head.id else " (rewound)" if done.rewound else ""
    click.echo(f"{done.branch} is at {done.head.short}{moved}: {copied}")
