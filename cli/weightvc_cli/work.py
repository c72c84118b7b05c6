"""Commands that bring weights in and out: init, commit, checkout, pull, status, verify."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightvc_cli.output import as_json, changed, density, first_line, shown, weight
from weightvc_cli.settings import (
    PLACE,
    Settings,
    checkout_here,
    json_option,
    repository_option,
    stats_option,
)

if TYPE_CHECKING:
    from weightvc.objects.version import Version
    from weightvc.protocol.checkout import Marker
    from weightvc.repository import Repository


@click.command()
@click.argument("url", required=False)
@click.option("-b", "--branch", default="main", metavar="NAME", help="The default branch (main).")
@json_option
@repository_option
@click.pass_obj
def init(settings: Settings, url: str | None, branch: str) -> None:
    """Make a repository.

    It lies at URL, else where -r or WEIGHTVC_REPO say, else in ./.weightvc.
    """
    import weightvc

    if url == "":
        raise click.UsageError("the URL is empty")
    place = url if url is not None else settings.named() or PLACE
    with weightvc.init(place, default_branch=branch, **settings.options()) as repository:
        if settings.json:
            click.echo(as_json({"url": repository.url, "default": branch}))
        else:
            click.echo(f"made an empty repository at {shown(repository.url)}")


def _metadata(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{pair!r}: write it as k=v", context, parameter)
        if key in out:
            raise click.BadParameter(f"{key!r} stands twice", context, parameter)
        try:
            out[key] = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            out[key] = value
    return out


def _no_constant(text: str) -> Any:
    # Python reads NaN and Infinity, which are not JSON: they stay words.
    raise ValueError(text)


@click.command()
@click.argument("path")
@click.option("-m", "--message", default="", help="What the version is.")
@click.option("-b", "--branch", metavar="NAME", help="The branch (that of a checked-out directory, else HEAD).")
@click.option("--step", type=click.IntRange(min=0), help="Label: the step.")
@click.option("--run", metavar="NAME", help="Label: the run.")
@click.option("--meta", metavar="K=V", multiple=True, callback=_metadata, help="Metadata; V is JSON or a string.")
@click.option("--dtype", metavar="NAME", help="Cast floating tensors: bf16, fp16, fp32.")
@click.option("--name", metavar="FILE", help="What a single file is called (model.safetensors).")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Leave files of a directory out.")
@click.option("--detach", is_flag=True, help="On no branch; the first --parent is what it is diffed against.")
@click.option("--parent", metavar="REF", multiple=True, help="A further parent.")
@click.option("--expect", metavar="REF", help="Only if this is the branch's head; '' for: no such branch yet.")
@click.option("--rebase", is_flag=True, help="If the branch moved, diff again on top of its new head.")
@click.option("--base", is_flag=True, help="Store it whole as well.")
@json_option
@stats_option
@repository_option
@click.pass_obj
def commit(
    settings: Settings,
    path: str,
    message: str,
    branch: str | None,
    step: int | None,
    run: str | None,
    meta: dict[str, Any],
    dtype: str | None,
    name: str | None,
    exclude: tuple[str, ...],
    detach: bool,
    parent: tuple[str, ...],
    expect: str | None,
    rebase: bool,
    base: bool,
) -> None:
    """Commit PATH as the next version of a branch.

    PATH is a checkpoint file, a directory of them, or a URL. A checked-out directory is committed to its branch: if
    that has moved since, nothing is committed (exit status 4) unless --rebase or --expect say so.
    """
    if detach and (branch is not None or expect is not None or rebase):
        raise click.UsageError("--detach is on no branch: leave --branch, --expect and --rebase out")
    if rebase and expect is not None:
        raise click.UsageError("--rebase takes any head and --expect only one: leave one out")
    from weightvc.protocol.checkout import scan

    began = time.monotonic()
    with settings.open(what="commit") as repository:
        marker = None if detach else _marker(repository, path, branch)
        # As it is before the commit reads it: what is changed while it runs is then seen to be.
        found = scan(Path(path)) if marker is not None else {}
        if marker is not None:
            branch = marker.branch
            if expect is None and not rebase:
                expect = marker.version
        made = repository.commit(
            path,
            branch=None if detach else branch or "HEAD",
            message=message,
            step=step,
            run=run,
            metadata=meta,
            dtype=dtype,
            expect=expect,
            parents=parent,
            on_conflict="rebase" if rebase else "raise",
            base=base,
            name=name,
            exclude=exclude,
        )
        if marker is not None:
            repository.mark(path, made, branch=marker.branch, found=found, exact=dtype is None)
        report_commit(settings, repository, made, began)


def _marker(repository: "Repository", path: str, branch: str | None) -> "Marker | None":
    """The marker of a checked-out directory, if it is on a branch, and that is the one to commit to."""
    from weightvc.errors import RefNotFound
    from weightvc.protocol.checkout import read_marker

    marker = read_marker(Path(path)) if os.path.isdir(path) else None
    if marker is None or marker.branch is None:
        return None
    if branch in ("HEAD", "@"):
        branch = repository.default_branch
    if branch not in (None, marker.branch):
        return None
    try:
        repository.resolve(marker.version)
    except RefNotFound:
        return None
    return marker


def report_commit(settings: Settings, repository: "Repository", made: "Version", began: float) -> None:
    """Print what was committed."""
    entry = repository.entry(made.id)
    place = entry.place
    assert place is not None
    if settings.json:
        fields = {
            "id": made.id,
            "branch": entry.name,
            "parents": list(made.parents),
            "tree": made.tree,
            "bytes": place.nbytes,
            "changed": changed(entry),
            "elements": made.elements,
            "density": density(entry),
            "seconds": round(time.monotonic() - began, 6),
        }
        click.echo(as_json(fields))
        return
    text = f"[{entry.name or 'detached'} {made.short}] {first_line(made.message)}"
    click.echo(f"{text.rstrip()}  ({weight(entry)})")


def report_version(settings: Settings, what: str, made: "Version", more: str = "") -> None:
    """Print which version something is now."""
    if settings.json:
        click.echo(as_json({"id": made.id, "step": made.step, "run": made.run, "message": made.message}))
    else:
        click.echo(f"{shown(what)} {made.short} {more}".rstrip())


def _checkout(settings: Settings, ref: str, target: str, force: bool, replace: bool) -> None:
    with settings.open(near=target, what="checkout") as repository:
        made = repository.checkout(ref, target, force=force, replace=replace)
        report_version(settings, f"{target} is", made, first_line(made.message))


@click.command()
@click.argument("ref")
@click.argument("target", metavar="DIR")
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Let go of changed files, and keep foreign ones beside the version's; replace a single file.",
)
@json_option
@stats_option
@repository_option
@click.pass_obj
def checkout(settings: Settings, ref: str, target: str, force: bool) -> None:
    """Write the files of a version.

    They go into the directory DIR, or into one file if it ends in .safetensors. Files of DIR that were changed since
    they were checked out are not overwritten, nor is a single file, unless --force says so.
    """
    _checkout(settings, ref, target, force, replace=False)


@click.command()
@click.argument("ref")
@click.option("--into", "target", metavar="DIR", required=True, help="The checked-out directory.")
@click.option("-f", "--force", is_flag=True, help="Keep files that are not the version's beside it.")
@json_option
@stats_option
@repository_option
@click.pass_obj
def pull(settings: Settings, ref: str, target: str, force: bool) -> None:
    """Bring a checked-out directory to a version.

    What the directory holds is used, so that as few bytes as can be are fetched. Files that were changed since they
    were checked out are put right.
    """
    _checkout(settings, ref, target, force, replace=True)


@click.command()
@click.argument("target", metavar="[DIR]", required=False)
@json_option
@repository_option
@click.pass_obj
def status(settings: Settings, target: str | None) -> None:
    """Show which version a directory holds.

    DIR is the checkout around the working directory unless given.
    """
    target = target or checkout_here()
    with settings.open(near=target) as repository:
        found = repository.status(target)
    clean = not (found.changed or found.missing)
    if settings.json:
        fields = {
            "version": found.version.id,
            "branch": found.branch,
            "head": found.head.id if found.head else None,
            "behind": found.behind,
            "changed": found.changed,
            "missing": found.missing,
            "foreign": found.foreign,
            "clean": clean,
        }
        click.echo(as_json(fields))
        return
    click.echo(f"version {found.version.id}  {first_line(found.version.message)}".rstrip())
    if found.branch is None:
        click.echo("on no branch")
    elif found.head is None:
        click.echo(f"branch {found.branch} is gone")
    elif found.behind is None:
        click.echo(f"not on branch {found.branch} any more, whose head is {found.head.short}")
    else:
        click.echo(f"branch {found.branch}, " + (f"{found.behind} behind" if found.behind else "up to date"))
    for what, paths in (("changed", found.changed), ("missing", found.missing), ("foreign", found.foreign)):
        for path in paths:
            click.echo(f"{what}: {shown(path)}")
    if clean:
        click.echo("nothing changed")


@click.command()
@click.argument("target", metavar="[DIR]", required=False)
@click.argument("ref", required=False)
@json_option
@repository_option
@click.pass_obj
def verify(settings: Settings, target: str | None, ref: str | None) -> None:
    """Compare a checkout with its version.

    Every byte is read. REF is another version to compare with. The exit status is 7 if they differ.
    """
    from weightvc.errors import Corrupt

    target = target or checkout_here()
    with settings.open(near=target) as repository:
        found = repository.verify(target, ref)
    version = found.version
    if settings.json:
        fields = {
            "version": version.id,
            "ok": found.ok,
            "tensors": found.tensors,
            "files": found.files,
            "foreign": found.foreign,
        }
        click.echo(as_json(fields))
    else:
        for what, names in (("tensor", found.tensors), ("file", found.files), ("foreign", found.foreign)):
            for name in names:
                click.echo(f"{what}: {shown(name)}")
    if not found.ok:
        if found.tensors or found.files:
            mend = f"is not version {version.short}: mend it with `weightvc pull {version.short} --into {target}`"
        else:
            mend = f"has files that version {version.short} has not: move them away"
        raise Corrupt(f"{target} {mend}")
    if not settings.json:
        click.echo(f"{shown(target)} is version {version.short}, bit for bit")
