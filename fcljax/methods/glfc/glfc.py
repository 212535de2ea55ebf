"""GLFC: federated class-incremental learning (Dong et al., CVPR 2022), as its release has it (specification
B4 to B10).

A client finds out by itself that its task has changed: the entropy of what the newest global model says of
its rows rises. Then it adopts the exemplars of its last task, distils the best model of that task, and sends
gradients of prototype images, from which a proxy server rebuilds images that choose the best model
(`proxy.py`). Its loss weighs each row by how far it is from its label, relative to the other old or
new rows of the batch, so that neither outweighs the other.

In the release a client chooses exemplars when it meets the next task, from rows of the one that is over.
Here it chooses when a task is over, from the same rows under the same model, and adopts them later.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.full import FullOptions
from fcljax.adapters.lora import LoraOptions
from fcljax.methods.glfc.lenet import LeNet
from fcljax.methods.glfc.proxy import (
    REPORT,
    Judge,
    Old,
    ProxyOptions,
    Sent,
    encode,
    proxy_server,
    share_right,
)
from fcljax.models.heads import class_sums, mask_logits, reduce_rows, unit
from fcljax.parts.classifiers import linear_on
from fcljax.parts.federate import Run, Seen, Term, federate
from fcljax.parts.learner import Learner, Model, Objective, learner
from fcljax.parts.replay import Budget, Gathered, Herded, draw_union, gather, gathering, no_memory, renew
from fcljax.parts.task_start import unlabelled
from fcljax.pixels import to_unit
from fcljax.settings import Preset, RunConfig
from fcljax.types import Batch, ClientContext, Method, Task, View

Schedule = Literal["constant", "steps", "released"]

FLOOR = 1e-5  # added to probabilities under the logarithm (release)
MILESTONES = (0.5, 0.75, 0.9)  # of a task's epochs, at each of which the rate is divided
DIVISOR = 5.0


@dataclasses.dataclass(frozen=True)
class GLFCOptions(ProxyOptions):
    """Options of GLFC."""

    memory_size: int = 200
    """Examples in the memory of a client, shared by its old classes."""
    memory_repeats: bool = False
    """Whether herding may choose an example again, as the release's does."""
    entropy_rise: float = 0.02
    """Rise of the mean entropy of a client's examples at which it takes its task as new."""
    entropy_unit: Literal["share", "nats"] = "share"
    """Unit of that rise: nats, or the entropy of a uniform guess among the seen classes."""
    lr_schedule: Schedule = "constant"
    """Learning-rate schedule over a task: constant, divided by 5 after 1/2, 3/4 and 9/10 of its epochs
    (steps), or the same but for the round of each step alone (released)."""


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


class Rule(NamedTuple):
    """How a client's loss is put together.

    weigh(gap, batch, memory, task) -> weight of each row: `gap` is how far it is from its label
    current: factor of the loss of labels, where there is an old model
    old: factor of the distillation
    alone: factor of the loss of labels, where there is none
    weighs_old: does the weight act on the distillation too?
    """

    weigh: Callable[[Array, Batch, "Known", Task], Float[Array, " B"]]
    current: float = 0.5
    old: float = 0.5
    alone: float = 1.0
    weighs_old: bool = False


def glfc(options: GLFCOptions, run: Run) -> Method:
    """GLFC as a method. `options` must be resolved."""
    return compensated(options, run, Rule(by_group), functools.partial(share_right, options))


def compensated(options: GLFCOptions, run: Run, rule: Rule, judge: Judge) -> Method:
    """GLFC with its clients' weights and its proxy's judge to choose.

    Raises:
      InputError: for a setting without `rows`.
    """
    head = linear_on(run.adapter, run.network.width, run.sizes.classes)
    model = learner(run.network, run.adapter, head)
    schedule, epochs = options.lr_schedule, run.train.epochs
    factor = lambda round_, rounds, epoch: rate_factor(schedule, epochs, round_, rounds, epoch)
    terms = (client(options, run, model, rule), *run.terms)
    steps = (proxy_server(options, run.sizes, run.network, judge),)
    return federate(
        model,
        run.sizes,
        run.train._replace(factor=factor),
        terms,
        steps,
        objective=Objective("seen", weight=0.0),
        aggregation=run.aggregation,
    )


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


# ---- what a client remembers -------------------------------------------------------------------------------


class Known(NamedTuple):
    """What a client keeps: the last entropy of its rows, the exemplars that it uses, those that it will use
    once it finds its task changed, and the task in which it had each class (-1: in none yet)."""

    entropy: Float[Array, ""]
    now: Herded
    later: Herded
    block: Int[Array, " C"]


class Sums(NamedTuple):
    """Of the features of a client's rows by class: sums, of vectors of length 1 and as they are, sums of
    squares, and numbers of rows."""

    near: Float[Array, "Ct D"]
    feature: Float[Array, "Ct D"]
    square: Float[Array, " Ct"]
    rows: Float[Array, " Ct"]


class Work(NamedTuple):
    """A client at work: what it keeps, the entropy of its rows as a sum over so many rows, its features, and
    of each class the image nearest to the mean so far."""

    known: Known
    entropy: Float[Array, ""]
    rows: Float[Array, ""]
    sums: Sums
    image: Float[Array, "Ct h w 3"]
    distance: Float[Array, " Ct"]


def client(options: GLFCOptions, run: Run, model: Learner, rule: Rule) -> Term:
    """All that clients do besides the step of the optimiser.

    Args:
      options: resolved.
      kit: the run's.
      model: what learns.
      rule: how the loss is put together.
    """
    sizes, size = run.sizes, run.train.batch_size
    budget = Budget(options.memory_size, "client", options.memory_repeats)
    view, room = View(1, size, shuffle=False, augment=False), gathering(sizes, run.network.width)
    fires = functools.partial(task_changed, options)

    def init(key: PRNGKeyArray, part: Model) -> Known:
        del key, part
        nothing = no_memory(budget, sizes)
        return Known(jnp.zeros(()), nothing, nothing, jnp.full(sizes.classes, -1, jnp.int32))

    def open_(context: ClientContext, known: Known, key: PRNGKeyArray) -> Work:
        del context, key
        count, width, zero = sizes.task_classes, run.network.width, jnp.zeros(())
        sums = Sums(*(jnp.zeros(shape) for shape in ((count, width), (count, width), count, count)))
        image = jnp.zeros((count, *run.network.image))
        return Work(known, zero, zero, sums, image, jnp.full(count, jnp.inf))

    def memory_of(context: ClientContext, work: Work) -> Known:
        return adopted(work.known, fires(work, context.task))

    def recall(context: ClientContext, work: Work, key: PRNGKeyArray) -> Int[Array, " recalls"]:
        now = memory_of(context, work).now
        place = draw_union(now.exemplars, context.task.old, size, context.client.examples, key)
        behind = jnp.where(fires(work, context.task), budget.size(sizes), 0)  # in `rows`, both lie end to end
        return jnp.where(place >= 0, place + behind, -1)

    def loss(learner: Learner, seen: Seen, work: Work) -> Float[Array, ""]:
        old = old_model(seen.context, fires(work, seen.context.task))
        return rule_loss(rule, learner, seen, memory_of(seen.context, work), old)

    def if_changed(then: Callable[[Learner, Seen, Work], Work]) -> Callable[[Learner, Seen, Work], Work]:
        def look(learner: Learner, seen: Seen, work: Work) -> Work:
            act = functools.partial(then, learner, seen)
            return jax.lax.cond(fires(work, seen.context.task), act, lambda work: work, work)

        return look

    def report(context: ClientContext, work: Work, part: Model) -> Sent:
        changed, encoded = (
            fires(work, context.task),
            functools.partial(prototypes, options, model, context, part),
        )
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(encoded, work))
        gradient = jax.lax.cond(changed, encoded, lambda work: none, work)
        return Sent(gradient, changed & (work.sums.rows > 0), spread_of(work.sums))

    def keep(context: ClientContext, work: Work, part: Model, known: Known) -> Known:
        del part, known
        return memory_of(context, work)._replace(entropy=mean_entropy(options, work, context.task))

    def choose(context: ClientContext, gathered: Gathered, part: Model, known: Known) -> Known:
        del part
        later = renew(known.now, gathered, context.task, budget, sizes)
        mine = jnp.zeros(sizes.classes, bool).at[gathered.label].max(gathered.row >= 0)
        return known._replace(later=later, block=jnp.where(mine, context.task.index, known.block))

    return Term(
        REPORT,
        loss,
        init,
        open_,
        if_changed(add_features),
        keep,
        recall=recall,
        rows=lambda known: jnp.concatenate([known.now.exemplars.row, known.later.exemplars.row]),
        recalls=size,
        view=view,
        reads=("proxy",),
        first=measure,
        again=if_changed(find_nearest),
        report=report,
        closing=Term(REPORT, open=room, look=gather, keep=choose, view=view, at_end=True),
    )


def adopted(known: Known, changed: Bool[Array, ""]) -> Known:
    """What a client keeps, once it knows whether its task has changed (B5)."""
    pick = lambda new, old: jnp.where(changed, new, old)
    return known._replace(now=jax.tree.map(pick, known.later, known.now))


# ---- has the task changed? (B4) ----------------------------------------------------------------------------


def measure(learner: Learner, seen: Seen, work: Work) -> Work:
    """Before training: the entropy of a batch under the model that was sent."""
    context, batch = seen.context, seen.batch
    logits = learner.forward(context.frozen, context.cached, seen.part, batch, context.task, False).logits
    entropy = entropy_of(logits, context.task.seen)
    mask = batch.mask
    return work._replace(
        entropy=work.entropy + jnp.sum(jnp.where(mask, entropy, 0.0)), rows=work.rows + jnp.sum(mask)
    )


def entropy_of(logits: Float[Array, "B C"], seen: Bool[Array, " C"]) -> Float[Array, " B"]:
    """The entropy of a softmax over the seen classes, in nats."""
    share = jax.nn.softmax(mask_logits(logits, seen))
    return -jnp.sum(jnp.where(seen, share * jnp.log(share + FLOOR), 0.0), axis=-1)


def mean_entropy(options: GLFCOptions, work: Work, task: Task) -> Float[Array, ""]:
    """Of a client's rows, in nats or as a share of a uniform guess's."""
    mean = work.entropy / jnp.maximum(work.rows, 1)
    if options.entropy_unit == "nats":
        return mean
    return mean / jnp.log(jnp.maximum(jnp.sum(task.seen), 2))


def task_changed(options: GLFCOptions, work: Work, task: Task) -> Bool[Array, ""]:
    """The signal: the entropy is higher than in the client's last round by more than the threshold."""
    rise = mean_entropy(options, work, task) - work.known.entropy
    return rise > options.entropy_rise


# ---- the loss (B6, B7) -------------------------------------------------------------------------------------


def old_model(context: ClientContext, changed: Bool[Array, ""]) -> Old:
    """Which model is distilled: the best of the task that is over, which is the best of all when the task has
    just changed, and later the best from before the newest gradients."""
    choice = context.payload.sent["proxy"]
    return jax.tree.map(lambda a, b: jnp.where(changed, a, b), choice.current, choice.previous)


def rule_loss(rule: Rule, learner: Learner, seen: Seen, known: Known, old: Old) -> Float[Array, ""]:
    """The whole loss: binary cross-entropy of the labels, and of an old model's answers where there is one,
    of which the classes that it does not know are the labels."""
    context, batch, logits = seen.context, seen.batch, seen.output.logits
    label = jax.nn.one_hot(batch.label, logits.shape[-1])
    weight = rule.weigh(gap_of(logits, batch.label), batch, known, context.task)
    binary = functools.partial(binary_loss, logits, seen=context.task.seen, mask=batch.mask)

    def both() -> Float[Array, ""]:
        answers = learner.forward(context.frozen, context.cached, old.part, batch, old.task, False).logits
        target = jnp.where(old.task.seen, jax.nn.sigmoid(jax.lax.stop_gradient(answers)), label)
        own = weight if rule.weighs_old else jnp.ones_like(weight)
        return rule.current * binary(label, weight) + rule.old * binary(target, own)

    return jax.lax.cond(old.task.index >= 0, both, lambda: rule.alone * binary(label, weight))


def gap_of(logits: Float[Array, "B C"], label: Int[Array, " B"]) -> Float[Array, " B"]:
    """How far each row is from its label: |sigmoid(z_y) - 1|, without a gradient."""
    own = jnp.take_along_axis(jax.lax.stop_gradient(logits), label[:, None], axis=-1)[:, 0]
    return jnp.abs(jax.nn.sigmoid(own) - 1)


def binary_loss(
    logits: Float[Array, "B C"],
    target: Float[Array, "B C"],
    weight: Float[Array, " B"],
    seen: Bool[Array, " C"],
    mask: Bool[Array, " B"],
) -> Float[Array, ""]:
    """The mean, over the rows in the mask and the seen classes, of the weighted binary cross-entropy."""
    each = jnp.where(seen, optax.sigmoid_binary_cross_entropy(logits, target), 0.0)
    return reduce_rows(weight * jnp.sum(each, axis=-1), mask, jnp.sum(mask) * jnp.sum(seen), "mean")


def by_group(gap: Float[Array, " B"], batch: Batch, known: Known, task: Task) -> Float[Array, " B"]:
    """Gradient compensation: a row's gap over the mean gap of the old or of the new rows, whichever it is;
    1 for clients that have learned nothing."""
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


def add_features(learner: Learner, seen: Seen, work: Work) -> Work:
    """After training: the features of a batch by class, under the client's own model."""
    context, batch, own = seen.context, seen.batch, work.sums
    feature = feature_of(learner, seen)
    add = lambda rows: class_sums(rows, batch.label, context.task.classes, batch.mask)
    (near, rows), (plain, _) = add(unit(feature)), add(feature)
    (square, _) = add(jnp.sum(feature**2, axis=-1, keepdims=True))
    new = Sums(own.near + near, own.feature + plain, own.square + square[:, 0], own.rows + rows)
    return work._replace(sums=new)


def feature_of(learner: Learner, seen: Seen) -> Float[Array, "B D"]:
    """Features as in evaluation."""
    context = seen.context
    return learner.forward(context.frozen, context.cached, seen.part, seen.batch, context.task, False).feature


def find_nearest(learner: Learner, seen: Seen, work: Work) -> Work:
    """In a second pass: of each class the image whose features are nearest to the class mean so far."""
    batch, mean = seen.batch, work.sums.near / jnp.maximum(work.sums.rows, 1)[:, None]
    gap = jnp.sum((unit(feature_of(learner, seen)) - mean[:, None]) ** 2, axis=-1)
    mine = (batch.label == seen.context.task.classes[:, None]) & batch.mask
    gap = jnp.where(mine, gap, jnp.inf)
    best = jnp.argmin(gap, axis=1)
    least = jnp.min(gap, axis=1)
    nearer = least < work.distance
    image = jnp.where(nearer[:, None, None, None], batch.image[best], work.image)
    return work._replace(image=image, distance=jnp.minimum(least, work.distance))


def prototypes(
    options: GLFCOptions, model: Learner, context: ClientContext, part: Model, work: Work
) -> LeNet:
    """The gradients of the task's prototypes, once they are perturbed."""
    label = jnp.maximum(context.task.classes, 0)
    pixels = perturb(options, model, context, part, to_unit(model.network, work.image), label)
    return encode(options, model.network, len(context.task.seen), pixels, label)


def perturb(
    options: GLFCOptions,
    model: Learner,
    context: ClientContext,
    part: Model,
    pixels: Float[Array, "Ct h w 3"],
    label: Int[Array, " Ct"],
) -> Float[Array, "Ct h w 3"]:
    """Images after some steps of gradient descent on the client's own loss of them: each by itself."""
    target = jax.nn.one_hot(label, len(context.task.seen))

    def loss(pixels: Array) -> Float[Array, ""]:
        batch = unlabelled(model, pixels)
        logits = model.forward(context.frozen, context.cached, part, batch, context.task, False).logits
        one = jnp.ones(len(pixels))
        return len(pixels) * binary_loss(logits, target, one, context.task.seen, batch.mask)

    def step(i: Array, pixels: Array) -> Array:
        del i
        slope = jax.grad(loss)(pixels) + options.prototype_decay * pixels
        return pixels - options.prototype_lr * slope

    return jax.lax.fori_loop(0, options.prototype_steps, step, pixels)


def spread_of(sums: Sums) -> Float[Array, ""]:
    """The mean variance of a number of the features within a class, over the classes there are."""
    rows, there = jnp.maximum(sums.rows, 1), sums.rows > 0
    trace = sums.square / rows - jnp.sum((sums.feature / rows[:, None]) ** 2, axis=-1)
    mean = jnp.sum(jnp.where(there, trace, 0.0)) / jnp.maximum(jnp.sum(there), 1)
    return jnp.maximum(mean, 0.0) / sums.feature.shape[-1]
