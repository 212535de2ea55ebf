"""HePCo: continual adaptation of vision transformers for federated learning (Halbe et al. 2024, TMLR).

Clients exist for one round: they train a weighted pool of prompts (`adapters/pool.py`) and a classifier, and
keep nothing. The server averages them; then it trains two generators of latents, one for the classes of the
task under the clients' models, one for older classes under the model that the last task ended with, on what
the averaged model gets wrong; and it distils prompts and classifier of the averaged model on their latents.
Only `Adapter.prompt` and `Classifier.logits` are needed, both pure in the latent, so any adapter runs; one
without prompts leaves the classifier to be distilled. Where paper and release differ, a field of
`HepcoOptions` says which one is meant.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.full import FullOptions
from fcljax.errors import InputError
from fcljax.methods.hepco.generator import Generator, GeneratorConfig, generate, init_generator
from fcljax.models.heads import cross_entropy, kl, mask_logits
from fcljax.options import option
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import Collect, Run, ServerStep, federate
from fcljax.parts.learner import Learner, Model, learner
from fcljax.parts.task_start import Start, began_with, no_start, sound_parts
from fcljax.settings import Preset, RunConfig, changed
from fcljax.types import Aggregate, Method, RoundContext, Task, Weighted

Schedule = Literal["cosine", "cosine_lag", "constant"]
Direction = Literal["server_client", "client_server"]
Weights = Literal["over_total", "per_class", "uniform"]
Phases = Literal["shared", "sequential"]

TEACHERS_AT_A_TIME = 16  # bounds the memory of their prompts where they run at once


@dataclasses.dataclass(frozen=True)
class PromptedOptions:
    """Options that HePCo's clients share with those of its baselines."""

    epoch_schedule: Schedule = "cosine"
    """Learning-rate schedule over the epochs of a round; cosine_lag is one epoch late."""


@dataclasses.dataclass(frozen=True)
class HepcoOptions(PromptedOptions):
    """Options of HePCo; the values are the release's."""

    kl_weight: float = 1.0
    """Weight lambda_KL of the disagreement of class probabilities."""
    mse_weight: float = 0.1
    """Weight lambda_MSE of the disagreement of prompts."""
    generator_steps: int = 100
    """Steps of the generator of the task's classes."""
    generator_growth: int = option(50, least=0)
    """Further steps per earlier task of the generator of older classes."""
    generator_lr: float = option(1e-4, positive=True)
    """Learning rate of both generators."""
    generator_norm: bool = True
    """Batch normalisation in the generators."""
    noise_width: int = 64
    """Width of the generators' noise."""
    label_width: int = 64
    """Width of the generators' embedding of classes."""
    latent_batch: int = 64
    """Latents per step."""
    replay_ratio: float = 0.5
    """Latents of older classes over those of the task's classes in the distillation."""
    distill_steps: int = 200
    """Steps of the distillation."""
    distill_lr: float = option(1e-4, positive=True)
    """Learning rate of the distillation."""
    kl_direction: Direction = "server_client"
    """Direction of the divergence: KL(server || client) or KL(client || server)."""
    generator_mse: Literal["sum", "mean", "none"] = "none"
    """Reduction of the prompts' disagreement in the generators' loss; none leaves it out."""
    loss_weights: Weights = "over_total"
    """How much each client's losses count for a class."""
    distill_phases: Phases = "shared"
    """Whether prompts and classifier are distilled on the same latents, or one after the other."""
    wo_previous: bool = False
    """Ablation: no generator of older classes, no replay."""
    wo_kl: bool = False
    """Ablation: no disagreement of class probabilities."""
    wo_mse: bool = False
    """Ablation: no disagreement of prompts."""
    wo_prompt_distillation: bool = False
    """Ablation: prompts stay averaged."""
    wo_classifier_distillation: bool = False
    """Ablation: the classifier stays averaged."""


# clients that exist for one round, and are averaged whatever they have
_RUN = RunConfig(partition="sampled", aggregator="uniform")
_RELEASED = dataclasses.replace(_RUN, preprocess="hepco", class_order="python", long_tail="reported")
CLIENT = {
    "intended": Preset(PromptedOptions(), _RUN),
    "paper": Preset(PromptedOptions("cosine_lag"), _RUN),
    "released": Preset(PromptedOptions("cosine_lag"), _RELEASED),
}
# baselines that train the whole network (section 5)
WHOLE = changed(CLIENT, adapters=(FullOptions(full_lr=5e-5),), lr=5e-5)
PRESETS = {
    "intended": Preset(HepcoOptions(), _RUN),
    "paper": Preset(HepcoOptions("cosine_lag", generator_mse="sum", loss_weights="uniform"), _RUN),
    "released": Preset(
        HepcoOptions("cosine_lag", kl_direction="client_server", distill_phases="sequential"), _RELEASED
    ),
}


def hepco(options: HepcoOptions, run: Run) -> Method:
    """HePCo as a method, on any adapter. `options` must be resolved.

    Raises:
      InputError: for an ablation of what the generators do not see anyway.
    """
    if options.wo_mse and options.generator_mse == "none":
        raise InputError("wo_mse: --generator-mse is none, so that nothing is left out; nearest: --no-wo-mse")
    model = learner(run.network, run.adapter, linear_on(run.adapter, run.network.width, run.sizes.classes))
    steps, train = (latent_distillation(options, run),), scheduled(run, options).train
    return federate(model, run.sizes, train, run.terms, steps, aggregation=run.aggregation)


# ---- client: cross-entropy over the task's classes (section 4.1) -------------------------------------------


def scheduled(run: Run, options: PromptedOptions) -> Run:
    """The kit with the clients' learning rate falling over the epochs of every round."""
    schedule, epochs = options.epoch_schedule, run.train.epochs
    factor = lambda round_, rounds, epoch: epoch_factor(schedule, epoch, epochs)
    return run._replace(train=run.train._replace(factor=factor))


def epoch_factor(schedule: Schedule, epoch: ArrayLike, epochs: int) -> Float[Array, ""]:
    """The factor on the learning rate in epoch e of E: cos(99 pi e / (200 (E - 1))), from 1 to 0.0157, or
    that of the epoch before ("cosine_lag": the release moves one epoch late)."""
    if schedule == "constant":
        return jnp.ones(())
    position = jnp.maximum(epoch - 1, 0) if schedule == "cosine_lag" else epoch
    return jnp.asarray(jnp.cos(99 * jnp.pi * position / (200 * max(epochs - 1, 1))), jnp.float32)


# ---- server: latent generation and distillation (section 4.2) ----------------------------------------------


class Past(NamedTuple):
    """The model that the task began with, which is what the last one ended with, and how many rows of each
    class there were in all rounds so far."""

    start: Start
    rows: Float[Array, " C"]


class Teachers(NamedTuple):
    """Models J that a student is compared with: the parameters that all of them hold, their parts [J, ...],
    and how much each counts for latents of a class."""

    cached: Model
    parts: Model
    weight: Float[Array, "J C"]


Gaps = Callable[[Array], Float[Array, "J batch"]]  # of latents [batch, width], to each teacher


class Latents(NamedTuple):
    """Drawn latents and the classes that they were drawn for."""

    value: Float[Array, "batch width"]
    label: Int[Array, " batch"]


class Composite(NamedTuple):
    """A batch of the distillation: latents of the task's classes, and of older ones if they are replayed."""

    new: Latents
    old: Latents | None


def latent_distillation(options: HepcoOptions, run: Run) -> ServerStep:
    """The server step: from the averaged model to one that also fits the clients' models on latents of the
    task's classes, and the previous model on latents of older classes."""
    sizes, width = run.sizes, run.network.width
    shape = GeneratorConfig(
        sizes.classes, width, options.noise_width, options.label_width, options.generator_norm
    )

    def init(params: Model, part: Model) -> Past:
        return Past(no_start(params, part), jnp.zeros(sizes.classes))

    def step(
        round_context: RoundContext,
        learner: Learner,
        params: Model,
        past: Past,
        aggregate: Aggregate,
        key: Array,
    ):
        task, keys = round_context.task, jax.random.split(key, 3)
        rows = jnp.where(aggregate.valid[:, None], aggregate.gather["class_rows"], 0).astype(jnp.float32)
        weight = class_weights(rows, aggregate.valid, options.loss_weights)
        clients = Teachers(params, sound_parts(learner.part(params, task), aggregate), weight)
        past = Past(began_with(round_context, past.start), past.rows + rows.sum(0))
        previous = _previous(params, past, task)
        loss = lambda teachers: functools.partial(
            generator_loss, learner, options, params, task, teachers, gaps(learner, params, task, teachers)
        )
        train = functools.partial(train_generator, options, shape)
        steps = jnp.where(jnp.any(aggregate.valid), options.generator_steps, 0)
        new, found = train(keys[0], steps, _odds(rows.sum(0)), loss(clients))
        older = Generator((), ())
        if not options.wo_previous:
            more = jnp.where((steps > 0) & (task.index > 0), steps + options.generator_growth * task.index, 0)
            older, _ = train(keys[1], more, _odds(past.rows * task.old), loss(previous))
        draw = functools.partial(draw_latents, options, shape, rows.sum(0), past, task, new, older)
        part, losses = distil(options, learner, params, task, clients, previous, draw, keys[2], steps > 0)
        return learner.put(params, task, part), past, losses | {"generator": found}

    counts = Collect(
        "class_rows", lambda context: context.client.class_examples, lambda learner, seen, total: total
    )
    return ServerStep("latent", step, init, collects=(counts,), sees_parts=True, changes=True)


def _previous(params: Model, past: Past, task: Task) -> Teachers:
    """The model that the task began with as the one teacher of older classes."""
    part = jax.tree.map(lambda leaf: leaf[None], past.start.part._replace(extra={}))
    return Teachers(params, part, task.old.astype(jnp.float32)[None])


def class_weights(
    rows: Float[Array, "clients C"], valid: Bool[Array, " clients"], kind: Weights
) -> Float[Array, "clients C"]:
    """How much each client's losses count for latents of each class.

    over_total: its rows of the class over all clients' rows of all classes, plus 1 for each class that nobody
      has (release); per_class: over all clients' rows of the class; uniform: 1 for everybody (eq. 2 to 4b).
    """
    total = rows.sum(0)
    if kind == "uniform":
        return jnp.broadcast_to(valid[:, None], rows.shape).astype(jnp.float32)
    if kind == "per_class":
        return rows / jnp.maximum(total, 1)
    return rows / (jnp.sum(total) + jnp.sum(total == 0))


def _odds(rows: Float[Array, " C"]) -> Float[Array, " C"]:
    """Logarithms of the probabilities of classes, up to a constant: they are drawn as often as they occur."""
    return jnp.where(rows > 0, jnp.log(jnp.maximum(rows, 1e-12)), -jnp.inf)


# ---- generation --------------------------------------------------------------------------------------------


def generator_loss(
    learner: Learner,
    options: HepcoOptions,
    params: Model,
    task: Task,
    teachers: Teachers,
    gaps: Gaps,
    latent: Float[Array, "batch width"],
    label: Int[Array, " batch"],
) -> Float[Array, ""]:
    """L_cls - lambda_KL L_KL - lambda_MSE L_MSE (eq. 5): latents that the teachers recognise, and of which
    the averaged model `params` thinks otherwise. `gaps` are those of its prompts and the teachers'."""
    weight, student = teachers.weight[:, label], learner.part(params, task)
    theirs, own = _logits(learner, teachers, task, latent), _one(learner, params, student, task, latent)
    known = mask_logits(theirs, task.seen)
    right = optax.softmax_cross_entropy_with_integer_labels(known, jnp.broadcast_to(label, weight.shape))
    loss = jnp.sum(weight * right)
    if not options.wo_kl:
        apart = divergence(theirs, own, task.seen, options.kl_direction)
        loss = loss - options.kl_weight * jnp.sum(weight * apart)
    # the release takes the query out of the gradient in its prompt module, so that L_MSE has none here
    if learner.adapter.prompt and options.generator_mse != "none" and not options.wo_mse:
        gap = jnp.sum(weight * gaps(latent))
        count = prompt_numbers(learner, params, student, task, latent)
        loss = loss - options.mse_weight * (gap / count if options.generator_mse == "mean" else gap)
    return loss


def divergence(
    client: Float[Array, "J batch C"],
    server: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
    direction: Direction,
) -> Float[Array, "J batch"]:
    """KL(server || client) (eq. 4a) or KL(client || server) (release), over the seen classes."""
    return kl(server, client, seen) if direction == "server_client" else kl(client, server, seen)


def prompt_numbers(learner: Learner, cached: Model, part: Model, task: Task, latent: Array) -> int:
    """How many numbers a latent's prompts have, in all blocks together."""
    prompt = learner.adapter.prompt
    assert prompt is not None
    shape = jax.eval_shape(lambda: prompt(cached.adapter, part.adapter, latent, task)).shape
    return math.prod(shape[1:])


def _one(learner: Learner, cached: Model, part: Model, task: Task, latent: Array) -> Float[Array, "batch C"]:
    return learner.classifier.logits(cached.classifier, part.classifier, latent, task)


def _logits(learner: Learner, teachers: Teachers, task: Task, latent: Array) -> Float[Array, "J batch C"]:
    """What each teacher's classifier says of latents: they are features and queries at once."""
    return jax.vmap(lambda part: _one(learner, teachers.cached, part, task, latent))(teachers.parts)


def gaps(learner: Learner, params: Model, task: Task, teachers: Teachers) -> Gaps:
    """`prompt_gap` of the averaged model and teachers that stay as they are, for many latents.

    Prompts that are sums w P of a basis P with weights w are compared without being made: w_s P_s - w_j P_j
    is (w_s - w_j) P_j + w_s (P_s - P_j), whose square needs no more than the products of these bases.
    """
    part, mixture = learner.part(params, task), learner.adapter.mixture
    if mixture is None:
        return functools.partial(prompt_gap, learner, params, part, task, teachers)
    of = lambda part, latent: mixture(params.adapter, part.adapter, latent, task)
    nowhere = jnp.ones((1, learner.network.width))  # a basis does not depend on the latent
    basis = lambda part: of(part, nowhere).basis

    def products(theirs: Model) -> Float[Array, "groups both both"]:
        both = jnp.concatenate([basis(theirs), basis(part) - basis(theirs)], axis=1)
        return jnp.einsum("gmn,gkn->gmk", both, both)

    square = jax.lax.map(products, teachers.parts)

    def gap(latent: Float[Array, "batch width"]) -> Float[Array, "J batch"]:
        own = of(part, latent).weight

        def one(theirs: Model, square: Float[Array, "groups both both"]) -> Float[Array, " batch"]:
            weight = jnp.concatenate([own - of(theirs, latent).weight, own], axis=-1)
            return jnp.einsum("bgm,gmk,bgk->b", weight, square, weight)

        return jax.vmap(one)(teachers.parts, square)

    return gap


def prompt_gap(
    learner: Learner,
    cached: Model,
    part: Model,
    task: Task,
    teachers: Teachers,
    latent: Float[Array, "batch width"],
) -> Float[Array, "J batch"]:
    """||rho_s(z) - rho_j(z)||^2, summed over blocks, tokens and channels (eq. 4b).

    Accelerators take some teachers at once, a CPU one after the other, which spares it batched products. What
    many teachers leave for the gradient is computed again.
    """
    prompt = learner.adapter.prompt
    assert prompt is not None
    of = lambda cached, part: prompt(cached.adapter, part.adapter, latent, task)
    own = of(cached, part)

    def gap(theirs: Model) -> Float[Array, " batch"]:
        square = (own - of(teachers.cached, theirs)) ** 2
        return jnp.sum(square, axis=tuple(range(1, square.ndim)))

    each = jax.checkpoint(gap) if len(teachers.weight) > TEACHERS_AT_A_TIME else gap
    return jax.lax.platform_dependent(
        teachers.parts,
        cpu=functools.partial(jax.lax.map, each),
        default=functools.partial(jax.lax.map, each, batch_size=TEACHERS_AT_A_TIME),
    )


def train_generator(
    options: HepcoOptions,
    shape: GeneratorConfig,
    key: PRNGKeyArray,
    steps: Int[Array, ""],
    odds: Float[Array, " C"],
    loss: Callable[[Array, Array], Array],
) -> tuple[Generator, Weighted]:
    """A new generator after so many steps of Adam on loss(latents, labels), and its mean loss."""
    adam, first = optax.adam(options.generator_lr), jax.random.fold_in(key, 0)
    generator = init_generator(shape, first)

    def step(i: Array, carry: tuple) -> tuple:
        generator, optimiser, total = carry
        noise, label = _conditions(jax.random.fold_in(key, i + 1), options.latent_batch, shape, odds)

        def loss_of(params):
            latent, moved = generate(shape, generator._replace(params=params), noise, label, True)
            return loss(latent, label), moved

        (value, moved), gradient = jax.value_and_grad(loss_of, has_aux=True)(generator.params)
        update, optimiser = adam.update(gradient, optimiser)
        return moved._replace(params=optax.apply_updates(generator.params, update)), optimiser, total + value

    start = (generator, adam.init(generator.params), jnp.zeros(()))
    generator, _, total = jax.lax.fori_loop(0, steps, step, start)
    return generator, Weighted(total, steps.astype(jnp.float32))


def _conditions(
    key: PRNGKeyArray, count: int, shape: GeneratorConfig, odds: Float[Array, " C"]
) -> tuple[Float[Array, "count noise"], Int[Array, " count"]]:
    """Noise and classes of so many latents."""
    first, second = jax.random.split(key)
    noise = jax.random.normal(first, (count, shape.noise))
    return noise, jax.random.categorical(second, odds, shape=(count,))


# ---- distillation ------------------------------------------------------------------------------------------


def draw_latents(
    options: HepcoOptions,
    shape: GeneratorConfig,
    rows: Float[Array, " C"],
    past: Past,
    task: Task,
    new: Generator,
    older: Generator,
    key: PRNGKeyArray,
) -> Composite:
    """A composite batch: latents of the task's classes, and floor(ratio * batch) of older ones."""

    def drawn(generator: Generator, key: PRNGKeyArray, count: int, rows: Float[Array, " C"]) -> Latents:
        noise, label = _conditions(key, count, shape, _odds(rows))
        return Latents(generate(shape, generator, noise, label, False)[0], label)

    keys, count = jax.random.split(key), options.latent_batch
    replay = 0 if options.wo_previous else int(count * options.replay_ratio)
    old = drawn(older, keys[1], replay, past.rows * task.old) if replay else None
    return Composite(drawn(new, keys[0], count, rows), old)


def distil(
    options: HepcoOptions,
    learner: Learner,
    params: Model,
    task: Task,
    clients: Teachers,
    previous: Teachers,
    draw: Callable[[PRNGKeyArray], Composite],
    key: PRNGKeyArray,
    alive: Bool[Array, ""],
) -> tuple[Model, dict[str, Weighted]]:
    """The averaged model's part after distilling prompts (eq. 6) and classifier (section 5.3)."""
    losses: dict[str, Callable] = {}
    if learner.adapter.prompt and not options.wo_prompt_distillation:
        losses["adapter"] = functools.partial(prompt_loss, learner, params, task, clients, previous)
    if not options.wo_classifier_distillation:
        losses["classifier"] = functools.partial(label_loss, learner, params, task, previous)
    together = [losses] if options.distill_phases == "shared" else [{name: losses[name]} for name in losses]
    part, found = learner.part(params, task), {}
    steps = jnp.where(alive, options.distill_steps, 0)
    for i, each in enumerate(together):
        own = jax.random.fold_in(key, i)
        part, totals = _descend(each, optax.adam(options.distill_lr), part, draw, own, steps)
        found |= {name: Weighted(total, steps.astype(jnp.float32)) for name, total in totals.items()}
    return part, found


def _descend(
    losses: dict[str, Callable],
    adam: optax.GradientTransformation,
    part: Model,
    draw: Callable,
    key: PRNGKeyArray,
    steps: Int[Array, ""],
) -> tuple[Model, dict[str, Array]]:
    """So many steps of each loss on the piece of the part that it is named by, and the sums of the losses."""

    def step(i: Array, carry: tuple) -> tuple:
        part, optimisers, totals = carry
        latents = draw(jax.random.fold_in(key, i))
        for name, loss in losses.items():
            of = lambda piece, name=name, loss=loss, part=part: loss(part._replace(**{name: piece}), latents)
            value, gradient = jax.value_and_grad(of)(getattr(part, name))
            update, optimiser = adam.update(gradient, optimisers[name])
            part = part._replace(**{name: optax.apply_updates(getattr(part, name), update)})
            optimisers, totals = optimisers | {name: optimiser}, totals | {name: totals[name] + value}
        return part, optimisers, totals

    optimisers = {name: adam.init(getattr(part, name)) for name in losses}
    start = (part, optimisers, dict.fromkeys(losses, jnp.zeros(())))
    part, _, totals = jax.lax.fori_loop(0, steps, step, start)
    return part, totals


def prompt_loss(
    learner: Learner,
    params: Model,
    task: Task,
    clients: Teachers,
    previous: Teachers,
    part: Model,
    batch: Composite,
) -> Float[Array, ""]:
    """eq. 6: the prompts of new latents go to the clients', those of older ones to the previous model's."""

    def pull(teachers: Teachers, latents: Latents) -> Float[Array, ""]:
        gap = prompt_gap(learner, params, part, task, teachers, latents.value)
        return jnp.sum(teachers.weight[:, latents.label] * gap)

    loss = pull(clients, batch.new)
    return loss if batch.old is None else loss + pull(previous, batch.old)


def label_loss(
    learner: Learner, params: Model, task: Task, previous: Teachers, part: Model, batch: Composite
) -> Float[Array, ""]:
    """Section 5.3: mean cross-entropy of the classes that latents were drawn for, among all seen so far."""
    both = [batch.new] if batch.old is None else [batch.new, batch.old]
    value, label = (jnp.concatenate(each) for each in zip(*both, strict=True))
    # what was drawn before there is a previous model is nothing
    used = (jnp.arange(len(label)) < len(batch.new.label)) | (previous.weight[0, label] > 0)
    return cross_entropy(_one(learner, params, part, task, value), label, task.seen, used)
