"""The traffic of a run, counted from the shapes of the pytrees that are sent."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fcljax.federated import communication
from fcljax.federated.communication import Traffic
from fcljax.runs.build import Experiment
from fcljax.types import Broadcast, ClientContext, ClientInfo, Round, RoundContext, Upload


class Payloads(NamedTuple):
    """Shapes of what clients and server send and store."""

    uploads: tuple[Upload, ...]
    """Of a client, in each of the method's rounds."""
    broadcast: Broadcast
    handover: PyTree
    """What clients download of a finished task when the next one begins."""
    state: PyTree
    """Of a client."""
    server: PyTree
    trainable: dict[str, PyTree]
    """What a client trains, by name."""


def payload_shapes(exp: Experiment) -> Payloads:
    """Return the shapes of an experiment's payloads, without computing anything."""
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

    def payloads(key, frozen, task, info):
        server = method.init(key, frozen)
        round_context = RoundContext.on_host(frozen, task, 0, False)
        broadcast = method.broadcast(round_context, server)
        state = method.init_client(key, server)
        context = ClientContext(frozen, broadcast.payload, broadcast.cached, task, info)
        uploads = tuple(upload(entry, context, state, key) for entry in method.rounds)
        trainable = {}
        # a method that does not name what trains: what clients send to be averaged
        if method.trainable:
            trainable = method.trainable(round_context, server)
        elif uploads:
            trainable = {"upload": uploads[0].mean}
        handover = ()
        if method.handover:
            handover = method.handover(round_context, server)
        return Payloads(uploads, broadcast, handover, state, server, trainable)

    # shapes of the real functions, so that nothing is counted by hand
    return jax.eval_shape(payloads, exp.key, exp.frozen, task, info)


def traffic_by_round(exp: Experiment, payloads: Payloads) -> list[Traffic]:
    """Return what one client uploads and downloads in each of the method's rounds."""
    traffic = []
    for entry, upload in zip(exp.method.rounds, payloads.uploads, strict=True):
        # without a step of the server, `finish` returns an upload that is never sent
        uploaded = upload if entry.server else None
        traffic.append(communication.traffic(uploaded, payloads.broadcast))
    return traffic


def handover_traffic(payloads: Payloads) -> Traffic:
    """Return what each client downloads, and then caches, when the next task begins."""
    handover = payloads.handover
    return Traffic(0, 0, communication.count_scalars(handover), communication.num_bytes(handover))


class Counted(NamedTuple):
    """The traffic of a run's exchanges."""

    by_round: list[Traffic]
    """Of one client, in each of the method's rounds."""
    handover: Traffic
    """Of one client, between two tasks."""
    clients: int

    @classmethod
    def of(cls, exp: Experiment) -> "Counted":
        """Return the traffic of an experiment."""
        payloads = payload_shapes(exp)
        return cls(traffic_by_round(exp, payloads), handover_traffic(payloads), exp.sizes.clients)

    def total(self, uploads: tuple[int, ...] | list[int], handovers: int) -> Traffic:
        """Return the traffic of all clients.

        Args:
          uploads: number of clients that took part in each of the method's rounds.
          handovers: number of tasks that began after the first.
        """
        total = np.multiply(self.handover, self.clients * handovers)
        for traffic, clients in zip(self.by_round, uploads, strict=True):
            total = total + np.multiply(traffic, clients)
        return Traffic(*total.tolist())
