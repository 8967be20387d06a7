"""The turn format of an imported policy: its own chat template, with one tool.

    prompt        system (with the tool), user, and what asks for the assistant's turn
    turn          what the policy samples, up to and including the stop token
    observation   what the template puts between a turn that called the tool and the next turn

Each piece is cut from a rendering of the template and encoded alone; a history is their concatenation and is never
rendered again (token in, token out). At construction a sample conversation is rendered whole: the template must say the
same as the pieces, or it is refused.

Thoughts. "off": the template's empty thought stands in front of every turn, given and not sampled. "keep": the policy
samples thoughts and they stay in the context. Some templates (Qwen3) leave empty thoughts out when they render a
history again; here they stay, because the policy saw them (`rerenders` is False then).

A template that knows no tools (SmolLM2), or writes calls in another form than `chat.tool_format`, gets the tool
described in the system message; calls are then the content of a turn and results user messages (`native` is False).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from trace_jax.config import ChatConfig, ConfigError
from trace_jax.policy import tool_calls
from trace_jax.policy.chat import Turn, transcript
from trace_jax.policy.chat_jinja import compile_template
from trace_jax.policy.fast_tokenizer import FastTokenizer

Message = dict[str, Any]

THINK, END_THINK = "<think>", "</think>"
_EMPTY = re.compile(rf"{THINK}\s*{END_THINK}\s*")
_SYSTEM, _USER, _CODE, _ANSWER, _THOUGHT = "Zsystem", "Zuser", "Zcode", "Zanswer", "Zthought"  # found again, and cut at
_CODES = (_CODE, 'print("a\\n")\n\n', "\n  <é> & '</x>'", "")  # what must survive writing and reading


class _Unfit(ConfigError):
    """Why a template cannot be used in one way; another way may do."""


class TemplateChat:
    """Encodes messages as the template of a checkpoint does, and parses sampled turns. Thread-safe."""

    def __init__(self, tokenizer: FastTokenizer, cfg: ChatConfig):
        """Args:
        tokenizer: with the checkpoint's chat template.
        cfg: whether the policy thinks, and how it writes a call.

        Raises:
            ConfigError: there is no template, or one whose histories are not what a policy would have sampled.
        """
        if tokenizer.template is None:
            raise ConfigError(
                "chat template: the tokenizer has none (a base model?): put a chat_template.jinja beside tokenizer.json"
            )
        self.tokenizer, self.thinking = tokenizer, cfg.thinking
        self._source = tokenizer.template
        self._template = compile_template(self._source)
        self._tokens = tokenizer.control_tokens
        names = sorted(self._tokens, key=len, reverse=True)
        if not names:
            raise ConfigError("chat template: the tokenizer has no special tokens: use the files of a chat model")
        if len(names[-1]) < 2:
            raise ConfigError(f"chat template: the control token {names[-1]!r} is too short to be told from text")
        self._pattern = re.compile("|".join(map(re.escape, names)))
        self._thinks = END_THINK in self._source
        reasons: list[str] = []
        for self.native in (True, False):
            try:
                self._set_up(cfg.tool_format)
                break
            except _Unfit as error:
                reasons.append(str(error))
        else:
            raise ConfigError(f"chat template: {'; '.join(dict.fromkeys(reasons))}: use that of a chat model")
        self.notes = [f"chat template: {reason}; the system message describes the tool" for reason in reasons]
        if not self.rerenders:
            self.notes.append("chat template: rendered again, a history loses its empty thoughts; here they stay")

    def _set_up(self, form: str) -> None:
        """Finds the stop token and the form of calls, and compares the pieces with a whole rendering.

        Raises:
            _Unfit: the template cannot be used so.
        """
        self.form = "json" if form == "auto" else form
        self._asked = asked = self._render(self._first(), asking=True)
        answered = self._render([*self._first(), {"role": "assistant", "content": _ANSWER}])
        at = answered.find(_ANSWER)
        stop = self._pattern.match(answered, at + len(_ANSWER)) if at >= 0 else None
        if stop is None:
            raise _Unfit("it ends no assistant turn with a special token")
        self._stop = stop[0]
        used = {m[0] for m in self._pattern.finditer(asked + answered)}
        greedy = sorted(name for name in used if self.tokenizer.takes_neighbours(name))
        if greedy:
            raise _Unfit(f"its token {greedy[0]!r} swallows the spaces beside it")
        if not all(text in asked for text in (_SYSTEM, _USER)):
            raise _Unfit("it leaves out the system or the user message")
        self._opened = self._thinks and asked.rfind(THINK) > asked.rfind(END_THINK)
        if self._opened and self.thinking == "off":
            raise _Unfit("it cannot switch thoughts off (chat.thinking off)")
        if self.native and tool_calls.SCHEMA["function"]["description"] not in asked:
            raise _Unfit("it knows no tools")
        called = self._turn(self._calling(_CODE))
        written = "xml" if "<function=" in called else "json"
        if form not in ("auto", written):
            raise _Unfit(f"it writes calls as {written}")
        self.form = written
        for code in _CODES:
            text = self._turn(self._calling(code)).removesuffix(self._stop)
            said = self._read(text, [(*m.span(), m[0]) for m in self._pattern.finditer(text)])
            if said != Turn("call", code):
                raise _Unfit(f"its tool calls cannot be read ({said.reason or said.kind})")
        self._compare()

    def _compare(self) -> None:
        def messages(thoughts: Sequence[str | None]) -> list[Message]:
            said = [self._calling("Zcode1"), self._calling("Zcode2"), {"role": "assistant", "content": _ANSWER}]
            said = [m if t is None else m | {"reasoning_content": t} for m, t in zip(said, thoughts, strict=True)]
            return [*self._first(), said[0], self._result("Zr1"), said[1], self._result("Zr2"), said[2]]

        def whole(thoughts: Sequence[str | None]) -> str:
            return self._render(messages(thoughts)).rstrip()

        def pieces(thoughts: Sequence[str | None]) -> str:
            _, _, first, _, second, _, last = messages(thoughts)
            results = [self._observation(name) for name in ("Zr1", "Zr2")]
            turns = [self._turn(message) for message in (first, second, last)]
            between = itertools.chain(*zip(turns, [*results, ""], strict=True))
            return (self._asked + "".join(between)).rstrip()

        without = [None] * 3
        self.rerenders = whole(without) == pieces(without)
        same = _EMPTY.sub("", whole(without)) == _EMPTY.sub("", pieces(without))
        if self.thinking == "keep" and self._thinks and same:
            named = [f"{_THOUGHT}{i}" for i in range(3)]
            same = whole(named) == pieces(named) and all(name in whole(named) for name in named)
        if not same:
            raise _Unfit("it renders a history otherwise than turn by turn, so the policy would not see what it wrote")

    # Rendering

    def _render(self, messages: Sequence[Message], asking: bool = False) -> str:
        """Raises _Unfit: the template refuses the messages."""
        tools = {"tools": [tool_calls.SCHEMA]} if self.native else {}
        try:
            return self._template(
                messages=messages,
                **tools,
                add_generation_prompt=asking,
                enable_thinking=self.thinking == "keep",
                **self.tokenizer.special,
            )
        except Exception as error:  # what the template computes may fail in any way
            raise _Unfit(f"it fails on a tool conversation ({' '.join(str(error).split())})") from error

    def _first(self, system: str = _SYSTEM, user: str = _USER) -> list[Message]:
        if not self.native:
            system = f"{system}\n\n{tool_calls.description(self.form)}"
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def _calling(self, code: str) -> Message:
        if not self.native:
            return {"role": "assistant", "content": tool_calls.write(code, self.form)}
        call = {"type": "function", "function": {"name": tool_calls.NAME, "arguments": {tool_calls.ARGUMENT: code}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _result(self, text: str) -> Message:
        if self.native:
            return {"role": "tool", "name": tool_calls.NAME, "content": text}
        return {"role": "user", "content": f"{tool_calls.RESULT_OPEN}\n{text}\n{tool_calls.RESULT_CLOSE}"}

    def _turn(self, message: Message) -> str:
        """What the policy samples to say the message."""
        whole = self._render([*self._first(), message])
        # Some templates (of models derived from Qwen3) ask with an empty thought and write the turn without it.
        for asked in (self._asked, re.sub(f"{_EMPTY.pattern}$", "", self._asked)):
            if whole.startswith(asked):
                return whole[len(asked) : whole.rindex(self._stop) + len(self._stop)]
        raise _Unfit("it writes an assistant turn otherwise than it asks for one")

    def _observation(self, text: str) -> str:
        """From the end of a turn that called to the beginning of the next."""
        called = [*self._first(), self._calling(_CODE)]
        whole = self._render([*called, self._result(text)], asking=True)
        return whole[whole.index(self._stop, whole.index(_CODE)) + len(self._stop) :]

    # Encoding. Control tokens that a message spells are broken by a character that it lacks, before the template sees
    # them: only the template's own become ids, and it takes no `</think>` of a message for a tag.

    def _mark(self, text: str, mark: str) -> str:
        return re.sub(f"(?=({self._pattern.pattern}))(.)", rf"\g<2>{mark}", text, flags=re.DOTALL)

    def _ids(self, rendered: str, mark: str) -> list[int]:
        ids, end = [], 0
        for found in self._pattern.finditer(rendered):
            ids += self.tokenizer.encode(rendered[end : found.start()].replace(mark, ""))
            ids.append(self._tokens[found[0]])
            end = found.end()
        return ids + self.tokenizer.encode(rendered[end:].replace(mark, ""))

    @property
    def stop_id(self) -> int:
        """The token that ends a sampled turn."""
        return self._tokens[self._stop]

    @property
    def template(self) -> str:
        """The checkpoint's chat template."""
        return self._source

    def encode_prompt(self, system: str, user: str) -> list[int]:
        """System message with the tool, user message, and the beginning of the turn; the next token is the policy's."""
        mark = _absent(system + user)
        messages = self._first(self._mark(system, mark), self._mark(user, mark))
        return self._ids(self._render(messages, asking=True), mark)

    def encode_call(self, code: str) -> list[int]:
        """A tool call as the policy would sample it, stop token included; with an empty thought where it thinks."""
        mark = _absent(code)
        return self._ids(self._turn(self._calling(self._mark(code, mark))), mark)

    def encode_answer(self, text: str) -> list[int]:
        """A final answer as the policy would sample it, stop token included."""
        mark = _absent(text)
        return self._ids(self._turn({"role": "assistant", "content": self._mark(text, mark)}), mark)

    def encode_probe(self, before: str, text: str) -> tuple[list[int], list[int]]:
        """A final answer that is not finished, in two parts: its start with the text before, and the tokens of `text`,
        as they are after it. A token that reaches across counts as one of `text`."""
        lead, _, _ = self._turn({"role": "assistant", "content": _ANSWER}).partition(_ANSWER)
        mark = _absent(before + text)
        ids = self._ids(lead + self._mark(before + text, mark), mark)
        normal = self.tokenizer.decode(self.tokenizer.encode(before))
        shared = max(n for n in range(len(ids) + 1) if (lead + normal).startswith(self.tokenizer.spell(ids[:n])[0]))
        return ids[:shared], ids[shared:]

    def encode_observation(self, text: str) -> list[int]:
        """A tool result; text that spells a control token stays text. Never trained on."""
        mark = _absent(text)
        return self._ids(self._observation(self._mark(text, mark)), mark)

    def encode_transcript(
        self, system: str, user: str, steps: Sequence[tuple[str, str]], answer: str
    ) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """A whole teacher transcript, see `chat.transcript`."""
        return transcript(self, system, user, steps, answer)

    # Reading

    def parse_turn(self, ids: Sequence[int]) -> Turn:
        """The sampled turn: a call of the tool (text before it is allowed), or else an answer. Where the tokenizer has
        tokens for the tags, only these count. Malformed: no stop token at the end, a thought without an end, a call
        that cannot be read, several calls, text after a call, or a control token in an answer."""
        ids = [int(i) for i in ids]
        if not ids or ids[-1] != self.stop_id:
            return Turn("malformed", self.tokenizer.spell(ids)[0], f"it does not end with {self._stop}")
        return self._read(*self.tokenizer.spell(ids[:-1]))

    def _read(self, text: str, marks: Sequence[tuple[int, int, str]]) -> Turn:
        """Args:
        text: of a turn without its stop token.
        marks: (start, end, name) of the control tokens in it.
        """
        try:
            begin = self._after_thought(text, marks)
            marks = [mark for mark in marks if mark[0] >= begin]
            names = [name for _, _, name in marks]
            call = self._find(tool_calls.OPEN, text, marks, begin)
            if call is None:
                if names:
                    raise ValueError(f"{names[0]} in an answer")
                return Turn("answer", text[begin:])
            if names != [tag for tag in (tool_calls.OPEN, tool_calls.CLOSE) if tag in self._tokens]:
                raise ValueError("not one tool call with its end")
            code, rest = tool_calls.read(text[call + len(tool_calls.OPEN) :], self.form)
            closing = tool_calls.CLOSE in names and marks[-1][0] != text.rfind(tool_calls.CLOSE)
            if rest.strip() != tool_calls.CLOSE or closing:
                raise ValueError("the call has no end, or text after it")
            return Turn("call", code)
        except ValueError as error:
            return Turn("malformed", text, str(error))

    def _after_thought(self, text: str, marks: Sequence[tuple[int, int, str]]) -> int:
        """Where the turn's text begins. Raises ValueError: a thought that does not end, or holds control tokens."""
        if self.thinking == "off" or not self._thinks:
            return 0
        if not self._opened and self._find(THINK, text, marks, 0) != len(text) - len(text.lstrip()):
            return 0  # no thought, or none at the beginning
        end = self._find(END_THINK, text, marks, 0)
        if end is None:
            raise ValueError("a thought without an end")
        inside = {name for start, _, name in marks if start < end}
        strange = sorted(inside - {THINK, tool_calls.OPEN, tool_calls.CLOSE})
        if strange:
            raise ValueError(f"{strange[0]} in a thought")
        rest = text[end + len(END_THINK) :]
        return len(text) - len(rest.lstrip("\n"))

    def _find(self, tag: str, text: str, marks: Sequence[tuple[int, int, str]], begin: int) -> int | None:
        """Place of the first such tag from `begin` on: of its token, or in the text if the tokenizer has none."""
        if tag in self._tokens:
            return next((start for start, _, name in marks if name == tag and start >= begin), None)
        at = text.find(tag, begin)
        return at if at >= 0 else None

    def given(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """What the policy was shown, a prompt or an observation, as (role, text); for people to look at."""
        text, marks = self.tokenizer.spell(ids)
        opening = next((name for _, _, name in marks if name != self._stop), None)
        starts = [end for _, end, name in marks if name == opening]
        parts = []
        for start, limit in zip(starts, [*starts[1:], len(text)], strict=True):
            end = next((a for a, _, name in marks if name == self._stop and start <= a < limit), None)
            if end is None:
                continue  # the beginning of the policy's own turn
            role, _, said = text[start:end].partition("\n")
            if said.startswith(tool_calls.RESULT_OPEN):
                role, said = "result", said.removeprefix(tool_calls.RESULT_OPEN).removesuffix(tool_calls.RESULT_CLOSE)
            parts.append((role, said))
        return parts


def _absent(text: str) -> str:
    """A character that the text lacks, of those that mean nothing in Unicode first."""
    return next(c for c in map(chr, range(0xFDD0, 0x110000)) if c not in text)
