"""Matrix products of rows that are sorted by group, each group with a matrix of its own; static shapes, no row dropped.

`jax.lax.ragged_dot` is one kernel on TPU, but only where rows are multiplied by matrices. For the sum of outer products
of each group XLA (libtpu 0.0.42) multiplies every row for all groups, with 256 experts 256 times the work; there the
kernel `tgmm` that comes with JAX (MegaBlocks, arXiv 2211.15841) is used. On CPU, and on NVIDIA GPUs up to jaxlib 0.10,
XLA makes either a dense product of every row with the matrices of *all* groups (on CPU, 8,192 rows of 32 groups took 60
times as long as here). There rows are multiplied block by block instead, each block with the matrix of its group, and a
few rows on a GPU as one batch in which every group has room for the most it may have. The platform is the one that a
program is compiled for.

Axes: m rows, G groups, a and b features, B rows of a block.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SMALLEST = 8  # rows of a block
CPU_BLOCK, GPU_BLOCK = 128, 512  # largest ones: the last block of each group is partly wasted
TPU_TILE = (128, 1024, 512)  # rows, a and b of what the kernel holds at a time: 128 rows waste little of a group's ends
GPU_FEW = 256  # rows of a group up to which a GPU takes longer to read a matrix than to multiply by it

_ROW_PRODUCT = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))


def matmul(
    x: Float[Array, "m a"], weight: Float[Array, "G a b"], sizes: Int[Array, " G"], most: int, transposed: bool = False
) -> Float[Array, "m b"]:
    """Each row times the matrix of its group, 0 for rows after the last group.

    Args:
        x: rows of group 0, then of group 1, ...
        sizes: rows of each group; together at most m.
        most: no group has more rows.
        transposed: `weight` is [G, b, a].
    """
    gpu = partial(padded, most=most) if most <= GPU_FEW else partial(blocks, largest=GPU_BLOCK)
    tpu, cpu, gpu = (partial(way, transposed=transposed) for way in (ragged, partial(blocks, largest=CPU_BLOCK), gpu))
    return jax.lax.platform_dependent(x, weight, sizes, tpu=tpu, cpu=cpu, default=gpu)


def outer(
    x: Float[Array, "m a"], y: Float[Array, "m b"], sizes: Int[Array, " G"], onto: Float[Array, "G a b"] | None = None
) -> Float[Array, "G a b"]:
    """Sum over the rows of each group of the outer products of x and y, float32; 0 for a group without rows.

    Args:
        onto: float32 to add it to.
    """
    cpu, gpu = (partial(outer_blocks, largest=largest) for largest in (CPU_BLOCK, GPU_BLOCK))
    return jax.lax.platform_dependent(x, y, sizes, onto, tpu=outer_kernel, cpu=cpu, default=gpu)


def ragged(x, weight, sizes, transposed=False):
    """`matmul` by XLA's own operation."""
    numbers = _TRANSPOSED if transposed else _ROW_PRODUCT
    y = jax.lax.ragged_dot_general(x, weight, sizes, numbers)
    return jnp.where(_inside(sizes, len(x))[:, None], y, 0)  # what a kernel leaves after the last group is undefined


def outer_kernel(x, y, sizes, onto=None, interpret=False):
    """`outer` by the TPU kernel; `interpret`: by XLA operations, on any device."""
    try:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
    except ImportError:  # experimental: another JAX may have it elsewhere, and every platform traces this
        return outer_blocks(x, y, sizes, onto, largest=GPU_BLOCK)
    rows, *most = TPU_TILE
    x, y = (jnp.pad(z, ((0, -len(z) % rows), (0, 0))) for z in (x, y))
    tiling = (rows, *map(min, (x.shape[1], y.shape[1]), most))
    return tgmm(x.T, y, sizes, jnp.float32, tiling, existing_out=onto, interpret=interpret)


def padded(x, weight, sizes, most, transposed=False):
    """`matmul` of a batch with `most` rows for each group."""
    starts = jnp.cumsum(sizes) - sizes
    room = jnp.clip(starts[:, None] + jnp.arange(most), 0, len(x) - 1)
    y = jnp.einsum("gma,gba->gmb" if transposed else "gma,gab->gmb", x[room], weight)
    row = jnp.arange(len(x))
    group = _group(jnp.cumsum(sizes), row)
    y = y[group, jnp.clip(row - starts[group], 0, most - 1)]
    return jnp.where(_inside(sizes, len(x))[:, None], y, 0)


def blocks(x, weight, sizes, largest, transposed=False):
    """`matmul` of as many blocks as there are, one after the other."""
    rows = _block_rows(len(x), len(sizes), largest)
    count, groups, starts, _ = _blocks(sizes, len(x), rows)
    padded_x = jnp.pad(x, ((0, rows), (0, 0)))

    def body(i, y):
        block = jax.lax.dynamic_slice_in_dim(padded_x, starts[i], rows)
        matrix = weight[groups[i]]
        # what is past the group's end is overwritten by the next group's first block
        return jax.lax.dynamic_update_slice_in_dim(y, block @ (matrix.T if transposed else matrix), starts[i], 0)

    width = weight.shape[1 if transposed else 2]
    y = jax.lax.fori_loop(0, count, body, jnp.zeros((len(x) + rows, width), x.dtype))[: len(x)]
    return jnp.where(_inside(sizes, len(x))[:, None], y, 0)


def outer_blocks(x, y, sizes, onto=None, *, largest):
    """`outer` by blocks."""
    rows = _block_rows(len(x), len(sizes), largest)
    count, groups, starts, ends = _blocks(sizes, len(x), rows)
    x, y = (jnp.pad(z, ((0, rows), (0, 0))) for z in (x, y))

    def body(i, total):
        x_block, y_block = (jax.lax.dynamic_slice_in_dim(z, starts[i], rows) for z in (x, y))
        inside = (starts[i] + jnp.arange(rows) < ends[i])[:, None]
        x_block, y_block = jnp.where(inside, x_block, 0), jnp.where(inside, y_block, 0)
        product = jnp.dot(x_block.T, y_block, preferred_element_type=jnp.float32)
        return total.at[groups[i]].add(product)

    onto = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32) if onto is None else onto
    return jax.lax.fori_loop(0, count, body, onto)


def _block_rows(m: int, groups: int, largest: int) -> int:
    """About the rows of a group, a power of two; it depends on shapes alone."""
    even = max(1, m // groups)
    return min(largest, max(SMALLEST, 1 << (even - 1).bit_length()))


def _blocks(sizes, m: int, rows: int):
    """Number of blocks, and of each its group, its first row and where its group ends."""
    ends = jnp.cumsum(sizes)
    of_group = -(-sizes // rows)
    until = jnp.cumsum(of_group)
    block = jnp.arange(m // rows + min(len(sizes), m))
    group = _group(until, block)
    starts = ends[group] - sizes[group] + (block - (until[group] - of_group[group])) * rows
    return until[-1], group, starts, ends[group]


def _group(ends, index):
    """The group that each index falls into; the last one for those after all groups."""
    return jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), len(ends) - 1)


def _inside(sizes, m: int):
    return jnp.arange(m) < jnp.sum(sizes)
