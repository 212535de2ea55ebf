"""Aggregation: how the clients' uploads become the server's next value.

`make_aggregation` composes a merging rule (`rules.py`), clipping, noise and a server optimiser into one
`Aggregation`, as the options say.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from fcljax.errors import InputError, choose
from fcljax.federated.distances import clip, difference
from fcljax.federated.rules import (
    centred_clipping,
    coordinate_median,
    geometric_median,
    krum,
    multi_krum,
    trimmed_mean,
)
from fcljax.federated.sums import cast_like, is_float, widen
from fcljax.options import check_ranges, check_read
from fcljax.settings import AggregationOptions, Aggregator
from fcljax.types import Claim, PyTree

SERVER_BETA2 = 0.99  # of the adaptive server optimisers (Reddi et al. 2021, section 5)


@runtime_checkable
class OnArrival(Protocol):
    """Acts on the upload of one client as it arrives, before it is merged."""

    def __call__(self, mean: PyTree, reference: PyTree, weight: Num[Array, ""], /) -> tuple[PyTree, Array]:
        """The upload [...] and its weight as they are merged."""
        ...


@runtime_checkable
class AcrossClients(Protocol):
    """Merges the uploads of all clients at once."""

    def __call__(
        self,
        stacked: PyTree,
        reference: PyTree,
        weight: Num[Array, " K"],
        valid: Bool[Array, " K"],
        key: PRNGKeyArray,
        /,
    ) -> PyTree:
        """Leaves [K, ...] merged to [...]."""
        ...


@runtime_checkable
class AtServer(Protocol):
    """Acts on what was merged."""

    def __call__(
        self, mean: PyTree, reference: PyTree, state: PyTree, count: Int[Array, ""], key: PRNGKeyArray, /
    ) -> tuple[PyTree, PyTree]:
        """The server's next value [...] and the new state; `count` is the number of valid uploads."""
        ...


class Aggregation(NamedTuple):
    """How the `mean` channel of uploads becomes the server's next value.

    `reference` is the value [...] that the clients started the round from, a tree like `mean`.
    """

    name: str
    """What is switched on, for messages."""
    init: Callable[[PyTree], PyTree]
    """init(reference): the state of `post`; () if it has none."""
    pre: OnArrival | None = None
    """On one upload as it arrives; None: nothing."""
    reduce: AcrossClients | None = None
    """The merging rule; None: the mean weighted by the uploads' weights, which streams."""
    post: AtServer | None = None
    """On what was merged; None: nothing."""
    noise: bool = False
    """Whether `post` adds the noise of differential privacy."""
    possible: Claim | None = None
    """What the uploads of this rule say of a client and can be checked; None: nothing but their weight."""


_ADAPTIVE = ("adam", "yogi")


def make_aggregation(options: AggregationOptions) -> Aggregation:
    """The rule that the options name: clipping, then merging, then noise, then the server optimiser.

    Integer and boolean leaves are merged and nothing else. Clipping bounds each client's change from the
    reference, over all floating leaves (McMahan et al. 2018, section 3). With noise every upload has weight
    1, and each coordinate of the mean of n uploads gets N(0, (noise_multiplier * clip_norm / n)^2); what that
    guarantees is `privacy.epsilon`, for this channel, its floating leaves, and float32 only: narrower leaves
    are rounded after clipping.

    Raises:
      InputError: an unknown name, a value out of range, an option that the choice does not read, or noise
        without clipping or with a rule that is no mean.
    """
    _check_options(options)
    return Aggregation(
        name=_name(options),
        init=_optimiser_state(options),
        pre=_on_arrival(options),
        reduce=_across_clients(options),
        post=_at_server(options),
        noise=options.noise_multiplier > 0,
    )


def _check_options(options: AggregationOptions) -> None:
    choose("aggregator", options.aggregator, get_args(Aggregator))
    choose("server_optimiser", options.server_optimiser, ("none", "momentum", *_ADAPTIVE))
    check_read(options)
    check_ranges(options)
    _check_noise(options)


def _check_noise(options: AggregationOptions) -> None:
    noise = options.noise_multiplier
    rule = options.aggregator
    if noise and not options.clip_norm:
        raise InputError(f"noise_multiplier: {noise} is noise in units of --clip-norm; give --clip-norm too")
    if noise and rule not in ("mean", "uniform"):
        raise InputError(f"noise_multiplier: {noise} is noise on a mean; use --aggregator mean, not {rule!r}")


def _name(options: AggregationOptions) -> str:
    on = [field for field in ("clip_norm", "noise_multiplier") if getattr(options, field)]
    server = [f"server {options.server_optimiser}"] if options.server_optimiser != "none" else []
    return ", ".join([options.aggregator, *on, *server])


# ---- on arrival: clipping, and equal weights --------------------------------------------------------------


def _on_arrival(options: AggregationOptions) -> OnArrival | None:
    bound = options.clip_norm
    equal = options.aggregator == "uniform" or options.noise_multiplier > 0
    if not bound and not equal:
        return None

    def pre(mean: PyTree, reference: PyTree, weight: Num[Array, ""] | float) -> tuple[PyTree, Array]:
        clipped = mean if not bound else clip_change(mean, reference, bound)
        return clipped, _equal_weight(weight) if equal else jnp.asarray(weight)

    return pre


def clip_change(mean: PyTree, reference: PyTree, bound: float) -> PyTree:
    """One upload [...] whose change from `reference` has L2 norm at most `bound` over all floating leaves:
    scaled, direction kept (McMahan et al. 2018, section 3).

    Shorter changes, and uploads that are not finite, are returned as they are.
    """
    start = _floats(reference)
    change, over = clip(difference(_floats(mean), start), bound)
    new = [jnp.where(over, s + c, m) for s, c, m in zip(start, change, _floats(mean), strict=True)]
    return _with_floats(mean, new)


def _equal_weight(weight: Num[Array, ""] | float) -> Array:
    """1 instead of a valid weight; an invalid one stays for the finite guard to find."""
    weight = jnp.asarray(weight)
    return jnp.where(jnp.isfinite(weight) & (weight >= 0), jnp.ones_like(weight), weight)


# ---- across clients ----------------------------------------------------------------------------------------


def _across_clients(options: AggregationOptions) -> AcrossClients | None:
    """The rule that the options name. Both means stream: the uniform one through equal weights."""
    malicious = options.malicious_bound
    radius = options.clip_radius
    rules = {
        "median": coordinate_median,
        "trimmed_mean": functools.partial(trimmed_mean, trim=options.trim),
        "geometric_median": geometric_median,
        "krum": functools.partial(krum, malicious=malicious),
        "multi_krum": functools.partial(multi_krum, malicious=malicious),
    }
    name = options.aggregator
    if name in ("mean", "uniform"):
        return None

    def reduce(stacked: PyTree, reference: PyTree, weight: Array, valid: Array, key: PRNGKeyArray) -> PyTree:
        del key
        if name == "centred_clipping":
            return centred_clipping(stacked, weight, valid, reference, radius)
        return rules[name](stacked, weight, valid)

    return reduce


# ---- at the server: noise, then the optimiser --------------------------------------------------------------


def _at_server(options: AggregationOptions) -> AtServer | None:
    optimiser = _optimiser(options)
    noise = options.noise_multiplier
    bound = options.clip_norm
    if optimiser is None and not noise:
        return None

    def post(
        mean: PyTree, reference: PyTree, state: PyTree, count: Int[Array, ""], key: PRNGKeyArray
    ) -> tuple[PyTree, PyTree]:
        if noise:
            mean = add_noise(mean, noise * bound / jnp.maximum(count, 1), key)
        if optimiser is None:
            return mean, state
        start = _floats(reference)
        gradient = jax.tree.map(jnp.subtract, start, _floats(mean))
        change, state = optimiser.update(gradient, state)
        return _with_floats(mean, jax.tree.map(jnp.add, start, change)), state

    return post


def add_noise(mean: PyTree, deviation: Float[Array, ""], key: PRNGKeyArray) -> PyTree:
    """Add Gaussian noise of this standard deviation to every coordinate of the floating leaves [...].

    With noise_multiplier * clip_norm / count this is the Gaussian mechanism on a plain mean (McMahan et al.
    2018, algorithm 1). Each leaf has a key of its own.
    """

    def noisy(index: int, leaf: Array) -> Array:
        return leaf + deviation * jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)

    return _with_floats(mean, [noisy(i, leaf) for i, leaf in enumerate(_floats(mean))])


def _optimiser(options: AggregationOptions) -> optax.GradientTransformation | None:
    """Steps along the pseudo-gradient, reference - mean: momentum is FedAvgM (Hsu et al. 2019), m <- beta m +
    g, x <- x - step m."""
    kind = options.server_optimiser
    beta = options.server_momentum
    if kind == "none":
        return None
    if kind == "momentum":
        return optax.sgd(options.server_step or 1.0, momentum=beta)
    adaptivity = options.server_adaptivity
    return adaptive(options.server_step or 0.1, beta, adaptivity, signed=kind == "yogi")


def _optimiser_state(options: AggregationOptions) -> Callable[[PyTree], PyTree]:
    optimiser = _optimiser(options)
    return lambda reference: () if optimiser is None else optimiser.init(_floats(reference))


def adaptive(step: float, beta: float, adaptivity: float, signed: bool) -> optax.GradientTransformation:
    """FedAdam, or FedYogi if signed (Reddi et al. 2021, algorithm 2, beta_2 = 0.99).

        m <- beta m + (1 - beta) g,   x <- x - step m / (sqrt(v) + tau)
        v <- beta_2 v + (1 - beta_2) g^2,   or with signs   v <- v - (1 - beta_2) g^2 sign(v - g^2)

    It starts from m = 0 and v = tau^2. The paper has no bias correction, as optax's adam and yogi have, so
    these would take other steps.
    """

    def init(params: PyTree) -> tuple[PyTree, PyTree]:
        m = jax.tree.map(jnp.zeros_like, params)
        return m, jax.tree.map(lambda x: jnp.full_like(x, adaptivity**2), params)

    def second(v: Array, g: Array) -> Array:
        square = jnp.square(g)
        return v - (1 - SERVER_BETA2) * (square * jnp.sign(v - square) if signed else v - square)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        m = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state[0], updates)
        v = jax.tree.map(second, state[1], updates)
        return jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + adaptivity), m, v), (m, v)

    return optax.GradientTransformation(init, update)


def _floats(tree: PyTree) -> list[Array]:
    """The floating leaves, in float32."""
    return [widen(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_floats(tree: PyTree, floats: list[Array]) -> PyTree:
    """The tree with these floating leaves, in its own dtypes; the other leaves stay."""
    new = iter(floats)
    return jax.tree.map(lambda leaf: cast_like(next(new), leaf) if is_float(leaf) else leaf, tree)
