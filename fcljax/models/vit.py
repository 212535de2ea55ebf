"""A pre-norm Vision Transformer in Flax with named intermediates, into which adapters inject.

The architecture is timm's `vit_*_patch16_224` (Dosovitskiy et al. 2021): learned position embeddings, class
token, biased qkv, LayerNorm with eps 1e-6, exact GELU, no dropout. DINOv2 (Oquab et al. 2024) adds scaled
layers and registers, DINOv3 (Siméoni et al. 2025) rotary positions, CLIP (Radford et al. 2021) a norm before
the blocks. Adapters change it through an
`Injection` and never touch this code. The patch embedding is a reshape and a matrix product because
convolutions inside loops fall off XLA's fast path.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.mesh import by_itself
from fcljax.models.products import activated, attention, dense, matmul
from fcljax.models.shapes import ViTConfig
from fcljax.types import Autoencoder, Features, Network


class Lora(NamedTuple):
    """Low-rank updates of one block, unscaled: q += B_q A_q x, v += B_v A_v x, with x the output of norm1."""

    a_q: Float[Array, "rank width"]
    b_q: Float[Array, "width rank"]
    a_v: Float[Array, "rank width"]
    b_v: Float[Array, "width rank"]


class Prefix(NamedTuple):
    """Extra keys and values of one block, the heads' side by side, as in DualPrompt, CODA-Prompt and HePCo.

    They bypass norm1 and the qkv projection.
    """

    key: Float[Array, "batch length width"]
    value: Float[Array, "batch length width"]


class Injection(NamedTuple):
    """What an adapter adds to the frozen network; prompts, prefixes and updates by block index."""

    # Tokens that join the block's input, [batch, length, width], or [length, width] for all images alike.
    # Their outputs would be dropped after the block, so they enter only as extra keys and values, which gives
    # the same class token at a lower cost (FPPL release; equal to prefix-tuning with K = W_k norm1(p) + b_k
    # and V likewise).
    prompt: Mapping[int, Float[Array, "..."]] = {}
    prefix: Mapping[int, Prefix] = {}  # keys and values that are concatenated as they are
    lora: Mapping[int, Lora] = {}  # low-rank updates of q and v
    keep: Int[Array, "batch kept"] | None = None  # the patches that stay (masked autoencoding); None: all
    # Tokens between the class token and the patches, from the first block to the last, [batch, length, width]
    # or [length, width], with the class token's position embedding (L2P); their outputs: `Features.prompts`.
    tokens: Float[Array, "..."] | None = None


Parts = tuple[list[Array], list[Array], Callable[[list[Array], list[Array]], "Injection | None"]]


def per_image(injection: Injection | None) -> Parts:
    """What of an injection belongs to single images, leaves [batch, ...], what is the same for all images,
    and a function that puts (some images') values of the first and of the second in their places."""
    leaves, tree = jax.tree.flatten(injection)
    keep = None if injection is None else injection.keep
    # prompts, prefixes and tokens have three axes, of which the first is 1 or missing where all images share
    own = [leaf is keep or (leaf.ndim == 3 and len(leaf) > 1) for leaf in leaves]

    def join(some: list[Array], rest: list[Array]) -> Injection | None:
        given = iter(some)
        shared = iter(rest)
        return tree.unflatten([next(given) if mine else next(shared) for mine in own])

    some, rest = (
        [leaf for leaf, mine in zip(leaves, own, strict=True) if mine is each] for each in (True, False)
    )
    return some, rest, join


class LayerNorm(nn.Module):
    """A layer of `layer_norm` with its parameters; the result has this type."""

    epsilon: float
    result: str = "float32"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, width)
        bias = self.param("bias", nn.initializers.zeros, width)
        return layer_norm(x.astype(jnp.float32), scale, bias, self.epsilon).astype(self.result)


def _norm(c: ViTConfig, name: str, result: str = "float32") -> LayerNorm:
    """A norm that is computed in float32, with a result of that type. Where activations are rounded, the
    backward pass computes it again from what entered it; it keeps the result's gradient until then, which
    therefore has that type too."""
    return (LayerNorm if c.dtype == "float32" else nn.remat(LayerNorm))(c.epsilon, result, name=name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    epsilon: float,
) -> Float[Array, "*rows width"]:
    """scale (x - mean) / sqrt(variance + epsilon) + bias, mean and variance of each row (Ba et al. 2016).

    Its derivative is written out, for which XLA needs fewer passes over x.
    """
    centred, inverse = _standard(x, epsilon)
    return centred * (inverse * scale) + bias


def _standard(x: Array, epsilon: float) -> tuple[Array, Array]:
    """x - mean, and 1 / sqrt(variance + epsilon)."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean)
    return x - mean, jax.lax.rsqrt(variance + epsilon)


@layer_norm.defjvp
def _layer_norm_moved(epsilon: float, values: tuple, moves: tuple) -> tuple[Array, Array]:
    """The value, and how it moves: with x its standard form moves by what is left of the move without its
    mean and without its part along that form."""
    (x, scale, bias) = values
    (of_x, of_scale, of_bias) = moves
    centred, inverse = _standard(x, epsilon)
    standard = centred * inverse
    along = jnp.mean(standard * of_x, axis=-1, keepdims=True)
    rest = of_x - jnp.mean(of_x, axis=-1, keepdims=True) - standard * along
    value = centred * (inverse * scale) + bias
    return value, rest * (inverse * scale) + standard * of_scale + of_bias


def patch_angles(c: ViTConfig) -> Float[Array, "patches head"]:
    """The angles by which DINOv3 rotates the channels of a head's queries and keys, patches row by row.

    A quarter of the channels turns with the patch's row, the next with its column, each at its own period,
    base^(i / (head / 4)) half images; the second half of the channels has the angles of the first.
    """
    quarter = c.width // c.heads // 4
    period = c.rotary_base ** (jnp.arange(quarter) / quarter)
    place = 2 * (jnp.arange(c.grid) + 0.5) / c.grid - 1  # of the patches' centres, from -1 to 1
    angle = 2 * jnp.pi * place[:, None] / period
    rows = jnp.repeat(angle, c.grid, axis=0)
    columns = jnp.tile(angle, (c.grid, 1))
    return jnp.tile(jnp.concatenate([rows, columns], axis=-1), (1, 2))


def rotate(
    x: Float[Array, "batch heads tokens head"], angle: Float[Array, "*images tokens head"]
) -> Float[Array, "batch heads tokens head"]:
    """Each pair of channels (i, i + half) turned by its angle; an angle of 0 leaves it as it is."""
    first, second = jnp.split(x, 2, axis=-1)
    angle = angle[..., None, :, :]  # for all heads alike
    return x * jnp.cos(angle) + jnp.concatenate([-second, first], axis=-1) * jnp.sin(angle)


class Attention(nn.Module):
    """Multi-head attention of the first `queries` tokens of x over all its tokens, prompts and prefix.

    `angle` is that of each token of x, for networks with rotary positions. Prompts and prefixes have none.
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, x, prompt, prefix, lora, queries, angle=None):
        c = self.config
        qkv = dense(3 * c.width, c.dtype, "qkv")
        kernel, bias = self._materialise(qkv, x)
        q = matmul(x[:, :queries], kernel[:, : c.width]) + bias[: c.width]
        kv = matmul(x, kernel[:, c.width :]) + bias[c.width :]
        if lora is not None:
            q = q + low_rank(x[:, :queries], lora.a_q, lora.b_q)
            kv = kv.at[..., c.width :].add(low_rank(x, lora.a_v, lora.b_v))
        q = q.astype(c.dtype)
        kv = kv.astype(c.dtype)
        if prompt is not None:
            extra = matmul(prompt, kernel[:, c.width :]) + bias[c.width :]
            extra = jnp.broadcast_to(extra, (x.shape[0], *extra.shape[-2:])).astype(c.dtype)
            kv = jnp.concatenate([kv, extra], axis=1)
        # Heads before tokens: two plain batched products, a third faster on CPU than with heads inside.
        q = rearrange(q, "b n (h d) -> b h n d", h=c.heads)
        k, v = (rearrange(part, "b n (h d) -> b h n d", h=c.heads) for part in jnp.split(kv, 2, axis=-1))
        if c.qk_norm:
            q, k = (_norm(c, name, c.dtype)(part) for name, part in (("q_norm", q), ("k_norm", k)))
        if angle is not None:
            own = rotate(k[:, :, : x.shape[1]], angle).astype(c.dtype)
            q = rotate(q, angle[..., :queries, :]).astype(c.dtype)
            k = jnp.concatenate([own, k[:, :, x.shape[1] :]], axis=2)
        if prefix is not None:
            key, value = (rearrange(x.astype(c.dtype), "b n (h d) -> b h n d", h=c.heads) for x in prefix)
            k = jnp.concatenate([k, key], axis=2)
            v = jnp.concatenate([v, value], axis=2)
        chip = c.kernel.chip if by_itself() or not c.kernel.each else "none"
        return dense(c.width, c.dtype, "proj")(rearrange(attention(q, k, v, chip), "b h n d -> b n (h d)"))

    def _materialise(self, dense: nn.Dense, x: Array) -> tuple[Array, Array]:
        """The fused projection, its kernel in the compute type: q, k and v are of different tokens."""
        if self.is_initializing():
            dense(x)
        parameters = dense.variables["params"]
        return parameters["kernel"].astype(self.config.dtype), parameters["bias"]


def low_rank(
    x: Float[Array, "*rows width"], down: Float[Array, "rank width"], up: Float[Array, "width rank"]
) -> Float[Array, "*rows width"]:
    """B A x, both products in the type of x."""
    return matmul(matmul(x, down.T.astype(x.dtype)).astype(x.dtype), up.T.astype(x.dtype))


class HiddenLayer(nn.Module):
    """A linear layer with bias, and the activation of the MLPs: exact GELU (Hendrycks and Gimpel 2016), or
    OpenAI's cheaper form of it."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], c.mlp))
        bias = self.param("bias", nn.initializers.zeros, (c.mlp,))
        product = matmul(x.astype(c.dtype), kernel.astype(c.dtype))
        return activated(_activation(c), product, bias, c.dtype)


def _activation(c: ViTConfig) -> Callable[[Array], Array]:
    if c.activation == "quick_gelu":
        return _quick_gelu
    if c.activation == "gelu_tanh":
        return _gelu_by_tanh
    on_tpu = c.dtype == "bfloat16" and c.kernel.chip == "tpu"
    return _gelu_by_erfc if on_tpu else _gelu


def _gelu(x: Array) -> Array:
    """As torch has it. It takes a third of the time of the form by erfc on a CPU, three fifths on a GPU."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_by_erfc(x: Array) -> Array:
    """The same; XLA for TPUs keeps what erf gives in memory, and not what erfc gives."""
    return nn.gelu(x, approximate=False)


def _gelu_by_tanh(x: Array) -> Array:
    """Its approximation (Hendrycks and Gimpel 2016, section 2), which flax takes unless told otherwise."""
    return nn.gelu(x, approximate=True)


def _quick_gelu(x: Array) -> Array:
    return x * nn.sigmoid(1.702 * x)


class Scale(nn.Module):
    """A learned factor for each channel."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x * self.param("scale", nn.initializers.constant(1e-5), x.shape[-1:])


class Joins(NamedTuple):
    """What joins the input of one block: of an injection, and the tokens' angles."""

    prompt: Float[Array, "..."] | None = None
    prefix: Prefix | None = None
    lora: Lora | None = None
    angle: Float[Array, "*images tokens head"] | None = None


NOTHING_JOINS = Joins()


class Block(nn.Module):
    """One transformer block. Only the first `queries` tokens come out; others are only keys and values."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x, joins=NOTHING_JOINS, queries=None):
        c = self.config
        (prompt, prefix, lora, angle) = joins
        queries = x.shape[1] if queries is None else queries
        norm1 = _norm(c, "norm1", c.dtype)
        norm2 = _norm(c, "norm2", c.dtype)
        if prompt is not None:
            prompt = norm1(prompt)
        attended = Attention(c, name="attn")(norm1(x), prompt, prefix, lora, queries, angle)
        x = (x[:, :queries] + self._scaled("ls1", attended)).astype(c.dtype)
        hidden = HiddenLayer(c, name="fc1")(norm2(x))
        return (x + self._scaled("ls2", dense(c.width, c.dtype, "fc2")(hidden))).astype(c.dtype)

    def _scaled(self, name: str, x: Array) -> Array:
        """Each channel times a learned factor, if the network has such (Touvron et al. 2021)."""
        return Scale(name=name)(x) if self.config.layer_scale else x


def run_block(
    owner: nn.Module,
    config: ViTConfig,
    name: str,
    x: Float[Array, "batch tokens width"],
    joins: Joins,
    queries: int | None = None,
    remat: bool = False,
) -> Float[Array, "batch queries width"]:
    """The block of a network that has this name. Blocks of equal shapes are traced once. `remat`: as of
    `apply_vit`. Programs have the block itself, no call of a function: with calls XLA for TPUs moves 5 % more
    bytes in PILoRA's step."""
    if owner.is_initializing():
        return Block(config, name=name)(x, joins, queries)
    apply = jax.checkpoint(_apply_block, static_argnums=(0, 4)) if remat else _apply_block
    return apply(config, owner.variables["params"][name], x, joins, queries)


@functools.partial(jax.jit, static_argnums=(0, 4), inline=True)
def _apply_block(config: ViTConfig, params: PyTree, x: Array, joins: Joins, queries: int | None) -> Array:
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return Block(config).apply({"params": params}, x, joins, queries)


def patchify(
    image: Float[Array, "batch height width_px 3"], patch: int
) -> Float[Array, "batch patches pixels"]:
    """Patches row by row; the pixels of one in order row, column, channel, channel fastest."""
    return rearrange(image, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)


class ViT(nn.Module):
    """The whole network; see `apply_vit`."""

    config: ViTConfig
    remat: bool = False

    @nn.compact
    def __call__(self, image, injection=None, full=False):
        c = self.config
        injection = Injection() if injection is None else injection
        patches = patchify(image, c.patch)
        cls = self.param("cls", nn.initializers.normal(0.02), (c.width,))
        position = self.param("pos", nn.initializers.normal(0.02), (1 + c.grid**2, c.width))
        x = dense(c.width, c.dtype, "patch")(patches) + position[1:]
        if injection.keep is not None:
            x = jnp.take_along_axis(x, injection.keep[..., None], axis=1)
        first = [jnp.broadcast_to(cls + position[0], (x.shape[0], 1, c.width))]
        if injection.tokens is not None:
            extra = injection.tokens + position[0]
            first.append(jnp.broadcast_to(extra, (x.shape[0], *extra.shape[-2:])))
        read = sum(part.shape[1] for part in first)
        if c.registers:
            registers = self.param("registers", nn.initializers.normal(0.02), (c.registers, c.width))
            first.append(jnp.broadcast_to(registers, (x.shape[0], *registers.shape)))
        x = jnp.concatenate([*first, x], axis=1)
        if c.pre_norm:
            x = _norm(c, "norm_pre")(x)
        x = x.astype(c.dtype)
        angle = _token_angles(c, injection, x.shape[1]) if c.rotary_base else None
        taps = {"embed": x}
        for i in range(c.depth):
            # Only the class token and injected tokens are read from the last block: query, projection and
            # MLP are for them alone.
            name = f"block_{i:02d}"
            queries = read if i == c.depth - 1 and not full else None
            joins = Joins(injection.prompt.get(i), injection.prefix.get(i), injection.lora.get(i), angle)
            x = run_block(self, c, name, x, joins, queries, self.remat)
            taps[name] = x
        x = _norm(c, "norm")(x) if c.final_norm else x.astype(jnp.float32)
        return Features(x[:, 0], x if full else None, taps, x[:, 1:read] if read > 1 else None)


def _token_angles(c: ViTConfig, injection: Injection, tokens: int) -> Float[Array, "*images tokens head"]:
    """Those of the patches that stay, behind zeros for the tokens without a place."""
    angle = patch_angles(c)
    if injection.keep is not None:
        angle = angle[injection.keep]
    before = tokens - angle.shape[-2]
    return jnp.pad(angle, [(0, 0)] * (angle.ndim - 2) + [(before, 0), (0, 0)])


def init_vit(key: PRNGKeyArray, config: ViTConfig) -> PyTree:
    """Random parameters of a ViT, float32: {patch, cls, pos, block_00.., norm}, and registers and norm_pre
    where it has them."""
    image = jnp.zeros((1, config.image_size, config.image_size, 3))
    return jax.jit(lambda key, image: ViT(config).init(key, image, full=True)["params"])(key, image)


def apply_vit(
    config: ViTConfig,
    params: PyTree,
    image: Float[Array, "batch height width_px 3"],
    injection: Injection | None = None,
    full: bool = False,
    remat: bool = False,
) -> Features:
    """Features of normalised images.

    Args:
      config: the static shape; `image` must be config.image_size square.
      params: as from `init_vit` or `models.weights.pretrained`; an argument, never closed over.
      image: float images in the range that the checkpoint expects.
      injection: what an adapter adds.
      full: also return all tokens; else the last block computes the class token alone (same value, cheaper).
      remat: for gradients, keep what enters each block and compute the rest again.
    """
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return ViT(config, remat).apply({"params": params}, image, injection, full)


def attention_inputs(
    params: PyTree, features: Features, blocks: int
) -> Float[Array, "blocks batch tokens width"]:
    """What queries, keys and values of the first blocks are computed from: norm1 of what enters a block.

    Args:
      params: of the ViT.
      features: as from `apply_vit`, with taps.
      blocks: how many.
    """
    entering = ["embed", *(f"block_{i:02d}" for i in range(blocks - 1))]

    def normed(block: int, name: str) -> Array:
        norm = params[f"block_{block:02d}"]["norm1"]
        x = features.taps[name].astype(jnp.float32)
        # another epsilon of a checkpoint is next to 0 as well
        return layer_norm(x, norm["scale"], norm["bias"], ViTConfig.epsilon)

    return jnp.stack([normed(block, name) for block, name in enumerate(entering)])


def vit_network(
    config: ViTConfig,
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
    std: tuple[float, float, float] = (1.0, 1.0, 1.0),
    autoencoder: Autoencoder | None = None,
    remat: bool = False,
) -> Network:
    """The ViT as methods see it; `autoencoder` is around the same one, where there is a decoder. `remat`: as
    of `apply_vit`."""

    def init(key: PRNGKeyArray) -> PyTree:
        return init_vit(key, config)

    def apply(params, image, injection, train, mask=None):
        del train, mask  # no layer of a ViT depends on training or on other examples
        return apply_vit(config, params, image, injection, remat=remat), params

    image = (config.image_size, config.image_size, 3)
    return Network(init, apply, config.width, config.depth, image, mean, std, autoencoder)


def check_blocks(field: str, blocks: int, network: Network) -> None:
    """Check that a network has the blocks that an adapter changes.

    Raises:
      InputError: if it does not.
    """
    if not 1 <= blocks <= network.blocks:
        nearest = min(max(blocks, 1), network.blocks)
        raise InputError(
            f"{field}: {blocks} where the network has {network.blocks} blocks; nearest: {nearest}"
        )


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: ViTConfig) -> PyTree:
    """Shapes of all parameters as jax.ShapeDtypeStruct, without computing them."""
    return jax.eval_shape(lambda: init_vit(jax.random.key(0), config))
