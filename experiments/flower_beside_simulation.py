"""Flower beside our own simulation: how far apart the server's states are after every round, and how many
bytes a message has beside what `fcljax` counts as communication.

    python experiments/flower_beside_simulation.py ewc --clients 3 --tasks 2

It needs `pip install -e '.[flower]'`. Options are those of `fcljax run`, and `--out` is a new folder; clients
are Flower's simulated nodes.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
from flwr.simulation import run_simulation

from fcljax.bridges import node
from fcljax.bridges.flower import client_app, server_app
from fcljax.commands import running
from fcljax.config import RunConfig
from fcljax.runs.build import build
from fcljax.runs.features import with_queries
from fcljax.runs.records import Clock, Records
from fcljax.runs.rounds import first_state, make_play_round
from fcljax.runs.traffic import payload_shapes, traffic_by_round
from fcljax.types import PyTree

# one client's work at a time: compiling is what takes the time
BACKEND = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}


def simulated(settings: RunConfig) -> tuple[list[PyTree], list[dict[str, int]]]:
    """The server's state after every round of our own simulation, and the communication that is counted for
    one client in each of the method's rounds."""
    states = []
    past = ()
    with Clock({}) as clock:
        exp = with_queries(build(settings))
        state = first_state(exp)
        play_round = make_play_round(exp, Records(), clock)
        for step in range(len(exp.scenario.tasks) * settings.rounds):
            state, kept, *_ = play_round(exp, state, past, step)
            past += () if kept is None else (kept,)
            states.append(jax.device_get(state.server))
    return states, [each._asdict() for each in traffic_by_round(exp, payload_shapes(exp))]


def flowered(method: str, settings: dict[str, Any], clients: int, out: str | None = None) -> list[PyTree]:
    """The server's state after every round under Flower's simulation."""
    states: list[PyTree] = []
    server = server_app(method, out, on_round=lambda t, r, s: states.append(jax.device_get(s)), **settings)
    run_simulation(server, client_app(method, **settings), clients, backend_config=BACKEND)
    return states


def largest_difference(a: PyTree, b: PyTree) -> float:
    """Of two states, over all their numbers."""
    wide = lambda x: np.asarray(x).astype(np.float64)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max((float(np.max(np.abs(wide(x) - wide(y)), initial=0.0)) for x, y in pairs), default=0.0)


def main(method: str, arguments: list[str]) -> None:
    given = running.parse_run(method, arguments, "flower_beside_simulation.py", "")
    out = given.pop("out")
    cfg = node.federation_settings(method, given)
    states, counted = simulated(cfg)
    found = flowered(method, given, cfg.clients, out)
    apart = [largest_difference(*pair) for pair in zip(states, found, strict=True)]
    print(
        json.dumps({"method": method, "largest_difference": apart, "counted_per_client_and_round": counted})
    )
    with open(f"{out}/metrics.jsonl", encoding="utf-8") as file:
        for line in map(json.loads, file):
            print(
                {
                    key: value
                    for key, value in line.items()
                    if key.startswith("payload") or key in ("task", "round")
                }
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
