"""The programs of a GRPO run on devices that need not be there, ready to be lowered; only shapes are made.

They are those of the run itself: `Learner.lowered_ahead`, `Probe.lowered_ahead` and the sampler's `Programs`, with the
shardings that the stages of a run would give their arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.config import ConfigError, PolicyConfig, RunConfig
from trace_jax.learner import packing, probe, sharding
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.roles import role_meshes, set_apart
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import lora
from trace_jax.policy.quantised import in_use, layout_in_use
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.recipes import processes
from trace_jax.recipes.ahead.topology import Topology
from trace_jax.rollout.placement import Place, check_compiled, lane_places, owners
from trace_jax.rollout.programs import ACCELERATOR_CHUNKS, Programs, State, cache_like
from trace_jax.rollout.sampling import Sampling

BLOCK = 128  # positions of a block of the cache on an accelerator
ANSWER = 128  # tokens of a gold answer with its scaffold, for the rows of a probe


@dataclass(frozen=True)
class Program:
    """One program of a run.

    Attributes:
        name: "accumulate", "apply", "score", "probe", "prefill" or "decode".
        role: "learner" or "sampler": whose devices it runs on.
        lower: traces it.
        runs: how often it runs in an optimizer step whose trajectories fill their context.
        arguments: of `arguments_by_kind`, the kinds that the program is given; the others lie beside it.
    """

    name: str
    role: str
    lower: Callable[[], jax.stages.Lowered]
    runs: float
    arguments: tuple[str, ...]


class Job:
    """A run's shapes on a topology."""

    def __init__(self, config: RunConfig, topology: Topology):
        """
        Raises:
            ConfigError: sizes that the devices do not divide, or what a run on such lanes refuses.
        """
        self.config, self.topology = config, topology
        self.vocab_size = config.policy.vocab_size or config.tokenizer.vocab_size
        self.mesh, self.sampling_mesh = role_meshes(config.mesh, topology.devices, topology.host_of)
        self.apart = set_apart(self.mesh, self.sampling_mesh)
        check_compiled(self.mesh.size, "the learner", "set `mesh.rollout_devices` to 0", topology.devices)
        packing.validate(config.grpo.microbatch, "grpo.microbatch", self.ways(self.mesh))
        processes.check_lanes(config, self.sampling_mesh, topology.host_of)
        if config.rollout.context > config.grpo.microbatch.row_length:
            raise ConfigError(
                f"`rollout.context` {config.rollout.context} does not fit rows of `grpo.microbatch.row_length` "
                f"{config.grpo.microbatch.row_length}: raise the second"
            )

    @staticmethod
    def ways(mesh: Mesh) -> int:
        """Parts that the rows of a batch are split into."""
        return mesh.shape["data"] * mesh.shape["fsdp"]

    # Shapes

    @cached_property
    def model(self) -> Transformer:
        """The policy without numbers."""
        return self._model(self.config)

    def _model(self, config: RunConfig) -> Transformer:
        return _shapes_of(config.policy, self.vocab_size)

    def base(self, mesh: Mesh, model: Transformer | None = None) -> Any:
        """Shapes of all parameters of a policy, on a mesh."""
        model = model or self.model
        like = nnx.state(model, nnx.Param)
        return on(like, sharding.shardings(like, logical_axes(model), mesh))

    def trained(self, config: RunConfig, model: Transformer) -> tuple[Any, Any]:
        """Shapes of what is trained, and its logical axes."""
        if not config.lora.rank:
            return nnx.state(model, nnx.Param), logical_axes(model)
        like = jax.eval_shape(lambda key: lora.init(config.policy, config.lora, key), jax.random.key(0))
        return like, lora.axes(config.policy, config.lora)

    def frozen(self, mesh: Mesh) -> lora.Frozen | None:
        """What adapters are trained on."""
        if not self.config.lora.rank:
            return None
        scale = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        return lora.Frozen(self.base(mesh), scale)

    @cached_property
    def learner(self) -> Learner:
        """The learner of the run."""
        logprobs = transformer_logprobs(nnx.graphdef(self.model), self.config.rollout.temperature)
        grpo = self.config.grpo
        _, axes = self.trained(self.config, self.model)
        return Learner(
            logprobs,
            grpo_objective(grpo),
            grpo.optimizer,
            grpo.steps * grpo.iterations,
            self.mesh,
            axes,
            self.frozen(self.mesh),
        )

    def batch(self) -> packing.LearnerBatch:
        """A micro-batch of the longest rows."""
        shape, policy = self.config.grpo.microbatch, self.config.policy
        experts = (policy.layers, policy.experts_per_token) if self.config.rollout.replay_routes else None
        like = packing.empty_batch(1, 1, self.config.rollout.top_k, experts)
        rows = (shape.rows, shape.row_length)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*rows, *a.shape[2:]), a.dtype), like)

    # Counts

    @property
    def sequences(self) -> int:
        """Trajectories of a step."""
        return self.config.grpo.prompts * self.config.grpo.group

    @property
    def micro_batches(self) -> int:
        """Of a step whose trajectories fill their context."""
        shape = self.config.grpo.microbatch
        rows = math.ceil(self.sequences / max(1, shape.row_length // self.config.rollout.context))
        return math.ceil(rows / shape.rows)

    # Programs

    def learning(self) -> list[Program]:
        """Programs of the learner, and of the probe where there is one."""
        grpo, times = self.config.grpo, self.config.grpo.iterations
        like, _ = self.trained(self.config, self.model)
        lower = self.learner.lowered_ahead(like, self.batch())
        found = [
            Program("accumulate", "learner", lower["accumulate"], self.micro_batches * times, LEARNING),
            Program("apply", "learner", lower["apply"], times, ("parameters", "moments", "gradients")),
        ]
        scored = (grpo.kl_coefficient > 0) + (grpo.old_policy == "learner")
        if scored:
            kinds = ("parameters", "base", "batch")
            found.append(Program("score", "learner", lower["score"], self.micro_batches * scored, kinds))
        if grpo.turn_credit.enabled:
            found.append(self._probe())
        return found

    def mesh_of(self, program: Program) -> Mesh:
        """The devices that a program runs on, by axis."""
        learns = program.role == "learner" or (program.name == "probe" and not self.apart)
        return self.mesh if learns else self.sampling_mesh

    def _probe(self) -> Program:
        shape, mesh = self.config.grpo.turn_credit.microbatch, self.sampling_mesh if self.apart else self.mesh
        packing.validate(shape, "grpo.turn_credit.microbatch", self.ways(mesh))
        like, axes = self.trained(self.config, self.model)
        params = on(like, sharding.shardings(like, axes, mesh))
        like_batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((shape.rows, shape.row_length), a.dtype), probe.empty_batch(1, 1)
        )
        batch = sharding.batch_like(like_batch, mesh)
        frozen = self.frozen(mesh)
        score = probe.scoring(probe.transformer_scores(nnx.graphdef(self.model)), mesh)
        each = self.config.rollout.context + self.config.rollout.max_turns * ANSWER
        rows = math.ceil(self.sequences * each / shape.row_length)
        return Program(
            "probe", "sampler", lambda: score.lower(params, frozen, batch), math.ceil(rows / shape.rows),
            ("probed", "base"),
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """Of a lane: processes that lead lanes have equal parts, and split them over theirs (`Workspace.engine`)."""
        led = Counter(found[0] for found in owners(self.sampling_mesh, self.topology.host_of))
        return max(math.ceil(math.ceil(self.config.rollout.slots / len(led)) / lanes) for lanes in led.values())

    def place(self, model: Transformer) -> Place:
        """Where a lane's arrays lie.

        Raises:
            ConfigError: heads that do not split.
        """
        like, axes = self.trained(self.config, model)
        around = None
        if self.config.lora.rank:
            whole = NamedSharding(self.sampling_mesh, PartitionSpec())
            base = nnx.state(model, nnx.Param)
            around = lora.Frozen(sharding.shardings(base, logical_axes(model), self.sampling_mesh), whole)
        layout = sharding.shardings(like, axes, self.sampling_mesh)
        layout, around = (layout_in_use(x, self.config.rollout.weights) for x in (layout, around))
        return lane_places(
            self.sampling_mesh,
            layout,
            self.config.policy.kv_heads,
            around,
            self.topology.host_of,
            self.topology.devices,
        )[0]

    def sampling(self) -> list[Program]:
        """Prefill and decoding of one lane with every slot full. They go through layers one by one, so they take longer
        to compile than the learner's. A few layers would not do: a compiler that has memory to spare spends it (28
        layers of Qwen3-0.6B need 2.4 GB in prefill; what 1 and 2 need would come to 50)."""
        config, model = self.config, self.model
        rollout = config.rollout
        like, _ = self.trained(config, model)
        place = self.place(model)
        one = NamedSharding(Mesh([place.device], ("one",)), PartitionSpec())
        whole = one if place.heads is None else NamedSharding(place.heads.mesh, PartitionSpec())

        def here(tree, where):
            return jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                tree,
                jax.tree.map(lambda _: whole, tree) if where is None else where,
            )

        dtype, weights = config.policy.dtype, rollout.weights
        params = here(in_use(like, dtype, weights), place.params)
        if config.lora.rank:
            frozen = lora.Frozen(nnx.state(model, nnx.Param), jax.ShapeDtypeStruct((1,), jnp.float32))
            params = (params, here(in_use(frozen, dtype, weights), place.frozen))
        cache = cache_like(config.policy, self.slots, rollout.context, rollout.cache_dtype, place.heads, whole, BLOCK)
        sampling = Sampling.of(rollout)
        programs = Programs(
            nnx.graphdef(model), 0, min(rollout.decode_steps, rollout.max_turn_tokens), rollout.replay_routes
        )

        def ints(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

        chunk, slots = ACCELERATOR_CHUNKS[0], self.slots
        state = State(token=ints(slots), position=ints(slots), left=ints(slots), adapter=ints(slots))
        seeds = jax.ShapeDtypeStruct((slots, 2), jnp.uint32, sharding=whole)
        rows = (ints(chunk.rows, chunk.width), *(ints(chunk.rows) for _ in range(4)))

        def prefill():
            return programs.prefill.lower(params, cache, *rows, heads=place.heads)

        def decode():
            return programs.lowered(params, cache, state, seeds, sampling, place.heads)

        kinds = ("sampled", "cache")
        return [
            Program("prefill", "sampler", prefill, 0, kinds),
            Program("decode", "sampler", decode, 0, kinds),
        ]


@lru_cache(maxsize=8)
def _shapes_of(policy: PolicyConfig, vocab_size: int) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(policy, vocab_size, rngs=nnx.Rngs(0)))


LEARNING = ("parameters", "base", "gradients", "batch")


def on(tree: Any, shardings: Any) -> Any:
    """Shapes of arrays that lie so."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings)


def bytes_of(tree: Any) -> int:
    """Bytes on each device of arrays that are split evenly."""
    return sum(
        a.dtype.itemsize * int(np.prod(a.sharding.shard_shape(a.shape), dtype=np.int64)) for a in jax.tree.leaves(tree)
    )
