"""What was found: what is so, or wrong, in one line, and in another one what mends it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from weightvc.errors import WeightvcError

State = Literal["ok", "warning", "problem", "skipped"]
Number = float | int | bool | str | None

READER: Final = "not allowed to look, which is fine for a reader"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    says: str
    mend: str = ""
    """The command or the step that mends it, where something is wrong."""
    error: type[WeightvcError] | None = None
    """Of a problem, the error that a command would meet."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """What was measured: seconds, bytes, counts, versions of software."""


def ok(check: str, says: str, **numbers: Number) -> Finding:
    """All is well."""
    return Finding(check, "ok", says, numbers=numbers)


def warning(check: str, says: str, mend: str, **numbers: Number) -> Finding:
    """It works, and should be mended."""
    return Finding(check, "warning", says, mend, numbers=numbers)


def problem(check: str, error: type[WeightvcError], says: str, mend: str = "", **numbers: Number) -> Finding:
    """Something does not work, or loses data. Without `mend`, what it says ends with that."""
    return Finding(check, "problem", says, mend, error, numbers)


def skipped(check: str, says: str) -> Finding:
    """It was not looked at: it does not apply, or may not be seen."""
    return Finding(check, "skipped", says)


def span(seconds: float) -> str:
    """Seconds in the unit that a person would use: 12 ms, 3.1 s, 5 min, 2 h, 3 days."""
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def amount(nbytes: float) -> str:
    """Bytes in a decimal unit, KB at least: 16.0 MB, 71.2 KB."""
    unit = next((one for one in (10**9, 10**6) if nbytes >= one), 10**3)
    return f"{nbytes / unit:.1f} {'GB' if unit == 10**9 else 'MB' if unit == 10**6 else 'KB'}"
