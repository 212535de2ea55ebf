"""Rules that merge the uploads of K clients: pure, jit-able, from pytrees [K, ...] to [...].

Every rule takes `valid [K]`, so that K stays fixed. Invalid clients have no influence,
whatever their uploads contain, NaN and inf included. Valid uploads must be finite, which
`sums.finite_guard` ensures. Results have the dtypes of the leaves; integers and booleans
are rounded. If no client is valid, a mean or median is 0, which is never used: the engine
keeps the server's state.

Robust rules ignore weights, which a malicious client can choose.
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
    """Return sum_k n_k w_k / sum_k n_k over the valid clients.

    This is FedAvg (McMahan et al. 2017, algorithm 1).

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0, usually the client's number of examples.
      valid: which clients count.

    Returns:
      Leaves [...]; zeros if the weights of the valid clients add up to 0.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    mean = add_stacked(sum_zeros(shapes, floating=True), stacked, valid, shares(weight, valid))
    return sum_value(mean, stacked)


def uniform_mean(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
) -> PyTree:
    """Return the unweighted mean [...] over the valid clients of leaves [K, ...]."""
    return weighted_mean(stacked, jnp.ones_like(weight), valid)


def coordinate_median(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
) -> PyTree:
    """Return the median [...] of every coordinate over the valid clients of leaves [K, ...].

    Of an even number it is the mean of the middle two (Yin et al. 2018, definition 1).
    """
    del weight
    # ranks of the middle two values; of an odd number both are the same
    count = jnp.sum(valid)
    low = jnp.maximum(count - 1, 0) // 2
    high = count // 2

    def median(leaf: Array) -> Array:
        # invalid clients sort behind all others
        wide = where_valid(leaf, valid, jnp.inf)
        lower = value_of_rank(wide, low)
        # the upper value equals the lower one if enough values do; else it is the next
        # larger one, which is cheaper to find than a second rank
        upper = jnp.min(jnp.where(wide > lower, wide, jnp.inf), axis=0)
        upper = jnp.where(jnp.sum(wide <= lower, axis=0) > high, lower, upper)
        # halves first: the sum of two large values may overflow
        return cast_like(jnp.where(count > 0, 0.5 * lower + 0.5 * upper, 0), leaf)

    return jax.tree.map(median, stacked)


@jax.custom_jvp
def value_of_rank(
    values: Float[Array, "K ..."],
    rank: Int[Array, ""],
) -> Float[Array, "..."]:
    """Return the value [...] of this rank (from 0) of every coordinate, as `sort` would.

    The bits are decided one by one, each in a pass over the values: a sort over 40,000
    clients takes 10 s and the memory of several copies.
    """
    bits = 8 * values.dtype.itemsize
    uint = jnp.dtype(f"uint{bits}")
    sign = jnp.asarray(1 << (bits - 1), uint)
    word = jax.lax.bitcast_convert_type(values, uint)
    # unsigned integers in the order of the floating-point numbers
    ordered = jnp.where(word >= sign, ~word, word | sign)

    def next_bit(i: Array, prefix: Array) -> Array:
        candidate = prefix | (sign >> i.astype(uint))
        # at most `rank` values are smaller: the value of this rank has the bit
        return jnp.where(jnp.sum(ordered < candidate, axis=0) <= rank, candidate, prefix)

    prefix = jax.lax.fori_loop(0, bits, next_bit, jnp.zeros(values.shape[1:], uint))
    word = jnp.where(prefix >= sign, prefix ^ sign, ~prefix)
    return jax.lax.bitcast_convert_type(word, values.dtype)


@value_of_rank.defjvp
def _value_of_rank_jvp(
    primals: tuple[Array, Array],
    tangents: tuple[Array, Any],
) -> tuple[Array, Array]:
    """Return the value, and the mean tangent of the clients that have it.

    Operations on bits have no derivative.
    """
    values, rank = primals
    value = value_of_rank(values, rank)
    equal = values == value
    tangent = jnp.sum(jnp.where(equal, tangents[0], 0), axis=0) / jnp.sum(equal, axis=0)
    return value, tangent


def trimmed_mean(
    stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"], trim: float = 0.1
) -> PyTree:
    """Return the mean [...] of every coordinate without its smallest and largest values.

    Of n valid clients, floor(trim * n) values are left out at each end (Yin et al. 2018,
    definition 2): none if n < 1 / trim.

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
        # `share` before the sum, which could overflow
        inner = jnp.sum(jnp.where((wide > lowest) & (wide < highest), share * wide, 0), axis=0)
        # several values may equal an end, and some of them are cut off: how many are not
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
    """Return the point [...] with the least weighted sum of L2 distances to the valid uploads.

    This is RFA (Pillutla et al. 2022), by the smoothed Weiszfeld algorithm:

        v <- sum_k b_k w_k / sum_k b_k,   b_k = a_k / max(smoothing, ||v - w_k||),
                                          a_k = n_k / sum_j n_j

    It starts at the coordinate median, not at the mean, from which one upload of 3e38
    takes 40 steps to forget. Clients with less than half of the weight cannot move the
    result far.

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
        # the algorithm as a step from the centre: v <- v + sum_k b_k (w_k - v) / sum_k b_k
        change = difference(wide, centre)
        distance = jnp.maximum(jax.vmap(norm)(change), SHRINK * smoothing)
        nearest = jnp.min(jnp.where(counted, distance, jnp.inf))
        # b_k in units of 1 / nearest, because 1 / distance could underflow
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
    """Return the valid upload [...] that is closest to its neighbours.

    It has the smallest sum of squared distances to its n - malicious - 2 nearest others,
    n = valid clients; ties go to the first (Blanchard et al. 2017, section 4).

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
    """Return the unweighted mean [...] of the uploads that `krum` ranks first.

    See Blanchard et al. 2017, section 5.

    Args:
      stacked: leaves [K, ...].
      weight: ignored.
      valid: which clients count; n of them.
      malicious: number of uploads that may be malicious; the paper's guarantee needs
        n > 2 * malicious + 2.
      chosen: number of uploads in the mean, from 1 to n; None: n - malicious.

    Raises:
      InputError: malicious < 0.
    """
    _check("malicious_bound", malicious, malicious >= 0, "at least 0; nearest valid value: 0")
    count = jnp.sum(valid)
    uploads = count - malicious
    if chosen is not None:
        uploads = chosen
    uploads = jnp.clip(uploads, 1, jnp.maximum(count, 1))
    # argsort twice gives each client's rank; ties go to the first
    rank = jnp.argsort(jnp.argsort(_krum_scores(stacked, valid, malicious)))
    return weighted_mean(stacked, jnp.ones_like(weight), valid & (rank < uploads))


def _krum_scores(
    stacked: PyTree,
    valid: Bool[Array, " K"],
    malicious: int,
) -> Float[Array, " K"]:
    """Return the root of Krum's score of each client, in shrunk units; inf if it is not valid.

    The score is the sum of squared L2 distances to the n - malicious - 2 nearest others,
    n = valid clients (Blanchard et al. 2017, section 4). Its root has the same order and
    does not overflow. With too few clients for the formula, one neighbour counts.
    """
    clients = valid.shape[0]
    count = jnp.sum(valid)
    wide = _selected(stacked, valid)
    # one client at a time: the differences of all pairs, [K, K, ...], may not fit into memory
    distance = jax.lax.map(lambda upload: jax.vmap(norm)(difference(wide, upload)), wide)
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
    """Move the centre [...] by the mean of the clients' changes, each clipped to L2 norm `radius`.

    This is CClip (Karimireddy et al. 2021, algorithm 2), repeated `steps` times:

        v <- v + 1/n sum_k (x_k - v) min(1, radius / ||x_k - v||)

    The result is at most steps * radius from `centre`.

    Args:
      stacked: leaves [K, ...].
      weight: ignored.
      valid: which clients count; n of them. With none the result is the centre.
      centre: leaves [...] that the clients started from.
      radius: the paper's tau, in the units of the leaves.
      steps: number of iterations.

    Raises:
      InputError: a radius that is not positive.
    """
    _check("clip_radius", radius, 0 < radius < np.inf, "finite and positive, such as 10")
    equal = shares(jnp.ones_like(weight), valid)
    wide = _selected(stacked, valid)

    def move(_: Array, centre: PyTree) -> PyTree:
        # clipped around the new centre in every step
        change, _ = jax.vmap(functools.partial(clip, radius=radius))(difference(wide, centre))
        return jax.tree.map(jnp.add, centre, _mix(equal, change))

    return sum_value(jax.lax.fori_loop(0, steps, move, jax.tree.map(widen, centre)), stacked)


def _check(name: str, value: float | int, valid: bool, requirement: str) -> None:
    if not valid:
        raise InputError(f"{name}: {value} must be {requirement}")


def _selected(stacked: PyTree, valid: Array) -> PyTree:
    return jax.tree.map(lambda leaf: where_valid(leaf, valid, 0.0), stacked)


def _mix(share: Array, stacked: PyTree) -> PyTree:
    """Return sum_k share_k leaf_k, as matrix products.

    With one million parameters, a sum over axis 0, which XLA fuses with the computation
    of its terms, took up to 100 times as long on the CPU.
    """
    # the default precision of accelerators rounds the factors to bfloat16 or TF32
    highest = jax.lax.Precision.HIGHEST
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1, precision=highest), stacked)
