"""FedRanPAC: RanPAC (McDonnell et al., NeurIPS 2023, arXiv 2307.02251) in a federation.

    first session   an adapter that trains does so in the first task, by FedAvg; then it is
                    frozen
    once per task   each client projects its features f at random,  h = relu(f^T P),  and
                    sends the sums  G_k = sum h h^T  and  Q_k = sum h y^T  (algorithm 1);
                    every fifth example is held out and has sums of its own
                    the server adds them to those of all clients and tasks, chooses the ridge
                    whose classifier has the least squared error on the held-out examples,
                    and solves  W = (G + lambda I)^-1 Q
    prediction      the largest entry of relu(f^T P)^T W

The projection makes features of different classes less correlated; it is drawn once
and never trains. A squared error needs only the sums of the held-out examples, since
|y - W^T h|^2 = |y|^2 - 2 <W, h y^T> + <W, h h^T W>: no client sends an example or
plays a second round.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.adapters.lora import LoraOptions
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run
from fcljax.parts.learner import Params
from fcljax.parts.random_features import (
    chosen_by_index,
    closed_form,
    longest_random_feature,
    random_features,
    statistics_time,
)
from fcljax.parts.ridge import (
    Moments,
    add_examples,
    no_moments,
    possible_moments,
    solve_definite,
    solve_ridge,
)
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import ClientContext, Method, Weighted

# candidates of the ridge, as in RanPAC
RIDGES = 10.0 ** jnp.arange(-8, 9)
# key of the split of examples into fit and held-out ones
SPLIT = 0


@dataclasses.dataclass(frozen=True)
class FedRanPACOptions:
    """Options of FedRanPAC."""

    projection: int = 2000
    """Width M of the random projection. A client sends M^2 parameters, and M^2 more if it
    helps to choose the ridge."""
    ridge_choice: Literal["all", "task", "fixed"] = "all"
    """Choose the ridge on held-out examples of all tasks so far (all) or of the current
    task, or take --ridge (fixed)."""
    ridge: float = option(100.0, positive=True, only=("ridge_choice", "fixed"))
    """Weight lambda of the classifier's squared norm."""


# one pair for all tasks, which only the first one trains: pairs of later tasks would
# change the features of which the server has summed up those of earlier tasks
_ONE_PAIR = (LoraOptions(lora_pairs="one"),)
PRESETS = {
    "intended": Preset(FedRanPACOptions(), adapters=_ONE_PAIR),
    "paper": Preset(FedRanPACOptions(10_000, "task"), adapters=_ONE_PAIR),
    "released": Preset(FedRanPACOptions(10_000, "task"), adapters=_ONE_PAIR),
}


# "fit": sums over four fifths of the examples; "held_out": sums over the others, by which
# the ridge is chosen
Split = dict[str, Moments]


def fedranpac(options: FedRanPACOptions, run: Run) -> Method:
    """Compose FedRanPAC."""
    return closed_form(run, options.projection, (ridge_regression(options, run),))


# ---- the sums and the ridge ------------------------------------------------------------


def ridge_regression(options: FedRanPACOptions, run: Run) -> ServerRule:
    """Keep the sums over tasks, and solve the classifier from them."""
    width = options.projection
    classes = run.sizes.classes
    chooses = options.ridge_choice != "fixed"

    def no_examples(*_arguments: object) -> Split:
        split = {"fit": no_moments(width, classes)}
        if chooses:
            split["held_out"] = no_moments(width, classes)
        return split

    def add(step: ClientStep, total: Split) -> Split:
        batch = step.batch
        h = random_features(step)
        if not chooses:
            return {"fit": add_examples(total["fit"], h, batch.label, batch.mask)}
        held_out = is_held_out(batch.index)
        return {
            "fit": add_examples(total["fit"], h, batch.label, batch.mask & ~held_out),
            "held_out": add_examples(total["held_out"], h, batch.label, batch.mask & held_out),
        }

    def update(round: ServerRound, params: Params, total: Split) -> ServerUpdate:
        reported: Split = round.reports["split"]
        total = jax.tree.map(jnp.add, total, reported)
        ridge = jnp.float32(options.ridge)
        if options.ridge_choice == "all":
            ridge = choose_ridge(total)
        if options.ridge_choice == "task":
            ridge = choose_ridge(reported)
        moments = total["fit"]
        # once the ridge is chosen, held-out examples train the classifier too
        if chooses:
            moments = jax.tree.map(jnp.add, total["fit"], total["held_out"])
        weights = solve_definite(moments.gram, moments.products, ridge)
        classifier = params.classifier._replace(weights=weights)
        metrics = {"ridge": Weighted(ridge, jnp.float32(1))}
        return ServerUpdate(params._replace(classifier=classifier), total, metrics)

    longest = functools.partial(longest_random_feature, run)

    def possible(context: ClientContext, reported: Split) -> Bool[Array, ""]:
        # each part alone, and the examples of both together
        examples = sum(moments.examples for moments in reported.values())
        parts = [possible_moments(context, moments, longest) for moments in reported.values()]
        return jnp.all(jnp.stack(parts)) & (examples <= context.client.examples)

    report = Report("split", no_examples, add, merge="sum", possible=possible)
    return ServerRule("ranpac", update, no_examples, reports=(report,), when=statistics_time(run))


def is_held_out(index: Int[Array, " batch"]) -> Bool[Array, " batch"]:
    """Choose a fifth of the examples by their indices in the training set.

    The choice does not depend on the partition.
    """
    return chosen_by_index(index, 0.2, jax.random.key(SPLIT))


def choose_ridge(split: Split) -> Float[Array, ""]:
    """Return the ridge of `RIDGES` with the least held-out squared error."""
    errors = jax.lax.map(lambda ridge: held_out_error(split, ridge), RIDGES)
    # small ridges may leave the matrix singular in float32: not finite, and never chosen
    return RIDGES[jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf))]


def held_out_error(split: Split, ridge: Float[Array, ""]) -> Float[Array, ""]:
    """Return sum |y - W^T h|^2 over held-out examples, W solved from the others."""
    weights = solve_ridge(split["fit"].gram, split["fit"].products, ridge)
    held_out = split["held_out"]
    # |y|^2 = 1 for each example; the rest is <W, G W - 2 Q>
    reduction = exact_matmul(held_out.gram, weights) - 2 * held_out.products
    return held_out.examples + jnp.sum(weights * reduction)
