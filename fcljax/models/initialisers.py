"""Initial values of layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def uniform_by_inputs(fan_in: int) -> Callable[..., Array]:
    """Return torch's initialiser of layers: uniform in +-1/sqrt(fan_in)."""
    bound = fan_in**-0.5
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(key, shape, dtype, -bound, bound)
