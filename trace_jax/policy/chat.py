"""The turn format of policies trained from scratch.

    <|system|> system <|user|> user   ( <|call|> code <|end|> <|result|> observation )*   <|answer|> text <|end|>

A policy samples from <|call|> or <|answer|> up to and including <|end|>; everything else is given to it. Histories are
extended token by token and never encoded again (token in, token out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from trace_jax.policy.tokenizer import Tokenizer

SYSTEM, USER, CALL, ANSWER, RESULT, END = CONTROL = (
    "<|system|>",
    "<|user|>",
    "<|call|>",
    "<|answer|>",
    "<|result|>",
    "<|end|>",
)

# The same format for servers that render messages through a Jinja template.
_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{%- if message.role == 'system' -%}}{{{{ '{SYSTEM}' + message.content }}}}"
    f"{{%- elif message.role == 'user' -%}}{{{{ '{USER}' + message.content }}}}"
    f"{{%- elif message.role == 'tool' -%}}{{{{ '{RESULT}' + message.content }}}}"
    "{%- elif message.tool_calls -%}{%- for call in message.tool_calls -%}"
    f"{{{{ '{CALL}' + call.function.arguments.code + '{END}' }}}}{{%- endfor -%}}"
    f"{{%- else -%}}{{{{ '{ANSWER}' + message.content + '{END}' }}}}{{%- endif -%}}"
    "{%- endfor -%}"
)


@dataclass(frozen=True)
class Turn:
    """What a sampled turn says: `kind` is "call", "answer" or "malformed", `reason` why it is malformed, if known."""

    kind: str
    text: str
    reason: str = ""


class Chat(Protocol):
    """A turn format. A sampled turn ends with `stop_id`; histories are concatenations of what these functions give."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_id(self) -> int: ...

    @property
    def template(self) -> str: ...

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know about how it differs from what others make of the template; one line each."""
        ...

    def encode_prompt(self, system: str, user: str) -> list[int]: ...

    def encode_call(self, code: str) -> list[int]: ...

    def encode_answer(self, text: str) -> list[int]: ...

    def encode_probe(self, before: str, text: str) -> tuple[list[int], list[int]]: ...

    def encode_observation(self, text: str) -> list[int]: ...

    def parse_turn(self, ids: Sequence[int]) -> Turn: ...

    def encode_transcript(
        self, system: str, user: str, steps: Sequence[tuple[str, str]], answer: str
    ) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], Int[np.ndarray, " n"]]: ...

    def given(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """What the policy was shown, a prompt or an observation, as (role, text); for people to look at."""
        ...


class NanoChat:
    """Encodes messages between control pieces and parses sampled turns."""

    notes = ()  # its template says the same

    def __init__(self, tokenizer: Tokenizer):
        """Raises:
        ConfigError: the tokenizer lacks one of `CONTROL`.
        """
        self.tokenizer = tokenizer
        self._id = {name: tokenizer.control_id(name) for name in CONTROL}
        self._kinds = {self._id[CALL]: "call", self._id[ANSWER]: "answer"}

    @property
    def stop_id(self) -> int:
        """The token that ends a sampled turn."""
        return self._id[END]

    @property
    def template(self) -> str:
        """Jinja chat template; a tool call carries its Python source as the argument `code`."""
        return _TEMPLATE

    def encode_prompt(self, system: str, user: str) -> list[int]:
        """System and user message; the next token is the policy's."""
        return [self._id[SYSTEM], *self.tokenizer.encode(system), self._id[USER], *self.tokenizer.encode(user)]

    def encode_call(self, code: str) -> list[int]:
        """A tool call as the policy would sample it, end token included."""
        return [self._id[CALL], *self.tokenizer.encode(code), self.stop_id]

    def encode_answer(self, text: str) -> list[int]:
        """A final answer as the policy would sample it, end token included."""
        return [self._id[ANSWER], *self.tokenizer.encode(text), self.stop_id]

    def encode_probe(self, before: str, text: str) -> tuple[list[int], list[int]]:
        """A final answer that is not finished, in two parts: its start with the text before, and the tokens of `text`,
        as they are after it. A token that reaches across counts as one of `text`."""
        start, *ids, _ = self.encode_answer(before + text)
        shared = max(n for n in range(len(ids)) if before.startswith(self.tokenizer.decode(ids[:n])))
        return [start, *ids[:shared]], ids[shared:]

    def encode_observation(self, text: str) -> list[int]:
        """A tool result; text that spells a control token stays text. Never trained on."""
        return [self._id[RESULT], *self.tokenizer.encode(text)]

    def parse_turn(self, ids: Sequence[int]) -> Turn:
        """The sampled turn. Malformed: no kind in front, no end token at the end, or a control token between."""
        ids = [int(i) for i in ids]
        body = ids[1:-1]
        whole = len(ids) >= 2 and ids[0] in self._kinds and ids[-1] == self.stop_id
        if not whole or any(self.tokenizer.is_control(i) for i in body):
            return Turn("malformed", self.tokenizer.decode(ids))
        return Turn(self._kinds[ids[0]], self.tokenizer.decode(body))

    def encode_transcript(
        self, system: str, user: str, steps: Sequence[tuple[str, str]], answer: str
    ) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """A whole teacher transcript, see `transcript`."""
        return transcript(self, system, user, steps, answer)

    def given(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """What the policy was shown, split where a control token names who speaks."""
        ids = [int(i) for i in ids]
        heads = [i for i, token in enumerate(ids) if self.tokenizer.is_control(token)]
        parts = [ids[a:b] for a, b in zip([0, *heads], [*heads, len(ids)], strict=True)]
        named = {token: name.strip("<|>") for name, token in self._id.items()}
        return [(named.get(part[0], ""), self.tokenizer.decode(part)) for part in parts if part]


def transcript(
    chat: Chat, system: str, user: str, steps: Sequence[tuple[str, str]], answer: str
) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """A whole teacher transcript, the same ids that a rollout of the same turns would hold.

    Args:
        chat: the turn format.
        system: system message.
        user: user message.
        steps: (code, observation) of each tool call.
        answer: final answer.

    Returns:
        ids; loss mask, true on the policy's turns with their end tokens; turn index, -1 in the prompt, k on call k
        and its observation, the number of calls on the answer.
    """
    parts = [(chat.encode_prompt(system, user), False, -1)]
    for k, (code, observation) in enumerate(steps):
        parts += [(chat.encode_call(code), True, k), (chat.encode_observation(observation), False, k)]
    parts.append((chat.encode_answer(answer), True, len(steps)))
    lengths = [len(ids) for ids, _, _ in parts]
    return (
        np.concatenate([np.asarray(ids, np.int32) for ids, _, _ in parts]),
        np.repeat([trained for _, trained, _ in parts], lengths),
        np.repeat(np.asarray([turn for _, _, turn in parts], np.int32), lengths),
    )
