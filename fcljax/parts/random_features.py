"""A classifier on random features relu(f^T P), and choices of examples by their index
alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax import matrices
from fcljax.federated.keys import InitKey
from fcljax.models.products import exact_matmul
from fcljax.parts.classifiers import computed, linear
from fcljax.parts.client import ClientStep
from fcljax.parts.federate import Run, federate
from fcljax.parts.first_task import first_task_only
from fcljax.parts.learner import Classifier, cross_entropy_loss, learner
from fcljax.parts.reports import longest_feature
from fcljax.parts.server import RuleTime, ServerRule
from fcljax.types import ClientContext, Method, Task


class Projected(NamedTuple):
    """The parameters of the classifier."""

    inner: PyTree
    """Parameters of the classifier that trains before the network is frozen, if one
    does."""
    projection: Float[Array, "D M"]
    """P, the same for all clients and tasks."""
    weights: PyTree
    """W [M, C]; () at clients, which do not need it."""
    statistics: PyTree = ()
    """Statistics of the server, which clients do not have."""


def on_projection(
    features: int,
    width: int,
    classes: int,
    inner: Classifier | None = None,
    statistics: PyTree = (),
) -> Classifier:
    """Return a linear classifier on a random projection, which clients hold too.

    Args:
      features: D.
      width: M.
      classes: C.
      inner: what trains before the network is frozen.
      statistics: the first value of `Projected.statistics`.
    """

    def init_params(key: PRNGKeyArray, inner_params: PyTree) -> Projected:
        # drawn once, by the server: sums over clients need the same projection for all
        projection_key = jax.random.fold_in(key, InitKey.PROJECTION)
        projection = jax.random.normal(projection_key, (features, width))
        return Projected(inner_params, projection, jnp.zeros((width, classes)), statistics)

    def predict(params: Projected, feature: Array, _task: Task) -> Array:
        return exact_matmul(project(feature, params.projection), params.weights)

    classifier = computed(classes, init_params, predict, inner)

    def cached(params: Projected) -> Projected:
        # clients never read weights and statistics, which have M C parameters and more
        return params._replace(inner=classifier.cached(params), weights=(), statistics=())

    def logits(cached: Projected, trainable: PyTree, feature: Array, task: Task) -> Array:
        return classifier.logits(cached.inner, trainable, feature, task)

    return classifier._replace(cached=cached, logits=logits)


def closed_form(run: Run, width: int, server_rules: tuple[ServerRule, ...]) -> Method:
    """Compose a method whose server solves a classifier on a random projection.

    An adapter that trains does so in the first task, with a linear classifier.

    Args:
      run: sizes, network, adapter.
      width: M.
      server_rules: of the time `statistics_time`.
    """
    features = run.network.width
    classes = run.sizes.classes
    # a frozen network as it is: there is nothing to train before the statistics
    if run.adapter.plain:
        model = learner(run.network, run.adapter, on_projection(features, width, classes))
        return federate(run, model, server_rules=server_rules)
    classifier = on_projection(features, width, classes, linear(features, classes))
    return federate(
        run,
        learner(run.network, run.adapter, classifier),
        loss=cross_entropy_loss(),
        client_rules=(first_task_only("first_session"),),
        server_rules=server_rules,
    )


def statistics_time(run: Run) -> RuleTime:
    """Return when clients send sums of features: after training, where the first task
    trains the network."""
    # without training a task's classes can be predicted from its first round on
    if run.adapter.plain:
        return "task_start"
    return "task_end"


def project(
    feature: Float[Array, "batch D"],
    projection: Float[Array, "D M"],
) -> Float[Array, "batch M"]:
    """Return relu(f^T P) (RanPAC, section 4)."""
    return jax.nn.relu(exact_matmul(feature, projection))


def random_features(step: ClientStep) -> Float[Array, "batch M"]:
    """Return the projected features of a batch of a client."""
    return project(step.output.feature, step.context.cached.classifier.projection)


def longest_random_feature(run: Run, context: ClientContext) -> Float[Array, ""]:
    """Return a bound on the norm of a client's projected features."""
    return longest_projected(longest_feature(run, context), context.cached.classifier.projection)


def longest_projected(longest: ArrayLike, projection: Float[Array, "D M"]) -> Float[Array, ""]:
    """Return a bound on the norm of `project` of features of at most the norm `longest`."""
    # |relu(f^T P)| <= |f^T P| <= |f| sigma_max(P), and sigma_max(P)^2 is the largest
    # eigenvalue of P P^T [D, D]
    square = matrices.eigvalsh(exact_matmul(projection, projection.T))[-1]
    return jnp.asarray(longest) * jnp.sqrt(square)


def chosen_by_index(
    index: Int[Array, " batch"],
    share: float,
    key: PRNGKeyArray,
) -> Bool[Array, " batch"]:
    """Draw a share of all examples at random, by the index in the training set, so that
    the choice does not depend on the partition."""

    def is_chosen(example: Array) -> Bool[Array, ""]:
        # an example keeps its draw in every round and for every client that has it
        return jax.random.bernoulli(jax.random.fold_in(key, example), share)

    return jax.vmap(is_chosen)(index)
