"""First values of layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def uniform_by_inputs(fan_in: int) -> Callable[..., Array]:
    """First values of torch's layers: uniform in +-1/sqrt(inputs)."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)
