"""Functional primitives: how a server merges the uploads of K clients, as pure functions
on pytrees.

All have one signature, `rule(uploads, weight=None, valid=None, *, ...)`, and run under
`jax.jit`, `jax.vmap` and `jax.grad`:

    uploads   a list with one pytree for each client; any other pytree is taken as stacked, leaves [K, ...]
    weight    [K], at least 0, usually the clients' numbers of examples; None: all weigh the same
    valid     [K] of booleans, which uploads arrived; None: all. The others have no influence, NaN included

Robust rules and means of prototypes ignore `weight`, because a weight is the client's own
claim. Valid uploads must be finite. Results have the dtypes of the leaves. The engine's
rules (`fcljax.federated.rules`) are the same functions behind `--aggregator`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Num

from fcljax.errors import InputError
from fcljax.federated import rules, sums
from fcljax.methods import fppl, pilora
from fcljax.methods.vfcl import conflation
from fcljax.parts.reports import Prototypes
from fcljax.parts.ridge import Moments, solve_ridge
from fcljax.types import PyTree

__all__ = [
    "Gaussian",
    "Moments",
    "ObservedPrototypes",
    "PerClient",
    "Prototypes",
    "centred_clipping",
    "coordinate_median",
    "gaussian_conflation",
    "geometric_median",
    "krum",
    "multi_krum",
    "prototype_mean",
    "prototype_reweight",
    "ridge_regression",
    "ridge_sums",
    "trimmed_mean",
    "uniform_mean",
    "weighted_mean",
]


PerClient = ArrayLike | Sequence[Any] | None
"""A value for each client [K]; None: the default of the rule."""


class Gaussian(NamedTuple):
    """Independent normal distributions of all parameters."""

    mean: PyTree
    """Leaves [...], with a first axis of clients in uploads."""
    sigma: PyTree
    """Standard deviations: a tree like `mean`."""


class ObservedPrototypes(NamedTuple):
    """Learned prototypes of classes beside the mean features of the client's examples (PILoRA)."""

    prototype: Float[Array, "*clients classes width"]
    feature_mean: Float[Array, "*clients classes width"]
    """Read only where `present`."""
    present: Bool[Array, "*clients classes"]
    """Classes of which the client has examples."""


# ---- means -----------------------------------------------------------------------------


def weighted_mean(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> PyTree:
    """Return sum_k n_k w_k / sum_k n_k (FedAvg, McMahan et al. 2017, algorithm 1).

    >>> uploads = [{"w": jnp.array([0.0, 4.0])}, {"w": jnp.array([3.0, 1.0])}]
    >>> weighted_mean(uploads, weight=[1, 2])
    {'w': Array([2., 2.], dtype=float32)}
    """
    return rules.weighted_mean(*_clients(uploads, weight, valid))


def uniform_mean(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> PyTree:
    """Return the plain mean of the uploads; `weight` is ignored.

    >>> uniform_mean(jnp.array([[0.0, 4.0], [3.0, 1.0]]), weight=[1, 2])
    Array([1.5, 2.5], dtype=float32)
    """
    return rules.uniform_mean(*_clients(uploads, weight, valid))


# ---- robust rules: `weight` is ignored, except by the geometric median -----------------


def coordinate_median(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> PyTree:
    """Return the median of every coordinate (Yin et al. 2018, definition 1).

    An even number of uploads takes the mean of the middle two.

    >>> coordinate_median(jnp.array([[0.0, 4.0], [3.0, 1.0], [1e9, 2.0]]))
    Array([3., 2.], dtype=float32)
    """
    return rules.coordinate_median(*_clients(uploads, weight, valid))


def trimmed_mean(
    uploads: PyTree, weight: PerClient = None, valid: PerClient = None, *, trim: float = 0.1
) -> PyTree:
    """Return the mean of every coordinate between its extremes (Yin et al. 2018, definition 2).

    The floor(trim * n) smallest and as many largest of n values do not count.

    >>> trimmed_mean(jnp.array([-1e9, 1.0, 2.0, 1e9]), trim=0.25)
    Array(1.5, dtype=float32)

    Raises:
      InputError: trim outside [0, 0.5).
    """
    return rules.trimmed_mean(*_clients(uploads, weight, valid), trim=trim)


def geometric_median(
    uploads: PyTree,
    weight: PerClient = None,
    valid: PerClient = None,
    *,
    steps: int = 32,
    smoothing: float = 1e-6,
) -> PyTree:
    """Return the point with the least weighted sum of L2 distances to the uploads (RFA).

    It takes `steps` iterations of the smoothed Weiszfeld algorithm (Pillutla et al. 2022).

    >>> geometric_median(jnp.array([[0.0, 0.0], [0.0, 0.0], [1e9, 1e9]])).round(3)
    Array([0., 0.], dtype=float32)

    Args:
      steps: iterations.
      smoothing: least distance that an upload's weight is divided by, in the units of the
        leaves; at distance 0 the weight would be infinite.
    """
    return rules.geometric_median(*_clients(uploads, weight, valid), steps=steps, smoothing=smoothing)


def krum(uploads: PyTree, weight: PerClient = None, valid: PerClient = None, *, malicious: int) -> PyTree:
    """Return the upload nearest to its neighbours (Blanchard et al. 2017, section 4).

    >>> krum(jnp.array([1.0, 1.1, 1.3, 1e9, 1.15]), malicious=1)
    Array(1.1, dtype=float32)

    Raises:
      InputError: malicious < 0.
    """
    return rules.krum(*_clients(uploads, weight, valid), malicious=malicious)


def multi_krum(
    uploads: PyTree,
    weight: PerClient = None,
    valid: PerClient = None,
    *,
    malicious: int,
    chosen: int | None = None,
) -> PyTree:
    """Return the mean of the uploads that `krum` ranks first (Blanchard et al. 2017, section 5).

    >>> multi_krum(jnp.array([1.0, 1.1, 1.3, 1e9, 1.15]), malicious=1).round(2)
    Array(1.14, dtype=float32)

    Args:
      malicious: how many uploads may be malicious; the guarantee needs n > 2 * malicious + 2.
      chosen: how many to average; None: n - malicious.

    Raises:
      InputError: malicious < 0.
    """
    return rules.multi_krum(*_clients(uploads, weight, valid), malicious=malicious, chosen=chosen)


def centred_clipping(
    uploads: PyTree,
    weight: PerClient = None,
    valid: PerClient = None,
    *,
    centre: PyTree,
    radius: float,
    steps: int = 3,
) -> PyTree:
    """Return `centre` moved by the mean of clipped changes (Karimireddy et al. 2021, algorithm 2).

        v <- v + 1/n sum_k (x_k - v) min(1, radius / ||x_k - v||)          (`steps` times)

    >>> uploads = jnp.array([1.0, 1e9])
    >>> centred_clipping(uploads, centre=jnp.array(0.0), radius=1.0, steps=1)
    Array(1., dtype=float32)

    Args:
      centre: leaves [...], what the clients started from.
      radius: the paper's tau, in the units of the leaves.

    Raises:
      InputError: a radius that is not positive, or a centre of another structure or shape.
    """
    stacked, weight, valid = _clients(uploads, weight, valid)
    centre = jax.tree.map(jnp.asarray, centre)
    # a centre of another shape would broadcast against the uploads, and nothing would
    # fail
    upload = jax.tree.map(lambda leaf: leaf[0], stacked)
    _check_alike("centre", centre, "an upload", upload)
    return rules.centred_clipping(stacked, weight, valid, centre=centre, radius=radius, steps=steps)


# ---- distributions, prototypes, closed forms -------------------------------------------


def gaussian_conflation(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> Gaussian:
    """Return the product of the clients' normal distributions (VFCL, eq. 10 and 11).

        1 / sigma^2 = sum_k 1 / sigma_k^2          mean = sigma^2 sum_k mean_k / sigma_k^2

    A client of weight w counts as w clients with the same distribution.

    >>> gaussian_conflation([Gaussian(0.0, 1.0), Gaussian(3.0, 0.5)])
    Gaussian(mean=Array(2.4, dtype=float32), sigma=Array(0.4472136, dtype=float32))

    Args:
      uploads: `Gaussian`, one for each client or stacked.
    """
    stacked, weight, valid = _clients(_of(Gaussian, uploads), weight, valid)
    terms = conflation.precision_terms(stacked.mean, stacked.sigma)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), terms)
    total = sums.add_stacked(sums.sum_zeros(shapes, floating=True), terms, valid, weight)
    return Gaussian(*conflation.conflate_sums(*total))


def prototype_mean(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> Prototypes:
    """Return the plain mean of each class's prototypes over its holders (FPPL, eq. 5).

    `weight` is ignored. A class without a holder has the vector 0 and is not present.

    Args:
      uploads: `Prototypes`: vector [K, C, D] and present [K, C] where stacked.
    """
    stacked, _, valid = _clients(_of(Prototypes, uploads), weight, valid)
    return Prototypes(*fppl.prototype_mean(stacked.vector, stacked.present, valid))


def prototype_reweight(
    uploads: PyTree,
    weight: PerClient = None,
    valid: PerClient = None,
    *,
    distance: str = "l2",
    temperature: float = 0.2,
    temperature_mode: str = "divide",
) -> Float[Array, "classes width"]:
    """Return prototypes weighted by closeness to clients' features (PILoRA, eq. 11-14).

    `weight` is ignored.

    Args:
      uploads: `ObservedPrototypes`: [K, C, D] and present [K, C] where stacked.
      distance: 'l2' (the release) or 'l2sq' (the paper).
      temperature: positive.
      temperature_mode: 'divide' (the release) or 'multiply' (the paper).

    Raises:
      InputError: another distance or mode, or a temperature that is not positive.
    """
    stacked, _, valid = _clients(_of(ObservedPrototypes, uploads), weight, valid)
    return pilora.prototype_reweight(
        stacked.prototype,
        stacked.feature_mean,
        stacked.present,
        valid,
        distance=distance,
        temperature=temperature,
        temperature_mode=temperature_mode,
    )


def ridge_sums(uploads: PyTree, weight: PerClient = None, valid: PerClient = None) -> Moments:
    """Return the moments of all clients' examples together; `weight` is ignored.

    They are those of the union of the data, so nothing that follows depends on the partition.

    Args:
      uploads: `Moments` of each client: the sums of h h^T and h y^T, and the number of examples.
    """
    stacked, _, valid = _clients(_of(Moments, uploads), weight, valid)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    return sums.add_stacked(sums.sum_zeros(shapes), stacked, valid)


def ridge_regression(
    uploads: PyTree, weight: PerClient = None, valid: PerClient = None, *, ridge: float = 1.0
) -> Float[Array, "width classes"]:
    """Return the classifier (sum_k G_k + ridge I)^-1 sum_k Q_k of all clients' examples.

    >>> h, y = jnp.array([[1.0], [2.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> clients = [Moments(h[:1].T @ h[:1], h[:1].T @ y[:1], jnp.array(1.0)),
    ...            Moments(h[1:].T @ h[1:], h[1:].T @ y[1:], jnp.array(1.0))]
    >>> ridge_regression(clients, ridge=5.0)
    Array([[0.1, 0.2]], dtype=float32)

    Args:
      uploads: `Moments` of each client.
      ridge: added to the diagonal; where it is too small for the rounding, the result is
        not finite.
    """
    total = ridge_sums(uploads, weight, valid)
    return solve_ridge(total.gram, total.products, ridge)


# ---- arguments -------------------------------------------------------------------------


def _clients(
    uploads: PyTree, weight: PerClient, valid: PerClient
) -> tuple[Any, Num[Array, " K"], Bool[Array, " K"]]:
    """Return uploads stacked over clients [K, ...], weights [K] and valid [K].

    Raises:
      InputError: names the argument that does not fit.
    """
    stacked = _stacked(uploads)
    clients = jax.tree.leaves(stacked)[0].shape[0]
    return stacked, _weights(weight, clients), _valid(valid, clients)


def _stacked(uploads: PyTree) -> PyTree:
    # A list is one pytree for each client. A tuple is not: NamedTuples are pytrees.
    if isinstance(uploads, list):
        if not uploads:
            raise InputError("uploads: an empty list; give one pytree for each client")
        for index, upload in enumerate(uploads):
            _check_alike(f"uploads[{index}]", upload, "uploads[0]", uploads[0])
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)
    stacked = jax.tree.map(jnp.asarray, uploads)
    paths = jax.tree_util.tree_leaves_with_path(stacked)
    if not paths:
        raise InputError(f"uploads: {type(uploads).__name__} without arrays; give leaves [clients, ...]")
    first = paths[0][1]
    for path, leaf in paths:
        name = f"uploads{jax.tree_util.keystr(path)}"
        if leaf.ndim == 0:
            raise InputError(f"{name}: a scalar; expected a first axis of clients, or a list of pytrees")
        if leaf.shape[0] != first.shape[0]:
            raise InputError(f"{name}: {leaf.shape[0]} clients, where the first leaf has {first.shape[0]}")
    if first.shape[0] == 0:
        raise InputError("uploads: 0 clients; needed: at least 1")
    return stacked


def _check_alike(name: str, tree: PyTree, other_name: str, other: PyTree) -> None:
    """Refuse a tree whose structure or shapes are not those of another."""
    structure = jax.tree.structure(other)
    if jax.tree.structure(tree) != structure:
        raise InputError(f"{name}: {jax.tree.structure(tree)}, where {other_name} is {structure}")
    leaves = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True)
    for (path, leaf), like in leaves:
        if np.shape(leaf) != np.shape(like):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise InputError(f"{where}: shape {np.shape(leaf)}, where {other_name} has {np.shape(like)}")


def _of(kind: type, uploads: PyTree) -> PyTree:
    """Return the uploads if they are of this NamedTuple, stacked or in a list.

    Raises:
      InputError: for anything else, such as a plain tuple, whose fields could be in any order.
    """
    first = uploads[0] if isinstance(uploads, list) and uploads else uploads
    if not isinstance(first, kind):
        fields = ", ".join(kind._fields)
        raise InputError(
            f"uploads: {type(first).__name__}; needed: fcljax.aggregate.{kind.__name__}({fields})"
        )
    return uploads


def _weights(weight: PerClient, clients: int) -> Num[Array, " K"]:
    if weight is None:
        return jnp.ones(clients)
    weight = jnp.asarray(weight)
    if weight.shape != (clients,):
        raise InputError(f"weight: shape {weight.shape}; needed: ({clients},), a number for each client")
    # values are not known while a caller's function is traced
    if not isinstance(weight, jax.core.Tracer):
        wrong = ~(np.isfinite(weight) & (np.asarray(weight) >= 0))
        if wrong.any():
            index = int(np.argmax(wrong))
            raise InputError(f"weight[{index}]: {weight[index]}; needed: finite and at least 0")
    return weight


def _valid(valid: PerClient, clients: int) -> Bool[Array, " K"]:
    if valid is None:
        return jnp.ones(clients, bool)
    valid = jnp.asarray(valid)
    if valid.shape != (clients,) or valid.dtype != bool:
        given = f"{valid.dtype} of shape {valid.shape}"
        raise InputError(f"valid: {given}; needed: booleans of shape ({clients},)")
    return valid
