"""Federated averaging of any model on arrays, on the engine that runs everything else.

It lies between a whole run (`fcljax.run`: networks, adapters, files) and the engine
itself: clients are an array of owners, and the model is a Flax module or a pytree of
parameters. Tasks, aggregation rules, client rules, server rules, attacks and differential
privacy are those of runs.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree
from rich.console import Console

from fcljax.data.partition import count_matrix
from fcljax.data.store import ClientIndices
from fcljax.errors import InputError, reason
from fcljax.federated.aggregation import make_aggregation
from fcljax.federated.check import Example, check_method, describe, leaks_in_one_line
from fcljax.federated.engine import (
    Engine,
    Lanes,
    RoundInputs,
    RoundReport,
    init_clients,
    make_engine,
    run_round,
)
from fcljax.federated.faults import attack_of, check_attacks, corrupt
from fcljax.federated.health import NOT_FINITE, diverged, training_warnings
from fcljax.federated.keys import STAGE_KEYS, RunKey, fold
from fcljax.federated.schedule import ClientPartition, capacities, largest_batch, participants
from fcljax.mesh import jit
from fcljax.options import LARGEST_INT
from fcljax.parts.client import ClientRule, Training
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Adapter, Classifier, Learner, Loss, Output, Params
from fcljax.parts.server import ServerRule
from fcljax.parts.simulation_inputs import (
    OwnedExamples,
    check_model,
    check_optimiser,
    check_participation,
    check_rules,
    check_whole,
    checked_examples,
    merging_options,
)
from fcljax.parts.simulation_tasks import (
    CompiledMetric,
    ExampleMetric,
    ScoredExamples,
    TaskSplit,
    checked_test,
    make_metric,
    measured_row,
    split_tasks,
)
from fcljax.parts.user_code import check_arguments
from fcljax.run_options import MergingOptions
from fcljax.terminal import progress_bar, say
from fcljax.types import Attack, Batch, LabelAttack, Method, Network, RoundContext, Sizes, Task, When

# examples for the loss of the untrained model, which shows whether training diverged
MOST_COMPARED = 1_000


@runtime_checkable
class ExampleLoss(Protocol):
    """Returns the loss of each example, not their mean: padding is masked afterwards.

    A loss with a parameter `key` gets a new key in every step, for dropout.
    """

    def __call__(self, model: Any, x: Any, y: Any, /) -> Float[Array, " B"]: ...


@runtime_checkable
class RandomLoss(Protocol):
    """A loss that draws."""

    def __call__(self, model: Any, x: Any, y: Any, /, *, key: PRNGKeyArray) -> Float[Array, " B"]: ...


@runtime_checkable
class Callback(Protocol):
    """Receives each round's line of the history, and the model after the round."""

    def __call__(self, line: dict[str, Any], model: Any, /) -> object: ...


class LocalSGD(NamedTuple):
    """How each client trains in a round."""

    loss: ExampleLoss | RandomLoss
    """loss(model, x [B, ...], y [B, ...]) -> [B]; with a parameter `key`,
    loss(model, x, y, key=key)."""
    optimiser: optax.GradientTransformation
    """New in every round; its learning rate is its own."""
    epochs: int
    """Passes over the client's examples."""
    batch_size: int
    """Examples of a step."""


def local_sgd(
    loss: ExampleLoss | RandomLoss,
    optimiser: optax.GradientTransformation,
    epochs: int = 1,
    batch_size: int = 32,
) -> LocalSGD:
    """Say how each client trains in a round: some epochs of an optax optimiser.

    Args:
      loss: loss(model, x, y) -> one number for each example. If it has a parameter `key`, it gets one that is
        new in every step, for dropout: `nnx.reseed(model, default=key)` with `nnx.Rngs(0)`.
      optimiser: such as `optax.sgd(0.1)`.
      epochs: passes over the client's examples in a round.
      batch_size: examples of a step.

    Raises:
      InputError: for a loss that takes other arguments, and for values that are none of these.
    """
    # `check_arguments` counts positional arguments, and `key` is given by keyword
    if not _draws(loss):
        check_arguments("local_sgd", loss=(loss, 3))
    check_optimiser(optimiser)
    epochs = check_whole("epochs", epochs, 1)
    batch_size = check_whole("batch_size", batch_size, 1, LARGEST_INT)
    return LocalSGD(loss, optimiser, epochs, batch_size)


class Averaging(NamedTuple):
    """Federated averaging of a user's own model, before the sizes of the data are known."""

    build: Callable[[Sizes], Method]
    """build(sizes) -> the method that the engine plays."""
    model_of: Callable[[PyTree], Any]
    """model_of(parameters) -> a model of the kind that was given."""
    first_loss: Callable[[Any, Any], float]
    """first_loss(x, y) -> mean loss of the model that was given."""
    losses: Callable[[Any, Any, Array], Float[Array, " B"]]
    """losses(model, x, y) -> the loss of each example."""
    attack: Attack | None = None
    """The attack of malicious clients; None where there are none."""


def fedavg(
    model: Any,
    client: LocalSGD,
    *,
    client_rules: tuple[ClientRule, ...] = (),
    server_rules: tuple[ServerRule, ...] = (),
    malicious: int = 0,
    attack: str | Attack = "sign_flip",
    **merging: Unpack[MergingOptions],
) -> Averaging:
    """Make a method by federated averaging (McMahan et al. 2017).

    Args:
      model: a `flax.nnx` module, of which the `nnx.Param`s train and all other state stays as it is (running
        statistics, counters of random numbers); or a pytree of parameters, which the loss gets as they are.
      client: from `local_sgd`.
      client_rules: as of `federate`, such as `prox(0.1)`.
      server_rules: as of `federate`.
      malicious: the clients with the lowest ids that attack.
      attack: a name of `choices.ATTACKS`, or an attack of your own.
      merging: options of `AggregationOptions`, such as `aggregator="median"`, or `clip_norm=1.0,
        noise_multiplier=0.5` for differential privacy.

    Raises:
      InputError: for options that do not exist or do not fit together.
    """
    # any other object would fail deep inside of `federate`
    if not isinstance(client, LocalSGD):
        raise InputError(f"client: {type(client).__name__}; nearest: local_sgd(loss, optimiser)")
    check_rules("client_rules", client_rules, ClientRule)
    check_rules("server_rules", server_rules, ServerRule)
    malicious = check_whole("malicious", malicious, 0, LARGEST_INT)
    chosen_attack = attack_of(attack)
    params, model_of = _opened(model)
    aggregation = make_aggregation(merging_options(merging))
    # `train_step` subtracts lr * direction, here with lr = 1; optax's updates are added
    descent = optax.chain(client.optimiser, optax.scale(-1.0))
    learner = _learner(params, model_of, client.loss)

    def build(sizes: Sizes) -> Method:
        # no larger than the largest client: the rest of its batch would be padding
        batch_size = largest_batch(client.batch_size, sizes.examples)
        training = Training(client.epochs, batch_size, 1.0, descent)
        run = Run(sizes, learner.network, learner.adapter, training, aggregation, client_rules)
        method = federate(run, learner, loss=Loss(_mean_loss), server_rules=server_rules, predicts="all")
        if malicious > sizes.clients:
            raise InputError(f"malicious: {malicious} of {sizes.clients} clients; nearest: {sizes.clients}")
        if malicious and isinstance(chosen_attack, LabelAttack) and sizes.classes == 1:
            raise InputError("attack: y has no class numbers to flip; nearest: 'sign_flip'")
        return corrupt(method, chosen_attack, malicious)

    def losses(model: Any, x: Any, y: Array) -> Array:
        return _losses(client.loss, model, x, y, jax.random.key(0))

    def first_loss(x: Any, y: Any) -> float:
        # as one batch: there are `MOST_COMPARED` examples at most
        inputs = jax.tree.map(jnp.asarray, x)
        return float(jnp.mean(losses(model_of(params), inputs, jnp.asarray(y))))

    return Averaging(build, model_of, first_loss, losses, chosen_attack if malicious else None)


def _draws(loss: Any) -> bool:
    """Return whether a loss has a parameter `key`."""
    try:
        return "key" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        # no function, or a builtin without a signature
        return False


def _losses(loss: Any, model: Any, x: Any, y: Array, key: PRNGKeyArray) -> Array:
    """Return the loss of each example."""
    if _draws(loss):
        return loss(model, x, y, key=key)
    return loss(model, x, y)


def _opened(model: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """Return the parameters of a model, and the function that makes a model of parameters."""
    # imported here, as pytree models do not need it
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return jax.tree.map(jnp.asarray, check_model(model)), lambda params: params
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    # nnx modules change in place: with a copy, layers may update their state while a loss
    # is traced, and `rest` stays as it is
    return check_model(nnx.to_pure_dict(params)), lambda params: nnx.merge(graph, params, rest, copy=True)


def _learner(params: PyTree, model_of: Callable[[PyTree], Any], loss: Any) -> Learner:
    """Return a learner that is the user's model, and whose output is the loss of each example.

    It has no network of this package, no adapter and no logits: all its parameters are the classifier's.
    """

    def init(_key: PRNGKeyArray, _frozen: PyTree) -> Params:
        return Params((), params)

    def forward(
        _frozen: PyTree, _cached: Params, trainable: Params, batch: Batch, _task: Task, _train: bool
    ) -> Output:
        # the key of the step's first example, which is never padding
        key = jax.random.key(0) if batch.keys is None else batch.keys[0]
        losses = _checked_losses(loss, model_of(trainable.classifier), batch, key)
        # a user's model gives neither logits nor features: arrays [B, 0]
        no_values = jnp.zeros((len(batch.mask), 0))
        return Output(logits=no_values, feature=no_values, losses=losses)

    def predict(_frozen: PyTree, _params: Params, batch: Batch, task: Task) -> Array:
        # the engine asks for the shape of a method's logits; a simulation measures its
        # test examples by the user's own function (`simulation_tasks.py`)
        return jnp.zeros((len(batch.mask), len(task.seen)))

    return Learner(
        network=Network(_no_params, _no_network, width=0, blocks=0),
        adapter=Adapter(lambda _key, _frozen: ()),
        classifier=Classifier(lambda _key: params, _no_network),
        init=init,
        open_task=_whole,
        trainable=_whole,
        merge=_trained,
        cached=_nothing,
        forward=forward,
        predict=predict,
        queries=False,
    )


def _checked_losses(loss: Any, model: Any, batch: Batch, key: PRNGKeyArray) -> Float[Array, " B"]:
    """Return the loss of each example.

    Raises:
      InputError: for whatever the user's loss raises, and for a result of another shape.
    """
    try:
        losses = _losses(loss, model, batch.input, batch.label, key)
    # a traced value that outlived its trace has a line of its own (`leaks_in_one_line`)
    except (InputError, jax.errors.UnexpectedTracerError):
        raise
    except Exception as error:
        raise InputError(f"loss: {describe(loss)}: {reason(error)}") from error
    shape = jnp.shape(losses)
    # one loss per example: the mean over a batch would count its padding
    expected = (len(batch.mask),)
    if shape != expected:
        hint = ""
        if shape == ():
            hint = "; leave out the mean over examples"
        raise InputError(
            f"loss: {describe(loss)} returned shape {shape}; expected one loss for each example, "
            f"{expected}{hint}"
        )
    return losses


def _no_params(_key: PRNGKeyArray) -> tuple:
    return ()


def _no_network(*_arguments: Any) -> Any:
    raise NotImplementedError("the model is the user's own")


def _whole(params: Params, _task: Task) -> Params:
    """Return all parameters: they train in every task."""
    return params


def _trained(_params: Params, _task: Task, trainable: Params) -> Params:
    return trainable


def _nothing(_params: Params) -> Params:
    """Return the parameters that clients cache: none."""
    return Params((), ())


def _mean_loss(output: Output, batch: Batch, _task: Task) -> Float[Array, ""]:
    """Return the mean loss of the examples that count."""
    assert output.losses is not None
    total = jnp.sum(jnp.where(batch.mask, output.losses, 0.0))
    return total / jnp.maximum(jnp.sum(batch.mask), 1)


class SimulationState(NamedTuple):
    """The state from which a further simulation continues."""

    server: PyTree
    """The server's state."""
    clients: PyTree
    """The clients' states, leaves [K, ...]."""
    names: np.ndarray
    """Names of the clients [K], sorted."""
    tasks: int
    """Tasks so far."""
    seen: Bool[np.ndarray, " C"]
    """Classes so far."""


@dataclasses.dataclass(frozen=True, eq=False)
class Simulated:
    """The result of a simulation. `model, history = simulate(...)` takes the first two fields."""

    model: Any
    """The trained model, of the kind that `fedavg` was given; the server's state for any other method."""
    history: list[dict[str, Any]]
    """Of each round: the clients' mean loss, participants, uploads that were left out, and the share of
    examples whose loss was NaN or infinite; with `tasks`, also the task and its round, from 0."""
    scores: Float[np.ndarray, "T T"] | None
    """The metric on the test examples of task i after task t, [t, i]; NaN before task i. None without
    `test`."""
    state: SimulationState
    """For `simulate(..., state=...)`, which continues with further tasks."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the model and the history."""
        return iter((self.model, self.history))


class Examined(NamedTuple):
    """The examples on the device."""

    x: PyTree
    y: Array


class Rounds(NamedTuple):
    """The rounds of each task, and their participants."""

    count: int
    participation: float
    seed: int
    attack: Attack | None
    names_tasks: bool
    """Whether a line of the history says its task and round."""


class Scored(NamedTuple):
    """The metric, and the test examples on which it is measured after each task."""

    metric: CompiledMetric
    test: ScoredExamples


class Listener(NamedTuple):
    """The user's callback and the progress bar."""

    callback: Callback | None
    model_of: Callable[[PyTree], Any]
    progress: bool


class End(NamedTuple):
    """The states after all rounds, and what was measured."""

    server: PyTree
    clients: PyTree
    history: list[dict[str, Any]]
    scores: Float[np.ndarray, "T T"] | None


@leaks_in_one_line()
def simulate(
    method: Averaging | Method,
    x: Any,
    y: Any,
    owner: Sequence | np.ndarray,
    rounds: int,
    *,
    tasks: int | Sequence | np.ndarray | None = None,
    test: Sequence | None = None,
    evaluate: str | ExampleMetric = "loss",
    callback: Callback | None = None,
    progress: bool = False,
    state: SimulationState | None = None,
    participation: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Play rounds of a method on arrays whose examples have owners.

    Args:
      method: from `fedavg`, or any `Method`.
      x: inputs [N, ...], or a pytree of such arrays, as {"ids": ..., "mask": ...}.
      y: labels or targets [N, ...]. Integers from 0 of shape [N] are classes, for what reads classes.
      owner: each example's client [N]: integers or text.
      rounds: their number in each task.
      tasks: their number, with the classes divided in their order; or the labels of each task, such as
        [[0, 1], [2]]; or each example's task [N], integers or text. None: all examples are one task.
      test: (x_test, y_test); (x_test, y_test, tasks_test) where `tasks` names each example's task.
      evaluate: measured on `test` after each task. "loss" is the client's. "accuracy" and "perplexity"
        call model(x) for logits [..., C] of labels y [...], and leave out negative labels. Or evaluate(model,
        x, y) -> a number for each example [B], or such numbers and their weights.
      callback: callback(line, model), called after each round with its line of the history.
      progress: whether a bar shows the rounds.
      state: `Simulated.state` of an earlier simulation; the tasks follow its tasks.
      participation: share of the clients that take part in a round.
      seed: of all random draws.

    Raises:
      InputError: for arrays of different lengths, or for a function that returns something else than it
        should, naming its file and line.
    """
    if not isinstance(method, Averaging | Method):
        raise InputError(f"method: {type(method).__name__}; nearest: fcljax.fedavg(model, client)")
    examples = checked_examples(x, y, owner)
    rounds = check_whole("rounds", rounds, 1)
    seed = check_whole("seed", seed, 0, 2**32 - 1)
    if callback is not None:
        check_arguments("simulate", callback=(callback, 2))
    split = split_tasks(tasks, examples)
    if state is not None:
        if not isinstance(state, SimulationState):
            kind = type(state).__name__
            raise InputError(f"state: {kind}; nearest: the field `state` of a simulation's result")
        examples, split = _following(state, examples, split)
    participation = check_participation(participation, len(examples.names))
    partitions = _partitions(examples, split)
    scored = _scored(method, test, evaluate, examples, split)
    attack = method.attack if isinstance(method, Averaging) else None
    plan = Rounds(rounds, participation, seed, attack, tasks is not None)
    sizes = _sizes(examples, split, partitions, rounds)
    played = method.build(sizes) if isinstance(method, Averaging) else method
    listener = Listener(callback, functools.partial(_model_of, method), progress)
    data = Examined(jax.tree.map(jnp.asarray, examples.x), jnp.asarray(examples.y))
    end = _rounds(played, data, partitions, split.tasks, plan, state, scored, listener)
    _warn(method, examples.x, examples.y, end.history)
    last = split.tasks[-1]
    following = SimulationState(
        end.server, end.clients, examples.names, int(last.index) + 1, np.asarray(last.seen)
    )
    return Simulated(_model_of(method, end.server), end.history, end.scores, following)


def _model_of(method: Averaging | Method, server: PyTree) -> Any:
    """Return the model of a server's state; the state itself for a method that is not `fedavg`."""
    if isinstance(method, Averaging):
        return method.model_of(server.params.classifier)
    return server


def _sizes(
    examples: OwnedExamples, split: TaskSplit, partitions: list[ClientPartition], rounds: int
) -> Sizes:
    """Return the sizes from which a method makes its shapes."""
    tasks = int(split.tasks[-1].index) + 1
    task_classes = len(split.tasks[0].classes)
    most_examples = max(int(partition.count.max()) for partition in partitions)
    return Sizes(examples.classes, tasks, task_classes, len(examples.names), rounds, most_examples)


def _scored(
    method: Averaging | Method, test: Any, evaluate: Any, examples: OwnedExamples, split: TaskSplit
) -> Scored | None:
    """Return what is measured after each task; None without test examples."""
    if test is None:
        if evaluate != "loss":
            raise InputError("evaluate: there are no test examples; give test=(x_test, y_test)")
        return None
    losses = method.losses if isinstance(method, Averaging) else None
    metric = make_metric(evaluate, losses, functools.partial(_model_of, method))
    return Scored(metric, checked_test(test, examples.x, split))


def _partitions(examples: OwnedExamples, split: TaskSplit) -> list[ClientPartition]:
    """Return the clients' examples of each task."""
    # without classes all examples are of one class, so that reports have a shape
    label = examples.y
    if examples.classes == 1:
        label = np.zeros(len(examples.y), int)
    partitions = []
    for task in range(len(split.tasks)):
        # clients are numbered in the order of their names
        client = np.where(split.of_example == task, examples.client, -1)
        parts = [np.flatnonzero(client == k).astype(np.int32) for k in range(len(examples.names))]
        counts = count_matrix(label, parts, examples.classes)
        partitions.append(ClientPartition(*ClientIndices.of(parts), counts.astype(np.int32)))
    return partitions


def _following(
    state: SimulationState, examples: OwnedExamples, split: TaskSplit
) -> tuple[OwnedExamples, TaskSplit]:
    """Return examples of the clients of an earlier simulation, and tasks that follow its tasks.

    Raises:
      InputError: for clients that the simulation does not have.
    """
    unknown = np.setdiff1d(examples.names, state.names)
    if len(unknown):
        raise InputError(
            f"owner: {unknown[0].item()!r} is no client of state, which has {len(state.names)}, such as "
            f"{state.names[0].item()!r}"
        )
    # clients keep their numbers, by which the states and random draws go
    client = np.searchsorted(state.names, examples.names)[examples.client]
    # earlier tasks may have had more classes than these, or fewer
    classes = max(examples.classes, len(state.seen))
    seen_before = np.zeros(classes, bool)
    seen_before[: len(state.seen)] = state.seen

    def following(task: Task) -> Task:
        padding = (0, classes - examples.classes)
        seen = seen_before | np.pad(np.asarray(task.seen), padding)
        current = np.pad(np.asarray(task.current), padding)
        number = np.asarray(int(task.index) + state.tasks, np.int32)
        return Task.of_numpy(number, np.asarray(task.classes), current, seen)

    examples = examples._replace(names=state.names, client=client, classes=classes)
    return examples, split._replace(tasks=tuple(map(following, split.tasks)))


def _warn(
    method: Averaging | Method,
    x: PyTree,
    y: np.ndarray,
    history: list[dict[str, Any]],
) -> None:
    """Warn on standard error if training went wrong."""
    warnings = training_warnings(history)
    # the loss before training costs a forward pass, so it is computed only where it may
    # be needed: if the loss did not fall
    if isinstance(method, Averaging) and not warnings and _loss_stayed(history):
        sample = np.linspace(0, len(y) - 1, min(len(y), MOST_COMPARED)).astype(int)
        first_loss = method.first_loss(jax.tree.map(lambda leaf: leaf[sample], x), y[sample])
        warnings = diverged(first_loss, history[-1]["loss"])
    for line in warnings:
        say(Console(stderr=True), line)


def _loss_stayed(history: list[dict[str, Any]]) -> bool:
    """Return whether the last round's loss is not below the first round's, or there is one round alone."""
    # `not <` instead of `>=`: it is also True for NaN
    return bool(history) and not (len(history) > 1 and history[-1]["loss"] < history[0]["loss"])


def _fetch(
    data: Examined,
    index: Array,
    _keys: Array,
    _augment: bool,
) -> tuple[PyTree, Array, None]:
    return jax.tree.map(lambda leaf: leaf[index], data.x), data.y[index], None


class Stage(NamedTuple):
    """The rounds that `_play` plays: before a task, one of it, or after it."""

    task: Task
    partition: ClientPartition
    round: int
    when: When
    last: bool


class RoundPlayer(NamedTuple):
    """The values that all rounds share."""

    engine: Engine
    data: Examined
    plan: Rounds
    key: PRNGKeyArray


def _play(
    federation: RoundPlayer, server: PyTree, clients: PyTree, stage: Stage
) -> tuple[PyTree, PyTree, RoundReport]:
    """Return the states after one stage, and its report."""
    task, partition, number, when, last = stage
    engine, data, plan, key = federation
    # all clients with examples report at a task's start and end
    ids = np.flatnonzero(partition.count)
    if when == "round":
        ids = participants(plan.seed, int(task.index), number, ids, plan.participation)
    stage_key = jax.random.fold_in(key, STAGE_KEYS[when])
    inputs = RoundInputs((), data, partition, ids, task, number, stage_key, when, last)
    return run_round(engine, server, clients, inputs)


def _rounds(
    method: Method,
    data: Examined,
    partitions: list[ClientPartition],
    tasks: tuple[Task, ...],
    plan: Rounds,
    state: SimulationState | None,
    scored: Scored | None,
    listener: Listener,
) -> End:
    """Play the rounds of all tasks, from the states of an earlier simulation if there is one."""
    num_clients = len(partitions[0].count)
    key = jax.random.key(plan.seed)
    # one client at a time on a CPU, where batched clients are slower
    lanes = Lanes(1, "loop")
    if jax.default_backend() != "cpu":
        lanes = Lanes(min(8, num_clients), "vmap")
    room = capacities(method, partitions, lanes.count, num_clients, plan.participation)
    example = Example((), data, tasks[0])
    if plan.attack is not None:
        uploads = tuple(shapes.upload for shapes in check_method(method, _fetch, example))
        check_attacks([plan.attack], uploads)
    federation = RoundPlayer(make_engine(method, _fetch, lanes, room, example), data, plan, key)
    server, clients = _first_states(method, num_clients, key, state)
    begin_task = jit(method.begin_task, None)
    history = []
    rows = []
    with progress_bar("rounds", console=Console(stderr=True, quiet=not listener.progress)) as bar:
        shown = bar.add_task("", total=len(tasks) * plan.count)
        for task, partition in zip(tasks, partitions, strict=True):
            context = RoundContext.on_host((), task, 0, plan.count == 1)
            server = begin_task(context, server, fold(key, RunKey.BEGIN_TASK, int(task.index)))
            start = Stage(task, partition, 0, "task_start", plan.count == 1)
            server, clients, _ = _play(federation, server, clients, start)
            for r in range(plan.count):
                stage = Stage(task, partition, r, "round", r == plan.count - 1)
                server, clients, report = _play(federation, server, clients, stage)
                if stage.last:
                    end = stage._replace(round=0, when="task_end")
                    server, clients, _ = _play(federation, server, clients, end)
                line = {"task": int(task.index), "round": r} if plan.names_tasks else {}
                history.append(line | _measured(report))
                bar.advance(shown)
                if listener.callback is not None:
                    listener.callback(history[-1], listener.model_of(server))
            if scored is not None:
                # tasks of a continued simulation do not begin at 0; rows of scores do
                number = int(task.index - tasks[0].index)
                rows.append(measured_row(scored.metric, server, scored.test, number, len(tasks)))
    return End(server, clients, history, np.array(rows) if rows else None)


def _measured(report: RoundReport) -> dict[str, Any]:
    """Return the history's entries of a round."""
    return {
        "loss": report.metrics["loss"],
        "participants": report.participants,
        "rejected": report.rejected,
        NOT_FINITE: report.metrics.get(NOT_FINITE, 0.0),
    }


def _first_states(
    method: Method, num_clients: int, key: PRNGKeyArray, state: SimulationState | None
) -> tuple[PyTree, PyTree]:
    """Return the states of the server and of all clients from which the first round starts.

    Raises:
      InputError: for states of another method or model.
    """
    server = method.init(jax.random.fold_in(key, RunKey.INIT), ())
    clients = init_clients(method, server, num_clients, jax.random.fold_in(key, RunKey.CLIENTS))
    if state is None:
        return server, clients
    # the new states serve as examples of the shapes that the method needs
    for name, new, earlier in (("server", server, state.server), ("clients", clients, state.clients)):
        expected = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(new)]
        received = [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(earlier)]
        if expected != received or jax.tree.structure(new) != jax.tree.structure(earlier):
            raise InputError(
                f"state: its {name} have arrays of other shapes than the method; nearest: the method and "
                f"the model of the simulation that it is from"
            )
    # a copy, because the engine donates clients' states and the caller may continue from
    # the same state again
    return state.server, jax.tree.map(jnp.copy, state.clients)
