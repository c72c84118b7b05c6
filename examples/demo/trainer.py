"""The demo's trainer: a transformer on the text of Python's own library; every step becomes a version.

It starts by itself with `python trainer.py REPOSITORY TRUTH`, and says on stdout, one JSON object a line, what it
does. TRUTH gets each step's weights as a plain safetensors file: followers compare with that, not with weightvc.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import weightvc


class Block(nn.Module):
    """Attention and a feed-forward part, normalised before each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)  # the scale that real language models start from

    def forward(self, text: Tensor) -> Tensor:
        """(batch, length) of bytes to (batch, length, 256) of logits."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def texts() -> Tensor:
    """Some two million bytes of Python."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[: 1 << 21]), dtype=torch.uint8)


def say(event: str, **fields: Any) -> None:
    """Tell the demo."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Warm up, then commit every step, then go back to an earlier one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository")
    parser.add_argument("truth", type=Path)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--revert-to", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    length, batch = 64, 4
    model = Transformer(args.width, args.layers, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)  # the masters are float32
    text = texts()

    def train() -> float:
        starts = torch.randint(len(text) - length - 1, (batch, 1))
        rows = text[starts + torch.arange(length + 1)].long()
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    # Adam's moments have to be those of a run under way, or the first steps would be larger than real ones.
    losses = [train() for _ in range(args.warm_up)]
    optimizer.param_groups[0]["lr"] = 1e-6
    say("warm", parameters=sum(p.numel() for p in model.parameters()), first=losses[0], last=losses[-1])

    def report(version: weightvc.Version, began: float) -> None:
        place = repository.entry(version.id).place
        assert place is not None
        say(
            "committed",
            id=version.id,
            message=version.message,
            step=version.step,
            began=began,
            stored=place.nbytes,
            full=version.nbytes,
            changed=place.edges[-1].changed if place.edges[-1].source else None,
            elements=version.elements,
            moved=repository.stats.bytes_written + repository.stats.bytes_read,
        )

    with weightvc.open(args.repository, cache=args.truth.parent / "cache-trainer") as repository:
        for step in range(args.steps + 1):
            if step:
                train()
            weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
            save_file(weights, args.truth / f"{step}.safetensors")
            began = time.monotonic()
            report(repository.commit(model, message=f"step {step}", step=step, dtype="bfloat16"), began)
        began = time.monotonic()
        report(repository.revert(f"main@{{step={args.revert_to}}}"), began)
    say("done")


if __name__ == "__main__":
    main()
