"""GLFC: federated class-incremental learning (Dong et al., CVPR 2022), as its release has it (specification
B4 to B10).

    client    measures the entropy of the newest global model on its examples; where it has risen, the task
              has changed, and the client adopts the exemplars of its last task                       (B4, B5)
              trains on binary cross-entropy of the labels and of an old model's answers, each example
              weighted by how far it is from its label relative to the other old or new ones          (B6, B7)
              where its task has changed, sends gradients of perturbed prototype images                (B9)
    server    averages; the proxy server (proxy.py) rebuilds the images, judges the merged model on them, and
              sends the best models of this task and of the one before                                 (B10)

In the release a client chooses exemplars when it meets the next task, from examples of the one that is over.
Here it chooses when a task is over, from the same examples under the same model, and adopts them later.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.full import FullOptions
from fcljax.adapters.lora import LoraOptions
from fcljax.federated.claims import within
from fcljax.methods.glfc.lenet import LeNet
from fcljax.methods.glfc.proxy import (
    REPORT,
    Judge,
    Old,
    ProxyOptions,
    Sent,
    encode,
    proxy_server,
    share_correct,
)
from fcljax.models.heads import mask_logits, reduce_rows, sum_by_class, unit
from fcljax.parts.client import (
    ClientEnd,
    ClientPass,
    ClientRule,
    ClientStep,
    LearningRateFactor,
    Replay,
    Report,
    StepMemory,
)
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Learner, Params, replaced_loss
from fcljax.parts.replay import (
    Budget,
    Gathered,
    Herded,
    draw_union,
    gather,
    gather_from,
    nothing_herded,
    pass_over,
    renew,
)
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import to_unit
from fcljax.settings import Preset, RunConfig
from fcljax.types import Batch, ClientContext, Method, Task

Schedule = Literal["constant", "steps", "released"]

FLOOR = 1e-5  # added to probabilities under the logarithm (release)
MILESTONES = (0.5, 0.75, 0.9)  # of a task's epochs, at each of which the rate is divided
DIVISOR = 5.0


@dataclasses.dataclass(frozen=True)
class GLFCOptions(ProxyOptions):
    """Options of GLFC."""

    memory_size: int = 200
    """Number of examples in a client's memory, shared by its old classes."""
    memory_repeats: bool = False
    """Allow herding to choose an example twice, as the release does."""
    entropy_rise: float = 0.02
    """Rise of the mean entropy of a client's examples that signals a new task."""
    entropy_unit: Literal["share", "nats"] = "share"
    """Unit of this rise: nats, or the entropy of a uniform guess among the seen classes
    (share)."""
    lr_schedule: Schedule = "constant"
    """Learning-rate schedule over a task. steps: divided by 5 after 1/2, 3/4 and 9/10 of
    its epochs; released: divided only during the round of each step."""


# clients are averaged equally, whatever they have
_RUN = RunConfig(aggregator="uniform", lr=1e-3)
_ADAPTERS = (LoraOptions(lora_pairs="one"), FullOptions(full_lr=3e-4))
_RELEASED = GLFCOptions(
    memory_size=2000,
    memory_repeats=True,
    entropy_rise=1.2,
    entropy_unit="nats",
    lr_schedule="released",
    match_steps=5000,
    match_start="normal",
    monitor_images=20,
    reset_best="never",
)
_PAPER = dataclasses.replace(_RELEASED, memory_repeats=False, lr_schedule="steps", reset_best="arrival")
PRESETS = {
    "intended": Preset(GLFCOptions(), _RUN, _ADAPTERS),
    "paper": Preset(_PAPER, _RUN, _ADAPTERS),
    "released": Preset(_RELEASED, _RUN, _ADAPTERS),
}


@runtime_checkable
class Weigh(Protocol):
    """Returns the weight of each example; `gap` is how far it is from its label."""

    def __call__(
        self, gap: Float[Array, " B"], batch: Batch, known: "Known", task: Task, /
    ) -> Float[Array, " B"]: ...


class LossWeights(NamedTuple):
    """How a client's loss is put together."""

    weigh: Weigh
    current: float = 0.5
    """Factor of the loss of labels, where there is an old model."""
    old: float = 0.5
    """Factor of the distillation."""
    alone: float = 1.0
    """Factor of the loss of labels, where there is no old model."""
    weighs_old: bool = False
    """Whether `weigh` acts on the distillation too."""


def glfc(options: GLFCOptions, run: Run) -> Method:
    """GLFC as a method."""
    return compensated(options, run, LossWeights(by_group), functools.partial(share_correct, options))


def compensated(options: GLFCOptions, run: Run, weights: LossWeights, judge: Judge) -> Method:
    """GLFC with its clients' loss weights and its proxy's judge to choose.

    Raises:
      InputError: for sizes without `examples`.
    """
    learner = linear_learner(run)
    proxy = proxy_server(options, run, judge, prototype_gradients(options, learner))
    return federate(
        run,
        learner,
        loss=replaced_loss("seen"),
        client_rules=(compensate(options, run, weights),),
        server_rules=(proxy,),
        learning_rate=task_schedule(options, run),
    )


def task_schedule(options: GLFCOptions, run: Run) -> LearningRateFactor:
    """The learning rate over the epochs of a task (B8)."""

    def factor(round: Array, rounds: int, epoch: Array) -> Float[Array, ""]:
        return rate_factor(options.lr_schedule, run.training.epochs, round, rounds, epoch)

    return factor


def rate_factor(
    schedule: Schedule, epochs: int, round_: Int[Array, ""], rounds: int, epoch: Int[Array, ""]
) -> Float[Array, ""]:
    """The factor on the learning rate in an epoch of a round (specification B8)."""
    if schedule == "constant":
        return jnp.ones(())
    reached = jnp.stack([jnp.int32(round(share * epochs * rounds)) for share in MILESTONES])
    passed = epochs * round_ + epoch >= reached
    if schedule == "steps":
        return DIVISOR ** -jnp.sum(passed).astype(jnp.float32)
    # every round begins at the full rate, and only the step that falls into it is taken
    mine = passed & (reached // epochs == round_)
    power = jnp.max(jnp.where(mine, jnp.arange(1, len(MILESTONES) + 1), 0))
    return DIVISOR ** -power.astype(jnp.float32)


# ---- client ------------------------------------------------------------------------------------------------

NAME = "glfc"


class Known(NamedTuple):
    """What a client keeps."""

    entropy: Float[Array, ""]
    """Of its examples in its last round."""
    now: Herded
    """The exemplars that it uses."""
    later: Herded
    """Those that it will use once it finds its task changed."""
    block: Int[Array, " C"]
    """The task in which it had each class; -1: none yet."""
    resting: Bool[Array, ""]
    """Whether it has not taken part since it chose `later`, and so has not looked for a change."""


class FeatureSums(NamedTuple):
    """Of the features of a client's examples, by class."""

    near: Float[Array, "Ct D"]
    """Sums of features as vectors of length 1."""
    feature: Float[Array, "Ct D"]
    square: Float[Array, " Ct"]
    """Sums of squared lengths."""
    examples: Float[Array, " Ct"]


class LocalState(NamedTuple):
    """A client at work."""

    known: Known
    entropy: Float[Array, ""]
    """The sum over `examples` examples."""
    examples: Float[Array, ""]
    sums: FeatureSums
    image: Float[Array, "Ct h w 3"]
    """Of each class the image nearest to the class mean so far."""
    distance: Float[Array, " Ct"]


def compensate(options: GLFCOptions, run: Run, weights: LossWeights) -> ClientRule:
    """All that clients do besides the steps of the optimiser.

    Args:
      options: of the method.
      run: the run's.
      weights: how the loss is put together.
    """
    sizes = run.sizes
    batch_size = run.training.batch_size
    budget = Budget(options.memory_size, "client", options.memory_repeats)
    view = pass_over(batch_size)

    def init(key: PRNGKeyArray, trainable: Params) -> Known:
        del key, trainable
        nothing = nothing_herded(budget, sizes)
        no_task = jnp.full(sizes.classes, -1, jnp.int32)
        return Known(jnp.zeros(()), nothing, nothing, no_task, jnp.bool_(False))

    def on_start(context: ClientContext, known: Known, key: PRNGKeyArray) -> LocalState:
        del context, key
        count = sizes.task_classes
        width = run.network.width
        zero = jnp.zeros(())
        sums = FeatureSums(*(jnp.zeros(shape) for shape in ((count, width), (count, width), count, count)))
        image = jnp.zeros((count, *run.network.image))
        return LocalState(known, zero, zero, sums, image, jnp.full(count, jnp.inf))

    def loss(step: ClientStep, work: LocalState) -> Float[Array, ""]:
        changed = task_changed(options, work, step.context.task)
        return weighted_loss(weights, step, adopted(work.known, changed), old_model(step.context, changed))

    def stored(known: Known) -> Int[Array, " M"]:
        return jnp.concatenate([known.now.exemplars.index, known.later.exemplars.index])

    def choose(context: ClientContext, work: LocalState, key: PRNGKeyArray) -> Int[Array, " count"]:
        changed = task_changed(options, work, context.task)
        now = adopted(work.known, changed).now
        chosen = draw_union(now.exemplars, context.task.old, batch_size, context.client.examples, key)
        behind = jnp.where(changed, budget.size(sizes), 0)  # `stored` has both buffers end to end
        return jnp.where(chosen >= 0, chosen + behind, -1)

    def on_end(context: ClientContext, work: LocalState, trainable: Params, known: Known) -> Known:
        del trainable, known
        kept = adopted(work.known, task_changed(options, work, context.task))
        return kept._replace(entropy=mean_entropy(options, work, context.task), resting=jnp.bool_(False))

    def choose_exemplars(
        context: ClientContext, gathered: Gathered, trainable: Params, known: Known
    ) -> Known:
        del trainable
        # a client that sat out the whole task adopts now what it chose at the end of the one before: in the
        # release clients look for changes in every round, also those that do not train
        known = adopted(known, known.resting)
        later = renew(known.now, gathered, context.task, budget, sizes)
        mine = jnp.zeros(sizes.classes, bool).at[gathered.label].max(gathered.index >= 0)
        block = jnp.where(mine, context.task.index, known.block)
        return known._replace(later=later, block=block, resting=jnp.bool_(True))

    passes = (
        ClientPass("before_training", view, measure_entropy),
        ClientPass("after_training", view, if_changed(options, add_statistics)),
        ClientPass("after_training", view, if_changed(options, find_nearest)),
        ClientPass("task_end", view, gather, gather_from(sizes, run.network.width), choose_exemplars),
    )
    replay = Replay(batch_size, stored, choose)
    return ClientRule(NAME, loss, init, on_start, passes, on_end, replay=replay)


def adopted(known: Known, changed: Bool[Array, ""]) -> Known:
    """What a client keeps, once it knows whether its task has changed (B5)."""

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(changed, new, old)

    return known._replace(now=jax.tree.map(pick, known.later, known.now))


def if_changed(options: GLFCOptions, then: StepMemory) -> StepMemory:
    """The step of a pass that only clients whose task has changed make."""

    def step_if(step: ClientStep, work: LocalState) -> LocalState:
        changed = task_changed(options, work, step.context.task)
        return jax.lax.cond(changed, functools.partial(then, step), lambda work: work, work)

    return step_if


# ---- has the task changed? (B4) ----------------------------------------------------------------------------


def measure_entropy(step: ClientStep, work: LocalState) -> LocalState:
    """Before training: the entropy of a batch under the model that was sent."""
    logits = step.forward(step.trainable, train=False).logits
    mask = step.batch.mask
    entropy = jnp.where(mask, entropy_of(logits, step.context.task.seen), 0.0)
    return work._replace(entropy=work.entropy + jnp.sum(entropy), examples=work.examples + jnp.sum(mask))


def entropy_of(logits: Float[Array, "B C"], seen: Bool[Array, " C"]) -> Float[Array, " B"]:
    """The entropy of a softmax over the seen classes, in nats."""
    share = jax.nn.softmax(mask_logits(logits, seen))
    return -jnp.sum(jnp.where(seen, share * jnp.log(share + FLOOR), 0.0), axis=-1)


def mean_entropy(options: GLFCOptions, work: LocalState, task: Task) -> Float[Array, ""]:
    """Of a client's examples, in nats or as a share of a uniform guess's."""
    mean = work.entropy / jnp.maximum(work.examples, 1)
    if options.entropy_unit == "nats":
        return mean
    return mean / jnp.log(jnp.maximum(jnp.sum(task.seen), 2))


def task_changed(options: GLFCOptions, work: LocalState, task: Task) -> Bool[Array, ""]:
    """Whether the entropy is higher than in the client's last round by more than the threshold."""
    return mean_entropy(options, work, task) - work.known.entropy > options.entropy_rise


# ---- the loss (B6, B7) -------------------------------------------------------------------------------------


def old_model(context: ClientContext, changed: Bool[Array, ""]) -> Old:
    """Which model is distilled: the best of the task that is over, which is the best of all when the task has
    just changed, and later the best from before the newest gradients."""
    choice = context.payload.sent["proxy"]
    return jax.tree.map(lambda a, b: jnp.where(changed, a, b), choice.current, choice.previous)


def weighted_loss(weights: LossWeights, step: ClientStep, known: Known, old: Old) -> Float[Array, ""]:
    """The whole loss: binary cross-entropy of the labels, and of an old model's answers where there is one;
    for classes that it does not know, its answers are the labels."""
    context = step.context
    batch = step.batch
    logits = step.output.logits
    label = jax.nn.one_hot(batch.label, logits.shape[-1])
    weight = weights.weigh(gap_of(logits, batch.label), batch, known, context.task)
    binary = functools.partial(weighted_binary_loss, logits, seen=context.task.seen, mask=batch.mask)

    def with_answers() -> Float[Array, "B C"]:
        forward = step.learner.forward
        answers = forward(context.frozen, context.cached, old.trainable, batch, old.task, False).logits
        return jnp.where(old.task.seen, jax.nn.sigmoid(answers), label)

    there = old.task.index >= 0
    # the cond holds no gradient: libtpu 0.0.42 crashes on one that returns a rounded array twice
    target = jax.lax.cond(there, with_answers, lambda: label)
    own = weight if weights.weighs_old else jnp.ones_like(weight)
    of_labels = jnp.where(there, weights.current, weights.alone) * binary(label, weight)
    return of_labels + jnp.where(there, weights.old, 0.0) * binary(target, own)


def gap_of(logits: Float[Array, "B C"], label: Int[Array, " B"]) -> Float[Array, " B"]:
    """How far each example is from its label: |sigmoid(z_y) - 1|, without a gradient."""
    own = jnp.take_along_axis(jax.lax.stop_gradient(logits), label[:, None], axis=-1)[:, 0]
    return jnp.abs(jax.nn.sigmoid(own) - 1)


def weighted_binary_loss(
    logits: Float[Array, "B C"],
    target: Float[Array, "B C"],
    weight: Float[Array, " B"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " B"],
) -> Float[Array, ""]:
    """The mean, over the examples in the mask and the seen classes, of the weighted binary cross-entropy."""
    each = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    return reduce_rows(weight * jnp.sum(each, axis=-1), mask, jnp.sum(mask) * jnp.sum(seen), "mean")


def by_group(gap: Float[Array, " B"], batch: Batch, known: Known, task: Task) -> Float[Array, " B"]:
    """Gradient compensation: an example's gap over the mean gap of the old or of the new
    examples, whichever it is; 1 for clients that have learned nothing."""
    del task
    learned = known.now.learned
    old = learned[batch.label]
    weight = jnp.where(old, over_mean(gap, old & batch.mask), over_mean(gap, ~old & batch.mask))
    return jnp.where(jnp.any(learned), weight, 1.0)


def over_mean(gap: Float[Array, " B"], group: Bool[Array, " B"]) -> Float[Array, " B"]:
    """Gaps over the mean of a group's."""
    mean = jnp.sum(jnp.where(group, gap, 0.0)) / jnp.maximum(jnp.sum(group), 1)
    return gap / jnp.maximum(mean, jnp.finfo(gap.dtype).tiny)


# ---- prototypes (B9) ---------------------------------------------------------------------------------------


def add_statistics(step: ClientStep, work: LocalState) -> LocalState:
    """After training: adds the features of a batch by class, under the client's own model."""
    batch = step.batch
    classes = step.context.task.classes
    own = work.sums
    feature = step.forward(step.trainable, train=False).feature

    def add(values: Array) -> tuple[Array, Array]:
        return sum_by_class(values, batch.label, classes, batch.mask)

    (near, examples) = add(unit(feature))
    (plain, _) = add(feature)
    (square, _) = add(jnp.sum(feature**2, axis=-1, keepdims=True))
    new = FeatureSums(
        own.near + near, own.feature + plain, own.square + square[:, 0], own.examples + examples
    )
    return work._replace(sums=new)


def find_nearest(step: ClientStep, work: LocalState) -> LocalState:
    """In a second pass: of each class the image whose features are nearest to the class mean so far."""
    batch = step.batch
    mean = work.sums.near / jnp.maximum(work.sums.examples, 1)[:, None]
    feature = step.forward(step.trainable, train=False).feature
    gap = jnp.sum((unit(feature) - mean[:, None]) ** 2, axis=-1)
    mine = (batch.label == step.context.task.classes[:, None]) & batch.mask
    gap = jnp.where(mine, gap, jnp.inf)
    best = jnp.argmin(gap, axis=1)
    least = jnp.min(gap, axis=1)
    nearer = least < work.distance
    image = jnp.where(nearer[:, None, None, None], batch.image[best], work.image)
    return work._replace(image=image, distance=jnp.minimum(least, work.distance))


def prototype_gradients(options: GLFCOptions, learner: Learner) -> Report:
    """What clients send of their prototypes when their task has changed."""

    def finalize(end: ClientEnd, total: tuple) -> Sent:
        del total
        context = end.context
        work = end.memories[NAME]
        changed = task_changed(options, work, context.task)
        encoded = functools.partial(encoded_prototypes, options, learner, context, end.trainable)
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(encoded, work))
        gradient = jax.lax.cond(changed, encoded, lambda work: none, work)
        return Sent(gradient, changed & (work.sums.examples > 0), spread_of(work.sums))

    # the proxy merges nothing, so that any aggregation rule is followed
    return Report(REPORT, finalize=finalize, follows_rule=True, possible=possible_gradients)


def possible_gradients(context: ClientContext, sent: Sent) -> Bool[Array, ""]:
    """Whether variances are not negative, and the gradient of the classifier's bias, a probability minus 0 or
    1, lies in [-1, 1]."""
    del context
    return within(sent.spread, 0, jnp.inf) & within(sent.gradient.bias, -1.001, 1.001)


def encoded_prototypes(
    options: GLFCOptions, learner: Learner, context: ClientContext, trainable: Params, work: LocalState
) -> LeNet:
    """The gradients of the task's prototypes, once they are perturbed."""
    label = jnp.maximum(context.task.classes, 0)
    pixels = perturb(options, learner, context, trainable, to_unit(learner.network, work.image), label)
    return encode(options, learner.network, len(context.task.seen), pixels, label)


def perturb(
    options: GLFCOptions,
    learner: Learner,
    context: ClientContext,
    trainable: Params,
    pixels: Float[Array, "Ct h w 3"],
    label: Int[Array, " Ct"],
) -> Float[Array, "Ct h w 3"]:
    """Images after some steps of gradient descent on the client's own loss of them: each by itself."""
    task = context.task
    target = jax.nn.one_hot(label, len(task.seen))

    def loss(pixels: Array) -> Float[Array, ""]:
        batch = unlabelled(learner, pixels)
        output = learner.forward(context.frozen, context.cached, trainable, batch, task, False)
        one = jnp.ones(len(pixels))
        return len(pixels) * weighted_binary_loss(output.logits, target, one, task.seen, batch.mask)

    def step(i: Array, pixels: Array) -> Array:
        del i
        slope = jax.grad(loss)(pixels) + options.prototype_decay * pixels
        return pixels - options.prototype_lr * slope

    return jax.lax.fori_loop(0, options.prototype_steps, step, pixels)


def spread_of(sums: FeatureSums) -> Float[Array, ""]:
    """The mean variance of a feature's entries within a class, over the classes there are."""
    examples = jnp.maximum(sums.examples, 1)
    there = sums.examples > 0
    trace = sums.square / examples - jnp.sum((sums.feature / examples[:, None]) ** 2, axis=-1)
    mean = jnp.sum(jnp.where(there, trace, 0.0)) / jnp.maximum(jnp.sum(there), 1)
    return jnp.maximum(mean, 0.0) / sums.feature.shape[-1]
