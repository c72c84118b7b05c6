"""The header of a safetensors file: a strict reader, and a writer that matches the safetensors library.

A file is 8 bytes of little-endian header length, the header (JSON, padded with spaces), then the data.
The header maps each tensor's name to its dtype, shape and data_offsets (relative to the data), and
optionally `__metadata__` to a map of strings. The tensors cover the data without holes or overlaps.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, count, islice
from operator import eq, itemgetter, not_
from typing import Any

from weightvc.errors import BadFile, BadTensor
from weightvc.objects import dtypes
from weightvc.objects.tensor import INFO
from weightvc.sources.base import TensorInfo

MAX_HEADER = 100_000_000
"""Bytes a header may have; the reference implementation has the same limit."""

METADATA = "__metadata__"

_MAX_DEPTH = 8
_MAX_COUNT = 2**63 - 1
_FIRST_READ = 1 << 16
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}":')

Entry = tuple[str, str, tuple[int, ...], int, int]
"""A tensor of a file: name, dtype, shape, and its bytes [begin, end) from the start of the file."""
Sorted = tuple[list[TensorInfo], list[int], list[int]]
"""Tensors by name; where in the file each begins; and which of them do not begin where the one before ends."""


_MANY = 1000
_KEPT = 1 << 19
"""Tensors of headers that are remembered, about."""


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What precedes the data (8 length bytes and the raw header), tensors in file order, the metadata."""

    prefix: bytes
    tensors: list[Entry]
    metadata: dict[str, str] | None
    _sorted: dict[str, Sorted] = field(default_factory=dict, repr=False)

    def sorted(self, component: str) -> Sorted:
        """The tensors by name, as those of a component; made once, since the next commit wants them again."""
        made = self._sorted.get(component)
        if made is None:
            found = sorted(self.tensors)
            rows = ((component, name, dtype, shape, end - begin) for name, dtype, shape, begin, end in found)
            begins = list(map(itemgetter(3), found))
            follows = map(eq, map(itemgetter(4), found), islice(begins, 1, None))
            breaks = list(compress(count(1), map(not_, follows)))
            made = self._sorted[component] = list(map(INFO, rows)), begins, breaks
        return made


_known: dict[tuple[int, bytes], Header] = {}
"""The last headers of many tensors, by the size of their files and what precedes the data there."""


def read_header(read_at: Callable[[int, int], bytes], size: int, where: str = "the file") -> Header:
    """Read and check the header of a file of `size` bytes; `read_at(start, stop)` gives bytes of it.

    `where` names the file in errors. Raises BadFile, or BadTensor for a dtype that is not known.
    """
    start = read_at(0, min(size, _FIRST_READ))
    if len(start) < 8:
        raise BadFile(f"{where}: {size} bytes are too few for a safetensors file: write the file again")
    length = int.from_bytes(start[:8], "little")
    end = 8 + length
    if length > MAX_HEADER or end > size:
        # Only now: 80 02 00 ... is also an honest length.
        if start.startswith(b"PK\x03\x04") or start[:1] == b"\x80":
            raise BadFile(
                f"{where}: this is a torch.save file (zip or pickle) under a safetensors name; it is never "
                "loaded as one: convert it with safetensors.torch.save_file"
            )
        raise BadFile(
            f"{where}: says that its header has {length} bytes, of at most {MAX_HEADER} allowed and "
            f"{size - 8} present: cut short, or not a safetensors file"
        )
    prefix = start[:end] if end <= len(start) else start + read_at(len(start), end)
    # A trainer commits the same header step after step: what was checked once is not checked again.
    known = _known.get((size, prefix))
    if known is not None:
        return known
    with collector_paused():
        tensors, metadata = parse(prefix[8:], where)
        header = Header(prefix, _checked(tensors, end, size, where), metadata)
    if len(header.tensors) >= _MANY:
        _known[size, prefix] = header
        while len(_known) > 2 and sum(len(one.tensors) for one in list(_known.values())) > _KEPT:
            # Of a list: another thread may be at it.
            _known.pop(next(iter(list(_known)), (0, b"")), None)
    return header


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from scanning what is being built: half of the time for 150,000 tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse(raw: bytes, where: str = "the header") -> tuple[dict[str, Any], dict[str, str] | None]:
    """Parse the header's JSON into tensor entries by name, not yet checked, and the metadata.

    Raises BadFile.
    """
    if not raw.startswith(b"{"):
        raise BadFile(f"{where}: the header does not start with '{{': not a safetensors file")
    entries = strict_json(raw, where)
    if METADATA not in entries:
        return entries, None
    metadata = entries.pop(METADATA)
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise BadFile(f"{where}: {METADATA} must map strings to strings: write the file again")
    return entries, metadata


def strict_json(raw: bytes, where: str) -> Any:
    """json.loads for untrusted bytes: bounded in stack and time, no repeated keys, no lone surrogates.

    Raises BadFile.
    """
    structure = _structure(raw)
    _check_depth(structure.replace(b":", b""), where)
    # Converting a long number takes quadratic time, where the interpreter's own limit is off.
    integer = None if 0 < sys.get_int_max_str_digits() <= 5000 else _short_int
    # Only an escape can bring a lone surrogate in: UTF-8 has none.
    escaped = b"\\u" in raw
    try:
        if not escaped:
            with suppress(ValueError):
                value = json.loads(raw.decode(), parse_constant=_no_constant, parse_int=integer)
                # Every key has a colon. If as many are there as were kept, none stood twice, and no hook has to look.
                if structure.count(b":") == _keys(value):
                    return value
        hook = _unique_valid_keys if escaped else _unique_keys
        return json.loads(raw.decode(), object_pairs_hook=hook, parse_constant=_no_constant, parse_int=integer)
    except (ValueError, RecursionError) as error:
        # Python's own words for it advise to lift its limit.
        reason = "a number of thousands of digits" if "set_int_max_str_digits" in str(error) else error
        raise BadFile(f"{where}: malformed JSON ({reason}): write the file again") from None


def _structure(raw: bytes) -> bytes:
    """The brackets and colons of JSON that are not inside of strings."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes side by side change nothing about what is inside of strings, be they of one or of two.
    return b"".join(raw.translate(None, _NOT_STRUCTURE).replace(b'""', b"").split(b'"')[::2])


def _keys(value: Any) -> int:
    """The keys of an object and of the objects that it maps to; not of those inside of them."""
    if type(value) is not dict:
        return 0
    return len(value) + sum(len(inner) for inner in value.values() if type(inner) is dict)


def _check_depth(brackets: bytes, where: str) -> None:
    # What remains of the brackets shrinks by a level a round.
    for _ in range(_MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise BadFile(f"{where}: malformed JSON: brackets do not match, or nest over {_MAX_DEPTH} levels deep")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return result


def _unique_valid_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, value in pairs:
        for text in (key, value):
            if type(text) is str:
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"{shown(text)} has half of a surrogate pair") from None
    return _unique_keys(pairs)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _short_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _checked(entries: dict[str, Any], data: int, size: int, where: str) -> list[Entry]:
    """Check every entry and that together they cover [data, size) exactly."""
    if (quick := _in_columns(entries, data, size)) is not None:
        return quick
    tensors: list[Entry] = []
    widths = dtypes.BITS
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            total = widths[dtype]
            for extent in shape:
                if type(extent) is not int or extent < 0:
                    raise TypeError
                total *= extent
                if total > _MAX_COUNT:
                    raise OverflowError
            if not (type(begin) is int and type(end) is int and 0 <= begin <= end and type(shape) is list):
                raise TypeError
        except OverflowError:
            raise BadFile(f"{where}: tensor {shown(name)} has a shape too large to exist") from None
        except (KeyError, TypeError, ValueError):
            raise _bad_entry(name, entry, where) from None
        if (end - begin) * 8 != total:
            raise BadFile(
                f"{where}: tensor {shown(name)} ({dtype}, {shape!s:.200}) needs {total / 8:g} bytes, "
                f"but its data_offsets {[begin, end]} give it {end - begin}: write the file again"
            )
        tensors.append((name, dtype, tuple(shape), data + begin, data + end))
    tensors.sort(key=lambda tensor: tensor[3:])
    reached = data
    for name, _, _, begin, end in tensors:
        if begin != reached:
            fault = "overlaps the one before it" if begin < reached else "leaves a hole before it"
            raise BadFile(f"{where}: tensor {shown(name)} {fault} at byte {min(begin, reached)}: write it again")
        reached = end
    if reached != size:
        raise BadFile(
            f"{where}: its tensors end at byte {reached}, the file at {size}: cut short, or bytes were added"
        )
    return tensors


def _in_columns(entries: dict[str, Any], data: int, size: int) -> list[Entry] | None:
    """What _checked() gives, if there is no fault and the entries are in the order of their data; else None.

    There may be hundreds of thousands of tensors: types are checked a column at a time, and each shape once.
    """
    try:
        rows = entries.values()
        shapes, offsets = [row["shape"] for row in rows], [row["data_offsets"] for row in rows]
        if not {*map(type, shapes), *map(type, offsets)} <= {list} or not {*map(len, offsets)} <= {2}:
            return None
        bounds = list(chain.from_iterable(offsets))
        if not {*map(type, chain.from_iterable(shapes)), *map(type, bounds)} <= {int}:
            return None
        kinds = list(zip([row["dtype"] for row in rows], map(tuple, shapes), strict=True))
        known = {kind: (*kind, _size(*kind)) for kind in set(kinds)}
    except (KeyError, TypeError, OverflowError):
        return None
    forms = [known[kind] for kind in kinds]
    borders = list(accumulate([form[2] for form in forms], initial=0))
    if bounds[::2] != borders[:-1] or bounds[1::2] != borders[1:] or data + borders[-1] != size:
        return None
    return [
        (name, dtype, shape, data + begin, data + begin + nbytes)
        for name, (dtype, shape, nbytes), begin in zip(entries, forms, borders, strict=False)
    ]


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises KeyError, OverflowError or TypeError for one that _checked() has to look at."""
    total = dtypes.BITS[dtype]
    for extent in shape:
        total *= extent
        if not 0 <= total <= _MAX_COUNT:
            raise OverflowError
    if total % 8:
        raise TypeError
    return total // 8


def _bad_entry(name: str, entry: Any, where: str) -> BadFile | BadTensor:
    if type(entry) is dict and type(entry.get("dtype")) is str:
        try:
            dtypes.bits(entry["dtype"])
        except BadTensor as error:
            return BadTensor(f"{where}: tensor {shown(name)}: {error}")
    return BadFile(
        f"{where}: tensor {shown(name)} must have a dtype, a shape of whole numbers from 0, and two "
        "data_offsets in order: write the file again"
    )


def shown(name: str) -> str:
    """A tensor's name for a message: quoted, on one line, of bounded length."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}... ({len(name)} characters)"


def order(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """`tensors` as the safetensors library orders a file: wider dtypes first, then by name."""
    rank = {dtype: -index for index, dtype in enumerate(dtypes.BITS)}
    return sorted(tensors, key=lambda tensor: (rank[tensor.dtype], tensor.name))


def build_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None) -> bytes:
    """The prefix of a file with `tensors` in order(): its 8 length bytes and its padded header.

    The same bytes as the safetensors library writes (with the metadata's keys sorted). Components are not
    looked at. Raises BadTensor for a dtype that is not known, a repeated name, or one that the format
    reserves.
    """
    entries: dict[str, Any] = {}
    if metadata is not None:
        entries[METADATA] = dict(sorted(metadata.items()))
    for tensor in tensors:
        dtypes.bits(tensor.dtype)
    begin = 0
    for tensor in order(tensors):
        if tensor.name == METADATA or tensor.name in entries:
            raise BadTensor(
                f"tensor {shown(tensor.name)} cannot be in a safetensors file: the name is taken; rename it"
            )
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
