"""The pixel ranges that networks are trained with, and random views of images that
servers make."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.types import Autoencoder, Network

# Mean and standard deviation per channel, of pixels scaled to [0, 1].
NORMALISE = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def from_unit(
    space: Network | Autoencoder,
    pixels: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Turn pixels in [0, 1] into a network's input."""
    return (pixels - jnp.array(space.mean)) / jnp.array(space.std)


def to_unit(
    space: Network | Autoencoder,
    image: Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Turn a network's input into pixels in [0, 1]."""
    return image * jnp.array(space.std) + jnp.array(space.mean)


def between(
    source: Network | Autoencoder, target: Network | Autoencoder, image: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Turn one network's input into another's; the same bits where both have the same
    pixel constants."""
    if (source.mean, source.std) == (target.mean, target.std):
        return image
    return from_unit(target, to_unit(source, image))


def jitter(
    key: PRNGKeyArray, image: Float[Array, "batch h w 3"], padding: float
) -> Float[Array, "batch h w 3"]:
    """Return images with a border of zeros, cut back to their size at random, and half of
    them mirrored.

    Args:
      key: for the draws.
      image: pixels of any range.
      padding: width of the border, as a fraction of the image's side.
    """
    count, h, w, _ = image.shape
    rows = round(padding * h)
    cols = round(padding * w)
    padded = jnp.pad(image, ((0, 0), (rows, rows), (cols, cols), (0, 0)))
    top, left, flip = jax.random.split(key, 3)
    # the border is on both sides, so there are 2 * rows + 1 places for a cut
    y = jax.random.randint(top, (count,), 0, 2 * rows + 1)
    x = jax.random.randint(left, (count,), 0, 2 * cols + 1)
    cut = jax.vmap(lambda bordered, y, x: jax.lax.dynamic_slice(bordered, (y, x, 0), (h, w, 3)))(padded, y, x)
    return jnp.where(jax.random.bernoulli(flip, 0.5, (count, 1, 1, 1)), cut[:, :, ::-1], cut)
