"""Patches and their parts: what weightvc's codecs take and how fast they are, beside the bound and what others use.

    python benchmarks/codec.py --write docs/benchmarks.md       all that has a place in that document, put there
    python benchmarks/codec.py --only patches,scan              print of it some sections
    python benchmarks/codec.py OLD.safetensors NEW.safetensors [OLD NEW …]
    python benchmarks/codec.py --pair-size 272 --join 16 OLD NEW …      as one model of so many MB, in so many tensors

Checkpoints are made here by real training steps (inputs.py says how); those of a chain are measured too, if there is
one. Both models are in memory. Encoding finds the changes, and makes the tables where there are any; decoding turns a
copy of the old model into the new one in place (patch-from and arc_v3 make one anew). "Verified" decodes, and takes
the blake3 of the new bytes, 4 MiB each, as soon as a thread has decoded them: speed of both together, and how much of
the threads' time is blake3. Speeds are those of one model's bytes, medians of rounds in each of which every scheme
runs once, so that all meet the same machine; in brackets, multiples of xor+zstd's, taken round by round. Peak memory
is what a process of its own held beyond the two models, payloads included.

The bound is the entropy of positions and steps by tensor and old exponent (of fp8: by old byte), the counts
themselves unpaid for. A coder that adapts within a tensor can get below it. It leaves out elements of over 16 bits:
none is given where they are most of the changes.
"""

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import goals
import inputs
import micro
import tables
from commits import commits
from inputs import Files, say
from pairs import Pair
from rows import measured
from schemes import BASE, SCHEMES

SHARES = (0.005, 0.01)
"""How much changes, about, in the pairs that are timed."""


@dataclass
class Bench:
    """What is measured, and how: each section of docs/benchmarks.md that is measured is a method."""

    made: list[Files]
    chain: list[Files]
    names: list[str]
    pool: ThreadPoolExecutor
    threads: int
    rounds: int
    quick: bool
    folder: Path

    @property
    def nbytes(self) -> int:
        """Of the models that are timed: more than a processor's own cache, mostly."""
        return 4_000_000 if self.quick else 272_000_000

    @cached_property
    def timed(self) -> list[Files]:
        """The pairs in which about SHARES change: of the first chain, or of all that is made."""
        found = [files for files in self.chain if files.chain == self.chain[0].chain]
        found = found or [files for files in self.made if files.kind == "bf16"]
        changed = {files: max(inputs.share(files), 1e-9) for files in found}
        return [min(found, key=lambda files: abs(math.log(changed[files] / share))) for share in SHARES]

    def patches(self) -> Any:
        """Bytes of every pair."""
        return [measured(files, self.pool, self.threads, 0, self.names) for files in self.chain + self.made]

    def speed(self) -> Any:
        """Everything, of blocks that are whole as in larger models."""
        return [
            measured(files, self.pool, self.threads, self.rounds, self.names, self.nbytes, 16, self.folder)
            for files in self.timed
        ]

    def blocks(self) -> Any:
        """Speeds with the tensors as they are, most of which are small."""
        names = [name for name in ("small", "fast", BASE) if name in self.names]
        found = [measured(files, self.pool, self.threads, self.rounds, names, self.nbytes) for files in self.timed]
        with ThreadPoolExecutor(1) as one:
            return [*found, measured(self.timed[0], one, 1, self.rounds, names, self.nbytes)]

    def scan(self) -> Any:
        return micro.scan(self._pair, self.pool, self.rounds)

    def bases(self) -> Any:
        """Of each kind of export, and of the chain."""
        first: dict[tuple[str, str], Files] = {}
        for files in self.chain[:1] + self.made:
            first.setdefault((files.chain, files.kind), files)
        least = self.nbytes // 2
        return [micro.base(files, least, self.pool, self.rounds) for files in first.values()]

    def hashing(self) -> Any:
        return micro.hashing(self._pair, self.pool, self.rounds)

    def start(self) -> Any:
        return micro.start(cold=not self.quick)

    def small(self) -> Any:
        return micro.small_tensors(200 if self.quick else 20_000, self.pool, self.rounds)

    def commits(self) -> Any:
        """Of the chains, or of the first way in which checkpoints are made."""
        return commits(self.chain or inputs.onward(self.made))

    @property
    def _pair(self) -> Pair:
        return Pair(self.timed[0].title, self.timed[0].old, self.timed[0].new, self.nbytes)


SECTIONS: dict[str, Callable[[Bench], Any]] = {
    "patches": Bench.patches,
    "speed": Bench.speed,
    "blocks": Bench.blocks,
    "scan": Bench.scan,
    "bases": Bench.bases,
    "hashing": Bench.hashing,
    "start": Bench.start,
    "small": Bench.small,
    "commits": Bench.commits,
}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import platform
    from importlib.metadata import version

    names = ("numpy", "zstandard", "numba", "blake3")
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": found[1] if found else platform.machine(),
        "avx512": "avx512bw" in Path("/proc/cpuinfo").read_text(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        **{name: version(name) for name in names},
    }


def report(bench: Bench, only: list[str], found: dict[str, Any]) -> dict[str, str]:
    """Measure sections, into `found`, and give their text. Goals only where nothing is left out."""
    for name in only:
        say(f"# {name}")
        found[name] = SECTIONS[name](bench)
    texts = {name: getattr(tables, name)(found[name]) for name in only}
    if len(only) < len(SECTIONS):
        return texts
    wanted = goals.goals(found)
    found["goals"] = goals.figures(wanted)
    return {"machine": tables.machine(found["machine"]), "goals": goals.report(wanted), **texts}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path, help="measure these pairs instead")
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAMES", help="sections (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the sections into this document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="where checkpoints are made, and kept")
    parser.add_argument(
        "--chain",
        type=Path,
        metavar="DIR",
        default=os.environ.get("WEIGHTVC_CHAIN"),
        help="real checkpoints, as tests/kit/chain.py says (default: WEIGHTVC_CHAIN, or none)",
    )
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="those to run (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, help="rounds that are timed (9); 0, of pairs: bytes only")
    parser.add_argument("--quick", action="store_true", help="with tiny inputs: to see whether all works")
    parser.add_argument(
        "--pair-size", type=float, default=0, metavar="MB", help="of pairs: repeat tensors up to that"
    )
    parser.add_argument(
        "--join", type=int, default=0, metavar="N", help="of pairs: join tensors, and cut them into N of one size"
    )
    args = parser.parse_args()
    if len(args.checkpoints) % 2:
        parser.error("checkpoints come in pairs: OLD NEW")
    args.names = [name for name in args.schemes.split(",") if name]
    if unknown := [name for name in args.names if name not in SCHEMES]:
        parser.error(f"no scheme {unknown[0]!r}: there are {', '.join(SCHEMES)}")
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(SECTIONS)}")
    if args.repeat is None:
        args.repeat = 1 if args.quick else 9
    if "arc_v3" in args.names:
        try:
            import fireworks_delta_compression  # noqa: F401
        except ImportError:
            args.names.remove("arc_v3")
            say("arc_v3 is left out: pip install 'weightvc[bench]' has it")
    return args


def main() -> None:
    """Measure, print the tables, and write them and the JSON."""
    args = arguments()
    found: dict[str, Any] = {"machine": machine() | {"threads": args.threads, "rounds": args.repeat}}
    size = int(args.pair_size * 1e6)
    with ThreadPoolExecutor(args.threads) as pool, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.checkpoints:
            found["pairs"] = []
            for old, new in zip(args.checkpoints[::2], args.checkpoints[1::2]):
                files = Files(f"{old.parent.name}/{old.stem} → {new.stem}", old, new)
                one = measured(files, pool, args.threads, args.repeat, args.names, size, args.join, folder)
                found["pairs"].append(one)
                print(f"{tables.speed([one])}\n", flush=True)
            print(tables.patches(found["pairs"]))
        else:
            if args.write:
                whole = ["machine", "goals"] if len(args.only) == len(SECTIONS) else []
                tables.check(args.write, whole + args.only)
            default = Path(tempfile.gettempdir(), "weightvc-benchmark-quick" if args.quick else "weightvc-benchmark")
            made = inputs.make(args.inputs or default, inputs.QUICK if args.quick else inputs.FULL)
            chain = inputs.chain(args.chain, folder / "chain", 2 if args.quick else 10) if args.chain else []
            bench = Bench(made, chain, args.names, pool, args.threads, args.repeat, args.quick, folder)
            texts = report(bench, args.only, found)
            for name, text in texts.items():
                print(f"<!-- {name} -->\n{text}\n")
            if args.write:
                tables.write(args.write, texts)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    say("done")


if __name__ == "__main__":
    main()
