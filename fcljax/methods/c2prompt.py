"""C2Prompt: class-aware client knowledge interaction (Xu et al., NeurIPS 2025, arXiv 2509.19674).

    before a task   clients send the sums of their frozen features and of the squares by class, and the server
                    has the moments of each class over all clients:
                      mu_i = sum_k p_ki mu_ki,   sigma_i^2 = sum_k p_ki (mu_ki^2 + sigma_ki^2) - mu_i^2
    client, once    trains a compensation prompt c_i of each of its classes i, tokens beside an image's
                    patches that move its frozen feature f to the class's distribution      (LCDC):
                      L_c = 1/2 (f - mu_i)^T Sigma_i^-1 (f - mu_i)
    client          trains CODA-Prompt's components and the classifier on   L_ce + beta L_kd,   half of L_ce
                    on images beside their class's compensation prompt
                    adds up how well each component matches each class's examples: H [N, classes]
    server          W = softmax(H H^T / tau) over the components of all clients,   P* = W P      (CPA)

L_kd is Powder's (Piao et al., ICML 2024): the logits of the task's wrong classes stay near those of the model
that the round began with. Compensation prompts never leave the client, and evaluation needs none.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.coda import CodaOptions, Components, matches, with_current
from fcljax.models.heads import kl, mask_logits, masked_sum, unit
from fcljax.models.products import exact_einsum
from fcljax.models.vit import Injection
from fcljax.options import option
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, OfEachClient, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Loss, Params, cross_entropy_loss
from fcljax.parts.reports import ClassMoments, moments_of, no_moments, normal_of, possible_moments
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig
from fcljax.types import ClientContext, Method, Task, View

MOMENTS = "moments"
AFFINITY = "affinity"
LEAST_VARIANCE = 1e-4  # of a feature in a class, such as one with a single example
FIRST_DEVIATION = 0.02  # standard deviation of a compensation prompt's first values


@dataclasses.dataclass(frozen=True)
class C2PromptOptions:
    """Options of C2Prompt."""

    wo_lcdc: bool = False
    """Ablation: use no compensation prompts."""
    wo_cpa: bool = False
    """Ablation: average the components at the server."""
    compensation_length: int = option(3, least=1)
    """Tokens of a class's compensation prompt."""
    compensation_epochs: int = option(5, least=1)
    """Number of epochs in which a client trains its compensation prompts, once per task."""
    compensation_lr: float = option(1e-2, positive=True)
    """Learning rate of the compensation prompts."""
    compensation_share: float = option(0.5, least=0.0, most=1.0)
    """Fraction of the cross-entropy on images with their class's compensation prompt."""
    kd_weight: float = option(1.0, least=0.0)
    """Weight beta of the distillation from the model at the start of the round."""
    kd_temperature: float = option(3.0, positive=True)
    """Temperature of this distillation."""
    affinity_temperature: float = option(0.1, positive=True)
    """Temperature tau of the weights with which the server mixes components."""


_CODA = CodaOptions(coda_components=80, coda_length=10)
PRESETS = {"intended": Preset(C2PromptOptions(), RunConfig(lr=1e-2), adapters=(_CODA,))}


def c2prompt(options: C2PromptOptions, run: Run) -> Method:
    """C2Prompt as a method."""
    distil = keep_wrong_classes(options.kd_weight, options.kd_temperature)
    client_rules: tuple[ClientRule, ...] = (distil,)
    server_rules: tuple[ServerRule, ...] = ()
    share = 0.0 if options.wo_lcdc else options.compensation_share
    if not options.wo_lcdc:
        client_rules = (compensate(options, run, cross_entropy_loss(weight=share)), distil)
        server_rules = (global_moments(run),)
    if not options.wo_cpa:
        server_rules = (*server_rules, mix_by_affinity(options, run))
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(weight=1 - share),
        client_rules=client_rules,
        server_rules=server_rules,
    )


# ---- the classes' distributions over all clients -----------------------------------------------------------


def global_moments(run: Run) -> ServerRule:
    """Sums over all clients' examples of the task's classes [Ct], from which mu and sigma^2 follow."""
    classes = run.sizes.task_classes
    width = run.network.width

    def init(params: Params, trainable: Params) -> ClassMoments:
        del params, trainable
        return no_moments(classes, width)

    def nothing(context: ClientContext) -> ClassMoments:
        del context
        return no_moments(classes, width)

    def add(step: ClientStep, total: ClassMoments) -> ClassMoments:
        feature = step.output.query
        batch = step.batch
        assert feature is not None
        more = moments_of(feature, batch.label, step.context.task.classes, batch.mask)
        return jax.tree.map(jnp.add, total, more)

    def sends(task: Task, known: ClassMoments) -> ClassMoments:
        del task
        return known

    def update(round: ServerRound, params: Params, known: ClassMoments) -> ServerUpdate:
        del known
        return ServerUpdate(params, round.reports[MOMENTS])

    report = Report(MOMENTS, nothing, add, merge="sum", possible=possible_moments)
    return ServerRule(MOMENTS, update, init, sends, (report,), when="task_start")


# ---- LCDC: local class distribution compensation -----------------------------------------------------------


class Compensation(NamedTuple):
    """A client's compensation prompts."""

    prompt: Float[Array, "Ct length width"]
    """Of each class of a task."""
    task: Int[Array, ""]
    """The task; -1: none yet."""


class Compensating(NamedTuple):
    """A client in a round."""

    prompt: Float[Array, "Ct length width"]
    optimiser: PyTree
    fresh: Bool[Array, ""]
    """Whether this is the client's first round of the task, so that its prompts train."""


def compensate(options: C2PromptOptions, run: Run, loss: Loss) -> ClientRule:
    """The compensation prompts, trained before the client's first round of a task and constant afterwards,
    and the loss on images beside them.

    Args:
      options: of the method.
      run: for sizes and training.
      loss: of these images, times its share.
    """
    shape = run.sizes.task_classes, options.compensation_length, run.network.width
    descent = optax.chain(run.training.optimiser, optax.scale(-options.compensation_lr))

    def init(key: PRNGKeyArray, trainable: Params) -> Compensation:
        del key, trainable
        return Compensation(jnp.zeros(shape), jnp.int32(-1))

    def start(context: ClientContext, state: Compensation, key: PRNGKeyArray) -> Compensating:
        del key  # all clients start alike, so that their order does not matter
        fresh = state.task != context.task.index
        first = first_prompts(shape)
        return Compensating(jnp.where(fresh, first, state.prompt), descent.init(first), fresh)

    def step(step: ClientStep, memory: Compensating) -> Compensating:
        def trained() -> Compensating:
            gradient = jax.grad(lambda prompt: misfit(step, prompt))(memory.prompt)
            by, optimiser = descent.update(gradient, memory.optimiser, memory.prompt)
            return Compensating(optax.tree.add(memory.prompt, by), optimiser, memory.fresh)

        return jax.lax.cond(memory.fresh, trained, lambda: memory)

    def value(step: ClientStep, memory: Compensating) -> Float[Array, ""]:
        output = step.output._replace(logits=compensated_logits(step, memory.prompt))
        return loss.value(output, step.batch, step.context.task)

    def end(context: ClientContext, memory: Compensating, trainable: Params, state: Compensation):
        del trainable, state
        return Compensation(memory.prompt, jnp.asarray(context.task.index, jnp.int32))

    view = View(options.compensation_epochs, run.training.batch_size)
    before = ClientPass("before_training", view, step, trains=True)
    return ClientRule("compensation", value, init, start, (before,), end)


def first_prompts(shape: tuple[int, int, int]) -> Float[Array, "Ct length width"]:
    """The first values of compensation prompts, always the same ones."""
    return FIRST_DEVIATION * jax.random.normal(jax.random.key(0), shape)


def tokens_of(step: ClientStep, prompt: Float[Array, "Ct length width"]) -> Float[Array, "batch length D"]:
    """The compensation prompt of every example's class."""
    return prompt[place_of(step)]


def place_of(step: ClientStep) -> Int[Array, " batch"]:
    """The place of every example's class among those of the task."""
    return jnp.argmax(step.batch.label[:, None] == step.context.task.classes, axis=1)


def misfit(step: ClientStep, prompt: Float[Array, "Ct length width"]) -> Float[Array, ""]:
    """L_c: the mean over the examples of 1/2 sum over channels of (f - mu)^2 / sigma^2, where f is the frozen
    network's feature of an image beside its class's prompt."""
    network = step.learner.network
    context = step.context
    mask = step.batch.mask
    injection = Injection(tokens=tokens_of(step, prompt))
    seen, _ = network.apply(context.frozen.network, step.batch.image, injection, True, mask)
    moments: ClassMoments = context.payload.sent[MOMENTS]
    mean, variance = normal_of(moments)
    place = place_of(step)
    apart = (seen.cls - mean[place]) ** 2 / jnp.maximum(variance[place], LEAST_VARIANCE)
    counts = mask & (moments.examples[place] > 0)
    return masked_sum(jnp.sum(apart, axis=1) / 2, counts) / jnp.maximum(jnp.sum(counts), 1)


def compensated_logits(step: ClientStep, prompt: Float[Array, "Ct length width"]) -> Float[Array, "batch C"]:
    """The model's logits of images beside their classes' prompts."""
    learner = step.learner
    context = step.context
    own = step.drawn
    batch = step.batch
    adapter = learner.adapter
    cached = context.cached
    task = context.task
    assert adapter.inject is not None
    injection = adapter.inject(cached.adapter, own.adapter, step.output.query, task, True, batch.mask)
    injection = injection._replace(tokens=tokens_of(step, prompt))
    seen, _ = learner.network.apply(context.frozen.network, batch.image, injection, True, batch.mask)
    return learner.classifier.logits(cached.classifier, own.classifier, adapter.feature(seen), task)


# ---- the distillation --------------------------------------------------------------------------------------


def keep_wrong_classes(weight: float, temperature: float) -> ClientRule:
    """beta L_kd, from a task's second round on: before, nobody knows its classes."""

    def loss(step: ClientStep, memory: tuple) -> Float[Array, ""]:
        del memory
        context = step.context
        batch = step.batch
        teacher = jax.lax.stop_gradient(step.forward(context.payload.trainable).logits)
        wrong = context.task.current & (jnp.arange(teacher.shape[1]) != batch.label[:, None])
        apart = not_true_distance(step.output.logits, teacher, wrong, temperature)
        value = weight * masked_sum(apart, batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)
        return jnp.where(context.client.round > 0, value, 0.0)

    return ClientRule("distillation", loss)


def not_true_distance(
    student: Float[Array, "batch C"],
    teacher: Float[Array, "batch C"],
    wrong: Bool[Array, "batch C"],
    temperature: float,
) -> Float[Array, " batch"]:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) over an example's wrong classes."""
    return temperature**2 * kl(teacher / temperature, student / temperature, wrong)


# ---- CPA: class-aware prompt aggregation -------------------------------------------------------------------


def affinity(run: Run) -> Report:
    """H: how well each component matches the examples of each class of the task, added up in training."""

    def init(context: ClientContext) -> Float[Array, "blocks N Ct"]:
        own = run.adapter.counted(context.payload.trainable.adapter, context.task)
        return jnp.zeros((*own.key.shape[:-1], run.sizes.task_classes))

    def add(step: ClientStep, total: Float[Array, "blocks N Ct"]) -> Float[Array, "blocks N Ct"]:
        task = step.context.task
        batch = step.batch
        query = step.output.query
        assert query is not None
        own: Components = run.adapter.counted(step.trainable.adapter, task)
        member = (batch.label[:, None] == task.classes) & batch.mask[:, None]
        return total + exact_einsum("bmn,bc->mnc", matches(own, query), member.astype(jnp.float32))

    return Report(AFFINITY, init, add, possible=possible_affinity)


def possible_affinity(context: ClientContext, sent: Float[Array, "blocks N Ct"]) -> Bool[Array, ""]:
    """Whether these can be sums of cosines, one for each example that was read."""
    return jnp.all(jnp.sum(jnp.abs(sent), axis=-1) <= context.client.examples * (1 + 1e-3))  # up to rounding


def mix_by_affinity(options: C2PromptOptions, run: Run) -> ServerRule:
    """P* = W P, and of the components in the same place the mean over clients."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        task = round.task
        adapter = run.adapter
        own: Components = jax.vmap(lambda sent: adapter.counted(sent, task))(round.reports["adapter"])
        weights = mixing_weights(
            round.reports[AFFINITY], round.weights, round.valid, options.affinity_temperature
        )
        mixed = jax.tree.map(lambda x: mixed_by(weights, x, round.valid), own)
        after: Components = with_current(params.adapter, mixed, task, constant=False)
        somebody = jnp.any(round.valid)
        after = jax.tree.map(lambda new, old: jnp.where(somebody, new, old), after, params.adapter)
        return ServerUpdate(params._replace(adapter=after), state)

    return ServerRule("affinity", update, reports=(OfEachClient("adapter"), affinity(run)))


def mixing_weights(
    affinity: Float[Array, "clients blocks N Ct"],
    weight: Float[Array, " clients"],
    valid: Bool[Array, " clients"],
    temperature: float,
) -> Float[Array, "blocks N every"]:
    """How much of every client's components each component of the server gets.

    The rows of H have length 1, as in Powder's release, so that they say which classes a component matches
    and not how many examples the client has. The components in the same place of all clients are averaged by
    the clients' weights.
    """
    clients, _, count, _ = affinity.shape
    there = valid[:, None, None, None]
    rows = rearrange(unit(jnp.where(there, affinity, 0.0)), "k m n c -> m (k n) c")
    odds = mask_logits(exact_einsum("mrc,msc->mrs", rows, rows) / temperature, jnp.repeat(valid, count))
    mixing = rearrange(jax.nn.softmax(odds), "m (k n) s -> k m n s", k=clients)
    share = jnp.where(valid, weight, 0.0)
    return exact_einsum("k,kmns->mns", share / jnp.maximum(jnp.sum(share), 1e-12), mixing)


def mixed_by(
    weights: Float[Array, "blocks N every"],
    own: Float[Array, "clients blocks N *shape"],
    valid: Bool[Array, " clients"],
) -> Float[Array, "blocks N *shape"]:
    """The weighted sums of all clients' components, those of clients that are not valid left out."""
    own = jnp.where(valid.reshape(-1, *[1] * (own.ndim - 1)), own, 0.0)
    clients, blocks, count = own.shape[:3]
    rows = jnp.moveaxis(own, 0, 1).reshape(blocks, clients * count, -1)
    return exact_einsum("mns,msf->mnf", weights, rows).reshape(own.shape[1:])
