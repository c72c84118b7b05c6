import os
import tempfile

import pytest
import safetensors.torch
import torch

from weightvc.errors import BadTensor, Refused
from weightvc.sources import open_source
from weightvc.sources.module import open_module

from .contents import content, files

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def tied_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).bfloat16()


def tied_qwen():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True))


def untied_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))


def moe():
    config = transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


def lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tied_qwen(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary directories go, so that a test sees whether they stay."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.mark.parametrize("build", [tied_llama, tied_qwen, untied_llama, moe, lora])
def test_a_model_is_what_save_pretrained_writes(tmp_path, scratch, build):
    torch.manual_seed(0)
    model = build()
    model.save_pretrained(tmp_path / "saved")
    saved = open_source(tmp_path / "saved")
    source = open_source(model)
    assert content(source) == content(saved)
    assert files(source) == files(saved)
    assert source.tensors
    if build is moe:
        assert any(".experts.3.gate_proj.weight" in info.name for info in source.tensors)
    if build in (tied_llama, tied_qwen):
        assert "lm_head.weight" not in {info.name for info in source.tensors}
    source.check()
    source.close()
    source.close()
    assert not list(scratch.iterdir())


def test_the_temporary_directory_goes_with_the_source_and_with_an_error(scratch, monkeypatch):
    source = open_source(tied_llama())
    assert len(list(scratch.iterdir())) == 1
    del source
    assert not list(scratch.iterdir())
    model = tied_llama()
    model.extra = torch.nn.Parameter(model.model.norm.weight.data[:4])
    with pytest.raises(BadTensor, match=r"LlamaForCausalLM\.save_pretrained failed"):
        open_source(model)
    assert not list(scratch.iterdir())


def test_a_model_on_meta_is_refused_by_name(scratch):
    with torch.device("meta"):
        model = untied_llama()
    with pytest.raises(BadTensor, match=r"model\.embed_tokens\.weight.*meta"):
        open_source(model)
    assert not list(scratch.iterdir())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.embed = torch.nn.Embedding(5, 3)
        self.embed.weight = self.lm_head.weight
        self.register_buffer("part", self.lm_head.weight.data[1:3])
        self.register_buffer("turned", self.lm_head.weight.data.t())


class Stateful(torch.nn.Linear):
    def get_extra_state(self):
        return {"amax": 1}

    def set_extra_state(self, state):
        pass


def test_another_module_keeps_the_name_that_save_model_keeps(tmp_path):
    module = Tied()
    names = [info.name for info in open_source(module).tensors]
    # save_model keeps embed.weight, and leaves out the views that only load through it.
    assert names == ["embed.weight", "part", "turned"]
    del module.part, module.turned
    safetensors.torch.save_model(module, tmp_path / "x.safetensors")
    assert content(open_source(module)) == content(open_source(tmp_path / "x.safetensors"))
    assert [info.name for info in open_source(module, names="as-is").tensors] == [
        "embed.weight",
        "lm_head.weight",
    ]


def test_wrappers_leave_no_prefix():
    module = torch.nn.DataParallel(torch.compile(torch.nn.Linear(2, 2)))
    assert [info.name for info in open_source(module).tensors] == ["bias", "weight"]


def test_names_by_function():
    module = torch.nn.Linear(2, 2)
    source = open_source(module, names=lambda name: f"model.{name}")
    assert [info.name for info in source.tensors] == ["model.bias", "model.weight"]
    assert source.read(1, 0, 16) == module.weight.detach().numpy().tobytes()
    with pytest.raises(BadTensor, match="'w' for both 'weight' and 'bias'"):
        open_source(module, names=lambda name: "w")
    with pytest.raises(BadTensor, match="None for tensor 'weight'"):
        open_source(module, names=lambda name: None)
    with pytest.raises(Refused, match='"as-is"'):
        open_source(module, names="hugging")


@pytest.mark.parametrize("names", ["hf", "as-is", str])
def test_extra_state_is_refused_by_name(names):
    with pytest.raises(BadTensor, match=r"'0\._extra_state': a dict"):
        open_module(torch.nn.Sequential(Stateful(2, 2)), names)


def test_a_module_is_read_without_a_copy():
    module = torch.nn.Linear(2, 2, bias=False)
    source = open_source(module)
    with torch.no_grad():
        module.weight.fill_(3)
    assert source.read(0, 0, 16) == module.weight.detach().numpy().tobytes()


def test_open_source_tells_what_it_takes(tmp_path):
    source = open_source({"w": torch.ones(1)})
    assert open_source(source) is source
    for bad in (3, None, [torch.ones(1)], torch.ones(1)):
        with pytest.raises(Refused, match=type(bad).__name__):
            open_source(bad)
    with pytest.raises(Refused, match="exclude"):
        open_source({}, exclude=["x"])
    with pytest.raises(Refused, match="`name`"):
        open_source(torch.nn.Linear(1, 1), name="x.safetensors")
    with pytest.raises(Refused, match="names"):
        open_source({}, names=str)
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    assert content(open_source(os.fspath(tmp_path), dtype="bf16"))["", "w"][0] == "BF16"
