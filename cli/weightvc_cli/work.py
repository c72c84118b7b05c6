"""Commands that bring weights in and out: init, commit, checkout, pull, status, verify."""

import json
import os
import shlex
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from weightvc_cli.completion import branches_of, paths_of, refs_of
from weightvc_cli.output import as_json, first_line, shown, weight
from weightvc_cli.settings import (
    PLACE,
    Duration,
    Settings,
    checkout_here,
    json_option,
    repository_option,
)

if TYPE_CHECKING:
    from weightvc.objects.version import Version
    from weightvc.protocol.checkout import Marker
    from weightvc.repository import Repository
    from weightvc.worktree import Verification


@click.command()
@click.argument("url", required=False, shell_complete=paths_of)
@click.option("-b", "--branch", default="main", metavar="NAME", help="The default branch (main).")
@json_option
@repository_option
@click.pass_obj
def init(settings: Settings, url: str | None, branch: str) -> None:
    """Make a repository.

    It lies at URL, else where -r or WEIGHTVC_REPO say, else in ./.weightvc.

    \b
    Examples:
      weightvc init s3://bucket/policy
      weightvc init policy
    """
    import weightvc

    if url == "":
        raise click.UsageError("the URL is empty")
    place = url if url is not None else settings.named() or PLACE
    settings.opened = place
    with weightvc.init(place, default_branch=branch, **settings.options()) as repository:
        if settings.json:
            click.echo(as_json({"url": repository.url, "default": branch}))
        else:
            click.echo(f"made an empty repository at {shown(repository.url)}")
        settings.print_stats(repository)


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
@click.argument("path", shell_complete=paths_of)
@click.option("-m", "--message", default="", help="What the version is.")
@click.option(
    "-b",
    "--branch",
    metavar="NAME",
    shell_complete=branches_of,
    help="The branch (that of a checked-out directory, else HEAD).",
)
@click.option("--step", type=click.IntRange(min=0), help="Label: the step.")
@click.option("--run", metavar="NAME", help="Label: the run.")
@click.option(
    "--meta",
    metavar="K=V",
    multiple=True,
    callback=_metadata,
    help="Metadata, as often as needed; V is JSON or a string.",
)
@click.option("--dtype", metavar="NAME", help="Cast floating tensors: bf16, fp16, fp32.")
@click.option("--name", metavar="FILE", help="What a single file is called (model.safetensors).")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Leave files of a directory out, as often as needed.")
@click.option("--detach", is_flag=True, help="On no branch; the first --parent is what it is diffed against.")
@click.option("--parent", metavar="REF", multiple=True, help="A further parent, as often as needed.")
@click.option("--expect", metavar="REF", help="Only if this is the branch's head; '' for: no such branch yet.")
@click.option(
    "--rebase",
    is_flag=True,
    help="If the branch moved, diff again on top of its new head: your weights replace its; nothing is merged.",
)
@click.option("--base", is_flag=True, help="Store it whole as well, so that a cold reader can start here.")
@click.option(
    "--codec",
    metavar="NAME",
    default="small",
    help="What the patch should be: small (the default), fast to apply, or auto: fast where that costs little.",
)
@json_option
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
    codec: Literal["small", "fast", "auto"],
) -> None:
    """Commit PATH as the next version of a branch.

    PATH is a checkpoint file, a directory of them, or a URL. A checked-out directory is committed to its branch: if
    that has moved since, nothing is committed (exit status 4) unless --rebase or --expect say so.

    With --rebase your weights replace those of the new head; the other's change is not merged, it stays in the
    history.

    \b
    Examples:
      weightvc commit checkpoint-100 --step 100 -m "warmed up"
      weightvc commit out/model.safetensors --dtype bf16 --meta reward=0.71
      weightvc commit weights --rebase
    """
    if detach and (branch is not None or expect is not None or rebase):
        raise click.UsageError("--detach is on no branch: leave --branch, --expect and --rebase out")
    if rebase and expect is not None:
        raise click.UsageError("--rebase takes any head and --expect only one: leave one out")
    from weightvc.protocol.checkout import scan

    _must_exist(path)
    began = time.monotonic()
    with settings.open(what="commit") as repository:
        marker = _marker(repository, path)
        if detach:
            marker = None
        elif marker is not None:
            follows = _branch(repository, marker, branch)
            if follows is not None and follows not in repository.branches() and follows != marker.branch:
                # A new branch grows out of the version that the directory holds.
                parent = (marker.version, *parent)
                expect = "" if expect is None and not rebase else expect
            elif follows is not None and expect is None and not rebase:
                expect = marker.version
            marker = replace(marker, branch=follows) if follows is not None else None
        # As it is before the commit reads it: what is changed while it runs is then seen to be.
        found = scan(Path(path)) if marker is not None else {}
        if marker is not None:
            branch = marker.branch
        before = None
        if rebase:
            before = marker.version if marker is not None else repository.branches().get(_name(repository, branch))
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
            codec=codec,
            name=name,
            exclude=exclude,
        )
        if marker is not None:
            repository.mark(path, made, branch=marker.branch, found=found, exact=dtype is None)
        report_commit(settings, repository, made, began)
        if before is not None and made.parents and made.parents[0] != before:
            head = repository.resolve(made.parents[0])
            said = f', "{first_line(head.message)}"' if head.message else ""
            settings.note(f"on top of {head.short} (by {head.author}{said}), whose weights these replace")


def _must_exist(path: str) -> None:
    from weightvc.errors import NotFound
    from weightvc.sources.files import is_url

    if not is_url(path) and not os.path.exists(path.removeprefix("file://")):
        raise NotFound(f"{path} does not exist: name a file or directory that does")


def _name(repository: "Repository", branch: str | None) -> str:
    return repository.default_branch if branch in (None, "HEAD", "@") else str(branch)


def _marker(repository: "Repository", path: str) -> "Marker | None":
    """The marker of a checked-out directory. Raises Refused if it is of another repository."""
    from weightvc.errors import RefNotFound, Refused
    from weightvc.protocol.checkout import read_marker

    marker = read_marker(Path(path)) if os.path.isdir(path) else None
    if marker is None:
        return None
    try:
        # A repository that was moved is the same one: its versions say so, not its URL.
        repository.resolve(marker.version)
    except RefNotFound:
        raise Refused(
            f"{path} holds version {marker.version[:12]} of {marker.repository}, which is not in {repository.url}: "
            f"commit to that one with `-r {shlex.quote(marker.repository)}`, or remove {os.path.join(path, PLACE)}"
        ) from None
    return marker


def _branch(repository: "Repository", marker: "Marker", branch: str | None) -> str | None:
    """The branch that a checked-out directory is committed to against what it holds; None for any other."""
    if branch is None:
        return marker.branch
    name = _name(repository, branch)
    return name if name == marker.branch or name not in repository.branches() else None


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
            "changed": entry.changed,
            "elements": made.elements,
            "density": entry.density,
            "seconds": round(time.monotonic() - began, 6),
        }
        click.echo(as_json(fields))
        return
    text = f"[{entry.name or 'detached'} {made.short}] {first_line(made.message)}"
    same = entry.changed == 0 and bool(made.parents) and repository.resolve(made.parents[0]).tree == made.tree
    click.echo(f"{text.rstrip()}  ({'same weights as its parent' if same else weight(entry)})")


def report_version(settings: Settings, what: str, made: "Version", more: str = "") -> None:
    """Print which version something is now."""
    if settings.json:
        click.echo(as_json({"id": made.id, "step": made.step, "run": made.run, "message": made.message}))
    else:
        click.echo(f"{shown(what)} {made.short} {more}".rstrip())


_lease = click.option(
    "--lease",
    type=Duration(),
    metavar="TIME",
    help="Hold a lease meanwhile, that dies this long after it was last renewed: 1h, 7d at most.",
)


def _checkout(settings: Settings, ref: str, target: str, force: bool, replace: bool, lease: int | None) -> None:
    with ExitStack() as stack:
        repository = stack.enter_context(settings.open(near=target, what="checkout"))
        if lease is not None:
            stack.enter_context(repository.lease(ref, lifetime=lease))
        made = repository.checkout(ref, target, force=force, replace=replace)
        report_version(settings, f"{target} is", made, first_line(made.message))


@click.command()
@click.argument("ref", shell_complete=refs_of)
@click.argument("target", metavar="DIR", shell_complete=paths_of)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Let go of changed files, and keep foreign ones beside the version's; replace a single file.",
)
@_lease
@json_option
@repository_option
@click.pass_obj
def checkout(settings: Settings, ref: str, target: str, force: bool, lease: int | None) -> None:
    """Write the files of a version.

    They go into the directory DIR, or into one file if it ends in .safetensors. Files of DIR that were changed since
    they were checked out are not overwritten, nor is a single file, unless --force says so.

    --lease is for a version that may be let go of before all of it is read.

    \b
    Examples:
      weightvc checkout main weights
      weightvc checkout 'main@{step=100}' old
      weightvc checkout v1 v1.safetensors
    """
    _checkout(settings, ref, target, force, replace=False, lease=lease)


@click.command()
@click.argument("ref", shell_complete=refs_of)
@click.option(
    "--into",
    "target",
    metavar="DIR",
    required=True,
    shell_complete=paths_of,
    help="The checked-out directory.",
)
@click.option("-f", "--force", is_flag=True, help="Keep files that are not the version's beside it.")
@_lease
@json_option
@repository_option
@click.pass_obj
def pull(settings: Settings, ref: str, target: str, force: bool, lease: int | None) -> None:
    """Bring a checked-out directory to a version.

    What the directory holds is used, so that as few bytes as can be are fetched. Files that were changed since they
    were checked out are put right.

    --lease is for a version that may be let go of before all of it is read.

    \b
    Examples:
      weightvc pull main --into weights
      weightvc pull main~3 --into weights --lease 1h
    """
    _checkout(settings, ref, target, force, replace=True, lease=lease)


@click.command()
@click.argument("target", metavar="[DIR]", required=False, shell_complete=paths_of)
@json_option
@repository_option
@click.pass_obj
def status(settings: Settings, target: str | None) -> None:
    """Show which version a directory holds.

    DIR is the checkout around the working directory unless given.

    \b
    Examples:
      weightvc status weights
    """
    target = target or checkout_here()
    _must_exist(target)
    _check_checkout(target)
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


def _check_checkout(target: str) -> None:
    from weightvc.errors import Refused

    if os.path.isfile(os.path.join(target, PLACE)):
        return
    if os.path.isfile(slot := os.path.join(target, "current", PLACE)):
        raise Refused(f"{target} holds versions side by side: name {os.path.dirname(slot)}")
    for place in (os.path.join(target, PLACE), target):
        if os.path.isfile(os.path.join(place, "root")):
            raise Refused(
                f"{target} is no checkout: the repository lies in {place}. Name a checked-out directory, or see "
                "`weightvc log`"
            )


@click.command()
@click.argument("target", metavar="[DIR]", required=False, shell_complete=paths_of)
@click.argument("ref", required=False, shell_complete=refs_of)
@json_option
@repository_option
@click.pass_obj
def verify(settings: Settings, target: str | None, ref: str | None) -> None:
    """Compare a checkout with its version.

    Every byte is read. REF is another version to compare with. The exit status is 7 if they differ.

    \b
    Examples:
      weightvc verify weights
      weightvc verify weights main~1
    """
    from weightvc.errors import Corrupt

    target = target or checkout_here()
    _must_exist(target)
    if ref is None:
        _check_checkout(target)
    with settings.open(near=target) as repository:
        found = repository.verify(target, ref)
        mend = "" if found.ok else _mend(repository, target, found)
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
        what = "is not" if found.tensors or found.files else "has files that are not in"
        raise Corrupt(f"{target} {what} version {version.short}{mend}")
    if not settings.json:
        click.echo(f"{shown(target)} is version {version.short}, bit for bit")


def _mend(repository: "Repository", target: str, found: "Verification") -> str:
    """What brings a checkout to the version that it ought to be. Nothing, if it was compared with another one."""
    from weightvc.protocol.checkout import read_marker

    marker = read_marker(Path(target)) if os.path.isdir(target) else None
    if marker is None or marker.version != found.version.id:
        return f", but {marker.version[:12]} was checked out into it" if marker is not None else ""
    if not (found.tensors or found.files):
        return ": move them away"
    # By its branch, if that is still there, so that the directory goes on following it.
    name = marker.branch
    if name is None or repository.branches().get(name) != found.version.id:
        name = found.version.short
    keep = " --force" if found.foreign else ""
    return f": mend it with `weightvc pull {name} --into {shlex.quote(target)}{keep}`"
