"""VFCL: variational federated continual learning (specification, from the paper; no code was released).

Clients train a Gaussian for each number of the network (`bayesian.py`): by the likelihood of their rows,
and towards a mixture of two priors, the global posterior that they were sent and their own posterior at the
end of the task before. Classifier and running statistics stay with each client; of the rest the server
multiplies the clients' Gaussians (conflation). A client is evaluated as itself, on the classes that it has
learned.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.full import FullOptions
from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation
from fcljax.methods.vfcl.bayesian import bayesian
from fcljax.methods.vfcl.conflation import conflate_sums, precision_terms
from fcljax.methods.vfcl.posterior import (
    Posterior,
    flat,
    in_blocks,
    log_density,
    log_mixture,
    of_gaussian,
    total,
)
from fcljax.options import option
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import Run, Seen, Term, federate
from fcljax.parts.learner import Learner, Model, Objective, learner
from fcljax.parts.replay import Budget, herded
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method

KLScale = Literal["per_sample", "per_parameter", "none"]

_RHO_OF_ONE = math.log(math.e - 1)  # softplus of it is 1


@dataclasses.dataclass(frozen=True)
class VFCLOptions:
    """Options of VFCL; the paper's values where it has them."""

    prior_weight: float = option(1.0, least=0.0)
    """Weight lambda_p of the two priors together; with 0 neither acts."""
    global_share: float = option(0.5, least=0.0, most=1.0)
    """Share lambda_k of the global prior in the mixture; with 1 the client's own prior does not act."""
    samples: int = option(1, least=1)
    """Number n of draws of the parameters per step."""
    exemplars: int = option(20, least=0)
    """Examples of each class in a client's memory, chosen by herding."""
    test_samples: int = option(5, least=0)
    """Draws of the parameters for a second reliability diagram of their mean probabilities."""
    sigma: float = option(0.02, positive=True)
    """Initial standard deviation of all parameters, on which the paper is silent."""
    kl_scale: KLScale = "per_sample"
    """Divisor of the priors' term: the client's examples, the number of parameters, or none (eq. 9)."""
    merge: Literal["conflation", "tempered", "average"] = "tempered"
    """How the server merges Gaussians: as their product (conflation), with its variance times the number of
    clients (tempered), or by averaging means and rhos by examples (Ours-FedAvg)."""


_RUN = RunConfig(lr=0.01, optimiser="sgd", rounds=10)
_ADAPTERS = (FullOptions(full_lr=0.01),)
_PAPER = Preset(VFCLOptions(merge="conflation"), _RUN, _ADAPTERS)
PRESETS = {
    "intended": Preset(VFCLOptions(), _RUN, _ADAPTERS),
    "paper": _PAPER,
    "released": _PAPER,  # no code was released
}


class Check(NamedTuple):
    """A client's own posterior at the end of the task before, and which of its classes existed by then; task
    -1: there is none yet."""

    adapter: Posterior
    classifier: Posterior
    known: Bool[Array, " C"]
    task: Int[Array, ""]


def vfcl(options: VFCLOptions, run: Run) -> Method:
    """VFCL as a method. `options` must be resolved.

    Raises:
      InputError: for a rule that merges in the place of conflation.
    """
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    plain = learner(run.network, run.adapter, head)
    own = (priors(options, run.sizes.classes, run.sizes.rounds),) if options.prior_weight else ()
    if options.exemplars:
        budget, width = Budget(options.exemplars), run.network.width
        own += (herded(budget, run.sizes, width, run.train.batch_size),)
    terms = (*own, *run.terms)
    return federate(
        bayesian(plain, options.sigma),
        run.sizes,
        run.train._replace(samples=options.samples),
        terms,
        objective=Objective("seen"),
        aggregation=merging(options, run.aggregation),
        personal=("classifier", "stats"),
        draws=options.test_samples,
    )


# ---- the clients' priors -----------------------------------------------------------------------------------


def priors(options: VFCLOptions, classes: int, rounds: int) -> Term:
    """lambda_p * s * (log q(w) - log p(w)) with p the mixture of the global and the client's own posterior
    (equations 6 and 9). A classifier has no global component: its own of the task before, or N(0, 1) for
    classes that are new (specification 3.4). Classes that the client has not seen count for nothing."""

    def init(key: PRNGKeyArray, part: Model) -> Check:
        del key
        return Check(part.adapter, part.classifier, jnp.zeros(classes, bool), jnp.int32(-1))

    def loss(model: Learner, seen: Seen, check: Check) -> Float[Array, ""]:
        del model
        share = jnp.where(check.task < 0, 1.0, options.global_share)
        # as one vector each: leaf by leaf a network of a hundred takes minutes to compile
        drawn, _ = ravel_pytree(seen.drawn.adapter)
        mine, sent, own = map(flat, (seen.part.adapter, seen.context.payload.part.adapter, check.adapter))

        def gap(drawn: Array, *numbers: Array) -> Array:
            mine, sent, own = (Posterior(*numbers[i : i + 2]) for i in (0, 2, 4))
            return log_density(drawn, mine) - log_mixture(drawn, sent, own, share)

        body = jnp.sum(in_blocks(gap, drawn, *mine, *sent, *own))
        return options.prior_weight * _scale(options.kl_scale, seen) * (body + _of_head(seen, check))

    def keep(context: ClientContext, memory: Check, part: Model, state: Check) -> Check:
        """The posterior of the task's last round; before it, that of the task before stays."""
        del memory
        now = Check(
            part.adapter, part.classifier, context.task.seen, jnp.asarray(context.task.index, jnp.int32)
        )
        last = context.client.round == rounds - 1
        return jax.tree.map(lambda new, old: jnp.where(last, new, old), now, state)

    return Term("priors", loss, init=init, open=lambda context, state, key: state, keep=keep)


def _of_head(seen: Seen, check: Check) -> Float[Array, ""]:
    """The classifier's part, over the classes that the client has seen: the last axis of every leaf."""
    drawn, mine = seen.drawn.classifier, seen.part.classifier
    old = lambda own, new: jnp.where(check.known, own, new)
    prior = Posterior(
        jax.tree.map(lambda own: old(own, 0.0), check.classifier.mean),
        jax.tree.map(lambda own: old(own, _RHO_OF_ONE), check.classifier.rho),
    )
    counted = lambda one, other: jnp.where(seen.context.task.seen, one - other, 0)
    return total(jax.tree.map(counted, log_density(drawn, mine), log_density(drawn, prior)))


def _scale(kind: KLScale, seen: Seen) -> Float[Array, ""] | float:
    if kind == "per_sample":
        return 1.0 / jnp.maximum(seen.context.client.examples, 1)
    trains = (seen.drawn.adapter, seen.drawn.classifier)
    return 1.0 / sum(x.size for x in jax.tree.leaves(trains)) if kind == "per_parameter" else 1.0


# ---- the server --------------------------------------------------------------------------------------------


def merging(options: VFCLOptions, rule: Aggregation) -> Aggregation:
    """How the clients' Gaussians become one: their product (equation 11), or the run's rule, on means and on
    rhos.

    A client sends the two numbers of a Gaussian that add up, so that conflation is a sum in any order.

    Raises:
      InputError: for another rule than the mean where conflation is asked for.
    """
    if options.merge == "average":
        return rule
    if rule.pre or rule.reduce or rule.post:
        raise InputError(
            f"aggregator: {rule.name!r} would merge in the place of conflation; nearest: 'mean', or "
            f"--merge average"
        )

    def pre(part: Model, reference: Model, weight: Array) -> tuple[Model, Array]:
        del reference
        precision, mean = precision_terms(part.adapter.mean, part.adapter.sigma)
        # what is sent keeps its shape: the two numbers travel in the places of mean and rho
        return part._replace(adapter=Posterior(mean, precision)), jnp.where(weight > 0, 1.0, 0.0)

    def post(part: Model, reference: Model, state: tuple, count: Array, key: PRNGKeyArray):
        del reference, key
        factor = count if options.merge == "conflation" else 1.0  # from the clients' mean to their sum
        mean, precision = jax.tree.map(lambda x: factor * x, part.adapter)
        return part._replace(adapter=of_gaussian(*conflate_sums(precision, mean))), state

    return rule._replace(pre=pre, post=post)
