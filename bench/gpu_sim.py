"""Simulator throughput on an accelerator, recorded as JSON: the table of `trace-jax bench sim`, and a sweep of how many
episodes are computed together.

    python bench/gpu_sim.py                # needs an accelerator; writes bench/results/sim-<device>-<date>.json
    python bench/gpu_sim.py --tiny         # seconds on a CPU, to see that the script works; writes nothing
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp

from trace_jax import bench
from trace_jax.bench import measure, sim, sim_programs
from trace_jax.config import RunConfig, SimulatorConfig
from trace_jax.simulator.oracle import OracleParams, verify_one
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import stream_key

WIDTHS = (64, 256, 1024, 4096, 16384)
SWEEP_BATCH = 65536  # campaign-episodes of one call, 2 GB of arrays


def sweep(config: SimulatorConfig, batch: int, widths: tuple[int, ...], repeats: int) -> list[dict[str, float]]:
    """Episodes a second by block width; the widths take turns, so that clocks and heat meet all alike."""
    raw = sim_programs.raw(config)

    def verified(*row):
        episode = raw(*row)
        return episode, verify_one(episode, OracleParams())

    programs = {
        (width, name): sim_programs.in_blocks(one, jax.local_devices()[:1], width)
        for width in widths
        if batch % width == 0
        for name, one in (("raw", raw), ("verified", verified))
    }
    rows = (jnp.arange(batch, dtype=jnp.int32), jnp.arange(batch, dtype=jnp.int32) % 4, jnp.zeros(batch, jnp.int32))
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in programs}
    for _ in range(repeats + 1):
        for key, program in programs.items():
            seconds[key].append(measure.timed(lambda: program(stream_key(0, "bench"), SimulatorParams(), *rows)))  # noqa: B023
    rate = {key: batch / statistics.median(times[1:]) for key, times in seconds.items()}  # the first one compiles
    return [
        {"width": width, "raw_episodes_per_s": rate[width, "raw"], "verified_episodes_per_s": rate[width, "verified"]}
        for width in dict.fromkeys(w for w, _ in programs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on whatever device there is")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    config, batch, widths, repeats = RunConfig(), SWEEP_BATCH, WIDTHS, options.repeats
    if options.tiny:
        config = RunConfig(simulator=SimulatorConfig(days=8, segments=16, siblings=1))
        batch, widths, repeats = 256, (64, 128), 1
        sim.BATCHES, sim.STREAM = (256,), (1, 2)
    elif jax.default_backend() == "cpu":
        parser.error("no accelerator here: use `trace-jax bench sim` for a CPU, or --tiny to try the script")
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "sweep": sweep(config.simulator, batch, widths, repeats),
        **bench.run("sim", config, repeats=repeats),
    }
    print(bench.text(result))
    print(json.dumps(result))
    if not options.tiny:
        device = re.sub(r"\W+", "-", result["machine"]["device"]).strip("-").lower()
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"sim-{device}-{result['date'][:10]}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
