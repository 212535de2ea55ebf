"""What a Bayesian network costs: VFCL's training step against plain descent on the same network, by number of
draws, and a checkpoint of clients that keep posteriors.

    python experiments/bench_bayesian.py step --backbone resnet18 --batch 32
    python experiments/bench_bayesian.py checkpoint --backbone resnet18 --clients 10

Steps are those of `fcljax run`, of random images, compiled once and timed in turn; the median of `--repeats`
of each. A line per measurement, with the processor and the peak of its matrix products in the same run.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from peers.machine import peak, processor, seconds

from fcljax.adapters.full import FullOptions, full
from fcljax.data.tasks import make_tasks
from fcljax.methods.vfcl.vfcl import VFCLOptions, vfcl
from fcljax.models.networks import CONVNETS, make_network
from fcljax.models.shapes import ConvNeXtConfig
from fcljax.parts.client import Training
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import cross_entropy_loss
from fcljax.runs import checkpoint
from fcljax.types import Batch, ClientContext, ClientInfo, Frozen, Method, RoundContext, Sizes

# networks with a first layer for small images
STEMS = [name for name, convnet in CONVNETS.items() if not isinstance(convnet, ConvNeXtConfig)]
CLASSES = 100
TASKS = 10
ROWS = 500
SIZES = Sizes(CLASSES, TASKS, CLASSES // TASKS, 1, rounds=10, examples=ROWS)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "checkpoint"))
    parser.add_argument("--backbone", choices=STEMS, default="resnet18")
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels; the stem is CIFAR's")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{processor()}, {jax.devices()[0].device_kind}, matrix products {peak():.0f} GFLOP/s")
    print(f"{options.backbone}, {options.side} x {options.side} pixels")
    run = run_of(options.backbone, options.side, options.batch)
    if options.what == "step":
        steps(run, options.side, options.batch, options.draws, options.repeats)
    else:
        checkpoints(run, options.clients)


def run_of(backbone: str, side: int, batch: int) -> Run:
    """The network as a run has it, all of which trains."""
    convnet = CONVNETS[backbone]
    assert not isinstance(convnet, ConvNeXtConfig), backbone
    config = dataclasses.replace(convnet, image_size=side, stem="cifar")
    network = make_network(config, (0.0,) * 3, (1.0,) * 3)
    adapter = full(FullOptions(0.01), SIZES, network)
    return Run(SIZES, network, adapter, Training(1, batch, 0.01, optax.identity()))


def vfcl_of(run: Run, draws: int) -> Method:
    """VFCL without exemplars: what examples it replays is no cost of its posteriors."""
    return vfcl(VFCLOptions(mc_samples=draws, merge="tempered", exemplars=0), run)


def client(method: Method, run: Run) -> tuple[ClientContext, tuple, tuple]:
    """A client that begins its second task: what it may read, its state, and what it works with."""
    frozen = Frozen(run.network.init(jax.random.key(0)))
    key = jax.random.key(1)
    server = jax.jit(method.init)(key, frozen)
    task = jax.tree.map(jnp.asarray, make_tasks(CLASSES, TASKS)[1])
    sent = method.broadcast(RoundContext.on_host(frozen, task, 0, False), server)
    info = ClientInfo(jnp.int32(0), jnp.int32(ROWS), jnp.full(CLASSES, ROWS // CLASSES), jnp.int32(0))
    context = ClientContext(frozen, sent.payload, sent.cached, task, info)
    state = method.init_client(key, server)
    return context, state, jax.jit(method.rounds[0].program.start)(context, state, key)


def steps(run: Run, side: int, batch: int, draws: list[int], repeats: int) -> None:
    """Plain descent, then VFCL with each number of draws, side by side."""
    plain = federate(run, linear_learner(run), loss=cross_entropy_loss())
    ways: dict[str, Method] = {"plain": plain} | {f"{n} draws": vfcl_of(run, n) for n in draws}
    image = jax.random.normal(jax.random.key(2), (batch, side, side, 3))
    ids = jnp.arange(batch, dtype=jnp.int32)
    rows = Batch(image, 10 + ids % 10, ids >= 0, ids)
    calls = {}
    for name, method in ways.items():
        context, _, local = client(method, run)
        start = time.perf_counter()
        step = (
            jax.jit(method.rounds[0].program.phases[0].step)
            .lower(context, local, rows, jax.random.key(3))
            .compile()
        )
        calls[name] = caller(step, context, local, rows), time.perf_counter() - start
    times = [{name: seconds(call)[0] for name, (call, _) in calls.items()} for _ in range(repeats)]
    medians = {name: statistics.median(each[name] for each in times) for name in calls}
    print("| step | seconds | times plain | compilation, s |\n|---|---|---|---|")
    for name, median in medians.items():
        print(
            f"| {name} | {median:.3f} | {median / medians['plain']:.2f} | {calls[name][1]:.0f} |", flush=True
        )


def caller(step: Callable, *arguments: object) -> Callable:
    """The call of one step, always from the same client."""
    return lambda: step(*arguments, jax.random.key(3))


def checkpoints(run: Run, clients: int) -> None:
    """A run's state with so many clients, written and read."""
    context, state, _ = client(vfcl_of(run, 1), run)
    everyone = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * clients), state)
    whole = checkpoint.State(context.payload.trainable, everyone, jax.random.key_data(jax.random.key(0)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(whole))
    with tempfile.TemporaryDirectory() as folder, checkpoint.open_checkpoints(Path(folder), 1) as manager:
        start = time.perf_counter()
        checkpoint.save(manager, checkpoint.Snapshot(1, whole, {}))
        checkpoint.finish(manager)
        written = time.perf_counter() - start
        start = time.perf_counter()
        checkpoint.latest(manager, whole)
        read = time.perf_counter() - start
    print(f"{clients} clients, {size / 1e6:,.0f} MB: written in {written:.1f} s, read in {read:.1f} s")


if __name__ == "__main__":
    main()
