"""The programs that a round runs, with the shapes of their arguments: for compiling them before there is
anything to compute, on this machine or for a chip that is not here."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from fcljax.data.streaming import whole
from fcljax.federated.client_loop import Call, ReplayData, TickWindow
from fcljax.federated.engine import Player, init_clients
from fcljax.federated.schedule import Chunk, plan_round
from fcljax.mesh import WHOLE, split
from fcljax.runs.build import Experiment
from fcljax.types import PyTree, RoundContext


class RoundProgram(NamedTuple):
    """One compiled function, and what it is called with."""

    name: str
    """Such as "round 0 phase 0": the round's time, its number, and the function."""
    function: Any
    """Under `jax.jit`."""
    arguments: tuple[Any, ...]
    """`jax.ShapeDtypeStruct`s, and static values as they are."""
    steps: int = 0
    """How often the step of its loop runs in a round, on one device; 0: it has no loop over steps."""

    def trace(self) -> jax.stages.Traced:
        """The function for these arguments."""
        return self.function.trace(*self.arguments)

    def lower(self) -> jax.stages.Lowered:
        """The function for these arguments."""
        return self.function.lower(*self.arguments)


class Placement(NamedTuple):
    """Where the arguments lie; without shardings, where jax puts arrays by default."""

    whole: Sharding | None = None
    """Of what every device has."""
    split: Sharding | None = None
    """Of what has an axis for the devices."""


DEFAULT = Placement()


def programs_of(exp: Experiment, placement: Placement = DEFAULT) -> Iterator[RoundProgram]:
    """Every program of a round of the first task: broadcast, client loop, and the server's step.

    Args:
      exp: the experiment; its weights may be shapes. Images that lie on the host are taken as resident.
      placement: of the arguments; on a mesh they lie as its programs have them.
    """
    if exp.engine.mesh is not None:
        each = NamedSharding(exp.engine.mesh, WHOLE), NamedSharding(exp.engine.mesh, split())
        placement = Placement(*each)
    engine, method = exp.engine, exp.method
    server = jax.eval_shape(method.init, exp.key, exp.frozen)
    states = jax.eval_shape(
        lambda server, key: init_clients(method, server, exp.sizes.clients, key), server, exp.key
    )
    context = RoundContext.on_host(exp.frozen, exp.scenario.tasks[0], 0, False)
    place = _placing(placement.whole)
    yield RoundProgram("broadcast", engine.broadcast, (place(context), place(server)))
    broadcast = jax.eval_shape(engine.broadcast, context, server)
    for index, player in enumerate(engine.players):
        name = f"{player.round.when} {index}"
        yield from _of_player(exp, player, name, (broadcast, states), placement)
        if player.server:
            context_after = context._replace(previous=broadcast)
            arguments = (context_after, server, jax.eval_shape(player.empty), exp.key)
            yield RoundProgram(f"{name} server", player.server, place(arguments))


def _of_player(
    exp: Experiment, player: Player, name: str, given: tuple[PyTree, PyTree], placement: Placement
) -> Iterator[RoundProgram]:
    """What the clients of one of the method's rounds run, in its order; `given`: broadcast and states."""
    (broadcast, states), (chunk, steps) = given, _first_chunk(exp, player)
    place, apart = _placing(placement.whole), _placing(placement.split)
    accumulator = jax.eval_shape(player.empty)
    carry = jax.eval_shape(player.open, accumulator, states, chunk)
    indices = jax.eval_shape(player.indices, chunk, exp.key)
    may_replay = np.zeros((len(chunk.id), 0), np.int32)
    yield RoundProgram(f"{name} indices", player.indices, place((chunk, exp.key)))
    yield RoundProgram(f"{name} open", player.open, place((accumulator, states, chunk)))
    if player.replay_indices:
        may_replay = jax.eval_shape(player.replay_indices, states, chunk)
        yield RoundProgram(f"{name} replay indices", player.replay_indices, place((states, chunk)))
    data = whole(exp.train)
    call = Call(exp.frozen, broadcast, chunk, exp.scenario.tasks[0], exp.key, np.bool_(False))
    past = ReplayData(data, may_replay, may_replay)
    for i, (run, mine, ticks) in enumerate(zip(player.run_ticks, indices, chunk.ticks, strict=True)):
        window = TickWindow(data, mine, mine, np.int32(0), ticks)
        arguments = (place(call), apart(carry), place(window), place(past), False)
        yield RoundProgram(f"{name} phase {i}", run, arguments, steps[i])
    yield RoundProgram(f"{name} sound", player.sound, (apart(carry),))
    yield RoundProgram(
        f"{name} close", player.close, (*place((accumulator, states)), apart(carry), place(chunk))
    )


def _first_chunk(exp: Experiment, player: Player) -> tuple[Chunk, list[int]]:
    """The first chunk of the first task's first round, with every client, and the steps of each phase in all
    chunks of the round."""
    partition = exp.scenario.partitions[0][0]
    ids = np.flatnonzero(partition.count)[: player.capacity.participants]
    chunks, _ = plan_round(player.round.program, partition, ids, 0, exp.engine.lanes.count, player.capacity)
    return chunks[0], [sum(map(int, ticks)) for ticks in zip(*(each.ticks for each in chunks), strict=True)]


def _placing(sharding: Sharding | None) -> Callable[[PyTree], PyTree]:
    """Arrays as shapes with this sharding."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return lambda tree: jax.tree.map(shape, tree)
