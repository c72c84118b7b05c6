"""Who goes by a root that collectors have left behind reads on from the newest one."""

import pytest

import weightvc
from tests.kit.faults import deny_what_is_missing
from tests.kit.weights import Bits, flipped, held, tensor, tiny_format
from weightvc.errors import AccessDenied, Expired, KeyNotFound
from weightvc.objects import key
from weightvc.objects.retention import Policy, Rules

START = {("", "w"): tensor("BF16", (40,), 0)}
COUNT = 14
EVEN = Policy({"*": Rules(every=2)}, None)
"""Something goes from every segment, so that each is written anew."""


@pytest.fixture(autouse=True)
def _tiny():
    with tiny_format():
        yield


def weights(number):
    return {("", "w"): flipped(START["", "w"], 0.3, number)}


@pytest.fixture
def ids(repository):
    """Versions in several segments, the first of them tagged."""
    made = [repository.commit(Bits(weights(i)), step=i, base=True).id for i in range(COUNT)]
    repository.tag("v0", made[0])
    repository.branch("side", made[0])
    assert len(repository.refresh().segments) == 1
    return made


def overtaken(url, kind, times=1):
    """The repository, as a process has it that sleeps before it reads an object of a kind, while others go on."""
    opened = weightvc.open(url, cache=None, author="sleeper")
    get = opened.store.get
    left = list(range(times))

    def slow(name, **more):
        if left and name.startswith(kind):
            number = left.pop()
            other = weightvc.open(url, cache=None, author="other")
            for i in range(9):  # spills, and so rewrites the last segment
                other.commit(Bits(weights(i)), branch="busy", message=f"{number} {i}", base=True)
            other.expire(EVEN)
            other.tag(f"other-{number}", "busy")
            other.gc(grace=0, force=True)
            with pytest.raises((KeyNotFound, AccessDenied)):
                get(name, **more)
        return get(name, **more)

    opened.store.get = slow
    return opened


@pytest.mark.parametrize(
    ("kind", "work"),
    {
        "resolve": ("segment/", lambda r, ids: r.resolve("main~13").id == ids[0]),
        "resolve an id": ("segment/", lambda r, ids: r.resolve(ids[0][:20]).id == ids[0]),
        "resolve a tag": ("page/", lambda r, ids: r.resolve("v0").id == ids[0]),
        "load": ("segment/", lambda r, ids: held(r, "main~13") == weights(0)),
        "tags": ("page/", lambda r, ids: r.tags()["v0"] == ids[0]),
        "log": ("segment/", lambda r, ids: [one.id for one in r.log("main")] == ids[::-1]),
        "reflog": ("segment/", lambda r, ids: [one.new for one in r.reflog("main")] == ids[::-1]),
        "tag": ("page/", lambda r, ids: r.tag("v1", "main").id == r.tags()["v1"]),
        "branch": ("segment/", lambda r, ids: r.branch("new", "main~13").id == ids[0]),
        "commit": ("segment/", lambda r, ids: r.commit(Bits(weights(1)), branch="side").parents == (ids[0],)),
        "detached": (
            "segment/",
            lambda r, ids: r.commit(Bits(weights(1)), branch=None, parents=[ids[0]]).parents == (ids[0],),
        ),
        "compact": ("segment/", lambda r, ids: r.compact().skipped == []),
        "expire": ("segment/", lambda r, ids: r.expire(EVEN).decisions != []),
        "gc": ("segment/", lambda r, ids: r.gc(grace=0, force=True).failed == {}),
        "gc, of a page": ("page/", lambda r, ids: r.gc(grace=0, force=True).failed == {}),
        "lease": ("segment/", lambda r, ids: leased(r, ids)),
        "plan": ("segment/", lambda r, ids: r.plan(None, "main~13").steps != ()),
    }.values(),
    ids=[
        *("resolve", "resolve an id", "resolve a tag", "load", "tags", "log", "reflog", "tag", "branch", "commit"),
        *("detached", "compact", "expire", "gc", "gc, of a page", "lease", "plan"),
    ],
)
def test_who_was_asleep_goes_on(repository, ids, kind, work):
    sleeper = overtaken(repository.url, kind)
    assert work(sleeper, ids)
    assert repository.fsck(read_data=1).ok


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        ("segment/", lambda r, ids: r.resolve("main~13").id == ids[0]),
        ("segment/", lambda r, ids: held(r, "main~13") == weights(0)),
        ("page/", lambda r, ids: r.resolve("v0").id == ids[0]),
    ],
    ids=["resolve", "load", "tag"],
)
def test_a_reader_that_is_denied_what_has_gone_goes_on(repository, ids, kind, work, monkeypatch):
    """So S3 answers who may not list, and reading is all that a reader needs to be allowed."""
    sleeper = overtaken(repository.url, kind)
    deny_what_is_missing(monkeypatch)
    sleeper.store.get = overtaken(repository.url, kind).store.get
    assert work(sleeper, ids)


def test_what_is_denied_is_not_called_missing(repository, ids):
    """Neither where the root names it still, nor where there is a newer root that names it as well."""
    segment = repository.refresh().segments[0].key
    for busy in (False, True):
        opened = weightvc.open(repository.url, cache=None)
        opened.refresh()
        get = opened.store.get

        def denied(name, get=get, **more):
            if name == segment:
                raise AccessDenied(f"cannot read {name!r}")
            return get(name, **more)

        opened.store.get = denied
        if busy:
            repository.commit(Bits(weights(1)), branch="busy")
        with pytest.raises(AccessDenied, match="segment/"):
            opened._refs().resolve("main~13") if busy else opened.resolve("main~13")


def leased(repository, ids):
    with repository.lease("main~13") as made:
        return made.id == ids[0] and held(repository, made.id) == weights(0)


def test_who_always_sleeps_too_long_is_told(repository, ids):
    with pytest.raises(Expired, match="slower than the grace period"):
        overtaken(repository.url, "segment/", times=2).resolve("main~13")


def test_what_is_lost_is_not_waited_for(repository, ids):
    """Nobody was faster: the root names it, and it is not there."""
    root = repository.refresh()
    repository.store.delete([root.segments[0].key, root.tags])
    for work in (
        lambda r: r.resolve("main~13"),
        lambda r: r.tags(),
        lambda r: r.tag("v1", "main"),
        lambda r: r.branch("new", "main~13"),
    ):
        with pytest.raises(KeyNotFound, match="weightvc fsck"):
            work(weightvc.open(repository.url, cache=None))
    assert repository.store.get(key.ROOT).data
