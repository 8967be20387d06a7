"""A prompted model behind an OpenAI-compatible endpoint as an agent: conversations with the tool, graded and counted.

The model reads the task's own system prompt and question and calls the environment's Python tool through the `tools`
of chat completions, or, where an endpoint has none, by a fenced block in its text (`endpoint.protocol`). Turns,
tokens of a turn and of the conversation are limited as in arXiv 2609.10315. Conversations are independent; what they
came to is handed over as they end, so that nothing is asked for twice (`recipes.prompted`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trace_jax.config import EndpointConfig, EvaluationConfig
from trace_jax.environments.base import Environment, Episode, Observation, Task
from trace_jax.evaluation.client import Client, Closed, Refused, Server, Unreadable, message_of

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python with state kept between calls; sql(query) inside it queries the tables.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}
TEXT_PROTOCOL = """

To use the tool, reply with nothing but one fenced block:
```python
CODE
```
What it prints comes back in the next message. A reply without such a block is your final answer."""
_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.S)
_TOO_LONG = (400, 413)  # what endpoints answer to a conversation that does not fit


@dataclass
class Usage:
    """What conversations cost. Tokens are as the endpoint counts them."""

    requests: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0  # of tokens_in
    tokens_out: int = 0
    seconds: float = 0.0
    cost: float | None = None  # as the endpoint states it; None: it does not

    def add(self, other: Usage) -> None:
        """Adds another conversation's."""
        for name in ("requests", "tokens_in", "tokens_cached", "tokens_out", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + other.cost

    def read(self, reply: Any) -> int:
        """Counts one reply; returns the tokens of the conversation so far, 0 if the endpoint does not say."""
        found = reply.get("usage") if isinstance(reply, dict) else None
        found = found if isinstance(found, dict) else {}
        details = found.get("prompt_tokens_details")
        self.requests += 1
        self.tokens_in += (came := _count(found.get("prompt_tokens")))
        self.tokens_cached += _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
        self.tokens_out += (went := _count(found.get("completion_tokens")))
        cost = found.get("cost")
        if isinstance(cost, int | float) and not isinstance(cost, bool):
            self.cost = (self.cost or 0.0) + float(cost)
        return came + went

    def priced(self, config: EndpointConfig) -> float | None:
        """Cost as stated, else by the configured prices; None if neither is known."""
        if self.cost is not None or not (config.price_in or config.price_out):
            return self.cost
        return (self.tokens_in * config.price_in + self.tokens_out * config.price_out) / 1e6


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else 0


@dataclass
class Conversation:
    """One attempt.

    Attributes:
        status: as `Trajectory.status`; malformed: a reply that held neither text nor a call, or could not be read.
        messages: all of it, as sent and received.
    """

    index: int
    sample: int
    status: str = "malformed"
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    tool_calls: int = 0
    usage: Usage = field(default_factory=Usage)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of_body(body: dict[str, Any]) -> Conversation:
        """The inverse of `dataclasses.asdict`. KeyError, TypeError or ValueError if it is none."""
        found = Conversation(**{**body, "usage": Usage(**body["usage"])})
        kinds = ((found.index, int), (found.sample, int), (found.status, str), (found.info, dict))
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise ValueError("not a conversation")
        return found


class Prompted:
    """A prompted model as an agent. `attend` may be used by several threads."""

    def __init__(
        self,
        config: EndpointConfig,
        evaluation: EvaluationConfig,
        *,
        seed: int = 0,
        kept: str = "finished episodes",
        sleep: Callable[[float], Any] | None = None,
    ):
        server = Server(
            url=config.url,
            key_variable=config.key_variable,
            timeout=config.timeout_seconds,
            retries=config.retries,
            section="endpoint",
            url_field="url",
            kept=kept,
        )
        self.client = Client(server, sleep=sleep)
        self._config, self._seed = config, seed
        self._body: dict[str, Any] = {
            "model": config.model,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            config.tokens_field: config.max_turn_tokens,
        }
        if config.protocol == "tools":
            self._body["tools"] = [TOOL]

    def attend(self, environment: Environment, index: int, sample: int) -> Conversation:
        """One attempt at one task, from opening to grade.

        Raises:
            ConfigError: the endpoint refuses or cannot be reached. Closed: replies are no longer wanted.
        """
        task = environment.task(index)
        talk = Conversation(index, sample, messages=self._opening(task))
        episode, start = environment.open(task), time.monotonic()
        try:
            self._converse(talk, episode)
            if talk.answer is not None:
                talk.info = dict(episode.grade(talk.answer).info)
        finally:
            episode.close()
        talk.usage.seconds = time.monotonic() - start
        return talk

    def _opening(self, task: Task) -> list[dict[str, Any]]:
        system = task.system + (TEXT_PROTOCOL if self._config.protocol == "text" else "")
        return [{"role": "system", "content": system}, {"role": "user", "content": task.user}]

    def _converse(self, talk: Conversation, episode: Episode) -> None:
        """Turn by turn, until an answer or a limit."""
        limits = self._config
        for turn in range(limits.max_turns):
            try:
                reply = self.client.ask(lambda attempt, turn=turn: self._request(talk, turn, attempt), _readable)
            except Unreadable:
                return
            except Refused as refusal:
                if refusal.code in _TOO_LONG and "context" in refusal.body.lower():
                    talk.status = "truncated"
                    return
                raise
            used = talk.usage.read(reply)
            message = message_of(reply)
            calls = self._calls(message)
            talk.messages.append(_kept(message, calls))
            last = turn == limits.max_turns - 1
            if not calls:
                cut = reply["choices"][0].get("finish_reason") == "length"
                text = message.get("content")
                talk.status = "truncated" if cut else "finished" if text else "malformed"
                talk.answer = text if talk.status == "finished" else None
                return
            if last or used >= limits.context:
                talk.status = "truncated"
                return
            for number, (call_id, code) in enumerate(calls, 1):
                talk.tool_calls += 1
                final = turn == limits.max_turns - 2 and number == len(calls)
                seen = _NO_CODE if code is None else episode.step(code, final_turn=final)
                if seen.status == "tool_failure":
                    talk.status = "tool_failure"
                    return
                talk.messages.append(_observation(call_id, seen.text))

    def _request(self, talk: Conversation, turn: int, attempt: int) -> dict[str, Any]:
        """The body of a request; its seed is a function of (seed, episode, sample, turn, attempt)."""
        mixed = np.random.SeedSequence([self._seed, talk.index, talk.sample, turn, attempt]).generate_state(1)
        return self._body | {"messages": talk.messages, "seed": int(mixed[0] >> 1)}

    def _calls(self, message: dict[str, Any]) -> list[tuple[str | None, str | None]]:
        """(id, code) of each call; code is None where it cannot be read."""
        if self._config.protocol == "text":
            found = _BLOCK.search(message.get("content") or "")
            return [(None, found[1])] if found else []
        calls = message.get("tool_calls")
        return [_call(c, n) for n, c in enumerate(calls, 1)] if isinstance(calls, list) else []


_NO_CODE = Observation('error: call the tool `python` with the argument {"code": "..."}', True, "error")


def _call(call: Any, number: int) -> tuple[str, str | None]:
    """Id and code of a tool call, whatever it looks like."""
    call = call if isinstance(call, dict) else {}
    named = str(call.get("id") or f"call-{number}")
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        code = arguments["code"]
        return named, code if isinstance(code, str) else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return named, None


def _observation(call_id: str | None, text: str) -> dict[str, Any]:
    if call_id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _kept(message: dict[str, Any], calls: Sequence[tuple[str | None, str | None]]) -> dict[str, Any]:
    """A reply as it goes into the conversation, without what endpoints add of their own and may refuse to take back;
    calls that could not be read are replaced by empty ones, which any endpoint takes."""
    kept: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    named = [(call_id, code) for call_id, code in calls if call_id is not None]
    if named:
        kept["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": "python", "arguments": json.dumps({} if code is None else {"code": code})},
            }
            for call_id, code in named
        ]
    return kept


def calls_of(messages: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """(code, what it showed) of each tool call of a conversation, in either protocol; calls without an answer, as at a
    limit, are left out."""
    out, open_calls = [], {}
    for message in messages[2:]:
        if message["role"] == "assistant":
            block = _BLOCK.search(message.get("content") or "")
            open_calls = {None: block[1]} if block else {}
            for call in message.get("tool_calls", ()):
                open_calls[call["id"]] = json.loads(call["function"]["arguments"]).get("code", "")
        elif (key := message.get("tool_call_id")) in open_calls:
            out.append((open_calls.pop(key), message["content"]))
    return tuple(out)


def _readable(reply: Any) -> Any:
    """The reply itself. Unreadable if it has no message, or one that is neither text nor a call."""
    message = message_of(reply)
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise Unreadable("the content is no text")
    return reply


def attempts(
    agent: Prompted,
    environment: Environment,
    missing: Sequence[tuple[int, int]],
    workers: int,
    check: Callable[[], Any] = lambda: None,
) -> Iterator[Conversation]:
    """Conversations as they end.

    Args:
        missing: (index, sample) of each.
        workers: conversations under way.
        check: called at least once a second; what it raises ends the work. Conversations under way are given up at
            their next request.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="endpoint")
    try:
        futures = {pool.submit(agent.attend, environment, index, sample) for index, sample in missing}
        while futures:
            done, futures = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda f: f.exception() is not None):  # nothing that ended well is lost
                yield future.result()
            check()
    except Closed:
        check()
        raise
    finally:
        agent.client.closing.set()
        pool.shutdown(wait=True, cancel_futures=True)
