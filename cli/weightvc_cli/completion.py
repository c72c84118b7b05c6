"""What the shell offers when Tab is pressed, and the command that sets that up: completion.

Tab must never wait, write or complain. Names are looked up in local directories alone, and whatever goes wrong is
nothing to offer.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from weightvc.repository import Repository

Items = list[CompletionItem[Any]]


def refs_of(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Branches, tags and HEAD."""
    return _named(ctx, incomplete, lambda repository: {"HEAD": "", **repository.branches(), **repository.tags()})


def branches_of(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Branches."""
    return _named(ctx, incomplete, lambda repository: repository.branches())


def tags_of(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Tags."""
    return _named(ctx, incomplete, lambda repository: repository.tags())


def paths_of(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Files and directories, which the shell looks up itself."""
    return [CompletionItem(incomplete, type="file")]


def sides_of(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Refs, or where none begins like this, files and directories."""
    return refs_of(ctx, parameter, incomplete) or paths_of(ctx, parameter, incomplete)


def _named(ctx: click.Context, incomplete: str, look: "Callable[[Repository], Mapping[str, str]]") -> Items:
    import weightvc

    try:
        place = ctx.find_root().obj.find()
        if "://" in place:
            return []
        with weightvc.open(place, cache=None, lazy=True) as repository:
            names = look(repository)
    except Exception:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, branches and tags.

    It is for the file that your shell reads when it starts. Names of versions are completed where the repository is
    a local directory.

    \b
    Examples:
      echo 'eval "$(weightvc completion bash)"' >> ~/.bashrc
      echo 'eval "$(weightvc completion zsh)"' >> ~/.zshrc
      weightvc completion fish > ~/.config/fish/completions/weightvc.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root()
    click.echo(found(root.command, {}, "weightvc", "_WEIGHTVC_COMPLETE").source(), nl=False)
