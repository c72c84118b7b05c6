"""Figures as Markdown. Each section of docs/benchmarks.md that is measured has a function here of its name."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schemes import BASE, SCHEMES

Figures = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def machine(found: Figures) -> str:
    """What the figures depend on, in a sentence."""
    vectors = "with AVX-512" if found["avx512"] else "without AVX-512"
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "numpy", "zstandard", "numba", "blake3"))
    counts = f"{found['threads']} threads, {found['rounds']} rounds"
    return f"{found['date']}: {found['processor']}, {vectors}; {counts}; {versions}."


def patches(found: list[Figures]) -> str:
    """Bytes of "small", and what share they are of the others'."""
    others = [name for name in SCHEMES if any(name in one["schemes"] for one in found) and name != "small"]
    rows = []
    for one in found:
        stored = {name: row["stored"] for name, row in one["schemes"].items()}
        small = stored["small"]
        cells = [one["pair"], density(one), f"{one['bound']:,.0f}" if one["bound"] else "", f"{small:,}"]
        cells += [f"{small / max(one['changed'], 1):.3f}", f"{small / one['bound']:.3f}" if one["bound"] else ""]
        rows.append(cells + [f"{small / stored[name]:.2f}" if stored.get(name) else "" for name in others])
    heads = ["pair", "changed", "bound", "small", "B/change", "× bound", *(f"of {name}" for name in others)]
    return table(heads, rows)


def density(one: Figures) -> str:
    """What changed."""
    return f"{one['changed'] / max(one['elements'], 1):.2%}"


def speed(found: list[Figures]) -> str:
    """A table a pair, of every scheme."""
    return "\n\n".join(f"{_title(one)}\n\n{_schemes(one)}" for one in found)


blocks = speed


def _title(one: Figures) -> str:
    copies = f", {one['copies']} times" if one["copies"] > 1 else ""
    threads = f"{one['threads']} threads" if one["threads"] > 1 else "one thread"
    size = f"{one['nbytes'] / 1e6:.0f} MB in {one['tensors']:,} tensors"
    return f"**{one['pair']}**{copies}: {size}, {density(one)} changed, {threads}"


def _schemes(one: Figures) -> str:
    per, least = max(one["changed"], 1), one["bound"]
    rows = []
    if least:
        left = f" ({one['left_out']:,} wider elements left out)" if one["left_out"] else ""
        rows.append([f"bound{left}", f"{least:,.0f}", f"{least / per:.3f}", "1", *[""] * 5])

    def mb(seconds: float | None, multiple: float | None = None) -> str:
        if seconds is None:
            return ""
        return f"{one['nbytes'] / seconds / 1e6:,.0f}" + ("" if multiple is None else f" ({multiple:.2f})")

    for name, row in one["schemes"].items():
        cells = [f"**{name}**" if SCHEMES[name].ours else name, f"{row['stored']:,}", f"{row['stored'] / per:.3f}"]
        cells.append(f"{row['stored'] / least:.3f}" if least else "")
        cells += [mb(row["encode"], row["encode_multiple"]), mb(row["decode"], row["decode_multiple"])]
        cells += [mb(row["verified"]), "" if row["hashing"] is None else f"{row['hashing']:.0%}"]
        rows.append([*cells, "" if row["peak"] is None else f"{row['peak'] / 1e6:.1f}"])
    heads = ["scheme", "bytes", "B/change", "× bound", f"encode MB/s (× {BASE})", "decode", "verified", "blake3"]
    return table([*heads, "peak MB"], rows)


def scan(found: Figures) -> str:
    """Speeds, and shares of a plain read's."""
    plain = found["plain read of two arrays"]
    rows = []
    for name, spent in found.items():
        share, work = plain["wall"] / spent["wall"], plain["cpu"] / spent["cpu"]
        rows.append([name, f"{spent['nbytes'] / spent['wall'] / 1e9:.1f}", f"{share:.2f}", f"{work:.2f}"])
    return table(["", "GB/s of input", "of a plain read", "by processor time"], rows)


def bases(found: list[Figures]) -> str:
    """Shares of raw, and speeds by the clock."""
    rows = []
    for one in found:
        speeds = [one["nbytes"] / one[what]["wall"] / 1e9 for what in ("encode", "decode")]
        rows.append([one["pair"], f"{one['share']:.3f}", *(f"{speed:.2f}" for speed in speeds)])
    return table(["", "of raw", "encode GB/s", "decode GB/s"], rows)


def hashing(found: Figures) -> str:
    """Milliseconds by the clock and of the processors."""
    rows = [
        [name, f"{1e3 * spent['wall']:.0f}", f"{1e3 * spent['cpu']:.0f}"]
        for name, spent in found.items()
        if not name.startswith("copy")
    ]
    return table(["", "ms", "ms of processors"], rows)


def start(found: Figures) -> str:
    """Seconds in a fresh process."""
    heads = list(next(iter(found.values())))
    return table(
        ["s", *heads], [[state, *(f"{spent[head]:.3f}" for head in heads)] for state, spent in found.items()]
    )


def small(found: Figures) -> str:
    """Many small tensors against one."""
    rows = []
    for what, spent in found["works"].items():
        row = [what]
        for one, many in (("one", "many"), ("one_cpu", "many_cpu")):
            row += [f"{1000 * spent[one]:.1f}", f"{1000 * spent[many]:.1f}", f"{spent[many] / spent[one]:.1f}"]
        rows.append(row)
    heads = [
        f"{found['tensors']:,} tensors of {found['each']} bf16, and one as large",
        *("one, ms", "many, ms", "times"),
        *("by processor time: one, ms", "many, ms", "times"),
    ]
    return table(heads, rows)


def commits(found: list[Figures]) -> str:
    """What committing a run of checkpoints stores."""
    rows = []
    for run in found:
        base, *steps = run["versions"]
        rows.append([f"{run['run']}, base", "", f"{base['stored']:,}", "", f"{run['nbytes'] / base['stored']:.2f} ×"])
        per = _range([one["stored"] / one["changed"] for one in steps], ".3f")
        smaller = _range([run["nbytes"] / one["stored"] for one in steps], ",.0f")
        rows.append(
            [
                f"{run['run']}, {len(steps)} steps",
                _range([one["payload"] / one["bound"] for one in steps], ".3f"),
                _range([one["stored"] for one in steps], ","),
                per,
                f"{smaller} ×",
            ]
        )
    return table(["", "payload × bound", "stored", "B/change, all counted", "smaller than a checkpoint"], rows)


def _range(values: list[Any], form: str) -> str:
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def check(path: Path, names: Iterable[str]) -> None:
    """See that a document has the marks of sections, before they are measured."""
    text = path.read_text()
    for name in names:
        if len(_mark(name).findall(text)) != 1:
            raise SystemExit(f"{path} needs the lines <!-- {name} --> and <!-- /{name} -->, once: add them")


def write(path: Path, found: dict[str, str]) -> None:
    """Put sections where the document has their marks, "<!-- NAME -->" before and "<!-- /NAME -->" behind."""
    text = path.read_text()
    for name, section in found.items():
        text = _mark(name).sub(lambda found, section=section: f"{found[1]}\n{section}\n\n{found[2]}", text)
    path.write_text(text)


def _mark(name: str) -> re.Pattern[str]:
    return re.compile(rf"^(<!-- {name} -->\n)(?:.*?\n)?(<!-- /{name} -->)$", re.DOTALL | re.MULTILINE)
