"""The demo's rollout host: holds the newest version in a directory, and checks each one bit by bit.

Started with `python follower.py REPOSITORY TRUTH DIR`; says what it does on stdout, one JSON object a line.
"""

import argparse
import json
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

import weightvc


def wrong_bits(one: Path, other: Path) -> int:
    """Bits in which two files differ, header and all; every bit of the longer one if their sizes differ."""
    a, b = np.fromfile(one, np.uint8), np.fromfile(other, np.uint8)
    if a.size != b.size:
        return 8 * max(a.size, b.size)
    return int(np.bitwise_count(a ^ b).sum(dtype=np.int64))


def missed(repository: weightvc.Repository, held: str | None, *, every: bool) -> list[weightvc.Version]:
    """What main has after the version held, oldest first. Who holds nothing gets `every` one, or the newest."""
    try:
        newest = repository.log("main", 1 if held is None and not every else None)
        return list(takewhile(lambda version: version.id != held, newest))[::-1]
    except weightvc.RefNotFound:  # nothing is committed yet
        return []


def say(event: str, **fields: Any) -> None:
    """Tell the demo."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Follow main until ended by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository")
    parser.add_argument("truth", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--every", action="store_true", help="Begin with the first version, not with the newest.")
    parser.add_argument("--hang-at", type=int, help="Stop half-way through the pull of this step.")
    args = parser.parse_args()
    pulling: weightvc.Version | None = None

    def progress(done: int, total: int) -> None:
        if pulling is not None and pulling.step == args.hang_at and 2 * done >= total:
            say("half-way", step=pulling.step, percent=100 * done // total, moved=repository.stats.bytes_read)
            time.sleep(600)  # until the SIGKILL

    cache = args.directory.with_name(f"cache-{args.directory.name}")
    repository = weightvc.open(args.repository, cache=cache, progress=progress)
    held = repository.status(args.directory).version.id if args.directory.exists() else None
    while True:
        for pulling in missed(repository, held, every=args.every):
            repository.checkout(pulling.id, args.directory)
            wrong = wrong_bits(args.directory / "model.safetensors", args.truth / f"{pulling.step}.safetensors")
            held = pulling.id
            moved = repository.stats.bytes_read
            say("verified", id=held, step=pulling.step, wrong=wrong, at=time.monotonic(), moved=moved)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
