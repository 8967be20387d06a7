"""Who investigates in `trace-jax diagnose`: the scripted analyst, a trained policy, or a model behind an endpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.diagnose.case import CaseEnvironment
from trace_jax.diagnose.findings import Investigation
from trace_jax.environments.ads import analyst
from trace_jax.environments.base import Observation
from trace_jax.evaluation.evaluate import evaluate_policy
from trace_jax.evaluation.prompted import Prompted, attempts, calls_of
from trace_jax.recipes import programs, prompted, shipped
from trace_jax.recipes.diagnose_view import View
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, refuse_changes
from trace_jax.recipes.workspace import Workspace, on_this_machine
from trace_jax.rollout.trajectory import Trajectory

ANALYST, ENDPOINT = "analyst", prompted.AGENT
# Fields that a diagnosis by a policy may set otherwise than its run.
_MAY = ("seed", "evaluation.", "rollout.", "mesh.", "environment.tool_", "environment.memory_limit_mb")


def named(asked: str | None, run_dir: Path | None) -> str:
    """The agent: as asked, else the newest policy of the run, else the package's own, else (an installation without
    its data) the scripted analyst.

    Raises:
        ConfigError: a stage without a run, or a run that the agent has no use for.
    """
    own = shipped.AGENT if shipped.there() else ANALYST
    agent = asked or (own if run_dir is None else "latest")
    apart = agent in (ANALYST, ENDPOINT, shipped.AGENT)
    if run_dir is None and not apart:
        raise ConfigError(f"--agent {agent} is a policy of a run: name the run with --run-dir")
    if run_dir is not None and agent in (ENDPOINT, shipped.AGENT):
        raise ConfigError(f"--agent {agent} is no policy of a run: leave --run-dir out")
    return agent


def check(config: RunConfig, agent: str, send: bool) -> None:
    """What can be refused before the files are read.

    Raises:
        ConfigError: an endpoint that is not named in full, or one that is named and not asked; a changed field that
            would make the shipped policy another one.
    """
    url, model = config.endpoint.url, config.endpoint.model
    if agent != ENDPOINT:
        for flag, given in (("--endpoint", url), ("--model", model), ("--send", send)):
            if given:
                raise ConfigError(f"{flag} is of `diagnose --agent endpoint`: add that, or leave it out")
    elif not (url and model):
        flag = "--model" if url else "--endpoint"
        raise ConfigError(f"diagnose --agent endpoint asks a model over the network: name it with {flag}")
    if agent == shipped.AGENT:
        refuse_changes(shipped.stored(), config, _MAY, "diagnose --agent shipped")


def configured(config: RunConfig, agent: str) -> RunConfig:
    """The configuration with the wording that the agent reads: the analyst the compact, a prompted model the full."""
    style = {ANALYST: "compact", ENDPOINT: "full"}.get(agent, config.environment.prompt)
    return dataclasses.replace(config, environment=dataclasses.replace(config.environment, prompt=style))


def introduced(agent: str, config: RunConfig, run_dir: Path | None) -> str:
    """Who it is, for people."""
    if agent == shipped.AGENT:
        found = shipped.manifest()
        return f"the policy that comes with trace-jax: {found['name']}, {found['parameters']:,} parameters"
    if agent == ENDPOINT:
        return f"{config.endpoint.model} at {config.endpoint.url}"
    return "the scripted analyst" if agent == ANALYST else f"policy of {run_dir}, {agent}"


def privacy(config: RunConfig) -> str:
    """What leaves the machine when a model behind an endpoint investigates."""
    return (
        f"sent to {config.endpoint.url}: the question, and what the model asks of the tables, which are sums by day "
        "and slice under the agent's words. Your files, the names of campaigns and your own values stay here."
    )


def agree(config: RunConfig, send: bool, view: View) -> None:
    """Shows what an endpoint will be sent and has it agreed to: `--yes` says nothing about this.

    Raises:
        ConfigError: a person said no, or nobody is there who could be asked and --send was not given.
    """
    view.say()
    view.say(f"   {privacy(config)}", "yellow")
    if send:
        return
    if not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError(f"nothing was sent to {config.endpoint.url}: add --send to agree to what is said above")
    try:
        reply = input("Send it? [y/N] ").strip().lower()
    except EOFError:
        reply = ""
    if reply not in ("y", "yes"):
        raise ConfigError("nothing was sent; without --agent endpoint everything stays on this machine")


def investigate(
    environment: CaseEnvironment, config: RunConfig, agent: str, run_dir: Path | None, samples: int, view: View
) -> list[Investigation]:
    """`samples` investigations of the only task of `environment`, shown while or after they are made."""
    if agent == ANALYST:
        return list(_analyst(environment, config, samples, view))
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, samples=samples))
    if agent == ENDPOINT:
        return _endpoint(environment, config, view)
    return _policy(environment, config, agent, run_dir, view)


class _Watched:
    """An episode whose steps are shown as they come."""

    def __init__(self, episode: Any, view: View):
        self._episode, self._view = episode, view

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call."""
        self._view.call(action)
        seen = self._episode.step(action, final_turn=final_turn)
        self._view.seen(seen.text)
        return seen


def _analyst(environment: CaseEnvironment, config: RunConfig, samples: int, view: View) -> Iterator[Investigation]:
    task = environment.task(0)
    for sample in range(samples):
        episode = environment.open(task)
        try:
            shown = _Watched(episode, view) if sample == 0 else episode
            rng = np.random.default_rng([config.seed, sample])
            transcript = analyst.investigate(shown, task, rng, config.environment.prompt)
        finally:
            episode.close()
        view.answered(sample, len(transcript.steps), transcript.answer)
        yield Investigation(tuple(transcript.steps), transcript.answer)


def second(environment: CaseEnvironment, config: RunConfig) -> Investigation:
    """The scripted analyst's investigation, which looks at all slices at once; not shown."""
    task = environment.task(0)
    episode = environment.open(task)
    try:
        rng = np.random.default_rng([config.seed, 0])
        transcript = analyst.investigate(episode, task, rng, "compact", ("scan",))
    finally:
        episode.close()
    return Investigation(tuple(transcript.steps), transcript.answer)


def _shown(result: list[Investigation], view: View) -> list[Investigation]:
    """The first investigation turn by turn, of all what they came to."""
    for number, one in enumerate(result):
        for code, text in one.steps if number == 0 else ():
            view.call(code)
            view.seen(text)
        view.answered(number, len(one.steps), one.answer)
    return result


# Policies


def _policy(
    environment: CaseEnvironment, config: RunConfig, agent: str, run_dir: Path | None, view: View
) -> list[Investigation]:
    programs.keep()
    samples = config.evaluation.samples
    rollout = dataclasses.replace(config.rollout, slots=min(config.rollout.slots, samples))
    config = on_this_machine(dataclasses.replace(config, rollout=rollout))
    with contextlib.ExitStack() as stack:
        if agent == shipped.AGENT:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run = stack.enter_context(RunDirectory.create(scratch / "run", config))
        else:
            run = stack.enter_context(RunDirectory.open(run_dir, lock=False))
            run.config = config
        work = Workspace(run, Progress(), Interrupt())  # which nobody asks: the command ends at once (`Break`)
        if agent == shipped.AGENT:
            work.furnish()
            params = work.initial_params
        else:
            agent = work.latest_stage() if agent == "latest" else agent
            params = work.trained_params(agent)
        work.engine.set_params(params, 0)
        with work.progress.bar(f"{agent} policy investigates", samples) as bar:

            def report(done: int, _: int) -> None:
                bar.update(done * samples)

            found = evaluate_policy(
                work.engine,
                work.chat,
                environment,
                [0],
                config.evaluation,
                rollout,
                seed=config.seed,
                on_progress=report,
            )
        return _shown([Investigation(_steps(t, work), t.answer) for t in found], view)


def _steps(t: Trajectory, work: Workspace) -> tuple[tuple[str, str], ...]:
    """Calls and what they showed, from the sampled ids."""
    out = []
    for turn in range(int(t.turn_index.max(initial=-1)) + 1):
        mine = t.turn_index == turn
        sampled, read = t.ids[mine & t.loss_mask], t.ids[mine & ~t.loss_mask]
        if len(read):
            text = "".join(text for _, text in work.chat.given(read.tolist()))
            out.append((work.chat.parse_turn(sampled.tolist()).text, text))
    return tuple(out)


# Endpoints


def _endpoint(environment: CaseEnvironment, config: RunConfig, view: View) -> list[Investigation]:
    samples, progress = config.evaluation.samples, Progress()
    agent = Prompted(config.endpoint, config.evaluation, seed=config.seed, kept="")
    found: dict[int, Investigation] = {}
    used = {"requests": 0, "tokens_in": 0, "tokens_out": 0}
    with progress.bar(f"{config.endpoint.model} investigates", samples) as bar:
        workers = min(config.endpoint.workers, samples)
        for talk in attempts(agent, environment, [(0, s) for s in range(samples)], workers):
            found[talk.sample] = Investigation(calls_of(talk.messages), talk.answer)
            used = {name: count + getattr(talk.usage, name) for name, count in used.items()}
            bar.update(len(found))
    result = _shown([found[sample] for sample in range(samples)], view)
    view.say("   usage: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in used.items()))
    return result
