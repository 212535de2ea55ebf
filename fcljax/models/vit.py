"""A pre-norm Vision Transformer in Flax with named intermediates, into which adapters
inject.

The architecture is timm's `vit_*_patch16_224` (Dosovitskiy et al. 2021): learned position
embeddings, class token, biased qkv, LayerNorm with eps 1e-6, exact GELU, no dropout.
DINOv2 (Oquab et al. 2024) adds scaled layers and registers, DINOv3 (Siméoni et al. 2025)
rotary positions, CLIP (Radford et al. 2021) a norm before the blocks. Adapters change it
through an `Injection` and never touch this code.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.mesh import by_itself
from fcljax.models.products import FLOAT32, activated, attention, dense, masked_attention, matmul
from fcljax.models.shapes import NumberFormat, ViTConfig
from fcljax.types import Autoencoder, Features, Network


class Lora(NamedTuple):
    """Unscaled low-rank updates of one block: q += B_q A_q x, v += B_v A_v x, x the
    output of norm1."""

    a_q: Float[Array, "rank width"]
    b_q: Float[Array, "width rank"]
    a_v: Float[Array, "rank width"]
    b_v: Float[Array, "width rank"]


class Prefix(NamedTuple):
    """Extra keys and values of one block, the heads' side by side (DualPrompt,
    CODA-Prompt, HePCo).

    They bypass norm1 and the qkv projection.
    """

    key: Float[Array, "batch length width"]
    value: Float[Array, "batch length width"]


class Injection(NamedTuple):
    """An adapter's additions to the frozen network; mappings are keyed by block index."""

    # Tokens that join the block's input, [batch, length, width], or [length, width] for
    # all images. Their outputs would be dropped after the block, so they enter only as
    # extra keys and values: the same class token at a lower cost (FPPL's release). It
    # equals prefix-tuning with K = W_k norm1(p) + b_k, and V likewise.
    prompt: Mapping[int, Float[Array, "..."]] = {}
    prefix: Mapping[int, Prefix] = {}
    lora: Mapping[int, Lora] = {}
    # visible patches (masked autoencoding); None: all
    keep: Int[Array, "batch kept"] | None = None
    # Tokens between the class token and the patches in all blocks, [batch, length,
    # width] or [length, width]. They get the class token's position embedding (L2P) and
    # leave the network as `Features.prompts`.
    tokens: Float[Array, "..."] | None = None
    # Of a text tower: vectors that stand behind the first token of all texts, at the next
    # positions (CoOp). The other tokens move on.
    context: Float[Array, "length width"] | None = None


def split_injection(
    injection: Injection | None,
) -> tuple[Injection | None, Injection | None]:
    """Split an injection into leaves of single images and those that images share.

    In each half, None stands for the leaves of the other one.
    """

    def belongs_to_images(
        leaf: Array,
    ) -> bool:
        # Prompts, prefixes and tokens of single images are [batch, length, width]; what
        # images share has a first axis of 1, or none. `keep` [batch, kept] is always of
        # single images.
        return (injection is not None and leaf is injection.keep) or (leaf.ndim == 3 and len(leaf) > 1)

    of_images = jax.tree.map(lambda leaf: leaf if belongs_to_images(leaf) else None, injection)
    shared = jax.tree.map(lambda leaf: None if belongs_to_images(leaf) else leaf, injection)
    return of_images, shared


def merge_injection(of_images: Injection | None, shared: Injection | None) -> Injection | None:
    """Merge the two halves of `split_injection`; the first may be of some images."""

    def present(image_leaf: Array | None, shared_leaf: Array | None) -> Array | None:
        return shared_leaf if image_leaf is None else image_leaf

    return jax.tree.map(present, of_images, shared, is_leaf=lambda leaf: leaf is None)


class LayerNorm(nn.Module):
    """A layer of `layer_norm` with its parameters.

    It computes in float32 and returns type `result`."""

    epsilon: float
    result: str = "float32"
    one_pass: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, width)
        bias = self.param("bias", nn.initializers.zeros, width)
        normed = layer_norm(x.astype(jnp.float32), scale, bias, self.epsilon, self.one_pass)
        return normed.astype(self.result)


def _norm(c: ViTConfig, name: str, result: str = "float32") -> LayerNorm:
    """Make a norm of the network.

    Under bfloat16 the backward pass recomputes it from its input."""
    # A norm computes in float32. Recomputed in the backward pass, it leaves only its
    # input in memory, which is bfloat16.
    layer = LayerNorm
    if c.dtype == "bfloat16":
        layer = nn.remat(LayerNorm)
    return layer(c.epsilon, result, not c.fewer_operations, name=name)


def embedding_norm(c: ViTConfig) -> LayerNorm:
    """Make the norm before the first block."""
    return _norm(c, "norm_pre")


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def layer_norm(
    x: Float[Array, "*rows width"],
    scale: Float[Array, " width"],
    bias: Float[Array, " width"],
    epsilon: float,
    one_pass: bool = True,
) -> Float[Array, "*rows width"]:
    """Return scale (x - mean) / sqrt(variance + epsilon) + bias, by row (Ba et al. 2016).

    Its derivative is written out because XLA then needs fewer passes over x.

    Args:
      x: rows to be standardised.
      scale, bias: of the result.
      epsilon: added to the variance.
      one_pass: compute the variance as E[x^2] - E[x]^2. False: as E[(x - E[x])^2], which
        XLA for GPUs makes one kernel of, with the norm and a sum before or behind it.
    """
    centred, inverse = _standardise(x, epsilon, one_pass)
    return centred * (inverse * scale) + bias


def _standardise(x: Array, epsilon: float, one_pass: bool) -> tuple[Array, Array]:
    """Return x - mean and 1 / sqrt(variance + epsilon)."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    if one_pass:
        # rounding can make it negative where x is constant
        variance = jnp.maximum(0.0, jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean)
    else:
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred, jax.lax.rsqrt(variance + epsilon)


def longest_normed(norm: Mapping[str, Array]) -> Float[Array, ""]:
    """Return the largest Euclidean norm of what a `LayerNorm` with these parameters computes.

    The standardised input has at most the norm sqrt(D).
    """
    scale = norm["scale"].astype(jnp.float32)
    bias = norm["bias"].astype(jnp.float32)
    return math.sqrt(len(scale)) * jnp.max(jnp.abs(scale)) + jnp.linalg.norm(bias)


@layer_norm.defjvp
def _layer_norm_jvp(
    epsilon: float,
    one_pass: bool,
    primals: tuple,
    tangents: tuple,
) -> tuple[Array, Array]:
    """Return the value and its tangent.

    With z the standardised x, dz = (dx - mean(dx) - z mean(z dx)) / sqrt(variance +
    epsilon).
    """
    x, scale, bias = primals
    dx, dscale, dbias = tangents
    centred, inverse = _standardise(x, epsilon, one_pass)
    z = centred * inverse
    along_z = jnp.mean(z * dx, axis=-1, keepdims=True)
    projected = dx - jnp.mean(dx, axis=-1, keepdims=True) - z * along_z
    value = centred * (inverse * scale) + bias
    return value, projected * (inverse * scale) + z * dscale + dbias


def patch_angles(c: ViTConfig) -> Float[Array, "patches head"]:
    """Return the angles by which DINOv3 rotates a head's queries and keys.

    Patches are row by row. A quarter of the channels turns with the patch's row, the
    next with its column, channel i at a period of base^(i / (head / 4)) half images.
    The second half of the channels repeats the angles of the first.
    """
    quarter = c.width // c.heads // 4
    period = c.rotary_base ** (jnp.arange(quarter) / quarter)
    # centres of the patches, from -1 to 1
    centre = 2 * (jnp.arange(c.grid) + 0.5) / c.grid - 1
    angle = 2 * jnp.pi * centre[:, None] / period
    by_row = jnp.repeat(angle, c.grid, axis=0)
    by_column = jnp.tile(angle, (c.grid, 1))
    return jnp.tile(jnp.concatenate([by_row, by_column], axis=-1), (1, 2))


def rotate(
    x: Float[Array, "batch heads tokens head"], angle: Float[Array, "*images tokens head"]
) -> Float[Array, "batch heads tokens head"]:
    """Turn each pair of channels (i, i + half) by its angle."""
    first_half, second_half = jnp.split(x, 2, axis=-1)
    angle = angle[..., None, :, :]  # all heads share it
    quarter_turn = jnp.concatenate([-second_half, first_half], axis=-1)
    return x * jnp.cos(angle) + quarter_turn * jnp.sin(angle)


class Attention(nn.Module):
    """Multi-head attention of the first `queries` tokens of x over x, prompts and prefix.

    `angle` has the rotary positions of x's tokens; prompts and prefixes have none.
    `mask` [batch, 1 or queries, tokens] is False for tokens of x that a query does not read.
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, x, prompt, prefix, lora, queries, angle=None, mask=None):
        c = self.config
        number_format = c.number_format
        dtype = number_format.array
        # one kernel, as in timm, but two products: queries may be of fewer tokens than
        # keys and values
        kernel, bias = self._parameters(dense(3 * c.width, number_format, "qkv"), x)
        q = self._project(x[:, :queries], kernel[:, : c.width], bias[: c.width])
        kv_kernel = kernel[:, c.width :]
        kv_bias = bias[c.width :]
        kv = self._project(x, kv_kernel, kv_bias)
        if lora is not None:
            q = q + low_rank(x[:, :queries], lora.a_q, lora.b_q, number_format)
            update = low_rank(x, lora.a_v, lora.b_v, number_format)
            kv = kv.at[..., c.width :].add(update.astype(kv.dtype))
        q = q.astype(dtype)
        kv = kv.astype(dtype)
        # prompts are keys and values alone: their outputs would be dropped (`Injection`)
        if prompt is not None:
            prompt_kv = self._project(prompt, kv_kernel, kv_bias)
            kv = jnp.concatenate([kv, for_each_image(prompt_kv, len(x)).astype(dtype)], axis=1)

        q = self._by_head(q)
        k, v = map(self._by_head, jnp.split(kv, 2, axis=-1))
        if c.qk_norm:
            q = _norm(c, "q_norm", dtype)(q)
            k = _norm(c, "k_norm", dtype)(k)
        if angle is not None:
            # the keys of prompts stand behind those of x, and have no place in the image
            tokens = x.shape[1]
            rotated = rotate(k[:, :, :tokens], angle).astype(dtype)
            q = rotate(q, angle[..., :queries, :]).astype(dtype)
            k = jnp.concatenate([rotated, k[:, :, tokens:]], axis=2)
        if prefix is not None:
            k = jnp.concatenate([k, self._by_head(prefix.key.astype(dtype))], axis=2)
            v = jnp.concatenate([v, self._by_head(prefix.value.astype(dtype))], axis=2)

        if mask is None:
            # XLA cannot divide the kernel over several devices
            chip = c.kernel.chip if by_itself() or not c.kernel.single_device else "none"
            attended = attention(q, k, v, chip, number_format)
        else:
            # prompts and prefixes stand behind the tokens, and every query reads them
            mask = jnp.pad(mask, [(0, 0), (0, 0), (0, k.shape[2] - mask.shape[2])], constant_values=True)
            attended = masked_attention(q, k, v, mask, number_format)
        return dense(c.width, number_format, "proj")(rearrange(attended, "b h n d -> b n (h d)"))

    def _project(self, x: Array, kernel: Array, bias: Array) -> Array:
        """Return x @ kernel + bias, in the type of the product."""
        result = matmul(x, kernel, self.config.number_format)
        return result + bias.astype(result.dtype)

    def _by_head(self, x: Array) -> Array:
        """Put heads before tokens: two plain batched products, a third faster on a
        CPU."""
        return rearrange(x, "b n (h d) -> b h n d", h=self.config.heads)

    def _parameters(self, layer: nn.Dense, x: Array) -> tuple[Array, Array]:
        """Return the layer's kernel, in the compute type, and bias; create them if need
        be."""
        if self.is_initializing():
            layer(x)
        parameters = layer.variables["params"]
        return parameters["kernel"].astype(self.config.number_format.array), parameters["bias"]


def for_each_image(
    tokens: Float[Array, "..."],
    batch: int,
) -> Float[Array, "batch length width"]:
    """Repeat tokens [length, width] for all images, unless they have a batch axis."""
    return jnp.broadcast_to(tokens, (batch, *tokens.shape[-2:]))


def low_rank(
    x: Float[Array, "*rows width"],
    down: Float[Array, "rank width"],
    up: Float[Array, "width rank"],
    number_format: NumberFormat = FLOAT32,
) -> Float[Array, "*rows width"]:
    """Return B A x, with both products in the type of x."""
    projected = matmul(x, down.T.astype(x.dtype), number_format).astype(x.dtype)
    return matmul(projected, up.T.astype(x.dtype), number_format)


class HiddenLayer(nn.Module):
    """The first linear layer of an MLP, with its activation."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], c.mlp))
        bias = self.param("bias", nn.initializers.zeros, (c.mlp,))
        dtype = c.number_format.array
        product = matmul(x.astype(dtype), kernel.astype(dtype), c.number_format)
        return activated(mlp_activation(c), product, bias, dtype)


def mlp_activation(c: ViTConfig) -> Callable[[Array], Array]:
    """Return the activation of a network's MLPs."""
    if c.activation == "quick_gelu":
        return _quick_gelu
    if c.activation == "gelu_tanh":
        return _gelu_tanh
    if c.fewer_operations:
        return gelu_polynomial
    # for the backward pass XLA for TPUs stores the result of erf, but recomputes that
    # of erfc
    if c.dtype == "bfloat16" and c.kernel.chip == "tpu":
        return _gelu_erfc
    return _gelu


def _gelu(x: Array) -> Array:
    """Return exact GELU (Hendrycks and Gimpel 2016), as torch computes it.

    It takes a third of the time of the form by erfc on a CPU, three fifths on a GPU.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_erfc(x: Array) -> Array:
    return nn.gelu(x, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    """Return GELU's approximation by tanh (Hendrycks and Gimpel 2016, section 2)."""
    return nn.gelu(x, approximate=True)


# Phi(x) - 1/2 = x q(x^2) on [-4.4, 4.4]: q by rising powers, the least largest error of
# x Phi(x) among polynomials of degree 8 that reach 1/2 at the border
_PHI_BORDER = 4.4
_PHI = (
    0.39876304,
    -0.066076805,
    0.0096432129,
    -0.0010550385,
    8.4299493e-05,
    -4.7254091e-06,
    1.7411124e-07,
    -3.7547533e-09,
    3.5702123e-11,
)


@jax.custom_jvp
def gelu_polynomial(x: Array) -> Array:
    """Return GELU within 5e-5, without the division of erf.

    For bfloat16, whose rounding is coarser: where |x| < 2 the relative error is below
    2^-10. The derivative is that of GELU, Phi(x) + x phi(x), within 1e-4.
    """
    return x * _normal_distribution(x)


def _normal_distribution(x: Array) -> Array:
    """Return Phi(x), the normal distribution function, by a polynomial."""
    inside = jnp.clip(x, -_PHI_BORDER, _PHI_BORDER)
    square = inside * inside
    slope = jnp.full_like(x, _PHI[-1])
    for coefficient in reversed(_PHI[:-1]):
        slope = slope * square + coefficient
    return 0.5 + inside * slope


@gelu_polynomial.defjvp
def _gelu_polynomial_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,) = primals
    (dx,) = tangents
    distribution = _normal_distribution(x)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * distribution, dx * (distribution + x * density)


def _quick_gelu(x: Array) -> Array:
    """Return OpenAI's approximation of GELU, x sigmoid(1.702 x)."""
    return x * nn.sigmoid(1.702 * x)


class Scale(nn.Module):
    """A learned factor for each channel (Touvron et al. 2021)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x * self.param("scale", nn.initializers.constant(1e-5), x.shape[-1:])


class Joins(NamedTuple):
    """What joins one block: its part of an injection, rotary positions of the tokens,
    which are read."""

    prompt: Float[Array, "..."] | None = None
    prefix: Prefix | None = None
    lora: Lora | None = None
    angle: Float[Array, "*images tokens head"] | None = None
    mask: Bool[Array, "batch #queries tokens"] | None = None


NOTHING_JOINS = Joins()


# names of the norms behind a block's sums
POST_NORMS = ("post_norm1", "post_norm2")


class Block(nn.Module):
    """One transformer block.

        x = x + ls1 attention(norm1(x))
        x = x + ls2 fc2(gelu(fc1(norm2(x))))

    With `post_norm` the norms stand behind the sums (Vaswani et al. 2017):

        x = norm1(x + attention(x))
        x = norm2(x + fc2(gelu(fc1(x))))

    It returns the first `queries` tokens; the others serve as keys and values only.
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, x, joins=NOTHING_JOINS, queries=None):
        c = self.config
        prompt, prefix, lora, angle, mask = joins
        if queries is None:
            queries = x.shape[1]
        dtype = c.number_format.array
        norm1 = self._norm_before("norm1")
        norm2 = self._norm_before("norm2")
        # prompts join the block's input, so they pass its first norm as tokens do
        if prompt is not None:
            prompt = norm1(prompt)
        # added in float32 and stored in the compute type: under bfloat16 half the memory
        attended = Attention(c, name="attn")(norm1(x), prompt, prefix, lora, queries, angle, mask)
        x = (x[:, :queries] + self._scaled("ls1", attended)).astype(dtype)
        if c.post_norm:
            x = _norm(c, POST_NORMS[0], dtype)(x)
        hidden = HiddenLayer(c, name="fc1")(norm2(x))
        out = dense(c.width, c.number_format, "fc2")(hidden)
        x = (x + self._scaled("ls2", out)).astype(dtype)
        if c.post_norm:
            x = _norm(c, POST_NORMS[1], dtype)(x)
        return x

    def _norm_before(self, name: str) -> Callable[[Array], Array]:
        """Make the norm before a part of the block; with `post_norm` there is none."""
        c = self.config
        if c.post_norm:
            return _unchanged
        return _norm(c, name, c.number_format.array)

    def _scaled(self, name: str, x: Array) -> Array:
        return Scale(name=name)(x) if self.config.layer_scale else x


def _unchanged(x: Array) -> Array:
    return x


def run_block(
    owner: nn.Module,
    config: ViTConfig,
    name: str,
    x: Float[Array, "batch tokens width"],
    joins: Joins,
    queries: int | None = None,
    remat: bool = False,
) -> Float[Array, "batch queries width"]:
    """Run the network's block of this name. Blocks of equal shapes are traced once.

    Args:
      owner: the network, which holds the block's parameters.
      config, name: the block's shape and name.
      x, joins, queries: as of `Block`.
      remat: as of `apply_vit`.
    """
    if owner.is_initializing():
        return Block(config, name=name)(x, joins, queries)
    apply = _apply_block
    if remat:
        apply = jax.checkpoint(_apply_block, static_argnums=(0, 4))
    return apply(config, owner.variables["params"][name], x, joins, queries)


# Inlined: with calls of functions, XLA for TPUs moves 5 % more bytes in PILoRA's step.
@functools.partial(jax.jit, static_argnums=(0, 4), inline=True)
def _apply_block(
    config: ViTConfig,
    params: PyTree,
    x: Array,
    joins: Joins,
    queries: int | None,
) -> Array:
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return Block(config).apply({"params": params}, x, joins, queries)


def patchify(
    image: Float[Array, "batch height width_px 3"], patch: int
) -> Float[Array, "batch patches pixels"]:
    """Cut images into patches, row by row; a patch's pixels are in order row, column,
    channel. With a matrix product this is the patch embedding: convolutions inside loops
    fall off XLA's fast path."""
    return rearrange(image, "b (h p) (w q) c -> b (h w) (p q c)", p=patch, q=patch)


class ViT(nn.Module):
    """The whole network; see `apply_vit`."""

    config: ViTConfig
    remat: bool = False

    @nn.compact
    def __call__(self, image, injection=None, full=False):
        c = self.config
        if injection is None:
            injection = Injection()
        batch = len(image)
        patches = patchify(image, c.patch)
        cls = self.param("cls", nn.initializers.normal(0.02), (c.width,))
        position = self.param("pos", nn.initializers.normal(0.02), (1 + c.grid**2, c.width))
        x = dense(c.width, c.number_format, "patch")(patches) + position[1:]
        if injection.keep is not None:
            x = jnp.take_along_axis(x, injection.keep[..., None], axis=1)

        # Order of tokens: class token, injected tokens, registers, patches.
        lead = [jnp.broadcast_to(cls + position[0], (batch, 1, c.width))]
        if injection.tokens is not None:
            lead.append(for_each_image(injection.tokens + position[0], batch))
        outputs = sum(tokens.shape[1] for tokens in lead)
        if c.registers:
            registers = self.param("registers", nn.initializers.normal(0.02), (c.registers, c.width))
            lead.append(for_each_image(registers, batch))
        x = jnp.concatenate([*lead, x], axis=1)
        if c.pre_norm:
            x = embedding_norm(c)(x)
        x = x.astype(c.number_format.array)

        angle = _token_angles(c, injection, x.shape[1]) if c.rotary_base else None
        return run_blocks(self, c, x, injection, outputs, Joins(angle=angle), full, self.remat)


def run_blocks(
    owner: nn.Module,
    c: ViTConfig,
    x: Float[Array, "batch tokens width"],
    injection: Injection,
    outputs: int,
    of_all: Joins = NOTHING_JOINS,
    full: bool = False,
    remat: bool = False,
) -> Features:
    """Run all blocks and the final norm.

    Args:
      owner: the network, which holds the parameters.
      c: its shape.
      x: the class token, injected tokens and all others.
      injection: what an adapter adds.
      outputs: how many of the first tokens are read in the end.
      of_all: what joins every block.
      full, remat: as of `apply_vit`.
    """
    taps = {"embed": x}
    for i in range(c.depth):
        name = f"block_{i:02d}"
        queries = None
        if i == c.depth - 1 and not full:
            # of the last block only the class token and injected tokens are read
            queries = outputs
        joins = of_all._replace(
            prompt=injection.prompt.get(i), prefix=injection.prefix.get(i), lora=injection.lora.get(i)
        )
        x = run_block(owner, c, name, x, joins, queries, remat)
        taps[name] = x
    x = _norm(c, "norm")(x) if c.final_norm else x.astype(jnp.float32)
    prompts = x[:, 1:outputs] if outputs > 1 else None
    return Features(x[:, 0], x if full else None, taps, prompts)


def _token_angles(c: ViTConfig, injection: Injection, tokens: int) -> Float[Array, "*images tokens head"]:
    """Return the visible patches' angles, behind zeros for other tokens."""
    angle = patch_angles(c)
    if injection.keep is not None:
        angle = angle[injection.keep]
    lead = tokens - angle.shape[-2]
    return jnp.pad(angle, [(0, 0)] * (angle.ndim - 2) + [(lead, 0), (0, 0)])


def init_vit(key: PRNGKeyArray, config: ViTConfig) -> PyTree:
    """Draw the parameters of a ViT, float32: {patch, cls, pos, block_00.., norm}.

    Networks that have them also get registers and norm_pre.
    """
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
    """Compute the features of normalised images.

    Args:
      config: the static shape; `image` must be config.image_size square.
      params: as from `init_vit` or `models.weights.pretrained`; an argument, never closed over.
      image: float images in the range that the checkpoint expects.
      injection: what an adapter adds.
      full: also return all tokens; else the last block computes only those that are read
        (same values, cheaper).
      remat: for gradients, store each block's input and recompute the rest.
    """
    # pyrefly: ignore[bad-return]  # a pair only where variables may change
    return ViT(config, remat).apply({"params": params}, image, injection, full)


def attention_inputs(
    params: PyTree, features: Features, blocks: int
) -> Float[Array, "blocks batch tokens width"]:
    """Return the inputs of the first blocks' qkv projections, after norm1.

    With `post_norm` there is no norm1. Padding of texts is 0.

    Args:
      params: of the ViT.
      features: as from `apply_vit` or `apply_text`, with taps.
      blocks: how many.
    """
    inputs = ["embed", *(f"block_{i:02d}" for i in range(blocks - 1))]

    def normalised(block: int, name: str) -> Array:
        x = features.taps[name].astype(jnp.float32)
        norm = params[f"block_{block:02d}"].get("norm1")
        if norm is None:
            return x
        # a checkpoint may have another epsilon, which is as small beside the variance
        return layer_norm(x, norm["scale"], norm["bias"], ViTConfig.epsilon)

    x = jnp.stack([normalised(block, name) for block, name in enumerate(inputs)])
    is_read = features.taps.get("is_read")
    if is_read is None:
        return x
    return jnp.where(is_read[..., None], x, 0.0)


def longest_attention_inputs(params: PyTree, blocks: int) -> Float[Array, " blocks"]:
    """Return a bound on the norm of an image's `attention_inputs` in a block.

    Tokens that an adapter adds are not counted: pairs have none.
    """
    tokens = len(params["pos"]) + len(params.get("registers", ()))
    norms = (_last_norm_before(params, block) for block in range(blocks))
    return math.sqrt(tokens) * jnp.stack([longest_normed(norm) for norm in norms])


def _last_norm_before(params: PyTree, block: int) -> Mapping[str, Array]:
    """Return the norm whose result a block's qkv projection reads."""
    norm = params[f"block_{block:02d}"].get("norm1")
    if norm is not None:
        return norm
    if block == 0:
        return params["norm_pre"]
    return params[f"block_{block - 1:02d}"][POST_NORMS[1]]


def longest_output(c: ViTConfig) -> Callable[[PyTree], Float[Array, ""]] | None:
    """Return a function of the parameters that bounds the norm of a feature; None without
    a last norm."""

    def longest(params: PyTree) -> Float[Array, ""]:
        if c.final_norm:
            return longest_normed(params["norm"])
        return longest_normed(params[f"block_{c.depth - 1:02d}"][POST_NORMS[1]])

    return longest if c.final_norm or c.post_norm else None


def vit_network(
    config: ViTConfig,
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
    std: tuple[float, float, float] = (1.0, 1.0, 1.0),
    autoencoder: Autoencoder | None = None,
    remat: bool = False,
) -> Network:
    """Make the `Network` of a ViT; arguments as of `networks.make_network`."""

    def init(key: PRNGKeyArray) -> PyTree:
        return init_vit(key, config)

    # no layer of a ViT depends on training or on other examples
    def apply(params, image, injection, _train, _mask=None):
        return apply_vit(config, params, image, injection, remat=remat), params

    image = (config.image_size, config.image_size, 3)
    longest = longest_output(config)
    return Network(init, apply, config.width, config.depth, image, mean, std, autoencoder, longest=longest)


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
    """Return the shapes of all parameters as jax.ShapeDtypeStruct."""
    return jax.eval_shape(lambda: init_vit(jax.random.key(0), config))
