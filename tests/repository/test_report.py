"""report(): facts, against what other commands find."""

import pytest

import weightvc
from tests.kit import history
from tests.kit.weights import Bits, Tensor, Weights, flipped, tensor
from weightvc.comparison import layer_of
from weightvc.errors import AccessDenied
from weightvc.objects import key
from weightvc.report import layers
from weightvc.repository import Repository


def model(seed: int = 0) -> Weights:
    """Some layers of a small model, and small tensors of them side by side."""
    made: Weights = {("", "embed.weight"): tensor("BF16", (512, 64), seed)}
    for layer in range(3):
        made["", f"layers.{layer}.up.weight"] = tensor("F32", (64, 128), seed + layer)
        made["", f"layers.{layer}.norm.weight"] = tensor("BF16", (64,), seed + layer)
        made["", f"layers.{layer}.count"] = tensor("I64", (3,), seed + layer)
    return made


def trained(repository: Repository, count: int) -> list[Weights]:
    """Commit a model and `count` steps of it; what was committed."""
    made = [model()]
    repository.commit(Bits(made[0]), step=0)
    for step in range(1, count + 1):
        last = made[-1]
        changed = {name: flipped(one, 0.01 * step, step) for name, one in last.items() if "layers.1" not in name[1]}
        made.append({**last, **changed})
        repository.commit(Bits(made[-1]), step=step)
    return made


def test_what_layers_changed_is_what_diff_finds(repository: Repository) -> None:
    trained(repository, 5)
    found = repository.report(sample=3).changes
    assert found is not None
    assert found.whole
    assert [version.version and version.version.step for version in found.versions] == [3, 4, 5]
    assert found.layers == ["embed", "layers.0", "layers.1", "layers.2"]
    steps: dict[int, int] = {}
    for number, entry in enumerate(found.versions):
        assert entry.version is not None
        diff = repository.diff(entry.version.parents[0], entry.version)
        wanted = dict.fromkeys(found.layers, 0)
        for one in diff.tensors:
            wanted[layer_of("", one.name)] += one.changed
        assert dict(zip(found.layers, found.changed[number], strict=True)) == wanted
        assert sum(found.changed[number]) == entry.changed
        for step, count in diff.steps.items():
            steps[step] = steps.get(step, 0) + count
    told: dict[int, int] = {}
    for (_, step), count in found.steps.items():
        told[step] = told.get(step, 0) + count
    for step in range(1 - layers.FAR, layers.FAR):
        assert told.get(step, 0) == steps.get(step, 0), step


def test_exponents_are_those_of_the_old_values(repository: Repository) -> None:
    # 1.0, -2.0, 0.5 and 0.0, each moved by some representable values.
    old, new = [0x3F80, 0xC000, 0x3F00, 0x0000], [0x3F81, 0xC002, 0x3EFF, 0x4000]
    for values in (old, new):
        data = b"".join(value.to_bytes(2, "little") for value in values)
        repository.commit(Bits({("", "w"): Tensor("BF16", (4,), data)}))
    found = repository.report().changes
    assert found is not None
    assert dict(found.steps) == {(0, 1): 1, (1, -2): 1, (-1, -1): 1, (-127, layers.FAR): 1}


def test_a_large_model_is_read_in_part(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(repository, 2)
    monkeypatch.setattr(layers, "BUDGET", 80_000)
    found = repository.report().changes
    assert found is not None
    assert not found.whole
    assert 0.1 < found.share < 0.9
    assert all(read <= of for read, of in zip(found.read, found.elements, strict=True))


def test_bytes_of_layers_add_up(repository: Repository) -> None:
    trained(repository, 5)
    found = repository.report(sample=0).weights
    assert found is not None
    assert [entry.version and entry.version.step for entry in found.versions] == [1, 2, 3, 4, 5]
    for entry, row in zip(found.versions, found.nbytes, strict=True):
        manifest = repository._shelf.manifest(entry.place.manifest)  # type: ignore[union-attr]
        assert manifest.patch is not None
        assert sum(row) == pytest.approx(manifest.patch.stream.nbytes)
        assert row[2] == 0  # layers.1, which never changes


def test_manifests_are_read_within_bounds(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(repository, 12)
    monkeypatch.setattr(layers, "COLUMNS", 4)
    found = repository.report(sample=0).weights
    assert found is not None
    assert found.of == 12
    assert [entry.version and entry.version.step for entry in found.versions] == [1, 5, 8, 12]
    monkeypatch.setattr(layers, "READ", 1)
    assert len(repository.report(sample=0).weights.versions) == 1  # type: ignore[union-attr]


def test_layers_are_put_together_where_there_are_many(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(repository, 1)
    monkeypatch.setattr(layers, "LAYERS", 2)
    found = repository.report().changes
    assert found is not None
    assert found.layers == ["embed … layers.0", "layers.1 … layers.2"]


def test_another_schema_ends_what_is_read(repository: Repository) -> None:
    weights = trained(repository, 2)[-1]
    for step in (3, 4):
        weights = {**weights, ("", "new"): tensor("BF16", (64,), step)}
        repository.commit(Bits(weights), step=step)
    facts = repository.report()
    assert facts.notes == []
    assert facts.changes is not None
    assert facts.weights is not None
    assert [entry.version and entry.version.step for entry in facts.changes.versions] == [4]
    assert [entry.version and entry.version.step for entry in facts.weights.versions] == [3, 4]


def test_cold_pulls_are_those_of_the_planner(repository: Repository) -> None:
    trained(repository, 9)
    repository.compact(base_every=4)
    facts = repository.report(sample=0)
    for row in facts.rows:
        plan = repository.plan(None, row.ident)
        assert row.cold is not None
        assert (row.cold.nbytes, row.cold.requests, row.cold.patches) == (plan.nbytes, plan.requests, plan.patches)
    assert facts.head is not None
    assert facts.head.ident == repository.resolve().id


def test_rows_are_the_log(repository: Repository) -> None:
    trained(repository, 3)
    repository.branch("exp", "main~2")
    repository.commit(Bits(model(7)), branch="exp", step=9)
    detached = repository.commit(Bits(model(8)), branch=None, parents=["exp"])
    repository.tag("kept", detached)
    repository.commit(Bits(model(9)), branch=None, parents=["main"])  # which nothing points at
    facts = repository.report()
    assert [row.entry for row in reversed(facts.rows)] == list(repository.entries(["main", "exp", "kept"]))
    some = repository.report(count=2)
    assert [row.ident for row in some.rows] == [row.ident for row in facts.rows[-2:]]
    assert some.older == len(facts.rows) - 2


def test_storage_is_what_fsck_counts(memory_url: str) -> None:
    with weightvc.init(memory_url, cache=None) as repository:
        trained(repository, 6)
        repository.compact(base_every=4)
        orphan = key.Transaction(repository.refresh().sequence).key("pack", b"nobody's")
        repository.store.put(orphan, b"nobody's")
        facts, report = repository.report(), repository.fsck()
        assert facts.listed
        (lost,) = [one for one in facts.stored if one.garbage]
        assert report.unreferenced == lost.count > 0
        assert report.unreferenced_bytes == lost.nbytes
        by_kind = {one.kind: one for one in facts.stored}
        edges = [e for entry in repository.entries() for way in entry.place.all_ways for e in way.edges]  # type: ignore[union-attr]
        assert by_kind["bases"].nbytes == sum(edge.nbytes for edge in edges if edge.source is None)
        patches = by_kind["patches of commits"].nbytes + by_kind["longer patches"].nbytes
        assert patches == sum(edge.nbytes for edge in edges if edge.source is not None)


def test_who_may_not_list_gets_the_rest(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(repository, 2)

    def denied(prefix: str) -> None:
        raise AccessDenied("no right to list")

    monkeypatch.setattr(repository.store, "list", denied)
    facts = repository.report()
    assert not facts.listed
    assert not any(one.garbage for one in facts.stored)
    assert facts.notes == ["garbage is not counted, since objects may not be listed: no right to list"]
    assert facts.changes is not None


def test_a_long_history_is_read_by_segments(memory_url: str) -> None:
    with weightvc.init(memory_url, cache=None) as repository:
        repository.commit(Bits(history.weights(0)), step=0)
        history.lay(repository.store, 4999)
    with weightvc.open(memory_url, cache=None) as repository:
        before = repository.stats.reads
        facts = repository.report()
        assert len(facts.rows) == 5000
        assert facts.notes == []
        # The root, 2 segments, 64 manifests; schema, and what leads to the newest versions.
        assert repository.stats.reads - before < 64 + 2 + layers.COLUMNS
