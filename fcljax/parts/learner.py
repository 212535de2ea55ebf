"""The model: a network, an adapter inside it and a classifier on its features, as one
`Learner`.

Adapters and classifiers know networks and tasks, nothing of federation. Both have
parameters for all tasks (`params`). In each task some of them are trainable and travel
between server and clients; clients cache the others that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.errors import InputError
from fcljax.models.heads import Reduction, correct, cross_entropy
from fcljax.parts.user_code import check_arguments
from fcljax.types import Batch, Features, Frozen, LearningRate, Network, Task, Weighted

Logits: TypeAlias = Float[Array, "batch classes"]
Feature: TypeAlias = Float[Array, "batch width"]


@runtime_checkable
class Select(Protocol):
    """Selects the parameters that train in a task and travel."""

    def __call__(self, params: Any, task: Task, /) -> Any: ...


@runtime_checkable
class Merge(Protocol):
    """Returns the parameters of all tasks, with those of this task replaced by
    `trainable`."""

    def __call__(self, params: Any, task: Task, trainable: Any, /) -> Any: ...


@runtime_checkable
class Inject(Protocol):
    """Returns what enters the frozen network's blocks (a `models.vit.Injection`), pure
    in the query.

    `cached` are the parameters of all tasks, or the part of them that clients cache.
    `train` is True at a client that trains, and False in evaluation. `mask` is for
    injections that depend on the whole batch: padding must not influence them.
    """

    def __call__(
        self,
        cached: Any,
        trainable: Any,
        query: Any,
        task: Task,
        train: bool,
        mask: Bool[Array, " batch"],
        /,
    ) -> Any: ...


@runtime_checkable
class Prompt(Protocol):
    """Returns the prompts that `inject` would insert for a query, [batch, ...]."""

    def __call__(self, cached: Any, trainable: Any, query: Any, task: Task, /) -> Array: ...


class Mixture(NamedTuple):
    """Prompts that are weighted sums: `einsum("bgm,gmn->bgn", weight, basis)`."""

    weight: Float[Array, "batch groups M"]
    """Depends on the query."""
    basis: Float[Array, "groups M N"]
    """M vectors of N parameters in each group; the same for all queries."""


def _all(params: PyTree, _task: Task) -> PyTree:
    return params


def _replaced(_params: PyTree, _task: Task, trainable: PyTree) -> PyTree:
    return trainable


def _nothing(_params: PyTree) -> tuple:
    return ()


def class_token(features: Features) -> Feature:
    """Return the class token after the final norm."""
    return features.cls


def _unchanged(trainable: PyTree) -> PyTree:
    return trainable


class Adapter(NamedTuple):
    """The functions of an adapter, which trains inside a frozen network."""

    init: Callable[[PRNGKeyArray, PyTree], PyTree]
    """init(key, frozen) -> params of all tasks."""
    open_task: Select = _all
    """open_task(params, task) -> params, called before the first round of a task."""
    trainable: Select = _all
    """Selects what trains in the task and travels."""
    merge: Merge = _replaced
    """Puts what trained back into the parameters of all tasks."""
    cached: Callable[[PyTree], PyTree] = _nothing
    """cached(params) -> what `inject` reads besides the trainable parameters; clients
    hold it."""
    inject: Inject | None = None
    """Computes what enters the network; None leaves the network as it is."""
    network: Callable[[PyTree], PyTree] | None = None
    """network(trainable) -> weights used in place of the frozen ones; None: the frozen
    ones."""
    feature: Callable[[Features], Feature] = class_token
    """feature(features) -> what the classifier reads."""
    prompt: Prompt | None = None
    """Computes prompts for servers that distil them on latents; None: the adapter has
    none."""
    mixture: Callable[..., Mixture] | None = None
    """Arguments as of `prompt`; None: prompts are no weighted sums.

    A server that compares prompts of all clients can compare mixtures faster."""
    loss: Callable[..., Float[Array, ""]] | None = None
    """loss(cached, trainable, query, task, mask) -> scalar that clients add to their loss
    in all methods."""
    counted: Select = _all
    """counted(trainable, task) -> the parameters that are reported as trainable."""
    truncated: bool = False
    """Whether its source draws the first classifier from a truncated normal, without
    biases."""
    queries: bool = False
    """Whether `inject` reads the query, the frozen network's own class token."""
    rate: LearningRate | None = None
    """The adapter's learning rate; None: that of the run."""
    batchwise: tuple[str, ...] = ()
    """Options of the run that make the result of `inject` in evaluation depend on the
    other images of a batch; (): it does not."""
    train_batchwise: bool = False
    """Whether the result of `inject` depends on the other images of a batch in training
    alone. Passes that measure then work as in evaluation."""
    lasting: Callable[[Any], Any] = _unchanged
    """lasting(trainable) -> the trainable parameters that all tasks share, with () in
    place of those that belong to one task. A state that outlives a task, as EWC's Fisher
    information, may only be of shared ones."""

    @property
    def plain(self) -> bool:
        """Whether the network stays as it is, so that its features are the query."""
        return self.inject is None and self.network is None


@runtime_checkable
class ClassifierLogits(Protocol):
    """Returns the logits of all classes, [batch, classes]; the caller masks those that do
    not compete."""

    def __call__(self, cached: Any, trainable: Any, feature: Feature, task: Task, /) -> Logits: ...


@runtime_checkable
class AtMeans(Protocol):
    """Sets the parameters of a classifier to class means."""

    def __call__(
        self, params: Any, task: Task, means: Float[Array, "Ct width"], present: Bool[Array, " Ct"], /
    ) -> Any:
        """Return the parameters with the task's present classes at their means."""
        ...


class Classifier(NamedTuple):
    """From features to logits."""

    init: Callable[[PRNGKeyArray], PyTree]
    """init(key) -> params of all classes."""
    logits: ClassifierLogits
    """Logits in training."""
    trainable: Select = _all
    """As in an `Adapter`."""
    merge: Merge = _replaced
    """As in an `Adapter`."""
    cached: Callable[[PyTree], PyTree] = _nothing
    """As in an `Adapter`."""
    predict: ClassifierLogits | None = None
    """Logits in evaluation; None: as in training."""
    lasting: Callable[[Any], Any] = _unchanged
    """As in an `Adapter`."""
    at_means: AtMeans | None = None
    """Sets new classes to their mean features; None: they cannot start there."""


class Params(NamedTuple):
    """The parameters of a learner: those of all tasks, the trainable ones of a task, or
    the cached ones."""

    adapter: PyTree
    """Parameters of the adapter; () where nothing trains inside the network."""
    classifier: PyTree
    """Parameters of the classifier."""
    extra: dict[str, PyTree] = {}
    """Parameters of client rules that train some of their own, by the rule's name."""
    stats: PyTree = ()
    """Running statistics of a network that trains; every step moves them, no gradient
    does. () for none."""


class Output(NamedTuple):
    """A learner's output for a batch."""

    logits: Logits
    """Logits of all classes, unmasked."""
    feature: Feature
    """The classifier's input."""
    query: Feature | None = None
    """The frozen network's own class token, if the adapter reads it."""
    stats: PyTree = ()
    """Running statistics after the batch."""
    losses: Float[Array, " batch"] | None = None
    """The loss of each example, of a model that computes it itself
    (`parts/simulation.py`); such a model has no logits."""


class Sampling(NamedTuple):
    """How a Bayesian learner draws parameters from its posterior in evaluation."""

    draw: Callable[[PRNGKeyArray, Params], Params]
    """draw(key, trainable) -> parameters that the forward pass takes in place of the
    trainable ones."""
    evaluation: int = 0
    """Draws of a second evaluation by mean probabilities; 0: none."""


@runtime_checkable
class Expectation(Protocol):
    """Returns the mean of a function over the parameters that a training step draws."""

    def __call__(
        self,
        function: Callable[[Params], PyTree],
        trainable: Params,
        batch: Batch,
        key: PRNGKeyArray,
        /,
    ) -> Any: ...


def at_trainable(
    function: Callable[[Params], PyTree],
    trainable: Params,
    _batch: Batch,
    _key: PRNGKeyArray,
) -> Any:
    """Return a function of the trainable parameters themselves: nothing is drawn."""
    return function(trainable)


@runtime_checkable
class Forward(Protocol):
    """The forward pass; `cached` may be the parameters of all tasks."""

    def __call__(
        self, frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool, /
    ) -> Output: ...


class Learner(NamedTuple):
    """Network, adapter and classifier as one; its functions act on `Params` as those of
    its parts do."""

    network: Network
    """The frozen network."""
    adapter: Adapter
    """The adapter inside the network."""
    classifier: Classifier
    """From features to logits."""
    init: Callable[[PRNGKeyArray, Frozen], Params]
    """init(key, frozen) -> params of all tasks."""
    open_task: Callable[[Params, Task], Params]
    """Called before the first round of a task."""
    trainable: Callable[[Params, Task], Params]
    """Selects what trains in the task and travels."""
    merge: Callable[[Params, Task, Params], Params]
    """Puts what trained back into the parameters of all tasks."""
    cached: Callable[[Params], Params]
    """Returns the parameters that clients cache besides the trainable ones."""
    forward: Forward
    """The forward pass of training; the caller masks its logits."""
    predict: Callable[[Frozen, Params, Batch, Task], Logits]
    """predict(frozen, params, batch, task) -> logits of evaluation, unmasked."""
    queries: bool
    """Whether a forward pass reads the frozen network's own class token."""
    features: Reads = "prompted"
    """Input of the classifier."""
    expectation: Expectation = at_trainable
    """expectation(function, trainable, batch, key) -> the mean of the function over the
    parameters that a training step of a Bayesian learner draws; of others, the function
    of the trainable parameters."""
    sampling: Sampling | None = None
    """For the evaluation of Bayesian learners; None: parameters are used as they are."""
    names_classes: bool = False
    """Whether names of classes make the classifier, so that it predicts classes of later
    tasks too."""
    sends: Callable[[Params, Task], Params] | None = None
    """sends(trainable, task) -> what a client sends in its place, which `merge`
    understands after it was averaged; None: the trainable parameters themselves."""

    def lasting(self, trainable: Params) -> Params:
        """Return the trainable parameters that are the same ones in every task, with ()
        in place of the others. Running statistics are no parameters."""
        adapter = self.adapter.lasting(trainable.adapter)
        classifier = self.classifier.lasting(trainable.classifier)
        return trainable._replace(adapter=adapter, classifier=classifier, stats=())


def matching(trainable: PyTree, lasting: PyTree) -> PyTree:
    """Return `trainable` without the parameters that `lasting`, a result of
    `Learner.lasting`, leaves out."""

    def pick(lasting_part: PyTree, leaf: PyTree) -> PyTree:
        # () marks parameters of one task, which have no counterpart in a later one
        if _left_out(lasting_part):
            return ()
        return leaf

    return jax.tree.map(pick, lasting, trainable, is_leaf=_left_out)


def with_lasting(trainable: PyTree, lasting: PyTree) -> PyTree:
    """Return `trainable` with the parameters of a `Learner.lasting` in their place."""

    def pick(lasting_part: PyTree, leaf: PyTree) -> PyTree:
        # a parameter of one task: the new task's own stays
        return leaf if _left_out(lasting_part) else lasting_part

    return jax.tree.map(pick, lasting, trainable, is_leaf=_left_out)


def all_last(adapter: Adapter, trainable: PyTree) -> bool:
    """Return whether an adapter trains the same parameters in every task."""
    return jax.tree.structure(adapter.lasting(trainable)) == jax.tree.structure(trainable)


def check_all_last(adapter: Adapter, trainable: PyTree, why: str) -> None:
    """Check that clients can keep the adapter's parameters over tasks: no parameter may
    belong to one task.

    Args:
      adapter: what trains inside the network.
      trainable: its trainable parameters of a task.
      why: who keeps what, as in "clients keep their own".

    Raises:
      InputError: naming an adapter that can be used.
    """
    if not all_last(adapter, trainable):
        raise InputError(
            f"adapter: {why} over tasks, and this adapter trains other parameters in each; "
            "nearest: --adapter lora --lora-pairs one"
        )


def _left_out(part: PyTree) -> bool:
    # () is an empty pytree, so `is_leaf` must name it or `jax.tree.map` would skip it
    return isinstance(part, tuple) and not part


Keys = Callable[[PRNGKeyArray], tuple[PRNGKeyArray, PRNGKeyArray]]


def two_keys(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the keys of an adapter's and a classifier's first values."""
    adapter, classifier = jax.random.split(key)
    return adapter, classifier


def one_key(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the key itself twice, where only the classifier draws initial values."""
    return key, key


Reads = Literal["prompted", "both"]
"""What a classifier reads: the adapted network's features, or the frozen network's and
then these."""


def learner(
    network: Network,
    adapter: Adapter,
    classifier: Classifier,
    keys: Keys = two_keys,
    features: Reads = "prompted",
) -> Learner:
    """Compose a network, an adapter and a classifier.

    Args:
      network: the frozen network.
      adapter: what trains inside it.
      classifier: reads the features.
      keys: derives the keys of the adapter's and the classifier's initial values.
      features: input of the classifier; "both" is [2 width] (APER, arXiv 2303.07338).

    Raises:
      InputError: for a function of adapter or classifier with a wrong number of arguments.
    """
    _check_parts(adapter, classifier)
    queries = adapter.queries or adapter.plain or features == "both"

    def extract(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> tuple[Float[Array, "batch features"], Feature | None, PyTree]:
        feature, query, stats = _features(
            network, adapter, queries, frozen, cached, trainable, batch, task, train
        )
        if features == "both":
            assert query is not None
            feature = jnp.concatenate([query, feature], axis=-1)
        return feature, query, stats

    def init(key: PRNGKeyArray, frozen: Frozen) -> Params:
        adapter_key, classifier_key = keys(key)
        stats = network.split(frozen.network)[1] if network.split and adapter.network else ()
        return Params(adapter.init(adapter_key, frozen), classifier.init(classifier_key), stats=stats)

    def open_task(params: Params, task: Task) -> Params:
        return params._replace(adapter=adapter.open_task(params.adapter, task))

    def trainable_of(params: Params, task: Task) -> Params:
        selected = adapter.trainable(params.adapter, task), classifier.trainable(params.classifier, task)
        return Params(*selected, stats=params.stats)

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        new = adapter.merge(params.adapter, task, trainable.adapter)
        head = classifier.merge(params.classifier, task, trainable.classifier)
        return params._replace(adapter=new, classifier=head, stats=trainable.stats)

    def cached_of(params: Params) -> Params:
        return Params(adapter.cached(params.adapter), classifier.cached(params.classifier))

    def forward(
        frozen: Frozen, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        feature, query, stats = extract(frozen, cached, trainable, batch, task, train)
        logits = classifier.logits(cached.classifier, trainable.classifier, feature, task)
        return Output(logits, feature, query, stats)

    def predict(frozen: Frozen, params: Params, batch: Batch, task: Task) -> Logits:
        trainable = trainable_of(params, task)
        feature = extract(frozen, params, trainable, batch, task, False)[0]
        rule = classifier.predict or classifier.logits
        return rule(params.classifier, trainable.classifier, feature, task)

    return Learner(
        network,
        adapter,
        classifier,
        init,
        open_task,
        trainable_of,
        merge,
        cached_of,
        forward,
        predict,
        queries=queries,
        features=features,
    )


def _check_parts(adapter: Adapter, classifier: Classifier) -> None:
    check_arguments(
        "adapter",
        init=(adapter.init, 2),
        open_task=(adapter.open_task, 2),
        trainable=(adapter.trainable, 2),
        merge=(adapter.merge, 3),
        cached=(adapter.cached, 1),
        inject=(adapter.inject, 6),
        network=(adapter.network, 1),
        feature=(adapter.feature, 1),
        prompt=(adapter.prompt, 4),
        loss=(adapter.loss, 5),
        counted=(adapter.counted, 2),
        lasting=(adapter.lasting, 1),
    )
    check_arguments(
        "classifier",
        init=(classifier.init, 1),
        logits=(classifier.logits, 4),
        trainable=(classifier.trainable, 2),
        merge=(classifier.merge, 3),
        cached=(classifier.cached, 1),
        predict=(classifier.predict, 4),
        lasting=(classifier.lasting, 1),
    )


def network_params(network: Network, adapter: Adapter, frozen: Frozen, trainable: Params) -> PyTree:
    """Return the network's parameters: the frozen ones, or those that the adapter trains
    with their running statistics."""
    if not adapter.network:
        return frozen.network
    weights = adapter.network(trainable.adapter)
    # weights train by the gradient and statistics by the forward pass; `apply` reads both
    # as one tree
    if network.join:
        return network.join(weights, trainable.stats)
    return weights


def _features(
    network: Network,
    adapter: Adapter,
    queries: bool,
    frozen: Frozen,
    cached: Params,
    trainable: Params,
    batch: Batch,
    task: Task,
    train: bool,
) -> tuple[Feature, Feature | None, PyTree]:
    """Return the adapted network's features, the query (cached where the batch has it;
    else computed if `queries`), and the running statistics after the batch."""
    # the engine caches queries of inputs that are the same in every epoch
    query = batch.query
    if query is None and queries:
        query = network.apply(frozen.network, batch.input, None, False, batch.mask)[0].cls
    # nothing acts inside the network: a second forward pass would give the same feature
    if adapter.plain and query is not None:
        return query, query, ()
    params = network_params(network, adapter, frozen, trainable)
    injection = None
    if adapter.inject:
        injection = adapter.inject(cached.adapter, trainable.adapter, query, task, train, batch.mask)
    features, new_params = network.apply(params, batch.input, injection, train, batch.mask)
    stats = ()
    # a frozen network's statistics stay those of its checkpoint
    if network.split and adapter.network:
        stats = network.split(new_params)[1]
    return adapter.feature(features), query, stats


# ---- the clients' own loss -------------------------------------------------------------

Classes = Literal["current", "seen", "all"]


def competing(classes: Classes, task: Task) -> Bool[Array, " C"]:
    """Return the classes that compete: those of the task, those seen so far, or all of
    the stream."""
    # `task.seen | True` is an array of True with the right shape
    return {"current": task.current, "seen": task.seen, "all": task.seen | True}[classes]


class Loss(NamedTuple):
    """A client's own loss, to which its client rules add theirs."""

    value: Callable[[Output, Batch, Task], Float[Array, ""]]
    """value(output, batch, task) -> scalar."""
    classes: Classes = "current"
    """The classes that compete, also for the training accuracy."""
    reduction: Reduction = "mean"
    """How `value` reduces over the examples of a batch."""


def cross_entropy_loss(
    classes: Classes = "current", reduction: Reduction = "mean", weight: float = 1.0
) -> Loss:
    """Return softmax cross-entropy over some classes as a loss.

    Args:
      classes: those that compete.
      reduction: over the examples of a batch.
      weight: factor of the loss; 0 where a client rule stands in its place.
    """

    def value(output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
        allowed = competing(classes, task)
        loss = cross_entropy(output.logits, batch.label, allowed, batch.mask, reduction)
        # no operation is added to the program of the usual loss
        if weight == 1:
            return loss
        return weight * loss

    return Loss(value, classes, reduction)


def replaced_loss(classes: Classes = "current") -> Loss:
    """Return a loss of 0, for methods whose client rule is the whole loss. Training
    accuracy is measured among `classes`."""
    return cross_entropy_loss(classes, weight=0.0)


def correct_examples(
    loss: Loss,
    output: Output,
    batch: Batch,
    task: Task,
) -> Float[Array, ""]:
    """Return the number of correctly classified examples of a batch, among the task's
    classes or those seen so far."""
    # a loss over all classes of the stream is scored among the task's: classes of later
    # tasks are no fair competitors
    allowed = task.current
    if loss.classes == "seen":
        allowed = task.seen
    return correct(output.logits, batch.label, allowed, batch.mask)


def total_cross_entropy(loss: Loss, output: Output, batch: Batch, task: Task) -> Weighted:
    """Return softmax cross-entropy among the classes that compete, over the examples
    whose label is one of them, whatever the clients' own loss is."""
    allowed = competing(loss.classes, task)
    # replayed examples of earlier tasks have no probability among the task's classes
    mask = batch.mask & allowed[batch.label]
    total = cross_entropy(output.logits, batch.label, allowed, mask, "sum")
    return Weighted(total, jnp.sum(mask).astype(jnp.float32))
