"""The tree: a schema and the digests of its chunks. Same weights, same tree digest, whatever they came from.

chunk   blake3 of its bytes
tensor  blake3 of canonical ["tensor 1", dtype, shape], a newline, and its chunks' digests
tree    blake3 of canonical ["tree 1", schema digest], a newline, and its tensors' digests, in schema order
"""

from functools import cached_property

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
        joined = self._joined
        return [joined[at : at + 32] for at in range(0, len(joined), 32)]

    def differing(self, other: "Tree") -> list[int]:
        """The tensors, by number, that `other` does not have bit for bit under the same name."""
        there = dict(zip(other.schema.tensors, other.tensors, strict=True))
        mine = zip(self.schema.tensors, self.tensors, strict=True)
        return [i for i, (tensor, digest) in enumerate(mine) if there.get(tensor) != digest]

    @cached_property
    def _joined(self) -> bytes:
        """Digests of all tensors. Their texts are made a kind at a time: those of a kind are equally long."""
        import numpy as np

        alike = self.schema.alike
        if not alike:
            return b""
        first = np.array(self.schema.first_chunk)
        digests = np.frombuffer(self.digests, np.uint8).reshape(-1, 32)
        texts, sizes = [], []
        for (dtype, shape), group in zip(self.schema.kinds[0], alike, strict=True):
            prefix = frame.canonical(["tensor 1", dtype, list(shape)]) + b"\n"
            begins = first[group]
            chunks = np.arange(first[group[0] + 1] - begins[0])
            text = np.empty((len(group), len(prefix) + 32 * len(chunks)), np.uint8)
            text[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
            text[:, len(prefix) :] = digests[begins[:, None] + chunks].reshape(len(group), -1)
            texts.append(text.reshape(-1))
            sizes.append(np.full(len(group), text.shape[1]))
        cuts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        found = np.frombuffer(frame.digests(np.concatenate(texts).data, cuts), np.uint8).reshape(-1, 32)
        joined = np.empty_like(found)
        joined[np.concatenate(alike)] = found
        return joined.tobytes()

    @cached_property
    def digest(self) -> str:
        """The tree digest, hex."""
        head = frame.canonical(["tree 1", self.schema.digest]) + b"\n"
        return frame.digest(head + self._joined).hex()
