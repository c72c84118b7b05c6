"""The fsspec file system weightvc://: versions read as files, by those who know nothing of weightvc."""

import json
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightvc
from tests.kit import faults
from tests.kit.weights import Bits, flipped, tensor, tiny_format, write_shards
from weightvc.errors import Corrupt, KeyNotFound, RefNotFound, Refused, Unavailable
from weightvc.filesystem import Location, WeightvcFileSystem, locate

ROOT = Path(__file__).parents[2]
WEIGHTS = {
    ("", "a"): tensor("BF16", (600, 3), 1),
    ("", "b"): tensor("F32", (50,), 2),
    ("", "empty"): tensor("F32", (0,), 3),
    ("draft", "c"): tensor("U8", (7,), 4),
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """As the entry point does for an installed weightvc (see test_the_entry_point)."""
    fsspec.register_implementation("weightvc", WeightvcFileSystem, clobber=True)


@pytest.fixture
def versions(tmp_path: Path):
    """A repository of three versions of a sharded checkpoint with files beside, in small packs and blocks."""
    repository = weightvc.init(tmp_path / "policy", cache=None)
    made = []
    with tiny_format():
        for number in range(3):
            weights = {key: flipped(value, 0.3, number) for key, value in WEIGHTS.items()}
            folder = tmp_path / f"checkpoint-{number}"
            write_shards(folder, {k: v for k, v in weights.items() if not k[0]}, 2)
            write_shards(folder / "draft", {("", n): v for (c, n), v in weights.items() if c}, 1)
            (folder / "draft" / "image@2x.png").write_bytes(b"png")
            (folder / "config.json").write_text(json.dumps({"number": number}))
            made.append(repository.commit(folder, step=number, run="r/7", branch="feature/x"))
        yield repository, made, tmp_path


def below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def url(repository: weightvc.Repository, ref: str, path: str = "") -> str:
    return f"weightvc://{repository.url.removeprefix('file://')}@{ref}/{path}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("weightvc://s3://b/policy@main~3/model.safetensors", ("s3://b/policy", "main~3", "model.safetensors")),
        ("weightvc://s3://b/p@feature%2Fx@{1}/a/b@2x.json", ("s3://b/p", "feature/x@{1}", "a/b@2x.json")),
        ("weightvc://p@main@{step=121,run=r%2F7}~2/", ("p", "main@{step=121,run=r/7}~2", "")),
        ("weightvc:///data/p@v1.0", ("/data/p", "v1.0", "")),
        ("weightvc://s3://b/p?endpoint_url=http://h:1@main/f", ("s3://b/p?endpoint_url=http://h:1", "main", "f")),
        ("weightvc://@/f@2x.png", (None, None, "f@2x.png")),
        ("weightvc://p@@/f", ("p", "@", "f")),
        ("weightvc://dir/f", (None, None, "dir/f")),
        ("dir/f@2x.png", (None, None, "dir/f@2x.png")),
    ],
)
def test_a_url_is_taken_apart_in_one_way(text, wanted):
    assert locate(text) == Location(*wanted)


def test_every_version_is_read_as_it_lay(versions):
    repository, made, folder = versions
    for number, version in enumerate(made):
        wanted = below(folder / f"checkpoint-{number}")
        for ref in (version.id, f"feature%2Fx~{2 - number}", f"feature%2Fx@{{step={number},run=r%2F7}}"):
            fs, root = fsspec.core.url_to_fs(url(repository, ref))
            assert fs.find(root) == [f"{root}/{name}" for name in sorted(wanted)]
            assert fs.glob(f"{root}/*/*.safetensors") == [f"{root}/draft/model-00001-of-00001.safetensors"]
            for name, data in wanted.items():
                assert fs.cat_file(name) == fs.cat_file(f"{root}/{name}") == data
                with fsspec.open(url(repository, ref, name)) as file:
                    assert file.read() == data
                # Every name is a URL once more: so do libraries that list with one instance and open with another.
                assert fsspec.open(f"{root}/{name}").open().read() == data
            fs.get(root, str(folder / "copy" / ref[:20]), recursive=True)
            assert below(folder / "copy" / ref[:20]) == wanted


def test_listing_and_info(versions):
    repository, made, _ = versions
    fs = fsspec.filesystem("weightvc", repo=repository.url.removeprefix("file://"), ref="feature/x")
    assert fs.ls("", detail=False) == [
        "config.json",
        "draft",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    info = fs.info("draft/model-00001-of-00001.safetensors")
    assert (info["type"], info["version"], info["tree"]) == ("file", made[2].id, made[2].tree)
    assert info["size"] == len(fs.cat_file(info["name"]))
    assert fs.info("draft")["type"] == "directory"
    assert fs.isdir("")
    assert fs.isdir("draft/")
    assert not fs.isfile("draft")
    assert not fs.exists("dra")
    assert fs.glob("**/*.safetensors") == [
        "draft/model-00001-of-00001.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert [fs.info(one)["name"] for one in fs.ls("draft", detail=False)] == fs.ls("draft", detail=False)
    assert fs.modified("config.json").timestamp() == pytest.approx(made[2].time / 1e6)
    again = fsspec.open(fs.unstrip_protocol("config.json")).fs
    assert again.version == made[2]
    for name in ("nothing", "draft/nothing", "config.json/x"):
        with pytest.raises(FileNotFoundError, match="it has"):
            fs.info(name)
        with pytest.raises(FileNotFoundError):
            fs.open(name)
        with pytest.raises(FileNotFoundError):
            fs.ls(name)
    with pytest.raises(Refused, match="open it anew"):
        fs.info(url(repository, "main", "config.json"))
    with pytest.raises(IsADirectoryError):
        fs.open("draft")


@settings(max_examples=40)
@given(st.data())
def test_ranges_and_seeks_give_what_slices_give(data):
    name = f"memory://fs-{os.getpid()}"
    with tiny_format():
        repository = weightvc.init(name, cache=None, exist_ok=True)
        if not repository.branches():
            for number in range(3):
                repository.commit(Bits({key: flipped(value, 0.3, number) for key, value in WEIGHTS.items()}))
        fs = WeightvcFileSystem(name, cache=None)
        whole = repository.cat("main", "model.safetensors")
        edge = st.one_of(st.none(), st.integers(-len(whole) - 5, len(whole) + 5))
        start, end = data.draw(edge), data.draw(edge)
        assert fs.cat_file("model.safetensors", start, end) == whole[start:end]
        with fs.open("model.safetensors", block_size=data.draw(st.integers(1, 5000))) as file:
            for _ in range(3):
                at, count = data.draw(st.integers(0, len(whole) + 5)), data.draw(st.integers(0, len(whole)))
                file.seek(at)
                assert file.read(count) == whole[at : at + count]


def test_safetensors_reads_it(versions):
    import torch
    from safetensors.torch import load

    repository, made, folder = versions
    name = "model-00001-of-00002.safetensors"
    with fsspec.open(url(repository, made[1].id, name)) as file:
        found = load(file.read())
    wanted = load((folder / "checkpoint-1" / name).read_bytes())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value.view(torch.uint8), wanted[key].view(torch.uint8)) for key, value in found.items())


def test_transformers_loads_what_was_copied(tmp_path):
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = BertModel(config)
    model.save_pretrained(tmp_path / "saved")
    repository = weightvc.init(tmp_path / "policy", cache=None)
    repository.commit(tmp_path / "saved")
    fs, root = fsspec.core.url_to_fs(f"weightvc://{tmp_path / 'policy'}@main/")
    fs.get(root, str(tmp_path / "copied"), recursive=True)
    assert below(tmp_path / "copied") == below(tmp_path / "saved")
    loaded = BertModel.from_pretrained(tmp_path / "copied").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_one_instance_reads_one_version_and_the_next_the_newest(tmp_path):
    place = str(tmp_path / "policy")
    repository = weightvc.init(place, cache=None)
    first = repository.commit({"w": np.zeros(9, np.float16)})
    fs = fsspec.filesystem("weightvc", repo=place)
    file = fs.open("model.safetensors")
    assert fs.version == first
    second = repository.commit({"w": np.ones(9, np.float16)})
    assert fs.info("model.safetensors")["version"] == first.id
    copies = [pickle.loads(pickle.dumps(fs)), WeightvcFileSystem.from_json(fs.to_json())]
    assert [copy.version for copy in copies] == [first, first]
    assert pickle.loads(pickle.dumps(file)).read() == file.read() == repository.cat(first, "model.safetensors")
    newest = fsspec.open(f"weightvc://{place}@main/model.safetensors")
    with newest as opened:
        assert opened.read() == repository.cat(second, "model.safetensors")
    fs.invalidate_cache()
    assert fs.version == second
    file.seek(0)
    assert file.read() == repository.cat(first, "model.safetensors")


def test_it_is_pickled_at_its_version_before_anything_was_read(tmp_path):
    place = str(tmp_path / "policy")
    repository = weightvc.init(place, cache=None)
    first = repository.commit({"w": np.zeros(9, np.float16)})
    sent = pickle.dumps(fsspec.filesystem("weightvc", repo=place))
    repository.commit({"w": np.ones(9, np.float16)})
    assert pickle.loads(sent).version == first


def test_a_forked_child_reads_on(versions, tmp_path):
    repository, _, folder = versions
    fs = WeightvcFileSystem(repository.url.removeprefix("file://"), "feature/x~1")
    name = "model-00001-of-00002.safetensors"
    wanted = (folder / "checkpoint-1" / name).read_bytes()
    file = fs.open(name, block_size=100)
    assert file.read(50) == wanted[:50]
    child = faults.fork(lambda: [file.read() == wanted[50:], fs.cat_file(name) == wanted], tmp_path / "result")
    assert faults.wait(child) == 0
    assert json.loads((tmp_path / "result").read_text()) == [True, True]
    assert file.read() == wanted[50:]


def test_over_s3_a_slice_of_a_base_takes_its_block_alone(s3_place):
    with tiny_format():
        repository = weightvc.init(s3_place.url, cache=None, **s3_place.options)
        repository.commit(Bits({("", "a"): tensor("BF16", (20_000,), 1)}))
        options = {"repo": s3_place.url, "cache": None, **s3_place.reader_options}
        fs = WeightvcFileSystem(**options)
        whole = repository.cat("main", "model.safetensors")
        fs.info("model.safetensors")
        stats = fs._view._repository.stats
        before = stats.bytes_read, stats.reads
        assert fs.cat_file("model.safetensors", 20_000, 20_100) == whole[20_000:20_100]
        assert stats.reads - before[1] <= 2
        assert stats.bytes_read - before[0] < len(whole) / 4
        # A chained URL, with the options of each side.
        with fsspec.open(
            f"weightvc://model.safetensors::{s3_place.url}",
            weightvc={"cache": None, **s3_place.reader_options},
        ) as file:
            assert file.read() == whole


def test_side_by_side_urls_of_other_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    repository = weightvc.init("policy", cache=None)
    repository.commit({"w": np.zeros(9, np.float16)})
    whole = repository.cat("main", "model.safetensors")
    for text in (
        "weightvc://policy@main/model.safetensors",
        "weightvc://policy@/model.safetensors",
        f"weightvc://{tmp_path}/policy@HEAD/model.safetensors",
        f"weightvc://file://{tmp_path}/policy@main/model.safetensors",
        f"weightvc://model.safetensors::file://{tmp_path}/policy",
    ):
        with fsspec.open(text, cache=None) if "::" not in text else fsspec.open(text) as file:
            assert file.read() == whole, text
    fs = fsspec.filesystem("weightvc", repo="policy")
    monkeypatch.chdir("/")
    assert fs.cat_file("model.safetensors") == whole
    # A version of one repository is a source for another.
    other = weightvc.init(tmp_path / "other", cache=None)
    made = other.commit(f"weightvc://{tmp_path}/policy@main/model.safetensors")
    assert made.tree == repository.resolve("main").tree


def test_a_rotten_block_is_never_handed_out(versions):
    repository, made, folder = versions
    for pack in (folder / "policy" / "pack").iterdir():
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(data)
    fs = WeightvcFileSystem(repository.url.removeprefix("file://"), made[0].id, cache=None)
    name = "model-00001-of-00002.safetensors"
    assert fs.cat_file("config.json") == (folder / "checkpoint-0" / "config.json").read_bytes()
    with pytest.raises(Corrupt):
        fs.cat_file(name, 0, fs.info(name)["size"])
    with pytest.raises(Corrupt):
        fs.get_file(name, folder / "copy")
    assert not (folder / "copy").exists()


def test_what_cannot_be_found_or_reached_is_no_empty_directory(tmp_path, monkeypatch):
    with pytest.raises(Refused, match="needs a repository"):
        fsspec.filesystem("weightvc")
    with pytest.raises(KeyNotFound):
        WeightvcFileSystem(tmp_path / "nothing").exists("x")
    repository = weightvc.init(tmp_path / "policy", cache=None)
    repository.commit({"w": np.zeros(9, np.float16)})
    with pytest.raises(RefNotFound):
        WeightvcFileSystem(tmp_path / "policy", "nobody").find("")

    def unreachable(*_: object, **__: object) -> weightvc.Repository:
        raise Unavailable("the store cannot be reached")

    monkeypatch.setattr("weightvc.filesystem.open", unreachable)
    for ask in ("find", "walk", "glob", "exists", "isdir", "isfile", "ls", "info", "cat_file"):
        with pytest.raises(Unavailable):
            getattr(WeightvcFileSystem("s3://nowhere/policy", cache=None), ask)("x")


def test_nothing_is_written(tmp_path):
    repository = weightvc.init(tmp_path / "policy", cache=None)
    repository.commit({"w": np.zeros(9, np.float16)})
    fs = WeightvcFileSystem(tmp_path / "policy")
    for write in (
        lambda: fs.open("new", "wb"),
        lambda: fs.pipe("new", b"x"),
        lambda: fs.mkdir("new"),
        lambda: fs.makedirs("a/b"),
        lambda: fs.rm("model.safetensors"),
        lambda: fs.mv("model.safetensors", "b"),
        lambda: fs.cp_file("model.safetensors", "b"),
        lambda: fs.touch("new"),
        lambda: fs.put_file(str(tmp_path / "policy" / "root"), "new"),
    ):
        with pytest.raises(Refused, match="read-only"):
            write()
    assert fs.ls("", detail=False) == ["model.safetensors"]


def test_the_entry_point(tmp_path):
    """What pyproject.toml promises is what fsspec finds, in a process that has not heard of weightvc."""
    specs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fsspec.specs"]
    (tmp_path / "probe-1.dist-info").mkdir()
    (tmp_path / "probe-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    lines = "\n".join(f"{name} = {value}" for name, value in specs.items())
    (tmp_path / "probe-1.dist-info" / "entry_points.txt").write_text(f"[fsspec.specs]\n{lines}\n")
    repository = weightvc.init(tmp_path / "policy", cache=None)
    repository.commit({"w": np.zeros(9, np.float16)})
    code = (
        "import sys, fsspec; assert 'weightvc' not in sys.modules\n"
        f"print(len(fsspec.open('weightvc://{tmp_path}/policy@main/model.safetensors').open().read()))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(repository.cat("main", "model.safetensors"))


def test_importing_weightvc_does_not_import_fsspec():
    code = "import sys, weightvc; weightvc.open; assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
