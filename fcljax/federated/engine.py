"""The round engine: it plans a round on the host (`schedule.py`), runs the clients in a
compiled loop (`client_loop.py`), and takes the server's step.

    run_round      plays the method's rounds of one time, each as an exchange
    run_chunks     gives the clients to the device, chunk by chunk
    run_ticks      trains the clients of a chunk (`client_loop.py`)
    _server_step   merges the uploads and calls the method's server function

Every function is traced once for a whole run. Uploads are running sums and gathered
buffers, so memory does not grow with the number of clients where they only send means
and sums.
"""

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.data.streaming import Host, over_windows, ready
from fcljax.errors import InputError
from fcljax.federated.check import Example, check_method
from fcljax.federated.claims import claims_of
from fcljax.federated.client_loop import (
    ACCUMULATOR_SPECS,
    CALL_SPECS,
    CHUNK_SPECS,
    Accumulator,
    Call,
    Carry,
    Fetch,
    Lanes,
    Merging,
    PhaseLoop,
    ReplayData,
    Shapes,
    TickWindow,
    chunk_accumulator,
    close_chunk,
    empty_accumulator,
    expand,
    indices_of_ticks,
    open_chunk,
    receive_sent,
    replay_indices,
    run_ticks,
    squeeze,
    states_of_chunk,
)
from fcljax.federated.communication import count_scalars
from fcljax.federated.keys import RoundKey, fold
from fcljax.federated.schedule import Capacity, Chunk, ClientPartition, LaneTable, plan_round
from fcljax.federated.server_replay import (
    Replayed,
    Replayer,
    current_buffer,
    make_replayer,
    replay_on_server,
)
from fcljax.federated.sums import became_non_finite, one_of, sum_value
from fcljax.mesh import (
    WHOLE,
    AnyMesh,
    by_device,
    device_count,
    in_order,
    keeps_order,
    on_each,
    put,
    put_server,
    put_shared,
    server_specs,
    split,
)
from fcljax.mesh import jit as jit_on
from fcljax.types import (
    Aggregate,
    Broadcast,
    ClientContext,
    Method,
    Metrics,
    Phase,
    PyTree,
    ReplayBuffer,
    Round,
    RoundContext,
    Server,
    ServerFunction,
    Task,
    Upload,
    Weighted,
    When,
    Who,
)

# with fewer parameters, programs take longer to compile than to run, so XLA optimises
# them less
LEAN_PARAMETERS = 2_000_000
# chunks that the host queues on the device: with one it would wait between chunks, and
# each further one takes the memory of its slots
CHUNKS_IN_FLIGHT = 2


class RoundReport(NamedTuple):
    """Host-side summary of one round."""

    metrics: dict[str, float]
    """Means over examples."""
    participants: int = 0
    """Clients that took part in the first of the method's rounds that was played."""
    rejected: int = 0
    """Uploads that were left out: not finite, or with an impossible claim."""
    impossible: dict[str, int] = {}
    """Claim -> uploads that were left out because it was impossible; claims that no
    upload broke are left out."""
    refused: int = 0
    """The method's rounds whose result was not finite, so that the server kept its
    state."""
    examples: int = 0
    """Examples read in all phases."""
    training_examples: int = 0
    """Examples read in the longest phase of the first of the method's rounds that was
    played."""
    useful_steps: int = 0
    """Steps of clients."""
    paid_steps: int = 0
    """Lanes times ticks: the useful steps if no lane waited."""
    uploads: tuple[int, ...] = ()
    """Clients that took part in each of the method's rounds."""
    client_ids: frozenset[int] = frozenset()
    """Ids of the clients that took part in any of the method's rounds: the state of no
    other client has changed."""

    @property
    def slot_efficiency(self) -> float:
        """Return useful steps over paid steps."""
        return self.useful_steps / max(self.paid_steps, 1)


class ServerResult(NamedTuple):
    """The server's part of an exchange."""

    server: PyTree  # the server's new state
    metrics: Metrics  # of its step
    # whether the result was not finite, so that the server keeps its state
    refused: Array | bool


Serve = Callable[[Accumulator], ServerResult]
"""The server's step on the received uploads.

It returns at once, while the device still computes."""


def no_server(_received: Accumulator) -> ServerResult:
    """Return no result: the `Serve` of callers that read only the received uploads."""
    return ServerResult((), {}, False)


class Player(NamedTuple):
    """The compiled functions of one of the method's rounds.

    Data on the host go through the same functions as resident data, a window at a time,
    and get the same bits. On a mesh every device runs its lanes, on a carry [devices,
    ...] that has the slots of its clients. States of clients and their entries in the
    accumulator lie in equal parts on the devices.
    """

    round: Round  # the round itself
    capacity: Capacity  # its static shapes
    empty: Callable[[], Accumulator]  # empty() -> an accumulator
    # indices(chunk, key) -> the training examples of every tick, for each phase
    indices: Callable[..., tuple[Array, ...]]
    # replay_indices(carry, chunk) -> the examples that
    # each of the chunk's clients may replay
    replay_indices: Callable[..., Array] | None
    # open(accumulator, states, chunk) -> carry before the first tick
    open: Callable[..., Carry]
    # for each phase: run_ticks(call, carry, window, replay_data, parted) -> carry;
    # `parted`: each device has its own part of the window's data
    run_ticks: tuple[Callable[..., Carry], ...]
    # close(accumulator, states, carry, chunk, merging) -> accumulator and states with the
    # chunk's uploads and states, if all are finite, and the number of merged chunks
    close: Callable[..., tuple[Accumulator, PyTree, Array]]
    # receive(accumulator, context, upload, position) adds an upload from another machine
    receive: Callable[..., tuple[Accumulator, Array]]
    # server(round_context, server, accumulator, key) -> the server's step
    server: Callable[..., ServerResult] | None
    mesh: AnyMesh | None  # the devices; None: one device


class Exchange(NamedTuple):
    """One of the method's rounds, as the clients get it."""

    index: int  # number of the method's round
    context: RoundContext  # the round
    broadcast: Broadcast  # what the server has sent to clients
    partition: ClientPartition  # the clients' examples
    ids: Int[np.ndarray, " n"]  # the sorted ids of the clients that take part
    key: PRNGKeyArray  # of this exchange, the same for all of its clients


class ExchangeOutcome(NamedTuple):
    """The uploads of an exchange, and the server's result."""

    accumulator: Accumulator  # the received uploads
    states: PyTree  # the new client states
    server_result: ServerResult
    ids: Int[np.ndarray, " n"]  # the clients that took part
    # useful steps, and steps that the lanes were busy or idle for
    steps: tuple[int, int]


@runtime_checkable
class Clients(Protocol):
    """Plays the clients' part of an exchange, on this engine or on other machines."""

    def __call__(self, exchange: Exchange, states: PyTree, serve: Serve, /) -> ExchangeOutcome:
        """Return the received uploads, `serve` of them, and the new states.

        `states` may be donated."""
        ...


class Engine(NamedTuple):
    """The compiled functions of one run."""

    method: Method
    """The method that it runs."""
    lanes: Lanes
    """How clients share the machine."""
    broadcast: Callable[[RoundContext, Server], Broadcast]
    """`Method.broadcast`, compiled."""
    players: tuple[Player, ...]
    """In the order of method.rounds."""
    place: Callable[[PyTree], PyTree]
    """Puts arrays where the engine works, a copy on every device of its mesh; arrays that
    are there stay."""
    traces: dict[str, int]
    """Number of traces of each function: 1 after any number of rounds."""
    mesh: AnyMesh | None
    """The devices; None: one device."""
    replayer: Replayer | None = None
    """The server's training on its replay buffer, if it has one."""


def make_engine(
    method: Method,
    fetch: Fetch,
    lanes: Lanes,
    capacities: tuple[Capacity, ...],
    example: Example,
    *,
    mesh: AnyMesh | None = None,
    shapes: tuple[Shapes, ...] | None = None,
) -> Engine:
    """Make functions that are compiled once for all rounds of all tasks.

    Args:
      method: the method.
      fetch: reads examples of the data.
      lanes: how clients share the machine; with a mesh, `lanes.count` is the total over
        devices and must be a multiple of them.
      capacities: the run's static shapes (`schedule.capacities`), one for each of the
        method's rounds.
      example: parameters, data and a task, of which shapes and types count. Data may be a `Host`.
      mesh: devices under the axis name `clients`; None uses one device.
      shapes: the result of `check_method` for these arguments, if it is known already.

    Raises:
      InputError: naming a function of the method that does not keep to the protocol.
    """
    traces: dict[str, int] = {}
    # before anything is compiled, so that an error names the method's function and not a
    # line of JAX
    if not shapes:
        shapes = check_method(method, fetch, example)
    for capacity in capacities:
        # slots are divided evenly over the devices
        if capacity.devices != device_count(mesh):
            raise InputError(
                f"capacities: made for {capacity.devices} devices; nearest valid value: {device_count(mesh)}"
            )

    specs_of_server = WHOLE  # how the devices share the server's state
    if mesh is not None and not keeps_order(mesh):
        server = jax.eval_shape(method.init, jax.random.key(0), example.frozen)
        specs_of_server = server_specs(server, mesh)

    lean = count_scalars(example.frozen) < LEAN_PARAMETERS

    def jit(name: str, function: Callable, spec=WHOLE, **options) -> Callable:
        return jit_on(_count_traces(traces, name, function), mesh, spec, lean=lean, **options)

    def place(tree: PyTree) -> PyTree:
        if mesh is None:
            return tree
        return put(tree, mesh)

    players = []
    for index, (this_round, capacity) in enumerate(zip(method.rounds, capacities, strict=True)):
        # names in traces and errors, such as "after_round 1 close"
        jit_of_round = _with_prefix(jit, f"{this_round.when} {index} ")
        player = _player(
            this_round, shapes[index], capacity, fetch, lanes, mesh, jit_of_round, specs_of_server
        )
        players.append(player)

    replayer = None
    if method.server_replay is not None:
        replayer = make_replayer(method.server_replay, jit, specs_of_server)
    return Engine(
        method,
        lanes,
        broadcast=jit("broadcast", method.broadcast),
        players=tuple(players),
        place=place,
        traces=traces,
        mesh=mesh,
        replayer=replayer,
    )


def _with_prefix(jit: Callable, prefix: str) -> Callable:
    """Return `jit` for functions whose names get a prefix."""

    def prefixed(name: str, *args, **options) -> Callable:
        return jit(prefix + name, *args, **options)

    return prefixed


def _player(
    this_round: Round,
    shapes: Shapes,
    capacity: Capacity,
    fetch: Fetch,
    lanes: Lanes,
    mesh: AnyMesh | None,
    jit: Callable,
    specs_of_server: PyTree,
) -> Player:
    """Compile what the clients and the server do in one of the method's rounds.

    Arguments are those of `make_engine` for this round; `jit(name, function, spec,
    **options)` compiles a function whose outputs the devices share by `spec`.
    """
    program = this_round.program
    # `lanes.count` is of all devices together
    lanes_of_device = lanes._replace(count=lanes.count // device_count(mesh))

    def empty() -> Accumulator:
        return empty_accumulator(shapes, capacity, len(claims_of(program)), mesh)

    def indices(chunk, key):
        return tuple(indices_of_ticks(phase, i, chunk, key) for i, phase in enumerate(program.phases))

    def indices_to_replay(carry, chunk):
        return replay_indices(program, _carry_of_device(carry, mesh).states, chunk)

    def open_(accumulator, states, chunk):
        states = states_of_chunk(states, chunk, capacity, mesh)
        accumulator = chunk_accumulator(accumulator, chunk)
        return _carry_of_mesh(open_chunk(shapes, lanes_of_device, accumulator, states, chunk), mesh)

    def close(accumulator, states, carry, chunk, merging):
        carry = _carry_of_device(carry, mesh)
        return close_chunk(accumulator, states, carry, chunk, merging, capacity, mesh)

    def loop_of_phase(phase_index: int) -> PhaseLoop:
        return PhaseLoop(
            program,
            phase_index,
            fetch,
            lanes_of_device,
            widths=capacity.widths[phase_index],
            waits=lanes.count > 1,
            shapes=shapes,
        )

    def jit_on_each(name: str, function: Callable, in_specs: tuple, out_specs, **options) -> Callable:
        """Compile a function that every device calls with its part of the arguments."""
        return jit(name, on_each(function, mesh, in_specs, out_specs), out_specs, **options)

    replay = None
    if program.replay_buffer is not None:
        replay = jit_on_each("replay indices", indices_to_replay, (split(), CHUNK_SPECS), split())
    server = None
    if this_round.server is not None:
        step = functools.partial(_server_step, this_round.server, shapes, capacity.participants, mesh)
        # pyrefly: ignore[bad-argument-type]  # a tree of specifications
        server = jit("server", step, ServerResult(specs_of_server, WHOLE, WHOLE))
    to_open = (ACCUMULATOR_SPECS, split(), CHUNK_SPECS)
    to_close = (ACCUMULATOR_SPECS, split(), split(), CHUNK_SPECS, WHOLE)
    closed = (ACCUMULATOR_SPECS, split(), WHOLE)
    return Player(
        this_round,
        capacity,
        empty=jit("empty", empty, ACCUMULATOR_SPECS),
        indices=jit_on_each("indices", indices, (CHUNK_SPECS, WHOLE), split(1)),
        replay_indices=replay,
        open=jit_on_each("open", open_, to_open, split()),
        run_ticks=tuple(_jit_ticks(loop_of_phase(i), mesh, jit) for i in range(len(program.phases))),
        # donated, so that a run holds each of them once
        close=jit_on_each("close", close, to_close, closed, donate_argnums=(0, 1)),
        receive=jit("receive", functools.partial(receive_sent, program), (ACCUMULATOR_SPECS, WHOLE)),
        server=server,
        mesh=mesh,
    )


def _jit_ticks(loop: PhaseLoop, mesh: AnyMesh | None, jit: Callable) -> Callable:
    """Compile the loop of one phase: `Player.run_ticks`. The carry is donated."""

    def ticks_on_device(call, carry, window, replay_data):
        carry = run_ticks(loop, call, _carry_of_device(carry, mesh), window, replay_data)
        return _carry_of_mesh(carry, mesh)

    def ticks(call, carry, window, replay_data, parted):
        # resident data are copied to all devices; of host data each device gets only the
        # examples of its lanes
        data = WHOLE
        if parted:
            data = split()
        # pyrefly: ignore[bad-argument-type]  # a tree of specifications
        window_specs = TickWindow(data, index=split(1), place=split(1), first=WHOLE, ticks=WHOLE)
        # pyrefly: ignore[bad-argument-type]
        replay_specs = ReplayData(data, index=split(), place=split())
        in_specs = (CALL_SPECS, split(), window_specs, replay_specs)
        return on_each(ticks_on_device, mesh, in_specs, split())(call, carry, window, replay_data)

    # `parted` is static: it decides the placement of the data
    return jit(f"phase {loop.phase_index}", ticks, split(), donate_argnums=1, static_argnums=4)


def _carry_of_device(carry: Carry, mesh: AnyMesh | None) -> Carry:
    """Return a device's carry.

    On a mesh it arrives as [1, ...], the device's part of [devices, ...]."""
    if mesh is None:
        return carry
    return squeeze(carry)


def _carry_of_mesh(carry: Carry, mesh: AnyMesh | None) -> Carry:
    """Return a device's carry as its part of the carry of all devices."""
    if mesh is None:
        return carry
    return expand(carry)


# ---- client states ---------------------------------------------------------------------


def init_clients(method: Method, server: PyTree, clients: int, key: PRNGKeyArray) -> PyTree:
    """Return the first states of all clients, stacked [K, ...] in the order of their ids.
    Client i has the key fold_in(key, i)."""
    return client_states(method, server, jnp.arange(clients), key)


def client_states(method: Method, server: PyTree, ids: Int[Array, " n"], key: PRNGKeyArray) -> PyTree:
    """Return the initial states of these clients [n, ...], as in `init_clients`."""
    # fold_in, not split: a client's key must not depend on the number of clients
    keys = jax.vmap(lambda client: jax.random.fold_in(key, client))(ids)
    init_all = jax.vmap(lambda client_key: method.init_client(client_key, server))
    return _strong(jax.jit(init_all)(keys))


def begin_clients(
    engine: Engine,
    server: PyTree,
    clients: int,
    key: PRNGKeyArray,
) -> PyTree:
    """Return `init_clients` shared by the devices: no device ever has all states."""
    if engine.mesh is None:
        return init_clients(engine.method, server, clients, key)

    def states_of_device(server: PyTree, ids: Array, key: PRNGKeyArray) -> PyTree:
        return client_states(engine.method, server, ids, key)

    ids = put_shared(np.arange(clients), engine.mesh)
    server = put_server(server, engine.mesh)
    return jit_on(states_of_device, engine.mesh, split())(server, ids, engine.place(key))


def _strong(tree: PyTree) -> PyTree:
    """Return the same arrays without jax's mark that a Python number made them.

    Arrays lose that mark on their way through a round, and every function would be
    traced a second time.
    """

    def strong(leaf: PyTree) -> PyTree:
        if getattr(leaf, "weak_type", False):
            return leaf.astype(leaf.dtype)
        return leaf

    return jax.tree.map(strong, tree)


# ---- one round -------------------------------------------------------------------------


class RoundInputs(NamedTuple):
    """The inputs of a federated round besides the states of server and clients."""

    frozen: PyTree
    """Arrays that are never trained. On a mesh, `frozen` and `data` should be as
    `Engine.place` returns them: otherwise they are copied to its devices in every
    round."""
    data: PyTree
    """Input of `Fetch` on the device, or a `Host`; both give the same bits."""
    partition: ClientPartition
    """Each client's examples in this task."""
    ids: Int[np.ndarray, " n"]
    """Sorted ids of the sampled participants; those without examples are absent and keep
    their state."""
    task: Task
    """The current task."""
    round: int
    """Number of the round within the task, from 0."""
    key: PRNGKeyArray
    """The run's key. The round's is derived from (key, task, round)."""
    when: When = "round"
    """Which of the method's rounds to play: "round" plays those of "after_round" as
    well."""
    last: bool = False
    """Whether this is the last round of the task."""
    past: Sequence[ReplayBuffer] = ()
    """The server's examples of the earlier tasks, in the order of the tasks, as
    `keep_task` returned them, if it has a server replay."""


def run_round(
    engine: Engine,
    server: PyTree,
    states: PyTree,
    inputs: RoundInputs,
    *,
    section: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    clients: Clients | None = None,
    guarded: bool = False,
) -> tuple[PyTree, PyTree, RoundReport]:
    """Play one federated round: broadcast, the participants' programs, merging, the
    server's step, and its training on its replay buffer; then the method's rounds of
    "after_round".

    `reference.py` says the same in plain words.

    Args:
      engine: from `make_engine`.
      server: the server's state.
      states: all clients' states, stacked [K, ...]; donated. On a mesh they should be as
        `mesh.put_shared` returns them, and as many are returned as are given.
      inputs: what else the round needs.
      section: a context manager that is entered around the parts "client" and "server",
        to time them.
      clients: runs the clients; None: this engine does. Others are clients on other machines.
      guarded: check every upload as it arrives. Otherwise the uploads of a chunk are
        checked as a whole, and from the first chunk on that is not finite all are run
        again, guarded. The bits are the same; guarded is faster where bad uploads are to
        be expected.

    Returns:
      The new server state (the old one if no upload was finite, or if the result is not),
        the new client states, and a report.
    """
    # the key depends on task and round, not on earlier rounds: a run can be resumed
    round_key = fold(inputs.key, inputs.task.index, inputs.round)
    server, states = _strong((server, states))
    context = RoundContext.on_host(inputs.frozen, inputs.task, inputs.round, inputs.last)
    if clients is None:
        clients = functools.partial(_run_clients, engine, inputs.data, guarded)
    # on a mesh, rows are added so that the devices share them evenly; they are cut off
    # at the end
    num_states = jax.tree.map(len, states)
    reports: dict[int, RoundReport] = {}
    replayed = None
    for stage in stages(inputs.when):
        for index, key in stage_keys(engine.method, stage, round_key):
            ids = _participants(engine.players[index].round.who, inputs)
            # `_exchange` fills in the broadcast, from the newest server state
            exchange = Exchange(index, context, Broadcast(()), inputs.partition, ids, key)
            server, states, reports[index] = _exchange(engine, server, states, exchange, section, clients)
        if stage == "round" and engine.replayer is not None:
            with section("server"):
                # a key of its own, so that replay does not change the draws of server rules
                key = fold(round_key, RoundKey.SERVER_REPLAY)
                context, key = engine.place((context, key))
                server = put_server(server, engine.mesh)
                past = inputs.past
                replayed = replay_on_server(engine.replayer, context, server, past, key, engine.place)
                server = replayed.server
    states = jax.tree.map(_first_rows, states, num_states)
    return server, states, _combine(engine.method, reports, replayed)


def _participants(who: Who, inputs: RoundInputs) -> Int[np.ndarray, " n"]:
    """Return the sorted ids of participants: clients with examples, sampled or all."""
    ids = inputs.ids
    if who == "everyone":
        ids = np.flatnonzero(inputs.partition.count)
    # a sampled client may have no examples of the task
    return ids[inputs.partition.count_of(ids) > 0]


def _first_rows(array: Array, rows: int) -> Array:
    """Return the first rows of an array.

    One that has no more is returned itself: slicing would copy it."""
    if len(array) == rows:
        return array
    return array[:rows]


def keep_task(
    engine: Engine,
    frozen: PyTree,
    server: PyTree,
    task: Task,
    round_: int,
) -> ReplayBuffer | None:
    """Return the server's examples of a finished task, on the host; None if there are none.

    The rounds of later tasks get them as `RoundInputs.past`.
    """
    if engine.replayer is None:
        return None
    round_context = RoundContext.on_host(frozen, task, round_, True)
    server = put_server(_strong(server), engine.mesh)
    return current_buffer(engine.replayer, engine.place(round_context), server)


def stages(when: When) -> tuple[When, ...]:
    """Return the stages that are played together: "after_round" follows "round"."""
    if when == "round":
        return ("round", "after_round")
    return (when,)


# folded into the round's key for the first round of a stage; the stage "round" has the
# round's key itself
_STAGE_KEYS = {
    "task_start": RoundKey.TASK_START,
    "after_round": RoundKey.AFTER_ROUND,
    "task_end": RoundKey.TASK_END,
}


def stage_keys(
    method: Method,
    stage: When,
    round_key: PRNGKeyArray,
) -> list[tuple[int, PRNGKeyArray]]:
    """Return the method's rounds of a stage, by index, each with its key."""
    stage_key = round_key
    if stage in _STAGE_KEYS:
        stage_key = fold(round_key, _STAGE_KEYS[stage])
    indices = [index for index, this_round in enumerate(method.rounds) if this_round.when == stage]
    # the first round has the stage's key, so that a further round changes no earlier key
    keys = [stage_key]
    for number in range(len(indices) - 1):
        keys.append(fold(stage_key, RoundKey.FURTHER_ROUNDS + number))
    return list(zip(indices, keys, strict=False))


def _exchange(
    engine: Engine,
    server: PyTree,
    states: PyTree,
    exchange: Exchange,
    section: Callable,
    clients: Clients,
) -> tuple[PyTree, PyTree, RoundReport]:
    """Play one of the method's rounds: the broadcast, the clients, the server's step.

    The host gives the server's step to the device before it waits for the clients, so
    that the device goes from one to the other without the host.
    """
    player = engine.players[exchange.index]
    # without participants there is nothing to merge
    if not len(exchange.ids):
        return server, states, RoundReport({})
    with section("client"):
        context, key = engine.place((exchange.context, exchange.key))
        server = put_server(server, engine.mesh)
        states = put_shared(states, engine.mesh)
        broadcast = engine.broadcast(context, server)

        def serve(received: Accumulator) -> ServerResult:
            if player.server is None:
                return ServerResult(server, {}, False)
            # server rules read the broadcast that the clients started from
            return player.server(context._replace(previous=broadcast), server, received, key)

        exchange = exchange._replace(context=context, broadcast=broadcast, key=key)
        outcome = clients(exchange, states, serve)
        # `section` times the clients, so it must not end before they have
        jax.block_until_ready(outcome.accumulator)
    with section("server"):
        report = _report(player.round, outcome, exchange.partition)
    return outcome.server_result.server, outcome.states, report


# ---- the clients of a round ------------------------------------------------------------


def _run_clients(
    engine: Engine,
    data: PyTree,
    guarded: bool,
    exchange: Exchange,
    states: PyTree,
    serve: Serve,
) -> ExchangeOutcome:
    """Run the clients on this engine: its `Clients`.

    `data` and `guarded` are as in `run_round`."""
    player = engine.players[exchange.index]
    chunks, steps = plan_round(
        player.round.program,
        exchange.partition,
        exchange.ids,
        int(exchange.context.round),
        engine.lanes.count,
        player.capacity,
        # another participant in every round measures the terms of its loss
        measured=int(exchange.context.task.index) + int(exchange.context.round),
    )
    data = ready(data, engine.mesh)
    accumulator, states, result = run_chunks(engine, chunks, exchange, states, data, guarded, serve)
    return ExchangeOutcome(accumulator, states, result, exchange.ids, steps)


def run_chunks(
    engine: Engine,
    chunks: list[Chunk],
    exchange: Exchange,
    states: PyTree,
    data: PyTree,
    guarded: bool = False,
    serve: Serve = no_server,
) -> tuple[Accumulator, PyTree, ServerResult]:
    """Run all chunks of an exchange, and take the server's step.

    Args:
      engine: from `make_engine`.
      chunks: of `plan_round`.
      exchange: which of the method's rounds; all of its arrays are placed.
      states: all clients' states, placed and donated.
      data: as in `RoundInputs`, placed.
      guarded: as in `run_round`.
      serve: the server's step.

    Returns:
      The received uploads, the new client states, and the result of `serve`.
    """
    player = engine.players[exchange.index]
    context = exchange.context
    accumulator = player.empty()
    # The device counts merged chunks. The host reads the count once per pass, because
    # reading it after each chunk would make it wait.
    merged = 0
    while True:
        merged_on_device = engine.place(np.int32(merged))
        in_flight = deque()
        for number in range(merged, len(chunks)):
            # an older chunk must end before there is memory for another one
            if len(in_flight) == CHUNKS_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            chunk = chunks[number]
            call = Call(
                context.frozen, exchange.broadcast, chunk, context.task, exchange.key, np.bool_(guarded)
            )
            carry = _run_chunk(player, engine.lanes, call, accumulator, states, data)
            merging = Merging(merged_on_device, np.int32(number), np.bool_(guarded))
            accumulator, states, merged_on_device = player.close(accumulator, states, carry, chunk, merging)
            in_flight.append(merged_on_device)
        # before it is known whether all chunks were merged, so that the device need not
        # wait; the result is thrown away if a chunk must run again
        result = serve(accumulator)
        # the one point at which the host waits
        merged = int(merged_on_device)
        if merged == len(chunks):
            return accumulator, states, result
        # A chunk had a bad upload. It and all later ones run again, and each upload is
        # checked as it arrives: bad uploads rarely come alone.
        guarded = True


def _run_chunk(
    player: Player,
    lanes: Lanes,
    call: Call,
    accumulator: Accumulator,
    states: PyTree,
    data: PyTree,
) -> Carry:
    """Run all ticks of one chunk; its carry has the uploads and states of the clients."""
    chunk = call.chunk
    carry = player.open(accumulator, states, chunk)
    indices = player.indices(chunk, call.key)
    to_replay = np.zeros((len(chunk.id), 0), np.int32)
    if player.replay_indices is not None:
        to_replay = player.replay_indices(carry, chunk)
    if isinstance(data, Host):
        # one transfer for both, since each one waits for the device. Every process reads
        # the indices of all devices
        indices, to_replay = jax.device_get(put((indices, to_replay), player.mesh))
        return _run_chunk_over_host(player, lanes, call, carry, data, indices, to_replay)
    replay_data = ReplayData(data, to_replay, to_replay)
    for run_phase, index, ticks in zip(player.run_ticks, indices, chunk.ticks, strict=True):
        # resident data are the whole training set, so places are indices
        window = TickWindow(data, index=index, place=index, first=np.int32(0), ticks=ticks)
        carry = run_phase(call, carry, window, replay_data, False)
    return carry


def _run_chunk_over_host(
    player: Player,
    lanes: Lanes,
    call: Call,
    carry: Carry,
    data: Host,
    indices: tuple,
    to_replay: np.ndarray,
) -> Carry:
    """Run the ticks of one chunk over windows of host data.

    The examples that its clients may replay stay on the device while the chunk runs.
    """
    chunk = call.chunk
    mesh = player.mesh
    devices = device_count(mesh)
    replay_data = _read_replay_data(data, to_replay, mesh)
    window_ticks = [
        _window_ticks(data, phase, lanes, table, devices)
        for phase, table in zip(player.round.program.phases, chunk.tables, strict=True)
    ]
    windows = [
        (phase_index, first)
        for phase_index, length in enumerate(window_ticks)
        for first in range(0, int(chunk.ticks[phase_index]), length)
    ]

    def load(window: tuple[int, int]) -> tuple[PyTree, Array, Array]:
        """Return the data of a window, with indices and places [ticks, L, B]."""
        phase_index, first = window
        length = window_ticks[phase_index]
        index = indices[phase_index][first : first + length]
        # the last window of a phase is padded, so that one program serves all windows
        index = np.pad(index, [(0, length - len(index)), (0, 0), (0, 0)], constant_values=-1)
        # a device's data have its examples in the order in which its lanes read them, so
        # places count from 0 on each device
        per_device = index[0].size // devices
        place = np.arange(length * per_device, dtype=np.int32).reshape(-1, 1, per_device)
        place = np.repeat(place, devices, axis=1).reshape(index.shape)
        order = by_device(length, devices, per_device)
        examples = np.maximum(index, 0).reshape(-1)[order]
        images = data.take(examples, mesh, parted=True)
        return images, put(index, mesh, split(1)), put(place, mesh, split(1))

    def step(carry: Carry, window: tuple[int, int], loaded: tuple[PyTree, Array, Array]) -> Carry:
        phase_index, first = window
        ticks = np.int32(min(window_ticks[phase_index], int(chunk.ticks[phase_index]) - first))
        tick_window = TickWindow(*loaded, first=np.int32(first), ticks=ticks)
        return player.run_ticks[phase_index](call, carry, tick_window, replay_data, True)

    return over_windows(step, carry, windows, load, data.overlap)


def _read_replay_data(
    data: Host,
    to_replay: np.ndarray,
    mesh: AnyMesh | None,
) -> ReplayData:
    """Read the examples that a chunk's clients may replay, onto their device.

    Without any, each device reads one example, since an array cannot be empty here.
    """
    devices = device_count(mesh)
    place_on_device = np.arange(to_replay.size // devices, dtype=np.int32)
    place = np.tile(place_on_device, devices).reshape(to_replay.shape)
    examples = np.zeros(devices, np.int32)
    if to_replay.size:
        examples = np.maximum(to_replay, 0).reshape(-1)
    return ReplayData(
        data=data.take(examples, mesh, parted=True),
        index=put(to_replay, mesh, split()),
        place=put(place, mesh, split()),
    )


def _window_ticks(data: Host, phase: Phase, lanes: Lanes, table: LaneTable, devices: int) -> int:
    """Return the number of ticks whose examples fit into the windows: from 1 to all."""
    examples_of_tick = lanes.count * phase.view.batch_size
    return int(np.clip(devices * data.window // examples_of_tick, 1, len(table.slot)))


# ---- one client alone ------------------------------------------------------------------


def sending(method: Method) -> Method:
    """Return the method for a single client, whose upload is returned and not merged."""

    def round_of_client(this_round: Round) -> Round:
        program = this_round.program

        def finish(context: ClientContext, local: PyTree, state: PyTree) -> tuple[Upload, PyTree]:
            upload, state = program.finish(context, local, state)
            # gathered uploads are neither weighted nor added
            gather = (upload.mean, upload.sum, upload.gather)
            return Upload(gather=gather, weight=upload.weight), state

        # the server calls `receive` and checks claims
        program_of_client = program._replace(finish=finish, receive=None, claims=())
        return this_round._replace(program=program_of_client, server=None)

    return method._replace(rounds=tuple(map(round_of_client, method.rounds)))


class ClientResult(NamedTuple):
    """The result of one client's work in a round."""

    upload: Upload  # what it sends; all zeros if that is not valid
    state: PyTree  # its new state; the old one if the upload is not valid
    metrics: tuple[Metrics, ...]  # of each phase
    valid: Array  # whether the upload is finite and of a weight that is not negative


def work_alone(
    engine: Engine,
    exchange: Exchange,
    state: PyTree,
    data: PyTree,
) -> ClientResult:
    """Run one client in one of the method's rounds, as it would run among others.

    Args:
      engine: of `sending(method)`, with one lane and capacities of `alone_capacity`.
      exchange: the round, whose `ids` have this client alone.
      state: the client's.
      data: as in `RoundInputs`.
    """
    player = engine.players[exchange.index]
    context = exchange.context
    (chunk,), _ = plan_round(
        player.round.program, exchange.partition, exchange.ids, int(context.round), 1, player.capacity
    )
    call = Call(context.frozen, exchange.broadcast, chunk, context.task, exchange.key, np.bool_(True))
    carry = _run_chunk(player, engine.lanes, call, player.empty(), expand(state), data)
    received = carry.accumulator
    mean, sum_, gather = squeeze(received.gather)
    upload = Upload(mean, sum_, gather, weight=received.weight[0])
    return ClientResult(upload, squeeze(carry.states), received.metrics, received.valid[0])


def alone_capacity(capacity: Capacity) -> Capacity:
    """Return the capacity of an engine that runs one client at a time and knows no other.

    It cannot know how many examples the others have, so all batches are padded to the
    full size.
    """
    full_widths = tuple(widths[-1:] for widths in capacity.widths)
    return capacity._replace(clients=1, participants=1, widths=full_widths)


# ---- the server ------------------------------------------------------------------------


def _server_step(
    function: ServerFunction,
    shapes: Shapes,
    participants: int,
    mesh: AnyMesh | None,
    round_context: RoundContext,
    server: PyTree,
    received: Accumulator,
    key: PRNGKeyArray,
) -> ServerResult:
    """Merge the uploads, then take the method's server step.

    Without a valid upload, or with a result that is not finite, the server keeps its
    state. The latter is reported as refused.
    """
    aggregate = _aggregate(received, shapes, participants, mesh)
    new_server, metrics = function(round_context, server, aggregate, fold(key, RoundKey.SERVER))
    new_server = jax.tree.map(jnp.asarray, new_server)
    # one program for all rounds: the step is computed, and then kept or not
    has_upload = jnp.any(aggregate.valid & (aggregate.weight > 0))
    refused = has_upload & became_non_finite(new_server, server)
    return ServerResult(one_of(has_upload & ~refused, new_server, server), metrics, refused)


def _aggregate(
    received: Accumulator,
    shapes: Shapes,
    participants: int,
    mesh: AnyMesh | None,
) -> Aggregate:
    """Return the merged uploads; the mean is sum_k w_k x_k / sum_k w_k."""
    entries = in_order((received.gather, received.weight, received.id, received.valid), mesh)
    # without the rows that a mesh adds to share them evenly
    gather, weight, ids, valid = jax.tree.map(lambda leaf: leaf[:participants], entries)
    total_weight = jnp.sum(weight)
    divisor = jnp.where(total_weight > 0, total_weight, 1.0)
    mean = jax.tree.map(lambda weighted_sum: weighted_sum / divisor, received.mean)
    return Aggregate(
        mean=sum_value(mean, shapes.upload.mean),
        sum=sum_value(received.sum, shapes.upload.sum),
        gather=gather,
        weight=weight,
        id=ids,
        valid=valid,
    )


# ---- reports ---------------------------------------------------------------------------


def _report(
    this_round: Round,
    outcome: ExchangeOutcome,
    partition: ClientPartition,
) -> RoundReport:
    """Return what an exchange's clients and server report. The host waits for both."""
    received = outcome.accumulator
    result = outcome.server_result
    # one transfer, because each one waits for the device
    rejected, impossible, client_metrics, server_metrics, refused = jax.device_get(
        (received.rejected, received.impossible, received.metrics, result.metrics, result.refused)
    )
    metrics = _add_by_name((*client_metrics, server_metrics))
    claims = zip(claims_of(this_round.program), impossible, strict=True)
    examples = partition.count_of(outcome.ids)
    epochs = [phase.view.epochs for phase in this_round.program.phases]
    useful_steps, paid_steps = outcome.steps
    return RoundReport(
        metrics={name: _mean(metric) for name, metric in metrics.items()},
        participants=int((examples > 0).sum()),
        rejected=int(rejected),
        impossible={claim.name: int(uploads) for claim, uploads in claims if uploads},
        refused=int(refused),
        examples=int(examples.sum()) * sum(epochs),
        training_examples=int(examples.sum()) * max(epochs),
        useful_steps=useful_steps,
        paid_steps=paid_steps,
        client_ids=frozenset(outcome.ids.tolist()),
    )


def _combine(
    method: Method,
    exchanges: dict[int, RoundReport],
    replayed: Replayed | None,
) -> RoundReport:
    """Combine the reports of a round's exchanges, which are by index of the method's round.

    Participants and training examples are those of the first exchange; all else is
    added up. A metric whose name an earlier exchange has taken gets a prefix, such as
    "after_round_1_loss". Metrics of the server's replay have the prefix "replay_".
    """
    reports = list(exchanges.values()) or [RoundReport({})]
    metrics: dict[str, float] = {}
    for index, report in exchanges.items():
        prefix = f"{method.rounds[index].when}_{index}_"
        taken = set(metrics)
        for name, value in report.metrics.items():
            if name in taken:
                name = prefix + name
            metrics[name] = value
    if replayed is not None:
        metrics |= {f"replay_{name}": _mean(metric) for name, metric in replayed.metrics.items()}
        metrics["replay_examples"] = float(replayed.examples)
    uploads = [0] * len(method.rounds)
    for index, report in exchanges.items():
        uploads[index] = report.participants
    refused = sum(report.refused for report in reports)
    if replayed is not None:
        refused += int(replayed.refused)
    return RoundReport(
        metrics=metrics,
        participants=reports[0].participants,
        rejected=sum(report.rejected for report in reports),
        impossible=dict(sum((Counter(report.impossible) for report in reports), Counter())),
        refused=refused,
        examples=sum(report.examples for report in reports),
        training_examples=reports[0].training_examples,
        useful_steps=sum(report.useful_steps for report in reports),
        paid_steps=sum(report.paid_steps for report in reports),
        uploads=tuple(uploads),
        client_ids=frozenset().union(*(report.client_ids for report in reports)),
    )


def _add_by_name(groups: tuple[Metrics, ...]) -> Metrics:
    """Return the metrics of phases and server. Metrics of the same name are added."""
    totals: Metrics = {}
    for metrics in groups:
        for name, metric in metrics.items():
            totals[name] = jax.tree.map(np.add, totals[name], metric) if name in totals else metric
    return totals


def _mean(metric: Weighted) -> float:
    if not float(metric.weight):
        return float("nan")
    return float(metric.total) / float(metric.weight)


def _count_traces(traces: dict[str, int], name: str, function: Callable) -> Callable:
    """Return `function`, which counts in `traces` how often jax traces it."""

    @functools.wraps(function)
    def traced(*args):
        traces[name] = traces.get(name, 0) + 1
        return function(*args)

    return traced
