"""Every target for some seconds: its seeds, damaged seeds, and arbitrary bytes. run.py goes on from there."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

EXAMPLES = {"context_block": 1000, "plain_block": 1000, "numbers": 1000, "stream": 500}
KINDS = ["flip", "set", "cut", "insert", "remove", "repeat", "number"]
NUMBERS = [
    b"-1",
    b"0",
    b"1e999",
    b"9223372036854775808",
    b"null",
    b"[]",
    b"{}",
    b'"\\ud800"',
    b"true",
    b"1.0",
    b"[" * 2000 + b"]" * 2000,
]


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed after some damage, or bytes out of nowhere."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    out = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        if not out:
            break
        at = draw(st.integers(0, len(out) - 1))
        match draw(st.sampled_from(KINDS)):
            case "flip":
                out[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                out[at] = draw(st.sampled_from([0, 1, 34, 44, 48, 127, 128, 254, 255]))
            case "cut":
                del out[max(1, at) :]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "remove":
                del out[at : at + draw(st.integers(1, 8))]
            case "repeat":
                out[at:at] = out[at : at + draw(st.integers(1, 64))]
            case "number":
                # JSON: what stands there becomes another value.
                end = at + 1
                while end < len(out) and out[end : end + 1] not in b",]}:":
                    end += 1
                out[at:end] = draw(st.sampled_from(NUMBERS))
    return bytes(out)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_pass(name: str) -> None:
    run, seeds = TARGETS[name]
    for seed in seeds():
        run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_met_by_the_errors_that_are_promised(name: str) -> None:
    run, seeds = TARGETS[name]

    @settings(
        max_examples=EXAMPLES.get(name, 600),
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(damaged(seeds()))
    def met(data: bytes) -> None:
        run(data)

    met()
