"""What a lane does on its devices: the caches of its groups, the parameters, and the calls of the jitted programs.

A lane decides on the host what is to be fed and drawn (`lane`); everything that touches a device goes through here. The
arguments of a call are numbers and small numpy arrays, so that the other processes of a lane that lies in several can
make the same calls (`spanning`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt32

from trace_jax.config import PolicyConfig
from trace_jax.policy.cache import KVCache
from trace_jax.policy.mixture import Lock
from trace_jax.rollout.placement import Place
from trace_jax.rollout.programs import Programs, State, new_cache
from trace_jax.rollout.sampling import Sampling

Weights = tuple[nnx.State, int]  # parameters on the lane's devices, and their version


class Calls:
    """The device calls of one lane. B: slots of a group; R, T: rows and width of a chunk; C: rows of a copy.

    Attributes:
      weights: of the calls to come; set between two of them, from any thread.
      caches: of the groups that have one.
    """

    def __init__(self, programs: Programs, policy: PolicyConfig, dtype: str, place: Place):
        """`dtype`: of the caches."""
        self.weights: Weights | None = None
        self.caches: dict[int, KVCache] = {}
        self._programs, self._policy, self._dtype, self._place = programs, policy, dtype, place

    def begin(self, sampling: Sampling) -> None:
        """A new collection: no cache is used again, and tokens are drawn so."""
        self.caches.clear()
        self._sampling = sampling

    def end(self) -> None:
        """The collection is over."""

    def free(self) -> None:
        """Gives up caches and parameters: nothing is called until there are others."""
        self.caches.clear()
        self.weights = None

    def room(self, group: int, slots: int, length: int) -> None:
        """Sees to it that a group's cache has at least `length` positions for each of its slots."""
        cache = self.caches.get(group)
        if cache is None:
            place = self._place
            self.caches[group] = new_cache(self._policy, slots, length, self._dtype, place.heads, place.device)
        elif length > cache.length:
            self.caches[group] = self._programs.grow(cache, length)

    def prefill(
        self,
        weights: Weights,
        group: int,
        ids: Int[np.ndarray, "R T"],
        starts: Int[np.ndarray, " R"],
        counts: Int[np.ndarray, " R"],
        slots: Int[np.ndarray, " R"],
        adapter: Int[np.ndarray, " R"],
        lock: Lock | None = None,
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Feeds the next chunk of some rows. Returns the experts of its tokens [L R T e], if they are asked for, and
        the weights that a gate has locked [L R M]."""
        self.caches[group], experts, locked = self._programs.prefill(
            weights[0], self.caches[group], ids, starts, counts, slots, adapter, lock, heads=self._place.heads
        )
        return experts, locked

    def copy(
        self, target: int, source: int, sources: Int[np.ndarray, " C"], targets: Int[np.ndarray, " C"]
    ) -> None:  # fmt: skip
        """Copies rows of one group's cache to rows of its own or of another's."""
        if source == target:
            self.caches[target] = self._programs.copy_within(self.caches[target], sources, targets)
        else:
            self.caches[target] = self._programs.copy_across(self.caches[target], self.caches[source], sources, targets)

    def wait(self, group: int) -> None:
        """Returns when a group's cache holds what it was fed."""
        jax.block_until_ready(self.caches[group])

    def decode(
        self, weights: Weights, group: int, state: State, seeds: UInt32[np.ndarray, "B 2"], going: int
    ) -> list[Any]:  # fmt: skip
        """`Programs.decode` of a group, all but its cache, on the host."""
        return jax.device_get(self.draw(weights, group, state, seeds, going))

    def draw(self, weights: Weights, group: int, state: State, seeds: UInt32[np.ndarray, "B 2"], going: int) -> Any:
        """The same, on the devices."""
        self.caches[group], *results = self._programs.decode(
            weights[0], self.caches[group], state, seeds, going, self._sampling, self._place.heads
        )
        return results
