"""What one machine of a federation has: a client its rows, the server the images that it evaluates on.
Nothing here knows by which framework they talk to each other.

All machines have the same settings. Where they name a data set, every client loads it and takes the rows that
the partition gives to it; a client with data of its own takes all of those, and nobody else sees them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fcljax import config
from fcljax.config import EngineConfig, RunConfig
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.sources import load_part
from fcljax.errors import InputError
from fcljax.federated.engine import Exchange, Work, client_states, work_alone
from fcljax.federated.keys import RunKey
from fcljax.methods import find_method
from fcljax.runs import origin
from fcljax.runs.build import Experiment, assemble, sizes_of
from fcljax.runs.inputs import Inputs, load_inputs
from fcljax.runs.loop import first_server
from fcljax.runs.queries import with_queries
from fcljax.scenario import Scenario, make_scenario, scenario_of_counts, scenario_of_one
from fcljax.types import Broadcast, PyTree, RoundContext, Upload

OWN = "its own"  # in place of a digest of images


# ---- settings ----------------------------------------------------------------------------------------------


def settings_of(method: str | None, given: dict[str, Any]) -> tuple[str, RunConfig]:
    """The method and the resolved settings of a federation.

    Args:
      method: its name or file; None: `given` has it under "method".
      given: settings by name, as `fcljax run` takes them.

    Raises:
      InputError: for a wrong value, or for what only a simulation can do.
    """
    given = {name.replace("-", "_"): value for name, value in given.items()}
    named = given.pop("method", method)
    if not named or (method and named != method):
        raise InputError(f"method: {named!r} given; name one method, such as 'fppl'")
    cfg = config.resolve(named, config.from_mapping(named, given, "settings"))
    check_deployable(cfg)
    return named, cfg


def check_deployable(cfg: RunConfig) -> None:
    """Check that clients on machines of their own can do what the settings ask for.

    Raises:
      InputError: naming what only a simulation can do.
    """
    if cfg.partition == "sampled":
        raise InputError(
            "partition: 'sampled' clients are drawn anew from all rows in every round, so no machine can be "
            "one; nearest: 'task_dirichlet'"
        )
    if cfg.population != "static":
        raise InputError(
            f"population: {cfg.population!r} deals all rows afresh in every round, and clients keep theirs; "
            f"nearest: 'static'"
        )
    if cfg.pool is not None:
        raise InputError(
            f"pool: {cfg.pool!r} makes the tasks from the rows of all clients, which no server has; nearest: "
            f"None"
        )
    simulated = {field.name for field in dataclasses.fields(EngineConfig)} | {"devices"}
    for field in dataclasses.fields(RunConfig):
        if field.name not in simulated or field.name == "eval_every_round":
            continue
        if getattr(cfg, field.name) != field.default:
            raise InputError(
                f"{field.name}: {getattr(cfg, field.name)!r} is for simulations: clients have machines of "
                f"their own, and a server alone cannot go on where a run broke off; nearest: "
                f"{field.default!r}"
            )


# ---- a client ----------------------------------------------------------------------------------------------


class Holding(NamedTuple):
    """What a client has loaded. `own`: are the rows data of its own? Else they are dealt by the settings."""

    inputs: Inputs
    scenario: Scenario
    own: bool

    def rows(self, client: int) -> list[int]:
        """Rows of a client in each task."""
        return [int(of_task[0].count[client]) for of_task in self.scenario.partitions]


class Facts(NamedTuple):
    """What a client says of itself before it takes part. `rows`: in each task. `settings`: of the run, as
    YAML has them. `digests`: of all that it reads, by what it is; data of its own have none."""

    client: int
    rows: list[int]
    settings: dict[str, Any]
    digests: dict[str, str]


class Own(NamedTuple):
    """Data of a client's own: the arrays x_train and y_train of a .npz file. `class_names`: of the whole
    federation, which the labels number."""

    client: int
    path: str
    class_names: tuple[str, ...]


@functools.lru_cache(maxsize=2)
def hold(method: str, cfg: RunConfig, own: Own | None) -> Holding:
    """What a client holds; what the settings deal is the same for all clients of a machine.

    Raises:
      InputError: for anything in settings or files that cannot work.
    """
    joint = find_method(method).joint
    if own is None:
        inputs = load_inputs(cfg)
        return Holding(inputs, make_scenario(inputs.dataset, cfg, cfg.rounds, joint), False)
    dataset = load_part(cfg.dataset, own.path, "train", own.class_names)
    scenario = scenario_of_one(dataset, cfg, cfg.rounds, joint, own.client)
    return Holding(load_inputs(cfg, dataset), scenario, True)


def check_client(cfg: RunConfig, client: object) -> int:
    """A client's id.

    Raises:
      InputError: for one that the settings do not have.
    """
    if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < cfg.clients:
        raise InputError(f"partition-id: {client!r} of {cfg.clients} clients; choose 0 to {cfg.clients - 1}")
    return client


def facts(method: str, cfg: RunConfig, client: int, holding: Holding) -> Facts:
    """What the client tells the server."""
    digests = origin.digests(holding.inputs)
    digests["images"] = OWN if holding.own else digests["images"]
    return Facts(client, holding.rows(client), origin.plain_settings(method, cfg), digests)


@functools.lru_cache(maxsize=2)
def client_experiment(method: str, cfg: RunConfig, own: Own | None, rows: int) -> Experiment:
    """All that a client works with.

    Args:
      rows: the most that any client of the federation has in a round, which decides over shapes.

    Raises:
      InputError: as `hold`.
    """
    holding = hold(method, cfg, own)
    sizes = sizes_of(holding.scenario, cfg)._replace(examples=rows)
    exp = assemble(method, cfg, holding.inputs, holding.scenario, sizes, by_itself=True)
    return with_queries(exp, cfg, ("train",))


def first_state(exp: Experiment, client: int) -> PyTree:
    """A client's state before it ever takes part."""
    shape = state_shape(exp)
    if not jax.tree.leaves(shape):
        return shape
    key = jax.random.fold_in(exp.key, RunKey.CLIENTS)
    states = client_states(exp.method, first_server(exp), jnp.array([client]), key)
    return jax.tree.map(lambda x: x[0], states)


def state_shape(exp: Experiment) -> PyTree:
    """Shapes and types of a client's state."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    return jax.eval_shape(exp.method.init_client, exp.key, server)


def broadcast_shape(exp: Experiment) -> Broadcast:
    """Shapes and types of what the server sends."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    return jax.eval_shape(exp.method.broadcast, _round_context(exp, 0, 0), server)


def _round_context(exp: Experiment, task: int, round_: int) -> RoundContext:
    return RoundContext.on_host(exp.frozen, exp.scenario.tasks[task], round_, False)


class Order(NamedTuple):
    """What a client is to do: which of the method's rounds, in which task and round, with which key."""

    index: int
    task: int
    round: int
    key: Array


def work(exp: Experiment, client: int, order: Order, broadcast: Broadcast, state: PyTree) -> Work:
    """A client's part of a round.

    Raises:
      InputError: for a task or a round that there is not.
    """
    sizes = (len(exp.method.rounds), len(exp.scenario.tasks), exp.sizes.rounds)
    for name, value, size in zip(("index", "task", "round"), order[:3], sizes, strict=True):
        if not 0 <= value < size:
            raise InputError(f"order: {name} {value} of {size}")
    partition = exp.scenario.partitions[order.task][order.round]
    round_context = _round_context(exp, order.task, order.round)
    exchange = Exchange(order.index, round_context, broadcast, partition, np.array([client]), order.key)
    return work_alone(exp.engine, exchange, state, exp.train)


# ---- the server --------------------------------------------------------------------------------------------


def load_server(cfg: RunConfig, test: str | None) -> Inputs:
    """The network, and the test images: those of a .npz file `test`, or of the settings' data set, of which
    no training image stays.

    Raises:
      InputError: for anything in settings or files that cannot work.
    """
    if test is None:
        inputs = load_inputs(cfg)
        return inputs._replace(dataset=_without_training(inputs.dataset))
    if cfg.holdout:
        raise InputError(f"holdout: {cfg.holdout} is a share of training images, and test names others")
    return load_inputs(cfg, load_part(cfg.dataset, test, "test"))


def server_facts(method: str, cfg: RunConfig, inputs: Inputs, test: str | None) -> Facts:
    """What a client's facts are compared with."""
    digests = origin.digests(inputs)
    digests["images"] = digests["images"] if test is None else OWN
    return Facts(-1, [], origin.plain_settings(method, cfg), digests)


def _without_training(dataset: Dataset) -> Dataset:
    """The data set with one black image of class 0 for training."""
    size = None if dataset.size_train is None else dataset.size_train[:1]
    black = np.zeros_like(dataset.x_train[:1])
    return dataset._replace(x_train=black, y_train=np.zeros(1, np.int64), size_train=size)


def server_experiment(
    method: str, cfg: RunConfig, inputs: Inputs, rows: Int[np.ndarray, "T K"]
) -> Experiment:
    """All that the server works with, where clients have so many rows in each task.

    Raises:
      InputError: for anything in the settings that cannot work.
    """
    scenario = scenario_of_counts(inputs.dataset, cfg, cfg.rounds, find_method(method).joint, rows)
    exp = assemble(method, cfg, inputs, scenario, sizes_of(scenario, cfg))
    return with_queries(exp, cfg, ("test",))


def check_facts(mine: Facts, theirs: Facts, tasks: int) -> None:
    """Check that a client can take part in the server's federation.

    Args:
      mine: the server's.
      theirs: the client's.
      tasks: of the run.

    Raises:
      InputError: naming what differs.
    """
    who = f"client {theirs.client}"
    differ = origin.differing(mine.settings, theirs.settings)
    if differ:
        raise InputError(f"{who}: it has other settings: {', '.join(differ.values())}")
    for name, digest in mine.digests.items():
        other = theirs.digests.get(name, "")
        if other != digest and not (name == "images" and OWN in (other, digest)):
            raise InputError(
                f"{who}: its {name} are not the server's: sha256 {other[:16]}, not {digest[:16]}"
            )
    if len(theirs.rows) != tasks or min(theirs.rows) < 0:
        raise InputError(f"{who}: it has rows {theirs.rows}; expected a number for each of {tasks} tasks")


def upload_shape(upload: Upload) -> Upload:
    """A program's upload as it travels: its weight is a float32."""
    # pyrefly: ignore[bad-argument-type]  # a shape stands for an array
    return upload._replace(weight=jax.ShapeDtypeStruct((), jnp.float32))
