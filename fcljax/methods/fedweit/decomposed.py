"""A learner whose network is composed anew for each task of a client (FedWeIT, Yoon et
al. 2021).

Network, adapter and classifier stay as they are: they get composed weights. For task t a
client computes with

    theta_t = B * m_t + A_t + sum_r alpha_tr A^r                                    (eq. 1)

B is the base: it stands in the adapter's place in `Params`, is sent and averaged. The
client keeps the mask m_t (a number in (0, 1) for each output, the entries of an array's
last axis), the sparse A_t and the attention alpha_t (one row for each array). The A^r are
other clients' A of finished tasks, which the server has sent to all clients for this
task. The client's parameters stand in the classifier's place, beside the head, so that
`federate(personal=("classifier", "stats"))` keeps them at the client. Each task has its
own running statistics.

All arrays of a network are one vector [N] here, and their masks another [M], because a
network of a hundred leaves takes minutes to compile leaf by leaf. Shapes are fixed: a
client's A are [T, N], and the received ones [T, R, N], once, at the server. In evaluation
each class has the logit of the network of its task, which takes a pass per task.
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


class Composition(NamedTuple):
    """How networks are composed."""

    kb_samples: int
    """R, the number of A of other clients that a task may have."""
    mask: float
    """Initial value of masks, inside of (0, 1)."""
    adaptive: float
    """Initial A_t as a share of the first base."""
    retroactive: bool
    """Whether the A of earlier tasks continue to train."""
    prune_threshold: float
    """Values of A up to which they are 0 where they are sent or evaluated."""
    client_sparsity: float
    """Share of each array's outputs whose base a client does not send."""


class Received(NamedTuple):
    """A of R clients for each task."""

    values: Float[Array, "T R N"]
    client: Int[Array, "T R"]
    """The clients that they come from; -1: from none, and the values are 0."""


class Shared(NamedTuple):
    """The parameters in the adapter's place."""

    base: Float[Array, " N"]
    received: Received


class ClientParams(NamedTuple):
    """The parameters in the classifier's place.

    Those of all tasks have an axis T. Those that train in a task do not, except for A
    where the A of all tasks train together.
    """

    head: PyTree
    """Of the classifier."""
    mask: Float[Array, "*tasks M"]
    """Before the sigmoid."""
    adaptive: Float[Array, "*tasks N"]
    """A."""
    attention: Float[Array, "*tasks R L"]
    """alpha."""
    task: PyTree = ()
    """The task of each class, -1 for none; () among what trains."""


class SparseBase(NamedTuple):
    """The part of a base that a client sends, or the mean over clients."""

    base: Float[Array, " N"]
    """0 where nothing is sent."""
    is_sent: Float[Array, " M"]
    """1 or 0 for each output."""


def decomposed(inner: Learner, sizes: Sizes, composition: Composition) -> Learner:
    """Return a learner whose clients send the base and keep all other parameters.

    Args:
      inner: computes with composed parameters; its adapter trains the same parameters in
        all tasks and its classifier is linear.
      sizes: of the run.
      composition: how networks are composed.

    Raises:
      InputError: for an adapter that has parameters for each task.
    """
    arrays = arrays_of(inner, sizes)
    classifier = _client_classifier(inner.classifier, composition)

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        params = inner.init(key, frozen)
        tasks = sizes.tasks
        first_task = make_tasks(sizes.classes, tasks)[0]
        base = arrays.flat(inner.adapter.trainable(params.adapter, first_task))
        stats = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (tasks, *leaf.shape)), params.stats)
        client = initial_client(params.classifier, base, arrays, sizes, composition)
        no_values = jnp.zeros((tasks, composition.kb_samples, len(base)))
        received = Received(no_values, jnp.full(no_values.shape[:2], jnp.int32(-1)))
        shared = Shared(base, received)
        return params._replace(adapter=shared, classifier=client, stats=stats)

    def open_task(params: Params, _task: Task) -> Params:
        return params

    def trainable_of(params: Params, task: Task) -> Params:
        client = classifier.trainable(params.classifier, task)
        return Params(params.adapter.base, client, params.extra, params.stats)

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        base = trainable.adapter
        # the mean of sparse uploads; elsewhere the base is whole
        if isinstance(base, SparseBase):
            base = filled(arrays, base, params.adapter.base)
        shared = params.adapter._replace(base=base)
        client = classifier.merge(params.classifier, task, trainable.classifier)
        return params._replace(adapter=shared, classifier=client, stats=trainable.stats)

    def cached_of(params: Params) -> Params:
        return Params(params.adapter.received, ())

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        index = task.index
        client: ClientParams = trainable.classifier
        if composition.retroactive:
            client = client._replace(adaptive=client.adaptive[index])
        theta = compose(arrays, trainable.adapter, client, cached.adapter.values[index])
        stats = at(trainable.stats, index)
        network = Params(arrays.tree(theta), client.head, trainable.extra, stats)
        output = inner.forward(frozen, Params((), ()), network, batch, task, train)
        stats = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), trainable.stats, output.stats)
        return output._replace(stats=stats)

    def predict(frozen: Frozen, params: Params, batch: Batch, task: Task) -> Float[Array, "batch classes"]:
        return _predict(inner, arrays, composition, frozen, params, batch, task)

    def sends(trainable: Params, _task: Task) -> Params:
        mask = trainable.classifier.mask
        base = sparse(arrays, trainable.adapter, mask, composition.client_sparsity)
        return trainable._replace(adapter=base)

    return inner._replace(
        classifier=classifier,
        init=init,
        open_task=open_task,
        trainable=trainable_of,
        merge=merge,
        cached=cached_of,
        forward=forward,
        predict=predict,
        sends=sends if composition.client_sparsity else None,
    )


def _client_classifier(inner: Classifier, composition: Composition) -> Classifier:
    """Return the classifier that selects and merges a client's parameters of a task.

    The learner composes and computes.
    """

    def trainable_of(params: ClientParams, task: Task) -> ClientParams:
        trainable = of_task(params, task.index)
        if composition.retroactive:
            trainable = trainable._replace(adaptive=params.adaptive)
        return trainable._replace(head=inner.trainable(params.head, task))

    def merge(params: ClientParams, task: Task, trainable: ClientParams) -> ClientParams:
        def merge_task(leaf: Array, new: Array) -> Array:
            return leaf.at[task.index].set(new)

        adaptive = trainable.adaptive
        if not composition.retroactive:
            adaptive = merge_task(params.adaptive, trainable.adaptive)
        return ClientParams(
            head=inner.merge(params.head, task, trainable.head),
            mask=merge_task(params.mask, trainable.mask),
            adaptive=adaptive,
            attention=merge_task(params.attention, trainable.attention),
            task=jnp.where(task.current, task.index, params.task),
        )

    def cached_of(_params: ClientParams) -> tuple:
        return ()

    # heads are personal, so the server has none to start at class means
    return inner._replace(trainable=trainable_of, merge=merge, cached=cached_of, at_means=None)


# ---- one network -----------------------------------------------------------------------


class Arrays(NamedTuple):
    """The L arrays of a network, concatenated in vectors [N].

    Their outputs, the entries of their last axes, are concatenated in vectors [M].
    """

    structure: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Return the number of entries of each array."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def outputs(self) -> list[int]:
        """Return the number of outputs of each array; an array without axes has one."""
        return [math.prod(shape[-1:]) for shape in self.shapes]

    def flat(self, tree: PyTree) -> Float[Array, " N"]:
        """Return a tree of the arrays as one vector."""
        return jnp.concatenate([jnp.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)])

    def tree(self, vector: Float[Array, " N"]) -> PyTree:
        """Return the arrays of a vector."""
        pieces = jnp.split(vector, np.cumsum(self.sizes)[:-1])
        leaves = [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)

    def of_outputs(self, values: Float[Array, "*lead M"]) -> Float[Array, "*lead N"]:
        """Return for each entry the value of its output."""

        def tile(piece: Array, shape: tuple[int, ...]) -> Array:
            return jnp.tile(piece, math.prod(shape[:-1]))

        return self._spread(values, tile, lambda shape: math.prod(shape[-1:]))

    def of_arrays(self, values: Float[Array, "*lead L"]) -> Float[Array, "*lead N"]:
        """Return for each entry the value of its array."""

        def broadcast(piece: Array, shape: tuple[int, ...]) -> Array:
            return jnp.broadcast_to(piece, (*piece.shape[:-1], math.prod(shape)))

        return self._spread(values, broadcast, lambda shape: 1)

    def _spread(self, values: Array, spread: Callable, width: Callable) -> Float[Array, "*lead N"]:
        """Return spread(values of an array, its shape), concatenated over the arrays.

        Each array has width(shape) values. Repeated blocks of arrays, as a network's equal
        layers, are computed together: XLA would compile a kernel for each array.
        """
        lead = values.shape[:-1]
        start = 0
        parts = []
        for shapes, times in runs(self.shapes):
            # [times, values of one block]
            ends = np.cumsum([width(shape) for shape in shapes])
            end = start + times * ends[-1]
            blocks = values[..., start:end].reshape(*lead, times, ends[-1])
            pieces = zip(jnp.split(blocks, ends[:-1], axis=-1), shapes, strict=True)
            part = jnp.concatenate([spread(piece, shape) for piece, shape in pieces], -1)
            parts.append(part.reshape(*lead, -1))
            start = end
        return jnp.concatenate(parts, axis=-1)


Shapes = tuple[tuple[int, ...], ...]


def runs(shapes: Shapes) -> list[tuple[Shapes, int]]:
    """Divide shapes into patterns, each with its number of repetitions in a row.

    Patterns that repeat are a network's equal blocks; the shapes between them form one
    pattern that occurs once.
    """
    patterns = []
    single: list[tuple[int, ...]] = []
    i = 0
    while i < len(shapes):
        width, times = _longest_run(shapes, i)
        if times == 1:
            single.append(shapes[i])
            i += 1
            continue
        if single:
            patterns.append((tuple(single), 1))
            single = []
        patterns.append((shapes[i : i + width], times))
        i += width * times
    if single:
        patterns.append((tuple(single), 1))
    return patterns


def _longest_run(shapes: Shapes, start: int) -> tuple[int, int]:
    """Return (width, repetitions) of the pattern from `start` with the most shapes.

    Among equal ones the pattern with more repetitions wins; (1, 1) if none repeats.
    """
    best = (1, 1)
    best_cover = (0, 1)
    for width in range(1, (len(shapes) - start) // 2 + 1):
        times = _repetitions(shapes, start, width)
        cover = (width * times, times)
        if times > 1 and cover > best_cover:
            best = (width, times)
            best_cover = cover
    return best


def _repetitions(shapes: Shapes, start: int, width: int) -> int:
    """Return how often the `width` shapes from `start` occur in a row."""
    pattern = shapes[start : start + width]
    times = 1
    while shapes[start + times * width : start + (times + 1) * width] == pattern:
        times += 1
    return times


def arrays_of(inner: Learner, sizes: Sizes) -> Arrays:
    """Return the arrays that the inner adapter trains, without computing anything.

    Raises:
      InputError: for an adapter that has parameters for each task.
    """
    first_task = make_tasks(sizes.classes, sizes.tasks)[0]

    # traced with `eval_shape`, so a whole network costs nothing
    def adapter(key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        params = inner.init(key, Frozen(inner.network.init(key))).adapter
        return inner.adapter.trainable(params, first_task), inner.adapter.cached(params)

    trainable, cached = jax.eval_shape(adapter, jax.random.key(0))
    if jax.tree.leaves(cached):
        raise InputError("adapter: it has parameters for each task already; nearest: --lora-pairs one")
    leaves, structure = jax.tree.flatten(trainable)
    return Arrays(structure, tuple(leaf.shape for leaf in leaves))


def compose(
    arrays: Arrays,
    base: Float[Array, " N"],
    client: ClientParams,
    received: Float[Array, "R N"],
) -> Float[Array, " N"]:
    """Return theta = B * sigmoid(mask) + A + sum_r alpha_r A^r (eq. 1).

    Args:
      arrays: of the network.
      base: B.
      client: mask [M], adaptive [N] and attention [R, L] of one task.
      received: A^r.
    """
    transferred = jnp.sum(arrays.of_arrays(client.attention) * received, axis=0)
    mask = arrays.of_outputs(jax.nn.sigmoid(client.mask))
    return base * mask + client.adaptive + transferred


def of_task(client: ClientParams, index: ArrayLike) -> ClientParams:
    """Return a client's parameters of one task, without the axis of tasks."""
    return ClientParams(client.head, client.mask[index], client.adaptive[index], client.attention[index])


def pruned(adaptive: Float[Array, "..."], prune_threshold: float) -> Float[Array, "..."]:
    """Return A with 0 in place of values whose size is at most `prune_threshold`."""
    return jnp.where(jnp.abs(adaptive) > prune_threshold, adaptive, 0.0)


def initial_client(
    head: PyTree,
    base: Float[Array, " N"],
    arrays: Arrays,
    sizes: Sizes,
    composition: Composition,
) -> ClientParams:
    """Return a client's initial parameters: the same for all tasks, without attention."""
    tasks = sizes.tasks
    # the inverse of the sigmoid
    logit = math.log(composition.mask / (1 - composition.mask))
    return ClientParams(
        head,
        mask=jnp.full((tasks, sum(arrays.outputs)), logit, jnp.float32),
        adaptive=jnp.tile(composition.adaptive * base, (tasks, 1)),
        attention=jnp.zeros((tasks, composition.kb_samples, len(arrays.shapes))),
        task=jnp.full(sizes.classes, jnp.int32(-1)),
    )


def at(tree: PyTree, index: ArrayLike) -> PyTree:
    """Return the values of one task of leaves [T, ...]."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _predict(
    inner: Learner,
    arrays: Arrays,
    composition: Composition,
    frozen: Frozen,
    params: Params,
    batch: Batch,
    task: Task,
) -> Float[Array, "batch classes"]:
    """Return for each class the logit of the network of its task.

    Classes of no task yet count as the current task's.
    """
    class_task = jnp.where(params.classifier.task < 0, task.index, params.classifier.task)
    shared: Shared = params.adapter

    def add_task(index: Int[Array, ""], logits: Array) -> Array:
        client = of_task(params.classifier, index)
        adaptive = pruned(client.adaptive, composition.prune_threshold)
        client = client._replace(adaptive=adaptive)
        theta = compose(arrays, shared.base, client, shared.received.values[index])
        stats = at(params.stats, index)
        network = Params(arrays.tree(theta), client.head, params.extra, stats)
        output = inner.forward(frozen, Params((), ()), network, batch, task, False)
        return jnp.where(class_task == index, output.logits, logits)

    lowest = jnp.full((len(batch.label), len(class_task)), jnp.finfo(jnp.float32).min)
    return jax.lax.fori_loop(0, task.index + 1, add_task, lowest)


# ---- what is sent ----------------------------------------------------------------------


def sparse(
    arrays: Arrays,
    base: Float[Array, " N"],
    mask: Float[Array, " M"],
    client_sparsity: float,
) -> SparseBase:
    """Return a base without the outputs of the smallest masks of each array.

    The release compares the absolute values of masks before the sigmoid, where the most
    negative ones, which let nothing of the base through, count as the largest. Here the
    masks themselves are compared.
    """
    outputs = np.array(arrays.outputs)
    array = np.repeat(np.arange(len(outputs)), outputs)
    # one sort by array, then by mask: ascending within each array
    ascending = jax.lax.sort((jnp.asarray(array), mask), num_keys=2)[1]
    starts = np.cumsum(outputs) - outputs
    thresholds = ascending[starts + np.floor(client_sparsity * outputs).astype(int)]
    is_sent = (mask >= thresholds[array]).astype(jnp.float32)
    return SparseBase(base * arrays.of_outputs(is_sent), is_sent)


def filled(arrays: Arrays, mean: SparseBase, old: Float[Array, " N"]) -> Float[Array, " N"]:
    """Return the merged base: the senders' means, or the old value without senders."""
    # the mean of 0 and 1 is the share of clients that sent an output: dividing by it
    # turns a mean over all clients into one over the senders
    share = arrays.of_outputs(mean.is_sent)
    return jnp.where(share > 0, mean.base / jnp.where(share > 0, share, 1.0), old)
