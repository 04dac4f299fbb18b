"""Parameters counted from a config agree with those of the model that `transformers` makes of it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvist.planning import weights_of_model

# Norms, biases and learned sinks are not counted; of these also small projections between layers.
ROUGHLY = {"gemma3n_text": 0.01, "gemma4_text": 0.015, "gpt2": 0.01}
CLOSELY = (
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "lfm2", "llama4_text", "qwen3_moe",
    "mixtral", "qwen2", "cohere2", "glm4_moe", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("model_type", [*CLOSELY, *ROUGHLY])
@pytest.mark.filterwarnings("ignore")
def test_parameters_are_those_of_the_model(model_type):
    """At the sizes that the model type has by default, up to 671 billion, on a device that allocates nothing."""
    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    counted = weights_of_model(json.loads(config.to_json_string())).num_parameters
    assert counted <= num_parameters
    assert counted == pytest.approx(num_parameters, rel=ROUGHLY.get(model_type, 0.0004))
