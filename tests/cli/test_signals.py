import signal
from collections.abc import Callable, Iterator

import pytest

from weightvc_cli.signals import stopped_by


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Tests that run in the background inherit that interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Unlucky:
    """Its end is when an interrupt arrives; Python prints what a destructor raises, and forgets it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def forgotten() -> None:
    with stopped_by() as stop:
        Unlucky()
        assert stop.wait(30)


def heard() -> None:
    with stopped_by():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("interrupted", [forgotten, heard])
def test_an_interrupt_ends_it_whenever_it_arrives(interrupted: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_another_signal_ends_it_quietly_and_the_old_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopped_by(signal.SIGTERM) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(30)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_ignores_interrupts_still_does() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopped_by() as stop:
        signal.raise_signal(signal.SIGINT)
    assert not stop.is_set()
