"""Real processes, killed and stopped at random: half a minute of what `make soak` does for ten."""

import os
import secrets

import pytest

from tests.kit import crowd

SECONDS = 25


@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_crowd_loses_nothing(where, request, tmp_path):
    """Writers, readers and `weightvc gc --every 1s --grace 3s` together. WEIGHTVC_SEED=n begins as that run did."""
    url, options = str(tmp_path / "repository"), {}
    if where == "s3":
        place = request.getfixturevalue("s3_place")
        url, options = place.url, place.options
    seed = int(os.environ.get("WEIGHTVC_SEED", secrets.randbits(32)))
    done = crowd.run(url, options, tmp_path, seconds=SECONDS, seed=seed)
    print(done)
    assert not done.faults, str(done)
    assert done.counts["commit"] > 0
    assert done.counts["kills"] > 0
    assert done.counts["versions at the end"] > 1
