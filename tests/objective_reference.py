"""The objectives in NumPy: float64, one sequence and one token at a time, straight from section 4 of the papers' notes.

Whatever is constant under differentiation is computed from `frozen`, the log-probs at which the gradient is taken, so
finite differences over `logprobs` alone are the gradient that the trainer must have.
"""

from dataclasses import dataclass, replace

import numpy as np

from trace_jax.learner.packing import Sequence, pack, unpack

STREAMS = ("advantages", "old_logprobs", "behaviour_logprobs", "reference_logprobs")


@dataclass
class Stream:
    """One sequence, all arrays of its length."""

    mask: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    reference_logprobs: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    weight: float


def random_streams(seed, lengths=(9, 14, 5, 20, 7), spread=0.35, constant=False):
    """Sequences whose ratios, weights and references are `spread` (standard deviation, nats) from 1."""
    rng = np.random.default_rng(seed)
    streams = []
    for n in lengths:
        mask = rng.random(n) < 0.6
        mask[0], mask[1] = False, True
        old = -0.2 - 2 * rng.random(n)
        advantages = np.full(n, rng.normal()) if constant else rng.normal(size=n)
        around = [old + spread * (rng.normal(size=n) + 0.4 * rng.normal()) for _ in range(3)]
        streams.append(Stream(mask, advantages, old, *around, rng.random(n), 1.0 + rng.random()))
    return streams


def packed(streams, length, rows):
    """Micro-batches in float64 with the log-probs and entropies of each: [(log-probs, entropies, batch)]."""
    batches = pack([Sequence(np.arange(len(s.mask)), s.mask) for s in streams], length, rows)
    values = {
        name: spread_out([getattr(s, name) for s in streams], length, rows, len(batches))
        for name in (*STREAMS, "logprobs", "entropies")
    }
    values["weights"] = spread_out([np.full(len(s.mask), s.weight) for s in streams], length, rows, len(batches))
    return [
        (
            values["logprobs"][i],
            values["entropies"][i],
            replace(batch, **{name: values[name][i] for name in ("weights", *STREAMS)}),
        )
        for i, batch in enumerate(batches)
    ]


def spread_out(per_sequence, length, rows, count):
    """Float64 arrays per sequence to where `pack` put them: found by sending their numbers through `unpack`."""
    places = np.arange(count * rows * length).reshape(count, rows, length)
    flat = np.zeros(count * rows * length)
    for at, values in zip(unpack(list(places), [len(v) for v in per_sequence], length), per_sequence, strict=True):
        flat[at] = values
    return flat.reshape(count, rows, length)


def surrogate(ratio, advantage, config):
    """Of one token."""
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    value = min(ratio * advantage, clipped * advantage)
    if config.dual_clip and advantage < 0:
        value = max(value, config.dual_clip * advantage)
    return -value


def kl(estimator, logprob, frozen, old, reference):
    """Loss of one token."""
    x = reference - logprob
    if estimator == "k1":
        return np.exp(logprob - old) * (frozen - reference)
    return x * x / 2 if estimator == "k2" else np.exp(x) - 1 - x


def trained(s, config):
    """Tokens of a sequence that a correction leaves."""
    at = np.flatnonzero(s.mask)
    weights = np.exp(s.old_logprobs - s.behaviour_logprobs)
    low, high = config.correction_low, config.correction_high
    if config.correction == "mask_tokens":
        return at[(low <= weights[at]) & (weights[at] <= high)]
    if config.correction == "mask_sequences":
        return at if low <= np.prod(weights[at]) ** (1 / len(at)) <= high else at[:0]
    return at


def loss(streams, logprobs, frozen, config):
    """Sum and denominator; `logprobs`, `frozen`: one array a sequence."""
    total = denominator = 0.0
    for s, lp, fixed in zip(streams, logprobs, frozen, strict=True):
        at = trained(s, config)
        if not len(at):
            continue
        n = len(at)
        whole = np.prod(np.exp(lp[at] - s.old_logprobs[at])) ** (1 / n)
        whole_fixed = np.prod(np.exp(fixed[at] - s.old_logprobs[at])) ** (1 / n)
        weights = np.exp(s.old_logprobs - s.behaviour_logprobs)
        losses = []
        for t in at:
            ratio, fixed_ratio = np.exp(lp[t] - s.old_logprobs[t]), np.exp(fixed[t] - s.old_logprobs[t])
            if config.objective == "gspo":
                value = surrogate(whole, s.advantages[at].mean(), config)
            elif config.objective == "gspo_token":
                value = surrogate(whole_fixed * np.exp(lp[t] - fixed[t]), s.advantages[t], config)
            elif config.objective == "cispo":
                cut = min(max(fixed_ratio, 1 - config.clip_low), 1 + config.clip_high)
                value = -cut * s.advantages[t] * lp[t]
            else:
                value = surrogate(ratio, s.advantages[t], config)
            if config.correction == "truncate":
                by_sequence = config.objective.startswith("gspo")
                value *= min(np.prod(weights[at]) ** (1 / n) if by_sequence else weights[t], config.correction_high)
            if config.kl_coefficient:
                value += config.kl_coefficient * kl(
                    config.kl_estimator, lp[t], fixed[t], s.old_logprobs[t], s.reference_logprobs[t]
                )
            losses.append(value - config.entropy_coefficient * s.entropies[t])
        summed = sum(losses)
        total += s.weight * {
            "token_mean": summed,
            "seq_mean_token_mean": summed / n,
            "seq_mean_token_sum": summed,
            "seq_sum_constant": summed / config.aggregation_constant,
        }[config.aggregation]  # fmt: skip
        denominator += s.weight * (n if config.aggregation == "token_mean" else 1)
    return total, denominator


def gradient(streams, config, step=1e-5):
    """Of the loss sum, by central differences: one array a sequence."""
    at = [s.logprobs.copy() for s in streams]
    out = [np.zeros(len(x)) for x in at]
    for i, s in enumerate(streams):
        for t in np.flatnonzero(s.mask):
            ends = []
            for sign in (1, -1):
                moved = at[i].copy()
                moved[t] += sign * step
                ends.append(loss([s], [moved], [at[i]], config)[0])
            out[i][t] = (ends[0] - ends[1]) / (2 * step)
    return out
