"""What every store must do. Subclass StoreContract and say in `open` how a second store of one place is made."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightvc.errors import BadName, KeyExists, KeyNotFound, PreconditionFailed, Refused
from weightvc.stores.base import Got, Store

DATA = bytes(range(256)) * 2

# One place serves all examples, and one method all subclasses: neither keeps anything between examples.
_SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/.",
    ".hidden",
    ".tmp-1",
    "a\\b",
    "a\0b",
    "a\nb",
    "a b",
    "é",
    "e\u0301",
    "x" * 256,
    "x/" * 450 + "y",
]


class StoreContract:
    """Each test gets `again`, which opens one fresh place as often as asked, and `store`, opened once."""

    refused: tuple[type[Exception], ...] = (PreconditionFailed,)
    """What the losers of a race for one swap are told."""

    @pytest.fixture
    def again(self) -> Callable[[], Store]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, again: Callable[[], Store]) -> Store:
        return again()

    # -- reading ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"\0", DATA, b"\r\n\xff\xfe" * 3])
    def test_gives_back_what_was_put(self, store: Store, data: bytes) -> None:
        etag = store.put("kind/one", data)
        assert store.get("kind/one") == Got(data, etag, len(data))

    def test_overwrites(self, store: Store) -> None:
        first = store.put("k", b"one")
        second = store.put("k", b"another")
        assert first != second
        assert store.get("k") == Got(b"another", second, 7)

    def test_ranges(self, store: Store) -> None:
        etag = store.put("k", DATA)
        for start in (None, 0, 1, 255, 511, 512, 513, 10_000):
            for length in (None, 0, 1, 256, 512, 513, 10_000):
                begin = start or 0
                want = DATA[begin:] if length is None else DATA[begin : begin + length]
                got = store.get("k", start=start, length=length)
                assert got == Got(want, etag, 512), (start, length)

    @pytest.mark.parametrize(("start", "length"), [(None, None), (0, 0), (0, 5), (3, None), (3, 5)])
    def test_ranges_of_an_empty_object(self, store: Store, start: int | None, length: int | None) -> None:
        etag = store.put("k", b"")
        assert store.get("k", start=start, length=length) == Got(b"", etag, 0)

    def test_ranges_of_a_large_object(self, store: Store) -> None:
        data = os.urandom(1 << 20) * 3 + b"end"
        etag = store.put("k", data)
        assert store.get("k") == Got(data, etag, len(data))
        assert store.get("k", start=1_000_001, length=1_500_000) == Got(data[1_000_001:2_500_001], etag, len(data))
        assert store.get("k", start=len(data) - 3) == Got(b"end", etag, len(data))
        assert store.get("k", start=len(data)) == Got(b"", etag, len(data))
        assert store.get("k", unless_etag=etag) is None

    @pytest.mark.parametrize("bad", [{"start": -1}, {"length": -1}, {"start": 3, "length": -2}])
    def test_negative_range_is_refused(self, store: Store, bad: dict[str, int]) -> None:
        store.put("k", DATA)
        with pytest.raises(Refused, match="negative"):
            store.get("k", start=bad.get("start"), length=bad.get("length"))

    def test_unless_etag(self, store: Store) -> None:
        etag = store.put("k", b"one")
        assert store.get("k", unless_etag=etag) is None
        assert store.get("k", start=1, length=1, unless_etag=etag) is None
        assert store.get("k", length=0, unless_etag=etag) is None
        newer = store.put("k", b"two")
        assert store.get("k", unless_etag=etag) == Got(b"two", newer, 3)

    def test_missing_key(self, store: Store) -> None:
        store.put("a/b", b"")
        for key in ("missing", "a", "a/b2"):
            with pytest.raises(KeyNotFound, match=key):
                store.get(key)
        with pytest.raises(KeyNotFound):
            store.get("missing", start=0, length=0)

    def test_empty_place(self, store: Store) -> None:
        with pytest.raises(KeyNotFound):
            store.get("root")
        assert list(store.list()) == []
        assert store.delete(["root"]) == {}

    # -- conditions ------------------------------------------------------------------------------------

    def test_create(self, store: Store) -> None:
        etag = store.create("root", b"first")
        with pytest.raises(KeyExists, match="root"):
            store.create("root", b"second")
        assert store.get("root") == Got(b"first", etag, 5)

    def test_swap(self, store: Store) -> None:
        first = store.create("root", b"v1")
        second = store.swap("root", b"v2", first)
        assert store.get("root") == Got(b"v2", second, 2)
        with pytest.raises(PreconditionFailed, match="root"):
            store.swap("root", b"v3", first)
        assert store.get("root") == Got(b"v2", second, 2)

    def test_swap_of_nothing(self, store: Store) -> None:
        etag = store.create("root", b"v1")
        store.delete(["root"])
        with pytest.raises(PreconditionFailed):
            store.swap("root", b"v2", etag)
        with pytest.raises(KeyNotFound):
            store.get("root")

    def test_one_of_eight_creates_wins(self, again: Callable[[], Store]) -> None:
        won = self._race(again, lambda store, i: store.create("root", b"writer %d" % i), (KeyExists,))
        got = again().get("root")
        assert got is not None
        assert [(got.data, got.etag)] == [(b"writer %d" % i, etag) for i, etag in won]

    def test_one_of_eight_swaps_wins(self, again: Callable[[], Store]) -> None:
        old = again().create("root", b"old")
        won = self._race(again, lambda store, i: store.swap("root", b"writer %d" % i, old), self.refused)
        got = again().get("root")
        assert got is not None
        assert [(got.data, got.etag)] == [(b"writer %d" % i, etag) for i, etag in won]

    @staticmethod
    def _race(
        again: Callable[[], Store], write: Callable[[Store, int], str], lost: tuple[type[Exception], ...]
    ) -> list[tuple[int, str]]:
        stores = [again() for _ in range(2)]  # threads of two stores, as of two processes
        start = threading.Barrier(8)

        def one(i: int) -> tuple[int, str] | None:
            start.wait()
            try:
                return i, write(stores[i % 2], i)
            except lost:
                return None

        with ThreadPoolExecutor(8) as threads:
            return [won for won in threads.map(one, range(8)) if won is not None]

    def test_swaps_lose_no_update(self, again: Callable[[], Store]) -> None:
        again().create("n", b"")

        def add(store: Store, name: bytes) -> None:
            for _ in range(3):
                while True:
                    got = store.get("n")
                    assert got is not None
                    try:
                        store.swap("n", got.data + name, got.etag)
                        break
                    except self.refused:
                        time.sleep(0.001)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(add, [again() for _ in range(3)], (b"a", b"b", b"c")))
        got = again().get("n")
        assert got is not None
        assert sorted(got.data) == sorted(b"aaabbbccc")

    # -- listing and deleting --------------------------------------------------------------------------

    def test_lists_in_byte_order(self, store: Store) -> None:
        keys = ["a-b", "a/b-c/d", "a/b.c", "a/b0", "A", "a/B", "a0", "b/c/d/e", "z~", "z!"]
        before = time.time()
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list())
        assert [one.key for one in listed] == sorted(keys)
        assert [one.size for one in listed] == [len(key) for key in sorted(keys)]
        assert all(before - 3 < one.modified < time.time() + 3 for one in listed)

    def test_prefixes(self, store: Store) -> None:
        for key in ("p/a", "p/b", "p2/a", "pins/x"):
            store.put(key, b"")
        assert [one.key for one in store.list("p/")] == ["p/a", "p/b"]
        assert [one.key for one in store.list("p")] == ["p/a", "p/b", "p2/a", "pins/x"]
        assert [one.key for one in store.list("p2")] == ["p2/a"]
        assert [one.key for one in store.list("p/b")] == ["p/b"]
        assert list(store.list("q/")) == []
        assert list(store.list("p/a/")) == []

    def test_many_keys(self, store: Store) -> None:
        keys = sorted(f"k/{i % 3}/{i}" for i in range(40))
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda key: store.put(key, b"x"), keys))
        assert [one.key for one in store.list("k/")] == keys
        assert store.delete(keys[::2]) == {}
        assert [one.key for one in store.list("k/")] == keys[1::2]

    def test_deletes(self, store: Store) -> None:
        store.put("a/b", b"")
        store.put("a/c", b"")
        assert store.delete(iter(["a/b", "a/never", "never/b"])) == {}
        assert store.delete(["a/b"]) == {}
        assert store.delete([]) == {}
        assert [one.key for one in store.list()] == ["a/c"]

    # -- names, accounts, processes --------------------------------------------------------------------

    def test_bad_keys_are_refused(self, store: Store) -> None:
        for key in BAD_KEYS:
            self._refuses(store, key)
        assert list(store.list()) == []

    @staticmethod
    def _refuses(store: Store, key: str) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: store.get(key),
            lambda: store.put(key, b""),
            lambda: store.create(key, b""),
            lambda: store.swap(key, b"", "etag"),
            lambda: store.delete([key]),
        ]
        for call in calls:
            with pytest.raises(BadName):
                call()

    def test_bad_prefixes_are_refused(self, store: Store) -> None:
        for prefix in ("/", "../", "a//", "a b", "é"):
            with pytest.raises(BadName):
                list(store.list(prefix))

    @settings(max_examples=15, deadline=None, suppress_health_check=_SHARED)
    @given(
        name=st.from_regex(r"[!-.0-\[\]-~]{1,40}", fullmatch=True).filter(lambda name: name[0] != "."),
        data=st.binary(max_size=300),
    )
    def test_any_good_key_comes_back(self, store: Store, name: str, data: bytes) -> None:
        key = f"any/{name}"
        etag = store.put(key, data)
        assert store.get(key) == Got(data, etag, len(data))
        assert [(one.key, one.size) for one in store.list(key) if one.key == key] == [(key, len(data))]
        assert store.delete([key]) == {}
        assert list(store.list("any/")) == []

    def test_counts(self, store: Store) -> None:
        etag = store.put("k", b"12345")
        store.create("l", b"123")
        store.swap("k", b"1234", etag)
        assert (store.stats.writes, store.stats.bytes_written) == (3, 12)
        reads = store.stats.reads
        store.get("k", start=0, length=4)
        assert store.stats.reads == reads + 1
        assert store.stats.bytes_read >= 4
        list(store.list())
        assert store.stats.lists == 1
        store.delete(["k", "l"])
        assert store.stats.deletes == 1

    def test_url_is_shown(self, store: Store) -> None:
        assert store.url in repr(store)
        with pytest.raises(KeyNotFound) as caught:
            store.get("missing")
        assert store.url in str(caught.value)

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_child_process_can_use_it(self, store: Store) -> None:
        """A fork copies connections and locks in the middle of whatever threads do with them."""
        store.put("k", b"parent")
        store.get("k")
        context = multiprocessing.get_context("fork")
        told: Any = context.SimpleQueue()

        def child() -> None:
            got = store.get("k")
            store.put("from-child", b"child")
            told.put(None if got is None else got.data)

        process = context.Process(target=child)
        process.start()
        assert told.get() == b"parent"
        process.join(30)
        assert process.exitcode == 0
        got = store.get("k")
        assert got is not None
        assert got.data == b"parent"
