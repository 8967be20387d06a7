"""A bare decoding loop: what sampling costs when nothing has to be scheduled.

One jitted program prefills prompts of one length and draws a fixed number of tokens for every row, with the policy's
own functions, the engine's sampler, and a cache of exactly the positions needed. Its keys and values have nowhere to go
afterwards, no row may stop, and no tool may answer: an engine is measured against it, not replaced by it.

Axis letters: B rows, P tokens of a prompt, N sampled tokens.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from trace_jax.policy import cache as kv_cache
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.sampling import Sampling, draw, token_keys

# Tokens of a prefill step, each over the positions so far: half again as fast on CPU as a whole prompt of 256 at once.
CHUNK = 64


class BareLoop:
    """The loop over fixed shapes. The rows may be split into equal parts that run side by side."""

    def __init__(self, model: Transformer, rows: int, prompt: int, tokens: int, parts: int = 1):
        """
        Args:
          rows, prompt, tokens: B, P, N.
          parts: programs that run at once, each on a thread: one of this size keeps about one core busy.
        """
        if rows % parts:
            raise ValueError(f"{rows} rows cannot be split into {parts} equal parts")
        self._structure, self._params = nnx.split(model)
        self._cfg, self._rows, self._prompt, self._tokens = model.cfg, rows // parts, prompt, tokens
        self._program = jax.jit(self._sample)
        self._threads = ThreadPoolExecutor(parts, thread_name_prefix="bare-loop")

    def __call__(
        self, prompts: Int[np.ndarray, "B P"], seeds: UInt32[np.ndarray, "B 2"]
    ) -> tuple[Int[np.ndarray, "B N"], Float[np.ndarray, "B N"]]:
        """Sampled ids and their log-probabilities."""

        def part(start: int):
            stop = start + self._rows
            return jax.device_get(self._program(self._params, prompts[start:stop], seeds[start:stop]))

        ids, logprobs = zip(*self._threads.map(part, range(0, len(prompts), self._rows)), strict=True)
        return np.concatenate(ids), np.concatenate(logprobs)

    def close(self) -> None:
        """Ends its threads."""
        self._threads.shutdown()

    def _sample(
        self, params, prompts: Int[Array, "B P"], seeds: UInt32[Array, "B 2"]
    ) -> tuple[Int[Array, "B N"], Float[Array, "B N"]]:
        model = nnx.merge(self._structure, params)
        rows, end = self._rows, self._prompt
        cache, hidden = kv_cache.new(self._cfg, rows, end + self._tokens), None
        for start in range(0, end, CHUNK):
            stop = min(start + CHUNK, end)
            positions = jnp.broadcast_to(jnp.arange(start, stop), (rows, stop - start))
            there = jnp.ones(positions.shape, bool)
            hidden, cache, *_ = model.decode(prompts[:, start:stop], positions, there, cache, attend=stop)

        def sampled(hidden, position):
            return draw(token_keys(seeds, jnp.full(rows, position)), model.logits(hidden), Sampling().knobs)[:2]

        def step(carry, position):
            cache, token = carry
            at = jnp.full((rows, 1), position)
            hidden, cache, *_ = model.decode(token[:, None], at, jnp.ones(at.shape, bool), cache)
            token, logprob = sampled(hidden[:, 0], position + 1)
            return (cache, token), (token, logprob)

        first = sampled(hidden[:, -1], end)
        _, rest = jax.lax.scan(step, (cache, first[0]), end + jnp.arange(self._tokens - 1))
        ids, logprobs = (jnp.concatenate([one[:, None], more.T], axis=1) for one, more in zip(first, rest, strict=True))
        return ids, logprobs
