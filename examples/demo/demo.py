"""One trainer and two rollout hosts, each a process of its own, share a repository; prints what each version took.

Follower A keeps up from the start, is killed with SIGKILL in the middle of a pull, and comes back. Follower B joins
late. At the end the trainer reverts to an earlier step. Every version that a follower holds is compared, bit by bit,
with what the trainer wrote to a plain file.

    python examples/demo/demo.py DIR            a minute or so; DIR must not exist
    python examples/demo/demo.py DIR --small    a toy model, for a test
"""

import argparse
import json
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from follower import wrong_bits

import weightvc

HERE: Final = Path(__file__).resolve().parent
SILENCE: Final = 120.0
"""Seconds without a word from any process after which something is wrong."""

Said = dict[str, Any]


class Demo:
    """The processes, what they said, and the table."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.directory = directory
        self.args = args
        self.heard: queue.Queue[tuple[str, Said]] = queue.Queue()
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.versions: list[Said] = []
        self.verified: dict[str, dict[str, Said]] = {"A": {}, "B": {}}
        self.moved: dict[int, int] = {}  # bytes by process, so that those of a killed one count
        self.wrong = 0
        self.printed = 0

    def run(self) -> None:
        """Run it all; ends with every process gone."""
        args = self.args
        (self.directory / "truth").mkdir(parents=True)
        weightvc.init(self.directory / "repository", cache=None).close()
        size = ("--width", args.width, "--layers", args.layers, "--warm-up", args.warm_up)
        self.start("trainer", "trainer.py", *size, "--steps", args.steps, "--revert-to", args.revert_to)
        self.start("A", "follower.py", self.directory / "A", "--every", "--hang-at", args.kill_at)
        try:
            # All steps from 0, and the revert.
            while self.printed < args.steps + 2:
                name, said = self.heard.get(timeout=SILENCE)
                self.take(name, said)
                while self.printed < len(self.versions) and self.complete(self.printed):
                    self.row(self.versions[self.printed])
                    self.printed += 1
        except queue.Empty:
            sys.exit(f"demo: nothing was heard of {', '.join(self.running)} for {SILENCE:.0f} s")
        finally:
            for process in self.running.values():
                process.kill()
                process.wait()

    def start(self, name: str, script: str, *arguments: object) -> None:
        """Start a process and listen to it."""
        places = [self.directory / "repository", self.directory / "truth"]
        command = [sys.executable, HERE / script, *places, *arguments]
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        self.running[name] = process

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.heard.put((name, {"pid": process.pid, **json.loads(line)}))
            self.heard.put((name, {"pid": process.pid, "event": "ended"}))

        threading.Thread(target=listen, daemon=True).start()

    def take(self, name: str, said: Said) -> None:
        """Act on what a process said."""
        event = said["event"]
        if "moved" in said:
            self.moved[said["pid"]] = said["moved"]
        if event == "warm":
            print(
                f"{said['parameters'] / 1e6:.1f} M parameters; {self.args.warm_up} steps of warm-up took the loss "
                f"from {said['first']:.2f} to {said['last']:.2f}; now AdamW at lr 1e-6 on fp32 masters, bf16 out\n\n"
                f"{'':45}seconds from commit to verified\n"
                f"{'version':14}{'step':>4}{'density':>10}{'patch':>10}{'smaller':>9}{'A':>12}{'B':>8}",
                flush=True,
            )
        elif event == "committed":
            self.versions.append(said)
            if said["step"] == self.args.join_at and "B" not in self.running:
                print(f"-- B joins late, at step {said['step']}: a base and the patches since bring it to the newest")
                self.start("B", "follower.py", self.directory / "B")
        elif event == "half-way":
            self.kill(said)
        elif event == "verified":
            self.verified[name][said["id"]] = said
            self.wrong += said["wrong"]
        elif event == "ended":
            process = self.running[name]
            # A that was killed ends too, but another process has its name by then.
            if process.pid == said["pid"] and (name != "trainer" or process.wait() != 0):
                sys.exit(f"demo: {name} ended by itself, with exit status {process.wait()}")

    def kill(self, said: Said) -> None:
        """A is in the middle of a pull: kill it, look at what it left, and start it again."""
        self.running["A"].kill()
        self.running["A"].wait()
        held = list(self.verified["A"].values())[-1]["step"]
        wrong = wrong_bits(
            self.directory / "A" / "model.safetensors", self.directory / "truth" / f"{held}.safetensors"
        )
        self.wrong += wrong
        print(
            f"-- SIGKILL for A, {said['percent']} % through step {said['step']}: its directory still is step {held}, "
            f"wrong bits {wrong}; A starts again",
            flush=True,
        )
        self.start("A", "follower.py", self.directory / "A", "--every")

    def complete(self, number: int) -> bool:
        """Whether all who follow by the time of a version have verified it."""
        names = [version["id"] for version in self.versions]
        first = next((i for i, name in enumerate(names) if name in self.verified["B"]), None)
        with_b = number >= self.args.join_at if first is None else number >= first
        return all(names[number] in self.verified[who] for who in ("AB" if with_b else "A"))

    def row(self, version: Said) -> None:
        """Print a version's line."""
        times = []
        for who in "AB":
            said = self.verified[who].get(version["id"])
            times.append(f"{said['at'] - version['began']:.2f}" if said else "-")
        density = "whole" if version["changed"] is None else f"{version['changed'] / version['elements']:.3%}"
        smaller = f"{version['full'] / version['stored']:.1f}x"
        print(
            f"{version['id'][:12]:14}{version['step']:>4}{density:>10}{size(version['stored']):>10}{smaller:>9}"
            f"{times[0]:>12}{times[1]:>8}" + (f"   {version['message']}" if "revert" in version["message"] else ""),
            flush=True,
        )

    def summary(self) -> None:
        """Print the last lines."""
        held = [len(self.verified[who]) for who in "AB"]
        full = self.versions[0]["full"] * (len(self.versions) + sum(held))
        moved = sum(self.moved.values())
        bases = 4 * self.versions[0]["stored"]
        print(
            f"\nmoved {size(moved)} where full checkpoints are {size(full)}, {full / moved:.0f} times less "
            f"({len(self.versions)} versions up, {held[0]} down to A, {held[1]} down to B); wrong bits {self.wrong}\n"
            f"of that {size(bases)} are the base: once up, once down to A, once to B, once back to the trainer for "
            f"the revert; {size(moved - bases)} are patches and all the rest"
        )


def size(nbytes: float) -> str:
    """Bytes, to be read."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


def main() -> None:
    """Run the demo; the exit status is 1 if a single bit is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=10, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=5, metavar="STEP", help="when A is killed")
    parser.add_argument("--join-at", type=int, default=8, metavar="STEP", help="when B joins")
    parser.add_argument("--revert-to", type=int, default=3, metavar="STEP")
    args = parser.parse_args()
    if args.small:
        args.width, args.layers, args.warm_up = 64, 2, 2
    if not 0 < args.kill_at <= args.steps or not 0 <= args.join_at <= args.steps or args.revert_to > args.steps:
        parser.error("--kill-at, --join-at and --revert-to are steps of --steps")
    directory = args.directory.absolute()
    if directory.exists():
        parser.error(f"{directory} exists: name a directory that does not")
    demo = Demo(directory, args)
    demo.run()
    demo.summary()
    for path in (directory / "truth", *directory.glob("cache-*")):
        shutil.rmtree(path)
    command = Path(sys.executable).with_name("weightvc")
    places = [
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path for path in (command, directory)
    ]
    print(f"look at it: {places[0]} -r {places[1] / 'repository'} log --oneline")
    print("try yours: weightvc diff ckpt_a/ ckpt_b/ --stat")
    sys.exit(1 if demo.wrong else 0)


if __name__ == "__main__":
    main()
