"""A conditional generator of latents: from noise and a class to a feature (HePCo,
section 4.2).

The class's embedding is concatenated with the noise; three linear layers follow, with
batch normalisation and ReLU between them. It has 1,092,352 parameters for 100 classes
and features of width 768.
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
    """Static shape of a generator."""

    classes: int
    width: int
    """Of a latent."""
    noise: int = 64
    """Width of the noise."""
    label: int = 64
    """Width of a class's embedding."""
    norm: bool = True
    """Whether there are layers of batch normalisation."""


class Generator(NamedTuple):
    """Parameters, and the running statistics of batch normalisation."""

    params: PyTree
    stats: PyTree


def _prefix_of(
    size: int,
    init: nn.initializers.Initializer,
) -> nn.initializers.Initializer:
    """Return an initialiser that always draws `size` values and takes the first ones.

    XLA compiles a draw for each size; with this there is one size for all layers.
    """

    def values(
        key: PRNGKeyArray,
        shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
    ) -> Array:
        return init(key, (size,), dtype)[: math.prod(shape)].reshape(shape)

    return values


def _linear(width: int, fan_in: int, size: int, name: str) -> nn.Dense:
    init = _prefix_of(size, uniform_by_inputs(fan_in))
    return nn.Dense(width, kernel_init=init, bias_init=init, name=name)


class _LatentGenerator(nn.Module):
    config: GeneratorConfig

    @nn.compact
    def __call__(self, noise: Array, label: Array, train: bool) -> Array:
        c = self.config
        widths = (c.noise + c.label, *HIDDEN, c.width)
        largest = max(c.classes * c.label, *map(math.prod, itertools.pairwise(widths)))
        init = _prefix_of(largest, nn.initializers.normal(1.0))
        embedding = nn.Embed(c.classes, c.label, embedding_init=init, name="label")
        x = jnp.concatenate([noise, embedding(label)], axis=-1)
        for i, width in enumerate(HIDDEN):
            x = _linear(width, x.shape[-1], largest, f"linear{i}")(x)
            if c.norm:
                # flax's momentum 0.9 is torch's 0.1
                x = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name=f"norm{i}")(x)
            x = nn.relu(x)
        return _linear(c.width, x.shape[-1], largest, "out")(x)


def init_generator(config: GeneratorConfig, key: PRNGKeyArray) -> Generator:
    """Return a new generator."""
    noise = jnp.zeros((2, config.noise))
    label = jnp.zeros(2, jnp.int32)
    variables = _LatentGenerator(config).init(key, noise, label, False)
    return Generator(variables["params"], variables.get("batch_stats", {}))


def generate(
    config: GeneratorConfig,
    generator: Generator,
    noise: Float[Array, "batch noise"],
    label: Int[Array, " batch"],
    train: bool,
) -> tuple[Float[Array, "batch width"], Generator]:
    """Return latents of these classes, and the generator.

    In training, batch normalisation reads the batch and moves the generator's running
    statistics; else it reads these.
    """
    network = _LatentGenerator(config)
    variables = {"params": generator.params, "batch_stats": generator.stats}
    mutable = []
    if train:
        mutable = ["batch_stats"]
    latent, updated = network.apply(variables, noise, label, train, mutable=mutable)
    # without batch normalisation flax returns no statistics
    if train and config.norm:
        generator = generator._replace(stats=updated["batch_stats"])
    # pyrefly: ignore[bad-return]  # flax does not say that there are two
    return latent, generator
