"""Turn credit: what each tool call did for the answer, judged by a frozen reference (arXiv 2607.13988).

A trajectory has T tool turns: calls whose results the policy has read. `S_k` is its prompt with the first k of them,
k = 0..T, and `l_k` the mean log-probability that the reference gives to the tokens of the gold answer after `S_k`
(`learner.probe`). From these come the credit of each turn, and from that the advantage of each sampled token:

    d_k = eps - l_k                             V_k = log(d_0 / d_k)
    delta_k: see `FORMS`                        of tool turn k, between S_k and S_k+1
    h_k = min(k + K - 1, T - 1)                 look-ahead of K turns
    c_k = sum g^(u-k) delta_u / sum g^(u-k)     over u = k..h_k, discount g
    r_k = c_k + [h_k = T - 1] f g^(T-k) A       terminal fill f, A the outcome advantage of the trajectory
    advantage of the tokens of tool turn k = a A + b r_k, of the final answer = a A

Everything here is arithmetic on the host over a handful of numbers a trajectory. No gradient flows through it. Nothing
depends on how many tokens a turn or an observation has. Axis letters: T tool turns, N tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.config import TurnCreditConfig

Values = Float[np.ndarray, " T+1"]
Credits = Float[np.ndarray, " T"]


def log_ratio(gap: Values) -> Credits:
    """`log(d_k / d_k+1)`: halving what is missing is worth log 2 wherever it happens; sums to V_T."""
    return np.log(gap[:-1] / gap[1:])


def raw_delta(gap: Values) -> Credits:
    """`l_k+1 - l_k`: nats a token gained, whatever was missing before."""
    return gap[:-1] - gap[1:]


def remaining_gap(gap: Values) -> Credits:
    """`(d_k - d_k+1) / d_k`: share of what was missing before the turn."""
    return raw_delta(gap) / gap[:-1]


def remaining_gap_initial(gap: Values) -> Credits:
    """`(d_k - d_k+1) / d_0`: share of what was missing at the start."""
    return raw_delta(gap) / gap[0]


FORMS: dict[str, Callable[[Values], Credits]] = {
    form.__name__: form for form in (log_ratio, raw_delta, remaining_gap, remaining_gap_initial)
}


def gaps(logprobs: Values, epsilon: float) -> Values:
    """`d_k`, float64; at least `epsilon`, so that its logarithm is finite.

    Args:
        logprobs: `l_k`, at most 0.

    Raises:
        ValueError: a value is not finite or greater than 0.
    """
    logprobs = np.asarray(logprobs, np.float64)
    if not np.all(np.isfinite(logprobs) & (logprobs <= 0.0)):
        raise ValueError(f"mean log-probabilities of the gold answer must be finite and at most 0, got {logprobs}")
    return epsilon - logprobs


def values(logprobs: Values, epsilon: float) -> Values:
    """`V_k`: 0 at the start; log 2 more each time the gap halves."""
    gap = gaps(logprobs, epsilon)
    return np.log(gap[0] / gap)


def look_ahead(deltas: Credits, turns: int, discount: float) -> Credits:
    """`c_k`: discounted mean of the turn's own delta and those of the `turns - 1` that follow, fewer at the end."""
    result = np.empty(len(deltas))
    for k in range(len(deltas)):
        ahead = deltas[k : k + turns]
        weights = discount ** np.arange(len(ahead))
        result[k] = weights @ ahead / weights.sum()
    return result


def turn_credits(logprobs: Values, config: TurnCreditConfig) -> Credits:
    """`c_k` of every tool turn; empty for a trajectory without one."""
    deltas = FORMS[config.form](gaps(logprobs, config.epsilon))
    return look_ahead(deltas, config.look_ahead, config.discount)


def turn_rewards(credits: Credits, outcome: float, config: TurnCreditConfig) -> Credits:
    """`r_k`: the turns whose look-ahead reaches the last tool turn also get a share of the outcome."""
    turns = len(credits)
    k = np.arange(turns)
    reaches = k + config.look_ahead >= turns
    return credits + np.where(reaches, config.terminal_fill * config.discount ** (turns - k) * outcome, 0.0)


def boundaries(turn_index: Int[np.ndarray, " N"], loss_mask: Bool[np.ndarray, " N"]) -> list[int]:
    """Lengths of `S_0 .. S_T` in tokens.

    A turn is a tool turn if something follows it: an observation, or (one without any token) another turn.

    Args:
        turn_index: turn of each token, -1 in the prompt; an observation carries the turn whose call it answers.
        loss_mask: sampled tokens.
    """
    turn_index, loss_mask = np.asarray(turn_index), np.asarray(loss_mask, bool)
    last = int(turn_index.max(initial=-1))
    ends = [int(np.searchsorted(turn_index, k, side="right")) for k in range(-1, last)]
    observed = turn_index[~loss_mask].max(initial=-1)
    if observed == last:
        ends.append(len(turn_index))
    return ends


def token_advantages(
    turn_index: Int[np.ndarray, " N"],
    loss_mask: Bool[np.ndarray, " N"],
    logprobs: Values,
    outcome: float,
    config: TurnCreditConfig,
) -> Float[np.ndarray, " N"]:
    """Advantage of every token, 0 outside the mask.

    Args:
        logprobs: `l_k` at the `boundaries` of the trajectory.
        outcome: A, the advantage of its reward inside its group.

    Raises:
        ValueError: there are more or fewer values than boundaries.
    """
    turns = len(boundaries(turn_index, loss_mask)) - 1
    if len(logprobs) != turns + 1:
        raise ValueError(f"{len(logprobs)} probe values for {turns} tool turns, there must be one more than turns")
    rewards = turn_rewards(turn_credits(logprobs, config), outcome, config)
    by_turn = np.full(int(np.max(turn_index, initial=-1)) + 2, config.outcome_coefficient * outcome)
    by_turn[:turns] += config.coefficient * rewards
    return np.where(loss_mask, by_turn[turn_index], 0.0)


def figures(
    logprobs: Sequence[Values], rewards: Sequence[float], config: TurnCreditConfig, turns_shown: int = 8
) -> dict[str, float | None]:
    """Metrics of a step's trajectories.

    Args:
        logprobs: `l_k` of each.
        rewards: of each.
        turns_shown: values are reported for so many turns.

    Returns:
        `credit/value_k`: mean V after k tool turns over the trajectories that have as many (None: none has);
        `credit/value_last`: mean V_T; `credit/mean`, `credit/std`, `credit/low`, `credit/high`: of `c_k` over tool
        turns, the last two the 10 and 90 % quantiles; `credit/positive`: share of turns with c_k > 0;
        `credit/reward_correlation`: of V_T with the reward (None where one of them does not vary).
    """
    all_values = [values(found, config.epsilon) for found in logprobs]
    credits = [turn_credits(found, config) for found in logprobs]
    result: dict[str, float | None] = {}
    for k in range(1, turns_shown + 1):
        reached = [v[k] for v in all_values if len(v) > k]
        result[f"credit/value_{k}"] = float(np.mean(reached)) if reached else None
    last = np.array([v[-1] for v in all_values])
    result["credit/value_last"] = float(last.mean()) if len(last) else None
    flat = np.concatenate(credits) if credits else np.zeros(0)
    names = ("mean", "std", "low", "high", "positive")
    found = (flat.mean(), flat.std(), *np.quantile(flat, (0.1, 0.9)), np.mean(flat > 0)) if len(flat) else (None,) * 5
    result |= {f"credit/{n}": None if f is None else float(f) for n, f in zip(names, found, strict=True)}
    varies = len(last) > 1 and np.std(last) > 0 and np.std(rewards) > 0
    result["credit/reward_correlation"] = float(np.corrcoef(last, rewards)[0, 1]) if varies else None
    return result
