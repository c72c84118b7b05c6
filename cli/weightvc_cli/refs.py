"""Commands that move branches and tags: branch, tag, reset, revert."""

from typing import TYPE_CHECKING

import click

from weightvc_cli import terminal
from weightvc_cli.completion import branches_of, refs_of, tags_of
from weightvc_cli.output import as_json, first_line
from weightvc_cli.settings import Settings, json_option, repository_option
from weightvc_cli.work import report_commit, report_version

if TYPE_CHECKING:
    from weightvc.objects.version import Version


@click.command()
@click.argument("name", required=False)
@click.argument("ref", required=False, shell_complete=refs_of)
@click.option(
    "-d",
    "--delete",
    metavar="NAME",
    shell_complete=branches_of,
    help="Delete a branch; its versions stay until they expire.",
)
@click.option("--restore", metavar="NAME", help="Make a deleted branch again, where it was (until it expires).")
@click.option("--default", metavar="NAME", shell_complete=branches_of, help="Let HEAD mean this branch.")
@json_option
@repository_option
@click.pass_obj
def branch(
    settings: Settings,
    name: str | None,
    ref: str | None,
    delete: str | None,
    restore: str | None,
    default: str | None,
) -> None:
    """List or make branches.

    With NAME: make one at REF (HEAD unless given).

    \b
    Examples:
      weightvc branch
      weightvc branch trial main~3
      weightvc branch -d trial
    """
    if sum(value is not None for value in (name, delete, restore, default)) > 1:
        raise click.UsageError("make, delete, restore, or set the default: one at a time")
    with settings.open() as repository:
        if name is not None:
            report_version(settings, f"branch {name}", repository.branch(name, ref or "HEAD"))
        elif delete is not None:
            _gone(settings, "branch", delete, repository.delete_branch(delete))
        elif restore is not None:
            report_version(settings, f"branch {restore}", repository.restore_branch(restore))
        elif default is not None:
            repository.set_default_branch(default)
            click.echo(as_json({"default": default}) if settings.json else f"HEAD means {default}")
        else:
            root = repository.refresh()
            heads = sorted(root.branches.items())
            if settings.json:
                click.echo(as_json([{"name": k, "id": v, "default": k == root.default} for k, v in heads]))
                return
            width = max((len(key) for key, _ in heads), default=0)
            for key, ident in heads:
                name = f"{key:<{width}}"
                said = f"* {click.style(name, fg='green')}" if key == root.default else f"  {name}"
                click.echo(f"{said} {terminal.ident(ident[:12])}")


@click.command()
@click.argument("name", required=False)
@click.argument("ref", required=False, shell_complete=refs_of)
@click.option("-d", "--delete", metavar="NAME", shell_complete=tags_of, help="Delete a tag; its version stays.")
@click.option("-f", "--force", is_flag=True, help="Move a tag, or give a deleted tag's name to another version.")
@json_option
@repository_option
@click.pass_obj
def tag(settings: Settings, name: str | None, ref: str | None, delete: str | None, force: bool) -> None:
    """List or make tags.

    With NAME: name the version REF (HEAD unless given).

    \b
    Examples:
      weightvc tag v1 main~3
      weightvc tag -d v1
    """
    if name is not None and delete is not None:
        raise click.UsageError("make or delete: one at a time")
    if force and name is None:
        raise click.UsageError("--force is for a tag that is made or moved: name it")
    with settings.open() as repository:
        if name is not None:
            report_version(settings, f"tag {name}", repository.tag(name, ref or "HEAD", force=force))
        elif delete is not None:
            _gone(settings, "tag", delete, repository.delete_tag(delete))
        else:
            tags = sorted(repository.tags().items())
            if settings.json:
                click.echo(as_json([{"name": key, "id": ident} for key, ident in tags]))
                return
            width = max((len(key) for key, _ in tags), default=0)
            for key, ident in tags:
                click.echo(f"{key:<{width}} {terminal.ident(ident[:12])}")


def _gone(settings: Settings, what: str, name: str, ident: str) -> None:
    if settings.json:
        click.echo(as_json({"deleted": name, "id": ident}))
    else:
        click.echo(f"deleted {what} {name} (was {ident[:12]})")


@click.command()
@click.argument("branch", shell_complete=branches_of)
@click.argument("ref", shell_complete=refs_of)
@click.option("--rewind", is_flag=True, help="Allow it to leave newer versions behind.")
@click.option("--expect", metavar="REF", help="Only if this is the branch's head.")
@click.option("-m", "--message", default="", help="Why: the reflog keeps it.")
@json_option
@repository_option
@click.pass_obj
def reset(settings: Settings, branch: str, ref: str, rewind: bool, expect: str | None, message: str) -> None:
    """Move a branch to a version.

    There is no current branch: name it, then where to. No directory is touched; those that follow the branch see it
    move. `weightvc reflog BRANCH` has where it was.

    \b
    Examples:
      weightvc reset main main~1 --rewind -m 'diverged'
      weightvc reset main 'main@{1}'
    """
    with settings.open() as repository:
        made: Version = repository.reset(branch, ref, rewind=rewind, expect=expect, message=message)
        report_version(settings, f"{branch} is at", made, first_line(made.message))


@click.command()
@click.argument("ref", shell_complete=refs_of)
@click.option("-b", "--branch", default="HEAD", metavar="NAME", shell_complete=branches_of, help="The branch (HEAD).")
@click.option("-m", "--message", help="The message; by default it says what was reverted to.")
@json_option
@repository_option
@click.pass_obj
def revert(settings: Settings, ref: str, branch: str, message: str | None) -> None:
    """Go back by a new version.

    It has the weights and files of REF. So REF is the version to go back to, not, as in git, the one to undo:
    `weightvc revert main~1` undoes the newest.

    \b
    Examples:
      weightvc revert main~1
      weightvc revert v1 -b main -m 'back to v1'
    """
    import time

    began = time.monotonic()
    with settings.open(what="revert") as repository:
        made = repository.revert(ref, branch=branch, message=message)
        report_commit(settings, repository, made, began)
        if made.parents and repository.resolve(made.parents[0]).tree == made.tree:
            settings.note("the branch had these weights already: REF is what to go back to, not what to undo")
