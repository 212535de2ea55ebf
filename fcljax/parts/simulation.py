"""Federated averaging of any model on arrays, on the engine that runs everything else.

Between a whole run (`fcljax.run`: images, tasks, files) and the engine itself: clients are an array of
owners, the model is a Flax module or a pytree of parameters. Aggregation rules, client rules, server rules,
attacks and differential privacy are those of runs.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from rich.console import Console

from fcljax.data.partition import count_matrix
from fcljax.data.store import ClientIndices
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError, reason
from fcljax.federated.aggregation import make_aggregation
from fcljax.federated.check import Example, check_method, describe, leaks_in_one_line
from fcljax.federated.engine import (
    Lanes,
    RoundInputs,
    init_clients,
    make_engine,
    run_round,
)
from fcljax.federated.faults import attack_of, check_attacks, corrupt
from fcljax.federated.health import NOT_FINITE, diverged, training_warnings
from fcljax.federated.keys import RunKey
from fcljax.federated.schedule import ClientPartition, capacities, largest_batch, participants
from fcljax.options import LARGEST_INT
from fcljax.parts.client import ClientRule, Training
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Adapter, Classifier, Learner, Loss, Output, Params
from fcljax.parts.server import ServerRule
from fcljax.parts.simulation_inputs import (
    check_model,
    check_optimiser,
    check_participation,
    check_rules,
    check_whole,
    checked_examples,
    merging_options,
)
from fcljax.parts.user_code import check_arguments
from fcljax.run_options import MergingOptions
from fcljax.terminal import say
from fcljax.types import Attack, Batch, LabelAttack, Method, Network, Sizes, Task

MOST_COMPARED = 1_000  # examples on which the loss is measured before training, where it seems to diverge


@runtime_checkable
class ExampleLoss(Protocol):
    """Returns the loss of each example, not their mean: padding is masked afterwards. A loss with a parameter
    `key` gets a new one in every step, for dropout."""

    def __call__(self, model: Any, x: Any, y: Any, /) -> Float[Array, " B"]: ...


@runtime_checkable
class RandomLoss(Protocol):
    """A loss that draws."""

    def __call__(self, model: Any, x: Any, y: Any, /, *, key: PRNGKeyArray) -> Float[Array, " B"]: ...


class LocalSGD(NamedTuple):
    """How each client trains in a round."""

    loss: ExampleLoss | RandomLoss
    """loss(model, x [B, ...], y [B, ...]) -> [B]; with a parameter `key`, loss(model, x, y, key=key)."""
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
    # a loss that draws has a keyword argument, which positions do not count
    if not _draws(loss):
        check_arguments("local_sgd", loss=(loss, 3))
    check_optimiser(optimiser)
    epochs = check_whole("epochs", epochs, 1)
    batch_size = check_whole("batch_size", batch_size, 1, LARGEST_INT)
    return LocalSGD(loss, optimiser, epochs, batch_size)


class Averaging(NamedTuple):
    """A federated method for a model of one's own, whatever the data."""

    build: Callable[[Sizes], Method]
    """build(sizes) -> the method that the engine plays."""
    model_of: Callable[[PyTree], Any]
    """model_of(parameters) -> a model of the kind that was given."""
    first_loss: Callable[[Any, Any], float]
    """first_loss(x, y) -> mean loss of the model that was given."""
    attack: Attack | None = None
    """What malicious clients do; None where there are none."""


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
        statistics, counters of random numbers); or a
        pytree of parameters, which the loss gets as they are.
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
    # a typing error here would otherwise fail deep inside of `federate`
    if not isinstance(client, LocalSGD):
        raise InputError(f"client: {type(client).__name__}; nearest: local_sgd(loss, optimiser)")
    check_rules("client_rules", client_rules, ClientRule)
    check_rules("server_rules", server_rules, ServerRule)
    malicious = check_whole("malicious", malicious, 0, LARGEST_INT)
    lie = attack_of(attack)
    params, model_of = _opened(model)
    aggregation = make_aggregation(merging_options(merging))
    # federate subtracts what the optimiser gives, and optax's updates are added
    descent = optax.chain(client.optimiser, optax.scale(-1.0))
    learner = _learner(params, model_of, client.loss)

    def build(sizes: Sizes) -> Method:
        # a client with few examples has one batch, of all of them
        batch_size = largest_batch(client.batch_size, sizes.examples)
        training = Training(client.epochs, batch_size, 1.0, descent)
        run = Run(sizes, learner.network, learner.adapter, training, aggregation, client_rules)
        method = federate(run, learner, loss=Loss(_mean_loss), server_rules=server_rules, predicts="all")
        if malicious > sizes.clients:
            raise InputError(f"malicious: {malicious} of {sizes.clients} clients; nearest: {sizes.clients}")
        if malicious and isinstance(lie, LabelAttack) and sizes.classes == 1:
            raise InputError("attack: y has no class numbers to flip; nearest: 'sign_flip'")
        return corrupt(method, lie, malicious)

    def first_loss(x: Any, y: Any) -> float:
        x = jax.tree.map(jnp.asarray, x)
        # on the host's device and without batches: a thousand examples at most
        return float(jnp.mean(_losses(client.loss, model_of(params), x, jnp.asarray(y), jax.random.key(0))))

    return Averaging(build, model_of, first_loss, lie if malicious else None)


def _draws(loss: Any) -> bool:
    """Return whether a loss has a parameter `key`."""
    try:
        return "key" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # no function; of builtins nothing is known
        return False


def _losses(loss: Any, model: Any, x: Any, y: Array, key: PRNGKeyArray) -> Array:
    """Return the loss of each example."""
    if _draws(loss):
        # only then, because a loss without `key` must not get one
        return loss(model, x, y, key=key)
    return loss(model, x, y)


def _opened(model: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """Return the parameters of a model, and the function that makes the model of parameters."""
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return jax.tree.map(jnp.asarray, check_model(model)), lambda params: params
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    # nnx modules change in place
    # a copy, so that layers may update their state while a loss is traced
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
        # of the step's first example, which is never padding
        key = jax.random.key(0) if batch.keys is None else batch.keys[0]
        losses = _checked_losses(loss, model_of(trainable.classifier), batch, key)
        nothing = jnp.zeros((len(batch.mask), 0))
        return Output(logits=nothing, feature=nothing, losses=losses)

    def predict(_frozen: PyTree, _params: Params, batch: Batch, task: Task) -> Array:
        # the engine asks for the shape of a method's logits; a simulation evaluates nothing
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
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"loss: {describe(loss)}: {reason(error)}") from error
    shape = jnp.shape(losses)
    # a mean over the batch would count padding
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
    """Return what clients hold besides what travels: nothing."""
    return Params((), ())


def _mean_loss(output: Output, batch: Batch, _task: Task) -> Float[Array, ""]:
    """Return the mean loss of the examples that count."""
    assert output.losses is not None
    total = jnp.sum(jnp.where(batch.mask, output.losses, 0.0))
    return total / jnp.maximum(jnp.sum(batch.mask), 1)


class Simulated(NamedTuple):
    """What a simulation ends with."""

    model: Any
    """The trained model, of the kind that `fedavg` was given; the server's state for any other method."""
    history: list[dict[str, float]]
    """Of each round: the clients' mean loss, participants, uploads that were left out, and the share of
    examples whose loss was NaN or infinite."""


@leaks_in_one_line()
def simulate(
    method: Averaging | Method,
    x: Any,
    y: Any,
    owner: Sequence | np.ndarray,
    rounds: int,
    *,
    participation: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Play rounds of a method on arrays whose examples have owners.

    Args:
      method: from `fedavg`, or any `Method`.
      x: inputs [N, ...], or a pytree of such arrays, as {"ids": ..., "mask": ...}.
      y: labels or targets [N, ...]. Integers from 0 of shape [N] are classes, for what reads classes.
      owner: each example's client [N]: integers or text.
      rounds: how many.
      participation: share of the clients that take part in a round.
      seed: of all random draws.

    Raises:
      InputError: for arrays of different lengths, or for a function that returns something else than it
        should, naming its file and line.
    """
    if not isinstance(method, Averaging | Method):
        raise InputError(f"method: {type(method).__name__}; nearest: fcljax.fedavg(model, client)")
    x, y, names, client, classes = checked_examples(x, y, owner)
    rounds = check_whole("rounds", rounds, 1)
    seed = check_whole("seed", seed, 0, 2**32 - 1)
    participation = check_participation(participation, len(names))
    # clients are numbered in the order of their names
    parts = [np.flatnonzero(client == k).astype(np.int32) for k in range(len(names))]
    # without classes all examples are of one class, so that reports have a shape
    label = y
    if classes == 1:
        label = np.zeros(len(y), int)
    counts = count_matrix(label, parts, classes)
    partition = ClientPartition(*ClientIndices.of(parts), counts.astype(np.int32))
    sizes = Sizes(classes, 1, classes, len(names), rounds, max(map(len, parts)))
    played = method.build(sizes) if isinstance(method, Averaging) else method
    attack = None
    if isinstance(method, Averaging):
        attack = method.attack
    data = Examined(jax.tree.map(jnp.asarray, x), jnp.asarray(y))
    server, history = _rounds(played, data, partition, Rounds(rounds, participation, seed, attack))
    _warn(method, x, y, history)
    model = server
    if isinstance(method, Averaging):
        model = method.model_of(server.params.classifier)
    return Simulated(model, history)


class Examined(NamedTuple):
    """The examples on the device."""

    x: PyTree
    y: Array


class Rounds(NamedTuple):
    """How many rounds are played, and by whom."""

    count: int
    participation: float
    seed: int
    attack: Attack | None


def _warn(method: Averaging | Method, x: PyTree, y: np.ndarray, history: list[dict[str, float]]) -> None:
    """Say on standard error if training went wrong."""
    said = training_warnings(history)
    # measured only where the loss did not fall: it costs a pass over examples
    if isinstance(method, Averaging) and not said and _loss_stayed(history):
        some = np.linspace(0, len(y) - 1, min(len(y), MOST_COMPARED)).astype(int)
        first = method.first_loss(jax.tree.map(lambda leaf: leaf[some], x), y[some])
        said = diverged(first, history[-1]["loss"])
    for line in said:
        say(Console(stderr=True), line)


def _loss_stayed(history: list[dict[str, float]]) -> bool:
    """Return whether the last round's loss is no lower than the first one's, or is the first one's."""
    # NaN compares as not smaller
    return bool(history) and not (len(history) > 1 and history[-1]["loss"] < history[0]["loss"])


def _fetch(data: Examined, index: Array, _keys: Array, _augment: bool) -> tuple[PyTree, Array, None]:
    return jax.tree.map(lambda leaf: leaf[index], data.x), data.y[index], None


def _rounds(
    method: Method, data: Examined, partition: ClientPartition, played: Rounds
) -> tuple[PyTree, list[dict[str, float]]]:
    """Return the server's state after all rounds, and the history of the rounds."""
    rounds, participation, seed, attack = played
    everyone, classes = partition.class_examples.shape
    (task,) = make_tasks(classes, 1)
    key = jax.random.key(seed)
    # batched clients are slower on a CPU
    lanes = Lanes(1, "loop")
    if jax.default_backend() != "cpu":
        lanes = Lanes(min(8, everyone), "vmap")
    room = capacities(method, [partition], lanes.count, everyone, participation)
    example = Example((), data, task)
    if attack is not None:
        check_attacks([attack], tuple(shapes.upload for shapes in check_method(method, _fetch, example)))
    engine = make_engine(method, _fetch, lanes, room, example)
    server = method.init(jax.random.fold_in(key, RunKey.INIT), ())
    # ids, not names, key the clients' draws
    states = init_clients(method, server, everyone, jax.random.fold_in(key, RunKey.CLIENTS))
    history = []
    for r in range(rounds):
        ids = participants(seed, 0, r, np.arange(everyone), participation)
        last = r == rounds - 1
        inputs = RoundInputs(
            (), data, partition, ids, task, r, jax.random.fold_in(key, RunKey.ROUND), last=last
        )
        server, states, report = run_round(engine, server, states, inputs)
        history.append(
            {"loss": report.metrics["loss"], "participants": report.participants}
            | {"rejected": report.rejected, NOT_FINITE: report.metrics.get(NOT_FINITE, 0.0)}
        )
    return server, history
