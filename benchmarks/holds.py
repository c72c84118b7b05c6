"""When patches pay: real runs by learning rate, optimizer, dtype and kind of training, audited by weightvc itself.

    python benchmarks/holds.py --write docs/when-it-holds.md --pictures docs/pictures [--json FILE]

A small transformer (inputs.py has it) learns Python's own library from scratch, by AdamW and by Muon, at a rate that
warms up to 1e-3 and falls to nothing. From what AdamW made of it, it is trained on at constant rates by each
optimizer; taught sums (SFT); and then gets better at them by GRPO, whose reward is whether the sum is right. Of every
run, a window of consecutive steps goes to weightvc.audit, as bf16, as fp8 in blocks with scales, and as float32. Runs
go two at a time, each on one thread. With --write the tables go between the marks of the document.
"""

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import inputs
import tables
from codec import machine
from inputs import Size, say

import weightvc
from weightvc.auditing import HARDLY, PAYS
from weightvc.sources import open_source

PEAK = 1e-3
"""The rate of pretraining, at its highest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How large, how long, and which runs."""

    size: Size
    settle: int
    """Steps before the window, so that averages are warm."""
    window: int
    """Steps of the window: a power of two."""
    pretrain: int
    warm: int
    every: int
    """Between two looks at pretraining."""
    rates: dict[str, tuple[float, ...]]
    rewarded: tuple[tuple[str, float], ...]
    """Optimizers and rates of GRPO,"""
    taught: tuple[tuple[str, float], ...]
    """and of SFT."""
    lessons: int
    """Steps of teaching at most, before there are rewards."""


RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4)
FULL = Plan(
    Size(vocabulary=2048, width=512, heads=8, hidden=1536),
    *(8, 16, 200, 20, 10),
    {"muon": RATES, "adamw": RATES, "sgd": (1e-6, 3e-4, 1e-2, 1e-1)},
    (("muon", 1e-6), ("adamw", 1e-6), ("adamw", 1e-5)),
    (("muon", 2e-5), ("adamw", 2e-5)),
    200,
)
QUICK = Plan(inputs.QUICK, *(1, 2, 10, 2, 4), {"adamw": (1e-6, 3e-4)}, (("adamw", 1e-6),), (("adamw", 2e-5),), 3)
"""To see whether all works."""
State = dict[str, Any]


class Trainer:
    """A model, what trains it, and what it learns from."""

    def __init__(self, plan: Plan, optimizer: str, rate: float, start: Path | None = None) -> None:
        """`start` has the weights, and AdamW's averages, to go on from."""
        import torch

        torch.set_num_threads(1)  # two runs share two cores; threads that wait for one another take longer
        torch.manual_seed(0)
        self.plan = plan
        self.model = inputs.decoder(plan.size)
        self.optimizers = inputs.optimizers_of(self.model, optimizer, rate)
        self.generator = torch.Generator().manual_seed(0)
        if start is not None:
            held = torch.load(start, weights_only=True)
            self.model.load_state_dict(held["model"])
            if optimizer == "adamw" and held["moments"] is not None:
                self.optimizers[0].load_state_dict(held["moments"])
        self.rate(rate)

    def rate(self, rate: float) -> None:
        """Change the learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def step(self, loss: Any) -> float:
        """One step down a loss."""
        import torch

        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.item())

    def logits(self, tokens: Any) -> Any:
        """What the model says, in bf16 as trainers do."""
        import torch

        with torch.autocast("cpu", torch.bfloat16):
            return self.model(tokens).float()

    def state(self) -> State:
        """A copy of the masters."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def save(self, path: Path, moments: bool) -> None:
        """Write what another run can go on from."""
        import torch

        held = self.optimizers[0].state_dict() if moments else None
        torch.save({"model": self.model.state_dict(), "moments": held}, path)


class Reading:
    """Next words of Python's library."""

    def __init__(self, trainer: Trainer) -> None:
        import torch

        self._trainer = trainer
        self._tokens = torch.tensor(inputs.library(trainer.plan.size))

    def __call__(self) -> float:
        import torch

        trainer, size = self._trainer, self._trainer.plan.size
        high = self._tokens.numel() - size.length - 1
        at = torch.randint(high, (size.sequences, 1), generator=trainer.generator)
        batch = self._tokens[at + torch.arange(size.length + 1)]
        logits = trainer.logits(batch[:, :-1])
        return trainer.step(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


class Sums:
    """Two digits and their sum of two digits, in words that the library hardly has: 7 + 5 = 1 2."""

    def __init__(self, trainer: Trainer) -> None:
        import torch

        self._trainer = trainer
        last = trainer.plan.size.vocabulary
        self._zero, self._plus, self._equals = last - 12, last - 2, last - 1
        self.all = torch.cartesian_prod(torch.arange(10), torch.arange(10))

    def _words(self, terms: Any) -> tuple[Any, Any]:
        """Prompts [n, 4], and the right answers [n, 2]."""
        import torch

        n = len(terms)
        signs = [torch.full((n, 1), sign) for sign in (self._plus, self._equals)]
        first, second = (terms[:, i : i + 1] + self._zero for i in (0, 1))
        total = terms.sum(1)
        answers = torch.stack([total // 10, total % 10], 1) + self._zero
        return torch.cat([first, signs[0], second, signs[1]], 1), answers

    def _drawn(self, count: int) -> Any:
        import torch

        return self.all[torch.randint(len(self.all), (count,), generator=self._trainer.generator)]

    def teach(self) -> float:
        """A step of supervised learning: of answers alone."""
        import torch

        prompts, answers = self._words(self._drawn(64))
        logits = self._trainer.logits(torch.cat([prompts, answers[:, :1]], 1))[:, -2:]
        return self._trainer.step(torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()))

    def answers(self, prompts: Any) -> Any:
        """Two words for each prompt, drawn as the model has it."""
        import torch

        with torch.no_grad():
            words = prompts
            for _ in range(2):
                chances = self._trainer.logits(words)[:, -1].softmax(-1)
                words = torch.cat([words, torch.multinomial(chances, 1, generator=self._trainer.generator)], 1)
        return words[:, -2:]

    def right(self) -> float:
        """Share of the answers to all sums that are right."""
        prompts, answers = self._words(self.all)
        return float((self.answers(prompts) == answers).all(1).float().mean())

    def reward(self, prompts: int = 16, group: int = 8) -> float:
        """A step of GRPO: advantages are rewards against the others of a prompt. Returns the mean reward."""
        import torch

        words, wanted = (part.repeat_interleave(group, 0) for part in self._words(self._drawn(prompts)))
        said = self.answers(words)
        rewards = (said == wanted).all(1).float().view(prompts, group)
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        logits = self._trainer.logits(torch.cat([words, said[:, :1]], 1))[:, -2:]
        chosen = logits.log_softmax(-1).gather(-1, said[..., None])[..., 0]
        self._trainer.step(-(advantages.view(-1, 1) * chosen).mean())
        return float(rewards.mean())


def audited(states: list[State]) -> dict[str, Any]:
    """What weightvc.audit says of a window, by what is served."""

    def form(export: str) -> list[Callable[[], Any]]:
        # Made when they are compared, and let go of: all of them at once would be much.
        return [partial(_source, state, export) for state in states]

    middle = len(states) // 2 - 1
    return {
        "bf16": _figures(weightvc.audit(form("bf16"), pairs=2)),
        "fp8": _figures(weightvc.audit(form("fp8"), pairs=2)),
        "fp32": _figures(weightvc.audit(form("fp32")[middle : middle + 2])),
    }


def _source(state: State, export: str) -> Any:
    return open_source(inputs.exported(state, export))


def _figures(found: weightvc.Audit) -> dict[str, Any]:
    names = ("apart", "density", "changed", "patch", "xor")
    return {
        "full": found.full,
        "elements": found.elements,
        "times": found.times if found.distances[0].changed else None,
        "growth": found.growth,
        "verdict": found.verdict,
        "distances": [{name: getattr(one, name) for name in names} for one in found.distances],
    }


def _window(trainer: Trainer, step: Callable[[], float]) -> tuple[dict[str, Any], list[float]]:
    """Settle, take a window of steps, and have it audited; and what each step returned."""
    said, states = [], []
    for count in range(trainer.plan.settle + trainer.plan.window):
        if count >= trainer.plan.settle:
            states.append(trainer.state())
        said.append(step())
    states.append(trainer.state())
    return audited(states), said


def pretrained(plan: Plan, optimizer: str, path: Path) -> dict[str, Any]:
    """Train from scratch: windows where the rate is highest, in the middle, and low; a look now and then."""
    trainer = Trainer(plan, optimizer, PEAK)
    read = Reading(trainer)
    last, keep = plan.pretrain, plan.window
    starts = {
        plan.warm: "rate at its peak",
        (plan.warm + last - keep) // 2: "middle",
        9 * last // 10 - keep // 2: "late in the decay",
    }
    windows, curve, states = [], [], []
    loss, rate, opened = math.nan, PEAK, -1
    before: State = {}
    for step in range(last + 1):
        state = trainer.state() if step in starts or states or step % plan.every <= 1 else {}
        if step % plan.every == 1:
            found = weightvc.diff(before, state, dtype="bfloat16")
            smaller = found.full / max(found.patch, 1)
            curve.append({"step": step, "rate": rate, "loss": loss, "density": found.density, "times": smaller})
        if step in starts:
            opened, states = step, []
        if opened >= 0:
            states.append(state)
            if len(states) == keep + 1:
                rate = PEAK * _schedule(step - keep // 2, plan)
                made = {"stage": "pretraining", "optimizer": optimizer, "rate": rate, "where": starts[opened]}
                windows.append(made | {"step": step, "loss": loss, "exports": audited(states)})
                opened, states = -1, []
        if step == last:
            break
        rate = PEAK * _schedule(step, plan)
        trainer.rate(rate)
        before = state
        loss = read()
    trainer.save(path, optimizer == "adamw")
    return {"runs": windows, "curve": {"optimizer": optimizer, "points": curve}, "said": f"loss {loss:.2f}"}


def _schedule(step: int, plan: Plan) -> float:
    """Up in a line, and down by a cosine."""
    if step < plan.warm:
        return (step + 1) / plan.warm
    return 0.5 * (1 + math.cos(math.pi * (step - plan.warm) / (plan.pretrain - plan.warm)))


def onward(plan: Plan, optimizer: str, rate: float, start: Path) -> dict[str, Any]:
    """Go on from the pretrained model at a constant rate."""
    trainer = Trainer(plan, optimizer, rate, start)
    exports, losses = _window(trainer, Reading(trainer))
    run = {"stage": "onward", "optimizer": optimizer, "rate": rate, "loss": losses[-1], "exports": exports}
    return {"runs": [run], "said": f"loss {losses[-1]:.2f}"}


def taught(plan: Plan, optimizer: str, rate: float, start: Path) -> dict[str, Any]:
    """Fine-tune it on sums."""
    trainer = Trainer(plan, optimizer, rate, start)
    exports, losses = _window(trainer, Sums(trainer).teach)
    run = {"stage": "SFT", "optimizer": optimizer, "rate": rate, "loss": losses[-1], "exports": exports}
    return {"runs": [run | {"first_loss": losses[0]}], "said": f"loss {losses[0]:.2f} to {losses[-1]:.2f}"}


def lessons(plan: Plan, start: Path, path: Path) -> dict[str, Any]:
    """Teach it sums until about half are right, so that rewards have something to choose from."""
    trainer = Trainer(plan, "adamw", 3e-4, start)
    sums = Sums(trainer)
    for step in range(1, plan.lessons + 1):
        sums.teach()
        if step % 5 == 0 and sums.right() >= 0.4:
            break
    trainer.save(path, False)
    return {"runs": [], "said": f"{sums.right():.0%} of the sums right after {step} steps"}


def rewarded(plan: Plan, optimizer: str, rate: float, start: Path) -> dict[str, Any]:
    """GRPO on sums."""
    trainer = Trainer(plan, optimizer, rate, start)
    exports, rewards = _window(trainer, Sums(trainer).reward)
    part = max(len(rewards) // 3, 1)
    ends = [sum(some) / part for some in (rewards[:part], rewards[-part:])]
    run = {"stage": "GRPO", "optimizer": optimizer, "rate": rate, "rewards": ends, "exports": exports}
    return {"runs": [run], "said": f"reward {ends[0]:.2f} to {ends[1]:.2f}"}


def _done(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return job()


def measured(plan: Plan, folder: Path, processes: int) -> dict[str, Any]:
    """All runs: each phase needs what the one before made."""
    base, able = folder / "adamw", folder / "sums"
    phases: list[list[tuple[str, Callable[[], dict[str, Any]]]]] = [
        [(f"pretraining, {o}", partial(pretrained, plan, o, folder / o)) for o in ("muon", "adamw")],
        [
            ("lessons", partial(lessons, plan, base, able)),
            *((f"onward, {o} {r:g}", partial(onward, plan, o, r, base)) for o in plan.rates for r in plan.rates[o]),
            *((f"SFT, {o} {r:g}", partial(taught, plan, o, r, base)) for o, r in plan.taught),
        ],
        [(f"GRPO, {o} {r:g}", partial(rewarded, plan, o, r, able)) for o, r in plan.rewarded],
    ]
    runs, curves = [], []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for jobs in phases:
            for (name, _), made in zip(jobs, pool.map(_done, [job for _, job in jobs])):
                say(f"{name}: {made['said']}")
                runs += made["runs"]
                curves += [made["curve"]] if "curve" in made else []
    return {"machine": machine(), "runs": runs, "curves": curves}


# What the document shows


def _rate(rate: float) -> str:
    mantissa, power = f"{rate:.0e}".split("e")
    return f"{mantissa}e{int(power)}"


def _named(name: str) -> str:
    return {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}[name]


def _share(density: float) -> str:
    return f"{100 * density:.3g} %"


def _times(times: float | None) -> str:
    if times is None:
        return "nothing changes"
    text = f"{times:,.0f} ×" if times >= 9.95 else f"{times:.1f} ×"
    return f"**{text}**" if times < HARDLY else text


def _cells(run: dict[str, Any]) -> list[str]:
    """Of bf16 all, of the others what changes and what that is worth."""
    found = run["exports"]["bf16"]
    first, *_, last = found["distances"]
    each = f"{first['patch'] / first['changed']:.2f}" if first["changed"] else ""
    cells = [_share(first["density"]), _share(last["density"]), f"k^{found['growth']:.2f}" if found["growth"] else ""]
    cells += [each, _times(found["times"]), f"{first['xor'] / first['patch']:.1f} ×" if first["patch"] else ""]
    for export in ("fp8", "fp32"):
        other = run["exports"][export]
        cells += [_share(other["distances"][0]["density"]), _times(other["times"])]
    return cells


def _heads(run: dict[str, Any]) -> list[str]:
    last = run["exports"]["bf16"]["distances"][-1]["apart"]
    heads = ["bf16: changed, k = 1", f"k = {last}", "grows as", "B/change", "smaller than whole", "than xor+zstd"]
    return [*heads, "fp8: changed", "smaller", "fp32: changed", "smaller"]


def rates_table(runs: list[dict[str, Any]]) -> str:
    """The grid of optimizers and rates."""
    some = [run for run in runs if run["stage"] == "onward"]
    rows = [[_named(run["optimizer"]), _rate(run["rate"]), *_cells(run)] for run in some]
    return tables.table(["optimizer", "rate", *_heads(some[0])], rows)


def kinds_table(runs: list[dict[str, Any]]) -> str:
    """Kinds of training."""
    some = [run for run in runs if run["stage"] != "onward"]
    rows = []
    for run in some:
        what = f"{run['stage']}, {run['where']}" if "where" in run else run["stage"]
        told = f"reward {run['rewards'][0]:.2f} → {run['rewards'][1]:.2f}" if "rewards" in run else ""
        told = told or (f"loss {run['first_loss']:.2f} → " if "first_loss" in run else "loss ") + f"{run['loss']:.2f}"
        rows.append([what, _named(run["optimizer"]), _rate(run["rate"]), told, *_cells(run)])
    return tables.table(["run", "optimizer", "rate", "", *_heads(some[0])], rows)


def borders(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """By optimizer and what is served, the rate at which patches are PAYS and HARDLY times smaller; None: not within
    the rates that were tried."""
    out: dict[str, dict[str, list[float | None]]] = {}
    for run in runs:
        if run["stage"] == "onward":
            out.setdefault(run["optimizer"], {})
    for optimizer, by in out.items():
        for export in ("bf16", "fp8", "fp32"):
            points = sorted(
                (run["rate"], run["exports"][export]["times"] or math.inf)
                for run in runs
                if run["stage"] == "onward" and run["optimizer"] == optimizer
            )
            by[export] = [_crossing(points, limit) for limit in (PAYS, HARDLY)]
    return out


def _crossing(points: list[tuple[float, float]], limit: float) -> float | None:
    """Where a falling line through points, in logarithms, passes a limit; 0 if it is below from the start."""
    if points[0][1] < limit:
        return 0.0
    for (left, high), (right, low) in pairwise(points):
        if low < limit <= high:
            part = math.log(high / limit) / math.log(high / low) if math.isfinite(high) else 1.0
            return left * (right / left) ** part
    return None


def borders_table(runs: list[dict[str, Any]]) -> str:
    """Where patches stop paying."""
    rows = []
    for optimizer, by in borders(runs).items():
        tried = [run["rate"] for run in runs if run["stage"] == "onward" and run["optimizer"] == optimizer]
        cells = []
        for some in by.values():
            for rate in some:
                ends = f"over {_rate(max(tried))}" if rate is None else f"under {_rate(min(tried))}"
                cells.append(_rate(rate) if rate else ends)
        rows.append([_named(optimizer), *cells])
    heads = [f"{export}: {limit:g} × smaller" for export in ("bf16", "fp8", "fp32") for limit in (PAYS, HARDLY)]
    return tables.table(["rate up to which patches are", *heads], rows)


def machine_text(found: dict[str, Any], plan: Plan) -> str:
    """What the figures are of."""
    about, size = found["machine"], plan.size
    elements = found["runs"][0]["exports"]["bf16"]["elements"]
    model = f"width {size.width}, {size.layers} layers, {size.vocabulary:,} words"
    return (
        f"{about['date']}: {about['processor']}, Python {about['python']}, torch {about['torch']}. "
        f"{elements / 1e6:.1f} M parameters: {model}; {plan.pretrain} steps of {size.sequences * size.length} words. "
        f"All of it took {found['seconds']:.0f} s."
    )


def texts(found: dict[str, Any], plan: Plan) -> dict[str, str]:
    """Sections of the document, by their marks."""
    runs = found["runs"]
    return {
        "machine": machine_text(found, plan),
        "borders": borders_table(runs),
        "rates": rates_table(runs),
        "kinds": kinds_table(runs),
    }


def main() -> None:
    """Make all runs, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this document")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw there (needs matplotlib)")
    parser.add_argument("--dark", type=Path, metavar="DIR", help="draw what dark screens show there, to look at")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="given", help="take figures from there; no runs")
    parser.add_argument("--processes", type=int, default=2, help="runs at once (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="with a tiny model: to see whether all works")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    if arguments.write:
        tables.check(arguments.write, ("machine", "borders", "rates", "kinds"))
    if arguments.given:
        found = json.loads(arguments.given.read_text())
    else:
        import time
        from importlib.metadata import version

        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            found = measured(plan, Path(name), arguments.processes)
        found["machine"]["torch"] = version("torch")
        found["seconds"] = time.perf_counter() - begin
    sections = texts(found, plan)
    for name, text in sections.items():
        print(f"<!-- {name} -->\n{text}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if arguments.write:
        tables.write(arguments.write, sections)
    _draw(found, [(arguments.pictures, False), (arguments.dark, True)])
    say("done")


def _draw(found: dict[str, Any], wanted: Iterable[tuple[Path | None, bool]]) -> None:
    for folder, dark in wanted:
        if folder is not None:
            import curves

            folder.mkdir(parents=True, exist_ok=True)
            for name, text in curves.draw(found, dark).items():
                (folder / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
