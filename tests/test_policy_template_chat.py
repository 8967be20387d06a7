"""Turns by chat template: ids of `transformers`, pieces = rendering, context = what was sampled, reading of turns."""

import dataclasses
import json
from datetime import datetime

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from helpers_chat import ANY, CALL, NAMES, SPELLED, WAYS, XML, chat_of, golden, ids_of, spelled, tokenizer_of
from helpers_collect import CONFIG, Script, ToyEnvironment
from helpers_episodes import fake_set
from hypothesis import given, settings

from trace_jax.config import ChatConfig, ConfigError, EnvironmentConfig, TokenizerConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Observation
from trace_jax.policy import tool_calls
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.chat_files import open_chat, tokenizer_files
from trace_jax.policy.chat_jinja import compile_template
from trace_jax.policy.fast_tokenizer import FastTokenizer
from trace_jax.policy.template_chat import TemplateChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.report.turns import said as report_turns
from trace_jax.rollout.collect import collect

# Against transformers


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name):
    """Prompts of both kinds and whole conversations with tool calls; after the last turn nothing is missing."""
    assert golden(name)["tools"] == [tool_calls.SCHEMA], "run tests/parity/chat_goldens.py again"
    for case in golden(name)["conversations"]:
        assert chat_of(name).encode_prompt(case["system"], case["user"]) == case["prompt"]
        assert chat_of(name, "keep").encode_prompt(case["system"], case["user"]) == case["thinking_prompt"]
        ids, _, _ = chat_of(name).encode_transcript(case["system"], case["user"], case["steps"], case["answer"])
        assert ids.tolist() == case["ids"][: len(ids)]
        assert spelled(chat_of(name), case["ids"][len(ids) :]) == "\n"


@pytest.mark.parametrize("name, thinking", WAYS)
def test_a_transcript_is_the_concatenation_of_its_turns(name, thinking):
    """What SFT trains on are the turns with their stop tokens and nothing else."""
    chat, case = chat_of(name, thinking), golden(name)["conversations"][2]
    ids, mask, turn = chat.encode_transcript(case["system"], case["user"], case["steps"], case["answer"])
    history, sampled = chat.encode_prompt(case["system"], case["user"]), []
    for code, observation in case["steps"]:
        history += chat.encode_call(code) + chat.encode_observation(observation)
        sampled += chat.encode_call(code)
    history, sampled = history + chat.encode_answer(case["answer"]), sampled + chat.encode_answer(case["answer"])
    assert ids.tolist() == history and ids[mask].tolist() == sampled
    assert np.sum(ids[mask] == chat.stop_id) == 4 and turn.max() == 3
    assert all(ids[mask & (turn == k)][-1] == chat.stop_id for k in range(4))


# Context = what was sampled


def sampled_text(name: str, thinking: str, thought: str, body: str) -> str:
    """A turn as a policy would write it after its generation prompt."""
    if thinking == "off" or name == "smollm2":
        return body + "<|im_end|>"
    return ("" if name == "qwen3_5" else "<think>\n") + f"{thought}\n</think>\n\n{body}<|im_end|>"


@pytest.mark.parametrize("name, thinking", WAYS)
def test_a_rollout_holds_what_was_sampled_and_the_template_says_the_same(name, thinking):
    """Through the collection of trajectories: thoughts stay, ids are the sampled ones, and the template, given the
    whole conversation with its thoughts, renders the text that the policy saw."""
    chat = chat_of(name, thinking)
    codes = ["x = 1\nprint('a')", "x + 1"]
    calls = [tool_calls.write(code, chat.form) for code in codes]
    texts = [sampled_text(name, thinking, f"thought {k}", body) for k, body in enumerate([*calls, '{"a": null}'])]
    turns = [ids_of(chat, text) for text in texts]
    outputs = iter(["a", "2"])
    environment = ToyEnvironment(lambda code, index, final: Observation(next(outputs)))
    limits = dataclasses.replace(CONFIG, context=4096, max_turn_tokens=512)
    script = Script(lambda row, turn: turns[turn], stop_id=chat.stop_id)
    (t,) = collect(script, chat, environment, [0], group=1, config=limits, seed=0, step=0)
    assert t.status == "finished" and t.answer == '{"a": null}' and t.tool_calls == 2
    assert t.ids[t.loss_mask].tolist() == sum(turns, [])

    task = environment.task(0)
    system = task.system if chat.native else f"{task.system}\n\n{tool_calls.description(chat.form)}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.user}]
    for k, (code, seen) in enumerate(zip(codes, ["a", "2"], strict=True)):
        call = {"function": {"name": "python", "arguments": {"code": code}}}
        said = {"content": "", "tool_calls": [call]} if chat.native else {"content": calls[k]}
        result = f"<tool_response>\n{seen}\n</tool_response>"
        messages.append({"role": "assistant", "reasoning_content": f"thought {k}"} | said)
        messages.append({"role": "tool", "content": seen} if chat.native else {"role": "user", "content": result})
    messages.append({"role": "assistant", "reasoning_content": "thought 2", "content": '{"a": null}'})
    if thinking == "off":
        messages = [m | {"reasoning_content": "\n"} if m["role"] == "assistant" else m for m in messages]
    tools = [tool_calls.SCHEMA] if chat.native else None
    whole = compile_template(chat.template)(messages=messages, tools=tools, enable_thinking=thinking == "keep")
    assert spelled(chat, t.ids) + "\n" == whole


def test_empty_thoughts_stand_in_front_of_every_turn_when_thinking_is_off():
    for name in ("qwen3", "qwen3_5"):
        chat = chat_of(name)
        for given_ids in (chat.encode_prompt("s", "u"), chat.encode_observation("o")):
            assert spelled(chat, given_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert not spelled(chat, chat.encode_call("x")).startswith("<think>")
    for chat in (chat_of("qwen3", "keep"), chat_of("smollm2")):
        assert spelled(chat, chat.encode_observation("o")).endswith("<|im_start|>assistant\n")


def test_a_template_that_never_writes_thoughts_can_be_used_without_them():
    template = QWEN3.replace("loop.index0 > ns.last_query and (loop.last or thought)", "false")
    chat = TemplateChat(with_template("qwen3", template), ChatConfig())
    assert not chat.rerenders and chat.encode_call("x") == chat_of("qwen3").encode_call("x")
    assert chat.encode_observation("o") == chat_of("qwen3").encode_observation("o")
    with pytest.raises(ConfigError, match="renders a history otherwise"):
        TemplateChat(with_template("qwen3", template), ChatConfig(thinking="keep"))


def test_what_a_user_should_know_is_noted():
    assert chat_of("qwen3").notes == [
        "chat template: rendered again, a history loses its empty thoughts; here they stay"
    ]
    assert chat_of("qwen3_5").notes == [] and chat_of("qwen3_5").rerenders
    assert chat_of("smollm2").notes == ["chat template: it knows no tools; the system message describes the tool"]


# Text that spells control tokens


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(text=ANY)
def test_text_that_spells_control_tokens_stays_text_everywhere(name, text):
    chat = chat_of(name)

    def marks(ids):
        return [mark for _, _, mark in chat.tokenizer.spell(ids)[1]]

    for encode in (chat.encode_observation, chat.encode_answer, chat.encode_call, lambda s: chat.encode_prompt(s, s)):
        assert marks(encode(text)) == marks(encode("plain"))
    inside = spelled(chat, chat.encode_observation(f"a{text}b"))
    normal = chat.tokenizer.decode(chat.tokenizer.encode(f"a{text}b"))
    assert f"<tool_response>\na{normal[1:-1]}b\n</tool_response>" in inside


def test_a_text_with_every_marking_character_is_encoded_too():
    text = "".join(map(chr, range(0xFDD0, 0xFDF0))) + SPELLED
    ids = chat_of("qwen3").encode_observation(text)
    assert text in spelled(chat_of("qwen3"), ids) and ids.count(chat_of("qwen3").stop_id) == 1


# A whole episode


@pytest.mark.parametrize("name", ["qwen3_5", "smollm2"])
def test_an_episode_of_the_real_environment_is_the_transcript_of_its_turns(name):
    """SFT would train on the very ids of a rollout, and the report shows who said what."""
    chat, environment = chat_of(name), AdsEnvironment(fake_set(2), EnvironmentConfig(prompt="full", tool_seconds=10))
    task = environment.task(1)
    codes = ['rows = sql("SELECT count(*) AS n FROM segment_daily")\nrows', "print(rows[0]['n'] > 1)", "1 / 0"]
    turns = [*map(chat.encode_call, codes), chat.encode_answer(task.gold_answer)]
    limits = dataclasses.replace(CONFIG, context=16384, max_turn_tokens=1024, trajectory_seconds=60.0)
    script = Script(lambda row, turn: turns[turn], stop_id=chat.stop_id)
    (t,) = collect(script, chat, environment, [1], group=1, config=limits, seed=0, step=0)
    assert t.status == "finished" and t.tool_calls == 3 and t.info["full_right"]
    shown = report_turns(t, chat)
    assert [role for role, _, _ in shown] == ["system", "user", *["call", "result"] * 3, "answer"]
    seen = [text for role, text, _ in shown if role == "result"]
    assert "True" in seen[1] and "ZeroDivisionError" in seen[2]
    steps = list(zip(codes, seen, strict=True))
    ids, mask, turn = chat.encode_transcript(task.system, task.user, steps, task.gold_answer)
    assert spelled(chat, ids).split() == spelled(chat, t.ids).split()  # the report strips what it shows
    assert ids[mask].tolist() == t.ids[t.loss_mask].tolist() and set(turn) == set(t.turn_index)


# Forms of calls, probes, people


def test_another_form_than_the_templates_is_described_in_the_system_message():
    chat = chat_of("qwen3_5", "off", "json")
    assert not chat.native and chat.form == "json"
    assert "it writes calls as xml" in chat.notes[0]
    assert tool_calls.description("json") in spelled(chat, chat.encode_prompt("s", "u"))
    assert spelled(chat, chat.encode_call("x")) == CALL + "<|im_end|>"
    assert chat.encode_call("x")[0] == chat.tokenizer.control_id("<tool_call>")
    assert "user\n<tool_response>\no\n</tool_response><|im_end|>" in spelled(chat, chat.encode_observation("o"))
    assert spelled(chat_of("smollm2", "off", "xml"), chat_of("smollm2", "off", "xml").encode_call("x")) == (
        XML + "<|im_end|>"
    )
    assert chat_of("qwen3", "off", "json").native and chat_of("qwen3_5", "off", "xml").native


@pytest.mark.parametrize("name, thinking", WAYS)
def test_a_probe_continues_the_answer_that_a_policy_would_write(name, thinking):
    chat = chat_of(name, thinking)
    before, text = '{"decision":{"root_cause":"', 'BID_CUT","driver'
    start, asked = chat.encode_probe(before, text)
    answer = chat.encode_answer(before + text + '_segments":[]}}')
    assert spelled(chat, answer).startswith(spelled(chat, start + asked))
    assert chat.tokenizer.decode(asked).endswith(text) and len(chat.tokenizer.decode(asked)) <= len(text) + 4
    assert answer[: len(start)] == start
    lead, whole = chat.encode_probe("", before + text)
    assert spelled(chat, lead + whole) == spelled(chat, start + asked) and start[: len(lead)] == lead
    assert spelled(chat, lead) == spelled(chat, chat.encode_answer("Z")).removesuffix("Z<|im_end|>")


def test_what_was_given_is_shown_by_role():
    chat = chat_of("qwen3")
    shown = chat.given(chat.encode_prompt("Find out.", "Why?"))
    assert [role for role, _ in shown] == ["system", "user"] and shown[0][1].startswith("Find out.")
    assert chat.given(chat.encode_observation(f"1 {SPELLED}")) == [("result", f"\n1 {SPELLED}\n")]


# Templates that cannot be used


def with_template(name: str, template: str | None, **settings) -> FastTokenizer:
    files = {file: data for file, data in tokenizer_of(name).files.items() if file != "chat_template.jinja"}
    settings = json.loads(files["tokenizer_config.json"]) | settings
    settings.pop("chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    return FastTokenizer(files | {"tokenizer_config.json": json.dumps(settings).encode()})


QWEN3, QWEN3_5, SMOLLM2 = (golden(name)["files"]["chat_template.jinja"] for name in NAMES)


@pytest.mark.parametrize(
    "template, thinking, message",
    [
        (None, "off", "has none"),
        ("{% if %}", "off", "in line 1: copy it again"),
        ("{{ raise_exception('no system role') }}", "off", "no system role"),
        (
            "model".join(SMOLLM2.rsplit("assistant", 1)),
            "off",
            "writes an assistant turn otherwise than it asks for one",
        ),
        (SMOLLM2.replace("<|im_end|>", "\n\n"), "off", "ends no assistant turn with a special token"),
        (SMOLLM2.replace("message['content']", "message['content'][:3]"), "off", "special token|leaves out"),
        ("{{ messages[0].nothing.at_all }}", "off", "fails on a tool conversation"),
        (QWEN3.replace("thought.strip('\\n')", "''"), "keep", "renders a history otherwise"),
        (QWEN3_5.replace("enable_thinking is false", "false"), "off", "cannot switch thoughts off"),
        ("{{ ''.__class__.__mro__ }}", "off", "unsafe|fails on a tool conversation"),
        ("{{ 1 / 0 }}", "off", "fails on a tool conversation .division"),
        ("{% for i in range(10**9) %}{% endfor %}", "off", "fails on a tool conversation .Range"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "off", "fails on a tool conversation .maximum"),
    ],
)
def test_templates_that_cannot_be_used_are_one_clear_line(template, thinking, message):
    with pytest.raises(ConfigError, match=message) as refused:
        TemplateChat(with_template("qwen3", template), ChatConfig(thinking=thinking))
    assert "\n" not in str(refused.value) and str(refused.value).startswith("chat template")


def test_a_template_that_is_no_utf8_is_refused():
    tokenizer = FastTokenizer(tokenizer_of("qwen3").files | {"chat_template.jinja": QWEN3.encode() + b"\xff"})
    with pytest.raises(ConfigError, match="not UTF-8"):
        TemplateChat(tokenizer, ChatConfig())


def test_a_token_that_swallows_spaces_is_refused():
    content = json.loads(tokenizer_of("qwen3").files["tokenizer.json"])
    content["added_tokens"] = [t | {"rstrip": t["content"] == "<|im_end|>"} for t in content["added_tokens"]]
    files = tokenizer_of("qwen3").files | {"tokenizer.json": json.dumps(content).encode()}
    with pytest.raises(ConfigError, match=r"<\|im_end\|>' swallows the spaces"):
        TemplateChat(FastTokenizer(files), ChatConfig())


def test_of_several_templates_the_one_for_tools_is_used():
    entries = [{"name": "default", "template": SMOLLM2}, {"name": "tool_use", "template": QWEN3}]
    assert TemplateChat(with_template("qwen3", entries), ChatConfig()).native
    assert not TemplateChat(with_template("qwen3", entries[:1]), ChatConfig()).native


def test_templates_have_what_transformers_gives_them():
    now = datetime(2026, 3, 4)
    source = (
        "{%- for x in xs %}{% if x > 2 %}{% break %}{% endif %}{% generation %}{{ x }}{% endgeneration %}{% endfor %}\n"
        "  {%- if true %}\n{{ {'b': '<é>', 'a': 1} | tojson }}\n  {% endif %}\n{{ strftime_now('%Y-%m-%d') }}"
    )
    assert compile_template(source, now)(xs=[1, 2, 3]) == '12{"b": "<é>", "a": 1}\n2026-03-04'
    with pytest.raises(Exception, match="unsafe"):
        compile_template("{{ xs.append(1) }}")(xs=[])


# Directories


def test_the_files_of_a_directory_say_which_chat_it_has(tmp_path):
    assert tokenizer_files(tmp_path) == ()
    with pytest.raises(ConfigError, match="has no tokenizer.model or tokenizer.json"):
        open_chat(tmp_path, ChatConfig())
    tokenizer_of("qwen3").save(tmp_path)
    assert tokenizer_files(tmp_path) == ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    chat = open_chat(tmp_path, ChatConfig(thinking="keep"))
    assert isinstance(chat, TemplateChat) and chat.thinking == "keep" and chat.template == QWEN3
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_chat(tmp_path, ChatConfig())
    SentencePieceTokenizer.train(["abc"] * 5, TokenizerConfig(vocab_size=300), CONTROL).save(
        tmp_path / "tokenizer.model"
    )
    assert isinstance(open_chat(tmp_path, ChatConfig()), NanoChat) and tokenizer_files(tmp_path) == ("tokenizer.model",)
