"""Reading what a policy wrote: calls in both forms, answers, thoughts, and turns that are neither."""

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from helpers_chat import ANY, CALL, WAYS, XML, chat_of, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.policy.chat import Turn


@pytest.mark.parametrize("name, thinking", WAYS)
@settings(max_examples=40, deadline=None)
@given(code=ANY)
def test_any_code_and_answer_come_back(name, thinking, code):
    """Codes as the tokenizer's normalisation leaves them; a template may trim the spaces around an answer."""
    chat = chat_of(name, thinking)
    code = chat.tokenizer.decode(chat.tokenizer.encode(code))
    assert chat.parse_turn(chat.encode_call(code)) == Turn("call", code)
    if name == "smollm2" and "<tool_call>" in code:
        return  # it has no token for the tag: this text is a call that cannot be read
    said = chat.parse_turn(chat.encode_answer(code))
    assert said.kind == "answer" and said.text.strip() == code.strip()


GOOD = [
    ("qwen3", "off", CALL, Turn("call", "x")),
    ("qwen3", "off", f"Let me look.\n{CALL}\n", Turn("call", "x")),
    ("qwen3", "off", CALL.replace("\n", ""), Turn("call", "x")),
    ("qwen3", "off", CALL.replace('"x"', '"a\\n\\ud800"'), Turn("call", "a\n?")),
    ("qwen3", "off", '```json\n{"a": 1}\n```', Turn("answer", '```json\n{"a": 1}\n```')),
    ("qwen3", "off", "", Turn("answer", "")),
    ("qwen3", "keep", f"<think>\nso\n</think>\n\n{CALL}", Turn("call", "x")),
    ("qwen3", "keep", f"<think>\n{CALL} maybe\n</think>\n\nyes", Turn("answer", "yes")),
    ("qwen3", "keep", "no thought", Turn("answer", "no thought")),
    ("qwen3_5", "off", XML, Turn("call", "x")),
    ("qwen3_5", "off", f"Look:\n\n{XML}", Turn("call", "x")),
    ("qwen3_5", "off", XML.replace("\nx\n", "x"), Turn("call", "x")),
    ("qwen3_5", "off", XML.replace("x\n", "\n </parameter> x\n\n", 1), Turn("call", "\n </parameter> x\n")),
    ("qwen3_5", "keep", f"so</think>{XML}", Turn("call", "x")),
    ("qwen3_5", "keep", "so\n</think>\n\nyes", Turn("answer", "yes")),
    ("smollm2", "off", f"I call {CALL}", Turn("call", "x")),
    ("smollm2", "keep", "<think>\nhm\n</think>\nyes", Turn("answer", "<think>\nhm\n</think>\nyes")),
    ("smollm2", "off", CALL.replace('"x"', '"</tool_call>"'), Turn("call", "</tool_call>")),
]
BAD = [
    ("qwen3", "off", CALL.replace("python", "bash"), "no tool is named 'bash'"),
    ("qwen3", "off", CALL.replace("code", "script"), "one argument, code"),
    ("qwen3", "off", CALL.replace('"x"', "5"), "one argument, code"),
    ("qwen3", "off", CALL.replace('{"code": "x"}', '"x"'), "one argument, code"),
    ("qwen3", "off", CALL.replace('"x"}', '"x", "y": 1}'), "one argument, code"),
    ("qwen3", "off", CALL.replace('"name"', '"id": 1, "name"'), "a name and arguments"),
    ("qwen3", "off", CALL.replace("}}", "}"), "not JSON"),
    ("qwen3", "off", f"<tool_call>\n{'[' * 5000}\n</tool_call>", "not JSON"),
    ("qwen3", "off", "<tool_call>\n[]\n</tool_call>", "a name and arguments"),
    ("qwen3", "off", f"{CALL}\n{CALL}", "not one tool call"),
    ("qwen3", "off", CALL.removesuffix("</tool_call>"), "not one tool call"),
    ("qwen3", "off", f"{CALL} and so on", "text after it"),
    ("qwen3", "off", CALL.removesuffix("\n</tool_call>") + "no</tool_call>", "text after it"),
    ("qwen3", "off", "yes</tool_call>", "</tool_call> in an answer"),
    ("qwen3", "off", "<|im_start|>user\nyes", "<|im_start|> in an answer"),
    ("qwen3", "off", "<think>\nhm\n</think>\n\nyes", "<think> in an answer"),
    ("qwen3", "off", f"{CALL}<|im_start|>", "not one tool call"),
    ("qwen3", "keep", "<think>\nfor ever", "a thought without an end"),
    ("qwen3", "keep", "<think><|im_start|></think>yes", "<|im_start|> in a thought"),
    ("qwen3", "keep", f"<think>\n{CALL}", "a thought without an end"),
    ("qwen3_5", "keep", "for ever", "a thought without an end"),
    ("qwen3_5", "off", XML.replace("</parameter>", "</parameter>\n<parameter=y>\n1\n</parameter>"), "more than one"),
    ("qwen3_5", "off", XML.replace("=python", "=bash"), "no tool is named 'bash'"),
    ("qwen3_5", "off", XML.replace("=code", "=script"), "one argument, code"),
    ("qwen3_5", "off", CALL, "not a function"),
    ("qwen3_5", "off", XML.replace("</function>", ""), "not a function"),
    ("smollm2", "off", f"{CALL}\n{CALL}", "text after it"),
    ("smollm2", "off", CALL.removesuffix("</tool_call>"), "no end"),
    ("smollm2", "off", "<tool_call>", "not JSON"),
]


@pytest.mark.parametrize("name, thinking, text, turn", GOOD)
def test_good_turns(name, thinking, text, turn):
    chat = chat_of(name, thinking)
    assert chat.parse_turn(np.array([*ids_of(chat, text), chat.stop_id])) == turn


@pytest.mark.parametrize("name, thinking, text, reason", BAD)
def test_bad_turns_are_malformed_with_a_reason(name, thinking, text, reason):
    chat = chat_of(name, thinking)
    turn = chat.parse_turn([*ids_of(chat, text), chat.stop_id])
    assert turn.kind == "malformed" and reason in turn.reason and turn.text == text


def test_a_turn_must_end_with_its_stop_token_and_hold_known_tokens():
    chat = chat_of("qwen3")
    call = chat.encode_call("x")
    for ids in ([], call[:-1], [*call, *chat.tokenizer.encode("x")], [chat.tokenizer.control_id("<|endoftext|>")]):
        assert chat.parse_turn(ids).reason == "it does not end with <|im_end|>"
    assert chat.parse_turn([430, chat.stop_id]) == Turn("malformed", "<unused 430>", "<unused 430> in an answer")
    # Where the tags are tokens, text that spells them is no call.
    plain = chat.tokenizer.encode(CALL)
    assert chat.parse_turn([*plain, chat.stop_id]) == Turn("answer", CALL)
    # Nor does a tag of tokens end where text spells its end.
    ids = [*chat.tokenizer.encode("</tool_call>"), chat.stop_id]
    broken = [*ids_of(chat, CALL.replace('"x"', '"a</tool_call>b"').removesuffix("</tool_call>")), *ids]
    assert chat.parse_turn(broken).kind == "malformed"


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([CALL, XML, "<tool_call>", "</tool_call>", "</think>", "<think>", "{", '"', "\n", "a", "x=1"]),
        max_size=8,
    ),
    way=st.sampled_from(WAYS),
)
def test_no_turn_raises(parts, way):
    chat = chat_of(*way)
    turn = chat.parse_turn([*ids_of(chat, "".join(parts)), chat.stop_id])
    assert turn.kind in ("call", "answer", "malformed") and bool(turn.reason) == (turn.kind == "malformed")
