"""Commands that keep a repository in order: expire, gc, maintain."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from weightvc.errors import Conflict, RefNotFound, Refused, StateUnknown, StoreError
from weightvc_cli.metrics import Metrics, collected, expired, maintained, metrics_options
from weightvc_cli.output import as_json, counted, first_line, iso, shown, size, table
from weightvc_cli.settings import Duration, Settings, json_option, repository_option
from weightvc_cli.signals import stopped_by
from weightvc_cli.ways import compaction_json, compaction_text

if TYPE_CHECKING:
    from weightvc.protocol.collect import Collection, Tally
    from weightvc.protocol.expire import Expiry
    from weightvc.repository import Repository
    from weightvc.retention import Maintenance

FAILED = 9
"""Exit status where single objects could not be deleted."""

SOME = 5
"""Pins that are named one by one."""

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the N newest versions of a branch.")
@click.option("--keep-within", type=Duration(), metavar="TIME", help="Keep versions younger than this (7d).")
@click.option("--keep-every", type=_COUNT, metavar="N", help="Keep versions whose generation is a multiple of N.")
@click.option("--keep-every-step", type=_COUNT, metavar="N", help="Keep versions whose step is a multiple of N.")
@click.option(
    "--keep-meta", multiple=True, metavar="K=V", help="Keep versions with this metadata, as often as needed."
)
@click.option(
    "--keep-unreachable", type=Duration(), metavar="TIME", help="Keep what nothing leads to any more so long (30d)."
)
@click.option(
    "-b",
    "--branch",
    "branches",
    multiple=True,
    metavar="NAME",
    help="The rules are for this branch only; others keep all.",
)
@click.option("--save", is_flag=True, help="Keep the policy in the repository, for later runs without options.")
@click.option("--forget", is_flag=True, help="Keep no policy (of --branch, if that is given) any more.")
@click.option("--show", is_flag=True, help="Show the policy that the repository keeps, as JSON.")
@click.option("-n", "--dry-run", is_flag=True, help="Only say what would become of each version.")
@metrics_options
@click.option("--force", is_flag=True, help="Also where there are no branches.")
@json_option
@repository_option
@click.pass_obj
def expire(
    settings: Settings,
    *,
    keep_last: int | None,
    keep_within: int | None,
    keep_every: int | None,
    keep_every_step: int | None,
    keep_meta: tuple[str, ...],
    keep_unreachable: int | None,
    branches: tuple[str, ...],
    save: bool,
    forget: bool,
    show: bool,
    dry_run: bool,
    force: bool,
    metrics: Metrics,
) -> None:
    """Let go of versions that no rule keeps.

    A version stays that any rule keeps. Heads and tagged versions always do. What others are patched from stays
    stored as a step, but cannot be asked for any more. Without rules, the policy that the repository keeps is
    followed. `weightvc gc` then frees the space. There is no way back: look with --dry-run first.

    \b
    Examples:
      weightvc expire --keep-last 1000 --keep-every-step 100 --dry-run
      weightvc expire --keep-within 7d --save
    """
    from weightvc.objects.retention import ALL, UNREACHABLE, Policy, Rules, to_json

    rules = Rules(keep_last, keep_within, keep_every, keep_every_step, _metadata(keep_meta))
    given_rules = rules != Rules() or keep_unreachable is not None
    if show and (given_rules or save or forget or force or branches or dry_run):
        raise click.UsageError("--show only shows the policy that is kept, all of it: leave out the other options")
    if forget and (given_rules or save or force):
        raise click.UsageError("--forget takes --branch and --dry-run alone: to keep other rules, --save them")
    if save and not given_rules:
        raise click.UsageError("there is no policy to --save: say what to keep")
    if branches and rules == Rules() and not forget:
        of = "" if keep_unreachable is None else "--keep-unreachable is for what no branch leads to: "
        raise click.UsageError(f"{of}say what to keep of the branch, or leave --branch out")
    if show or forget or dry_run:
        metrics.none_of("a dry run" if dry_run else "--show" if show else "--forget")
    with metrics.opened(settings) as (repository, run):
        if show:
            kept = repository.policy()
            click.echo(as_json(to_json(kept) if kept is not None else None))
            return
        if forget:
            _forget(settings, repository, branches, dry_run=dry_run)
            return
        _check_branches(repository, branches)
        given: Policy | None = None
        if given_rules:
            named = dict.fromkeys(branches or [ALL], rules) if rules != Rules() else {}
            given = Policy(named, None if branches else UNREACHABLE)
            if save and (kept := repository.policy()) is not None:
                given = Policy({**kept.branches, **named}, kept.unreachable)
            if keep_unreachable is not None:
                given = replace(given, unreachable=keep_unreachable)
        result = repository.expire(given, save=save, force=force, dry_run=dry_run)
        run.numbers |= expired(result) | {"seconds/expire": run.took()}
        report_expiry(settings, result, dry_run=dry_run)
        if save and not settings.json:
            follow = "is kept: `weightvc expire` and `weightvc maintain` follow it"
            click.echo(f"the policy {'would be kept' if dry_run else follow}")


def _forget(settings: Settings, repository: "Repository", branches: tuple[str, ...], *, dry_run: bool) -> None:
    from weightvc.objects.retention import to_json

    # As it stands there: it is forgotten, too, where this weightvc cannot read it.
    was = repository.refresh().retention
    kept = repository.forget_policy(branches, dry_run=dry_run)
    left = None if kept is None else to_json(kept)
    forgotten = was
    if was is not None and left is not None:
        gone = {name: rules for name, rules in was["branches"].items() if name not in left["branches"]}
        forgotten = {"branches": gone} if gone else None
    if settings.json:
        click.echo(as_json({"forgotten": forgotten, "left": left, "dry_run": dry_run}))
    elif forgotten is None:
        click.echo("there is nothing to forget")
    else:
        click.echo(f"{'would forget' if dry_run else 'forgot'} {as_json(forgotten)}")
        be = "would be" if dry_run else "is"
        click.echo(f"no policy {be} left" if left is None else f"{be} left: {as_json(left)}")


def _check_branches(repository: "Repository", named: tuple[str, ...]) -> None:
    """Raise RefNotFound for a branch that there is not, and that the kept policy does not name either."""
    unknown = set(named) - set(repository.branches()) if named else set()
    if unknown and (kept := repository.policy()) is not None:
        unknown -= set(kept.branches)
    if unknown:
        raise RefNotFound(f"there is no branch {min(unknown)!r}: see `weightvc branch`")


def _metadata(given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{text!r}: metadata is given as K=V")
        if name in found:
            raise click.UsageError(f"--keep-meta: {name!r} has two values, and a rule has one")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def report_expiry(settings: Settings, result: "Expiry", *, dry_run: bool) -> None:
    """Each version with the rule that keeps it, and a sum."""
    if settings.json:
        click.echo(as_json(expiry_json(result) | {"dry_run": dry_run}))
        return
    words = {"kept": "keep", "stone": "step", "expired": "expire"}
    rows = [
        (
            words[one.state],
            one.version.short,
            "" if one.version.step is None else f"[step {one.version.step}]",
            size(one.nbytes),
            f"{shown(one.rule)}  {first_line(one.version.message)}".rstrip(),
        )
        for one in result.decisions
    ]
    for line in table(rows, "lllrl") if rows else ():
        click.echo(line)
    counts = {state: sum(one.state == state for one in result.decisions) for state in words}
    gone = counts["stone"] + counts["expired"]
    verb = "would be" if dry_run else "is" if gone == 1 else "are"
    click.echo(
        f"{counts['kept']} kept, {gone} {verb} let go of, {counts['stone']} of them "
        f"stored on as steps; {size(result.released)} for `weightvc gc` to free"
    )
    if counts["stone"] and not dry_run:
        click.echo("steps go at a later run, once a base lies past them: `weightvc compact --base-every N` makes one")


def expiry_json(result: "Expiry") -> dict[str, Any]:
    """What expire() decided, as JSON says it."""
    from weightvc.objects.retention import to_json

    return {
        "policy": to_json(result.policy),
        "released": result.released,
        "versions": [
            {
                "id": one.version.id,
                "step": one.version.step,
                "branch": one.branch,
                "state": one.state,
                "rule": one.rule,
                "bytes": one.nbytes,
            }
            for one in result.decisions
        ],
    }


@click.command()
@click.option(
    "--grace", type=Duration(), default="1h", metavar="TIME", help="How long what is dead is left: 90s, 10m, 1h (1h)."
)
@click.option("--every", type=Duration(), metavar="TIME", help="Go on for ever, a run each TIME.")
@click.option("-n", "--dry-run", is_flag=True, help="Only say what a run would do.")
@metrics_options
@click.option("--force", is_flag=True, help="Also where it looks like a mistake.")
@json_option
@repository_option
@click.pass_obj
def gc(
    settings: Settings,
    grace: int,
    every: int | None,
    dry_run: bool,
    force: bool,
    metrics: Metrics,
) -> int:
    """Free the space of what nothing refers to.

    Two runs are needed, a grace period apart: one condemns, the other deletes. With --grace 0s one run does all of
    it, for repositories that nobody uses meanwhile. What a pin holds stays until that dies: the report names it.

    \b
    Examples:
      weightvc gc --dry-run
      weightvc gc --grace 2h
    """
    if dry_run:
        metrics.none_of("a dry run")

    def once() -> int:
        with metrics.opened(settings) as (repository, run):
            result = repository.gc(grace=grace, force=force, dry_run=dry_run)
            run.numbers |= collected(result) | {"seconds/gc": run.took()}
            run.code = report_collection(settings, repository, result, dry_run=dry_run)
            if dry_run and not settings.json:
                lists = ". A run also deletes the lists that it writes on its way"
                click.echo(f"nothing was changed: this was a dry run{'' if grace else lists}")
            return run.code

    return once() if every is None else _for_ever(settings, every, once)


def _for_ever(settings: Settings, every: int, once: Callable[[], int]) -> int:
    import sys

    if every < 1:
        raise Refused("--every 0s would never pause: give 1s at least")
    with stopped_by() as stop:
        while not stop.is_set():
            try:
                once()
            except (StoreError, Conflict, StateUnknown) as error:
                # What passes by itself does not end the service; whatever else is wrong does.
                settings.note(f"{error}; the next run goes on")
            sys.stdout.flush()
            stop.wait(every)
    return 0


_WHAT = (
    ("live", "named by the root"),
    ("pinned", "pinned by readers and copies of the root"),
    ("held", "named by nothing, held by a writer's pin"),
    ("young", "named by nothing, left to a later run"),
    ("waiting", "condemned before, waiting"),
    ("condemned", "condemned now"),
    ("deleted", "deleted"),
    ("foreign", "not ours, left alone"),
)


def report_collection(settings: Settings, repository: "Repository", result: "Collection", *, dry_run: bool) -> int:
    """Objects and bytes, by kind, and the pins that some wait for; returns the exit status."""
    if settings.json:
        click.echo(as_json(collection_json(result) | {"dry_run": dry_run}))
    else:
        rows = [
            (name, str(tally.objects.total()), size(tally.bytes.total()), _kinds(tally, says))
            for name, says in (("listed", "all that is ours"), *_WHAT)
            if (tally := getattr(result, name)).objects or name in ("listed", "live", "deleted")
        ]
        for line in table(rows, "lrrl"):
            click.echo(line)
        for pin in result.pins[:SOME]:
            click.echo(shown(f"{pin.told}: {pin.mend(repository.store.url)}"))
        if len(result.pins) > SOME:
            click.echo(f"and {counted(len(result.pins) - SOME, 'more pin')}: --json has all")
    for name, error in result.failed.items():
        settings.note(f"{name} could not be deleted: {error}")
    return FAILED if result.failed else 0


def _kinds(tally: "Tally", says: str) -> str:
    parts = [_kind(kind, count) for kind, count in sorted(tally.objects.items())]
    return f"{says}: {', '.join(parts)}" if parts else says


def _kind(kind: str, count: int) -> str:
    if kind == "root.d":
        return f"{count} {'copy' if count == 1 else 'copies'} of the root"
    # What is not ours may have any name.
    return f"{count} {shown(kind)}{'s' * (count > 1 and kind.isalpha())}"


def collection_json(result: "Collection") -> dict[str, Any]:
    """What gc() did, as JSON says it."""
    out: dict[str, Any] = {"sequence": result.sequence, "horizon": result.horizon}
    for name in ("listed", *(name for name, _ in _WHAT)):
        tally: Tally = getattr(result, name)
        out[name] = {
            "objects": tally.objects.total(),
            "bytes": tally.bytes.total(),
            "kinds": {kind: [tally.objects[kind], tally.bytes[kind]] for kind in sorted(tally.objects)},
        }
    out["pins"] = [
        {
            "key": pin.name,
            "begin": pin.begin,
            "versions": sorted(pin.versions),
            "holder": pin.holder,
            "since": None if pin.since is None else iso(int(pin.since * 1e6)),
            "renewed": iso(int(pin.renewed * 1e6)),
            "until": iso(int(pin.until * 1e6)),
        }
        for pin in result.pins
    ]
    out["failed"] = {name: str(error) for name, error in result.failed.items()}
    return out


@click.command()
@click.option("--grace", type=Duration(), default="1h", metavar="TIME", help="As for gc (1h).")
@click.option("--every", type=Duration(), metavar="TIME", help="Go on for ever, a run each TIME.")
@click.option("--no-compact", is_flag=True, help="Leave compaction out.")
@metrics_options
@click.option("--force", is_flag=True, help="Also where it looks like a mistake.")
@json_option
@repository_option
@click.pass_obj
def maintain(
    settings: Settings,
    grace: int,
    every: int | None,
    no_compact: bool,
    force: bool,
    metrics: Metrics,
) -> int:
    """Do all that a repository wants done regularly.

    Expire by the policy that it keeps, compact, collect garbage, and keep a copy of the root: one job to schedule.

    \b
    Examples:
      weightvc maintain --every 1h --metrics maintain.jsonl
    """

    def once() -> int:
        with metrics.opened(settings) as (repository, run):
            done = repository.maintain(grace=grace, force=force, compact=not no_compact)
            run.numbers |= maintained(done)
            run.code = _report(settings, repository, done)
            return run.code

    return once() if every is None else _for_ever(settings, every, once)


def _report(settings: Settings, repository: "Repository", done: "Maintenance") -> int:
    assert done.collection is not None
    if settings.json:
        out = {
            "expire": None if done.expiry is None else expiry_json(done.expiry),
            "compact": None if done.compaction is None else compaction_json(done.compaction),
            "gc": collection_json(done.collection),
            "copy": done.copy,
            "seconds": done.seconds,
        }
        click.echo(as_json(out))
        return FAILED if done.collection.failed else 0
    if done.expiry is None:
        click.echo("expire: no policy is kept (`weightvc expire --save`)")
    else:
        gone = sum(one.state == "expired" for one in done.expiry.decisions)
        click.echo(f"expire: {gone} of {len(done.expiry.decisions)} versions let go of")
    if (made := done.compaction) is not None:
        click.echo(f"compact: {compaction_text(made)}")
    code = report_collection(settings, repository, done.collection, dry_run=False)
    click.echo(f"copy of the root: {done.copy}")
    return code
