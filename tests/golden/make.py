# ruff: noqa: E402
"""Write golden repositories: `python tests/golden/make.py` makes those that are not there, or those named.

They are what "a reader reads everything that an earlier main wrote" is tested by, so once a format is released they
are only added to. Content, names and times are fixed; only another version of zstd may give other bytes. What is
expected of them (expected.json) comes from what was committed, not from what was read back.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import numpy as np

import weightvc
from tests.kit.weights import Bits, Tensor, Weights, bf, file_bytes, files_below, flipped, tensor, write_shards
from weightvc.objects import dtypes, frame, key, manifest, root, version
from weightvc.objects.retention import Policy, Rules
from weightvc.protocol import coder, collect, commit, compact, live, pins, swap
from weightvc.repository import Repository

REPOSITORIES = HERE / "repositories"


class Golden:
    """A repository being made, and what is expected of its versions."""

    def __init__(self, path: Path) -> None:
        self.repository: Repository = weightvc.init(path, cache=None, author="golden")
        self.versions: list[dict[str, Any]] = []
        self.kept: set[str] | None = None
        """Versions that can still be read; None: all of them."""

    def commit(self, weights: Weights, files: Mapping[str, bytes] | None = None, **options: Any) -> str:
        """Commit tensors: from memory, or as `files`, which hold exactly them. Returns the id."""
        if files is None:
            made = self.repository.commit(Bits(weights), **options)
            files = one_file_a_component(weights)
        else:
            with tempfile.TemporaryDirectory() as folder:
                for path, content in files.items():
                    (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(folder) / path).write_bytes(content)
                made = self.repository.commit(folder, **options)
        tensors = [
            {"component": c, "name": n, "dtype": t.dtype, "shape": list(t.shape), "sha256": sha256(t.data)}
            for (c, n), t in sorted(weights.items())
        ]
        self._expect(made, tensors, {path: sha256(data) for path, data in sorted(files.items())})
        return made.id

    def revert(self, ref: str) -> str:
        """Revert a branch."""
        old = self.repository.resolve(ref).id
        made = self.repository.revert(ref)
        same = next(v for v in self.versions if v["id"] == old)
        self._expect(made, same["tensors"], same["files"])
        return made.id

    def _expect(self, made: weightvc.Version, tensors: list[dict[str, Any]], files: dict[str, str]) -> None:
        self.versions.append(
            {
                "id": made.id,
                "tree": made.tree,
                "layout": made.layout,
                "parents": list(made.parents),
                "generation": made.generation,
                "step": made.step,
                "run": made.run,
                "message": made.message,
                "metadata": dict(made.metadata),
                "tensors": tensors,
                "files": files,
            }
        )

    def expected(self) -> dict[str, Any]:
        """What expected.json says."""
        kept = {} if self.kept is None else {"kept": sorted(self.kept)}
        return {
            **kept,
            "default": self.repository.default_branch,
            "branches": self.repository.branches(),
            "tags": self.repository.tags(),
            "versions": self.versions,
        }


def sha256(data: bytes) -> str:
    """Hex."""
    return hashlib.sha256(data).hexdigest()


def one_file_a_component(weights: Weights) -> dict[str, bytes]:
    """The files of a version that came from memory."""
    files = {}
    for component in sorted({c for c, _ in weights} or {""}):
        part = {k: t for k, t in weights.items() if k[0] == component}
        files[f"{component}/model.safetensors" if component else "model.safetensors"] = file_bytes(part)
    return files


def normal(dtype: str, count: int, seed: int) -> Tensor:
    """Floats around 0 as a model has them, few of them distinct, so that they store small."""
    values = np.round(np.random.default_rng(seed).normal(size=count) * 16) / 256
    if dtype == "BF16":
        return Tensor("BF16", (count,), (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return Tensor(dtype, (count,), values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).tobytes())


def stepped(old: Tensor, share: float, most: int, seed: int) -> Tensor:
    """About `share` of the elements moved up by 1 to `most` units in the last place."""
    rng = np.random.default_rng(seed)
    values = np.frombuffer(old.data, f"<u{dtypes.lane(old.dtype)}").copy()
    chosen = rng.random(values.size) < share
    values[chosen] += rng.integers(1, most + 1, int(chosen.sum())).astype(values.dtype)
    return replace(old, data=values.tobytes())


def changed_at(old: Tensor, at: list[int], mask: int) -> Tensor:
    """`mask` flipped in the lanes `at`."""
    values = np.frombuffer(old.data, f"<u{dtypes.lane(old.dtype)}").copy()
    values[at] ^= values.dtype.type(mask)
    return replace(old, data=values.tobytes())


# The repositories


def make_dtypes(golden: Golden) -> None:
    """Every dtype, 0-dim and empty tensors, names of any kind: from a file, one bit flipped in each, from memory."""
    weights: Weights = {("", dtype): tensor(dtype, (2, 4), i) for i, dtype in enumerate(sorted(dtypes.BITS))}
    weights["", "BOOL"] = Tensor("BOOL", (2, 4), bytes([0, 1, 1, 0, 1, 0, 0, 1]))
    weights["", "scalar f32"] = tensor("F32", (), 100)
    weights["", "scalar i64"] = tensor("I64", (), 101)
    weights["", "empty (0,3)"] = tensor("F32", (0, 3), 0)
    weights["", "empty (2,0)"] = tensor("BF16", (2, 0), 0)
    weights["", "empty F4"] = tensor("F4", (0, 4), 0)
    weights["", ""] = tensor("U8", (3,), 102)
    weights["", '../é\N{COMBINING ACUTE ACCENT}\n\\"\N{GRINNING FACE}\x7f'] = tensor("F64", (3,), 103)
    weights["", "nan and zero"] = bf(0x0000, 0x7FC0, 0x3F80, 0x7F81)
    golden.commit(weights, {"model.safetensors": file_bytes(weights, {"format": "pt", "é": "ü"})}, step=0)
    weights = {k: flipped(t, 0.0, i) for i, (k, t) in enumerate(sorted(weights.items()))}
    weights["", "nan and zero"] = bf(0x8000, 0x7FC1, 0x7FC0, 0xFFC0)
    golden.commit(weights, {"model.safetensors": file_bytes(weights, {"format": "pt", "é": "ü"})}, step=1)
    golden.commit(weights, message="the same, from memory")
    golden.commit({}, message="no tensors")
    golden.commit({}, {"model.safetensors": file_bytes({}, {"only": "metadata"})})


def make_trees(golden: Golden) -> None:
    """Components; tied, renamed, reshaped, retyped, removed and added tensors; a tensor that grows."""
    big = normal("BF16", 12_000, 1)
    weights: Weights = {
        ("", "embed"): big,
        ("", "lm_head"): big,
        ("", "norm"): normal("F32", 40, 2),
        ("", "old name"): normal("F16", 3_000, 3),
        ("", "shape"): replace(normal("F32", 12, 4), shape=(3, 4)),
        ("", "kind"): normal("BF16", 64, 5),
        ("", "gone"): tensor("U8", (7,), 6),
        ("draft", "norm"): normal("F32", 10, 7),
        ("text/encoder", "w"): normal("BF16", 50, 8),
    }
    golden.commit(weights, message="tied")
    moved = stepped(big, 0.02, 2, 9)
    weights |= {("", "embed"): moved, ("", "lm_head"): moved}
    golden.commit(weights, message="tied, both changed")
    weights["", "lm_head"] = stepped(moved, 0.02, 1, 10)
    golden.commit(weights, message="untied")
    renamed = stepped(weights.pop(("", "old name")), 0.0, 1, 11)
    weights["", "a new name"] = renamed
    golden.commit(weights, message="renamed")
    weights["", "shape"] = replace(weights["", "shape"], shape=(2, 6))
    golden.commit(weights, message="reshaped")
    weights["", "kind"] = changed_at(replace(weights["", "kind"], dtype="F16"), [3], 1)
    golden.commit(weights, message="retyped, and one change")
    weights["", "kind"] = replace(weights["", "kind"], dtype="F32", shape=(32,))
    golden.commit(weights, message="retyped to another width")
    del weights["", "gone"]
    weights["", "added"] = normal("BF16", 9, 12)
    weights["", "embed"] = replace(weights["", "embed"], shape=(12_001,), data=weights["", "embed"].data + b"\1\2")
    golden.commit(weights, message="removed, added, grown")
    # A name goes and another one, coded against it, changes from the second chunk on.
    long = Tensor("U8", (5 << 20,), bytes(5 << 20))
    weights["", "long"] = long
    golden.commit(weights)
    del weights["", "long"]
    weights["", "longer name"] = changed_at(long, [(4 << 20) + 5], 7)
    golden.commit(weights, message="renamed and changed")
    golden.commit({("draft", "only"): tensor("U8", (3,), 13)}, message="one component, not the default one")


def make_codecs(golden: Golden) -> None:
    """All codecs and both modes, in blocks of each lane width; tensors of several chunks."""
    zeros = Tensor("BF16", (9, 1 << 19), bytes(9 << 20))
    weights: Weights = {("", "zeros"): zeros, ("", "random"): tensor("U8", (4_000,), 1)}
    for i, dtype in enumerate(["F16", "BF16", "F32", "F64"]):
        weights["", f"normal {dtype}"] = normal(dtype, 6_144 // dtypes.lane(dtype), i)
    weights["", "counts"] = Tensor("I64", (600,), np.arange(600, dtype="<i8").tobytes())
    golden.commit(weights)
    far = [0, 255, 256, (1 << 21) - 1, 1 << 21, (1 << 21) + 77, (9 << 19) - 1]
    weights["", "zeros"] = changed_at(zeros, far, 0x3F81)
    for i, name in enumerate(["normal F16", "normal BF16", "normal F32", "normal F64"]):
        weights["", name] = stepped(weights["", name], 0.03, 3, i)
    weights["", "counts"] = changed_at(weights["", "counts"], [5, 299], 1 << 63)
    weights["", "random"] = stepped(weights["", "random"], 0.01, 1, 5)
    golden.commit(weights, message="few steps")
    weights["", "zeros"] = changed_at(weights["", "zeros"], list(range(0, 9 << 19, 997)), 0x0001)
    golden.commit(weights, message="many, at even distances")
    for i, name in enumerate(["normal F16", "normal BF16", "normal F32", "normal F64"]):
        weights["", name] = stepped(weights["", name], 0.6, 2, 10 + i)
    weights["", "random"] = changed_at(weights["", "random"], list(range(0, 4_000, 2)), 0x80)
    golden.commit(weights, message="dense")
    weights["", "random"] = tensor("U8", (4_000,), 6)
    weights["", "normal F32"] = normal("F32", 1_536, 77)
    weights["", "normal BF16"] = normal("BF16", 3_072, 78)
    golden.commit(weights, message="all new")
    rng = np.random.default_rng(8)
    counts = np.frombuffer(weights["", "counts"].data, "<u8").copy()
    counts[::4] += rng.integers(0, 1 << 40, 150, dtype=np.uint64)
    weights["", "counts"] = replace(weights["", "counts"], data=counts.tobytes())
    weights["", "normal F16"] = flipped(weights["", "normal F16"], 0.05, 9)
    golden.commit(weights, message="large steps", base=True)
    golden.commit(weights, message="nothing changed")


def make_packs(golden: Golden) -> None:
    """Streams in packs, of a base and of patches; blocks of no bytes at the borders."""
    weights: Weights = {
        ("", f"{i:02}"): normal(["F32", "BF16", "F64"][i % 3], 60 + 40 * (i % 5), i) for i in range(24)
    }
    with mock.patch.multiple(manifest, INLINE=200, PACK=700):
        golden.commit(weights, message="a base in packs")
        weights |= {k: stepped(weights[k], 0.5, 2, i) for i, k in enumerate(sorted(weights)) if i % 7 and i < 22}
        golden.commit(weights, message="a patch in packs")
        weights |= {k: stepped(weights[k], 0.9, 300, i) for i, k in enumerate(sorted(weights)) if i > 3}
        golden.commit(weights, message="both in packs", base=True)
        weights["", "00"] = stepped(weights["", "00"], 0.5, 1, 99)
        golden.commit(weights, message="a small patch and a base in packs", base=True)
    weights["", "01"] = stepped(weights["", "01"], 0.5, 1, 98)
    golden.commit(weights, message="a patch in the manifest")


def make_context(golden: Golden) -> None:
    """Blocks of the context codec, in several dtypes, beside others."""
    weights: Weights = {
        ("", "bf16"): normal("BF16", 20_000, 1),
        ("", "bf16.small"): normal("BF16", 500, 2),
        ("", "f16"): normal("F16", 3_000, 3),
        ("", "f32"): normal("F32", 2_000, 4),
        ("", "f8"): tensor("F8_E4M3", (3_000,), 5),
        ("", "i64"): tensor("I64", (100,), 6),
        ("", "u8"): tensor("U8", (3_000,), 7),
    }
    with mock.patch.object(coder, "CONTEXT_FROM", 0), mock.patch.object(coder, "FEW", 0):
        golden.commit(weights, message="a base")
        for step, share in enumerate((0.01, 0.2, 0.002)):
            for i, name in enumerate(sorted(weights)):
                weights[name] = stepped(weights[name], share, 3, 10 * step + i)
            golden.commit(weights, message=f"about {share:.1%} changed", step=step)
        weights["", "bf16"] = flipped(weights["", "bf16"], 0.05, 1)
        golden.commit(weights, message="any bits")


def make_fast(golden: Golden) -> None:
    """Blocks of the RICE codec, in lanes of every width, and of another where it would be too large."""
    weights: Weights = {
        ("", "bf16"): normal("BF16", 20_000, 1),
        ("", "c64"): tensor("C64", (200,), 2),
        ("", "f16"): normal("F16", 3_000, 3),
        ("", "f32"): normal("F32", 2_000, 4),
        ("", "f8"): tensor("F8_E4M3", (3_000,), 5),
        ("", "f64"): normal("F64", 900, 6),
        ("", "i32"): tensor("I32", (300,), 7),
        ("", "noise"): tensor("U8", (2_000,), 8),
        ("", "small"): normal("BF16", 500, 9),
    }
    golden.commit(weights, message="a base")
    for step, share in enumerate((0.01, 0.2, 0.002)):
        for i, name in enumerate(sorted(weights)):
            weights[name] = stepped(weights[name], share, 3, 10 * step + i)
        golden.commit(weights, message=f"about {share:.1%} changed", step=step, codec="fast")
    weights["", "bf16"] = flipped(weights["", "bf16"], 0.05, 1)
    weights["", "noise"] = tensor("U8", (2_000,), 10)
    golden.commit(weights, message="any bits", codec="fast")


def make_files(golden: Golden) -> None:
    """Directories: shards with their index, side files small and large, components in folders."""

    def directory(weights: Weights, shards: int, **side: bytes) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            top = {k: t for k, t in weights.items() if not k[0]}
            write_shards(Path(folder), top, shards)
            files = files_below(Path(folder))
        for component in {c for c, _ in weights if c}:
            part = {k: t for k, t in weights.items() if k[0] == component}
            files[f"{component}/weights.safetensors"] = file_bytes(part, {"format": "pt"})
        return files | {path.replace("__", "."): content for path, content in side.items()}

    weights: Weights = {("", f"layers.{i}.weight"): normal("BF16", 100 + i, i) for i in range(5)}
    weights["draft/model", "w"] = normal("F32", 30, 9)
    vocabulary = "".join(f"token {i}\n" for i in range(12_000)).encode()
    side = {"config__json": b'{"architectures": ["A"]}\n', "empty__txt": b"", "tokenizer__json": vocabulary}
    assert len(vocabulary) > 64 << 10
    golden.commit(weights, directory(weights, 3, **side), message="shards")
    weights["", "layers.0.weight"] = stepped(weights["", "layers.0.weight"], 0.2, 1, 20)
    golden.commit(weights, directory(weights, 3, **side), message="only weights changed")
    side["config__json"] = b'{"architectures": ["B"]}\n'
    golden.commit(weights, directory(weights, 3, **side), message="only config.json changed")
    files = directory(weights, 2, **side, added__bin=bytes(200_000))
    golden.commit(weights, files, message="two shards and another large file")
    # A header that no writer of today would write: spaces, an order of its own, padding.
    raw = b'{ "b":{"shape":[2],"dtype":"U8","data_offsets":[3,5]},'
    raw += b'"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}   '
    odd = {("", "a"): Tensor("U8", (3,), b"abc"), ("", "b"): Tensor("U8", (2,), b"de")}
    golden.commit(odd, {"x.safetensors": len(raw).to_bytes(8, "little") + raw + b"abcde"}, message="an odd header")


def make_history(golden: Golden) -> None:
    """Branches, tags, detached versions, several parents, revert, reset, labels, metadata."""
    repository = golden.repository

    def weights(i: int) -> Weights:
        return {("", "w"): stepped(normal("BF16", 400, 1), 0.1, 2, i), ("", "step"): bf(i)}

    first = golden.commit(weights(0), step=0, run="run 1", message="first")
    metadata = {
        "lr": 1e-6,
        "floats": [0.1, -0.0, 1e22, 5e-324, 1.7976931348623157e308, 123456.789, 1.0],
        "größe": '日本語 \N{GRINNING FACE} "quoted" \\ \n\t\x01\x7f',
        "nested": {"b": [True, False, None, {}], "a": [], "count": 2**70},
    }
    golden.commit(weights(1), step=1, run="run 1", message="метаданные", metadata=metadata)
    repository.tag("v1")
    repository.tag("gone", first)
    repository.branch("experiment/a", "main~1", message="try")
    golden.commit(weights(2), step=1, run="run 2", branch="experiment/a")
    golden.commit(weights(3), step=2, run="run 1", expect="main")
    repository.delete_tag("gone")
    detached = golden.commit(weights(4), branch=None, parents=["main"], message="detached")
    golden.commit(weights(5), branch=None, message="detached, without parents")
    golden.commit(weights(6), branch=None, parents=[detached], message="on a detached one")
    golden.commit(weights(7), parents=["experiment/a", detached], message="three parents")
    golden.revert("main~2")
    golden.commit(weights(8), branch="new", parents=["main"], step=3)
    repository.branch("brief")
    repository.delete_branch("brief")
    repository.tag("v1", "main", force=True)
    repository.tag("release/1.0", "new")
    golden.commit(weights(9), message="to be left behind")
    repository.reset("main", "main~1", rewind=True, message="oops")
    golden.commit(weights(10), step=4, message="after the reset")
    repository.set_default_branch("new")
    golden.commit(weights(10), message="the same tree on another branch")


def make_long(golden: Golden) -> None:
    """80 commits of a tiny tensor: a chain of 79 patches, three segments, and a tail."""
    weights: Weights = {("", "w"): normal("BF16", 30, 0)}
    with mock.patch.multiple(swap, TAIL=24, SEGMENT=40):
        for step in range(80):
            golden.commit(weights, step=step)
            weights["", "w"] = stepped(weights["", "w"], 0.2, 1, step)


def make_compacted(golden: Golden) -> None:
    """10 commits and a branch of 2, with a rename and a dtype that changes, and the ways that compaction adds: long
    patches, patches back, a base; the kept policy; entries with ways in a segment and in the tail."""

    def weights(step: int) -> Weights:
        w = normal("BF16", 100, 0)
        for i in range(step):
            w = stepped(w, 0.05, 1, i)
        name, dtype = "renamed" if step > 2 else "b", "F16" if step > 5 else "BF16"
        return {("", "w"): w, ("draft", name): replace(normal("BF16", 40, 1), dtype=dtype)}

    repository = golden.repository
    ids = []
    with mock.patch.multiple(swap, TAIL=4, RECENT=4):
        for step in range(10):
            ids.append(golden.commit(weights(step), step=step, run="trunk"))
        repository.branch("side", ids[4])
        for step in range(2):
            golden.commit(weights(30 + step), step=step, run="side", branch="side")
        repository.compact(base_every=8, share=10_000, reverse=True, save=True)


def make_claims(golden: Golden) -> None:
    """A branch that was claimed, and claimed again at an older version; one that was claimed and has no version."""
    repository = golden.repository
    weights: Weights = {("", "w"): normal("BF16", 300, 0)}
    repository.claim()
    for step in range(4):
        golden.commit(weights, step=step)
        weights["", "w"] = stepped(weights["", "w"], 0.2, 1, step)
    repository.claim(at="main@{step=1}", message="resumed from the checkpoint of step 1")
    golden.commit(weights, step=2, message="another step 2")
    repository.claim("exp")


def make_fresh(golden: Golden) -> None:
    """A repository without a version."""


def make_retention(golden: Golden) -> None:
    """Versions kept, stepping stones, and expired; a policy, the collector's page, pins, a copy of the root.

    It lies apart: not all of its versions can be read.
    """
    repository = golden.repository
    weights: Weights = {("", "w"): normal("BF16", 300, 0)}
    for step in range(8):
        golden.commit(weights, step=step, base=step % 3 == 0)
        weights["", "w"] = stepped(weights["", "w"], 0.2, 1, step)
    golden.commit(weights, branch="gone", expect="", message="of a branch that is deleted")
    repository.delete_branch("gone")
    repository.tag("release", "main@{step=1}")
    policy = Policy({"*": Rules(last=1, meta={"keep": True}), "exp": Rules(within=86400)}, None)
    found = repository.expire(policy, save=True)
    golden.kept = {one.version.id for one in found.decisions if one.state == "kept"}
    transaction = key.Transaction(1)
    dead = frame.header(frame.PACK) + b"named by nothing"
    name = transaction.key("pack", dead)
    repository.store.put(name, dead)
    begun = key.Transaction(repository.refresh().sequence)

    def condemn(old: root.Root) -> root.Root:
        page = collect.Page(((4, 1_767_225_600_000_000), (9, 1_767_225_601_000_000)), (name,), 1_767_225_602_000_000)
        return old.next(
            horizon=4, collector=repository._shelf.put(begun, "page", collect.encode_page(page), keep=False)
        )

    swap.change(repository._shelf, condemn, begun)
    head = repository.entry("main")
    pins.Holder(repository.store, names=live.named(head), versions=[head.new or ""], lifetime=600).take()
    pins.Holder(repository.store, begin=7).take()
    repository.copy_root()


MAKERS: dict[str, Callable[[Golden], None]] = {
    name.removeprefix("make_"): made for name, made in list(globals().items()) if name.startswith("make_")
}


@contextlib.contextmanager
def fixed(name: str) -> Iterator[None]:
    """Chance, time and the order of uploads are always the same."""
    count = itertools.count()

    def token_hex(size: int) -> str:
        return hashlib.sha256(f"{name} {next(count)}".encode()).hexdigest()[: 2 * size]

    def time_ns() -> int:
        return (1_767_225_600_000_000 + 1_000_000 * next(count)) * 1000

    chance = SimpleNamespace(token_hex=token_hex)
    with (
        mock.patch.object(key, "secrets", chance),
        mock.patch.object(root, "secrets", chance),
        mock.patch.object(pins, "secrets", chance),
        mock.patch.object(pins, "myself", return_value="host, process 1"),
        mock.patch.object(version, "time", SimpleNamespace(time_ns=time_ns)),
        mock.patch.object(time, "time_ns", time_ns),
        mock.patch.object(commit, "ThreadPoolExecutor", lambda _, prefix: ThreadPoolExecutor(1, prefix)),
        mock.patch.object(compact, "ThreadPoolExecutor", lambda _, prefix: ThreadPoolExecutor(1, prefix)),
    ):
        yield


def make(name: str, directory: Path) -> None:
    """Write one repository below `directory`, with its expected.json beside its objects."""
    with fixed(name):
        golden = Golden(directory)
        MAKERS[name](golden)
        expected = golden.expected()
    (directory / ".lock").unlink(missing_ok=True)
    # A version a line.
    versions = ",\n".join(json.dumps(one, ensure_ascii=False, sort_keys=True) for one in expected.pop("versions"))
    rest = json.dumps(expected, ensure_ascii=False, sort_keys=True)
    (directory / "expected.json").write_text(f'{rest[:-1]}, "versions": [\n{versions}\n]}}\n')


def place(name: str) -> Path:
    """Where a golden repository lies."""
    return HERE / name if name == "retention" else REPOSITORIES / name


def main() -> None:
    """Make those that are named, or else those that are not there: what an earlier writer made is never replaced."""
    for name in sys.argv[1:] or [name for name in MAKERS if not place(name).exists()]:
        shutil.rmtree(place(name), ignore_errors=True)
        make(name, place(name))
        size = sum(path.stat().st_size for path in place(name).rglob("*") if path.is_file())
        print(f"{name}: {size} bytes")


if __name__ == "__main__":
    main()
