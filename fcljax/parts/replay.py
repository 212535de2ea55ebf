"""Replay: examples of past tasks that clients keep, chosen uniformly (`replay`) or by
herding (`herded`).

Clients store indices of training examples, never images; the engine reads the images.
Examples are chosen when their task is over, because until then they are in the training
set, and join batches of later tasks.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.heads import unit
from fcljax.models.products import exact_matmul
from fcljax.parts.client import ClientPass, ClientRule, ClientStep, Replay
from fcljax.parts.learner import Params
from fcljax.types import Batch, ClientContext, Sizes, Task, View


class Exemplars(NamedTuple):
    """The replay buffer of a client: M places for training examples."""

    label: Int[Array, " M"]
    index: Int[Array, " M"]
    """Index of the training example; -1: an empty place."""
    priority: Float[Array, " M"]
    """Examples of the lowest priority are dropped first."""


def no_exemplars(size: int) -> Exemplars:
    """Return an empty replay buffer."""
    return Exemplars(jnp.zeros(size, jnp.int32), jnp.full(size, -1, jnp.int32), jnp.full(size, -1.0))


def draw_exemplars(
    exemplars: Exemplars, old: Bool[Array, " C"], count: int, key: PRNGKeyArray
) -> Int[Array, " count"]:
    """Draw `count` exemplars of old classes uniformly, as indices; -1 if there are none."""
    usable = _usable(exemplars, old)
    # equal logits draw uniformly. Without usable exemplars all logits are -inf: the draw
    # is then arbitrary, and replaced by -1
    chosen = jax.random.categorical(key, jnp.where(usable, 0.0, -jnp.inf), shape=(count,))
    return jnp.where(jnp.any(usable), chosen, -1)


def _usable(exemplars: Exemplars, old: Bool[Array, " C"]) -> Bool[Array, " M"]:
    # examples of the current task are still in the training set
    return (exemplars.index >= 0) & old[exemplars.label]


def pass_over(batch_size: int) -> View:
    """Return a view of one pass over the client's own images, in order and not augmented."""
    return View(1, batch_size, shuffle=False, augment=False)


# ---- uniformly -------------------------------------------------------------------------


class Memory(NamedTuple):
    """A client's exemplars, and the key of their priorities."""

    exemplars: Exemplars
    key: Array


def replay(size: int, batch_size: int) -> ClientRule:
    """Let examples of earlier tasks join every batch, as many as the batch has itself.

    Args:
      size: examples that a client keeps.
      batch_size: of training, and of the pass that fills the buffer.
    """

    def init(key: PRNGKeyArray, _trainable: Params) -> Memory:
        # key data, not a key: client state is stored as plain arrays in checkpoints
        return Memory(no_exemplars(size), jax.random.key_data(key))

    def offer(step: ClientStep, memory: Memory) -> Memory:
        return memory._replace(exemplars=keep_highest(memory.exemplars, step.batch, memory.key))

    def keep(
        _context: ClientContext,
        memory: Memory,
        _trainable: Params,
        _state: Memory,
    ) -> Memory:
        return memory

    def stored(state: Memory) -> Int[Array, " M"]:
        return state.exemplars.index

    def choose(
        context: ClientContext,
        memory: Memory,
        key: PRNGKeyArray,
    ) -> Int[Array, " count"]:
        return draw_exemplars(memory.exemplars, context.task.old, batch_size, key)

    at_end = ClientPass("task_end", pass_over(batch_size), offer, on_end=keep)
    return ClientRule("replay", init=init, passes=(at_end,), replay=Replay(batch_size, stored, choose))


def keep_highest(exemplars: Exemplars, batch: Batch, key_data: Array) -> Exemplars:
    """Return the exemplars after a batch was offered: of all examples ever offered
    those of highest priority, each at most once.

    A priority is uniform and depends on the client and the example alone, so this is a
    uniform sample of all examples so far, whatever their order and the batch size.
    """
    key = jax.random.wrap_key_data(key_data)

    def uniform(index: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(key, index))

    # padding has index -1, and any number will do: its priority is replaced below
    priority = jax.vmap(uniform)(jnp.maximum(batch.index, 0))
    # a task that comes again offers the same examples: each is stored at most once
    stored = jnp.any(batch.index[:, None] == exemplars.index, axis=1)
    # -2 is below the -1 of empty places: padding and repeats never take a place
    offered = Exemplars(batch.label, batch.index, jnp.where(batch.mask & ~stored, priority, -2.0))
    candidates = _concatenate(exemplars, offered)
    # stable: of equal priorities the stored one stays
    best = jnp.argsort(-candidates.priority, stable=True)[: exemplars.index.shape[0]]
    return jax.tree.map(lambda leaf: leaf[best], candidates)


def _concatenate(exemplars: Exemplars, new: Exemplars) -> Exemplars:
    def join(stored: Array, added: Array) -> Array:
        return jnp.concatenate([stored, added.astype(stored.dtype)])

    return jax.tree.map(join, exemplars, new)


# ---- by herding ------------------------------------------------------------------------


class Gathered(NamedTuple):
    """Features of a client's examples in the order in which it read them, at most R."""

    feature: Float[Array, "R D"]
    label: Int[Array, " R"]
    index: Int[Array, " R"]
    """Index of the training example; -1: an empty place."""
    count: Int[Array, ""]
    """Number of examples so far."""


class Herded(NamedTuple):
    """The state of a client."""

    exemplars: Exemplars
    """The first exemplar of a class has priority 0, the next -1, and so on."""
    learned: Bool[Array, " C"]
    """Classes that the client has chosen from so far."""


class Budget(NamedTuple):
    """Number of examples that a client stores."""

    examples: int
    """Number of examples, as `per` says."""
    per: Literal["class", "client"] = "class"
    """`class`: of every class. `client`: in all; every learned class then gets the same
    share, rounded down."""
    repeats: bool = False
    """Whether an example may be chosen again, as in GLFC's release."""

    def size(self, sizes: Sizes) -> int:
        """Return the places of a buffer."""
        if self.per == "class":
            return self.examples * sizes.classes
        return self.examples

    def most(self, sizes: Sizes) -> int:
        """Return the most examples of one class."""
        # with repeats a class may fill its share with few different examples
        if self.repeats:
            return self.examples
        return min(self.examples, sizes.examples)

    def share(self, learned: Bool[Array, " C"]) -> Int[Array, ""]:
        """Return the number of examples of each learned class."""
        classes = 1
        if self.per == "client":
            classes = jnp.maximum(jnp.sum(learned), 1)
        return jnp.int32(self.examples) // classes


def herded(budget: Budget, sizes: Sizes, width: int, batch_size: int) -> ClientRule:
    """Let examples of earlier tasks join batches, chosen by herding under the model
    that their task ended with.

    They join as often as if they and the client's own examples were one data set, and
    at most as many as a batch has itself (herding: Rebuffi et al. 2017, algorithm 4).

    Args:
      budget: how many a client keeps.
      sizes: of the run; `examples` must be known.
      width: D, of the features that the classifier reads.
      batch_size: of training, and of the pass that gathers features.

    Raises:
      InputError: for sizes without `examples`.
    """

    def init(_key: PRNGKeyArray, _trainable: Params) -> Herded:
        return nothing_herded(budget, sizes)

    def keep(
        context: ClientContext,
        gathered: Gathered,
        _trainable: Params,
        state: Herded,
    ) -> Herded:
        return renew(state, gathered, context.task, budget, sizes)

    def stored(state: Herded) -> Int[Array, " M"]:
        return state.exemplars.index

    def choose(
        context: ClientContext,
        memory: Herded,
        key: PRNGKeyArray,
    ) -> Int[Array, " count"]:
        return draw_union(memory.exemplars, context.task.old, batch_size, context.client.examples, key)

    gathering = ClientPass("task_end", pass_over(batch_size), gather, gather_from(sizes, width), keep)
    return ClientRule("herded", init=init, passes=(gathering,), replay=Replay(batch_size, stored, choose))


def nothing_herded(budget: Budget, sizes: Sizes) -> Herded:
    """Return a client's state before its first task."""
    return Herded(no_exemplars(budget.size(sizes)), jnp.zeros(sizes.classes, bool))


def gather_from(sizes: Sizes, width: int) -> Callable[..., Gathered]:
    """Return the start of a pass that gathers features: a place for every example that
    a client can hold.

    Raises:
      InputError: for sizes without `examples`.
    """
    if sizes.examples < 1:
        raise InputError(
            "examples: 0, where herding needs the most examples that a client holds (Sizes.examples)"
        )

    def on_start(_context: ClientContext, _state: PyTree, _key: PRNGKeyArray) -> Gathered:
        empty = jnp.full(sizes.examples, -1, jnp.int32)
        feature = jnp.zeros((sizes.examples, width))
        return Gathered(feature, jnp.zeros(sizes.examples, jnp.int32), empty, jnp.int32(0))

    return on_start


def gather(step: ClientStep, gathered: Gathered) -> Gathered:
    """Add the examples of a batch with their features.

    Features are those of evaluation: with the statistics of a batch, examples of a batch
    would change each other's features.
    """
    batch = step.batch
    feature = step.forward(step.trainable, train=False).feature
    # consecutive places from the first free one; padding gets a place beyond the end,
    # which JAX drops
    place = gathered.count + jnp.cumsum(batch.mask) - 1
    place = jnp.where(batch.mask, place, gathered.index.shape[0])

    def write(buffer: Array, new: Array) -> Array:
        return buffer.at[place].set(new.astype(buffer.dtype), mode="drop")

    return Gathered(
        write(gathered.feature, feature),
        write(gathered.label, batch.label),
        write(gathered.index, batch.index),
        gathered.count + jnp.sum(batch.mask),
    )


def renew(
    memory: Herded,
    gathered: Gathered,
    task: Task,
    budget: Budget,
    sizes: Sizes,
) -> Herded:
    """Return the buffer after a task: old classes are cut to their share, and examples
    of the task's classes are chosen (GLFC, section B5 of the specification)."""
    most = budget.most(sizes)
    group = group_of(gathered, task)
    chosen = herd(gathered.feature, group, len(task.classes), most, budget.repeats)
    index = jnp.where(chosen >= 0, gathered.index[chosen], -1)
    # the order of choice is the priority: a smaller share later keeps the exemplars that
    # were chosen first (iCaRL)
    priority = jnp.broadcast_to(-jnp.arange(most, dtype=jnp.float32), chosen.shape)
    label = jnp.broadcast_to(jnp.maximum(task.classes, 0)[:, None], chosen.shape)
    new = Exemplars(*(leaf.reshape(-1) for leaf in (label, index, priority)))
    # `max`, not `set`: empty places share a label with chosen exemplars (those of padding
    # classes have label 0), and must not undo their entry
    chosen_now = jnp.zeros_like(memory.learned).at[new.label].max(new.index >= 0)
    old = memory.exemplars
    # a class that comes again, as in a stream of domains, keeps only its new exemplars
    old = old._replace(index=jnp.where(chosen_now[old.label], -1, old.index))
    learned = memory.learned | chosen_now
    exemplars = _cut(_concatenate(old, new), budget.share(learned), budget.size(sizes))
    return Herded(exemplars, learned)


def _cut(exemplars: Exemplars, share: Int[Array, ""], size: int) -> Exemplars:
    """Return the first `share` exemplars of every class, in `size` places."""
    stays = (exemplars.index >= 0) & (-exemplars.priority < share)
    # False sorts before True; stable, so that exemplars of a class keep their order
    order = jnp.argsort(~stays, stable=True)
    first = order[:size]
    exemplars_left = jax.tree.map(lambda leaf: leaf[first], exemplars)
    # cut exemplars that still fall into the buffer become empty places
    pick = functools.partial(jnp.where, stays[first])
    return jax.tree.map(pick, exemplars_left, no_exemplars(size))


def group_of(gathered: Gathered, task: Task) -> Int[Array, " R"]:
    """Return the index of each example's class in the task; -1 for other classes."""
    same = (gathered.label[:, None] == task.classes) & (gathered.index >= 0)[:, None]
    return jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), -1)


def herd(
    feature: Float[Array, "R D"],
    group: Int[Array, " R"],
    groups: int,
    most: int,
    repeats: bool = False,
) -> Int[Array, "groups most"]:
    """Choose examples by herding (Rebuffi et al. 2017, algorithm 4): each next example
    brings the mean of the chosen ones nearest to the mean of their group. Features
    count as vectors of length 1; of equally near examples the first is chosen.

    Args:
      feature: of all examples.
      group: of each example, from 0; -1: none.
      groups: their number.
      most: examples to choose of each group.
      repeats: whether an example may be chosen again.

    Returns:
      Indices of the chosen examples of each group in their order; -1 where a group has no more.
    """
    members = group == jnp.arange(groups)[:, None]
    # the mean of directions, as in iCaRL
    vector = jnp.where((group >= 0)[:, None], unit(feature), 0.0)
    size = jnp.maximum(jnp.sum(members, axis=1), 1)
    mean = exact_matmul(members.astype(jnp.float32), vector) / size[:, None]
    group_index = jnp.maximum(group, 0)
    half_square = jnp.sum(vector * vector, axis=1) / 2

    def choose(carry: tuple, number: Array) -> tuple:
        total, free = carry
        # argmin |mu - (total + x) / n| = argmax x . (n mu - total) - |x|^2 / 2
        missing = number * mean - total
        score = jnp.sum(vector * missing[group_index], axis=1) - half_square
        best = jnp.argmax(jnp.where(free, score, -jnp.inf), axis=1)
        exists = jnp.any(free, axis=1)
        # without free members all scores are -inf, and `best` is arbitrary
        total = total + jnp.where(exists[:, None], vector[best], 0.0)
        used = (jnp.arange(len(group)) == best[:, None]) & (not repeats)
        return (total, free & ~used), jnp.where(exists, best, -1)

    numbers = jnp.arange(1, most + 1, dtype=jnp.float32)
    _, chosen = jax.lax.scan(choose, (jnp.zeros_like(mean), members), numbers)
    return chosen.T.astype(jnp.int32)


def draw_union(
    exemplars: Exemplars,
    old: Bool[Array, " C"],
    batch_size: int,
    examples: Int[Array, ""],
    key: PRNGKeyArray,
) -> Int[Array, " batch_size"]:
    """Draw the indices of exemplars of old classes, as many as a batch of the union of
    exemplars and the client's own `examples` would have on average, and at most as many
    as a batch; -1: none."""
    count = jnp.sum(_usable(exemplars, old))
    # exemplars and examples have the same ratio in a batch as in the union
    num_replayed = jnp.ceil(batch_size * count / jnp.maximum(examples, 1))
    chosen = draw_exemplars(exemplars, old, batch_size, key)
    return jnp.where(jnp.arange(batch_size) < num_replayed, chosen, -1)
