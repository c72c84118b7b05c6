"""Parts of the way by themselves: the scan, the first call, small tensors, bases, hashing.

scan     an unchanged pair, against a loop that does nothing but read both of its models
start    encode and decode in a fresh process: compiled code not there, then there; the call after
small    20,000 tensors of 64 elements against one that is as large: through the kernels as a commit and a reader
         drive them (blocks joined, digests taken), then through Repository.commit and load
base     whole models by themselves: share of raw, and speed
hash     encoding and blake3, one after the other over the model, or block by block
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from inputs import Files
from pairs import Bytes, Pair, Span
from schemes import Small

import weightvc_kernels as wk
from weightvc.objects import frame
from weightvc.sources.header import collector_paused
from weightvc_kernels import context

EACH = 64
"""Elements of a small tensor."""


@dataclass(slots=True)
class Spent:
    """Median seconds by the clock, and of the processors, which other work on the machine disturbs less."""

    wall: float
    cpu: float


def interleaved(rounds: int, works: dict[str, Callable[[], Any]]) -> dict[str, Spent]:
    """Run all works in every round, after one that does not count."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if turn:
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Spent(*map(statistics.median, zip(*seconds))) for name, seconds in spent.items()}


def scan(pair: Pair, pool: ThreadPoolExecutor, rounds: int) -> dict[str, Any]:
    """GB/s of both models together."""
    from numba import njit

    @njit(nogil=True)  # type: ignore[misc]
    def both(a: Any, b: Any) -> Any:
        bits = a[0] ^ b[0]
        for i in range(a.size):
            bits |= a[i] ^ b[i]
        return bits

    stats = [context.sample(span.of(pair.old), span.of(pair.new), span.dtype) for span in pair.blocks[:8]]
    dtype, lane = pair.blocks[0].dtype, pair.blocks[0].lane
    model = context.Model(context.tables(sum(stats[1:], stats[0]), dtype), dtype)
    same = pair.old.copy()
    runs = [
        [
            (span.of(pair.old), span.of(same))
            for span in run
            if span.dtype == dtype and (span.stop - span.start) % 8 == 0
        ]
        for run in pair.runs
    ]

    def over(work: Callable[[list[tuple[Bytes, Bytes]]], Any]) -> Callable[[], Any]:
        return lambda: list(pool.map(work, runs))

    def each(work: Callable[[Bytes, Bytes], Any]) -> Callable[[], Any]:
        return over(lambda run: [work(*pair) for pair in run])

    seconds = interleaved(
        rounds,
        {
            "plain read of two arrays": each(lambda a, b: both(a.view("u8"), b.view("u8"))),
            "context codec": over(lambda run: context.encode_batch(model, run)),
            "first codec": each(lambda a, b: wk.encode_patch(a, b, lane)),
            "sample of one in 16": over(lambda run: context.sample_batch(run, dtype)),
        },
    )
    total = 2 * sum(old.size for run in runs for old, _ in run)
    return {name: asdict(spent) | {"nbytes": total} for name, spent in seconds.items()}


def hashing(pair: Pair, pool: ThreadPoolExecutor, rounds: int) -> dict[str, Any]:
    """Seconds for a commit's and a reader's arithmetic, by order."""
    coder, target = Small(pair, pool), pair.old.copy()
    _, coded = coder.encode()
    tables, payloads = coded
    models = {dtype: context.Model(data, dtype) for dtype, data in tables.items()}
    piece = 256 << 10
    spans = [span for span in pair.blocks if span.dtype in models]
    jobs = [(span, payload) for span, payload in zip(pair.blocks, payloads) if span.dtype in models]

    def put(span: Span) -> Any:
        return context.encode_patch(models[span.dtype], span.of(pair.old), span.of(pair.new))

    def sum_of(model: Bytes, span: Span) -> Any:
        return frame.digests(span.of(model).data, span.cuts)

    def take(job: tuple[Span, tuple[int, bytes]]) -> None:
        span, (codec, payload) = job
        if codec in (wk.SPARSE, wk.DENSE, wk.PLANES, wk.RAW):
            wk.decode_patch_into(codec, payload, span.of(target), span.lane)
        else:
            context.decode_into(models[span.dtype], payload, span.of(target))

    def by_pieces(span: Span) -> None:
        model, old, new, digest = models[span.dtype], span.of(pair.old), span.of(pair.new), blake3()
        for at in range(0, new.size, piece):
            context.encode_patch(model, old[at : at + piece], new[at : at + piece])
            digest.update(new[at : at + piece].data)
        digest.digest()

    def every(*works: Callable[[Any], Any], over: Sequence[Any] = spans) -> Callable[[], None]:
        def run() -> None:
            for work in works:
                list(pool.map(work, over))

        return run

    def new_sum(span: Span) -> Any:
        return sum_of(pair.new, span)

    def target_sum(job: tuple[Span, Any]) -> Any:
        return sum_of(target, job[0])

    seconds = interleaved(
        rounds,
        {
            "encode alone": every(put),
            "blake3 alone": every(new_sum),
            "encode all, then blake3": every(put, new_sum),
            "each block: encode, blake3": every(lambda span: (put(span), new_sum(span))),
            "each block: blake3, encode": every(lambda span: (new_sum(span), put(span))),
            "each 256 KiB: encode, blake3": every(by_pieces),
            "copy of the old model": lambda: np.copyto(target, pair.old),
            "decode alone": every(take, over=jobs),
            "copy of the old model again": lambda: np.copyto(target, pair.old),
            "decode all, then blake3": every(take, target_sum, over=jobs),
            "copy of the old model once more": lambda: np.copyto(target, pair.old),
            "each block: decode, blake3": every(lambda job: (take(job), target_sum(job)), over=jobs),
        },
    )
    return {name: asdict(spent) for name, spent in seconds.items()}


def base(files: Files, least: int, pool: ThreadPoolExecutor, rounds: int) -> dict[str, Any]:
    """Share of raw, and seconds of encode_whole and decode_whole of the newer one, repeated up to `least` bytes."""
    pair = Pair(files.title, files.new, files.new, least)
    coded = list(pool.map(lambda span: wk.encode_whole(span.of(pair.new), span.lane), pair.blocks))

    def decode() -> list[Bytes]:
        return list(
            pool.map(lambda span, it: wk.decode_whole(*it, span.stop - span.start, span.lane), pair.blocks, coded)
        )

    for span, data in zip(pair.blocks, decode()):
        assert np.array_equal(data, span.of(pair.new)), files.title
    seconds = interleaved(
        rounds,
        {
            "encode": lambda: list(pool.map(lambda span: wk.encode_whole(span.of(pair.new), span.lane), pair.blocks)),
            "decode": decode,
        },
    )
    share = sum(len(payload) for _, payload in coded) / pair.nbytes
    return {
        "pair": files.title,
        "kind": files.kind,
        "share": share,
        "nbytes": pair.nbytes,
        **{what: asdict(spent) for what, spent in seconds.items()},
    }


def small_tensors(many: int, pool: ThreadPoolExecutor, rounds: int) -> dict[str, Any]:
    """Seconds of `many` small tensors, and of one as large, by the clock and of the processors."""
    import torch
    from safetensors.torch import save_file

    import weightvc

    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(0, 0.02, many * EACH).astype("f4")).bfloat16()
    bits = values.view(torch.int16).numpy().copy()
    bits[rng.random(bits.size) < 0.01] ^= 1
    changed = torch.from_numpy(bits).view(torch.bfloat16)

    def cut(state: Any, count: int) -> dict[str, Any]:
        return {f"layers.{i:06}.weight": part.clone() for i, part in enumerate(state.chunk(count))}

    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs: dict[int, Pair] = {}
        works: dict[str, Callable[[], Any]] = {}
        for count in (1, many):
            for state, tensors in (("old", values), ("new", changed)):
                save_file(cut(tensors, count), folder / f"{count}-{state}")
            pairs[count] = Pair("small", folder / f"{count}-old", folder / f"{count}-new")
            encode, decode = _driven(pairs[count], pool)
            works |= {f"encode {count}": encode, f"decode {count}": decode}
        # A pass of the collector over all that torch has made takes 20 times as long as a round, and falls in some.
        with collector_paused():
            seconds = interleaved(rounds, works)
        for what in ("encode", "decode"):
            out[f"kernels: {what}"] = _one_and_many(seconds[f"{what} 1"], seconds[f"{what} {many}"])
        steps: dict[str, list[tuple[float, float]]] = {}
        for turn in range(rounds + 1):
            for count in (1, many):
                place = folder / f"{turn}-{count}"
                repository = weightvc.init(place / "repository", cache=place / "cache")
                old, new = cut(values, count), cut(changed, count)
                # What making them leaves to Python's collector is not what is asked.
                gc.collect()
                work: dict[str, Callable[[], Any]] = {
                    "first commit": lambda r=repository, state=old: r.commit(state),
                    "next commit": lambda r=repository, state=new: r.commit(state),
                    "load": lambda r=repository: r.load(framework="numpy"),
                }
                for what, run in work.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    run()
                    if turn:
                        spent = time.perf_counter() - wall, time.process_time() - cpu
                        steps.setdefault(f"{what} {count}", []).append(spent)
        for what in ("first commit", "next commit", "load"):
            medians = [Spent(*map(statistics.median, zip(*steps[f"{what} {count}"]))) for count in (1, many)]
            out[f"Repository: {what}"] = _one_and_many(*medians)
    return {"tensors": many, "each": EACH, "works": out}


def _one_and_many(one: Spent, many: Spent) -> dict[str, float]:
    return {"one": one.wall, "many": many.wall, "one_cpu": one.cpu, "many_cpu": many.cpu}


def _driven(pair: Pair, pool: ThreadPoolExecutor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Encoding as a commit does it, from a buffer a tensor, and decoding as a reader does: with a digest a tensor."""
    news = [span.of(pair.new).copy() for span in pair.tensors]
    starts = [span.start for span in pair.tensors]

    def pieces(span: Span) -> list[Bytes]:
        """What lies in a block, of each tensor."""
        low, high = np.searchsorted(starts, [span.start, span.stop - 1], "right") - 1
        cut = [(i, span.start - starts[i], span.stop - starts[i]) for i in range(low, high + 1)]
        return [news[i][max(a, 0) : b] for i, a, b in cut]

    jobs = [(span, pieces(span)) for span in pair.blocks]
    coder, model = Small(pair, pool), pair.old.copy()
    held: list[Any] = [coder.encode()[1]]

    def encode() -> Any:
        for span, parts in jobs:
            data = bytes(parts[0]) if len(parts) == 1 else b"".join(part.data for part in parts)
            frame.digests(data, span.cuts)
        held[0] = coder.encode()[1]

    def check(data: Bytes, span: Span) -> None:
        frame.digests(data.data, span.cuts)

    def decode() -> Any:
        np.copyto(model, pair.old)
        coder.decode(held[0], model, check)

    return encode, decode


_FRESH = """
import json, sys, time
begin = time.perf_counter()
import numpy as np
import weightvc_kernels as wk
from weightvc_kernels import context
spent = {"import weightvc_kernels": time.perf_counter() - begin}
rng = np.random.default_rng(0)
old = (rng.normal(0, 0.02, 1 << 21).astype("f4").view("u4") >> 16).astype("u2")
new = old.copy()
new[rng.random(old.size) < 0.005] ^= 1
for turn in ("first", "second"):
    begin = time.perf_counter()
    model = context.Model(context.tables(context.sample(old, new, "BF16"), "BF16"), "BF16")
    payload = context.encode(model, old, new)
    spent[f"{turn} encode"] = time.perf_counter() - begin
    target = old.copy()
    begin = time.perf_counter()
    context.decode_into(model, payload, target)
    spent[f"{turn} decode"] = time.perf_counter() - begin
    assert np.array_equal(target, new)
print(json.dumps(spent))
"""


def start(cold: bool = True) -> dict[str, dict[str, float]]:
    """Seconds of the first and the second call in a process, 4 MiB of bf16; with nothing compiled too, if `cold`."""
    out = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("nothing compiled", "compiled code cached")[not cold :]:
            environment = os.environ | ({"NUMBA_CACHE_DIR": cache} if cold else {})
            done = subprocess.run([sys.executable, "-c", _FRESH], env=environment, capture_output=True, check=True)
            out[state] = json.loads(done.stdout)
    return out
