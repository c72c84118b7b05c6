"""Checkpoints of real training steps, made on the CPU, and those of a chain: what benchmarks/codec.py measures.

    python benchmarks/inputs.py DIR [--chain DIR]

A transformer of 20.5 M parameters (width 768, two layers, 8,192 tokens) learns Python's own library, as found on this
machine. It is trained by AdamW for 240 steps, at a rate that falls from 1e-3 to nothing, and then on, from there, in
each of the ways below. Ten steps of each pass before the first that counts, so that the averages are warm:
in its first steps several times as much changes. Masters are float32, and what is compared is their export. So these
are real steps of real optimizers, but of a model that is small and early in its life: its weights are still nearly as
normally distributed as they began, and its steps go on in one direction more than late in a long run, where what
differs grows more slowly with k.

A chain is as tests/kit/chain.py says: a bf16 model, and what each of ten steps of an optimizer changes in it.
"""

import argparse
import copy
import json
import re
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

BEGIN = time.perf_counter()


def say(text: str) -> None:
    """Show how far it is, and since when it runs."""
    print(f"[{time.perf_counter() - BEGIN:4.0f} s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Files:
    """Two checkpoints to compare."""

    title: str
    old: Path
    new: Path
    kind: str = ""
    """What they were exported as: bf16, fp8, fp32; empty if not known."""
    chain: str = ""
    """The optimizer of the chain that they are from; empty if from none."""
    step: int = 0
    """Of a chain, the newer one's number."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is trained, and for how long."""

    vocabulary: int = 8192
    width: int = 768
    heads: int = 12
    hidden: int = 2048
    layers: int = 2
    sequences: int = 8
    length: int = 64
    pretrain: int = 240
    settle: int = 10
    modules: int = 1 << 20
    """At most so many of the library's modules are its text."""


FULL = Size()
QUICK = Size(512, 128, 4, 256, 1, 2, 32, 20, 2, 20)
"""To see whether all works: its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train on from the pretrained model."""

    name: str
    optimizer: str
    rate: float
    steps: tuple[int, ...]
    """After how many steps to export, besides before the first."""
    exports: tuple[str, ...] = ("bf16",)


WAYS = (
    Way("adamw", "adamw", 1e-6, (1, 8, 32), ("bf16", "fp8", "fp32")),
    Way("muon", "muon", 1e-6, (1, 8, 32)),
    Way("sgd", "sgd", 1e-3, (1, 8)),
    Way("sft", "adamw", 2e-5, (1, 8)),
)
EXPORTED = {"fp8": (1, 8), "fp32": (1,)}
"""Exports of which not every step is kept."""


def make(folder: Path, size: Size = FULL) -> list[Files]:
    """Every pair; made unless the folder has them already."""
    done = folder / "made.json"
    setting = str((WAYS, EXPORTED, size))
    if not done.exists() or json.loads(done.read_text())["setting"] != setting:
        start = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        _train(folder, size)
        done.write_text(json.dumps({"setting": setting, "seconds": time.perf_counter() - start}))
    pairs = []
    for way in WAYS:
        for export in way.exports:
            for steps in way.steps:
                if steps in EXPORTED.get(export, way.steps):
                    title = f"{way.optimizer} {way.rate:g}, {export}, k = {steps}"
                    files = (folder / f"{way.name}-{export}-{k}.safetensors" for k in (0, steps))
                    pairs.append(Files(title, *files, export))
    return pairs


def chain(source: Path, folder: Path, steps: int = 10) -> list[Files]:
    """Pairs of consecutive steps, of each optimizer; the checkpoints are written to the folder."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.kit.chain import versions

    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for optimizer in ("adamw", "muon"):
        paths = []
        for step, data in enumerate(versions(optimizer, steps, source)):
            paths.append(folder / f"{optimizer}-{step}.safetensors")
            paths[-1].write_bytes(data)
        for step, (old, new) in enumerate(pairwise(paths), 1):
            pairs.append(Files(f"chain, {optimizer}, step {step}", old, new, "bf16", optimizer, step))
    say(f"chain: {len(pairs)} steps of {source}")
    return pairs


def onward(made: list[Files]) -> list[Files]:
    """What was made in the first way as a chain: each of its states against the one before."""
    first = [files for files in made if files.old == made[0].old]
    states = [first[0].old, *(files.new for files in first)]
    return [
        Files(f"{files.title}, onward", old, new, files.kind, files.title.split(",")[0], step)
        for step, (files, (old, new)) in enumerate(zip(first, pairwise(states)), 1)
    ]


def share(files: Files) -> float:
    """Changed elements of all, of a pair of 16-bit floats."""
    old, new = (np.fromfile(path, np.uint16) for path in (files.old, files.new))
    return float(np.count_nonzero(old != new)) / old.size


def _train(folder: Path, size: Size) -> None:
    import torch

    threads = torch.get_num_threads()
    if size == QUICK:
        torch.set_num_threads(1)  # threads that wait for one another would take longer on a machine that is busy
    torch.manual_seed(0)
    tokens = torch.tensor(library(size))
    model = decoder(size)
    say(f"inputs: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {tokens.numel()} tokens")
    generator = torch.Generator().manual_seed(0)

    def step(model: Any, optimizers: list[Any]) -> float:
        at = torch.randint(tokens.numel() - size.length - 1, (size.sequences, 1), generator=generator)
        batch = tokens[at + torch.arange(size.length + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.item())

    first = optimizers_of(model, "adamw", 1e-3)
    for count in range(size.pretrain):
        first[0].param_groups[0]["lr"] = 1e-3 * (1 - count / size.pretrain)
        loss = step(model, first)
    say(f"inputs: pretrained for {size.pretrain} steps, loss {loss:.2f}")
    state, moments = copy.deepcopy(model.state_dict()), first[0].state_dict()
    for way in WAYS:
        model.load_state_dict(state)
        optimizers = optimizers_of(model, way.optimizer, way.rate)
        if way.optimizer == "adamw":
            optimizers[0].load_state_dict(copy.deepcopy(moments))
            for group in optimizers[0].param_groups:
                group["lr"] = way.rate
        for count in range(size.settle + max(way.steps) + 1):
            steps = count - size.settle
            if steps == 0 or steps in way.steps:
                for export in way.exports:
                    if steps == 0 or steps in EXPORTED.get(export, way.steps):
                        _save(model, export, folder / f"{way.name}-{export}-{steps}.safetensors")
            if steps < max(way.steps):
                loss = step(model, optimizers)
        say(f"inputs: {way.name}, loss {loss:.2f}")
    torch.set_num_threads(threads)


def library(size: Size) -> list[int]:
    """Python's library as numbers of its words, spaces and signs; 0 for the rarer ones."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: size.modules]
    text = "".join(path.read_text(errors="ignore") for path in paths)
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(size.vocabulary - 1), 1)}
    return [number.get(word, 0) for word in words]


def decoder(size: Size) -> Any:
    """A decoder with the parts and the names that today's have."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(size.width, size.width, bias=False))

        def forward(self, x: Any) -> Any:
            q, k, v = (
                part(x).unflatten(-1, (size.heads, -1)).transpose(1, 2)
                for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).flatten(2))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(size.width, size.hidden, bias=False)
            self.up_proj = nn.Linear(size.width, size.hidden, bias=False)
            self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
            self.self_attn, self.mlp = Attention(), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
            self.embed_positions = nn.Embedding(size.length, size.width)
            self.layers = nn.ModuleList(Layer() for _ in range(size.layers))
            self.norm = nn.RMSNorm(size.width)
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.embed_tokens(tokens) + self.embed_positions(torch.arange(tokens.shape[1]))
            for layer in self.layers:
                x = layer(x)
            # One matrix for both ends, as small models have it.
            return self.norm(x) @ self.embed_tokens.weight.T

    return Decoder()


def optimizers_of(model: Any, name: str, rate: float) -> list[Any]:
    """What trains a model together."""
    import torch

    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)]
    # Muon is for matrices; the rest has AdamW beside it.
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _save(model: Any, export: str, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(exported(model.state_dict(), export), path)


def exported(state: dict[str, Any], export: str) -> dict[str, Any]:
    """float32 masters as they are served."""
    import torch

    tensors = {}
    for name, value in state.items():
        if export == "fp8" and value.ndim == 2 and "embed" not in name:
            # A float32 scale for each 128 × 128 weights; all extents are multiples of that.
            rows, columns = value.shape[0] // 128, value.shape[1] // 128
            blocks = value.reshape(rows, 128, columns, 128)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scales).reshape(value.shape).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
        elif export == "fp32":
            tensors[name] = value.clone()
        else:
            tensors[name] = value.to(torch.bfloat16)
    return tensors


def main() -> None:
    """Make the inputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chain", type=Path, metavar="DIR", help="write the checkpoints of this one too")
    arguments = parser.parse_args()
    pairs = chain(arguments.chain, arguments.folder) if arguments.chain else []
    for files in pairs + make(arguments.folder):
        print(f"{files.title}: {files.old.name} {files.new.name}")


if __name__ == "__main__":
    main()
