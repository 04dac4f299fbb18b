"""A model's name for stores changes with whatever its K and V depend on, and with nothing else."""

import re

import pytest
import torch
from tests.serve.models import tiny_model

from kvist import DiskTier, HostTier
from kvist.errors import ConfigError
from kvist.serve import cache_config
from kvist.serve import model as module
from kvist.serve.fingerprint import model_fingerprint


def test_equal_models_have_equal_names_wherever_they_come_from(tmp_path):
    model = tiny_model("llama")
    named = model_fingerprint(model)
    assert re.fullmatch(r"LlamaForCausalLM float32 [0-9a-f]{32}", named)
    assert model_fingerprint(tiny_model("llama")) == named
    for folder in ("here", "there"):
        model.save_pretrained(tmp_path / folder)
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert model_fingerprint(loaded) == named
        loaded.config._attn_implementation = "eager"
        assert model_fingerprint(loaded) == named


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_weight_changes_the_name(dtype):
    model = tiny_model("llama").to(dtype)
    names = {model_fingerprint(model)}
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        for index in ((0, 0), (17, 45), (63, 127)):
            weight[index] *= 1.5
            names.add(model_fingerprint(model))
        weight[:2] = weight[:2].flip(0)  # as many of each number as before
        names.add(model_fingerprint(model))
    assert len(names) == 5


def test_dtype_config_and_adapters_change_the_name():
    names = [model_fingerprint(tiny_model("llama"))]
    names.append(model_fingerprint(tiny_model("llama").bfloat16()))
    names.append(model_fingerprint(tiny_model("llama", rms_norm_eps=1e-3)))
    names.append(model_fingerprint(tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0})))
    adapted = tiny_model("llama")
    adapted.model.layers[0].mlp.adapter = torch.nn.Linear(2, 2)
    names.append(model_fingerprint(adapted))
    assert len(set(names)) == len(names)


def test_weights_that_are_not_loaded_have_no_name():
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight of LlamaForCausalLM is not loaded"):
        model_fingerprint(tiny_model("llama").to("meta"))


def test_a_cache_is_named_where_a_tier_needs_it_and_the_caller_has_not(monkeypatch):
    model = tiny_model("llama")
    disk = cache_config(model, num_blocks=4, tiers=[DiskTier("somewhere")])
    assert disk.model == model_fingerprint(model)
    monkeypatch.setattr(module, "model_fingerprint", lambda _: pytest.fail("all weights would be read"))
    assert cache_config(model, num_blocks=4).model == ""
    assert cache_config(model, num_blocks=4, tiers=[HostTier("1 MiB")]).model == ""
    assert cache_config(model, num_blocks=4, tiers=[DiskTier("somewhere")], model="mine").model == "mine"
    with pytest.raises(ConfigError, match="tiers is 5, must be a list"):
        cache_config(model, num_blocks=4, tiers=5)
