"""From settings to everything that a run needs: the method, its engine, the data and who holds them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from fcljax import config
from fcljax.adapters import ADAPTERS
from fcljax.config import RunConfig, TrainConfig
from fcljax.data.store import Split
from fcljax.data.streaming import Host, ready
from fcljax.errors import InputError
from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.federated.check import Example, check_method
from fcljax.federated.client_loop import Shapes, batches_alone, slot_bytes
from fcljax.federated.engine import Engine, Lanes, alone, default_lanes, make_engine, sending
from fcljax.federated.faults import corrupt, parse_faults, with_faults
from fcljax.federated.schedule import Capacity, ClientPartition, capacities
from fcljax.methods import find_method
from fcljax.models.weights.pretrained import Pretrained
from fcljax.options import resolved
from fcljax.parts.client import Training
from fcljax.parts.federate import Run
from fcljax.parts.proximal import norm_bound, prox
from fcljax.runs.inputs import (
    Inputs,
    device_mesh,
    fetch,
    forward_flops,
    load_inputs,
    make_splits,
    network_of,
    read_clean,
)
from fcljax.scenario import Scenario, make_scenario
from fcljax.types import Frozen, Method, Network, Round, Sizes

# FLOPs in the time that compiling a step takes on one core of a CPU: 10 s at 100 GFLOP/s, as of a ViT-Ti
COMPILING = 1e12
TRAINING = 3  # passes forwards that a step takes the time of
# Clients that one call of the compiled program plays: as many as this memory holds the states and uploads
# of, whatever the number of clients. A call costs milliseconds, which tiny clients would feel.
CHUNK_BYTES = 2**28
MOST_PER_CHUNK = 4096


class Experiment(NamedTuple):
    """Everything that a run needs and that does not change while it goes on."""

    method: Method
    engine: Engine
    frozen: Frozen
    train: Split | Host
    test: Split | Host
    scenario: Scenario
    inputs: Inputs
    sizes: Sizes
    key: jax.Array

    def read(self, split: Split, rows: Array) -> Array:
        """These rows as network input, under the clean view."""
        return read_clean(self.inputs.preprocess, split, rows)


def build(method_name: str, cfg: RunConfig) -> Experiment:
    """Load data and backbone, deal the rows to clients and tasks, make the method and its engine.

    Args:
      method_name: of the package, or from outside (`methods.find_method`).
      cfg: resolved settings.

    Raises:
      InputError: for anything in the settings or files that cannot work.
    """
    inputs = load_inputs(cfg)
    scenario = make_scenario(inputs.dataset, cfg, cfg.rounds, find_method(method_name).joint)
    return assemble(method_name, cfg, inputs, scenario, sizes_of(scenario, cfg))


def assemble(
    method_name: str,
    cfg: RunConfig,
    inputs: Inputs,
    scenario: Scenario,
    sizes: Sizes,
    by_itself: bool = False,
) -> Experiment:
    """An experiment of what has been loaded and dealt.

    Args:
      by_itself: is it one client's, who plays alone (`engine.work_alone`) and has at most `setting.rows` rows
        in a round?

    Raises:
      InputError: as `build`.
    """
    inputs = inputs if cfg.augment is None else inputs._replace(augments=cfg.augment)
    tasks = scenario.tasks
    method = make_method(method_name, cfg, sizes, network_of(inputs.backbone, inputs.preprocess))
    labels = (scenario.train_label, scenario.test_label)
    train, test = make_splits(inputs.dataset, *labels, cfg.data_budget, cfg.eval_batch_size)
    frozen = frozen_of(inputs.backbone, inputs.surrogate)
    example = Example(frozen, train, tasks[0])
    method = _with_faults(method, cfg, inputs, example)
    make = _engine_of_one if by_itself else _engine
    engine = make(method, cfg, inputs, scenario, example, sizes)
    return Experiment(method, engine, frozen, train, test, scenario, inputs, sizes, jax.random.key(cfg.seed))


def sizes_of(scenario: Scenario, cfg: RunConfig) -> Sizes:
    """The static sizes of a run."""
    first, every = scenario.tasks[0], [partition for of_task in scenario.partitions for partition in of_task]
    rows = max(int(partition.count.max()) for partition in every)
    return Sizes(len(first.seen), len(scenario.tasks), len(first.classes), cfg.clients, cfg.rounds, rows)


def make_method(method_name: str, cfg: RunConfig, sizes: Sizes, network: Network) -> Method:
    """The method that the settings describe, malicious clients included.

    Raises:
      InputError: for options that it cannot honour, or an adapter that the network has no place for.
    """
    entry, adapter_name = find_method(method_name), resolved(cfg.adapter)
    adapter_entry = ADAPTERS[adapter_name]
    if adapter_entry.attention and not network.blocks:
        raise InputError(
            f"adapter: {adapter_name!r} works inside attention, and the backbone has none; nearest: 'full'"
        )
    adapter = adapter_entry.build(config.part(adapter_entry.options, cfg), sizes, network)
    aggregation = make_aggregation(config.part(AggregationOptions, cfg))
    terms = (prox(cfg.prox_weight),) if cfg.prox_weight else ()
    terms += (norm_bound(cfg.norm_bound),) if cfg.norm_bound is not None else ()
    run = Run(sizes, network, adapter, make_train(cfg), aggregation, terms)
    options = entry.options_with.get(adapter_name, entry.options)
    method = entry.build(config.part(options, cfg), run)
    if method.aggregation != aggregation.name:
        raise InputError(
            f"aggregator: {aggregation.name!r} is not honoured by {method_name}, which merges by "
            f"{method.aggregation!r}"
        )
    return corrupt(method, cfg.attack or "sign_flip", cfg.malicious) if cfg.malicious else method


def _with_faults(method: Method, cfg: RunConfig, inputs: Inputs, example: Example) -> Method:
    """The method whose clients fail as the settings say."""
    shares = parse_faults(cfg.faults)
    if not shares:
        return method
    shapes = check_method(method, partial(fetch, inputs.preprocess, inputs.augments), example)
    return with_faults(method, shares, cfg.seed, tuple(each.upload for each in shapes))


def make_train(cfg: TrainConfig) -> Training:
    """How clients train: Adam's or gradient descent's direction, with weight decay added to the gradient."""
    direction = optax.scale_by_adam()
    if cfg.optimiser == "sgd":
        direction = optax.trace(cfg.momentum) if cfg.momentum else optax.identity()
    if cfg.weight_decay:
        direction = optax.chain(optax.add_decayed_weights(cfg.weight_decay), direction)
    return Training(cfg.epochs, cfg.batch_size, cfg.lr, direction)


def frozen_of(backbone: Pretrained, surrogate: np.ndarray | tuple = ()) -> Frozen:
    """The parameters of a file of weights, none of which train, and the images of another data set."""
    decoder = backbone.decoder.params if backbone.decoder else ()
    return Frozen(backbone.params, decoder, jax.tree.map(jnp.asarray, surrogate))


def _engine(
    method: Method, cfg: RunConfig, inputs: Inputs, scenario: Scenario, example: Example, sizes: Sizes
) -> Engine:
    lanes, mesh = _lanes(cfg)
    read = partial(fetch, inputs.preprocess, inputs.augments)
    shapes = check_method(method, read, example)
    every = [partition for of_task in scenario.partitions for partition in of_task]
    slots = clients_per_chunk(method, shapes, sizes.examples, image_bytes(example.data), lanes.count)
    fit = partial(capacities, method, every, lanes.count, slots, cfg.participation)
    room = _with_widths(fit, inputs, lanes)
    return make_engine(method, read, lanes, room, example, mesh=mesh, shapes=shapes)


def clients_per_chunk(method: Method, shapes: tuple[Shapes, ...], rows: int, image: int, lanes: int) -> int:
    """How many clients of at most so many rows, of so many bytes each, are played by one call: at least one
    for each lane, at most `MOST_PER_CHUNK`, else as many as `CHUNK_BYTES` hold."""

    def size(each: Round, made: Shapes) -> int:
        program = each.program
        numbers = 4 * rows * sum(phase.view.epochs for phase in program.phases)  # of the rows that it reads
        replayed = jax.eval_shape(program.replay_buffer, made.state).size if program.replay_buffer else 0
        return slot_bytes(program, made) + numbers + replayed * image

    largest = max(map(size, method.rounds, shapes))
    return max(lanes, min(MOST_PER_CHUNK, CHUNK_BYTES // max(1, largest)))


def image_bytes(data: Split | Host) -> int:
    """Bytes of an image as it is stored."""
    split = data.take(np.zeros(1, np.int32)) if isinstance(data, Host) else data
    return split.image.nbytes // len(split.label)


def _with_widths(fit: Callable, inputs: Inputs, lanes: Lanes) -> tuple[Capacity, ...]:
    """The run's static shapes, with further widths of a step where they are worth compiling."""
    room = fit(worth=1.0 if batches_alone(lanes) else np.inf)
    if all(len(widths) == 1 for each in room for widths in each.widths):
        return room
    return fit(worth=COMPILING / (TRAINING * forward_flops(inputs.backbone)))


def _engine_of_one(
    method: Method, cfg: RunConfig, inputs: Inputs, scenario: Scenario, example: Example, sizes: Sizes
) -> Engine:
    """Of a client that plays alone: all clients have the shapes of the largest, so that those of one process
    share what was compiled."""
    del cfg, scenario
    rows, none = np.zeros(sizes.examples, np.int32), np.zeros((1, sizes.classes), np.int32)
    largest = ClientPartition(rows, np.array([0, sizes.examples]), none)
    room = tuple(map(alone, capacities(method, [largest], lanes=1, slots=1)))
    read = partial(fetch, inputs.preprocess, inputs.augments)
    return make_engine(sending(method), read, Lanes(1, "loop"), room, example)


def _lanes(cfg: RunConfig) -> tuple[Lanes, Mesh | None]:
    """The lanes, and the devices that share them: the defaults that were measured for the backend where
    nothing is asked for."""
    mesh = device_mesh(cfg.devices)
    default = default_lanes(jax.default_backend(), -(-cfg.clients // cfg.devices))
    lanes = Lanes(cfg.lanes or default.count * cfg.devices, cfg.lane_mode or default.mode)
    if lanes.count % cfg.devices:
        fitting = -(-lanes.count // cfg.devices) * cfg.devices
        raise InputError(
            f"lanes: {lanes.count} lanes cannot be split over {cfg.devices} devices; nearest valid value: "
            f"{fitting}"
        )
    return lanes, mesh


def placed(exp: Experiment) -> Experiment:
    """The experiment with all that rounds and evaluations read on every device of the mesh, but for images on
    the host."""
    mesh = exp.engine.mesh
    train, test = ready(exp.train, mesh), ready(exp.test, mesh)
    return exp._replace(frozen=exp.engine.place(exp.frozen), train=train, test=test)
