"""The meter: a part counts while any thread is at it, and one inside of another interrupts that."""

import contextlib
import threading

import pytest

from weightvc.protocol import meter as meters
from weightvc.protocol.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meters, "time", made)
    return made


def test_a_part_inside_of_another_interrupts_it(clock: Clock) -> None:
    meter = Meter()
    with meter.part("decode"):
        clock.now = 1
        with meter.part("fetch"):
            clock.now = 4
        clock.now = 9
    clock.now = 20
    with contextlib.suppress(ZeroDivisionError), meter.part("fetch"):
        raise ZeroDivisionError
    clock.now = 25
    assert dict(meter.seconds) == {"decode": 6, "fetch": 3}
    with meter.part("fetch"), meter.part("fetch"):
        clock.now = 30
    assert meter.seconds["fetch"] == 8


def test_threads_that_are_at_it_at_once_count_once(clock: Clock) -> None:
    meter = Meter()
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with meter.part("verify"):
            begun.set()
            assert end.wait(30)

    with meter.part("verify"):
        other = threading.Thread(target=work)
        other.start()
        assert begun.wait(30)
        clock.now = 2
    clock.now = 5
    end.set()
    other.join()
    assert meter.seconds["verify"] == 5
