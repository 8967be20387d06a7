"""Simulator throughput: proposals, accepted episodes and segment-day cells a second, against raw random draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.bench import measure
from trace_jax.config import RunConfig
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import BLOCK, paper_composition, simulate, stream_key

# What one cell (segment and day) needs at the least: impressions, clicks, orders, and the noise of its price.
DRAWS_PER_CELL = 4


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Propose and verify one compiled batch in the paper's mix of causes, again and again with new indices."""
    sizes = config.simulator
    batch = -(-sizes.batch // BLOCK) * BLOCK  # as `stream.propose` rounds it
    composition = paper_composition(1000)
    strata = list(composition)
    weights = np.array([composition[s] for s in strata], float)
    chosen = np.random.default_rng(0).choice(len(strata), size=batch, p=weights / weights.sum())
    causes = jnp.array([CAUSE_INDEX[strata[i][0]] for i in chosen], jnp.int32)
    dimensions = jnp.array([strata[i][1] for i in chosen], jnp.int32)
    key, params, oracle = stream_key(0, "bench"), SimulatorParams(), OracleParams()
    starts = iter(range(0, batch * (repeats + 1), batch))
    accepted: list[int] = []

    def work():
        indices = jnp.arange(batch, dtype=jnp.int32) + next(starts)
        shape = {"days": sizes.days, "segments": sizes.segments, "siblings": sizes.siblings}
        made, verdict = simulate(key, indices, causes, dimensions, params, oracle, **shape)
        accepted.append(int(verdict.accept.sum()))
        return jax.tree.leaves(made)

    time = measure.spread(measure.seconds(work, repeats))
    cells = batch * sizes.days * sizes.segments
    draws = measure.draw_rate((batch, sizes.days, sizes.segments), repeats)
    share_accepted = sum(accepted[1:]) / (batch * repeats)
    rate = batch / time["median"]
    return {
        "sizes": {"batch": batch, "days": sizes.days, "segments": sizes.segments, "siblings": sizes.siblings},
        "floor": {"uniform_draws_per_second": draws, "draws_per_cell": DRAWS_PER_CELL},
        "measured": {
            "seconds": time,
            "proposals_per_second": rate,
            "accepted_per_second": rate * share_accepted,
            "acceptance": share_accepted,
            "cells_per_second": cells / time["median"],
        },
        "share": {"of_raw_draws": cells * DRAWS_PER_CELL / time["median"] / draws},
    }
