import json
import os
import socket
import struct
import subprocess
import sys
import threading
from itertools import accumulate

import fsspec
import numpy as np
import pytest
import safetensors.numpy

from weightvc.errors import BadFile, BadName, BadTensor
from weightvc.objects import dtypes
from weightvc.sources import open_source
from weightvc.sources.base import TensorInfo
from weightvc.sources.files import open_files
from weightvc.sources.header import build_header
from weightvc.sources.local import MAX_OPEN

from .contents import content, files

ONE = safetensors.numpy.save(
    {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.array(7, "<i8")}, {"format": "pt"}
)
TWO = safetensors.numpy.save({"c": np.arange(5, dtype="u1")})
NONE = safetensors.numpy.save({})


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


@pytest.fixture
def memory():
    """A fresh folder of fsspec's memory file system: a function that writes, and the folder's URL."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()

    def put(path: str, data: bytes) -> None:
        fs.pipe_file(f"/box/{path}", data)

    yield put, "memory://box"
    fs.store.clear()


def test_one_file(write):
    path = write("any.safetensors", ONE)
    source = open_files(path)
    assert content(source) == {
        ("", "a"): ("I64", (), struct.pack("<q", 7)),
        ("", "b"): ("F32", (2, 3), np.arange(6, dtype="<f4").tobytes()),
    }
    assert files(source) == {"model.safetensors": ONE}
    assert files(open_files(str(path), name="sub/x.safetensors")) == {"sub/x.safetensors": ONE}
    assert files(open_files(f"file://{path}")) == {"model.safetensors": ONE}
    source.check()
    source.close()
    source.close()


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "x.bin", ""])
def test_a_bad_name_for_one_file_is_refused(write, name):
    with pytest.raises(BadName):
        open_files(write("x.safetensors", ONE), name=name)


def test_ranges(write):
    source = open_files(write("x.safetensors", ONE))
    data = np.arange(6, dtype="<f4").tobytes()
    assert source.read(1, 3, 11) == data[3:11]
    assert source.read(1, 24, 24) == b""
    for start, stop in ((0, 25), (-1, 3), (4, 3)):
        with pytest.raises(IndexError):
            source.read(1, start, stop)


def test_a_directory_is_kept_byte_for_byte(tmp_path, write):
    kept = {
        "model.safetensors": ONE,
        "config.json": b'{"a": 1}\n',
        "tokenizer/merges.txt": b"\xff\x00",
        "draft/model.safetensors": ONE,
        "a/b/none.safetensors": NONE,
        "pytorch_model.bin": b"opaque",
        "empty": b"",
        ".gitattributes": b"x",
        "deep/.git/x": b"only the top one is left out",
    }
    for path, data in kept.items():
        write(path, data)
    write(".git/config", b"x")
    write(".weightvc/state", b"x")
    write("draft/.weightvc", b"a checkout lies there")
    (tmp_path / "empty folder").mkdir()
    source = open_files(tmp_path)
    assert files(source) == kept
    assert list(content(source)) == [("", "a"), ("", "b"), ("draft", "a"), ("draft", "b")]
    source.check()


def test_exclude(tmp_path, write):
    for path in ("model.safetensors", "optimizer/a.safetensors", "x.pt", "sub/y.pt", "sub/z.txt"):
        write(path, ONE)
    os.mkfifo(tmp_path / "pipe")
    source = open_files(tmp_path, exclude=["optimizer", "*.pt", "pipe"])
    assert list(files(source)) == ["model.safetensors", "sub/z.txt"]
    assert list(files(open_files(tmp_path, exclude=["sub/*", "opt*", "pipe"]))) == [
        "model.safetensors",
        "x.pt",
    ]
    assert "sub/z.txt" in files(open_files(tmp_path, exclude="pipe"))


@pytest.mark.parametrize(
    ("names", "found"),
    [([], "nothing"), (["a.txt"], "a.txt"), (["pytorch_model.bin", "config.json"], "pytorch_model.bin")],
)
def test_a_directory_without_weights_says_what_is_there(tmp_path, write, names, found):
    for name in names:
        write(name, b"x")
    with pytest.raises(BadFile, match=found):
        open_files(tmp_path)


def test_nothing_there(tmp_path, write, memory):
    for path in (tmp_path / "none", "memory://none", "nosuchscheme://x"):
        with pytest.raises(BadFile, match=str(path)):
            open_files(path)


def test_side_files_are_bounded(tmp_path, write, monkeypatch):
    write("model.safetensors", ONE)
    for name in "abcde":
        with open(tmp_path / name, "wb") as file:
            file.truncate(64 << 20)
    with pytest.raises(BadFile, match=r"/e: .*256 MiB.*exclude"):
        open_files(tmp_path)
    with open(tmp_path / "a", "ab") as file:
        file.write(b"1")
    with pytest.raises(BadFile, match=r"/a: .*64 MiB.*exclude='a'"):
        open_files(tmp_path)


def test_links(tmp_path, write):
    inside = write("in/real.safetensors", ONE).parent
    (inside / "model.safetensors").symlink_to("real.safetensors")
    with pytest.raises(BadFile, match=r"in 'model.safetensors' and in 'real.safetensors'"):
        open_files(inside)
    source = open_files(inside, exclude=["real.safetensors"])
    assert files(source) == {"model.safetensors": ONE}
    (tmp_path / "link").symlink_to("in")
    assert files(open_files(tmp_path / "link", exclude=["real*"])) == {"model.safetensors": ONE}

    outside = write("out/config.json", b"{}")
    for target in (outside, "../out/config.json", "../in2", "/etc/hostname"):
        link = inside / "config.json"
        link.symlink_to(target)
        with pytest.raises(BadFile, match=r"config\.json.*cp -rL"):
            open_files(inside)
        link.unlink()
    write("inside/model.safetensors", ONE)
    (inside / "sibling").symlink_to("../inside/model.safetensors")
    with pytest.raises(BadFile, match=r"sibling.*cp -rL"):
        open_files(inside)
    (inside / "sibling").unlink()
    (inside / "loop").symlink_to(".")
    with pytest.raises(BadFile, match="loop"):
        open_files(inside)


def test_a_hub_cache_is_refused_with_the_mend(tmp_path, write):
    write("blobs/1", ONE)
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/model.safetensors").symlink_to("../blobs/1")
    with pytest.raises(BadFile, match="cp -rL"):
        open_files(tmp_path / "snapshots")
    assert files(open_files(tmp_path / "snapshots/model.safetensors")) == {"model.safetensors": ONE}


def test_pipes_and_sockets_are_refused(tmp_path, write, monkeypatch):
    write("d/model.safetensors", ONE)
    os.mkfifo(tmp_path / "d/pipe")
    with pytest.raises(BadFile, match="pipe"):
        open_files(tmp_path / "d")
    with pytest.raises(BadFile, match="pipe"):
        open_files(tmp_path / "d/pipe")
    (tmp_path / "d/pipe").unlink()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("d/sock")
        with pytest.raises(BadFile, match="sock"):
            open_files(tmp_path / "d")


@pytest.mark.parametrize("name", [b"a\\b", b"a\nb", b"C:x", b"\xff"])
def test_unsafe_file_names_are_refused(tmp_path, write, name):
    write("model.safetensors", ONE)
    with open(os.fsencode(tmp_path) + b"/" + name, "wb"):
        pass
    with pytest.raises(BadName):
        open_files(tmp_path)


def test_colliding_file_names_are_refused(tmp_path, write):
    write("model.safetensors", ONE)
    write("A.json", b"")
    write("a.json", b"")
    with pytest.raises(BadFile, match=r"'A\.json' and 'a\.json'"):
        open_files(tmp_path)


def test_shards_with_an_index(tmp_path, write):
    write("1.safetensors", ONE)
    write("2.safetensors", TWO)
    write("sub/1.safetensors", TWO)
    write("sub/m.safetensors.index.json", index(c="1.safetensors"))
    write("m.safetensors.index.json", index(a="1.safetensors", b="1.safetensors", c="2.safetensors"))
    source = open_files(tmp_path)
    assert list(content(source)) == [("", "a"), ("", "b"), ("", "c"), ("sub", "c")]
    assert len(files(source)) == 5


def test_shards_of_many_tensors_are_read_in_order(tmp_path, write):
    """Those of three files of one size lie between each other; and again, with what is remembered of the headers."""
    sizes = [4, 2, 0, 6]
    shards: list[dict[str, np.ndarray]] = [{}, {}, {}]
    for i in range(3600):
        shards[i // 5 % 3][f"{i:04}"] = np.full(sizes[i // 15 % 4], i, "<u2")
    held = {("", name): ("U16", array.shape, array.tobytes()) for shard in shards for name, array in shard.items()}
    for i, shard in enumerate(shards):
        write(f"c/{i}.safetensors", safetensors.numpy.save(shard))
    assert len({(tmp_path / f"c/{i}.safetensors").stat().st_size for i in range(3)}) == 1
    joined = b"".join(data for _, (_, _, data) in sorted(held.items()))
    for _ in range(2):
        source = open_files(tmp_path / "c")
        assert content(source) == held
        ends = [0, *accumulate(info.nbytes for info in source.tensors)]
        for first, last in ((0, 3600), (0, 1), (3, 7), (4, 17), (1000, 1500), (3599, 3600)):
            assert bytes(source.read_run(first, last)) == joined[ends[first] : ends[last]]
    shards[2]["0003"] = np.zeros(1, "<u2")
    write("c/2.safetensors", safetensors.numpy.save(shards[2]))
    for _ in range(2):
        with pytest.raises(BadFile, match=r"'0003' is in '.\.safetensors' and in '.\.safetensors'"):
            open_files(tmp_path / "c")


@pytest.mark.parametrize(
    "bad",
    [
        index(a="1.safetensors", b="1.safetensors", c="1.safetensors"),
        index(a="1.safetensors", b="1.safetensors", d="2.safetensors"),
        index(a="1.safetensors", c="2.safetensors"),
        index(a="1.safetensors", b="1.safetensors", c="3.safetensors"),
        index(a="1.safetensors", b="1.safetensors", c="sub/2.safetensors"),
        *(
            index(a="1.safetensors", b="1.safetensors", c=name)
            for name in ("../../s.safetensors", "/etc/x", "a\\..\\b", "C:x", "a\0b", "", "..", "config.json")
        ),
        b'{"weight_map":{"a":"1.safetensors","a":"1.safetensors","b":"1.safetensors"}}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":[]}',
        b"[]",
        b"",
        b"\xff",
        b"[" * 200_000,
        b'{"weight_map":' + b"9" * 5000 + b"}",
    ],
)
def test_an_index_that_lies_is_refused_by_name(tmp_path, write, bad):
    write("1.safetensors", ONE)
    write("2.safetensors", TWO)
    write("sub/2.safetensors", TWO)
    write("config.json", b"{}")
    write("m.safetensors.index.json", bad)
    with pytest.raises(BadFile, match=r"m\.safetensors\.index\.json"):
        open_files(tmp_path)


def test_a_key_in_two_shards_is_refused_naming_both(tmp_path, write):
    write("1.safetensors", ONE)
    write("2.safetensors", ONE)
    with pytest.raises(BadFile, match=r"'a'.*'1\.safetensors'.*'2\.safetensors'"):
        open_files(tmp_path)


@pytest.mark.parametrize("change", ["content", "longer", "shorter", "replaced", "gone"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_change_while_reading_is_noticed(tmp_path, write, name, change):
    path = write("model.safetensors", ONE)
    write("config.json", b"{}")
    source = open_files(tmp_path)
    source.check()
    path = tmp_path / name
    data = path.read_bytes()
    if change == "content":
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
    elif change == "longer":
        path.write_bytes(data + b"x")
    elif change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "gone":
        path.unlink()
    else:
        status = path.stat()
        other = write("other", data)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.rename(path)
    with pytest.raises(BadFile, match=name):
        source.check()


def test_a_file_that_shrinks_gives_no_short_read(write):
    path = write("x.safetensors", ONE)
    source = open_files(path)
    os.truncate(path, len(ONE) - 4)
    with pytest.raises(BadFile, match="shorter"):
        source.read(1, 0, 24)


def test_many_shards_keep_few_descriptors_and_threads_may_read(tmp_path, write):
    for number in range(MAX_OPEN + 40):
        raw = safetensors.numpy.save({f"{number:03}": np.full(10, number, "<u2")})
        write(f"{number:03}.safetensors", raw)
    source = open_files(tmp_path)
    faults = []

    def reader(offset: int) -> None:
        for number in range(len(source.tensors)):
            at = (number * 7 + offset) % len(source.tensors)
            if source.read(at, 2, 20) != np.full(9, at, "<u2").tobytes():
                faults.append(at)

    threads = [threading.Thread(target=reader, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert sum(path.startswith(str(tmp_path)) for path in opened) <= MAX_OPEN
    source.close()
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not any(path.startswith(str(tmp_path)) for path in opened)


def test_urls(memory):
    put, url = memory
    kept = {"model.safetensors": ONE, "sub/2.safetensors": TWO, "config.json": b"{}", "e": b""}
    for path, data in kept.items():
        put(path, data)
    put(".git/x", b"")
    for address in (url, f"{url}/"):
        source = open_files(address)
        assert files(source) == kept
        assert list(content(source)) == [("", "a"), ("", "b"), ("sub", "c")]
        source.check()
    single = open_files(f"{url}/sub/2.safetensors", name="x.safetensors")
    assert files(single) == {"x.safetensors": TWO}
    assert list(files(open_files(url, exclude=["sub", "e"]))) == ["config.json", "model.safetensors"]
    put("config.json", b"{ }")
    with pytest.raises(BadFile, match=r"config\.json.*changed"):
        source.check()
    single.check()
    put("sub/2.safetensors", TWO)
    with pytest.raises(BadFile, match=r"2\.safetensors.*changed"):
        single.check()


def test_unsafe_keys_at_a_url_are_refused(memory):
    put, url = memory
    put("model.safetensors", ONE)
    put("a\\b", b"")
    with pytest.raises(BadName):
        open_files(url)


@pytest.mark.parametrize("remote", [False, True])
def test_a_pickle_named_safetensors_is_refused(tmp_path, write, memory, remote):
    import io

    import torch

    put, url = memory
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    for zipped in (True, False):
        buffer = io.BytesIO()
        torch.save({"a": Evil()}, buffer, _use_new_zipfile_serialization=zipped)
        for name in ("model.safetensors", "model.pt"):
            path = write(name, buffer.getvalue())
            put(name, buffer.getvalue())
            with pytest.raises(BadFile, match=name):
                open_files(f"{url}/{name}" if remote else path)
        with pytest.raises(BadFile, match=r"model\.safetensors"):
            open_files(url if remote else tmp_path)
    assert not ran.exists()


def test_pickled_state_dicts(tmp_path, memory):
    import torch

    put, url = memory
    state = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(1, dtype=torch.int8)}
    expected = {
        ("", "a"): ("F32", (3, 2), np.arange(6, dtype="<f4").reshape(2, 3).T.tobytes()),
        ("", "b"): ("I8", (), b"\1"),
    }
    for zipped in (True, False):
        path = tmp_path / "x.pt"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        source = open_source(path)
        assert content(source) == expected
        assert source.layout is None
        source.check()
        put("x.pt", path.read_bytes())
        remote = open_source(f"{url}/x.pt")
        assert content(remote) == expected
        remote.check()
        os.utime(path, ns=(1, 1))
        with pytest.raises(BadFile, match="changed"):
            source.check()
        source.close()


@pytest.mark.parametrize("value", [{"model": {"a": 1}, "step": 3}, [1], 3, {"a": None}])
def test_other_pickles_are_refused_naming_their_keys(tmp_path, value):
    import torch

    path = tmp_path / "x.pt"
    torch.save(value, path)
    with pytest.raises(BadFile, match="model.*step" if "model" in str(value) else "state dict"):
        open_files(path)


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_a_pickle_with_code_is_refused_by_what_it_asks_for_and_nobody_is_told_to_run_it(tmp_path):
    import torch

    torch.save({"w": Runs()}, path := tmp_path / "x.pt")
    with pytest.raises(BadFile, match=r"exec.*") as caught:
        open_files(path)
    assert "weights_only=False" not in str(caught.value)


NAMES = ["", "../../x", "a\0b", "n" * 5000, "A", "a", "é", "e\u0301", "/etc/x", "C:x"]


def test_names_never_become_paths(tmp_path, write):
    infos = [TensorInfo("", name, "U8", (1,), 1) for name in NAMES]
    write("d/model.safetensors", build_header(infos) + bytes(range(len(NAMES))))
    source = open_files(tmp_path / "d")
    assert sorted(tensor.name for tensor in source.tensors) == sorted(NAMES)
    assert len({data for _, _, data in content(source).values()}) == len(NAMES)
    assert list(files(source)) == ["model.safetensors"]


def test_every_dtype_of_the_format(write):
    infos = [TensorInfo("", name, name, (4, 2), dtypes.nbytes(name, (4, 2))) for name in dtypes.BITS]
    data = os.urandom(sum(info.nbytes for info in infos))
    raw = build_header(infos) + data
    source = open_files(write("x.safetensors", raw))
    assert files(source) == {"model.safetensors": raw}
    assert {name: dtype for (_, name), (dtype, _, _) in content(source).items()} == {n: n for n in dtypes.BITS}


def test_a_dtype_from_the_future_is_refused_by_name(write):
    header = b'{"w":{"dtype":"F3_E9","shape":[1],"data_offsets":[0,1]}}'
    with pytest.raises(BadTensor, match=r"'w'.*F3_E9"):
        open_files(write("x.safetensors", len(header).to_bytes(8, "little") + header + b"1"))


def test_a_tensor_of_2_33_elements(tmp_path):
    size = 2**33
    prefix = build_header([TensorInfo("", "w", "U8", (size,), size)])
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(prefix)
        file.truncate(len(prefix) + size)
        for at in (2**31, 2**32 + 5):
            file.seek(len(prefix) + at)
            file.write(b"\1")
    source = open_files(tmp_path / "x.safetensors")
    assert source.read(0, 2**32 + 4, 2**32 + 7) == b"\0\1\0"
    assert source.read(0, 2**31 - 1, 2**31 + 2) == b"\0\1\0"
    assert source.read(0, size - 1, size) == b"\0"


def test_files_need_no_torch(write):
    write("x.safetensors", ONE)
    directory = write("d/x.safetensors", ONE).parent
    script = (
        "import sys; from weightvc.sources import open_source\n"
        f"for path in ({str(directory)!r}, {str(directory / 'x.safetensors')!r}):\n"
        "    source = open_source(path); source.read(1, 0, 24); source.check(); source.close()\n"
        "heavy = {'torch', 'numpy', 'numba', 'boto3', 'fsspec', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_many_tensors(write, capsys):
    import time

    infos = [TensorInfo("", f"layers.{i}.experts.down_proj.weight", "BF16", (1,), 2) for i in range(150_000)]
    path = write("x.safetensors", build_header(infos) + bytes(2 * len(infos)))
    started = time.perf_counter()
    source = open_files(path)
    taken = time.perf_counter() - started
    assert len(source.tensors) == len(infos)
    with capsys.disabled():
        print(f"\n150,000 tensors: file opened in {taken:.2f} s")
