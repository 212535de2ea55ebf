"""Rules that merge the uploads of K clients: pure, jit-able reductions of pytrees [K,
...] to pytrees [...].

Every rule takes `valid [K]`, so that K stays fixed. Invalid clients have no influence,
whatever their uploads contain, NaN and inf included. Valid uploads must be finite;
`sums.finite_guard` sees to that. Results have the dtypes of the leaves; integers and
booleans are rounded. If no client is valid, a mean or median is 0; the engine keeps the
server's state in that case, so the zeros are never used.

Robust rules ignore weights, because a weight is the client's own claim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from fcljax.errors import InputError
from fcljax.federated.distances import SHRINK, clip, difference, norm
from fcljax.federated.sums import (
    add_stacked,
    broadcast_left,
    cast_like,
    shares,
    sum_value,
    sum_zeros,
    where_valid,
    widen,
)
from fcljax.types import PyTree


def weighted_mean(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
) -> PyTree:
    """sum_k n_k w_k / sum_k n_k over the valid clients (FedAvg, McMahan et al. 2017,
    algorithm 1).

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0, usually the client's number of examples.
      valid: which clients count.

    Returns:
      Leaves [...]; zeros if the weights of the valid clients add up to 0.
    """
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    mean = add_stacked(sum_zeros(one, floating=True), stacked, valid, shares(weight, valid))
    return sum_value(mean, stacked)


def uniform_mean(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
) -> PyTree:
    """The plain mean [...] over the valid clients of leaves [K, ...]; `weight [K]` is
    ignored."""
    return weighted_mean(stacked, jnp.ones_like(weight), valid)


def coordinate_median(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
) -> PyTree:
    """The median [...] of every coordinate over the valid clients of leaves [K, ...]
    (Yin et al. 2018, definition 1). `weight [K]` is ignored.

    An even count takes the mean of the middle two.
    """
    del weight
    count = jnp.sum(valid)
    low = jnp.maximum(count - 1, 0) // 2
    high = count // 2

    def median(leaf: Array) -> Array:
        wide = where_valid(leaf, valid, jnp.inf)
        lower = value_of_rank(wide, low)
        upper = jnp.min(jnp.where(wide > lower, wide, jnp.inf), axis=0)
        upper = jnp.where(jnp.sum(wide <= lower, axis=0) > high, lower, upper)
        return cast_like(jnp.where(count > 0, 0.5 * lower + 0.5 * upper, 0), leaf)

    return jax.tree.map(median, stacked)


@jax.custom_jvp
def value_of_rank(
    values: Float[Array, "K ..."],
    rank: Int[Array, ""],
) -> Float[Array, "..."]:
    """The value [...] of this rank, from 0 on, of every coordinate: exact, as if they
    were sorted.

    It is found bit by bit, in a pass over the values for each: a sort over 40,000
    clients takes 10 s and needs the memory of several copies.
    """
    bits = 8 * values.dtype.itemsize
    kind = jnp.dtype(f"uint{bits}")
    top = jnp.asarray(1 << (bits - 1), kind)
    word = jax.lax.bitcast_convert_type(values, kind)
    ordered = jnp.where(word >= top, ~word, word | top)  # integers in the order of the numbers

    def next_bit(i: Array, prefix: Array) -> Array:
        higher = prefix | (top >> i.astype(kind))
        return jnp.where(jnp.sum(ordered < higher, axis=0) <= rank, higher, prefix)

    prefix = jax.lax.fori_loop(0, bits, next_bit, jnp.zeros(values.shape[1:], kind))
    return jax.lax.bitcast_convert_type(jnp.where(prefix >= top, prefix ^ top, ~prefix), values.dtype)


@value_of_rank.defjvp
def _value_of_rank_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """Give the tangent of the value of this rank; equal values share it. Bits have no
    derivative."""
    values, rank = primals
    value = value_of_rank(values, rank)
    equal = values == value
    tangent = jnp.sum(jnp.where(equal, tangents[0], 0), axis=0) / jnp.sum(equal, axis=0)
    return value, tangent


def trimmed_mean(
    stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"], trim: float = 0.1
) -> PyTree:
    """The mean [...] of every coordinate without its floor(trim * n) smallest and as
    many largest values, n = valid clients (Yin et al. 2018, definition 2). `weight [K]`
    is ignored.

    Fewer than 1 / trim valid clients leave nothing to trim.

    Raises:
      InputError: trim outside [0, 0.5).
    """
    _check("trim", trim, 0 <= trim < 0.5, "at least 0 and below 0.5, such as 0.1")
    del weight
    clients = valid.shape[0]
    count = jnp.sum(valid)
    # tabulated in float64: floor(0.1 * 30) must not become 2 through float32 rounding
    cut = jnp.asarray(np.floor(trim * np.arange(clients + 1) + 1e-9), jnp.int32)[count]
    share = 1 / jnp.maximum(count - 2 * cut, 1).astype(jnp.float32)

    def mean(leaf: Array) -> Array:
        wide = where_valid(leaf, valid, jnp.inf)
        lowest = value_of_rank(wide, cut)
        highest = value_of_rank(wide, count - 1 - cut)
        inner = jnp.sum(jnp.where((wide > lowest) & (wide < highest), share * wide, 0), axis=0)
        # equal values at an end: those that are not cut off
        low = jnp.sum(wide <= lowest, axis=0) - cut
        high = jnp.sum((wide >= highest) & broadcast_left(valid, leaf), axis=0) - cut
        ends = (share * low) * lowest + (share * high) * highest
        mean = jnp.where(lowest < highest, inner + ends, lowest)
        return cast_like(jnp.where(count > 0, mean, 0), leaf)

    return jax.tree.map(mean, stacked)


def geometric_median(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    steps: int = 32,
    smoothing: float = 1e-6,
) -> PyTree:
    """The point [...] with the least weighted sum of L2 distances to the valid uploads
    (RFA, Pillutla et al. 2022, the smoothed Weiszfeld algorithm).

        v <- sum_k b_k w_k / sum_k b_k,   b_k = a_k / max(smoothing, ||v - w_k||),   a_k = n_k / sum_j n_j

    It starts at the coordinate median, not at the mean: from the mean, one upload of
    3e38 takes 40 steps to forget. Clients with less than half of the weight cannot move
    the result far.

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0; clients of weight 0 do not count.
      valid: which clients count.
      steps: iterations; the paper takes 3.
      smoothing: the paper's nu, in the units of the leaves.
    """
    counted = valid & (weight > 0)
    wide = _selected(stacked, counted)
    share = shares(weight, counted)

    def towards(_: Array, centre: PyTree) -> PyTree:
        change = difference(wide, centre)
        distance = jnp.maximum(jax.vmap(norm)(change), SHRINK * smoothing)
        nearest = jnp.min(jnp.where(counted, distance, jnp.inf))
        # steps of unit vectors, all relative to the nearest
        # upload: 1 / distance itself would underflow
        pull = jnp.sum(jnp.where(counted, share * (nearest / distance), 0))
        length = jnp.where(pull > 0, nearest / SHRINK / jnp.where(pull > 0, pull, 1), 0)
        unit = _mix(share, jax.tree.map(lambda x: x / broadcast_left(distance, x), change))
        return jax.tree.map(lambda c, u: c + length * u, centre, unit)

    start = coordinate_median(wide, weight, counted)
    return sum_value(jax.lax.fori_loop(0, steps, towards, start), stacked)


def krum(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    malicious: int,
) -> PyTree:
    """The one valid upload [...] with the smallest sum of squared distances to its n -
    malicious - 2 nearest others, n = valid clients; the first of equals (Blanchard et
    al. 2017, section 4). `weight [K]` is ignored.

    Raises:
      InputError: malicious < 0.
    """
    return multi_krum(stacked, weight, valid, malicious, chosen=1)


def multi_krum(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    malicious: int,
    chosen: int | None = None,
) -> PyTree:
    """The plain mean [...] of the `chosen` valid uploads that `krum` ranks first
    (Blanchard et al. 2017, section 5).

    Args:
      stacked: leaves [K, ...].
      weight: ignored.
      valid: which clients count; n of them.
      malicious: how many uploads may be malicious; the paper's guarantee needs n > 2 * malicious + 2.
      chosen: how many to average, at least one and at most n; None takes n - malicious.

    Raises:
      InputError: malicious < 0.
    """
    _check("malicious_bound", malicious, malicious >= 0, "at least 0; nearest valid value: 0")
    count = jnp.sum(valid)
    score = _krum_scores(stacked, valid, malicious)
    chosen_count = jnp.clip(count - malicious if chosen is None else chosen, 1, jnp.maximum(count, 1))
    rank = jnp.argsort(jnp.argsort(score))
    return weighted_mean(stacked, jnp.ones_like(weight), valid & (rank < chosen_count))


def _krum_scores(
    stacked: PyTree,
    valid: Bool[Array, " K"],
    malicious: int,
) -> Float[Array, " K"]:
    """The root of the sum of squared L2 distances of an upload to its n - malicious - 2
    nearest others, n = valid clients, in shrunk units; inf for invalid clients
    (Blanchard et al. 2017, section 4).

    The root ranks as the sum does and does not overflow. With too few clients for the
    formula, one neighbour counts, if there is one.
    """
    clients = valid.shape[0]
    count = jnp.sum(valid)
    wide = _selected(stacked, valid)
    # one client at a time: the differences of all
    # pairs, [K, K, ...], may not fit into memory
    distance = jax.lax.map(lambda one: jax.vmap(norm)(difference(wide, one)), wide)
    other = valid[:, None] & valid & ~jnp.eye(clients, dtype=bool)
    ranked = jnp.sort(jnp.where(other, distance, jnp.inf), axis=1)
    nearest = jnp.minimum(jnp.maximum(count - malicious - 2, 1), count - 1)
    score = jax.vmap(norm)(jnp.where(jnp.arange(clients) < nearest, ranked, 0))
    return jnp.where(valid, score, jnp.inf)


def centred_clipping(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    centre: PyTree,
    radius: float,
    steps: int = 3,
) -> PyTree:
    """The centre [...] moved, `steps` times, by the mean of the changes clipped to L2
    norm `radius` (Karimireddy et al. 2021, algorithm 2, CClip).

        v <- v + 1/n sum_k (x_k - v) min(1, radius / ||x_k - v||)

    The result is at most steps * radius from `centre`.

    Args:
      stacked: leaves [K, ...].
      weight: ignored.
      valid: which clients count; n of them. With none the result is the centre.
      centre: leaves [...] of the same structure: what the clients started from.
      radius: the paper's tau, in the units of the leaves.
      steps: the paper's number of iterations.

    Raises:
      InputError: a radius that is not positive.
    """
    _check("clip_radius", radius, 0 < radius < np.inf, "finite and positive, such as 10")
    equal = shares(jnp.ones_like(weight), valid)
    wide = _selected(stacked, valid)

    def move(_: Array, centre: PyTree) -> PyTree:
        change, _ = jax.vmap(functools.partial(clip, radius=radius))(difference(wide, centre))
        return jax.tree.map(jnp.add, centre, _mix(equal, change))

    return sum_value(jax.lax.fori_loop(0, steps, move, jax.tree.map(widen, centre)), stacked)


def _check(name: str, value: float | int, valid: bool, wanted: str) -> None:
    if not valid:
        raise InputError(f"{name}: {value} must be {wanted}")


def _selected(stacked: PyTree, valid: Array) -> PyTree:
    return jax.tree.map(lambda leaf: where_valid(leaf, valid, 0.0), stacked)


def _mix(share: Array, stacked: PyTree) -> PyTree:
    """sum_k share_k leaf_k, as matrix products.

    With one million parameters, a sum over axis 0 that is fused with what computes its
    terms took up to 100 times as long on the CPU.
    """
    highest = jax.lax.Precision.HIGHEST  # else accelerators round to fewer bits
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1, precision=highest), stacked)
