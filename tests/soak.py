"""Long runs: what the tests search a little, for as long as there is time (`make soak SECONDS=3600`).

Half of the time goes to searches that have an end, an equal share to each, and half to random orders. Stops at the
first loss, with the order that led to it.
"""

from __future__ import annotations

import argparse
import itertools
import time

from tests import test_interleavings as small
from tests.kit.schedule import explore, scheduled, wander


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1000, help="the first of the random orders")
    options = parser.parse_args()
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
                print(f"random orders: seeds {options.seed} to {seed - 1}, each without faults and with three")
                return
            for faults in (0, 3):
                wander(small.EVERYTHING, seed, faults=faults, changes=8, depth=200)


if __name__ == "__main__":
    main()
