"""A Bayesian learner: any learner with a Gaussian for each of its numbers (VFCL, specification section 1).

Neither network nor adapter nor classifier know of it. What trains and travels are means and deviations; a
training step draws parameters and uses them, evaluation uses the means. Running statistics are no parameters
and stay as they are.
"""

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.methods.vfcl.posterior import Posterior, init_posterior, sample
from fcljax.parts.learner import Learner, Model, Output
from fcljax.types import Batch, Frozen, Task


def bayesian(inner: Learner, sigma: float) -> Learner:
    """The learner with `Posterior`s in the places of its adapter's and classifier's parameters.

    Args:
      inner: which does the computing.
      sigma: the deviation that all numbers begin with.
    """

    def init(key: PRNGKeyArray, frozen: Frozen) -> Model:
        params = inner.init(key, frozen)
        wide = init_posterior((params.adapter, params.classifier), sigma)
        return _together(params, Model(*wide.rho))

    def forward(frozen: Frozen, cached: Model, part: Model, batch: Batch, task: Task, train: bool) -> Output:
        return inner.forward(frozen, cached, _drawn(part), batch, task, train)

    def predict(frozen: Frozen, params: Model, batch: Batch, task: Task) -> Float[Array, "batch classes"]:
        return inner.predict(frozen, _drawn(params), batch, task)

    def put(params: Model, task: Task, part: Model) -> Model:
        put = inner.put(means(params), task, means(part))
        return _together(put, inner.put(_rhos(params), task, _rhos(part)))

    def trained(part: Posterior, task: Task) -> PyTree:
        return Posterior(inner.adapter.trained(part.mean, task), inner.adapter.trained(part.rho, task))

    return inner._replace(
        adapter=inner.adapter._replace(trained=trained),
        init=init,
        open_task=lambda params, task: _together(inner.open_task(means(params), task), _rhos(params)),
        part=lambda params, task: _together(inner.part(means(params), task), inner.part(_rhos(params), task)),
        put=put,
        cached=lambda params: inner.cached(means(params)),
        forward=forward,
        predict=predict,
        sample=draw,
    )


def means(model: Model) -> Model:
    """The parameters that evaluation uses (VFCL, appendix F.4)."""
    return model._replace(adapter=model.adapter.mean, classifier=model.classifier.mean)


def draw(key: PRNGKeyArray, part: Model) -> Model:
    """Parameters drawn from the posteriors of a part."""
    first, second = jax.random.split(key)
    return part._replace(adapter=sample(first, part.adapter), classifier=sample(second, part.classifier))


def _drawn(model: Model) -> Model:
    """Parameters as they are, if they have been drawn; else the means of their posteriors."""
    return means(model) if isinstance(model.adapter, Posterior) else model


def _rhos(model: Model) -> Model:
    return model._replace(adapter=model.adapter.rho, classifier=model.classifier.rho)


def _together(mean: Model, rho: Model) -> Model:
    """A model of both; all but adapter and classifier are the first one's."""
    adapter = Posterior(mean.adapter, rho.adapter)
    return mean._replace(adapter=adapter, classifier=Posterior(mean.classifier, rho.classifier))
