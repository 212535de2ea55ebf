"""AFCL: analytic federated continual learning (Tang et al. 2025, arXiv 2505.12245).

    once per task   each client k sends  G_k = H_k^T H_k  and  Q_k = H_k^T Y_k,  H_k the frozen network's
                    features of its examples and Y_k their one-hot labels
                    the server adds them up and updates what it knows by recursive least squares:
                        R^-1 <- R^-1 + G,      W <- W + R (Q - G W)
    prediction      the largest entry of h^T W

R starts as I / gamma, so that after any tasks of any clients in any order W is the ridge regression of all
their examples together, argmin ||Y - H W||^2 + gamma ||W||^2. No gradient is taken, a task needs one round,
and old examples are not needed again. Classes that are not known yet have columns of 0 in W and Q, which is
the paper's splitting into known and unknown classes at a fixed shape.

The server keeps R^-1 and not R: both recursions are the same, this one inverts nothing twice.
"""

import dataclasses
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
from fcljax.parts.ridge import moments_report, solve_ridge
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
    """Nothing: no classifier trains."""
    weights: Float[Array, "D C"]
    """W; 0 for classes that nobody had examples of."""


def afcl(options: AFCLOptions, run: Run) -> Method:
    """AFCL as a method; nothing trains."""
    width = run.network.width
    classes = run.sizes.classes

    def first(key: PRNGKeyArray, inner: PyTree) -> Regression:
        del key
        return Regression(inner, jnp.zeros((width, classes)))

    head = computed(classes, first, _predict)
    rule = recursive_least_squares(width, classes, options.ridge)
    return federate(run, learner(run.network, run.adapter, head), server_rules=(rule,))


def _predict(params: Regression, feature: Array, task: Task) -> Array:
    del task
    return exact_matmul(feature, params.weights)


def recursive_least_squares(width: int, classes: int, ridge: float) -> ServerRule:
    """The recursion over tasks; its state is R^-1, gamma I at first.

    Args:
      width: D.
      classes: C.
      ridge: gamma.
    """

    def init(params: Params, trainable: Params) -> Float[Array, "D D"]:
        del params, trainable
        return ridge * jnp.eye(width)

    def update(round: ServerRound, params: Params, knowledge: Float[Array, "D D"]) -> ServerUpdate:
        gram, products, _ = round.reports["moments"]
        knowledge, weights = recursion(knowledge, params.classifier.weights, gram, products)
        head = params.classifier._replace(weights=weights)
        return ServerUpdate(params._replace(classifier=head), knowledge)

    report = moments_report(width, classes, _features)
    return ServerRule("least_squares", update, init, reports=(report,), when="task_start")


def _features(step: ClientStep) -> Float[Array, "batch D"]:
    return step.output.feature


def recursion(
    knowledge: Float[Array, "D D"],
    weights: Float[Array, "D C"],
    gram: Float[Array, "D D"],
    products: Float[Array, "D C"],
) -> tuple[Float[Array, "D D"], Float[Array, "D C"]]:
    """(R^-1 + G, W + R (Q - G W)), with R of after the update."""
    knowledge = knowledge + gram
    error = products - jnp.dot(gram, weights, precision=jax.lax.Precision.HIGHEST)
    return knowledge, weights + solve_ridge(knowledge, error, 0.0)
