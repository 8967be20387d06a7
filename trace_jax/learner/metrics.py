"""What a train step reports. Micro-batches give sums (or maxima); they are turned into means once, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.policy.moe import load_figures

MAXIMA = ("ratio_max", "mismatch_max")  # combined by maximum, everything else by sum

# sum -> reported name; each is divided by the number of trained tokens. How to read them ("old": `grpo.old_policy`):
PER_TOKEN = {
    "entropy": "entropy",  # nats; a fall towards 0 means exploration is dying
    "logprob": "logprob",  # mean log-probability of the trained tokens under the new policy
    "ratio": "ratio_mean",  # new / old; 1 before any update, unless the old policy is a sampler that disagrees
    "clipped": "clip_fraction",  # share that the clip acted on; beyond ~0.2 steps are too large (GSPO: 0.15 is usual)
    "old_kl": "approx_kl",  # k3 estimate of KL(old || new), nats
    "logprob_gap": "logprob_gap",  # mean |new - old| log-prob
    "reference_kl": "reference_kl",  # estimate (`grpo.kl_estimator`) of KL(new || reference policy), nats
}

# Sampler against learner, over the tokens that were to be trained on, of weights w = learner / sampler. Read before any
# update on a collection, where only numerics and staleness tell the two apart:
MISMATCH = {
    "mismatch_mean": "mean of log w, -KL(sampler || learner) in nats: 0 is agreement, below -1e-3 stale or faulty",
    "mismatch_gap": "mean of |log w|: below 1e-4 in float32, about 0.05 in bfloat16",
    "mismatch_max": "largest |log w|: ~1e-4 in float32, up to ~1 in bfloat16; above, single tokens are scored wrongly",
    "mismatch_kept": "share of the weight that `grpo.correction` keeps (1 without one): below 0.9 it decides the step",
    "mismatch_ess": "(sum w)^2 / (n sum w^2), share of tokens that count as much as exact ones: 1 is exact, ~0.5 bad",
}

# What means nothing when no token was trained on: a recipe reports these as missing then, not as 0.
OF_TRAINED_TOKENS = frozenset({"loss", *PER_TOKEN.values(), *MAXIMA, *MISMATCH})


def combine(left: Mapping[str, Float[Array, ""]], right: Mapping[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Adds two micro-batches' sums; maxima by maximum."""
    return {k: jnp.maximum(left[k], right[k]) if k in MAXIMA else left[k] + right[k] for k in right}


def finish(sums: Mapping[str, Any], loss_sum: float, denominator: float) -> dict[str, float]:
    """Means over one optimizer step.

    `loss`; the names of `PER_TOKEN` that the objective has; `ratio_max`; those of `MISMATCH` (not for SFT); `tokens`:
    trained tokens; `filled_tokens`: tokens that are not padding; `padding_share`: share of computed positions that were
    padding (wasted work); of a mixture of experts the names of `policy.moe.load_figures`.
    """
    load = load_figures(sums["experts"]) if "experts" in sums else {}
    sums = {k: float(v) for k, v in sums.items() if k != "experts"}
    tokens = max(sums["tokens"], 1.0)
    out = {"loss": loss_sum / denominator if denominator else 0.0}
    out |= {name: sums[key] / tokens for key, name in PER_TOKEN.items() if key in sums}
    out |= {key: sums[key] for key in MAXIMA if key in sums}
    if "mismatch_tokens" in sums:
        count = sums["mismatch_tokens"]
        out["mismatch_mean"] = _share(sums["mismatch"], count, empty=0.0)
        out["mismatch_gap"] = _share(sums["mismatch_gap"], count, empty=0.0)
        out["mismatch_kept"] = _share(sums["mismatch_kept"], sums["mismatch_total"])
        out["mismatch_ess"] = _share(sums["mismatch_weight"] ** 2, count * sums["mismatch_square"])
    return (
        out
        | load
        | {
            "tokens": sums["tokens"],
            "filled_tokens": sums["filled"],
            "padding_share": 1.0 - sums["filled"] / sums["positions"],
        }
    )


def _share(part: float, whole: float, empty: float = 1.0) -> float:
    return part / whole if whole else empty
