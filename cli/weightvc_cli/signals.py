"""How a command that goes on for ever is told to end."""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by(*more: signal.Signals) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, and signals of `more`; Ctrl-C raises KeyboardInterrupt as well, now or at the end.

    An interrupt that arrives while Python runs a destructor or a callback is printed and forgotten by Python: without
    the event, a service that was told to end once would go on for ever.
    """
    stop = threading.Event()
    interrupted = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        # By another thread: this one may be inside stop.wait(), with its lock.
        _thread.start_new_thread(stop.set, ())
        if number == signal.SIGINT:
            interrupted = True
            raise KeyboardInterrupt

    # What is started in the background of a script, or by nohup, ignores what it was told to ignore.
    heard = [number for number in (signal.SIGINT, *more) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield stop
        if interrupted:
            raise KeyboardInterrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
