"""From settings to an experiment: the method, its engine, the data and how clients share them."""

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from fcljax import config
from fcljax.adapters import find_adapter
from fcljax.choices import chosen
from fcljax.config import RunConfig, TrainConfig
from fcljax.data.files.dataset import Dataset
from fcljax.data.owners import with_owners
from fcljax.data.store import Split
from fcljax.data.streaming import Host, ready
from fcljax.errors import InputError
from fcljax.federated.aggregation import make_aggregation
from fcljax.federated.check import Example, check_method, describe, in_users_code
from fcljax.federated.client_loop import Fetch
from fcljax.federated.engine import Engine, Lanes, alone_capacity, make_engine, sending
from fcljax.federated.faults import acting, check_attacks, corrupt, parse_faults, with_faults
from fcljax.federated.rates import Rates, with_rates
from fcljax.federated.schedule import ClientPartition, capacities, largest_batch
from fcljax.methods import MethodEntry, find_method
from fcljax.models.microbatch import in_microbatches, on_batch_devices
from fcljax.models.weights.pretrained import Pretrained
from fcljax.models.weights.text_towers import in_order
from fcljax.parts.client import Training
from fcljax.parts.federate import Run, rule_names
from fcljax.parts.proximal import norm_bound, prox
from fcljax.parts.reports import HEADTUNE, start_at_class_means
from fcljax.parts.schedules import Constant
from fcljax.runs.early_stop import HeldOut, check_stop, held_out_of, hold_out_training
from fcljax.runs.inputs import (
    Inputs,
    compute_type,
    device_mesh,
    inputs_of,
    load_inputs,
    make_splits,
    network_of,
    read_clean,
    used_part,
)
from fcljax.runs.machine import Machine, kernel_on, plan_lanes, plan_shapes
from fcljax.scenario import Scenario, fit_partition, make_scenario
from fcljax.types import Frozen, Method, Metric, Network, PyTree, Sizes


class Experiment(NamedTuple):
    """Everything that a run needs and that does not change while it goes on."""

    settings: RunConfig
    method: Method
    engine: Engine
    frozen: Frozen
    train: Split | Host
    test: Split | Host
    scenario: Scenario
    inputs: Inputs
    sizes: Sizes
    key: jax.Array
    held_out: HeldOut | None = None
    """Training examples that decide when a task ends, with --stop-when-flat."""
    metrics: Mapping[str, Metric] = {}
    """The user's metrics: name -> function."""

    @property
    def batch_size(self) -> int:
        """Return the most examples of a step."""
        return largest_batch(self.settings.batch_size, self.sizes.examples)

    def read(self, split: Split, index: Array) -> PyTree:
        """Return these examples as network input, without augmentation."""
        return read_clean(self.inputs.preprocess, split, index)


class Supplied(NamedTuple):
    """What a caller has in memory, in place of what the settings name."""

    dataset: Dataset | None = None
    """Examples and labels."""
    backbone: Pretrained | None = None
    """A network."""
    owners: np.ndarray | None = None
    """The client of each training example [N], for the partition `column:owner`."""
    metrics: Mapping[str, Metric] = {}
    """The user's metrics: name -> function."""


NOTHING = Supplied()


def build(settings: RunConfig, supplied: Supplied = NOTHING) -> Experiment:
    """Load data and backbone, partition the examples, make the method and its engine.

    Args:
      settings: resolved.
      supplied: what need not be loaded.

    Raises:
      InputError: for settings or files that cannot work.
    """
    settings, inputs = load(settings, supplied)
    joint = find_method(settings.source).joint
    scenario = make_scenario(inputs.dataset, settings, settings.rounds, joint)
    settings = config.with_scale_of_schedule(settings, examples_of_task(scenario))
    exp = assemble(settings, inputs, scenario, sizes_of(scenario))
    held_out = None
    if inputs.validated is not None:
        held_out = held_out_of(settings, inputs.dataset, inputs.validated, joint)
    return exp._replace(held_out=held_out, metrics=supplied.metrics)


def load(settings: RunConfig, supplied: Supplied) -> tuple[RunConfig, Inputs]:
    """Load data and backbone, and return them with the settings that the data decide.

    Raises:
      InputError: for settings or files that cannot work.
    """
    # "auto" ends here: cached features and checkpoints depend on the number format, so
    # the settings that are written must name it
    settings = dataclasses.replace(settings, dtype=compute_type(settings))
    dataset = supplied.dataset
    if dataset:
        dataset = used_part(dataset, settings)
    inputs = load_inputs(settings, dataset, supplied.backbone)
    check_reads(settings, inputs.dataset)
    check_stop(settings, lambda: bool(config.learning_rates(settings)) or config.has_own_rate(settings))
    if settings.stop_when_flat:
        # before examples are assigned, so that no client trains on what is held out
        reduced, validated = hold_out_training(inputs.dataset)
        inputs = inputs._replace(dataset=reduced, validated=validated)
    if supplied.owners is not None:
        inputs = inputs._replace(dataset=with_owners(inputs.dataset, supplied.owners))
    # a partition file or the data set may decide the number of clients and tasks
    return config.resolve(fit_partition(settings, inputs.dataset)), inputs


def check_reads(settings: RunConfig, dataset: Dataset) -> None:
    """Check that a method that reads pixels gets images.

    Raises:
      InputError: with the nearest method that reads any data.
    """
    instead = find_method(settings.source).instead
    if instead and dataset.kind is not None:
        raise InputError(
            f"method: {settings.method} reads pixels, and {dataset.name} has {dataset.kind.word}; nearest: "
            f"{instead!r}"
        )


def examples_of_task(scenario: Scenario) -> float:
    """Return the examples of a task that a client with any has in its first round, on average."""
    counts = np.concatenate([of_task[0].count for of_task in scenario.partitions])
    # clients without examples never train and would pull the mean to 0
    return float(np.mean(counts[counts > 0]))


def assemble(
    settings: RunConfig,
    inputs: Inputs,
    scenario: Scenario,
    sizes: Sizes,
    *,
    single: bool = False,
    machine: Machine | None = None,
) -> Experiment:
    """Put an experiment together, on loaded data and its partition.

    Args:
      settings: resolved.
      inputs: network and images; its weights may be shapes, to compile the programs
        without running them.
      scenario: client partitions and task schedule.
      sizes: of the run.
      single: for one client that works by itself (`engine.work_alone`), with at most
        `sizes.examples` examples in a round.
      machine: what it is compiled for; None: the first `settings.devices` devices that are here.

    Raises:
      InputError: as `build`.
    """
    if settings.augment is not None:
        inputs = inputs._replace(augments=settings.augment)
    if machine is None:
        mesh = None
        if not single:
            mesh = device_mesh(settings.devices)
        machine = Machine(jax.default_backend(), mesh)
    network = network_of(inputs.backbone, inputs.preprocess, settings.remat, kernel_on(machine))
    method = make_method(settings, sizes, network)
    rates = {}
    if settings.scale == "fit":
        # as data, not constants of the program: all rates of the search share one compile
        rates = config.learning_rates(settings)
        method = with_rates(lambda rates: make_method(_with(settings, rates), sizes, network), rates)
    labels = (scenario.train_label, scenario.test_label)
    train, test = make_splits(inputs.dataset, labels, settings.data_budget, settings.eval_batch_size)
    frozen = frozen_of(inputs.backbone, inputs.surrogate)._replace(rates=as_data(rates))
    if inputs.texts is not None:
        # prompts come in the data set's order, and logits are in the run's class order
        frozen = frozen._replace(text=in_order(inputs.texts, scenario.labels(inputs.dataset)))
    if settings.partition == "sampled":
        check_stateless(settings, method, frozen)
    if settings.population == "online" and not single:
        check_one_pass(settings, method)
    example = Example(frozen, train, scenario.tasks[0])
    fetch = partial(inputs_of, inputs.preprocess, inputs.augments)
    method = _with_faults(settings, method, fetch, example)
    if single:
        engine = _single_engine(method, fetch, example, sizes)
    else:
        # of all tasks, because the shapes must hold the run's largest round: one compile
        # serves them all
        partitions = [partition for of_task in scenario.partitions for partition in of_task]
        partitions += scenario.whole
        engine = _engine(settings, method, fetch, example, partitions, inputs.backbone, machine)
    key = jax.random.key(settings.seed)
    return Experiment(settings, method, engine, frozen, train, test, scenario, inputs, sizes, key)


def _with_faults(settings: RunConfig, method: Method, fetch: Fetch, example: Example) -> Method:
    """Return the method whose clients have the faults that the settings name.

    Raises:
      InputError: for a fault or an attack that changes nothing of what this method's clients send.
    """
    shares = parse_faults(settings.faults)
    attacks = list(acting(shares).values())
    if settings.malicious:
        attacks.append(chosen("attack", settings))
    if not attacks and not shares:
        return method
    # shapes of uploads decide whether a fault has anything to act on
    uploads = tuple(shapes.upload for shapes in check_method(method, fetch, example))
    check_attacks(attacks, uploads)
    return with_faults(method, shares, settings.seed, uploads)


def _engine(
    settings: RunConfig,
    method: Method,
    fetch: Fetch,
    example: Example,
    partitions: list[ClientPartition],
    backbone: Pretrained,
    machine: Machine,
) -> Engine:
    """Return the engine of a run, whose lanes and static shapes suit the machine."""
    lanes, mesh = plan_lanes(settings, method, partitions, backbone, machine)
    shapes = check_method(method, fetch, example)
    capacities_of_rounds = plan_shapes(
        method, shapes, partitions, example.data, lanes, mesh, backbone, settings.participation
    )
    return make_engine(method, fetch, lanes, capacities_of_rounds, example, mesh=mesh, shapes=shapes)


def _single_engine(method: Method, fetch: Fetch, example: Example, sizes: Sizes) -> Engine:
    """Return the engine of a client that works by itself. All clients have the shapes of
    the largest, so that those of one process share what was compiled."""
    # a client with as many examples as any; shapes are all that is read of it
    indices = np.zeros(sizes.examples, np.int32)
    class_examples = np.zeros((1, sizes.classes), np.int32)
    largest = ClientPartition(indices, np.array([0, sizes.examples]), class_examples)
    alone = tuple(map(alone_capacity, capacities(method, [largest], lanes=1, slots=1)))
    return make_engine(sending(method), fetch, Lanes(1, "loop"), alone, example)


def sizes_of(scenario: Scenario) -> Sizes:
    """Return the static sizes of a run."""
    # any task will do: their class lists are padded to the largest task's length
    first = scenario.tasks[0]
    partitions = scenario.partitions
    counts = [partition.count for of_task in partitions for partition in of_task]
    counts += [partition.count for partition in scenario.whole]
    return Sizes(
        classes=len(first.seen),
        tasks=len(scenario.tasks),
        task_classes=len(first.classes),
        clients=len(counts[0]),
        rounds=len(partitions[0]),
        # over all rounds, because a client's buffer of exemplars is made once
        examples=max(int(count.max()) for count in counts),
    )


def check_stateless(settings: RunConfig, method: Method, frozen: Frozen) -> None:
    """Check that clients that are new in every round have no state to keep.

    Raises:
      InputError: naming the method whose clients have one, which would pass to other clients.
    """
    # shapes tell whether there is a state; nothing is computed
    key = jax.random.key(0)
    server = jax.eval_shape(method.init, key, frozen)
    if jax.tree.leaves(jax.eval_shape(method.init_client, key, server)):
        raise InputError(
            f"partition: 'sampled' clients are new in every round, and {settings.method} keeps a state for "
            "each client; nearest: 'task_dirichlet'"
        )


def check_one_pass(settings: RunConfig, method: Method) -> None:
    """Check that clients read each example of an online stream once.

    Raises:
      InputError: naming the method and how often it reads them.
    """
    passes = sum(phase.view.epochs for exchange in method.rounds for phase in exchange.program.phases)
    if passes > 1:
        raise InputError(
            f"population: an online stream is seen once, and {settings.method} reads each example {passes} "
            "times; nearest: 'static'"
        )


def as_data(rates: Mapping[str, float]) -> dict[str, Array]:
    """Return learning rates as `Frozen.rates` has them."""
    return {name: jnp.asarray(rate, jnp.float32) for name, rate in rates.items()}


def _with(settings: RunConfig, rates: Rates) -> RunConfig:
    """Return settings with these learning rates."""
    return dataclasses.replace(settings, rate_factor=1.0, **rates)  # pyrefly: ignore[bad-argument-type]


def make_method(settings: RunConfig, sizes: Sizes, network: Network) -> Method:
    """Make the method that the settings describe, malicious clients included.

    Raises:
      InputError: for options that it cannot honour, or an adapter that does not fit the network.
    """
    # 0: not searched yet, and the rates are the preset's; 1: nothing to multiply
    if settings.rate_factor not in (0.0, 1.0):
        settings = _with(settings, config.learning_rates(settings))
    entry = find_method(settings.source)
    adapter_entry = find_adapter(settings.adapter)
    if adapter_entry.attention and not network.blocks:
        raise InputError(
            f"adapter: {settings.adapter!r} works inside attention, but the backbone has none; "
            f"{_without_attention(entry)}"
        )
    adapter = adapter_entry.build(config.part(adapter_entry.options, settings), sizes, network)
    # one rate for all parameters: the optax optimiser's, not full_lr or another of the
    # adapter's
    if config.has_own_rate(settings):
        adapter = adapter._replace(rate=None)
    for name, divided in (("microbatch", settings.microbatch), ("batch_devices", settings.batch_devices > 1)):
        # Batch normalisation over a part of the batch is not that over the whole batch.
        # `split` is set where there are running statistics, `network` where the adapter
        # trains the network.
        if divided and network.split and adapter.network:
            raise InputError(
                f"{name}: {getattr(settings, name)} cannot work in a network that trains on the "
                "statistics of the whole batch; leave it out"
            )
    if settings.microbatch:
        network = in_microbatches(network, settings.microbatch)
    # around the microbatches: devices divide the batch, and each splits its own part
    network = on_batch_devices(network)
    aggregation = make_aggregation(settings)
    rules = ()
    if settings.prox_weight:
        rules += (prox(settings.prox_weight),)
    if settings.norm_bound:
        rules += (norm_bound(settings.norm_bound),)
    run = Run(sizes, network, adapter, make_train(settings, sizes), aggregation, rules)
    if settings.headtune:
        run = run._replace(server_rules=(functools.partial(start_at_class_means, run),))
    try:
        method = entry.build(config.part(entry.options(settings.adapter), settings), run)
    except Exception as error:
        raise in_users_code("build", error) from error
    if not isinstance(method, Method):
        kind = type(method).__name__
        raise InputError(f"method: {describe(entry.build)} returned {kind}; expected a Method")
    # a method that merges by a rule of its own would ignore the user's without a word
    if method.aggregation != aggregation.name:
        raise InputError(
            f"aggregator: {aggregation.name!r} has no effect on {settings.method}, which merges by "
            f"{method.aggregation!r}"
        )
    if settings.headtune and HEADTUNE not in rule_names(method).get("server", ()):
        raise InputError(
            f"headtune: {settings.method} is not made by parts.federate, so it starts no class at a mean; "
            "leave it out"
        )
    # wrapped last, so that a method cannot tell malicious clients from honest ones
    if not settings.malicious:
        return method
    return corrupt(method, chosen("attack", settings), settings.malicious)


def _without_attention(entry: MethodEntry) -> str:
    """Return what to choose for a backbone without attention."""
    if "full" in entry.excludes:
        return "nearest: a method that trains another adapter, such as 'ewc'"
    return "nearest: 'full'"


def make_train(cfg: TrainConfig, sizes: Sizes) -> Training:
    """Return how clients train: their epochs, batches, learning rate and optimiser."""
    optimiser = chosen("optimiser", cfg)
    lr = cfg.lr
    if config.has_own_rate(cfg):
        # A client steps by minus its rate times the direction, and optax's updates are
        # added as they are: hence the minus sign, and a rate of 1.
        direction = optax.chain(optimiser, optax.scale(-1.0))
        lr = 1.0
    else:
        direction = optimiser.build()
    # no factor at all, rather than a product with 1
    schedule = chosen("lr_schedule", cfg)
    if schedule == Constant():
        schedule = None
    batch_size = largest_batch(cfg.batch_size, sizes.examples)
    return Training(cfg.epochs, batch_size, lr, direction, schedule, sizes.rounds)


def frozen_of(backbone: Pretrained, surrogate: np.ndarray | tuple = ()) -> Frozen:
    """Return a file's parameters, none of which train, and the surrogate images."""
    decoder = ()
    if backbone.decoder:
        decoder = backbone.decoder.params
    return Frozen(backbone.params, decoder, jax.tree.map(jnp.asarray, surrogate))


def placed(exp: Experiment) -> Experiment:
    """Return the experiment with everything that rounds and evaluations read on every
    device of the mesh, except for images on the host."""
    mesh = exp.engine.mesh
    train = ready(exp.train, mesh)
    test = ready(exp.test, mesh)
    held_out = exp.held_out
    if held_out is not None:
        held_out = held_out._replace(split=ready(held_out.split, mesh))
    return exp._replace(frozen=exp.engine.place(exp.frozen), train=train, test=test, held_out=held_out)
