import io
import os
import threading

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightvc.errors import BadName, BadTensor
from weightvc.objects import dtypes
from weightvc.objects.tensor import TensorInfo
from weightvc.sources import open_source
from weightvc.sources.header import read_header
from weightvc.sources.memory import NUMPY_DTYPES, TORCH_DTYPES, carved, open_tensors, to_numpy, to_torch
from weightvc_kernels import hashes

from .contents import content


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype_as_in_a_safetensors_file_and_back(name):
    kind = getattr(torch, name)
    data = os.urandom(6 * kind.itemsize)
    if name == "bool":
        data = b"\0\1" * 3
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(2, 3)
    saved = safetensors.torch.save({"w": tensor})
    header = read_header(lambda start, stop: saved[start:stop], len(saved))
    _, dtype, shape, begin, end = header.tensors[0]
    source = open_tensors({"w": tensor})
    assert content(source) == {("", "w"): (dtype, shape, saved[begin:end])}
    assert saved[begin:end] == data

    back = to_torch(dtype, shape, bytearray(data))
    assert back.dtype == kind
    assert back.shape == tensor.shape
    assert raw(back) == data
    flipped = bytearray(data)
    flipped[0] ^= 1
    assert content(open_tensors({"w": to_torch(dtype, shape, flipped)}))["", "w"][2] == bytes(flipped)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_every_numpy_dtype_and_back(name):
    kind = np.dtype(getattr(ml_dtypes, name, name))
    data = os.urandom(6 * kind.itemsize)
    array = np.frombuffer(data, dtype=kind).reshape(2, 3)
    assert content(open_tensors({"w": array})) == {("", "w"): (NUMPY_DTYPES[name], (2, 3), data)}
    back = to_numpy(NUMPY_DTYPES[name], (2, 3), bytearray(data))
    assert back.dtype == kind
    assert back.tobytes() == data
    back.view("u1")[0, 0] ^= 1
    if kind.itemsize > 1 and kind.kind != "V":
        swapped = array.astype(kind.newbyteorder(">"))
        assert content(open_tensors({"w": swapped})) == {("", "w"): (NUMPY_DTYPES[name], (2, 3), array.tobytes())}


def test_tensors_over_a_buffer_share_it():
    data = bytearray(8)
    a, b = to_torch("I16", (2, 2), data), to_numpy("I16", (4,), memoryview(data))
    a[0, 1] = 7
    assert b.tolist() == [0, 7, 0, 0]
    assert data[2] == 7
    for build in (to_torch, to_numpy):
        assert tuple(build("F32", (0, 3), bytearray()).shape) == (0, 3)
        assert tuple(build("F32", (), bytearray(4)).shape) == ()


@pytest.mark.parametrize(("framework", "build"), [("torch", to_torch), ("numpy", to_numpy)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES.values())
def test_tensors_that_are_carved_together_are_as_if_made_alone(framework, build, dtype):
    shapes = [(6,), (), (2, 3, 2), (0, 4), (*[1] * 63, 6)]
    infos = [TensorInfo("", f"{i} {s}", dtype, s, dtypes.nbytes(dtype, s)) for i in range(20) for s in shapes]
    infos.append(TensorInfo("", "large", dtype, (1 << 17,), dtypes.nbytes(dtype, (1 << 17,))))
    # Neither in the order in which they lie, nor side by side, nor at even places.
    sizes = [info.nbytes + 3 for info in infos]
    starts = [sum(sizes[i + 1 :]) + 1 for i in range(len(infos))]
    data = np.random.default_rng(0).integers(0, 2 if dtype == "BOOL" else 256, sum(sizes) + 1, "u1").tobytes()
    for info, start, tensor in zip(infos, starts, carved(framework, infos, starts, memoryview(data)), strict=True):
        like = build(dtype, info.shape, bytearray(info.nbytes))
        assert (type(tensor), tensor.dtype, tensor.shape) == (type(like), like.dtype, like.shape)
        assert content(open_tensors({"w": tensor}))["", "w"][2] == data[start : start + info.nbytes]


def test_each_tensor_that_is_carved_owns_its_memory():
    infos = [TensorInfo("", str(i), "BF16", shape, 2 * 6) for i in range(20) for shape in ((6,), (2, 3))]
    infos += [TensorInfo("", f"scale {i}", "BF16", (), 2) for i in range(20)]
    starts, data = [0] * len(infos), memoryview(bytearray(12))
    tensors = {info.name + str(info.shape): t for info, t in zip(infos, carved("torch", infos, starts, data))}
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors.values())
    # It refuses tensors that share memory.
    safetensors.torch.save(tensors)
    next(iter(tensors.values()))[0] = 1
    assert sum(t.count_nonzero().item() for t in tensors.values()) == 1
    for array in carved("numpy", infos, starts, data):
        while array.base is not None:
            array = array.base
        assert array.nbytes <= 12
        array[...] = 1
    assert not any(data)


@pytest.mark.parametrize(
    ("build", "dtype"), [(to_torch, "F6_E2M3"), (to_numpy, "F6_E3M2"), (to_numpy, "F4"), (to_torch, "X9")]
)
def test_what_a_library_lacks_is_refused_by_name(build, dtype):
    with pytest.raises(BadTensor, match=dtype):
        build(dtype, (4,), bytearray(3))


def test_views_give_their_logical_values():
    neg = torch._neg_view(torch.tensor([1.0, 2.0]))
    conj = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    imag = conj.imag
    found = content(open_tensors({"neg": neg, "conj": conj, "imag": imag}))
    assert np.frombuffer(found["", "neg"][2], "<f4").tolist() == [-1, -2]
    assert np.frombuffer(found["", "conj"][2], "<c8").tolist() == [1 - 2j]
    assert np.frombuffer(found["", "imag"][2], "<f4").tolist() == [-2]


def layouts():
    w = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    big = torch.arange(2000, dtype=torch.float32).reshape(100, 20)
    return {
        "t": w.t(),
        "expand": torch.arange(4, dtype=torch.int64).expand(3, 4),
        "channels": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice": big[:1],
        "column": big[:, 3],
        "step": big[::7, ::3],
        "grad": torch.nn.Parameter(torch.ones(2, 2)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "scalar": big[3, 4],
        "bool": torch.tensor([[True, False], [True, True]]).t(),
        "fp8": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 3).t(),
        "fp4 rows": torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(4, 4)[::2],
    }


@pytest.mark.parametrize("name", layouts())
def test_layouts_give_logical_bytes(name):
    tensor = layouts()[name]
    plain = tensor.detach()
    data = raw(plain.view(torch.uint8) if plain.dtype == torch.float4_e2m1fn_x2 else plain)
    source = open_tensors({"w": tensor})
    assert source.tensors[0].nbytes == len(data) == plain.numel() * plain.element_size()
    assert content(source)["", "w"][2] == data
    for start in range(0, len(data), 3):
        assert bytes(source.read(0, start, min(start + 5, len(data)))) == data[start : start + 5]
    if plain.dtype != torch.float4_e2m1fn_x2:
        assert content(open_tensors({"w": plain.contiguous()})) == content(source)
        if plain.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            assert content(open_tensors({"w": plain.numpy()})) == content(source)


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(1000)
    array = np.zeros(1000, "<f4")
    source = open_tensors({"t": tensor, "a": array})
    views = {info.name: source.read(i, 4, 12) for i, info in enumerate(source.tensors)}
    tensor[1] = 1
    array[1] = 1
    for view in views.values():
        assert isinstance(view, memoryview)
        assert bytes(view) == np.array([1, 0], "<f4").tobytes()


def test_empty_and_0_dim_tensors():
    values = {
        "weight_scale": torch.tensor(1.5),
        "n": torch.tensor(7),
        "a": torch.zeros(0, 3),
        "b": np.zeros((2, 0), "i2"),
        "c": np.array(3, "u1"),
        "big": np.array(3, ">u2"),
    }
    found = content(open_tensors(values))
    assert {name: (dtype, shape) for (_, name), (dtype, shape, _) in found.items()} == {
        "weight_scale": ("F32", ()),
        "n": ("I64", ()),
        "a": ("F32", (0, 3)),
        "b": ("I16", (2, 0)),
        "c": ("U8", ()),
        "big": ("U16", ()),
    }
    assert found["", "n"][2] == (7).to_bytes(8, "little")
    assert found["", "big"][2] == b"\3\0"
    assert content(open_tensors({})) == {}
    assert open_tensors({}).layout is None


def test_the_name_that_safetensors_keeps_for_itself_is_refused():
    with pytest.raises(BadTensor, match=r"'__metadata__'.*rename"):
        open_tensors({"__metadata__": torch.ones(1)})


def test_components():
    one, two = torch.ones(1), torch.zeros(1)
    source = open_source({"draft": {"w": one}, "": {"w": two, "v": one}, "a/b": {"w": two}})
    assert [(info.component, info.name) for info in source.tensors] == [
        ("", "v"),
        ("", "w"),
        ("a/b", "w"),
        ("draft", "w"),
    ]
    assert content(source)["draft", "w"][2] == raw(one)
    with pytest.raises(BadName):
        open_tensors({"../x": {"w": one}})
    with pytest.raises(BadTensor, match="'x'"):
        open_tensors({"x": {}})
    with pytest.raises(BadTensor, match="'m': a dict"):
        open_tensors({"m": {"w": one}, "w": one})


def test_tied_tensors_keep_both_names():
    w = torch.arange(4.0)
    found = content(open_tensors({"embed": w, "lm_head": w}))
    assert found["", "embed"] == found["", "lm_head"] == ("F32", (4,), raw(w))


def test_what_is_no_tensor_is_named_with_its_type():
    bad = {"w": torch.ones(1), "l._extra_state": io.BytesIO(), "b": None, "step": 3}
    with pytest.raises(BadTensor) as caught:
        open_source(bad)
    message = str(caught.value)
    for part in ("'l._extra_state': a _io.BytesIO", "'b': a NoneType", "'step': a int"):
        assert part in message
    assert "'w'" not in message
    with pytest.raises(BadTensor, match="and 15 more"):
        open_tensors({str(i): i for i in range(25)})
    with pytest.raises(BadTensor, match=r"3: a name of type int"):
        open_tensors({3: torch.ones(1)})
    with pytest.raises(BadTensor, match="Unicode"):
        open_tensors({"\ud800": torch.ones(1)})
    names = ["", "../../x", "a\0b", "n" * 5000, "A", "a", "é", "e\u0301"]
    assert [info.name for info in open_tensors(dict.fromkeys(names, torch.ones(1))).tensors] == sorted(names)


class Sub(torch.Tensor):
    pass


def sparse():
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.nn.Parameter(torch.ones(2, device="meta")), "meta"),
        (sparse, "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.ones(2).as_subclass(Sub), "Sub"),
        (lambda: torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (lambda: torch._efficientzerotensor((3,)), "ZeroTensor"),
        (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
        (lambda: torch.ones(2, dtype=torch.complex32), "complex32"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "bits8"),
        (lambda: torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t(), "fp4"),
        (lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "fp4"),
        (lambda: np.zeros(2, "c16"), "complex128"),
        (lambda: np.array([None]), "object"),
        (lambda: np.array(["a"]), "str"),
        (lambda: np.zeros(2, "f4,i4"), "dtype void64"),
        (lambda: np.zeros(2, "M8[s]"), "datetime64"),
        (lambda: np.zeros(2, np.longdouble), "float128"),
        (lambda: np.zeros(2, ml_dtypes.int4), "int4"),
        (lambda: np.zeros(2, ml_dtypes.float4_e2m1fn), "float4_e2m1fn"),
        (lambda: np.zeros(2, ml_dtypes.float8_e3m4), "float8_e3m4"),
        (lambda: np.ma.zeros(2), "MaskedArray"),
        (lambda: np.float32(1), "float32"),
        (lambda: [1.0], "list"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(value, part):
    with pytest.raises(BadTensor, match=f"'the.key': .*{part}"):
        open_tensors({"the.key": value()})


def test_a_dtensor_is_refused_by_name(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        for value in (sharded, torch.nn.Parameter(sharded)):
            with pytest.raises(BadTensor, match=r"'the.key': a DTensor.*full_tensor"):
                open_tensors({"the.key": value})
    finally:
        dist.destroy_process_group()


def test_a_tensor_of_2_33_elements():
    size = 2**33
    array = np.zeros(size, "u1")
    array[[2**31, 2**32 + 5]] = 1
    source = open_tensors({"w": array, "t": torch.from_numpy(array)})
    for index in range(2):
        assert bytes(source.read(index, 2**32 + 4, 2**32 + 7)) == b"\0\1\0"
        assert bytes(source.read(index, 2**31 - 1, 2**31 + 2)) == b"\0\1\0"


def assorted():
    """Tensors of all sorts, most of them as plain as most are."""
    numbers = torch.arange(12, dtype=torch.float32)
    w = numbers.to(torch.bfloat16)
    nan = torch.tensor([0x7F81, -1], dtype=torch.int16).view(torch.bfloat16)
    return [
        *(w, w, nan, numbers.reshape(3, 4), torch.nn.Parameter(numbers), torch.tensor(7), torch.tensor([True])),
        *(numbers.reshape(3, 4).t(), numbers[::2], torch.ones(1).expand(5), torch.zeros(0, 3)),
        *(
            torch.view_as_complex(numbers.reshape(6, 2)).conj(),
            torch.view_as_complex(numbers.reshape(6, 2)).conj().imag,
        ),
        *(torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.zeros(3).view(torch.int32)),
        *(np.arange(6, dtype="<f2").reshape(2, 3), np.array(3, "u1"), np.zeros((0, 2)), np.arange(4, dtype=">i4")),
        *(np.arange(6, dtype="<f2").reshape(2, 3).T, np.arange(3).astype(ml_dtypes.bfloat16), np.arange(9)[::3]),
    ]


@given(st.lists(st.sampled_from(range(len(assorted()))), max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_runs_of_tensors_of_any_sort(chosen, one, two):
    values = assorted()
    source = open_tensors({f"{i:02}": values[k] for i, k in enumerate(chosen)})
    first, last = sorted((min(one, len(chosen)), min(two, len(chosen))))
    alone = [open_tensors({"w": values[k]}) for k in chosen]
    assert [info[2:] for info in source.tensors] == [other.tensors[0][2:] for other in alone]
    wanted = b"".join([bytes(other.read(0, 0, other.tensors[0].nbytes)) for other in alone[first:last]])
    assert bytes(source.read_run(first, last)) == wanted


@pytest.mark.parametrize("compiled", [False, True])
def test_many_tensors_of_any_sort_are_what_each_is_alone(monkeypatch, compiled):
    """Sorts beside each other, in and out of order, and again, when what was seen before is used."""
    monkeypatch.setattr(hashes, "worth", lambda count: compiled)
    sorts = assorted()
    few = [*range(len(sorts)), *[0] * 1500, 7, *[4] * 1500, 8]
    for chosen in (few, [0] * 1500, [0] * 1499 + [1], [3] * 1500, few):
        for names in (sorted, lambda given: sorted(given, reverse=True)):
            values = {name: sorts[k] for name, k in zip(names(f"{i:04}" for i in range(len(chosen))), chosen)}
            source = open_tensors(values)
            assert [info.name for info in source.tensors] == sorted(values)
            alone = {id(value): open_tensors({"w": value}) for value in sorts}
            wanted = []
            for info in source.tensors:
                one = alone[id(values[info.name])]
                assert info[2:] == one.tensors[0][2:]
                wanted.append(bytes(one.read(0, 0, info.nbytes)))
            assert bytes(source.read_run(0, len(wanted))) == b"".join(wanted)
            assert bytes(source.read_run(20, len(wanted) - 3)) == b"".join(wanted[20:-3])


def test_what_has_changed_since_the_last_commit_is_seen():
    """Names and sorts are remembered: a new shape, dtype, name, fault, or stride is none of those."""
    values = {f"{i:04}": torch.full((2, 3), float(i)) for i in range(1200)}
    assert content(open_tensors(values)) == content(open_tensors(dict(values)))
    for changed in (torch.ones(6), torch.ones(2, 3, dtype=torch.int32), torch.ones(3, 2).t(), torch.ones(0, 3)):
        found = content(open_tensors({**values, "0700": changed}))
        assert found["", "0700"] == content(open_tensors({"w": changed}))["", "w"]
        assert found["", "0701"][2] == raw(values["0701"])
    with pytest.raises(BadTensor, match="'0700': a meta tensor"):
        open_tensors({**values, "0700": torch.ones(2, 3, device="meta")})
    with pytest.raises(BadTensor, match="a sparse_coo tensor"):
        open_tensors({**values, "0700": torch.ones(2, 3).to_sparse()})
    renamed = {("x" if name == "0700" else name): value for name, value in values.items()}
    assert content(open_tensors(renamed))["", "x"] == content(open_tensors(values))["", "0700"]
    assert [info.name for info in open_tensors(renamed).tensors] == sorted(renamed)
    components = open_tensors({"a": values, "b": values})
    assert [info[:2] for info in components.tensors] == [(part, name) for part in "ab" for name in sorted(values)]


def test_a_tensor_that_was_let_go_of_is_not_read_past_its_end():
    values = {str(i): torch.ones(1 << 20) for i in range(2)}
    source = open_tensors(values)
    values["1"].data = torch.ones(1)
    assert len(source.read_run(0, 2)) == 4 + (4 << 20)
    values["0"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        source.read_run(0, 2)


def test_threads_read_laid_out_tensors():
    tensors = {str(i): torch.arange(1000, dtype=torch.int32).add(i).reshape(10, 100).t() for i in range(4)}
    source = open_tensors(tensors)
    expected = [raw(tensors[info.name]) for info in source.tensors]
    faults = []

    def reader(offset: int) -> None:
        for i in range(200):
            index = (i + offset) % 4
            if bytes(source.read(index, 40 + i, 400 + i)) != expected[index][40 + i : 400 + i]:
                faults.append(index)

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@given(
    st.lists(st.integers(0, 3), max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(["u1", "<f2", ">i4"]),
)
def test_any_strided_array_gives_its_logical_bytes(shape, random, dtype):
    array = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    axes = list(range(len(shape)))
    random.shuffle(axes)
    view = array.transpose(axes)[(..., *(slice(None, None, random.choice([1, -1, 2])) for _ in axes))]
    little = np.ascontiguousarray(view, dtype=np.dtype(dtype).newbyteorder("<"))
    found = content(open_tensors({"w": view}))["", "w"]
    assert found[1:] == (view.shape, little.tobytes())
    assert dtypes.nbytes(*found[:2]) == len(found[2])


@pytest.mark.parametrize("count", [1, 1200])
def test_a_tensor_whose_memory_was_freed_is_named(count: int):
    """As those of a module that FSDP has resharded are."""
    values = {f"t{i:04d}": torch.ones(3) for i in range(count)}
    values["t0000"].untyped_storage().resize_(0)
    with pytest.raises(BadTensor, match="'t0000': a tensor whose memory was freed"):
        open_tensors(values)


def test_a_tensor_inside_of_a_transform_is_named():
    def look(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(BadTensor, match=r"'w': a tensor inside of a torch\.func transform"):
            open_tensors({"w": value})
        return value.sum()

    torch.func.grad(look)(torch.ones(3))
