"""A backbone of the user's own: any function from examples to features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError, reason
from fcljax.models.convnet import Colour
from fcljax.types import Features, Network

Apply = Callable[[PyTree, PyTree], Float[Array, "B D"]]


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network of one's own, for `fcljax.run(..., backbone=...)`.

    Adapters that work inside attention refuse it; `linear` trains on its features, and
    `full` trains all of its parameters.
    """

    apply: Apply
    """apply(params, input) -> features [B, D]; images are [B, S, S, 3], other data as
    they were given."""
    params: PyTree
    """Arrays that `apply` reads."""
    image_size: int = 0
    """S, the side in pixels of the images that it is given; 0: it reads other data."""
    mean: Colour = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1]."""
    std: Colour = (1.0, 1.0, 1.0)
    """What these pixels are then divided by."""
    name: str = "own"
    """In tables and on pages."""

    @classmethod
    def of(cls, module: Any, image_size: int = 0, variables: PyTree = None, **fields: Any) -> Backbone:
        """Make a backbone of a Flax module, in evaluation mode.

        Args:
          module: of `flax.nnx`, or of `flax.linen` with its variables.
          image_size: side in pixels; 0: it reads data that are no images.
          variables: of a linen module.
          fields: further fields of a `Backbone`.

        Raises:
          InputError: for anything else.
        """
        from flax import linen, nnx

        named: dict[str, Any] = {"name": type(module).__name__} | fields
        if isinstance(module, nnx.Module):
            # `rest` (batch statistics, say) is not trained, so it stays out of `params`
            module.eval()
            graph, params, rest = nnx.split(module, nnx.Param, ...)

            def of_nnx(params: PyTree, inputs: PyTree) -> Array:
                return nnx.merge(graph, params, rest)(inputs)

            return cls(of_nnx, nnx.to_pure_dict(params), image_size, **named)
        if not isinstance(module, linen.Module) or variables is None:
            raise InputError(
                f"backbone: {type(module).__name__} is neither a flax.nnx module nor a flax.linen module "
                "with variables; nearest: Backbone(apply, params, pixels)"
            )

        def of_linen(variables: PyTree, inputs: PyTree) -> Array:
            return cast(Array, module.apply(variables, inputs))

        return cls(of_linen, variables, image_size, **named)


def is_flax_module(value: object) -> bool:
    """Check whether a value is a module of flax.nnx, which holds its parameters."""
    from flax import nnx

    return isinstance(value, nnx.Module)


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    """The static shape of a network of the user's own."""

    name: str
    width: int
    apply: Apply = dataclasses.field(repr=False)
    # shapes and types of one example
    example: PyTree = dataclasses.field(compare=False)
    image_size: int = 0
    dtype: str = "float32"


def own_config(
    backbone: Backbone, place: Callable[[Callable], str], example: PyTree | None = None
) -> OwnConfig:
    """Trace a backbone for the width of its features.

    Args:
      backbone: the user's.
      place: describes where a function is defined, for messages.
      example: shapes and types of one example; None: an image of the backbone's size.

    Raises:
      InputError: in one line, if `apply` fails or returns anything but one vector for each image.
    """
    side = backbone.image_size
    noun = "images" if example is None else "examples"
    if example is None:
        example = jax.ShapeDtypeStruct((side, side, 3), jnp.float32)
    # two examples, because a network that loses the batch axis would pass with one
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), example)
    try:
        feature = jax.eval_shape(backbone.apply, backbone.params, batch)
    # anything, since it is the user's code
    except Exception as error:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in jax.tree.leaves(batch))
        raise InputError(
            f"backbone: {place(backbone.apply)} fails on {noun} of shape {shapes}: {reason(error)}"
        ) from error
    shape = getattr(feature, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 2:
        returned = type(feature).__name__ if shape is None else f"shape {list(shape)}"
        raise InputError(
            f"backbone: {place(backbone.apply)} returned {returned} for 2 {noun}; expected features [2, D]"
        )
    return OwnConfig(backbone.name, shape[1], backbone.apply, example, side)


def own_network(config: OwnConfig, mean: Colour, std: Colour) -> Network:
    """Make the `Network` of a user's own backbone."""

    def init(_key: PRNGKeyArray) -> PyTree:
        raise InputError(f"backbone: {config.name} cannot draw new initial values, which this method needs")

    def apply(params, inputs, _injection, _train, _mask=None):
        return Features(config.apply(params, inputs).astype(jnp.float32), None, {}), params

    side = config.image_size
    return Network(init, apply, config.width, 0, (side, side, 3 if side else 0), mean, std)
