"""How many answers the limits of `rollout` would cut off, from a few dozen investigations; nothing is written.

Asked is whoever is there: the policy of a run, or the teacher of its environment, whose transcripts SFT teaches a
policy to write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from trace_jax.config import RolloutConfig, RunConfig
from trace_jax.environments.base import Environment
from trace_jax.policy import chat_files
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.recipes import schedule
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import BASE, RunDirectory, stored_config
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.collect import collect
from trace_jax.rollout.trajectory import Trajectory

POLICY_COUNT, TEACHER_COUNT = 32, 64  # investigations
LIMITS = ("max_turns", "max_turn_tokens", "context")  # of `rollout`
# Times the limits, but at least so much, to see where answers that were cut off would have ended.
WIDER, WIDE_CONTEXT, WIDE_TURNS = 4, 1024, 16


@dataclass(frozen=True)
class Investigations:
    """What some investigations came to.

    Attributes:
        cut: by limit, the investigations that it ended or would have ended.
        needs: by limit, what each investigation takes of it.
        ended: those that came to an end of their own, so that their needs are known.
        sampled: tokens that the policy chose in each.
        vocab_size: of the tokenizer that counted. rough: it was trained on the investigations only.
    """

    cut: dict[str, Bool[np.ndarray, " n"]]
    needs: dict[str, Int[np.ndarray, " n"]]
    ended: Bool[np.ndarray, " n"]
    sampled: Int[np.ndarray, " n"]
    vocab_size: int
    rough: bool = False

    @property
    def truncated(self) -> float:
        """Share that any limit cut off."""
        return float(np.any(list(self.cut.values()), axis=0).mean())


def cut_by(trajectory: Trajectory, limits: RolloutConfig) -> str | None:
    """The limit that cut a trajectory off, None for one that no limit did."""
    if not trajectory.truncated:
        return None
    turns = len(trajectory.versions)
    last = int((trajectory.loss_mask & (trajectory.turn_index == turns - 1)).sum())
    if last >= limits.max_turn_tokens:
        return "max_turn_tokens"
    return "max_turns" if turns >= limits.max_turns and len(trajectory) < limits.context else "context"


def of_trajectories(trajectories: Sequence[Trajectory], limits: RolloutConfig, vocab_size: int = 0) -> Investigations:
    """What trajectories that were sampled within these limits came to."""
    by = [cut_by(t, limits) for t in trajectories]
    return Investigations(
        cut={name: np.array([b == name for b in by]) for name in LIMITS},
        needs={
            "max_turns": np.array([len(t.versions) for t in trajectories]),
            "max_turn_tokens": np.array([_longest_turn(t.turn_index, t.loss_mask) for t in trajectories]),
            "context": np.array([len(t) for t in trajectories]),
        },
        ended=np.array([b is None for b in by]),
        sampled=np.array([t.sampled_tokens for t in trajectories]),
        vocab_size=vocab_size,
    )


def _longest_turn(turn_index, loss_mask) -> int:
    return int(np.bincount(turn_index[loss_mask]).max(initial=0))


def _tasks(config: RunConfig, count: int, interrupt: Interrupt) -> Environment:
    domain = domain_of(config)
    return domain.environment(domain.draw(config, "plan", count, interrupt.check), config)


def of_policy(config: RunConfig, path: Path, stage: str, interrupt: Interrupt) -> Investigations:
    """The policy of a stage of the run in `path` investigates, sampled within the limits of `config`."""
    limits = dataclasses.replace(config.rollout, slots=min(config.rollout.slots, POLICY_COUNT))
    # Adapters that a new run will train on this policy change nothing yet.
    config = config.replace(rollout=limits, lora=stored_config(path).lora)
    environment = _tasks(config, POLICY_COUNT, interrupt)
    work = Workspace(RunDirectory(path, config, lock=False), Progress(), interrupt)
    work.engine.set_params(work.initial_params if stage == BASE else work.trained_params(stage), 0)
    trajectories = collect(
        work.engine,
        work.chat,
        environment,
        range(len(environment)),
        group=1,
        config=limits,
        seed=schedule.collection_seed(config.seed, "plan", 0),
        step=0,
        progress=interrupt.check,
    )
    return of_trajectories(trajectories, limits, work.chat.tokenizer.vocab_size)


def widened(config: RunConfig) -> RunConfig:
    """The configuration with limits in which answers that were cut off might have ended."""
    limits = config.rollout
    context = min(max(WIDER * limits.context, WIDE_CONTEXT), config.policy.max_length)
    wide = {"context": context, "max_turn_tokens": context - 1, "max_turns": max(WIDER * limits.max_turns, WIDE_TURNS)}
    return config.replace(rollout=dataclasses.replace(limits, **wide))


def of_teacher(config: RunConfig, path: Path | None, interrupt: Interrupt) -> Investigations:
    """The teacher's transcripts in tokens: of the tokenizer of the run in `path`, or of one trained on them,
    which has seen less than the run's will have, so that rare queries take more tokens."""
    domain, transcripts = domain_of(config), []
    environment = _tasks(config, TEACHER_COUNT, interrupt)
    for index in range(len(environment)):
        interrupt.check()
        task, done, _ = domain.transcribe(environment, index, schedule.stream(config.data.seed, "plan", index), config)
        transcripts.append((task.system, task.user, done.steps, done.answer))
    rough = True
    if path is not None and chat_files.tokenizer_files(path):
        rough = False
        chat = chat_files.open_chat(path, config.chat)
    else:
        texts = [text for s, u, steps, answer in transcripts for text in (s, u, *sum(map(tuple, steps), ()), answer)]
        tokenizer = SentencePieceTokenizer.train(texts, config.tokenizer, list(CONTROL), domain.atoms)
        chat = NanoChat(tokenizer)
    encoded = [chat.encode_transcript(*transcript) for transcript in transcripts]
    needs = {
        "max_turns": np.array([turns.max() + 1 for _, _, turns in encoded]),
        "max_turn_tokens": np.array([_longest_turn(turns, mask) for _, mask, turns in encoded]),
        "context": np.array([len(ids) for ids, _, _ in encoded]),
    }
    return Investigations(
        cut={name: needs[name] > getattr(config.rollout, name) for name in LIMITS},
        needs=needs,
        ended=np.ones(len(encoded), bool),
        sampled=np.array([mask.sum() for _, mask, _ in encoded]),
        vocab_size=chat.tokenizer.vocab_size,
        rough=rough,
    )
