"""How things are written: sizes, shares, times, versions, as text and as JSON."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightvc.objects.catalogue import Entry
    from weightvc.objects.version import Edge, Version


def as_json(value: Any) -> str:
    """One line of ASCII JSON."""
    return json.dumps(value)


def shown(text: str) -> str:
    """Text from a repository, safe on a terminal: control characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(text: str) -> str:
    """What stands for a message on one line."""
    return shown(text.strip().partition("\n")[0])


def counted(number: int, what: str, several: str | None = None) -> str:
    """A number of things: 1 version, 2 versions, 0 patches."""
    return f"{number} {what if number == 1 else several or what + 's'}"


def size(nbytes: float) -> str:
    """Bytes with a decimal unit: 999 B, 1.25 MB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    if unit == "B":
        return f"{nbytes:.0f} B"
    digits = 0 if nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {unit}"


def share(part: float) -> str:
    """A share of 1, in percent with three digits."""
    return f"{100 * part:.3g} %"


def percent(part: float) -> str:
    """A share of 1, in percent with fixed decimals, for a column of them."""
    return f"{100 * part:.3f} %"


def times(ratio: float) -> str:
    """A ratio: 8.3x, 180x."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def iso(microseconds: int) -> str:
    """A time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def local(microseconds: int) -> str:
    """A time in the reader's zone."""
    return datetime.fromtimestamp(microseconds / 1e6).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def shape(sizes: "tuple[int, ...]") -> str:
    """A shape: [4096, 1024]."""
    return f"[{', '.join(map(str, sizes))}]"


def labels(version: "Version") -> str:
    """The step and run of a version, or nothing."""
    parts = [f"step {version.step}"] if version.step is not None else []
    parts += [f"run {shown(version.run)}"] if version.run is not None else []
    return ", ".join(parts)


def table(rows: Sequence[tuple[str, ...]], right: str) -> list[str]:
    """Rows as lines of aligned columns; `right` has an r for a column that is flush right. The last is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = []
    for row in rows:
        cells = [c.rjust(w) if k == "r" else c.ljust(w) for c, w, k in zip(row, widths, right, strict=True)]
        out.append("  ".join(cells).rstrip())
    return out


def weight(entry: "Entry") -> str:
    """What a version took: its patch, how much of it changed, and how much smaller than the whole that is."""
    version, place = entry.version, entry.place
    assert version is not None
    if place is None or entry.gone:
        return "no more: it has expired"
    parts = []
    if entry.patch is not None:
        parts += [f"patch {size(entry.patch.nbytes)}", f"{share(entry.density)} changed"]
    if entry.base is not None:
        parts.append(f"base {size(entry.base.nbytes)}")
    if 0 < place.nbytes < version.nbytes:
        parts.append(f"{times(version.nbytes / place.nbytes)} smaller")
    return ", ".join(parts)


def entry_json(entry: "Entry") -> dict[str, Any]:
    """A version as JSON says it; docs/cli.md lists the fields."""
    version, place = entry.version, entry.place
    assert version is not None
    edges, ways = (place.edges, place.ways) if place is not None else ((), ())
    return {
        "id": version.id,
        "parents": list(version.parents),
        "generation": version.generation,
        "branch": entry.name,
        "step": version.step,
        "run": version.run,
        "message": version.message,
        "author": version.author,
        "time": iso(version.time),
        "metadata": dict(version.metadata),
        "tree": version.tree,
        "layout": version.layout,
        "elements": version.elements,
        "changed": entry.changed,
        "density": entry.density,
        "full_bytes": version.nbytes,
        "bytes": place.nbytes if place is not None else 0,
        "edges": [_edge_json(edge) for edge in edges],
        "ways": [_edge_json(edge) for way in ways for edge in way.edges],
        "expired": entry.gone,
    }


def _edge_json(edge: "Edge") -> dict[str, Any]:
    return {"from": edge.source, "bytes": edge.nbytes, "changed": edge.changed}
