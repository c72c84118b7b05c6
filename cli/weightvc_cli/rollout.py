"""Command of a rollout host: follow."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from weightvc_cli.completion import branches_of, paths_of
from weightvc_cli.output import as_json, first_line, shown, size
from weightvc_cli.settings import Settings, json_option, repository_option
from weightvc_cli.signals import stopped_by

if TYPE_CHECKING:
    from weightvc.client import Update
    from weightvc.engines import Engine, Pause
    from weightvc.objects.version import Version
    from weightvc.repository import Repository
    from weightvc.targets import Slots


SECONDS: Final = ("resolve", "fetch", "decode", "verify", "apply", "stage", "activate", "age")
"""Timings of an update that are told."""


@click.command()
@click.argument("branch", required=False, default="HEAD", shell_complete=branches_of)
@click.option(
    "--into",
    "target",
    metavar="DIR",
    required=True,
    shell_complete=paths_of,
    help="Where to keep the versions: DIR/ID, DIR/current.",
)
@click.option("--on-update", "command", metavar="CMD", help="A shell command to run after every update.")
@click.option("--engine", "engine_url", metavar="KIND=URL", help="A serving engine to move: sglang=URL or vllm=URL.")
@click.option(
    "--mode",
    type=click.Choice(["in_place", "retract", "drain"]),
    default="retract",
    show_default=True,
    help="What becomes of the requests that the engine works on.",
)
@click.option("--cache-keys", is_flag=True, help="Requests carry the version in their cache key: for in_place.")
@click.option("--every", metavar="SECONDS", default=1.0, show_default=True, help="How often to look.")
@click.option("--max-lag", metavar="N", default=1, show_default=True, help="Versions behind that call for an update.")
@click.option("--updates", metavar="N", type=click.IntRange(1), help="Stop after so many updates.")
@json_option
@repository_option
@click.pass_obj
def follow(
    settings: Settings,
    branch: str,
    target: str,
    command: str | None,
    engine_url: str | None,
    mode: str,
    cache_keys: bool,
    every: float,
    max_lag: int,
    updates: int | None,
) -> None:
    """Keep a directory at the newest version of a branch.

    BRANCH is HEAD unless given. Each version is built and verified in a directory of its own, DIR/ID, while the old
    one is in use. Then the link DIR/current is turned to it, by one rename, and CMD is run with WEIGHTVC_PATH (the
    directory), WEIGHTVC_VERSION, WEIGHTVC_STEP and WEIGHTVC_RUN. The version before stays; older ones are removed. A
    revert or reset is followed too. An engine is moved before the link; its API key is WEIGHTVC_ENGINE_KEY. Where CMD
    fails, that is said, and it is run again with the next update, or at the next start; so it is where follow was
    killed before CMD had succeeded. An update that fails because of the store, or because somebody else moved the
    link meanwhile, is tried again, at growing intervals. Ends at SIGTERM or Ctrl-C, between two updates.

    \b
    Examples:
      weightvc follow main --into slots --on-update 'kill -HUP 4711'
      weightvc follow main --into slots --engine sglang=http://127.0.0.1:30000
    """
    from weightvc.client import Client, moves
    from weightvc.targets import Slots

    engine = _engine(engine_url, mode, cache_keys) if engine_url is not None else None
    with noted(settings), stopped_by(signal.SIGTERM) as stop, settings.open() as repository:
        slots = Slots(target)
        client = Client(repository, into=slots)
        if (held := slots.holds) is not None:
            # Nothing more may come for long, where that is the newest.
            settings.note(f"{slots.path} holds version {held[:12]}; waiting for what comes after it")
            if command and slots.told != held:
                version = _held(settings, repository, held, every, stop)
                if version is not None:
                    settings.note(f"`{command}` has not succeeded for version {version.short}: it is run now")
                    _run(settings, command, slots, version)
        also = engine.behind if engine is not None else None
        move = engine.activate if engine is not None else _activate
        following = moves(client, branch, move, every=every, max_lag=max_lag, stop=stop, also=also)
        for done, (update, pause) in enumerate(following, 1):
            code = _run(settings, command, slots, update.version) if command else None
            _report(settings, update, code, pause)
            if done == updates:
                break


def _activate(update: "Update") -> None:
    update.activate()


def _held(
    settings: Settings, repository: "Repository", held: str, every: float, stop: threading.Event
) -> "Version | None":
    """The version that the directory holds, once the store can be asked; None if it is of another repository."""
    from weightvc.client import waits
    from weightvc.errors import AccessDenied, NotFound, RefNotFound, StoreError

    failures = 0
    while not stop.is_set():
        try:
            return repository.resolve(held)
        except RefNotFound:
            return None
        except AccessDenied:
            raise
        except (NotFound, StoreError) as error:
            failures += 1
            settings.note(f"{error}; asked again which version {held[:12]} is (attempt {failures} failed)")
            stop.wait(waits(every, failures))
    return None


def _engine(named: str, mode: str, cache_keys: bool) -> "Engine":
    from weightvc.engines import VLLM, SGLang
    from weightvc.errors import Refused

    kind, found, url = named.partition("=")
    kinds: dict[str, Any] = {"sglang": SGLang, "vllm": VLLM}
    if not found or kind not in kinds:
        raise Refused(f"--engine {named!r:.200}: write sglang=URL or vllm=URL")
    key = os.environ.get("WEIGHTVC_ENGINE_KEY") or None
    made: Engine = kinds[kind](url, mode=mode, key=key, cache_keys=cache_keys)
    return made


@contextmanager
def noted(settings: Settings) -> Iterator[None]:
    """What following has to wait for is noted on stderr."""
    log = logging.getLogger("weightvc")
    log.setLevel(logging.INFO)
    log.propagate = False
    notes = _Notes(settings)
    log.addHandler(notes)
    try:
        yield
    finally:
        log.removeHandler(notes)


class _Notes(logging.Handler):
    """What following has to wait for, as notes on stderr."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def emit(self, record: logging.LogRecord) -> None:
        self._settings.note(record.getMessage())


def _run(settings: Settings, command: str, slots: "Slots", version: "Version") -> int:
    from weightvc.errors import StoreError

    told = {
        "WEIGHTVC_PATH": str(slots.path / version.short),
        "WEIGHTVC_VERSION": version.id,
        "WEIGHTVC_STEP": "" if version.step is None else str(version.step),
        "WEIGHTVC_RUN": version.run or "",
    }
    out = sys.stderr if settings.json else None  # stdout is for JSON alone
    code = subprocess.run(command, shell=True, env={**os.environ, **told}, stdout=out, check=False).returncode
    if code:
        settings.note(f"`{command}` ended with status {code} at version {version.short}")
        return code
    try:
        slots.tell(version.id)
    except StoreError as error:
        settings.note(f"{error}; `{command}` succeeded, and will be run again at the next start")
    return code


def _report(settings: Settings, update: "Update", code: int | None, pause: "Pause | None") -> None:
    version, timings = update.version, update.timings
    if settings.json:
        fields: dict[str, Any] = {
            "id": version.id,
            "step": version.step,
            "run": version.run,
            "path": update.path,
            "lag": update.lag,
            **{name: round(getattr(timings, name), 6) for name in SECONDS},
            "requests": timings.requests,
            "bytes": timings.nbytes,
            "exit_code": code,
            "pause": None if pause is None else _seconds(pause),
        }
        click.echo(as_json(fields))
        return
    what = f"step {version.step}" if version.step is not None else first_line(version.message)
    click.echo(
        f"{version.short} {what}: {size(timings.nbytes)} in {timings.resolve + timings.stage:.2f} s, "
        f"{timings.age:.2f} s after its commit, at {shown(update.path or '')}"
        + ("" if pause is None else f"; the engine paused for {pause.total:.2f} s ({pause.way})")
    )


def _seconds(pause: "Pause") -> dict[str, Any]:
    times = {name: round(getattr(pause, name), 6) for name in ("drain", "reload", "swap")}
    return {"mode": pause.mode, "way": pause.way, "why": pause.why, **times}
