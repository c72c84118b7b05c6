"""Long runs: what the tests do a little, for as long as there is time (`make soak SECONDS=3600`).

    orders    orders of events in a model of the store. Half of the time goes to searches that have an end, an equal
              share to each, and half to random orders. Stops at the first loss, with the order that led to it
    local     a crowd of real processes on a directory, killed and stopped at random (tests/kit/crowd.py)
    s3        the same on a SeaweedFS server
    hosts     rollout hosts that follow a trainer on a directory, killed and stopped at random (tests/kit/fleet.py)
    hosts-s3  the same on a SeaweedFS server

Each for so many seconds: all of them, or those that are named (`make soak SOAK_ARGS=local`).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests import test_interleavings as small
from tests.kit import crowd, fleet
from tests.kit.orders import explore, wander
from tests.kit.schedule import scheduled
from tests.kit.seaweed import Seaweed

WHAT = ("orders", "local", "s3", "hosts", "hosts-s3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="|".join(WHAT))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1000, help="the first of the random orders, and of the crowds")
    options = parser.parse_args()
    if unknown := set(options.what).difference(WHAT):
        parser.error(f"{', '.join(unknown)}: name some of {', '.join(WHAT)}")
    for what in options.what or WHAT:
        if what == "orders":
            orders(options)
        elif what in ("local", "hosts"):
            processes(what, None, options)
        else:
            with Seaweed() as server:
                processes(what, server, options)


def processes(what: str, server: Seaweed | None, options: argparse.Namespace) -> None:
    """Real processes. What they wrote stays if something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="weightvc-soak-"))
    url, access = (str(folder / "repository"), {})
    if server is not None:
        place = server.place()
        url, access = place.url, place.options
    run = fleet.run if what.startswith("hosts") else crowd.run
    done = run(url, access, folder, seconds=options.seconds, seed=options.seed)
    print(f"{what}, {options.seconds:.0f} s, {done}", flush=True)
    if done.faults:
        sys.exit(f"faults: see {folder}")
    shutil.rmtree(folder)


def orders(options: argparse.Namespace) -> None:
    """Orders of events."""
    searches = [(one, {}) for one in (*small.EXHAUSTIVE, *small.BOUNDED, *small.LARGE)]
    searches += [(one, {"preemptions": 2}) for one in (*small.BOUNDED, *small.LARGE)]
    searches += [(one, {"faults": 1, "preemptions": 1}) for one in (*small.FAULTY, *small.FAULTY_AND_LARGE)]
    end = time.monotonic() + options.seconds
    middle = time.monotonic() + options.seconds / 2
    with scheduled():
        for number, (one, how) in enumerate(searches):
            share = (middle - time.monotonic()) / (len(searches) - number)
            print(f"{one.name} {how or 'all'}: {explore(one, seconds=share, **how)}", flush=True)
        for seed in itertools.count(options.seed):
            if time.monotonic() > end:
                how = "by right clocks and by wrong ones, each without faults and with three"
                print(f"random orders: seeds {options.seed} to {seed - 1}, {how}")
                return
            for one, faults in itertools.product((small.EVERYTHING, small.WRONG_CLOCKS), (0, 3)):
                wander(one, seed, faults=faults, changes=8, depth=200)


if __name__ == "__main__":
    main()
