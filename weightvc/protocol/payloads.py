"""Payloads: the bytes of a stream's blocks, from the manifest or from packs, of which nothing is fetched twice."""

import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol

from weightvc.errors import Corrupt
from weightvc.objects import frame
from weightvc.objects.frame import Buffer
from weightvc.objects.manifest import REF, Stream
from weightvc.pool import Pool
from weightvc.protocol.shelf import Shelf
from weightvc.protocol.spool import Reader, Spool

PIECE: Final = 8 << 20
"""Bytes of a base that are asked for at once, about: enough to keep a connection busy, and few enough for several."""
AHEAD: Final = 64 << 20
"""Bytes of a base that are asked for before they are wanted,"""
HELD: Final = 96 << 20
"""and those of it in memory, about: what has to wait longer goes to the spool."""


class Payloads(Protocol):
    """The bytes of a stream's blocks."""

    def block(self, block: int) -> Buffer:
        """One block's bytes."""
        ...


def _range(shelf: Shelf, stream: Stream, first: int, stop: int) -> Buffer:
    """The bytes of blocks [first, stop), which lie in one pack, by a ranged read of it."""
    size = stream.offsets[stop] - stream.offsets[first]
    if not size:
        return b""
    pack, at = stream.pack_of(first)
    name = stream.packs[pack][0]
    if shelf.cache is not None and (held := shelf.cache.get(name)) is not None:
        return memoryview(held)[at : at + size]
    with shelf.meter.part("fetch"):
        got = shelf.store.get(name, start=at, length=size)
    if got is None or len(got.data) != size:
        raise Corrupt(f"{name} is corrupt: it ends before its blocks do")
    return got.data


def _pack(shelf: Shelf, stream: Stream, pack: int) -> Buffer:
    """A whole pack object, checked."""
    name, size = stream.packs[pack]
    data = shelf.get(name)
    frame.check_header(data, frame.PACK, name)
    if len(data) != frame.HEADER_SIZE + size:
        raise Corrupt(f"{name} is corrupt: {len(data) - frame.HEADER_SIZE} bytes where {size} are promised")
    return data


class _Piece(NamedTuple):
    """Blocks [first, stop) of one pack; `size` is of what is fetched for them."""

    first: int
    stop: int
    size: int


class BasePayloads:
    """A base's blocks: from the manifest; or from packs, of which the pieces that will be wanted are fetched side by
    side, in order, some of them ahead.

    A piece is a whole pack, checked by its key, where there is a cache to keep it, or if `checked` says so; else a
    few blocks side by side, which are checked by what they give. Once expect() has said what will be read, each piece
    is fetched once: a block that has to wait for its turn, or is referred to from afar, waits in the spool. If nobody
    says it, blocks are read in order, if not all of them, and what is asked for again is fetched again.
    """

    def __init__(
        self,
        shelf: Shelf,
        stream: Stream,
        digests: bytes,
        pool: Pool,
        spool: Spool,
        *,
        whole: bool,
        checked: bool = False,
    ) -> None:
        """`digests` are those of the manifest's chunks: alike ones tell which block a REF block will ask for. `whole`
        says that more than a few blocks will be read."""
        self._shelf = shelf
        self._stream = stream
        self._digests = digests
        self._pool = pool
        self._spool = spool
        self._whole = whole
        self._packs = checked or shelf.cache is not None
        self._pieces: list[_Piece] | None = None
        self._of: dict[int, int] = {}
        """The piece of each block that has one."""
        self._uses: Counter[int] | None = None
        """How often each block will still be asked for, if that is known."""
        self._left: list[int] = []
        """The same of each piece's blocks together."""
        self._asked: OrderedDict[int, Future[Buffer]] = OrderedDict()
        self._newest = -1
        self._held = 0
        self._kept: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def expect(self, uses: "Counter[int]") -> None:
        """Tell how often each block will be asked for: others will not be, or each by itself."""
        with self._lock:
            if self._pieces is not None or not (self._whole and self._stream.packs):
                return
            self._uses = Counter(uses)
            for block, target in self._targets().items():
                if uses[block]:
                    self._uses[target] += uses[block]
            self._cut()

    def _targets(self) -> dict[int, int]:
        """Of each REF block the block that it will ask for: the first of a chunk with the same digest."""
        stream = self._stream
        referring = [block for block, codec in enumerate(stream.codecs) if codec == REF]
        first: dict[bytes, int] = {}
        for block, codec in enumerate(stream.codecs) if referring else ():
            if codec != REF and stream.counts[block] == 1:
                first.setdefault(self._digest(block), block)
        found = ((block, first.get(self._digest(block))) for block in referring)
        return {block: target for block, target in found if target is not None}

    def _digest(self, block: int) -> bytes:
        chunk = self._stream.first[block]
        return self._digests[32 * chunk : 32 * chunk + 32]

    def _cut(self) -> None:
        """Make the pieces."""
        stream, uses, pieces = self._stream, self._uses, []
        first = stop = size = 0
        pack = -1
        for block, length in enumerate(stream.lengths):
            if not length or (uses is not None and not uses[block]):
                continue
            at, _ = stream.pack_of(block)
            # What lies between two blocks that are wanted is not.
            gap = stop != block and stream.offsets[stop] != stream.offsets[block]
            if at != pack or (not self._packs and (gap or size + length > PIECE)):
                if size:
                    pieces.append(_Piece(first, stop, size))
                first, size, pack = block, 0, at
            stop, size = block + 1, size + length
            self._of[block] = len(pieces)
        if size:
            pieces.append(_Piece(first, stop, size))
        if self._packs:
            pieces = [one._replace(size=stream.packs[stream.pack_of(one.first)[0]][1]) for one in pieces]
        self._pieces = pieces
        if uses is not None:
            self._left = [0] * len(pieces)
            for block, piece in self._of.items():
                self._left[piece] += uses[block]

    def block(self, block: int) -> Buffer:
        stream = self._stream
        start, stop = stream.offsets[block], stream.offsets[block + 1]
        if not stream.packs:
            return memoryview(stream.inline)[start:stop]
        if start == stop:
            return b""
        future = None
        if self._whole:
            with self._lock:
                if self._pieces is None:
                    self._cut()
                assert self._pieces is not None
                if (kept := self._kept.get(block)) is not None:
                    return kept(0, stop - start)
                piece = self._of.get(block)
                if piece is not None:
                    future = self._ask(piece)
        if future is None or piece is None:
            return _range(self._shelf, stream, block, block + 1)
        with self._shelf.meter.part("fetch"):
            data = future.result()
        with self._lock:
            self._took(block, piece)
        return self._part(piece, data, block)

    def _part(self, piece: int, data: Buffer, block: int) -> memoryview:
        """A block's bytes of a piece's."""
        stream = self._stream
        assert self._pieces is not None
        at = stream.pack_of(block)[1]
        if not self._packs:
            at -= stream.pack_of(self._pieces[piece].first)[1]
        return memoryview(data)[at : at + stream.lengths[block]]

    def _took(self, block: int, piece: int) -> None:
        """One use of a block less; a piece that nobody will ask for any more is let go of."""
        if self._uses is None or not self._uses[block]:
            return
        self._uses[block] -= 1
        self._left[piece] -= 1
        if not self._left[piece] and piece in self._asked:
            self._let_go(piece)

    def _ask(self, piece: int) -> "Future[Buffer] | None":
        """A piece on its way, and those behind it; None for one that nobody was to ask for any more."""
        assert self._pieces is not None
        if piece not in self._asked and self._uses is not None and not self._left[piece]:
            return None
        near, ahead = piece, 0
        for one in range(piece, len(self._pieces)):
            size = self._pieces[one].size
            # Who goes back to a block that another refers to does not go on from there.
            if one > piece and ((ahead := ahead + size) > AHEAD or piece < self._newest):
                break
            near = one
            if one not in self._asked and (self._uses is None or self._left[one]):
                self._asked[one] = self._pool.submit(self._fetch, self._pieces[one])
                self._held += size
        self._newest = max(self._newest, piece)
        self._asked.move_to_end(piece)
        future = self._asked[piece]
        for old in list(self._asked):
            if self._held <= HELD:
                break
            if not piece <= old <= near and self._asked[old].done():
                self._set_aside(old)
        return future

    def _fetch(self, piece: _Piece) -> Buffer:
        if self._packs:
            return _pack(self._shelf, self._stream, self._stream.pack_of(piece.first)[0])
        return _range(self._shelf, self._stream, piece.first, piece.stop)

    def _set_aside(self, piece: int) -> None:
        """Let go of a piece, but for what somebody will still ask for."""
        assert self._pieces is not None
        future = self._asked[piece]
        if self._uses is not None and not future.exception():
            data = future.result()
            for block in range(self._pieces[piece].first, self._pieces[piece].stop):
                if self._of.get(block) == piece and self._uses[block]:
                    self._kept[block] = self._spool.keep(self._part(piece, data, block))
            self._left[piece] = 0
        self._let_go(piece)

    def _let_go(self, piece: int) -> None:
        assert self._pieces is not None
        del self._asked[piece]
        self._held -= self._pieces[piece].size


class PatchPayloads:
    """A patch's blocks, in a spool: a chain may have thousands of patches, and every block wants all of them."""

    def __init__(self, shelf: Shelf, stream: Stream, spool: Spool, *, whole: bool) -> None:
        self._shelf = shelf
        self._stream = stream
        self._spool = spool
        self._whole = whole
        self._inline = spool.keep(stream.inline) if not stream.packs else None
        self._packs: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def block(self, block: int) -> Buffer:
        stream = self._stream
        start, stop = stream.offsets[block], stream.offsets[block + 1]
        if self._inline is not None:
            return self._inline(start, stop)
        if start == stop or not self._whole:
            return _range(self._shelf, stream, block, block + 1)
        pack, at = stream.pack_of(block)
        with self._shelf.meter.part("fetch"), self._lock:
            read = self._packs.get(pack)
            if read is None:
                read = self._packs[pack] = self._spool.keep(_pack(self._shelf, stream, pack))
        return read(at, at + stop - start)
