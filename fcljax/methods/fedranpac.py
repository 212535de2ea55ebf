"""FedRanPAC: RanPAC (McDonnell et al., NeurIPS 2023, arXiv 2307.02251) in a federation.

    first session   an adapter that trains does so in the first task, by FedAvg; then it is frozen
    once per task   each client projects its features f at random,  h = relu(f^T P),  and sends the sums
                    G_k = sum h h^T  and  Q_k = sum h y^T  (algorithm 1), those of every fifth example apart
                    the server adds them to those of all clients and tasks, chooses the ridge whose classifier
                    has the least squared error on the examples apart, and solves  W = (G + lambda I)^-1 Q
    prediction      the largest entry of relu(f^T P)^T W

The projection makes features of different classes less correlated; it is drawn once and never trains. A mean
squared error needs nothing but the sums of the examples apart, since
|y - W^T h|^2 = |y|^2 - 2 <W, h y^T> + <W, h h^T W>: no client sends an example or plays a second round.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.adapters.lora import LoraOptions
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run, federate
from fcljax.parts.first_task import first_task_only
from fcljax.parts.learner import Params, cross_entropy_loss, learner
from fcljax.parts.random_features import chosen_by_index, on_projection, project
from fcljax.parts.ridge import Moments, add_examples, no_moments, possible_moments, solve_ridge
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import ClientContext, Method, Weighted

RIDGES = 10.0 ** jnp.arange(-8, 9)
SPLIT = 0  # the key of the split of examples; no result depends on it but through chance


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


_ONE_PAIR = (LoraOptions(lora_pairs="one"),)  # a pair of a later task would change the features
PRESETS = {
    "intended": Preset(FedRanPACOptions(), adapters=_ONE_PAIR),
    "paper": Preset(FedRanPACOptions(10_000, "task"), adapters=_ONE_PAIR),
    "released": Preset(FedRanPACOptions(10_000, "task"), adapters=_ONE_PAIR),
}


Split = dict[str, Moments]  # "fit": of four fifths of the examples; "apart": of those that choose the ridge


def fedranpac(options: FedRanPACOptions, run: Run) -> Method:
    """FedRanPAC as a method."""
    trains = not run.adapter.plain
    inner = linear(run.network.width, run.sizes.classes) if trains else None
    head = on_projection(run.network.width, options.projection, run.sizes.classes, inner)
    return federate(
        run,
        learner(run.network, run.adapter, head),
        loss=cross_entropy_loss() if trains else None,
        client_rules=(first_task_only("first_session"),) if trains else (),
        server_rules=(ridge_regression(options, run),),
    )


# ---- the sums and the ridge --------------------------------------------------------------------------------


def ridge_regression(options: FedRanPACOptions, run: Run) -> ServerRule:
    """The server's sums over tasks, and the classifier from them."""
    width = options.projection
    classes = run.sizes.classes
    chosen = options.ridge_choice != "fixed"

    def empty(*context: object) -> Split:
        del context
        names = ("fit", "apart") if chosen else ("fit",)
        return {name: no_moments(width, classes) for name in names}

    def add(step: ClientStep, total: Split) -> Split:
        batch = step.batch
        h = project(step.output.feature, step.context.cached.classifier.projection)
        apart = held_apart(batch.index) if chosen else jnp.zeros_like(batch.mask)
        masks = {"fit": batch.mask & ~apart, "apart": batch.mask & apart}
        return {name: add_examples(sums, h, batch.label, masks[name]) for name, sums in total.items()}

    def update(round: ServerRound, params: Params, total: Split) -> ServerUpdate:
        arrived: Split = round.reports["split"]
        total = jax.tree.map(jnp.add, total, arrived)
        ridge = jnp.float32(options.ridge)
        if chosen:
            ridge = choose_ridge(total if options.ridge_choice == "all" else arrived)
        every: Moments = jax.tree.map(lambda *sums: sum(sums), *total.values())
        head = params.classifier._replace(weights=solve_ridge(every.gram, every.products, ridge))
        metrics = {"ridge": Weighted(ridge, jnp.float32(1))}
        return ServerUpdate(params._replace(classifier=head), total, metrics)

    def possible(context: ClientContext, sent: Split) -> Bool[Array, ""]:
        together = sum(moments.examples for moments in sent.values())
        alone = [possible_moments(context, moments) for moments in sent.values()]
        return jnp.all(jnp.stack(alone)) & (together <= context.client.examples)

    report = Report("split", empty, add, merge="sum", possible=possible)
    # the first task's sums are those of the network that it ends with
    when = "task_start" if run.adapter.plain else "task_end"
    return ServerRule("ranpac", update, empty, reports=(report,), when=when)


def held_apart(index: Int[Array, " batch"]) -> Bool[Array, " batch"]:
    """Every fifth example at random, by its index in the training set: whoever holds it, it is the same."""
    return chosen_by_index(index, 0.2, jax.random.key(SPLIT))


def choose_ridge(split: Split) -> Float[Array, ""]:
    """The ridge of `RIDGES` whose classifier has the least squared error on the examples apart."""
    errors = jax.lax.map(lambda ridge: held_out_error(split, ridge), RIDGES)
    return RIDGES[jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf))]


def held_out_error(split: Split, ridge: Float[Array, ""]) -> Float[Array, ""]:
    """Sum of |y - W^T h|^2 over the examples apart, W solved from the others."""
    weights = solve_ridge(split["fit"].gram, split["fit"].products, ridge)
    explained = jnp.sum(weights * (exact_matmul(split["apart"].gram, weights) - 2 * split["apart"].products))
    return split["apart"].examples + explained
