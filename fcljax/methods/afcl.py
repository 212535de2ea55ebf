"""AFCL: analytic federated continual learning (Tang et al. 2025, arXiv 2505.12245).

    once per task   each client k sends  G_k = H_k^T H_k  and  Q_k = H_k^T Y_k,  where H_k are
                    the frozen network's features and Y_k the one-hot labels
                    the server sums them and updates by recursive least squares:
                        R^-1 <- R^-1 + G,      W <- W + R (Q - G W)
    prediction      the largest entry of h^T W

R starts as I / gamma, so that after any tasks of any clients in any order W is the ridge
regression of all their examples together, argmin ||Y - H W||^2 + gamma ||W||^2. No
gradient is taken, a task needs one round, and old examples are not needed again. Classes
that are not known yet have columns of 0 in W and Q, which is the paper's splitting into
known and unknown classes at a fixed shape.

The server keeps R^-1 and not R: the recursion is the same, and nothing is inverted twice.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.classifiers import computed
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Params, learner
from fcljax.parts.reports import Longest, longest_feature
from fcljax.parts.ridge import moments_report, solve_definite
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.types import Method, Task


@dataclasses.dataclass(frozen=True)
class AFCLOptions:
    """Options of AFCL."""

    ridge: float = option(1.0, positive=True)
    """Weight gamma of the classifier's squared norm."""


class Regression(NamedTuple):
    """The parameters of the classifier."""

    inner: PyTree
    """() always: no classifier trains (`parts.classifiers.computed`)."""
    weights: Float[Array, "D C"]
    """W; 0 for classes without examples so far."""


def afcl(options: AFCLOptions, run: Run) -> Method:
    """Compose AFCL; nothing trains."""
    width = run.network.width
    classes = run.sizes.classes

    def init(_key: PRNGKeyArray, inner: PyTree) -> Regression:
        return Regression(inner, jnp.zeros((width, classes)))

    classifier = computed(classes, init, _predict)
    longest = functools.partial(longest_feature, run)
    rule = recursive_least_squares(width, classes, options.ridge, longest)
    return federate(run, learner(run.network, run.adapter, classifier), server_rules=(rule,))


def _predict(params: Regression, feature: Array, _task: Task) -> Array:
    return exact_matmul(feature, params.weights)


def recursive_least_squares(width: int, classes: int, ridge: float, longest: Longest) -> ServerRule:
    """Update W by the sums of each task; the state is R^-1, initially gamma I.

    Args:
      width: D.
      classes: C.
      ridge: gamma.
      longest: bounds the norm of a feature.
    """

    def init(_params: Params, _trainable: Params) -> Float[Array, "D D"]:
        return ridge * jnp.eye(width)

    def update(round: ServerRound, params: Params, inverse_r: Float[Array, "D D"]) -> ServerUpdate:
        # sums of all clients: R depends only on their sum, so the order of clients does
        # not matter
        gram, cross, _ = round.reports["moments"]
        inverse_r, weights = recursion(inverse_r, params.classifier.weights, gram, cross)
        classifier = params.classifier._replace(weights=weights)
        return ServerUpdate(params._replace(classifier=classifier), inverse_r)

    report = moments_report(width, classes, _features, longest)
    # once per task, before its first round, since nothing trains
    return ServerRule("least_squares", update, init, reports=(report,), when="task_start")


def _features(step: ClientStep) -> Float[Array, "batch D"]:
    return step.output.feature


def recursion(
    inverse_r: Float[Array, "D D"],
    weights: Float[Array, "D C"],
    gram: Float[Array, "D D"],
    cross: Float[Array, "D C"],
) -> tuple[Float[Array, "D D"], Float[Array, "D C"]]:
    """Return (R^-1 + G, W + R (Q - G W)) for R after the update.

    Args:
      inverse_r: R^-1 before the update.
      weights: W.
      gram: G.
      cross: Q.
    """
    inverse_r = inverse_r + gram
    # R comes from a solve, so errors of bfloat16 would be amplified by its condition
    error = cross - jnp.dot(gram, weights, precision=jax.lax.Precision.HIGHEST)
    # no further ridge: gamma is in R^-1 since the start
    return inverse_r, weights + solve_definite(inverse_r, error, 0.0)
