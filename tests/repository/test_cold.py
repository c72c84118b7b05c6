"""A reader that holds nothing reads each byte of a base once, whichever way it reads and however the chunks refer to
each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightvc
from tests.kit.weights import Bits, Weights, flipped, held, lying, tensor, tiny_format
from weightvc.protocol import payloads
from weightvc.repository import Repository


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch):
    """Some dozens of packs, of which a reader may hold about three."""
    monkeypatch.setattr(payloads, "PIECE", 200)
    monkeypatch.setattr(payloads, "AHEAD", 300)
    monkeypatch.setattr(payloads, "HELD", 900)
    with tiny_format():
        yield


def weights() -> Weights:
    """Tensors, of which every seventh stands twice: at the beginning and, under another name, at the end."""
    made = {("", f"a{i:02}"): tensor("BF16", (100,), i) for i in range(42)}
    return made | {("", f"b{i:02}"): made["", f"a{i:02}"] for i in range(0, 42, 7)}


def renamed() -> Weights:
    """The same under names that turn their order round."""
    return {("", f"c{99 - i:02}"): value for i, (_, value) in enumerate(sorted(weights().items()))}


def of_live(repository: Repository, _: Path) -> Weights:
    found = {name: t for (_, name), t in weights_at(repository).items()}
    live = {name: np.zeros(t.shape, "<u2") for name, t in found.items()}
    with weightvc.Client(repository, into=live_bf16(live)) as client:
        client.pull()
    return {("", name): found[name].__class__("BF16", found[name].shape, v.tobytes()) for name, v in live.items()}


def weights_at(repository: Repository) -> Weights:
    return held(weightvc.open(repository.url, cache=None))


def live_bf16(live: dict[str, Any]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(value.view("<i2")).view(torch.bfloat16) for name, value in live.items()}


def of_checkout(repository: Repository, folder: Path) -> Weights:
    repository.checkout("main", folder / "out")
    return lying(folder / "out")


def of_load(repository: Repository, _: Path) -> Weights:
    loaded = repository.load()
    import torch

    like = weights_at(repository)
    return {
        ("", name): like["", name].__class__("BF16", tuple(t.shape), t.view(torch.int16).numpy().tobytes())
        for name, t in loaded.items()
    }


READERS = {"load": of_load, "checkout": of_checkout, "live": of_live}


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("history", ["base", "patched", "renamed"])
def test_each_byte_of_a_base_is_read_once(
    memory_url: str, tmp_path: Path, read: Callable[[Repository, Path], Weights], cached: bool, history: str
) -> None:
    writer = weightvc.init(memory_url, cache=None)
    want = weights()
    writer.commit(Bits(want))
    if history == "patched":
        want = {key: flipped(value, 0.01, 5) if key[1] < "a30" else value for key, value in want.items()}
    elif history == "renamed":
        want = renamed()
    if history != "base":
        writer.commit(Bits(want))
    stored = {one.key: one.size for one in writer.store.list("pack/")}
    assert len(stored) > 20
    with weightvc.open(memory_url, cache=tmp_path / "cache" if cached else None) as reader:
        asked = packs_read(reader)
        assert read(reader, tmp_path) == want
    assert len(asked) == len({(key, start) for key, start, _ in asked}), "a piece of a pack was read twice"
    assert sum(nbytes for *_, nbytes in asked) <= sum(stored.values())


def packs_read(repository: Repository) -> list[tuple[str, int | None, int]]:
    """Key, first byte and bytes of every read of a pack from now on."""
    asked = []
    get = repository.store.get

    def counted(key: str, **options: Any) -> Any:
        got = get(key, **options)
        if key.startswith("pack/"):
            asked.append((key, options.get("start"), len(got.data)))
        return got

    repository.store.get = counted  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
def test_what_a_target_does_not_want_is_not_read(memory_url: str, tmp_path: Path, cached: bool) -> None:
    writer = weightvc.init(memory_url, cache=None)
    writer.commit(Bits(weights()))
    stored = sum(one.size for one in writer.store.list("pack/"))
    live = {"a41": np.zeros(100, "<u2"), "b35": np.zeros(100, "<u2")}
    names = {name: name if name in live else None for _, name in weights()}
    with weightvc.open(memory_url, cache=tmp_path / "cache" if cached else None) as reader:
        asked = packs_read(reader)
        with weightvc.Client(reader, into=live_bf16(live), names=names) as client:
            client.pull()
    assert 0 < sum(nbytes for *_, nbytes in asked) < stored / 3
    assert {name: value.tobytes() for name, value in live.items()} == {n: weights()["", n].data for n in live}
