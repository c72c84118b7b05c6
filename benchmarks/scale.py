"""Whether a long history costs what a short one does: commits, pulls and polls, the root's size, and collection.

    python benchmarks/scale.py [--versions 100000] [--s3-versions 10000] [--rounds 200] [--json FILE]

Lays down histories of a tensor of 1 KiB, of 100 versions and of many, as commits would have left them (fsck looks at
them), in a local directory and in SeaweedFS (of the dev extra). Then both take turns at the same work, so that both
see the same machine; seconds are medians by the clock, requests and bytes are exact. Collection runs in a process of
its own, with nothing cached. Prints a table of what is wanted and what was seen.
"""

import argparse
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import weightvc
from tests.kit import history, memory
from tests.kit.weights import Bits
from weightvc.objects import key
from weightvc.objects import root as roots
from weightvc.protocol import collect, swap
from weightvc.protocol.refs import encode_tags
from weightvc.protocol.shelf import Shelf
from weightvc.repository import Repository

SMALL = 100
WORKS = ("commit", "pull", "poll")
WANTED = 1.3
"""Times what a short history takes."""
ROOT, BRANCH = 32 << 10, 100
"""Bytes of the root, and of a branch in it, at most."""
BRANCHES, TAGS = 1000, 5000
MARKED = 50_000
"""Objects a second."""


class Side:
    """A history with a writer that goes on, and a reader that follows."""

    def __init__(self, url: str, options: dict[str, Any], count: int, folder: Path) -> None:
        self.url, self.options = url, options
        with weightvc.init(url, cache=None, **options) as repository:
            repository.commit(Bits(history.weights(0)))
            began = time.perf_counter()
            history.lay(repository.store, count - 1)
            report = repository.fsck()
            assert report.ok, report.damages
            print(f"{url}: {count:,} versions laid and looked at in {time.perf_counter() - began:.0f} s", flush=True)
        self.next = count
        self.target = folder / "out"
        self.writer = weightvc.open(url, cache=folder / "cache", **options)
        self.reader = weightvc.open(url, cache=None, **options)
        self.roots: list[int] = []
        self.seconds: dict[str, list[float]] = {work: [] for work in WORKS}
        self.requests: dict[str, list[tuple[int, int]]] = {work: [] for work in WORKS}
        self.bytes: dict[str, list[int]] = {work: [] for work in WORKS}
        self.turn(keep=False)

    def turn(self, *, keep: bool = True) -> None:
        """A commit, a pull of it by a reader that has the one before, and a poll that finds nothing new."""
        source = Bits(history.weights(self.next))
        self._do("commit", self.writer, lambda: self.writer.commit(source, step=self.next), keep)
        self._do("pull", self.reader, lambda: self.reader.checkout("main", self.target), keep)
        self._do("poll", self.reader, self.reader.refresh, keep)
        self.roots.append(len(roots.encode(self.reader.refresh())))
        self.next += 1

    def _do(self, what: str, repository: Repository, work: Callable[[], object], keep: bool) -> None:
        stats = repository.stats
        before = stats.reads, stats.writes + stats.lists, stats.bytes_read + stats.bytes_written
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        if keep:
            self.seconds[what].append(seconds)
            self.requests[what].append((stats.reads - before[0], stats.writes + stats.lists - before[1]))
            self.bytes[what].append(stats.bytes_read + stats.bytes_written - before[2])


class Table:
    """What is wanted, and what was seen."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, bool, str]] = []
        self.figures: dict[str, Any] = {}

    def add(self, goal: str, held: bool, seen: str, **figures: Any) -> None:
        self.rows.append((goal, held, seen))
        self.figures[goal] = {"held": held, "seen": seen, **figures}

    def __str__(self) -> str:
        lines = ["| goal | | seen |", "|---|---|---|"]
        lines += [f"| {goal} | {'held' if held else '**missed**'} | {seen} |" for goal, held, seen in self.rows]
        return "\n".join(lines)


def compare(table: Table, where: str, small: Side, large: Side, rounds: int) -> None:
    """Let both take turns."""
    count = large.next - 1
    for _ in range(rounds):
        for side in (small, large):
            side.turn()
    for work in WORKS:
        one, many = (statistics.median(side.seconds[work]) for side in (small, large))
        mean_one, mean_many = (statistics.fmean(side.seconds[work]) for side in (small, large))
        asked = [max(side.requests[work]) for side in (small, large)]
        moved = [statistics.median(side.bytes[work]) for side in (small, large)]
        same = small.requests[work] == large.requests[work]
        table.add(
            f"{where}, {count:,} versions: {work}",
            many <= WANTED * one and same,
            f"{many * 1e3:.2f} ms against {one * 1e3:.2f}: {many / one:.2f} × (mean {mean_many / mean_one:.2f} ×); "
            f"{'the same requests' if same else f'requests {asked[1]} against {asked[0]} at most'}, "
            f"{moved[1]:,.0f} bytes against {moved[0]:,.0f}",
            seconds=[one, many],
            mean_seconds=[mean_one, mean_many],
            requests=asked,
            bytes=moved,
        )
    largest = [max(side.roots) for side in (small, large)]
    table.add(
        f"{where}: the root, at most {ROOT:,} bytes",
        largest[1] <= ROOT,
        f"{min(large.roots):,} to {largest[1]:,} bytes; {largest[0]:,} at most with {SMALL} versions",
        bytes=largest,
    )


def names(table: Table, side: Side) -> None:
    """What branches and tags add to the root."""
    seen = swap.must_read(side.reader.store)
    plain = len(roots.encode(seen.root))
    more = {f"experiments/lr-3e-5/seed-{i:04}": secrets.token_hex(32) for i in range(BRANCHES)}
    each = (len(roots.encode(replace(seen.root, branches={**seen.root.branches, **more}))) - plain) / BRANCHES
    table.add(
        f"a branch, at most {BRANCH} bytes of the root",
        each <= BRANCH,
        f"{each:.0f} bytes each, of {BRANCHES:,} with names of 30 characters",
        bytes=each,
    )
    transaction = key.Transaction(seen.root.sequence)
    page = encode_tags({f"step-{i:06}": secrets.token_hex(32) for i in range(TAGS - 1)}, {})
    root = seen.root.next(tags=Shelf(side.reader.store, None).put(transaction, "page", page))
    side.reader.store.swap(key.ROOT, roots.encode(root), seen.etag)
    began = time.perf_counter()
    side.writer.tag("step-last")
    seconds = time.perf_counter() - began
    assert len(side.writer.tags()) == TAGS
    root = side.writer.refresh()
    added = len(roots.encode(root)) - len(roots.encode(replace(root, tags=None)))
    table.add(
        f"{TAGS:,} tags: the root grows by a page's key",
        added <= 200,
        f"{added} bytes; the page has {len(page):,}, and one more tag took {seconds * 1e3:.0f} ms",
        bytes=added,
        page=len(page),
    )


class Counted:
    """A store that counts what is read, by kind."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.read: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, **more: Any) -> Any:
        self.read[name.partition("/")[0]] += 1
        return self._inner.get(name, **more)


def collecting(url: str, rounds: int = 3) -> dict[str, Any]:
    """A dry run of gc(), in parts; to be called in a fresh process."""
    repository = weightvc.open(url, cache=None)
    store: Any = Counted(repository.store)
    before = peak()
    best = {"look": 1e9, "mark": 1e9, "run": 1e9}
    for _ in range(rounds):
        store.read.clear()
        began = time.perf_counter()
        found = collect.run(Shelf(store, None), dry_run=True)
        best["run"] = min(best["run"], time.perf_counter() - began)
        kinds = dict(store.read)
    taken = peak() - before
    with collect.collector_paused():
        for _ in range(rounds):
            began = time.perf_counter()
            sight = collect.look(store)
            best["look"] = min(best["look"], time.perf_counter() - began)
            root, shelf = swap.must_read(store).root, Shelf(store, None)
            began = time.perf_counter()
            collect.mark(shelf, root, sight, grace=3600)
            best["mark"] = min(best["mark"], time.perf_counter() - began)
    return {"objects": found.listed.objects.total(), "memory": taken, "read": kinds, "seconds": best}


def peak() -> int:
    """Bytes that this process has had at most."""
    if memory.STATUS.exists():
        # Not ru_maxrss, which on Linux begins with what the parent held when it made this process.
        return memory.status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def collection(table: Table, small: Side, large: Side) -> None:
    """What gc costs."""

    def child(side: Side) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, __file__, "--collect", side.url], check=True, stdout=subprocess.PIPE, text=True
        )
        return dict(json.loads(done.stdout))

    few, many = child(small), child(large)
    objects, seconds = many["objects"], many["seconds"]
    rate = {what: objects / took for what, took in seconds.items()}
    table.add(
        f"gc marks {MARKED:,} objects a second",
        rate["mark"] >= MARKED,
        f"{rate['mark']:,.0f}, of {objects:,}; it lists {rate['look']:,.0f}, and a whole run is {rate['run']:,.0f}",
        **many,
    )
    read = ", ".join(f"{count} {kind}" for kind, count in sorted(many["read"].items()))
    table.add("gc reads root, segments and pages only", not {*many["read"]} - {"root", "segment", "page"}, read)
    each = (many["memory"] - few["memory"]) / (objects - few["objects"])
    table.add("memory of gc by objects", each > 0, f"{each:,.0f} bytes an object", bytes=each)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100_000, help="in a local directory; 0: leave that out")
    parser.add_argument("--s3-versions", type=int, default=10_000, help="in SeaweedFS; 0: leave that out")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--collect", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collect:
        print(json.dumps(collecting(arguments.collect)))
        return
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def side(name: str, url: str, options: dict[str, Any], count: int) -> Side:
            (place / name).mkdir()
            return Side(url, options, count, place / name)

        if arguments.versions:
            small = side("small", str(place / "short"), {}, SMALL)
            large = side("large", str(place / "long"), {}, arguments.versions)
            compare(table, "local", small, large, arguments.rounds)
            collection(table, small, large)
            names(table, large)
        if arguments.s3_versions:
            from tests.kit.seaweed import Seaweed

            with Seaweed() as server:
                one, many = server.place(), server.place()
                small = side("s3-small", one.url, one.options, SMALL)
                large = side("s3-large", many.url, many.options, arguments.s3_versions)
                compare(table, "S3", small, large, arguments.rounds)
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}\n\n{table}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
