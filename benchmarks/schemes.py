"""Ways to code a pair: what weightvc has, and what others use. SCHEMES lists them; to add one is one entry there.

A scheme codes a pair that is in memory, and decodes onto a copy of its old model. All share the threads of one pool.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from pairs import Bytes, Pair, Span

import weightvc_kernels as wk
from weightvc.protocol import parallel
from weightvc.protocol.coder import Coder
from weightvc_kernels import context

Check = Callable[[Bytes, Span], None]
"""Called with the new bytes of a tensor or a block as soon as they are decoded."""


class Scheme:
    """One way to code a pair."""

    ours = False
    once = False
    """Too slow to be run more than once."""
    note = ""

    def __init__(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        self.pair = pair
        self._pool = pool

    @property
    def spans(self) -> list[Span]:
        """What is coded each by itself."""
        return self.pair.tensors

    @property
    def unit(self) -> int:
        """Bytes of the largest span: a thread holds one."""
        return max((span.stop - span.start for span in self.spans), default=0)

    def encode(self) -> tuple[int, Any]:
        """Bytes stored, and what decode takes."""
        coded = self.every(self.put, self.spans)
        return sum(size for size, _ in coded), [payload for _, payload in coded]

    def decode(self, coded: Any, model: Bytes, check: Check) -> list[Bytes] | None:
        """Turn `model` from old to new, or leave it and return every span's new bytes."""

        def one(span: Span, payload: Any) -> Bytes:
            made = self.take(span, payload, span.of(model))
            check(made, span)
            return made

        made = self.every(one, self.spans, coded)
        return None if all(np.shares_memory(a, model) for a in made[:1]) else made

    def put(self, span: Span) -> tuple[int, Any]:
        """Code one span: bytes, and what take takes."""
        raise NotImplementedError

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        """The span's new bytes: `target` itself, which holds the old ones, or others."""
        raise NotImplementedError

    def threads(self, pool: int) -> int:
        """How many of the pool's threads call its checks at a time."""
        return pool

    def every(self, work: Callable[..., Any], *columns: Any) -> list[Any]:
        """work of every row, in the pool."""
        return list(self._pool.map(work, *columns))

    def _bytes(self, span: Span) -> tuple[Bytes, Bytes]:
        return span.of(self.pair.old), span.of(self.pair.new)

    def _lanes(self, span: Span) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return span.of(self.pair.old).view(f"u{span.lane}"), span.of(self.pair.new).view(f"u{span.lane}")


class Blocks(Scheme):
    """Each block by itself, by functions of weightvc_kernels that take and give codec, payload and lane."""

    ours = True
    put_block: Callable[..., tuple[int, bytes, Any]]
    take_block: Callable[..., None]

    @property
    def spans(self) -> list[Span]:
        return self.pair.blocks

    def put(self, span: Span) -> tuple[int, Any]:
        codec, payload, _ = type(self).put_block(*self._bytes(span), span.lane)
        return len(payload), (codec, payload)

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        type(self).take_block(*payload, target, span.lane)
        return target


class Small(Blocks):
    """As a commit does: the context codec, with tables from a sample, and the first codecs where they are smaller.
    Blocks are coded and decoded in runs."""

    learns = True
    """Whether tables are made from a sample. A scheme with another coder is a subclass of three lines."""

    def coder(self) -> Coder:
        """What chooses a codec for each block, as a commit has it."""
        return Coder()

    def encode(self) -> tuple[int, Any]:
        coder, stride = self.coder(), context.stride_of(self.pair.nbytes)

        def sample(run: list[Span]) -> tuple[str, context.Stats | None]:
            dtype = run[0].dtype
            known = context.supports(dtype)
            return dtype, context.sample_batch([*map(self._bytes, run)], dtype, stride) if known else None

        def some(run: list[Span]) -> list[tuple[int, bytes]]:
            coded = coder.patches(run[0].dtype, run[0].lane, [*map(self._bytes, run)])
            return [(codec, payload) for codec, payload, _ in coded]

        if self.learns:
            coder.learn(parallel.ordered(self._pool, sample, self.pair.runs, 64))
        coded = [*chain.from_iterable(self.every(some, self.pair.runs))]
        size = sum(map(len, coder.tables.values())) + sum(len(payload) for _, payload in coded)
        return size, (coder.tables, coded)

    def decode(self, coded: Any, model: Bytes, check: Check) -> list[Bytes] | None:
        models = {dtype: context.Model(tables, dtype) for dtype, tables in coded[0].items()}
        payloads, at = [], 0
        for run in self.pair.runs:
            payloads.append(coded[1][at : at + len(run)])
            at += len(run)

        def some(run: list[Span], coded: list[tuple[int, bytes]]) -> None:
            with_model = models.get(run[0].dtype)
            jobs = [(wk.payloads.Payload(*each, with_model), span.of(model)) for each, span in zip(coded, run)]
            wk.payloads.apply(jobs, run[0].lane)
            for span in run:
                check(span.of(model), span)

        self.every(some, self.pair.runs, payloads)
        return None


class Fast(Small):
    """As a commit with codec="fast" does: RICE, and the first codecs where they are much smaller."""

    learns = False

    def coder(self) -> Coder:
        return Coder("fast")


class First(Blocks):
    """SPARSE, DENSE, PLANES or RAW, whichever is smallest."""

    put_block = wk.encode_patch
    take_block = wk.decode_patch_into


class Xor(Scheme):
    """All bytes XORed, zstd level 1."""

    def put(self, span: Span) -> tuple[int, Any]:
        payload = _squeeze(np.bitwise_xor(*self._bytes(span)))
        return len(payload), payload

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        target ^= np.frombuffer(_expand(payload), np.uint8)
        return target


class PatchFrom(Scheme):
    """The new tensor by zstd level 3 with the old one for a dictionary, as the command line's --patch-from."""

    once = True

    def put(self, span: Span) -> tuple[int, Any]:
        from backports import zstd

        old, new = self._bytes(span)
        # A window over all of the old one, and long matches.
        parameter = zstd.CompressionParameter
        options = {
            parameter.compression_level: 3,
            parameter.enable_long_distance_matching: 1,
            parameter.window_log: min(27, max(10, (old.size + new.size).bit_length())),
        }
        payload = zstd.compress(new.data, options=options, zstd_dict=_prefix(old))
        return len(payload), payload

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        from backports import zstd

        options = {zstd.DecompressionParameter.window_log_max: 27}
        return np.frombuffer(zstd.decompress(payload, options=options, zstd_dict=_prefix(target)), np.uint8)


class Coo(Scheme):
    """32-bit positions and new values, uncompressed."""

    def put(self, span: Span) -> tuple[int, Any]:
        x, y = self._lanes(span)
        at = np.flatnonzero(x != y)
        payload = at.astype(np.uint32), y[at]
        return payload[0].nbytes + payload[1].nbytes, payload

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        target.view(payload[1].dtype)[payload[0]] = payload[1]
        return target


class Gaps(Scheme):
    """16-bit gaps; then XORs or new values of the changed elements; with zstd level 1 each, or as they are."""

    xor = squeezed = False

    def put(self, span: Span) -> tuple[int, Any]:
        x, y = self._lanes(span)
        at = np.flatnonzero(x != y)
        gaps = np.diff(at, prepend=-1) - 1
        far = gaps // 65535
        # 65,535 stands for so many unchanged elements and no change.
        out = np.full(gaps.size + int(far.sum()), 65535, np.uint16)
        out[np.arange(gaps.size) + np.cumsum(far)] = gaps % 65535
        values = x[at] ^ y[at] if self.xor else y[at]
        if not self.squeezed:
            return out.nbytes + values.nbytes, (out.tobytes(), values.tobytes())
        payload = _squeeze(out), _squeeze(values)
        return sum(map(len, payload)), payload

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        first, second = map(_expand, payload) if self.squeezed else payload
        gaps = np.frombuffer(first, np.uint16).astype(np.int64)
        real = gaps != 65535
        at = np.cumsum(gaps + real)[real] - 1
        x = target.view(f"u{span.lane}")
        values = np.frombuffer(second, x.dtype)
        if self.xor:
            x[at] ^= values
        else:
            x[at] = values
        return target


class GapsXor(Gaps):
    """16-bit gaps and XORs of the changed elements, zstd level 1 each."""

    xor = squeezed = True


class GapsNew(Gaps):
    """16-bit gaps and the new values, zstd level 1 each."""

    squeezed = True


class Arc(Scheme):
    """fireworks-delta-compression's arc_v3: a tensor after the other, since each takes threads of its own."""

    once = True
    note = "one round; keeps the smallest of what is ready in time, so bytes vary; checks Adler-32 as it decodes"

    def __init__(self, pair: Pair, pool: ThreadPoolExecutor) -> None:
        super().__init__(pair, pool)
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it only reads what it decompressed
        import fireworks_delta_compression
        import torch

        from weightvc.sources.memory import TORCH_DTYPES

        self._arc = fireworks_delta_compression
        self._torch = torch
        names = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}
        self._as = {
            span: (getattr(torch, names[span.dtype]), info.shape) for span, info in zip(pair.tensors, pair.infos)
        }

    def threads(self, pool: int) -> int:
        return 1

    def every(self, work: Callable[..., Any], *columns: Any) -> list[Any]:
        return list(map(work, *columns))

    def put(self, span: Span) -> tuple[int, Any]:
        old, new = (self._tensor(span, data) for data in self._bytes(span))
        payload, checksum = self._arc.delta_compress(src=old, dst=new, compression_format="arc_v3")
        return payload.numel() + len(checksum), (payload, checksum)

    def take(self, span: Span, payload: Any, target: Bytes) -> Bytes:
        # Its envelope is a pickle: decoded here is what was coded here, and nothing else.
        made = self._arc.delta_decompress(
            src=self._tensor(span, target),
            compressed_diff=payload[0],
            checksum=payload[1],
            compression_format="arc_v3",
        )
        data: Bytes = made.contiguous().reshape(-1).view(self._torch.uint8).numpy()
        return data

    def _tensor(self, span: Span, data: Bytes) -> Any:
        kind, shape = self._as[span]
        return self._torch.from_numpy(data).view(kind).reshape(shape)


def _squeeze(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _expand(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _prefix(data: Bytes) -> Any:
    """The old tensor to find matches in. (In a dictionary of zstandard's no long ones would be looked for.)"""
    from backports import zstd

    return zstd.ZstdDict(data.tobytes(), is_raw=True).as_prefix if data.size >= 8 else None


SCHEMES: dict[str, type[Scheme]] = {
    "small": Small,
    "fast": Fast,
    "first": First,
    "xor+zstd": Xor,
    "gap+xor+zstd": GapsXor,
    "gap+new+zstd": GapsNew,
    "gap+raw": Gaps,
    "coo": Coo,
    "patch-from": PatchFrom,
    "arc_v3": Arc,
}
"""Every scheme by the name that the tables give it, in their order. `ours` are held against the rest."""

BASE = "xor+zstd"
"""What speeds are given as multiples of."""
