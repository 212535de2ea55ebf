"""Networks of tables and series, with random values: `mlp`, `conv1d`, and none at all
(`identity`)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.products import dense
from fcljax.models.shapes import ArrayNetConfig, Dtype, NumberFormat
from fcljax.types import Features, Network


class _MLP(nn.Module):
    """Linear layers with ReLU on the flattened example."""

    config: ArrayNetConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B *shape"]) -> Float[Array, "B width"]:
        x = x.reshape(len(x), -1)
        for i, width in enumerate(self.config.hidden):
            x = nn.relu(dense(width, NumberFormat(self.config.dtype), f"layer_{i}")(x))
        return x


class _Conv1D(nn.Module):
    """Convolutions over time with ReLU, each layer at half the steps of the one before,
    and their mean.

    A convolution is a matrix product of windows: convolutions inside loops fall off
    XLA's fast path.
    """

    config: ArrayNetConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B steps channels"]) -> Float[Array, "B width"]:
        for i, width in enumerate(self.config.hidden):
            # the first layer keeps all steps of the series
            stride = 1 if i == 0 else 2
            windows = _windows(x, self.config.kernel, stride)
            x = nn.relu(dense(width, NumberFormat(self.config.dtype), f"layer_{i}")(windows))
        return jnp.mean(x, axis=1)


def _windows(x: Float[Array, "B steps channels"], size: int, stride: int) -> Float[Array, "B out window"]:
    """Return `size` steps around every `stride`-th step, zeros beyond the ends."""
    steps = x.shape[1]
    padded = jnp.pad(x, [(0, 0), (size // 2, size // 2), (0, 0)])
    shifted = [padded[:, i : i + steps : stride] for i in range(size)]
    return jnp.concatenate(shifted, axis=-1)


class _Identity(nn.Module):
    """The example itself, flattened."""

    config: ArrayNetConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B *shape"]) -> Float[Array, "B width"]:
        # flattened, so that classifiers get one vector
        return x.reshape(len(x), -1).astype(jnp.float32)


_MODULES = {"mlp": _MLP, "conv1d": _Conv1D, "identity": _Identity}


def array_net_config(
    name: str,
    shape: tuple[int, ...],
    dtype: Dtype = "float32",
) -> ArrayNetConfig:
    """Return the static shape of a network for examples of this shape.

    Raises:
      InputError: for a network that cannot read them.
    """
    if name == "conv1d":
        if len(shape) != 2:
            raise InputError(
                f"backbone: 'conv1d' reads series [steps, channels], and an example has the shape "
                f"{list(shape)}; nearest: 'mlp'"
            )
        return ArrayNetConfig(name, shape, (64, 64, 64), dtype)
    if name == "mlp":
        return ArrayNetConfig(name, shape, (128, 128), dtype)
    return ArrayNetConfig(name, shape, (), dtype)


def init_array_net(key: PRNGKeyArray, config: ArrayNetConfig) -> PyTree:
    """Draw the parameters, float32; `identity` has none."""
    example = jnp.zeros((1, *config.shape))
    return _MODULES[config.name](config).init(key, example).get("params", {})


def array_network(config: ArrayNetConfig) -> Network:
    """Make the `Network` of a static shape."""
    module = _MODULES[config.name](config)

    def init(key: PRNGKeyArray) -> PyTree:
        return init_array_net(key, config)

    def apply(params, x, _injection, _train, _mask=None):
        feature = jnp.asarray(module.apply({"params": params}, x), jnp.float32)
        return Features(feature, None, {}), params

    return Network(init, apply, config.width, 0)


def random_array_net(
    name: str, shape: tuple[int, ...], dtype: Dtype, seed: int
) -> tuple[ArrayNetConfig, PyTree]:
    """Return the static shape of a named network and values that the seed decides."""
    # jit: without it every operation of flax's `init` would compile by itself
    config = array_net_config(name, shape, dtype)
    return config, jax.jit(init_array_net, static_argnums=1)(jax.random.key(seed), config)
