"""A backbone of the user's own: any function from images to features."""

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

Apply = Callable[[PyTree, Float[Array, "B S S 3"]], Float[Array, "B D"]]


@dataclasses.dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network of one's own, for `fcljax.run(..., backbone=...)`.

    Adapters that work inside attention refuse it; `linear` trains on its features, and `full` trains all of
    its parameters.
    """

    apply: Apply
    """apply(params, image [B, S, S, 3]) -> features [B, D]."""
    params: PyTree
    """Arrays that `apply` reads."""
    image_size: int
    """S, the side in pixels of the images that it is given."""
    mean: Colour = (0.0, 0.0, 0.0)
    """Subtracted from pixels in [0, 1]."""
    std: Colour = (1.0, 1.0, 1.0)
    """What these pixels are then divided by."""
    name: str = "own"
    """In tables and on pages."""

    @classmethod
    def of(cls, module: Any, image_size: int, variables: PyTree = None, **fields: Any) -> Backbone:
        """Make a backbone of a Flax module, in evaluation mode.

        Args:
          module: of `flax.nnx`, or of `flax.linen` with its variables.
          image_size: side in pixels.
          variables: of a linen module.
          fields: further fields of a `Backbone`.

        Raises:
          InputError: for anything else.
        """
        from flax import linen, nnx

        named: dict[str, Any] = {"name": type(module).__name__} | fields
        if isinstance(module, nnx.Module):
            module.eval()
            graph, params, rest = nnx.split(module, nnx.Param, ...)

            def of_nnx(params: PyTree, image: Array) -> Array:
                return nnx.merge(graph, params, rest)(image)

            return cls(of_nnx, nnx.to_pure_dict(params), image_size, **named)
        if not isinstance(module, linen.Module) or variables is None:
            raise InputError(
                f"backbone: {type(module).__name__} is neither a flax.nnx module nor a flax.linen module "
                "with variables; nearest: Backbone(apply, params, pixels)"
            )

        def of_linen(variables: PyTree, image: Array) -> Array:
            return cast(Array, module.apply(variables, image))

        return cls(of_linen, variables, image_size, **named)


@dataclasses.dataclass(frozen=True)
class OwnConfig:
    """The static shape of a network of the user's own."""

    name: str
    image_size: int
    width: int
    apply: Apply = dataclasses.field(repr=False)
    dtype: str = "float32"


def own_config(backbone: Backbone, place: Callable[[Callable], str]) -> OwnConfig:
    """Trace a backbone for the width of its features.

    Args:
      backbone: the user's.
      place: describes where a function is defined, for messages.

    Raises:
      InputError: in one line, if `apply` fails or returns anything but one vector for each image.
    """
    side = backbone.image_size
    # two images: an axis of length 2 is that of the batch
    image = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    try:
        feature = jax.eval_shape(backbone.apply, backbone.params, image)
    except Exception as error:  # whatever a user's function raises
        raise InputError(
            f"backbone: {place(backbone.apply)} fails on images of shape [2, {side}, {side}, 3]: "
            f"{reason(error)}"
        ) from error
    shape = getattr(feature, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != 2:
        returned = type(feature).__name__ if shape is None else f"shape {list(shape)}"
        raise InputError(
            f"backbone: {place(backbone.apply)} returned {returned} for 2 images, "
            "and features [2, D] are needed"
        )
    return OwnConfig(backbone.name, side, shape[1], backbone.apply)


def own_network(config: OwnConfig, mean: Colour, std: Colour) -> Network:
    """Make the `Network` of a user's own backbone."""

    def init(_key: PRNGKeyArray) -> PyTree:
        raise InputError(f"backbone: {config.name} cannot draw new initial values, which this method needs")

    def apply(params, image, _injection, _train, _mask=None):
        return Features(config.apply(params, image).astype(jnp.float32), None, {}), params

    return Network(init, apply, config.width, 0, (config.image_size, config.image_size, 3), mean, std)
