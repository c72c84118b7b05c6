"""Pairs of checkpoints: what weightvc's codecs make of them, beside the bound and what others use.

    python benchmarks/codec.py                                  real training steps, made here (inputs.py says how)
    python benchmarks/codec.py OLD.safetensors NEW.safetensors [OLD NEW …]
    python benchmarks/codec.py --pair-size 272 --join 16 …      as one model of so many MB, in so many tensors
    python benchmarks/codec.py --micro                          scan, start, small tensors, bases, hashing (micro.py)

Both models are in memory. Encoding finds the changes, and makes the tables where there are any; decoding turns a copy
of the old model into the new one in place (patch-from and arc_v3 make one anew). "Verified" decodes, and takes the
blake3 of the new bytes, 4 MiB each, as soon as a thread has decoded them: speed of both together, and how much of the
threads' time is blake3. Speeds are those of one model's bytes, medians of rounds in each of which every scheme runs
once, so that all meet the same machine; in brackets, multiples of xor+zstd's, taken round by round. Peak memory is
what a process of its own held beyond the two models, payloads included; beside it is the largest block, or tensor,
times the threads.

The bound is the entropy of positions and steps by tensor and old exponent (of fp8: by old byte), the counts
themselves unpaid for. A coder that adapts within a tensor can get below it. It leaves out elements of over 16 bits:
none is given where they are most of the changes.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import inputs
import numpy as np
from micro import micro
from pairs import Bound, Bytes, Pair, Span, bound, joined
from peaks import peaks
from schemes import BASE, SCHEMES, Scheme

from weightvc.objects import frame


@dataclass(slots=True)
class Row:
    """One scheme on one pair. Seconds are medians, multiples are of BASE's speed; None if not measured."""

    stored: int
    encode: float | None = None
    decode: float | None = None
    verified: float | None = None
    hashing: float | None = None
    """Share of blake3 in the threads' time of `verified`."""
    encode_multiple: float | None = None
    decode_multiple: float | None = None
    encode_cpu_multiple: float | None = None
    """By processor time, which other work on the machine disturbs less, and which idle threads cost nothing."""
    decode_cpu_multiple: float | None = None
    peak: int | None = None
    """Bytes."""
    unit: int = 0
    """Bytes of the largest span, times threads."""


class Clock:
    """Seconds that threads spend on digests, and in all."""

    def __init__(self) -> None:
        self.hashing = 0.0
        self._lock = threading.Lock()

    def __call__(self, data: Bytes, span: Span) -> None:
        start = time.perf_counter()
        frame.digests(data.data, span.cuts)
        spent = time.perf_counter() - start
        with self._lock:
            self.hashing += spent


class Timed:
    """Appends the seconds that a block took: wall clock's, and for what has such a list the processors'."""

    def __init__(self, times: dict[str, list[float]], what: str) -> None:
        self._times, self._what = times, what

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        for what, seconds in zip((self._what, f"{self._what}_cpu"), spent):
            if what in self._times:
                self._times[what].append(seconds)


def measure(pair: Pair, pool: ThreadPoolExecutor, threads: int, repeat: int, names: list[str]) -> dict[str, Row]:
    """Run every scheme, check what it decodes, and time it `repeat` times."""
    schemes = {name: SCHEMES[name](pair, pool) for name in names}
    target = pair.old.copy()
    rows: dict[str, Row] = {}
    times: dict[str, dict[str, list[float]]] = {}

    def nothing(data: Bytes, span: Span) -> None:
        pass

    for name, scheme in schemes.items():
        rows[name] = Row(0, unit=scheme.unit * threads)
        times[name] = {what: [] for what in ("encode", "decode", "verified", "hashing", "encode_cpu", "decode_cpu")}
    # The first round checks, compiles and imports, and is not timed.
    for turn in range(repeat + 1):
        for name, scheme in schemes.items():
            if scheme.once and turn != min(1, repeat):
                continue
            clock, times_of = Clock(), times[name] if turn else {what: [] for what in times[name]}
            with Timed(times_of, "encode"):
                rows[name].stored, coded = scheme.encode()
            np.copyto(target, pair.old)
            with Timed(times_of, "decode"):
                scheme.decode(coded, target, _nothing)
            np.copyto(target, pair.old)
            with Timed(times_of, "verified"):
                made = scheme.decode(coded, target, clock)
            times_of["hashing"].append(clock.hashing / (times_of["verified"][-1] * scheme.threads(threads)))
            _check(name, scheme, target, made)
            del coded, made
    for name, row in rows.items():
        for what, seconds in times[name].items():
            if seconds and hasattr(row, what):
                setattr(row, what, statistics.median(seconds))
        for what in ("encode", "decode", "encode_cpu", "decode_cpu"):
            base = times.get(BASE, {}).get(what, [])
            ratios = [b / s for b, s in zip(base, times[name][what]) if s]
            if ratios:
                setattr(row, f"{what}_multiple", statistics.median(ratios))
    return rows


def _nothing(data: Bytes, span: Span) -> None:
    pass


def _check(name: str, scheme: Scheme, target: Bytes, made: list[Bytes] | None) -> None:
    pieces = made if made is not None else [span.of(target) for span in scheme.spans]
    for span, data in zip(scheme.spans, pieces):
        if not np.array_equal(data, span.of(scheme.pair.new)):
            raise SystemExit(f"{name}: what it decodes differs from what it coded, at byte {span.start} of a model")


def table(pair: Pair, least: Bound, rows: dict[str, Row], threads: int) -> None:
    """Print one pair's table."""
    share = least.changed / max(pair.elements, 1)
    copies = f" in {pair.copies} copies" if pair.copies > 1 else ""
    print(f"\n**{pair.title}**{copies}: {pair.nbytes / 1e6:.1f} MB, {least.changed:,} of {pair.elements:,} ", end="")
    print(f"elements changed ({share:.2%})\n")
    heads = ["scheme", "bytes", "B/change", "× bound", "encode MB/s", "decode MB/s", "verified MB/s", "blake3"]
    print(f"| {' | '.join([*heads, 'peak MB', 'unit × threads'])} |\n|{'---|' * 10}")
    per = max(least.changed, 1)
    known = has_bound(least)
    if known:
        left = f" ({least.left_out:,} wider elements left out)" if least.left_out else ""
        print(f"| bound{left} | {least.nbytes:,.0f} | {least.nbytes / per:.3f} | 1 | | | | | | |")

    def speed(seconds: float | None, multiple: float | None = None) -> str:
        if seconds is None:
            return ""
        return f"{pair.nbytes / seconds / 1e6:,.0f}" + ("" if multiple is None else f" ({multiple:.2f})")

    for name, row in rows.items():
        cells = [f"**{name}**" if SCHEMES[name].ours else name, f"{row.stored:,}", f"{row.stored / per:.3f}"]
        cells.append(f"{row.stored / least.nbytes:.3f}" if known else "")
        cells += [speed(row.encode, row.encode_multiple), speed(row.decode, row.decode_multiple), speed(row.verified)]
        cells.append("" if row.hashing is None else f"{row.hashing:.0%}")
        cells.append("" if row.peak is None else f"{row.peak / 1e6:.1f}")
        print(f"| {' | '.join([*cells, f'{row.unit / 1e6:.1f}'])} |")
    for name in rows:
        if SCHEMES[name].note:
            print(f"\n{name}: {SCHEMES[name].note}.")
    sys.stdout.flush()


def has_bound(least: Bound) -> bool:
    """Whether the bound stands for nearly all of the changes."""
    return least.nbytes > 0 and least.left_out < least.changed // 10


def goals(results: list[dict[str, Any]]) -> None:
    """Print how "small" does against the bound and against the others, pair by pair."""
    print("\n**small against the others**: its bytes as a share of theirs, its speeds as multiples of ", end="")
    print(f"{BASE}'s, by the clock / by processor time\n")
    heads = ["pair", "changed", "× bound", "arc_v3's bytes", "encode × arc_v3", "the best other's bytes"]
    print(f"| {' | '.join([*heads, 'encode ×', 'decode ×'])} |")
    print(f"|{'---|' * 8}")
    for result in results:
        rows = result["schemes"]
        if "small" not in rows:
            continue
        small, arc = rows["small"], rows.get("arc_v3")
        others = {name: row["stored"] for name, row in rows.items() if not SCHEMES[name].ours}
        cells = [result["pair"], f"{result['changed'] / result['elements']:.2%}"]
        cells.append(f"{small['stored'] / result['bound']:.3f}" if result["bound"] else "")
        cells.append(f"{small['stored'] / arc['stored']:.2f}" if arc else "")
        cells.append(f"{arc['encode'] / small['encode']:.0f}" if arc and arc["encode"] else "")
        best = min(others, key=lambda name: others[name], default=None)
        cells.append(f"{small['stored'] / others[best]:.2f} ({best})" if best else "")
        for what in ("encode", "decode"):
            pair = small[f"{what}_multiple"], small[f"{what}_cpu_multiple"]
            cells.append("" if None in pair else "{:.2f} / {:.2f}".format(*pair))
        print(f"| {' | '.join(cells)} |")


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


def main() -> None:
    """Read the arguments, measure every pair, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="where checkpoints are made, and kept")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="those to run (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7, help="rounds that are timed; 0: bytes and memory only")
    parser.add_argument("--pair-size", type=float, default=0, metavar="MB", help="repeat tensors up to that")
    parser.add_argument(
        "--join", type=int, default=0, metavar="N", help="join tensors, and cut them into N of one size"
    )
    parser.add_argument("--micro", action="store_true", help="measure parts instead, see micro.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    args = parser.parse_args()
    if len(args.checkpoints) % 2:
        parser.error("checkpoints come in pairs: OLD NEW")
    names = [name for name in args.schemes.split(",") if name]
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"no scheme {unknown[0]!r}: there are {', '.join(SCHEMES)}")
    if "arc_v3" in names:
        try:
            import fireworks_delta_compression  # noqa: F401
        except ImportError:
            names.remove("arc_v3")
            print("arc_v3 is left out: pip install weightvc[bench] has it", file=sys.stderr)
    paths = args.checkpoints
    chosen = [(f"{old.parent.name}/{old.stem} → {new.stem}", old, new) for old, new in zip(paths[::2], paths[1::2])]
    if not chosen:
        chosen = inputs.make(args.inputs or Path(tempfile.gettempdir()) / "weightvc-benchmark")
    folder = tempfile.TemporaryDirectory()
    if args.join:
        least = int(args.pair_size * 1e6)
        for i, (title, *both) in enumerate(chosen):
            place = Path(folder.name, str(i))
            place.mkdir()
            chosen[i] = (f"{title}, joined", *(joined(path, least, args.join, place) for path in both))
        args.pair_size = 0
    about = machine() | {"threads": args.threads, "rounds": args.repeat}
    print(f"{', '.join(f'{key} {value}' for key, value in about.items())}")
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = {"machine": about}
    with ThreadPoolExecutor(args.threads) as pool:
        if args.micro:
            found["micro"] = micro(chosen, pool, args.threads, args.repeat)
        else:
            for title, old, new in chosen:
                pair = Pair(title, old, new, int(args.pair_size * 1e6))
                least = bound(pair)
                rows = measure(pair, pool, args.threads, args.repeat, names)
                for name, peak in peaks(title, old, new, int(args.pair_size * 1e6), args.threads, names).items():
                    rows[name].peak = peak
                table(pair, least, rows, args.threads)
                results.append(
                    {
                        "pair": title,
                        "copies": pair.copies,
                        "nbytes": pair.nbytes,
                        "elements": pair.elements,
                        "changed": least.changed,
                        "bound": least.nbytes if has_bound(least) else None,
                        "schemes": {name: asdict(row) for name, row in rows.items()},
                    }
                )
            goals(results)
            found["pairs"] = results
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
