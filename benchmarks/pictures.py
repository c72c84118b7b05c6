"""The pictures of docs/patch.md, from real checkpoints.

    python benchmarks/pictures.py --chain DIR docs/pictures     (default: WEIGHTVC_CHAIN)

They are SVG that this script writes itself: small, the same bytes each time, with text that stays text, and with
colours for light and dark screens that are told apart without seeing hues too.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
from inputs import Files, chain
from pairs import Pair
from rows import measured
from schemes import SCHEMES

from weightvc_kernels import context, context_tables, rice
from weightvc_kernels.lanes import ulp_steps

STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
.small{font-size:11px}.mono{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.bold{font-weight:600}
"""
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "faint": "#59636e",
    "grid": "#dfe3e8",
    "one": "#0072b2",
    "two": "#c24e00",
    "three": "#00795a",
    "four": "#8b4a86",
    "shade": "#cfe3f1",
}
DARK = {
    "paper": "#0d1117",
    "ink": "#f0f6fc",
    "faint": "#a5adb7",
    "grid": "#30363d",
    "one": "#56b4e9",
    "two": "#ff9d5c",
    "three": "#2fc79a",
    "four": "#e0a3d9",
    "shade": "#12395a",
}
RAMP = ("#d6e6f2", "#9ecae1", "#5aa5d1", "#2474b0", "#08407e", "#041c3c")
"""Light to dark, for what has an order: each is told from the next by how dark it is, on either paper."""


class Picture:
    """An SVG. Colours are names of LIGHT, or literal."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._title = title
        self._parts: list[str] = []
        self.rect(0, 0, width, height, "paper", extra='rx="8"')

    def rect(self, x: float, y: float, w: float, h: float, fill: str, edge: str = "", extra: str = "") -> None:
        self._add("rect", f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"', fill, edge, extra)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.5, extra: str = "") -> None:
        where = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._add("polyline", f'points="{where}" stroke-width="{_n(width)}"', "none", colour, extra)

    def dot(self, x: float, y: float, colour: str, r: float = 4.5) -> None:
        self._add("circle", f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"', colour, "")

    def diamond(self, x: float, y: float, colour: str, r: float = 5) -> None:
        where = f"M{_n(x)} {_n(y - r)}L{_n(x + r)} {_n(y)}L{_n(x)} {_n(y + r)}L{_n(x - r)} {_n(y)}Z"
        self._add("path", f'd="{where}"', colour, "")

    def text(self, x: float, y: float, text: str, kind: str = "", colour: str = "ink", at: str = "start") -> None:
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        classes = " ".join(filter(None, (f"f-{colour}", kind)))
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}" class="{classes}"{anchor}>{escape(text)}</text>')

    def _add(self, what: str, where: str, fill: str, edge: str, extra: str = "") -> None:
        classes, literal = [], []
        for colour, letter, name in ((fill, "f", "fill"), (edge, "s", "stroke")):
            if colour in LIGHT:
                classes.append(f"{letter}-{colour}")
            elif colour:
                literal.append(f'{name}="{colour}"')
        kind = f'class="{" ".join(classes)}"' if classes else ""
        self._parts.append(f"<{' '.join(filter(None, (what, kind, where, *literal, extra)))}/>")

    def svg(self, dark: bool = False) -> str:
        """The file; `dark` for one whose only colours are those of dark screens."""

        def rules(colours: dict[str, str]) -> str:
            return "".join(f".f-{name}{{fill:{c}}}.s-{name}{{stroke:{c}}}" for name, c in colours.items())

        style = STYLE + rules(DARK if dark else LIGHT)
        if not dark:
            style += f"\n@media (prefers-color-scheme:dark){{{rules(DARK)}}}"
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self._title)}</title>'
        return "\n".join([head, f"<style>{style}\n</style>", *self._parts, "</svg>\n"])


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def density(pairs: Sequence[tuple[str, Pair]]) -> Picture:
    """Share of the lanes of each exponent that changed, and what makes it so."""
    picture = Picture(760, 430, "Share of the weights that change, by exponent of the old weight")
    left, top, right, bottom, low, high = 84, 54, 735, 364, 105, 125

    def x(exponent: float) -> float:
        return left + (exponent - low + 0.5) / (high - low + 1) * (right - left)

    def y(share: float) -> float:
        return top - math.log10(share) / 5 * (bottom - top)

    picture.text(20, 26, "Of the weights with one exponent, so many change in a step", "bold")
    for power in range(6):
        picture.line([(left, y(10**-power)), (right, y(10**-power))], "grid", 1)
        picture.text(
            left - 8, y(10**-power) + 4, ("100 %", "10 %", "1 %", "0.1 %", "0.01 %", "0.001 %")[power], at="end"
        )
    for exponent in range(low, high + 1, 2):
        picture.text(x(exponent), bottom + 20, str(exponent), at="middle")
        picture.text(x(exponent), bottom + 36, f"2{_super(exponent - 127)}", "small", "faint", "middle")
    under = "exponent of the old weight, and the power of two that it stands for"
    picture.text((left + right) / 2, bottom + 56, under, at="middle")
    for i, (name, pair) in enumerate(pairs):
        colour = ("one", "two")[i]
        counts, coarse = (_sampled(pair, stride) for stride in (1, context.STRIDE))
        data = context_tables.Tables.unpack(context.tables(coarse, "BF16"), context_tables.form("BF16"))
        odds = context_tables.spread_odds(data, context_tables.form("BF16"))
        measured = {e: counts.changed[e] / counts.seen[e] for e in range(low, high + 1) if counts.changed[e] > 4}
        mean = measured[118] * 2.0 ** (118 - 134)
        sigma = mean / math.sqrt(2 / math.pi)
        curve = [(x(e / 8), y(_crossing(sigma / 2.0 ** (e / 8 - 134)))) for e in range(8 * low - 3, 8 * high + 4)]
        picture.line(curve, colour, 1.5, 'stroke-dasharray="6 4"' if i else "")
        for e, share in measured.items():
            (picture.diamond if i else picture.dot)(x(e), y(share), colour)
        if i == 0:
            for e in measured:
                ratio = 2.0 ** ((int(odds[e]) - 160) / 8)
                there = y(ratio / (1 + ratio))
                picture.line([(x(e) - 12, there), (x(e) + 12, there)], "ink", 1.5)
        at = 262 + 32 * i
        picture.line([(104, at - 4), (136, at - 4)], colour, 1.5, 'stroke-dasharray="6 4"' if i else "")
        (picture.diamond if i else picture.dot)(120, at - 4, colour)
        picture.text(146, at - 6, f"{name}, measured")
        picture.text(146, at + 8, f"line: if updates are {mean * 1e7:.1f} · 10⁻⁷ on average", "small", "faint")
    picture.line([(108, 322), (132, 322)], "ink", 1.5)
    picture.text(146, 320, f"the tables of the {pairs[0][0]} patch")
    picture.text(146, 334, f"made from one unit in {context.STRIDE}", "small", "faint")
    return picture


def _crossing(ratio: float) -> float:
    """The chance that an update moves a weight, its size being normal with deviation `ratio` of the distance between
    neighbours: the mean of min(1, |u|), a weight lying anywhere between the two points where it rounds anew."""
    inside = math.erf(1 / (ratio * math.sqrt(2)))
    return ratio * math.sqrt(2 / math.pi) * (1 - math.exp(-1 / (2 * ratio * ratio))) + 1 - inside


def _sampled(pair: Pair, stride: int) -> context.Stats:
    """Counts of a pair, in the units that changed."""
    found = [context.sample(span.of(pair.old), span.of(pair.new), span.dtype, stride) for span in pair.blocks]
    return sum(found[1:], found[0])


def steps(name: str, pair: Pair) -> Picture:
    """How far changed weights go, by exponent."""
    picture = Picture(760, 400, "Length of the steps of changed weights, by exponent of the old weight")
    left, top, right, bottom, low, high = 70, 84, 735, 330, 105, 123
    names = ("1", "2", "3 or 4", "5 to 8", "9 to 16", "more")
    counts = np.zeros((256, len(names)), np.int64)
    for _, old, new in pair.sides():
        at = np.flatnonzero(old != new)
        length = np.abs(ulp_steps(old[at], new[at], 2).astype(np.int64))
        column = np.minimum(np.ceil(np.log2(length)).astype(int), len(names) - 1)
        np.add.at(counts, (old[at] >> 7 & 255, column), 1)
    picture.text(
        20, 26, f"Of the weights that change ({name}), so many go how many representable numbers far", "bold"
    )
    for i, what in enumerate(names):
        picture.rect(left + 100 * i, 44, 14, 14, RAMP[i], "faint")
        picture.text(left + 20 + 100 * i, 56, what)
    for share in (0, 25, 50, 75, 100):
        y = bottom - share / 100 * (bottom - top)
        picture.line([(left, y), (right, y)], "grid", 1)
        picture.text(left - 8, y + 4, f"{share} %", at="end")
    step = (right - left) / (high - low + 1)
    for e in range(low, high + 1):
        x, y = left + (e - low) * step, float(bottom)
        for i, count in enumerate(counts[e] / max(counts[e].sum(), 1)):
            height = count * (bottom - top)
            if height:
                picture.rect(x + 3, y - height, step - 6, height, RAMP[i], "faint", 'stroke-width="0.5"')
            y -= height
        picture.text(x + step / 2, bottom + 18, str(e), at="middle")
        picture.text(x + step / 2, bottom + 34, f"{counts[e].sum():,}", "small", "faint", "middle")
    under = "exponent of the old weight, and how many of them changed"
    picture.text((left + right) / 2, bottom + 54, under, at="middle")
    return picture


def sizes(name: str, figures: dict[str, Any]) -> Picture:
    """Bytes a changed weight, by codec."""
    stored = {scheme: row["stored"] / figures["changed"] for scheme, row in figures["schemes"].items()}
    floor = figures["bound"] / figures["changed"]
    order = sorted(stored, key=lambda scheme: stored[scheme])
    picture = Picture(760, 92 + 27 * len(order), "Bytes a changed weight, by codec")
    left, right, top = 128, 700, 64
    share = figures["changed"] / figures["elements"]
    picture.text(20, 26, f"Bytes a changed weight: {name}, {share:.2%} changed", "bold")

    def x(value: float) -> float:
        return left + value / 6 * (right - left)

    for value in range(7):
        picture.line([(x(value), top - 10), (x(value), top + 27 * len(order))], "grid", 1)
        picture.text(x(value), top + 27 * len(order) + 18, str(value), at="middle")
    for i, scheme in enumerate(order):
        y = top + 27 * i
        ours = SCHEMES[scheme].ours
        picture.text(left - 10, y + 13, scheme, "bold" if ours else "", at="end")
        end = x(stored[scheme])
        picture.rect(left, y, end - left, 18, "one" if ours else "grid", "" if ours else "faint")
        picture.text(end + 8, y + 13, f"{stored[scheme]:.2f}")
    picture.line([(x(floor), top - 12), (x(floor), top + 27 * len(order))], "two", 2, 'stroke-dasharray="5 3"')
    picture.text(x(floor), top - 17, f"the bound, {floor:.2f}", "small", "two", "middle")
    return picture


def hazards() -> Picture:
    """How a change becomes an interval."""
    chances = (0.05, 0.02, 0.3, 0.05, 0.12, 0.02, 0.4, 0.05, 0.12, 0.02, 0.2)
    chosen = 6
    picture = Picture(760, 440, "From hazards to an interval of the range coder")
    left, top, right, bottom = 90, 52, 560, 330
    widths = [-math.log2(1 - p) for p in chances]
    ends = np.cumsum([0, *widths])
    full = float(ends[-1]) * 1.04

    def x(bits: float) -> float:
        return left + bits / full * (right - left)

    def y(chance: float) -> float:
        return bottom - chance * (bottom - top)

    def passed(bits: float) -> float:
        return 1 - 2.0**-bits

    low, high = float(ends[chosen]), float(ends[chosen + 1])
    picture.text(20, 26, "The next change is the seventh lane: one symbol, as wide as that is likely", "bold")
    picture.rect(left, y(passed(high)), right - left + 16, y(passed(low)) - y(passed(high)), "shade")
    picture.rect(x(low), y(passed(high)), x(high) - x(low), bottom - y(passed(high)), "shade")
    picture.line([(left, top), (left, bottom), (right, bottom)], "faint", 1)
    for chance, what in ((0.0, "0"), (1.0, "2³¹")):
        picture.text(left - 8, y(chance) + 4, what, at="end")
    there = y(passed(low) + 0.37 * (passed(high) - passed(low)))
    picture.text(left - 12, there + 4, "x mod 2³¹", at="end")
    picture.line([(left - 8, there), (left + 8, there)], "ink", 2)
    picture.line([(x(t / 200 * full), y(passed(t / 200 * full))) for t in range(201)], "one", 2.5)
    for i, (p, width) in enumerate(zip(chances, widths)):
        at = float(ends[i])
        picture.rect(x(at) + 1, bottom + 8, x(at + width) - x(at) - 2, 22, "two" if i == chosen else "faint")
        if x(at + width) - x(at) > 24:
            picture.text(x(at + width / 2), bottom + 23, f"{100 * p:.0f}", "small", "paper", "middle")
    for bits in (low, high):
        corner = (x(bits), y(passed(bits)))
        picture.line([(left, corner[1]), corner, (corner[0], bottom)], "two", 1, 'stroke-dasharray="4 3"')
        picture.dot(x(bits), y(passed(bits)), "two")
    picture.text(right + 24, y(passed(high)) + 4, "C(Λ + λ)", colour="two")
    picture.text(right + 24, y(passed(low)) + 4, "C(Λ)", colour="two")
    picture.text(right + 24, y(passed((low + high) / 2)) + 4, f"{passed(high) - passed(low):.1%} of the range")
    picture.text(x(1.0) - 60, y(passed(1.0)) - 22, "C(Λ) = 1 − 2", colour="one", at="end")
    picture.text(x(1.0) - 60, y(passed(1.0)) - 28, "−Λ", "small", "one")
    before = 100 * (1 - passed(low))
    notes = (
        f"That the six before it stay has a chance of {before:.0f} %; times its own 40 %, that is the width.",
        "The decoder takes x mod 2³¹, and adds up hazards until C is above it.",
    )
    under = "lanes since the last change, each as wide as its hazard λ; in it, its chance to change in %"
    picture.text(left, bottom + 50, under)
    for i, note in enumerate(notes):
        picture.text(left, bottom + 74 + 18 * i, note, "small", "faint")
    return picture


def payloads() -> Picture:
    """What lies where in a block's payload, of either codec."""
    picture = Picture(760, 560, "The bytes of a block's payload, of the context codec and of RICE")
    picture.text(20, 28, "Context codec: a block of units of 4,096 bytes …", "bold")
    flags = (0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1)
    for i, flag in enumerate(flags):
        picture.rect(20 + 60 * i, 42, 56, 26, "shade" if flag else "paper", "faint")
        picture.text(48 + 60 * i, 60, "changes" if flag else "–", "small", "ink" if flag else "faint", "middle")
    picture.text(20, 100, "… is coded in this order: all flags, then the lanes of flagged units alone", "bold")
    at = 20.0
    change, step = ("change", 60, "one"), ("step", 46, "two")
    said = [("flags", 174, "four"), change, step, change, step, ("rest", 44, "three"), change, step]
    said += [("raw", 40, "two"), ("…", 34, "faint")]
    for what, width, colour in said:
        picture.rect(at, 114, width - 4, 30, "paper", colour, 'stroke-width="2"')
        if what != "flags":
            picture.text(at + width / 2 - 2, 133, what, "small", at="middle")
        at += width
    for i, flag in enumerate(flags):
        picture.text(31 + 13.5 * i, 133, str(flag), "small mono", at="middle")
    notes = (
        ("flags", "four", "12 bits of range each, by the three flags before"),
        ("change", "one", "31 bits: how much hazard passes before the next changed lane"),
        ("rest", "three", "31 bits: 8 bits of hazard have passed without a change; go on from 0"),
        (
            "step",
            "two",
            "12 bits: bucket and direction, by the group of the lane's class; raw: low bits of a long one",
        ),
    )
    for i, (what, colour, note) in enumerate(notes):
        picture.rect(20, 157 + 19 * i, 11, 11, "paper", colour, 'stroke-width="2"')
        picture.text(38, 167 + 19 * i, f"{what}: {note}", "small")
    picture.text(20, 262, "… and lies in 32-bit words, little-endian, of one range coder", "bold")
    words = [("x, high", "shade"), ("x, low", "shade"), *[("word", "paper")] * 6, ("…", "paper"), ("last", "paper")]
    for i, (what, fill) in enumerate(words):
        picture.rect(20 + 72 * i, 276, 72, 28, fill, "faint")
        picture.text(56 + 72 * i, 294, what, "small", at="middle")
    picture.text(20, 322, "the first state, 64 bits", "small", "faint")
    picture.text(166, 322, "one read whenever x < 2³¹; at the end x is 2³² − 1 and none is left", "small", "faint")

    old = np.full(10, 0x3F80, "<u2")
    new = old.copy()
    new[[1, 2, 9]] = 0x3F81, 0x3F7F, 0x4048
    payload = rice.encode_patch(old, new, "BF16", 2)[0]
    picture.text(20, 364, "RICE: lanes 1, 2 and 9 of ten change, by 1 up, 1 down and 200 up", "bold")
    head = (("C", 1, "3"), ("form", 1, "shift 7"), ("j", 1, "1"), ("T", 2, "0"), ("a group of three changes", 5, ""))
    at = 0
    for what, count, value in head:
        x, width = 20 + 72 * at, 72 * count
        picture.rect(x, 378, width, 30, "shade" if count == 5 else "paper", "faint")
        for i, byte in enumerate(payload[at : at + count]):
            picture.text(x + 36 + 72 * i, 397, f"{byte:02x}", "mono", at="middle")
        picture.text(x + width / 2, 424, f"{what}: {value}" if value else what, "small", "faint", "middle")
        at += count
    picture.text(20, 456, "the group's bits, the lowest of each byte first", "small", "faint")
    bits = "".join(f"{byte:08b}"[::-1] for byte in payload[5:])
    fields = (
        (5, "k = 1", "three"),
        (2, "1", "one"),
        (2, "0", "one"),
        (5, "6", "one"),
        (3, "signs", "four"),
        (3, "run 2", "two"),
        (19, "code(0, 15) = 198: u = 199, a step of 200", "two"),
        (1, "pad", "faint"),
    )
    assert sum(count for count, *_ in fields) == len(bits) == 40
    at = 0
    for count, what, colour in fields:
        x, width = 20 + 18 * at, 18 * count
        picture.rect(x + 1, 466, width - 2, 26, "paper", colour, 'stroke-width="2"')
        for i, bit in enumerate(bits[at : at + count]):
            picture.text(x + 9 + 18 * i, 483, bit, "mono small", at="middle")
        picture.text(x + width / 2, 508, what, "small", colour, "middle")
        at += count
    picture.line([(111, 516), (111, 522), (271, 522), (271, 516)], "one", 1)
    picture.text(191, 538, "gaps: lanes left out", "small", "one", "middle")
    return picture


def _super(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def main() -> None:
    """Draw all, from the last step of each optimizer of a chain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chain", type=Path, metavar="DIR", default=os.environ.get("WEIGHTVC_CHAIN"))
    parser.add_argument("--dark", type=Path, metavar="DIR", help="write what dark screens show there, to look at")
    arguments = parser.parse_args()
    if not arguments.chain:
        parser.error("--chain, or WEIGHTVC_CHAIN, has to name real checkpoints")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        last: dict[str, Files] = {files.chain: files for files in chain(arguments.chain, Path(name))}
        named = [(label, last[key]) for label, key in (("AdamW", "adamw"), ("Muon", "muon"))]
        pairs = [(label, Pair(files.title, files.old, files.new)) for label, files in named]
        figures = measured(named[0][1], pool, 2, 0, list(SCHEMES))
    pictures: dict[str, Callable[[], Picture]] = {
        "density": lambda: density(pairs),
        "steps": lambda: steps(*pairs[0]),
        "bytes": lambda: sizes(pairs[0][0], figures),
        "hazards": hazards,
        "payloads": payloads,
    }
    for folder, dark in ((arguments.folder, False), (arguments.dark, True)):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for what, draw in pictures.items():
                (folder / f"{what}.svg").write_text(draw().svg(dark))


if __name__ == "__main__":
    main()
