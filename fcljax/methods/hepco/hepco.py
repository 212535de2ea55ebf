"""HePCo: continual adaptation of vision transformers for federated learning (Halbe et al. 2024, TMLR).

One round of task t:

    clients   exist for one round: train a weighted prompt pool (adapters/pool.py) and a classifier (sec. 4.1)
              send both, with their numbers of examples per class; keep nothing
    server    averages them; then, on the averaged model,                                           (sec. 4.2)
              trains a generator of latents of the task's classes, which the clients' models
              recognise and of which the averaged one thinks otherwise                               (eq. 2-5)
              and one of older classes, under the model that the task began with
              distils prompts                                                                        (eq. 6)
              and the classifier on their latents                                                   (sec. 5.3)

Only `Adapter.prompt` and `Classifier.logits` are needed, both pure in the latent, so any adapter runs; one
without prompts leaves the classifier to be distilled. Where the paper and the authors' code differ, an option
says which one is meant; the presets are the readings.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.claims import possible_counts
from fcljax.methods.hepco.diagnosis import PER_CLASS, compare, real_features
from fcljax.methods.hepco.generator import Generator, GeneratorConfig, generate, init_generator
from fcljax.methods.prompted import CLIENT, PromptedOptions, epoch_schedule
from fcljax.models.heads import cross_entropy, kl, mask_logits
from fcljax.models.products import exact_einsum
from fcljax.options import option
from fcljax.parts.client import ClientEnd, OfEachClient, Report
from fcljax.parts.federate import Run, feature_width, federate, linear_learner
from fcljax.parts.learner import Learner, Params, Reads, cross_entropy_loss
from fcljax.parts.reports import ClassMoments, no_moments, normal_of, start_at_class_means, weights_at_means
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.task_start import Start, began_with, no_start, valid_parameters
from fcljax.settings import Preset
from fcljax.types import ClientContext, LearningRate, Method, Metrics, Task, Weighted

Direction = Literal["server_client", "client_server"]
Weights = Literal["over_total", "per_class", "uniform"]
Phases = Literal["shared", "sequential"]

TEACHERS_AT_A_TIME = 16  # bounds the memory of their prompts where they run at once


@dataclasses.dataclass(frozen=True)
class HepcoOptions(PromptedOptions):
    """Options of HePCo; the values are the release's."""

    kl_weight: float = 1.0
    """Weight lambda_KL of the disagreement of class probabilities."""
    mse_weight: float = 0.1
    """Weight lambda_MSE of the disagreement of prompts."""
    generator_steps: int = 100
    """Number of steps that train the generator of the task's classes."""
    generator_growth: int = option(50, least=0)
    """Number of further steps per earlier task for the generator of older classes."""
    generator_lr: LearningRate = option(1e-4, positive=True, learning_rate=True)
    """Learning rate of both generators."""
    generator_norm: bool = True
    """Use batch normalisation in the generators."""
    noise_width: int = 64
    """Width of the generators' noise."""
    label_width: int = 64
    """Width of the generators' embedding of classes."""
    latent_batch: int = 64
    """Number of latents per step."""
    replay_ratio: float = option(0.5, most=100.0)
    """Ratio of latents of older classes to those of the task's classes in the
    distillation."""
    distill_steps: int = 200
    """Number of distillation steps."""
    distill_lr: LearningRate = option(1e-4, positive=True, learning_rate=True)
    """Learning rate of the distillation."""
    kl_direction: Direction = "server_client"
    """Direction of the divergence: KL(server || client) or KL(client || server)."""
    generator_mse: Literal["sum", "mean", "none"] = "none"
    """Reduction of the prompts' disagreement in the generators' loss; none leaves it out."""
    loss_weights: Weights = "over_total"
    """Weights of the clients' losses for each class."""
    distill_phases: Phases = "shared"
    """Distil prompts and classifier on the same latents (shared), or one after the other."""
    wo_previous: bool = False
    """Ablation: no generator of older classes and no replay."""
    wo_kl: bool = False
    """Ablation: leave out the disagreement of class probabilities."""
    wo_mse: bool = False
    """Ablation: leave out the disagreement of prompts."""
    wo_prompt_distillation: bool = False
    """Ablation: keep the averaged prompts."""
    wo_classifier_distillation: bool = False
    """Ablation: keep the averaged classifier."""
    latents: Literal["generated", "gaussian"] = "generated"
    """Latents for the distillation: from generators (generated), or from a normal
    distribution per class (gaussian), for which clients also send sums of features."""
    headtune: bool = False
    """Start a new task's classes at the normalised mean features of all clients; needs
    --aggregator mean."""
    features: Reads = "prompted"
    """Input of the classifier and of the distillation: features with prompts (prompted),
    or with them also the frozen network's, which never change (both; APER, Zhou et al.
    2023, arXiv 2303.07338). both needs --latents gaussian."""
    diagnose: bool = False
    """Record how generated latents compare with clients' features; clients then also send
    sums of features."""


_IMPROVED = HepcoOptions(latents="gaussian", distill_lr=1e-3, headtune=True, features="both")
PRESETS = {
    "intended": CLIENT["intended"]._replace(options=HepcoOptions()),
    # class means are sums over examples, so clients count by their examples everywhere
    "improved": Preset(_IMPROVED, dataclasses.replace(CLIENT["intended"].run, aggregator="mean")),
    "paper": CLIENT["paper"]._replace(
        options=HepcoOptions("cosine_lag", generator_mse="sum", loss_weights="uniform")
    ),
    "released": CLIENT["released"]._replace(
        options=HepcoOptions("cosine_lag", kl_direction="client_server", distill_phases="sequential")
    ),
}


def hepco(options: HepcoOptions, run: Run) -> Method:
    """HePCo as a method, on any adapter.

    Raises:
      InputError: for an ablation of what the generators do not see anyway, or generators of two features.
    """
    if options.features == "both" and options.latents != "gaussian":
        raise InputError("features: generators make one feature, not both; nearest: --latents gaussian")
    if options.diagnose and options.latents == "gaussian":
        raise InputError("diagnose: it compares generators, and --latents is gaussian; nearest: generated")
    if options.wo_mse and options.generator_mse == "none":
        raise InputError("wo_mse: --generator-mse is none, so that nothing is left out; nearest: --no-wo-mse")
    starting = (start_at_class_means(run, weights_at_means, options.features),) if options.headtune else ()
    return federate(
        run,
        linear_learner(run, features=options.features),
        loss=cross_entropy_loss(),
        server_rules=(latent_distillation(options, run), *starting),
        learning_rate=epoch_schedule(options, run),
    )


# ---- server: latent generation and distillation (section 4.2) ----------------------------------------------


class Past(NamedTuple):
    """What the server keeps of earlier rounds."""

    start: Start
    """The model that the task began with, which is what the task before ended with."""
    examples: Float[Array, " C"]
    """Numbers of examples of each class in all rounds so far."""
    real: ClassMoments | None = None
    """Sums of the clients' features in all rounds so far; None: nothing reads them."""


class Teachers(NamedTuple):
    """J models that a student is compared with."""

    cached: Params
    """The parameters that all of them share."""
    trainable: Params
    """Their own, [J, ...]."""
    weight: Float[Array, "J C"]
    """How much each counts for latents of a class."""


Gaps = Callable[[Array], Float[Array, "J batch"]]  # of latents [batch, width], to each teacher


class Latents(NamedTuple):
    """Drawn latents and the classes that they were drawn for."""

    value: Float[Array, "batch width"]
    label: Int[Array, " batch"]


class Composite(NamedTuple):
    """A batch of the distillation."""

    new: Latents
    """Of the task's classes."""
    old: Latents | None
    """Of older classes; None: without replay."""


def latent_distillation(options: HepcoOptions, run: Run) -> ServerRule:
    """From the averaged model to one that also fits the clients' models on latents of the task's classes, and
    the model before the task on latents of older classes."""
    sizes = run.sizes
    width = feature_width(run, options.features)
    shape = GeneratorConfig(
        sizes.classes, width, options.noise_width, options.label_width, options.generator_norm
    )
    gaussian = options.latents == "gaussian"

    def init(params: Params, trainable: Params) -> Past:
        real = no_moments(run.sizes.classes, width) if options.diagnose or gaussian else None
        return Past(no_start(params, trainable), jnp.zeros(sizes.classes), real)

    def update(round: ServerRound, params: Params, past: Past) -> ServerUpdate:
        task = round.task
        keys = jax.random.split(round.key, 3)
        anybody = jnp.any(round.valid)
        sent = round.reports["class_examples"]
        examples = jnp.where(round.valid[:, None], sent, 0).astype(jnp.float32)
        past = Past(began_with(round, past.start), past.examples + examples.sum(0), past.real)
        clients = _clients(options, round, params, examples)
        previous = _previous(params, past, task)
        study = Study(options, round.learner, params, task)
        steps = jnp.where(anybody, 0 if gaussian else options.generator_steps, 0)
        new = older = Generator((), ())
        found = Weighted(jnp.zeros(()), jnp.zeros(()))
        if past.real is not None:
            past = past._replace(real=jax.tree.map(jnp.add, past.real, round.reports["features"]))
        if not gaussian:
            new, found = train_generator(study, shape, clients, keys[0], steps, _odds(examples.sum(0)))
        if not (gaussian or options.wo_previous):
            more = steps_of_older(options, steps, task.index)
            older, _ = train_generator(study, shape, previous, keys[1], more, _odds(past.examples * task.old))
        draw = functools.partial(draw_latents, options, shape, examples.sum(0), past, task, new, older)
        trainable, losses = distil(study, clients, previous, draw, keys[2], anybody)
        if options.diagnose:
            assert past.real is not None
            made = ("new", new, examples.sum(0)), ("older", older, past.examples * task.old)
            losses |= diagnosis(study, shape, past.real, made, jax.random.fold_in(round.key, 3))
        merged = round.learner.merge(params, task, trainable)
        return ServerUpdate(merged, past, losses | {"generator": found})

    counts = Report("class_examples", finalize=class_examples, possible=possible_examples)
    features = (real_features(run, width),) if options.diagnose or gaussian else ()
    return ServerRule("latent", update, init, reports=(counts, OfEachClient("trainable"), *features))


def class_examples(end: ClientEnd, total: tuple) -> Int[Array, " C"]:
    """The numbers of examples of each class that a client reports."""
    del total
    return end.context.client.class_examples


def possible_examples(context: ClientContext, sent: Int[Array, " C"]) -> Bool[Array, ""]:
    """Whether these numbers of examples of each class can be true; they weigh a client as a teacher."""
    return possible_counts(sent, context.client.examples)


def _clients(
    options: HepcoOptions, round: ServerRound, params: Params, examples: Float[Array, "clients C"]
) -> Teachers:
    """The clients' models as teachers of the task's classes."""
    mean = round.learner.trainable(params, round.task)
    weight = class_weights(examples, round.valid, options.loss_weights)
    return Teachers(params, valid_parameters(round, mean), weight)


def _previous(params: Params, past: Past, task: Task) -> Teachers:
    """The model that the task began with as the one teacher of older classes."""
    trainable = jax.tree.map(lambda leaf: leaf[None], past.start.trainable._replace(extra={}))
    return Teachers(params, trainable, task.old.astype(jnp.float32)[None])


class Study(NamedTuple):
    """What the losses of the server share."""

    options: HepcoOptions
    learner: Learner
    params: Params
    """The averaged model."""
    task: Task

    @property
    def trainable(self) -> Params:
        """The averaged model's trainable parameters."""
        return self.learner.trainable(self.params, self.task)

    def logits(self, cached: Params, trainable: Params, latent: Array) -> Float[Array, "batch C"]:
        """What a model's classifier says of latents: they are features and queries at once."""
        classifier = self.learner.classifier
        return classifier.logits(cached.classifier, trainable.classifier, latent, self.task)

    def teachers_logits(self, teachers: Teachers, latent: Array) -> Float[Array, "J batch C"]:
        """The same of each teacher."""
        return jax.vmap(lambda one: self.logits(teachers.cached, one, latent))(teachers.trainable)

    def prompt(self, cached: Params, trainable: Params, latent: Array) -> Array:
        """A model's prompts for latents."""
        prompt = self.learner.adapter.prompt
        assert prompt is not None
        # the query is the frozen network's feature, which comes first if there are both
        query = latent[..., : self.learner.network.width]
        return prompt(cached.adapter, trainable.adapter, query, self.task)


def class_weights(
    examples: Float[Array, "clients C"], valid: Bool[Array, " clients"], kind: Weights
) -> Float[Array, "clients C"]:
    """How much each client's losses count for latents of each class.

    over_total: its examples of the class over all clients' examples of all classes, plus 1 for each class
      that nobody has (release); per_class: over all clients' examples of the class; uniform: 1 for everybody
      (eq. 2 to 4b).
    """
    total = examples.sum(0)
    if kind == "uniform":
        return jnp.broadcast_to(valid[:, None], examples.shape).astype(jnp.float32)
    if kind == "per_class":
        return examples / jnp.maximum(total, 1)
    return examples / (jnp.sum(total) + jnp.sum(total == 0))


def steps_of_older(options: HepcoOptions, steps: Int[Array, ""], task: Int[Array, ""]) -> Int[Array, ""]:
    """Steps of the generator of older classes in task number `task`, from 0: more in every task, and none in
    the first or where nobody takes part (`steps` is 0)."""
    return jnp.where((steps > 0) & (task > 0), steps + options.generator_growth * task, 0)


def _odds(examples: Float[Array, " C"]) -> Float[Array, " C"]:
    """Log-probabilities of classes, up to a constant: classes are drawn as often as they occur."""
    return jnp.where(examples > 0, jnp.log(jnp.maximum(examples, 1e-12)), -jnp.inf)


# ---- generation --------------------------------------------------------------------------------------------


def generator_loss(
    study: Study,
    teachers: Teachers,
    gaps: Gaps,
    latent: Float[Array, "batch width"],
    label: Int[Array, " batch"],
) -> Float[Array, ""]:
    """L_cls - lambda_KL L_KL - lambda_MSE L_MSE (eq. 5): latents that the teachers recognise, and of which
    the averaged model thinks otherwise. `gaps` are those of its prompts and the teachers'."""
    options = study.options
    task = study.task
    trainable = study.trainable
    weight = teachers.weight[:, label]
    theirs = study.teachers_logits(teachers, latent)
    own = study.logits(study.params, trainable, latent)
    known = mask_logits(theirs, task.seen)
    right = optax.softmax_cross_entropy_with_integer_labels(known, jnp.broadcast_to(label, weight.shape))
    loss = jnp.sum(weight * right)
    if not options.wo_kl:
        apart = divergence(theirs, own, task.seen, options.kl_direction)
        loss = loss - options.kl_weight * jnp.sum(weight * apart)
    # the release takes the query out of the gradient in its prompt module, so that L_MSE has none here
    if study.learner.adapter.prompt and options.generator_mse != "none" and not options.wo_mse:
        gap = jnp.sum(weight * gaps(latent))
        count = prompt_size(study, trainable, latent)
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


def prompt_size(study: Study, trainable: Params, latent: Array) -> int:
    """How many parameters a latent's prompts have, in all blocks together."""
    shape = jax.eval_shape(lambda: study.prompt(study.params, trainable, latent)).shape
    return math.prod(shape[1:])


def prompt_gaps(study: Study, teachers: Teachers) -> Gaps:
    """`prompt_gap` of the averaged model and teachers that stay as they are, for many latents.

    Prompts that are sums w P of a basis P with weights w are compared without being made: w_s P_s - w_j P_j
    is (w_s - w_j) P_j + w_s (P_s - P_j), whose square needs no more than the products of these bases.
    """
    params = study.params
    own = study.trainable
    mixture = study.learner.adapter.mixture
    if mixture is None:
        return functools.partial(prompt_gap, study, own, teachers)
    nowhere = jnp.ones((1, study.learner.network.width))  # a basis does not depend on the latent

    def mixed(trainable: Params, latent: Array):
        return mixture(params.adapter, trainable.adapter, latent, study.task)

    def products(theirs: Params) -> Float[Array, "groups both both"]:
        basis = mixed(theirs, nowhere).basis
        own_basis = mixed(own, nowhere).basis
        both = jnp.concatenate([basis, own_basis - basis], axis=1)
        return exact_einsum("gmn,gkn->gmk", both, both)

    square = jax.lax.map(products, teachers.trainable)

    def gap(latent: Float[Array, "batch width"]) -> Float[Array, "J batch"]:
        weight_own = mixed(own, latent).weight

        def one(theirs: Params, square: Float[Array, "groups both both"]) -> Float[Array, " batch"]:
            weight = jnp.concatenate([weight_own - mixed(theirs, latent).weight, weight_own], axis=-1)
            return exact_einsum("bgm,gmk,bgk->b", weight, square, weight)

        return jax.vmap(one)(teachers.trainable, square)

    return gap


def prompt_gap(
    study: Study, trainable: Params, teachers: Teachers, latent: Float[Array, "batch width"]
) -> Float[Array, "J batch"]:
    """||rho_s(z) - rho_j(z)||^2, summed over blocks, tokens and channels (eq. 4b).

    Accelerators take some teachers at once, a CPU one after the other, which spares it batched products. What
    many teachers leave for the gradient is computed again.
    """
    own = study.prompt(study.params, trainable, latent)

    def gap(theirs: Params) -> Float[Array, " batch"]:
        square = (own - study.prompt(teachers.cached, theirs, latent)) ** 2
        return jnp.sum(square, axis=tuple(range(1, square.ndim)))

    each = jax.checkpoint(gap) if len(teachers.weight) > TEACHERS_AT_A_TIME else gap
    return jax.lax.platform_dependent(
        teachers.trainable,
        cpu=functools.partial(jax.lax.map, each),
        default=functools.partial(jax.lax.map, each, batch_size=TEACHERS_AT_A_TIME),
    )


def train_generator(
    study: Study,
    shape: GeneratorConfig,
    teachers: Teachers,
    key: PRNGKeyArray,
    steps: Int[Array, ""],
    odds: Float[Array, " C"],
) -> tuple[Generator, Weighted]:
    """A new generator after so many steps of Adam on its loss under these teachers, and the mean loss."""
    options = study.options
    gaps = prompt_gaps(study, teachers)
    adam = optax.adam(options.generator_lr)
    generator = init_generator(shape, jax.random.fold_in(key, 0))

    def step(i: Array, carry: tuple) -> tuple:
        generator, optimiser, total = carry
        noise, label = _conditions(jax.random.fold_in(key, i + 1), options.latent_batch, shape, odds)

        def loss(params):
            latent, moved = generate(shape, generator._replace(params=params), noise, label, True)
            return generator_loss(study, teachers, gaps, latent, label), moved

        (value, moved), gradient = jax.value_and_grad(loss, has_aux=True)(generator.params)
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


def diagnosis(
    study: Study,
    shape: GeneratorConfig,
    real: ClassMoments,
    made: tuple[tuple[str, Generator, Float[Array, " C"]], ...],
    key: PRNGKeyArray,
) -> Metrics:
    """`diagnosis.compare` for each generator, by name, with the examples of the classes that it makes; one
    that was left out says nothing."""
    found: Metrics = {}
    label = jnp.repeat(jnp.arange(shape.classes), PER_CLASS)
    for i, (name, generator, examples) in enumerate(made):
        if not generator.params:
            continue
        noise = jax.random.normal(jax.random.fold_in(key, i), (len(label), shape.noise))
        latent = generate(shape, generator, noise, label, False)[0]
        logits = study.logits(study.params, study.trainable, latent)
        says = compare(latent, label, examples > 0, logits, study.task.seen, real)
        found |= {f"{name}_{what}": value for what, value in says.items()}
    return found


# ---- distillation ------------------------------------------------------------------------------------------


def draw_latents(
    options: HepcoOptions,
    shape: GeneratorConfig,
    examples: Float[Array, " C"],
    past: Past,
    task: Task,
    new: Generator,
    older: Generator,
    key: PRNGKeyArray,
) -> Composite:
    """A composite batch: latents of the task's classes, and floor(ratio * batch) of older ones."""

    count = options.latent_batch
    replay = 0 if options.wo_previous else int(count * options.replay_ratio)

    def drawn(generator: Generator, key: PRNGKeyArray, number: int, examples: Float[Array, " C"]) -> Latents:
        if options.latents == "gaussian":
            assert past.real is not None
            return normal_latents(past.real, key, number, _odds(examples))
        # the first of as many as are drawn of either kind: one size is compiled, not two
        noise, label = _conditions(key, max(count, replay), shape, _odds(examples))
        noise = noise[:number]
        label = label[:number]
        return Latents(generate(shape, generator, noise, label, False)[0], label)

    keys = jax.random.split(key)
    old = drawn(older, keys[1], replay, past.examples * task.old) if replay else None
    return Composite(drawn(new, keys[0], count, examples), old)


def normal_latents(real: ClassMoments, key: PRNGKeyArray, count: int, odds: Float[Array, " C"]) -> Latents:
    """Draws of normal distributions with the classes' means and variances."""
    first, second = jax.random.split(key)
    label = jax.random.categorical(second, odds, shape=(count,))
    mean, variance = normal_of(real)
    noise = jax.random.normal(first, (count, mean.shape[1]))
    return Latents(mean[label] + jnp.sqrt(variance[label]) * noise, label)


def distil(
    study: Study,
    clients: Teachers,
    previous: Teachers,
    draw: Callable[[PRNGKeyArray], Composite],
    key: PRNGKeyArray,
    anybody: Bool[Array, ""],
) -> tuple[Params, dict[str, Weighted]]:
    """The averaged model's trainable parameters after distilling prompts (eq. 6) and classifier (section
    5.3)."""
    options = study.options
    losses = dict[str, Callable]()
    if study.learner.adapter.prompt and not options.wo_prompt_distillation:
        losses["adapter"] = functools.partial(prompt_loss, study, clients, previous)
    if not options.wo_classifier_distillation:
        losses["classifier"] = functools.partial(label_loss, study, previous)
    together = [losses] if options.distill_phases == "shared" else [{name: losses[name]} for name in losses]
    trainable = study.trainable
    found = {}
    steps = jnp.where(anybody, options.distill_steps, 0)
    for i, each in enumerate(together):
        own = jax.random.fold_in(key, i)
        trainable, totals = _descend(each, optax.adam(options.distill_lr), trainable, draw, own, steps)
        found |= {name: Weighted(total, steps.astype(jnp.float32)) for name, total in totals.items()}
    return trainable, found


def _descend(
    losses: dict[str, Callable],
    adam: optax.GradientTransformation,
    trainable: Params,
    draw: Callable,
    key: PRNGKeyArray,
    steps: Int[Array, ""],
) -> tuple[Params, dict[str, Array]]:
    """So many steps of each loss on the part that it is named by, and the sums of the losses.

    The losses of a step share its latents, and each sees what the one before it has changed.
    """

    def step(i: Array, carry: tuple) -> tuple:
        trainable, optimisers, totals = carry
        latents = draw(jax.random.fold_in(key, i))
        for name, loss in losses.items():
            loss_of = functools.partial(_loss_of_part, name, loss, trainable, latents)
            value, gradient = jax.value_and_grad(loss_of)(getattr(trainable, name))
            update, optimiser = adam.update(gradient, optimisers[name])
            part = optax.apply_updates(getattr(trainable, name), update)
            trainable = trainable._replace(**{name: part})
            optimisers = optimisers | {name: optimiser}
            totals = totals | {name: totals[name] + value}
        return trainable, optimisers, totals

    optimisers = {name: adam.init(getattr(trainable, name)) for name in losses}
    start = (trainable, optimisers, dict.fromkeys(losses, jnp.zeros(())))
    trainable, _, totals = jax.lax.fori_loop(0, steps, step, start)
    return trainable, totals


def _loss_of_part(name: str, loss: Callable, trainable: Params, latents: Composite, part) -> Array:
    return loss(trainable._replace(**{name: part}), latents)


def prompt_loss(
    study: Study, clients: Teachers, previous: Teachers, trainable: Params, batch: Composite
) -> Float[Array, ""]:
    """eq. 6: the prompts of new latents go to the clients', those of older ones to the previous model's."""

    def pull(teachers: Teachers, latents: Latents) -> Float[Array, ""]:
        gap = prompt_gap(study, trainable, teachers, latents.value)
        return jnp.sum(teachers.weight[:, latents.label] * gap)

    loss = pull(clients, batch.new)
    return loss if batch.old is None else loss + pull(previous, batch.old)


def label_loss(study: Study, previous: Teachers, trainable: Params, batch: Composite) -> Float[Array, ""]:
    """Section 5.3: mean cross-entropy of the classes that latents were drawn for, among all seen so far."""
    both = [batch.new] if batch.old is None else [batch.new, batch.old]
    value, label = (jnp.concatenate(each) for each in zip(*both, strict=True))
    # latents drawn before there is a previous model do not count
    used = (jnp.arange(len(label)) < len(batch.new.label)) | (previous.weight[0, label] > 0)
    logits = study.logits(study.params, trainable, value)
    return cross_entropy(logits, label, study.task.seen, used)
