"""What bench_gpu.py measures, in series; each series is a process of its own and tells what it finds at once.

A process of its own has a peak of memory that is nobody else's, and can be stopped when its time is over.
Nothing here needs a GPU.
"""

import dataclasses
import functools
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fcljax import config
from fcljax.checks.chips import product_flops
from fcljax.data.streaming import Host
from fcljax.federated.client_loop import Lanes
from fcljax.mesh import compiler_options
from fcljax.models.attention_kernel import cudnn_attention
from fcljax.models.products import attention
from fcljax.models.shapes import VITS, AttentionKernel, Dtype
from fcljax.models.vit import ViTConfig, mlp_activation, vit_network
from fcljax.runs.build import build
from fcljax.runs.machine import Machine, kernel_on
from fcljax.runs.programs import programs_of
from peers.contest import has_torch
from peers.dense import PFL_CIFAR10, PFL_CIFAR10_EVERY, PFL_CIFAR10_ROUNDS, dense_logits, weights_of
from peers.dense import game_of as dense_game
from peers.game import Game, round_of
from peers.machine import best, device, peak, processor, profiled, seconds
from peers.prompted import Work, game_of, predict_of, rows_seen, useful_flops

TYPES = ("bfloat16", "float32")
KERNELS = 20  # that a profile names
# of XLA's compiler, for GPUs
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"xla_gpu_autotune_level": 0},
    {"xla_gpu_enable_llvm_module_compilation_parallelism": True},
    {"xla_backend_optimization_level": 1},
    {"xla_gpu_enable_triton_gemm": False},
)
LAYERS = 12  # of attention, one after the other
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # queries, keys, values
Found = dict[str, Any]  # one line of what was found


class Sizes(NamedTuple):
    """How large everything is."""

    vit: ViTConfig
    clients: int
    rows: int  # of each client
    batch: int
    test: int
    lanes: tuple[int, ...]
    square: int  # rows of the matrices whose product is the ceiling
    copied: int  # bytes
    blocks: int  # that have prompts
    repeats: int


FULL = Sizes(VITS["vit_b16"], 10, 128, 128, 1024, (1, 2, 10), 8192, 2**31, 5, 3)  # as the paper's batches
MICRO = ViTConfig(image_size=16, patch=8, width=16, depth=2, heads=2, mlp=32)
SMALL = Sizes(MICRO, 2, 3, 2, 4, (1, 2), 128, 2**20, 1, 1)


def work_of(sizes: Sizes, dtype: Dtype, **network: Any) -> Work:
    """FPPL with one epoch and the prototype pass, and the network of a run but for some fields."""
    kernel = kernel_on(Machine(jax.default_backend()))
    fields: dict[str, Any] = {"dtype": dtype, "kernel": kernel}
    vit = dataclasses.replace(sizes.vit, **fields | network)
    rows = (sizes.rows,) * sizes.clients
    return Work("fppl", vit, rows, sizes.batch, epochs=1, test=sizes.test, blocks=sizes.blocks)


# ---- series ------------------------------------------------------------------------------------------------


def ceilings(sizes: Sizes) -> Iterator[Found]:
    """Matrix products and copies by themselves."""
    yield {"device": device(), "processor": processor(), "jax": jax.__version__}
    named = {
        "bfloat16": ("bfloat16", None),
        "float32, default precision": ("float32", None),
        "float32, highest precision": ("float32", "highest"),
    }
    for name, (dtype, precision) in named.items():
        yield {"ceiling": name, "tflops": peak(sizes.square, 3, dtype, precision) / 1e3}
    host = np.ones(sizes.copied // 4, np.float32)
    twice = 2 * sizes.copied
    there = jax.device_put(host)
    yield {"ceiling": "host to device", "gb_s": sizes.copied / best(lambda: jax.device_put(host), 3) / 1e9}
    # a copy that XLA cannot leave out; it reads and writes
    change = jax.jit(lambda x: x + 1.0)
    taken = best(lambda: change(there), 3)
    yield {"ceiling": "device to device, read and written", "gb_s": twice / taken / 1e9}


def training(sizes: Sizes, dtype: Dtype, mode: Literal["vmap", "loop"]) -> Iterator[Found]:
    """Client images per second by the number of lanes, from few to many: memory is the peak so far. Each
    setting is announced before it begins, so that a stopped process leaves a trace."""
    work = work_of(sizes, dtype)
    game = game_of(work)
    for i, lanes in enumerate(sizes.lanes):
        label = {"training": dtype, "mode": mode, "lanes": lanes}
        yield {"begins": label, "then": [label | {"lanes": more} for more in sizes.lanes[i + 1 :]]}
        yield label | tried(lambda lanes=lanes: rate_of(work, game, Lanes(lanes, mode), sizes.repeats))
        jax.clear_caches()


def with_cudnn(sizes: Sizes) -> Iterator[Found]:
    """The same round as that of `training`'s one lane, with attention by cuDNN."""
    work = work_of(sizes, "bfloat16", kernel=AttentionKernel("cudnn"))
    yield {"cudnn": "bfloat16"} | tried(lambda: rate_of(work, game_of(work), Lanes(1), sizes.repeats))


def gelus(sizes: Sizes) -> Iterator[Found]:
    """GELU by erf and by a polynomial, and the round of `training`'s one lane with each.

    The second round also has norms of two passes."""
    for name, fewer in {"erf": False, "polynomial": True}.items():
        work = work_of(sizes, "bfloat16", fewer_operations=fewer)
        yield {"gelu": name} | tried(lambda work=work: rate_of_gelu(work, sizes.repeats))
        yield {"gelu": f"{name}, a round"} | tried(
            lambda work=work: rate_of(work, game_of(work), Lanes(1), sizes.repeats)
        )


def rate_of_gelu(work: Work, repeats: int) -> Found:
    """Images per second of the activation of one layer's MLP, alone and with its gradient."""
    vit = work.vit
    function = mlp_activation(vit)
    shape = work.batch, 1 + vit.grid**2, vit.mlp
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0))]

    def layer(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    alone = timed(in_a_row(lambda x: (layer(x),), arrays[:1]), repeats)
    with_its_gradient = timed(in_a_row(with_gradient(layer), arrays), repeats)
    images = LAYERS * work.batch
    return with_its_gradient.rates(images) | {"forward_images_s": images / alone.median}


def rate_of(work: Work, game: Game, lanes: Lanes, repeats: int) -> Found:
    """A round's images per second, what it computes, how long it took to compile, and memory."""
    spent = timed(round_of(game, lanes), repeats)
    rows = rows_seen(work)
    flops = useful_flops(work)[0]
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return spent.rates(rows) | {
        "tflops": flops / spent.median / 1e12,
        "compilation_s": round(max(0.0, spent.first - spent.median), 1),
        "peak_gib": None if used is None else round(used / 2**30, 2),
    }


class Spent(NamedTuple):
    """Seconds of the first call, and of the others."""

    first: float
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the others."""
        return statistics.median(self.times)

    def rates(self, images: int) -> Found:
        """Images per second: median and range."""
        return {
            "images_s": images / self.median,
            "lowest": images / max(self.times),
            "highest": images / min(self.times),
        }


def timed(call: Callable[[], Any], repeats: int) -> Spent:
    """A call that compiles, and so many more."""
    first = seconds(call)[0]
    return Spent(first, tuple(seconds(call)[0] for _ in range(repeats)))


def tried(measure: Callable[[], Found]) -> Found:
    """What was found, or why not: a setting that needs too much memory is a result too."""
    try:
        return measure()
    except (RuntimeError, MemoryError, ValueError) as error:  # of the backend, of torch, of shapes not taken
        lines = str(error).splitlines() or [type(error).__name__]
        full = "RESOURCE_EXHAUSTED" in lines[0] or "out of memory" in lines[0].lower()
        return {"failed": "out of memory" if full else lines[0][:200]}


def compilation(sizes: Sizes) -> Iterator[Found]:
    """Seconds to compile the training step that a first run waits for, FPPL's on the embedded digits, by
    options of XLA's compiler: what its kernels, their search and one thread of LLVM cost."""
    del sizes
    method = config.resolve(config.from_mapping("fppl", {"dtype": "bfloat16"}, "bench"))
    (program,) = (each for each in programs_of(build(method)) if each.name == "round 0 phase 0")
    for options in OPTIONS:
        given = compiler_options() | options

        def measure(given: dict[str, Any] = given) -> Found:
            lowered = program.lower()  # anew: jax keeps what it has compiled
            start = time.perf_counter()
            used = time.process_time()
            lowered.compile(given)
            return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - used}

        name = ", ".join(f"{key}={value}" for key, value in options.items())
        yield {"compilation": name or "as a run compiles"} | tried(measure)
        jax.clear_caches()


def evaluation(sizes: Sizes) -> Iterator[Found]:
    """Test images per second, un-prompted features not cached."""
    for dtype in TYPES:
        work = work_of(sizes, dtype)

        def measure(work: Work = work) -> Found:
            spent = timed(predict_of(work, game_of(work)), sizes.repeats)
            return spent.rates(work.test) | {"tflops": useful_flops(work)[1] / spent.median / 1e12}

        yield {"evaluation": dtype} | tried(measure)


def attentions(sizes: Sizes) -> Iterator[Found]:
    """Images per second of one layer's attention, alone and with its gradient, in XLA, in the chip's kernel
    and in cuDNN; and the largest difference between their numbers, over the largest of XLA's."""
    vit = sizes.vit
    batch = sizes.batch
    shape = batch, vit.heads, 1 + vit.grid**2, vit.width // vit.heads
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]
    own = kernel_on(Machine(jax.default_backend())).chip
    ways = {
        "in XLA": attention,
        "one kernel": functools.partial(attention, chip=own),
        "cuDNN": cudnn_attention,
    }
    exact = jax.jit(with_gradient(attention))(*arrays)
    for name, attend in ways.items():

        def measure(attend: Attend = attend) -> Found:
            both = with_gradient(attend)
            found = jax.jit(both)(*arrays)
            forward = timed(
                in_a_row(lambda q, k, v, out: (attend(q, k, v), k, v, out), arrays), sizes.repeats
            )
            spent = timed(in_a_row(both, arrays), sizes.repeats)
            apart = [distance(x, y) for x, y in zip(found, exact, strict=True)]
            alone = LAYERS * batch / forward.median
            return spent.rates(LAYERS * batch) | {"apart": max(apart), "forward_images_s": alone}

        yield {"attention": name} | tried(measure)


def distance(found: jax.Array, exact: jax.Array) -> float:
    """The largest difference over the largest value, not rounded to the arrays' type."""
    found = found.astype(jnp.float32)
    exact = exact.astype(jnp.float32)
    return float(jnp.max(jnp.abs(found - exact)) / jnp.max(jnp.abs(exact)))


def with_gradient(layer: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Of a layer's inputs and the result's gradient: a gradient for each input, and the result."""

    def both(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        *inputs, gradient = arrays
        out, back = jax.vjp(layer, *inputs)
        return (*back(gradient), out)

    return both


def in_a_row(layer: Callable[..., tuple[jax.Array, ...]], arrays: Sequence[jax.Array]) -> Callable[[], Any]:
    """So many layers, each of what the one before it left, so that calling does not count."""
    many = jax.jit(lambda *given: jax.lax.fori_loop(0, LAYERS, lambda i, each: layer(*each), given))
    return lambda: many(*arrays)


def profile(sizes: Sizes) -> Iterator[Found]:
    """Where the device's time goes in a round of one lane: its kernels by their share, those together whose
    names differ by their numbers alone."""
    work = work_of(sizes, "bfloat16")
    play = round_of(game_of(work), Lanes(1, "vmap"))
    seconds(play)
    whole, found = profiled(play)
    spent = time_of_kernels(found)
    busy = sum(spent.values())
    yield {"profile": "all kernels", "s": busy, "round_s": whole}
    for name, each in spent.most_common(KERNELS):
        yield {"profile": name, "s": each, "share": each / busy}


def time_of_kernels(found: jax.profiler.ProfileData) -> Counter[str]:
    """Seconds by the name of a kernel without its numbers; on a CPU, of an instruction."""
    planes = list(found.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    spent: Counter[str] = Counter()
    for plane in devices or planes:
        for line in plane.lines:
            if line.name.startswith("Stream" if devices else "tf_"):
                for event in line.events:
                    spent[re.sub(r"[._]?\d+", "", event.name)] += event.duration_ns / 1e9
    return spent


def streaming(sizes: Sizes) -> Iterator[Found]:
    """Images on the host that are copied in windows while the device works, against resident ones."""
    work = work_of(sizes, "bfloat16")
    game = game_of(work)
    lanes = Lanes(min(4, sizes.clients), "vmap")
    split = jax.tree.map(np.asarray, game.data)
    window = 4 * lanes.count * work.batch
    for name, data in {"resident": game.data, "host": Host(split, window)}.items():

        def measure(data: Any = data) -> Found:
            return timed(round_of(game._replace(data=data), lanes), sizes.repeats).rates(rows_seen(work))

        yield {"streaming": name, "window": window, "lanes": lanes.count} | tried(measure)
    alone = best(lambda: Host(split, window).take(np.arange(len(split.label), dtype=np.int32)), sizes.repeats)
    yield {"streaming": "copies alone", "images_s": len(split.label) / alone}


def torch_loop(sizes: Sizes) -> Iterator[Found]:
    """The authors' algorithm as a plain loop in torch, on its GPU."""
    if not has_torch():
        yield {"torch": "left out: not installed"}
        return
    import torch

    if not torch.cuda.is_available():
        yield {"torch": "left out: torch sees no CUDA device"}
        return
    yield from torch_ways(sizes, "cuda")


def torch_ways(sizes: Sizes, where: str) -> Iterator[Found]:
    """The same on any device of torch's: lean and compiled, lean in two types, without unused
    gradients, and as released."""
    import torch

    from peers import torch_vit

    work = work_of(sizes, "float32")
    game = game_of(work)
    rows = rows_seen(work)
    flops = useful_flops(work)[0]
    settings = (
        ("compiled", "bfloat16"),
        ("lean", "bfloat16"),
        ("lean", "high"),
        ("frozen", "highest"),
        ("released", "highest"),
    )
    for how, precision in settings:
        torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
        half = precision == "bfloat16"

        def measure(how: torch_vit.How = how, half: bool = half) -> Found:
            play = torch_vit.fppl_round(work, game, how, where)

            def once() -> Any:
                with torch.autocast(torch.device(where).type, torch.bfloat16, enabled=half):
                    return play()

            spent = timed(once, sizes.repeats)
            return spent.rates(rows) | {"tflops": flops / spent.median / 1e12}

        name = {"highest": "float32", "high": "float32, TF32 allowed", "bfloat16": "bfloat16"}[precision]
        yield {"torch": how, "type": name} | tried(measure)


def whole_network(sizes: Sizes) -> Iterator[Found]:
    """Training of all weights of the network, by its number format: images per second of a step of SGD."""
    names: dict[Dtype, str] = {"bfloat16": "bfloat16", "tf32": "float32, TF32 allowed", "float32": "float32"}
    for dtype, name in names.items():
        vit = dataclasses.replace(sizes.vit, dtype=dtype, kernel=kernel_on(Machine(jax.default_backend())))
        yield {"whole network": "fedavg-ft", "type": name} | tried(functools.partial(_step_rate, vit, sizes))


def _step_rate(vit: ViTConfig, sizes: Sizes) -> Found:
    """Images per second of a step that trains a network, whose parameters are float32 in every format."""
    network = vit_network(vit)
    params = jax.jit(network.init)(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (sizes.batch, *network.image))

    def loss(params: Any) -> jax.Array:
        return jnp.sum(jnp.square(network.apply(params, image, None, True)[0].cls))

    step = jax.jit(lambda params: jax.tree.map(lambda x, g: x - 1e-6 * g, params, jax.grad(loss)(params)))
    flops = product_flops(jax.make_jaxpr(step)(params).jaxpr)
    spent = timed(lambda: jax.block_until_ready(step(params)), 3 * sizes.repeats)
    return spent.rates(sizes.batch) | {"tflops": flops / spent.median / 1e12}


def pfl_cifar10(sizes: Sizes) -> Iterator[Found]:
    """pfl-research's benchmark on CIFAR-10, on random images: rounds by lanes, and seconds of its 1,500
    rounds with an evaluation of 10,000 images after every tenth."""
    work, test = (PFL_CIFAR10, 10_000) if sizes == FULL else (PFL_CIFAR10._replace(rows=(20, 20)), 20)
    federation = dense_game(work)
    weights = weights_of(federation)
    image = jax.random.normal(jax.random.key(1), (test, *work.image))
    predict = jax.jit(dense_logits)
    evaluation = timed(lambda: jax.block_until_ready(predict(weights, image)), sizes.repeats).median
    evaluations = PFL_CIFAR10_ROUNDS // PFL_CIFAR10_EVERY
    for lanes in sorted({1, min(10, len(work.rows)), len(work.rows)}):

        def measure(lanes: int = lanes) -> Found:
            spent = timed(round_of(federation, Lanes(lanes, "vmap")), sizes.repeats)
            whole = PFL_CIFAR10_ROUNDS * spent.median + evaluations * evaluation
            return spent.rates(sum(work.rows)) | {"round_s": spent.median, "whole_s": whole}

        yield {"pfl-cifar10": f"{lanes} lanes"} | tried(measure)
        jax.clear_caches()


SERIES: dict[str, Callable[[Sizes], Iterator[Found]]] = {
    "ceilings": ceilings,
    "bfloat16 vmap": functools.partial(training, dtype="bfloat16", mode="vmap"),
    "attention": attentions,
    "cudnn": with_cudnn,
    "gelu": gelus,
    "profile": profile,
    "compilation": compilation,
    "evaluation": evaluation,
    "torch": torch_loop,
    "whole network": whole_network,
    "pfl-cifar10": pfl_cifar10,
    "float32 vmap": functools.partial(training, dtype="float32", mode="vmap"),
    "streaming": streaming,
    "bfloat16 loop": functools.partial(training, dtype="bfloat16", mode="loop"),
}


def play_series(name: str, sizes: Sizes, say: Callable[[Found], None]) -> None:
    """Everything that a series finds, as it is found, with the seconds since its start."""
    start = time.perf_counter()
    for found in SERIES[name](sizes):
        say(found | {"at_s": round(time.perf_counter() - start, 1)})
