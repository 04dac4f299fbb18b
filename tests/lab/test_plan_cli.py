"""`kvist plan`: accelerators, traces, and what it refuses."""

import json

import pytest
from tests.lab.plan_models import DEEPSEEK_V3, GEMMA3, LLAMA, QWEN3_NEXT
from typer.testing import CliRunner

from kvist.cli import app
from kvist.planning import Demand, Deployment, plan_devices


@pytest.fixture
def model(tmp_path):
    """Where to put a config: a function from settings to its path."""

    def write(settings):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return str(tmp_path)

    return write


@pytest.fixture
def trace(tmp_path):
    """A Mooncake trace of 40 requests: all begin with the same two blocks of 512, and ten prompts of 8 come again."""
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 4096,
            "output_length": 8,
            "hash_ids": [0, 1, *(100 * (number % 10) + block for block in range(2, 8))],
        }
        for number in range(40)
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"mooncake:{file}"


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_plan_prints_what_fits_on_accelerators(model):
    arguments = ["--gpu-memory", "80GiB", "--tp", 8, "--pp", 2, "--dtype", "fp8", "--max-len", 32768]
    result = invoke(model(DEEPSEEK_V3), *arguments, "--concurrency", 64)
    assert (result.exit_code, result.stderr) == (0, "")
    expected = plan_devices(DEEPSEEK_V3, Deployment("80 GiB", 8, 2), Demand(32768, dtype="fp8", concurrency=64))
    assert result.stdout.startswith(str(expected))
    assert "each of 64 sequences can be up to" in result.stdout


def test_plan_prints_the_same_as_one_json_object(model):
    arguments = ["--gpu-memory", "24 GiB", "--weights", "8 GiB", "--reserve", "1 GiB", "--utilisation", 0.95]
    made = json.loads(invoke(model(LLAMA), *arguments, "--block-size", 32, "--host", "64 GiB", "--json").stdout)
    (stage,) = made["stages"]
    assert (stage["weights_bytes"], stage["reserved_bytes"]) == (8 * 2**30, 2**30)
    assert made["memory_bytes"] == stage["cache_bytes"] == made["pools"][0]["num_blocks"] * 32 * 131072
    assert (made["filled_settings"], made["trace"]) == ([], None)
    assert made["tiers"][0]["name"] == "host"
    assert any("95%" in line for line in made["assumptions"])


def test_plan_says_what_a_trace_would_hit_and_which_tiers_pay(model, trace):
    """All in all 62 blocks of 512 tokens. Room for 11 keeps the two of all prompts, which 39 of 40 requests hit."""
    memory = 11 * 512 * 131072 + 2
    arguments = ["--gpu-memory", memory, "--weights", 1, "--reserve", 1, "--utilisation", 1, "--trace", trace]
    result = invoke(model(LLAMA), *arguments)
    assert result.exit_code == 0, result.stderr
    assert "requests.jsonl: 24.4% of blocks hit with 5,632 tokens cached by LRU, 80.6% if everything is kept" in (
        result.stdout
    )
    found = json.loads(invoke(model(LLAMA), *arguments, "--json").stdout)["trace"]
    assert (found["device_tokens"], found["hit_rate"]) == (5632, 78 / 320)
    assert found["largest_hit_rate"] == (2 * 39 + 6 * 30) / 320
    assert [tier["name"] for tier in found["tiers"]] == ["host", "disk"]
    assert sum(size["gain"] for size in found["sizes"]) == pytest.approx(found["largest_hit_rate"] - 78 / 320)
    assert found["tiers"][0]["worth_bytes"] == 4 * 2**30


def test_rates_decide_whether_a_tier_pays(model, trace):
    arguments = ["--gpu-memory", "1 GiB", "--weights", "1", "--reserve", "1", "--trace", trace, "--json"]
    slow = json.loads(invoke(model(LLAMA), *arguments, "--prefill-rate", 1000).stdout)["trace"]["tiers"]
    assert [tier["pays"] for tier in slow] == [True, True]
    fast = json.loads(invoke(model(LLAMA), *arguments, "--prefill-rate", 1e6).stdout)["trace"]["tiers"]
    assert [tier["pays"] for tier in fast] == [False, False]
    wide = [*arguments, "--prefill-rate", 1e6, "--host-bandwidth", "900 GB"]
    assert [tier["pays"] for tier in json.loads(invoke(model(LLAMA), *wide).stdout)["trace"]["tiers"]] == [True, False]


def test_settings_that_the_config_leaves_to_its_model_type_are_filled_in_and_named(model):
    """Gemma 3 4B as published names neither heads nor their size: 8 of 256, 4 of them with K and V."""
    pytest.importorskip("transformers")
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    }  # fmt: skip
    folder = model({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    result = invoke(folder, "--gpu-memory", "24 GiB")
    assert "num_attention_heads, vocab_size, num_key_value_heads, head_dim are not in the config" in result.stdout
    made = json.loads(invoke(folder, "--gpu-memory", "24 GiB", "--json").stdout)
    assert [(group["kind"], len(group["layers"])) for group in made["groups"]] == [("full", 5), ("sliding", 29)]
    assert made["token_bytes"] == 34 * 2 * 4 * 256 * 2
    assert made["num_parameters"] / 1e9 == pytest.approx(3.88, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--gpu-memory", "80 GiB", "--memory", "1 GiB"], 2, "give either --memory or --sequences, or --gpu-memory"),
        (["--memory", "1 GiB", "--tp", 2, "--trace", "x"], 2, "--tp, --trace: only with --gpu-memory"),
        (["--gpu-memory", "80 GiB", "--utilisation", 0], 2, "utilisation is 0.0, must be more than 0 and at most 1"),
        (["--gpu-memory", "80 GiB", "--disk-bandwidth", "fast"], 2, "'fast' is not a size"),
        (["--gpu-memory", "lots"], 1, "'lots' is not a size"),
        (["--gpu-memory", "8 GiB"], 1, "weights and activations take"),
        (["--gpu-memory", "80 GiB", "--tp", 3], 1, "tensor_parallel is 3, which does not divide the 32 heads"),
        (["--gpu-memory", "80 GiB", "--pp", 99], 1, "pipeline_parallel is 99, more than the 32 layers of the model"),
        (["--gpu-memory", "80 GiB", "--trace", "nowhere.jsonl"], 1, "nowhere.jsonl"),
    ],
)
def test_what_plan_cannot_do_for_accelerators_is_told(model, arguments, status, message):
    result = invoke(model(LLAMA), *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("kvist: ")
    assert message in result.stderr


@pytest.mark.parametrize("settings", [GEMMA3, QWEN3_NEXT], ids=["gemma3", "qwen3_next"])
def test_models_of_several_kinds_of_layers_are_planned(model, settings):
    result = invoke(model(settings), "--gpu-memory", "141 GiB", "--tp", 2, "--max-len", 32768)
    assert result.exit_code == 0, result.stderr
    assert "assumed:" in result.stdout
