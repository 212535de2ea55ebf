"""STSA: spatial-temporal statistics aggregation (Guan et al., WWW 2026, arXiv 2506.01327).

    first task      an adapter that trains does so in the first task, by FedAvg; then it is
                    frozen
    once per task   each client projects its features f at random,  x = relu(f^T R),  and sends
                    G_k = X_k^T X_k  and  P_k = X_k^T Y_k
    spatial         the server adds them up over clients,  G_t = sum_k G_k,  P_t = sum_k P_k
    temporal        and over tasks,  G = sum_t G_t,  P = sum_t P_t
    classifier      W = (G + gamma I)^-1 P

The sums do not depend on the partition. G_k has M^2 parameters. STSA-E (`statistics` =
first) sends only sums of features s_kc and numbers of examples n_kc of each class c, of
random groups of a client's examples (dummy clients). Of K_c groups with examples of class c
and N_c examples, the server estimates without bias

    G_t = sum_c (N_c - 1) / (K_c - 1) sum_k s_kc s_kc^T / n_kc
              - (N_c - K_c) / ((K_c - 1) N_c) P_c P_c^T,        P_c = sum_k s_kc

which is a variance of group means: features of one class must be distributed alike in all
groups. With one example in each group it is exact.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fcljax.adapters.lora import LoraOptions
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.classifiers import Sums, add_batch, add_classes, empty_sums
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run
from fcljax.parts.learner import Params
from fcljax.parts.random_features import (
    closed_form,
    longest_random_feature,
    random_features,
    statistics_time,
)
from fcljax.parts.reports import Longest, possible_sums
from fcljax.parts.ridge import Moments, moments_report, no_moments, solve_definite
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import ClientContext, Method, Task

GROUPS = 0  # key of the split of examples into groups


@dataclasses.dataclass(frozen=True)
class STSAOptions:
    """Options of STSA."""

    projection: int = 1250
    """Width M of the random projection."""
    ridge: float = option(100.0, positive=True)
    """Weight gamma of the classifier's squared norm."""
    statistics: Literal["second", "first"] = "second"
    """Send Gram matrices (second), or only sums of features of groups (first: STSA-E)."""
    dummy_clients: int = option(4, least=1, only=("statistics", "first"))
    """Number of random groups of a client's examples."""


# one pair for all tasks, which only the first one trains: pairs of later tasks would
# change the features of which the server has summed up those of earlier tasks
PRESETS = {"intended": Preset(STSAOptions(), adapters=(LoraOptions(lora_pairs="one"),))}


def stsa(options: STSAOptions, run: Run) -> Method:
    """Compose STSA or STSA-E."""
    return closed_form(run, options.projection, (aggregate_statistics(options, run),))


def aggregate_statistics(options: STSAOptions, run: Run) -> ServerRule:
    """Add up the sums of clients and tasks, and solve the classifier from them."""
    width = options.projection
    classes = run.sizes.classes
    longest = functools.partial(longest_random_feature, run)
    efficient = options.statistics == "first"

    def init(_params: Params, _trainable: Params) -> Moments:
        return no_moments(width, classes)

    def update(round: ServerRound, params: Params, total: Moments) -> ServerUpdate:
        if efficient:
            moments = estimate(round.reports["groups"], round.valid, round.task, classes)
        else:
            moments = round.reports["moments"]
        total = jax.tree.map(jnp.add, total, moments)
        weights = solve_definite(total.gram, total.products, options.ridge)
        classifier = params.classifier._replace(weights=weights)
        return ServerUpdate(params._replace(classifier=classifier), total)

    report = moments_report(width, classes, random_features, longest)
    if efficient:
        report = group_report(options, run.sizes.task_classes, longest)
    return ServerRule("stsa", update, init, reports=(report,), when=statistics_time(run))


def group_report(options: STSAOptions, classes: int, longest: Longest) -> Report:
    """Report sums [S, Ct, M] and numbers of examples [S, Ct] of S dummy clients (STSA-E)."""
    groups = options.dummy_clients

    def init(_context: ClientContext) -> Sums:
        of_group = empty_sums(classes, options.projection)
        return jax.tree.map(lambda leaf: jnp.zeros((groups, *leaf.shape)), of_group)

    def add(step: ClientStep, total: Sums) -> Sums:
        x = random_features(step)
        group = group_of(step.batch.index, groups)

        def add_group(sums: Sums, number: Array) -> Sums:
            # the mask and not an index: a group's share of a batch has no fixed size
            batch = step.batch._replace(mask=step.batch.mask & (group == number))
            return add_batch(sums, x, batch, step.context.task)

        return jax.vmap(add_group)(total, jnp.arange(groups))

    def possible(context: ClientContext, sums: Sums) -> Bool[Array, ""]:
        # all groups together have the client's examples: S Ct classes, as it were
        of_all_groups = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sums)
        return possible_sums(context, of_all_groups, longest)

    return Report("groups", init, add, possible=possible)


def group_of(index: Int[Array, " batch"], groups: int) -> Int[Array, " batch"]:
    """Draw the group of each example at random, by its index in the training set."""
    # by example, so that groups do not depend on the order of the batches
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(GROUPS), index)
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, groups))(keys)


def estimate(sums: Sums, valid: Bool[Array, " P"], task: Task, classes: int) -> Moments:
    """Return the estimated moments of all valid clients' examples, from sums of their groups
    [P, S, Ct, M] and numbers of examples [P, S, Ct]."""
    # n_kc and s_kc, with k over the groups of all clients; invalid ones may be NaN
    n = jnp.where(valid[:, None, None], sums.examples, 0.0).reshape(-1, len(task.classes))
    s = jnp.where(valid[:, None, None, None], sums.feature, 0.0).reshape(*n.shape, -1)
    products = jnp.sum(s, axis=0)
    examples = jnp.sum(n, axis=0)
    groups = jnp.sum(n > 0, axis=0)
    # the two factors of the formula above. One group alone shows no variance, so K_c = 1
    # gives s s^T / n, as if all examples were equal
    degrees = jnp.maximum(groups - 1, 1)
    between = jnp.where(groups > 1, (examples - 1) / degrees, 1.0)
    common = jnp.where(groups > 1, (examples - groups) / (degrees * jnp.maximum(examples, 1)), 0.0)
    # the first sum over c and k as one product of matrices, whose rows are
    # s_kc sqrt(between_c / n_kc)
    rows = (s * jnp.sqrt(between / jnp.maximum(n, 1))[..., None]).reshape(-1, s.shape[-1])
    gram = exact_matmul(rows.T, rows) - exact_matmul(products.T * common, products)
    of_all_classes = add_classes(empty_sums(classes, s.shape[-1]), Sums(products, examples), task)
    return Moments(gram, of_all_classes.feature.T, jnp.sum(examples))
