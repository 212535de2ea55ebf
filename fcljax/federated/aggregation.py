"""What a server does with K uploads: pure, jit-able reductions over pytrees whose leaves are stacked over
clients, [K, ...].

Every rule takes `valid [K]`: rows with valid False have no influence whatever they hold, NaN and inf
included, so K stays fixed. Valid rows must be finite; `finite_guard` sees to that. Sums are taken in float32
(float64 leaves stay float64) and results have the leaf's shape without axis 0 and the leaf's dtype; integer
and boolean leaves are rounded. With no valid row a mean or median is 0: the engine keeps the server's state
in that case, so the zeros are never used.

Rules about whole uploads measure L2 distances over all leaves together. Their arithmetic neither overflows
nor turns into NaN while uploads are finite, so one upload of 3e38 is one far row and no more.

`make_aggregation` composes a rule, clipping, noise and a server optimiser into one `Aggregation`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray

from fcljax.errors import InputError, Value, choose
from fcljax.options import check_ranges, check_value, flag, option
from fcljax.types import PyTree

# keeps precisions of repeatedly conflated posteriors, and their sum over clients, far from float32's limit
SIGMA_MIN = 1e-6
EQUAL_DISTANCES = 1e-6  # relative spread below which distances differ by rounding only
# lengths are measured in units this much larger: then those of any finite numbers, in trees of up to 2^40 of
# them, and their reciprocals are normal float32 numbers. Divisors above 2^126 are flushed to 1 / d = 0.
SHRINK = 2.0**-24
Leaf = Array | np.ndarray | jax.ShapeDtypeStruct  # where only shape and dtype count
SERVER_BETA2 = 0.99  # of the adaptive server optimisers (Reddi et al. 2021, section 5)


# ---- sums that uploads are added to as they arrive ---------------------------------------------------------


def sum_zeros(shapes: PyTree, floating: bool = False) -> PyTree:
    """A running sum of nothing, for `add_rows`.

    Args:
      shapes: leaves with shape and dtype of ONE upload, arrays or `jax.ShapeDtypeStruct`.
      floating: are the rows weighted? Then integer and boolean leaves are summed in float32 as well.

    Returns:
      Zeros [...] in float32 for narrower floats (a bfloat16 sum of ones stops at 256); float64, and without
      `floating` integers and booleans, keep their dtype.
    """

    exact = lambda leaf: not floating and not _is_float(leaf)
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype if exact(leaf) else _wide_dtype(leaf.dtype)), shapes
    )


def add_rows(
    total: PyTree, rows: PyTree, valid: Bool[Array, " L"], weight: Num[Array, " L"] | None = None
) -> PyTree:
    """`total [...]` plus the valid rows of leaves [L, ...], each times its weight if there are weights, in
    the total's dtype. Booleans without weight are combined by "or".

    Invalid rows are left out by selection, not by a factor: 0 * NaN is NaN.
    """

    def add(total: Array, leaf: Array) -> Array:
        wide = leaf.astype(total.dtype)
        scaled = wide if weight is None else wide * _rows(weight, leaf).astype(total.dtype)
        kept = jnp.where(_rows(valid, leaf), scaled, jnp.zeros((), total.dtype))
        return total | jnp.any(kept, axis=0) if total.dtype == bool else total + jnp.sum(kept, axis=0)

    return jax.tree.map(add, total, rows)


def sum_value(total: PyTree, like: PyTree) -> PyTree:
    """A finished sum, or a mean made of it, in the dtypes of the leaves of `like`; integers and booleans are
    rounded."""
    return jax.tree.map(_like, total, like)


# ---- rules: (stacked, weight, valid) -> one tree -----------------------------------------------------------


def weighted_mean(stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"]) -> PyTree:
    """sum_k n_k w_k / sum_k n_k over the valid clients (FedAvg, McMahan et al. 2017, algorithm 1).

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0, usually the client's rows.
      valid: which rows count.

    Returns:
      Leaves [...]; zeros if the weights of the valid rows add up to 0.
    """
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    mean = add_rows(sum_zeros(one, floating=True), stacked, valid, _shares(weight, valid))
    return sum_value(mean, stacked)


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
    _check_range("trim", trim)
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


def geometric_median(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    steps: int = 32,
    smoothing: float = 1e-6,
) -> PyTree:
    """The point [...] with the least weighted sum of L2 distances to the valid uploads (RFA, Pillutla et al.
    2022, the smoothed Weiszfeld algorithm).

        v <- sum_k b_k w_k / sum_k b_k,   b_k = a_k / max(smoothing, ||v - w_k||),   a_k = n_k / sum_j n_j

    The start is the coordinate median, not the mean: from the mean, one upload of 3e38 takes 40 steps to
    forget. Less than half of the weight cannot move the result far; a weight is a client's own claim.

    Args:
      stacked: leaves [K, ...].
      weight: n_k >= 0; rows of weight 0 do not count.
      valid: which rows count.
      steps: iterations; the paper takes 3.
      smoothing: the paper's nu, in the units of the leaves.
    """
    counted = valid & (weight > 0)
    wide, share = _selected(stacked, counted), _shares(weight, counted)

    def towards(_: Array, centre: PyTree) -> PyTree:
        apart = _apart(wide, centre)
        far = jnp.maximum(jax.vmap(_norm)(apart), SHRINK * smoothing)
        near = jnp.min(jnp.where(counted, far, jnp.inf))
        # steps of unit vectors, all relative to the nearest row: 1 / distance itself would underflow
        pull = jnp.sum(jnp.where(counted, share * (near / far), 0))
        length = jnp.where(pull > 0, near / SHRINK / jnp.where(pull > 0, pull, 1), 0)
        unit = _mix(share, jax.tree.map(lambda x: x / _rows(far, x), apart))
        return jax.tree.map(lambda c, u: c + length * u, centre, unit)

    start = coordinate_median(wide, weight, counted)
    return sum_value(jax.lax.fori_loop(0, steps, towards, start), stacked)


def krum(stacked: PyTree, weight: Num[Array, " K"], valid: Bool[Array, " K"], malicious: int) -> PyTree:
    """The one valid upload [...] with the smallest sum of squared distances to its n - malicious - 2 nearest
    others, n = valid rows; the first of equals (Blanchard et al. 2017, section 4). `weight [K]` is ignored.

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
    """The plain mean [...] of the `chosen` valid uploads that `krum` ranks first (Blanchard et al. 2017,
    section 5).

    Args:
      stacked: leaves [K, ...].
      weight: ignored, since it is a client's own claim.
      valid: which rows count; n of them.
      malicious: how many uploads may be malicious; the paper's guarantee needs n > 2 * malicious + 2.
      chosen: how many to average, at least one and at most n; None takes n - malicious.

    Raises:
      InputError: malicious < 0.
    """
    count = jnp.sum(valid)
    score = _krum_scores(stacked, valid, malicious)
    kept = jnp.clip(count - malicious if chosen is None else chosen, 1, jnp.maximum(count, 1))
    rank = jnp.argsort(jnp.argsort(score))
    return weighted_mean(stacked, jnp.ones_like(weight), valid & (rank < kept))


def _krum_scores(stacked: PyTree, valid: Bool[Array, " K"], malicious: int) -> Float[Array, " K"]:
    """The root of the sum of squared L2 distances of an upload to its n - malicious - 2 nearest others, n =
    valid rows, in shrunk units; inf for invalid rows (Blanchard et al. 2017, section 4).

    The root ranks as the sum does and does not overflow. Too few rows for the formula: one neighbour, if
    there is one.
    """
    _check_range("malicious_bound", malicious)
    rows, count, wide = valid.shape[0], jnp.sum(valid), _selected(stacked, valid)
    # one row at a time: the differences of all pairs, [K, K, ...], may not fit
    distance = jax.lax.map(lambda one: jax.vmap(_norm)(_apart(wide, one)), wide)
    other = valid[:, None] & valid & ~jnp.eye(rows, dtype=bool)
    ranked = jnp.sort(jnp.where(other, distance, jnp.inf), axis=1)
    nearest = jnp.minimum(jnp.maximum(count - malicious - 2, 1), count - 1)
    score = jax.vmap(_norm)(jnp.where(jnp.arange(rows) < nearest, ranked, 0))
    return jnp.where(valid, score, jnp.inf)


def centred_clipping(
    stacked: PyTree,
    weight: Num[Array, " K"],
    valid: Bool[Array, " K"],
    centre: PyTree,
    radius: float,
    steps: int = 3,
) -> PyTree:
    """The centre [...] moved, `steps` times, by the mean of the changes clipped to L2 norm `radius`
    (Karimireddy et al. 2021, algorithm 2, CClip).

        v <- v + 1/n sum_k (x_k - v) min(1, radius / ||x_k - v||)

    `weight [K]` is ignored. The result is at most steps * radius from `centre`.

    Args:
      stacked: leaves [K, ...].
      weight: ignored.
      valid: which rows count; n of them. With none the result is the centre.
      centre: leaves [...] of the same structure: what the clients started from.
      radius: the paper's tau, in the units of the leaves.
      steps: the paper's number of iterations.

    Raises:
      InputError: a radius that is not positive.
    """
    _check_range("clip_radius", radius)
    equal, wide = _shares(jnp.ones_like(weight), valid), _selected(stacked, valid)

    def move(_: Array, centre: PyTree) -> PyTree:
        change, _ = jax.vmap(functools.partial(_clip, radius=radius))(_apart(wide, centre))
        return jax.tree.map(jnp.add, centre, _mix(equal, change))

    return sum_value(jax.lax.fori_loop(0, steps, move, jax.tree.map(_wide, centre)), stacked)


# the rules that need nothing but uploads and weights, by the names that a config has for them
AGGREGATORS: dict[str, Callable[[PyTree, Array, Array], PyTree]] = {
    "mean": weighted_mean,
    "uniform": uniform_mean,
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "geometric_median": geometric_median,
}


# ---- from arrival to the server's new value: one Aggregation -----------------------------------------------


class Aggregation(NamedTuple):
    """How the `mean` channel of uploads becomes the server's next value. `reference`: the value [...] that
    the clients started the round from, a tree like `mean`.

    name: what is on, for messages
    init(reference) -> state of the server's part; () if it has none
    pre(mean, reference, weight) -> (mean, weight): one client's upload as it arrives, before merging
    reduce(stacked [K, ...], reference, weight [K], valid [K], key) -> tree across clients; None: the mean
      weighted by the uploads' weights, which streams
    post(mean, reference, state, count, key) -> (mean, state): at the server; count: valid uploads
    noise: does `post` add the noise of differential privacy?
    """

    name: str
    init: Callable[[PyTree], PyTree]
    pre: Callable[[PyTree, PyTree, Array], tuple[PyTree, Array]] | None = None
    reduce: Callable[[PyTree, PyTree, Array, Array, PRNGKeyArray], PyTree] | None = None
    post: Callable[[PyTree, PyTree, PyTree, Array, PRNGKeyArray], tuple[PyTree, PyTree]] | None = None
    noise: bool = False


Aggregator = Literal[
    "mean", "uniform", "median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "centred_clipping"
]


@dataclasses.dataclass(frozen=True)
class AggregationOptions:
    """Fields with default None take their usual value where the choice reads them, and are refused where it
    does not."""

    aggregator: Aggregator = "mean"  # how uploads are merged; mean: weighted by the clients' rows
    trim: float | None = option(None, below=0.5)  # share that trimmed_mean drops at either end; default: 0.1
    # malicious clients that krum and multi_krum assume; default: 1
    malicious_bound: int | None = option(None, least=0)
    # L2 norm that centred_clipping clips changes to; default: 10
    clip_radius: float | None = option(None, positive=True)
    # L2 norm that every client's change is clipped to; default: no clipping
    clip_norm: float | None = option(None, positive=True)
    # noise over clip_norm: central differential privacy; default: none
    noise_multiplier: float | None = option(None, positive=True)
    server_optimiser: Literal["none", "momentum", "adam", "yogi"] = "none"  # steps along the clients' change
    # its step size; default: 1 for momentum, 0.1 for adam and yogi
    server_step: float | None = option(None, positive=True)
    server_momentum: float | None = option(None, below=1.0)  # beta_1 of the server optimiser; default: 0.9
    server_adaptivity: float | None = option(None, positive=True)  # tau of adam and yogi; default: 0.001


_KRUMS, _ADAPTIVE = ("krum", "multi_krum"), ("adam", "yogi")
# option: which other option decides whether it is read, and the values of it that do
_READERS = {
    "trim": ("aggregator", ("trimmed_mean",)),
    "malicious_bound": ("aggregator", _KRUMS),
    "clip_radius": ("aggregator", ("centred_clipping",)),
    "server_step": ("server_optimiser", ("momentum", *_ADAPTIVE)),
    "server_momentum": ("server_optimiser", ("momentum", *_ADAPTIVE)),
    "server_adaptivity": ("server_optimiser", _ADAPTIVE),
}


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
        noise=options.noise_multiplier is not None,
    )


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
    apart = _apart(jnp.where(holds[..., None], _wide(vectors), 0), _wide(merged))
    distance = jax.vmap(jax.vmap(_norm))(apart)
    usual = jax.vmap(coordinate_median, in_axes=(1, None, 1))(distance, jnp.ones(valid.shape), holds)
    # where most prototypes equal the merged one, a difference by rounding is no outlier
    rounding = EQUAL_DISTANCES * jax.vmap(_norm)(SHRINK * _wide(merged))
    far = (distance > factor * usual + rounding) & (jnp.sum(holds, axis=0) >= 3)
    return holds & ~far


def _check_options(options: AggregationOptions) -> None:
    choose("aggregator", options.aggregator, get_args(Aggregator))
    choose("server_optimiser", options.server_optimiser, ("none", "momentum", *_ADAPTIVE))
    for field, (decider, readers) in _READERS.items():
        choice = getattr(options, decider)
        if getattr(options, field) is not None and choice not in readers:
            verb = "reads" if len(readers) == 1 else "read"
            names = " and ".join(", ".join(readers).rsplit(", ", 1))
            raise InputError(
                f"{field}: only {names} {verb} it, and {decider} is {choice!r}; "
                f"nearest: {flag(decider)} {tuple(readers)[0]}"
            )
    check_ranges(options)
    _check_noise(options)


def _check_noise(options: AggregationOptions) -> None:
    noise, rule = options.noise_multiplier, options.aggregator
    if noise is not None and options.clip_norm is None:
        raise InputError(f"noise_multiplier: {noise} is noise in units of --clip-norm; give --clip-norm too")
    if noise is not None and rule not in ("mean", "uniform"):
        raise InputError(f"noise_multiplier: {noise} is noise on a mean; use --aggregator mean, not {rule!r}")


def _check_range(name: str, value: float | int) -> None:
    """The range of an option, for a rule that is called without the options."""
    check_value(next(field for field in dataclasses.fields(AggregationOptions) if field.name == name), value)


def _name(options: AggregationOptions) -> str:
    on = [field for field in ("clip_norm", "noise_multiplier") if getattr(options, field) is not None]
    server = [f"server {options.server_optimiser}"] if options.server_optimiser != "none" else []
    return ", ".join([options.aggregator, *on, *server])


def _usual(value: Value | None, usual: Value) -> Value:
    return usual if value is None else value


# on arrival: clipping, and weights of 1


def _on_arrival(options: AggregationOptions) -> Callable | None:
    bound = options.clip_norm
    equal = options.aggregator == "uniform" or options.noise_multiplier is not None
    if bound is None and not equal:
        return None

    def pre(mean: PyTree, reference: PyTree, weight: Num[Array, ""] | float) -> tuple[PyTree, Array]:
        clipped = mean if bound is None else clip_change(mean, reference, bound)
        return clipped, _equal_weight(weight) if equal else jnp.asarray(weight)

    return pre


def clip_change(mean: PyTree, reference: PyTree, bound: float) -> PyTree:
    """One upload [...] whose change from `reference` has L2 norm at most `bound` over all floating leaves:
    scaled, direction kept (McMahan et al. 2018, section 3). Shorter changes, and uploads that are not finite,
    are returned as they are."""
    start = _floats(reference)
    change, over = _clip(_apart(_floats(mean), start), bound)
    new = [jnp.where(over, s + c, m) for s, c, m in zip(start, change, _floats(mean), strict=True)]
    return _with_floats(mean, new)


def _equal_weight(weight: Num[Array, ""] | float) -> Array:
    """1 instead of a valid weight; a bad one stays for the finite guard to find."""
    weight = jnp.asarray(weight)
    return jnp.where(jnp.isfinite(weight) & (weight >= 0), jnp.ones_like(weight), weight)


# across clients


def _across_clients(options: AggregationOptions) -> Callable | None:
    """reduce(stacked, reference, weight, valid, key). Both means stream: the uniform one by its weights."""
    malicious = _usual(options.malicious_bound, 1)
    rules = {
        "median": coordinate_median,
        "trimmed_mean": functools.partial(trimmed_mean, trim=_usual(options.trim, 0.1)),
        "geometric_median": geometric_median,
        "krum": functools.partial(krum, malicious=malicious),
        "multi_krum": functools.partial(multi_krum, malicious=malicious),
    }
    if options.aggregator == "centred_clipping":
        return functools.partial(_reduce_around, _usual(options.clip_radius, 10.0))
    rule = rules.get(options.aggregator)
    return rule and functools.partial(_reduce_by, rule)


def _reduce_by(rule, stacked, reference, weight, valid, key):
    del reference, key
    return rule(stacked, weight, valid)


def _reduce_around(radius, stacked, reference, weight, valid, key):
    del key
    return centred_clipping(stacked, weight, valid, reference, radius)


# at the server: noise, then the optimiser


def _at_server(options: AggregationOptions) -> Callable | None:
    optimiser, noise, bound = _optimiser(options), options.noise_multiplier, options.clip_norm
    if optimiser is None and noise is None:
        return None

    def post(
        mean: PyTree, reference: PyTree, state: PyTree, count: Int[Array, ""], key: PRNGKeyArray
    ) -> tuple[PyTree, PyTree]:
        if noise is not None and bound is not None:
            mean = add_noise(mean, noise * bound / jnp.maximum(count, 1), key)
        return (mean, state) if optimiser is None else _server_step(optimiser, mean, reference, state)

    return post


def add_noise(mean: PyTree, deviation: Float[Array, ""], key: PRNGKeyArray) -> PyTree:
    """Gaussian noise of this standard deviation on every coordinate of the floating leaves [...], drawn leaf
    by leaf: with noise_multiplier * clip_norm / count, the Gaussian mechanism on a plain mean (McMahan et al.
    2018, algorithm 1)."""
    draw = lambda i, x: x + deviation * jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
    return _with_floats(mean, [draw(i, leaf) for i, leaf in enumerate(_floats(mean))])


def _optimiser(options: AggregationOptions) -> optax.GradientTransformation | None:
    """Steps along the pseudo-gradient, reference - mean: momentum is FedAvgM (Hsu et al. 2019), m <- beta m +
    g, x <- x - step m."""
    kind, beta = options.server_optimiser, _usual(options.server_momentum, 0.9)
    if kind == "none":
        return None
    if kind == "momentum":
        return optax.sgd(_usual(options.server_step, 1.0), momentum=beta)
    adaptivity = _usual(options.server_adaptivity, 1e-3)
    return adaptive(_usual(options.server_step, 0.1), beta, adaptivity, signed=kind == "yogi")


def adaptive(step: float, beta: float, adaptivity: float, signed: bool) -> optax.GradientTransformation:
    """FedAdam, or FedYogi if signed (Reddi et al. 2021, algorithm 2, beta_2 = 0.99).

        m <- beta m + (1 - beta) g,   x <- x - step m / (sqrt(v) + tau)
        v <- beta_2 v + (1 - beta_2) g^2,   or with signs   v <- v - (1 - beta_2) g^2 sign(v - g^2)

    from m = 0 and v = tau^2. The paper corrects no bias, as optax's adam and yogi do, so these would take
    other steps.
    """

    def init(params: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.zeros_like, params), jax.tree.map(
            lambda x: jnp.full_like(x, adaptivity**2), params
        )

    def second(v: Array, g: Array) -> Array:
        square = jnp.square(g)
        return v - (1 - SERVER_BETA2) * (square * jnp.sign(v - square) if signed else v - square)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        del params
        m = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state[0], updates)
        v = jax.tree.map(second, state[1], updates)
        return jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + adaptivity), m, v), (m, v)

    return optax.GradientTransformation(init, update)


def _optimiser_state(options: AggregationOptions) -> Callable[[PyTree], PyTree]:
    optimiser = _optimiser(options)
    return lambda reference: () if optimiser is None else optimiser.init(_floats(reference))


def _server_step(optimiser: optax.GradientTransformation, mean, reference, state) -> tuple[PyTree, PyTree]:
    start = _floats(reference)
    gradient = jax.tree.map(jnp.subtract, start, _floats(mean))
    change, state = optimiser.update(gradient, state)
    return _with_floats(mean, jax.tree.map(jnp.add, start, change)), state


# ---- clients that are not to count -------------------------------------------------------------------------


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
        prototype,
        feature_mean,
        present,
        valid,
        distance=distance,
        temperature=temperature,
        temperature_mode=temperature_mode,
    )
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


def _wide_dtype(dtype: np.dtype) -> np.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _wide(leaf: Array) -> Array:
    return leaf.astype(_wide_dtype(leaf.dtype))


def _rows(vector: Array, leaf: Array) -> Array:
    return vector.reshape(vector.shape + (1,) * (leaf.ndim - 1))


def _valid_or(leaf: Array, valid: Array, other: float) -> Array:
    """The leaf in float32 with `other` in its invalid rows: selected, not multiplied, because 0 * NaN is
    NaN."""
    return jnp.where(_rows(valid, leaf), _wide(leaf), other)


def _selected(stacked: PyTree, valid: Array) -> PyTree:
    return jax.tree.map(lambda leaf: _valid_or(leaf, valid, 0.0), stacked)


def _shares(weight: Array, valid: Array) -> Array:
    """The valid rows' weights over their sum [K]; zeros if they add up to 0."""
    share = jnp.where(valid, weight, 0).astype(jnp.float32)
    total = jnp.sum(share)
    return jnp.where(total > 0, share / jnp.where(total > 0, total, 1), 0)


def _mix(share: Array, stacked: PyTree) -> PyTree:
    """sum_k share_k leaf_k. As matrix products: with one million numbers a sum over axis 0 that is fused with
    what makes its rows took up to 100 times as long on the CPU."""
    highest = jax.lax.Precision.HIGHEST  # else accelerators round to fewer bits
    return jax.tree.map(lambda leaf: jnp.tensordot(share, leaf, 1, precision=highest), stacked)


def _like(value: Array, leaf: Leaf) -> Array:
    rounds = _is_float(value) and not _is_float(leaf)
    return (jnp.round(value) if rounds else value).astype(leaf.dtype)


def _is_float(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floats(tree: PyTree) -> list[Array]:
    """The floating leaves, in float32."""
    return [_wide(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _with_floats(tree: PyTree, floats: list[Array]) -> PyTree:
    """The tree with these floating leaves, in its own dtypes; the other leaves stay."""
    new = iter(floats)
    return jax.tree.map(lambda leaf: _like(next(new), leaf) if _is_float(leaf) else leaf, tree)


# lengths of vectors that may hold any finite number; all are measured in shrunk units


def _apart(x: PyTree, y: PyTree) -> PyTree:
    """SHRINK * (x - y), which is finite where x - y may not be."""
    return jax.tree.map(lambda x, y: SHRINK * x - SHRINK * y, x, y)


def _peak_and_spread(tree: PyTree) -> tuple[Array, Array]:
    """(peak, spread), both finite: the L2 norm over all leaves is their product, and its square need not be
    representable."""
    leaves = jax.tree.leaves(tree)
    peak = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), initial=0) for x in leaves], jnp.float32(0))
    # numbers below the smallest normal one may be flushed to 0: they are no divisor
    peak = jnp.where(peak >= jnp.finfo(jnp.float32).tiny, peak, 1)
    squares = [jnp.sum(jnp.square(x / peak)) for x in leaves]
    return peak, jnp.sqrt(functools.reduce(jnp.add, squares, jnp.float32(0)))


def _norm(tree: PyTree) -> Array:
    """The L2 norm over all leaves."""
    peak, spread = _peak_and_spread(tree)
    return peak * spread


def _clip(apart: PyTree, radius: float) -> tuple[PyTree, Array]:
    """(apart / SHRINK, scaled to L2 norm `radius` if it is longer, and whether it is)."""
    peak, spread = _peak_and_spread(apart)
    over = peak * spread > SHRINK * radius
    scale = radius / jnp.where(spread > 0, spread, 1)
    return jax.tree.map(lambda x: jnp.where(over, x / peak * scale, x / SHRINK), apart), over
