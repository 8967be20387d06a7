"""One accelerator, in eight minutes: the simulator, decoding, the learner at 16k tokens and the probe.

    python bench/gpu_pods.py [--minutes 8]    # writes bench/results/pods-<device>-<date>.json after every part
    python bench/gpu_pods.py --tiny           # a minute or two of a CPU, to see that it works; writes nothing

The policy has the shapes of configs/qwen3_0_6b.yaml and random weights: speed does not depend on their values. Parts
run in the order below, each as soon as the one before it ended; one that would begin after the time is up is left out
and listed under `left_out`. Aims on one H200: at least 12,000 training tokens/s, at least a million raw
campaign-episodes/s.

    simulator    campaign-episodes a second, raw and with the oracle
    learner      tokens a second of whole optimizer steps, rows of 16,384 tokens; `mfu` of the published peak
    decode       sampled tokens a second, every slot taken, prompts fed before
    probe        trajectories a second of turn credit, packed
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax import config_io
from trace_jax.bench import learner_batches, measure, rollout_drive, sim_programs
from trace_jax.config import BatchConfig, RunConfig, SimulatorConfig
from trace_jax.learner import flops, objectives, sharding
from trace_jax.learner.probe import Probe, Question, transformer_scores
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.rollout.engine import Engine
from trace_jax.simulator import stream
from trace_jax.simulator.oracle import OracleParams, verify_one
from trace_jax.simulator.params import SimulatorParams

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of all parts. `turn` tokens are sampled for each of `slots` rows after a prompt."""

    episodes: int = 65536
    block: int = 4096
    row_length: int = 16384
    rows: int = 1
    micro_batches: int = 4
    slots: int = 64
    prompt: int = 1024
    turn: int = 256
    turns: int = 12
    repeats: int = 3


TINY = Sizes(128, 64, 256, 1, 2, 4, 32, 8, 3, 1)


def simulator(config: SimulatorConfig, sizes: Sizes) -> dict[str, float]:
    """Rates of one block width."""
    raw = sim_programs.raw(config)

    def verified(*row):
        episode = raw(*row)
        return episode, verify_one(episode, OracleParams())

    count = sizes.episodes
    index = jnp.arange(count, dtype=jnp.int32)
    rows = (index, index % 4, jnp.zeros(count, jnp.int32))
    found = {}
    for name, one in (("raw", raw), ("verified", verified)):
        program = sim_programs.in_blocks(one, jax.local_devices()[:1], sizes.block)
        seconds = _seconds(lambda: program(stream.stream_key(0, "bench"), SimulatorParams(), *rows), sizes)  # noqa: B023
        found[f"{name}_episodes_per_s"] = count / seconds
    return found


def learner(config: RunConfig, model: Transformer, sizes: Sizes) -> dict[str, float]:
    """Whole GRPO steps on full rows."""
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(config.mesh, jax.local_devices()[:1])
    objective = objectives.grpo_objective(config.grpo)
    made = Learner(transformer_logprobs(graphdef), objective, config.grpo.optimizer, 1000, mesh, logical_axes(model))
    shape = learner_batches.Shape(rows=sizes.rows, row_length=sizes.row_length)
    batches = [b for seed in range(sizes.micro_batches) for b in learner_batches.full(shape, model.vocab_size, seed)]
    state = made.init(params)

    def step():
        nonlocal state
        state, metrics = made.step(state, batches)
        return metrics["loss"]

    seconds = _seconds(step, sizes)
    tokens = learner_batches.tokens(batches)
    work = tokens * flops.flops_per_token(config.policy, model.vocab_size, learner_batches.attended(batches))
    peak = flops.peak()
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "tokens_per_s": tokens / seconds, "step_seconds": seconds, "tokens": tokens,
        "mfu": None if peak is None else work / seconds / peak, "peak_bytes": memory.get("peak_bytes_in_use"),
    }  # fmt: skip


def decode(config: RunConfig, model: Transformer, sizes: Sizes) -> dict[str, float]:
    """One turn of every slot."""
    rollout = dataclasses.replace(config.rollout, slots=sizes.slots, context=sizes.prompt + sizes.turn + 1)
    engine = Engine(model, rollout, model.vocab_size)  # a stop token that is never drawn
    engine.set_params(nnx.state(model, nnx.Param), 0)
    shape = rollout_drive.Shape(prompt=sizes.prompt, turn=sizes.turn)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.vocab_size, sizes.prompt).astype(np.int32) for _ in range(sizes.slots)]
    taken = []
    for seed in range(sizes.repeats + 1):
        taken.append(rollout_drive.spent(engine, lambda: rollout_drive.drive(engine, shape, prompts, seed)))  # noqa: B023
    seconds = statistics.median(s for s, _ in taken[1:])
    stats = taken[-1][1]
    return {
        "sampled_tokens_per_s": sizes.slots * sizes.turn / seconds,
        "decode_tokens_per_s": stats.sampled_tokens / stats.decode_seconds,
        "prefill_tokens_per_s": stats.prefill_tokens / stats.prefill_seconds,
        "occupancy": stats.occupancy,
    }


def probe(config: RunConfig, model: Transformer, sizes: Sizes) -> dict[str, float]:
    """All boundaries of trajectories that fill a quarter of a row."""
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(config.mesh, jax.local_devices()[:1])
    length, rng = sizes.row_length // 4, np.random.default_rng(0)
    each = max(2, length // (2 * sizes.turns))
    ends = [length - each * (sizes.turns - k) for k in range(sizes.turns + 1)]
    answer = 40 if length > 1000 else 4
    batches = BatchConfig(length + (sizes.turns + 1) * (answer + 1), 1)
    asked = Probe(transformer_scores(graphdef), params, mesh, logical_axes(model), batches)

    def question():
        ids = rng.integers(0, model.vocab_size, length).astype(np.int32)
        return Question(ids, ends, [0], rng.integers(0, model.vocab_size, answer).tolist())

    questions = [question() for _ in range(4)]
    seconds = _seconds(lambda: asked(questions), sizes)
    return {"trajectories_per_s": len(questions) / seconds, "tokens": length, "boundaries": len(ends)}


def _seconds(work: Callable[[], Any], sizes: Sizes) -> float:
    """Median after a first one, which compiles."""
    times = [measure.timed(work) for _ in range(sizes.repeats + 1)]
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on whatever device there is")
    parser.add_argument("--minutes", type=float, default=8.0, help="no part begins later (default: 8)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if not args.tiny and jax.default_backend() == "cpu":
        parser.error("no accelerator here: --tiny tries the script on a CPU")
    config, sizes = config_io.load(ROOT / "configs" / "qwen3_0_6b.yaml", []), Sizes()
    if args.tiny:
        policy = RunConfig().policy
        config, sizes = config.replace(policy=dataclasses.replace(policy, vocab_size=512)), TINY
    config = config.replace(
        policy=dataclasses.replace(config.policy, max_length=max(config.policy.max_length, sizes.row_length))
    )
    world = SimulatorConfig(days=8, segments=16, siblings=1) if args.tiny else config.simulator
    begun = time.monotonic()
    model = nnx.jit(lambda: Transformer(config.policy, config.policy.vocab_size, rngs=nnx.Rngs(0)))()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "simulator": lambda: simulator(world, sizes),
        "learner": lambda: learner(config, model, sizes),
        "decode": lambda: decode(config, model, sizes),
        "probe": lambda: probe(config, model, sizes),
    }
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": measure.machine(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "trace-jax")},
        "sizes": dataclasses.asdict(sizes),
        "left_out": [],
    }
    path = args.out / (
        f"pods-{re.sub(r'[^a-z0-9]+', '-', jax.devices()[0].device_kind.lower())}-{result['date'][:10]}.json"
    )
    for name, part in parts.items():
        if time.monotonic() - begun > 60 * args.minutes:
            result["left_out"].append(name)
            continue
        start = time.monotonic()
        result[name] = part() | {"seconds_with_compilation": time.monotonic() - start}
        print(f"{name}: {result[name]}", flush=True)
        if not args.tiny:  # what is measured is kept, whatever happens to the next part
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
