"""`trace-jax compile`: what a run needs and takes on accelerators, before one is rented."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, RunConfig
from trace_jax.policy import kernels
from trace_jax.recipes.ahead import render, report, suggest
from trace_jax.recipes.ahead.analysis import Compiled, analyse
from trace_jax.recipes.ahead.programs import Job
from trace_jax.recipes.ahead.topology import parse
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress


def command(config: RunConfig, topology: str, rollout: bool = False, out: Path | None = None) -> dict[str, Any]:
    """Compiles the programs of a run for a topology, prints the report and returns it.

    Args:
        topology: see `topology.parse`.
        rollout: also the sampler's programs. Without them its memory is what its arrays take.
        out: directory for the report as `<config>.json` and `<config>.md`.

    Returns:
        `report.summarise`, and where the run does not fit `suggestion` (see `suggest.nearest`).

    Raises:
        ConfigError: an unknown topology, no libtpu, a mesh that the devices do not divide, a gate over adapters.
    """
    if config.lora.gate:
        raise ConfigError("`lora.gate` is not compiled ahead: leave it out, one adapter needs as much")
    devices, progress, interrupt = parse(topology), Progress(), Interrupt()
    job = Job(config, devices)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with interrupt:
        programs = job.learning()
        if rollout:
            job.place(job.model)  # refuses a lane that cannot be
            programs += job.sampling()
        if report.too_large(job):
            progress.note("nothing is compiled: what stays in a chip's memory is too much already")
            programs = []
        found: dict[str, Compiled] = {}
        with progress.bar("compile", len(programs)) as bar:
            for done, program in enumerate(programs):
                interrupt.check()
                progress.note(f"compiling {program.name} for {topology}; minutes, and longer on few cores")
                begun = time.perf_counter()
                mesh = job.mesh_of(program)
                with kernels.standing_in(partial(kernels.flash, interpret=True) if devices.estimate else None):
                    lowered = program.lower()
                said = analyse(lowered, dict(mesh.shape), topology, run=not devices.estimate)
                found[program.name] = said
                bar.update(done + 1, seconds=time.perf_counter() - begun, gigabytes=said.beside_arguments / 1e9)
        result = report.summarise(job, programs, found)
    if not result["fits"]:
        result["suggestion"] = suggest.nearest(config, devices, result)
    print(render.text(result), flush=True)
    if out is not None:
        render.write(result, out)
    return result
