import io
import json
import pickle
import time
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightvc.errors import BadFile, BadTensor, Refused
from weightvc.objects import dtypes
from weightvc.sources import header as headers
from weightvc.sources.base import TensorInfo
from weightvc.sources.header import build_header, read_header
from weightvc.sources.memory import TORCH_DTYPES, open_tensors


def file_of(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def read(raw: bytes):
    return read_header(lambda start, stop: raw[start:stop], len(raw), "x.safetensors")


def entry(dtype="U8", shape="[4]", offsets="[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


MALFORMED = {
    "duplicate tensor": file_of(f'{{"a":{entry()},"a":{entry()}}}', b"1234"),
    "duplicate field": file_of('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "duplicate metadata": file_of('{"__metadata__":{"a":"1","a":"1"}}'),
    "duplicate by escape": file_of(f'{{"a":{entry()},"\\u0061":{entry()}}}', b"1234"),
    "overlap": file_of(f'{{"a":{entry()},"b":{entry(offsets="[2,6]")}}}', b"123456"),
    "same range": file_of(f'{{"a":{entry()},"b":{entry()}}}', b"1234"),
    "hole": file_of(f'{{"a":{entry()},"b":{entry(offsets="[5,9]")}}}', b"123456789"),
    "hole at the start": file_of(f'{{"a":{entry(offsets="[1,5]")}}}', b"12345"),
    "trailing bytes": file_of(f'{{"a":{entry()}}}', b"12345"),
    "trailing bytes, no tensors": file_of("{}", b"1"),
    "cut short": file_of(f'{{"a":{entry()}}}', b"123"),
    "metadata as a tensor": file_of(f'{{"__metadata__":{entry()}}}', b"1234"),
    "metadata null": file_of('{"__metadata__":null}'),
    "metadata number": file_of('{"__metadata__":{"a":1}}'),
    "length 2^62": file_of("{}", length=2**62),
    "length past the end": file_of("{}", length=3),
    "length over the limit": file_of("{}", length=100_000_001),
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": bytes(8),
    "an array": file_of("[]"),
    "leading space": file_of(" {}"),
    "two values": file_of("{}{}"),
    "not UTF-8": file_of(b'{"\xff":1}'),
    "shape 2^33 x 2^33": file_of(f'{{"a":{entry(shape="[8589934592,8589934592]", offsets="[0,0]")}}}'),
    "shape 2^33 x 2^33 x 0": file_of(f'{{"a":{entry(shape="[8589934592,8589934592,0]", offsets="[0,0]")}}}'),
    "shape wraps at 64 bits": file_of(f'{{"a":{entry(shape="[4294967296,4294967296,1]", offsets="[0,0]")}}}'),
    "many large extents": file_of(f'{{"a":{entry(shape="[" + ",".join(["9" * 18] * 10_000) + "]")}}}', b"1234"),
    "size mismatch": file_of(f'{{"a":{entry(shape="[5]")}}}', b"1234"),
    "5,000 digits": file_of(f'{{"a":{entry(shape="[" + "9" * 5000 + "]")}}}', b"1234"),
    "5,000 digits in offsets": file_of(f'{{"a":{entry(offsets="[0," + "9" * 5000 + "]")}}}', b"1234"),
    "200,000 arrays": file_of('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "200,000 objects": file_of('{"a":' * 200_000 + "1" + "}" * 200_000),
    "200,000 open arrays": file_of('{"a":' + "[" * 200_000),
    "negative offset": file_of(f'{{"a":{entry(offsets="[-4,0]")}}}', b"1234"),
    "offsets reversed": file_of(f'{{"a":{entry(offsets="[4,0]")}}}', b"1234"),
    "fractional offset": file_of(f'{{"a":{entry(offsets="[0,4.0]")}}}', b"1234"),
    "exponent offset": file_of(f'{{"a":{entry(offsets="[0,4e0]")}}}', b"1234"),
    "infinite offset": file_of(f'{{"a":{entry(offsets="[0,1e999]")}}}', b"1234"),
    "NaN offset": file_of(f'{{"a":{entry(offsets="[0,NaN]")}}}', b"1234"),
    "boolean offset": file_of(f'{{"a":{entry(shape="[1]", offsets="[false,true]")}}}', b"1"),
    "string offset": file_of(f'{{"a":{entry(offsets=json.dumps("04"))}}}', b"1234"),
    "three offsets": file_of(f'{{"a":{entry(offsets="[0,4,4]")}}}', b"1234"),
    "negative extent": file_of(f'{{"a":{entry(shape="[-2,-2]")}}}', b"1234"),
    "boolean extent": file_of(f'{{"a":{entry(shape="[true,4]")}}}', b"1234"),
    "fractional extent": file_of(f'{{"a":{entry(shape="[4.0]")}}}', b"1234"),
    "shape is an object": file_of(f'{{"a":{entry(shape="{}", offsets="[0,1]")}}}', b"1"),
    "shape is a string": file_of(f'{{"a":{entry(shape=json.dumps(""), offsets="[0,1]")}}}', b"1"),
    "no dtype": file_of('{"a":{"shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "dtype is an array": file_of('{"a":{"dtype":["U8"],"shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "entry is a number": file_of('{"a":4}'),
    "entry is null": file_of('{"a":null}'),
    "half a surrogate pair": file_of(f'{{"\\ud800":{entry()}}}', b"1234"),
    "half a surrogate pair in metadata": file_of('{"__metadata__":{"a":"\\udfff"}}'),
    "raw NUL in a name": file_of(f'{{"a\0":{entry()}}}', b"1234"),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_header_is_refused_by_one_kind_of_error(raw):
    with pytest.raises(BadFile) as caught:
        read(raw)
    assert "x.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "sys." not in str(caught.value)  # what Python advises mends nothing


def test_a_huge_length_is_refused_without_reading_that_much():
    asked = []

    def read_at(start, stop):
        asked.append(stop - start)
        return (2**62).to_bytes(8, "little") + bytes(stop - start - 8)

    with pytest.raises(BadFile):
        read_header(read_at, 2**62 + 8)
    assert sum(asked) <= 1 << 16


def test_a_long_number_is_refused_where_the_interpreter_has_no_limit():
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(BadFile, match="5000 digits"):
            read(MALFORMED["5,000 digits"])
        assert len(read(file_of(f'{{"a":{entry()}}}', b"1234")).tensors) == 1
    finally:
        sys.set_int_max_str_digits(limit)


def test_an_unknown_dtype_is_refused_by_name():
    with pytest.raises(BadTensor, match=r"'a'.*F2_E1M0"):
        read(file_of(f'{{"a":{entry(dtype="F2_E1M0")}}}', b"1234"))


def test_torch_files_under_a_safetensors_name_are_refused():
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    for raw in (buffer.getvalue(), pickle.dumps({"a": 1}), pickle.dumps({"a": 1}, protocol=0)):
        with pytest.raises(BadFile):
            read(raw + bytes(64))
    with pytest.raises(BadFile, match=r"torch\.save"):
        read(buffer.getvalue())


def test_a_length_that_starts_like_a_pickle_is_read():
    raw = file_of(b"{}" + b" " * (0x0280 - 2))
    assert raw[:2] == b"\x80\x02"
    assert read(raw).tensors == []


@pytest.mark.parametrize("header", ["{}", "{}      ", '{"__metadata__":{}}', '{"__metadata__":{"a":"é"}}'])
def test_files_without_tensors(header):
    result = read(file_of(header))
    assert result.tensors == []
    assert result.prefix == file_of(header)
    assert result.metadata == json.loads(header).get("__metadata__")


def test_tensors_come_in_file_order_with_absolute_offsets():
    header = f'{{"b":{entry(offsets="[4,8]")},"a":{entry()},"z":{entry(shape="[]", offsets="[8,9]")}'
    header += f',"e":{entry(shape="[0,3]", offsets="[4,4]")}}}'
    base = 8 + len(header)
    assert read(file_of(header, b"123456789")).tensors == [
        ("a", "U8", (4,), base, base + 4),
        ("e", "U8", (0, 3), base + 4, base + 4),
        ("b", "U8", (4,), base + 4, base + 8),
        ("z", "U8", (), base + 8, base + 9),
    ]


NAMES = [
    "",
    "../../x",
    "a\0b",
    "n" * 5000,
    "a",
    "A",
    "é",
    "e\u0301",
    "[[{",
    '"}\\"',
    "\\",
    "a\\\\",
    "😀",
    "__meta__",
]


def test_names_are_kept_exactly():
    infos = [TensorInfo("", name, "U8", (1,), 1) for name in NAMES]
    for ascii_only in (False, True):
        prefix = build_header(infos)
        raw = json.dumps(json.loads(prefix[8:]), ensure_ascii=ascii_only).encode()
        found = read(file_of(raw, bytes(len(NAMES)))).tensors
        assert sorted(tensor[0] for tensor in found) == sorted(NAMES)


def test_every_dtype_is_sized():
    for dtype in dtypes.BITS:
        info = TensorInfo("", "a", dtype, (4, 2), dtypes.nbytes(dtype, (4, 2)))
        prefix = build_header([info])
        assert read(prefix + bytes(info.nbytes)).tensors[0][1:3] == (dtype, (4, 2))
        with pytest.raises(BadFile):
            read(prefix + bytes(info.nbytes + 1))


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "a": '"\\\n\0\x7f/\u2028é'}])
def test_writes_what_the_library_writes_for_all_torch_dtypes(metadata):
    tensors = {}
    for index, name in enumerate(TORCH_DTYPES):
        dtype = getattr(torch, name)
        for prefix in ("b", "a", "é"):
            raw = torch.zeros(2, (index % 3 + 1) * dtype.itemsize, dtype=torch.uint8)
            tensors[f"{prefix}.{name}"] = raw.view(dtype)
    saved = safetensors.torch.save(tensors, metadata)
    prefix = build_header(open_tensors(tensors).tensors, metadata)
    length = 8 + int.from_bytes(saved[:8], "little")
    if metadata and len(metadata) > 1:
        # The library may write the metadata's keys in any order.
        assert json.loads(prefix[8:]) == json.loads(saved[8:length])
        assert len(prefix) == length
    else:
        assert prefix == saved[:length]
    assert read(saved).metadata == metadata


ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.tuples(st.sampled_from(["u1", "<i2", "<f4", "<f8", "?", "<c8"]), st.lists(st.integers(0, 3), max_size=3)),
    max_size=6,
)


@given(ARRAYS)
def test_writes_and_reads_what_the_library_writes(spec):
    spec.pop("__metadata__", None)
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in spec.items()}
    saved = safetensors.numpy.save(arrays)
    header = read(saved)
    infos = [TensorInfo("", name, dtype, shape, end - begin) for name, dtype, shape, begin, end in header.tensors]
    assert {info.name: info.shape for info in infos} == {name: array.shape for name, array in arrays.items()}
    assert build_header(infos[::-1]) == saved[: len(header.prefix)] == header.prefix


FAULTS = [
    lambda entry: entry.pop("dtype"),
    lambda entry: entry.update(dtype="F5"),
    lambda entry: entry.update(dtype=["U8"]),
    lambda entry: entry.update(dtype="F4", shape=[1]),
    lambda entry: entry.update(shape=[True]),
    lambda entry: entry.update(shape=[-1, -4]),
    lambda entry: entry.update(shape=[4.0]),
    lambda entry: entry.update(shape="4"),
    lambda entry: entry.update(shape={}),
    lambda entry: entry.update(shape=[2**40, 2**40]),
    lambda entry: entry.update(data_offsets=[0]),
    lambda entry: entry.update(data_offsets={}),
    lambda entry: entry.update(data_offsets=[0, 1, 2]),
    lambda entry: entry.update(data_offsets=["0", "4"]),
    lambda entry: entry.update(data_offsets=[entry["data_offsets"][0], entry["data_offsets"][1] + 1]),
    lambda entry: entry.update(data_offsets=[entry["data_offsets"][0], True]),
    lambda entry: entry.update(data_offsets=[at + 1 for at in entry["data_offsets"]]),
    lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]),
    lambda entry: entry.update(more={"a": 1}),
]


def outcome(raw):
    try:
        return read(raw).tensors
    except Refused as error:
        return type(error), str(error)


def same_outcome(entries, nbytes):
    """What a header comes to, however it is looked at."""
    raw = file_of(json.dumps(entries), bytes(max(0, nbytes)))
    quick = outcome(raw)
    with mock.patch.object(headers, "_in_columns", return_value=None):
        assert quick == outcome(raw)
    return quick


def entries_of(kinds):
    entries, end = {}, 0
    for i, (dtype, shape, nbytes) in enumerate(kinds):
        entries[f"n:{i}"] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    return entries, end


SOUND = [("U8", (4,), 4), ("F32", (), 4), ("BF16", (0, 3), 0), ("F4", (2, 3), 3)]


@given(st.lists(st.sampled_from(SOUND), max_size=5), st.randoms(use_true_random=False), st.sampled_from([0, -1, 1]))
def test_columns_tell_the_same_as_one_entry_after_the_other(kinds, random, more):
    entries, end = entries_of(kinds)
    if random.random() < 0.5:
        entries = dict(random.sample(list(entries.items()), len(entries)))
    assert isinstance(same_outcome(entries, end + more), list) == (more == 0 or end + more < 0)


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_columns_pass_over_no_fault(fault):
    for i in range(4):
        entries, end = entries_of(SOUND)
        FAULTS[fault](entries[f"n:{i}"])
        found = same_outcome(entries, end)
        # A field more, or what says the same of an empty tensor, is no fault.
        assert isinstance(found, tuple) or fault == len(FAULTS) - 1 or i == 2


def text_of(value):
    return json.dumps(value, ensure_ascii=False)


def object_of(pairs):
    return "{" + ",".join(f"{text_of(key)}:{value}" for key, value in pairs) + "}"


def list_of(values):
    return "[" + ",".join(values) + "]"


TEXTS = st.sampled_from(["a", "b", ":", '":"', "{", "\\", '\\"', "[]", "é", "", "a:1,"])
VALUES = st.recursive(
    st.sampled_from(["1", "null", "[]", "{}", '"x"']) | TEXTS.map(text_of),
    lambda inner: (
        st.lists(st.tuples(TEXTS, inner), max_size=3).map(object_of) | st.lists(inner, max_size=2).map(list_of)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_key_that_stands_twice_is_found_at_any_depth(text):
    """Whichever way it is looked for: by counting, or by a look at every object."""
    twice = []

    def look(pairs):
        twice.extend([1] * (len(pairs) - len(dict(pairs))))
        return dict(pairs)

    wanted = json.loads(text, object_pairs_hook=look)
    if twice:
        with pytest.raises(BadFile, match="twice"):
            headers.strict_json(text.encode(), "x")
    else:
        assert headers.strict_json(text.encode(), "x") == wanted


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_refused(raw):
    for data in (raw, file_of(b"{" + raw), file_of(b'{"a":' + raw + b"}")):
        try:
            read(data)
        except Refused:
            pass


@pytest.mark.parametrize("name", ["__metadata__", "twice"])
def test_a_name_that_is_taken_is_not_written(name):
    with pytest.raises(BadTensor, match=name):
        build_header([TensorInfo("", name, "U8", (1,), 1)] * 2)


def test_many_tensors(capsys):
    infos = [TensorInfo("", f"model.layers.{i}.experts.down_proj.weight", "BF16", (1,), 2) for i in range(150_000)]
    prefix = build_header(infos, {"format": "pt"})
    raw = prefix + bytes(2 * len(infos))
    started = time.perf_counter()
    header = read(raw)
    taken = time.perf_counter() - started
    assert len(header.tensors) == len(infos)
    with capsys.disabled():
        print(f"\n150,000 tensors: header read in {taken:.2f} s")
