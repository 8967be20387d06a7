"""Where the arrays of a training pass live on a mesh: an interface, so that the policy knows no mesh.

`learner.sharding.MeshPlacement` fills it in. A weight is used whole (but for the axes that split a matmul) and its
gradient is kept as the weight is stored. The weight is cast to the compute type before it is gathered; the gradient is
made in float32 before it is summed over devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array


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
            axes: logical axes of parameters, of which `embed` is whole in use; "rows" of a batch; "replica" and
                "split": rows and columns of the same array once its columns are split as those of a stored weight; ""
                for what is whole.
        """
        return array

    def stored(self, array: Array, axes: tuple[str, ...]) -> Array:
        """An array with the logical axes of a parameter, as that parameter is stored."""
        return array


ANYWHERE = Placement()
