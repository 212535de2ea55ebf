"""A masked autoencoder around the ViT: random masking, the lightweight decoder and its
loss.

After He et al. 2022 and pMAE (arXiv 2411.01916). The encoder is `apply_vit(config,
params, image, Injection(keep=masking.keep), full=True)`; its tokens are the latent that
`decode` takes. The decoder predicts all patches. Its predictions of visible patches are
not replaced by the known pixels.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.products import dense
from fcljax.models.shapes import NO_KERNEL, AttentionKernel, Dtype, NumberFormat, array_type
from fcljax.models.vit import Injection, Joins, LayerNorm, ViTConfig, apply_vit, patchify, run_block
from fcljax.types import Autoencoder


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static shape of a decoder; the defaults are MAE's for a ViT-B/16."""

    image_size: int = 224
    patch: int = 16
    encoder_width: int = 768
    width: int = 512
    depth: int = 8
    heads: int = 16
    mlp: int = 2048
    dtype: Dtype = "float32"  # of the factors of matrix products
    epsilon: float = 1e-6  # of the LayerNorms
    kernel: AttentionKernel = NO_KERNEL

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch


class Masking(NamedTuple):
    """Which patches an encoder sees."""

    keep: Int[Array, "batch kept"]  # the visible patches, in their random order
    # the position of every patch in the sequence [visible, masked]
    restore: Int[Array, "batch patches"]
    masked: Bool[Array, "batch patches"]  # whether a patch is hidden


def random_mask(
    key: Key[Array, "..."],
    batch: int,
    patches: int,
    ratio: float,
) -> Masking:
    """Hide a random share of the patches, a new one for every sample (MAE, section 3).

    Args:
      key: one key, from which sample i gets fold_in(key, i), or one key per sample,
        [batch]: a sample's mask depends on its key alone.
      batch: samples.
      patches: patches per sample.
      ratio: share that is hidden, in [0, 1]; int(patches * (1 - ratio)) stay (with 0 all,
        in random order).

    Raises:
      InputError: for a ratio outside [0, 1].
    """
    # a key for each sample, so that its mask does not depend on the size of the batch
    keys = key
    if not key.ndim:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    noise = jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)
    return mask_by_noise(noise, ratio)


def mask_by_noise(noise: Float[Array, "batch patches"], ratio: float) -> Masking:
    """Show the patches with the least noise, in its order, and hide the others.

    Raises:
      InputError: for a ratio outside [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise InputError(f"mask_ratio: {ratio} is not in [0, 1]; nearest: {min(max(ratio, 0), 1)}")
    # truncated, as in MAE's release: 196 patches at a ratio of 0.75 leave 49
    visible = int(noise.shape[1] * (1 - ratio))
    shuffle = jnp.argsort(noise, axis=1)
    # the inverse permutation puts patches back in place
    restore = jnp.argsort(shuffle, axis=1)
    return Masking(shuffle[:, :visible], restore, restore >= visible)


def sincos_positions(grid: int, width: int) -> Float[Array, "tokens width"]:
    """Return fixed position embeddings [1 + grid * grid, width] of patches row by row.

    That of the class token is 0. The first half of the others encodes the column p, the
    second half the row p, as [sin(p w), cos(p w)] with w_i = 10000^(-i / (width / 4)).

    Raises:
      InputError: if width is not a multiple of 4.
    """
    if width % 4:
        raise InputError(
            f"decoder width: {width} is not a multiple of 4; nearest: {max(4, round(width / 4) * 4)}"
        )
    # w_i
    frequency = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    row, column = np.divmod(np.arange(grid * grid), grid)
    angles = [np.outer(index, frequency) for index in (column, row)]
    patches = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1)
    return jnp.asarray(np.concatenate([np.zeros((1, width)), patches]), jnp.float32)


class Decoder(nn.Module):
    """The whole decoder; see `decode`."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, latent, restore, prompt=None):
        c = self.config
        # a parameter only to be stored: MAE does not train the decoder's positions
        position = jax.lax.stop_gradient(self.param("pos", nn.initializers.zeros, (1 + c.grid**2, c.width)))
        mask = self.param("mask", nn.initializers.zeros, (c.width,))
        x = dense(c.width, NumberFormat(c.dtype), "embed")(latent)
        # mask tokens stand in for the hidden patches, and all patches go back to their
        # order in the image
        hidden = jnp.broadcast_to(mask, (x.shape[0], 1 + c.grid**2 - x.shape[1], c.width))
        shuffled = jnp.concatenate([x[:, 1:], hidden], axis=1)
        patches = jnp.take_along_axis(shuffled, restore[..., None], axis=1)
        x = (jnp.concatenate([x[:, :1], patches], axis=1) + position).astype(array_type(c.dtype))
        for i in range(c.depth):
            # pMAE's prompt joins the first block only
            joins = Joins(prompt if i == 0 else None)
            x = run_block(self, _block_config(c), f"block_{i:02d}", x, joins)
        x = LayerNorm(c.epsilon, name="norm")(x)
        # the class token predicts no patch
        return dense(3 * c.patch**2, NumberFormat(c.dtype), "predict")(x[:, 1:])


def _block_config(c: DecoderConfig) -> ViTConfig:
    shape = ViTConfig(c.image_size, c.patch, c.width, c.depth, c.heads, c.mlp, c.dtype, c.epsilon)
    return dataclasses.replace(shape, kernel=c.kernel)


def decode(
    config: DecoderConfig,
    params: PyTree,
    latent: Float[Array, "batch seen encoder_width"],
    restore: Int[Array, "batch patches"],
    prompt: Float[Array, "..."] | None = None,
) -> Float[Array, "batch patches pixels"]:
    """Predict the pixels of all patches, in the range that the decoder learned.

    Args:
      config: the static shape.
      params: as from `init_decoder` or `models.weights.pretrained`; an argument, never
        closed over. No gradient reaches the fixed `pos`.
      latent: the encoder's tokens after its final norm: class token, then the visible patches.
      restore: from the `Masking` with which they were encoded.
      prompt: tokens that join the input of block 0 and are dropped after it, [length,
        width] or [batch, length, width] (pMAE's reconstructive prompt).

    Returns:
      [batch, patches, patch * patch * 3].
    """
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return Decoder(config).apply({"params": params}, latent, restore, prompt)


def autoencoder(
    encoder: ViTConfig,
    decoder: DecoderConfig,
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
    std: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Autoencoder:
    """Make the `Autoencoder` of two static shapes.

    Args:
      encoder, decoder: the static shapes.
      mean, std: constants by which the decoder's training images were normalised.
    """

    def encode(
        params: PyTree,
        image: Array,
        keep: Array,
    ) -> Float[Array, "batch tokens width"]:
        tokens = apply_vit(encoder, params, image, Injection(keep=keep), full=True).tokens
        assert tokens is not None  # full
        return tokens

    return Autoencoder(
        encode, functools.partial(decode, decoder), decoder.patch, decoder.grid**2, decoder.width, mean, std
    )


def init_decoder(key: PRNGKeyArray, config: DecoderConfig) -> PyTree:
    """Draw the parameters, float32: {embed, mask, pos, block_00.., norm, predict}.

    As in MAE: xavier-uniform kernels, zero biases, a mask token from N(0, 0.02^2),
    sin-cos positions.
    """
    shapes, structure = jax.tree_util.tree_flatten_with_path(decoder_shapes(config))
    keys = jax.random.split(key, len(shapes))
    return structure.unflatten(
        [_draw(key, path[-1].key, x.shape, config) for key, (path, x) in zip(keys, shapes, strict=True)]
    )


def _draw(
    key: PRNGKeyArray,
    name: str,
    shape: tuple[int, ...],
    config: DecoderConfig,
) -> Array:
    if name == "pos":
        return sincos_positions(config.grid, config.width)
    initialisers = {
        "kernel": nn.initializers.xavier_uniform(),
        "bias": nn.initializers.zeros,
        "scale": nn.initializers.ones,
        "mask": nn.initializers.normal(0.02),
    }
    return initialisers[name](key, shape, jnp.float32)


@functools.lru_cache(maxsize=64)
def decoder_shapes(config: DecoderConfig) -> PyTree:
    """Return the shapes of all parameters as jax.ShapeDtypeStruct."""
    latent = jax.ShapeDtypeStruct((1, 1 + config.grid**2, config.encoder_width), jnp.float32)
    restore = jax.ShapeDtypeStruct((1, config.grid**2), jnp.int32)
    return jax.eval_shape(Decoder(config).init, jax.random.key(0), latent, restore)["params"]


def unpatchify(
    patches: Float[Array, "batch patches pixels"], patch: int
) -> Float[Array, "batch height width_px 3"]:
    """Put square images together again that `patchify` took apart."""
    side = math.isqrt(patches.shape[1])
    return rearrange(patches, "b (h w) (p q c) -> b (h p) (w q) c", h=side, p=patch, q=patch, c=3)


def hidden_pixels(
    masked: Bool[Array, "batch patches"],
    patch: int,
) -> Bool[Array, "batch height width_px 3"]:
    """Mark the pixels of hidden patches in images as from `unpatchify`."""
    pixels = jnp.broadcast_to(masked[..., None], (*masked.shape, 3 * patch**2))
    return unpatchify(pixels.astype(jnp.float32), patch) > 0


def reconstruction_loss(
    prediction: Float[Array, "batch patches pixels"],
    image: Float[Array, "batch height width_px 3"],
    masked: Bool[Array, "batch patches"],
    mask: Bool[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Return the mean squared error over hidden patches; 0 if none is hidden.

    It is sum(masked * error) / sum(masked), with error the mean over a patch's pixels
    (MAE, section 3, without per-patch normalisation of the pixels).

    Args:
      prediction: from `decode`.
      image: the target, in the same range.
      masked: from the `Masking`.
      mask: False for padding, which has no influence; None takes all examples.
    """
    counted = masked
    if mask is not None:
        counted = masked & mask[:, None]
    target = patchify(image, image.shape[1] // math.isqrt(prediction.shape[1]))
    # before the square: behind it, the gradient of padding that is not finite would be
    # NaN
    difference = jnp.where(counted[..., None], prediction - target, 0.0)
    return jnp.square(difference).mean(axis=-1).sum() / jnp.maximum(counted.sum(), 1)
