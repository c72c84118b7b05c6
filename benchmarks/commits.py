"""What commits of consecutive checkpoints store: everything is counted that a commit uploads but the root."""

import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from inputs import Files, say
from pairs import Pair, bound

import weightvc
from weightvc.protocol import resolve


def commits(runs: Sequence[Files]) -> list[dict[str, Any]]:
    """Bytes of every version of each chain, in turn."""
    return [_run(name, list(steps)) for name, steps in groupby(runs, lambda files: files.chain)]


def _run(name: str, steps: list[Files]) -> dict[str, Any]:
    versions: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        repository = weightvc.init(Path(folder, "repository"), cache=Path(folder, "cache"))
        for files in [None, *steps]:
            path = files.new if files else steps[0].old
            say(f"commit of {path.name}")
            entry = repository.entry(repository.commit(path))
            assert entry.place is not None
            patch = resolve.manifest_of(repository._shelf, entry).patch
            tables = sum(map(len, patch.tables.values())) if patch else 0
            payload = sum(edge.nbytes for edge in entry.place.edges) + tables
            version = {"stored": entry.place.nbytes, "payload": payload}
            if files:
                pair = Pair(files.title, files.old, files.new)
                floor = bound(pair)
                version |= {"changed": floor.changed, "bound": floor.nbytes, "step": files.step}
            versions.append(version)
    return {"run": name, "nbytes": steps[0].old.stat().st_size, "tensors": len(pair.infos), "versions": versions}
