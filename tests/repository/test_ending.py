"""When the interpreter ends, what a thread that outlives the main one does, or a function of atexit, is done."""

import subprocess
import sys
import textwrap

import pytest

import weightvc

HEAD = """
import atexit, concurrent.futures.thread, sys, threading, numpy as np, weightvc

url, other, directory = sys.argv[1:]
repository = weightvc.open(url, cache=url + ".cache")
weights = {"w": np.arange(6 << 20, dtype=np.float32)}  # 24 MiB, several blocks

def is_ending():
    return concurrent.futures.thread._shutdown

def at_the_end(work):
    pause = threading.Event()
    def wait():
        while not is_ending():
            pause.wait(0.01)
        work()
    threading.Thread(target=wait).start()

def no_thread(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def without_threads(work):
    threading.Thread.start = no_thread
    work()
"""
ENDS = {
    "thread": "at_the_end(work)",
    "atexit": "atexit.register(work)",
    "atexit without threads": "atexit.register(without_threads, work)",  # as in Python 3.12
}


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("how", ENDS)
def test_what_is_called_when_the_main_thread_has_ended_works(tmp_path, how):
    url = tmp_path / "repository"
    weightvc.init(url, cache=None)
    done = run(
        f"""
        first = repository.commit(weights, step=0)
        def work():
            assert is_ending()
            weights["w"][::1000] += 1
            version = repository.commit(weights, step=1, base=True)
            assert (repository.load(first, framework="numpy")["w"] != weights["w"]).any()
            assert (repository.load(version, framework="numpy")["w"] == weights["w"]).all()
            with repository.writer(step=2) as out:
                out.add("w", weights["w"])
            weightvc.mirror(repository, weightvc.init(other, cache=None))
            repository.checkout("main", directory)
            assert repository.verify(directory).ok
            assert repository.diff("main~1", "main").changed == 0
            repository.compact()
            assert repository.fsck(read_data=1).ok
            print("done")
        {ENDS[how]}
        """,
        url,
        tmp_path / "other",
        tmp_path / "directory",
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")
    assert [version.step for version in weightvc.open(url, cache=None).log()] == [2, 1, 0]


def test_a_commit_in_the_middle_of_which_the_main_thread_ends_is_whole(tmp_path):
    url = tmp_path / "repository"
    weightvc.init(url, cache=None)
    done = run(
        """
        from weightvc.protocol import parallel
        from weightvc.sources import open_source

        parallel.workers = lambda: 1  # so that not all of it is begun when the main thread ends
        begun, pause = threading.Event(), threading.Event()

        class Slow:
            def __init__(self, source):
                self.tensors, self.layout, self.check, self.close = source.tensors, None, source.check, source.close
                self.source = source

            def read(self, index, start, stop):
                while start and not is_ending():
                    begun.set()
                    pause.wait(0.01)
                return self.source.read(index, start, stop)

        threading.Thread(target=lambda: repository.commit(Slow(open_source(weights)), step=0)).start()
        begun.wait()
        """,
        url,
        "",
        "",
    )
    assert (done.returncode, done.stderr) == (0, "")
    repository = weightvc.open(url, cache=None)
    assert [version.step for version in repository.log()] == [0]
    assert repository.fsck(read_data=1).ok


def test_a_store_that_can_not_be_probed_any_more_is_refused(tmp_path):
    done = run(
        """
        from weightvc.stores.memory import MemoryStore
        from weightvc.stores.probe import probe

        store = MemoryStore("memory")
        store.conditional = False
        def work():
            try:
                probe(store)
            except weightvc.Refused as error:
                print(error)
        atexit.register(work)
        """,
        weightvc.init(tmp_path / "repository", cache=None).url,
        "",
        "",
    )
    assert done.stderr == ""
    assert "cannot be probed" in done.stdout


LEFT = {
    "version": """
        from weightvc.protocol.stored import VersionSource
        refs = repository._refs()
        left = VersionSource(repository._shelf, refs, refs.resolve("main").entry, whole=True)
        left.read(0, 0, 8)
        """,
    "iteration": """
        def work():
            with Pool(1, "work") as pool:
                pool.submit(int).result()
                yield
        left = work()
        next(left)
        """,
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_nobody_closed_may_be_collected_anywhere(tmp_path, kind):
    """Python's collector ran in a thread that was just beginning, which holds what ending another one needs."""
    weightvc.init(tmp_path / "repository", cache=None)
    done = run(
        f"""
        import contextlib, gc
        from weightvc.pool import Pool
        repository = weightvc.open(url, cache=None)
        repository.commit({{"w": np.random.default_rng(0).random(6 << 20)}})  # whose base lies in packs
        {LEFT[kind]}
        circle = [left]
        circle.append(circle)
        gc.collect()
        del left, circle
        with getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):  # before Python 3.13
            gc.collect()
        print("gone on")
        """,
        tmp_path / "repository",
        "",
        "",
    )
    assert (done.returncode, done.stdout) == (0, "gone on\n"), done.stderr
