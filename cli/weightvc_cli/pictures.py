"""The pictures of a report, by bokeh, which is imported here alone and comes with the extra `report`.

Canvas, so that ten thousand versions are drawn and moved at once. Each colour is the light one; `themes` says which
properties of which models have another in the dark. Colours are those of Okabe and Ito, moved until each is told from
the paper; series differ by marker too, and heat maps by lightness alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from bokeh.embed import components
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    DataRange1d,
    DatetimeTickFormatter,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    LogColorMapper,
    Range1d,
)
from bokeh.palettes import Cividis256
from bokeh.plotting import figure
from bokeh.resources import Resources
from bokeh.transform import factor_cmap, factor_mark

from weightvc.history import version_of
from weightvc.report.facts import Facts
from weightvc.report.layers import FAR
from weightvc_cli.output import first_line, iso

LIGHT: Final = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#59636e",
    "grid": "#dfe3e8",
    "series": ["#0072b2", "#c24e00", "#00795a", "#8b4a86", "#7a6200", "#59636e"],
    "heat": list(reversed(Cividis256)),
}
DARK: Final = {
    "paper": "#0d1117",
    "ink": "#f0f6fc",
    "faint": "#a5adb7",
    "grid": "#30363d",
    "series": ["#56b4e9", "#ff9d5c", "#2fc79a", "#e0a3d9", "#f0e442", "#a5adb7"],
    "heat": list(Cividis256),
}
MARKERS: Final = ["circle", "square", "triangle", "diamond", "inverted_triangle", "x"]
OTHERS: Final = "other branches"
LABELS: Final = 40
"""Names in the version graph at most; more would lie over each other."""
MANY: Final = 1000
"""Versions past which each is drawn smaller."""
TOOLS: Final = "pan,box_zoom,xwheel_zoom,reset,save"

_BYTES: Final = """
const units = ["B", "KB", "MB", "GB", "TB"];
let n = IT, unit = 0;
if (n == null || isNaN(n)) return "none";
while (n >= 999.5 && unit < 4) { n /= 1000; unit += 1; }
return n.toFixed(unit == 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2) + " " + units[unit];
"""
_TICK: Final = "return String(Number(tick.toPrecision(2)));"
_NUMBER: Final = 'return value == null || isNaN(value) ? "none" : String(Number(value.toPrecision(4)));'


@dataclass(slots=True)
class Pictures:
    """Figures by name, and what makes them dark."""

    figures: dict[str, Any] = field(default_factory=dict)
    themes: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    """Model, property, and its light and dark value."""

    def colour(self, model: Any, **of: Any) -> None:
        """Have properties of a model follow the theme: each by a colour's name, or its light and dark value."""
        for attribute, named in of.items():
            light, dark = (LIGHT[named], DARK[named]) if isinstance(named, str) else named
            setattr(model, attribute, light)
            self.themes.append((model.id, attribute, light, dark))

    def script(self) -> tuple[str, dict[str, str]]:
        """The script that draws them, and where each goes, as HTML."""
        code, places = components(self.figures, wrap_script=False)
        return code, places

    @staticmethod
    def library() -> str:
        """What the script needs: bokeh for browsers, without widgets and WebGL."""
        return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def draw(facts: Facts) -> Pictures:
    """All pictures that the facts are enough for."""
    out = Pictures()
    if facts.rows:
        _history(out, facts)
    _layers(out, facts)
    _stored(out, facts)
    _told(out, facts)
    return out


# Frames


def _figure(out: Pictures, name: str, height: int, what: str, **options: Any) -> Any:
    made: Any = figure(
        height=height, sizing_mode="stretch_width", tools=options.pop("tools", TOOLS), min_border_left=100, **options
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.name = name
    made.yaxis.axis_label = what + (" (log)" if options.get("y_axis_type") == "log" else "")
    out.figures[name] = made
    return made


def _finish(out: Pictures, made: Any) -> None:
    """Colours of what frames a picture; once all is in it."""
    # The page's own; and with no fill, bokeh strokes into an outline whatever path it drew last.
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    for axis in made.axis:
        for attribute in ("axis_line_color", "major_tick_line_color"):
            out.colour(axis, **{attribute: "faint"})
        axis.minor_tick_line_color = None
        out.colour(axis, major_label_text_color="ink", axis_label_text_color="ink")
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "13px"
    for grid in made.grid:
        out.colour(grid, grid_line_color="grid")
    for legend in made.legend:
        # Above, so that it lies over no version.
        made.add_layout(legend, "above")
        legend.orientation = "horizontal"
        legend.background_fill_color = legend.border_line_color = None
        legend.padding = legend.margin = 2
        out.colour(legend, label_text_color="ink")
    for place in (made.left, made.right, made.above, made.below):
        for one in place:
            if isinstance(one, ColorBar):
                out.colour(one, background_fill_color="paper", major_label_text_color="ink")
                one.major_label_text_font_size = "12px"
                one.major_tick_line_color = None


def _bytes_axis(axis: Any) -> None:
    axis.formatter = CustomJSTickFormatter(code=_BYTES.replace("IT", "tick"))


def _hover(out: Any, renderer: Any, tooltips: Sequence[tuple[str, str]], **formats: str) -> None:
    formatters: dict[str, Any] = {}
    for name, kind in formats.items():
        code = _BYTES.replace("IT", "value") if kind == "bytes" else _NUMBER
        formatters[f"@{name}"] = CustomJSHover(code=code)
    rows = "".join(
        f'<tr><td style="color:var(--faint);text-align:right;padding-right:8px">{label}</td>'
        f"<td>@{{{what}}}{'{custom}' if what in formats else ''}</td></tr>"
        for label, what in tooltips
    )
    # The page's colours, in either theme. What stands for an @ is put in as text.
    text = f'<table style="background:var(--paper);color:var(--ink);margin:-5px;padding:5px 8px">{rows}</table>'
    renderers = renderer if isinstance(renderer, list) else [renderer]
    out.add_tools(HoverTool(renderers=renderers, tooltips=text, formatters=formatters, limit=3))


# Versions


def _series(facts: Facts) -> tuple[list[str], list[str]]:
    """Which series each version belongs to, and the series: the default branch, then those with most versions."""
    called = [row.entry.name or "no branch" for row in facts.rows]
    counts = Counter(called)
    first = [facts.default] if facts.default in counts else []
    most = first + [name for name, _ in counts.most_common() if name != facts.default]
    kept = most if len(most) <= len(MARKERS) else [*most[: len(MARKERS) - 1], OTHERS]
    return [name if name in kept else OTHERS for name in called], kept


def _column(values: Sequence[float | int | None]) -> "np.ndarray[Any, Any]":
    return np.array([np.nan if value is None else value for value in values], np.float64)


def columns(facts: Facts) -> dict[str, Any]:
    """What the pictures of versions draw, and say of the one that is pointed at."""
    rows, entries = facts.rows, [row.entry for row in facts.rows]
    versions = [version_of(entry) for entry in entries]
    named: dict[str, list[str]] = {}
    for name, ident in [*facts.branches.items(), *facts.tags.items()]:
        named.setdefault(ident, []).append(name)
    density = _column([entry.density for entry in entries])
    return {
        "generation": np.array([version.generation for version in versions], np.int32),
        "id": [version.short for version in versions],
        "step": ["none" if version.step is None else str(version.step) for version in versions],
        "series": _series(facts)[0],
        "branch": [entry.name or "none" for entry in entries],
        "message": [first_line(version.message)[:80] for version in versions],
        "names": [", ".join(named.get(version.id, [])) for version in versions],
        "time": [iso(version.time)[:19] + "Z" for version in versions],
        "changed": _column([entry.changed for entry in entries]),
        "density": density,
        # Nothing has no place on an axis of powers.
        "percent": np.where(density > 0, 100 * density, np.nan),
        "patch": _column([entry.patch.nbytes if entry.patch else None for entry in entries]),
        "base": _column([entry.base.nbytes if entry.base else None for entry in entries]),
        "stored": _column([entry.place.nbytes if entry.place else None for entry in entries]),
        "smaller": _column([row.smaller for row in rows]),
        "cold_bytes": _column([row.cold.nbytes if row.cold else None for row in rows]),
        "cold_requests": _column([row.cold.requests if row.cold else None for row in rows]),
        "cold_patches": _column([row.cold.patches if row.cold else None for row in rows]),
        "state": ["expired" if entry.gone else "kept" for entry in entries],
    }


_VERSION: Final = [
    ("version", "id"),
    ("step", "step"),
    ("branch", "branch"),
    ("message", "message"),
    ("made", "time"),
]


def _history(out: Pictures, facts: Facts) -> None:
    data = columns(facts)
    source = ColumnDataSource(data, name="versions")
    series = _series(facts)[1]
    low, high = int(data["generation"].min()), int(data["generation"].max())
    reach = Range1d(low - 0.7, high + 0.7, bounds=(low - 1.5, high + 1.5), min_interval=2)
    axis = _steps(facts, high)
    colour = factor_cmap("series", LIGHT["series"][: len(series)], series)
    out.colour(colour.transform, palette=(LIGHT["series"][: len(series)], DARK["series"][: len(series)]))
    look: dict[str, Any] = {"color": colour, "marker": factor_mark("series", MARKERS[: len(series)], series)}
    size = 7 if len(facts.rows) <= MANY else 4
    _graph(out, facts, source, reach, axis, look)
    shared = [("changed", "changed"), ("of all, %", "percent"), ("patch", "patch"), ("stored", "stored")]
    shared += [("times smaller", "smaller")]
    formats = {"patch": "bytes", "stored": "bytes", "base": "bytes", "percent": "number", "smaller": "number"}
    formats["changed"] = "number"
    plots: list[tuple[str, str, str, list[tuple[str, str]]]] = [
        ("density", "elements changed, %", "percent", shared),
        ("stored", "bytes stored", "stored", [*shared, ("base", "base")]),
        ("smaller", "times smaller", "smaller", shared),
    ]

    def plot(made: Any, column: str, tooltips: list[tuple[str, str]], formats: dict[str, str]) -> None:
        points = made.scatter(
            "generation", column, source=source, size=size, alpha=0.85, legend_group="series", **look
        )
        _hover(made, points, _VERSION + tooltips, **formats)
        if formats[column] == "bytes":
            _bytes_axis(made.yaxis[0])
        axis(made)
        made.legend.visible = len(series) > 1
        _finish(out, made)

    for name, what, column, tooltips in plots:
        kind = "log" if _positive(data[column]) else "linear"
        made = _figure(out, name, 280, what, x_range=reach, y_axis_type=kind)
        made.yaxis[0].formatter = CustomJSTickFormatter(code=_TICK)
        plot(made, column, tooltips, formats)
    cold = [("patches", "cold_patches"), ("fetched", "cold_bytes"), ("requests", "cold_requests")]
    formats = {"cold_patches": "number", "cold_requests": "number", "cold_bytes": "bytes"}
    for name, what, column in (
        ("depth", "patches after the base", "cold_patches"),
        ("cold", "bytes of a cold pull", "cold_bytes"),
    ):
        made = _figure(out, name, 240, what, x_range=reach, y_range=_from_zero(data[column]))
        plot(made, column, cold, formats)


def _positive(values: "np.ndarray[Any, Any]") -> bool:
    known = values[~np.isnan(values)]
    return bool(known.size) and bool((known > 0).all())


def _from_zero(values: "np.ndarray[Any, Any]") -> Range1d:
    known = values[~np.isnan(values)]
    return Range1d(0, 1.08 * max(1.0, float(known.max())) if known.size else 1.0)


def _steps(facts: Facts, high: int) -> Any:
    """What gives a figure its axis of versions: labelled by steps, where the default branch has them."""
    steps: list[int | None] = [None] * (high + 1)
    by_id = {row.ident: version_of(row.entry) for row in facts.rows}
    at = facts.branches.get(facts.default)
    while at in by_id:
        steps[by_id[at].generation] = by_id[at].step
        at = next(iter(by_id[at].parents), None)
    labelled = any(step is not None for step in steps)
    formatter = CustomJSTickFormatter(
        args={"steps": steps}, code="const step = steps[tick]; return step == null ? '' : String(step);"
    )

    def give(made: Any) -> None:
        made.xaxis.ticker = BasicTicker(min_interval=1, mantissas=[1, 2, 5], desired_num_ticks=10)
        made.xaxis.axis_label = (
            f"step, along the history of {facts.default}" if labelled else "generation: versions that lie before"
        )
        if labelled:
            made.xaxis.formatter = formatter

    return give


def _graph(out: Pictures, facts: Facts, source: Any, reach: Any, axis: Any, look: dict[str, Any]) -> None:
    lanes: dict[str, int] = {facts.default: 0}
    for row in facts.rows:
        lanes.setdefault(row.entry.name or "no branch", len(lanes))
    where = {
        row.ident: (version_of(row.entry).generation, -lanes[row.entry.name or "no branch"]) for row in facts.rows
    }
    source.data["lane"] = np.array([where[row.ident][1] for row in facts.rows], np.int32)
    edges = [
        (*where[parent], *where[row.ident])
        for row in facts.rows
        for parent in version_of(row.entry).parents
        if parent in where
    ]
    ends = np.array(edges, np.int32).reshape(-1, 4)
    lines = ColumnDataSource(dict(zip(("x0", "y0", "x1", "y1"), ends.T, strict=True)), name="edges")
    height = min(150 + 30 * len(lanes), 620)
    made = _figure(out, "graph", height, "branch", x_range=reach, y_range=Range1d(0.8 - len(lanes), 1.2), tools=TOOLS)
    drawn = made.segment("x0", "y0", "x1", "y1", source=lines, line_width=1.5)
    out.colour(drawn.glyph, line_color="faint")
    points = made.scatter("generation", "lane", source=source, size=9 if len(facts.rows) <= MANY else 5, **look)
    tooltips = [*_VERSION, ("branches and tags here", "names"), ("state", "state")]
    _hover(made, points, tooltips)
    shown = [row for row in facts.rows if row.ident in {*facts.branches.values(), *facts.tags.values()}]
    names = ColumnDataSource({"x": [], "y": [], "text": []}, name="names")
    for row in shown[-LABELS:]:
        x, y = where[row.ident]
        texts = [f"[{name}]" for name, ident in facts.branches.items() if ident == row.ident]
        texts += [name for name, ident in facts.tags.items() if ident == row.ident]
        for column, value in (("x", x), ("y", y), ("text", _cut(", ".join(texts), 28))):
            names.data[column].append(value)
    ring = made.scatter("x", "y", source=names, size=15, fill_color=None, line_width=1.5)
    out.colour(ring.glyph, line_color="ink")
    text = made.text(
        "x", "y", "text", source=names, angle=0.5, x_offset=4, y_offset=-9, text_font_size="12px", text_align="left"
    )
    out.colour(text.glyph, text_color="ink")
    made.yaxis.ticker = FixedTicker(ticks=[-lane for lane in lanes.values()] if len(lanes) <= LABELS else [])
    made.yaxis.major_label_overrides = {-lane: _cut(name, 24) for name, lane in lanes.items()}
    made.ygrid.visible = False
    axis(made)
    _finish(out, made)


def _cut(text: str, wide: int) -> str:
    return text if len(text) <= wide else f"{text[: wide - 1]}…"


# Layers


def _layers(out: Pictures, facts: Facts) -> None:
    if (found := facts.weights) is not None:
        bits = [[8 * n / max(1, of) for n, of in zip(row, found.elements, strict=True)] for row in found.nbytes]
        names = [_column_name(row) for row in found.versions]
        _heat(out, "patches", names, found.layers, bits, "bits of patch an element", "bits")
    if (made := facts.changes) is not None:
        shares: list[list[float | None]] = [
            [100 * n / read if read else None for n, read in zip(row, made.read, strict=True)] for row in made.changed
        ]
        names = [_column_name(row) for row in made.versions]
        _heat(out, "layers", names, made.layers, shares, "elements changed, %", "%")
        if made.steps:
            _ulp(out, made.steps)


def _column_name(entry: Any) -> str:
    version = version_of(entry)
    return f"{version.step if version.step is not None else version.generation} · {version.short[:7]}"


def _heat(
    out: Pictures,
    name: str,
    across: list[str],
    down: list[str],
    values: Sequence[Sequence[float | None]],
    what: str,
    unit: str,
) -> None:
    array = np.array([[np.nan if v is None else v for v in row] for row in values], np.float64)
    width, height = array.shape
    known = array[~np.isnan(array) & (array > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.1, 1.0)
    log = high > 10 * low
    mapper: Any = LogColorMapper if log else LinearColorMapper
    colours = mapper(palette=LIGHT["heat"], low=low if log else 0.0, high=high if high > low or not log else 2 * low)
    # What did not change at all has no place on a scale of powers: the paper's colour.
    colours.nan_color = "rgba(0,0,0,0)"
    if log:
        array = np.where(array > 0, array, np.nan)
    out.colour(colours, palette="heat")
    columns_, rows = np.meshgrid(np.arange(width), np.arange(height), indexing="ij")
    source = ColumnDataSource(
        {
            "x": columns_.ravel().astype(np.int32),
            "y": rows.ravel().astype(np.int32),
            "value": array.ravel(),
            "version": [across[i] for i in columns_.ravel()],
            "layer": [down[i] for i in rows.ravel()],
        },
        name=name,
    )
    made = _figure(
        out,
        name,
        min(140 + 20 * height, 900),
        "layer",
        x_range=Range1d(-0.5, width - 0.5, bounds="auto"),
        y_range=Range1d(height - 0.5, -0.5, bounds="auto"),
    )
    fill = {"field": "value", "transform": colours}
    cells = made.rect("x", "y", 1, 1, source=source, fill_color=fill, line_color=fill)
    _hover(made, cells, [("layer", "layer"), ("version", "version"), (what, "value")], value="number")
    made.xaxis.ticker = FixedTicker(ticks=list(range(0, width, max(1, -(-width // 12)))))
    made.xaxis.major_label_overrides = {i: text.partition(" ")[0] for i, text in enumerate(across)}
    made.xaxis.axis_label = "step"
    made.yaxis.ticker = FixedTicker(ticks=list(range(0, height, max(1, -(-height // 40)))))
    made.yaxis.major_label_overrides = {i: _cut(text, 36) for i, text in enumerate(down)}
    made.grid.visible = False
    _scale(made, colours, unit)
    _finish(out, made)


def _scale(made: Any, colours: Any, unit: str) -> None:
    formatter = CustomJSTickFormatter(code=f'return String(Number(tick.toPrecision(2))) + " {unit}";')
    made.add_layout(ColorBar(color_mapper=colours, width=14, formatter=formatter), "right")


def _ulp(out: Pictures, steps: Mapping[tuple[int, int], int]) -> None:
    exponents = sorted({exponent for exponent, _ in steps})
    moves = list(range(-FAR, FAR + 1))
    total = Counter[int]()
    for (exponent, _), count in steps.items():
        total[exponent] += count
    pairs = sorted(steps)
    shares = np.array([100 * steps[pair] / total[pair[0]] for pair in pairs])
    colours = LogColorMapper(palette=LIGHT["heat"], low=max(0.01, float(shares.min())), high=100.0)
    out.colour(colours, palette="heat")
    source = ColumnDataSource(
        {
            "x": np.array([exponent for exponent, _ in pairs], np.int32),
            "y": np.array([step for _, step in pairs], np.int32),
            "share": shares,
            "count": np.array([steps[pair] for pair in pairs], np.int64).astype(np.float64),
            "exponent": [str(exponent) for exponent, _ in pairs],
            "move": [move(step) for _, step in pairs],
        },
        name="ulp",
    )
    made = _figure(
        out,
        "ulp",
        420,
        "move, in representable values (ULP)",
        x_range=Range1d(exponents[0] - 0.5, exponents[-1] + 0.5, bounds="auto"),
        y_range=Range1d(-FAR - 0.5, FAR + 0.5, bounds="auto"),
    )
    fill = {"field": "share", "transform": colours}
    cells = made.rect("x", "y", 1, 1, source=source, fill_color=fill, line_color=fill)
    tooltips = [("old exponent", "exponent"), ("move", "move"), ("elements", "count"), ("share, %", "share")]
    _hover(made, cells, tooltips, share="number", count="number")
    made.xaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=16)
    made.xaxis.axis_label = "exponent of the old value (of 2)"
    made.yaxis.ticker = FixedTicker(ticks=[step for step in moves if step % 2])
    made.yaxis.major_label_overrides = {step: move(step) for step in moves}
    made.grid.visible = False
    _scale(made, colours, "%")
    _finish(out, made)


def move(step: int) -> str:
    """A move in words; those of FAR and further are one."""
    return f"{step:+d}" if abs(step) < FAR else f"{'+' if step > 0 else '-'}{FAR} or more"


# Storage


def _stored(out: Pictures, facts: Facts) -> None:
    kinds = [one.kind for one in facts.stored]
    source = ColumnDataSource(
        {
            "kind": kinds,
            "nbytes": _column([one.nbytes for one in facts.stored]),
            "count": _column([one.count for one in facts.stored]),
            "state": ["garbage" if one.garbage else "named" for one in facts.stored],
        },
        name="storage",
    )
    made = _figure(
        out, "storage", 90 + 34 * len(kinds), "", y_range=list(reversed(kinds)), tools="save", x_range=Range1d(0, 1)
    )
    largest = max([one.nbytes for one in facts.stored], default=0)
    made.x_range.end = 1.06 * max(1, largest)
    colour = factor_cmap("state", LIGHT["series"][:2], ["named", "garbage"])
    out.colour(colour.transform, palette=(LIGHT["series"][:2], DARK["series"][:2]))
    bars = made.hbar(y="kind", right="nbytes", left=0, height=0.6, source=source, color=colour)
    _hover(made, bars, [("kind", "kind"), ("bytes", "nbytes"), ("number", "count")], nbytes="bytes", count="number")
    _bytes_axis(made.xaxis[0])
    made.xaxis.axis_label = "bytes"
    made.ygrid.visible = False
    _finish(out, made)


# Metrics


def _told(out: Pictures, facts: Facts) -> None:
    hosts = [one for one in facts.told if one.pulls][: len(MARKERS)]
    if hosts:
        lag = _figure(out, "lag", 260, "seconds from commit to verified", y_axis_type="log")
        lag.yaxis[0].formatter = CustomJSTickFormatter(code=_TICK)
        behind = _figure(out, "behind", 220, "versions behind", x_range=lag.x_range)
        for number, host in enumerate(hosts):
            data = {
                "n": np.arange(1, len(host.pulls) + 1, dtype=np.int32),
                "age": _column([pull.age if pull.age > 0 else None for pull in host.pulls]),
                "lag": _column([pull.lag for pull in host.pulls]),
                "seconds": _column([pull.seconds for pull in host.pulls]),
                "nbytes": _column([pull.nbytes for pull in host.pulls]),
                "version": [pull.version[:12] for pull in host.pulls],
                "host": [host.name] * len(host.pulls),
            }
            source = ColumnDataSource(data, name=f"pulls-{number}")
            for made, column in ((lag, "age"), (behind, "lag")):
                points = made.scatter(
                    "n", column, source=source, size=8, marker=MARKERS[number], legend_label=_cut(host.name, 40)
                )
                pair = LIGHT["series"][number], DARK["series"][number]
                out.colour(points.glyph, fill_color=pair, line_color=pair)
                tooltips = [("file", "host"), ("version", "version"), ("age, s", "age"), ("versions behind", "lag")]
                tooltips += [("update took, s", "seconds"), ("fetched", "nbytes")]
                formats = {"age": "number", "lag": "number", "seconds": "number", "nbytes": "bytes"}
                _hover(made, points, tooltips, **formats)
        for made in (lag, behind):
            made.xaxis.axis_label = "pull of the host"
            _finish(out, made)
    runs = sorted((run for one in facts.told for run in one.runs), key=lambda run: run.time)
    if any("bytes/live" in run.numbers for run in runs):
        made = _figure(out, "runs", 260, "bytes", x_axis_type="datetime", x_range=DataRange1d(min_interval=60_000))
        for number, (what, label) in enumerate(GARBAGE):
            some = [run for run in runs if what in run.numbers]
            source = ColumnDataSource(
                {
                    "time": _column([1000 * run.time for run in some]),
                    "value": _column([run.numbers[what] for run in some]),
                    "command": [run.command for run in some],
                    "kind": [label] * len(some),
                },
                name=f"runs-{number}",
            )
            points = made.scatter("time", "value", source=source, size=7, marker=MARKERS[number], legend_label=label)
            line = made.line("time", "value", source=source, line_width=1.5, legend_label=label)
            pair = LIGHT["series"][number], DARK["series"][number]
            out.colour(points.glyph, fill_color=pair, line_color=pair)
            out.colour(line.glyph, line_color=pair)
            _hover(made, points, [("kind", "kind"), ("bytes", "value"), ("command", "command")], value="bytes")
        _bytes_axis(made.yaxis[0])
        made.xaxis.formatter = DatetimeTickFormatter()
        made.xaxis.axis_label = "when the run ended (UTC)"
        _finish(out, made)


GARBAGE: Final = [
    ("bytes/live", "named by the root"),
    ("bytes/young", "garbage, young"),
    ("bytes/waiting", "garbage, condemned before"),
    ("bytes/deleted", "deleted by the run"),
]
"""Numbers of `gc` and `maintain` that are drawn."""
