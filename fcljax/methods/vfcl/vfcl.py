"""VFCL: variational federated continual learning (from the paper; no code was released).

    client    has a Gaussian for each parameter of the network (bayesian.py) and trains them on
              L_ce + lambda_p * s * (log q(w) - log p(w)),   w drawn from q        (eq. 6, 9)
              where p mixes two priors: the global posterior that it received, with weight
              lambda_k, and its own posterior at the end of the previous task
              keeps its classifier and running statistics, and exemplars of earlier tasks
    server    multiplies the clients' Gaussians: conflation                      (eq. 10, 11)

Clients are evaluated with their personal models, on the classes that they have learned.
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
from fcljax.methods.vfcl import posterior
from fcljax.methods.vfcl.bayesian import bayesian
from fcljax.methods.vfcl.conflation import conflate_sums, precision_terms
from fcljax.methods.vfcl.posterior import Flat, Posterior
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, Params, all_last, cross_entropy_loss, with_lasting
from fcljax.parts.replay import Budget, herded
from fcljax.parts.task_end import TaskEnd, after_round, no_task_end, of_task_before
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Claim, ClientContext, Method, Upload

KLScale = Literal["per_sample", "per_parameter", "none"]

_RHO_OF_ONE = math.log(math.e - 1)  # rho of a standard deviation of 1: softplus(rho) = 1


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
# mini: `kl_scale` divides the priors' weight by a client's number of examples, which is
# about a tenth of the paper's
PRESETS = with_mini(
    {
        "intended": Preset(VFCLOptions(), _RUN, _ADAPTERS),
        "paper": _PAPER,
        "released": _PAPER,  # no code was released
    },
    lr=0.05,
    full_lr=1e-3,
    prior_weight=0.01,
    rounds=3,
)


def vfcl(options: VFCLOptions, run: Run) -> Method:
    """Compose VFCL.

    Raises:
      InputError: for an aggregation rule that would replace conflation.
    """
    client_rules = []
    if options.prior_weight:
        client_rules.append(two_priors(options, run))
    if options.exemplars:
        budget = Budget(options.exemplars)
        batch_size = run.training.batch_size
        client_rules.append(herded(budget, run.sizes, run.network.width, batch_size))
    inner = linear_learner(run)
    return federate(
        run._replace(aggregation=conflation(options, run.aggregation, run.sizes.classes)),
        bayesian(inner, options.init_std, options.mc_samples, options.mc_test_samples),
        loss=cross_entropy_loss("seen"),
        client_rules=tuple(client_rules),
        personal=("classifier", "stats"),
    )


# ---- client: the two priors (eq. 6, 9) -------------------------------------------------


class ClientPrior(NamedTuple):
    """A client's posterior after its last round of the previous task."""

    adapter: Posterior
    classifier: Posterior
    seen: Bool[Array, " C"]
    """Classes seen by the end of that task."""
    task: Int[Array, ""]
    """The previous task; -1: there is none."""


def two_priors(options: VFCLOptions, run: Run) -> ClientRule:
    """Add lambda_p * s * (log q(w) - log p(w)) with the mixture prior p (eq. 6, 9).

    The classifier is personal, so its prior has no global component: it is the client's
    posterior of the previous task, or N(0, 1) for new classes. Classes that the client has
    not seen do not count. Adapter parameters that belong to one task have no posterior of
    the previous task, and the global prior takes its place.
    """

    def init(_key: PRNGKeyArray, trainable: Params) -> TaskEnd:
        no_classes = jnp.zeros(run.sizes.classes, bool)
        no_task = jnp.int32(-1)
        prior = ClientPrior(trainable.adapter, trainable.classifier, no_classes, no_task)
        return no_task_end(prior)

    def on_start(
        context: ClientContext,
        state: TaskEnd,
        _key: PRNGKeyArray,
    ) -> ClientPrior:
        return of_task_before(state, context.task)

    def loss(step: ClientStep, prior: ClientPrior) -> Float[Array, ""]:
        # without a previous task there is only the global prior
        global_weight = jnp.where(prior.task < 0, 1.0, options.global_share)
        global_posterior: Posterior = step.context.payload.trainable.adapter
        adapter = of_this_task(run.adapter, global_posterior, prior.adapter)
        prior = prior._replace(adapter=adapter)
        adapter_ratio = log_posterior_ratio(step, prior, global_weight)
        scale = kl_scale(options.kl_scale, step)
        return options.prior_weight * scale * (adapter_ratio + classifier_ratio(step, prior))

    def on_end(
        context: ClientContext,
        prior: ClientPrior,
        trainable: Params,
        _state: TaskEnd,
    ) -> TaskEnd:
        index = jnp.asarray(context.task.index, jnp.int32)
        seen = context.task.seen
        newest = ClientPrior(trainable.adapter, trainable.classifier, seen, index)
        return after_round(prior, newest, context.task)

    return ClientRule("priors", loss, init, on_start, on_end=on_end)


def of_this_task(
    adapter: Adapter,
    global_posterior: Posterior,
    previous: Posterior,
) -> Posterior:
    """Return a client's posterior of the previous task for parameters that all tasks
    share, and the global posterior for those that belong to one task.
    """
    if all_last(adapter, previous.mean.params):
        return previous

    def merge(global_flat: Flat, previous_flat: Flat) -> Flat:
        lasting = adapter.lasting(previous_flat.params)
        return Flat.of(with_lasting(global_flat.params, lasting))

    mean = merge(global_posterior.mean, previous.mean)
    return Posterior(mean, merge(global_posterior.rho, previous.rho))


def log_posterior_ratio(
    step: ClientStep, prior: ClientPrior, global_weight: Float[Array, ""]
) -> Float[Array, ""]:
    """Return log q(w) - log p(w) of the adapter's drawn parameters w (eq. 6).

    Args:
      step: of the client, whose posterior is q.
      prior: the client's component of the mixture p; the other one is what it received.
      global_weight: lambda_k.
    """
    # as vectors: leaf by leaf, a network of a hundred leaves takes minutes to compile
    w, _ = ravel_pytree(step.drawn.adapter)
    q = posterior.flat(step.trainable.adapter)
    global_prior = posterior.flat(step.context.payload.trainable.adapter)
    client_prior = posterior.flat(prior.adapter)

    def ratio(
        global_weight: Array,
        w: Array,
        q_mean: Array,
        q_rho: Array,
        global_mean: Array,
        global_rho: Array,
        client_mean: Array,
        client_rho: Array,
    ) -> Array:
        q = Posterior(q_mean, q_rho)
        global_prior = Posterior(global_mean, global_rho)
        client_prior = Posterior(client_mean, client_rho)
        log_q = posterior.log_density(w, q)
        return log_q - posterior.log_mixture(w, global_prior, client_prior, global_weight)

    vectors = (w, *q, *global_prior, *client_prior)
    return jnp.sum(posterior.in_blocks(ratio, global_weight, *vectors))


def classifier_ratio(step: ClientStep, prior: ClientPrior) -> Float[Array, ""]:
    """Return log q(w) - log p(w) of the classifier, over the classes seen.

    Classes are the last axis of each leaf.
    """

    def mean_or_zero(mean: Array) -> Array:
        return jnp.where(prior.seen, mean, 0.0)

    def rho_or_one(rho: Array) -> Array:
        # N(0, 1) for classes that were not seen in the previous task
        return jnp.where(prior.seen, rho, _RHO_OF_ONE)

    def of_seen_classes(log_q: Array, log_p: Array) -> Array:
        # no example has taught the client anything about unseen classes
        return jnp.where(step.context.task.seen, log_q - log_p, 0)

    p = Posterior(
        jax.tree.map(mean_or_zero, prior.classifier.mean),
        jax.tree.map(rho_or_one, prior.classifier.rho),
    )
    w = step.drawn.classifier
    log_q = posterior.log_density(w, step.trainable.classifier)
    log_p = posterior.log_density(w, p)
    return posterior.sum_all(jax.tree.map(of_seen_classes, log_q, log_p))


def kl_scale(kind: KLScale, step: ClientStep) -> Float[Array, ""] | float:
    """Return s, the factor of the priors' loss (`VFCLOptions.kl_scale`)."""
    if kind == "per_sample":
        return 1.0 / jnp.maximum(step.context.client.examples, 1)
    if kind == "per_parameter":
        parameters = (step.drawn.adapter, step.drawn.classifier)
        return 1.0 / sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return 1.0


# ---- server: conflation (eq. 10, 11) ---------------------------------------------------


# largest factor by which one round may reduce a standard deviation
MOST_SHARPER = 10.0


def possible_precision(context: ClientContext, upload: Upload) -> Bool[Array, ""]:
    """Check that sigma is finite and at least a tenth of the received one.

    In conflation precisions are weights, which clients choose: a tiny sigma would
    outweigh all others. An infinite sigma becomes a precision of 0, which no check for
    finite numbers would find.
    """
    trainable: Params = upload.gather.get("mean", upload.mean)
    received = context.payload.trainable.adapter.sigma

    def possible(sigma: Array, received: Array) -> Array:
        float32 = jnp.finfo(jnp.float32)
        # above 0 also where the received sigma is tiny: 1 / 0^2 is infinite
        least = jnp.maximum(received / MOST_SHARPER, float32.tiny)
        return within(sigma, least, float32.max)

    checks = jax.tree.map(possible, trainable.adapter.sigma, received)
    return jnp.all(jnp.stack(jax.tree.leaves(checks)))


def bounded_certainty(
    client: Posterior,
    received: Posterior,
    nats: Float[Array, ""],
) -> PyTree:
    """Return standard deviations that are no more certain than the client's labels allow.

    n labels of C classes have at most n log C nats of information, and cannot give more
    about the parameters (mutual information). So the posterior has on average at most so
    much less entropy than its prior, which is the sum of log(received / client) over all
    parameters that became more certain. Where this sum is larger, all these logarithms
    are reduced by the same factor; else the standard deviations keep their bits.

    Args:
      client: the client's posterior.
      received: the global posterior from which it trained.
      nats: n log C.
    """

    def information(sigma: Array, received: Array) -> Array:
        return jnp.maximum(jnp.log(received / sigma), 0)

    # `maximum`: a parameter that became less certain must not pay for others
    gains = jax.tree.map(information, client.sigma, received.sigma)
    total = posterior.sum_all(gains)
    share = nats / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)

    def bound(sigma: Array, received: Array, gain: Array) -> Array:
        # exp(-log(r / s)) would round: with share >= 1 sigma itself stays
        is_bounded = (share < 1) & (gain > 0)
        return jnp.where(is_bounded, received * jnp.exp(-share * gain), sigma)

    return jax.tree.map(bound, client.sigma, received.sigma, gains)


def conflation(options: VFCLOptions, rule: Aggregation, classes: int) -> Aggregation:
    """Merge the clients' Gaussians to their product (eq. 11), or by the run's rule.

    Clients with smaller posterior variance receive more weight, up to a bound
    (`bounded_certainty`). Each upload is turned into the two terms of its Gaussians that
    add up, so that conflation is a sum in any order (conflation.py). With `merge` =
    average the run's rule merges means and rhos.

    Raises:
      InputError: for another rule than the mean where conflation is chosen.
    """
    # claims are checked on what the client sent, before `pre` changes it
    rule = rule._replace(possible=Claim("precision", possible_precision))
    if options.merge == "average":
        return rule
    if rule.pre or rule.reduce or rule.post:
        raise InputError(
            f"aggregator: {rule.name!r} would replace conflation; nearest: 'mean', or --merge average"
        )

    def pre(trainable: Params, reference: Params, weight: Array) -> tuple[Params, Array]:
        nats = weight * math.log(classes)  # the weight is the number of examples
        sigma = bounded_certainty(trainable.adapter, reference.adapter, nats)
        precision, precision_mean = precision_terms(trainable.adapter.mean, sigma)
        # the two terms take the places of mean and rho: an upload keeps its structure
        terms = Posterior(precision_mean, precision)
        # weight 1, since the precisions are the weights; a client without examples adds
        # nothing
        return trainable._replace(adapter=terms), jnp.where(weight > 0, 1.0, 0.0)

    def post(
        merged: Params, _reference: Params, state: tuple, count: Array, _key: PRNGKeyArray
    ) -> tuple[Params, tuple]:
        # `merged` is the mean of the clients' terms. It is as certain as one client
        # (tempered); times the number of clients it is their sum (conflation)
        factor = 1.0
        if options.merge == "conflation":
            factor = count
        precision_mean, precision = jax.tree.map(lambda leaf: factor * leaf, merged.adapter)
        mean, sigma = conflate_sums(precision, precision_mean)
        return merged._replace(adapter=posterior.of_gaussian(mean, sigma)), state

    return rule._replace(pre=pre, post=post)
