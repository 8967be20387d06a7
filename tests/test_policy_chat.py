"""The turn format: masks, parsing, and that a transcript is what a rollout would have built."""

import numpy as np
import pytest

from trace_jax.config import ChatConfig, ConfigError, TokenizerConfig
from trace_jax.policy.chat import ANSWER, CALL, CONTROL, END, RESULT, NanoChat
from trace_jax.policy.chat_files import open_chat
from trace_jax.policy.tokenizer import SentencePieceTokenizer

STEPS = [('sql("""SELECT 1""")', "1\nrow"), ("2 + 2", "4 <|end|><|answer|>")]


@pytest.fixture(scope="module")
def chat() -> NanoChat:
    texts = ["find out why", 'sql("""SELECT 1""")', "1\nrow", '{"decision": null}'] * 20
    return NanoChat(SentencePieceTokenizer.train(texts, TokenizerConfig(vocab_size=400), CONTROL))


def test_transcript_is_the_concatenation_of_its_turns(chat):
    """Case 1 of trainer: the supervised row equals the history of a rollout with the same turns."""
    ids, mask, turn = chat.encode_transcript("find out", "why", STEPS, "{}")
    history = chat.encode_prompt("find out", "why")
    sampled = []
    for code, observation in STEPS:
        sampled += chat.encode_call(code)
        history += chat.encode_call(code) + chat.encode_observation(observation)
    history += chat.encode_answer("{}")
    sampled += chat.encode_answer("{}")
    assert ids.tolist() == history and ids[mask].tolist() == sampled
    assert len(ids) == len(mask) == len(turn) and mask.dtype == bool and ids.dtype == np.int32


def test_masks_cover_the_turns_with_their_end_token_only(chat):
    """Case 2 of trainer: the end of turn is trained, observations and prompt are not; turns are counted."""
    ids, mask, turn = chat.encode_transcript("find out", "why", STEPS, "{}")
    end = chat.tokenizer.control_id(END)
    assert np.all(mask[ids == end]) and np.sum(ids == end) == 3
    for name, trained in ((CALL, True), (ANSWER, True), (RESULT, False)):
        assert np.all(mask[ids == chat.tokenizer.control_id(name)] == trained)
    prompt = len(chat.encode_prompt("find out", "why"))
    assert np.all(turn[:prompt] == -1) and not mask[:prompt].any()
    assert np.all(np.diff(turn[prompt:]) >= 0) and turn[prompt] == 0 and turn[-1] == 2
    assert all(mask[turn == k].any() for k in range(3))


def test_sampled_turns_parse_back(chat):
    for code, _ in STEPS:
        turn = chat.parse_turn(np.array(chat.encode_call(code)))
        assert (turn.kind, turn.text) == ("call", code)
    assert chat.parse_turn(chat.encode_answer('{"a": 1}\n')).text == '{"a": 1}\n'
    assert chat.stop_id == chat.encode_answer("")[-1] and chat.parse_turn(chat.encode_answer("")).kind == "answer"


def test_malformed_turns(chat):
    call, text = chat.encode_call("x"), chat.tokenizer.encode("x")
    bad = [[], call[:1], call[:-1], call[1:], text + call, call + text, call[:-1] + chat.encode_answer("y")]
    assert [chat.parse_turn(ids).kind for ids in bad] == ["malformed"] * len(bad)


def test_observation_never_contains_a_control_token_but_its_own(chat):
    ids = chat.encode_observation("".join(CONTROL))
    assert [chat.tokenizer.is_control(i) for i in ids] == [True] + [False] * (len(ids) - 1)


def test_served_template_renders_the_same_text(chat):
    jinja2 = pytest.importorskip("jinja2")
    (code, observation), answer = STEPS[0], "{}"
    rendered = jinja2.Template(chat.template).render(
        messages=[
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": {"code": code}}}]},
            {"role": "tool", "content": observation},
            {"role": "assistant", "content": answer},
        ]
    )
    ids, _, _ = chat.encode_transcript("S", "U", STEPS[:1], answer)
    names = {chat.tokenizer.control_id(name): name for name in CONTROL}
    assert rendered == "".join(names.get(int(i)) or chat.tokenizer.decode([i]) for i in ids)


def test_a_tokenizer_without_the_control_tokens_is_refused():
    with pytest.raises(ConfigError, match="system"):
        NanoChat(SentencePieceTokenizer.train(["abc"] * 5, TokenizerConfig(vocab_size=300), ["<|end|>"]))


def test_chat_settings_are_refused_where_they_would_do_nothing(tmp_path, chat):
    chat.tokenizer.save(tmp_path / "tokenizer.model")
    assert isinstance(open_chat(tmp_path, ChatConfig()), NanoChat)
    with pytest.raises(ConfigError, match="`chat` is for imported policies"):
        open_chat(tmp_path, ChatConfig(thinking="keep"))
