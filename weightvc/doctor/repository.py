"""Checks of the repository: its root, what a pull costs, and what killed processes left."""

import time
from collections.abc import Iterator
from itertools import islice, pairwise
from statistics import median
from typing import Final

from weightvc.doctor.case import DAY, Case
from weightvc.doctor.finding import READER, Finding, amount, ok, problem, skipped, span, warning
from weightvc.errors import Corrupt, KeyNotFound
from weightvc.objects import frame, key, policy
from weightvc.objects import root as roots
from weightvc.objects.catalogue import Entry
from weightvc.protocol import pins as leases
from weightvc.protocol.plan import plan
from weightvc.protocol.refs import Refs

FAR: Final = 64
"""Patches after a base from which `compact` is due: it leaves a dozen, and its job may be an hour of steps behind."""
HEAVY: Final = 1 << 20
"""Bytes of patches that nobody minds, whatever the base has."""
LARGE: Final = 4 * roots.LIMIT
"""Bytes of a root that are much to read at each poll."""
AHEAD: Final = 60.0
"""Seconds that an operation may lie in the future: the clocks of hosts differ."""
HOLDERS: Final = 3
"""Pins that are named one by one."""
STEPS: Final = 10
"""Versions whose times tell how often one comes."""


def root(case: Case) -> Iterator[Finding]:
    """Whether there is a root that this weightvc reads, and what it tells."""
    url = case.store.url
    if case.found is None:
        says = f"{url} holds no weightvc repository"
        yield problem("root", KeyNotFound, says, f"`weightvc init {url}`; if there was one, `weightvc fsck`")
        return
    try:
        case.root = found = roots.decode(case.found.data, f"{url}: root")
    except Corrupt as error:
        yield problem("root", Corrupt, str(error), "`weightvc fsck`, which says what a root can be made of")
        return
    nbytes = len(case.found.data)
    says = f"format {frame.FORMAT}, operation {found.sequence}, {amount(nbytes)}"
    numbers: dict[str, float] = {"sequence": found.sequence, "bytes": nbytes, "branches": len(found.branches)}
    last = found.tail[-1] if found.tail else None
    age = 0.0
    if last is not None:
        age = numbers["age_seconds"] = time.time() + case.ahead - last.time / 1e6
        says += f"; the last one was a {last.op} {span(max(0.0, age))} ago"
    if nbytes > LARGE:
        says += f", which each poll reads, with {len(found.branches)} branches"
        yield warning("root", says, "`weightvc branch -d NAME` for those that are not needed", **numbers)
    elif age < -AHEAD:
        says = f"its last operation lies {span(-age)} in the future: a writer's clock is wrong"
        yield warning("root", says, f"set the clock of {last.author if last else 'the writer'}", **numbers)
    else:
        yield ok("root", says, **numbers)


def catalogue(case: Case) -> Iterator[Finding]:
    """How far the newest version lies from a base."""
    if case.root is None:
        return
    name = case.root.default
    if name not in case.root.branches:
        yield ok("catalogue", f"the branch {name!r} has no version yet")
        return
    refs = Refs(case.shelf, case.root)
    case.newest = entry = refs.resolve(name).entry
    case.cold = cold = plan(refs, entry)
    base, patches = cold.steps[0].edge.nbytes, cold.nbytes - cold.steps[0].nbytes
    says = f"the head of {name!r} is {cold.patches} patches ({amount(patches)}) after a base of {amount(base)}"
    numbers = {"patches": cold.patches, "patch_bytes": patches, "base_bytes": base}
    share = policy.of(case.root.extra).share
    if cold.patches >= FAR or patches > max(HEAVY, share * base // 100):
        mend = "`weightvc compact`, or `weightvc maintain` as a job"
        yield warning("catalogue", f"{says}: compaction is due", mend, **numbers)
    else:
        yield ok("catalogue", says, **numbers)


def pull(case: Case) -> Iterator[Finding]:
    """What a new host and one that is a version behind wait for, by the times that were measured here."""
    if case.root is None or case.newest is None or case.cold is None:
        return
    if case.request is None or case.throughput is None:
        yield skipped("pull", "nothing large enough was read to tell how long one takes")
        return
    refs = Refs(case.shelf, case.root)
    last = list(islice(refs.history(case.newest), STEPS))
    cold = case.cold.nbytes / case.throughput + case.cold.requests * case.request
    says = f"a new host fetches {amount(case.cold.nbytes)} in {span(cold)}"
    numbers = {"cold_bytes": case.cold.nbytes, "cold_requests": case.cold.requests, "cold_seconds": cold}
    before = last[1].version if len(last) > 1 else None
    if before is None:
        yield ok("pull", says, **numbers)
        return
    way = plan(refs, case.newest, frozenset({before.tree}))
    # A poll and the root come first.
    step = way.nbytes / case.throughput + (1 + way.requests) * case.request
    every = _interval(last)
    says += (
        f", one that is a version behind {amount(way.nbytes)} in {span(step)}; the last ones came every {span(every)}"
    )
    numbers |= {"step_bytes": way.nbytes, "step_seconds": step, "interval_seconds": every}
    quiet = time.time() + case.ahead - last[0].time / 1e6
    if step > every and quiet < STEPS * max(every, 1.0):
        mend = "hosts near the store, a mirror near the hosts (`weightvc mirror`), or fewer commits"
        yield warning("pull", f"{says}: they cannot keep up", mend, **numbers)
    else:
        yield ok("pull", says, **numbers)


def _interval(entries: list[Entry]) -> float:
    """Seconds between versions, the newest first."""
    times = [one.version.time / 1e6 for one in entries if one.version is not None]
    return max(0.0, median([newer - older for newer, older in pairwise(times)]))


def pins(case: Case) -> Iterator[Finding]:
    """Who holds leases and writers' pins, and those that killed processes left."""
    if "list" not in case.rights:
        yield skipped("pins", READER)
        return
    now = time.time() + case.ahead
    written = {one.key: one.modified for one in case.store.list("pin/")}
    try:
        found = leases.read(case.store, now)
    except Corrupt as error:
        yield problem("pins", Corrupt, f"{error}: nothing is collected until then")
        return
    stale = [name for name in found.stale if written.get(name, now) < now - DAY]
    # Somebody who lives has written it again by half of its time.
    silent = [pin for pin in found.held if pin.renewed < now - pin.lifetime / 2]
    numbers = {"held": len(found.held), "silent": len(silent), "stale": len(stale)}
    if stale:
        yield warning("pins", f"{len(stale)} that killed processes left over a day ago", "`weightvc gc`", **numbers)
    elif silent:
        says = f"{len(silent)} of {len(found.held)} held by who was killed or stands still: {silent[0].told}"
        yield warning("pins", says, silent[0].mend(case.store.url), **numbers)
    else:
        first = sorted(found.held, key=lambda pin: pin.until)[:HOLDERS]
        more = [f"and {len(found.held) - HOLDERS} more"] if len(found.held) > HOLDERS else []
        named = f": {'; '.join([pin.told for pin in first] + more)}" if first else ""
        yield ok("pins", f"{len(found.held)} held{named}", **numbers)


def probes(case: Case) -> Iterator[Finding]:
    """What was written for a try and is still there: by us, or by processes that were killed."""
    if case.left:
        yield warning("probes", f"{len(case.left)} objects could not be deleted again", "`weightvc gc`, in a day")
        return
    if "list" not in case.rights:
        return
    before = time.time() + case.ahead - DAY
    old = [one for one in case.store.list("probe/") if key.PROBE.fullmatch(one.key) and one.modified < before]
    if old:
        says = f"{len(old)} that killed processes left over a day ago"
        yield warning("probes", says, "`weightvc gc`", stale=len(old))
    else:
        yield ok("probes", "none left over", stale=0)
