"""Compiled programs that `bench sim` measures beside the simulator's own: no oracle, and the two floors.

All of them run on every device and return new arrays, as `stream.simulate` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trace_jax.config import SimulatorConfig
from trace_jax.simulator import draws, metrics, stream
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.params import SimulatorParams

# One proposal: key of the stream, params, index, cause, dimensions.
One = Callable[[jax.Array, SimulatorParams, jax.Array, jax.Array, jax.Array], Any]


def shape_of(config: SimulatorConfig) -> dict[str, int]:
    """The static arguments of the simulator."""
    return {"days": config.days, "segments": config.segments, "siblings": config.siblings}


def in_blocks(one: One, devices: Sequence[jax.Device], width: int):
    """`one` for every row of (indices, causes, dimensions), `width` rows at a time on each device (0: all), jitted."""

    def rows(key, params, indices, causes, dimensions):
        blocks = jax.tree.map(lambda x: x.reshape(-1, width or len(x)), (indices, causes, dimensions))
        out = jax.lax.map(lambda b: jax.vmap(lambda *row: one(key, params, *row))(*b), blocks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("episodes",))
        split = P("episodes")
        rows = jax.shard_map(
            rows, mesh=mesh, in_specs=(P(), P(), split, split, split), out_specs=split, check_vma=False
        )
    return jax.jit(rows)


def raw(config: SimulatorConfig) -> One:
    """Simulate, do not verify."""

    def one(key, params, index, cause, dimensions):
        shape = shape_of(config)
        return metrics.simulate_one(key, index, cause, dimensions, **shape, params=params, rng=config.rng)

    return one


def episode_shapes(config: SimulatorConfig) -> EpisodeBatch:
    """Shapes and types of one proposal's arrays."""
    key = jax.eval_shape(lambda: stream.stream_key(0, "bench"))
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(raw(config), key, SimulatorParams(), zero, zero, zero)


def floor(config: SimulatorConfig, own_generator: bool) -> One:
    """As many uniform threefry numbers as an episode uses, and arrays of the types and sizes of an episode.

    Args:
        own_generator: draw them with `draws.random_bits`, as the simulator does; else with `jax.random.uniform`.
    """
    count = sum(metrics.tape_size(**shape_of(config)))
    shapes = episode_shapes(config)

    def one(key, params, index, cause, dimensions):
        own = jax.random.fold_in(key, index)
        if own_generator:
            numbers = draws.unit_uniform(draws.random_bits(own, count, draws.RNG_ROUNDS[config.rng]))
        else:
            numbers = jax.random.uniform(own, (count,))
        seen = numbers.sum()  # every number is needed, none is written
        return jax.tree.map(lambda x: jnp.full(x.shape, seen.astype(x.dtype)), shapes)

    return one
