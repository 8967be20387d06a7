"""Labels from a model behind an OpenAI-compatible endpoint: several independent runs over every attempt.

Replies are kept in a file as they come, so that an interrupted labelling goes on where it stopped and a second one
costs nothing. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from trace_jax.config import CapabilityConfig, ConfigError
from trace_jax.environments.capability import Attempt, Capability, Label
from trace_jax.evaluation.client import Client, Server, Unreadable, message_of

SHOWN = 4000  # characters of a call or result that the model is shown; the middle of a longer one is left out

_INSTRUCTIONS = """You label one attempt of an agent at a task, for each capability of a list. For each decide:
NA: the task does not call for it, or nothing shows whether it is there. PRESENT: called for and shown. LACKING: called
for and not shown. An attempt may be wrong although a capability is there, and right although it is lacking.

Capabilities
{capabilities}

Reply with one JSON object and nothing else: a key for each capability, "NA", "PRESENT" or "LACKING" as its value."""


def prompt(attempt: Attempt, capabilities: Sequence[Capability]) -> list[dict[str, str]]:
    """The messages of a request. Whether the attempt passed is not told."""
    listed = "\n".join(f"- {c.name} ({c.title}): {c.definition}" for c in capabilities)
    parts = [f"Task\n{attempt.user}", f"Truth, hidden from the agent\n{json.dumps(dict(attempt.facts), default=list)}"]
    for number, (code, text) in enumerate(attempt.steps, 1):
        parts.append(f"Call {number}\n{_cut(code)}\nResult {number}\n{_cut(text)}")
    parts.append(f"Answer\n{_cut(attempt.answer)}" if attempt.answer is not None else "There is no answer.")
    parts.append(f"Ending: {attempt.ending}")
    return [
        {"role": "system", "content": _INSTRUCTIONS.format(capabilities=listed)},
        {"role": "user", "content": "\n\n".join(parts)},
    ]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n[...]\n{text[-SHOWN // 2 :]}"


def parse(text: str, capabilities: Sequence[Capability]) -> list[Label]:
    """The labels in a reply, prose or a code fence around them.

    Raises:
        Unreadable: there is no JSON object with a label for each.
    """
    start, end = text.find("{"), text.rfind("}")
    try:
        body = json.loads(text[start : end + 1])
        return [Label[str(body[c.name]).strip().upper()] for c in capabilities]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unreadable(f"no label for each capability in {text[:80]!r}") from error


class Endpoint:
    """A model that labels. `ask` may be used by several threads.

    Attributes:
        closing: set when labels are no longer wanted; ends waits between tries.
    """

    def __init__(self, config: CapabilityConfig, *, sleep: Callable[[float], Any] | None = None):
        server = Server(
            url=config.endpoint,
            key_variable=config.key_variable,
            timeout=config.timeout_seconds,
            retries=config.retries,
            section="capability",
            url_field="endpoint",
            kept="labels",
        )
        self._config, self._client = config, Client(server, sleep=sleep)
        self.closing = self._client.closing

    def ask(self, messages: Sequence[dict[str, str]], capabilities: Sequence[Capability], run: int) -> list[Label]:
        """Labels of one attempt in one run.

        Raises:
            Unreadable: no reply could be read.
            ConfigError: the endpoint refuses, or could not be reached however often it was tried.
        """
        body = {"model": self._config.model, "messages": list(messages), "temperature": self._config.temperature}

        def request(attempt: int) -> dict[str, Any]:
            # A reply that could not be read is asked for with another seed: the same one would give the same again.
            return body | {"seed": run * (self._config.retries + 1) + attempt}

        return self._client.ask(request, lambda reply: parse(str(message_of(reply).get("content")), capabilities))


class Cache:
    """Labels that were paid for, one JSON line each; a line cut short by a crash is left out."""

    def __init__(self, path: Path):
        self._path, self._lock, self._known = path, threading.Lock(), {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = [Label[name] for name in entry["labels"]]
            except (ValueError, KeyError, TypeError):
                continue
        if text and not text.endswith("\n"):  # what comes next must not become part of a cut line
            with open(path, "a", encoding="utf-8") as file:
                file.write("\n")

    def get(self, key: str) -> list[Label] | None:
        return self._known.get(key)

    def put(self, key: str, labels: Sequence[Label]) -> None:
        line = json.dumps({"key": key, "labels": [label.name for label in labels]}) + "\n"
        try:
            with self._lock, open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}; free space or choose another --out"
            ) from error
        self._known[key] = list(labels)


def label(
    attempts: Sequence[Attempt],
    capabilities: Sequence[Capability],
    config: CapabilityConfig,
    cache: Path,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    sleep: Callable[[float], Any] | None = None,
) -> tuple[Int[np.ndarray, "R T C"], int]:
    """Labels of all attempts in `config.runs` runs, and how many replies could not be read (their labels are NA).

    Args:
        cache: file of what was labelled before, also of what is labelled now.
        on_progress: called with (replies, replies in all); what it raises ends the work, replies so far are kept.

    Raises:
        ConfigError: see `Endpoint.ask`.
    """
    endpoint, known = Endpoint(config, sleep=sleep), Cache(cache)
    found = np.zeros((config.runs, len(attempts), len(capabilities)), np.int8)
    messages = [prompt(attempt, capabilities) for attempt in attempts]
    missing: list[tuple[int, int, str]] = []
    for run in range(config.runs):
        for i, asked in enumerate(messages):
            content = json.dumps([config.endpoint, config.model, config.temperature, run, asked])
            key = hashlib.sha256(content.encode()).hexdigest()
            if (labels := known.get(key)) is not None:
                found[run, i] = labels
            else:
                missing.append((run, i, key))
    total, unread = config.runs * len(attempts), 0
    done = total - len(missing)
    on_progress(done, total)
    pool = ThreadPoolExecutor(config.workers, thread_name_prefix="labels")
    try:
        futures = {pool.submit(endpoint.ask, messages[i], capabilities, run): (run, i, key) for run, i, key in missing}
        while futures:
            for future in wait(futures, timeout=1.0, return_when=FIRST_COMPLETED).done:
                run, i, key = futures.pop(future)
                done += 1
                try:
                    found[run, i] = labels = future.result()
                    known.put(key, labels)
                except Unreadable:
                    unread += 1
            on_progress(done, total)
    finally:
        endpoint.closing.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return found, unread
