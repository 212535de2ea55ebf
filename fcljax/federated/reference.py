"""One round of a method in plain words, client by client: what the engine computes,
without its speed.

    server     broadcasts its payload
    client k   starts from the payload, takes steps over its examples, phase by phase, and uploads
    server     merges the uploads and takes its step

It calls the functions of a `Method` for one client and one batch at a time, and shows
the key of every random draw. `engine.py` computes the same for many clients in one
compiled program; a test compares the two. Read this file first.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fcljax.federated.claims import claims_hold
from fcljax.federated.client_loop import Fetch, join_batches
from fcljax.federated.engine import RoundInputs, stage_keys, stages
from fcljax.federated.keys import ClientKey, RoundKey, StepKey, fold
from fcljax.types import (
    Aggregate,
    Batch,
    Broadcast,
    ClientContext,
    ClientInfo,
    ClientState,
    Method,
    Metrics,
    Phase,
    Program,
    RoundContext,
    Server,
    Task,
    Upload,
)


class ExchangeResult(NamedTuple):
    """The result of one of the method's rounds."""

    server: Server
    """The server's new state."""
    states: list[ClientState]
    """All clients' new states, in the order of their ids."""
    uploads: dict[int, Upload | None]
    """By client id; None: the upload was rejected."""
    metrics: list[Metrics]
    """Of every step of every client, and of the server."""


class ReferenceRound(NamedTuple):
    """The result of all that a method does at one time of a task."""

    server: Server
    """The server's new state."""
    states: list[ClientState]
    """All clients' new states, in the order of their ids."""
    exchanges: dict[int, ExchangeResult]
    """Index of the method's round -> its result, in the order in which they were
    played."""


def play_round(
    method: Method,
    fetch: Fetch,
    server: Server,
    states: Sequence[ClientState],
    inputs: RoundInputs,
) -> ReferenceRound:
    """Play all that a method does at one time of a task.

    Args:
      method: the method. Training of the server on a replay buffer is not played
        (`server_replay.py`).
      fetch: reads examples of the data.
      server: the server's state.
      states: all clients' states, in the order of their ids.
      inputs: what else the round needs, as the engine gets it.
    """
    # the key depends on task and round, not on earlier rounds: a run can be resumed
    round_key = fold(inputs.key, inputs.task.index, inputs.round)
    exchanges: dict[int, ExchangeResult] = {}
    for stage in stages(inputs.when):
        for index, key in stage_keys(method, stage, round_key):
            # each exchange starts from the server and the clients that the last one left
            result = play_exchange(method, index, fetch, server, states, inputs, key)
            server = result.server
            states = result.states
            exchanges[index] = result
    return ReferenceRound(server, list(states), exchanges)


def play_exchange(
    method: Method,
    index: int,
    fetch: Fetch,
    server: Server,
    states: Sequence[ClientState],
    inputs: RoundInputs,
    key: PRNGKeyArray,
) -> ExchangeResult:
    """Play one of the method's rounds: broadcast, clients one by one, server step.

    Args:
      method, fetch, server, states, inputs: as in `play_round`.
      index: of the method's round.
      key: of this exchange.
    """
    this_round = method.rounds[index]
    round_context = RoundContext.on_host(inputs.frozen, inputs.task, inputs.round, inputs.last)
    broadcast = jax.jit(method.broadcast)(round_context, server)

    read = functools.partial(fetch, inputs.data)
    states = list(states)
    uploads: dict[int, Upload | None] = {}
    metrics: list[Metrics] = []
    for client in participants(this_round.who, inputs):
        context = client_context(inputs, broadcast, client)
        examples = inputs.partition.of_client(client)
        upload, state, steps = train_client(this_round.program, context, states[client], examples, read, key)
        uploads[client] = upload
        metrics += steps
        # a client whose upload is rejected keeps its old state: training that ended in
        # NaN would otherwise stay in it
        if upload is not None:
            states[client] = state

    # without a valid upload there is nothing to merge, and the server keeps its state
    if this_round.server is not None and any(upload is not None for upload in uploads.values()):
        aggregate = merge(uploads, absent=len(states))
        # server rules may read the broadcast that the clients started from
        round_context = round_context._replace(previous=broadcast)
        step = jax.jit(this_round.server)
        server, server_metrics = step(round_context, server, aggregate, fold(key, RoundKey.SERVER))
        metrics.append(server_metrics)
    return ExchangeResult(server, states, uploads, metrics)


def participants(who: str, inputs: RoundInputs) -> list[int]:
    """Return the ids of participants: clients with examples, sampled or all."""
    ids = inputs.ids
    if who == "everyone":
        ids = np.arange(len(inputs.partition.count))
    return [int(client) for client in ids if inputs.partition.count[client] > 0]


def client_context(
    inputs: RoundInputs,
    broadcast: Broadcast,
    client: int,
) -> ClientContext:
    """Return all that a client may read besides its own state."""
    partition = inputs.partition
    info = ClientInfo(
        id=jnp.int32(client),
        examples=jnp.int32(partition.count[client]),
        class_examples=jnp.asarray(partition.class_examples[client]),
        round=jnp.int32(inputs.round),
    )
    task: Task = inputs.task
    # clients with streams of their own have tasks of their own
    if partition.task is not None:
        task = jax.tree.map(lambda leaf: leaf[client], partition.task)
    return ClientContext(inputs.frozen, broadcast.payload, broadcast.cached, task, info)


# ---- one client ------------------------------------------------------------------------


def train_client(
    program: Program,
    context: ClientContext,
    state: ClientState,
    examples: Int[np.ndarray, " n"],
    read: Callable,
    round_key: PRNGKeyArray,
) -> tuple[Upload | None, ClientState, list[Metrics]]:
    """Play a client's program from start to finish.

    Args:
      program: what clients do.
      context: all that the client may read besides its own state.
      state: the client's state.
      examples: indices of its training examples.
      read: read(index, keys, augment) -> input, label and query features of examples.
      round_key: of the exchange, the same for all clients.

    Returns:
      The upload as the server receives it (None: it is rejected), the client's new state,
        and each step's metrics.
    """
    client_key = fold(round_key, RoundKey.CLIENT, context.client.id)
    local = jax.jit(program.start)(context, state, fold(client_key, ClientKey.START))
    metrics: list[Metrics] = []
    for phase_index, phase in enumerate(program.phases):
        step_phase = jax.jit(phase.step)
        for step, batch_examples in enumerate(batches(phase, phase_index, examples, round_key)):
            step_key = fold(client_key, ClientKey.PHASES + phase_index, step)
            update_key = fold(step_key, StepKey.UPDATE)
            # from the round's key: draws that belong to examples are the same at any client
            draws_key = fold(round_key, RoundKey.EXAMPLE_DRAWS, phase_index, step)
            keys = fold(step_key, StepKey.IMAGES), draws_key
            batch = read_batch(read, batch_examples, phase.view.batch_size, phase.view.augment, keys)
            if phase.replay is not None and program.replay_buffer is not None:
                position = jax.jit(phase.replay)(context, local, update_key)
                replayed = replayed_examples(program.replay_buffer(state), position)
                # replayed examples are not augmented, so their first key draws nothing
                keys = update_key, draws_key
                batch = join_batches(batch, read_batch(read, replayed, phase.view.replay, False, keys))
            local, step_metrics = step_phase(context, local, batch, update_key)
            metrics.append(step_metrics)
    upload, state = jax.jit(program.finish)(context, local, state)
    return receive(program, context, upload), state, metrics


def receive(program: Program, context: ClientContext, upload: Upload) -> Upload | None:
    """Return an upload as the server merges it; None if it is rejected."""
    # claims are about what the client sent, before the server clips it
    check_claims = jax.jit(functools.partial(claims_hold, program))
    is_possible = bool(np.all(check_claims(context, upload)))
    if program.receive is not None:
        upload = jax.jit(program.receive)(context, upload)
    is_finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(upload))
    if not (is_possible and is_finite):
        return None
    return upload


def batches(
    phase: Phase,
    phase_index: int,
    examples: Int[np.ndarray, " n"],
    round_key: PRNGKeyArray,
) -> Iterator[Int[np.ndarray, " b"]]:
    """Yield the examples of every step. The last batch of an epoch may be short."""
    for epoch in range(phase.view.epochs):
        order = examples
        if phase.view.shuffle:
            order = epoch_order(round_key, phase_index, epoch, examples)
        for start in range(0, len(order), phase.view.batch_size):
            yield order[start : start + phase.view.batch_size]


def epoch_order(
    round_key: PRNGKeyArray, phase_index: int, epoch: int, examples: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Return a client's examples in the order of an epoch, sorted by a draw per example."""
    epoch_key = fold(round_key, RoundKey.EXAMPLE_ORDER, phase_index, epoch)
    # a draw belongs to the example, so the order does not depend on the other clients
    draws = [int(jax.random.bits(fold(epoch_key, example))) for example in examples.tolist()]
    return examples[np.argsort(draws, kind="stable")]


def replayed_examples(
    replay_buffer: Int[Array, " M"], position: Int[Array, " replay"]
) -> Int[np.ndarray, " replay"]:
    """Return the examples at these positions of a replay buffer; -1 where there is none."""
    buffer = np.asarray(replay_buffer)
    chosen = np.asarray(position)
    is_inside = (chosen >= 0) & (chosen < len(buffer))
    return np.where(is_inside, buffer[np.clip(chosen, 0, len(buffer) - 1)], -1)


def read_batch(
    read: Callable,
    examples: Int[np.ndarray, " b"],
    batch_size: int,
    augment: bool,
    keys: tuple[PRNGKeyArray, PRNGKeyArray],
) -> Batch:
    """Read a step's examples, padded to the batch size.

    Args:
      read: as in `train_client`.
      examples: their indices; -1 is padding.
      batch_size: B, to which the examples are padded.
      augment: whether images are augmented.
      keys: of augmentation, and of the draws that belong to examples.
    """
    index = np.pad(examples, (0, batch_size - len(examples)), constant_values=-1)
    mask = index >= 0
    # padding reads example 0, because shapes are fixed, and is then set to zeros
    stored = jnp.asarray(np.where(mask, index, 0), jnp.int32)
    inputs, label, query = read(stored, jax.random.split(keys[0], batch_size), augment)

    def without_padding(array: Array) -> Array:
        mask_of_array = mask.reshape(-1, *[1] * (array.ndim - 1))
        return jnp.where(mask_of_array, array, jnp.zeros_like(array))

    if query is not None:
        query = without_padding(query)
    return Batch(
        input=jax.tree.map(without_padding, inputs),
        label=without_padding(label),
        mask=jnp.asarray(mask),
        index=jnp.asarray(index, jnp.int32),
        query=query,
        keys=jax.vmap(jax.random.fold_in, (None, 0))(keys[1], stored),
    )


# ---- the server ------------------------------------------------------------------------


def merge(uploads: dict[int, Upload | None], absent: int) -> Aggregate:
    """Merge uploads: the weighted mean, the sum, and the stack of what clients sent.

    Args:
      uploads: by client id; None: a rejected one, which leaves an invalid entry.
      absent: the id of invalid entries, which no client has.
    """
    # a rejected upload enters no sum: 0 times NaN would be NaN
    received = {client: upload for client, upload in uploads.items() if upload is not None}
    valid = np.array([upload is not None for upload in uploads.values()])
    weights = np.zeros(len(uploads), np.float32)
    weights[valid] = [float(upload.weight) for upload in received.values()]
    # if all weights are 0 the mean is 0, not 0 / 0
    shares = weights[valid] / max(weights.sum(), np.finfo(np.float32).tiny)

    def weighted_mean(*leaves: Array) -> np.ndarray:
        return np.sum([share * leaf for share, leaf in zip(shares, leaves, strict=True)], axis=0)

    def total(*leaves: Array) -> np.ndarray:
        return np.sum(np.stack(leaves), axis=0)

    def stack(*leaves: Array) -> np.ndarray:
        entries = np.zeros((len(uploads), *np.shape(leaves[0])), np.asarray(leaves[0]).dtype)
        entries[valid] = np.stack(leaves)
        return entries

    return Aggregate(
        mean=jax.tree.map(weighted_mean, *(upload.mean for upload in received.values())),
        sum=jax.tree.map(total, *(upload.sum for upload in received.values())),
        gather=jax.tree.map(stack, *(upload.gather for upload in received.values())),
        weight=jnp.asarray(weights),
        id=jnp.asarray(np.where(valid, list(uploads), absent), jnp.int32),
        valid=jnp.asarray(valid),
    )
