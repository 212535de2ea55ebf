"""A data-free distillation server: on drawn features, the mean classifier learns what the clients' say."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fcljax import Method, MethodEntry, Run, ServerStep, View, Weighted, apply_head, distillation, linear
from fcljax.parts.federate import federate
from fcljax.parts.learner import learner
from fcljax.parts.reports import class_prototypes


@dataclasses.dataclass(frozen=True)
class DistillOptions:
    """Options of the distillation server."""

    distill_steps: int = 20  # steps of the server in a round
    distill_lr: float = 1e-3  # their learning rate
    spread: float = 0.5  # deviation of the drawn features around a class mean


def teach(options: DistillOptions, run: Run) -> ServerStep:
    """Gather class means and classifiers, draw features, distil the mean of the clients' answers."""
    adam, batch, width = optax.adam(options.distill_lr), run.train.batch_size, run.network.width

    def step(round_context, model, params, state, aggregate, key):
        means, valid = aggregate.gather["prototypes"], aggregate.valid
        odds = jnp.where(means.present & valid[:, None], 0.0, -jnp.inf).reshape(-1)

        def one(i, carry):
            head, optimiser, total = carry
            first, second = jax.random.split(jax.random.fold_in(key, i))
            place = jax.random.categorical(first, odds, shape=(batch,))
            feature = means.vector.reshape(-1, width)[place]
            feature += options.spread * jax.random.normal(second, feature.shape)
            answers = jax.vmap(apply_head, (0, None))(aggregate.gather["part"].classifier, feature)
            target = jnp.sum(jnp.where(valid[:, None, None], answers, 0), 0) / jnp.maximum(valid.sum(), 1)
            loss_of = lambda h: distillation(
                apply_head(h, feature), target, round_context.task.seen, place >= 0
            )
            loss, gradient = jax.value_and_grad(loss_of)(head)
            update, optimiser = adam.update(gradient, optimiser)
            return optax.apply_updates(head, update), optimiser, total + loss

        start = (params.classifier, adam.init(params.classifier), jnp.zeros(()))
        head, _, total = jax.lax.fori_loop(0, options.distill_steps, one, start)
        loss = Weighted(total / options.distill_steps, jnp.ones(()))
        return params._replace(classifier=head), state, {"loss": loss}

    view = View(1, batch, augment=False)
    collects = (class_prototypes("prototypes", run.sizes.task_classes, width, view),)
    return ServerStep("distill", step, collects=collects, sees_parts=True)


def distill(options: DistillOptions, run: Run) -> Method:
    model = learner(run.network, run.adapter, linear(run.network.width, run.sizes.classes))
    return federate(model, run.sizes, run.train, run.terms, (teach(options, run),))


METHOD = MethodEntry("FedAvg and data-free distillation", DistillOptions, distill, adapter="prompts")
