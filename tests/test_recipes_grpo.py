"""What GRPO logs of a step, without a model."""

from types import SimpleNamespace

import numpy as np
import pytest

from trace_jax.config import RunConfig
from trace_jax.learner.metrics import MISMATCH
from trace_jax.recipes import grpo
from trace_jax.recipes.phases import PhaseTimer


class Learner:
    """Reports what the real one does of a step: zeros when nothing was computed."""

    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 1}, size=1)

    def step(self, state, batches, denominator):
        tokens = float(sum(b.loss_mask.sum() for b in batches))
        names = ("loss", "entropy", "approx_kl", "ratio_max", *MISMATCH)
        return state + 1, dict.fromkeys(names, 0.5 if tokens else 0.0) | {"tokens": tokens, "grad_norm": 0.0}


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.0, 1.0)])
def test_a_step_without_a_gradient_logs_no_loss(rewards):
    trajectories = [
        SimpleNamespace(
            ids=np.arange(4, dtype=np.int32), loss_mask=np.array([False, True, True, True]), status="finished",
            group=0, sample=k, reward=reward, truncated=False, kept=None, experts=None, info={},
            behaviour_logprobs=lambda: np.zeros(4, np.float32),
        )
        for k, reward in enumerate(rewards)
    ]  # fmt: skip
    state, logged = grpo.update(Learner(), 0, trajectories, RunConfig(), None, PhaseTimer(), 768)
    expected = None if rewards[0] == rewards[1] else 0.5
    assert {logged[k] for k in ("loss", "entropy", "mismatch_gap", "approx_kl", "ratio_max")} == {expected}
    assert logged["grad_norm"] == 0.0 and state == 1
