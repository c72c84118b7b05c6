"""Metrics of the commands that keep a repository in order: a line of JSON a run, and a file for Prometheus."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from weightvc.errors import WeightvcError
from weightvc_cli.files import check_writable, write_atomically
from weightvc_cli.output import as_json
from weightvc_cli.settings import Settings

if TYPE_CHECKING:
    from weightvc.protocol.collect import Collection
    from weightvc.protocol.compact import Compacted
    from weightvc.protocol.expire import Expiry
    from weightvc.protocol.fsck import FsckReport
    from weightvc.repository import Repository
    from weightvc.retention import Maintenance


@dataclass(slots=True)
class Run:
    """What a run came to."""

    repository: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    """By name and, behind a slash, kind."""
    code: int = 0
    """The exit status of a run that ends without an error."""
    error: Exception | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def ok(self) -> bool:
        """Whether all of it was done."""
        return self.error is None and self.code == 0

    def took(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self.began


class Metrics:
    """The files that the numbers of each run of a command go into.

    Raises Refused or AccessDenied, before anything is done, where they could not be written.
    """

    def __init__(self, command: str, lines: str | None, prometheus: str | None) -> None:
        self._command = command
        self._lines = lines
        self._prometheus = prometheus
        if lines is not None:
            check_writable(lines, lines if os.path.exists(lines) else os.path.dirname(lines) or ".")
        if prometheus is not None:  # another file is put in its place
            check_writable(prometheus, os.path.dirname(prometheus) or ".")

    def none_of(self, what: str) -> None:
        """Raise UsageError if metrics are wanted of what is no run."""
        if self._lines is not None or self._prometheus is not None:
            raise click.UsageError(f"{what} has no metrics: leave out --metrics and --prometheus")

    @contextmanager
    def opened(self, settings: Settings, what: str = "") -> Iterator[tuple["Repository", Run]]:
        """The repository for one run, and the run; at its end the files say what became of it, also of an error.

        The error goes on as it is. Of a run that is interrupted or killed nothing is written.
        """
        run = Run()
        good = self._before()
        try:
            with settings.open(what=what) as repository:
                run.repository = repository.url
                yield repository, run
            self._replace(run, good)
            self._append(run)
        except Exception as error:
            run.repository = run.repository or settings.opened or settings.named() or ""
            run.error = error
            for write in (partial(self._replace, run, good), partial(self._append, run)):
                try:
                    write()
                except WeightvcError as unwritten:
                    settings.note(f"the metrics of a failed run were not written: {unwritten}")
            raise

    def _append(self, run: Run) -> None:
        from weightvc.protocol.checkout import local_errors

        if self._lines is None:
            return
        out = {"time": time.time(), "repository": run.repository, "command": self._command, "ok": run.ok}
        if run.error is not None:
            out |= {"error": type(run.error).__name__, "message": str(run.error)}
        with local_errors(self._lines), open(self._lines, "a") as file:
            file.write(as_json(out | run.numbers) + "\n")

    def _replace(self, run: Run, before: str) -> None:
        from weightvc.protocol.checkout import local_errors

        if self._prometheus is None:
            return
        now = time.time()
        numbers = {**run.numbers, "ok": int(run.ok), "ended": now}
        # Alerts go by `time`: a run that fails must neither move it, nor leave it out, which no alert would notice.
        numbers["time"] = now if run.ok else self._value(before, "time", run)
        groups: dict[str, list[str]] = {}  # the lines of a metric have to stand together, below one TYPE
        for name, value in numbers.items():
            metric, _, kind = name.partition("/")
            group = groups.setdefault(metric, [f"# TYPE weightvc_{metric} gauge"])
            group.append(f"{self._series(metric, run, kind)} {value!r}")
        with local_errors(self._prometheus):
            write_atomically(self._prometheus, "".join(f"{line}\n" for group in groups.values() for line in group))

    def _series(self, metric: str, run: Run, kind: str = "") -> str:
        labels = {"repository": run.repository, "command": self._command} | ({"what": kind} if kind else {})
        return f"weightvc_{metric}{{{','.join(f'{name}={_quoted(value)}' for name, value in labels.items())}}}"

    def _before(self) -> str:
        """What an earlier run left for Prometheus."""
        try:
            with open(self._prometheus or os.devnull, encoding="utf-8", errors="backslashreplace") as file:
                return file.read()
        except OSError:
            return ""

    def _value(self, text: str, metric: str, run: Run) -> float:
        """A number that an earlier run of this command left, or 0."""
        series = f"{self._series(metric, run)} "
        for line in text.splitlines():
            if line.startswith(series):
                try:
                    return float(line.removeprefix(series))
                except ValueError:
                    break
        return 0.0


def metrics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --metrics and --prometheus to a command, which gets them as `metrics`."""
    file = click.Path(dir_okay=False)

    @click.option("--metrics", "lines", type=file, metavar="FILE", help="Append a line of JSON a run.")
    @click.option("--prometheus", type=file, metavar="FILE", help="Write metrics for Prometheus: a file a job.")
    @wraps(command)
    def watched(*args: Any, lines: str | None, prometheus: str | None, **options: Any) -> Any:
        return command(*args, metrics=Metrics(command.__name__, lines, prometheus), **options)

    return watched


def collected(result: "Collection") -> dict[str, float]:
    """Numbers of gc()."""
    out: dict[str, float] = {}
    for what in ("listed", "live", "pinned", "held", "young", "waiting", "condemned", "deleted", "foreign"):
        tally = getattr(result, what)
        out |= {f"objects/{what}": tally.objects.total(), f"bytes/{what}": tally.bytes.total()}
    return out | {"failed": len(result.failed), "sequence": result.sequence, "horizon": result.horizon}


def compacted(made: "Compacted") -> dict[str, float]:
    """Numbers of compact()."""
    return {
        "ways/patches": made.patches,
        "ways/back": made.back,
        "ways/bases": made.bases,
        "ways_bytes": made.nbytes,
        "ways_skipped": len(made.skipped),
    }


def expired(result: "Expiry") -> dict[str, float]:
    """Numbers of expire()."""
    out: dict[str, float] = {"released_bytes": result.released}
    for state in ("kept", "stone", "expired"):
        out[f"versions/{state}"] = sum(one.state == state for one in result.decisions)
    return out


def maintained(done: "Maintenance") -> dict[str, float]:
    """Numbers of maintain()."""
    out = {f"seconds/{part}": seconds for part, seconds in done.seconds.items()}
    if done.expiry is not None:
        out |= expired(done.expiry)
    if done.compaction is not None:
        out |= compacted(done.compaction)
    if done.collection is not None:
        out |= collected(done.collection)
    return out


def checked(report: "FsckReport") -> dict[str, float]:
    """Numbers of fsck()."""
    out: dict[str, float] = {
        "damaged": len(report.damages),
        "lost": len(report.lost),
        "repaired": len(report.repaired),
        "objects/read": report.objects_read,
    }
    if report.sequence is not None:
        out["sequence"] = report.sequence
    if report.unreferenced is not None:
        # Not `live`, which is without the root itself.
        out |= {"objects/kept": report.objects, "bytes/kept": report.nbytes}
        out |= {"objects/unreferenced": report.unreferenced, "bytes/unreferenced": report.unreferenced_bytes}
    return out


def _quoted(value: str) -> str:
    """A label's value, as Prometheus reads it: it knows three escapes, and no others."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
