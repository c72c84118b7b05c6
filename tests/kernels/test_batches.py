"""Many blocks at once are the same bytes as each by itself, and what is wrong with one is told of that one."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc_kernels as wk
from tests.kit.blocks import changed
from weightvc.objects import dtypes, manifest
from weightvc.objects.schema import Schema
from weightvc.objects.tensor import TensorInfo
from weightvc_kernels import context, payloads, rice
from weightvc_kernels.payloads import Payload

Lanes = npt.NDArray[np.unsignedinteger]
Pairs = list[tuple[Lanes, Lanes]]
DTYPES = ["BF16", "F8_E4M3", "F32", "F64", "U8"]


def blocks(dtype: str, sizes: list[int], densities: list[float], seed: int = 1) -> Pairs:
    """Old and new lanes like weights, of so many lanes each, some at odd addresses."""
    rng, kind = np.random.default_rng(seed), np.dtype(f"u{dtypes.lane(dtype)}")
    out = []
    for i, (size, density) in enumerate(zip(sizes, densities, strict=True)):
        store = np.zeros(size * kind.itemsize + 8, np.uint8)
        old = store[i % 3 : i % 3 + size * kind.itemsize].view(kind)
        old[:] = rng.normal(0, 0.02, size).view(np.uint64) >> np.uint64(64 - 8 * kind.itemsize)
        kinds = ["step", "far", "random"]
        out.append((old, changed(old, rng.random(size) < density, kinds[i % 3], seed + i)))
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Pairs]:
    count = draw(st.integers(0, 8))
    size = st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 9000]))
    density = st.sampled_from([0.0, 0.001, 0.05, 0.9])
    dtype = draw(st.sampled_from(DTYPES))
    sizes, densities = (draw(st.lists(each, min_size=count, max_size=count)) for each in (size, density))
    return dtype, blocks(dtype, sizes, densities, draw(st.integers(0, 1000)))


def model_of(pairs: Pairs, dtype: str) -> context.Model:
    return context.Model(context.tables(context.sample_batch(pairs, dtype, 1), dtype), dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_the_same_as_one_by_one(case: tuple[str, Pairs]) -> None:
    dtype, pairs = case
    lane = dtypes.lane(dtype)
    total = context.sample_batch([], dtype)
    for old, new in pairs:
        total = total + context.sample(old, new, dtype, 1)
    together = context.sample_batch(pairs, dtype, 1)
    assert context.tables(together, dtype) == context.tables(total, dtype)
    np.testing.assert_array_equal(together.steps, total.steps)
    model = model_of(pairs, dtype)
    by_context, by_rice = context.encode_batch(model, pairs), rice.encode_batch(pairs, dtype, lane)
    alone = (
        [context.encode_patch(model, *pair) for pair in pairs],
        [rice.encode_patch(*pair, dtype, lane) for pair in pairs],
    )
    for some, each in zip((by_context, by_rice), alone):
        assert [payload for payload, _ in some] == [payload for payload, _ in each]
        for (_, was), (_, wanted), (old, new) in zip(some, each, pairs, strict=True):
            np.testing.assert_array_equal(was, wanted)
            np.testing.assert_array_equal(was, old[old != new])
    for decode in (
        lambda targets: context.decode_batch(model, [(p, t) for (p, _), t in zip(by_context, targets)]),
        lambda targets: rice.decode_batch([(p, t) for (p, _), t in zip(by_rice, targets)], lane),
    ):
        targets = [changed(old, old != old, "step", 0) for old, _ in pairs]
        decode(targets)
        assert [target.tobytes() for target in targets] == [new.tobytes() for _, new in pairs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_several_codecs_at_once(dtype: str) -> None:
    lane = dtypes.lane(dtype)
    pairs = blocks(dtype, [3000, 1, 500, 0, 4096, 70, 9000, 300], [0.01, 1, 0.5, 0, 0.001, 0, 0.2, 0.02])
    model, other = model_of(pairs, dtype), model_of(pairs[:1], dtype)
    made = []
    for i, (old, new) in enumerate(pairs):
        which = i % 4
        if which == 0:
            made.append(Payload(wk.RICE, rice.encode(old, new, dtype, lane)))
        elif which == 3:
            made.append(Payload(*wk.encode_patch(old, new, lane)[:2]))
        else:
            by = (model, other)[which - 1]
            made.append(Payload(payloads.CONTEXT, context.encode(by, old, new), by))
    targets = [old.copy() for old, _ in pairs]
    payloads.apply(list(zip(made, targets)), lane)
    assert [target.tobytes() for target in targets] == [new.tobytes() for _, new in pairs]


@pytest.mark.parametrize("codec", [wk.RICE, payloads.CONTEXT, wk.SPARSE])
def test_what_is_wrong_is_told_of_its_block(codec: int) -> None:
    pairs = blocks("BF16", [5000, 3000, 0, 4000, 2000], [0.02] * 5)
    model = model_of(pairs, "BF16")
    encode = {
        wk.RICE: lambda old, new: rice.encode(old, new, "BF16", 2),
        payloads.CONTEXT: lambda old, new: context.encode(model, old, new),
        wk.SPARSE: lambda old, new: wk.encode_patch(old, new, 2)[1],
    }[codec]
    made = [encode(*pair) for pair in pairs]
    made[3] = made[3][:-4]
    targets = [old.copy() for old, _ in pairs]
    jobs = [(Payload(codec, data, model), target) for data, target in zip(made, targets)]
    with pytest.raises(wk.CodecError) as caught:
        payloads.apply(jobs, 2)
    assert caught.value.job == 3
    if codec != payloads.CONTEXT:
        assert targets[3].tobytes() == pairs[3][0].tobytes()
    assert targets[4].tobytes() == pairs[4][0].tobytes()
    # A head that is none, and what is none of the codec's payloads at all.
    for bad in (b"\xff" * 12, b"\0" * 12, b"\1"):
        with pytest.raises(wk.CodecError) as caught:
            payloads.apply([jobs[2], jobs[2], (Payload(codec, bad, model), targets[4])], 2)
        assert caught.value.job == 2
    read_only = pairs[4][0].copy()
    read_only.flags.writeable = False
    with pytest.raises(wk.CodecError, match="read-only") as caught:
        payloads.apply([jobs[2], (Payload(codec, made[4], model), read_only)], 2)
    assert caught.value.job == 1


def test_where_nothing_changes_there_is_no_payload() -> None:
    block = np.zeros(8, np.uint16)
    with pytest.raises(wk.CodecError, match="where nothing changes") as caught:
        payloads.apply([(Payload(payloads.SAME), block), (Payload(payloads.SAME, b"x"), block)], 2)
    assert caught.value.job == 1
    with pytest.raises(wk.CodecError, match="without its model"):
        payloads.apply([(Payload(payloads.CONTEXT, b"12345678"), block)], 2)
    with pytest.raises(wk.CodecError, match="one length"):
        context.encode_batch(model_of([], "BF16"), [(block, block), (block, block[1:])])
    with pytest.raises(wk.CodecError, match="one length"):
        rice.encode_batch([(block, block), (block, block[1:])], "BF16", 2)


def test_runs_are_all_blocks_in_order() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.choice([1, 300, 9000, 200_000, 3_000_000], 200)
    tensors = [TensorInfo("", f"{i:03}", ("BF16", "F16", "F32")[i // 80], (int(n),), 0) for i, n in enumerate(sizes)]
    tensors = [t._replace(nbytes=t.shape[0] * dtypes.lane(t.dtype)) for t in tensors]
    schema = Schema(tensors)
    every = manifest.blocks(schema, None)
    for some in (every, every[::3], [], every[:1]):
        runs = manifest.runs(schema, some)
        assert [block for run in runs for block in run] == some
        for run in runs:
            nbytes = schema.position(run[-1][1]) - schema.position(run[0][0])
            assert len(run) == 1 or nbytes <= manifest.BLOCK
            assert all(a[1] == b[0] for a, b in pairwise(run))
            assert len({schema.tensors[schema.tensor_of(low)].dtype for low, _ in run}) == 1
    joined = manifest.runs(schema, every)
    assert len(joined) < len(every) / 2
