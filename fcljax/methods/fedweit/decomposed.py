"""A learner whose network is composed anew for every task of a client, as FedWeIT does it (Yoon et al. 2021).

Neither network nor adapter nor classifier know of it. For task t a client computes with

    theta_t = B * m_t + A_t + sum_r alpha_tr A^r    (equation 1)

where B, the base, is the adapter's part, which travels and is averaged; the mask m_t (between 0 and 1, one
number for each entry of an array's last axis: its outputs), the sparse A_t and the attention alpha_t (one row
for each array) are the client's own; and the A^r are what the server has handed to everybody for this task,
other clients' A of finished tasks. What is the client's own lies in the classifier's place, behind the head,
so that `federate(personal=("classifier", "stats"))` keeps it there. Running statistics are one set for each
task.

All arrays of a network are one vector [N] here, and their masks another [M]: leaf by leaf, a network of a
hundred takes minutes to compile. Shapes are fixed: every client's A take T N numbers, and what was received
takes T R N, once, with the server. Evaluation gives every class the logit of the network of the task that
brought it, which takes as many passes as there were tasks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.parts.learner import Classifier, Learner, Output, Params
from fcljax.types import Batch, Frozen, Sizes, Task


class Shape(NamedTuple):
    """How networks are composed.

    kb_samples: R, parameters of others that a task may have
    mask: what masks begin with, inside of (0, 1)
    adaptive: the share of the first base that every A_t begins with
    retroactive: do the A of earlier tasks go on training?
    prune_threshold: numbers of A that are not larger are 0 wherever they are sent or evaluated
    client_sparsity: share of each array's outputs whose base a client does not send
    """

    kb_samples: int
    mask: float
    adaptive: float
    retroactive: bool
    prune_threshold: float
    client_sparsity: float


class Received(NamedTuple):
    """For each task A of R clients, and whose they are; -1: nobody's, and 0."""

    values: Float[Array, "T R N"]
    client: Int[Array, "T R"]


class Shared(NamedTuple):
    """In the adapter's place: the base, and what was handed out."""

    base: Float[Array, " N"]
    received: Received


class Own(NamedTuple):
    """In the classifier's place. Of all tasks: masks [T, M] before the sigmoid, A [T, N] and attention [T, R,
    L], and of which task each class is (-1: none). Of one task, as its part: without the axis T, but for A
    that train together, and without `task`."""

    head: PyTree
    mask: Float[Array, "*tasks M"]
    adaptive: Float[Array, "*tasks N"]
    attention: Float[Array, "*tasks R L"]
    task: PyTree = ()


class Sparse(NamedTuple):
    """What a client sends of a base: 0 where nothing is sent, and 1 or 0 by output; or means of both over
    clients."""

    base: Float[Array, " N"]
    sent: Float[Array, " M"]


def decomposed(inner: Learner, sizes: Sizes, shape: Shape) -> Learner:
    """The learner with a base that travels and everything else of a network with the client.

    Args:
      inner: does the computing; its adapter trains the same parameters in all tasks and its classifier is
        linear.
      sizes: of the run.
      shape: how networks are composed.

    Raises:
      InputError: for an adapter that has parameters for each task.
    """
    arrays = arrays_of(inner, sizes)
    head = _own_classifier(inner.classifier, shape)

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        params = inner.init(key, frozen)
        tasks = sizes.tasks
        base = arrays.flat(inner.adapter.trainable(params.adapter, make_tasks(sizes.classes, tasks)[0]))
        stats = jax.tree.map(lambda x: jnp.broadcast_to(x, (tasks, *x.shape)), params.stats)
        own = first_own(params.classifier, base, arrays, sizes, shape)
        nothing = jnp.zeros((tasks, shape.kb_samples, len(base)))
        received = Received(nothing, jnp.full(nothing.shape[:2], jnp.int32(-1)))
        return params._replace(adapter=Shared(base, received), classifier=own, stats=stats)

    def open_task(params: Params, _task: Task) -> Params:
        return params

    def trainable_of(params: Params, task: Task) -> Params:
        own = head.trainable(params.classifier, task)
        return Params(params.adapter.base, own, params.extra, params.stats)

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        base = trainable.adapter
        own = head.merge(params.classifier, task, trainable.classifier)
        base = filled(arrays, base, params.adapter.base) if isinstance(base, Sparse) else base
        shared = params.adapter._replace(base=base)
        return params._replace(adapter=shared, classifier=own, stats=trainable.stats)

    def cached_of(params: Params) -> Params:
        return Params(params.adapter.received, ())

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        own = trainable.classifier
        now = task.index
        own = own._replace(adaptive=own.adaptive[now]) if shape.retroactive else own
        theta = compose(arrays, trainable.adapter, own, cached.adapter.values[now])
        stats = at(trainable.stats, now)
        network = Params(arrays.tree(theta), own.head, trainable.extra, stats)
        output = inner.forward(frozen, Params((), ()), network, batch, task, train)
        moved = jax.tree.map(lambda every, new: every.at[now].set(new), trainable.stats, output.stats)
        return output._replace(stats=moved)

    def predict(frozen: Frozen, params: Params, batch: Batch, task: Task) -> Float[Array, "batch classes"]:
        return _predict(inner, arrays, shape, frozen, params, batch, task)

    def sends(trainable: Params, _task: Task) -> Params:
        base = sparse(arrays, trainable.adapter, trainable.classifier.mask, shape.client_sparsity)
        return trainable._replace(adapter=base)

    return inner._replace(
        classifier=head,
        init=init,
        open_task=open_task,
        trainable=trainable_of,
        merge=merge,
        cached=cached_of,
        forward=forward,
        predict=predict,
        sends=sends if shape.client_sparsity else None,
    )


def _own_classifier(inner: Classifier, shape: Shape) -> Classifier:
    """What of a client's own parameters trains in a task, and how it is put back; the learner does the
    rest."""

    def trainable_of(params: Own, task: Task) -> Own:
        now = of_task(params, task.index)
        adaptive = params.adaptive if shape.retroactive else now.adaptive
        return now._replace(head=inner.trainable(params.head, task), adaptive=adaptive)

    def merge(params: Own, task: Task, trainable: Own) -> Own:
        def put(every: Array, new: Array) -> Array:
            return every.at[task.index].set(new)

        adaptive = trainable.adaptive if shape.retroactive else put(params.adaptive, trainable.adaptive)
        return Own(
            inner.merge(params.head, task, trainable.head),
            put(params.mask, trainable.mask),
            adaptive,
            put(params.attention, trainable.attention),
            jnp.where(task.current, task.index, params.task),
        )

    def cached_of(_params: Own) -> tuple:
        return ()

    return inner._replace(trainable=trainable_of, merge=merge, cached=cached_of)


# ---- one network -------------------------------------------------------------------------------------------


class Arrays(NamedTuple):
    """The L arrays of a network, which lie one after the other in vectors [N], and their outputs, the entries
    of last axes, in vectors [M]."""

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """How many numbers each has."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def outputs(self) -> list[int]:
        """How many outputs each has; an array without axes has one."""
        return [math.prod(shape[-1:]) for shape in self.shapes]

    def flat(self, tree: PyTree) -> Float[Array, " N"]:
        """A tree of the arrays as one vector."""
        return jnp.concatenate([jnp.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)])

    def tree(self, vector: Float[Array, " N"]) -> PyTree:
        """The arrays of a vector."""
        pieces = jnp.split(vector, np.cumsum(self.sizes)[:-1])
        leaves = [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def of_outputs(self, values: Float[Array, "*lead M"]) -> Float[Array, "*lead N"]:
        """For each number the value of its output."""

        def tiled(piece: Array, shape: tuple[int, ...]) -> Array:
            return jnp.tile(piece, math.prod(shape[:-1]))

        return self._spread(values, tiled, lambda shape: math.prod(shape[-1:]))

    def of_arrays(self, values: Float[Array, "*lead L"]) -> Float[Array, "*lead N"]:
        """For each number the value of its array."""

        def repeated(piece: Array, shape: tuple[int, ...]) -> Array:
            return jnp.broadcast_to(piece, (*piece.shape[:-1], math.prod(shape)))

        return self._spread(values, repeated, lambda shape: 1)

    def _spread(self, values: Array, spread: Callable, width: Callable) -> Float[Array, "*lead N"]:
        """spread(values of an array, its shape) for all arrays; each has width(shape) values. Equal blocks
        of arrays are done at once: each array by itself would be compiled by itself."""
        lead = values.shape[:-1]
        done = 0
        found = []
        for shapes, times in runs(self.shapes):
            ends = np.cumsum([width(shape) for shape in shapes])
            part = values[..., done : done + times * ends[-1]].reshape(*lead, times, ends[-1])
            pieces = zip(jnp.split(part, ends[:-1], axis=-1), shapes, strict=True)
            found.append(jnp.concatenate([spread(*each) for each in pieces], -1).reshape(*lead, -1))
            done += times * ends[-1]
        return jnp.concatenate(found, axis=-1)


def runs(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[tuple[int, ...], ...], int]]:
    """The shapes as patterns and how often each comes in a row: a network's equal blocks, and the rest
    between them once."""
    found = []
    alone = []
    i = 0
    while i < len(shapes):
        width, times = max(
            ((width, _repeats(shapes, i, width)) for width in range(1, (len(shapes) - i) // 2 + 1)),
            key=lambda each: (each[0] * each[1] if each[1] > 1 else 0, each[1]),
            default=(1, 1),
        )
        if times > 1:
            found += [(tuple(alone), 1)] if alone else []
            found.append((shapes[i : i + width], times))
            alone = []
            i = i + width * times
        else:
            alone.append(shapes[i])
            i += 1
    return [*found, (tuple(alone), 1)] if alone else found


def _repeats(shapes: tuple, first: int, width: int) -> int:
    """How often the `width` shapes from `first` on come in a row."""
    pattern = shapes[first : first + width]
    times = 1
    while shapes[first + times * width : first + (times + 1) * width] == pattern:
        times += 1
    return times


def arrays_of(inner: Learner, sizes: Sizes) -> Arrays:
    """Of the part of the inner learner's adapter, without computing anything."""
    first = make_tasks(sizes.classes, sizes.tasks)[0]

    def adapter(key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        params = inner.init(key, Frozen(inner.network.init(key))).adapter
        return inner.adapter.trainable(params, first), inner.adapter.cached(params)

    trainable, cached = jax.eval_shape(adapter, jax.random.key(0))
    if jax.tree.leaves(cached):
        raise InputError("adapter: it has parameters for each task already; nearest: --lora-pairs one")
    leaves, structure = jax.tree.flatten(trainable)
    return Arrays(structure, tuple(leaf.shape for leaf in leaves))


def compose(
    arrays: Arrays, base: Float[Array, " N"], own: Own, received: Float[Array, "R N"]
) -> Float[Array, " N"]:
    """theta = B * sigmoid(mask) + A + sum_r alpha_r A^r (equation 1; the sigmoid is the release's).

    Args:
      arrays: of the network.
      base: B.
      own: mask [M], adaptive [N] and attention [R, L] of one task.
      received: A^r.
    """
    given = jnp.sum(arrays.of_arrays(own.attention) * received, axis=0)
    return base * arrays.of_outputs(jax.nn.sigmoid(own.mask)) + own.adaptive + given


def of_task(own: Own, index: ArrayLike) -> Own:
    """What a client has for one task alone."""
    return Own(own.head, own.mask[index], own.adaptive[index], own.attention[index])


def pruned(adaptive: Float[Array, "..."], prune_threshold: float) -> Float[Array, "..."]:
    """Numbers whose size is not above `prune_threshold` become 0."""
    return jnp.where(jnp.abs(adaptive) > prune_threshold, adaptive, 0.0)


def first_own(head: PyTree, base: Array, arrays: Arrays, sizes: Sizes, shape: Shape) -> Own:
    """What a client has before it ever trains: all tasks alike, no attention to anybody."""
    tasks = sizes.tasks
    raw = math.log(shape.mask / (1 - shape.mask))
    return Own(
        head,
        mask=jnp.full((tasks, sum(arrays.outputs)), raw, jnp.float32),
        adaptive=jnp.tile(shape.adaptive * base, (tasks, 1)),
        attention=jnp.zeros((tasks, shape.kb_samples, len(arrays.shapes))),
        task=jnp.full(sizes.classes, jnp.int32(-1)),
    )


def at(tree: PyTree, index: ArrayLike) -> PyTree:
    """Of leaves [T, ...] those of one task."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _predict(
    inner: Learner,
    arrays: Arrays,
    shape: Shape,
    frozen: Frozen,
    params: Params,
    batch: Batch,
    task: Task,
) -> Float[Array, "batch classes"]:
    """Each class has the logit of the network of the task that brought it; classes of no task yet count as
    the current one's."""
    classes = jnp.where(params.classifier.task < 0, task.index, params.classifier.task)

    def add(index: Int[Array, ""], found: Array) -> Array:
        own = of_task(params.classifier, index)
        own = own._replace(adaptive=pruned(own.adaptive, shape.prune_threshold))
        theta = compose(arrays, params.adapter.base, own, params.adapter.received.values[index])
        network = Params(arrays.tree(theta), own.head, params.extra, at(params.stats, index))
        output = inner.forward(frozen, Params((), ()), network, batch, task, False)
        return jnp.where(classes == index, output.logits, found)

    lowest = jnp.full((len(batch.image), len(classes)), jnp.finfo(jnp.float32).min)
    return jax.lax.fori_loop(0, task.index + 1, add, lowest)


# ---- what is sent ------------------------------------------------------------------------------------------


def sparse(
    arrays: Arrays, base: Float[Array, " N"], mask: Float[Array, " M"], client_sparsity: float
) -> Sparse:
    """A base without the share `client_sparsity` of each array's outputs, those with the smallest masks.

    The release compares masks before the sigmoid by their size, so that the most negative count as the
    largest; here those that let the least of the base through are left out.
    """
    outputs = np.array(arrays.outputs)
    array = np.repeat(np.arange(len(outputs)), outputs)
    ranked = jax.lax.sort((jnp.asarray(array), mask), num_keys=2)[1]
    least = ranked[np.cumsum(outputs) - outputs + np.floor(client_sparsity * outputs).astype(int)]
    sent = (mask >= least[array]).astype(jnp.float32)
    return Sparse(base * arrays.of_outputs(sent), sent)


def filled(arrays: Arrays, mean: Sparse, old: Float[Array, " N"]) -> Float[Array, " N"]:
    """The merged base: each number's mean over the clients that sent it; the old one where nobody did."""
    sent = arrays.of_outputs(mean.sent)
    return jnp.where(sent > 0, mean.base / jnp.where(sent > 0, sent, 1.0), old)
