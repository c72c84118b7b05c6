"""The command `weightvc`: the group of commands, and what becomes of errors, warnings and signals."""

import gc
import keyword
import os
import sys
import warnings
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from weightvc import __version__
from weightvc.errors import AccessDenied, KeyNotFound, Refused, Unavailable, WeightvcError
from weightvc_cli import habits, terminal
from weightvc_cli.output import as_json, shown
from weightvc_cli.settings import Compiling, Settings, pager_option, repository_option

# Commands are imported when they are asked for: `weightvc --version` should not wait for `commit`.
COMMANDS: Final = {
    "init": "work",
    "commit": "work",
    "checkout": "work",
    "pull": "work",
    "follow": "rollout",
    "status": "work",
    "verify": "work",
    "log": "history",
    "show": "history",
    "ls": "history",
    "cat": "history",
    "reflog": "history",
    "diff": "compare",
    "density": "compare",
    "audit": "audit",
    "branch": "refs",
    "tag": "refs",
    "reset": "refs",
    "revert": "refs",
    "plan": "ways",
    "compact": "ways",
    "expire": "maintenance",
    "gc": "maintenance",
    "maintain": "maintenance",
    "fsck": "recovery",
    "doctor": "doctor",
    "report": "report",
    "mirror": "mirror",
    "import": "exchange",
    "export": "exchange",
    "completion": "completion",
}
SECTIONS: Final = {
    "Weights in and out": ("work", "rollout"),
    "Look": ("history", "compare", "audit", "report"),
    "Move branches and tags": ("refs",),
    "Keep in order": ("ways", "maintenance", "recovery", "doctor"),
    "Other places": ("mirror", "exchange"),
    "Your shell": ("completion",),
}
"""The modules under each heading of the help."""
INTERRUPTED: Final = 130
CLOSED_PIPE: Final = 141


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        for heading, modules in SECTIONS.items():
            with formatter.section(heading):
                rows = [(name, self.get_command(ctx, name)) for name, module in COMMANDS.items() if module in modules]
                formatter.write_dl([(name, found.get_short_help_str(limit)) for name, found in rows if found])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would make it status 1, which is for bugs.
            raise click.exceptions.Exit(CLOSED_PIPE) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if ctx.resilient_parsing:  # Tab was pressed: nothing is said
            return super().resolve_command(ctx, args)
        if name == "help":
            # `weightvc help log` is `weightvc log --help`.
            args = [args[1], "--help"] if len(args) > 1 else args
            if len(args) == 1:
                click.echo(ctx.get_help())
                raise click.exceptions.Exit
        elif name not in COMMANDS and not name.startswith("-"):
            import difflib

            close = difflib.get_close_matches(name, COMMANDS)
            if name in habits.COMMANDS:
                ctx.fail(f"no command {name!r}: {habits.COMMANDS[name]}")
            ctx.fail(f"no command {name!r}" + (f": did you mean {' or '.join(close)}?" if close else ""))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        found = getattr(import_module(f"weightvc_cli.{module}"), name)
        assert isinstance(found, click.Command)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@repository_option
@pager_option
@click.version_option(__version__, message="weightvc %(version)s")
def cli() -> None:
    """git for model weights, on object storage.

    A REF is a branch, a tag, a version id or its first digits, and what follows: main~2, main@{1},
    main@{step=121}. HEAD is the default branch.

    \b
    Examples:
      weightvc init s3://bucket/policy
      export WEIGHTVC_REPO=s3://bucket/policy
      weightvc commit checkpoint-100 --step 100 -m "warmed up"
      weightvc log --oneline -5
      weightvc pull main --into weights

    `weightvc help COMMAND` has more of each.
    """


def main() -> NoReturn:
    """Run the command line and exit: 0, or the code of the kind of error."""
    # A command is done in a moment: to look for cycles among the objects of 150,000 tensors takes a sixth of it.
    gc.set_threshold(1_000_000)
    settings = Settings()
    warnings.showwarning = _warn(settings)
    Compiling(settings).install()
    try:
        code = _run(settings)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = CLOSED_PIPE
    if code in (INTERRUPTED, CLOSED_PIPE):
        # Nobody reads on: what is still buffered must not be written, or waited for, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(settings: Settings) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A file name may hold bytes that are no text; it is shown all the same.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    try:
        color = False if terminal.plain() else None
        result: Any = cli.main(prog_name="weightvc", standalone_mode=False, obj=settings, color=color)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        settings.json = settings.json or "--json" in sys.argv
        return _fail(settings, "Usage", _usage(error), error.exit_code, error)
    except WeightvcError as error:
        hint = settings.hint() if isinstance(error, KeyNotFound | AccessDenied | Unavailable) else ""
        return _fail(settings, type(error).__name__, f"{error}{hint}", error.exit_code, error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if _lost():
            text = "the working directory is gone, deleted or replaced by a checkout: cd into it again, or away"
            return _fail(settings, "Refused", text, Refused.exit_code, error)
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        return _fail(settings, type(error).__name__, what, 9, error)
    except Exception as error:
        text = f"a bug in weightvc: {type(error).__name__}: {error}; WEIGHTVC_DEBUG=1 shows where: please report it"
        return _fail(settings, "Bug", text, 1, error)


def _usage(error: click.ClickException) -> str:
    """What is wrong with the command line, and what to type next."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "weightvc"
    said = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        habit = habits.OPTIONS.get((path.rpartition(" ")[2], error.option_name))
        if habit is not None:
            said = f"no option {error.option_name}: {habit}"
    return f"{said} (see `{path} --help`)"


def _lost() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _fail(settings: Settings, kind: str, message: str, code: int, error: Exception) -> int:
    if os.environ.get("WEIGHTVC_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if settings.json:
        click.echo(as_json({"error": kind, "message": message, "exit_code": code}), err=True)
    else:
        click.echo(f"weightvc: {shown(message)}", err=True)
    return code


def _warn(settings: Settings) -> Any:
    def show(message: Any, *where: Any, **more: Any) -> None:
        if settings.json:
            click.echo(as_json({"warning": str(message)}), err=True)
        else:
            click.echo(f"weightvc: warning: {shown(str(message))}", err=True)

    return show
