"""What a scheme makes of a pair: bytes, speeds, memory; every decoded byte is compared."""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Files, say
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


def measured(
    files: Files,
    pool: ThreadPoolExecutor,
    threads: int,
    repeat: int,
    names: list[str],
    least: int = 0,
    join: int = 0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """One pair's figures, as JSON has them. `least` bytes of a model and `join` tensors are as Pair and joined say;
    what is joined is written to `folder`. Without rounds bytes alone."""
    if join and folder:
        old, new = (joined(path, least, join, folder) for path in (files.old, files.new))
        files, least = replace(files, old=old, new=new), 0
    say(files.title)
    pair = Pair(files.title, files.old, files.new, least)
    floor = bound(pair)
    rows = _rows(pair, pool, threads, repeat, names)
    if repeat:
        for name, peak in peaks(files.title, files.old, files.new, least, threads, names).items():
            rows[name].peak = peak
    return {
        "pair": files.title,
        "kind": files.kind,
        "chain": files.chain,
        "step": files.step,
        "threads": threads,
        "tensors": len(pair.infos),
        "copies": pair.copies,
        "nbytes": pair.nbytes,
        "elements": pair.elements,
        "changed": floor.changed,
        "bound": floor.nbytes if has_bound(floor) else None,
        "left_out": floor.left_out,
        "schemes": {name: asdict(row) for name, row in rows.items()},
    }


def has_bound(floor: Bound) -> bool:
    """Whether the bound stands for nearly all of the changes."""
    return floor.nbytes > 0 and floor.left_out < floor.changed // 10


def _rows(pair: Pair, pool: ThreadPoolExecutor, threads: int, repeat: int, names: list[str]) -> dict[str, Row]:
    """Run every scheme, check what it decodes, and time it `repeat` times."""
    schemes = {name: SCHEMES[name](pair, pool) for name in names}
    target = pair.old.copy()
    rows: dict[str, Row] = {}
    times: dict[str, dict[str, list[float]]] = {}
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
            if repeat:
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
