"""Federated averaging of any model on arrays, on the engine that runs everything else.

Between a whole run (`fcljax.run`: images, tasks, files) and the engine itself: clients are an array of
owners, the model is a Flax module or a pytree of parameters. Aggregation rules, client rules, server rules,
attacks and differential privacy are those of runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from rich.console import Console

from fcljax.data.partition import count_matrix
from fcljax.data.store import ClientIndices, Split
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated.aggregation import make_aggregation
from fcljax.federated.check import Example, describe
from fcljax.federated.engine import (
    Lanes,
    RoundInputs,
    init_clients,
    make_engine,
    run_round,
)
from fcljax.federated.faults import corrupt
from fcljax.federated.health import NOT_FINITE, diverged, training_warnings
from fcljax.federated.keys import RunKey
from fcljax.federated.schedule import ClientPartition, capacities, participants
from fcljax.options import replaced
from fcljax.parts.client import ClientRule, Training
from fcljax.parts.federate import Run, federate
from fcljax.parts.learner import Adapter, Classifier, Learner, Loss, Output, Params
from fcljax.parts.server import ServerRule
from fcljax.parts.user_code import check_arguments
from fcljax.settings import AggregationOptions, Aggregator
from fcljax.terminal import say
from fcljax.types import Batch, Method, Network, Sizes, Task

MOST_COMPARED = 1_000  # examples on which the loss is measured before training, where it seems to diverge


@runtime_checkable
class ExampleLoss(Protocol):
    """Returns the loss of each example, not their mean: padding is masked afterwards."""

    def __call__(self, model: Any, x: Array, y: Array, /) -> Float[Array, " B"]: ...


class LocalSGD(NamedTuple):
    """How each client trains in a round."""

    loss: ExampleLoss
    """loss(model, x [B, ...], y [B, ...]) -> [B]."""
    optimiser: optax.GradientTransformation
    """New in every round; its learning rate is its own."""
    epochs: int
    """Passes over the client's examples."""
    batch_size: int
    """Examples of a step."""


def local_sgd(
    loss: ExampleLoss, optimiser: optax.GradientTransformation, epochs: int = 1, batch_size: int = 32
) -> LocalSGD:
    """How each client trains in a round: some epochs of an optax optimiser.

    Args:
      loss: loss(model, x, y) -> one number for each example.
      optimiser: such as `optax.sgd(0.1)`.
      epochs: passes over the client's examples in a round.
      batch_size: examples of a step.

    Raises:
      InputError: for a loss that takes other arguments.
    """
    check_arguments("local_sgd", loss=(loss, 3))
    return LocalSGD(loss, optimiser, epochs, batch_size)


class MergingOptions(TypedDict, total=False):
    """How the server merges uploads: the fields of `settings.AggregationOptions`."""

    aggregator: Aggregator
    trim: float
    malicious_bound: int
    clip_radius: float
    clip_norm: float
    noise_multiplier: float
    server_optimiser: Literal["none", "momentum", "adam", "yogi"]
    server_step: float | None
    server_momentum: float
    server_adaptivity: float


class Averaging(NamedTuple):
    """A federated method for a model of one's own, whatever the data."""

    build: Callable[[Sizes], Method]
    """build(sizes) -> the method that the engine plays."""
    model_of: Callable[[PyTree], Any]
    """model_of(parameters) -> a model of the kind that was given."""
    first_loss: Callable[[Any, Any], float]
    """first_loss(x, y) -> mean loss of the model that was given."""


def fedavg(
    model: Any,
    client: LocalSGD,
    *,
    client_rules: tuple[ClientRule, ...] = (),
    server_rules: tuple[ServerRule, ...] = (),
    malicious: int = 0,
    attack: str = "sign_flip",
    **merging: Unpack[MergingOptions],
) -> Averaging:
    """Federated averaging (McMahan et al. 2017).

    Args:
      model: a `flax.nnx` module, of which the `nnx.Param`s train and all other state stays as it is; or a
        pytree of parameters, which the loss gets as they are.
      client: from `local_sgd`.
      client_rules: as of `federate`, such as `prox(0.1)`.
      server_rules: as of `federate`.
      malicious: the clients with the lowest ids that attack.
      attack: of `settings.ATTACKS`.
      merging: options of `AggregationOptions`, such as `aggregator="median"`, or `clip_norm=1.0,
        noise_multiplier=0.5` for differential privacy.

    Raises:
      InputError: for options that do not exist or do not fit together.
    """
    params, model_of = _opened(model)
    unknown = sorted(set(merging) - {*AggregationOptions.__dataclass_fields__})
    if unknown:
        raise InputError(f"fedavg: unknown option {unknown[0]!r}; choose from those of AggregationOptions")
    aggregation = make_aggregation(replaced(AggregationOptions(), **merging))
    # federate subtracts what the optimiser gives, and optax's updates are added
    descent = optax.chain(client.optimiser, optax.scale(-1.0))
    training = Training(client.epochs, client.batch_size, 1.0, descent)
    learner = _learner(params, model_of, client.loss)

    def build(sizes: Sizes) -> Method:
        run = Run(sizes, learner.network, learner.adapter, training, aggregation, client_rules)
        method = federate(run, learner, loss=Loss(_mean_loss), server_rules=server_rules, predicts="all")
        return corrupt(method, attack, malicious)

    def first_loss(x: Any, y: Any) -> float:
        return float(jnp.mean(client.loss(model_of(params), jnp.asarray(x), jnp.asarray(y))))

    return Averaging(build, model_of, first_loss)


def _opened(model: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """The parameters of a model, and the model of parameters."""
    from flax import nnx

    if not isinstance(model, nnx.Module):
        return jax.tree.map(jnp.asarray, model), lambda params: params
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return nnx.to_pure_dict(params), lambda params: nnx.merge(graph, params, rest)


def _learner(params: PyTree, model_of: Callable[[PyTree], Any], loss: ExampleLoss) -> Learner:
    """A learner without a frozen network, whose classifier is the whole model and whose features are the
    losses of the examples."""

    def init(key: PRNGKeyArray, frozen: PyTree) -> Params:
        del key, frozen
        return Params((), params)

    def forward(
        frozen: PyTree, cached: Params, trainable: Params, batch: Batch, task: Task, train: bool
    ) -> Output:
        del frozen, cached, train
        found = loss(model_of(trainable.classifier), batch.image, batch.label)
        shape, wanted = jnp.shape(found), (len(batch.mask),)
        if shape != wanted:
            hint = "; leave out the mean over examples" if shape == () else ""
            raise InputError(
                f"loss: {describe(loss)} returned shape {shape}, and one loss for each example is needed, "
                f"{wanted}{hint}"
            )
        # there need be no classes: nothing reads these logits
        return Output(jnp.zeros((len(batch.mask), len(task.seen))), found)

    def predict(frozen: PyTree, params: Params, batch: Batch, task: Task) -> Array:
        return forward(frozen, params, params, batch, task, False).logits

    adapter = Adapter(lambda key, frozen: ())
    classifier = Classifier(lambda key: params, lambda cached, trainable, feature, task: feature)
    network = Network(lambda key: (), _no_network, 0, 0, (0, 0, 0))
    parts = network, adapter, classifier
    return Learner(*parts, init, _whole, _whole, _trained, _nothing, forward, predict, queries=False)


def _no_network(*_: Any) -> Any:
    raise NotImplementedError("the model is the user's own")


def _whole(params: Params, task: Task) -> Params:
    """All parameters train, in every task."""
    del task
    return params


def _trained(params: Params, task: Task, trainable: Params) -> Params:
    del params, task
    return trainable


def _nothing(params: Params) -> Params:
    """Clients hold nothing that does not travel."""
    del params
    return Params((), ())


def _mean_loss(output: Output, batch: Batch, task: Task) -> Float[Array, ""]:
    del task
    total = jnp.sum(jnp.where(batch.mask, output.feature, 0.0))
    return total / jnp.maximum(jnp.sum(batch.mask), 1)


class Simulated(NamedTuple):
    """What a simulation ends with."""

    model: Any
    """The trained model, of the kind that `fedavg` was given; the server's state for any other method."""
    history: list[dict[str, float]]
    """Of each round: the clients' mean loss, participants, uploads that were left out, and the share of
    examples whose loss was NaN or infinite."""


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
    """Rounds of a method on arrays whose examples have owners.

    Args:
      method: from `fedavg`, or any `Method`.
      x: inputs [N, ...].
      y: labels or targets [N, ...].
      owner: each example's client [N]: integers or text.
      rounds: how many.
      participation: share of the clients that take part in a round.
      seed: of all random draws.

    Raises:
      InputError: for arrays of different lengths, or for a function that returns something else than it
        should, naming its file and line.
    """
    x, y, owner = np.asarray(x), np.asarray(y), np.asarray(owner)
    if not len(x) == len(y) == len(owner) or owner.ndim != 1:
        raise InputError(f"simulate: x, y and owner have the shapes {x.shape}, {y.shape} and {owner.shape}")
    names, client = np.unique(owner, return_inverse=True)
    parts = [np.flatnonzero(client == k).astype(np.int32) for k in range(len(names))]
    classes = int(y.max()) + 1 if y.ndim == 1 and y.dtype.kind in "iu" else 1
    counts = count_matrix(y if classes > 1 else np.zeros(len(y), int), parts, classes)
    partition = ClientPartition(*ClientIndices.of(parts), counts.astype(np.int32))
    sizes = Sizes(classes, 1, classes, len(names), rounds, max(map(len, parts)))
    played = method.build(sizes) if isinstance(method, Averaging) else method
    server, history = _rounds(
        played, Split(jnp.asarray(x), jnp.asarray(y)), partition, rounds, participation, seed
    )
    _warn(method, x, y, history)
    model = method.model_of(server.params.classifier) if isinstance(method, Averaging) else server
    return Simulated(model, history)


def _warn(method: Averaging | Method, x: np.ndarray, y: np.ndarray, history: list[dict[str, float]]) -> None:
    """Say on standard error if training went wrong."""
    said = training_warnings(history)
    if isinstance(method, Averaging) and not said and _loss_stayed(history):
        some = np.linspace(0, len(x) - 1, min(len(x), MOST_COMPARED)).astype(int)
        said = diverged(method.first_loss(x[some], y[some]), history[-1]["loss"])
    for line in said:
        say(Console(stderr=True), line)


def _loss_stayed(history: list[dict[str, float]]) -> bool:
    """Whether the last round's loss is no lower than the first one's, or is the first one's."""
    return bool(history) and not (len(history) > 1 and history[-1]["loss"] < history[0]["loss"])


def _fetch(split: Split, index: Array, keys: Array, augment: bool) -> tuple[Array, Array, None]:
    del keys, augment
    return split.image[index], split.label[index], None


def _rounds(
    method: Method, data: Split, partition: ClientPartition, rounds: int, participation: float, seed: int
) -> tuple[PyTree, list[dict[str, float]]]:
    """The server's state after all rounds, and what is known of each."""
    everyone, classes = partition.class_examples.shape
    (task,), key = make_tasks(classes, 1), jax.random.key(seed)
    # batched clients are slower on a CPU
    lanes = Lanes(1, "loop") if jax.default_backend() == "cpu" else Lanes(min(8, everyone), "vmap")
    room = capacities(method, [partition], lanes.count, everyone, participation)
    engine = make_engine(method, _fetch, lanes, room, Example((), data, task))
    server = method.init(jax.random.fold_in(key, RunKey.INIT), ())
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
