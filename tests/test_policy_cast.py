"""Parameters in the compute type: the same numbers, to the last bit, for half the memory."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax.config import PolicyConfig
from trace_jax.policy import cache
from trace_jax.policy.parameters import cast_in_use
from trace_jax.policy.transformer import Transformer

POLICY = PolicyConfig(
    layers=2, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=0, mixers=("delta", "attention"),
    delta_key_heads=1, delta_value_heads=2, delta_key_dim=8, delta_value_dim=8, attention_gate=True,
    experts=4, experts_per_token=2, expert_width=8, shared_expert_width=8, tie_embeddings=False, dtype="bfloat16",
)  # fmt: skip


def test_a_sampler_with_cast_matrices_gives_the_same_bits():
    graphdef, params = nnx.split(Transformer(POLICY, 32, rngs=nnx.Rngs(0)), nnx.Param)
    ids = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    positions = jnp.broadcast_to(jnp.arange(4), ids.shape)

    @jax.jit
    def run(params):
        model = nnx.merge(graphdef, params)
        done = model.decode(ids, positions, jnp.ones_like(ids, bool), cache.new(POLICY, 2, 8, "bfloat16"))
        return model.logits(done.hidden), done

    cast = cast_in_use(params, POLICY.dtype)
    for a, b in zip(jax.tree.leaves(run(params)), jax.tree.leaves(run(cast)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    wide = {path[0].key for path, x in jax.tree_util.tree_leaves_with_path(cast) if x.dtype == jnp.float32}
    norms = {"attention_norm", "mlp_norm", "final_norm", "query_norm", "key_norm", "delta_norm"}
    assert wide == norms | {"conv_query", "conv_key", "conv_value", "decay_rate", "decay_bias", "shared_share"}
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (cast, params)]
    assert 0.5 < sizes[0] / sizes[1] < 0.6
