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
        """Return the upload [...] and its weight as they are merged."""
        ...


@runtime_checkable
class AtServer(Protocol):
    """Acts on the merged uploads."""

    def __call__(
        self, mean: PyTree, reference: PyTree, state: PyTree, count: Int[Array, ""], key: PRNGKeyArray, /
    ) -> tuple[PyTree, PyTree]:
        """Return the server's next value [...] and the new state.

        `count` is the number of valid uploads.
        """
        ...


class Aggregation(NamedTuple):
    """How the `mean` channel of uploads becomes the server's next value.

    `reference` is the value [...] from which the clients started the round.
    """

    name: str
    """The options in use, for messages."""
    init: Callable[[PyTree], PyTree]
    """init(reference) -> state of `post`; () if it has none."""
    pre: OnArrival | None = None
    """Acts on each upload as it arrives."""
    reduce: MergingRule | None = None
    """The merging rule; None: the mean by the uploads' weights, which is a running sum."""
    post: AtServer | None = None
    """Acts on the merged uploads."""
    noise: bool = False
    """Whether `post` adds the noise of differential privacy."""
    possible: Claim | None = None
    """A claim of the uploads that can be checked, besides their weight."""


def make_aggregation(options: AggregationOptions) -> Aggregation:
    """Compose clipping, merging, noise and the server optimiser as the options say.

    Integer and boolean leaves are only merged. Clipping bounds each client's change from
    the reference, over all floating leaves (McMahan et al. 2018, section 3). With noise
    every upload has weight 1, and each coordinate of the mean of n uploads gets
    N(0, (noise_multiplier * clip_norm / n)^2). The guarantee, `privacy.epsilon`, is for
    this channel's floating leaves in float32: narrower leaves are rounded after clipping.

    Raises:
      InputError: an unknown name, a value out of range, or noise without clipping or with
        a rule that is not a mean.
    """
    # an unknown name or a value out of range fails before anything is compiled
    rule = chosen("aggregator", options)
    check_ranges(options)
    _check_noise(options, rule)
    optimiser = _optimiser(options)
    # the engine takes means as running sums; any other rule needs all uploads at once
    reduce = None
    if not isinstance(rule, Mean | Uniform):
        reduce = _like_reference(rule)
    return Aggregation(
        name=_name(options),
        init=_optimiser_state(optimiser),
        pre=_on_arrival(options, rule),
        reduce=reduce,
        post=_at_server(options, optimiser),
        noise=options.noise_multiplier > 0,
    )


def _like_reference(rule: MergingRule) -> MergingRule:
    """Return the rule, with a check of a user's own one: its result must be like the reference."""
    if name_of("aggregator", rule):
        return rule

    def reduce(stacked: PyTree, reference: PyTree, weight: Array, valid: Array, key: PRNGKeyArray) -> PyTree:
        merged = rule(stacked, reference, weight, valid, key)
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (merged, reference)]
        if jax.tree.structure(merged) != jax.tree.structure(reference) or shapes[0] != shapes[1]:
            name = label_of("aggregator", rule)
            raise InputError(f"aggregator: {name} returned shapes {shapes[0]}; needed: {shapes[1]}")
        # a rule may compute in float32 whatever the leaf's type
        return jax.tree.map(cast_like, merged, reference)

    return reduce


def _check_noise(options: AggregationOptions, rule: object) -> None:
    noise = options.noise_multiplier
    if noise and not options.clip_norm:
        raise InputError(f"noise_multiplier: {noise} is noise in units of --clip-norm; also give --clip-norm")
    # the noise is calibrated to the sensitivity of a mean, clip_norm / n
    if noise and not isinstance(rule, Mean | Uniform):
        name = label_of("aggregator", options.aggregator)
        raise InputError(f"noise_multiplier: {noise} is noise on a mean; use --aggregator mean, not {name!r}")


def _name(options: AggregationOptions) -> str:
    parts = [label_of("aggregator", options.aggregator)]
    parts += [field for field in ("clip_norm", "noise_multiplier") if getattr(options, field)]
    server = label_of("server_optimiser", options.server_optimiser)
    if server != "none":
        parts.append(f"server {server}")
    return ", ".join(parts)


# ---- on arrival: clipping, and equal weights -------------------------------------------


def _on_arrival(options: AggregationOptions, rule: object) -> OnArrival | None:
    bound = options.clip_norm
    # the noise is calibrated to the influence of one client, which the largest weight
    # would decide: with equal weights it is clip_norm / n
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
    """Scale an upload's change from `reference` to L2 norm at most `bound`.

    The norm is over all floating leaves [...] (McMahan et al. 2018, section 3). Shorter
    changes, and uploads that are not finite, are returned unchanged.
    """
    start = _floats(reference)
    change, over = clip(difference(_floats(mean), start), bound)
    # short changes keep their bits: start + (mean - start) would round
    new = [jnp.where(over, s + c, m) for s, c, m in zip(start, change, _floats(mean), strict=True)]
    return _with_floats(mean, new)


def _equal_weight(weight: Num[Array, ""] | float) -> Array:
    """Return 1 for a valid weight, and an invalid one unchanged, which the finite guard
    rejects."""
    weight = jnp.asarray(weight)
    return jnp.where(jnp.isfinite(weight) & (weight >= 0), jnp.ones_like(weight), weight)


# ---- at the server: noise, then the optimiser ------------------------------------------


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
            # sigma clip_norm / n (McMahan et al. 2018). In an empty round n = 0, and the
            # mean is not used
            mean = add_noise(mean, noise * bound / jnp.maximum(count, 1), key)
        if optimiser is None:
            return mean, state
        start = _floats(reference)
        # x_t - mean: descending along it with rate 1 is FedAvg (Reddi et al. 2021)
        gradient = jax.tree.map(jnp.subtract, start, _floats(mean))
        change, state = optimiser.update(gradient, state, start)
        return _with_floats(mean, jax.tree.map(jnp.add, start, change)), state

    return post


def add_noise(mean: PyTree, std: Float[Array, ""], key: PRNGKeyArray) -> PyTree:
    """Add Gaussian noise with this standard deviation to the floating leaves [...].

    With noise_multiplier * clip_norm / count this is the Gaussian mechanism on an
    unweighted mean (McMahan et al. 2018, algorithm 1).
    """

    def noisy(index: int, leaf: Array) -> Array:
        # a key per leaf, by position: equal leaves must not get equal noise
        return leaf + std * jax.random.normal(jax.random.fold_in(key, index), leaf.shape, leaf.dtype)

    return _with_floats(mean, [noisy(i, leaf) for i, leaf in enumerate(_floats(mean))])


def _optimiser(options: AggregationOptions) -> optax.GradientTransformation | None:
    """Return the optimiser of the pseudo-gradient reference - mean, if there is one."""
    choice = chosen("server_optimiser", options)
    if label_of("server_optimiser", options.server_optimiser) == "none":
        return None
    if hasattr(choice, "build"):
        return choice.build()
    return choice  # a user's own optax optimiser


def _optimiser_state(optimiser: optax.GradientTransformation | None) -> Callable[[PyTree], PyTree]:
    def init(reference: PyTree) -> PyTree:
        if optimiser is None:
            return ()
        return optimiser.init(_floats(reference))

    return init


def _floats(tree: PyTree) -> list[Array]:
    """Return the floating leaves, in float32."""
    # in bfloat16, sums of squares would lose the small coordinates
    return [widen(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_floats(tree: PyTree, floats: list[Array]) -> PyTree:
    """Return the tree with its floating leaves replaced, in their own dtypes."""
    new = iter(floats)  # in the order of `_floats`

    def replace(leaf: Array) -> Array:
        if is_float(leaf):
            return cast_like(next(new), leaf)
        return leaf

    return jax.tree.map(replace, tree)
