"""What all commands share: which repository, how it is opened, progress and statistics.

Only here is the environment read; the library never does.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from weightvc.errors import BadFile, NotFound
from weightvc_cli.completion import paths_of
from weightvc_cli.output import as_json, shown, size

if TYPE_CHECKING:
    from weightvc.repository import Repository

F = TypeVar("F", bound=Callable[..., Any])
PLACE: Final = ".weightvc"
"""A directory of this name is a repository; a file of this name says where a checkout came from."""


_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Size(click.ParamType[int]):
    """A number of bytes such as 500M, 40GB or 2T; a bare number is bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", value.strip().upper())
        if match is None:
            self.fail(f"{value!r} is no size: write 500M, 40G or a number of bytes", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


class Duration(click.ParamType[int]):
    """A time such as 90s, 10m, 1h, 7d or 2w; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9]{1,9})([smhdw]?)", value)
        if match is None:
            self.fail(f"{value!r} is no time: write 90s, 10m, 1h or 7d", param, ctx)
        return int(match[1]) * _SECONDS[match[2] or "s"]


class Settings:
    """The options that stand before or after the command's name."""

    def __init__(self) -> None:
        self.repo: str | None = None
        self.endpoint_url: str | None = None
        self.region: str | None = None
        self.profile: str | None = None
        self.no_cache = False
        self.cache_limit: int | None = None
        self.json = False
        self.stats = False
        self.no_pager = False
        self.opened = ""
        """The repository that a command works on, once it is known."""

    def options(self) -> dict[str, Any]:
        """Options for weightvc.open() and weightvc.init()."""
        cache: str | bool | None = os.environ.get("WEIGHTVC_CACHE", True)
        if self.no_cache or cache in ("", "none"):
            cache = None
        limit = self.cache_limit
        if limit is None and (told := os.environ.get("WEIGHTVC_CACHE_LIMIT")):
            try:
                limit = Size().convert(told, None, None)
            except click.BadParameter as error:
                raise click.UsageError(f"WEIGHTVC_CACHE_LIMIT: {error.message}") from error
        out: dict[str, Any] = {
            "cache": cache,
            "cache_limit": limit,
            "author": os.environ.get("WEIGHTVC_AUTHOR") or None,
        }
        for name in ("endpoint_url", "region", "profile"):
            if (value := getattr(self, name)) is not None:
                out[name] = value
        return out

    def named(self) -> str | None:
        """The repository that -r or WEIGHTVC_REPO names, or None."""
        return self.repo if self.repo is not None else os.environ.get("WEIGHTVC_REPO") or None

    def find(self, near: str | None = None) -> str:
        """The repository: as named, or that of the checkout `near`, or found upwards from the working directory.

        Raises NotFound, or BadFile for a marker that cannot be read.
        """
        named = self.named()
        if named is not None:
            return named
        if near is not None:
            from weightvc.protocol.workspace import recover

            recover(Path(os.path.realpath(near)))
        for start in ([near] if near is not None else []) + ["."]:
            found = _upwards(start)
            if found is not None:
                return str(found) if found.is_dir() else _repository_of(found)
        raise NotFound(
            "no repository here or above: name one with -r URL or WEIGHTVC_REPO, or make one with `weightvc init`"
        )

    @contextmanager
    def open(self, near: str | None = None, what: str = "") -> Iterator["Repository"]:
        """The repository, open; `what` names the work in a progress bar."""
        import weightvc

        with progress(what) as bar:
            self.opened = self.find(near)
            repository = weightvc.open(self.opened, lazy=True, progress=bar, **self.options())
            try:
                yield repository
            finally:
                repository.close()
                self.print_stats(repository)

    def hint(self) -> str:
        """What to add where a repository was not reached or not found: S3 is not Amazon's alone."""
        said = self.endpoint_url is not None or "endpoint_url=" in self.opened
        said = said or any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
        if said or not self.opened.startswith("s3://"):
            return ""
        return "; if it is not on Amazon's S3, name the server with --endpoint-url URL or AWS_ENDPOINT_URL"

    def note(self, text: str) -> None:
        """Say something on stderr that is worth knowing and no warning."""
        if self.json:
            click.echo(as_json({"note": text}), err=True)
        else:
            click.echo(f"weightvc: note: {shown(text)}", err=True)

    def print_stats(self, repository: "Repository") -> None:
        """Print requests and bytes, if that was asked for."""
        if not self.stats:
            return
        stats = repository.stats
        names = ("reads", "writes", "lists", "deletes", "bytes_read", "bytes_written")
        if self.json:
            click.echo(as_json({"stats": {name: getattr(stats, name) for name in names}}), err=True)
            return
        click.echo(
            f"weightvc: {stats.reads} reads, {stats.writes} writes, {stats.lists} lists, {stats.deletes} deletes; "
            f"{stats.bytes_read} bytes read, {stats.bytes_written} bytes written",
            err=True,
        )


def checkout_here() -> str:
    """The checked-out directory that the working directory lies in, or the working directory."""
    found = _upwards(".")
    return str(found.parent) if found is not None and found.is_file() else "."


def _upwards(start: str) -> Path | None:
    here = Path(start).resolve()
    for directory in (here, *here.parents):
        found = directory / PLACE
        if found.is_dir() or found.is_file():
            return found
    return None


def _repository_of(marker: Path) -> str:
    from weightvc.protocol.checkout import read_marker

    found = read_marker(marker.parent)
    if found is None:
        raise BadFile(f"{marker} does not say which repository it belongs to: name one with -r, or remove the file")
    return found.repository


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback that draws a bar on a terminal's standard error, for work that takes over a second; else None."""
    if not sys.stderr.isatty() or not what or os.environ.get("TERM") == "dumb":
        yield None
        return
    began = time.monotonic()
    drawn = 0.0

    def draw(done: int, total: int) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - began < 1 or now - drawn < 0.1:
            return
        drawn = now
        part = done / total if total else 1.0
        bar = "#" * round(30 * part)
        rate = size(done / (now - began))
        sys.stderr.write(f"\r{what} [{bar:<30}] {part:4.0%}  {size(done)} of {size(total)}, {rate}/s\x1b[K")
        sys.stderr.flush()

    try:
        yield draw
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class Compiling(logging.Handler):
    """On a terminal, a note that code is compiled, which keeps a command from its work for some seconds."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def install(self) -> None:
        """Have it listen."""
        log = logging.getLogger("weightvc_kernels")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty() and not self._settings.json:
            self._settings.note(record.getMessage())


def set_value(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Keep an option's value in the settings, wherever on the line it stood."""
    if value is not None and value is not False:
        if value == "":
            raise click.BadParameter("it is empty", context, parameter)
        setattr(context.find_root().obj, str(parameter.name), value)


def store_options(command: F) -> F:
    """Add what says how repositories are reached: the options of S3, those of the cache, --stats."""
    command = click.option(
        "--stats", is_flag=True, callback=set_value, expose_value=False, help="Print requests and bytes on stderr."
    )(command)
    for name, value, text in (
        ("--profile", "NAME", "Profile of AWS credentials."),
        ("--region", "NAME", "S3 region."),
        ("--endpoint-url", "URL", "S3 server."),
    ):
        command = click.option(name, metavar=value, callback=set_value, expose_value=False, help=text)(command)
    command = click.option(
        "--cache-limit",
        type=Size(),
        metavar="SIZE",
        callback=set_value,
        expose_value=False,
        help="Bytes that the cache may take (40G).",
    )(command)
    return click.option(
        "--no-cache", is_flag=True, callback=set_value, expose_value=False, help="Neither read nor write the cache."
    )(command)


def repository_option(command: F) -> F:
    """Add store_options(), and which repository: -r."""
    return click.option(
        "-r",
        "--repo",
        metavar="URL",
        callback=set_value,
        expose_value=False,
        shell_complete=paths_of,
        help="Repository: a URL or a path.",
    )(store_options(command))


def pager_option(command: F) -> F:
    """Add --no-pager, for what may be long."""
    return click.option(
        "--no-pager",
        is_flag=True,
        callback=set_value,
        expose_value=False,
        help="On a terminal too, print straight away.",
    )(command)


def json_option(command: F) -> F:
    """Add --json."""
    return click.option(
        "--json",
        is_flag=True,
        is_eager=True,
        callback=set_value,
        expose_value=False,
        help="Report as JSON; errors too.",
    )(command)
