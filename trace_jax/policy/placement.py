"""Where the arrays of a training pass live on a mesh: an interface, so that the policy knows no mesh.

`learner.sharding.MeshPlacement` fills it in. A weight is used whole (but for the axes that split a matmul) and its
gradient is kept as the weight is stored. The weight is cast to the compute type before it is gathered; the gradient is
made in float32 before it is summed over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Placement:
    """One device, or whatever the compiler makes of the arguments' shardings.

    Attributes:
        blocks: groups of rows that live on different devices.
    """

    blocks: int = 1

    def used(self, array: Array, axes: tuple[str, ...]) -> Array:
        """An array as a layer works on it.

        Args:
            axes: logical axes of parameters, of which `embed` is whole in use; "rows" of a batch; "tokens": rows whose
                tokens are divided further, over the devices that have the same rows, where they divide evenly;
                "replica" and "split": rows and columns of the same array once its columns are split as those of a
                stored weight; "" for what is whole.
        """
        return array

    def stored(self, array: Array, axes: tuple[str, ...]) -> Array:
        """An array with the logical axes of a parameter, as that parameter is stored."""
        return array

    def over_experts(self, function: Callable, arrays: tuple, axes: tuple, out_axes: tuple) -> Any:
        """A function on the experts of each device and the rows it has.

        Args:
            function: (part, *arrays) -> out; a device has part `part` of the experts, and of each array its own share.
            arrays: trees of arrays.
            axes: the same trees with the logical axes of each array, as in use.
            out_axes: the tree of the result with the logical axes of each array, as stored. Where several devices have
                the same share of an array, it is the sum of what they return. "copies" are rows of an array that each
                device made of its own rows and experts.
        """
        return function(0, *arrays)

    def over_heads(
        self,
        function: Callable,
        q: Float[Array, "B T H h"],
        k: Float[Array, "B T K h"],
        v: Float[Array, "B T K h"],
        segments: Int[Array, "B T"],
    ) -> Float[Array, "B T H h"]:
        """Attention on the rows and heads of each device.

        Args:
            function: (q, k, v, segments) -> out; equally many heads share each key.
        """
        return function(q, k, v, segments)


ANYWHERE = Placement()
