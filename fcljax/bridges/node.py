"""Play one machine of a federation: a client with its examples, or the server with its
test images. Nothing depends on the framework by which they communicate.

All machines have the same settings. If these name a data set, every client loads it and
takes the examples that the partition assigns to it; a client with data of its own takes
all of those, which no other machine sees.
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
from fcljax.federated.engine import ClientResult, Exchange, client_states, work_alone
from fcljax.federated.keys import RunKey
from fcljax.methods import check_no_code, find_method
from fcljax.runs import resume
from fcljax.runs.build import Experiment, assemble, sizes_of
from fcljax.runs.features import with_queries
from fcljax.runs.inputs import Inputs, compute_type, load_inputs
from fcljax.runs.rate_search import is_due
from fcljax.runs.rounds import first_server
from fcljax.scenario import Scenario, make_scenario, scenario_of_counts, scenario_of_one
from fcljax.types import Broadcast, PyTree, RoundContext, Upload

# of a client in a task. The server's plan has a place for each, so that a client that
# claims 10^12 examples would use up the server's memory.
MAX_EXAMPLES = 1_000_000
OWN = "its own"  # in place of the digest of images that no other machine has


# ---- settings --------------------------------------------------------------------------


def federation_settings(method: str | None, options: dict[str, Any]) -> RunConfig:
    """Return the resolved settings of a federation, with the number format in which
    this machine computes.

    Args:
      method: name or file; None: `options` has it under "method".
      options: settings by name, as `fcljax run` takes them.

    Raises:
      InputError: for a wrong value, or for settings that only a simulation can honour.
    """
    # Flower's configuration is TOML, in which names are usually written with dashes
    options = {name.replace("-", "_"): value for name, value in options.items()}
    method_name = options.pop("method", method)
    if not method_name or (method and method_name != method):
        raise InputError(f"method: {method_name!r} given; name one method, such as 'fppl'")
    # the run's configuration comes over the network: it may name a method of the package,
    # never a file to execute
    if not method:
        check_no_code(method_name, "method", "give it to client_app and server_app")
    settings = config.resolve(config.from_mapping(method_name, options, "settings"))
    check_deployable(settings)
    # `auto` means something else on a CPU than on an accelerator; as a value the server
    # can compare it with the clients'
    return dataclasses.replace(settings, dtype=compute_type(settings))


def check_deployable(settings: RunConfig) -> None:
    """Check that clients on machines of their own can honour the settings.

    Raises:
      InputError: naming the setting that only a simulation can honour.
    """
    if settings.partition == "sampled":
        raise InputError(
            "partition: 'sampled' clients are drawn from all examples in every round, so no machine can be "
            "one; nearest: 'task_dirichlet'"
        )
    if settings.population != "static":
        raise InputError(
            f"population: {settings.population!r} assigns all examples anew in every round, and machines "
            f"keep theirs; nearest: 'static'"
        )
    pool = getattr(settings, "task_pool", "same")
    if pool != "same":
        raise InputError(
            f"task_pool: {pool!r} makes the tasks from the examples of all clients, which no "
            "server has; nearest: None"
        )
    # everything about lanes, memory and checkpoints. `eval_every_round` is the server's
    # own business; whatever else stands at its default asks for nothing.
    only_simulated = {field.name for field in dataclasses.fields(EngineConfig)} | {"devices"}
    for field in dataclasses.fields(RunConfig):
        if field.name not in only_simulated or field.name == "eval_every_round":
            continue
        if getattr(settings, field.name) != field.default:
            raise InputError(
                f"{field.name}: {getattr(settings, field.name)!r} is for simulations: clients have machines "
                f"of their own, and a server alone cannot resume a run; nearest: {field.default!r}"
            )


# ---- a client --------------------------------------------------------------------------


class OwnData(NamedTuple):
    """Private data of a client: the arrays x_train and y_train of a .npz file."""

    client: int
    path: str
    class_names: tuple[str, ...]  # of the whole federation; labels number them


class ClientData(NamedTuple):
    """Data that a client has loaded."""

    inputs: Inputs
    scenario: Scenario
    private: bool  # private data of the client; otherwise the settings' partition assigns it

    def examples(self, client: int) -> list[int]:
        """Count a client's examples in each task."""
        return [int(of_task[0].count[client]) for of_task in self.scenario.partitions]


class Facts(NamedTuple):
    """Report of a client before it takes part."""

    client: int
    examples: list[int]  # in each task
    settings: dict[str, Any]  # as YAML has them
    digests: dict[str, str]  # of everything that it reads, by name; `OWN` for its own data


@functools.lru_cache(maxsize=2)
def load_client(settings: RunConfig, private: OwnData | None) -> ClientData:
    """Load a client's data; the partition of the settings is the same for all clients
    of a machine.

    Raises:
      InputError: for settings or files that cannot work.
    """
    joint = find_method(settings.source).joint
    # the whole data set and the whole partition, of which the client reads its part: so
    # it is the same one as in a simulation
    if private is None:
        inputs = load_inputs(settings)
        scenario = make_scenario(inputs.dataset, settings, settings.rounds, joint)
        return ClientData(inputs, scenario, False)
    # the file has the client's examples and no others, so there is nothing to select
    _check_all_classes(settings, "partitions")
    dataset = load_part(settings.dataset, private.path, "train", private.class_names)
    scenario = scenario_of_one(dataset, settings, settings.rounds, joint, private.client)
    return ClientData(load_inputs(settings, dataset), scenario, True)


def check_client(settings: RunConfig, client: object) -> int:
    """Check a client's id and return it.

    Raises:
      InputError: for an id beyond the settings' clients.
    """
    return check_client_id(client, settings.clients)


def check_client_id(client: object, count: int) -> int:
    """Check a client's id, one of `count`, and return it.

    Raises:
      InputError: for anything else than a number below it.
    """
    # a sender may write anything, and to Python True is the client 1
    if isinstance(client, bool) or not isinstance(client, int) or not 0 <= client < count:
        raise InputError(f"partition-id: {client!r} of {count} clients; choose 0 to {count - 1}")
    return client


def facts(settings: RunConfig, client: int, data: ClientData) -> Facts:
    """Return the client's report to the server."""
    digests = resume.digests(data.inputs)
    digests["images"] = OWN if data.private else digests["images"]
    return Facts(client, data.examples(client), resume.plain_settings(settings), digests)


@functools.lru_cache(maxsize=2)
def client_experiment(
    settings: RunConfig,
    private: OwnData | None,
    examples: int,
) -> Experiment:
    """Build the experiment of a client.

    Args:
      settings: of the federation.
      private: data of the client alone; None: the partition assigns its data.
      examples: the most that any client of the federation has in a round, which decides
        the shapes.

    Raises:
      InputError: as `load_client`.
    """
    check_no_search(settings)
    data = load_client(settings, private)
    # this client's own number would give other shapes than the server expects
    sizes = sizes_of(data.scenario)._replace(examples=examples)
    exp = assemble(settings, data.inputs, data.scenario, sizes, single=True)
    return with_queries(exp, ("train",))


def check_no_search(settings: RunConfig) -> None:
    """Check that nobody has to choose learning rates before the first round: no process
    of a federation has the examples of all clients.

    Raises:
      InputError: for `--scale fit` without a factor.
    """
    if is_due(settings):
        raise InputError(
            "scale: fit searches learning rates in a simulation, and the clients are on machines of their "
            "own here; give the --rate-factor that a simulation chose, or --scale mini"
        )


def first_state(exp: Experiment, client: int) -> PyTree:
    """Return a client's state before it ever takes part."""
    shape = state_shape(exp)
    # where clients keep nothing, the server's initial state, which takes a compilation,
    # is not needed
    if not jax.tree.leaves(shape):
        return shape
    # the key of a simulation, whose clients begin with the same state
    key = jax.random.fold_in(exp.key, RunKey.CLIENTS)
    states = client_states(exp.method, first_server(exp), jnp.array([client]), key)
    return jax.tree.map(lambda x: x[0], states)


def state_shape(exp: Experiment) -> PyTree:
    """Return shapes and types of a client's state."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    return jax.eval_shape(exp.method.init_client, exp.key, server)


def broadcast_shape(exp: Experiment) -> Broadcast:
    """Return shapes and types of the broadcast."""
    server = jax.eval_shape(exp.method.init, exp.key, exp.frozen)
    return jax.eval_shape(exp.method.broadcast, _round_context(exp, 0, 0), server)


def _round_context(exp: Experiment, task: int, round_: int) -> RoundContext:
    return RoundContext.on_host(exp.frozen, exp.scenario.tasks[task], round_, False)


class Request(NamedTuple):
    """Request of the server to a client."""

    index: int  # of the method's round
    task: int
    round: int
    key: Array


def client_work(
    exp: Experiment, client: int, request: Request, broadcast: Broadcast, state: PyTree
) -> ClientResult:
    """Play a client's part of an exchange.

    Raises:
      InputError: for a task or a round that does not exist.
    """
    # the request comes over the network, and a negative index would pick the last one
    sizes = (len(exp.method.rounds), len(exp.scenario.tasks), exp.sizes.rounds)
    for name, value, size in zip(("index", "task", "round"), request[:3], sizes, strict=True):
        if not 0 <= value < size:
            raise InputError(f"request: {name} {value} of {size}")
    partition = exp.scenario.partitions[request.task][request.round]
    round_context = _round_context(exp, request.task, request.round)
    ids = np.array([client])
    exchange = Exchange(request.index, round_context, broadcast, partition, ids, request.key)
    return work_alone(exp.engine, exchange, state, exp.train)


# ---- the server ------------------------------------------------------------------------


class ServerData(NamedTuple):
    """What a server has loaded."""

    inputs: Inputs
    assigned: list[list[int]] | None  # examples of each client in each task; None: only clients know


def load_server(settings: RunConfig, test: str | None) -> ServerData:
    """Load the network and the test images: those of a .npz file `test`, or of the
    settings' data set, whose training images are left out once they are counted.

    Raises:
      InputError: for settings or files that cannot work.
    """
    if test is None:
        inputs = load_inputs(settings)
        joint = find_method(settings.source).joint
        scenario = make_scenario(inputs.dataset, settings, settings.rounds, joint)
        counted = ClientData(inputs, scenario, False)
        # counted before the training images are dropped: claims of clients are checked
        # against these numbers
        assigned = [counted.examples(client) for client in range(settings.clients)]
        return ServerData(inputs._replace(dataset=_without_training(inputs.dataset)), assigned)
    _check_all_classes(settings, "test")
    if settings.holdout:
        raise InputError(f"holdout: {settings.holdout} is a share of training images, and test names others")
    return ServerData(load_inputs(settings, load_part(settings.dataset, test, "test")), None)


def _check_all_classes(settings: RunConfig, what: str) -> None:
    """Check that no classes are selected where files have the examples.

    Raises:
      InputError: for `--classes`.
    """
    if settings.classes != "all":
        raise InputError(
            f"classes: {settings.classes!r} selects from the data set, and {what} names files; leave it out"
        )


def server_facts(settings: RunConfig, inputs: Inputs, test: str | None) -> Facts:
    """Return the server's facts, with which those of clients are compared."""
    digests = resume.digests(inputs)
    digests["images"] = digests["images"] if test is None else OWN
    return Facts(-1, [], resume.plain_settings(settings), digests)


def _without_training(dataset: Dataset) -> Dataset:
    """Return the data set with one example of zeros, of class 0, for training."""
    # one example and not none, since the engine is traced with an example
    size = None
    if dataset.size_train is not None:
        size = dataset.size_train[:1]
    zeros = jax.tree.map(lambda x: np.zeros_like(x[:1]), dataset.x_train)
    return dataset._replace(x_train=zeros, y_train=np.zeros(1, np.int64), size_train=size)


def server_experiment(
    settings: RunConfig,
    inputs: Inputs,
    examples: Int[np.ndarray, "T K"],
) -> Experiment:
    """Build the experiment of the server, whose clients have so many examples in each
    task.

    Raises:
      InputError: for settings that cannot work.
    """
    check_no_search(settings)
    joint = find_method(settings.source).joint
    scenario = scenario_of_counts(inputs.dataset, settings, settings.rounds, joint, examples)
    return with_queries(assemble(settings, inputs, scenario, sizes_of(scenario)), ("test",))


def check_facts(server: Facts, client: Facts, tasks: int) -> None:
    """Check that a client can take part in the server's federation.

    Args:
      server: facts of the server.
      client: facts of the client.
      tasks: of the run.

    Raises:
      InputError: naming what differs.
    """
    sender = f"client {client.client}"
    check_client_id(client.client, server.settings["clients"])
    # the settings first: where they differ, so do most digests, which say less
    differing = resume.differing(server.settings, client.settings)
    if differing:
        hint = ""
        if "dtype" in differing:
            hint = "; give all machines the same dtype"
        raise InputError(f"{sender}: it has other settings: {', '.join(differing.values())}{hint}")
    for name, digest in server.digests.items():
        client_digest = client.digests.get(name, "")
        # images of its own, on either side, cannot be compared with anything
        if client_digest != digest and not (name == "images" and OWN in (client_digest, digest)):
            raise InputError(
                f"{sender}: its {name} are not the server's: sha256 {client_digest[:16]}, not {digest[:16]}"
            )
    if len(client.examples) != tasks or min(client.examples) < 0:
        raise InputError(
            f"{sender}: it has {client.examples} examples; expected a number for each of {tasks} tasks"
        )
    if max(client.examples) > MAX_EXAMPLES:
        raise InputError(
            f"{sender}: it has {max(client.examples)} examples in a task; the most that a server makes room "
            f"for are {MAX_EXAMPLES:,}"
        )


def check_examples(client: Facts, assigned: list[list[int]] | None, most: int | None) -> None:
    """Check how many examples a client says that it has: its weight depends on it.

    Args:
      client: facts of the client.
      assigned: examples of each client in each task by the settings' partition.
      most: the most that a client with data of its own may have in a task; None: any
        number.

    Raises:
      InputError: for other numbers.
    """
    sender = f"client {client.client}"
    if client.digests["images"] == OWN:
        if most is not None and max(client.examples) > most:
            raise InputError(
                f"{sender}: it has {max(client.examples)} examples in a task; most-examples is {most}"
            )
    elif assigned is not None and client.examples != assigned[client.client]:
        raise InputError(
            f"{sender}: it says that it has {client.examples} examples in its tasks; the partition assigns "
            f"{assigned[client.client]}"
        )


def upload_shape(upload: Upload) -> Upload:
    """Return the shape of a program's upload as it is sent: its weight is a float32."""
    # pyrefly: ignore[bad-argument-type]  # a shape stands for an array
    return upload._replace(weight=jax.ShapeDtypeStruct((), jnp.float32))
