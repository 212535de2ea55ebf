"""C2Prompt: class-aware client knowledge interaction (Xu et al., NeurIPS 2025, arXiv
2509.19674).

    before a task   clients send sums of their frozen features and of the squared features by
                    class, which give mean and variance of each class over all clients:
                      mu_i = sum_k p_ki mu_ki
                      sigma_i^2 = sum_k p_ki (mu_ki^2 + sigma_ki^2) - mu_i^2
    client, once    trains a compensation prompt c_i of each of its classes i: tokens beside
                    an image's patches that move its frozen feature f to the class's
                    distribution                                                   (LCDC):
                      L_c = 1/2 (f - mu_i)^T Sigma_i^-1 (f - mu_i)
    client          trains CODA-Prompt's components and the classifier on L_ce + beta L_kd,
                    half of L_ce on images beside their class's compensation prompt
                    sums how well each component matches each class's examples: H [N, classes]
    server          W = softmax(H H^T / tau) over the components of all clients,
                    P* = W P                                                        (CPA)

L_kd is Powder's (Piao et al., ICML 2024): the logits of the task's wrong classes stay
near those of the model that the round began with. Compensation prompts never leave the
client, and evaluation needs none.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.coda import CodaOptions, Components, matches, with_current
from fcljax.models import heads
from fcljax.models.products import exact_einsum
from fcljax.models.vit import Injection
from fcljax.options import option
from fcljax.parts import reports
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, OfEachClient, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Loss, Params, cross_entropy_loss
from fcljax.parts.reports import ClassMoments
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import ClientContext, Method, Task, View

MOMENTS = "moments"
AFFINITY = "affinity"
# least variance of a feature in a class: with a single example it would be 0
LEAST_VARIANCE = 1e-4
INITIAL_STD = 0.02  # standard deviation of a compensation prompt's initial values


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
    """Number of epochs in which a client trains its compensation prompts, once per
    task."""
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
_RUN = RunConfig(lr=1e-2)
PRESETS = with_mini({"intended": Preset(C2PromptOptions(), _RUN, (_CODA,))}, lr=1e-2)


def c2prompt(options: C2PromptOptions, run: Run) -> Method:
    """Compose C2Prompt."""
    client_rules: list[ClientRule] = []
    server_rules: list[ServerRule] = []
    # part of L_ce on images beside their compensation prompt; 1 - share is on plain images
    share = 0.0
    if not options.wo_lcdc:
        share = options.compensation_share
        client_rules.append(compensate(options, run, cross_entropy_loss(weight=share)))
        server_rules.append(global_moments(run))
    client_rules.append(keep_wrong_classes(options.kd_weight, options.kd_temperature))
    if not options.wo_cpa:
        server_rules.append(mix_by_affinity(options, run))
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(weight=1 - share),
        client_rules=tuple(client_rules),
        server_rules=tuple(server_rules),
    )


# ---- the classes' distributions over all clients ---------------------------------------


def global_moments(run: Run) -> ServerRule:
    """Send mu and sigma^2 of the task's classes [Ct] over all clients' examples."""
    classes = run.sizes.task_classes
    width = run.network.width

    def init(_params: Params, _trainable: Params) -> ClassMoments:
        return reports.no_moments(classes, width)

    def init_total(_context: ClientContext) -> ClassMoments:
        return reports.no_moments(classes, width)

    def add(step: ClientStep, total: ClassMoments) -> ClassMoments:
        # the frozen network's features: no adapter changes them, so the moments hold in
        # all rounds of the task
        feature = step.output.query
        batch = step.batch
        assert feature is not None
        task_classes = step.context.task.classes
        moments = reports.moments_of(feature, batch.label, task_classes, batch.mask)
        return jax.tree.map(jnp.add, total, moments)

    def sends(_task: Task, moments: ClassMoments) -> ClassMoments:
        return moments

    def update(
        round: ServerRound,
        params: Params,
        _previous: ClassMoments,
    ) -> ServerUpdate:
        return ServerUpdate(params, round.reports[MOMENTS])

    longest = functools.partial(reports.longest_feature, run)
    possible = functools.partial(reports.possible_moments, longest=longest)
    report = Report(MOMENTS, init_total, add, merge="sum", possible=possible)
    return ServerRule(MOMENTS, update, init, sends, (report,), when="task_start")


# ---- LCDC: local class distribution compensation ---------------------------------------


class Compensation(NamedTuple):
    """A client's compensation prompts."""

    prompt: Float[Array, "Ct length width"]
    """Of each class of a task."""
    task: Int[Array, ""]
    """The task; -1: none yet."""


class Compensating(NamedTuple):
    """A client's compensation prompts in a round."""

    prompt: Float[Array, "Ct length width"]
    optimiser: PyTree
    trains: Bool[Array, ""]
    """Whether this is the client's first round of the task, so that its prompts train."""


def compensate(options: C2PromptOptions, run: Run, loss: Loss) -> ClientRule:
    """Train compensation prompts (LCDC), and add the loss on images beside them.

    The prompts train before the client's first round of a task and are constant
    afterwards.

    Args:
      options: of the method.
      run: for sizes and training.
      loss: of images beside their prompts, times its share.
    """
    shape = (run.sizes.task_classes, options.compensation_length, run.network.width)
    # the run's optimiser gives a direction, and these prompts have their own learning rate
    optimiser = optax.chain(run.training.optimiser, optax.scale(-options.compensation_lr))

    def init(_key: PRNGKeyArray, _trainable: Params) -> Compensation:
        return Compensation(jnp.zeros(shape), jnp.int32(-1))

    def start(
        context: ClientContext,
        state: Compensation,
        _key: PRNGKeyArray,
    ) -> Compensating:
        # the client's first round of the task, which may not be the task's first round
        trains = state.task != context.task.index
        initial = initial_prompts(shape)
        prompt = jnp.where(trains, initial, state.prompt)
        return Compensating(prompt, optimiser.init(initial), trains)

    def step(step: ClientStep, memory: Compensating) -> Compensating:
        def train() -> Compensating:
            gradient = jax.grad(lambda prompt: misfit(step, prompt))(memory.prompt)
            update, state = optimiser.update(gradient, memory.optimiser, memory.prompt)
            return Compensating(optax.tree.add(memory.prompt, update), state, memory.trains)

        # all rounds play the same program, so the pass has no effect in later ones
        return jax.lax.cond(memory.trains, train, lambda: memory)

    def value(step: ClientStep, memory: Compensating) -> Float[Array, ""]:
        output = step.output._replace(logits=compensated_logits(step, memory.prompt))
        return loss.value(output, step.batch, step.context.task)

    def end(
        context: ClientContext,
        memory: Compensating,
        _trainable: Params,
        _state: Compensation,
    ) -> Compensation:
        return Compensation(memory.prompt, jnp.asarray(context.task.index, jnp.int32))

    view = View(options.compensation_epochs, run.training.batch_size)
    compensation_pass = ClientPass("before_training", view, step, trains=True)
    return ClientRule("compensation", value, init, start, (compensation_pass,), end)


def initial_prompts(shape: tuple[int, int, int]) -> Float[Array, "Ct length width"]:
    """Return the initial values of compensation prompts, the same at each client."""
    return INITIAL_STD * jax.random.normal(jax.random.key(0), shape)


def tokens_of(
    step: ClientStep,
    prompt: Float[Array, "Ct length width"],
) -> Float[Array, "batch length D"]:
    """Return the compensation prompt of each example's class."""
    return prompt[class_index(step)]


def class_index(step: ClientStep) -> Int[Array, " batch"]:
    """Return the index of each example's class among those of the task."""
    return jnp.argmax(step.batch.label[:, None] == step.context.task.classes, axis=1)


def misfit(step: ClientStep, prompt: Float[Array, "Ct length width"]) -> Float[Array, ""]:
    """Return L_c, the mean over examples of 1/2 sum_channels (f - mu)^2 / sigma^2.

    f is the frozen network's feature of an image beside its class's prompt.
    """
    network = step.learner.network
    context = step.context
    mask = step.batch.mask
    # without the adapter, since mu and sigma are moments of the frozen network's features
    injection = Injection(tokens=tokens_of(step, prompt))
    features, _ = network.apply(context.frozen.network, step.batch.input, injection, True, mask)
    moments: ClassMoments = context.payload.sent[MOMENTS]
    mean, variance = reports.normal_of(moments)
    index = class_index(step)
    # a channel that is constant in a class would have an infinite weight
    distance = (features.cls - mean[index]) ** 2 / jnp.maximum(variance[index], LEAST_VARIANCE)
    # a class whose clients' uploads were all rejected has no moments
    counts = mask & (moments.examples[index] > 0)
    total = heads.masked_sum(jnp.sum(distance, axis=1) / 2, counts)
    return total / jnp.maximum(jnp.sum(counts), 1)


def compensated_logits(
    step: ClientStep,
    prompt: Float[Array, "Ct length width"],
) -> Float[Array, "batch C"]:
    """Return the model's logits of images beside their classes' prompts."""
    network, adapter, classifier = step.learner[:3]
    cached = step.context.cached
    trainable = step.drawn
    task = step.context.task
    batch = step.batch
    assert adapter.inject is not None
    injection = adapter.inject(cached.adapter, trainable.adapter, step.output.query, task, True, batch.mask)
    injection = injection._replace(tokens=tokens_of(step, prompt))
    frozen = step.context.frozen.network
    features, _ = network.apply(frozen, batch.input, injection, True, batch.mask)
    feature = adapter.feature(features)
    return classifier.logits(cached.classifier, trainable.classifier, feature, task)


# ---- the distillation ------------------------------------------------------------------


def keep_wrong_classes(weight: float, temperature: float) -> ClientRule:
    """Add beta L_kd from a task's second round on: before, no model knows the classes."""

    def loss(step: ClientStep, _memory: tuple) -> Float[Array, ""]:
        context = step.context
        batch = step.batch
        teacher = jax.lax.stop_gradient(step.forward(context.payload.trainable).logits)
        is_not_label = jnp.arange(teacher.shape[1]) != batch.label[:, None]
        wrong = context.task.current & is_not_label
        distance = not_true_distance(step.output.logits, teacher, wrong, temperature)
        total = weight * heads.masked_sum(distance, batch.mask)
        value = total / jnp.maximum(jnp.sum(batch.mask), 1)
        return jnp.where(context.client.round > 0, value, 0.0)

    return ClientRule("distillation", loss)


def not_true_distance(
    student: Float[Array, "batch C"],
    teacher: Float[Array, "batch C"],
    wrong: Bool[Array, "batch C"],
    temperature: float,
) -> Float[Array, " batch"]:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)) over wrong classes."""
    return temperature**2 * heads.kl(teacher / temperature, student / temperature, wrong)


# ---- CPA: class-aware prompt aggregation -----------------------------------------------


def affinity(run: Run) -> Report:
    """Report H: the cosine of each component and query, summed over the examples of each
    class."""

    def init(context: ClientContext) -> Float[Array, "blocks N Ct"]:
        components = run.adapter.counted(context.payload.trainable.adapter, context.task)
        return jnp.zeros((*components.key.shape[:-1], run.sizes.task_classes))

    def add(
        step: ClientStep,
        total: Float[Array, "blocks N Ct"],
    ) -> Float[Array, "blocks N Ct"]:
        task = step.context.task
        batch = step.batch
        query = step.output.query
        assert query is not None
        components: Components = run.adapter.counted(step.trainable.adapter, task)
        member = (batch.label[:, None] == task.classes) & batch.mask[:, None]
        match = matches(components, query)
        return total + exact_einsum("bmn,bc->mnc", match, member.astype(jnp.float32))

    return Report(AFFINITY, init, add, possible=possible_affinity)


def possible_affinity(
    context: ClientContext,
    reported: Float[Array, "blocks N Ct"],
) -> Bool[Array, ""]:
    """Check that these can be sums of cosines, one for each example."""
    # each example adds a cosine to one class, up to rounding
    most = context.client.examples * (1 + 1e-3)
    return jnp.all(jnp.sum(jnp.abs(reported), axis=-1) <= most)


def mix_by_affinity(options: C2PromptOptions, run: Run) -> ServerRule:
    """Mix the components of all clients, P* = W P (CPA), and average over clients."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        def components_of(uploaded: Components) -> Components:
            return run.adapter.counted(uploaded, round.task)

        components = jax.vmap(components_of)(round.reports["adapter"])
        weights = mixing_weights(
            round.reports[AFFINITY], round.weights, round.valid, options.affinity_temperature
        )
        mixed = jax.tree.map(lambda leaf: mixed_by(weights, leaf, round.valid), components)
        adapter: Components = with_current(params.adapter, mixed, round.task, constant=False)
        # without a valid upload W would mix zeros
        any_upload = jnp.any(round.valid)
        pick = functools.partial(jnp.where, any_upload)
        adapter = jax.tree.map(pick, adapter, params.adapter)
        return ServerUpdate(params._replace(adapter=adapter), state)

    return ServerRule("affinity", update, reports=(OfEachClient("adapter"), affinity(run)))


def mixing_weights(
    affinity: Float[Array, "clients blocks N Ct"],
    weight: Float[Array, " clients"],
    valid: Bool[Array, " clients"],
    temperature: float,
) -> Float[Array, "blocks N all_components"]:
    """Return the weights with which the server mixes all clients' components into each of
    its own.

    W = softmax(H H^T / tau); then the rows of W that belong to the same component of
    different clients are averaged by the clients' weights. The rows of H are scaled to
    length 1, as in Powder's release: which classes a component matches counts, and not
    how many examples the client has.

    Args:
      affinity: H of each client.
      weight: the clients' weights in the mean.
      valid: clients whose upload arrived.
      temperature: tau.
    """
    clients, _, count, _ = affinity.shape
    # invalid uploads may be NaN; their columns get no weight below
    affinity = jnp.where(valid[:, None, None, None], affinity, 0.0)
    rows = rearrange(heads.unit(affinity), "k m n c -> m (k n) c")
    logits = exact_einsum("mrc,msc->mrs", rows, rows) / temperature
    w = jax.nn.softmax(heads.mask_logits(logits, jnp.repeat(valid, count)))
    w = rearrange(w, "m (k n) s -> k m n s", k=clients)
    share = jnp.where(valid, weight, 0.0)
    share = share / jnp.maximum(jnp.sum(share), 1e-12)
    return exact_einsum("k,kmns->mns", share, w)


def mixed_by(
    weights: Float[Array, "blocks N all_components"],
    components: Float[Array, "clients blocks N *shape"],
    valid: Bool[Array, " clients"],
) -> Float[Array, "blocks N *shape"]:
    """Return the weighted sums of the valid clients' components."""
    is_valid = valid.reshape(-1, *[1] * (components.ndim - 1))
    components = jnp.where(is_valid, components, 0.0)
    clients, blocks, count = components.shape[:3]
    rows = jnp.moveaxis(components, 0, 1).reshape(blocks, clients * count, -1)
    mixed = exact_einsum("mns,msf->mnf", weights, rows)
    return mixed.reshape(components.shape[1:])
