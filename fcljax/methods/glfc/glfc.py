"""GLFC: federated class-incremental learning (Dong et al., CVPR 2022), as in its release.

    client    measures the entropy of the newest global model on its examples; if it has
              risen, the task has changed, and the client adopts the exemplars of its last task
              trains on binary cross-entropy of the labels and of an old model's outputs; each
              example is weighted by its gap to its label, relative to the mean gap of the old
              or of the new examples
              if its task has changed, sends gradients of perturbed prototype images
    server    averages; the proxy server (proxy.py) reconstructs the images, evaluates the
              merged model on them, and sends the best models of this task and of the previous

In the release a client chooses exemplars of a task when it meets the next one, from old
examples. Here it chooses them when the task is over, from the same examples under the
same model, and adopts them when it meets the next task.
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
from fcljax.methods.glfc import proxy
from fcljax.methods.glfc.lenet import LeNet
from fcljax.models import heads
from fcljax.parts import replay as herding
from fcljax.parts.client import (
    ClientEnd,
    ClientPass,
    ClientRule,
    ClientStep,
    Replay,
    Report,
    StepMemory,
)
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Learner, Params, replaced_loss
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import to_unit
from fcljax.settings import Preset, RunConfig, with_mini
from fcljax.types import Batch, ClientContext, Method, Task

FLOOR = 1e-5  # added to probabilities before the logarithm (release)


@dataclasses.dataclass(frozen=True)
class GLFCOptions(proxy.ProxyOptions):
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


# the release averages clients without weights
_RUN = RunConfig(aggregator="uniform", lr=1e-3)
_ADAPTERS = (LoraOptions(lora_pairs="one"), FullOptions(full_lr=3e-4))
_RELEASED = GLFCOptions(
    memory_size=2000,
    memory_repeats=True,
    entropy_rise=1.2,
    entropy_unit="nats",
    match_steps=5000,
    match_start="normal",
    monitor_images=20,
    reset_best="never",
)
_PAPER = dataclasses.replace(_RELEASED, memory_repeats=False, reset_best="arrival")
PRESETS = with_mini(
    {
        "intended": Preset(GLFCOptions(), _RUN, _ADAPTERS),
        "paper": Preset(_PAPER, dataclasses.replace(_RUN, lr_schedule="step"), _ADAPTERS),
        "released": Preset(_RELEASED, dataclasses.replace(_RUN, lr_schedule="step_in_round"), _ADAPTERS),
    },
    lr=3e-2,
)


@runtime_checkable
class Weigh(Protocol):
    """Returns the weight of each example; `gap` is its distance from its label (`gap_of`)."""

    def __call__(
        self, gap: Float[Array, " B"], batch: Batch, state: "ClientMemory", task: Task, /
    ) -> Float[Array, " B"]: ...


class LossWeights(NamedTuple):
    """The summands of a client's loss."""

    weigh: Weigh
    """Weights of examples."""
    current: float = 0.5
    """Factor of the loss of labels, where there is an old model."""
    old: float = 0.5
    """Factor of the distillation."""
    alone: float = 1.0
    """Factor of the loss of labels, where there is no old model."""
    weighs_old: bool = False
    """Whether `weigh` acts on the distillation too."""


def glfc(options: GLFCOptions, run: Run) -> Method:
    """Compose GLFC."""
    evaluate = functools.partial(proxy.accuracy, options)
    return compensated(options, run, LossWeights(by_group), evaluate)


def compensated(
    options: GLFCOptions,
    run: Run,
    weights: LossWeights,
    evaluate: proxy.Evaluate,
) -> Method:
    """Compose GLFC with these loss weights at clients and this evaluation at the proxy.

    Raises:
      InputError: for sizes without `examples`.
    """
    learner = linear_learner(run)
    gradients = prototype_gradients(options, learner)
    return federate(
        run,
        learner,
        loss=replaced_loss("seen"),
        client_rules=(compensate(options, run, weights),),
        server_rules=(proxy.proxy_server(options, run, evaluate, gradients),),
    )


# ---- client ----------------------------------------------------------------------------

NAME = "glfc"


class ClientMemory(NamedTuple):
    """A client's state between rounds."""

    entropy: Float[Array, ""]
    """Mean entropy of its examples in its last round."""
    current: herding.Herded
    """The exemplars that it uses."""
    upcoming: herding.Herded
    """The exemplars that it will use once it finds its task changed."""
    class_task: Int[Array, " C"]
    """The task in which it had each class; -1: none yet."""
    was_absent: Bool[Array, ""]
    """Whether it has not taken part since it chose `upcoming`, and so has not measured
    whether the task changed."""


class FeatureSums(NamedTuple):
    """Sums over the features of a client's examples, by class."""

    unit: Float[Array, "Ct D"]
    """Sums of features scaled to length 1."""
    feature: Float[Array, "Ct D"]
    """Sums of features."""
    square: Float[Array, " Ct"]
    """Sums of squared lengths."""
    examples: Float[Array, " Ct"]
    """Numbers of examples."""


class LocalState(NamedTuple):
    """A client's memory of this rule within a round."""

    memory: ClientMemory
    """From its last round."""
    entropy: Float[Array, ""]
    """The sum of entropies over `examples` examples."""
    examples: Float[Array, ""]
    """Number of examples so far."""
    sums: FeatureSums
    """Of the features after training."""
    image: Float[Array, "Ct h w 3"]
    """Of each class the image nearest to the class mean so far."""
    distance: Float[Array, " Ct"]
    """Its squared distance from the class mean; inf: no image yet."""


def compensate(options: GLFCOptions, run: Run, weights: LossWeights) -> ClientRule:
    """Compose the client rule: loss, exemplars, change of task, and prototypes.

    Args:
      options: of the method.
      run: for sizes and training.
      weights: of the loss.
    """
    sizes = run.sizes
    width = run.network.width
    batch_size = run.training.batch_size
    budget = herding.Budget(options.memory_size, "client", options.memory_repeats)

    def init(_key: PRNGKeyArray, _trainable: Params) -> ClientMemory:
        no_exemplars = herding.nothing_herded(budget, sizes)
        no_task = jnp.full(sizes.classes, -1, jnp.int32)
        return ClientMemory(jnp.zeros(()), no_exemplars, no_exemplars, no_task, jnp.bool_(False))

    def on_start(_context: ClientContext, memory: ClientMemory, _key: PRNGKeyArray) -> LocalState:
        classes = sizes.task_classes
        zero = jnp.zeros(())
        sums = FeatureSums(
            unit=jnp.zeros((classes, width)),
            feature=jnp.zeros((classes, width)),
            square=jnp.zeros(classes),
            examples=jnp.zeros(classes),
        )
        image = jnp.zeros((classes, *run.network.image))
        return LocalState(memory, zero, zero, sums, image, jnp.full(classes, jnp.inf))

    def loss(step: ClientStep, local: LocalState) -> Float[Array, ""]:
        changed = task_changed(options, local, step.context.task)
        memory = adopt_exemplars(local.memory, changed)
        return weighted_loss(weights, step, memory, old_model(step.context, changed))

    def stored(memory: ClientMemory) -> Int[Array, " M"]:
        return jnp.concatenate([memory.current.exemplars.index, memory.upcoming.exemplars.index])

    def choose(context: ClientContext, local: LocalState, key: PRNGKeyArray) -> Int[Array, " count"]:
        task = context.task
        changed = task_changed(options, local, task)
        exemplars = adopt_exemplars(local.memory, changed).current.exemplars
        # the release joins exemplars and examples to one data set (specification, B5)
        examples = context.client.examples
        index = herding.draw_union(exemplars, task.old, batch_size, examples, key)
        # in `stored`, the upcoming exemplars follow the current ones
        offset = jnp.where(changed, budget.size(sizes), 0)
        return jnp.where(index >= 0, index + offset, -1)

    def on_end(
        context: ClientContext, local: LocalState, _trainable: Params, _memory: ClientMemory
    ) -> ClientMemory:
        memory = adopt_exemplars(local.memory, task_changed(options, local, context.task))
        entropy = mean_entropy(options, local, context.task)
        return memory._replace(entropy=entropy, was_absent=jnp.bool_(False))

    def choose_exemplars(
        context: ClientContext,
        gathered: herding.Gathered,
        _trainable: Params,
        memory: ClientMemory,
    ) -> ClientMemory:
        # a client that was absent for a whole task adopts the exemplars before it chooses
        # new ones: in the release all clients measure their entropy in every round
        memory = adopt_exemplars(memory, memory.was_absent)
        upcoming = herding.renew(memory.current, gathered, context.task, budget, sizes)
        has_class = jnp.zeros(sizes.classes, bool).at[gathered.label].max(gathered.index >= 0)
        class_task = jnp.where(has_class, context.task.index, memory.class_task)
        return memory._replace(upcoming=upcoming, class_task=class_task, was_absent=jnp.bool_(True))

    view = herding.pass_over(batch_size)
    start_gathering = herding.gather_from(sizes, width)
    passes = (
        ClientPass("before_training", view, measure_entropy),
        ClientPass("after_training", view, if_changed(options, add_statistics)),
        ClientPass("after_training", view, if_changed(options, find_nearest)),
        ClientPass("task_end", view, herding.gather, start_gathering, choose_exemplars),
    )
    replay = Replay(batch_size, stored, choose)
    return ClientRule(NAME, loss, init, on_start, passes, on_end, replay=replay)


def adopt_exemplars(memory: ClientMemory, changed: Bool[Array, ""]) -> ClientMemory:
    """Return the memory with the upcoming exemplars as current ones, if the task has changed."""

    def pick(upcoming: Array, current: Array) -> Array:
        return jnp.where(changed, upcoming, current)

    return memory._replace(current=jax.tree.map(pick, memory.upcoming, memory.current))


def if_changed(options: GLFCOptions, step_memory: StepMemory) -> StepMemory:
    """Return the step of a pass that only clients whose task has changed take."""

    def step_if_changed(step: ClientStep, local: LocalState) -> LocalState:
        changed = task_changed(options, local, step.context.task)
        take_step = functools.partial(step_memory, step)
        return jax.lax.cond(changed, take_step, lambda local: local, local)

    return step_if_changed


# ---- has the task changed? -------------------------------------------------------------


def measure_entropy(step: ClientStep, local: LocalState) -> LocalState:
    """Add the entropy of a batch under the received model, before training."""
    logits = step.forward(step.trainable, train=False).logits
    mask = step.batch.mask
    entropy = jnp.where(mask, entropy_of(logits, step.context.task.seen), 0.0)
    return local._replace(entropy=local.entropy + jnp.sum(entropy), examples=local.examples + jnp.sum(mask))


def entropy_of(logits: Float[Array, "B C"], seen: Bool[Array, " C"]) -> Float[Array, " B"]:
    """Return the entropy of a softmax over the seen classes, in nats."""
    probability = jax.nn.softmax(heads.mask_logits(logits, seen))
    summand = probability * jnp.log(probability + FLOOR)
    return -jnp.sum(jnp.where(seen, summand, 0.0), axis=-1)


def mean_entropy(options: GLFCOptions, local: LocalState, task: Task) -> Float[Array, ""]:
    """Return the mean over the client's examples, in nats or as a share of a uniform guess's."""
    mean = local.entropy / jnp.maximum(local.examples, 1)
    if options.entropy_unit == "nats":
        return mean
    # the entropy of a uniform guess is the logarithm of the number of classes
    return mean / jnp.log(jnp.maximum(jnp.sum(task.seen), 2))


def task_changed(options: GLFCOptions, local: LocalState, task: Task) -> Bool[Array, ""]:
    """Return whether the entropy has risen by more than the threshold since the last round."""
    rise = mean_entropy(options, local, task) - local.memory.entropy
    return rise > options.entropy_rise


# ---- the loss --------------------------------------------------------------------------


def old_model(context: ClientContext, changed: Bool[Array, ""]) -> proxy.OldModel:
    """Return the model that clients distil: the best one of the task that is over.

    When the client's task has just changed, this is the proxy's best model so far. Later
    the proxy has new images for the new task, and it is the best model before these.
    """
    best: proxy.BestModels = context.payload.sent["proxy"]
    return jax.tree.map(
        lambda current, previous: jnp.where(changed, current, previous), best.current, best.previous
    )


def weighted_loss(
    weights: LossWeights, step: ClientStep, memory: ClientMemory, old: proxy.OldModel
) -> Float[Array, ""]:
    """Return the whole loss: cross-entropy of the labels, and of an old model's outputs.

    Both are binary, one problem per class. For classes that the old model does not
    know, its outputs are replaced by the labels. Without an old model the loss is
    that of the labels.
    """
    context = step.context
    batch = step.batch
    logits = step.output.logits
    one_hot = jax.nn.one_hot(batch.label, logits.shape[-1])
    weight = weights.weigh(gap_of(logits, batch.label), batch, memory, context.task)
    seen = context.task.seen
    binary_loss = functools.partial(weighted_binary_loss, logits, seen=seen, mask=batch.mask)

    def old_outputs() -> Float[Array, "B C"]:
        output = step.learner.forward(context.frozen, context.cached, old.trainable, batch, old.task, False)
        return jnp.where(old.task.seen, jax.nn.sigmoid(output.logits), one_hot)

    has_old = old.task.index >= 0
    # only the target is inside the `cond`, not the loss: libtpu 0.0.42 crashes on the
    # gradient of a `cond` that returns a rounded array twice
    old_target = jax.lax.cond(has_old, old_outputs, lambda: one_hot)
    old_weight = jnp.ones_like(weight)
    if weights.weighs_old:
        old_weight = weight
    # GLFC: factors 0.5 and 0.5 with an old model, and 1 for the labels without one
    label_factor = jnp.where(has_old, weights.current, weights.alone)
    old_factor = jnp.where(has_old, weights.old, 0.0)
    label_loss = label_factor * binary_loss(one_hot, weight)
    return label_loss + old_factor * binary_loss(old_target, old_weight)


def gap_of(logits: Float[Array, "B C"], label: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return |sigmoid(z_y) - 1|, the gap of each example to its label, without a gradient."""
    # a weight must not be trained to be small
    z_y = jnp.take_along_axis(jax.lax.stop_gradient(logits), label[:, None], axis=-1)[:, 0]
    return jnp.abs(jax.nn.sigmoid(z_y) - 1)


def weighted_binary_loss(
    logits: Float[Array, "B C"],
    target: Float[Array, "B C"],
    weight: Float[Array, " B"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " B"],
) -> Float[Array, ""]:
    """Return the mean weighted binary cross-entropy over examples and seen classes."""
    loss = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    # torch's mean over the matrix [examples, seen classes]
    count = jnp.sum(mask) * jnp.sum(seen)
    return heads.reduce_rows(weight * jnp.sum(loss, axis=-1), mask, count, "mean")


def by_group(
    gap: Float[Array, " B"],
    batch: Batch,
    memory: ClientMemory,
    _task: Task,
) -> Float[Array, " B"]:
    """Return an example's gap over the mean gap of the old, or of the new examples.

    This is gradient compensation. Weights are 1 for clients that have learned no class yet.
    """
    learned = memory.current.learned
    is_old = learned[batch.label]
    old_weight = over_mean(gap, is_old & batch.mask)
    new_weight = over_mean(gap, ~is_old & batch.mask)
    return jnp.where(jnp.any(learned), jnp.where(is_old, old_weight, new_weight), 1.0)


def over_mean(gap: Float[Array, " B"], group: Bool[Array, " B"]) -> Float[Array, " B"]:
    """Return gaps divided by the mean gap of a group."""
    mean = jnp.sum(jnp.where(group, gap, 0.0)) / jnp.maximum(jnp.sum(group), 1)
    # a group without examples has mean 0, and its weights are not used
    return gap / jnp.maximum(mean, jnp.finfo(gap.dtype).tiny)


# ---- prototypes ------------------------------------------------------------------------


def add_statistics(step: ClientStep, local: LocalState) -> LocalState:
    """Add the features of a batch by class, under the client's trained model."""
    batch = step.batch
    feature = step.forward(step.trainable, train=False).feature

    def sum_by_class(values: Array) -> tuple[Array, Array]:
        classes = step.context.task.classes
        return heads.sum_by_class(values, batch.label, classes, batch.mask)

    unit_sum, examples = sum_by_class(heads.unit(feature))
    feature_sum, _ = sum_by_class(feature)
    square_sum, _ = sum_by_class(jnp.sum(feature**2, axis=-1, keepdims=True))
    batch_sums = FeatureSums(unit_sum, feature_sum, square_sum[:, 0], examples)
    return local._replace(sums=jax.tree.map(jnp.add, local.sums, batch_sums))


def find_nearest(step: ClientStep, local: LocalState) -> LocalState:
    """Keep, for each class, the image whose features are nearest to the class mean so far."""
    batch = step.batch
    # the class mean of features of length 1, as in herding; the pass before has completed
    # the sums
    mean = local.sums.unit / jnp.maximum(local.sums.examples, 1)[:, None]
    feature = step.forward(step.trainable, train=False).feature
    distance = jnp.sum((heads.unit(feature) - mean[:, None]) ** 2, axis=-1)
    in_class = (batch.label == step.context.task.classes[:, None]) & batch.mask
    distance = jnp.where(in_class, distance, jnp.inf)
    nearest = jnp.argmin(distance, axis=1)
    least = jnp.min(distance, axis=1)
    is_nearer = least < local.distance
    image = jnp.where(is_nearer[:, None, None, None], batch.input[nearest], local.image)
    return local._replace(image=image, distance=jnp.minimum(least, local.distance))


def prototype_gradients(options: GLFCOptions, learner: Learner) -> Report:
    """Report the gradients of a client's prototypes, if its task has changed."""

    def finalize(end: ClientEnd, _total: tuple) -> proxy.Gradients:
        context = end.context
        local: LocalState = end.memories[NAME]
        changed = task_changed(options, local, context.task)
        encode = functools.partial(encoded_prototypes, options, learner, context, end.trainable)
        # clients whose task has not changed send zeros: an upload has a fixed shape
        shapes = jax.eval_shape(encode, local)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        gradient = jax.lax.cond(changed, encode, lambda _local: zeros, local)
        present = changed & (local.sums.examples > 0)
        return proxy.Gradients(gradient, present, spread_of(local.sums))

    # `follows_rule`: the proxy merges nothing, so any aggregation rule may be chosen
    return Report(proxy.REPORT, finalize=finalize, follows_rule=True, possible=possible_gradients)


def possible_gradients(_context: ClientContext, reported: proxy.Gradients) -> Bool[Array, ""]:
    """Check that no variance is negative, and that gradients of biases lie in [-1, 1].

    A gradient of the classifier's bias is a probability minus 0 or 1, up to rounding.
    """
    return within(reported.spread, 0, jnp.inf) & within(reported.gradient.bias, -1.001, 1.001)


def encoded_prototypes(
    options: GLFCOptions,
    learner: Learner,
    context: ClientContext,
    trainable: Params,
    local: LocalState,
) -> LeNet:
    """Return the gradients of the task's perturbed prototypes."""
    label = jnp.maximum(context.task.classes, 0)
    pixels = to_unit(learner.network, local.image)
    pixels = perturb(options, learner, context, trainable, pixels, label)
    classes = len(context.task.seen)
    return proxy.encode(options, learner.network, classes, pixels, label)


def perturb(
    options: GLFCOptions,
    learner: Learner,
    context: ClientContext,
    trainable: Params,
    pixels: Float[Array, "Ct h w 3"],
    label: Int[Array, " Ct"],
) -> Float[Array, "Ct h w 3"]:
    """Return images after some steps of gradient descent on the client's loss of each."""
    task = context.task
    target = jax.nn.one_hot(label, len(task.seen))

    def loss(pixels: Array) -> Float[Array, ""]:
        batch = unlabelled(learner, pixels)
        output = learner.forward(context.frozen, context.cached, trainable, batch, task, False)
        weight = jnp.ones(len(pixels))
        mean = weighted_binary_loss(output.logits, target, weight, task.seen, batch.mask)
        # times the number of images: each image's gradient is that of its own loss
        return len(pixels) * mean

    def step(_: Array, pixels: Array) -> Array:
        gradient = jax.grad(loss)(pixels) + options.prototype_decay * pixels
        return pixels - options.prototype_lr * gradient

    return jax.lax.fori_loop(0, options.prototype_steps, step, pixels)


def spread_of(sums: FeatureSums) -> Float[Array, ""]:
    """Return the mean variance of a feature's entries within a class, over present classes."""
    examples = jnp.maximum(sums.examples, 1)
    present = sums.examples > 0
    mean = sums.feature / examples[:, None]
    # E|f|^2 - |E f|^2 is the sum of the variances of all entries
    variance = sums.square / examples - jnp.sum(mean**2, axis=-1)
    mean_variance = jnp.sum(jnp.where(present, variance, 0.0)) / jnp.maximum(jnp.sum(present), 1)
    # rounding may make it negative
    return jnp.maximum(mean_variance, 0.0) / sums.feature.shape[-1]
