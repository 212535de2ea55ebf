"""FedTPG: federated text-driven prompt generation (Qiu et al., ICLR 2024, arXiv
2310.06123). CLIP stays frozen; clients train a network that makes context vectors of the
names of the classes that compete.

    T                    text features of these classes, [n, E]
    generator            V = CrossAttention(Q, T, T), with learned queries Q [M, token width]
                         V = V + MLP(V), a gated one
                         and, with --generator-layers, self-attention layers on V
    prompt of class c    start, V_1 .. V_M, name of c, end
    client               trains it by cross-entropy over the task's classes of
                         s cos(W_i f(x), W_t text(prompt of c))
    server               averages the generator's parameters

Clients generate context vectors from the classes of their task. In evaluation they are
generated from the classes seen so far or, for the accuracy on new classes, from these.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.models.clip import ClassTexts
from fcljax.models.heads import mask_logits
from fcljax.models.products import exact_einsum
from fcljax.models.vit import layer_norm
from fcljax.options import ContextOptions, option
from fcljax.parts.class_names import InitClassifier, behind_context, named_learner, text_side
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import cross_entropy_loss
from fcljax.parts.optimisers import SGD
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Method, TextTower

EPSILON = 1e-5  # of the LayerNorms
GROWTH = 4  # width of the MLP's hidden layer, in widths of a token
QUERY_STD = 0.02  # standard deviation of the initial queries


@dataclasses.dataclass(frozen=True)
class FedTPGOptions(ContextOptions):
    """Options of FedTPG; the values are those of its release."""

    generator_heads: int = 4
    """Heads of the generator's attention."""
    generator_layers: int = option(0, least=0)
    """Self-attention layers of the generator, after its cross-attention."""


PRESETS = with_mini({"intended": Preset(FedTPGOptions(), RunConfig(optimiser=SGD(momentum=0.9), lr=3e-3))})


def fedtpg(options: FedTPGOptions, run: Run) -> Method:
    """Compose FedTPG.

    Raises:
      InputError: for heads that do not divide the width of the text tower's tokens.
    """
    tower = text_side(run, "fedtpg")
    heads = options.generator_heads
    if tower.width % heads:
        nearest = max(number for number in range(1, heads) if tower.width % number == 0)
        raise InputError(
            f"generator_heads: {heads} does not divide the width {tower.width} of the text tower's tokens; "
            f"nearest: {nearest}"
        )

    def context(
        generator: PromptGenerator,
        texts: ClassTexts,
        competing: Bool[Array, " C"],
    ) -> Array:
        return generate(generator, texts.rows, competing, heads)

    learner = named_learner(run, behind_context(tower, new_generator(options, tower), context))
    return federate(run, learner, loss=cross_entropy_loss())


# ---- the generator -------------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear layer."""

    kernel: Float[Array, "from to"]
    bias: Float[Array, " to"]


class NormParams(NamedTuple):
    """A LayerNorm's parameters."""

    scale: Float[Array, " width"]
    bias: Float[Array, " width"]


class PromptAttention(NamedTuple):
    """Multi-head attention, and the norms of what it reads."""

    norm: NormParams
    norm_texts: NormParams | tuple[()]
    """Of the texts; () for self-attention."""
    query: Linear
    key: Linear
    value: Linear
    out: Linear


class MLP(NamedTuple):
    """A gated MLP: W_2 (a gelu(b)), with [a, b] = W_1 norm(x)."""

    norm: NormParams
    first: Linear
    second: Linear


class Layer(NamedTuple):
    """PromptAttention and an MLP."""

    attention: PromptAttention
    mlp: MLP


class PromptGenerator(NamedTuple):
    """The trainable parameters of FedTPG."""

    queries: Float[Array, "M token_width"]
    """Q."""
    cross: Layer
    layers: tuple[Layer, ...]
    """Self-attention layers."""


def generate(
    generator: PromptGenerator, texts: Float[Array, "C E"], competing: Bool[Array, " C"], heads: int
) -> Float[Array, "M token_width"]:
    """Return the context vectors V for the classes that compete.

    Args:
      generator: its parameters.
      texts: text features of all classes.
      competing: the classes whose features are read.
      heads: of attention.
    """
    cross = generator.cross
    # no residual connection around the cross-attention, as in the release
    x = attend(cross.attention, generator.queries, texts, competing, heads)
    x = x + gated(cross.mlp, x)
    for layer in generator.layers:
        x = x + attend(layer.attention, x, None, None, heads)
        x = x + gated(layer.mlp, x)
    return x


def attend(
    params: PromptAttention,
    x: Float[Array, "M token_width"],
    texts: Float[Array, "C E"] | None,
    readable: Bool[Array, " C"] | None,
    heads: int,
) -> Float[Array, "M token_width"]:
    """Return the attention of x to texts, or to x itself where texts is None."""
    x = normed(params.norm, x)
    source = x
    if texts is not None:
        assert isinstance(params.norm_texts, NormParams)
        source = normed(params.norm_texts, texts)
    query, key, value = (
        rearrange(applied(layer, tokens), "n (h d) -> h n d", h=heads)
        for layer, tokens in ((params.query, x), (params.key, source), (params.value, source))
    )
    score = exact_einsum("hmd,hnd->hmn", query, key) * query.shape[-1] ** -0.5
    # texts of all classes have a fixed shape; the mask leaves those that compete
    if readable is not None:
        score = mask_logits(score, readable)
    attended = exact_einsum("hmn,hnd->hmd", jax.nn.softmax(score), value)
    return applied(params.out, rearrange(attended, "h n d -> n (h d)"))


def gated(params: MLP, x: Float[Array, "M token_width"]) -> Float[Array, "M token_width"]:
    """Return the gated MLP of x."""
    # torch's gelu is exact by default, JAX's an approximation
    linear, gate = jnp.split(applied(params.first, normed(params.norm, x)), 2, axis=-1)
    return applied(params.second, linear * jax.nn.gelu(gate, approximate=False))


def applied(layer: Linear, x: Float[Array, "n from"]) -> Float[Array, "n to"]:
    """Return x W + b."""
    return exact_einsum("nf,ft->nt", x, layer.kernel) + layer.bias


def normed(norm: NormParams, x: Float[Array, "n width"]) -> Float[Array, "n width"]:
    """Return x after a LayerNorm."""
    return layer_norm(x, norm.scale, norm.bias, EPSILON)


# ---- the generator's initial values --------------------------------------------------------


def new_generator(options: FedTPGOptions, tower: TextTower) -> InitClassifier:
    """Return a function that draws the generator's parameters as torch's layers do."""
    width = tower.width

    def init(key: PRNGKeyArray, _texts: ClassTexts) -> PromptGenerator:
        query_key, cross_key, *keys = jax.random.split(key, 2 + options.generator_layers)
        queries = QUERY_STD * jax.random.normal(query_key, (options.context_length, width))
        layers = tuple(_new_layer(layer_key, width, None) for layer_key in keys)
        return PromptGenerator(queries, _new_layer(cross_key, width, tower.joint), layers)

    return init


def _new_layer(key: PRNGKeyArray, width: int, texts: int | None) -> Layer:
    """Draw a layer. `texts` is the width of the texts that it attends to; None: itself."""
    keys = jax.random.split(key, 6)
    source = width if texts is None else texts
    # as in torch's MultiheadAttention: Xavier for query, key and value, and biases 0
    attention = PromptAttention(
        _new_norm(width),
        () if texts is None else _new_norm(texts),
        _xavier(keys[0], width, width),
        _xavier(keys[1], source, width),
        _xavier(keys[2], source, width),
        _uniform(keys[3], width, width)._replace(bias=jnp.zeros(width)),
    )
    hidden = GROWTH * width
    mlp = MLP(_new_norm(width), _uniform(keys[4], width, 2 * hidden), _uniform(keys[5], hidden, width))
    return Layer(attention, mlp)


def _new_norm(width: int) -> NormParams:
    return NormParams(jnp.ones(width), jnp.zeros(width))


def _xavier(key: PRNGKeyArray, inputs: int, outputs: int) -> Linear:
    bound = (6 / (inputs + outputs)) ** 0.5
    return Linear(_between(key, (inputs, outputs), bound), jnp.zeros(outputs))


def _uniform(key: PRNGKeyArray, inputs: int, outputs: int) -> Linear:
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return Linear(_between(kernel_key, (inputs, outputs), bound), _between(bias_key, (outputs,), bound))


def _between(key: PRNGKeyArray, shape: tuple[int, ...], bound: float) -> Array:
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
