"""The command diff: between versions, or plain checkpoints with no repository at all."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli import terminal
from weightvc_cli.completion import sides_of
from weightvc_cli.output import as_json, percent, shape, share, shown, size, table, times
from weightvc_cli.settings import Settings, json_option, pager_option, progress, repository_option

if TYPE_CHECKING:
    from weightvc.comparison import Diff, TensorDiff

LISTED: Final = 8
"""Steps of up to so many representable values are listed one by one."""


@click.command()
@click.argument("old", shell_complete=sides_of)
@click.argument("new", shell_complete=sides_of)
@click.option("--stat", is_flag=True, help="Also steps, weights, and what a day of such steps would cost.")
@click.option(
    "--step-time",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    metavar="SECONDS",
    help="Seconds between versions (60).",
)
@click.option("--readers", type=click.IntRange(min=0), default=1, help="Hosts that fetch each version (1).")
@click.option("--dtype", metavar="NAME", help="Cast floating tensors of both first: bf16, fp16, fp32.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if they differ.")
@pager_option
@json_option
@repository_option
@click.pass_context
def diff(
    context: click.Context,
    old: str,
    new: str,
    stat: bool,
    step_time: float,
    readers: int,
    dtype: str | None,
    exit_code: bool,
) -> None:
    """Show what changed from OLD to NEW.

    Each is a path or URL of a checkpoint, or else a version. Two paths need no repository.

    \b
    Examples:
      weightvc diff main~1 main --stat
      weightvc diff checkpoint-100 checkpoint-101 --dtype bf16 --stat
    """
    import weightvc
    from weightvc.errors import RefNotFound

    settings: Settings = context.obj
    with ExitStack() as stack:
        bar = stack.enter_context(progress("diff"))
        sides: list[Any] = [old, new]
        named = [i for i, side in enumerate(sides) if not (os.path.exists(side) or "://" in side)]
        if named:
            repository = stack.enter_context(_open(settings, sides[named[0]]))
            for i in named:
                try:
                    sides[i] = stack.enter_context(repository.source(sides[i], whole=True))
                except RefNotFound as error:
                    raise RefNotFound(f"no file or directory {sides[i]!r} here; {error}") from None
        found = weightvc.diff(*sides, progress=bar, dtype=dtype)
    if settings.json:
        click.echo(as_json(_json(found, step_time, readers)))
    else:
        lines = _stat(found, step_time, readers) if stat else _summary(found)
        terminal.write(lines, pager=not settings.no_pager)
    differs = any(tensor.status != "same" for tensor in found.tensors)
    if exit_code and differs:
        context.exit(1)


def _open(settings: Settings, side: str) -> Any:
    from weightvc.errors import NotFound

    try:
        settings.find()
    except NotFound:
        raise NotFound(
            f"{side!r} is no file or directory, and there is no repository to look it up in: give a path, or name "
            "the repository with -r"
        ) from None
    return settings.open()


def _json(found: "Diff", step_time: float, readers: int) -> dict[str, Any]:
    return {
        "elements": found.elements,
        "changed": found.changed,
        "density": found.density,
        "patch_bytes": found.patch,
        "full_bytes": found.full,
        "steps": {str(step): count for step, count in found.steps.items()},
        "costs": found.costs(step_time, readers),
        "tensors": [
            {k: v for k, v in asdict(t).items() if k != "patch"} | {"density": t.density, "patch_bytes": t.patch}
            for t in found.tensors
        ],
    }


def _called(component: str, name: str) -> str:
    return shown(f"{component}/{name}" if component else name)


def _density(tensor: "TensorDiff") -> str:
    return percent(tensor.density) if tensor.status != "removed" else ""


def _totals(found: "Diff") -> str:
    differ = sum(tensor.status != "same" for tensor in found.tensors)
    return (
        f"{differ} of {len(found.tensors)} tensors differ, {found.changed} of {found.elements} elements "
        f"({share(found.density)})"
    )


def _summary(found: "Diff") -> list[str]:
    rows = [(t.status, _density(t), _called(t.component, t.name)) for t in found.tensors if t.status != "same"]
    return [*(table(rows, "lrl") if rows else []), _totals(found)]


def _stat(found: "Diff", step_time: float, readers: int) -> list[str]:
    rows = [("status", "changed", "density", "patch", "dtype", "shape", "tensor")]
    rows += [
        (
            t.status,
            str(t.changed) if t.status != "removed" else "",
            _density(t),
            size(t.patch) if t.status != "removed" else "",
            t.dtype,
            shape(t.shape),
            _called(t.component, t.name),
        )
        for t in found.tensors
        if t.status != "same"
    ]
    lines = [*(table(rows, "lrrrlll") if len(rows) > 1 else []), _totals(found)]
    if found.steps and found.changed:
        lines += ["", "Steps of changed elements, in representable values (ULP):"]
        counted = [(f"{step:+d}", n) for step, n in found.steps.items() if 0 < abs(step) <= LISTED]
        far = found.changed - sum(n for _, n in counted)
        counted += [("others", far)] if far > 0 else []
        lines += table([(f"  {step}", str(n), percent(n / found.changed)) for step, n in counted], "rrr")
    each = f", {found.patch / found.changed:.2f} bytes a changed element" if found.changed else ""
    ratio = f", {times(found.full / found.patch)} smaller than" if found.patch else ", beside"
    lines += ["", f"A patch would weigh {size(found.patch)}{each}{ratio} the whole ({size(found.full)})."]
    return [*lines, "", *_costs(found, step_time, readers)]


def _costs(found: "Diff", step_time: float, readers: int) -> list[str]:
    costs = found.costs(step_time, readers)
    rows: list[tuple[str, ...]] = [("", "stored", "requests", "kept a month", "sent out")]
    for name, kind in (("patches", "patch"), ("whole", "full")):
        money = [f"${costs[f'{kind}_{what}']:,.2f}" for what in ("requests", "month", "egress")]
        rows.append((f"  {name}", size(costs[f"{kind}_bytes"]), *money))
    who = "1 reader" if readers == 1 else f"{readers} readers"
    head = f"A day of such steps, one every {step_time:g} s ({costs['steps']:,.0f} a day), for {who}, on S3:"
    return [head, *table(rows, "lrrrr")]
