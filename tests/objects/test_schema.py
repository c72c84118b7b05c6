"""Schemas and blocks, against what their definitions say a tensor or a chunk at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightvc.errors import BadTensor
from weightvc.objects import dtypes, frame, manifest
from weightvc.objects.schema import CHUNK, Schema
from weightvc.objects.tensor import TensorInfo
from weightvc.objects.tree import Tree

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ['"', "\\", "\n", "\0", "a,b"]
)
KINDS = st.tuples(
    st.sampled_from(["F32", "BF16", "U8", "I16"]), st.lists(st.sampled_from([0, 1, 2, 100, 5000, 30000]), max_size=2)
)


@st.composite
def schemas(draw):
    found = draw(st.dictionaries(st.tuples(st.sampled_from(["", "a", "é/b"]), NAMES), KINDS, max_size=30))
    return Schema(
        [
            TensorInfo(*key, dtype, tuple(shape), dtypes.nbytes(dtype, shape))
            for key, (dtype, shape) in sorted(found.items())
        ]
    )


def chunks_of(schema: Schema) -> list[tuple[int, str]]:
    """Bytes and dtype of every chunk."""
    return [
        (min(CHUNK, tensor.nbytes - start), tensor.dtype)
        for tensor in schema.tensors
        for start in range(0, tensor.nbytes, CHUNK)
    ]


@given(schemas())
def test_a_schema_is_what_its_tensors_are(schema):
    components: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for component, name, dtype, shape, _ in schema.tensors:
        components.setdefault(component, []).append((name, dtype, shape))
    assert schema.canonical == frame.canonical({"components": components, "weightvc": "schema 1"})
    assert schema.elements == sum(dtypes.count(tensor.shape) for tensor in schema.tensors)
    chunks = chunks_of(schema)
    assert schema.chunks == len(chunks)
    assert schema.positions == [sum(size for size, _ in chunks[:i]) for i in range(len(chunks) + 1)]
    lanes = [0, *(dtypes.lane(dtype) for _, dtype in chunks)]
    assert schema.lane_borders == [i for i in range(len(chunks)) if lanes[i] != lanes[i + 1]]


@given(schemas(), st.randoms(use_true_random=False))
def test_blocks(schema, random):
    """Each is as long as it may be: of one dtype, at most BLOCK bytes, its sources side by side; the large alone."""
    chunks = chunks_of(schema)
    sources = [random.choice([-1, i, i, i, i, random.randrange(40)]) for i in range(len(chunks))]
    for given_sources in (None, sources):
        wanted: list[tuple[int, int]] = []
        for i, (size, dtype) in enumerate(chunks):
            low = wanted[-1][0] if wanted else 0
            joins = i > 0 and dtype == chunks[i - 1][1]
            joins = joins and max(size, chunks[i - 1][0]) < manifest.LONE
            joins = joins and sum(each for each, _ in chunks[low : i + 1]) <= manifest.BLOCK
            if joins and given_sources is not None:
                before, here = sources[i - 1], sources[i]
                joins = here == before + 1 if before >= 0 else here < 0
            if joins:
                wanted[-1] = (low, i + 1)
            else:
                wanted.append((i, i + 1))
        assert manifest.blocks(schema, given_sources) == wanted


@given(schemas())
def test_tensors_have_the_digests_that_the_format_says(schema):
    digests = b"".join(frame.digest(bytes([i % 256])) for i in range(schema.chunks))
    tree = Tree(schema, digests)
    for i, (_, _, dtype, shape, _) in enumerate(schema.tensors):
        chunks = digests[32 * schema.first_chunk[i] : 32 * schema.first_chunk[i + 1]]
        text = frame.canonical(["tensor 1", dtype, list(shape)]) + b"\n" + chunks
        assert tree.tensors[i] == frame.digest(text)


@pytest.mark.parametrize("names", ["ba", "aa", "aba"])
def test_tensors_out_of_order_are_refused(names):
    infos = [TensorInfo("", name, "U8", (i,), i) for i, name in enumerate(names)]
    with pytest.raises(BadTensor, match="'a' stands twice, or out of order"):
        Schema(infos)
