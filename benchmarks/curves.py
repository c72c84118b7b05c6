"""The pictures of docs/when-it-holds.md, by matplotlib from the figures of benchmarks/holds.py.

They are SVG whose text stays text. Their colours are those of pictures.py, and a rule for dark screens changes each
for its counterpart; lines are told apart by marks and dashes too.
"""

import io
import math
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from pictures import DARK, LIGHT

from weightvc.auditing import PAYS

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

LOOK: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "weightvc",
    "font.family": "sans-serif",
    "font.size": 11,
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": LIGHT["paper"],
    "axes.edgecolor": LIGHT["faint"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["faint"],
    "ytick.color": LIGHT["faint"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.labelcolor": LIGHT["ink"],
    "legend.frameon": False,
}
OPTIMIZERS = {
    "adamw": ("AdamW", "one", "o", "-"),
    "muon": ("Muon", "two", "D", "--"),
    "sgd": ("SGD", "three", "s", ":"),
}
EXPORTS = {"bf16": ("one", "o", "-"), "fp8": ("two", "D", "--"), "fp32": ("three", "s", ":")}
SANS = 'system-ui,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif'


def draw(found: dict[str, Any], dark: bool = False) -> dict[str, str]:
    """SVG by name; `dark` for the colours of dark screens alone."""
    pictures: dict[str, Callable[[dict[str, Any]], Any]] = {
        "holds-rates": rates,
        "holds-distance": distance,
        "holds-pretraining": pretraining,
    }
    made = {}
    with plt.rc_context(LOOK):
        for name, picture in pictures.items():
            figure = picture(found)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
            made[name] = _themed(out.getvalue(), dark)
    return made


def _themed(text: str, dark: bool) -> str:
    """The file with rules for dark screens, fonts of the reader's, and coordinates no longer than they need be."""
    text = re.sub("<[^>]*>", lambda tag: re.sub(r"(\d+\.\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", rf"font: \1 {SANS.replace(chr(34), chr(39))}", text)
    text = text[text.index("<svg") :]
    if dark:
        for name, colour in LIGHT.items():
            text = text.replace(colour, DARK[name])
        return text
    rules = "".join(
        f'[style*="{what}: {colour}"]{{{what}:{DARK[name]}!important}}'
        for name, colour in LIGHT.items()
        for what in ("fill", "stroke")
    )
    return text.replace("<defs>", f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n<defs>", 1)


def _onward(found: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    runs = [run for run in found["runs"] if run["stage"] == "onward" and run["optimizer"] == optimizer]
    return sorted(runs, key=lambda run: run["rate"])


def _marked(axes: Any, x: list[float], y: list[float], label: str, colour: str, mark: str, dash: str) -> None:
    axes.plot(x, y, dash, marker=mark, markersize=5, color=LIGHT[colour], label=label, linewidth=1.8)


def _worth(axes: Any, at: float) -> None:
    """A logarithmic axis of how many times smaller patches are, and what pays."""
    axes.set_yscale("log")
    axes.axhline(PAYS, color=LIGHT["ink"], linewidth=1)
    axes.annotate(
        "above: patches pay",
        (at, PAYS),
        xycoords=("axes fraction", "data"),
        va="bottom",
        fontsize=9,
        color=LIGHT["faint"],
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f} ×")


def rates(found: dict[str, Any]) -> Any:
    """Times smaller than whole checkpoints: by optimizer, and by what is served."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for optimizer, (label, *look) in OPTIMIZERS.items():
        runs = [run for run in _onward(found, optimizer) if run["exports"]["bf16"]["times"]]
        if runs:
            times = [run["exports"]["bf16"]["times"] for run in runs]
            _marked(left, [run["rate"] for run in runs], times, label, *look)
    for export, look in EXPORTS.items():
        runs = [run for run in _onward(found, "adamw") if run["exports"][export]["times"]]
        times = [run["exports"][export]["times"] for run in runs]
        _marked(right, [run["rate"] for run in runs], times, export, *look)
    left.set_title("Served as bf16, by optimizer")
    right.set_title("AdamW, by what is served")
    left.set_ylabel("patch: times smaller than the whole")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        _worth(axes, 0.01)
        axes.legend()
    return figure


def distance(found: dict[str, Any]) -> Any:
    """Share of the elements that differ, k steps apart."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.8), sharey=True, layout="constrained")
    colours = ("one", "two", "three", "four", "faint", "ink")
    marks = "oDs^vPX"
    for i, run in enumerate(_onward(found, "adamw")):
        _distances(left, run, f"{run['rate']:g}", colours[i % 6], marks[i % 7])
    left.set_title("AdamW, by learning rate")
    others = [run for run in found["runs"] if run["stage"] in ("SFT", "GRPO") or "decay" in run.get("where", "")]
    for i, run in enumerate(others):
        stage = "pretraining, late" if "where" in run else f"{run['stage']} {run['rate']:g}"
        _distances(right, run, f"{stage}, {OPTIMIZERS[run['optimizer']][0]}", colours[i % 6], marks[i % 7])
    right.set_title("Kinds of training")
    left.set_ylabel("elements that differ, bf16")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("k, steps apart")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.legend(fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure


def _distances(axes: Any, run: dict[str, Any], label: str, colour: str, mark: str) -> None:
    points = [(one["apart"], one["density"]) for one in run["exports"]["bf16"]["distances"] if one["density"]]
    if points:
        growth = run["exports"]["bf16"]["growth"]
        label = f"{label}: k^{growth:.2f}" if growth else label
        _marked(axes, *map(list, zip(*points)), label, colour, mark, "-")


def pretraining(found: dict[str, Any]) -> Any:
    """Times smaller through pretraining, over the learning rate."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, layout="constrained", height_ratios=(3, 1)
    )
    for curve in found["curves"]:
        label, *look = OPTIMIZERS[curve["optimizer"]]
        points = [point for point in curve["points"] if math.isfinite(point["times"])]
        _marked(upper, [p["step"] for p in points], [p["times"] for p in points], label, *look)
    points = found["curves"][0]["points"]
    lower.plot([p["step"] for p in points], [p["rate"] for p in points], color=LIGHT["faint"], linewidth=1.8)
    upper.set_title("Pretraining from scratch, served as bf16: a patch from one step to the next")
    upper.set_ylabel("times smaller")
    _worth(upper, 0.4)
    upper.legend(loc="upper left")
    lower.set_ylabel("rate")
    lower.set_xlabel("step")
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return figure
