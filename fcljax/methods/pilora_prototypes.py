"""Prototypes at PILoRA's server: equations 11 to 14."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fcljax.errors import InputError, choose
from fcljax.federated.distances import EQUAL_DISTANCES
from fcljax.federated.sums import cast_like, where_valid, widen


def prototype_weights(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    *,
    distance: str = "l2",
    temperature: float = 0.2,
    temperature_mode: str = "divide",
) -> Float[Array, "K C"]:
    """PILoRA's weights of the clients' prototypes, per class (PILoRA eq. 11-13).

        d_k = sum_j dist(m_k, mu_j),   a_k = (1/d_k - min 1/d) / (max 1/d - min 1/d),   w = softmax_k(a_k /
        temperature)

    with k over the valid clients, holders of the class or not, and j over those that hold it. The paper has
    dist = squared L2 and exp(temperature * a); its release has L2 and exp(a / temperature).

    Args:
      prototype: m_k, the clients' learned prototypes.
      feature_mean: mu_j, the clients' mean features; read only where present.
      present: which client has rows of which class.
      valid: which clients count.
      distance: 'l2' or 'l2sq'.
      temperature: positive.
      temperature_mode: 'divide' or 'multiply'.

    Returns:
      Weights that sum to 1 over the valid clients: uniform where all distances are equal (one client
      included) and for classes that nobody holds. All 0 if nobody is valid.

    Raises:
      InputError: unknown distance or temperature_mode, or a temperature that is not positive.
    """
    choose("distance", distance, ("l2", "l2sq"))
    choose("temperature_mode", temperature_mode, ("divide", "multiply"))
    if not temperature > 0:
        raise InputError(f"temperature: must be positive, got {temperature}; the paper has 0.2")
    spread = _spread(prototype, feature_mean, present, valid, distance)
    # a is unchanged when all 1/d are scaled, so d_min/d in [0, 1] replaces 1/d: no overflow, and d = 0 has
    # its limit, 1
    valid = valid[:, None]
    nearest = jnp.min(jnp.where(valid, spread, jnp.inf), axis=0)
    inverse = jnp.where(spread > 0, nearest / jnp.where(spread > 0, spread, 1), 1)
    lowest = jnp.min(jnp.where(valid, inverse, 1), axis=0)
    equal = 1 - lowest < EQUAL_DISTANCES
    score = jnp.where(equal, 1, (inverse - lowest) / jnp.where(equal, 1, 1 - lowest))
    scale = 1 / temperature if temperature_mode == "divide" else temperature
    odds = jnp.where(valid, jnp.exp(scale * (score - 1)), 0)
    return odds / jnp.maximum(jnp.sum(odds, axis=0), jnp.finfo(odds.dtype).tiny)


def prototype_reweight(
    prototype: Float[Array, "K C D"],
    feature_mean: Float[Array, "K C D"],
    present: Bool[Array, "K C"],
    valid: Bool[Array, " K"],
    *,
    distance: str = "l2",
    temperature: float = 0.2,
    temperature_mode: str = "divide",
) -> Float[Array, "C D"]:
    """Global prototypes m = sum_k w_k m_k with PILoRA's weights; arguments and errors of `prototype_weights`
    (PILoRA eq. 11-13).

    Returns:
      [C, D]; the plain mean over valid clients for a class that nobody holds; zeros if nobody is valid.
    """
    weight = prototype_weights(
        prototype,
        feature_mean,
        present,
        valid,
        distance=distance,
        temperature=temperature,
        temperature_mode=temperature_mode,
    )
    return cast_like(jnp.sum(weight[..., None] * where_valid(prototype, valid, 0.0), axis=0), prototype)


def _spread(prototype: Array, feature_mean: Array, present: Array, valid: Array, distance: str) -> Array:
    """d [K, C]: every client's prototype to the mean features of all holders; one holder at a time, as [K, K,
    C, D] may not fit."""
    holds = present & valid[:, None]
    prototype = where_valid(prototype, valid, 0.0)
    feature = jnp.where(holds[..., None], widen(feature_mean), 0)

    def to_holder(one: tuple[Array, Array]) -> Array:
        squared = jnp.sum(jnp.square(prototype - one[0]), axis=-1)
        return jnp.where(one[1], squared if distance == "l2sq" else jnp.sqrt(squared), 0)

    return jnp.sum(jax.lax.map(to_holder, (feature, holds)), axis=0)
