"""Real processes, killed and stopped at random: on each store a minute of the crowd, and a quarter of one of the
hosts, of what `make soak` does for ten minutes each."""

import os
import secrets

import pytest

from tests.kit import crowd, fleet

CROWD, HOSTS = 60, 15
"""Seconds, on each store."""


def place(where, request, tmp_path):
    """The URL and the options of a place for a repository."""
    if where == "s3":
        found = request.getfixturevalue("s3_place")
        return found.url, found.options
    return str(tmp_path / "repository"), {}


def seed():
    """WEIGHTVC_SEED=n begins as that run did."""
    return int(os.environ.get("WEIGHTVC_SEED", secrets.randbits(32)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_crowd_loses_nothing(where, request, tmp_path):
    """Writers, readers and `weightvc gc --every 1s --grace 3s` together."""
    url, options = place(where, request, tmp_path)
    done = crowd.run(url, options, tmp_path, seconds=CROWD, seed=seed())
    print(done)
    assert not done.faults, str(done)
    assert done.counts["commit"] > 0
    assert done.counts["kills"] > 0
    assert done.counts["versions at the end"] > 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_fleet_ends_bit_exact(where, request, tmp_path):
    """A trainer that rewinds, compaction, and eight hosts, some with a cache that is far too small."""
    url, options = place(where, request, tmp_path)
    done = fleet.run(url, options, tmp_path, seconds=HOSTS, seed=seed())
    print(done)
    assert not done.faults, str(done)
    assert done.counts["served"] > 0
    assert done.counts["exact"] == len(fleet.HOSTS)
