"""Attention of the training pass: which kernel computes it where.

| compiled for | taken when | kernel |
| --- | --- | --- |
| TPU | rows are a multiple of 128 long | splash attention (Pallas), 16 or 32 bits, heads of any width |
| GPU | the same, 16-bit compute type, head width a power of two from 16 to 256 | flash attention (Pallas, Triton) |
| all else | CPU, branches, other lengths and types | `attention.packed_attention` |

The kernels tell segments by their numbers, so that neither a [B, T, T] bias nor [T, T] scores exist: memory grows with
T, not with its square. `packed_attention` keeps no scores, but takes the bias (a gigabyte for four rows of 8,192) and
holds the scores of a block of queries. It is what the kernels are tested against, what is fast on a CPU, where a kernel
would be interpreted, and the only one that knows branches, whose mask no segment number can say.

Why not cuDNN: what `jax.nn.dot_product_attention` offers of it takes one length a row, so packed rows would need a bias
(and a gradient of it, of the same size, which cuDNN always makes). Its packed layout is reached through private
functions only, wants a static bound on the segments of a row and Hopper or later, and in JAX 0.10.2 reads wrong keys
where heads share them (jax-ml/jax pull request 39521). 32-bit policies keep `packed_attention` on a GPU, since Triton
would multiply in TF32.

On a mesh a kernel runs inside `Placement.over_heads`, on the rows and heads of each device: the compiler cannot split
it. Tests interpret both kernels, compile the first for TPU topologies and lower the second for CUDA; tile sizes were
chosen to fit and are not tuned on a device.

Axes: B rows, T tokens, H query heads, K key/value heads, h head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.policy import attention
from trace_jax.policy.placement import ANYWHERE, Placement

Kernel = Callable[[Array, Array, Array, Array], Array]
LANES = 128  # a block of queries or keys is a multiple of it
_instead: ContextVar[Kernel | None] = ContextVar("instead", default=None)


def packed(
    cfg: PolicyConfig,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    placement: Placement,
    branches: attention.Branches | None,
) -> Callable[[Array, Array, Array], Array]:
    """Causal attention inside segments, (q, k, v) -> out, with what all layers share computed once."""
    rows, time = segments.shape
    if branches is None and (kernel := choose(platform(), time, cfg.head_dim, cfg.dtype)):
        return lambda q, k, v: placement.over_heads(kernel, q, k, v, segments)
    bias = attention.packed_bias(segments, positions, branches)
    one_cpu = platform() == "cpu" and placement is ANYWHERE
    at_once = attention.rows_in_cache(rows, time, cfg.heads) if one_cpu else None
    return lambda q, k, v: attention.packed_attention(q, k, v, bias, at_once)


def platform() -> str:
    """Kind of device that is compiled for: that of the mesh a function is traced for, which may be no device of this
    machine (ahead-of-time compilation), else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def choose(platform: str, time: int, head_dim: int, dtype: DTypeLike) -> Kernel | None:
    """The kernel for rows of a length on a platform; None: `attention.packed_attention`."""
    if time % LANES:
        return None
    if platform == "cpu" and (kernel := _instead.get()) is not None:
        return kernel
    if platform == "tpu":
        return splash
    power_of_two = head_dim & (head_dim - 1) == 0
    if platform == "gpu" and jnp.dtype(dtype).itemsize == 2 and power_of_two and 16 <= head_dim <= 256:
        return flash
    return None


@contextlib.contextmanager
def standing_in(kernel: Kernel | None) -> Iterator[None]:
    """What is traced within for a CPU has this kernel: programs that are compiled there to see what they would need
    elsewhere."""
    token = _instead.set(kernel)
    try:
        yield
    finally:
        _instead.reset(token)


def splash(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segments: Int[Array, "B T"],
    interpret: bool = False,
) -> Float[Array, "B T H h"]:
    """Attention by the TPU kernel, which skips blocks above the diagonal; heads share keys without copies of them.

    Under `policy.remat: dots` its result and normaliser are kept as those of a matmul are.

    Args:
        interpret: run by XLA operations, on any device.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    time, heads, width = q.shape[1:]
    # 512 of each: scores of a block take a megabyte of vector memory, and its matmuls fill the 128 x 128 units.
    size = next(n for n in (512, 256, LANES) if time % n == 0)
    blocks = tpu.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    kernel = tpu.make_splash_mha(
        tpu.MultiHeadMask([tpu.CausalMask((time, time))] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="matmul",
        interpret=interpret,
    )
    q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)  # the kernel does not scale

    def row(q, k, v, segments):
        return kernel(q, k, v, tpu.SegmentIds(segments, segments))

    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.vmap(row)(q, k, v, segments).swapaxes(1, 2)


def flash(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    segments: Int[Array, "B T"],
    interpret: bool = False,
) -> Float[Array, "B T H h"]:
    """Attention by the GPU kernel (FlashAttention-2, arXiv 2307.08691). Keys and values are repeated for the heads that
    share them, which is as much memory as the queries.

    Args:
        interpret: run by XLA operations, on any device.
    """
    from jax.experimental.pallas.ops.gpu import attention as gpu

    heads, width = q.shape[2:]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    # One tile of queries and two each of keys and values in flight fit in the 160 KiB that a block has on an A100.
    wide, narrow = (64, 32) if width > 128 else (128, 64)
    back = 64 if width <= 64 else 32
    blocks = gpu.BlockSizes(
        block_q=wide, block_k=narrow, block_q_dkv=back, block_kv_dkv=back, block_q_dq=back, block_kv_dq=back
    )
    return gpu.mha(q, k, v, segments, width**-0.5, True, blocks, interpret=interpret)
