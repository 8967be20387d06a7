"""What collection needs of a sampler: the engine of this package, or a served model that takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from trace_jax.rollout.sampling import Sampling


@dataclass(frozen=True)
class SampledTurn:
    """One assistant turn of a row, as it was sampled. W: its tokens; k: `Sampling.top_k`.

    Attributes:
      row: the caller's number of the trajectory.
      ids: sampled ids, the stop token included.
      logprobs: log-probability of each under the distribution it was drawn from; NaN when greedy.
      stopped: whether the stop token came; otherwise a limit cut the turn.
      version: the oldest policy version that drew one of its tokens.
      stale: whether a token attended to keys and values of older parameters than those that drew it. Its
        log-probabilities are those it was drawn with, but no single version of the policy reproduces them.
      kept: ids that could have been drawn at each position, -1 where fewer than k; None when nothing was left out.
      experts: those that each token of the whole row so far was given, but the last, which nothing has been computed
        from yet; None unless `rollout.replay_routes`. L: layers, e: experts of a token.
      gate: weights that the row has locked over adapters and base, in every layer (`policy.mixture`); None without a
        gate. M: adapters and the base, which is the last.
    """

    row: int
    ids: Int[np.ndarray, " W"]
    logprobs: Float[np.ndarray, " W"]
    stopped: bool
    version: int
    stale: bool = False
    kept: Int[np.ndarray, "W k"] | None = None
    experts: Int[np.ndarray, "n L e"] | None = None
    gate: Float[np.ndarray, "L M"] | None = None


Deliver = Callable[[SampledTurn | BaseException], None]


class Generator(Protocol):
    """A sampler of many rows at once. Calls return at once; turns arrive through `deliver`, in any order, from any
    thread. An exception that is delivered ends the collection."""

    @property
    def slots(self) -> int:
        """Rows that it holds at once: started and not yet released."""
        ...

    @property
    def version(self) -> int:
        """Policy version of tokens drawn from now on."""
        ...

    def begin(self, sampling: Sampling, deliver: Deliver) -> None:
        """Forgets every row and delivers turns to `deliver` from now on."""
        ...

    def start(self, row: int, prompt: Int[np.ndarray, " n"], seed: int, limit: int, adapter: int = 0) -> None:
        """A new row, whose first turn of at most `limit` tokens is sampled. `seed` (64 bits) and the position of a
        token decide what is drawn, whoever else is sampled at the time. `adapter`: which of those resident it has, -1:
        none; without adapters it says nothing."""
        ...

    def resume(self, row: int, ids: Int[np.ndarray, " n"], limit: int) -> None:
        """Appends ids that were not sampled to a row whose turn was delivered, and samples its next turn."""
        ...

    def release(self, row: int) -> None:
        """The row is over, or given up in the middle of a turn, which may then still be delivered."""
        ...

    def end(self) -> None:
        """Releases every row; nothing is delivered after it returns."""
        ...
