"""The sampling engine: continuous batching with a key/value cache that is kept across turns.

A fixed number of slots holds the rows in flight. Slots are spread over lanes, each with a cache and a thread of its
own: one lane a device, or a group of devices that split the heads of the policy, so that lanes never wait for each
other. A process needs no other process to sample, unless a lane's devices lie in several (`spanning`). On CPU several
lanes share the device: one XLA program of this size keeps about one core busy. Within a lane slots are decoded in
groups of one fixed size.

Every token is drawn with a key made from its row's seed and its position, and every call has a fixed shape, so what a
row samples does not depend on the rows that are sampled beside it, or on when.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int

from trace_jax.config import ConfigError, RolloutConfig
from trace_jax.config_rules_policy import DELTA, mixers
from trace_jax.policy.cache import default_block
from trace_jax.policy.quantised import layout_in_use
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.calls import Calls
from trace_jax.rollout.generator import Deliver
from trace_jax.rollout.lane import Lane, LaneStats
from trace_jax.rollout.placement import Place, Weights, lane_places, owners
from trace_jax.rollout.programs import Programs, chunks, length_buckets
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.slots import Slots
from trace_jax.rollout.spanning import Announced, Channel, Follower

CPU_GROUP = 16  # slots decoded together on CPU, where a larger batch is no faster per row and idles more


@dataclass
class EngineStats(LaneStats):
    """Sums of `LaneStats` over lanes (seconds too: lanes run side by side).

    Attributes:
      swaps: times that other parameters were set.
    """

    swaps: int = 0

    @property
    def occupancy(self) -> float:
        """Share of decoded slots and steps that drew a token for a row."""
        return self.sampled_tokens / self.slot_steps if self.slot_steps else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """What was added since an earlier look."""
        return EngineStats(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    def figures(self) -> dict[str, float]:
        """Figures to log. How rows fell into calls depends on how long tools took, so these differ between runs."""
        return {
            "engine/occupancy": self.occupancy,
            "engine/decode_steps": float(self.decode_steps),
            "engine/prefill_tokens": float(self.prefill_tokens),
            "engine/shared_tokens": float(self.shared_tokens),
            "engine/refilled_tokens": float(self.refilled_tokens),
            "engine/decode_seconds": self.decode_seconds,
            "engine/prefill_seconds": self.prefill_seconds,
        }


class Engine:
    """Samples turns of many rows with one policy. Implements `generator.Generator`."""

    def __init__(
        self,
        model: Transformer,
        config: RolloutConfig,
        stop_id: int,
        *,
        lanes: int | None = None,
        mesh: Mesh | None = None,
        specs: Callable[[Mesh], Any] | None = None,
        reuse: bool = True,
        frozen: Any = None,
        frozen_specs: Callable[[Mesh], Any] | None = None,
        channel: Callable[[Place], Channel] | None = None,
    ):
        """Reads the structure of `model` and its present parameters.

        Args:
          model: the policy; its parameters, unless it is only their shapes, are the first to be used, later ones arrive
            through `set_params`.
          config: `slots` (of the lanes that this process leads), `context`, `decode_steps` and `cache_dtype` fix the
            shapes.
          stop_id: the token that ends a turn.
          lanes: independent batches that run at once, on a single device; by default one per core on CPU (at most 4)
            and 1 elsewhere.
          mesh: `data x fsdp x tensor x expert`; its devices in this process are divided into lanes of
            `tensor x expert` devices. None: the default device.
          specs: sharding of every parameter on a mesh, as the learner has it; needed when a lane has several devices.
          frozen, frozen_specs: what adapters work on, placed once, and its sharding on a mesh; `set_params` then takes
            the adapters, or the gate over adapters that are among what is frozen (`policy.lora.Frozen`).
          reuse: keep the cache across turns and share prefixes; without it every turn is fed from its first token.
          channel: makes what carries the calls of a lane that lies in several processes from the one that leads it to
            the others; needed when there is such a lane.

        Raises:
          ConfigError: the context is longer than the policy's positions; a mesh that the policy or the processes do not
            divide into lanes; fewer slots than lanes of several processes.
        """
        if config.context > model.cfg.max_length:
            raise ConfigError(
                f"rollout.context {config.context} exceeds policy.max_length {model.cfg.max_length}; lower the first"
            )
        structure, params = nnx.split(model)
        policy = model.cfg
        experts = (policy.layers, policy.experts_per_token) if config.replay_routes else None
        gate = (policy.layers, len(frozen.scale) + 1) if frozen is not None and frozen.pairs is not None else None
        recurrent = DELTA in mixers(policy)
        shapes = chunks()
        layout, around = (None if mesh is None or f is None else f(mesh) for f in (specs, frozen_specs))
        alone = mesh is None
        held = [layout_in_use(x, config.weights) for x in (layout, around)]
        places = [Place(jax.local_devices()[0])] if alone else lane_places(mesh, held[0], policy.kv_heads, held[1])
        self._weights = Weights(mesh, layout, policy.dtype, config.weights if frozen is None else "compute")
        if len(places) == 1 and places[0].heads is None:
            places *= max(1, min(_default_lanes() if lanes is None else lanes, config.slots))
        self._share = _share(mesh)
        followed = [place for place in places if not place.leads]
        places = [place for place in places if place.leads]
        spanning = [place for place in places if place.spans]
        if spanning and config.slots < len(places):
            raise ConfigError(
                f"rollout.slots leaves {config.slots} slots for the {len(places)} sampling lanes that a process leads: "
                "raise it, each lane needs one"
            )
        shares = [len(part) for part in np.array_split(np.arange(config.slots), min(len(places), config.slots) or 1)]
        most = CPU_GROUP if jax.default_backend() == "cpu" else max(shares)
        # One size for all groups, whatever their lane's share: the shape must not depend on the lane.
        self._group = -(-max(shares) // -(-max(shares) // most))
        self._programs = Programs(
            structure, stop_id, min(config.decode_steps, config.max_turn_tokens), config.replay_routes
        )
        self._context, self._slots, self._swaps = config.context, config.slots if places else 0, 0
        self._shapes = shapes
        self._lanes = [
            Lane(
                self._calls(policy, config, place, channel),
                config,
                Slots(share, self._group, config.context, shapes[0].width, recurrent, experts, gate),
                place,
                shapes,
                reuse,
            )
            for share, place in zip(shares, places, strict=False)
        ]
        self._followers = [
            Follower(Calls(self._programs, policy, config.cache_dtype, place), channel(place)) for place in followed
        ]
        self._places = places[: len(self._lanes)] + followed  # in the order of `_all_calls`
        self._free = list(shares)
        self._share_of = shares
        self._lane_of: dict[int, int] = {}
        self._last_prompts: dict[bytes, int] = {}
        self._frozen: list[Any] | None = None
        if frozen is not None:
            held = [replace(place, params=place.frozen) for place in self._places]
            self._frozen = Weights(mesh, around, policy.dtype, config.weights).place(frozen, held, copy=False)
        elif all(isinstance(x, jax.Array) for x in jax.tree.leaves(params)):
            self.set_params(params, 0)
        self._swaps = 0

    def set_params(self, params: nnx.State, version: int, *, copy: bool = False) -> None:
        """Parameters for everything sampled from now on (`nnx.state(model, nnx.Param)`, or adapters on them as
        `policy.lora.Frozen` says); `version` labels the turns.

        Takes effect between two device calls, also in the middle of a collection and of a turn: nothing is drained.
        What a row's cache holds of older parameters is fed anew before its next turn, or kept (`rollout.stale_cache`);
        turns that used it all the same are marked `stale`.

        Args:
          copy: for a learner that gives the arrays' memory away (donates them) while sampling goes on. Without it the
            arrays must stay alive until other parameters are set.
        """
        self.use(self.place(params, copy=copy), version)

    def place(self, params: nnx.State, *, copy: bool = False) -> list[Any]:
        """The parameters on the devices of every lane, for `use`. Processes that share a mesh all call this, in one
        order with whatever else runs on the whole mesh; `use` concerns nobody else."""
        return self._weights.place(params, self._places, copy)

    def use(self, placed: list[Any], version: int) -> None:
        """`set_params` with parameters that `place` has brought to the lanes."""
        self.version = version
        self._swaps += 1
        for i, (calls, mine) in enumerate(zip(self._all_calls(), placed, strict=True)):
            calls.weights = (mine if self._frozen is None else (mine, self._frozen[i]), version)

    def free(self) -> None:
        """Gives up caches and parameters, after `end`: for a learner that works on the same devices meanwhile. They are
        set anew before anything is sampled."""
        for lane in self._lanes:
            lane.free()
        for follower in self._followers:
            follower.calls.free()

    def _all_calls(self) -> list[Calls]:
        return [lane.calls for lane in self._lanes] + [follower.calls for follower in self._followers]

    def _calls(self, policy, config: RolloutConfig, place: Place, channel) -> Calls:
        needed = (self._programs, policy, config.cache_dtype, place)
        return Announced(*needed, channel=channel(place)) if place.spans else Calls(*needed)

    # Lanes that other processes lead

    @property
    def share(self) -> tuple[int, int] | None:
        """Which part of a collection this process collects, and how many parts there are: one for each process that
        leads a lane. None: it leads none, and only follows."""
        return self._share

    def follow(self) -> None:
        """Takes part in lanes that other processes lead, for one collection; returns at once. Every process of the job
        calls it before it collects its share, and `followed` afterwards."""
        for follower in self._followers:
            follower.follow()

    def followed(self) -> None:
        """Returns when the processes that lead those lanes have ended the collection.

        Raises:
          BaseException: what a call on the devices raised here.
        """
        for follower in self._followers:
            follower.followed()

    @property
    def slots(self) -> int:
        """See `Generator.slots`."""
        return self._slots

    @property
    def compiled(self) -> int:
        """Decoding and prefill programs compiled so far."""
        return self._programs.compiled

    @property
    def compile_bound(self) -> int:
        """Most programs that one sampler on one lane's devices can ever compile: a decoding program and one for every
        prefill chunk, for each bucket of cache lengths."""
        return (1 + len(self._shapes)) * len(length_buckets(self._context, default_block()))

    @property
    def stats(self) -> EngineStats:
        """Counts and seconds since the engine was made."""
        total = EngineStats(swaps=self._swaps)
        for lane in self._lanes:
            for name, value in vars(lane.stats).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def begin(self, sampling: Sampling, deliver: Deliver) -> None:
        """See `Generator.begin`."""
        self.end()
        for follower in self._followers:
            follower.watch(deliver)
        for lane in self._lanes:
            lane.begin(sampling, deliver)

    def start(self, row: int, prompt: Int[np.ndarray, " n"], seed: int, limit: int, adapter: int = 0) -> None:
        """See `Generator.start`. A prompt that another row has, or begins with, is not fed again as far as they agree.

        Raises:
          ConfigError: an empty prompt, or one that leaves no room in the context.
          ValueError: all slots are taken, or the row exists.
        """
        prompt = np.asarray(prompt, np.int32)
        if not 0 < len(prompt) < self._context:
            raise ConfigError(
                f"prompt of row {row} has {len(prompt)} tokens, rollout.context is {self._context}: raise the context"
            )
        if not any(self._free):
            raise ValueError(f"row {row}: all {self._slots} slots are taken")
        if row in self._lane_of:
            raise ValueError(f"row {row} exists already")
        # Rows of one prompt go to one lane, where they share its prefill; otherwise the emptiest lane is next.
        index = self._last_prompts.get(prompt.tobytes(), -1)
        if index < 0 or not self._free[index]:
            index = max(range(len(self._lanes)), key=lambda i: self._free[i] / self._share_of[i])
        self._last_prompts[prompt.tobytes()] = index
        self._lane_of[row] = index
        self._free[index] -= 1
        lane = self._lanes[index]
        lane.order(partial(lane.start, row, prompt, int(seed), int(limit), int(adapter)))

    def resume(self, row: int, ids: Int[np.ndarray, " n"], limit: int) -> None:
        """See `Generator.resume`."""
        lane = self._lanes[self._lane_of[row]]
        lane.order(partial(lane.resume, row, np.asarray(ids, np.int32), int(limit)))

    def release(self, row: int) -> None:
        """See `Generator.release`."""
        index = self._lane_of.pop(row, None)
        if index is not None:
            self._free[index] += 1
            self._lanes[index].order(partial(self._lanes[index].release, row))

    def end(self) -> None:
        """See `Generator.end`."""
        for lane in self._lanes:
            lane.end()
        self._free = list(self._share_of)
        self._lane_of.clear()
        self._last_prompts.clear()


def _share(mesh: Mesh | None) -> tuple[int, int] | None:
    """See `Engine.share`."""
    leaders = [jax.process_index()] if mesh is None else sorted({found[0] for found in owners(mesh)})
    mine = jax.process_index()
    return (leaders.index(mine), len(leaders)) if mine in leaders else None


def _default_lanes() -> int:
    return min(4, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
