"""Live tensors that follow a branch: what they hold is a version's bits, or it is said that they do not."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import weightvc
from weightvc import live
from weightvc.repository import Repository
from weightvc.targets import Slots, Tensors

Made = Callable[..., Repository]


def bits(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return bytes(tensor.tobytes())


def weights(seed: int, n: int = 70_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(n, generator=generator).bfloat16(),
        "b": torch.randn(3, 5, generator=generator),
        "scale": torch.tensor(float(seed)),
        "empty": torch.zeros(0, 3),
    }


def stepped(old: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    new = {name: value.clone() for name, value in old.items()}
    lanes = new["a"].view(torch.int16).numpy()
    at = rng.choice(lanes.size, 300, replace=False)
    lanes[at] ^= rng.integers(1, 4, at.size).astype(np.int16)
    lanes[:3] = [0x7FC1, -0x8000, 0x7F81]  # NaNs with payloads, and -0
    new["scale"] = torch.tensor(float(seed) + 0.5)
    return new


def blank(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in like.items()}


def check(target: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: bits(value) for name, value in target.items()} == {n: bits(v) for n, v in wanted.items()}


@pytest.fixture
def history(again: Made) -> tuple[Made, list[dict[str, torch.Tensor]]]:
    repository = again()
    states = [weights(0)]
    for seed in range(1, 6):
        states.append(stepped(states[-1], seed))
    for step, state in enumerate(states):
        repository.commit(state, message="", step=step)
    return again, states


def at(step: int) -> str:
    return f"main@{{step={step}}}"


def test_goes_anywhere_in_place(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    pointers = {name: value.data_ptr() for name, value in target.items()}
    client = weightvc.Client(again(), into=target)
    assert client.current() is None
    for step in (0, 1, 5, 2, 4, 3, 0):
        update = client.pull(at(step))
        check(target, states[step])
        assert update.version.step == step
        held = client.current()
        assert held is not None
        assert held.step == step
        assert client.verify() == []
    assert pointers == {name: value.data_ptr() for name, value in target.items()}


def test_the_next_version_is_two_reads_and_its_changes(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    client.pull(at(3))
    update = client.stage(at(4))
    check(target, states[3])
    assert update.timings.requests <= 2
    assert 0 < update.timings.nbytes < 40_000
    assert update.changed == ["a", "scale"]
    update.activate()
    check(target, states[4])


def test_back_costs_a_look_at_the_root_and_nothing_else(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    for step in (2, 3, 4):
        client.pull(at(step))
    staged = client.stage(at(2))
    assert staged.timings.requests == 1  # and no bytes, where the root is what it was
    check(target, states[4])
    staged.activate()
    check(target, states[2])
    assert client.verify() == []
    # What somebody else wrote shows, and then the patches are fetched after all.
    for step in (3, 4):
        client.pull(at(step))
    target["a"][7] += 1
    assert client.pull(at(2)).timings.requests > 1
    check(target, states[2])


@pytest.fixture
def forked(again: Made) -> tuple[Made, dict[str, dict[str, torch.Tensor]]]:
    """Ten versions of main, and of exp three more from the sixth of them, by name."""
    repository = again()
    states = {"main0": weights(0)}
    for i in range(1, 10):
        states[f"main{i}"] = stepped(states[f"main{i - 1}"], i)
    for i in range(10):
        repository.tag(f"main{i}", repository.commit(states[f"main{i}"], step=i))
    repository.branch("exp", "main5")
    states["exp5"] = states["main5"]
    for i in range(6, 9):
        states[f"exp{i}"] = stepped(states[f"exp{i - 1}"], 100 + i)
        repository.tag(f"exp{i}", repository.commit(states[f"exp{i}"], branch="exp", step=i))
    return again, states


def patches(repository: Repository, old: str, new: str) -> int:
    """Bytes by which one version is read from the other, by patches alone."""
    way = repository.plan(old, new)
    assert way.start is not None
    return way.nbytes


@pytest.mark.parametrize("kind", ["tensors", "slots"])
def test_another_branch_begins_at_the_ancestor_that_is_still_there(
    kind: str, forked: tuple[Made, dict[str, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    again, states = forked
    target = blank(states["main0"])
    repository = again(cache=None)
    client = weightvc.Client(repository, into=target if kind == "tensors" else Slots(tmp_path / "slots"))

    def pull(name: str) -> int:
        client.pull(name)
        held = target if kind == "tensors" else load_file(tmp_path / "slots" / "current" / "model.safetensors")
        check(held, states[name])
        assert client.verify() == []
        assert client.timings is not None
        return client.timings.nbytes

    pull("main5")
    pull("main9")
    side, root = patches(repository, "main5", "exp8"), pull("main9")
    assert pull("exp8") <= side + root + 1000
    assert pull("main9") <= patches(repository, "main5", "main9") + root + 1000
    assert pull("exp8") <= side + root + 1000


def test_a_way_back_that_somebody_wrote_over_costs_a_fetch(
    forked: tuple[Made, dict[str, dict[str, torch.Tensor]]],
) -> None:
    again, states = forked
    target = blank(states["main0"])
    client = weightvc.Client(again(cache=None), into=target)
    client.pull("main5")
    client.pull("main9")
    target["a"].view(torch.int16).numpy()[:] ^= 1
    client.pull("exp8")
    check(target, states["exp8"])


def test_a_damaged_slot_that_is_nearer_is_not_begun_from(
    forked: tuple[Made, dict[str, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    again, states = forked
    repository = again(cache=None)
    client = weightvc.Client(repository, into=Slots(tmp_path / "slots"))
    near = client.pull("main5").version
    client.pull("main4")
    file = tmp_path / "slots" / near.short / "model.safetensors"
    for damage in (
        lambda: file.write_bytes(file.read_bytes()[:-9] + bytes(9)),
        lambda: file.write_bytes(b""),
        file.unlink,
    ):
        damage()
        client.pull("exp8")
        check(load_file(tmp_path / "slots" / "current" / "model.safetensors"), states["exp8"])
        assert client.timings is not None
        # From the slot in use, then: no base is fetched.
        assert client.timings.nbytes <= 3 * patches(repository, "main4", "exp8")
        client.repository.checkout("main5", tmp_path / "slots" / near.short, force=True)
        client.pull("main4")
        shutil.rmtree(tmp_path / "slots" / repository.resolve("exp8").short)


def test_an_interrupted_move_over_the_way_back_is_finished(
    forked: tuple[Made, dict[str, dict[str, torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    again, states = forked
    target = blank(states["main0"])
    client = weightvc.Client(again(cache=None), into=target)
    client.pull("main5")
    client.pull("main9")
    update = client.stage("exp8")
    check(target, states["main9"])
    with monkeypatch.context() as patched:
        made = iter([True])
        apply = live.Write.apply

        def once(write: live.Write) -> None:
            if not next(made, False):
                raise KeyboardInterrupt
            apply(write)

        patched.setattr(live.Write, "apply", once)
        with pytest.raises(KeyboardInterrupt):
            update.activate()
    assert client.current() is None
    client.pull("main9")
    check(target, states["main9"])
    client.pull("exp8")
    check(target, states["exp8"])


def test_goes_back_where_a_name_came_to_another_place_in_the_version(again: Made) -> None:
    repository = again()
    large = torch.zeros(10_000)  # or more would have been overwritten than is kept
    first = {"a": torch.arange(1000).bfloat16(), "b": torch.zeros(15), "large": large}
    second = {"b": torch.ones(15), "large": large, "z": torch.ones(1000).bfloat16()}
    one, two = repository.commit(first), repository.commit(second)
    target = blank(first)
    client = weightvc.Client(again(), into=target, names={"z": "a"})
    for version in (one, two, one):
        client.pull(version)
        check(target, first if version is one else {"a": second["z"], "b": second["b"], "large": large})


def test_what_changed_is_not_asked_of_a_target(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    with pytest.raises(weightvc.Refused, match=r"changed_only.*without into.*changed"):
        client.pull("main", changed_only=True)
    check(target, blank(states[0]))


def test_only_what_changed_comes_and_groups_whole(again: Made) -> None:
    repository = again()
    state = {
        "x.weight": torch.ones(8), "x.weight_scale": torch.ones(2), "y.weight": torch.ones(8), "z": torch.ones(3),
        "y.bias": torch.ones(1),
    }  # fmt: skip
    repository.commit(state)
    state = {**state, "x.weight_scale": torch.zeros(2), "z": torch.zeros(3)}
    repository.commit(state)
    state = {**state, "y.bias": torch.zeros(1), "new": torch.zeros(1)}
    repository.commit(state)
    for groups, third in ((None, {"y.bias", "new"}), (lambda name: name[0], {"y.bias", "y.weight", "new"})):
        client = weightvc.Client(again(), groups=groups)
        assert len(client.pull("main~2", changed_only=True)) == 5
        second = client.pull("main~1", changed_only=True)
        assert {name: float(value[0]) for name, value in second.items()} == {
            "x.weight": 1.0, "x.weight_scale": 0.0, "z": 0.0,
        }  # fmt: skip
        assert set(client.pull("main", changed_only=True)) == third
        assert client.pull("main", changed_only=True) == {}
        assert client.timings is not None
        assert client.timings.requests >= 1
        assert len(client.pull("main")) == 6
    with pytest.raises(weightvc.TensorNotFound, match="draft"):
        weightvc.Client(again(), component="draft").pull()
    target = {name: torch.full_like(value, 7) for name, value in state.items() if name != "new"}
    names = {"new": None}
    client = weightvc.Client(again(), into=target, names=names)
    client.pull("main~2")
    assert client.pull("main~1").changed == ["x.weight", "x.weight_scale", "z"]
    client = weightvc.Client(again(), into=target, names=names, groups={"x.weight_scale": 1, "y.weight": 1})
    client.pull("main~2")
    assert client.pull("main~1").changed == ["x.weight_scale", "y.weight", "z"]
    for bad in (3, lambda name: []):
        with pytest.raises(weightvc.Refused, match="groups"):
            weightvc.Client(again(), into=target, names=names, groups=bad).pull()


def test_a_group_is_written_together(again: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = again()
    names = ["a.weight", "b.weight", "a.weight_scale", "b.weight_scale"]
    repository.commit({name: torch.zeros(4).bfloat16() for name in names})
    repository.commit({name: torch.ones(4).bfloat16() for name in names})
    client = weightvc.Client(again(), into={name: torch.full((4,), 2.0).bfloat16() for name in names})
    client.pull("main~1")
    written: list[str] = []
    done = live.Write.apply
    monkeypatch.setattr(live.Write, "apply", lambda self: (written.append(self.name), done(self)))
    client.pull("main")
    assert sorted(written) == sorted(names)
    assert [name[0] for name in written] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_what_is_kept_to_go_back_is_bounded(again: Made) -> None:
    repository = again()
    random = np.random.default_rng(0)
    states = [{"w": random.integers(0, 1 << 15, 100_000).astype(np.int16)} for _ in range(3)]
    states += [{"w": states[2]["w"] ^ (np.arange(100_000) < edge).astype(np.int16)} for edge in range(100, 800, 100)]
    versions = [repository.commit(state) for state in states]
    target = {"w": np.zeros(100_000, np.int16)}
    tensors = Tensors(target)
    client = weightvc.Client(again(), into=tensors)
    for number, version in enumerate(versions):
        client.pull(version)
        kept = sum(write.kept for _, writes in tensors._undo for write in writes)
        assert kept <= target["w"].nbytes // 2
        assert len(tensors._undo) == max(0, min(number - 2, tensors.UNDO))
    assert client.pull(versions[-5]).timings.requests <= 2
    check(target, {"w": torch.from_numpy(states[-5]["w"])})
    client.pull(versions[0])
    check(target, {"w": torch.from_numpy(states[0]["w"])})


def test_without_a_target_new_tensors_come(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    check(weightvc.Client(again()).pull(at(2)), states[2])


def test_what_others_wrote_is_put_right(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    client.pull(at(3))
    target["b"][1, 1] = 7
    assert client.verify() == ["b"]
    assert client.current() is None
    client.pull(at(4))
    check(target, states[4])
    # In a chunk that the patch touches, it is found without being asked for.
    target["a"][40_000] = 3
    client.pull(at(5))
    check(target, states[5])


def test_an_interrupted_write_is_known_and_finished(
    history: tuple[Made, list[dict[str, torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    client.pull(at(1))
    update = client.stage(at(2))
    done = live.Write.apply
    count = 0

    def fail(self: live.Write) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        done(self)

    monkeypatch.setattr(live.Write, "apply", fail)
    with pytest.raises(KeyboardInterrupt):
        update.activate()
    assert client.current() is None
    monkeypatch.undo()
    client.pull(at(3))
    check(target, states[3])
    assert client.verify() == []


def test_staged_from_elsewhere_is_refused(history: tuple[Made, list[dict[str, torch.Tensor]]]) -> None:
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    client.pull(at(1))
    late = client.stage(at(2))
    client.pull(at(3))
    with pytest.raises(weightvc.Conflict, match="moved"):
        late.activate()
    check(target, states[3])
    late.stage().activate()
    check(target, states[2])


def test_staged_before_a_write_that_was_interrupted_or_forgotten_is_refused(
    history: tuple[Made, list[dict[str, torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    again, states = history
    target = {name: value.clone() for name, value in states[3].items()}
    client = weightvc.Client(again(), into=target)
    # Of what lies there, all but a little is what step 3 has: to move there writes nothing.
    first, late = client.stage(at(1)), client.stage(at(3))
    done = live.Write.apply
    monkeypatch.setattr(live.Write, "apply", lambda self: done(self) if self.name == "a" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.activate()
    monkeypatch.undo()
    with pytest.raises(weightvc.Conflict, match="stage it again"):
        late.activate()
    first.activate()
    check(target, states[1])
    target["a"][0] = 9
    assert client.verify() == ["a"]
    assert client.current() is None
    with pytest.raises(weightvc.Conflict, match="stage it again"):
        late.activate()
    late.stage().activate()
    check(target, states[3])


def test_tensors_that_are_one_here_and_two_there_are_refused(again: Made) -> None:
    repository = again()
    old = repository.commit({"a": torch.ones(8), "b": torch.ones(8)})
    new = repository.commit({"a": torch.ones(8), "b": torch.zeros(8)})
    one = torch.full((8,), 7.0)
    client = weightvc.Client(again(), into={"a": one, "b": one})
    with pytest.raises(weightvc.BadTensor, match=r"'a' and 'b' are the same memory.*names="):
        client.pull(new)
    assert one.tolist() == [7] * 8
    client.pull(old)
    with pytest.raises(weightvc.BadTensor, match="the same memory"):
        client.pull(new)
    assert one.tolist() == [1] * 8
    assert client.current() == old
    rows = torch.zeros(12)
    with pytest.raises(weightvc.BadTensor, match="overlaps"):
        weightvc.Client(again(), into={"a": rows[:8], "b": rows[4:]}).pull(old)
    weightvc.Client(again(), into={"a": one, "b": one}, names={"b": None}).pull(new)
    assert one.tolist() == [1] * 8


def test_a_target_whose_tensors_were_moved_is_refused(again: Made) -> None:
    repository = again()
    module = torch.nn.Linear(4, 4)
    repository.commit(module)
    client = weightvc.Client(again(), into=module)
    client.pull()
    assert client.verify() == []
    module.double().float()
    repository.commit({name: value + 1 for name, value in module.state_dict().items()})
    for act in (client.pull, client.verify):
        with pytest.raises(weightvc.BadTensor, match="make another client"):
            act()
    held = {name: value.detach() for name, value in module.named_parameters()}
    weightvc.Client(again(), into=module).pull()
    client = weightvc.Client(again(), into=held)
    client.pull()
    held["weight"].data = torch.zeros(4, 4)
    with pytest.raises(weightvc.BadTensor, match="'weight'"):
        client.pull("main~1")


def test_a_target_that_does_not_fit_is_refused_before_anything_is_written(
    history: tuple[Made, list[dict[str, torch.Tensor]]],
) -> None:
    again, states = history
    for change, said in (
        ({"a": torch.zeros(3).bfloat16()}, "shape"),
        ({"b": torch.zeros(3, 5).half()}, "F16"),
        ({"more": torch.zeros(2)}, "nothing for 'more'"),
    ):
        target = {**blank(states[0]), **change}
        before = {name: bits(value) for name, value in target.items()}
        with pytest.raises(weightvc.BadTensor, match=said):
            weightvc.Client(again(), into=target).pull(at(1))
        assert before == {name: bits(value) for name, value in target.items()}
    less = blank(states[0])
    del less["scale"]
    with pytest.raises(weightvc.BadTensor, match="no tensor 'scale'"):
        weightvc.Client(again(), into=less).pull(at(1))
    for bad in (torch.zeros(4, 4).t(), torch.zeros(1).expand(4), "no tensor"):
        with pytest.raises(weightvc.BadTensor):
            weightvc.Client(again(), into={"a": bad})


def test_names_fuse_prefix_and_leave_out(again: Made) -> None:
    repository = again()
    old = {name: torch.randn(4, 8) for name in ("q", "k", "v", "other")}
    new = {name: value + (name == "k") for name, value in old.items()}
    for state in (old, new):
        repository.commit(state)
    target = {"m.qkv": np.zeros((12, 8), np.float32)}
    names = {"q": ("m.qkv", 0), "k": ("m.qkv", 4), "v": ("m.qkv", 8), "other": None}
    client = weightvc.Client(again(), into=target, names=names)
    for ref, state in (("main~1", old), ("main", new)):
        client.pull(ref)
        assert np.array_equal(target["m.qkv"], torch.cat([state["q"], state["k"], state["v"]]).numpy())
    for bad, said in (
        ({**names, "v": ("m.qkv", 4)}, "both go to"),
        ({**names, "v": None}, "all of 'm.qkv'"),
        ({**names, "v": ("m.qkv", 9)}, "from row 9"),
        ({**names, "v": 3}, "is wanted"),
    ):
        with pytest.raises(weightvc.BadTensor, match=said):
            weightvc.Client(again(), into=target, names=bad).pull("main")


def test_a_module_with_tied_weights(again: Made) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(16, 8)
            self.head = torch.nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

    served, trained = Tied(), Tied()
    repository = again()
    repository.commit(trained)
    client = weightvc.Client(again(), into=served)
    client.pull()
    with torch.no_grad():
        trained.embed.weight[3] += 1
    repository.commit(trained)
    client.pull()
    assert served.head.weight is served.embed.weight
    assert bits(served.embed.weight) == bits(trained.embed.weight)


def test_shapes_that_change_between_versions(again: Made) -> None:
    repository = again()
    repository.commit({"w": torch.ones(4), "n": torch.ones(2)})
    repository.commit({"w": torch.ones(4)})
    target = {"w": torch.zeros(4), "n": torch.zeros(2)}
    client = weightvc.Client(again(), into=target)
    client.pull("main~1")
    with pytest.raises(weightvc.BadTensor, match="nothing for 'n'"):
        client.pull("main")
    held = client.current()
    assert held is not None
    assert held.id == repository.resolve("main~1").id


class OnDevice:
    """Makes tensors take the way of those that lie on a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flat = live._flat

        def torch_flat(value: Any) -> Any:
            _, where = flat(value)
            return live.memory.torch_bytes(value), where

        monkeypatch.setattr(live, "_flat", torch_flat)


def test_tensors_on_a_device(
    history: tuple[Made, list[dict[str, torch.Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    OnDevice(monkeypatch)
    again, states = history
    target = blank(states[0])
    client = weightvc.Client(again(), into=target)
    for step in (1, 2, 5, 4):
        client.pull(at(step))
        check(target, states[step])
        assert client.verify() == []


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_walk_over_any_bits(data: st.DataObject) -> None:
    kinds = [np.uint8, np.int16, np.float32, np.int64]
    shapes = {f"t{i}": (data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, 40))) for i in range(3)}

    def draw() -> dict[str, Any]:
        return {
            name: np.frombuffer(data.draw(st.binary(min_size=0, max_size=n)).ljust(n * 8, b"\0"), "u1")[
                : n * np.dtype(kind).itemsize
            ].view(kind)
            for name, (kind, n) in shapes.items()
        }

    states = [draw() for _ in range(4)]
    repository = weightvc.init(f"memory://{secrets.token_hex(8)}", cache=None)
    versions = [repository.commit(state).id for state in states]
    target = {name: np.zeros(n, kind) for name, (kind, n) in shapes.items()}
    client = weightvc.Client(repository, into=target)
    for step in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)):
        client.pull(versions[step])
        assert {k: v.tobytes() for k, v in target.items()} == {k: v.tobytes() for k, v in states[step].items()}
        assert client.verify() == []


def moved_data(target: dict[str, Any]) -> None:
    target["b"].data = torch.zeros(3, 5)


def replaced(target: dict[str, Any]) -> None:
    target["b"] = torch.zeros(3, 5)


def removed(target: dict[str, Any]) -> None:
    del target["b"]


def resized(target: dict[str, Any]) -> None:
    target["n"].resize((70_000,), refcheck=False)


@pytest.mark.parametrize("move", [moved_data, replaced, removed, resized])
@pytest.mark.parametrize("staged", [True, False])
def test_tensors_that_lie_elsewhere_by_now_are_not_written(
    repository: Repository, move: Callable[[dict[str, Any]], None], staged: bool
) -> None:
    """What is written to where they lay would serve nobody, and might be memory of somebody else by now."""
    for step in range(2):
        repository.commit({"b": torch.full((3, 5), float(step)), "n": np.full(40_000, step, np.int32)})
    target: dict[str, Any] = {"b": torch.zeros(3, 5), "n": np.zeros(40_000, np.int32)}
    client = weightvc.Client(repository, into=target)
    client.pull("main~1")
    update = client.update("main")
    if staged:
        update.stage()
    move(target)
    with pytest.raises(weightvc.BadTensor, match="does not lie where it did"):
        update.activate()
    assert client.current() == repository.resolve("main~1")
