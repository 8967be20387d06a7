"""What a train step reports. Micro-batches give sums (or maxima); they are turned into means once, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

MAXIMA = ("ratio_max",)  # combined by maximum, everything else by sum

# sum -> reported name; each is divided by the number of trained tokens. How to read them:
PER_TOKEN = {
    "entropy": "entropy",  # nats; a fall towards 0 means exploration is dying
    "logprob": "logprob",  # mean log-probability of the trained tokens under the new policy
    "ratio": "ratio_mean",  # 1 when sampler and learner agree; drift before any update means they do not
    "clipped": "clip_fraction",  # share of tokens whose gradient the clip removed; beyond ~0.2 steps are too large
    "old_kl": "approx_kl",  # k3 estimate of KL(behaviour || new), nats
    "logprob_gap": "logprob_gap",  # mean |new - behaviour| log-prob; before any update: the sampler's noise
    "reference_kl": "reference_kl",  # k3 to the reference policy, nats
}


def combine(left: Mapping[str, Float[Array, ""]], right: Mapping[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Adds two micro-batches' sums; maxima by maximum."""
    return {k: jnp.maximum(left[k], right[k]) if k in MAXIMA else left[k] + right[k] for k in right}


def finish(sums: Mapping[str, float], loss_sum: float, denominator: float) -> dict[str, float]:
    """Means over one optimizer step.

    `loss`; the names of `PER_TOKEN` that the objective has; `ratio_max`; `tokens`: trained tokens; `filled_tokens`:
    tokens that are not padding; `padding_share`: share of computed positions that were padding (wasted work).
    """
    tokens = max(sums["tokens"], 1.0)
    out = {"loss": loss_sum / denominator if denominator else 0.0}
    out |= {name: sums[key] / tokens for key, name in PER_TOKEN.items() if key in sums}
    out |= {key: sums[key] for key in MAXIMA if key in sums}
    return out | {
        "tokens": sums["tokens"],
        "filled_tokens": sums["filled"],
        "padding_share": 1.0 - sums["filled"] / sums["positions"],
    }
