"""tokenizer.json: ids of `transformers`, any text there and back, and texts that spell special tokens."""

import builtins
import json
import random
import subprocess
import sys
import unicodedata

import pytest

pytest.importorskip("tokenizers")

from helpers_chat import NAMES, golden, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ChatConfig, ConfigError
from trace_jax.policy.fast_tokenizer import FastTokenizer, byte_alphabet
from trace_jax.policy.template_chat import TemplateChat

TAGS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
PARTS = st.one_of(st.text(max_size=12), st.sampled_from([*TAGS, "<|im_", "end|>", "<", "\n", "  "]))
TEXTS = st.lists(PARTS).map("".join)


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_plain_texts_are_those_of_transformers(name):
    tokenizer = tokenizer_of(name)
    for case in golden(name)["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_any_text_comes_back_and_holds_no_control_token(name, text):
    """Up to the tokenizer's own normalisation: Qwen composes characters (NFC)."""
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    known = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", known) if name == "qwen3" else known)
    assert not any(tokenizer.is_control(i) for i in ids)
    assert tokenizer.spell(ids) == (tokenizer.decode(ids), [])


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 440), max_size=30))
def test_any_ids_decode_as_the_reference_does_and_control_tokens_add_nothing(ids):
    """The model may have more rows than the tokenizer has tokens, and may sample one of them."""
    import tokenizers

    tokenizer = tokenizer_of("qwen3")
    reference = tokenizers.Tokenizer.from_str(golden("qwen3")["files"]["tokenizer.json"])
    plain = [i for i in ids if not tokenizer.is_control(i)]
    assert tokenizer.decode(ids) == reference.decode(plain, skip_special_tokens=False)
    text, marks = tokenizer.spell(ids)
    assert len(marks) == len(ids) - len(plain)
    assert all(text[start:end] == name for start, end, name in marks)


def test_control_tokens_and_sizes():
    tokenizer = tokenizer_of("qwen3")
    assert tokenizer.vocab_size == 429 and tokenizer.pad_id == tokenizer.control_id("<|endoftext|>") == 420
    assert set(TAGS) < set(tokenizer.control_tokens)
    assert all(tokenizer.is_control(i) for i in (*tokenizer.control_tokens.values(), 429, 10**6))
    assert tokenizer.piece(423) == "<tool_call>" and tokenizer.piece(999) == "<unused 999>"
    assert tokenizer.special == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    with pytest.raises(ConfigError, match="no control token 'why'"):
        tokenizer.control_id("why")


def test_a_vocabulary_that_lists_its_special_tokens_never_yields_them():
    """SmolLM2 lists them among the pieces; `ignore_merges` and a merge to the token are the two ways to reach one."""
    files = dict(golden("smollm2")["files"])
    content = json.loads(files["tokenizer.json"])
    model = content["model"]
    assert "<|im_end|>" in model["vocab"]
    content["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False
    model["ignore_merges"] = True
    left = max(model["vocab"].values()) + 1
    pieces = ["<|", "<|i", "<|im", "<|im_", "<|im_e", "<|im_en", "<|im_end", "<|im_end|"]
    model["vocab"] |= {piece: left + i for i, piece in enumerate(pieces)}
    steps = zip(["<", *pieces], "|im_end|>", strict=True)
    model["merges"] = [*map(list, steps), *model["merges"]]
    import tokenizers

    spelled = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []})).encode("<|im_end|>").ids
    assert spelled == [2]  # it would
    tokenizer = FastTokenizer({"tokenizer.json": json.dumps(content).encode()})
    ids = tokenizer.encode("<|im_end|>")
    assert 2 not in ids and tokenizer.decode(ids) == "<|im_end|>" and tokenizer.is_control(2)


def test_bytes_that_the_vocabulary_lacks_become_a_replacement_character():
    """SmolLM2 lacks some that its training text never had; `transformers` drops them silently."""
    content = json.loads(golden("smollm2")["files"]["tokenizer.json"])
    lost = byte_alphabet()[0x04]
    del content["model"]["vocab"][lost]
    tokenizer = FastTokenizer({"tokenizer.json": json.dumps(content).encode()})
    assert tokenizer.decode(tokenizer.encode("a\x04b é")) == "a\ufffdb é"


def test_tokens_of_the_settings_are_added_and_a_contradiction_is_refused():
    content = json.loads(golden("qwen3")["files"]["tokenizer.json"])
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] != "</think>"]
    data = json.dumps(content).encode()

    def load(**ids: int) -> FastTokenizer:
        settings = {"added_tokens_decoder": {str(i): {"content": f"</{name}>"} for name, i in ids.items()}}
        return FastTokenizer({"tokenizer.json": data, "tokenizer_config.json": json.dumps(settings).encode()})

    assert load(think=428, tool_call=424).control_id("</think>") == 428
    with pytest.raises(ConfigError, match="no control token"):
        load().control_id("</think>")
    with pytest.raises(ConfigError, match="disagree on the id of '</tool_call>'"):
        load(think=428, tool_call=7)


def test_files_come_back_as_they_were(tmp_path):
    tokenizer = tokenizer_of("qwen3_5")
    tokenizer.save(tmp_path)
    again = FastTokenizer.load(tmp_path)
    assert again.files == tokenizer.files and again.hash == tokenizer.hash
    assert again.template == golden("qwen3_5")["files"]["chat_template.jinja"]
    assert {p.name for p in tmp_path.iterdir()} == set(tokenizer.files)


def _with(**changes):
    content = json.loads(golden("qwen3")["files"]["tokenizer.json"])
    return json.dumps(content | changes).encode()


def _same_id():
    model = json.loads(golden("qwen3")["files"]["tokenizer.json"])["model"]
    return _with(model=model | {"vocab": model["vocab"] | {"b": model["vocab"]["a"]}})


def test_merges_are_not_dropped_at_random():
    """`dropout` in a file is for training; every encoding of a text is the one without it."""
    model = json.loads(golden("qwen3")["files"]["tokenizer.json"])["model"]
    plain = tokenizer_of("qwen3")
    tokenizer = FastTokenizer(plain.files | {"tokenizer.json": _with(model=model | {"dropout": 0.9})})
    text = "select the impressions and the clicks of the campaign"
    assert len(plain.encode(text)) < len(text)
    assert all(tokenizer.encode(text) == plain.encode(text) for _ in range(20))


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "not JSON, or cut off"),
        ({"tokenizer.json": b"[]"}, "not a JSON object"),
        ({"tokenizer.json": b"{}"}, "damaged or of an unknown form"),
        ({"tokenizer.json": lambda: _with(model={"type": "Unigram", "vocab": []})}, "no byte-level BPE"),
        ({"tokenizer.json": lambda: _with(pre_tokenizer={"type": "Metaspace"})}, "no byte-level BPE"),
        ({"tokenizer.json": lambda: _with(pre_tokenizer=None)}, "no byte-level BPE"),
        ({"tokenizer.json": lambda: _with(model={"type": "BPE", "vocab": {"a": 0}, "merges": []})}, "of the 256 bytes"),
        ({"tokenizer.json": lambda: _with(added_tokens=[{"id": 420, "content": "  "}])}, "which is plain text"),
        ({"tokenizer.json": lambda: _with(), "tokenizer_config.json": b"\xff"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer.json": b"[" * 100_000}, "not JSON, or cut off"),
        ({"tokenizer.json": lambda: _with(added_tokens=[{"id": 5, "content": "<|im_end|>"}])}, "shares the id 5"),
        ({"tokenizer.json": lambda: _same_id()}, "'b' shares the id"),
    ],
)
def test_bad_files_are_one_clear_line(files, message, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data() if callable(data) else data)
    with pytest.raises(ConfigError, match=message) as refused:
        FastTokenizer.load(tmp_path)
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def _damaged(value, rng):
    """The value with one entry somewhere in it lost, or of another kind."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        if rng.random() < 0.25:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _damaged(value[key], rng)}
    if isinstance(value, list) and value:
        i = rng.randrange(len(value))
        return value[:i] + ([_damaged(value[i], rng)] if rng.random() < 0.7 else []) + value[i + 1 :]
    return rng.choice([None, 1, "x", [], {}, -1, True, 10**12, ""])


def test_damaged_files_are_refused_or_usable():
    """Nothing but a ConfigError in one line comes of a file of another form."""
    whole, refused = {name: json.loads(data) for name, data in list(tokenizer_of("qwen3").files.items())[:2]}, 0
    whole["tokenizer_config.json"] |= {"chat_template": [{"name": "default", "template": "x"}]}
    for seed in range(120):
        rng = random.Random(seed)
        name = rng.choice(sorted(whole))
        files = {n: json.dumps(_damaged(c, rng) if n == name else c).encode() for n, c in whole.items()}
        try:
            tokenizer = FastTokenizer(files)
            tokenizer.encode("h\u00e9 <|im_end|> 12"), tokenizer.decode(range(500)), tokenizer.pad_id
            TemplateChat(tokenizer, ChatConfig())
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 60


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    files = tokenizer_of("qwen3").files
    real = builtins.__import__

    def without(name, *rest):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'trace-jax\[hf\]'"):
        FastTokenizer(files)


def test_importing_the_modules_imports_no_extra():
    code = (
        "import sys, trace_jax.policy.chat_files, trace_jax.policy.gguf_tokenizer; "
        "print({'tokenizers', 'gguf', 'torch', 'jax'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
