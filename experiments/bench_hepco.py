"""What HePCo's server costs: its step as one compiled call against the same loops run from Python, and how it
grows with the number of clients.

    python experiments/bench_hepco.py --width 192 --clients 5 20 80

Random models of so many clients, in the second task, where latents of older classes are made and replayed
too. From Python means that every pass through a loop is one compiled call: what a program in PyTorch does.
Prints a line per measurement, the processor and the peak of its matrix products in the same run.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from peers.machine import peak, processor, seconds

from fcljax.adapters import find_adapter
from fcljax.adapters.pool import PoolOptions
from fcljax.data.tasks import make_tasks
from fcljax.methods.hepco.hepco import HepcoOptions, latent_distillation
from fcljax.parts.classifiers import linear
from fcljax.parts.client import Training
from fcljax.parts.federate import Payload, Run
from fcljax.parts.learner import Learner, Params, learner
from fcljax.parts.server import ServerRound
from fcljax.types import Broadcast, Frozen, Network, Sizes, Task

CLASSES = 100
TASKS = 10


def main() -> None:
    """Measure for every number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=192, help="of the network: 192 is ViT-Ti's")
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 80])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{processor()}, {jax.devices()[0].device_kind}, matrix products {peak():.0f} GFLOP/s")
    print("| clients | compiled call, s | from Python, s | ratio | compilation, s |\n|---|---|---|---|---|")
    for clients in options.clients:
        print(measure(options.width, clients, options.repeats), flush=True)


def measure(width: int, clients: int, repeats: int) -> str:
    """A row of the table."""
    step, arguments = server_step(width, clients)
    compiled = jax.jit(step)
    first, _ = seconds(lambda: compiled(*arguments))
    times = [seconds(lambda: compiled(*arguments)) for _ in range(repeats)]
    whole = statistics.median(time for time, _ in times)
    spent: list[float] = []
    with mock.patch("jax.lax.fori_loop", functools.partial(python_loop, spent)):
        expected = step(*arguments)
    slow = sum(spent)
    worst = max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), times[0][1], expected))
    )
    assert worst < 1e-2, f"the two ways differ by {worst}"
    return f"| {clients} | {whole:.2f} | {slow:.2f} | {slow / whole:.2f} | {first - whole:.1f} |"


def python_loop(spent: list[float], lower: int, upper: Any, body: Callable, start: Any) -> Any:
    """`jax.lax.fori_loop`, with one compiled call per pass; the seconds without compilation are noted."""
    compiled = jax.jit(body).lower(jnp.int32(0), start).compile()

    def loop() -> Any:
        carry = start
        for i in range(int(lower), int(upper)):
            carry = compiled(jnp.int32(i), carry)
        return carry

    time, result = seconds(loop)
    spent.append(time)
    return result


def server_step(width: int, clients: int) -> tuple[Callable, tuple]:
    """HePCo's server step as a function of arrays, and random ones: the merged model, the clients' models, a
    key."""
    sizes = Sizes(CLASSES, TASKS, CLASSES // TASKS, clients)
    network = Network(lambda key: (), lambda *_: None, width, 12, (8, 8, 3))  # pyrefly: ignore
    adapter = find_adapter("pool").build(PoolOptions(), sizes, network)
    model = learner(network, adapter, linear(width, CLASSES))
    run = Run(sizes, network, adapter, Training(1, 1, 1e-3))
    latent = latent_distillation(HepcoOptions(), run)
    task = jax.tree.map(jnp.asarray, make_tasks(CLASSES, TASKS)[1])
    keys = jax.random.split(jax.random.key(0), clients + 2)
    params = model.init(keys[0], Frozen(()))
    clients_own = [noisy(model, params, task, key) for key in keys[2:]]
    gathered = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients_own)
    past = latent.init(params, model.trainable(params, task))._replace(class_examples=jnp.full(CLASSES, 50.0))
    examples = jnp.tile(jnp.where(task.current, 10, 0), (clients, 1))

    def step(params: Params, gathered: Params, key: jax.Array) -> Params:
        previous = Broadcast(Payload(model.trainable(params, task), {}))
        reports = {"trainable": gathered, "class_examples": examples}
        everyone = (jnp.ones(clients, bool), jnp.arange(clients), jnp.ones(clients))
        frozen = Frozen(())
        index = jnp.int32(0)
        last = jnp.bool_(False)
        round = ServerRound(model, frozen, task, index, last, previous, reports, *everyone, key)
        return latent.update(round, params, past).params

    return step, (params, gathered, keys[1])


def noisy(model: Learner, params: Params, task: Task, key: jax.Array) -> Params:
    """A client's trainable parameters: the merged ones and some noise."""
    leaves, shape = jax.tree.flatten(model.trainable(params, task))
    keys = jax.random.split(key, len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return jax.tree.unflatten(shape, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in pairs])


if __name__ == "__main__":
    main()
