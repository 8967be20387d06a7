"""The tokenizer trained on transcripts: exact round trip, data never hidden in a fragment, short code."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, TokenizerConfig
from trace_jax.policy import fragments
from trace_jax.policy.chat import CONTROL
from trace_jax.policy.hf_tokenizer import tokenizer_json
from trace_jax.policy.tokenizer import SentencePieceTokenizer

PLACES = ("TOP_OF_SEARCH", "REST_OF_SEARCH", "PRODUCT_PAGE")
QUERY = (
    "SELECT placement, SUM(impressions) FILTER (WHERE later) / SUM(impressions) AS share\n"
    "FROM segment_daily GROUP BY placement ORDER BY share DESC"
)


def messages(n: int = 200) -> list[str]:
    rng = random.Random(0)
    texts = []
    for _ in range(n):
        texts.append(f"campaign C{rng.randint(100, 999)} from 2024-03-04: orders -{rng.randint(1, 60)}%. Why?")
        texts.append(QUERY if rng.random() < 0.7 else QUERY.replace("share DESC", "share"))
        texts.append("\n".join(f"{place} {rng.gauss(0, 1):.3g} {rng.gauss(0, 9):.3g}" for place in PLACES))
        answer = {"root_cause": "PLACEMENT_SHIFT", "driver_segments": [{"dimension": "placement", "value": PLACES[0]}]}
        texts.append(json.dumps({"decision": answer, "explanation": f"{rng.choice(PLACES)} grew"}))
    return texts


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.train(messages(), TokenizerConfig(vocab_size=480), CONTROL)


pieces_of_trouble = st.sampled_from(
    ["\n", "\n\n", " ", "   ", "\t", "\r\n", "\u2581", "\0", "<|end|>", "<pad>", "<unk>", "<0x0A>", "<s>", "\ufeff"]
    + ["\u00e9", "e\u0301", "\u3000", "🙂", QUERY[:40], PLACES[0], "-0.5", "１２"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(pieces_of_trouble, st.text(max_size=8)), max_size=12).map("".join))
def test_round_trip_is_exact_and_never_a_control_token(tokenizer, text):
    """Case 1 of trainer: a text that spells a control token is plain text."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(i) for i in ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(pieces_of_trouble, st.sampled_from(messages(3)), st.text(max_size=5)), max_size=8))
def test_tokenizer_json_gives_the_same_ids_to_other_software(tokenizer, parts):
    tokenizers = pytest.importorskip("tokenizers", reason="compares with another package: pip install tokenizers")
    text = "".join(parts).replace("\u2581", "").replace("<", "")
    other = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tokenizer)))
    ids = other.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text)
    assert other.decode(ids) == text


def test_lone_surrogates_do_not_stop_an_episode(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_code_is_short_and_data_is_copied_by_the_same_ids(tokenizer):
    assert len(tokenizer.encode(QUERY)) <= 4
    result, answer = f"{PLACES[0]} 0.5\n{PLACES[1]} -2", json.dumps({"value": PLACES[1]})
    for place in PLACES:
        (single,) = tokenizer.encode(place)
        if place in result:
            assert single in tokenizer.encode(result)
        if place in answer:
            assert single in tokenizer.encode(answer)


def test_digits_are_single_pieces_everywhere(tokenizer):
    for text in messages(5):
        for token in tokenizer.encode(text):
            piece = tokenizer.piece(token)
            assert len(piece) == 1 or tokenizer.decode([token]) == "" or not any(c.isdigit() for c in piece)


def test_every_id_decodes_and_controls_add_nothing(tokenizer):
    assert all(tokenizer.decode([tokenizer.control_id(name)]) == "" for name in CONTROL)
    assert len({tokenizer.control_id(name) for name in CONTROL} | {tokenizer.pad_id}) == len(CONTROL) + 1
    for token in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.decode([token]), str) and isinstance(tokenizer.piece(token), str)


def test_training_is_repeatable_and_a_file_brings_it_back(tokenizer, tmp_path):
    again = SentencePieceTokenizer.train(messages(), TokenizerConfig(vocab_size=480), CONTROL)
    tokenizer.save(tmp_path / "tokenizer.model")
    loaded = SentencePieceTokenizer.load(tmp_path / "tokenizer.model")
    assert again.hash == tokenizer.hash == loaded.hash
    assert loaded.encode(QUERY) == tokenizer.encode(QUERY)


def test_a_small_corpus_makes_a_small_vocabulary():
    small = SentencePieceTokenizer.train(["abc 1"], TokenizerConfig(vocab_size=768), CONTROL)
    assert small.vocab_size < 300 and small.decode(small.encode("zzz\n")) == "zzz\n"


def test_spaces_seen_only_inside_fragments_still_round_trip():
    tokenizer = SentencePieceTokenizer.train(["find out why"] * 9, TokenizerConfig(vocab_size=400), CONTROL)
    assert len(tokenizer.encode("find out why")) == 1
    assert tokenizer.decode(tokenizer.encode("2 + 2▁")) == "2 + 2▁"


def test_atoms_stay_out_of_fragments():
    tokenizer = SentencePieceTokenizer.train(messages(), TokenizerConfig(vocab_size=480), CONTROL, atoms=["placement"])
    (atom,) = tokenizer.encode("placement")
    assert tokenizer.encode(QUERY).count(atom) == 2


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("select a from b order by c", True),
        ("SELECT a FROM b WHERE c IS NOT NULL", True),
        ("select a from b where c = TOP_OF_SEARCH", False),
        ("select a from b limit 5", False),
        ("first line\nsecond line of code", True),
        ("first line\n-1.5", False),
    ],
)
def test_barriers(text, whole):
    found = fragments.mine([text] * 10, limit=20, min_characters=2, minimum=3)
    assert (text in found) == whole
    assert not any(c.isdigit() or "TOP_OF_SEARCH" in f for f in found for c in f)


def test_only_the_most_useful_fragments_are_kept():
    texts = ["a long common clause"] * 50 + ["another shared clause"] * 20 + ["a rare long clause of text"] * 4
    assert fragments.mine(texts, limit=2, min_characters=8, minimum=3) == [
        "a long common clause",
        "another shared clause",
    ]


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (lambda t: SentencePieceTokenizer.train(messages(3), TokenizerConfig(vocab_size=200), CONTROL), "vocab_size"),
        (lambda t: SentencePieceTokenizer.train([], TokenizerConfig(), CONTROL), "transcripts"),
        (lambda t: t.control_id("<|tool|>"), "tool"),
        (lambda t: SentencePieceTokenizer.load("no/such/file.model"), "file.model"),
        (lambda t: SentencePieceTokenizer.load(__file__), "not a sentencepiece model"),
    ],
)
def test_bad_input_is_one_line(tokenizer, act, word, capfd):
    with pytest.raises(ConfigError, match=word) as caught:
        act(tokenizer)
    assert "\n" not in str(caught.value)


def test_damaged_model_files_are_one_clear_line(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    cases = [b"", b"not a model", tokenizer.model[: len(tokenizer.model) // 2]]
    for seed in range(60):
        rng, data = random.Random(seed), bytearray(tokenizer.model)
        for _ in range(4):
            data[rng.randrange(len(data) // 2)] = rng.randrange(256)
        cases.append(bytes(data))
    refused = 0
    for case in cases:
        path.write_bytes(case)
        try:
            SentencePieceTokenizer.load(path)  # four bytes may happen to spell another valid model
        except ConfigError as error:
            assert str(path) in str(error) and "copy it again" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused >= 10
    with pytest.raises(ConfigError, match="No such file"):
        SentencePieceTokenizer.load(tmp_path / "missing")
