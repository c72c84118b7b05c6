"""Pairs of checkpoints: the context codec, the first codec and other people's schemes, in bytes and speed.

python benchmarks/codec.py OLD.safetensors NEW.safetensors [OLD NEW …]

--threads N     threads that share the blocks, or the tensors (2)
--repeat N      rounds; in each every scheme runs once, so that all meet the same machine; medians count (7)
--block MIB     largest block in MiB (4)
--stride N      of so many 4 KiB units the context codec samples one for its tables (16)
--json PATH     write the figures there too

    context     blocks, tables included; decode in place
    first       SPARSE, DENSE, PLANES or RAW, whatever is smallest; decode in place
    xor+zstd    per tensor, all bytes XORed, zstd level 1; decode in place
    gap+xor     per tensor, 16-bit gaps and XORs of changed elements, zstd level 1 each; decode in place
    coo         32-bit positions and new values, uncompressed
    patch-from  per tensor, the new one by zstd level 3 with the old one for a dictionary; decode to a copy

The bound is the entropy of positions and steps by tensor and exponent, with the counts themselves unpaid for. All
times are of the encoding from two models in memory, finding the changes included. 16-bit tensors are what is meant:
others go to the context codec and the bound leaves them out.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

import weightvc_kernels as wk
from weightvc.objects.dtypes import lane as lane_of
from weightvc_kernels import context

Bytes = npt.NDArray[np.uint8]
EXPONENT = {"BF16": 7, "F16": 10}


def tensors(path: Path) -> Iterator[tuple[str, str, Bytes]]:
    """Name, dtype and bytes of every tensor of a trusted safetensors file."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry["dtype"], data[start + begin : start + end].copy()


class Pair:
    """Two checkpoints, by tensor and by block."""

    def __init__(self, old: Path, new: Path, size: int) -> None:
        before = {name: (dtype, data) for name, dtype, data in tensors(old)}
        self.dtypes, self.old, self.new = [], [], []
        for name, dtype, data in tensors(new):
            assert before[name][0] == dtype
            self.dtypes.append(dtype)
            self.old.append(before[name][1])
            self.new.append(data)
        self.nbytes = sum(data.size for data in self.new)
        self.blocks = list(self._blocks(size))

    def _blocks(self, size: int) -> Iterator[tuple[str, Bytes, Bytes]]:
        """Large tensors in blocks of `size` bytes, small ones of a dtype together in one."""
        waiting: dict[str, list[tuple[Bytes, Bytes]]] = {}
        for dtype, old, new in zip(self.dtypes, self.old, self.new):
            if old.size >= size // 2:
                for at in range(0, old.size, size):
                    yield dtype, old[at : at + size].copy(), new[at : at + size].copy()
                continue
            held = waiting.setdefault(dtype, [])
            if sum(a.size for a, _ in held) + old.size > size:
                yield dtype, *(np.concatenate(side) for side in zip(*held))
                held.clear()
            held.append((old, new))
        for dtype, held in waiting.items():
            yield dtype, *(np.concatenate(side) for side in zip(*held))


def entropy(counts: npt.NDArray[Any]) -> float:
    """Bits of a sequence with these counts."""
    counts = counts[counts > 0].astype(float)
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if counts.size else 0.0


def bound(pair: Pair) -> tuple[int, float]:
    """Changed elements, and bytes that no lossless patch by exponent and tensor goes below, of 16-bit floats."""
    changed, bits = 0, 0.0
    for dtype, old, new in zip(pair.dtypes, pair.old, pair.new):
        width = lane_of(dtype)
        x, y = old.view(f"u{width}"), new.view(f"u{width}")
        at = np.flatnonzero(x != y)
        changed += at.size
        if dtype not in EXPONENT or not at.size:
            continue
        exponent = (x >> EXPONENT[dtype]) & (0x7FFF >> EXPONENT[dtype])
        there = exponent[at]
        all_of, some_of = np.bincount(exponent), np.bincount(there)
        steps = wk.ulp_steps(x[at], y[at], 2)
        for e in np.flatnonzero(some_of):
            bits += entropy(np.array([some_of[e], all_of[e] - some_of[e]]))
            bits += entropy(np.unique(steps[there == e], return_counts=True)[1])
    return changed, bits / 8


class Scheme:
    """One way to code a pair: encode gives bytes stored and something that decode turns old into new by."""

    def __init__(self, pair: Pair, pool: ThreadPoolExecutor, stride: int) -> None:
        self.pair, self.pool, self.stride = pair, pool, stride

    def encode(self) -> tuple[int, Any]:
        raise NotImplementedError

    def targets(self) -> list[Bytes]:
        """Copies to decode into, made outside the clock."""
        return [old.copy() for old in self.pair.old]

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        raise NotImplementedError

    def wanted(self) -> list[Bytes]:
        return self.pair.new

    def every(self, work: Callable[..., Any], *columns: Any) -> list[Any]:
        return list(self.pool.map(work, *columns))


class Blocked(Scheme):
    def targets(self) -> list[Bytes]:
        return [old.copy() for _, old, _ in self.pair.blocks]

    def wanted(self) -> list[Bytes]:
        return [new for _, _, new in self.pair.blocks]


class Context(Blocked):
    def encode(self) -> tuple[int, Any]:
        blocks = [block for block in self.pair.blocks if context.supports(block[0])]
        counts = self.every(
            lambda block: (block[0], context.sample(block[1], block[2], block[0], self.stride)), blocks
        )
        stats: dict[str, context.Stats] = {}
        for dtype, part in counts:
            stats[dtype] = stats[dtype] + part if dtype in stats else part
        tables = {dtype: context.tables(total, dtype) for dtype, total in stats.items()}
        models = {dtype: context.Model(data, dtype) for dtype, data in tables.items()}

        def one(block: tuple[str, Bytes, Bytes]) -> Any:
            dtype, old, new = block
            if dtype in models:
                return 0, context.encode(models[dtype], old, new)
            return wk.encode_patch(old, new, lane_of(dtype))[:2]

        payloads = self.every(one, self.pair.blocks)
        size = sum(map(len, tables.values())) + sum(len(payload) for _, payload in payloads)
        return size, (tables, payloads)

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        tables, payloads = coded
        models = {dtype: context.Model(data, dtype) for dtype, data in tables.items()}

        def one(block: tuple[str, Bytes, Bytes], payload: tuple[int, bytes], target: Bytes) -> None:
            if payload[0]:
                wk.decode_patch_into(*payload, target, lane_of(block[0]))
            else:
                context.decode_into(models[block[0]], payload[1], target)

        self.every(one, self.pair.blocks, payloads, targets)


class First(Blocked):
    def encode(self) -> tuple[int, Any]:
        coded = self.every(lambda block: wk.encode_patch(block[1], block[2], lane_of(block[0]))[:2], self.pair.blocks)
        return sum(len(payload) for _, payload in coded), coded

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        def one(block: tuple[str, Bytes, Bytes], payload: tuple[int, bytes], target: Bytes) -> None:
            wk.decode_patch_into(*payload, target, lane_of(block[0]))

        self.every(one, self.pair.blocks, coded, targets)


def squeeze(data: Any, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def expand(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


class Xor(Scheme):
    def encode(self) -> tuple[int, Any]:
        coded = self.every(lambda old, new: squeeze(np.bitwise_xor(old, new)), self.pair.old, self.pair.new)
        return sum(map(len, coded)), coded

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        def one(payload: bytes, target: Bytes) -> None:
            target ^= np.frombuffer(expand(payload), np.uint8)

        self.every(one, coded, targets)


class Gaps(Scheme):
    def encode(self) -> tuple[int, Any]:
        def one(dtype: str, old: Bytes, new: Bytes) -> tuple[bytes, bytes]:
            x, y = (side.view(f"u{lane_of(dtype)}") for side in (old, new))
            at = np.flatnonzero(x != y)
            gaps = np.diff(at, prepend=-1) - 1
            far = gaps // 65535
            # 65,535 stands for so many unchanged elements and no change.
            out = np.full(gaps.size + int(far.sum()), 65535, np.uint16)
            out[np.arange(gaps.size) + np.cumsum(far)] = gaps % 65535
            return squeeze(out), squeeze(x[at] ^ y[at])

        coded = self.every(one, self.pair.dtypes, self.pair.old, self.pair.new)
        return sum(len(a) + len(b) for a, b in coded), coded

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        def one(dtype: str, payload: tuple[bytes, bytes], target: Bytes) -> None:
            gaps = np.frombuffer(expand(payload[0]), np.uint16).astype(np.int64)
            real = gaps != 65535
            x = target.view(f"u{lane_of(dtype)}")
            x[np.cumsum(gaps + real)[real] - 1] ^= np.frombuffer(expand(payload[1]), x.dtype)

        self.every(one, self.pair.dtypes, coded, targets)


class Coo(Scheme):
    def encode(self) -> tuple[int, Any]:
        def one(dtype: str, old: Bytes, new: Bytes) -> tuple[Any, Any]:
            x, y = (side.view(f"u{lane_of(dtype)}") for side in (old, new))
            at = np.flatnonzero(x != y)
            return at.astype(np.uint32), y[at]

        coded = self.every(one, self.pair.dtypes, self.pair.old, self.pair.new)
        return sum(at.nbytes + values.nbytes for at, values in coded), coded

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        def one(payload: tuple[Any, Any], target: Bytes) -> None:
            target.view(payload[1].dtype)[payload[0]] = payload[1]

        self.every(one, coded, targets)


class PatchFrom(Scheme):
    def encode(self) -> tuple[int, Any]:
        def one(old: Bytes, new: Bytes) -> bytes:
            # What the command line's --patch-from does: a window over all of the old one, long matches.
            room = max(10, (old.size + new.size).bit_length())
            parameters = zstandard.ZstdCompressionParameters.from_level(
                3, source_size=new.size, window_log=min(27, room), enable_ldm=True, write_content_size=1
            )
            raw = zstandard.ZstdCompressionDict(old.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            return zstandard.ZstdCompressor(dict_data=raw, compression_params=parameters).compress(new)

        coded = self.every(one, self.pair.old, self.pair.new)
        return sum(map(len, coded)), coded

    def decode(self, coded: Any, targets: list[Bytes]) -> None:
        def one(payload: bytes, old: Bytes, target: Bytes) -> None:
            raw = zstandard.ZstdCompressionDict(old.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            decompressor = zstandard.ZstdDecompressor(dict_data=raw, max_window_size=1 << 30)
            target[:] = np.frombuffer(decompressor.decompress(payload), np.uint8)

        self.every(one, coded, self.pair.old, targets)


SCHEMES: dict[str, type[Scheme]] = {
    "context": Context,
    "first": First,
    "xor+zstd": Xor,
    "gap+xor": Gaps,
    "coo": Coo,
    "patch-from": PatchFrom,
}


def measure(pair: Pair, pool: ThreadPoolExecutor, repeat: int, stride: int) -> dict[str, dict[str, float]]:
    """Bytes and seconds of every scheme: medians, and ratios to xor+zstd taken round by round."""
    schemes = {name: kind(pair, pool, stride) for name, kind in SCHEMES.items()}
    sizes: dict[str, int] = {}
    times: dict[str, dict[str, list[float]]] = {name: {"encode": [], "decode": []} for name in schemes}
    for turn in range(repeat + 1):
        for name, scheme in schemes.items():
            if name == "patch-from" and turn > 1:
                continue
            start = time.perf_counter()
            sizes[name], coded = scheme.encode()
            middle = time.perf_counter()
            targets = scheme.targets()
            begin = time.perf_counter()
            scheme.decode(coded, targets)
            end = time.perf_counter()
            assert all(np.array_equal(a, b) for a, b in zip(targets, scheme.wanted())), f"{name}: decode differs"
            # The first round compiles, and warms the caches.
            if turn:
                times[name]["encode"].append(middle - start)
                times[name]["decode"].append(end - begin)
    out: dict[str, dict[str, float]] = {}
    for name, by in times.items():
        out[name] = {"bytes": sizes[name]}
        for what, seconds in by.items():
            out[name][what] = statistics.median(seconds)
            base = times["xor+zstd"][what]
            out[name][f"{what} × xor+zstd"] = statistics.median(b / s for b, s in zip(base, seconds))
    return out


def report(title: str, pair: Pair, rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Print one pair's table; what is in it, for JSON."""
    changed, least = bound(pair)
    elements = sum(data.size // lane_of(dtype) for dtype, data in zip(pair.dtypes, pair.new))
    print(
        f"\n{title}: {pair.nbytes / 1e6:.1f} MB, {changed} of {elements} elements changed ({changed / elements:.3%})"
    )
    print(f"| scheme | bytes | B/change | × bound | encode MB/s | × | decode MB/s | × |\n|{'---|' * 8}")
    print(f"| bound | {least:.0f} | {least / max(changed, 1):.3f} | 1 | | | | |")
    for name, row in rows.items():
        cells = [name, f"{row['bytes']}", f"{row['bytes'] / max(changed, 1):.3f}", f"{row['bytes'] / least:.3f}"]
        for what in ("encode", "decode"):
            cells += [f"{pair.nbytes / row[what] / 1e6:.0f}", f"{row[f'{what} × xor+zstd']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return {"pair": title, "nbytes": pair.nbytes, "changed": changed, "elements": elements, "bound": least, **rows}


def main() -> None:
    """Read the arguments and report on every pair."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--block", type=float, default=4, metavar="MIB")
    parser.add_argument("--stride", type=int, default=context.STRIDE)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len(args.checkpoints) % 2:
        parser.error("checkpoints come in pairs: OLD NEW")
    size = int(args.block * (1 << 20)) // 8 * 8
    results = []
    with ThreadPoolExecutor(args.threads) as pool:
        for old, new in zip(args.checkpoints[::2], args.checkpoints[1::2]):
            pair = Pair(old, new, size)
            rows = measure(pair, pool, args.repeat, args.stride)
            results.append(report(f"{old.parent.name}/{old.stem} → {new.stem}", pair, rows))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
