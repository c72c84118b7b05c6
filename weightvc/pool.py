"""The pool: threads that work for a caller, who works himself where Python lets nobody have threads any more."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that works on when the interpreter ends: for a thread that outlives the main one, and for
    functions of atexit, which Python's own refuses."""

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Have work(…) done; once the interpreter ends, here and now. So it may wait for no other work, and for no
        lock that the caller holds."""
        try:
            return super().submit(work, *args, **kwargs)
        except RuntimeError:
            if not thread._shutdown:  # has no public name
                raise
        done: Future[R] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the work, unless a generator is let go of: that may be the cyclic collector's doing, in a thread
        that is just beginning, and holds a lock of Python's that waiting for another thread's end takes."""
        abandoned = kind is GeneratorExit
        self.shutdown(wait=not abandoned, cancel_futures=abandoned)


def beside(name: str, work: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> threading.Thread | None:
    """Begin a daemon thread for what nothing depends on; None where there can be no thread any more."""
    begun = threading.Thread(target=work, name=name, args=args, kwargs=kwargs, daemon=True)
    try:
        begun.start()
    except RuntimeError:  # of Python 3.12, when the interpreter ends
        return None
    return begun
