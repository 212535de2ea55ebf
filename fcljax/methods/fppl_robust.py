"""Class prototypes at FPPL's server: their mean (equation 5), and what a robust rule makes of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation
from fcljax.federated.distances import EQUAL_DISTANCES, SHRINK, difference, norm
from fcljax.federated.rules import coordinate_median
from fcljax.federated.sums import cast_like, widen


def prototype_mean(
    prototype: Float[Array, "K C D"], present: Bool[Array, "K C"], valid: Bool[Array, " K"]
) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
    """Global prototypes: the unweighted mean over the valid clients that hold the class (FPPL eq. 5).

    Returns:
      (mean, held): held [C] is False, and the mean 0, for classes that no valid client holds.
    """
    holds = present & valid[:, None]
    holders = jnp.sum(holds, axis=0)
    total = jnp.sum(jnp.where(holds[..., None], widen(prototype), 0), axis=0)
    return cast_like(total / jnp.maximum(holders, 1)[:, None], prototype), holders > 0


def per_class(aggregation: Aggregation) -> Callable[..., tuple[Array, Array]]:
    """The rule's `reduce` for stacks of class prototypes, class by class over the clients that hold it.

    Clipping, noise and server optimiser have no part in it: prototypes have no reference, so centred clipping
    starts from zeros.

    Returns:
      merge(vectors [K, C, D], present [K, C], weight [K], valid [K], key) -> (merged [C, D], held [C]). Held
      is False, and merged 0, for classes that no valid client holds. Means are unweighted (`prototype_mean`).
    """

    def merge(
        vectors: Float[Array, "K C D"],
        present: Bool[Array, "K C"],
        weight: Num[Array, " K"],
        valid: Bool[Array, " K"],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
        if aggregation.reduce is None:
            return prototype_mean(vectors, present, valid)
        holds, nothing = present & valid[:, None], jnp.zeros(vectors.shape[1:], vectors.dtype)
        keys = jax.random.split(key, vectors.shape[1])
        of_class = jax.vmap(aggregation.reduce, in_axes=(1, 0, None, 1, 0))
        return of_class(vectors, nothing, weight, holds, keys), jnp.any(holds, axis=0)

    return merge


def screen_prototypes(
    vectors: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    merged: Float[Array, "C D"],
    valid: Bool[Array, " K"],
    factor: float = 3.0,
) -> Bool[Array, "K C"]:
    """Which prototypes to believe: those whose L2 distance to the merged one is at most `factor` times the
    median distance of the class's holders.

    A class with fewer than 3 valid holders keeps all of them, since two cannot say which of them is wrong. By
    construction at least half of the holders stay. `merged` should come from a robust rule: a plain mean of n
    holders puts a far one at only n - 1 times the others' distance.

    Returns:
      `present` without the screened prototypes and without the rows of invalid clients.

    Raises:
      InputError: factor < 1.
    """
    if not factor >= 1:
        raise InputError(f"factor: {factor} is too small; nearest valid value: 1, and 3 is usual")
    holds = present & valid[:, None]
    apart = difference(jnp.where(holds[..., None], widen(vectors), 0), widen(merged))
    distance = jax.vmap(jax.vmap(norm))(apart)
    usual = jax.vmap(coordinate_median, in_axes=(1, None, 1))(distance, jnp.ones(valid.shape), holds)
    # where most prototypes equal the merged one, a difference by rounding is no outlier
    rounding = EQUAL_DISTANCES * jax.vmap(norm)(SHRINK * widen(merged))
    far = (distance > factor * usual + rounding) & (jnp.sum(holds, axis=0) >= 3)
    return holds & ~far
