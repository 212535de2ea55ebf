"""Aggregation: how the clients' uploads become the server's next value.

`make_aggregation` composes a merging rule (`rules.py`), clipping, noise and a server
optimiser into one `Aggregation`, as the options say.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Num, PRNGKeyArray

from fcljax.choices import chosen, label_of, name_of
from fcljax.errors import InputError
from fcljax.federated.aggregators import Mean, Uniform
from fcljax.federated.distances import clip, difference
from fcljax.federated.sums import cast_like, is_float, widen
from fcljax.options import check_ranges
from fcljax.settings import AggregationOptions
from fcljax.types import Claim, MergingRule, PyTree


@runtime_checkable
class OnArrival(Protocol):
    """Acts on the upload of one client as it arrives, before it is merged."""

    def __call__(self, mean: PyTree, reference: PyTree, weight: Num[Array, ""], /) -> tuple[PyTree, Array]:
        """The upload [...] and its weight as they are merged."""
        ...


@runtime_checkable
class AtServer(Protocol):
    """Acts on what was merged."""

    def __call__(
        self, mean: PyTree, reference: PyTree, state: PyTree, count: Int[Array, ""], key: PRNGKeyArray, /
    ) -> tuple[PyTree, PyTree]:
        """The server's next value [...] and the new state; `count` is the number of valid
        uploads."""
        ...


class Aggregation(NamedTuple):
    """How the `mean` channel of uploads becomes the server's next value.

    `reference` is the value [...] that the clients started the round from, a tree like
    `mean`.
    """

    name: str
    """What is switched on, for messages."""
    init: Callable[[PyTree], PyTree]
    """init(reference): the state of `post`; () if it has none."""
    pre: OnArrival | None = None
    """On one upload as it arrives; None: nothing."""
    reduce: MergingRule | None = None
    """The merging rule; None: the mean weighted by the uploads' weights, which
    streams."""
    post: AtServer | None = None
    """On what was merged; None: nothing."""
    noise: bool = False
    """Whether `post` adds the noise of differential privacy."""
    possible: Claim | None = None
    """What the uploads of this rule say of a client and can be checked; None: nothing but
    their weight."""


def make_aggregation(options: AggregationOptions) -> Aggregation:
    """Return the rule that the options choose: clipping, then merging, then noise, then
    the server optimiser.

    Integer and boolean leaves are merged and nothing else. Clipping bounds each
    client's change from the reference, over all floating leaves (McMahan et al. 2018,
    section 3). With noise every upload has weight 1, and each coordinate of the mean of
    n uploads gets N(0, (noise_multiplier * clip_norm / n)^2); what that guarantees is
    `privacy.epsilon`, for this channel, its floating leaves, and float32 only: narrower
    leaves are rounded after clipping.

    Raises:
      InputError: an unknown name, a value out of range, or noise without clipping or with a rule that is no
        mean.
    """
    # an unknown name or range fails here, before anything is compiled
    rule = chosen("aggregator", options)
    check_ranges(options)
    _check_noise(options, rule)
    optimiser = _optimiser(options)
    return Aggregation(
        name=_name(options),
        init=_optimiser_state(optimiser),
        pre=_on_arrival(options, rule),
        reduce=None if isinstance(rule, Mean | Uniform) else _like_reference(rule),
        post=_at_server(options, optimiser),
        noise=options.noise_multiplier > 0,
    )


def _like_reference(rule: MergingRule) -> MergingRule:
    """Return a rule of which it is checked, where it is traced, that it returns a tree
    like the reference."""
    if name_of("aggregator", rule):
        return rule

    def reduce(stacked: PyTree, reference: PyTree, weight: Array, valid: Array, key: PRNGKeyArray) -> PyTree:
        merged = rule(stacked, reference, weight, valid, key)
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (merged, reference)]
        if jax.tree.structure(merged) != jax.tree.structure(reference) or shapes[0] != shapes[1]:
            called = label_of("aggregator", rule)
            raise InputError(f"aggregator: {called} returned shapes {shapes[0]}; needed: {shapes[1]}")
        # a rule may compute in float32: leaves of other types get theirs back
        return jax.tree.map(cast_like, merged, reference)

    return reduce


def _check_noise(options: AggregationOptions, rule: object) -> None:
    noise = options.noise_multiplier
    if noise and not options.clip_norm:
        raise InputError(f"noise_multiplier: {noise} is noise in units of --clip-norm; also give --clip-norm")
    # the noise is calibrated to the mean's sensitivity,
    # clip_norm / n, which no other rule has
    if noise and not isinstance(rule, Mean | Uniform):
        called = label_of("aggregator", options.aggregator)
        raise InputError(
            f"noise_multiplier: {noise} is noise on a mean; use --aggregator mean, not {called!r}"
        )


def _name(options: AggregationOptions) -> str:
    on = [field for field in ("clip_norm", "noise_multiplier") if getattr(options, field)]
    server = label_of("server_optimiser", options.server_optimiser)
    parts = [label_of("aggregator", options.aggregator), *on]
    if server != "none":
        parts.append(f"server {server}")
    return ", ".join(parts)


# ---- on arrival: clipping, and equal weights --------------------------------------------------------------


def _on_arrival(options: AggregationOptions, rule: object) -> OnArrival | None:
    bound = options.clip_norm
    # with weights the sensitivity would be the largest
    # weight's, so under noise all have weight 1
    equal = isinstance(rule, Uniform) or options.noise_multiplier > 0
    if not bound and not equal:
        return None

    def pre(mean: PyTree, reference: PyTree, weight: Num[Array, ""] | float) -> tuple[PyTree, Array]:
        clipped = mean
        if bound:
            clipped = clip_change(mean, reference, bound)
        new_weight = jnp.asarray(weight)
        if equal:
            new_weight = _equal_weight(weight)
        return clipped, new_weight

    return pre


def clip_change(mean: PyTree, reference: PyTree, bound: float) -> PyTree:
    """One upload [...] whose change from `reference` has L2 norm at most `bound` over
    all floating leaves: scaled, direction kept (McMahan et al. 2018, section 3).

    Shorter changes, and uploads that are not finite, are returned as they are.
    """
    start = _floats(reference)
    change, over = clip(difference(_floats(mean), start), bound)
    # short changes keep their bits: start + (mean - start) would round
    new = [jnp.where(over, s + c, m) for s, c, m in zip(start, change, _floats(mean), strict=True)]
    return _with_floats(mean, new)


def _equal_weight(weight: Num[Array, ""] | float) -> Array:
    """1 instead of a valid weight; an invalid one stays for the finite guard to find."""
    weight = jnp.asarray(weight)
    return jnp.where(jnp.isfinite(weight) & (weight >= 0), jnp.ones_like(weight), weight)


# ---- at the server: noise, then the optimiser --------------------------------------------------------------


def _at_server(
    options: AggregationOptions, optimiser: optax.GradientTransformation | None
) -> AtServer | None:
    noise = options.noise_multiplier
    bound = options.clip_norm
    if optimiser is None and not noise:
        return None

    def post(
        mean: PyTree,
        reference: PyTree,
        state: PyTree,
        count: Int[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[PyTree, PyTree]:
        if noise:
            # sigma clip_norm / n (McMahan et al. 2018): an empty round has n = 0, and
            # its mean is not used
            mean = add_noise(mean, noise * bound / jnp.maximum(count, 1), key)
        if optimiser is None:
            return mean, state
        start = _floats(reference)
        # x_t - mean: descending along it with rate 1 is FedAvg (Reddi et al. 2021)
        gradient = jax.tree.map(jnp.subtract, start, _floats(mean))
        change, state = optimiser.update(gradient, state, start)
        return _with_floats(mean, jax.tree.map(jnp.add, start, change)), state

    return post


def add_noise(mean: PyTree, deviation: Float[Array, ""], key: PRNGKeyArray) -> PyTree:
    """Add Gaussian noise of this standard deviation to every coordinate of the floating
    leaves [...].

    With noise_multiplier * clip_norm / count this is the Gaussian mechanism on a plain
    mean (McMahan et al. 2018, algorithm 1). Each leaf has a key of its own.
    """

    def noisy(index: int, leaf: Array) -> Array:
        # a key per leaf, by position: equal leaves must not get equal noise
        return leaf + deviation * jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)

    return _with_floats(mean, [noisy(i, leaf) for i, leaf in enumerate(_floats(mean))])


def _optimiser(options: AggregationOptions) -> optax.GradientTransformation | None:
    """Return the optimiser of the server, which steps along the pseudo-gradient,
    reference - mean."""
    choice = chosen("server_optimiser", options)
    if label_of("server_optimiser", options.server_optimiser) == "none":
        return None
    return choice.build() if hasattr(choice, "build") else choice


def _optimiser_state(optimiser: optax.GradientTransformation | None) -> Callable[[PyTree], PyTree]:
    def init(reference: PyTree) -> PyTree:
        if optimiser is None:
            return ()
        return optimiser.init(_floats(reference))

    return init


def _floats(tree: PyTree) -> list[Array]:
    """The floating leaves, in float32."""
    # float32: sums of squares of bfloat16 would lose the small coordinates
    return [widen(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_floats(tree: PyTree, floats: list[Array]) -> PyTree:
    """The tree with these floating leaves, in its own dtypes; the other leaves stay."""
    # in the order of `_floats`, which skips the other leaves in the same way
    new = iter(floats)
    return jax.tree.map(lambda leaf: cast_like(next(new), leaf) if is_float(leaf) else leaf, tree)
