"""A Bayesian learner: any learner with a Gaussian for each of its parameters (VFCL, specification section 1).

Neither network nor adapter nor classifier know of it. Means and standard deviations train and travel; a
training step draws parameters from them, evaluation uses the means. Those of the adapter are one vector
(`Flat`). Running statistics are no parameters and stay as they are.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.methods.vfcl.posterior import Flat, Posterior, init_posterior, sample
from fcljax.parts.learner import Learner, Output, Params, Sampling
from fcljax.types import Batch, Frozen, Task


def bayesian(inner: Learner, sigma: float, training: int = 1, evaluation: int = 0) -> Learner:
    """The learner with `Posterior`s in the places of its adapter's and classifier's parameters.

    Args:
      inner: does the computing.
      sigma: standard deviation that all parameters begin with.
      training, evaluation: draws, as of `Sampling`.
    """

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        params = inner.init(key, frozen)
        wide = init_posterior((params.adapter, params.classifier), sigma)
        return _together(params, Params(*wide.rho))

    def open_task(params: Params, task: Task) -> Params:
        return _together(inner.open_task(means(params), task), _rhos(params))

    def trainable_of(params: Params, task: Task) -> Params:
        return _together(inner.trainable(means(params), task), inner.trainable(_rhos(params), task))

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        merged = inner.merge(means(params), task, means(trainable))
        return _together(merged, inner.merge(_rhos(params), task, _rhos(trainable)))

    def cached_of(params: Params) -> Params:
        return inner.cached(means(params))

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        return inner.forward(frozen, cached, _drawn(trainable), batch, task, train)

    def predict(frozen: Frozen, params: Params, batch: Batch, task: Task) -> Float[Array, "batch classes"]:
        return inner.predict(frozen, _drawn(params), batch, task)

    def counted(trainable: Posterior, task: Task) -> PyTree:
        count = inner.adapter.counted
        return Posterior(count(trainable.mean.params, task), count(trainable.rho.params, task))

    def loss(cached: PyTree, drawn: Flat, *others: Any) -> Float[Array, ""]:
        assert inner.adapter.loss is not None
        return inner.adapter.loss(cached, drawn.params, *others)

    return inner._replace(
        adapter=inner.adapter._replace(counted=counted, loss=loss if inner.adapter.loss else None),
        init=init,
        open_task=open_task,
        trainable=trainable_of,
        merge=merge,
        cached=cached_of,
        forward=forward,
        predict=predict,
        sampling=Sampling(draw_parameters, training, evaluation),
    )


def means(params: Params) -> Params:
    """The parameters that evaluation uses (VFCL, appendix F.4)."""
    return params._replace(adapter=params.adapter.mean.params, classifier=params.classifier.mean)


def draw_parameters(key: PRNGKeyArray, trainable: Params) -> Params:
    """Parameters drawn from their posteriors; the adapter's are one vector."""
    first, second = jax.random.split(key)
    adapter = sample(first, trainable.adapter)
    classifier = sample(second, trainable.classifier)
    return trainable._replace(adapter=adapter, classifier=classifier)


def _drawn(params: Params) -> Params:
    """Parameters as they are if they have been drawn, else the means of their posteriors."""
    if isinstance(params.adapter, Posterior):
        return means(params)
    return params._replace(adapter=params.adapter.params)


def _rhos(params: Params) -> Params:
    return params._replace(adapter=params.adapter.rho.params, classifier=params.classifier.rho)


def _together(mean: Params, rho: Params) -> Params:
    """Posteriors of adapter and classifier; all else is that of `mean`."""
    adapter = Posterior(Flat.of(mean.adapter), Flat.of(rho.adapter))
    return mean._replace(adapter=adapter, classifier=Posterior(mean.classifier, rho.classifier))
