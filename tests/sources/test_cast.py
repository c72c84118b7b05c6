import json

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightvc.errors import Refused
from weightvc.sources import open_source
from weightvc.sources.cast import _BLOCK, NAMES, cast
from weightvc.sources.memory import open_tensors

from .contents import content, files

KINDS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LANES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def patterns(kind: torch.dtype, count: int) -> torch.Tensor:
    """Random bits of all exponents, NaNs with payloads, infinities and both zeros."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, count * kind.itemsize, dtype="u1"))
    tensor = bits.view(kind).clone()
    for at, value in ((0, float("inf")), (3, -0.0), (5, float("nan")), (7, 65504.0), (8, 1e-40)):
        tensor[at::97] = value
    return tensor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rounds_as_torch_does(kind, name):
    tensor = patterns(kind, 2 * _BLOCK + 777)
    source = cast(open_tensors({"w": tensor}), name)
    wanted = tensor.to(KINDS[NAMES[name]])
    dtype, shape, data = content(source)["", "w"]
    assert (dtype, shape) == (NAMES[name], tuple(tensor.shape))
    found = torch.frombuffer(bytearray(data), dtype=wanted.dtype)
    nan = wanted.isnan()
    lane = LANES[wanted.itemsize]
    # A NaN's payload depends in torch itself on where in a vector the element lies.
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(lane)[~nan], wanted.view(lane)[~nan])


SHARED = {kind: open_tensors({"w": patterns(KINDS[kind], _BLOCK + 300)}) for kind in KINDS}
WHOLE = {(kind, to): content(cast(SHARED[kind], to))["", "w"][2] for kind in KINDS for to in NAMES}


@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 4 * _BLOCK), st.integers(0, 2000))
def test_the_same_bytes_however_the_ranges_are_cut(pair, start, length):
    kind, to = pair
    whole = WHOLE[pair]
    for begin in (start, max(len(whole) - length, 0), 2 * _BLOCK - length // 2):
        begin = min(begin, len(whole))
        stop = min(begin + length, len(whole))
        assert bytes(cast(SHARED[kind], to).read(0, begin, stop)) == whole[begin:stop]


def test_other_dtypes_pass_and_nothing_to_do_is_nothing():
    tensors = {"i": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16), "e": torch.zeros(0, 3)}
    tensors["f8"] = torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = content(open_source(tensors, dtype="bfloat16"))
    assert {name: dtype for (_, name), (dtype, _, _) in found.items()} == {
        "i": "I64",
        "b": "BF16",
        "e": "BF16",
        "f8": "F8_E4M3",
    }
    assert found["", "i"][2] == raw(tensors["i"])
    source = open_tensors({"i": torch.arange(3)})
    assert cast(source, "bf16") is source


@pytest.mark.parametrize("name", ["float8", "BF16", "", 3, "int8"])
def test_a_dtype_that_is_not_there_lists_those_that_are(name):
    with pytest.raises(Refused, match="bfloat16, bf16, float16"):
        open_source({"w": torch.ones(1)}, dtype=name)


def test_a_directory_is_the_one_that_would_have_been_saved_in_that_dtype(tmp_path):
    tensors = {
        "1": {"b": torch.randn(3, 5), "a": torch.randn(4, dtype=torch.float64), "n": torch.arange(3)},
        "2": {"c": torch.randn(2, 2).half(), "s": torch.tensor(1.5)},
        "sub/3": {"c": torch.randn(2, 2)},
    }
    for folder, kind in (("old", None), ("new", torch.bfloat16)):
        (tmp_path / folder / "sub").mkdir(parents=True)
        total = 0
        for name, shard in tensors.items():
            held = {key: t.to(kind) if kind and t.is_floating_point() else t for key, t in shard.items()}
            metadata = {"format": "pt"} if name == "1" else None
            safetensors.torch.save_file(held, tmp_path / folder / f"{name}.safetensors", metadata)
            total += sum(t.nbytes for t in held.values()) if "/" not in name else 0
        weight_map = {key: f"{name}.safetensors" for name in "12" for key in tensors[name]}
        index = json.dumps({"metadata": {"total_size": total, "x": 1}, "weight_map": weight_map}, indent=2)
        (tmp_path / folder / "m.safetensors.index.json").write_text(index)
        (tmp_path / folder / "sub/m.safetensors.index.json").write_text('{"weight_map": {"c": "3.safetensors"}}')
        (tmp_path / folder / "config.json").write_text(f'{{"torch_dtype": "{"bfloat16" if kind else "float32"}"}}')
    source = open_source(tmp_path / "old", dtype="bf16")
    wanted = {str(p.relative_to(tmp_path / "new")): p.read_bytes() for p in (tmp_path / "new").rglob("*.*")}
    assert files(source) == wanted
    source.check()
    source.close()


def test_a_torch_dtype_is_as_good_as_its_name():
    tensors = {"w": torch.ones(3)}
    assert content(open_source(tensors, dtype=torch.bfloat16)) == content(open_source(tensors, dtype="bfloat16"))
    with pytest.raises(Refused, match="bfloat16, bf16, float16"):
        open_source(tensors, dtype=torch.int8)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{ "dtype" :"float32", "x": 1.50}', '{ "dtype" :"bfloat16", "x": 1.50}'),
        ('{"torch_dtype": "float16", "dtype": "float32"}', '{"torch_dtype": "bfloat16", "dtype": "bfloat16"}'),
        # A part's own dtype, and one that is no text or no float, stay.
        (
            '{"vision": {"dtype": "float32"}, "dtype": "float32"}',
            '{"vision": {"dtype": "float32"}, "dtype": "bfloat16"}',
        ),
        ('{"a": {"dtype": "float32"}}', None),
        ('{"dtype": "int8", "torch_dtype": null}', None),
        ("[1]", None),
        ('{"dtype": "float32"', None),
    ],
)
def test_a_config_says_what_the_weights_became(tmp_path, before, after):
    for folder in (tmp_path, tmp_path / "part", tmp_path / "tokenizer"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(before)
    for folder in (tmp_path, tmp_path / "part"):
        safetensors.torch.save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    found = files(open_source(tmp_path, dtype="bf16"))
    wanted = (before if after is None else after).encode()
    assert found["config.json"] == found["part/config.json"] == wanted
    assert found["tokenizer/config.json"] == before.encode()
    # Nothing to cast is nothing to say.
    assert files(open_source(tmp_path, dtype="fp32"))["config.json"] == before.encode()


def test_transformers_loads_what_was_committed(tmp_path):
    import transformers

    import weightvc

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, dtype="float32")
    transformers.GPT2Model(config).save_pretrained(tmp_path / "saved")
    with weightvc.init(tmp_path / "repository", cache=None) as repository:
        repository.commit(tmp_path / "saved", dtype=torch.bfloat16)
        repository.checkout("main", tmp_path / "out")
    assert '"float32"' in (tmp_path / "saved" / "config.json").read_text()
    assert transformers.GPT2Model.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
