"""plan and compact: the ways to versions, shown and added."""

from typing import TYPE_CHECKING, Any

import click

from weightvc_cli.completion import refs_of
from weightvc_cli.metrics import Metrics, compacted, metrics_options
from weightvc_cli.output import as_json, counted, shown, size, table
from weightvc_cli.settings import Settings, json_option, repository_option

if TYPE_CHECKING:
    from weightvc.protocol.compact import Compacted
    from weightvc.protocol.plan import Step

NOTHING = "nothing"


class _Percent(click.IntRange):
    """A whole number of percent; the sign may be given, as it may be elsewhere."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            value = value.strip().removesuffix("%")
        return super().convert(value, param, ctx)


def _label(step: "Step") -> str:
    version = step.entry.version
    assert version is not None
    return version.short + (f" (step {version.step})" if version.step is not None else "")


@click.command()
@click.argument("old", metavar="FROM", shell_complete=refs_of)
@click.argument("new", metavar="TO", shell_complete=refs_of)
@json_option
@repository_option
@click.pass_obj
def plan(settings: Settings, old: str, new: str) -> None:
    """Show the cheapest way from one version to another.

    It is what a host that holds the version FROM (`nothing`: a new host) fetches to have TO: objects and bytes,
    beside the root and segments of the catalogue.

    \b
    Examples:
      weightvc plan main~5 main
      weightvc plan nothing main
    """
    with settings.open() as repository:
        made = repository.plan(None if old == NOTHING else old, new)
        assert made.target.version is not None
        if settings.json:
            fields = {
                "from": made.start.new if made.start is not None else None,
                "to": made.target.new,
                "bytes": made.nbytes,
                "requests": made.requests,
                "patches": made.patches,
                "steps": [
                    {
                        "to": step.entry.new,
                        "from": step.edge.source,
                        "bytes": step.nbytes,
                        "requests": step.requests,
                        "manifest": step.way.manifest,
                    }
                    for step in made.steps
                ],
            }
            click.echo(as_json(fields))
            return
        rows = []
        for step in made.steps:
            what = "base" if step.edge.source is None else "patch"
            rows.append((what, _label(step), size(step.nbytes), f"{step.requests}"))
        if rows:
            for line in table([("", "to", "bytes", "requests"), *rows], "llrr"):
                click.echo(line)
        total = f"{made.patches} patches, " if made.patches != 1 else "1 patch, "
        held = f"from {shown(old)}" if made.start is not None else "from nothing"
        if made.start is None and old != NOTHING:
            held += f", since no patch leads on from {shown(old)} more cheaply"
        click.echo(f"{held}: {total}{size(made.nbytes)}, {made.requests} requests")


@click.command()
@click.option(
    "--share",
    type=_Percent(min=1),
    metavar="PERCENT",
    help="A base where the patches since the last one outweigh so much of it (50).",
)
@click.option(
    "--base-every", type=click.IntRange(min=4), metavar="N", help="A base every N versions at least (1024)."
)
@click.option("--reverse/--no-reverse", default=None, help="Patches back as well (no).")
@click.option("--save", is_flag=True, help="Keep what was given in the repository, for later runs and maintain.")
@metrics_options
@json_option
@repository_option
@click.pass_obj
def compact(
    settings: Settings,
    *,
    share: int | None,
    base_every: int | None,
    reverse: bool | None,
    save: bool,
    metrics: Metrics,
) -> None:
    """Add long patches and bases, so that whoever is far behind has few to fetch.

    Versions stay as they are. It may run anywhere, beside writers, and again: it makes what is missing.

    \b
    Examples:
      weightvc compact
      weightvc compact --share 30 --save
    """
    if save and share is None and base_every is None and reverse is None:
        raise click.UsageError("there is nothing to --save: give --share, --base-every or --reverse")
    with metrics.opened(settings) as (repository, run):
        done = repository.compact(share=share, base_every=base_every, reverse=reverse, save=save)
        run.numbers |= compacted(done) | {"seconds/compact": run.took()}
        for why in done.skipped:
            settings.note(f"skipped: {why}")
        if settings.json:
            click.echo(as_json(compaction_json(done)))
        elif not (done.patches or done.back or done.bases):
            click.echo("nothing to add")
        else:
            click.echo(f"added {compaction_text(done)}")


def compaction_text(done: "Compacted") -> str:
    """What compact() did, in words."""
    back = f", {done.back} back" if done.back else ""
    return f"{counted(done.patches, 'patch', 'patches')}{back}, {counted(done.bases, 'base')}: {size(done.nbytes)}"


def compaction_json(done: "Compacted") -> dict[str, Any]:
    """What compact() did, as JSON says it."""
    return {
        "patches": done.patches,
        "reverse": done.back,
        "bases": done.bases,
        "bytes": done.nbytes,
        "swaps": done.swaps,
        "skipped": done.skipped,
    }
