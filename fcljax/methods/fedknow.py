"""FedKNOW: signature task knowledge (Luopan et al., ICDE 2023, arXiv 2212.01738).

    extractor    at a task's end each client keeps the share rho of the weights with the
                 largest magnitudes, w_t, and tunes them on its examples
    restorer     in later tasks w_t teaches on the current examples x; among the classes
                 of task t
                     g_t = d/dw CE(softmax(f(x, w_t) / T), softmax(f(x, w) / T))
    integrator   turns the gradient g of the client's loss into g' with <g', g_i> >= 0 for
                 all rows g_i of G: the k restored gradients that are the least aligned
                 with g, and the gradient at the client's own model before aggregation
                     g' = g + G^T v,  v = argmin_{v >= margin} v^T G G^T v / 2 + (G g)^T v
                 which for margin = 0 is the nearest such g' (GEM's dual)
    server       averages

Sources are the paper's abstract and the authors' code; the paper's text was not available.
The code restores another gradient in place of that before aggregation: from the model that
the task began with, over all earlier classes. docs/fidelity.md has all differences.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.models.heads import cosine, distillation
from fcljax.models.products import exact_matmul
from fcljax.options import option
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, moved_against
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Loss, Params, check_all_last, cross_entropy_loss
from fcljax.settings import Preset, with_mini
from fcljax.types import ClientContext, Method, View

Gradient = Float[Array, " P"]
Gradients = Float[Array, "n P"]
# coordinate descent on at most a few dozen multipliers; tests compare it with a solver
SWEEPS = 100


@dataclasses.dataclass(frozen=True)
class FedKNOWOptions:
    """Options of FedKNOW; the values are those of the release."""

    signature_share: float = option(0.1, positive=True, most=1.0)
    """Share rho of the adapter's weights that clients keep of each task, by magnitude."""
    signature_epochs: int = option(2, least=0)
    """Epochs that tune these weights and the classifier at a task's end."""
    signature_tasks: int = option(10, least=1)
    """Restored gradients of past tasks, k, that the integrator takes at most."""
    distill_temperature: float = option(2.0, positive=True)
    """Temperature T of student and teacher when gradients are restored."""
    rotation_margin: float = 0.5
    """Least multiplier of every gradient that takes part in a turn; 0 turns the client's
    gradient only as far as a right angle."""


_LORA = LoraOptions(lora_pairs="one", lora_lr=1e-3)
# on held-out digits larger rates of either gain nothing (docs/results/embedded.md)
PRESETS = with_mini({"intended": Preset(FedKNOWOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)


class Signature(NamedTuple):
    """The signature knowledge of a task, or of all tasks [tasks, ...]."""

    weights: Params
    """w_t: of each leaf of the adapter its largest weights, [k]; the whole classifier."""
    positions: PyTree
    """Positions of these weights in each flat leaf, [k]."""
    classes: Bool[Array, " C"]
    """The task's classes; none before its end."""


class ClientKnowledge(NamedTuple):
    """The state of a client."""

    signatures: Signature
    """Of all tasks."""
    model: Params
    """The client's model after its newest round, before aggregation."""
    task: Int[Array, ""]
    """The task of that round; -1 before the first one."""


class Tuning(NamedTuple):
    """A client that tunes the signature of a task."""

    signature: Signature
    optimiser: PyTree


def fedknow(options: FedKNOWOptions, run: Run) -> Method:
    """Compose FedKNOW.

    Raises:
      InputError: for an adapter that trains other parameters in each task.
    """
    loss = cross_entropy_loss()
    rule = signature_knowledge(options, loss, run)
    return federate(run, linear_learner(run), loss=loss, client_rules=(rule,))


def signature_knowledge(options: FedKNOWOptions, loss: Loss, run: Run) -> ClientRule:
    """Keep knowledge of each task at its end, and turn the gradients of later tasks by it."""

    def init(_key: PRNGKeyArray, trainable: Params) -> ClientKnowledge:
        check_all_last(run.adapter, trainable.adapter, "clients keep signature knowledge")
        no_classes = jnp.zeros(run.sizes.classes, bool)
        extracted = functools.partial(extract, share=options.signature_share)
        of_task = jax.eval_shape(extracted, trainable, no_classes)
        signatures = jax.tree.map(lambda leaf: jnp.zeros((run.sizes.tasks, *leaf.shape), leaf.dtype), of_task)
        return ClientKnowledge(signatures, weights_of(trainable), jnp.int32(-1))

    def on_end(
        context: ClientContext, knowledge: ClientKnowledge, trainable: Params, _state: ClientKnowledge
    ) -> ClientKnowledge:
        task = jnp.asarray(context.task.index, jnp.int32)
        return knowledge._replace(model=weights_of(trainable), task=task)

    integrated = functools.partial(integrate, options, loss)
    return ClientRule("signatures", integrated, init, passes=(extractor(options, loss, run),), on_end=on_end)


# ---- knowledge extractor ---------------------------------------------------------------


def weights_of(trainable: Params) -> Params:
    """Return adapter and classifier: neither statistics nor what other rules train."""
    return Params(trainable.adapter, trainable.classifier)


def with_weights(trainable: Params, weights: Params) -> Params:
    """Return trainable parameters with this adapter and classifier."""
    return trainable._replace(adapter=weights.adapter, classifier=weights.classifier)


def extract(trainable: Params, classes: Bool[Array, " C"], share: float) -> Signature:
    """Keep the share of each leaf of the adapter that has the largest magnitudes."""

    def largest(leaf: Array) -> Array:
        return jax.lax.top_k(jnp.abs(leaf.ravel()), max(1, round(share * leaf.size)))[1]

    positions = jax.tree.map(largest, trainable.adapter)
    values = jax.tree.map(lambda leaf, i: leaf.ravel()[i], trainable.adapter, positions)
    return Signature(Params(values, trainable.classifier), positions, classes)


def restore(signature: Signature, trainable: Params) -> Params:
    """Return the model of a signature: its weights, and 0 in place of all others."""

    def fill(leaf: Array, values: Array, positions: Array) -> Array:
        return jnp.zeros(leaf.size, leaf.dtype).at[positions].set(values).reshape(leaf.shape)

    weights = signature.weights
    adapter = jax.tree.map(fill, trainable.adapter, weights.adapter, signature.positions)
    return with_weights(trainable, weights._replace(adapter=adapter))


def extractor(options: FedKNOWOptions, loss: Loss, run: Run) -> ClientPass:
    """Extract a signature from the global model at a task's end, and tune it."""
    optimiser = run.training.optimiser

    def start(context: ClientContext, _knowledge: ClientKnowledge, _key: PRNGKeyArray) -> Tuning:
        received = context.payload.trainable
        signature = extract(received, context.task.current, options.signature_share)
        return Tuning(signature, optimiser.init(signature.weights))

    def tune(step: ClientStep, tuning: Tuning) -> Tuning:
        signature = tuning.signature

        def loss_of(weights: Params) -> Float[Array, ""]:
            model = restore(signature._replace(weights=weights), step.trainable)
            return loss.value(step.forward(model), step.batch, step.context.task)

        gradient = jax.grad(loss_of)(signature.weights)
        direction, state = optimiser.update(gradient, tuning.optimiser, signature.weights)
        weights = moved_against(run.training, step.learner, signature.weights, direction)
        return Tuning(signature._replace(weights=weights), state)

    def end(
        context: ClientContext, tuning: Tuning, _trainable: Params, knowledge: ClientKnowledge
    ) -> ClientKnowledge:
        def put(of_all_tasks: Array, new: Array) -> Array:
            return of_all_tasks.at[context.task.index].set(new)

        signatures = jax.tree.map(put, knowledge.signatures, tuning.signature)
        return knowledge._replace(signatures=signatures)

    view = View(options.signature_epochs, run.training.batch_size)
    return ClientPass("task_end", view, tune, start, end, trains=True)


# ---- gradient restorer and integrator --------------------------------------------------


def integrate(
    options: FedKNOWOptions, loss: Loss, step: ClientStep, knowledge: ClientKnowledge
) -> Float[Array, ""]:
    """Return <g' - g, w>, whose gradient turns g into g'; its value does not count as loss."""
    model = jax.lax.stop_gradient(step.trainable)
    task = step.context.task

    def loss_of(model: Params) -> Float[Array, ""]:
        return loss.value(step.forward(model), step.batch, task)

    def distil(model: Params, signature: Signature) -> Float[Array, ""]:
        teacher = step.forward(restore(signature, model))
        student = step.forward(model)
        temperature = options.distill_temperature
        return distillation(student.logits, teacher.logits, signature.classes, step.batch.mask, temperature)

    def zeros() -> Gradient:
        return jnp.zeros_like(flat(model))

    def restored(signature: Signature) -> Gradient:
        # tasks that are not over have no signature, and cost nothing
        is_over = jnp.any(signature.classes)
        return jax.lax.cond(is_over, lambda: flat(jax.grad(distil)(model, signature)), zeros)

    def at_local_model() -> Gradient:
        return flat(jax.grad(loss_of)(with_weights(model, knowledge.model)))

    gradient = flat(jax.grad(loss_of)(model))
    of_tasks = jax.lax.map(restored, knowledge.signatures)
    # in a client's first round of a task its model is that of an earlier task
    local_gradient = jax.lax.cond(knowledge.task == task.index, at_local_model, zeros)
    rows = jnp.vstack([least_aligned(of_tasks, gradient, options.signature_tasks), local_gradient])
    term = jnp.vdot(rotation(gradient, rows, options.rotation_margin), flat(step.trainable))
    return term - jax.lax.stop_gradient(term)


def flat(model: Params) -> Gradient:
    """Return adapter and classifier, or their gradients, as one vector."""
    return ravel_pytree(weights_of(model))[0]


def least_aligned(restored: Gradients, gradient: Gradient, count: int) -> Float[Array, "k P"]:
    """Return the restored gradients with the smallest cosines to g, `count` at most."""
    is_restored = jnp.any(restored != 0, axis=1)
    similarity = jnp.where(is_restored, cosine(restored, gradient[None])[:, 0], jnp.inf)
    _, chosen = jax.lax.top_k(-similarity, min(count, len(restored)))
    return restored[chosen]


def rotation(gradient: Gradient, rows: Gradients, margin: float) -> Gradient:
    """Return g' - g = G^T v, by coordinate descent on the multipliers v; 0 if g agrees with
    all rows already."""
    gram = exact_matmul(rows, rows.T)
    products = exact_matmul(rows, gradient)
    curvature = jnp.diag(gram)

    def descend(step: Array, v: Float[Array, " n"]) -> Float[Array, " n"]:
        i = step % len(rows)
        slope = exact_matmul(gram[i], v) + products[i]
        minimum = v[i] - slope / jnp.where(curvature[i] > 0, curvature[i], 1.0)
        return v.at[i].set(jnp.maximum(minimum, margin))

    v = jax.lax.fori_loop(0, SWEEPS * len(rows), descend, jnp.full(len(rows), margin))
    return jnp.where(jnp.any(products < 0), exact_matmul(v, rows), 0.0)
