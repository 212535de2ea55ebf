"""A data-free distillation server: the averaged classifier learns the clients' answers on drawn features."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import fcljax
from fcljax import Method, MethodEntry, OfEachClient, Run, ServerRound, ServerRule, ServerUpdate, View


@dataclasses.dataclass(frozen=True)
class DistillOptions:
    """Options of the distillation server."""

    distill_steps: int = 20
    """Optimiser steps of the server in a round."""
    distill_lr: float = 1e-3
    """Learning rate of the server."""
    spread: float = 0.5
    """Standard deviation of the drawn features around a class mean."""


def distil_on_drawn_features(options: DistillOptions, run: Run) -> ServerRule:
    """Gathers class means and classifiers, draws features, distils the mean of the clients' answers."""

    def update(round: ServerRound, params, state) -> ServerUpdate:
        valid = round.valid
        means = round.reports["prototypes"]
        heads = round.reports["trainable"].classifier
        weights = jnp.where(means.present & valid[:, None], 1.0, 0.0).reshape(-1)

        def loss(head, i):
            choose, move = jax.random.split(jax.random.fold_in(round.key, i))
            # `categorical` draws noise for each row, so its choice would depend on rows of absent clients
            chosen = jax.random.choice(choose, weights.size, (run.training.batch_size,), p=weights)
            feature = means.vector.reshape(-1, means.vector.shape[-1])[chosen]
            feature += options.spread * jax.random.normal(move, feature.shape)
            answers = jax.vmap(fcljax.apply_head, (0, None))(heads, feature)
            mean = jnp.sum(jnp.where(valid[:, None, None], answers, 0), 0) / jnp.maximum(valid.sum(), 1)
            return fcljax.distillation(fcljax.apply_head(head, feature), mean, round.task.seen, chosen >= 0)

        adam = optax.adam(options.distill_lr)
        head, mean_loss = fcljax.optimise(loss, params.classifier, adam, options.distill_steps)
        return ServerUpdate(params._replace(classifier=head), state, {"loss": mean_loss})

    clean = View(1, run.training.batch_size, augment=False)
    means = fcljax.class_prototypes("prototypes", run.sizes.task_classes, run.network.width, clean)
    return ServerRule("distill", update, reports=(means, OfEachClient("trainable")))


def distill(options: DistillOptions, run: Run) -> Method:
    """FedAvg with this server."""
    rules = (distil_on_drawn_features(options, run),)
    loss = fcljax.cross_entropy_loss()
    return fcljax.federate(run, fcljax.linear_learner(run), loss=loss, server_rules=rules)


METHOD = MethodEntry("FedAvg and data-free distillation", DistillOptions, distill, adapter="prompts")
