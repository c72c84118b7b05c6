"""Checkpoints of real training steps, made on the CPU: what benchmarks/codec.py measures if it is given none.

    python benchmarks/inputs.py DIR

A transformer of 20.5 M parameters (width 768, two layers, 8,192 tokens) learns Python's own library, as found on this
machine. It is trained by AdamW for 240 steps, at a rate that falls from 1e-3 to nothing, and then on, from there, in
each of the ways below. Ten steps of each pass before the first that counts, so that the averages are warm:
in its first steps several times as much changes. Masters are float32, and what is compared is their export. So these
are real steps of real optimizers, but of a model that is small and early in its life: its weights are still nearly as
normally distributed as they began, and its steps go on in one direction more than late in a long run, where what
differs grows more slowly with k.
"""

import argparse
import copy
import json
import re
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS = 8192, 768, 12, 2048, 2
SEQUENCES, LENGTH = 8, 64
PRETRAIN, SETTLE = 240, 10


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


def make(folder: Path) -> list[tuple[str, Path, Path]]:
    """Title, old and new of every pair; made unless the folder has them already."""
    done = folder / "made.json"
    setting = json.dumps(
        [str(WAYS), EXPORTED, VOCABULARY, WIDTH, HIDDEN, LAYERS, SEQUENCES, LENGTH, PRETRAIN, SETTLE]
    )
    if not done.exists() or json.loads(done.read_text())["setting"] != setting:
        start = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        _train(folder)
        done.write_text(json.dumps({"setting": setting, "seconds": time.perf_counter() - start}))
    pairs = []
    for way in WAYS:
        for export in way.exports:
            for steps in way.steps:
                if steps in EXPORTED.get(export, way.steps):
                    title = f"{way.optimizer} {way.rate:g}, {export}, k = {steps}"
                    pairs.append((title, *(folder / f"{way.name}-{export}-{k}.safetensors" for k in (0, steps))))
    return pairs


def _train(folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    tokens = torch.tensor(_tokens())
    model = _model()
    print(f"inputs: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {tokens.numel()} tokens")
    generator = torch.Generator().manual_seed(0)

    def step(model: Any, optimizers: list[Any]) -> float:
        at = torch.randint(tokens.numel() - LENGTH - 1, (SEQUENCES, 1), generator=generator)
        batch = tokens[at + torch.arange(LENGTH + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return float(loss.item())

    first = _optimizers(model, "adamw", 1e-3)
    for count in range(PRETRAIN):
        first[0].param_groups[0]["lr"] = 1e-3 * (1 - count / PRETRAIN)
        loss = step(model, first)
    print(f"inputs: pretrained for {PRETRAIN} steps, loss {loss:.2f}", flush=True)
    state, moments = copy.deepcopy(model.state_dict()), first[0].state_dict()
    for way in WAYS:
        model.load_state_dict(state)
        optimizers = _optimizers(model, way.optimizer, way.rate)
        if way.optimizer == "adamw":
            optimizers[0].load_state_dict(copy.deepcopy(moments))
            for group in optimizers[0].param_groups:
                group["lr"] = way.rate
        for count in range(SETTLE + max(way.steps) + 1):
            steps = count - SETTLE
            if steps == 0 or steps in way.steps:
                for export in way.exports:
                    if steps == 0 or steps in EXPORTED.get(export, way.steps):
                        _save(model, export, folder / f"{way.name}-{export}-{steps}.safetensors")
            if steps < max(way.steps):
                loss = step(model, optimizers)
        print(f"inputs: {way.name}, loss {loss:.2f}", flush=True)


def _tokens() -> list[int]:
    """Python's library as numbers of its words, spaces and signs; 0 for the rarer ones."""
    text = "".join(
        path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1), 1)}
    return [number.get(word, 0) for word in words]


def _model() -> Any:
    """A decoder with the parts and the names that today's have."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

        def forward(self, x: Any) -> Any:
            q, k, v = (
                part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).flatten(2))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.self_attn, self.mlp = Attention(), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.embed_positions = nn.Embedding(LENGTH, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
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


def _optimizers(model: Any, name: str, rate: float) -> list[Any]:
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
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, value in model.state_dict().items():
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
    save_file(tensors, path)


def main() -> None:
    """Make the inputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for title, old, new in make(parser.parse_args().folder):
        print(f"{title}: {old.name} {new.name}")


if __name__ == "__main__":
    main()
