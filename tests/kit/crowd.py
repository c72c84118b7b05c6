"""A crowd: writers, readers and collectors as processes of their own on one repository, killed and stopped at random.

    done = run(url, options, folder, seconds=60, seed=1)

What a version holds is told by its label `step` alone, so every reader can compare what it got, bit for bit. At the
end all are killed; then `weightvc fsck --read-data` has to find nothing, every version that the root promises has to
check out as it was committed once all that is garbage has gone, and every commit that returned has to be in the
catalogue. `python -m tests.kit.crowd ROLE …` is one of the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

import weightvc
from tests.kit.servers import die_with_parent
from tests.kit.weights import Bits, Weights, file_bytes, flipped, held, lying, tensor
from weightvc.errors import Conflict, Expired, RefNotFound, StateUnknown, StoreError, WeightvcError
from weightvc.repository import Repository

ROLES: Final = ("writer", "second writer", "commander", "keeper", "gc", "reader", "leaseholder", "puller", "follower")
GRACE: Final = 3
"""Seconds of the collector's grace period."""
LONGEST: Final = 8.0
"""Seconds that somebody is stopped, at most: longer than two grace periods, and far shorter than a lease lives."""
LIFETIME: Final = 120
"""Seconds that a lease lives."""
KEPT: Final = ["--keep-last", "25", "--keep-unreachable", "4s"]
BRANCHES: Final = ("main", "main", "main", "side", "try")
LOST: Final = (3, 4, 5, 6)
"""Exit statuses of a command that lost a race, or whose version has gone."""
COMMAND: Final = [sys.executable, "-m", "weightvc_cli"]


@cache
def first() -> Weights:
    return {("", "w"): tensor("BF16", (20_000,), 0)}


def weights(step: int) -> Weights:
    """What a version with this label holds."""
    return first() if step == 0 else {("", "w"): flipped(first()["", "w"], 0.01, step)}


# One process


class Fault(Exception):
    """Something that must not happen."""


class Actor:
    """One process of the crowd."""

    def __init__(self, role: str, given: Mapping[str, Any], number: int) -> None:
        """`number` is one that no other role has."""
        self.role = role
        self.url: str = given["url"]
        self.options: dict[str, Any] = given["options"]
        self.folder = Path(given["folder"])
        self.random = random.Random(f"{given['seed']} {role} {given['life']}")
        self._step = (number + 1) * 10**7 + given["life"] * 10**4
        self.home = self.folder / role.replace(" ", "-")
        self.home.mkdir(exist_ok=True)
        self._notes = os.open(self.folder / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, what: str, **more: Any) -> None:
        """One line of what happened, in one write."""
        os.write(self._notes, (json.dumps({"role": self.role, "what": what, **more}) + "\n").encode())

    def step(self) -> int:
        """A label that nobody else uses."""
        self._step += 1
        return self._step

    def open(self) -> Repository:
        """The repository; half of the time with a cache."""
        kept = self.home / "cache" if self.random.random() < 0.5 else None
        return weightvc.open(self.url, cache=kept, author=self.role, **self.options)

    def branch(self) -> str:
        return self.random.choice(BRANCHES)

    def ref(self) -> str:
        """Some version: most often one that is near a head."""
        what = self.random.randrange(6)
        return self.branch() if what < 2 else "one" if what == 2 else f"{self.branch()}~{self.random.randrange(40)}"

    def command(self, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """A command, whose outcome has to be one that it may have."""
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            env=environment(self.url, self.options, self.home),
            cwd=self.home,
            capture_output=True,
            text=True,
            **more,
        )
        kind = str(arguments[0])
        if done.returncode in LOST or (done.returncode == 9 and self.options):
            self.note(f"{kind} lost", status=done.returncode)
        elif done.returncode:
            raise Fault(f"{' '.join(map(str, arguments))}: {done.returncode}: {done.stderr[-2000:]}")
        else:
            self.note(kind)
        return done

    @contextlib.contextmanager
    def racing(self, what: str) -> Any:
        """What is done inside may lose a race, and then says so."""
        try:
            yield
        except (Conflict, Expired, RefNotFound) as error:
            self.note(f"{what} lost", error=f"{type(error).__name__}: {error}"[:300])
        except (StoreError, StateUnknown) as error:
            if not self.options:
                raise
            self.note("store", error=f"{type(error).__name__}: {error}"[:300])
        else:
            self.note(what)


def environment(url: str, options: Mapping[str, Any], home: Path) -> dict[str, str]:
    """For a command on the repository."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIGHTVC_", "AWS_"))}
    kept |= {"WEIGHTVC_REPO": url, "WEIGHTVC_CACHE": str(home / "cache"), "AWS_EC2_METADATA_DISABLED": "true"}
    if options:
        kept |= {
            "AWS_ENDPOINT_URL": options["endpoint_url"],
            "AWS_REGION": options["region"],
            "AWS_ACCESS_KEY_ID": options["access_key"],
            "AWS_SECRET_ACCESS_KEY": options["secret_key"],
        }
    return kept


def writer(actor: Actor) -> None:
    """Commits, and moves of branches and tags, through the library."""
    repository = actor.open()
    pick = actor.random
    for _ in range(pick.randrange(5, 40)):
        what = pick.randrange(20)
        if what < 12:
            with actor.racing("commit"):
                step = actor.step()
                made = repository.commit(
                    Bits(weights(step)),
                    branch=actor.branch(),
                    step=step,
                    message=str(step),
                    on_conflict="rebase",
                    base=pick.random() < 0.05,
                )
                actor.note("committed", id=made.id)
        elif what == 12:
            with actor.racing("detached commit"):
                step = actor.step()
                parent = repository.resolve(actor.ref())
                made = repository.commit(Bits(weights(step)), branch=None, step=step, parents=[parent])
                actor.note("committed", id=made.id)
        elif what == 13:
            with actor.racing("tag"):
                repository.tag(f"t{pick.randrange(5)}", actor.ref(), force=True)
        elif what == 14:
            with actor.racing("tag"):
                repository.tag("one", actor.branch(), force=True)
        elif what == 15:
            with actor.racing("untag"):
                repository.delete_tag(f"t{pick.randrange(5)}")
        elif what == 16:
            with actor.racing("reset"):
                repository.reset("main", f"main~{pick.randrange(1, 4)}", rewind=True)
        elif what == 17:
            with actor.racing("delete"):
                repository.delete_branch("try")
        elif what == 18:
            with actor.racing("restore"):
                repository.restore_branch("try")
        else:
            with actor.racing("revert"):
                made = repository.revert(f"main~{pick.randrange(1, 9)}", branch="main", on_conflict="rebase")
                actor.note("committed", id=made.id)
        time.sleep(pick.random() * 0.1)


def commander(actor: Actor) -> None:
    """The same by the command."""
    pick = actor.random
    path = actor.home / "model.safetensors"
    for _ in range(10):
        what = pick.randrange(8)
        if what < 4:
            step = actor.step()
            path.write_bytes(file_bytes(weights(step)))
            done = actor.command("commit", path, "--step", step, "-b", actor.branch(), "--rebase", "--json")
            if done.returncode == 0:
                actor.note("committed", id=json.loads(done.stdout)["id"])
        elif what == 4:
            actor.command("tag", "-f", f"t{pick.randrange(5)}", actor.ref())
        elif what == 5:
            actor.command("reset", "main", f"main~{pick.randrange(1, 4)}", "--rewind")
        elif what == 6:
            actor.command("branch", "side", actor.ref())
        else:
            actor.command("revert", f"main~{pick.randrange(1, 9)}")


def keeper(actor: Actor) -> None:
    """Lets go of versions, and compacts."""
    for _ in range(10):
        actor.command("expire", *KEPT)
        time.sleep(actor.random.random())
        actor.command("compact", "--base-every", actor.random.choice([8, 16, 1024]))


def gc(actor: Actor) -> NoReturn:
    """Becomes the command."""
    command = [*COMMAND, "gc", "--every", "1s", "--grace", f"{GRACE}s", "--json"]
    log = os.open(actor.home / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execve(command[0], command, environment(actor.url, actor.options, actor.home))


def reader(actor: Actor) -> None:
    """Reads versions: exactly what was committed, or an error that says why not."""
    repository = actor.open()
    for _ in range(40):
        with actor.racing("read"):
            made = repository.resolve(actor.ref())
            # Others go on, and may let go of it.
            time.sleep(actor.random.random() ** 4 * 5)
            compare(held(repository, made.id), made)
        if actor.random.random() < 0.2:
            repository = actor.open()


def leaseholder(actor: Actor) -> None:
    """Who has a lease reads, whatever others do."""
    repository = actor.open()
    for _ in range(10):
        with actor.racing("lease"), repository.lease(actor.ref(), lifetime=LIFETIME) as made:
            for _ in range(3):
                try:
                    time.sleep(actor.random.random() * 3)
                    compare(held(repository, made.id), made)
                    repository.checkout(made.id, actor.home / "out", replace=True)
                    compare(lying(actor.home / "out"), made)
                except Expired as error:
                    raise Fault(f"a lease on {made.short} was held, and yet: {error}") from error


def puller(actor: Actor) -> None:
    """Pulls and checks out by the command."""
    out = actor.home / "out"
    for _ in range(10):
        ref = "main" if actor.random.random() < 0.7 else actor.ref()
        done = actor.command("pull", ref, "--into", out, "--json")
        if done.returncode == 0:
            compare_file(out / "model.safetensors", json.loads(done.stdout)["step"])


def follower(actor: Actor) -> None:
    """Follows by the command, and looks at each update."""
    with subprocess.Popen(
        [*COMMAND, "follow", "main", "--into", actor.home / "slots", "--every", "0.3", "--json"],
        env=environment(actor.url, actor.options, actor.home),
        stdout=subprocess.PIPE,
        stderr=(actor.home / "log").open("ab"),
        text=True,
        preexec_fn=die_with_parent,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            told = json.loads(line)
            # It is gone when two later ones have come.
            with contextlib.suppress(FileNotFoundError):
                compare_file(Path(told["path"]) / "model.safetensors", told["step"])
                actor.note("follow")
    raise Fault(f"follow ended with status {running.returncode}: see {actor.home / 'log'}")


def compare(found: Weights, made: weightvc.Version) -> None:
    """Raise Fault unless these are a version's weights."""
    if made.step is None or found != weights(made.step):
        raise Fault(f"version {made.id}, step {made.step}, has other bits than were committed")


def compare_file(path: Path, step: int) -> None:
    """Raise Fault unless a file is what was committed."""
    data = path.read_bytes()
    if not data.endswith(weights(step)["", "w"].data):
        raise Fault(f"{path}, step {step}, has other bits than were committed")


PARTS: Final[Mapping[str, Callable[[Actor], None]]] = {
    "writer": writer,
    "second writer": writer,
    "commander": commander,
    "keeper": keeper,
    "gc": gc,
    "reader": reader,
    "leaseholder": leaseholder,
    "puller": puller,
    "follower": follower,
}


def main(role: str, given: str) -> None:
    """Be one of the processes until it is killed, or something is wrong."""
    actor = Actor(role, json.loads(given), ROLES.index(role))
    while True:
        try:
            PARTS[role](actor)
        except (Fault, AssertionError, WeightvcError, OSError) as error:
            actor.note("fault", error=f"{type(error).__name__}: {error}")
            raise


# All of them


@dataclass
class Done:
    """What a crowd did."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = ", ".join(f"{what} {count}" for what, count in sorted(self.counts.items()))
        return f"seed {self.seed}: {said}; faults: {len(self.faults)}" + "".join(f"\n  {one}" for one in self.faults)


class Herd:
    """The processes, each a session of its own: killed and stopped at random, and started again."""

    def __init__(self, module: str, roles: Sequence[str], given: Mapping[str, Any], done: Done) -> None:
        """Each of `roles` runs as `python -m MODULE ROLE {given, with its number of lives so far}`."""
        self._module, self.roles, self._given, self._done = module, roles, dict(given), done
        self._log = Path(given["folder"]) / "log"
        self._lives: Counter[str] = Counter()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._asleep: dict[str, float] = {}

    def __enter__(self) -> Herd:
        for role in self.roles:
            self.start(role)
        return self

    def __exit__(self, *_: object) -> None:
        for role, process in self.running.items():
            self.send(role, signal.SIGKILL)
            process.wait()

    def start(self, role: str) -> None:
        given = json.dumps({**self._given, "life": self._lives[role]})
        self._lives[role] += 1
        with self._log.open("ab") as log:
            self.running[role] = subprocess.Popen(
                [sys.executable, "-m", self._module, role, given],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def send(self, role: str, number: int) -> None:
        # Its group, so that a command that it runs meets the same.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[role].pid, number)

    def disturb(self, seconds: float, pick: random.Random, ended: Callable[[str, int], None]) -> None:
        """For some seconds; `ended` is told of what ends by itself, with its status."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and len(self._done.faults) <= 20:
            self._wake(now)
            for role, process in self.running.items():
                if (status := process.poll()) is not None:
                    ended(role, status)
                    self.start(role)
            role = pick.choice(self.roles)
            if role not in self._asleep:
                if pick.random() < 0.5:
                    self.send(role, signal.SIGKILL)
                    self.running[role].wait()
                    self._done.counts["kills"] += 1
                    self.start(role)
                else:
                    self.send(role, signal.SIGSTOP)
                    self._asleep[role] = now + LONGEST * pick.random() ** 2
                    self._done.counts["stops"] += 1
            time.sleep(0.2 + pick.random())
        self._wake(float("inf"))

    def _wake(self, now: float) -> None:
        for role in [role for role, until in self._asleep.items() if until < now]:
            del self._asleep[role]
            self.send(role, signal.SIGCONT)


def run(url: str, options: Mapping[str, Any], folder: Path, *, seconds: float, seed: int) -> Done:
    """Let the crowd at a new repository for some seconds. Raises nothing for what goes wrong: see `faults`."""
    done = Done(seed)
    repository = weightvc.init(url, cache=None, author="crowd", **options)
    repository.commit(Bits(weights(0)), step=0)
    repository.branch("side")
    repository.branch("try")
    repository.tag("one")

    def ended(role: str, status: int) -> None:
        if role != "gc":
            done.faults.append(f"{role} ended with status {status}: see {folder / 'log'}")
        elif status == 8:
            # What looks like a mistake: uploads that were killed outweigh the rest.
            done.counts["gc refused"] += 1
        elif status:
            done.faults.append(f"gc ended with status {status}: see {folder / 'gc' / 'log'}")

    given = {"url": url, "options": dict(options), "folder": str(folder), "seed": seed}
    with Herd("tests.kit.crowd", ROLES, given, done) as herd:
        herd.disturb(seconds, random.Random(seed), ended)
    committed = _gather(folder, done)
    _look(repository, options, folder, committed, done)
    return done


def _gather(folder: Path, done: Done) -> set[str]:
    """Count what was noted; the ids of commits that returned."""
    committed = set()
    for line in (folder / "notes").read_text().splitlines():
        told = json.loads(line)
        if told["what"] == "committed":
            committed.add(told["id"])
        elif told["what"] == "fault":
            done.faults.append(f"{told['role']}: {told['error']}")
        else:
            done.counts[told["what"]] += 1
    for line in (folder / "gc" / "log").read_text().splitlines():
        # A line that was cut short is of a run that was killed.
        with contextlib.suppress(json.JSONDecodeError):
            told = json.loads(line)
            done.counts["gc runs"] += "deleted" in told
            done.counts["objects deleted"] += told.get("deleted", {}).get("objects", 0)
            if told.get("error") == "Bug" or told.get("failed"):
                done.faults.append(f"gc: {line[:500]}")
    return committed


def _look(repository: Repository, options: Mapping[str, Any], folder: Path, committed: set[str], done: Done) -> None:
    """Whether all is there, and still when what is garbage has gone."""

    def command(*arguments: str) -> None:
        home = folder / "look"
        home.mkdir(exist_ok=True)
        told = subprocess.run(
            [*COMMAND, *arguments],
            env=environment(repository.url, options, home),
            cwd=home,
            capture_output=True,
            text=True,
        )
        if told.returncode:
            done.faults.append(
                f"{' '.join(arguments)}: {told.returncode}: {told.stdout[-1000:]}{told.stderr[-1000:]}"
            )

    command("fsck", "--read-data", "--no-cache")
    command("gc", "--grace", "0s", "--force")
    command("fsck", "--read-data", "--no-cache")
    seen = set()
    for entry in repository._refs().catalogue:
        seen.add(entry.new)
        if entry.version is None or entry.gone:
            continue
        try:
            repository.checkout(entry.version.id, folder / "out", replace=True)
            compare(lying(folder / "out"), entry.version)
        except (WeightvcError, Fault) as error:
            done.faults.append(f"at the end: {type(error).__name__}: {error}")
        done.counts["versions at the end"] += 1
    if lost := committed - seen:
        done.faults.append(f"{len(lost)} commits returned and are not catalogued: {sorted(lost)[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
