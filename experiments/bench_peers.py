"""fcljax's engine beside plain loops of our own in JAX and torch, on one core.

    python experiments/bench_peers.py --repeats 3
    python experiments/bench_peers.py --profile --only fppl      # where the time of a round goes, by kernels
    python experiments/bench_peers.py --only mlp tiny
    python experiments/bench_peers.py --environments build/peers   # beside FedJAX, pfl-research and torch too

Workloads: a CNN on 50 clients (28 x 28 grey images, 62 classes), an MLP on 200, 5,000 tiny clients, a round
of pfl-research's benchmark on CIFAR-10 (its network without dropout, on random images), FPPL and PILoRA on
a ViT-Ti/16 at 64 px with random weights, training and evaluation, and FedAvg of LoRA pairs on text encoders
with the sizes of text_micro and of MiniLM. All ways of a workload do the same work in float32 and take
turns; compilation is apart. One workload is otherwise: for FPPL's later evaluations a run of ours has kept
the un-prompted features, which all others compute again. Samples are rows that pass through the network,
FPPL's prototype pass included. Ways are compared by their CPU seconds: on a busy machine the clock says
nothing. In torch, FPPL and PILoRA are the papers' algorithms as their releases compute them, without the
gradients that nobody reads, lean, and lean with torch.compile (peers/torch_vit.py). torch is optional.

FedJAX and pfl-research train the dense networks by their own federated averaging, in processes of their own
(peers/outside.py), after a check that they do the same work. FedJAX fills a client's last batch with rows of
its next epoch, which are not counted.

The share of the peak is that of useful FLOPs: matrix products of real rows in the cheapest known form
(peers/prompted.py, useful_flops), over the fastest product that numpy or jax made in the same run.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from peers.pin import one_core


def main() -> None:
    """Measure what was asked for."""
    options = parse(sys.argv[1:])
    one_core(options.core)
    if options.profile:
        print(profile(options), flush=True)
        return
    if options.environments:
        from peers import outside

        outside.prepare(options.environments)
        outside.enter(options.environments)
        for name in outside.served():
            outside.same_work(options.environments, name)
    print(report(options), flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", type=int, default=None, help="the processor's core to run on")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument(
        "--profile", action="store_true", help="our rounds by their kernels, and nothing else"
    )
    parser.add_argument("--environments", type=Path, help="the other libraries' folder, made if missing")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    return parser.parse_args(arguments)


def report(options: argparse.Namespace) -> str:
    """Markdown of everything; what is found meanwhile goes to stderr."""
    from peers import contest, machine

    size = 256 if options.small else 2048
    peaks = [{"numpy": machine.numpy_peak(size), "jax": machine.peak(size)}]
    rows: list[contest.Row] = []
    for name in options.only:
        for workload in WORKLOADS[name](options.small, options.environments):
            rows += contest.measure(workload, options.repeats)
            for row in rows[-len(workload.ways) :]:
                progress = f"{workload.name}, {row.way}: {row.rate:,.0f} samples/CPU s"
                print(progress, file=sys.stderr, flush=True)
    peaks.append({"numpy": machine.numpy_peak(size), "jax": machine.peak(size)})
    said = [f"{name} {before:.0f} and {peaks[1][name]:.0f}" for name, before in peaks[0].items()]
    lines = [
        f"{machine.processor()}, one core; matrix products of {size} x {size} before and after, GFLOP/s: "
        f"{', '.join(said)}"
    ]
    table = contest.table(rows, max(max(each.values()) for each in peaks))
    return "\n\n".join([*lines, table, *contest.left_out(bool(options.environments))])


def profile(options: argparse.Namespace) -> str:
    """Where the time of our rounds goes, a table for each workload."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] += f" --xla_dump_to={folder} --xla_dump_hlo_as_text"
        from peers import game, kernels, machine

        from fcljax.federated.client_loop import Lanes

        lines = [machine.processor()]
        for name in options.only:
            play = game.round_of(game_of(name, options.small), Lanes(1, "loop"))
            lines += [f"{title(name)}:", kernels.profile(play, Path(folder))]
    return "\n\n".join(lines)


def game_of(name: str, small: bool) -> Any:
    """The federation of a workload."""
    from peers import dense, prompted, texts

    sizes = dense_sizes(small)
    if name in sizes:
        return dense.game_of(sizes[name])
    if name in TEXTS:
        return texts.game_of(text_work(name, small))
    return prompted.game_of(prompted_work(name, small))


# ---- workloads ---------------------------------------------------------------------------------------------


def dense_workload(name: str, small: bool, environments: Path | None) -> Iterable[Any]:
    """A whole network that trains."""
    from peers import contest, dense, game

    from fcljax.federated.client_loop import Lanes

    work = dense_sizes(small)[name]
    federation = dense.game_of(work)
    lanes = {"fcljax": Lanes(1, "loop")}
    if len(work.image) == 1:  # side by side, every client's convolution would have kernels of its own
        lanes["fcljax, 8 lanes side by side"] = Lanes(8, "vmap")
    ways: dict[str, Callable[[], Any]] = {
        n: lambda each=each: game.round_of(federation, each) for n, each in lanes.items()
    }
    ways["JAX, a call per step"] = lambda: dense.jax_steps(work, federation)
    if len(work.image) == 1:  # in a loop of XLA's, the gradient of jax's own convolution is 40 times slower
        ways["JAX, a call per client"] = lambda: dense.jax_clients(work, federation)
    if contest.has_torch():
        ways["torch"] = lambda: dense.torch_steps(work, federation)
    others = ()
    if environments:
        from peers import outside

        others = outside.ways(environments, work, federation)
    samples = sum(work.rows) * work.epochs
    return [contest.Workload(title(name), samples, 0, (*made(ways), *others))]


def dense_sizes(small: bool) -> dict[str, Any]:
    """The CNN has the convolutions of the usual one for EMNIST; tiny clients have 1 to 4 steps each."""
    from peers.dense import PFL_CIFAR10, Dense, skewed

    if small:
        return {
            "cnn": Dense((8, 8, 1), (4, 4), (8,), 10, skewed(3, 6, 2), 4),
            "mlp": Dense((16,), (), (8,), 10, skewed(5, 6, 2), 4),
            "tiny": Dense((8,), (), (4,), 4, skewed(20, 3, 1), 4),
            "cifar10": Dense((8, 8, 3), (), (8,), 10, (6,) * 3, 3, rate=0.1, valid=(4, 4)),
        }
    return {
        "cnn": Dense((28, 28, 1), (32, 64), (128,), 62, skewed(50, 40, 5), 20),
        "mlp": Dense((784,), (), (200, 200), 62, skewed(200, 100, 10), 20),
        "tiny": Dense((64,), (), (32,), 10, skewed(5000, 12, 3), 10),
        "cifar10": PFL_CIFAR10,
    }


def prompted_workload(name: str, small: bool, environments: Path | None) -> Iterable[Any]:
    """Training, then evaluation, of a method on a ViT."""
    from peers import contest, game, prompted

    from fcljax.federated.client_loop import Lanes

    work = prompted_work(name, small)
    federation = prompted.game_of(work)
    rows = prompted.rows_seen(work)
    rounds: dict[str, Callable] = {
        "fcljax": lambda: game.round_of(federation, Lanes(1, "loop")),
        "JAX, a call per step": lambda: prompted.jax_steps(work, federation),
    }
    tests: dict[str, Callable] = {
        "fcljax": lambda: prompted.predict_of(work, federation),
        "JAX, a call per step": lambda: prompted.jax_predict(work, federation),
    }
    if contest.has_torch():
        from peers import torch_vit

        for how in torch_vit.WAYS[name]:
            rounds[f"torch, {how}"] = lambda how=how: torch_vit.ROUNDS[name](work, federation, how)
        for how in ("released", "lean", "compiled"):
            tests[f"torch, {how}"] = lambda how=how: torch_vit.PREDICTS[name](work, federation, how)
    train, test = prompted.useful_flops(work)
    yield contest.Workload(title(name), rows, train, made(rounds))
    yield contest.Workload(f"{title(name)}, evaluation", work.test, test, made(tests))
    if name == "fppl":
        tests["fcljax"] = lambda: prompted.predict_of(work, federation, later=True)
        flops = prompted.later_flops(work)
        yield contest.Workload(f"{title(name)}, later evaluation", work.test, flops, made(tests))


def prompted_work(name: str, small: bool) -> Any:
    """Clients of uneven sizes whose rows fill 8 batches in all."""
    import dataclasses

    from peers.prompted import Work

    from fcljax.models.shapes import VITS
    from fcljax.models.vit import ViTConfig

    if small:
        vit = ViTConfig(image_size=16, patch=8, width=16, depth=2, heads=2, mlp=32)
        return Work(name, vit, (6, 2), 4, epochs=1, test=6, blocks=1)
    vit = dataclasses.replace(VITS["vit_ti16"], image_size=64)
    return Work(name, vit, (100, 70, 50, 36), 32)


def text_workload(name: str, small: bool, environments: Path | None) -> Iterable[Any]:
    """Training of LoRA pairs on a text encoder."""
    from peers import contest, game, texts

    from fcljax.federated.client_loop import Lanes

    work = text_work(name, small)
    federation = texts.game_of(work)
    ways = {
        "fcljax": lambda: game.round_of(federation, Lanes(1, "loop")),
        "JAX, a call per step": lambda: texts.jax_steps(work, federation),
    }
    yield contest.Workload(title(name), sum(work.rows) * work.epochs, 0, made(ways))


def text_work(name: str, small: bool) -> Any:
    """The sizes of all-MiniLM-L6-v2 (blocks with their norms in front, as of text_micro), or text_micro's."""
    import dataclasses

    from peers.texts import TextWork

    from fcljax.models.shapes import TextConfig

    encoder = TextConfig()
    if small:
        blocks = dataclasses.replace(encoder.blocks, width=16, depth=2, heads=2, mlp=32)
        return TextWork(TextConfig(30, 8, blocks), (6, 2), 4, epochs=1)
    if name == "text":
        return TextWork(encoder, (400, 280, 200, 144), 32)
    blocks = dataclasses.replace(encoder.blocks, width=384, heads=12, mlp=1536)
    return TextWork(TextConfig(30522, 64, blocks, pooling="mean"), (100, 70, 50, 36), 32)


def made(ways: dict[str, Callable]) -> tuple:
    """Ways by name, as they are measured."""
    from peers import contest

    return tuple(contest.Way(name, contest.here(make)) for name, make in ways.items())


def title(name: str) -> str:
    """Of a workload in the table."""
    return {
        "cnn": "CNN, 50 clients",
        "mlp": "MLP, 200 clients",
        "tiny": "5,000 tiny clients",
        "cifar10": "pfl-research's CIFAR-10",
        "fppl": "FPPL, ViT-Ti/16",
        "pilora": "PILoRA, ViT-Ti/16",
        "text": "LoRA, text_micro",
        "minilm": "LoRA, MiniLM's sizes",
    }[name]


TEXTS = ("text", "minilm")
WORKLOADS: dict[str, Callable[[bool, Path | None], Iterable[Any]]] = {
    "cnn": partial(dense_workload, "cnn"),
    "mlp": partial(dense_workload, "mlp"),
    "tiny": partial(dense_workload, "tiny"),
    "cifar10": partial(dense_workload, "cifar10"),
    "fppl": partial(prompted_workload, "fppl"),
    "pilora": partial(prompted_workload, "pilora"),
    **{name: partial(text_workload, name) for name in TEXTS},
}


if __name__ == "__main__":
    main()
