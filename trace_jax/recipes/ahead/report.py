"""From what the compiler says of every program to memory, time and a verdict for one chip."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trace_jax.recipes.ahead import memory, work
from trace_jax.recipes.ahead.analysis import Compiled
from trace_jax.recipes.ahead.hlo import Collective, by_axis
from trace_jax.recipes.ahead.programs import Job, Program

HEADROOM = 0.05  # share of the memory that stays free: the runtime's own, and what fragmentation takes
SHOWN = 5  # collectives


def too_large(job: Job) -> bool:
    """Whether what stays in memory is more than a chip has, whatever the programs need."""
    held, _ = memory.resident(job)
    return max(memory.phases(job, held, {"learner": 0, "sampler": 0}).values()) > job.topology.chip.hbm_bytes


def summarise(job: Job, programs: Sequence[Program], compiled: Mapping[str, Compiled]) -> dict[str, Any]:
    """The report of a run on a topology.

    Args:
        programs: those that were compiled, none of a run that is `too_large`.
        compiled: by name.

    Returns:
        `fits`, `hbm_bytes_per_chip`, `flops` (of the model in an optimizer step, all chips), `collective_bytes` (that a
        chip receives in a step), `roofline_step_s`, `mfu_bound`; details under `memory`, `programs`, `collectives`,
        `counts`, `sampler`, `chip`, `notes`.
    """
    chip, config = job.topology.chip, job.config
    held, no_sampler = memory.resident(job)
    own = job.sampling_mesh is not job.mesh
    figures = {p.name: _program(job, p, compiled) for p in programs if p.role == "learner" or p.name == "probe"}
    figures |= _sampler(programs, compiled)
    temporaries = {
        role: max((f["beside_arguments"] for n, f in figures.items() if f["role"] == role), default=0.0)
        for role in ("learner", "sampler")
    }
    kinds = {name: held.get(name, 0) for name in (*memory.LEARNER, *memory.SAMPLER)}
    learner = sum(kinds[n] for n in memory.LEARNER) + temporaries["learner"]
    sampler = sum(kinds[n] for n in memory.SAMPLER) + temporaries["sampler"]
    phases = memory.phases(job, held, temporaries)
    total = max(phases.values())
    steps = [f for f in figures.values() if f["role"] == "learner"]
    seconds = sum(f["runs"] * f["roofline_s"] for f in steps)
    flops = _step_flops(job)
    mfu = flops / (seconds * chip.flops * job.mesh.size) if seconds else 0.0
    known = all(f["refused"] is None for f in figures.values())
    room = 1 - total / chip.hbm_bytes
    gathers = _gathers(job, compiled, programs) if programs else None
    return {
        "fits": bool(known and room >= HEADROOM and no_sampler is None),
        "hbm_bytes_per_chip": int(total),
        "flops": flops,
        "collective_bytes": sum(f["runs"] * f["collective_bytes"] for f in steps) if programs else None,
        "roofline_step_s": seconds if programs else None,
        "mfu_bound": mfu if programs else None,
        "estimate": job.topology.estimate,
        "config": config.name,
        "topology": job.topology.name,
        "mesh": dict(job.mesh.shape),
        "sampling_mesh": dict(job.sampling_mesh.shape) if own else None,
        "remat": config.policy.remat,
        "microbatch": [config.grpo.microbatch.rows, config.grpo.microbatch.row_length],
        "headroom": room,
        "memory": {
            **kinds,
            "learner_temporaries": int(temporaries["learner"]),
            "sampler_temporaries": int(temporaries["sampler"]),
            "learner": int(learner),
            "sampler": int(sampler),
            "phases": {name: int(size) for name, size in phases.items()},
            "limit": int(chip.hbm_bytes),
        },
        "no_sampler": no_sampler,
        "counts": {
            "sequences": job.sequences,
            "context": config.rollout.context,
            "micro_batches": job.micro_batches,
            "optimizer_steps": config.grpo.iterations,
            "slots_per_lane": job.slots,
        },
        "programs": figures,
        "collectives": {
            p.name: _collectives(compiled[p.name].collectives) for p in programs if p.role == "learner"
        },
        "gathers": gathers,
        "chip": {
            name: getattr(chip, name)
            for name in (
                "name", "flops", "hbm_bandwidth", "link_bandwidth", "network_bandwidth", "per_host", "source"
            )
        },
    }  # fmt: skip


def _program(job: Job, program: Program, compiled: Mapping[str, Compiled]) -> dict[str, Any]:
    """Time and memory of one run of a program of all layers."""
    said, chip = compiled[program.name], job.topology.chip
    mesh = job.mesh_of(program)
    done = _work(job, program)
    link, network = _link_seconds(said.collectives, mesh, job)
    terms = {
        "compute": max(done.executed, said.multiplied or 0.0) / chip.flops,
        "memory": (said.traffic or 0.0) / chip.hbm_bandwidth,
        "links": link,
        "network": network,
    }
    return {
        "role": program.role,
        "runs": program.runs,
        "model_flops": done.model,
        "executed_flops_per_chip": done.executed,
        "counted_flops_per_chip": said.counted_flops,
        "multiplied_flops_per_chip": said.multiplied,
        "hbm_traffic_per_chip": said.traffic,
        "collective_bytes": sum(c.moved * c.runs for c in said.collectives),
        "collective_bytes_by_axis": by_axis(said.collectives),
        "uncounted_loops": sum(not c.known for c in said.collectives),
        "seconds": terms,
        "roofline_s": max(terms.values()),
        "serial_s": sum(terms.values()),
        "arguments": said.arguments,
        "outputs": said.outputs,
        "aliased": said.aliased,
        "temporaries": said.temporaries,
        "beside_arguments": said.beside_arguments,
        "refused": said.refused,
        "compile_seconds": said.seconds,
    }


def _step_flops(job: Job) -> float:
    """Of the model in one step on trajectories that fill their context."""
    shape, policy, context = job.config.grpo.microbatch, job.config.policy, job.config.rollout.context
    tokens = job.micro_batches * shape.rows * shape.row_length * job.config.grpo.iterations
    return work.training(policy, job.vocab_size, tokens, context, dict(job.mesh.shape)).model


def _work(job: Job, program: Program) -> work.Work:
    config, mesh = job.config, dict(job.mesh.shape)
    context, policy = config.rollout.context, config.policy
    if program.name == "accumulate":
        shape = config.grpo.microbatch
        return work.training(policy, job.vocab_size, shape.rows * shape.row_length, context, mesh)
    if program.name == "score":
        shape = config.grpo.microbatch
        found = work.scoring(policy, job.vocab_size, shape.rows * shape.row_length, context, mesh)
        return work.Work(0.0, found.executed)  # the objective's own cost, no FLOPs of the model's training
    if program.name == "probe":
        shape, mesh = config.grpo.turn_credit.microbatch, dict(job.mesh_of(program).shape)
        return work.scoring(policy, job.vocab_size, shape.rows * shape.row_length, context, mesh)
    return work.Work(0.0, 0.0)


def _link_seconds(found: Sequence[Collective], mesh: Mesh, job: Job) -> tuple[float, float]:
    """Seconds that a chip's links, and the network between nodes, take for what it receives."""
    link = network = 0.0
    for c in found:
        seconds = c.moved * c.runs
        if job.topology.estimate and _crosses(mesh, c.axes, job):
            network += seconds / job.topology.chip.network_bandwidth
        else:
            link += seconds / job.topology.chip.link_bandwidth
    return link, network


def _crosses(mesh: Mesh, axes: str, job: Job) -> bool:
    """Whether a group of chips lies in several nodes. A slice of TPUs is one node: links join all of it."""
    chosen = axes.split("+")
    index = tuple(slice(None) if name in chosen else 0 for name in mesh.axis_names)
    return len({job.topology.host_of(d) for d in np.ravel(mesh.devices[index])}) > 1


def _sampler(programs: Sequence[Program], compiled: Mapping[str, Compiled]) -> dict[str, Any]:
    """Prefill and decoding, which no step counts."""
    result: dict[str, Any] = {}
    for name in (p.name for p in programs if p.name in ("prefill", "decode")):
        said = compiled[name]
        result[name] = {
            "role": "sampler",
            "runs": 0,
            "model_flops": 0.0,
            "beside_arguments": said.beside_arguments,
            "arguments": said.arguments,
            "hbm_traffic_per_chip": said.traffic or 0.0,
            "collective_bytes": sum(c.moved * c.runs for c in said.collectives),
            "roofline_s": 0.0,
            "refused": said.refused,
            "compile_seconds": said.seconds,
        }
    return result


def _collectives(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """The largest ones, equal ones together."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in found:
        groups[c.kind, c.axes, c.ways, c.bytes, c.in_loop, c.known].append(c)
    rows = [
        {
            "kind": kind, "axes": axes, "ways": ways, "bytes": size, "runs": sum(c.runs for c in same),
            "in_loop": in_loop, "known": known, "moved": sum(c.moved * c.runs for c in same), "origin": same[0].origin,
        }
        for (kind, axes, ways, size, in_loop, known), same in groups.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda r: -r["moved"])[:20]


def _gathers(job: Job, compiled: Mapping[str, Compiled], programs: Sequence[Program]) -> dict[str, Any]:
    """Whether weights are gathered layer by layer: the largest gather of the gradient, and what one layer has."""
    wide = 2 if job.config.policy.dtype == "bfloat16" else 4
    base = jax.tree_util.tree_leaves_with_path(job.base(job.mesh))
    axes = jax.tree.leaves(_axes(job), is_leaf=lambda n: isinstance(n, tuple))
    layer = single = 0.0
    for (_, array), names in zip(base, axes, strict=True):
        size = wide * math.prod(array.shape)
        if names[0] == "layers":
            layer += size / array.shape[0]
        else:
            single = max(single, size)
    period = len(job.config.policy.mixers)
    found = [c for c in compiled["accumulate"].collectives if c.kind == "all-gather"]
    outside = [c.bytes for c in found if not c.in_loop]
    inside = [c.bytes for c in found if c.in_loop]
    limit = max(single, layer * period)
    return {
        "layer_bytes": layer,
        "embedding_bytes": single,
        "largest_in_layers": max(inside, default=0.0),
        "largest_outside": max(outside, default=0.0),
        "parameter_sized_outside": max(outside, default=0.0) > 1.01 * single or max(inside, default=0.0) > 1.01 * limit,
    }


def _axes(job: Job) -> Any:
    from trace_jax.policy.transformer import logical_axes

    return logical_axes(job.model)
