"""Metrics: the files that jobs (`--metrics`, `--prometheus`) and hosts (`weightvc follow --json`) write."""

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weightvc.errors import BadFile, NotFound
from weightvc.protocol.checkout import local_errors

LINES: Final = 10_000
"""Lines of a file that are used, from its end."""
WIDE: Final = 1 << 20
"""Characters of a line at most."""
_SERIES: Final = re.compile(r'(weightvc_\w+)\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\} (\S+)')
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Pull:
    """One update of a host."""

    version: str
    lag: int | None
    """Versions that it was behind."""
    age: float
    """Seconds from the commit until it was verified there."""
    seconds: float
    """Seconds that the update took."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job."""

    time: float
    """When it ended, in seconds since the epoch."""
    command: str
    ok: bool
    numbers: Mapping[str, float]
    """By name and, behind a slash, kind."""


@dataclass(slots=True)
class Told:
    """What one file tells."""

    name: str
    pulls: list[Pull] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


def read(path: str) -> Told:
    """What a file tells, whichever of the three kinds it is: the newest LINES of it.

    Raises NotFound, AccessDenied, or BadFile for one that tells nothing.
    """
    told = Told(Path(path).name)
    last: deque[str] = deque(maxlen=LINES)
    series: dict[str, dict[str, float]] = {}
    if not Path(path).exists():
        raise NotFound(f"there is no file {path}: name one that --metrics, --prometheus or follow --json wrote")
    with local_errors(path), open(path, encoding="utf-8", errors="replace") as file:
        while line := file.readline(WIDE):
            last.append(line)
    for line in last:
        if line.startswith("{"):
            _line(told, line)
        elif found := _SERIES.match(line):
            _series(series, *found.groups())
    for command, numbers in series.items():
        ended = numbers.pop("ended", numbers.get("time", 0.0))
        told.runs.append(Run(ended, command, numbers.pop("ok", 1.0) == 1.0, numbers))
    if not told.pulls and not told.runs:
        raise BadFile(f"{path} tells of no run and no pull: name a file of --metrics, --prometheus or follow --json")
    return told


def _line(told: Told, line: str) -> None:
    """A line of JSON; what is none of ours, or cut off, is passed over."""
    try:
        fields: dict[str, Any] = json.loads(line)
        if "command" in fields and "ok" in fields:
            numbers = {k: float(v) for k, v in fields.items() if type(v) in (int, float) and k != "time"}
            told.runs.append(Run(float(fields["time"]), str(fields["command"]), bool(fields["ok"]), numbers))
        elif "age" in fields and "lag" in fields:
            lag = None if fields["lag"] is None else int(fields["lag"])
            took = float(fields["resolve"]) + float(fields["stage"])
            told.pulls.append(Pull(str(fields["id"]), lag, float(fields["age"]), took, int(fields["bytes"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return


def _series(series: dict[str, dict[str, float]], name: str, labels: str, value: str) -> None:
    known = dict(_LABEL.findall(labels))
    metric = name.removeprefix("weightvc_") + (f"/{known['what']}" if "what" in known else "")
    try:
        series.setdefault(known.get("command", ""), {})[metric] = float(value)
    except ValueError:
        return
