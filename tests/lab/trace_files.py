"""Files of traces for tests: written as text, packed or not, and read back whole."""

import gzip
import json

import tokenizers
import zstandard

from kvist.lab.traces import open_trace

WORDS = [f"w{number}" for number in range(400)] + ["<|im_start|>", "<|im_end|>", "user", "assistant", "system"]


def written(path, *lines):
    """The path, after these lines have been written to it: objects as JSON, text as it is; packed by its ending."""
    content = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


def word_tokenizer(path):
    """A tokenizer.json that knows a few hundred words, and gives each an id."""
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def ids(*words):
    return [WORDS.index(word) for word in words]


def tokens_of(path, **options):
    """The prompts of a trace as lists of token ids."""
    return [request.prompt.tokens().tolist() for request in open_trace(path, **options)]


def mooncake(time_ms, hash_ids, num_tokens=None, **others):
    length = 512 * len(hash_ids) if num_tokens is None else num_tokens
    return {"timestamp": time_ms, "input_length": length, "output_length": 7, "hash_ids": hash_ids, **others}
