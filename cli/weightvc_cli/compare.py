"""The commands diff and density: between versions, or plain checkpoints with no repository at all."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli import terminal
from weightvc_cli.completion import sides_of
from weightvc_cli.output import as_json, percent, shape, share, shown, size, table, times
from weightvc_cli.settings import F, Settings, json_option, pager_option, progress, repository_option

if TYPE_CHECKING:
    from weightvc.comparison import Diff, ExponentDiff, GroupDiff, TensorDiff

COUNTS: Final = ("elements", "changed", "single")
RARE: Final = 0.001
"""Exponents of a smaller share of the elements are not listed one by one."""
LISTED: Final = 8
"""Steps of up to so many representable values are listed one by one."""


def cost_options(command: F) -> F:
    """Add --step-time and --readers, which decide what a day costs."""
    every = click.option(
        "--step-time",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        metavar="SECONDS",
        help="Seconds between versions (60).",
    )
    readers = click.option(
        "--readers", type=click.IntRange(min=0), default=1, help="Hosts that fetch each version (1)."
    )
    return every(readers(command))


@click.command()
@click.argument("old", shell_complete=sides_of)
@click.argument("new", shell_complete=sides_of)
@click.option("--stat", is_flag=True, help="Also steps, weights, and what a day of such steps would cost.")
@cost_options
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

    settings: Settings = context.obj
    with progress("diff") as bar, _sides(settings, old, new) as sides:
        found = weightvc.diff(*sides, progress=bar, dtype=dtype)
    if settings.json:
        click.echo(as_json(_json(found, step_time, readers)))
    else:
        lines = _stat(found, step_time, readers) if stat else _summary(found)
        terminal.write(lines, pager=not settings.no_pager)
    differs = any(tensor.status != "same" for tensor in found.tensors)
    if exit_code and differs:
        context.exit(1)


@click.command()
@click.argument("old", shell_complete=sides_of)
@click.argument("new", shell_complete=sides_of)
@click.option("--dtype", metavar="NAME", help="Cast floating tensors of both first: bf16, fp16, fp32.")
@pager_option
@json_option
@repository_option
@click.pass_obj
def density(settings: Settings, old: str, new: str, dtype: str | None) -> None:
    """Show where the changes from OLD to NEW lie: by dtype, layer and exponent.

    Each is a path or URL of a checkpoint, or else a version. Two paths need no repository. `weightvc diff --stat` has
    them by tensor, and `weightvc audit` looks at a whole run.

    \b
    Examples:
      weightvc density checkpoint-100 checkpoint-101
      weightvc density main~8 main --dtype bf16
    """
    import weightvc

    with progress("density") as bar, _sides(settings, old, new) as sides:
        found = weightvc.diff(*sides, closely=True, progress=bar, dtype=dtype)
    if settings.json:
        click.echo(as_json(_density_json(found)))
    else:
        terminal.write(_density_text(found), pager=not settings.no_pager)


@contextmanager
def _sides(settings: Settings, old: str, new: str) -> Iterator[list[Any]]:
    """Both sides as weightvc.diff() takes them: what is no path is looked up in the repository."""
    from weightvc.errors import RefNotFound

    with ExitStack() as stack:
        sides: list[Any] = [old, new]
        named = [i for i, side in enumerate(sides) if not is_path(side)]
        if named:
            repository = stack.enter_context(repository_of(settings, sides[named[0]]))
            for i in named:
                try:
                    sides[i] = stack.enter_context(repository.source(sides[i], whole=True))
                except RefNotFound as error:
                    raise RefNotFound(f"no file or directory {sides[i]!r} here; {error}") from None
        yield sides


def is_path(side: str) -> bool:
    """Whether it is a path or a URL, and not a version."""
    return os.path.exists(side) or "://" in side


def repository_of(settings: Settings, side: str) -> Any:
    """The repository, as settings.open(), to look up what is no path."""
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


def group_json(group: "GroupDiff") -> dict[str, Any]:
    """A layer or a dtype."""
    return {k: v for k, v in asdict(group).items() if k != "patch"} | {
        "density": group.density,
        "patch_bytes": group.patch,
    }


def _density_json(found: "Diff") -> dict[str, Any]:
    return {
        "elements": found.elements,
        "changed": found.changed,
        "density": found.density,
        "patch_bytes": found.patch,
        "xor_bytes": found.xor,
        "full_bytes": found.full,
        "dtypes": [group_json(group) for group in found.dtypes],
        "layers": [group_json(group) for group in found.layers],
        "exponents": [asdict(row) | {"density": row.density} for row in found.exponents],
    }


def _density_text(found: "Diff") -> list[str]:
    lines: list[str] = []
    for head, groups in (("dtype", found.dtypes), ("layer", found.layers)):
        rows = [(head, "tensors", "elements", "density", "patch", "bytes a change", "of the patch")]
        for group in groups:
            each = f"{group.patch / group.changed:.2f}" if group.changed else ""
            part = f"{group.patch / found.patch:.1%}" if found.patch else ""
            cells = (f"{group.elements:,}", percent(group.density), size(group.patch), each, part)
            rows.append((shown(group.name), str(group.tensors), *cells))
        lines += [*table(rows, "lrrrrrr"), ""]
    levels = _levels(found.exponents)
    lines += [*table([("weights from", "dtype", "elements", "density", "of these by one ULP"), *levels], "llrrr"), ""]
    beside = f", XOR and zstd {size(found.xor)}" if found.xor is not None else ""
    return [*lines, f"{_totals(found)}: a patch has {size(found.patch)}{beside}, the whole {size(found.full)}"]


def _levels(exponents: "list[ExponentDiff]") -> list[tuple[str, ...]]:
    """A row an exponent; those of so few elements that they say nothing are one, at either end."""
    out: list[tuple[str, ...]] = []
    for dtype, same in groupby(exponents, key=lambda one: one.dtype):
        rows = list(same)
        least = sum(row.elements for row in rows) * RARE
        common = [i for i, row in enumerate(rows) if row.elements >= least]
        low, high = common[0], common[-1] + 1
        ends = f"below {_power(rows[low])}", f"{_power(rows[high])} and up" if high < len(rows) else ""
        parts = [(ends[0], rows[:low]), *((_power(row), [row]) for row in rows[low:high]), (ends[1], rows[high:])]
        for label, some in parts:
            elements, changed, single = (sum(getattr(row, name) for row in some) for name in COUNTS)
            if elements:
                one = f"{single / changed:.1%}" if changed else ""
                out.append((label, dtype, f"{elements:,}", percent(changed / elements), one))
    return out


def _power(row: "ExponentDiff") -> str:
    return "subnormal, 0" if row.exponent is None else f"2^{row.exponent}"


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
