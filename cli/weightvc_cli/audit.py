"""The command audit: a whole run, as versions or as plain checkpoints with no repository at all."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightvc_cli import terminal
from weightvc_cli.compare import cost_options, group_json, is_path, repository_of
from weightvc_cli.completion import sides_of
from weightvc_cli.output import as_json, counted, share, shown, size, table, times
from weightvc_cli.settings import Settings, json_option, pager_option, progress, repository_option

if TYPE_CHECKING:
    from weightvc.auditing import Audit, AuditedPair, Distance


@click.command()
@click.argument("what", nargs=-1, metavar="[REF | DIR | PATH...]", shell_complete=sides_of)
@click.option("--run", metavar="NAME", help="Of versions, only those with this label.")
@click.option("--last", type=click.IntRange(min=2), metavar="N", default=33, help="The newest N checkpoints (33).")
@click.option("--only", metavar="GLOB", help="Of a directory, take only names that match, as in 'checkpoint-*'.")
@click.option("--pairs", type=click.IntRange(min=1), metavar="N", default=3, help="Pairs of each distance (3).")
@cost_options
@click.option("--dtype", metavar="NAME", help="Cast floating tensors of all first: bf16, fp16, fp32.")
@pager_option
@json_option
@repository_option
@click.pass_obj
def audit(
    settings: Settings,
    what: tuple[str, ...],
    run: str | None,
    last: int,
    only: str | None,
    pairs: int,
    step_time: float,
    readers: int,
    dtype: str | None,
) -> None:
    """Tell whether patches pay for a run: what changes, what it costs, and what would mend it.

    It compares checkpoints 1, 2, 4, 8, ... apart: the versions that REF (HEAD) descends from, the numbered
    checkpoints in DIR, or those that are given, the oldest first. Paths need no repository, and nothing is written.

    \b
    Examples:
      weightvc audit outputs --only 'checkpoint-*' --dtype bf16
      weightvc audit main --run r7 --last 9 --readers 64
      weightvc audit step-10.safetensors step-11.safetensors
    """
    import weightvc

    paths = [is_path(one) for one in what]
    if not all(paths) and len(what) > 1:
        other = what[paths.index(False)]
        raise click.UsageError(f"{other!r} is no file or directory: give paths alone, or one branch")
    if run is not None and what and all(paths):
        raise click.UsageError("--run is for versions: name a branch")
    if only is not None and not (len(what) == 1 and os.path.isdir(what[0])):
        raise click.UsageError("--only is for a directory of checkpoints: name one")
    with progress("audit") as bar:
        options: dict[str, Any] = {"pairs": pairs, "dtype": dtype, "progress": bar}
        if what and all(paths):
            checkpoints, steps = _checkpoints(what, only or "*")
            found = weightvc.audit(checkpoints[-last:], steps=steps and steps[-last:], **options)
        else:
            with repository_of(settings, what[0]) if what else settings.open() as repository:
                found = repository.audit(what[0] if what else "HEAD", run=run, last=last, **options)
    if settings.json:
        click.echo(as_json(_json(found, step_time, readers)))
    else:
        terminal.write(_text(found, step_time, readers), pager=not settings.no_pager)


def _checkpoints(what: tuple[str, ...], only: str) -> tuple[list[str], list[int] | None]:
    """Paths, the oldest first, and their numbers if they have some."""
    from weightvc.importing import numbered

    if len(what) > 1 or not os.path.isdir(what[0]):
        return list(what), None
    found = numbered(Path(what[0]), only)
    return [str(one.path) for one in found], [one.number for one in found]


def _json(found: "Audit", step_time: float, readers: int) -> dict[str, Any]:
    return {
        "checkpoints": list(found.checkpoints),
        "stride": found.stride,
        "elements": found.elements,
        "full_bytes": found.full,
        "times": found.times if math.isfinite(found.times) else None,
        "growth": found.growth,
        "pays": found.pays,
        "verdict": found.verdict,
        "costs": found.costs(step_time, readers),
        "distances": [
            {
                "apart": one.apart,
                "density": one.density,
                "changed": one.changed,
                "patch_bytes": one.patch,
                "xor_bytes": one.xor,
                "pairs": [_pair_json(pair) for pair in one.pairs],
            }
            for one in found.distances
        ],
        "dtypes": [group_json(group) for group in found.dtypes],
        "cast": None if found.cast is None else _pair_json(found.cast),
    }


def _pair_json(pair: "AuditedPair") -> dict[str, Any]:
    return {
        "old": pair.old,
        "new": pair.new,
        "elements": pair.elements,
        "changed": pair.changed,
        "density": pair.density,
        "patch_bytes": pair.patch,
        "xor_bytes": pair.xor,
        "full_bytes": pair.full,
    }


def _text(found: "Audit", step_time: float, readers: int) -> list[str]:
    first, last = (shown(found.checkpoints[i]) for i in (0, -1))
    stride = f", {found.stride:g} {'step' if found.stride == 1 else 'steps'} apart" if found.stride else ""
    kinds = ", ".join(f"{group.name} {group.elements / max(found.elements, 1):.0%}" for group in found.dtypes[:4])
    lines = [
        f"{counted(len(found.checkpoints), 'checkpoint')}, {first} to {last}{stride}",
        f"{found.elements:,} elements ({kinds}), {size(found.full)}",
        "",
    ]
    rows = [("apart", "pairs", "changed", "", "patch", "bytes a change", "smaller than whole", "than xor + zstd")]
    lines += table([*rows, *(_row(found, one) for one in found.distances)], "rrrlrrrr")
    if found.growth is not None:
        lines.append(f"The share that changes grows with the distance k as k^{found.growth:.2f}.")
    newest = found.distances[0].pairs[-1]
    lines += ["", *_costs(found, step_time, readers), "", found.verdict]
    return [*lines, f"Where it lies: weightvc density {shown(newest.old)} {shown(newest.new)}"]


def _row(found: "Audit", one: "Distance") -> tuple[str, ...]:
    densities = sorted(pair.density for pair in one.pairs)
    spread = f"({share(densities[0])} to {share(densities[-1])})" if len(densities) > 1 else ""
    each = f"{one.patch / one.changed:.2f}" if one.changed else ""
    smaller = (times(found.full / one.patch), times(one.xor / one.patch)) if one.patch else ("", "")
    return str(one.apart), str(len(one.pairs)), share(one.density), spread, size(one.patch), each, *smaller


def _costs(found: "Audit", step_time: float, readers: int) -> list[str]:
    costs = found.costs(step_time, readers)
    rows: list[tuple[str, ...]] = [("", "stored a day", "requests", "kept a month", "sent out", "in all")]
    names = {"patch": "patches", "compacted": "and compact's", "xor": "xor + zstd", "full": "whole"}
    for kind, name in names.items():
        # What thirty days leave is kept from then on; requests and what is sent are those of the thirty days.
        money = [30 * costs[f"{kind}_{what}"] for what in ("requests", "month", "egress")]
        cells = [f"${one:,.2f}" for one in (*money, sum(money))]
        rows.append((f"  {name}", size(costs[f"{kind}_bytes"]), *cells))
    who = "1 reader" if readers == 1 else f"{readers} readers"
    head = f"30 days of a version each {step_time:g} s ({costs['steps']:,.0f} a day), for {who}, on S3:"
    return [head, *table(rows, "lrrrrr")]
