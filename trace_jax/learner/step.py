"""The optimizer step: token streams in, new parameters out. It knows no task, no model and no algorithm.

Gradients of loss *sums* are accumulated over micro-batches in float32, then divided once by the accumulated
denominator, clipped by their global norm and applied. Three programs are compiled, whatever the number of
micro-batches: one that makes zeros, `accumulate` (once for each shape of a micro-batch) and `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from trace_jax.config import OptimizerConfig
from trace_jax.learner import metrics as reporting
from trace_jax.learner import sharding
from trace_jax.learner.objectives import Objective
from trace_jax.learner.packing import LearnerBatch
from trace_jax.policy import lora
from trace_jax.policy.transformer import token_logprobs

CHUNK = 1024  # trained tokens of a device whose scores over the vocabulary exist at a time
Params = Any  # any pytree of float arrays
# (params, batch) -> log-prob of ids[t] given the tokens of its sequence before t (0 on its first token), and the
# entropy of the distribution it was drawn from; both [rows, time], float32; outside `loss_mask` they may be anything.
# Of a mixture of experts also how many tokens each of them had, [layers, experts].
LogprobFn = Callable[[Params, LearnerBatch], tuple[Float[Array, "..."], ...]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything an optimizer step changes.

    Attributes:
        step: optimizer steps taken; the learning rate is a function of it.
        params: float32 parameters.
        opt_state: Adam moments and count.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any


def transformer_logprobs(graphdef: nnx.GraphDef, temperature: float = 1.0, chunk: int = CHUNK) -> LogprobFn:
    """`LogprobFn` of a `policy.Transformer` split by `nnx.split(model, nnx.Param)`, or of adapters on it or a gate over
    them (`lora.Frozen`; the gate's batches have a `lock`); 0 outside `loss_mask`.

    Args:
        temperature: the one the trajectories were sampled at, so that both sides mean the same distribution; of a
            truncated one, a batch's `kept` says what was left.
        chunk: tokens of a device that are scored at a time.
    """

    def logprob_fn(params, batch):
        base, adapters = lora.parts(params, lock=batch.lock)
        model, placement = nnx.merge(graphdef, base), sharding.placement()
        experts = None if batch.experts is None else jnp.moveaxis(batch.experts.astype(jnp.int32), 2, 0)
        passed = model.run(batch.ids, batch.positions, batch.segments, placement, adapters=adapters, experts=experts)
        before = jnp.pad(batch.segments[:, :-1], ((0, 0), (1, 0)))
        inside = batch.loss_mask & (batch.segments > 0) & (batch.segments == before)
        # the hidden state of token t predicts token t + 1: score the next id, then move the result to where that id is
        targets, kept, wanted = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), (batch.ids, batch.kept, inside))
        scored = token_logprobs(
            model, passed.hidden, targets, temperature, kept=kept, wanted=wanted, chunk=chunk, placement=placement
        )
        load = () if passed.load is None else (passed.load,)
        return (*(jnp.roll(x, 1, axis=1) for x in scored), *load)

    return logprob_fn


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
    """Linear warm-up (step 0 already moves), then constant, or a cosine down to `final_fraction` at `total_steps`."""

    def schedule(step):
        warm = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
        if config.schedule == "constant":
            return config.learning_rate * warm
        progress = jnp.clip((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return config.learning_rate * warm * (config.final_fraction + (1.0 - config.final_fraction) * cosine)

    return schedule


def adamw(config: OptimizerConfig, decay: Any) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) before the learning rate; `decay` is a tree of bools: what weight decay applies to."""
    return optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay),
    )


class Learner:
    """Compiled train step for one objective on one mesh.

        learner = Learner(logprob_fn, objective, config.optimizer, total_steps, mesh, axes)
        state = learner.init(params)
        state, metrics = learner.step(state, pack(sequences, row_length, rows))

    Micro-batches may have several shapes; each compiles a program. `step` consumes the state it is given (its buffers
    are donated): hand the sampler the parameters of the *returned* state, and copy parameters that must survive (a
    reference policy).
    """

    def __init__(
        self,
        logprob_fn: LogprobFn,
        objective: Objective,
        optimizer: OptimizerConfig,
        total_steps: int,
        mesh: Mesh,
        axes: Any,
        frozen: Any = None,
    ):
        """
        Args:
            total_steps: length of the schedule, optimizer steps.
            axes: tree of the parameters with the tuple of logical axis names of each (`transformer.logical_axes`).
            frozen: arrays on the mesh that are used and never changed, as the base of adapters. `logprob_fn` is then
                given the pair of parameters and these.
        """
        self._frozen = frozen
        self.mesh = mesh
        self.axes = axes
        self._logprob_fn = logprob_fn
        self._objective = objective
        self._config = optimizer
        self._schedule = learning_rate(optimizer, total_steps)
        # weight decay acts on matrices, not on gains: a gain has one axis besides the stacked layers
        self._transform = adamw(
            optimizer,
            lambda params: jax.tree.map(lambda _, names: len([n for n in names if n != "layers"]) > 1, params, axes),
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._score = jax.jit(
            lambda params, frozen, batch: self._on_mesh(logprob_fn)(_whole(params, frozen), batch)[0],
            out_shardings=self._replicated,
        )
        self._programs: tuple[Any, Any, Any] | None = None
        self._mean = jax.jit(_mean)

    def init(self, params: Params) -> TrainState:
        """Fresh state on the mesh; the given parameters are copied and stay usable."""
        params = self.place(params)
        shapes = self.state_like(params)
        opt_state = jax.jit(self._transform.init, out_shardings=jax.tree.map(lambda s: s.sharding, shapes.opt_state))
        return TrainState(
            step=jax.device_put(jnp.zeros((), jnp.int32), self._replicated), params=params, opt_state=opt_state(params)
        )

    def place(self, params: Params) -> Params:
        """A copy of parameters on the mesh, e.g. of the reference policy."""
        return sharding.place(params, sharding.shardings(params, self.axes, self.mesh))

    def state_like(self, params: Params) -> TrainState:
        """Shapes, types and shardings of the state, for restoring a checkpoint without making one first."""
        param_shardings = sharding.shardings(params, self.axes, self.mesh)
        opt_state = jax.eval_shape(self._transform.init, params)
        opt_shardings = sharding.like_params(opt_state, params, param_shardings, self.mesh)

        def shape(a, s):
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)

        return TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated),
            params=jax.tree.map(shape, params, param_shardings),
            opt_state=jax.tree.map(shape, opt_state, opt_shardings),
        )

    def step(
        self, state: TrainState, batches: Sequence[LearnerBatch], denominator: float = 0.0
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step over all micro-batches together.

        Args:
            denominator: of sequences that carry no gradient and were left out of the batches (`credit.grpo_sequences`);
                it counts in the mean.

        Returns:
            The new state and the metrics of `metrics.finish`, plus `grad_norm` (before clipping), `learning_rate` and
            `skipped` (1 when nothing was trained on or the gradient was not finite: parameters and moments stay).

        Raises:
            ValueError: no micro-batch.
            ConfigError: the rows do not split over the mesh.
        """
        total = self._accumulated(state.params, batches)
        _, _, apply = self._programs
        state, results = apply(state, total, np.float32(denominator))
        report, loss, whole, rest = jax.device_get(results)
        numbers = reporting.finish(report, float(loss), float(whole))
        return state, numbers | {k: float(v) for k, v in rest.items()}

    def gradients(self, params: Params, batches: Sequence[LearnerBatch], denominator: float = 0.0) -> Params:
        """The gradient of the mean loss that `step` would apply, before clipping: float32, placed like the parameters.

        Args:
            denominator: see `step`.
        """
        total = self._accumulated(params, batches)
        return self._mean(total["grads"], total["denominator"] + np.float32(denominator))

    def lowered(self, params: Params, batch: LearnerBatch) -> jax.stages.Lowered:
        """The accumulation of one micro-batch, for its memory, its collectives, its FLOPs: see `jax.stages`."""
        batch = sharding.place_batch(batch, self.mesh)
        zeros, accumulate, _ = self._programs or self._compile(params, batch)
        return accumulate.lower(params, self._frozen, jax.eval_shape(zeros), batch)

    def lowered_ahead(self, params: Params, batch: LearnerBatch) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """The programs of a train step for devices that need not be there; nothing is allocated.

        Args:
            params, batch: shapes alone will do (`jax.ShapeDtypeStruct`).

        Returns:
            `accumulate` (one micro-batch), `apply` (the update) and `score` (log-probs under other parameters); each
            is lowered when it is called.
        """
        state = self.state_like(params)
        batch = sharding.batch_like(batch, self.mesh)
        zeros, accumulate, apply = self._programs or self._compile(state.params, batch)
        total = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated), jax.eval_shape(zeros)
        )
        total["grads"] = jax.tree.map(
            lambda a, p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p.sharding), total["grads"], state.params
        )
        left_out = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
        return {
            "accumulate": lambda: accumulate.lower(state.params, self._frozen, total, batch),
            "apply": lambda: apply.lower(state, total, left_out),
            "score": lambda: self._score.lower(state.params, self._frozen, batch),
        }

    def logprobs(self, params: Params, batches: Sequence[LearnerBatch]) -> list[Float[np.ndarray, "rows time"]]:
        """Log-probs of every token of every micro-batch under some parameters; `packing.unpack` undoes the packing."""
        return self._scored(params, [replace(b, loss_mask=b.segments > 0) for b in batches])

    def with_old(self, params: Params, batches: Sequence[LearnerBatch]) -> list[LearnerBatch]:
        """The micro-batches with `old_logprobs`, the denominator of the ratio, of the learner's own: call it with the
        parameters before the first update on them. `behaviour_logprobs` stay those of the sampler."""
        scored = self._scored(params, batches)
        return [replace(b, old_logprobs=s) for b, s in zip(batches, scored, strict=True)]

    def with_reference(self, params: Params, batches: Sequence[LearnerBatch]) -> list[LearnerBatch]:
        """The micro-batches with the log-probs the KL penalty compares to: those of a frozen policy (see `place`), or
        of what adapters are trained on (None)."""
        scored = self._scored(params, batches)
        return [replace(b, reference_logprobs=s) for b, s in zip(batches, scored, strict=True)]

    def compilations(self) -> int:
        """How many programs the train step has compiled so far: 2 and one for each shape of a micro-batch."""
        return sum(p._cache_size() for p in self._programs or ())

    def _scored(self, params, batches):
        """Log-probs of the trained tokens."""
        return [np.asarray(self._score(params, self._frozen, sharding.place_batch(b, self.mesh))) for b in batches]

    def _accumulated(self, params, batches):
        """Sums over micro-batches of gradients, losses, denominators and metrics."""
        if not batches:
            raise ValueError("an optimizer step needs at least one micro-batch")
        total = None
        for batch in batches:
            placed = sharding.place_batch(batch, self.mesh)
            zeros, accumulate, _ = self._programs or self._compile(params, placed)
            total = accumulate(params, self._frozen, zeros() if total is None else total, placed)
        return total

    def _on_mesh(self, function):
        """Functions of the policy find the mesh they are traced for."""

        def traced(*args):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return traced

    def _compile(self, params: Params, batch: LearnerBatch):
        @self._on_mesh
        def gradient(params, frozen, batch):
            def loss(params):
                logprobs, entropies, *load = self._logprob_fn(_whole(params, frozen), batch)
                total, denominator, sums = self._objective(logprobs, entropies, batch)
                return total, (denominator, sums | ({"experts": load[0]} if load else {}))

            (total, (denominator, sums)), grads = jax.value_and_grad(loss, has_aux=True)(params)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            return {"grads": grads, "loss": total, "denominator": denominator, "sums": sums}

        def accumulate(params, frozen, total, batch):
            new = gradient(params, frozen, batch)
            return {
                "grads": jax.tree.map(jnp.add, total["grads"], new["grads"]),
                "loss": total["loss"] + new["loss"],
                "denominator": total["denominator"] + new["denominator"],
                "sums": reporting.combine(total["sums"], new["sums"]),
            }

        def apply(state, total, left_out):
            denominator = total["denominator"] + left_out
            grads = _mean(total["grads"], denominator)
            norm = optax.tree.norm(grads)
            scale = jnp.minimum(1.0, self._config.clip_norm / jnp.maximum(norm, 1e-30))
            grads = jax.tree.map(lambda g: g * scale, grads)
            updates, opt_state = self._transform.update(grads, state.opt_state, state.params)
            rate = self._schedule(state.step)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            good = (denominator > 0) & jnp.isfinite(norm)

            def keep(new, old):
                return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)

            new = TrainState(state.step + 1, keep(params, state.params), keep(opt_state, state.opt_state))
            rest = {"grad_norm": norm, "learning_rate": rate, "skipped": 1.0 - good}
            return new, (total["sums"], total["loss"], denominator, rest)

        shapes = jax.eval_shape(gradient, params, self._frozen, batch)
        state_shardings = jax.tree.map(lambda a: a.sharding, self.state_like(params))
        total_shardings = jax.tree.map(lambda _: self._replicated, shapes)
        total_shardings["grads"] = state_shardings.params
        zeros = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), out_shardings=total_shardings
        )
        accumulate = jax.jit(accumulate, donate_argnums=2, out_shardings=total_shardings)
        apply = jax.jit(apply, donate_argnums=0, out_shardings=(state_shardings, self._replicated))
        self._programs = (zeros, accumulate, apply)
        return self._programs


def _whole(params, frozen):
    """What `logprob_fn` is given."""
    return params if frozen is None else (params, frozen)


def _mean(total, denominator):
    return jax.tree.map(lambda x: x / jnp.where(denominator > 0, denominator, 1.0), total)
