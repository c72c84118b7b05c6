"""The tree: a schema and the digests of its chunks. Same weights, same tree digest, whatever they came from.

chunk   blake3 of its bytes
tensor  blake3 of canonical ["tensor 1", dtype, shape], a newline, and its chunks' digests
tree    blake3 of canonical ["tree 1", schema digest], a newline, and its tensors' digests, in schema order
"""

from functools import cached_property
from itertools import accumulate, pairwise

from weightvc.errors import Corrupt
from weightvc.objects import frame
from weightvc.objects.schema import Schema


class Tree:
    """`digests` holds 32 bytes a chunk, in the schema's chunk order."""

    def __init__(self, schema: Schema, digests: bytes) -> None:
        if len(digests) != frame.DIGEST_SIZE * schema.chunks:
            raise Corrupt(
                f"{len(digests) // 32} digests where the schema {schema.digest[:12]} has {schema.chunks} chunks"
            )
        self.schema = schema
        self.digests = digests

    def chunk(self, index: int) -> bytes:
        """Digest of one chunk."""
        return self.digests[32 * index : 32 * index + 32]

    @cached_property
    def tensors(self) -> list[bytes]:
        """Digest of each tensor, in schema order."""
        prefixes: dict[tuple[str, tuple[int, ...]], bytes] = {}
        for kind in {tensor[2:4] for tensor in self.schema.tensors}:
            prefixes[kind] = frame.canonical(["tensor 1", kind[0], list(kind[1])]) + b"\n"
        digests = self.digests
        texts = [
            prefixes[tensor[2:4]] + digests[32 * a : 32 * b]
            for tensor, (a, b) in zip(self.schema.tensors, pairwise(self.schema.first_chunk), strict=True)
        ]
        joined = frame.digests(b"".join(texts), list(accumulate(map(len, texts), initial=0)))
        return [joined[at : at + 32] for at in range(0, len(joined), 32)]

    def differing(self, other: "Tree") -> list[int]:
        """The tensors, by number, that `other` does not have bit for bit under the same name."""
        there = dict(zip(other.schema.tensors, other.tensors, strict=True))
        mine = zip(self.schema.tensors, self.tensors, strict=True)
        return [i for i, (tensor, digest) in enumerate(mine) if there.get(tensor) != digest]

    @cached_property
    def digest(self) -> str:
        """The tree digest, hex."""
        head = frame.canonical(["tree 1", self.schema.digest]) + b"\n"
        return frame.digest(head + b"".join(self.tensors)).hex()
