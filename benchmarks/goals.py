"""What was wanted, and whether it is held: computed from the figures of all sections."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from schemes import BASE, SCHEMES
from tables import Figures, density, table


@dataclass(slots=True)
class Goal:
    """Something wanted of every case: the worst one decides."""

    what: str
    wanted: float
    at_most: bool
    seen: list[tuple[float, str]] = field(default_factory=list)
    """Values, and of what."""
    digits: int = 2

    @property
    def worst(self) -> tuple[float, str] | None:
        """The value that decides, None if nothing was measured."""
        return (max if self.at_most else min)(self.seen, default=None)

    @property
    def held(self) -> bool | None:
        """None if nothing was measured."""
        if self.worst is None:
            return None
        return self.worst[0] <= self.wanted if self.at_most else self.worst[0] >= self.wanted

    def cells(self) -> list[str]:
        """A row of the table."""
        state = {True: "held", False: "**missed**", None: "not measured"}[self.held]
        wanted = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}"
        if self.worst is None:
            return [self.what, wanted, "", state]
        value, where = self.worst
        missed = sum(value > self.wanted if self.at_most else value < self.wanted for value, _ in self.seen)
        count = f"; {missed} of {len(self.seen)} miss it" if missed and len(self.seen) > 1 else ""
        return [self.what, wanted, f"{value:,.{self.digits}f} ({where}){count}", state]


def goals(found: Figures) -> list[Goal]:
    """All of them."""
    return [*_bytes(found.get("patches", [])), *_commits(found.get("commits", [])), *_speeds(found), *_parts(found)]


def report(wanted: list[Goal]) -> str:
    """The table; of each goal the worst case."""
    return table(["", "wanted", "seen at worst", ""], [goal.cells() for goal in wanted])


def figures(wanted: list[Goal]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [asdict(goal) | {"held": goal.held} for goal in wanted]


def _stored(one: Figures, name: str) -> int:
    stored: int = one["schemes"][name]["stored"] if name in one["schemes"] else 0
    return stored


def _bytes(patches: list[Figures]) -> Iterator[Goal]:
    chain = [one for one in patches if one["chain"]]
    made = [one for one in patches if not one["chain"]]
    late = [one for one in chain if one["step"] > 1]
    for name, wanted in (("small", 1.04), ("fast", 1.6)):
        for which, pairs in (("chains, from step 2", late), ("made inputs", made)):
            seen = [(_stored(one, name) / one["bound"], one["pair"]) for one in pairs if one["bound"]]
            yield Goal(f"{name}: bytes, × the bound; {which}", wanted, True, seen, 3)
    for which, pairs in (("chains", chain), ("made inputs", made)):
        seen = [(_stored(one, "small") / arc, one["pair"]) for one in pairs if (arc := _stored(one, "arc_v3"))]
        yield Goal(f"small: share of arc_v3's bytes; {which}", 0.45, True, seen)
        seen = [
            (_stored(one, "small") / row["stored"], f"{name}, {one['pair']}")
            for one in pairs
            for name, row in one["schemes"].items()
            if not SCHEMES[name].ours and name != "arc_v3" and row["stored"]
        ]
        yield Goal(f"small: share of any other's bytes; {which}", 0.6, True, seen)


def _commits(runs: list[Figures]) -> Iterator[Goal]:
    steps = [(run, one) for run in runs for one in run["versions"][1:]]
    seen = [
        (one["payload"] / one["bound"], f"{run['run']}, step {one['step']}") for run, one in steps if one["step"] > 1
    ]
    yield Goal("as committed: payload, × the bound; from step 2", 1.04, True, seen, 3)
    seen = [
        ((one["stored"] - one["payload"] - 2048) / run["tensors"], f"{run['run']}, step {one['step']}")
        for run, one in steps
    ]
    yield Goal("as committed: bytes a tensor beside the payload and 2 KiB", 40, True, seen, 1)


def _speeds(found: Figures) -> Iterator[Goal]:
    large = found.get("speed", [])
    wide = found.get("machine", {}).get("avx512", False)
    for name, encode in (("small", 1.5 if wide else 1.25), ("fast", 2.0)):
        vectors = " (AVX-512)" if wide and name == "small" else ""
        yield Goal(f"{name}: encode, × {BASE}'s speed{vectors}", encode, False, _multiples(large, name, "encode"))
        if name == "small":
            half, one = ([pair for pair in large if _near(pair) == share] for share in (0.005, 0.01))
            yield Goal("small: decode at 0.5 %", 0.9, False, _multiples(half, name, "decode"))
            yield Goal("small: decode at 1 %", 0.7, False, _multiples(one, name, "decode"))
        else:
            yield Goal(f"{name}: decode", 3.5, False, _multiples(large, name, "decode"))
    seen = [
        (arc["encode"] / one["schemes"]["small"]["encode"], density(one))
        for one in large
        if (arc := one["schemes"].get("arc_v3")) and arc["encode"]
    ]
    yield Goal("small: encode, × arc_v3's speed", 40, False, seen, 0)
    seen = [
        (row["peak"] / row["unit"], f"{name}, {density(one)}")
        for one in large
        for name, row in one["schemes"].items()
        if name in ("small", "fast") and row["peak"] is not None
    ]
    yield Goal("memory beyond the models, in blocks a thread", 1, True, seen)
    several = [one for one in found.get("blocks", []) if one["threads"] > 1]
    for name, encode, decode in (("small", 1.25, 0.9), ("fast", 2.0, 3.5)):
        yield Goal(f"{name}: encode where most blocks are small", encode, False, _multiples(several, name, "encode"))
        yield Goal(f"{name}: decode where most blocks are small", decode, False, _multiples(several, name, "decode"))


def _near(one: Figures) -> float:
    share = one["changed"] / max(one["elements"], 1)
    return 0.005 if abs(share - 0.005) < abs(share - 0.01) else 0.01


def _multiples(pairs: list[Figures], name: str, what: str) -> list[tuple[float, str]]:
    rows = [(one, one["schemes"][name]) for one in pairs if name in one["schemes"]]
    return [
        (row[f"{what}_multiple"], f"{density(one)}; {row[f'{what}_cpu_multiple']:.2f} by processor time")
        for one, row in rows
        if row[f"{what}_multiple"] is not None
    ]


def _parts(found: Figures) -> Iterator[Goal]:
    scan = found.get("scan", {})
    seen = []
    if scan:
        plain, ours = scan["plain read of two arrays"], scan["context codec"]
        seen = [(plain["wall"] / ours["wall"], f"{plain['cpu'] / ours['cpu']:.2f} by processor time")]
    yield Goal("small: scan of an unchanged pair, of a plain read's speed", 0.8, False, seen)
    start = found.get("start", {}).get("compiled code cached", {})
    seen = [(start[f"first {what}"] - start[f"second {what}"], what) for what in ("encode", "decode") if start]
    yield Goal("first call in a process, compiled code cached: seconds more than the second", 1, True, seen)
    works = found.get("small", {}).get("works", {})
    for where in ("kernels", "Repository"):
        seen = [
            (spent["many"] / spent["one"], f"{what}; {spent['many_cpu'] / spent['one_cpu']:.1f} by processor time")
            for what, spent in works.items()
            if what.startswith(where)
        ]
        yield Goal(f"many small tensors, × the time of one as large; {where}", 20, True, seen, 1)
    bases = [one for one in found.get("bases", []) if one["kind"] == "bf16"]
    yield Goal("bf16 bases: of raw", 0.68, True, [(one["share"], one["pair"]) for one in bases], 3)
    speeds = {what: [one["nbytes"] / one[what]["wall"] / 1e9 for one in bases] for what in ("encode", "decode")}
    names = [one["pair"] for one in bases]
    yield Goal("bf16 bases: encode, GB/s", 1, False, list(zip(speeds["encode"], names)))
    seen = [(b / a, name) for a, b, name in zip(speeds["encode"], speeds["decode"], names)]
    yield Goal("bf16 bases: decode, × encode's speed", 1, False, seen)
