"""What learns: a network, an adapter inside it and a classifier on its features, as one.

Adapters and classifiers know networks and tasks, nothing of federation. Both keep parameters for the whole
stream (`params`) of which a `part` trains and travels in the current task; what else of the parameters a
client's forward pass reads is `held`. `Model` stands for the pair, of parameters, parts or held ones.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from fcljax.models.heads import Reduction, correct, cross_entropy
from fcljax.types import Batch, Features, Frozen, Network, Task


def _same(params: PyTree, task: Task) -> PyTree:
    del task
    return params


def _new(params: PyTree, task: Task, part: PyTree) -> PyTree:
    del params, task
    return part


def _nothing(params: PyTree) -> tuple:
    del params
    return ()


def _class_token(features: Features) -> Float[Array, "batch width"]:
    return features.cls


class Mixture(NamedTuple):
    """Prompts that are weighted sums: of M vectors of N numbers in each of some groups, with weights of every
    query. A prompt is einsum("bgm,gmn->bgn", weight, basis)."""

    weight: Float[Array, "batch groups M"]
    basis: Float[Array, "groups M N"]


class Adapter(NamedTuple):
    """What is trained inside a frozen network.

    init(key, frozen) -> params, those of all tasks
    open_task(params, task) -> params, before a task's first round
    part(params, task) -> what trains and travels now
    put(params, task, part) -> params with the part in its place
    held(params) -> what `inject` reads besides the part: params, or the same tuple with what clients do not
      need as None or ()
    inject(held or params, part, query, task, train, mask) -> Injection: pure in the query, the frozen
      network's own class token; None changes nothing in the network. `train`: as in a client's step, or as in
      evaluation. `mask`: rows that count, where rows share what they get; padding has no say in it
    network(part) -> weights that stand for the frozen ones; None: the frozen ones
    feature(Features) -> what the classifier reads
    prompt(held or params, part, query, task) -> the prompts that inject would insert, for servers that distil
      them on latents; None: it has none
    mixture(held or params, part, query, task) -> Mixture, whose weights alone depend on the query, for
      servers that compare the prompts of many models; None: prompts are no such sums
    loss(part, query, task, mask) -> scalar that clients add to their loss, whatever the method; None: nothing
    trained(part, task) -> what of the part trains, for counting
    truncated: does its source draw the first classifier from a truncated normal, without biases?
    queries: does `inject` read the query?
    rate: learning rate of the part; None: the run's
    """

    init: Callable[[PRNGKeyArray, PyTree], PyTree]
    open_task: Callable[[PyTree, Task], PyTree] = _same
    part: Callable[[PyTree, Task], PyTree] = _same
    put: Callable[[PyTree, Task, PyTree], PyTree] = _new
    cached: Callable[[PyTree], PyTree] = _nothing
    inject: Callable[..., PyTree] | None = None
    network: Callable[[PyTree], PyTree] | None = None
    feature: Callable[[Features], Float[Array, "batch width"]] = _class_token
    prompt: Callable[..., Array] | None = None
    mixture: Callable[..., Mixture] | None = None
    loss: Callable[..., Float[Array, ""]] | None = None
    trained: Callable[[PyTree, Task], PyTree] = _same
    truncated: bool = False
    queries: bool = False
    rate: float | None = None

    @property
    def plain(self) -> bool:
        """Does the network stay as it is, so that its features are the query?"""
        return self.inject is None and self.network is None


class Classifier(NamedTuple):
    """From features to logits.

    init(key) -> params, those of all classes
    part, put, held: as of an Adapter
    logits(held or params, part, feature, task) -> [batch, C]; who competes is masked by whoever reads them
    predict(params, part, feature, task) -> logits of evaluation; None: as in training
    """

    init: Callable[[PRNGKeyArray], PyTree]
    logits: Callable[[PyTree, PyTree, Array, Task], Float[Array, "batch classes"]]
    part: Callable[[PyTree, Task], PyTree] = _same
    put: Callable[[PyTree, Task, PyTree], PyTree] = _new
    cached: Callable[[PyTree], PyTree] = _nothing
    predict: Callable[[PyTree, PyTree, Array, Task], Float[Array, "batch classes"]] | None = None


class Model(NamedTuple):
    """Parameters of adapter and classifier, and by their names of the terms that train some of their own: all
    of them, those of a task, or those that are held. stats: running statistics of a network that trains,
    which every training step moves and no gradient; () where there are none."""

    adapter: PyTree
    classifier: PyTree
    extra: dict[str, PyTree] = {}
    stats: PyTree = ()


class Output(NamedTuple):
    """What a learner says of a batch: logits of all classes, unmasked, the features below them, and the query
    if the adapter reads it; and the running statistics after it."""

    logits: Float[Array, "batch classes"]
    feature: Float[Array, "batch width"]
    query: Float[Array, "batch width"] | None = None
    stats: PyTree = ()


class Learner(NamedTuple):
    """Network, adapter and classifier as one; the functions are those of Adapter and Classifier on `Model`s.

    forward(frozen, held or params, part, batch, task, train) -> Output
    predict(frozen, params, batch, task) -> logits of evaluation, unmasked
    sample(key, part) -> what a training step computes with in the place of the part; None: the part itself
    sends(part, task) -> what a client sends in the place of its part, which is merged number by number and
      which `put` understands; None: the part itself
    """

    network: Network
    adapter: Adapter
    classifier: Classifier
    init: Callable[[PRNGKeyArray, Frozen], Model]
    open_task: Callable[[Model, Task], Model]
    part: Callable[[Model, Task], Model]
    put: Callable[[Model, Task, Model], Model]
    cached: Callable[[Model], Model]
    forward: Callable[..., Output]
    predict: Callable[..., Float[Array, "batch classes"]]
    queries: bool
    sample: Callable[[PRNGKeyArray, Model], Model] | None = None
    sends: Callable[[Model, Task], Model] | None = None


Keys = Callable[[PRNGKeyArray], tuple[PRNGKeyArray, PRNGKeyArray]]


def two_keys(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """The keys that draw an adapter's and a classifier's first values."""
    adapter, classifier = jax.random.split(key)
    return adapter, classifier


def learner(network: Network, adapter: Adapter, classifier: Classifier, keys: Keys = two_keys) -> Learner:
    """A network with an adapter and a classifier.

    Args:
      network: the frozen one.
      adapter: what trains inside it.
      classifier: what reads its features.
      keys: from the key of the first values to the adapter's and the classifier's; methods whose own order of
        draws is older than this function keep it.
    """

    def init(key: PRNGKeyArray, frozen: Frozen) -> Model:
        first, second = keys(key)
        stats = network.split(frozen.network)[1] if network.split and adapter.network else ()
        return Model(adapter.init(first, frozen), classifier.init(second), stats=stats)

    def put(params: Model, task: Task, part: Model) -> Model:
        new = adapter.put(params.adapter, task, part.adapter)
        head = classifier.put(params.classifier, task, part.classifier)
        return params._replace(adapter=new, classifier=head, stats=part.stats)

    def features(frozen: Frozen, cached: Model, part: Model, batch: Batch, task: Task, train: bool):
        return _features(network, adapter, frozen, cached.adapter, part, batch, task, train)

    def forward(frozen: Frozen, cached: Model, part: Model, batch: Batch, task: Task, train: bool) -> Output:
        feature, query, stats = features(frozen, cached, part, batch, task, train)
        logits = classifier.logits(cached.classifier, part.classifier, feature, task)
        return Output(logits, feature, query, stats)

    def part_of(params: Model, task: Task) -> Model:
        own = adapter.part(params.adapter, task), classifier.part(params.classifier, task)
        return Model(*own, stats=params.stats)

    def predict(frozen: Frozen, params: Model, batch: Batch, task: Task) -> Float[Array, "batch classes"]:
        part = part_of(params, task)
        feature = features(frozen, params, part, batch, task, False)[0]
        rule = classifier.predict or classifier.logits
        return rule(params.classifier, part.classifier, feature, task)

    return Learner(
        network,
        adapter,
        classifier,
        init,
        open_task=lambda params, task: params._replace(adapter=adapter.open_task(params.adapter, task)),
        part=part_of,
        put=put,
        cached=lambda params: Model(adapter.cached(params.adapter), classifier.cached(params.classifier)),
        forward=forward,
        predict=predict,
        queries=adapter.queries or adapter.plain,
    )


def _features(
    network: Network,
    adapter: Adapter,
    frozen: Frozen,
    cached: PyTree,
    part: Model,
    batch: Batch,
    task: Task,
    train: bool,
) -> tuple[Float[Array, "batch width"], Float[Array, "batch width"] | None, PyTree]:
    """The features that the classifier reads, the query, which is taken from the cache where the batch has
    it, and the running statistics after it."""
    query = batch.query
    if query is None and (adapter.queries or adapter.plain):
        query = network.apply(frozen.network, batch.image, None, False, batch.mask)[0].cls
    if adapter.plain and query is not None:
        return query, query, ()
    params, own = frozen.network, part.adapter
    if adapter.network:
        params = network.join(adapter.network(own), part.stats) if network.join else adapter.network(own)
    injection = adapter.inject(cached, own, query, task, train, batch.mask) if adapter.inject else None
    seen, after = network.apply(params, batch.image, injection, train, batch.mask)
    stats = network.split(after)[1] if network.split and adapter.network else ()
    return adapter.feature(seen), query, stats


Classes = Literal["current", "seen", "all"]


class Objective(NamedTuple):
    """A client's own loss: cross-entropy over some classes. classes: those of the task, those seen so far, or
    all of the stream, which compete. reduction: over the rows of a batch. hardness: factor on the logits.
    weight: of the loss; 0 where a term stands for it."""

    classes: Classes = "current"
    reduction: Reduction = "mean"
    hardness: float = 1.0
    weight: float = 1.0

    def allowed(self, task: Task) -> Array:
        """Who competes [C]."""
        return {"current": task.current, "seen": task.seen, "all": task.seen | True}[self.classes]


def objective_loss(objective: Objective, output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
    """The cross-entropy of a batch under an objective."""
    logits = objective.hardness * output.logits
    loss = cross_entropy(logits, batch.label, objective.allowed(task), batch.mask, objective.reduction)
    return loss if objective.weight == 1 else objective.weight * loss


def hits(objective: Objective, output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
    """How many rows of a batch get their label, among the task's classes, or those seen if they compete."""
    allowed = task.seen if objective.classes == "seen" else task.current
    return correct(output.logits, batch.label, allowed, batch.mask)
