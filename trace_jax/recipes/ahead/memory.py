"""What lies in the memory of one chip, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trace_jax.config import ConfigError
from trace_jax.policy.quantised import in_use
from trace_jax.recipes.ahead.programs import BLOCK, Job, bytes_of
from trace_jax.recipes.turn_probe import is_anchor
from trace_jax.rollout.programs import cache_like

LEARNER = ("parameters", "base", "moments", "gradients", "batch", "reference", "versions")
SAMPLER = ("sampler_parameters", "sampler_base", "kv_cache", "probe_reference")
# Without staleness, where both roles share the devices, they work in turn: the learner's sums are made and dropped
# within a step (`Learner.step`), and the sampler gives up its parameters and caches before it (`Generation`).
ONLY_LEARNING = ("gradients", "batch")
ONLY_SAMPLING = ("sampler_parameters", "kv_cache")


def phases(job: Job, held: Mapping[str, float], temporaries: Mapping[str, float]) -> dict[str, float]:
    """Bytes on the chip at each time of a step; the largest is what a chip must have.

    Args:
        held: of `resident`.
        temporaries: of the largest program of each role, beside its arguments: "learner", "sampler".

    Returns:
        `learning` and `sampling`; one figure, `both`, where the two go on at the same time on the same devices.
        Programs of one chip run one after the other.
    """
    learner, sampler = (sum(held.get(n, 0) for n in names) for names in (LEARNER, SAMPLER))
    learns, draws = (temporaries[role] for role in ("learner", "sampler"))
    if job.apart:
        return {"learning": learner + learns, "sampling": sampler + draws}
    if job.config.grpo.staleness:
        return {"both": learner + sampler + max(learns, draws)}
    whole = learner + sampler
    return {
        "learning": whole - sum(held.get(n, 0) for n in ONLY_SAMPLING) + learns,
        "sampling": whole - sum(held.get(n, 0) for n in ONLY_LEARNING) + draws,
    }


def resident(job: Job) -> tuple[dict[str, int], str | None]:
    """Bytes on a chip of what stays there between programs, exact: from the shapes and where they lie.

    Returns:
        By kind: `parameters` (of adapters alone where these are trained), `base` (what adapters are trained on),
        `moments`, `gradients` (accumulated, float32), `batch` (two micro-batches: the next one is on its way),
        `reference` of the KL penalty, `versions` (parameters of earlier steps that are still sampled with);
        `sampler_parameters`, `sampler_base` (what adapters work on, as the sampler holds it), `kv_cache` with every
        slot of a lane full, `probe_reference`. And why there can be no sampler, None if there can.
    """
    config, model = job.config, job.model
    like, axes = job.trained(config, model)
    state = job.learner.state_like(like)
    held = bytes_of(state.params)
    gradients = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding), state.params)
    ways = job.ways(job.mesh)
    batch = sum(a.dtype.itemsize * a.size // ways for a in jax.tree.leaves(job.batch()))
    found = {
        "parameters": held,
        "base": bytes_of(job.base(job.mesh)) if config.lora.rank else 0,
        "moments": bytes_of(state.opt_state),
        "gradients": bytes_of(gradients),
        "batch": 2 * batch,
        "reference": held if config.grpo.kl_coefficient else 0,
        "versions": (config.grpo.staleness + 1) * held if config.grpo.staleness else 0,
        "probe_reference": held if config.grpo.turn_credit.enabled and not is_anchor(config) else 0,
    }
    try:
        return found | _lane(job), None
    except ConfigError as error:
        return found | {"sampler_parameters": 0, "sampler_base": 0, "kv_cache": 0}, str(error)


def _lane(job: Job) -> dict[str, int]:
    config = job.config
    place = job.place(job.model)
    whole = jax.sharding.SingleDeviceSharding(place.device)
    like, _ = job.trained(config, job.model)

    def size(tree: Any, where: Any) -> int:
        where = jax.tree.map(lambda _: whole, tree) if where is None else where
        return bytes_of(jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, where))

    shared = job.mesh is job.sampling_mesh and job.mesh.size == 1  # reads the learner's
    dtype, weights = config.policy.dtype, config.rollout.weights
    shared = shared and weights == "compute"
    parameters = 0 if shared else size(in_use(like, dtype, weights), place.params)
    around = 0
    if config.lora.rank:
        base = job.base(job.mesh)
        base = in_use(base, dtype, weights) if job.mesh.size > 1 or weights == "int8" else base
        around = size(base, None if place.frozen is None else place.frozen.base)
    rollout = config.rollout
    cache = cache_like(config.policy, job.slots, rollout.context, rollout.cache_dtype, place.heads, whole, BLOCK)
    return {"sampler_parameters": parameters, "sampler_base": around, "kv_cache": bytes_of(cache)}
