"""The optimisers of the server, which step along the pseudo-gradient: what clients
started from, minus their mean."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from fcljax.options import option
from fcljax.types import PyTree

SERVER_BETA2 = 0.99  # of both adaptive optimisers (Reddi et al. 2021, section 5)


@dataclasses.dataclass(frozen=True)
class FedAvgM:
    """Momentum on the server (Hsu et al. 2019): m <- beta m + g, x <- x - step m."""

    server_step: float = option(1.0, positive=True)
    """Step size of the server optimiser."""
    server_momentum: float = option(0.9, below=1.0)
    """Momentum (beta_1) of the server optimiser."""

    def build(self) -> optax.GradientTransformation:
        """Return the optimiser."""
        return optax.sgd(self.server_step, momentum=self.server_momentum)


@dataclasses.dataclass(frozen=True)
class FedAdam:
    """Adam on the server (Reddi et al. 2021)."""

    server_step: float = option(0.1, positive=True)
    """Step size of the server optimiser."""
    server_momentum: float = option(0.9, below=1.0)
    """Momentum (beta_1) of the server optimiser."""
    server_adaptivity: float = option(1e-3, positive=True)
    """Adaptivity (tau) of the server optimiser."""

    def build(self) -> optax.GradientTransformation:
        """Return the optimiser."""
        return adaptive(self.server_step, self.server_momentum, self.server_adaptivity, signed=False)


@dataclasses.dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi on the server (Reddi et al. 2021)."""

    def build(self) -> optax.GradientTransformation:
        """Return the optimiser."""
        return adaptive(self.server_step, self.server_momentum, self.server_adaptivity, signed=True)


def adaptive(
    step: float,
    beta: float,
    adaptivity: float,
    signed: bool,
) -> optax.GradientTransformation:
    """Return FedAdam, or FedYogi if signed (Reddi et al. 2021, algorithm 2, beta_2 = 0.99).

        m <- beta m + (1 - beta) g,   x <- x - step m / (sqrt(v) + tau)
        v <- beta_2 v + (1 - beta_2) g^2,   or with signs   v <- v - (1 - beta_2) g^2 sign(v - g^2)

    It starts from m = 0 and v = tau^2, and has no bias correction, as in the paper.
    optax's adam and yogi correct the bias, and would take other steps.
    """

    def init(params: PyTree) -> tuple[PyTree, PyTree]:
        m = jax.tree.map(jnp.zeros_like, params)
        return m, jax.tree.map(lambda x: jnp.full_like(x, adaptivity**2), params)

    def second_moment(v: Array, g: Array) -> Array:
        square = jnp.square(g)
        # towards g^2: Adam by a share of the distance, Yogi by a share of g^2
        return v - (1 - SERVER_BETA2) * (square * jnp.sign(v - square) if signed else v - square)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        m = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state[0], updates)
        v = jax.tree.map(second_moment, state[1], updates)
        return jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + adaptivity), m, v), (m, v)

    return optax.GradientTransformation(init, update)
