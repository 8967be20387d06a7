"""The nearest configuration that fits, when one does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, PolicyConfig, RunConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers
from trace_jax.recipes.ahead import memory
from trace_jax.recipes.ahead.programs import Job
from trace_jax.recipes.ahead.report import HEADROOM
from trace_jax.recipes.ahead.topology import Topology

MOST_CHANGES = 4


def nearest(config: RunConfig, topology: Topology, report: dict[str, Any]) -> dict[str, Any] | None:
    """The fewest changes of mesh, remat, micro-batch, slots and staleness with which the run would fit.

    What stays in memory is counted again for each of them. The temporaries of the compiled program are scaled by the
    activations that a layer keeps, so the result wants to be compiled in its turn.

    Returns:
        `fields` to set, and the `hbm_bytes_per_chip` that is expected; None where no such change is enough.
    """
    before = Job(config, topology)
    if _least(before) > (1 - HEADROOM) * topology.chip.hbm_bytes:
        return None
    known = {k: report["memory"][f"{k}_temporaries"] for k in ("learner", "sampler")}
    seen, level = {_key(config)}, [(config, {})]
    for _ in range(MOST_CHANGES):
        following, fitting = [], []
        for current, fields in level:
            for field, changed in _changes(current, topology):
                if _key(changed) in seen:
                    continue
                seen.add(_key(changed))
                try:
                    job = Job(changed, topology)
                    held, no_sampler = memory.resident(job)
                except ConfigError:
                    continue
                scale = _activations(job) / _activations(before)
                wanted = {"learner": known["learner"] * scale, "sampler": known["sampler"] * job.slots / before.slots}
                total = max(memory.phases(job, held, wanted).values())
                entry = (changed, fields | field)
                following.append((total, entry))
                if no_sampler is None and total <= (1 - HEADROOM) * topology.chip.hbm_bytes:
                    fitting.append((job.micro_batches, total, entry[1]))
        if fitting:
            _, total, fields = min(fitting, key=lambda f: f[:2])
            return {"fields": fields, "hbm_bytes_per_chip": int(total)}
        level = [entry for _, entry in sorted(following, key=lambda f: f[0])[:12]]
    return None


def _least(job: Job) -> float:
    """Bytes of a learner's chip when everything that it keeps is split over all of them."""
    held, _ = memory.resident(job)
    like, _ = job.trained(job.config, job.model)
    whole = sum(a.dtype.itemsize * a.size for a in jax.tree.leaves(like))
    kept = sum(held[n] for n in ("parameters", "moments", "gradients", "versions", "reference"))
    return kept / held["parameters"] * whole / job.mesh.size


def _key(config: RunConfig) -> tuple:
    grpo = config.grpo
    mesh = dataclasses.astuple(config.mesh)
    return mesh, config.policy.remat, grpo.microbatch.rows, config.rollout.slots, grpo.staleness


def _changes(config: RunConfig, topology: Topology) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Configurations one step away, with the fields that differ."""
    mesh, shape = config.mesh, config.grpo.microbatch
    if config.policy.remat != "full":
        yield {"policy.remat": "full"}, config.replace(policy=dataclasses.replace(config.policy, remat="full"))
    if config.rollout.slots > 1:
        slots = max(1, config.rollout.slots // 2)
        yield {"rollout.slots": slots}, config.replace(rollout=dataclasses.replace(config.rollout, slots=slots))
    if config.grpo.staleness and not mesh.rollout_devices:  # lanes of several hosts need it
        yield {"grpo.staleness": 0}, config.replace(grpo=dataclasses.replace(config.grpo, staleness=0))
    ways = Job.ways(Job(config, topology).mesh)
    if shape.rows > ways:
        yield _with_rows(config, ways, {})
    size = len(topology.devices) - mesh.rollout_devices * topology.hosts
    for axis in ("fsdp", "tensor", "expert"):
        wider = dataclasses.replace(mesh, **{axis: 2 * getattr(mesh, axis)})
        fields = {f"mesh.{axis}": getattr(wider, axis)}
        if wider.fsdp * wider.tensor * wider.expert > size and axis != "fsdp" and wider.fsdp % 2 == 0:
            wider = dataclasses.replace(wider, fsdp=wider.fsdp // 2)
            fields["mesh.fsdp"] = wider.fsdp
        fixed = wider.fsdp * wider.tensor * wider.expert
        if size % fixed or (axis == "expert" and not config.policy.experts):
            continue
        if wider.data != -1:
            wider = dataclasses.replace(wider, data=size // fixed)
            fields["mesh.data"] = wider.data
        ways = size // (wider.tensor * wider.expert)
        yield _with_rows(config.replace(mesh=wider), max(ways, shape.rows // ways * ways), fields)


def _with_rows(config: RunConfig, rows: int, fields: dict[str, Any]) -> tuple[dict[str, Any], RunConfig]:
    """The micro-batch with other rows, which go with the mesh."""
    if rows == config.grpo.microbatch.rows:
        return fields, config
    shape = dataclasses.replace(config.grpo.microbatch, rows=rows)
    changed = config.replace(grpo=dataclasses.replace(config.grpo, microbatch=shape))
    return fields | {"grpo.microbatch.rows": rows}, changed


def _activations(job: Job) -> float:
    """Bytes of activations on a chip, roughly: what every layer keeps, and what one works with."""
    shape, policy, tensor = job.config.grpo.microbatch, job.config.policy, job.mesh.shape["tensor"]
    tokens = shape.rows * shape.row_length / job.ways(job.mesh)
    whole, split = _widths(policy)
    layer = whole + split / tensor
    kept = {"none": layer, "dots": 3 * policy.width + split / tensor / 2, "full": policy.width}[policy.remat]
    return tokens * np.dtype(policy.dtype).itemsize * (layer + policy.layers * kept)


def _widths(policy: PolicyConfig) -> tuple[float, float]:
    """Entries of a token in a layer that every chip of a tensor group has, and those that it splits."""
    kinds = mixers(policy)
    split = 0.0
    if ATTENTION in kinds:
        split = 5 * policy.heads * policy.head_dim + 4 * policy.kv_heads * policy.head_dim
    if DELTA in kinds:  # float32
        split = max(
            split,
            8 * (2 * policy.delta_key_heads * policy.delta_key_dim + policy.delta_value_heads * policy.delta_value_dim),
        )
    split += 4 * (policy.mlp_width + policy.experts_per_token * policy.expert_width + policy.shared_expert_width)
    return 4 * policy.width + 6 * policy.experts_per_token * policy.width, split
