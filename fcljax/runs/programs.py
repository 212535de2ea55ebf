"""The programs of a round and of an evaluation, with the shapes of their arguments.

They are compiled before a run has data, on this machine or for a chip that is not
present.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from fcljax.data.streaming import whole
from fcljax.federated.client_loop import (
    ACCUMULATOR_SPECS,
    CHUNK_SPECS,
    Accumulator,
    Call,
    Carry,
    Merging,
    ReplayData,
    TickWindow,
)
from fcljax.federated.engine import Player, init_clients
from fcljax.federated.schedule import Chunk, plan_round
from fcljax.mesh import WHOLE, AnyMesh, device_count, rows_on, server_specs, shardings, split
from fcljax.runs.build import Experiment
from fcljax.runs.evaluate import predictor
from fcljax.runs.features import with_query_shapes
from fcljax.types import Broadcast, PyTree, RoundContext


class RoundProgram(NamedTuple):
    """A compiled function and its arguments."""

    name: str
    """When the round is played, its number, and the function: "round 0 phase 0"."""
    function: Any
    """A function under `jax.jit`."""
    arguments: tuple[Any, ...]
    """`jax.ShapeDtypeStruct`s, and static values as they are."""
    steps: int = 0
    """How often its loop runs a step in a round, on one device; 0 without such a loop."""

    def trace(self) -> jax.stages.Traced:
        """Trace the function for these arguments."""
        return self.function.trace(*self.arguments)

    def lower(self) -> jax.stages.Lowered:
        """Lower the function for these arguments."""
        return self.function.lower(*self.arguments)


class Placement(NamedTuple):
    """Where the arguments lie: without shardings, on jax's default device."""

    one: Sharding | None = None
    """Sharding of all arguments on one device."""
    mesh: AnyMesh | None = None
    """Devices that share the arguments."""

    def of(self, spec: PyTree = WHOLE) -> Callable[[PyTree], PyTree]:
        """Return a function from arrays to shapes with the sharding of `spec`, which may
        be a tree."""

        def shape(x: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
            if not hasattr(x, "dtype"):
                x = np.asarray(x)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        if self.mesh is None:
            return lambda tree: jax.tree.map(lambda x: shape(x, self.one), tree)

        def placed(tree: PyTree) -> PyTree:
            leaf_shardings = jax.tree.broadcast(shardings(self.mesh, spec), tree)
            return jax.tree.map(shape, tree, leaf_shardings)

        return placed


DEFAULT = Placement()


def programs_of(
    exp: Experiment,
    placement: Placement = DEFAULT,
) -> Iterator[RoundProgram]:
    """Yield every program of a round of the first task.

    Args:
      exp: the experiment; its weights may be shapes. Images on the host count as resident
        on the device.
      placement: of the arguments; on a mesh it is that of the experiment's programs.
    """
    # the run's programs take cached query features, which are not computed yet
    exp = with_query_shapes(exp)
    placement = _on_mesh(exp, placement)
    engine = exp.engine
    server, states, context, broadcast = _round_of(exp)
    place = placement.of()
    server = placement.of(server_specs(server, engine.mesh))(server)
    yield RoundProgram("broadcast", engine.broadcast, (place(context), server))
    for index, player in enumerate(engine.players):
        name = f"{player.round.when} {index}"
        # one context for all rounds: it is data, so other rounds have the same program
        yield from _of_player(exp, player, name, (broadcast, states), placement)
        if player.server:
            context_after = context._replace(previous=broadcast)
            received = placement.of(ACCUMULATOR_SPECS)(jax.eval_shape(player.empty))
            arguments = (place(context_after), server, received, place(exp.key))
            yield RoundProgram(f"{name} server", player.server, arguments)


def evaluations_of(
    exp: Experiment,
    placement: Placement = DEFAULT,
) -> Iterator[RoundProgram]:
    """Yield the programs of an evaluation after the last task, on all test images.

    One evaluates the model that counts, and one the merged model before the server
    trained, where a method has it. Arguments are those of `programs_of`.
    """
    exp = with_query_shapes(exp)
    placement = _on_mesh(exp, placement)
    server, states, context, _ = _round_of(exp)
    task_of = np.zeros(exp.sizes.classes, np.int32)
    test = whole(exp.test)
    client_state = jax.eval_shape(partial(jax.tree.map, lambda x: x[0]), states)
    evaluated = exp.method.predict
    if exp.method.personal:
        evaluated = exp.method.predict_client
    functions = {
        "evaluation": evaluated,
        "provisional evaluation": exp.method.predict_provisional,
    }
    for name, function in functions.items():
        if function:
            model = (server,)
            # a personal model is evaluated with its client's state, one client at a time
            if function is exp.method.predict_client:
                model = (server, client_state)
            predict = predictor(exp, function)
            devices = device_count(exp.engine.mesh)
            # the number of images is data too, so an index of the right shape is enough
            index = np.zeros(predict.steps * devices * exp.settings.eval_batch_size, np.int32)
            place = placement.of()
            place_parts = placement.of(split())
            arguments = place((context, model, task_of)), place(test), place_parts(index), place(np.int32(0))
            yield RoundProgram(name, predict.function, arguments, predict.steps)


def _of_player(
    exp: Experiment,
    player: Player,
    name: str,
    received: tuple[PyTree, PyTree],
    placement: Placement,
) -> Iterator[RoundProgram]:
    """Yield the clients' programs of one of the method's rounds, in order."""
    broadcast, states = received
    place = placement.of()
    accumulator, states, chunk, carry, indices, may_replay, steps = _of_chunk(exp, player, states, placement)
    yield RoundProgram(f"{name} indices", player.indices, (chunk, place(exp.key)))
    yield RoundProgram(f"{name} open", player.open, (accumulator, states, chunk))
    if player.replay_indices:
        yield RoundProgram(f"{name} replay indices", player.replay_indices, (carry, chunk))
    data = place(whole(exp.train))
    frozen, task, key = place((exp.frozen, exp.scenario.tasks[0], exp.key))
    # False: not guarded, as a run begins. The guard is data, so both share this program.
    call = Call(frozen, place(broadcast), chunk, task, key, place(np.bool_(False)))
    replay = ReplayData(data, may_replay, may_replay)
    for i, (run, phase_indices, ticks) in enumerate(zip(player.run_ticks, indices, chunk.ticks, strict=True)):
        window = TickWindow(data, phase_indices, phase_indices, *place((np.int32(0), ticks)))
        yield RoundProgram(f"{name} phase {i}", run, (call, carry, window, replay, False), steps[i])
    merged = place(Merging(np.int32(0), np.int32(0), np.bool_(0)))
    yield RoundProgram(f"{name} close", player.close, (accumulator, states, carry, chunk, merged))


class _OfChunk(NamedTuple):
    """Placed shapes of the arguments of the clients' programs."""

    accumulator: Accumulator
    states: PyTree
    chunk: Chunk
    carry: Carry
    indices: tuple
    may_replay: Any
    steps: list[int]


def _of_chunk(
    exp: Experiment,
    player: Player,
    states: PyTree,
    placement: Placement,
) -> _OfChunk:
    first_chunk, steps = _first_chunk(exp, player)
    place_parts = placement.of(split())
    chunk = placement.of(CHUNK_SPECS)(first_chunk)
    accumulator = placement.of(ACCUMULATOR_SPECS)(jax.eval_shape(player.empty))
    states = place_parts(states)
    # `open` leaves the chunk's slots divided over the devices, and the phases find them
    # there
    carry = place_parts(jax.eval_shape(player.open, accumulator, states, chunk))
    indices = placement.of(split(1))(jax.eval_shape(player.indices, chunk, exp.key))
    may_replay = np.zeros((len(chunk.id), 0), np.int32)
    if player.replay_indices:
        may_replay = jax.eval_shape(player.replay_indices, carry, chunk)
    return _OfChunk(accumulator, states, chunk, carry, indices, place_parts(may_replay), steps)


def _on_mesh(exp: Experiment, placement: Placement) -> Placement:
    """Return the placement on the experiment's mesh, if it has one."""
    if exp.engine.mesh is None:
        return placement
    return Placement(mesh=exp.engine.mesh)


def _round_of(exp: Experiment) -> tuple[PyTree, PyTree, RoundContext, Broadcast]:
    """Return shapes of the server's and all clients' states, the first round's context,
    and its broadcast."""
    method = exp.method
    clients = rows_on(exp.engine.mesh, exp.sizes.clients)
    server = jax.eval_shape(method.init, exp.key, exp.frozen)
    states = jax.eval_shape(lambda server, key: init_clients(method, server, clients, key), server, exp.key)
    context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, False)
    return server, states, context, jax.eval_shape(exp.engine.broadcast, context, server)


class EngineState(NamedTuple):
    """Bytes of the engine per device, without network, images and a step's temporaries.

    Of a method's rounds, the largest counts.
    """

    server: int
    """Server state and broadcast, before and after a round."""
    clients: int
    """Client states between rounds."""
    uploads: int
    """Sums over clients and gathered uploads of a round."""
    slots: int
    """Clients of a chunk: states, uploads, and what waits between phases."""
    order: int
    """Tables of steps, and the indices of the examples that they read."""

    @property
    def total(self) -> int:
        """Return the sum of all."""
        return sum(self)


def engine_state(exp: Experiment) -> EngineState:
    """Return the engine's bytes on each device of its mesh, by shapes alone.

    The mesh may be abstract."""
    placement = _on_mesh(exp, DEFAULT)
    server, states, _, broadcast = _round_of(exp)
    server = placement.of(server_specs(server, exp.engine.mesh))(server)
    # the old broadcast is still needed when the next one is made
    of_server = server, placement.of()((broadcast, broadcast))
    chunks = [_of_chunk(exp, player, states, placement) for player in exp.engine.players]
    sizes = [(share((chunk.carry,)), share((chunk.chunk, chunk.indices))) for chunk in chunks]
    # slots and tables belong to the same round, so their sum decides
    slots, order = max(sizes, key=sum)
    uploads = max(share(chunk.accumulator) for chunk in chunks)
    clients = share(placement.of(split())(states))
    return EngineState(share(of_server), clients, uploads, slots, order)


def share(tree: PyTree) -> int:
    """Return the bytes of shapes on each device that has a part of them."""

    def size(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape
        if x.sharding is not None:
            shape = x.sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _first_chunk(exp: Experiment, player: Player) -> tuple[Chunk, list[int]]:
    """Return the first chunk of a first round of all clients, and the steps of each phase
    in the round."""
    partition = exp.scenario.partitions[0][0]
    ids = np.flatnonzero(partition.count)[: player.capacity.participants]
    chunks, _ = plan_round(player.round.program, partition, ids, 0, exp.engine.lanes.count, player.capacity)
    phases = zip(*(chunk.ticks for chunk in chunks), strict=True)
    return chunks[0], [sum(map(int, ticks)) for ticks in phases]
