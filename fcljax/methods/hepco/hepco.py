"""HePCo: continual adaptation of vision transformers for federated learning (Halbe et al.
2024, TMLR).

One round of task t:

    clients   exist for one round: train a weighted prompt pool (adapters/pool.py) and a
              classifier (sec. 4.1)
              send both, with their numbers of examples per class; keep nothing
    server    averages them; then, on the averaged model,                     (sec. 4.2)
              trains a generator of latents of the task's classes, which the
              clients' models recognise and on which the averaged one disagrees (eq. 2-5)
              and one of older classes, under the model that the task began with
              distils prompts                                                   (eq. 6)
              and the classifier on their latents                             (sec. 5.3)

The server step needs only `Adapter.prompt` and `Classifier.logits`, both pure functions of
the latent, so HePCo runs on any adapter; on one without prompts only the classifier is
distilled. Where the paper and the authors' code differ, an option says which one is meant;
the presets are the readings.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.claims import possible_counts
from fcljax.methods import prompted
from fcljax.methods.hepco import diagnosis as diagnostics
from fcljax.methods.hepco.generator import Generator, GeneratorConfig, generate, init_generator
from fcljax.models import heads
from fcljax.models.products import exact_einsum
from fcljax.options import option
from fcljax.parts import reports, task_start
from fcljax.parts.client import ClientEnd, OfEachClient, Report
from fcljax.parts.federate import Run, feature_width, federate, linear_learner
from fcljax.parts.learner import Learner, Params, Reads, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset, with_mini
from fcljax.types import ClientContext, LearningRate, Method, Metrics, Task, Weighted

Direction = Literal["server_client", "client_server"]
Weights = Literal["over_total", "per_class", "uniform"]
Phases = Literal["shared", "sequential"]

# clients whose prompts are in the memory of an accelerator at the same time
TEACHERS_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class HepcoOptions:
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
    features: Reads = "prompted"
    """Input of the classifier and of the distillation: features with prompts (prompted),
    or with them also the frozen network's, which never change (both; APER, Zhou et al.
    2023, arXiv 2303.07338). both needs --latents gaussian."""
    diagnose: bool = False
    """Record how generated latents compare with clients' features; clients then also send
    sums of features."""


_IMPROVED = HepcoOptions(latents="gaussian", distill_lr=1e-3, features="both")
PRESETS = with_mini(
    {
        "intended": prompted.CLIENT["intended"]._replace(options=HepcoOptions()),
        # its latents come from sums over all examples, so the mean weighs clients by
        # their examples too
        "improved": Preset(
            _IMPROVED,
            dataclasses.replace(prompted.CLIENT["intended"].run, aggregator="mean", headtune=True),
        ),
        "paper": prompted.CLIENT["paper"]._replace(
            options=HepcoOptions(generator_mse="sum", loss_weights="uniform")
        ),
        "released": prompted.CLIENT["released"]._replace(
            options=HepcoOptions(kl_direction="client_server", distill_phases="sequential")
        ),
    },
    lr=1e-2,
    generator_lr=1e-3,
)


def hepco(options: HepcoOptions, run: Run) -> Method:
    """Compose HePCo on any adapter.

    Raises:
      InputError: for an option that the other options leave without effect, or generators
        of two features.
    """
    if options.features == "both" and options.latents != "gaussian":
        raise InputError(
            "features: generators produce one kind of feature, not both; nearest: --latents gaussian"
        )
    if options.diagnose and options.latents == "gaussian":
        raise InputError("diagnose: it compares generators, but --latents is gaussian; nearest: generated")
    if options.wo_mse and options.generator_mse == "none":
        raise InputError("wo_mse: --generator-mse is none, so it has no effect; nearest: --no-wo-mse")
    return federate(
        run,
        linear_learner(run, features=options.features),
        loss=cross_entropy_loss(),
        server_rules=(latent_distillation(options, run),),
    )


# ---- server: latent generation and distillation (section 4.2) --------------------------


class History(NamedTuple):
    """The server's state of earlier rounds."""

    start: task_start.Start
    """The model that the task began with, with which the previous task ended."""
    class_examples: Float[Array, " C"]
    """Numbers of examples of each class in all rounds so far."""
    features: reports.ClassMoments | None = None
    """Sums of the clients' features in all rounds so far; None: nothing reads them."""


class Teachers(NamedTuple):
    """J models from which a student learns."""

    cached: Params
    """The parameters that all of them share."""
    trainable: Params
    """The trainable parameters of each, [J, ...]."""
    weight: Float[Array, "J C"]
    """Their weights for latents of a class."""


class Generators(NamedTuple):
    """The generators of a round; one that is not trained has no parameters."""

    current: Generator = Generator((), ())
    """Of the task's classes."""
    old: Generator = Generator((), ())
    """Of classes of earlier tasks."""


# gaps(latents [batch, width]) to each teacher
Gaps = Callable[[Array], Float[Array, "J batch"]]


class Latents(NamedTuple):
    """Latents drawn for given classes."""

    value: Float[Array, "batch width"]
    label: Int[Array, " batch"]


class Composite(NamedTuple):
    """A batch of the distillation."""

    current: Latents
    """Of the task's classes."""
    old: Latents | None
    """Of older classes; None: without replay."""


def latent_distillation(options: HepcoOptions, run: Run) -> ServerRule:
    """Train the averaged model on the server, without data.

    It learns from the clients' models on latents of the task's classes, and from the
    model before the task on latents of older classes.
    """
    # a latent is an input of the classifier
    width = feature_width(run, options.features)
    shape = GeneratorConfig(
        run.sizes.classes,
        width,
        options.noise_width,
        options.label_width,
        options.generator_norm,
    )
    # sums of features are a further upload of C D scalars and more
    needs_features = options.diagnose or options.latents == "gaussian"

    def init(params: Params, trainable: Params) -> History:
        start = task_start.no_start(params, trainable)
        features = None
        if needs_features:
            features = reports.no_moments(run.sizes.classes, width)
        return History(start, jnp.zeros(run.sizes.classes), features)

    def update(round: ServerRound, params: Params, history: History) -> ServerUpdate:
        task = round.task
        # for the generators of the task's classes and of older ones, and the distillation
        keys = jax.random.split(round.key, 3)
        client_examples = valid_examples(round)
        class_examples = client_examples.sum(0)
        history = updated_history(history, round, class_examples)

        model = LatentModel(options, round.learner, params, task)
        clients = client_teachers(options, round, params, client_examples)
        previous = previous_teacher(params, history, task)
        generators, generator_loss = train_generators(
            model, shape, clients, previous, class_examples, history, jnp.any(round.valid), keys
        )
        draw = functools.partial(draw_latents, options, shape, class_examples, history, task, generators)
        trainable, metrics = distil(model, clients, previous, draw, keys[2], jnp.any(round.valid))
        if options.diagnose:
            # a key of its own: the model must be the same as without diagnosis
            key = jax.random.fold_in(round.key, 3)
            metrics |= diagnosis(model, shape, generators, class_examples, history, key)
        merged = round.learner.merge(params, task, trainable)
        return ServerUpdate(merged, history, metrics | {"generator": generator_loss})

    counts = Report("class_examples", finalize=class_examples, possible=possible_examples)
    features = ()
    if needs_features:
        features = (diagnostics.real_features(run, width),)
    return ServerRule("latent", update, init, reports=(counts, OfEachClient("trainable"), *features))


def class_examples(end: ClientEnd, _total: tuple) -> Int[Array, " C"]:
    """Return the client's numbers of examples of each class."""
    return end.context.client.class_examples


def possible_examples(context: ClientContext, reported: Int[Array, " C"]) -> Bool[Array, ""]:
    """Check reported numbers of examples against the client's total, which the server knows.

    A client's weight as a teacher follows from them, so an inflated report would outweigh
    the others.
    """
    return possible_counts(reported, context.client.examples)


def valid_examples(round: ServerRound) -> Float[Array, "clients C"]:
    """Return each client's numbers of examples per class, 0 where no upload arrived."""
    examples = round.reports["class_examples"]
    return jnp.where(round.valid[:, None], examples, 0).astype(jnp.float32)


def updated_history(history: History, round: ServerRound, class_examples: Float[Array, " C"]) -> History:
    """Return the history with the reports of a round, `class_examples` summed over clients."""
    # None stays None, so that the state keeps its structure
    features = history.features
    if features is not None:
        features = jax.tree.map(jnp.add, features, round.reports["features"])
    start = task_start.start_of(round, history.start)
    return History(start, history.class_examples + class_examples, features)


def client_teachers(
    options: HepcoOptions,
    round: ServerRound,
    params: Params,
    examples: Float[Array, "clients C"],
) -> Teachers:
    """Return the clients' models as teachers of the task's classes."""
    mean = round.learner.trainable(params, round.task)
    weight = class_weights(examples, round.valid, options.loss_weights)
    # an invalid client gets the mean's parameters, which are finite, and weight 0
    return Teachers(params, task_start.valid_parameters(round, mean), weight)


def previous_teacher(params: Params, history: History, task: Task) -> Teachers:
    """Return the model that the task began with as the one teacher of older classes."""
    start = history.start.trainable._replace(extra={})
    # [1, ...]: one teacher, in the same form as J clients
    trainable = jax.tree.map(lambda leaf: leaf[None], start)
    # weight 0 for classes that this model has not learned
    return Teachers(params, trainable, task.old.astype(jnp.float32)[None])


class LatentModel(NamedTuple):
    """The averaged model as a function of latents. A latent is both the classifier's input
    and the query of the prompts."""

    options: HepcoOptions
    learner: Learner
    params: Params
    """The averaged parameters of all tasks."""
    task: Task

    @property
    def trainable(self) -> Params:
        """Return the averaged trainable parameters."""
        return self.learner.trainable(self.params, self.task)

    def logits(
        self, cached: Params, trainable: Params, latent: Float[Array, "batch width"]
    ) -> Float[Array, "batch C"]:
        """Return the logits of a model with these parameters."""
        logits_of = self.learner.classifier.logits
        return logits_of(cached.classifier, trainable.classifier, latent, self.task)

    def teachers_logits(
        self, teachers: Teachers, latent: Float[Array, "batch width"]
    ) -> Float[Array, "J batch C"]:
        """Return the logits of each teacher."""
        # only the trainable parameters differ between teachers, and have an axis J
        logits_of_teacher = functools.partial(self.logits, teachers.cached, latent=latent)
        return jax.vmap(logits_of_teacher)(teachers.trainable)

    def prompt(self, cached: Params, trainable: Params, latent: Float[Array, "batch width"]) -> Array:
        """Return the prompts [batch, ...] of a model with these parameters."""
        prompt_of = self.learner.adapter.prompt
        assert prompt_of is not None
        # of two concatenated features the frozen network's comes first, and is the query
        query = latent[..., : self.learner.network.width]
        return prompt_of(cached.adapter, trainable.adapter, query, self.task)


def class_weights(
    examples: Float[Array, "clients C"], valid: Bool[Array, " clients"], kind: Weights
) -> Float[Array, "clients C"]:
    """Return the weight of each client's loss on latents of each class.

    over_total: its examples of the class over all clients' examples of all classes, plus
      1 for each class without examples (release)
    per_class: its examples of the class over all clients' examples of the class
    uniform: 1 for each client (eq. 2 to 4b)
    """
    class_total = examples.sum(0)
    if kind == "uniform":
        return jnp.broadcast_to(valid[:, None], examples.shape).astype(jnp.float32)
    if kind == "per_class":
        return examples / jnp.maximum(class_total, 1)
    return examples / (jnp.sum(class_total) + jnp.sum(class_total == 0))


def log_frequencies(examples: Float[Array, " C"]) -> Float[Array, " C"]:
    """Return log-probabilities of classes, up to a constant, from their numbers of examples."""
    # -inf: a class without examples is never drawn. `maximum` avoids log(0)
    return jnp.where(examples > 0, jnp.log(jnp.maximum(examples, 1e-12)), -jnp.inf)


# ---- generation ------------------------------------------------------------------------


def train_generators(
    model: LatentModel,
    shape: GeneratorConfig,
    clients: Teachers,
    previous: Teachers,
    class_examples: Float[Array, " C"],
    history: History,
    any_client: Bool[Array, ""],
    keys: Key[Array, "3"],
) -> tuple[Generators, Weighted]:
    """Train the generators that the options ask for; no step where no client takes part.

    Args:
      model: the averaged model.
      shape: of a generator.
      clients: teachers of the task's classes.
      previous: teacher of older classes.
      class_examples: of this round, summed over clients.
      history: with this round's examples.
      any_client: whether an upload arrived.
      keys: the first for the generator of the task's classes, the second for the other.

    Returns:
      The generators, and the mean loss of that of the task's classes.
    """
    options = model.options
    # normal distributions need no training; a metric of weight 0 is of no step
    if options.latents == "gaussian":
        return Generators(), Weighted(jnp.zeros(()), jnp.zeros(()))
    # without an upload there is no teacher. A loop of 0 steps, and not an `if`: whether
    # uploads arrived is data
    steps = jnp.where(any_client, options.generator_steps, 0)
    frequencies = log_frequencies(class_examples)
    current, loss = train_generator(model, shape, clients, keys[0], steps, frequencies)
    if options.wo_previous:
        return Generators(current), loss
    old_steps = steps_of_older(options, steps, model.task.index)
    # the task's classes have the other generator
    old_frequencies = log_frequencies(history.class_examples * model.task.old)
    old, _ = train_generator(model, shape, previous, keys[1], old_steps, old_frequencies)
    return Generators(current, old), loss


def steps_of_older(options: HepcoOptions, steps: Int[Array, ""], task: Int[Array, ""]) -> Int[Array, ""]:
    """Return the steps of the generator of older classes in task number `task`, from 0.

    They grow with every task. There are none in the first task, or where no client takes
    part (`steps` is 0).
    """
    return jnp.where((steps > 0) & (task > 0), steps + options.generator_growth * task, 0)


def train_generator(
    model: LatentModel,
    shape: GeneratorConfig,
    teachers: Teachers,
    key: PRNGKeyArray,
    steps: Int[Array, ""],
    frequencies: Float[Array, " C"],
) -> tuple[Generator, Weighted]:
    """Return a new generator after `steps` steps of Adam (eq. 5), and its mean loss.

    Args:
      model: the averaged model.
      shape: of the generator.
      teachers: what its loss compares the averaged model with.
      key: of its first values, noise and classes.
      steps: 0 or more.
      frequencies: log-probabilities of the classes that latents are drawn for.
    """
    options = model.options
    # before the loop: the bases of the prompts do not depend on the generator
    gaps = prompt_gaps(model, teachers)
    adam = optax.adam(options.generator_lr)
    generator = init_generator(shape, jax.random.fold_in(key, 0))

    def step(i: Array, carry: tuple) -> tuple:
        generator, optimiser, total = carry
        # key 0 drew the first values
        step_key = jax.random.fold_in(key, i + 1)
        noise, label = _conditions(step_key, options.latent_batch, shape, frequencies)

        def loss(params):
            candidate = generator._replace(params=params)
            latent, updated = generate(shape, candidate, noise, label, True)
            return generator_loss(model, teachers, gaps, latent, label), updated

        (value, updated), gradient = jax.value_and_grad(loss, has_aux=True)(generator.params)
        update, optimiser = adam.update(gradient, optimiser)
        params = optax.apply_updates(generator.params, update)
        return updated._replace(params=params), optimiser, total + value

    start = (generator, adam.init(generator.params), jnp.zeros(()))
    generator, _, total = jax.lax.fori_loop(0, steps, step, start)
    return generator, Weighted(total, steps.astype(jnp.float32))


def _conditions(
    key: PRNGKeyArray, count: int, shape: GeneratorConfig, frequencies: Float[Array, " C"]
) -> tuple[Float[Array, "count noise"], Int[Array, " count"]]:
    """Draw the noise and the classes of `count` latents."""
    noise_key, label_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (count, shape.noise))
    return noise, jax.random.categorical(label_key, frequencies, shape=(count,))


def generator_loss(
    model: LatentModel,
    teachers: Teachers,
    gaps: Gaps,
    latent: Float[Array, "batch width"],
    label: Int[Array, " batch"],
) -> Float[Array, ""]:
    """Return L_cls - lambda_KL L_KL - lambda_MSE L_MSE (eq. 5).

    The teachers recognise latents of low loss, and the averaged model disagrees with them.

    Args:
      model: the averaged model.
      teachers: J models.
      gaps: between its prompts and the teachers' (`prompt_gaps`).
      latent: z.
      label: the classes that the latents were drawn for.
    """
    options = model.options
    seen = model.task.seen
    weight = teachers.weight[:, label]
    teacher_logits = model.teachers_logits(teachers, latent)
    server_logits = model.logits(model.params, model.trainable, latent)

    # L_cls, eq. 2: the teachers recognise the latent as its class
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
        heads.mask_logits(teacher_logits, seen), jnp.broadcast_to(label, weight.shape)
    )
    loss = jnp.sum(weight * cross_entropy)

    if not options.wo_kl:  # L_KL, eq. 4a
        disagreement = divergence(teacher_logits, server_logits, seen, options.kl_direction)
        loss = loss - options.kl_weight * jnp.sum(weight * disagreement)

    # L_MSE, eq. 4b. The release takes the query out of the gradient in its prompt module,
    # so that this loss does not move its generators: generator_mse "none" does the same
    if model.learner.adapter.prompt and options.generator_mse != "none" and not options.wo_mse:
        gap = jnp.sum(weight * gaps(latent))
        if options.generator_mse == "mean":
            gap = gap / prompt_size(model, latent)
        loss = loss - options.mse_weight * gap
    return loss


def divergence(
    client: Float[Array, "J batch C"],
    server: Float[Array, "batch C"],
    seen: Bool[Array, " C"],
    direction: Direction,
) -> Float[Array, "J batch"]:
    """Return KL(server || client) (eq. 4a) or KL(client || server) (release) of logits."""
    if direction == "server_client":
        return heads.kl(server, client, seen)
    return heads.kl(client, server, seen)


def prompt_size(model: LatentModel, latent: Float[Array, "batch width"]) -> int:
    """Return the number of scalars in a latent's prompts, in all blocks together."""
    prompt = functools.partial(model.prompt, model.params, model.trainable, latent)
    return math.prod(jax.eval_shape(prompt).shape[1:])


def prompt_gaps(model: LatentModel, teachers: Teachers) -> Gaps:
    """Return `prompt_gap` of the averaged model and fixed teachers, fast for many latents.

    Prompts that are mixtures w P of a basis P are compared without being made. With s for
    the server and j for a teacher,

        w_s P_s - w_j P_j = (w_s - w_j) P_j + w_s (P_s - P_j)

    so the squared norm needs only the products of the rows of [P_j; P_s - P_j].
    """
    student = model.trainable
    mixture = model.learner.adapter.mixture
    if mixture is None:
        return functools.partial(prompt_gap, model, student, teachers)
    # only the weights of a mixture depend on the query, so any will do for its basis
    any_latent = jnp.ones((1, model.learner.network.width))

    def mixed(trainable: Params, latent: Array):
        return mixture(model.params.adapter, trainable.adapter, latent, model.task)

    def products(teacher: Params) -> Float[Array, "groups rows rows"]:
        basis = mixed(teacher, any_latent).basis
        student_basis = mixed(student, any_latent).basis
        rows = jnp.concatenate([basis, student_basis - basis], axis=1)
        return exact_einsum("gmn,gkn->gmk", rows, rows)

    teacher_products = jax.lax.map(products, teachers.trainable)

    def gaps(latent: Float[Array, "batch width"]) -> Float[Array, "J batch"]:
        student_weight = mixed(student, latent).weight

        def gap(teacher: Params, product: Float[Array, "groups rows rows"]) -> Float[Array, " batch"]:
            # the rows of [P_j; P_s - P_j] have the coefficients w_s - w_j and w_s
            difference = student_weight - mixed(teacher, latent).weight
            weight = jnp.concatenate([difference, student_weight], axis=-1)
            # |w P|^2 = w (P P^T) w^T: no prompt is made
            return exact_einsum("bgm,gmk,bgk->b", weight, product, weight)

        return jax.vmap(gap)(teachers.trainable, teacher_products)

    return gaps


def prompt_gap(
    model: LatentModel,
    student: Params,
    teachers: Teachers,
    latent: Float[Array, "batch width"],
) -> Float[Array, "J batch"]:
    """Return ||rho_s(z) - rho_j(z)||^2, summed over blocks, tokens and channels (eq. 4b)."""
    student_prompt = model.prompt(model.params, student, latent)

    def gap(teacher: Params) -> Float[Array, " batch"]:
        square = (student_prompt - model.prompt(teachers.cached, teacher, latent)) ** 2
        return jnp.sum(square, axis=tuple(range(1, square.ndim)))

    if len(teachers.weight) > TEACHERS_AT_ONCE:
        # prompts of many teachers do not fit into memory: the gradient makes them again
        gap = jax.checkpoint(gap)
    # one teacher at a time on a CPU, where batched products are slow
    return jax.lax.platform_dependent(
        teachers.trainable,
        cpu=functools.partial(jax.lax.map, gap),
        default=functools.partial(jax.lax.map, gap, batch_size=TEACHERS_AT_ONCE),
    )


def diagnosis(
    model: LatentModel,
    shape: GeneratorConfig,
    generators: Generators,
    class_examples: Float[Array, " C"],
    history: History,
    key: PRNGKeyArray,
) -> Metrics:
    """Return `diagnostics.compare` of each trained generator, as new_... and older_....

    Args:
      model: the averaged model.
      shape: of a generator.
      generators: one that was not trained has no metrics.
      class_examples: of this round; the current generator makes these classes.
      history: the old generator makes its classes of earlier tasks.
      key: of the noise.
    """
    assert history.features is not None
    examples_by_generator = {
        "new": (generators.current, class_examples),
        "older": (generators.old, history.class_examples * model.task.old),
    }
    metrics: Metrics = {}
    label = jnp.repeat(jnp.arange(shape.classes), diagnostics.PER_CLASS)
    for i, (name, (generator, examples)) in enumerate(examples_by_generator.items()):
        # a generator that was not trained has nothing to compare
        if not generator.params:
            continue
        noise = jax.random.normal(jax.random.fold_in(key, i), (len(label), shape.noise))
        latent, _ = generate(shape, generator, noise, label, False)
        logits = model.logits(model.params, model.trainable, latent)
        comparison = diagnostics.compare(
            latent, label, examples > 0, logits, model.task.seen, history.features
        )
        metrics |= {f"{name}_{metric}": value for metric, value in comparison.items()}
    return metrics


# ---- distillation ----------------------------------------------------------------------


def draw_latents(
    options: HepcoOptions,
    shape: GeneratorConfig,
    class_examples: Float[Array, " C"],
    history: History,
    task: Task,
    generators: Generators,
    key: PRNGKeyArray,
) -> Composite:
    """Draw a batch: latents of the task's classes, and floor(ratio * batch) of older ones."""
    batch = options.latent_batch
    # rounded down, as in the release
    num_replayed = int(batch * options.replay_ratio)
    if options.wo_previous:
        num_replayed = 0

    def draw(
        generator: Generator,
        key: PRNGKeyArray,
        count: int,
        examples: Float[Array, " C"],
    ) -> Latents:
        frequencies = log_frequencies(examples)
        if options.latents == "gaussian":
            assert history.features is not None
            return normal_latents(history.features, key, count, frequencies)
        # both draws have the larger size and are cut: XLA compiles a draw for each size
        noise, label = _conditions(key, max(batch, num_replayed), shape, frequencies)
        noise = noise[:count]
        label = label[:count]
        latent, _ = generate(shape, generator, noise, label, False)
        return Latents(latent, label)

    keys = jax.random.split(key)
    old = None
    if num_replayed:
        old = draw(generators.old, keys[1], num_replayed, history.class_examples * task.old)
    return Composite(draw(generators.current, keys[0], batch, class_examples), old)


def normal_latents(
    features: reports.ClassMoments,
    key: PRNGKeyArray,
    count: int,
    frequencies: Float[Array, " C"],
) -> Latents:
    """Draw from normal distributions with the classes' means and variances."""
    noise_key, label_key = jax.random.split(key)
    label = jax.random.categorical(label_key, frequencies, shape=(count,))
    mean, variance = reports.normal_of(features)
    noise = jax.random.normal(noise_key, (count, mean.shape[1]))
    return Latents(mean[label] + jnp.sqrt(variance[label]) * noise, label)


def distil(
    model: LatentModel,
    clients: Teachers,
    previous: Teachers,
    draw: Callable[[PRNGKeyArray], Composite],
    key: PRNGKeyArray,
    any_client: Bool[Array, ""],
) -> tuple[Params, dict[str, Weighted]]:
    """Distil prompts (eq. 6) and classifier (section 5.3); no step where no client takes part.

    Returns:
      The averaged model's trainable parameters after it, and the mean loss of each part.
    """
    options = model.options
    losses: dict[str, Callable] = {}
    if model.learner.adapter.prompt and not options.wo_prompt_distillation:
        losses["adapter"] = functools.partial(prompt_loss, model, clients, previous)
    if not options.wo_classifier_distillation:
        losses["classifier"] = functools.partial(label_loss, model, previous)

    # the release trains prompts first and then the classifier, on latents of its own
    phases = [losses]
    if options.distill_phases == "sequential":
        phases = [{part: loss} for part, loss in losses.items()]
    trainable = model.trainable
    steps = jnp.where(any_client, options.distill_steps, 0)
    metrics = {}
    for i, phase_losses in enumerate(phases):
        adam = optax.adam(options.distill_lr)
        phase_key = jax.random.fold_in(key, i)
        trainable, totals = train_parts(phase_losses, adam, trainable, draw, phase_key, steps)
        for part, total in totals.items():
            metrics[part] = Weighted(total, steps.astype(jnp.float32))
    return trainable, metrics


def train_parts(
    losses: dict[str, Callable],
    optimiser: optax.GradientTransformation,
    trainable: Params,
    draw: Callable[[PRNGKeyArray], Composite],
    key: PRNGKeyArray,
    steps: Int[Array, ""],
) -> tuple[Params, dict[str, Array]]:
    """Take `steps` steps of each loss, each on the part of the parameters that its name says.

    The losses of a step share its latents, and a loss sees the parameters after the update
    of the one before it.

    Returns:
      The parameters, and the sum of each loss over the steps.
    """

    def step(i: Array, carry: tuple) -> tuple:
        trainable, states, totals = carry
        latents = draw(jax.random.fold_in(key, i))
        for part, loss in losses.items():
            params = getattr(trainable, part)
            loss_of = functools.partial(_loss_of_part, part, loss, trainable, latents)
            value, gradient = jax.value_and_grad(loss_of)(params)
            update, state = optimiser.update(gradient, states[part])
            trainable = trainable._replace(**{part: optax.apply_updates(params, update)})
            states = states | {part: state}
            totals = totals | {part: totals[part] + value}
        return trainable, states, totals

    states = {part: optimiser.init(getattr(trainable, part)) for part in losses}
    start = (trainable, states, dict.fromkeys(losses, jnp.zeros(())))
    trainable, _, totals = jax.lax.fori_loop(0, steps, step, start)
    return trainable, totals


def _loss_of_part(part: str, loss: Callable, trainable: Params, latents: Composite, params) -> Array:
    """Return the loss as a function of one part of the parameters, its last argument."""
    return loss(trainable._replace(**{part: params}), latents)


def prompt_loss(
    model: LatentModel,
    clients: Teachers,
    previous: Teachers,
    trainable: Params,
    batch: Composite,
) -> Float[Array, ""]:
    """Return eq. 6: on the task's latents prompts approach the clients', on older ones
    the previous model's."""

    def weighted_gap(teachers: Teachers, latents: Latents) -> Float[Array, ""]:
        gap = prompt_gap(model, trainable, teachers, latents.value)
        return jnp.sum(teachers.weight[:, latents.label] * gap)

    loss = weighted_gap(clients, batch.current)
    if batch.old is not None:
        loss = loss + weighted_gap(previous, batch.old)
    return loss


def label_loss(
    model: LatentModel, previous: Teachers, trainable: Params, batch: Composite
) -> Float[Array, ""]:
    """Return the mean cross-entropy of the latents' classes among all seen (section 5.3)."""
    latents = [batch.current]
    if batch.old is not None:
        latents.append(batch.old)
    value = jnp.concatenate([part.value for part in latents])
    label = jnp.concatenate([part.label for part in latents])
    # in the first task there are no older classes: these draws are arbitrary, and their
    # labels have weight 0 in the previous model
    is_current = jnp.arange(len(label)) < len(batch.current.label)
    counts = is_current | (previous.weight[0, label] > 0)
    logits = model.logits(model.params, trainable, value)
    return heads.cross_entropy(logits, label, model.task.seen, counts)
