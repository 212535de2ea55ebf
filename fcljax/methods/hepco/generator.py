"""A conditional generator of latents: noise and a class to a point of feature space (HePCo, section 4.2).

The class's embedding beside the noise, three linear layers, batch normalisation and ReLU between them: small,
1,092,352 parameters for 100 classes and features of width 768.
"""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.models.initialisers import uniform_by_inputs

HIDDEN = (256, 1024)


class GeneratorConfig(NamedTuple):
    """Static shape of a generator. norm: are there layers of batch normalisation?"""

    classes: int
    width: int
    noise: int = 64
    label: int = 64
    norm: bool = True


class Generator(NamedTuple):
    """Parameters, and the running statistics of batch normalisation."""

    params: PyTree
    stats: PyTree


def _first_of(most: int, init: nn.initializers.Initializer) -> nn.initializers.Initializer:
    """The same first values, drawn as the first of `most`: every size drawn is compiled by itself."""

    def values(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return init(key, (most,), dtype)[: math.prod(shape)].reshape(shape)

    return values


def _linear(width: int, fan_in: int, most: int, name: str) -> nn.Dense:
    init = _first_of(most, uniform_by_inputs(fan_in))
    return nn.Dense(width, kernel_init=init, bias_init=init, name=name)


class _LatentGenerator(nn.Module):
    config: GeneratorConfig

    @nn.compact
    def __call__(self, noise: Array, label: Array, train: bool) -> Array:
        c = self.config
        widths = (c.noise + c.label, *HIDDEN, c.width)
        most = max(c.classes * c.label, *map(math.prod, itertools.pairwise(widths)))
        init = _first_of(most, nn.initializers.normal(1.0))
        embedding = nn.Embed(c.classes, c.label, embedding_init=init, name="label")
        x = jnp.concatenate([noise, embedding(label)], axis=-1)
        for i, width in enumerate(HIDDEN):
            x = _linear(width, x.shape[-1], most, f"linear{i}")(x)
            if c.norm:
                # torch's momentum of 0.1 is 0.9 here
                x = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name=f"norm{i}")(x)
            x = nn.relu(x)
        return _linear(c.width, x.shape[-1], most, "out")(x)


def init_generator(config: GeneratorConfig, key: PRNGKeyArray) -> Generator:
    """A new generator."""
    example = jnp.zeros((2, config.noise)), jnp.zeros(2, jnp.int32)
    variables = _LatentGenerator(config).init(key, *example, False)
    return Generator(variables["params"], variables.get("batch_stats", {}))


def generate(
    config: GeneratorConfig,
    generator: Generator,
    noise: Float[Array, "batch noise"],
    label: Int[Array, " batch"],
    train: bool,
) -> tuple[Float[Array, "batch width"], Generator]:
    """Latents of these classes, and the generator with its running statistics moved if it trains."""
    variables = {"params": generator.params, "batch_stats": generator.stats}
    network = _LatentGenerator(config)
    latent, moved = network.apply(variables, noise, label, train, mutable=["batch_stats"] if train else [])
    # pyrefly: ignore[bad-return]  # flax does not say that there are two
    return latent, generator._replace(stats=moved["batch_stats"]) if train and config.norm else generator
