"""The command that looks whether a repository is whole, and mends it: fsck."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli.metrics import Metrics, checked, metrics_options
from weightvc_cli.output import as_json, counted, share, shown, size
from weightvc_cli.settings import Settings, json_option, repository_option

if TYPE_CHECKING:
    from weightvc.protocol.fsck import FsckReport
    from weightvc.protocol.rebuild import Rebuilt
    from weightvc.protocol.survey import Damage, Sufferer

SOME: Final = 10
"""Versions and objects that are named one by one; the rest is counted, and in --json."""


class _Share(click.ParamType[float]):
    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found <= 1:
            self.fail(f"{value!r} is no share: give 0.1 or 10%", param, ctx)
        return found


@click.command()
@click.option(
    "--read-data",
    type=_Share(),
    is_flag=False,
    flag_value=1.0,
    default=0.0,
    metavar="[SHARE]",
    help="Read objects too and build trees: all, or a share of them (0.1, 10%).",
)
@click.option("--seed", type=click.IntRange(0), help="Which share: the same seed chooses the same again.")
@click.option("--repair", is_flag=True, help="Put back what is bad, and lead the catalogue around it.")
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=click.Path(),
    metavar="PATH",
    help="With --repair: a checkout, a file, a cache or a copy of the repository to take from; as often as needed.",
)
@click.option("--rebuild-root", is_flag=True, help="Write the root anew where it is missing or corrupt.")
@click.option("--adopt", is_flag=True, help="With --rebuild-root: catalogue versions that only manifests tell of.")
@metrics_options
@json_option
@repository_option
@click.pass_obj
def fsck(
    settings: Settings,
    read_data: float,
    seed: int | None,
    repair: bool,
    sources: Sequence[str],
    rebuild_root: bool,
    adopt: bool,
    metrics: Metrics,
) -> None:
    """Look whether the repository is whole.

    All that the root names has to be there, and to have the size that it should; with --read-data, its bytes have to
    be right as well. The exit status is 7 if something is missing or bad.

    \b
    Examples:
      weightvc fsck
      weightvc fsck --read-data=5%
      weightvc fsck --read-data --repair --from weights
    """
    if sources and not repair:
        raise click.UsageError("--from is for --repair")
    if adopt and not rebuild_root:
        raise click.UsageError("--adopt is for --rebuild-root")
    if seed is not None and not read_data:
        raise click.UsageError("--seed is for --read-data=SHARE")
    with metrics.opened(settings, what="fsck") as (repository, run):
        made = repository.rebuild_root(adopt=adopt) if rebuild_root else None
        if made is not None and not settings.json:
            _print_rebuilt(made)
        report = repository.fsck(read_data=read_data, seed=seed, repair=repair, sources=sources)
        run.numbers |= checked(report) | {"seconds/fsck": run.took()}
        # What is wrong in bytes alone is found, and mended, only where they are read.
        mend = "" if repair else f": see `weightvc fsck{' --read-data' if read_data else ''} --repair`"
        _tell(settings, report, made, mend)


def _tell(settings: Settings, report: "FsckReport", made: "Rebuilt | None", mend: str) -> None:
    """Print what was found; raise Corrupt where something is missing or bad."""
    from weightvc.errors import Corrupt

    if settings.json:
        fields = asdict(report)
        fields |= {"bytes": fields.pop("nbytes"), "ok": report.ok, "rebuilt": None if made is None else asdict(made)}
        click.echo(as_json(fields))
    else:
        _print(report)
    if not report.ok:
        if report.sequence is None:
            raise Corrupt(f"{report.url} has no root that can be read: see `weightvc fsck --rebuild-root`")
        raise Corrupt(
            f"{report.url} is not whole: {counted(len(report.damages), 'object')} missing or bad, "
            f"{counted(len(report.lost), 'version')} that cannot be read{mend}"
        )


def _print(report: "FsckReport") -> None:
    for line in report.repaired:
        click.echo(f"repaired: {shown(line)}")
    told: dict[tuple[Sufferer, ...], str] = {}
    for damage in report.damages[:SOME]:
        _print_damage(damage, told)
    if len(report.damages) > SOME:
        click.echo(f"and {counted(len(report.damages) - SOME, 'object')} more; --json names all")
    if report.lost:
        click.echo(f"cannot be read: {_named_once(report.lost, told)}")
    if report.lost_entries:
        click.echo(f"{counted(report.lost_entries, 'operation')} in segments that cannot be read")
    for one in report.needed[:SOME]:
        click.echo(f"needed: {shown(one)}")
    for note in report.notes:
        click.echo(f"note: {shown(note)}")
    if report.sequence is None:
        return
    expired = f", {report.expired} expired" if report.expired else ""
    objects = f"{counted(report.objects, 'object')}, {size(report.nbytes)}"
    click.echo(f"{counted(report.versions, 'version')}{expired}, {objects}")
    if report.unreferenced:
        click.echo(f"named by nothing: {counted(report.unreferenced, 'object')}, {size(report.unreferenced_bytes)}")
    if report.share:
        seed = "" if report.share == 1 else f" ({share(report.share)}, --seed {report.seed})"
        trees = counted(report.trees_built, "tree")
        click.echo(f"read {counted(report.objects_read, 'object')}, built {trees}{seed}")
    if report.ok:
        click.echo("whole" if report.share == 1 else "whole, as far as it was looked at")


def _print_damage(damage: "Damage", told: "dict[tuple[Sufferer, ...], str]") -> None:
    click.echo(f"bad: {damage.key}: {shown(damage.fault)}")
    if damage.referred:
        more = f", and {len(damage.referred) - 3} more" if len(damage.referred) > 3 else ""
        click.echo(f"    named by {', '.join(damage.referred[:3])}{more}")
    for what, versions in (
        ("lost", damage.lost),
        ("files cannot be written", damage.files),
        ("has another way", damage.elsewhere),
    ):
        if versions:
            click.echo(f"    {what}: {_named_once(versions, told)}")
            told.setdefault(tuple(versions), damage.key)


def _named_once(versions: "Sequence[Sufferer]", told: "dict[tuple[Sufferer, ...], str]") -> str:
    """Versions by name, or, where they were named before (`told`), how many and at which object."""
    where = told.get(tuple(versions))
    return _named(versions) if where is None else f"{counted(len(versions), 'version')}, named at {where}"


def _named(versions: "Sequence[Sufferer]") -> str:
    from weightvc.protocol.fsck import described

    more = f", and {len(versions) - SOME} more" if len(versions) > SOME else ""
    return ", ".join(shown(described(one)) for one in versions[:SOME]) + more


def _print_rebuilt(made: "Rebuilt") -> None:
    origin = f"the copy {made.copy}" if made.copy else "segments and manifests alone"
    click.echo(f"made a root of {origin}: sequence {made.sequence}, {counted(made.versions, 'version')}")
    for name, ident in made.branches.items():
        click.echo(f"    branch {shown(name)}: {ident[:12]}")
    for what, versions in (
        ("adopted", made.adopted),
        (
            "not in it, and known by manifests alone (--adopt)",
            [one for one in made.offered if one not in made.adopted],
        ),
        ("expired since", made.expired),
        ("objects are missing", made.lacking),
    ):
        if versions:
            click.echo(f"    {what}: {_named(versions)}")
    if made.kept:
        click.echo(f"    the old root's bytes are kept as {made.kept}")
    for note in made.notes:
        click.echo(f"note: {shown(note)}")
