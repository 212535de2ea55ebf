"""Federated RanPAC: ridge regression on a random projection of frozen features (McDonnell et al. 2023).

Nothing trains. Before a task each client sends, once, sums over its examples: the Gram matrix H'H of the
projected features H, and H'Y with one-hot labels Y. The server adds them up and solves for the classifier."""

import dataclasses

import jax
import jax.numpy as jnp

from fcljax import Classifier, Method, MethodEntry, Report, Run, ServerRule, ServerUpdate, federate, learner


@dataclasses.dataclass(frozen=True)
class RanPACOptions:
    width: int = 1000  # of the random projection
    ridge: float = 100.0  # weight of the squared norm of the classifier


def ranpac(options: RanPACOptions, run: Run) -> Method:
    def project(feature):
        draw = jax.random.normal(jax.random.key(0), (feature.shape[-1], options.width))
        return jax.nn.relu(feature @ draw)

    def add(step, total):
        h, y = project(step.output.feature), jax.nn.one_hot(step.batch.label, run.sizes.classes)
        h = jnp.where(step.batch.mask[:, None], h, 0)
        return total[0] + h.T @ h, total[1] + h.T @ y

    def solve(round, params, state):
        gram, cross = jax.tree.map(jnp.add, state, round.reports["gram"])
        weights = jnp.linalg.solve(gram + options.ridge * jnp.eye(options.width), cross)
        return ServerUpdate(params._replace(classifier=weights), (gram, cross))

    empty = [jnp.zeros((options.width, n)) for n in (options.width, run.sizes.classes)]
    head = Classifier(
        lambda key: empty[1], lambda cached, trainable, feature, task: project(feature) @ trainable
    )
    gram = Report("gram", lambda context: tuple(empty), add, merge="sum")
    rule = ServerRule("ridge", solve, lambda *params: tuple(empty), reports=(gram,), when="task_start")
    return federate(run, learner(run.network, run.adapter, head), server_rules=(rule,))


METHOD = MethodEntry("ridge regression on a random projection", RanPACOptions, ranpac, adapter="linear")
