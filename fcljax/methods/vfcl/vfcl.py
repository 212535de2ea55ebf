"""VFCL: variational federated continual learning (specification, from the paper; no code was released).

    client    has a Gaussian for each parameter of the network (bayesian.py) and trains them on
              L_ce + lambda_p * s * (log q(w) - log p(w)),   w drawn from q                    (eq. 6, 9)
              where p mixes two priors: the global posterior that it was sent, with share lambda_k, and its
              own posterior at the end of the task before
              keeps its classifier and running statistics to itself, and exemplars of earlier tasks
    server    multiplies the clients' Gaussians: conflation                                    (eq. 10, 11)

Clients are evaluated as themselves, on the classes that they have learned.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.full import FullOptions
from fcljax.errors import InputError
from fcljax.federated.aggregation import Aggregation
from fcljax.federated.claims import within
from fcljax.methods.vfcl.bayesian import bayesian
from fcljax.methods.vfcl.conflation import conflate_sums, precision_terms
from fcljax.methods.vfcl.posterior import (
    Flat,
    Posterior,
    flat,
    in_blocks,
    log_density,
    log_mixture,
    of_gaussian,
    sum_all,
)
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, Params, all_last, cross_entropy_loss, with_lasting
from fcljax.parts.replay import Budget, herded
from fcljax.parts.task_end import TaskEnd, after_round, no_task_end, of_task_before
from fcljax.settings import Preset, RunConfig
from fcljax.types import Claim, ClientContext, Method, Upload

KLScale = Literal["per_sample", "per_parameter", "none"]

_RHO_OF_ONE = math.log(math.e - 1)  # softplus of it is 1


@dataclasses.dataclass(frozen=True)
class VFCLOptions:
    """Options of VFCL; the paper's values where it has them."""

    prior_weight: float = option(1.0, least=0.0)
    """Weight lambda_p of the two priors together; 0 switches both off."""
    global_share: float = option(0.5, least=0.0, most=1.0)
    """Weight lambda_k of the global prior in the mixture; 1 switches the client's prior
    off."""
    mc_samples: int = option(1, least=1)
    """Number n of parameter draws per step."""
    exemplars: int = option(20, least=0)
    """Number of examples per class in a client's memory, chosen by herding."""
    mc_test_samples: int = option(5, least=0)
    """Number of parameter draws for a second reliability diagram, of their mean
    probabilities."""
    init_std: float = option(0.02, positive=True)
    """Initial standard deviation of all parameters; the paper does not state it."""
    kl_scale: KLScale = "per_sample"
    """Divisor of the priors' term: the client's examples, the number of parameters, or
    none (eq. 9)."""
    merge: Literal["conflation", "tempered", "average"] = "tempered"
    """Merge of the Gaussians at the server: their product (conflation), the product with
    its variance times the number of clients (tempered), or the mean of means and rhos
    weighted by examples (Ours-FedAvg)."""


_RUN = RunConfig(lr=0.01, optimiser="sgd", rounds=10)
_ADAPTERS = (FullOptions(full_lr=0.01),)
_PAPER = Preset(VFCLOptions(merge="conflation"), _RUN, _ADAPTERS)
PRESETS = {
    "intended": Preset(VFCLOptions(), _RUN, _ADAPTERS),
    "paper": _PAPER,
    "released": _PAPER,  # no code was released
}


def vfcl(options: VFCLOptions, run: Run) -> Method:
    """VFCL as a method.

    Raises:
      InputError: for an aggregation rule that would merge in the place of conflation.
    """
    rules = (two_priors(options, run),) if options.prior_weight else ()
    if options.exemplars:
        budget = Budget(options.exemplars)
        rules += (herded(budget, run.sizes, run.network.width, run.training.batch_size),)
    return federate(
        run._replace(aggregation=conflation(options, run.aggregation, run.sizes.classes)),
        bayesian(linear_learner(run), options.init_std, options.mc_samples, options.mc_test_samples),
        loss=cross_entropy_loss("seen"),
        client_rules=rules,
        personal=("classifier", "stats"),
    )


# ---- client: the two priors (eq. 6, 9) ---------------------------------------------------------------------


class OwnPrior(NamedTuple):
    """A client's own posterior after its last round of the task before."""

    adapter: Posterior
    classifier: Posterior
    known: Bool[Array, " C"]
    """Classes that existed by then."""
    task: Int[Array, ""]
    """-1: there is none yet."""


def two_priors(options: VFCLOptions, run: Run) -> ClientRule:
    """lambda_p * s * (log q(w) - log p(w)), p the mixture of the global and the client's own posterior (eq. 6
    and 9).

    A classifier has no global component: its prior is its own of the task before, or N(0, 1) for new classes
    (specification 3.4). Classes that the client has not seen do not count. Where each task has parameters of
    its own, the posterior of the task before says nothing of them, and the global prior stands in its place.
    """

    def init(_key: PRNGKeyArray, trainable: Params) -> TaskEnd:
        nothing = jnp.zeros(run.sizes.classes, bool)
        return no_task_end(OwnPrior(trainable.adapter, trainable.classifier, nothing, jnp.int32(-1)))

    def on_start(context: ClientContext, state: TaskEnd, _key: PRNGKeyArray) -> OwnPrior:
        return of_task_before(state, context.task)

    def loss(step: ClientStep, prior: OwnPrior) -> Float[Array, ""]:
        share = jnp.where(prior.task < 0, 1.0, options.global_share)
        sent: Posterior = step.context.payload.trainable.adapter
        prior = prior._replace(adapter=of_this_task(run.adapter, sent, prior.adapter))
        body = log_posterior_ratio(step, prior, share)
        scale = kl_scale(options.kl_scale, step)
        return options.prior_weight * scale * (body + classifier_ratio(step, prior))

    def on_end(context: ClientContext, prior: OwnPrior, trainable: Params, _state: TaskEnd) -> TaskEnd:
        index = jnp.asarray(context.task.index, jnp.int32)
        newest = OwnPrior(trainable.adapter, trainable.classifier, context.task.seen, index)
        return after_round(prior, newest, context.task)

    return ClientRule("priors", loss, init, on_start, on_end=on_end)


def of_this_task(adapter: Adapter, sent: Posterior, own: Posterior) -> Posterior:
    """A client's own posterior of the adapter at the end of the task before, with the global one where each
    task has parameters of its own."""
    if all_last(adapter, own.mean.params):
        return own

    def joined(sent: Flat, own: Flat) -> Flat:
        return Flat.of(with_lasting(sent.params, adapter.lasting(own.params)))

    return Posterior(joined(sent.mean, own.mean), joined(sent.rho, own.rho))


def log_posterior_ratio(step: ClientStep, prior: OwnPrior, share: Float[Array, ""]) -> Float[Array, ""]:
    """log q(w) - log p(w) of the network's drawn parameters (eq. 6); `share` is lambda_k."""
    # as one vector each: leaf by leaf a network of a hundred leaves takes minutes to compile
    drawn, _ = ravel_pytree(step.drawn.adapter)
    received = step.context.payload.trainable.adapter
    mine, sent, own = map(flat, (step.trainable.adapter, received, prior.adapter))

    def ratio(share: Array, drawn: Array, *numbers: Array) -> Array:
        mine, sent, own = (Posterior(*numbers[i : i + 2]) for i in (0, 2, 4))
        return log_density(drawn, mine) - log_mixture(drawn, sent, own, share)

    return jnp.sum(in_blocks(ratio, share, drawn, *mine, *sent, *own))


def classifier_ratio(step: ClientStep, prior: OwnPrior) -> Float[Array, ""]:
    """The same of the classifier, over the classes that the client has seen: the last axis of every leaf."""
    drawn = step.drawn.classifier
    mine = step.trainable.classifier
    seen = step.context.task.seen

    def known_or(new: float):
        return lambda own: jnp.where(prior.known, own, new)

    of_new = Posterior(
        jax.tree.map(known_or(0.0), prior.classifier.mean),
        jax.tree.map(known_or(_RHO_OF_ONE), prior.classifier.rho),
    )

    def counted(one: Array, other: Array) -> Array:
        return jnp.where(seen, one - other, 0)

    return sum_all(jax.tree.map(counted, log_density(drawn, mine), log_density(drawn, of_new)))


def kl_scale(kind: KLScale, step: ClientStep) -> Float[Array, ""] | float:
    """s: what the priors' loss is multiplied by (`VFCLOptions.kl_scale`)."""
    if kind == "per_sample":
        return 1.0 / jnp.maximum(step.context.client.examples, 1)
    trains = (step.drawn.adapter, step.drawn.classifier)
    return 1.0 / sum(x.size for x in jax.tree.leaves(trains)) if kind == "per_parameter" else 1.0


# ---- server: conflation (eq. 10, 11) -----------------------------------------------------------------------


MOST_SHARPER = 10.0  # how much smaller a round of training may make a standard deviation


def possible_precision(context: ClientContext, upload: Upload) -> Bool[Array, ""]:
    """Whether no standard deviation is 0 or less than a tenth of the one that was sent: precisions are
    weights, which clients choose. An infinite one would become a precision of 0, which looks sound."""
    trainable: Params = upload.gather.get("mean", upload.mean)
    sent = context.payload.trainable.adapter.sigma

    def possible(mine: Array, sent: Array) -> Array:
        number = jnp.finfo(jnp.float32)
        return within(mine, jnp.maximum(sent / MOST_SHARPER, number.tiny), number.max)

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(possible, trainable.adapter.sigma, sent))))


def bounded_certainty(mine: Posterior, sent: Posterior, nats: Float[Array, ""]) -> PyTree:
    """Standard deviations of which no client is more certain than its labels can make it.

    n labels of C classes have at most n log C nats of information, and so has what they say of the weights
    (mutual information). A posterior from them has on average at most so much less entropy than its prior:
    the sum of log(sent / mine) over all weights that became more certain. Where it is more, all these
    logarithms are shortened by the same factor; else the numbers keep their bits.
    """
    gained = jax.tree.map(lambda m, s: jnp.maximum(jnp.log(s / m), 0), mine.sigma, sent.sigma)
    share = nats / jnp.maximum(sum_all(gained), jnp.finfo(jnp.float32).tiny)

    def bounded(mine: Array, sent: Array, gained: Array) -> Array:
        return jnp.where((share < 1) & (gained > 0), sent * jnp.exp(-share * gained), mine)

    return jax.tree.map(bounded, mine.sigma, sent.sigma, gained)


def conflation(options: VFCLOptions, rule: Aggregation, classes: int) -> Aggregation:
    """How the clients' Gaussians become one: their product (eq. 11), or the run's rule on means and on rhos.

    Clients with smaller posterior variance receive more weight, within what their labels can say
    (`bounded_certainty`). A client sends the two terms of its Gaussians that add up, so that conflation is a
    sum in any order (conflation.py).

    Raises:
      InputError: for another rule than the mean where conflation is asked for.
    """
    rule = rule._replace(possible=Claim("precision", possible_precision))
    if options.merge == "average":
        return rule
    if rule.pre or rule.reduce or rule.post:
        raise InputError(
            f"aggregator: {rule.name!r} would merge in the place of conflation; nearest: 'mean', or "
            f"--merge average"
        )

    def pre(trainable: Params, reference: Params, weight: Array) -> tuple[Params, Array]:
        nats = weight * math.log(classes)  # the weight is the number of examples
        sigma = bounded_certainty(trainable.adapter, reference.adapter, nats)
        precision, mean = precision_terms(trainable.adapter.mean, sigma)
        # the two terms travel in the places of mean and rho, so that what is sent keeps its shape
        return trainable._replace(adapter=Posterior(mean, precision)), jnp.where(weight > 0, 1.0, 0.0)

    def post(merged: Params, _reference: Params, state: tuple, count: Array, _key: PRNGKeyArray):
        factor = count if options.merge == "conflation" else 1.0  # from the clients' mean to their sum
        mean, precision = jax.tree.map(lambda x: factor * x, merged.adapter)
        return merged._replace(adapter=of_gaussian(*conflate_sums(precision, mean))), state

    return rule._replace(pre=pre, post=post)
