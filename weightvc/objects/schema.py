"""The schema: names, dtypes and shapes of a tree's tensors, and where their chunks fall.

Tensors stand in byte order of (component, name). A tensor's canonical bytes are cut into chunks of 4 MiB, the
last one shorter; an empty tensor has none. Chunks are numbered through the whole tree in that order, which is
also the order of the canonical stream: all tensors' bytes, one after the other.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, compress, groupby, islice, pairwise, repeat
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Any, Final

from weightvc.errors import BadTensor, Corrupt, Unsupported
from weightvc.objects import dtypes, expect, frame
from weightvc.objects.tensor import INFO, TensorInfo

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Numbers = numpy.typing.NDArray[numpy.int64]

CHUNK: Final = 4 << 20
"""Bytes of a chunk: the unit of digests, fixed in format 1."""
_ESCAPED: Final = b'"\\' + bytes(range(32))
"""What does not stand in a JSON text as it is."""


class Schema:
    """Tensors in order, with prefix sums over chunks and bytes."""

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        # There may be hundreds of thousands: what is done here a tensor is done in C.
        self.tensors: list[TensorInfo] = list(tensors)
        alone = len({*map(itemgetter(0), self.tensors)}) < 2
        keys: list[Any] = list(map(itemgetter(1) if alone else itemgetter(0, 1), self.tensors))
        if not all(map(lt, keys, islice(keys, 1, None))):
            wrong = next(i for i, (one, two) in enumerate(pairwise(keys), 1) if two <= one)
            raise BadTensor(f"tensor {self.tensors[wrong].name[:200]!r} stands twice, or out of order")
        sizes = list(map(itemgetter(4), self.tensors))
        self._single = bool(sizes) and min(sizes) > 0 and max(sizes) <= CHUNK
        """Whether each tensor is one chunk."""
        counts = repeat(1, len(sizes)) if self._single else (-(-size // CHUNK) for size in sizes)
        self.first_chunk: list[int] = list(accumulate(counts, initial=0))
        """The first chunk of each tensor, and the number of chunks."""
        self.offset: list[int] = list(accumulate(sizes, initial=0))
        """Where each tensor begins in the canonical stream, and its end."""
        self.chunks = self.first_chunk[-1]
        self.nbytes = self.offset[-1]

    @cached_property
    def positions(self) -> list[int]:
        """Where each chunk begins in the canonical stream, and its end.

        Made when it is first asked for: a forged shape can stand for any number of chunks, and is only found out
        once a tree compares their number with the digests that are there.
        """
        if self._single:
            return self.offset
        made = [start for a, b in pairwise(self.offset) for start in range(a, b, CHUNK)]
        made.append(self.offset[-1])
        return made

    @cached_property
    def dtype_runs(self) -> list[tuple[int, str]]:
        """Where chunks of another dtype than that of the chunk before begin: the first chunk, and the dtype."""
        if len({dtype for dtype, _ in self.kinds[0]}) == 1:
            return [(0, self.tensors[0].dtype)] if self.chunks else []
        held = compress(zip(map(itemgetter(2), self.tensors), self.first_chunk), map(itemgetter(4), self.tensors))
        return [(next(run)[1], dtype) for dtype, run in groupby(held, key=itemgetter(0))]

    @cached_property
    def lane_borders(self) -> list[int]:
        """The chunks whose lane is not as wide as that of the chunk before."""
        lanes = ((first, dtypes.lane(dtype)) for first, dtype in self.dtype_runs)
        return [next(run)[0] for _, run in groupby(lanes, key=itemgetter(1))]

    @cached_property
    def kinds(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
        """The distinct pairs of dtype and shape, and which of them each tensor has: few stand behind many tensors."""
        keys = list(map(itemgetter(2, 3), self.tensors))
        number = {kind: i for i, kind in enumerate(dict.fromkeys(keys))}
        return list(number), list(map(number.__getitem__, keys))

    @cached_property
    def index(self) -> dict[tuple[str, str], int]:
        """Position of each tensor by (component, name)."""
        return {(tensor.component, tensor.name): i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors."""
        kinds, numbers = self.kinds
        return sum(dtypes.count(kinds[number][1]) * times for number, times in Counter(numbers).items())

    def tensor_of(self, chunk: int) -> int:
        """The tensor that `chunk` belongs to."""
        return bisect_right(self.first_chunk, chunk) - 1

    def chunks_of(self, tensor: int) -> int:
        """The number of chunks of a tensor."""
        return self.first_chunk[tensor + 1] - self.first_chunk[tensor]

    def span(self, chunk: int) -> tuple[int, int, int]:
        """(tensor, start, stop): the bytes of `chunk` inside its tensor."""
        tensor = self.tensor_of(chunk)
        start = (chunk - self.first_chunk[tensor]) * CHUNK
        return tensor, start, min(start + CHUNK, self.tensors[tensor].nbytes)

    def chunk_at(self, tensor: int, byte: int) -> int:
        """The chunk that holds a byte of a tensor."""
        return self.first_chunk[tensor] + byte // CHUNK

    def whole(self, low: int, high: int) -> tuple[int, int] | None:
        """The tensors [first, last) that chunks [low, high) are exactly, or None."""
        first, last = self.tensor_of(low), self.tensor_of(high - 1) + 1
        exact = self.offset[first] == self.positions[low] and self.offset[last] == self.positions[high]
        return (first, last) if exact else None

    def position(self, chunk: int) -> int:
        """Where `chunk` begins in the canonical stream; `chunks` itself gives the stream's end."""
        return self.positions[chunk]

    def sizes(self, low: int, high: int) -> list[int]:
        """Bytes of each chunk in [low, high)."""
        return [b - a for a, b in pairwise(self.positions[low : high + 1])]

    @cached_property
    def edges(self) -> "Numbers":
        """`positions` as an array, made when it is first asked for as they are."""
        import numpy

        return numpy.array(self.positions, numpy.int64)

    def cuts(self, low: int, high: int) -> "Numbers":
        """Where chunks [low, high) begin, and where the last ends, counted from the first."""
        cuts: Numbers = self.edges[low : high + 1] - self.edges[low]
        return cuts

    @cached_property
    def alike(self) -> "list[Numbers]":
        """The tensors of each of `kinds`."""
        import numpy

        kinds, numbers = self.kinds
        order = numpy.argsort(numpy.array(numbers, numpy.int64), kind="stable")
        ends = numpy.cumsum(numpy.bincount(numbers, minlength=len(kinds)))
        return numpy.split(order, ends[:-1]) if kinds else []

    @cached_property
    def canonical(self) -> bytes:
        """Canonical JSON of the schema; its blake3 is the schema's digest."""
        # As frame.canonical() would make it, but that few distinct ends stand behind many tensors.
        kinds, numbers = self.kinds
        column, components, at = list(map(itemgetter(0), self.tensors)), [], 0
        try:
            ends = ['",' + frame.canonical([dtype, list(shape)])[1:].decode() + ',["' for dtype, shape in kinds]
            for component in dict.fromkeys(column):
                part = slice(at, at := bisect_right(column, component, at))
                texts = [""] * (2 * (part.stop - part.start))
                texts[::2] = _escaped([tensor[1] for tensor in self.tensors[part]])
                texts[1::2] = [ends[number] for number in numbers[part]]
                rows = "".join(texts).removesuffix(',["')
                components.append(f'{frame.canonical(component).decode()}:[["{rows}]')
            return f'{{"components":{{{",".join(components)}}},"weightvc":"schema 1"}}'.encode()
        except UnicodeEncodeError:
            raise BadTensor("a tensor name holds a lone surrogate, which UTF-8 cannot say: rename it") from None

    @cached_property
    def digest(self) -> str:
        """blake3 of the canonical JSON, hex."""
        return frame.digest(self.canonical).hex()

    def encode(self) -> bytes:
        """The schema as a stored object."""
        return frame.encode(frame.SCHEMA, {"schema": self.canonical.decode()})


def _escaped(names: list[str]) -> list[str]:
    """Names as they stand in JSON, without the quotes around them."""
    text = "".join(names).encode()
    if len(text.translate(None, _ESCAPED)) == len(text):
        return names
    # JSON has no raw newline inside a text.
    quoted = json.dumps(names, ensure_ascii=False, separators=("\n", ":"))[1:-1].split("\n")
    return [name[1:-1] for name in quoted]


def decode(data: frame.Buffer, what: str) -> Schema:
    """Read a stored schema. Raises Corrupt naming `what`; Unsupported for a dtype that is not known here.

    Takes memory by the size of `data` alone, whatever the shapes say: Tree compares them with its digests.
    """
    head, _ = frame.decode(frame.SCHEMA, data, what)
    try:
        text = expect.text(head["schema"], "the schema")
        fields = expect.parse(text)
        frame.check_type(fields["weightvc"], "schema 1", what)
        components = sorted(expect.mapping(fields["components"], "components").items())
        schema = Schema([tensor for component, rows in components for tensor in _tensors(component, rows, what)])
        schema.__dict__["canonical"] = text.encode()
    except Unsupported:
        raise
    except expect.MALFORMED as error:
        raise Corrupt(f"{what} is corrupt: {error}") from None
    return schema


def _tensors(component: str, rows: Any, what: str) -> list[TensorInfo]:
    """The tensors of one component. Types are checked a column at a time: there may be hundreds of thousands."""
    names = [name for name, _, _ in expect.array(rows, "a component")]
    kinds = [row[1] for row in rows]
    extents = [row[2] for row in rows]
    "".join([expect.text(component, "a component"), *names]).encode()
    listed, counted = {*map(type, rows), *map(type, extents)}, {*map(type, chain.from_iterable(extents))}
    if not listed <= {list} or not counted <= {int}:
        raise ValueError("a tensor is not [name, dtype, shape]")
    for dtype in {*kinds}:
        if dtype not in dtypes.BITS:
            raise Unsupported(f"{what} has tensors of dtype {dtype!r:.100}, not known here: upgrade weightvc")
    shapes = list(map(tuple, extents))
    keys = list(zip(kinds, shapes, strict=True))
    sizes = {key: dtypes.nbytes(*key) for key in dict.fromkeys(keys)}
    return list(map(INFO, zip(repeat(component), names, kinds, shapes, map(sizes.__getitem__, keys))))
