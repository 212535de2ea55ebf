"""Federated RanPAC (McDonnell et al. 2023): ridge regression on a random projection of frozen features."""

import dataclasses

import jax
import jax.numpy as jnp

from fcljax import Classifier, Method, MethodEntry, Report, Run, ServerRule, ServerUpdate, federate, learner


@dataclasses.dataclass(frozen=True)
class RanPACOptions:
    width: int = 1000
    """Width of the random projection."""
    ridge: float = 100.0
    """Weight of the squared norm of the classifier."""


def ranpac(options: RanPACOptions, run: Run) -> Method:
    shape = (width := options.width, width + run.sizes.classes)

    def project(feature):
        return jax.nn.relu(feature @ jax.random.normal(jax.random.key(0), (feature.shape[-1], width)))

    def add(step, total):
        h = jnp.where(step.batch.mask[:, None], project(step.output.feature), 0)
        return total + h.T @ jnp.hstack([h, jax.nn.one_hot(step.batch.label, run.sizes.classes)])

    def solve(round, params, total):
        total += round.reports["sums"]
        weights = jnp.linalg.solve(total[:, :width] + options.ridge * jnp.eye(width), total[:, width:])
        return ServerUpdate(params._replace(classifier=weights), total)

    report = Report("sums", lambda context: jnp.zeros(shape), add, merge="sum")
    ridge = ServerRule("ridge", solve, lambda *_: jnp.zeros(shape), reports=(report,), when="task_start")
    head = Classifier(lambda key: jnp.zeros(shape)[:, width:], lambda _, w, x, task: project(x) @ w)
    return federate(run, learner(run.network, run.adapter, head), server_rules=(ridge,))


METHOD = MethodEntry("ridge regression on a random projection", RanPACOptions, ranpac, adapter="linear")
