"""Commands for trainers and engines that know nothing of weightvc: import, export."""

import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import click

from weightvc_cli.completion import branches_of, paths_of, refs_of
from weightvc_cli.output import as_json, counted, labels, shown, size
from weightvc_cli.rollout import noted
from weightvc_cli.settings import Settings, json_option, repository_option
from weightvc_cli.signals import stopped_by

if TYPE_CHECKING:
    from weightvc.exporting import Exported
    from weightvc.importing import Imported

_T = TypeVar("_T")


@click.command("import")
@click.argument("directory", metavar="DIR", shell_complete=paths_of)
@click.option(
    "-b",
    "--branch",
    default="HEAD",
    metavar="NAME",
    show_default=True,
    help="The branch to commit to.",
    shell_complete=branches_of,
)
@click.option("--follow", is_flag=True, help="Go on: commit each checkpoint that appears, once it is whole.")
@click.option("--every", metavar="SECONDS", default=5.0, show_default=True, help="How often --follow looks.")
@click.option("--only", metavar="GLOB", default="*", help="Take only names that match, as in 'checkpoint-*'.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Leave files of checkpoints out, as often as needed.")
@click.option("--dtype", metavar="NAME", help="Cast floating tensors: bf16, fp16, fp32.")
@click.option(
    "--base", metavar="PATH", shell_complete=paths_of, help="The checkpoint that the first delta was made on."
)
@click.option("--run", metavar="NAME", help="Label: the run.")
@json_option
@repository_option
@click.pass_obj
def import_(
    settings: Settings,
    directory: str,
    branch: str,
    follow: bool,
    every: float,
    only: str,
    exclude: tuple[str, ...],
    dtype: str | None,
    base: str | None,
    run: str | None,
) -> None:
    """Commit the numbered checkpoints of a directory, in order.

    A checkpoint is a folder, or a safetensors file, whose name ends in a number, which becomes its step: step_000120,
    checkpoint-120, weight_v000120 (whole, or a delta as slime and miles write them). A step that the branch has is
    not committed again, only compared: if its weights differ, or a delta's base is missing, that one is refused by
    name, and those before it are in. It may be killed at any moment, and goes on when it is run again.

    With --follow the directory may still be written to: a checkpoint is committed once all of it is there and has
    looked the same twice. What does not become whole is told once. The trainer may remove checkpoints. Ends at
    SIGTERM or Ctrl-C, between two versions.

    \b
    Examples:
      weightvc import outputs --follow --exclude 'optimizer.*'
    """
    from weightvc.importing import Import

    with noted(settings), settings.open(what="import") as repository:
        importing = Import(
            *(repository, directory),
            branch=branch,
            base=base,
            run=run,
            dtype=dtype,
            only=only,
            exclude=exclude,
        )
        if follow:
            with stopped_by(signal.SIGTERM) as stop:
                _told(settings, importing.follow(every=every, stop=stop), _imported)
        elif not _told(settings, importing.run(), _imported) and not settings.json:
            click.echo("nothing to import: all of it is in")


def _told(settings: Settings, versions: Iterable[_T], tell: Callable[[Settings, _T], None]) -> int:
    """Tell of each version as it is done; returns how many there were."""
    count = 0
    for done in versions:
        tell(settings, done)
        count += 1
    return count


def _imported(settings: Settings, done: "Imported") -> None:
    version = done.version
    if settings.json:
        click.echo(as_json({"path": str(done.path), "id": version.id, "step": version.step, "tree": version.tree}))
    else:
        click.echo(f"{version.short} {labels(version)}: {shown(done.path.name)}")


@click.command()
@click.argument("ref", shell_complete=refs_of)
@click.argument("directory", metavar="DIR", shell_complete=paths_of)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["slime"]),
    default="slime",
    show_default=True,
    help="The layout: slime is that of slime, miles and /pull_weights.",
)
@click.option("--follow", is_flag=True, help="Go on, as new versions come.")
@click.option("--every", metavar="SECONDS", default=1.0, show_default=True, help="How often --follow looks.")
@click.option("--last", metavar="N", type=click.IntRange(1), help="Begin an empty DIR with the newest N versions.")
@click.option("--full-every", metavar="N", type=click.IntRange(1), help="Write numbers that N divides whole.")
@click.option(
    "--encoding",
    type=click.Choice(["xor", "overwrite"]),
    default="xor",
    show_default=True,
    help="Of deltas: overwrite is larger, and may be applied twice.",
)
@click.option(
    "--checksum",
    type=click.Choice(["xxh3-128", "blake3", "adler32"]),
    default="xxh3-128",
    show_default=True,
    help="Of each changed tensor.",
)
@json_option
@repository_option
@click.pass_obj
def export(
    settings: Settings,
    ref: str,
    directory: str,
    layout: str,
    follow: bool,
    every: float,
    last: int | None,
    full_every: int | None,
    encoding: str,
    checksum: str,
) -> None:
    """Write a branch's versions, up to REF, into DIR as an engine's own format has them.

    Each version becomes DIR/weight_vNNNNNN, by one rename: the first one whole, the others as deltas on the one
    before, which engines with /pull_weights apply unchanged. NNNNNN counts from 1. What is there is not written
    again, so that it may be killed at any moment, and goes on when it is run again; old directories may be removed.
    A version that the layout cannot say is refused before anything of it is written. With --follow it ends at SIGTERM
    or Ctrl-C, between two versions.

    \b
    Examples:
      weightvc export main served --follow --last 1
    """
    from weightvc.exporting import Export

    with noted(settings), settings.open(what="export") as repository:
        exporting = Export(
            *(repository, directory, ref), encoding=encoding, checksum=checksum, full_every=full_every, last=last
        )
        if follow:
            with stopped_by(signal.SIGTERM) as stop:
                _told(settings, exporting.follow(every=every, stop=stop), _exported)
        elif not _told(settings, exporting.run(), _exported) and not settings.json:
            click.echo("nothing to export: all of it is there")


def _exported(settings: Settings, done: "Exported") -> None:
    version = done.version
    if settings.json:
        fields = {
            "path": str(done.path),
            "number": done.number,
            "id": version.id,
            "step": version.step,
            "full": done.full,
            "why": done.why,
            "tensors": done.tensors,
            "bytes": done.nbytes,
        }
        click.echo(as_json(fields))
        return
    said = f" ({labels(version)})" if labels(version) else ""
    what = "whole" if done.full else f"{counted(done.tensors, 'tensor')} changed"
    click.echo(f"{done.path.name} is {version.short}{said}: {what}, {size(done.nbytes)}")
