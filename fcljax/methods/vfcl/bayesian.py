"""A Bayesian learner: any learner with a Gaussian for each of its parameters (VFCL).

Network, adapter and classifier stay as they are: they get drawn parameters. Means and
rhos train and travel; a training step draws parameters from them, evaluation uses the
means. The adapter's are one vector (`Flat`). Running statistics are no parameters, and
have no Gaussians.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.federated.keys import StepKey
from fcljax.methods.vfcl.posterior import Flat, Posterior, init_posterior, sample
from fcljax.parts.learner import Learner, Output, Params, Sampling
from fcljax.types import Batch, Frozen, Task


def bayesian(
    inner: Learner,
    sigma: float,
    training: int = 1,
    evaluation: int = 0,
) -> Learner:
    """Return a learner with `Posterior`s for the parameters of adapter and classifier.

    Args:
      inner: computes with drawn parameters.
      sigma: initial standard deviation of all parameters.
      training: draws in every training step, whose loss is their mean.
      evaluation: draws, as of `Sampling`.
    """

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        params = inner.init(key, frozen)
        posterior = init_posterior((params.adapter, params.classifier), sigma)
        return _posteriors(params, Params(*posterior.rho))

    def open_task(params: Params, task: Task) -> Params:
        return _posteriors(inner.open_task(means(params), task), _rhos(params))

    def trainable_of(params: Params, task: Task) -> Params:
        # means and rhos have the same structure, so the inner learner selects from both
        mean = inner.trainable(means(params), task)
        return _posteriors(mean, inner.trainable(_rhos(params), task))

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        merged = inner.merge(means(params), task, means(trainable))
        return _posteriors(merged, inner.merge(_rhos(params), task, _rhos(trainable)))

    def cached_of(params: Params) -> Params:
        return inner.cached(means(params))

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        return inner.forward(frozen, cached, _drawn(trainable), batch, task, train)

    def predict(
        frozen: Frozen,
        params: Params,
        batch: Batch,
        task: Task,
    ) -> Float[Array, "batch classes"]:
        return inner.predict(frozen, _drawn(params), batch, task)

    def counted(trainable: Posterior, task: Task) -> PyTree:
        count = inner.adapter.counted
        return Posterior(count(trainable.mean.params, task), count(trainable.rho.params, task))

    def loss(cached: PyTree, drawn: Flat, *others: Any) -> Float[Array, ""]:
        assert inner.adapter.loss is not None
        return inner.adapter.loss(cached, drawn.params, *others)

    def expectation(
        function: Callable[[Params], PyTree], trainable: Params, batch: Batch, key: PRNGKeyArray
    ) -> PyTree:
        return mean_over_draws(training, function, trainable, batch, key)

    return inner._replace(
        adapter=inner.adapter._replace(counted=counted, loss=loss if inner.adapter.loss else None),
        # class means give no standard deviations, so classes cannot start there
        classifier=inner.classifier._replace(at_means=None),
        init=init,
        open_task=open_task,
        trainable=trainable_of,
        merge=merge,
        cached=cached_of,
        forward=forward,
        predict=predict,
        expectation=expectation,
        sampling=Sampling(draw_parameters, evaluation),
    )


def mean_over_draws(
    draws: int,
    function: Callable[[Params], PyTree],
    trainable: Params,
    batch: Batch,
    key: PRNGKeyArray,
) -> PyTree:
    """Return the mean of a function over parameters drawn from their posteriors: an
    estimate of the expectation in eq. 6."""
    # the key of the first example, which is the same at every client that has it
    batch_key = key
    if batch.keys is not None:
        batch_key = batch.keys[0]
    keys = jax.random.split(jax.random.fold_in(batch_key, StepKey.DRAWN_PARAMS), draws)
    # the usual case, without a loop
    if draws == 1:
        return function(draw_parameters(keys[0], trainable))
    # one after the other: batched draws would give every convolution a kernel per draw
    values = jax.lax.map(lambda key: function(draw_parameters(key, trainable)), keys)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), values)


def means(params: Params) -> Params:
    """Return the parameters that evaluation uses (VFCL, appendix F.4)."""
    return params._replace(adapter=params.adapter.mean.params, classifier=params.classifier.mean)


def draw_parameters(key: PRNGKeyArray, trainable: Params) -> Params:
    """Draw parameters from their posteriors; the adapter's are one vector."""
    adapter_key, classifier_key = jax.random.split(key)
    adapter = sample(adapter_key, trainable.adapter)
    classifier = sample(classifier_key, trainable.classifier)
    return trainable._replace(adapter=adapter, classifier=classifier)


def _drawn(params: Params) -> Params:
    """Return the parameters of a forward pass: drawn ones, or the means of posteriors."""
    if isinstance(params.adapter, Posterior):
        return means(params)
    return params._replace(adapter=params.adapter.params)


def _rhos(params: Params) -> Params:
    return params._replace(adapter=params.adapter.rho.params, classifier=params.classifier.rho)


def _posteriors(mean: Params, rho: Params) -> Params:
    """Return posteriors of adapter and classifier, with other parameters of `mean`."""
    adapter = Posterior(Flat.of(mean.adapter), Flat.of(rho.adapter))
    classifier = Posterior(mean.classifier, rho.classifier)
    return mean._replace(adapter=adapter, classifier=classifier)
