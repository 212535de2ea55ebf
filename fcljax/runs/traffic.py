"""What clients and server send each other in a run: counted from the shapes of the real
pytrees."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fcljax.federated import communication
from fcljax.federated.communication import Traffic
from fcljax.runs.build import Experiment
from fcljax.types import Broadcast, ClientContext, ClientInfo, Round, RoundContext, Upload


class Payloads(NamedTuple):
    """Shapes of what clients and server send and keep."""

    uploads: tuple[Upload, ...]  # of a client, in each of the method's rounds
    broadcast: Broadcast
    handover: PyTree  # what clients get of a finished task when the next one begins
    state: PyTree  # of a client
    server: PyTree
    trainable: dict[str, PyTree]  # what a client trains, by name


def payload_shapes(exp: Experiment) -> Payloads:
    """The shapes, without computing anything."""
    method = exp.method
    task = exp.scenario.tasks[0]
    info = ClientInfo.example(exp.sizes.classes)

    def upload(
        entry: Round,
        context: ClientContext,
        state: PyTree,
        key: jax.Array,
    ) -> Upload:
        local = entry.program.start(context, state, key)
        return entry.program.finish(context, local, state)[0]

    def everything(key, frozen, task, info):
        server = method.init(key, frozen)
        round_context = RoundContext.on_host(frozen, task, 0, False)
        broadcast = method.broadcast(round_context, server)
        state = method.init_client(key, server)
        context = ClientContext(frozen, broadcast.payload, broadcast.cached, task, info)
        uploads = tuple(upload(entry, context, state, key) for entry in method.rounds)
        named = method.trainable(round_context, server) if method.trainable else {"upload": uploads[0].mean}
        handover = ()
        if method.handover:
            handover = method.handover(round_context, server)
        return Payloads(uploads, broadcast, handover, state, server, named)

    return jax.eval_shape(everything, exp.key, exp.frozen, task, info)


def traffic_by_round(exp: Experiment, payloads: Payloads) -> list[Traffic]:
    """What one client uploads and downloads in each of the method's rounds; it uploads
    nothing in a round without aggregation."""
    pairs = zip(exp.method.rounds, payloads.uploads, strict=True)
    return [
        communication.traffic(upload if entry.server else None, payloads.broadcast) for entry, upload in pairs
    ]


def handover_traffic(payloads: Payloads) -> Traffic:
    """What each client downloads of a finished task when the next one begins, since it
    caches it from then on."""
    down = communication.count_scalars(payloads.handover), communication.num_bytes(payloads.handover)
    return Traffic(0, 0, *down)


class Counted(NamedTuple):
    """The traffic of a run's exchanges."""

    by_round: list[Traffic]
    """of one client, in each of the method's rounds"""
    handover: Traffic
    """of one client, between two tasks"""
    clients: int

    @classmethod
    def of(cls, exp: Experiment) -> "Counted":
        """The traffic of a method at an experiment's sizes."""
        payloads = payload_shapes(exp)
        return cls(traffic_by_round(exp, payloads), handover_traffic(payloads), exp.sizes.clients)

    def total(self, uploads: tuple[int, ...] | list[int], handovers: int) -> Traffic:
        """Of all clients.

        Args:
          uploads: how many clients took part in each of the method's rounds.
          handovers: how often another task began.
        """
        pairs = [*zip(self.by_round, uploads, strict=True), (self.handover, self.clients * handovers)]
        sums = sum((np.multiply(entry, times) for entry, times in pairs), np.zeros(len(Traffic._fields), int))
        return Traffic(*sums.tolist())
