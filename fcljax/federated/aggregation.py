"""What a server does with K uploads: pure, jit-able reductions over pytrees whose leaves are stacked over
clients, [K, ...].

Every rule takes `valid [K]`: rows with valid False have no influence whatever they hold, NaN and inf
included, so K stays fixed. Valid rows must be finite; `finite_guard` sees to that. Sums are taken in float32
(float64 leaves stay float64) and results have the leaf's shape without axis 0 and the leaf's dtype; integer
and boolean leaves are rounded. With no valid row a mean or median is 0: the engine keeps the server's state
in that case, so the zeros are never used.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from fcljax.errors import InputError, choose
from fcljax.types import PyTree

# keeps precisions of repeatedly conflated posteriors, and their sum over clients, far from float32's limit
SIGMA_MIN = 1e-6
EQUAL_DISTANCES = 1e-6  # relative spread below which distances differ by rounding only


def weighted_mean(stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]) -> PyTree:
    """sum_k n_k w_k / sum_k n_k over the valid clients (FedAvg, McMahan et al. 2017, algorithm 1).

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0, usually the client's rows.
      valid: which rows count.

    Returns:
      Leaves [...]; zeros if the weights of the valid rows add up to 0.
    """
    share = jnp.where(valid, weight, 0).astype(jnp.float32)
    total = jnp.sum(share)
    share = jnp.where(total > 0, share / jnp.where(total > 0, total, 1), 0)
    return jax.tree.map(
        lambda leaf: _like(jnp.sum(_rows(share, leaf) * _valid_or(leaf, valid, 0.0), axis=0), leaf), stacked
    )


def uniform_mean(stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]) -> PyTree:
    """The plain mean [...] of the valid rows of leaves [K, ...]; `weight [K]` is ignored."""
    return weighted_mean(stacked, jnp.ones_like(weight), valid)


def coordinate_median(stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]) -> PyTree:
    """The median [...] of every coordinate over the valid rows of leaves [K, ...] (Yin et al. 2018,
    definition 1).

    Unweighted: `weight [K]` is ignored, since a weight is a client's own claim. An even count takes the mean
      of the middle two.
    """
    del weight
    count = jnp.sum(valid)
    low, high = jnp.maximum(count - 1, 0) // 2, count // 2

    def median(leaf: Array) -> Array:
        ranked = jnp.sort(_valid_or(leaf, valid, jnp.inf), axis=0)
        middle = 0.5 * jnp.take(ranked, low, axis=0) + 0.5 * jnp.take(ranked, high, axis=0)
        return _like(jnp.where(count > 0, middle, 0), leaf)

    return jax.tree.map(median, stacked)


def trimmed_mean(
    stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"], trim: float = 0.1
) -> PyTree:
    """The mean [...] of every coordinate without its floor(trim * n) smallest and as many largest values, n =
    valid rows (Yin et al. 2018, definition 2). `weight [K]` is ignored. Fewer than 1 / trim valid rows leave
    nothing to trim.

    Raises:
      InputError: trim outside [0, 0.5).
    """
    if not 0 <= trim < 0.5:
        raise InputError(
            f"trim: must be at least 0 and below 0.5, got {trim}; 0.1 drops a tenth at either end"
        )
    del weight
    rows = valid.shape[0]
    count = jnp.sum(valid)
    # tabulated in float64: floor(0.1 * 30) must not become 2 through float32 rounding
    cut = jnp.asarray(np.floor(trim * np.arange(rows + 1) + 1e-9), jnp.int32)[count]
    kept = (jnp.arange(rows) >= cut) & (jnp.arange(rows) < count - cut)

    def mean(leaf: Array) -> Array:
        ranked = jnp.sort(_valid_or(leaf, valid, jnp.inf), axis=0)
        return _like(weighted_mean(ranked, jnp.ones(rows), kept), leaf)

    return jax.tree.map(mean, stacked)


# the rules for the `mean` channel of an upload that a config can name; each is (stacked, weight, valid) ->
# mean
AGGREGATORS: dict[str, Callable[[PyTree, Array, Array], PyTree]] = {
    "mean": weighted_mean,
    "uniform": uniform_mean,
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
}


def is_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether every floating-point leaf is free of NaN and inf; other leaves are ignored."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def finite_guard(
    stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]
) -> tuple[Num[Array, " K"], Bool[Array, " K"], Int[Array, ""]]:
    """Reject whole clients: one NaN or inf in any leaf [K, ...] or in its weight, or a negative weight, and
    the client is out.

    Returns:
      (weight, valid, rejected): weight is 0 and valid False for rejected and for already invalid clients;
      `rejected` counts clients that were valid before.
    """
    finite = jax.vmap(is_finite)((stacked, weight)) & (weight >= 0)
    kept = valid & finite
    return jnp.where(kept, weight, 0), kept, jnp.sum(valid & ~finite, dtype=jnp.int32)


def precision_terms(mean: PyTree, sigma: PyTree) -> tuple[PyTree, PyTree]:
    """A Gaussian as the two numbers that add up under conflation: (1/sigma^2, mean/sigma^2), in float32, same
    shapes.

    `sigma` is clamped to [1e-6, inf). Adding these over clients in any order or grouping, then
    `conflate_sums`, is VFCL eq. 11.
    """
    precision = jax.tree.map(lambda s: 1 / jnp.square(jnp.maximum(_wide(s), SIGMA_MIN)), sigma)
    return precision, jax.tree.map(lambda p, m: p * _wide(m), precision, mean)


def conflate_sums(precision: PyTree, precision_mean: PyTree) -> tuple[PyTree, PyTree]:
    """(mean, sigma) of the product of Gaussians from the sums over clients of `precision_terms` (VFCL eq.
    11).

    Precision 0 (no client) gives mean 0 and sigma inf, the neutral element of conflation. sigma is clamped to
    [1e-6, inf).
    """
    mean = jax.tree.map(
        lambda p, pm: jnp.where(p > 0, pm / jnp.where(p > 0, p, 1), 0), precision, precision_mean
    )
    return mean, jax.tree.map(lambda p: jnp.maximum(jax.lax.rsqrt(p), SIGMA_MIN), precision)


def conflate(mean: PyTree, sigma: PyTree, valid: Bool[Array, " K"]) -> tuple[PyTree, PyTree]:
    """Gaussian conflation, unweighted over the valid clients (VFCL eq. 11).

        mean = sum_k mean_k / sigma_k^2 / sum_k 1 / sigma_k^2,   sigma^2 = 1 / sum_k 1 / sigma_k^2

    Args:
      mean: leaves [K, ...].
      sigma: same structure, standard deviations; clamped to [1e-6, inf).
      valid: which rows count.

    Returns:
      (mean, sigma), leaves [...]; (0, inf) if nobody is valid.
    """
    terms = precision_terms(
        jax.tree.map(lambda leaf: _valid_or(leaf, valid, 0.0), mean),
        jax.tree.map(lambda leaf: _valid_or(leaf, valid, jnp.inf), sigma),
    )
    merged = conflate_sums(*jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms))
    return jax.tree.map(_like, merged, (mean, sigma))


def softplus_inverse(value: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x with log(1 + e^x) = value, for value > 0; right to a float32 rounding for x in [-15, 15] (VFCL
    section 3)."""
    value = jnp.maximum(value, jnp.finfo(value.dtype).tiny)
    # log(e^v - 1) = v + log(1 - e^-v): e^v would overflow, and each branch keeps the digits the other one
    # loses
    near = jnp.log(-jnp.expm1(-jnp.minimum(value, 1.0)))
    far = jnp.log1p(-jnp.exp(-jnp.maximum(value, 0.5)))
    return value + jnp.where(value < 0.7, near, far)


def prototype_mean(
    prototype: Float[Array, "K C D"], present: Bool[Array, "K C"], valid: Bool[Array, " K"]
) -> tuple[Float[Array, "C D"], Bool[Array, " C"]]:
    """Global prototypes: the unweighted mean over the valid clients that hold the class (FPPL eq. 5).

    Returns:
      (mean, held): held [C] is False, and the mean 0, for classes that no valid client holds.
    """
    holds = present & valid[:, None]
    holders = jnp.sum(holds, axis=0)
    total = jnp.sum(jnp.where(holds[..., None], _wide(prototype), 0), axis=0)
    return _like(total / jnp.maximum(holders, 1)[:, None], prototype), holders > 0


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
        prototype, feature_mean, present, valid,
        distance=distance, temperature=temperature, temperature_mode=temperature_mode,
    )  # fmt: skip
    return _like(jnp.sum(weight[..., None] * _valid_or(prototype, valid, 0.0), axis=0), prototype)


def _spread(prototype: Array, feature_mean: Array, present: Array, valid: Array, distance: str) -> Array:
    """d [K, C]: every client's prototype to the mean features of all holders; one holder at a time, as [K, K,
    C, D] may not fit."""
    holds = present & valid[:, None]
    prototype = _valid_or(prototype, valid, 0.0)
    feature = jnp.where(holds[..., None], _wide(feature_mean), 0)

    def to_holder(one: tuple[Array, Array]) -> Array:
        squared = jnp.sum(jnp.square(prototype - one[0]), axis=-1)
        return jnp.where(one[1], squared if distance == "l2sq" else jnp.sqrt(squared), 0)

    return jnp.sum(jax.lax.map(to_holder, (feature, holds)), axis=0)


def _wide(leaf: Array) -> Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _rows(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))


def _valid_or(leaf: Array, valid: Array, other: float) -> Array:
    """The leaf in float32 with `other` in its invalid rows: selected, not multiplied, because 0 * NaN is
    NaN."""
    return jnp.where(_rows(valid, leaf), _wide(leaf), other)


def _like(value: Array, leaf: Array) -> Array:
    floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return (value if floating else jnp.round(value)).astype(leaf.dtype)
