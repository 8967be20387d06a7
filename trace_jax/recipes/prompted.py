"""`trace-jax eval --agent endpoint`: a prompted model on held-out episodes; what has ended is not asked again."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, EndpointConfig, RunConfig
from trace_jax.config_rules import require_environment
from trace_jax.environments.base import Environment
from trace_jax.evaluation import identity
from trace_jax.evaluation.prompted import Conversation, Prompted, Usage, attempts
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.rundir import RunDirectory, writing
from trace_jax.recipes.workspace import Workspace

AGENT = "endpoint"
# Fields that decide what a model is asked and shown.
_ASKED = (
    *("url", "model", "protocol", "max_turns", "max_turn_tokens", "context"),
    *("evaluation.temperature", "evaluation.top_p", "environment.tool_seconds", "environment.tool_characters"),
)


def name_of(config: RunConfig) -> str:
    """What the model's results are called, its own name as far as a file may have it."""
    return f"{AGENT}-{re.sub(r'[^A-Za-z0-9._-]+', '_', config.endpoint.model)[:80]}"


def prepare(run_dir: Path | None, config: RunConfig) -> tuple[Path, RunConfig]:
    """The run directory, a new one unless there is a run, and the configuration.

    Raises:
        ConfigError: no endpoint or model is named, or the environment has no Python tool.
    """
    require_environment(config, "ads", "eval --agent endpoint")
    for name, flag in (("url", "--endpoint"), ("model", "--model")):
        if not getattr(config.endpoint, name):
            raise ConfigError(f"eval --agent endpoint needs `endpoint.{name}`: give it with {flag}")
    for name, off in (("top_k", 0), ("min_p", 0.0)):
        if getattr(config.evaluation, name) != off:
            raise ConfigError(f"`evaluation.{name}` is no part of the chat-completions interface: leave it out")
    run_dir = run_dir or Path("runs") / name_of(config)
    if not (run_dir / "config.yaml").exists():
        # Which endpoint is asked is no part of a run: others may be evaluated in it.
        with RunDirectory.create(run_dir, replace(config, endpoint=EndpointConfig())):
            pass
    return run_dir, config


def worded(config: RunConfig) -> RunConfig:
    """The configuration with the full wording: a prompted model has not learnt what the compact one leaves out."""
    return replace(config, environment=replace(config.environment, prompt="full"))


def evaluate(
    work: Workspace,
    environment: Environment,
    name: str,
    on_progress: Callable[[int, int], None],
    *,
    sleep: Callable[[float], Any] | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Records of `evaluation.samples` attempts at every episode, and what they cost.

    Conversations go into trajectories/NAME.jsonl as they end; the next call takes from there those that were asked in
    the same way on the same episodes.

    Args:
        on_progress: called with (episodes done, in all); what it raises ends the work.
    """
    config = work.config
    key = _key(config, environment)
    path = work.run.folder("trajectories") / f"{name}.jsonl"
    wanted = [(i, s) for i in range(len(environment)) for s in range(config.evaluation.samples)]
    known = {(t.index, t.sample): t for t in _load(path, key)}
    done = {at: known[at] for at in wanted if at in known}
    if done:
        work.progress.note(f"{len(done)} of {len(wanted)} answers are in {path}")
    agent = Prompted(config.endpoint, config.evaluation, seed=config.seed, sleep=sleep)

    def report() -> None:
        on_progress(len(done) // config.evaluation.samples, len(environment))

    report()
    missing = [at for at in wanted if at not in done]
    if missing:
        _end_line(path)
    for talk in attempts(agent, environment, missing, config.endpoint.workers, report):
        with writing(path), open(path, "ab") as file:
            file.write(json.dumps({"key": key, "talk": asdict(talk)}, default=list).encode() + b"\n")
        talk.messages.clear()  # they are in the file now
        done[talk.index, talk.sample] = talk
    talks = [done[at] for at in wanted]
    record_of = domain_of(config).kind.record_of
    labels = [environment.task(i).labels for i in range(len(environment))]
    records = [record_of(t.index, t.sample, labels[t.index], t.info, t.tool_calls, t.status) for t in talks]
    return records, _usage(talks, config.endpoint)


def _end_line(path: Path) -> None:
    """What a crash cut short stays alone on its line."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


def _key(config: RunConfig, environment: Environment) -> str:
    """Hash of all that determines what a model is asked."""
    fields = {name: _field(config, name) for name in _ASKED}
    task = environment.task(0)
    benchmark = identity.benchmark_of(environment)
    content = [fields, config.seed, task.system, {name: benchmark[name] for name in ("episodes", "sha256")}]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _field(config: RunConfig, name: str) -> Any:
    section, _, field = name.rpartition(".")
    return getattr(getattr(config, section or "endpoint"), field)


def _load(path: Path, key: str) -> list[Conversation]:
    """Conversations of an earlier call, without their messages; lines that are no whole conversation are left out."""
    found: list[Conversation] = []
    if not path.exists():
        return found
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                body = json.loads(line)
                if body["key"] == key:
                    found.append(Conversation.of_body({**body["talk"], "messages": []}))
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _usage(talks: list[Conversation], config: EndpointConfig) -> dict[str, Any]:
    """Sums, mean tokens of an answer, and the cost if it is known."""
    total = Usage()
    for talk in talks:
        total.add(talk.usage)
    cost = total.priced(config)
    per_answer = {name: getattr(total, name) / max(len(talks), 1) for name in ("requests", "tokens_in", "tokens_out")}
    stated = "unknown (set endpoint.price_in and price_out)" if cost is None else f"{cost:.4f}"
    print(
        f"usage: {total.requests} requests, {total.tokens_in} tokens in ({total.tokens_cached} cached), "
        f"{total.tokens_out} tokens out, cost {stated}"
    )
    return {**asdict(total), "cost": cost, "per_answer": per_answer}
