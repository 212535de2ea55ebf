"""RegMean: linear layers merged by their responses (Jin et al., ICLR 2023, arXiv 2212.09849),
in every round, a baseline of LoRM's tables.

    round       clients train adapter and classifier, as in FedAvg
    client i    sends for each linear layer the Gram matrix G_i = X_i^T X_i of its inputs, with
                a factor alpha off the diagonal, and G_i (W_i - W)
    server      merges each layer in least squares,
                    W = argmin_V sum_i |X_i V - X_i W_i|^2 = (sum_i G_i)^-1 (sum_i G_i W_i)
                and averages the classifier's bias

The linear layers are the classifier, whose inputs are features, and both factors of a LoRA
pair: A reads the inputs x of its block, and B reads A_i x, so that its Gram matrix is
A_i G_i A_i^T.

Here clients send their changes times G_i, whose sums give the same W; directions in which
no client has inputs stay as they were.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from fcljax.adapters.lora import LoraOptions
from fcljax.models.products import exact_matmul
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientEnd, ClientStep, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.gram import (
    can_move,
    feature_gram,
    inner_gram,
    largest_changes,
    least_squares,
    merged_by_responses,
    no_pair_grams,
    pair_grams,
    possible_features,
    possible_inner,
    possible_inputs,
    scale_off_diagonal,
)
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, with_mini
from fcljax.types import ClientContext, Method, View

# name of a layer -> that of its Gram matrix: queries and values read the same inputs
GRAM_OF = {"classifier": "features", "a_q": "inputs", "a_v": "inputs", "b_q": "b_q", "b_v": "b_v"}
Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class RegMeanOptions:
    """Options of RegMean."""

    off_diagonal: float = option(0.5, least=0.0, most=1.0)
    """Factor alpha of the Gram matrices' entries off the diagonal."""


_LORA = LoraOptions(lora_pairs="one")
PRESETS = with_mini({"intended": Preset(RegMeanOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)


class Responses(NamedTuple):
    """A client's report of its linear layers, or the sums over clients."""

    grams: Arrays
    """G_i by the names of `GRAM_OF`, [n, n] or [blocks, n, n] for n inputs."""
    changes: Arrays
    """G_i (W_i - W) by layer, [n, outputs] or [blocks, n, outputs]."""


def regmean(options: RegMeanOptions, run: Run) -> Method:
    """Compose RegMean."""
    model = linear_learner(run)
    rule = merge_layers(options, run, model)
    return federate(run, merged_by_responses(model), loss=cross_entropy_loss(), server_rules=(rule,))


def layers_of(trainable: Params) -> Arrays:
    """Return the weights W of the linear layers, [inputs, outputs]."""
    # LoRA's factors are stored as [outputs, inputs]
    factors = trainable.adapter._asdict()
    return {"classifier": trainable.classifier.kernel} | {name: w.mT for name, w in factors.items()}


def responses(options: RegMeanOptions, run: Run) -> Report:
    """Report the Gram matrices of the trained model and the changes times them."""

    def init(context: ClientContext) -> Arrays:
        width = run.network.width
        return {"features": jnp.zeros((width, width)), "inputs": no_pair_grams(context)}

    def add(step: ClientStep, total: Arrays) -> Arrays:
        inputs = pair_grams(step, len(total["inputs"]))
        return {"features": total["features"] + feature_gram(step), "inputs": total["inputs"] + inputs}

    def finalize(end: ClientEnd, sums: Arrays) -> Responses:
        pair: Lora = end.trainable.adapter
        inputs = sums["inputs"]
        # B reads A_i x, whose Gram matrix follows from that of x
        inner = {"b_q": inner_gram(pair.a_q, inputs), "b_v": inner_gram(pair.a_v, inputs)}
        grams = {}
        for name, gram in (sums | inner).items():
            grams[name] = scale_off_diagonal(gram, options.off_diagonal)
        received = layers_of(end.context.payload.trainable)
        changes = {
            name: exact_matmul(grams[GRAM_OF[name]], weights - received[name])
            for name, weights in layers_of(end.trainable).items()
        }
        return Responses(grams, changes)

    # after training: G_i is of the layers' inputs in the client's trained model
    view = View(1, run.training.batch_size, shuffle=False)
    possible = functools.partial(possible_responses, run)
    return Report("responses", init, add, finalize, view, "sum", possible=possible)


def possible_responses(run: Run, context: ClientContext, sent: Responses) -> Bool[Array, ""]:
    """Check that a client's examples and training can give these sums."""
    grams = sent.grams
    largest = largest_changes(run, context)
    is_possible = possible_features(run, context, grams["features"])
    is_possible &= possible_inputs(context, grams["inputs"])
    received: Lora = context.payload.trainable.adapter
    for a, inner in ((received.a_q, grams["b_q"]), (received.a_v, grams["b_v"])):
        is_possible &= possible_inner(inner, grams["inputs"], a, largest.pair)
    for name, change in sent.changes.items():
        reach = largest.classifier if name == "classifier" else largest.pair
        # False also where the matrix is no Gram matrix (`norm_by_gram` gives NaN)
        is_possible &= can_move(grams[GRAM_OF[name]], change, reach)
    return is_possible


def merge_layers(options: RegMeanOptions, run: Run, model: Learner) -> ServerRule:
    """Merge the linear layers after a round. `model` is the learner with all parameters."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        grams, changes = round.reports["responses"]
        trainable = model.trainable(params, round.task)
        layers = {
            name: least_squares(weights, grams[GRAM_OF[name]], changes[name])
            for name, weights in layers_of(trainable).items()
        }
        head = trainable.classifier._replace(kernel=layers.pop("classifier"))
        pair = Lora(**{name: weights.mT for name, weights in layers.items()})
        merged = trainable._replace(adapter=pair, classifier=head)
        return ServerUpdate(model.merge(params, round.task, merged), state)

    return ServerRule("regression", update, reports=(responses(options, run),))
