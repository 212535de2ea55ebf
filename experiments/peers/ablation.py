"""What stands between FPPL's round and the peak of matrix products, part by part.

Each part is what a round takes less without it: clients whose batches are all full, images as they are, the
network without norms, softmax or GELU (whose results are then wrong, and their time is all that counts), and
the same steps, of the same sizes, called one by one without the engine. What is left are the matrix products,
which are timed one by one at their shapes.
"""

import collections
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fcljax.federated.client_loop import Lanes
from fcljax.models.vit import ViTConfig
from fcljax.types import Batch, ClientContext, ClientInfo, Phase, RoundContext
from peers.game import KEY, Game, capacities_of, round_of
from peers.machine import best, seconds
from peers.prompted import CLASSES, PROMPTS, TASK_CLASSES, Work, game_of, useful_flops

WITHOUT: dict[str, tuple[str, Any]] = {
    "layer norms": ("fcljax.models.vit._norm", lambda config, name: lambda x: x),
    "softmax": ("jax.nn.softmax", lambda x, axis=-1: 0.05 * x),
    "GELU": ("flax.linen.gelu", lambda x, approximate=False: x),
}


class Part(NamedTuple):
    """A part of a round, in seconds."""

    name: str
    seconds: float


def profile(work: Work, lanes: Lanes, peak: float, repeats: int) -> str:
    """Markdown of all parts of a round of FPPL; `peak` in GFLOP/s."""
    game = game_of(work)
    taken = medians(variants(work, game, lanes), repeats)
    whole, still = taken["whole"], taken["without augmentation"]
    products = products_alone(work)
    useful = useful_flops(work)[0] / peak / 1e9
    partial = whole - taken["without partial batches"]
    parts = [
        Part("useful matrix products, at the peak", useful),
        Part(f"last batches of fewer rows ({padded_rows(game):.1%} of all rows are padding)", partial),
        Part("augmentation", whole - still),
        *(Part(name, whole - taken[f"without {name}"]) for name in WITHOUT),
        Part("engine: loop, tables, reading rows, receiving", still - taken["steps alone"]),
        Part("matrix products below the peak at their shapes", products - useful),
    ]
    rest = whole - sum(part.seconds for part in parts)
    return markdown([*parts, Part("rest: losses, Adam, memory between products", rest)], whole, useful)


def markdown(parts: list[Part], whole: float, useful: float) -> str:
    """A table of the parts, and what the round reaches."""
    lines = ["| part of FPPL's round | ms | share |", "|---|---|---|"]
    lines += [f"| {part.name} | {1e3 * part.seconds:.0f} | {part.seconds / whole:.1%} |" for part in parts]
    lines.append(f"| whole round | {1e3 * whole:.0f} | 100 % |")
    verdict = f"Useful work at {useful / whole:.0%} of the peak; at 80 % the round would take "
    return "\n".join([*lines, "", f"{verdict}{1e3 * useful / 0.8:.0f} ms."])


def variants(work: Work, game: Game, lanes: Lanes) -> dict[str, Callable[[], Any]]:
    """Name -> a call that plays a round, compiled."""
    calls = {"whole": round_of(game, lanes)}
    calls["without partial batches"] = round_of(game_of(work._replace(rows=even_rows(work))), lanes)
    calls["without augmentation"] = round_of(game_of(work._replace(augment=False)), lanes)
    for name, (target, cheap) in WITHOUT.items():
        calls[f"without {name}"] = round_of(game, lanes)
        with mock.patch(target, cheap):
            seconds(calls[f"without {name}"])  # it is traced here, and never again
    calls["steps alone"] = steps_alone(work, game)
    return calls


def even_rows(work: Work) -> tuple[int, ...]:
    """As many rows for as many clients, in full batches as far as they go."""
    full = sum(work.rows) // work.batch
    if full * work.batch != sum(work.rows) or full < len(work.rows):
        raise ValueError(f"rows: {sum(work.rows)} are no {len(work.rows)} clients of full batches")
    each, more = divmod(full, len(work.rows))
    return tuple(work.batch * (each + (i < more)) for i in range(len(work.rows)))


def medians(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Seconds of each, called in turn."""
    for call in calls.values():
        seconds(call)
    times = [{name: seconds(call)[0] for name, call in calls.items()} for _ in range(repeats)]
    return {name: statistics.median(each[name] for each in times) for name in calls}


def step_sizes(game: Game) -> list[list[int]]:
    """The rows that each step of a round is computed for, by phase."""
    phases = game.method.rounds[0].program.phases
    sizes = []
    for phase, widths in zip(phases, capacities_of(game, 1)[0].widths, strict=True):
        size, found = phase.view.batch_size, []
        for count in game.partition.count.tolist():
            last = next(width for width in widths if width >= (count - 1) % size + 1)
            found += phase.view.epochs * [*[size] * ((count - 1) // size), last]
        sizes.append(found)
    return sizes


def padded_rows(game: Game) -> float:
    """The share of a round's rows that are padding."""
    phases = game.method.rounds[0].program.phases
    real = int(np.sum(game.partition.count)) * sum(phase.view.epochs for phase in phases)
    return 1 - real / sum(map(sum, step_sizes(game)))


def steps_alone(work: Work, game: Game) -> Callable[[], Any]:
    """A call that takes the steps of a round, of the sizes that the engine gives them, on two batches in
    turn, in bare loops of one program. (A call for each step would be slower than the engine: each call takes
    new memory for what lies between its products. Of one batch XLA would compute once what no step
    changes.)"""
    task, program = game.task, game.method.rounds[0].program
    sent = game.method.broadcast(RoundContext.on_host(game.frozen, task, 0, False), game.server)
    info = ClientInfo(jnp.int32(0), jnp.int32(work.batch), jnp.ones(CLASSES, jnp.int32), jnp.int32(0))
    context, ids = (
        ClientContext(game.frozen, sent.payload, sent.cached, task, info),
        jnp.arange(work.batch, dtype=jnp.int32),
    )
    size = work.vit.image_size
    image = jax.random.uniform(KEY, (2, work.batch, size, size, 3))
    batch = Batch(image, TASK_CLASSES + ids % TASK_CLASSES, ids >= 0, ids)
    start = program.start(context, game.method.init_client(KEY, game.server), KEY)
    counts = [collections.Counter(sizes) for sizes in step_sizes(game)]

    @jax.jit
    def play(context: ClientContext, local: Any, batch: Batch, times: list[dict[int, Any]]) -> Any:
        for phase, mine in zip(program.phases, times, strict=True):
            for rows, many in mine.items():

                def step(i: Array, local: Any, phase: Phase = phase, rows: int = rows) -> Any:
                    own = batch._replace(image=batch.image[i % 2])
                    return phase.step(context, local, jax.tree.map(lambda x: x[:rows], own), KEY)[0]

                local = jax.lax.fori_loop(0, many, step, local)  # many is data: nothing is unrolled
        return local

    return lambda: play(context, start, batch, [dict(count) for count in counts])


def shapes(vit: ViTConfig, batch: int, prompts: int, blocks: int) -> list[tuple[int, int, int, int]]:
    """(how many, rows, inner, columns) of one forward pass's products of matrices; attention is apart."""
    tokens, d = 1 + vit.grid**2, vit.width
    found = [(1, batch * vit.grid**2, vit.patch**2 * 3, d)]
    for i in range(vit.depth):
        queries = 1 if i == vit.depth - 1 else tokens
        own = batch * queries
        found += [(1, own, d, d), (1, batch * tokens, d, 2 * d), (1, own, d, d)]
        found += [(1, batch * prompts, d, 2 * d)] if i < blocks and prompts else []
        found += [(1, own, d, vit.mlp), (1, own, vit.mlp, d)]
    return found


def attention_shapes(vit: ViTConfig, prompts: int, blocks: int) -> list[tuple[int, int]]:
    """(queries, keys) of each block."""
    tokens = 1 + vit.grid**2
    pairs = [(tokens, tokens + (prompts if i < blocks else 0)) for i in range(vit.depth)]
    return [*pairs[:-1], (1, pairs[-1][1])]


def products_alone(work: Work) -> float:
    """Seconds that the matrix products of a round's real rows take by themselves, at their shapes."""
    vit, batch, spent = work.vit, work.batch, {}

    def dense(rows: int, inner: int, columns: int) -> float:
        a, b = jnp.ones((rows, inner)), jnp.ones((inner, columns))
        return best(lambda: _matmul(a, b), 5)

    def attend(queries: int, keys: int) -> float:
        head = vit.width // vit.heads
        a = jnp.ones((batch, vit.heads, queries, head))
        b = jnp.ones((batch, vit.heads, head, keys))
        return 2 * best(lambda: _matmul(a, b), 5)

    def of(function: Callable, *shape: int) -> float:
        name = (function.__name__, *shape)
        if name not in spent:
            spent[name] = function(*shape)
        return spent[name]

    def forward(prompts: int) -> float:
        attention = sum(of(attend, *pair) for pair in attention_shapes(vit, prompts, work.blocks))
        products = shapes(vit, batch, prompts, work.blocks)
        return attention + sum(n * of(dense, *shape) for n, *shape in products)

    def backward() -> float:
        attention = 2 * sum(of(attend, *pair) for pair in attention_shapes(vit, PROMPTS, work.blocks))
        back = shapes(vit, batch, PROMPTS, work.blocks)[3:]  # not of the pixels, nor to the first tokens
        return attention + sum(n * of(dense, rows, to, inner) for n, rows, inner, to in back)

    steps = sum(work.rows) / batch
    both = forward(0) + forward(PROMPTS)
    return steps * (work.epochs * (both + backward()) + both)


_matmul = jax.jit(jnp.matmul)
