"""FOT: federated orthogonal training (Bakman et al., ICLR 2024, arXiv 2309.01289).

    client      trains as in FedAvg
    server      W <- W + dW (I - P), with dW the mean of the clients' updates of a layer and
                P the projection onto the inputs that the layer had in earlier tasks
    task end    clients send sketches X_k Omega_k of the inputs X_k of each layer, with random
                signs Omega_k, and the server adds them to X Omega
                P <- P + the leading left singular vectors of (I - P) X Omega, until P
                explains the share epsilon_t of X Omega       (global principal subspaces)

For inputs x in the range of P, (W + dW (I - P)) x = W x: the new task does not change what
the layer computes for earlier ones. X Omega has, by randomised SVD, the leading left
singular vectors of all clients' inputs X together, and shows the server none of them.

The paper trains all layers of a CNN. Here the layers that train are those of one LoRA pair
for all tasks: A reads tokens x, and B reads A x, whose sketch is A X Omega. The classifier
is not projected: the loss is among the task's classes, as with the paper's head per task.

The release sends P to the clients, which send (I - P) X_k Omega_k and the ratio of norms
before and after. Both are linear in the sums, so here the server does it, and P is not
sent. The ratio is that of squared norms, as for the singular values; the release compares
squares with the norms themselves.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.federated.claims import possible_trace
from fcljax.federated.keys import fold
from fcljax.models.products import exact_einsum
from fcljax.models.vit import Injection, Lora
from fcljax.options import option
from fcljax.parts.client import ClientStep, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, Params, cross_entropy_loss
from fcljax.parts.reports import inputs_of_pairs, longest_inputs
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.subspaces import extend_directions
from fcljax.settings import Preset, with_mini
from fcljax.types import ClientContext, Method, Task, Weighted

Projections = Float[Array, "blocks inputs inputs"]
# factor by which |X Omega|^2 may exceed its mean over the random signs: with 8 columns or
# more an honest client is rejected with a probability below 1e-12
SIGNS = 10.0


@dataclasses.dataclass(frozen=True)
class FOTOptions:
    """Options of FOT; the values are those of the release for Split CIFAR-100."""

    subspace_share: float = option(0.87, positive=True, most=1.0)
    """Fraction epsilon of the inputs' energy that the subspaces explain after the first task."""
    subspace_growth: float = option(0.001, most=1.0)
    """Growth of epsilon with each further task."""
    sketch_columns: int = 5
    """Columns of a sketch, as a multiple of the layer's inputs (the release: 5 for linear
    layers, 1 for convolutions). With fewer, directions seem to explain more than they do."""


_LORA = LoraOptions(lora_pairs="one", lora_lr=1e-3)
PRESETS = with_mini({"intended": Preset(FOTOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=5e-3)


class Protected(NamedTuple):
    """LoRA pairs, and projections onto the inputs that their layers had in earlier tasks."""

    pairs: Lora
    tokens: Projections
    """Of both factors A, which read the same tokens."""
    query: Projections
    """Of B of the queries, which reads A x."""
    value: Projections
    """Of B of the values."""


def fot(options: FOTOptions, run: Run) -> Method:
    """Compose FOT."""
    run = run._replace(adapter=orthogonal_updates(run.adapter))
    return federate(
        run,
        linear_learner(run),
        loss=cross_entropy_loss(),
        server_rules=(principal_subspaces(options),),
    )


def orthogonal_updates(adapter: Adapter) -> Adapter:
    """Return the adapter of one LoRA pair that takes the part of an update that is
    orthogonal to the inputs of earlier tasks."""

    def init(key: PRNGKeyArray, frozen: PyTree) -> Protected:
        pairs: Lora = adapter.init(key, frozen)
        tasks, blocks, rank, width = pairs.a_q.shape
        if tasks > 1:
            # P protects what one pair computes; a new pair would add to all outputs
            raise InputError("lora_pairs: 'task' leaves no pair that later tasks update; nearest: 'one'")
        # no input is protected before the first task ends
        no_projection = jnp.zeros((blocks, rank, rank))
        return Protected(pairs, jnp.zeros((blocks, width, width)), no_projection, no_projection)

    def trainable(params: Protected, task: Task) -> Lora:
        return adapter.trainable(params.pairs, task)

    def merge(params: Protected, task: Task, mean: Lora) -> Protected:
        # the projection is linear: projecting the mean is as good as each client's update
        old: Lora = adapter.trainable(params.pairs, task)
        new = Lora(
            a_q=old.a_q + orthogonal(mean.a_q - old.a_q, params.tokens),
            b_q=old.b_q + orthogonal(mean.b_q - old.b_q, params.query),
            a_v=old.a_v + orthogonal(mean.a_v - old.a_v, params.tokens),
            b_v=old.b_v + orthogonal(mean.b_v - old.b_v, params.value),
        )
        return params._replace(pairs=adapter.merge(params.pairs, task, new))

    def no_cache(_params: Protected) -> tuple:
        return ()

    def inject(_cached: PyTree, pair: Lora, query, task: Task, train: bool, mask) -> Injection:
        # only the trainable pair acts. In evaluation `_cached` has all parameters, with
        # the projections, which the adapter does not know
        assert adapter.inject is not None
        return adapter.inject((), pair, query, task, train, mask)

    return adapter._replace(init=init, trainable=trainable, merge=merge, cached=no_cache, inject=inject)


def orthogonal(
    update: Float[Array, "blocks outputs inputs"], projection: Projections
) -> Float[Array, "blocks outputs inputs"]:
    """Return dW (I - P)."""
    return update - exact_einsum("moi,mij->moj", update, projection)


# ---- the inputs of a task --------------------------------------------------------------


def input_sketch(columns: int) -> Report:
    """Report the sum of x omega^T over all tokens x that a block's pairs read, with random
    signs omega [s] for each token; s is `columns` times the width D."""

    def init(context: ClientContext) -> Float[Array, "blocks D s"]:
        blocks, _, width = context.payload.trainable.adapter.a_q.shape
        return jnp.zeros((blocks, width, columns * width))

    def add(step: ClientStep, total: Float[Array, "blocks D s"]) -> Float[Array, "blocks D s"]:
        x = inputs_of_pairs(step, len(total))
        tokens = x.shape[1] // len(step.batch.mask)

        # keyed by task and example, so that the sum depends neither on the batches nor on
        # the clients' numbers. Examples differ between clients, and so do their signs
        def signs(example: Int[Array, ""]) -> Float[Array, "tokens s"]:
            key = fold(jax.random.key(0), step.context.task.index, example)
            return jax.random.rademacher(key, (tokens, total.shape[2]), jnp.float32)

        omega = rearrange(jax.vmap(signs)(step.batch.index), "batch tokens s -> (batch tokens) s")
        return total + exact_einsum("mnd,ns->mds", x, omega)

    return Report("input_sketch", init, add, merge="sum", possible=possible_sketch)


def possible_sketch(context: ClientContext, sketch: Float[Array, "blocks D s"]) -> Bool[Array, ""]:
    """Check that inputs no longer than the blocks' norms allow can have these sketches.

    The mean of |X Omega|^2 over the signs of s columns is s |X|^2.
    """
    blocks, _, columns = sketch.shape
    examples = jnp.full(blocks, context.client.examples)
    energy = jnp.sum(sketch**2, axis=(1, 2)) / (SIGNS * columns)
    return possible_trace(energy, examples, longest_inputs(context, blocks))


def principal_subspaces(options: FOTOptions) -> ServerRule:
    """Extend the projections by the inputs of the task that ends."""

    def update(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
        sketch = round.reports["input_sketch"]
        protected: Protected = params.adapter
        pair: Lora = round.learner.adapter.trainable(protected, round.task)
        share = options.subspace_share + options.subspace_growth * round.task.index
        # many tasks must not ask for more than all of the inputs' energy
        epsilon = jnp.minimum(share, 1.0)

        def extended(
            projections: Projections,
            sketches: Float[Array, "blocks inputs s"],
        ) -> Projections:
            return jax.vmap(lambda p, y: extend_directions(p, y, epsilon))(projections, sketches)

        protected = protected._replace(
            tokens=extended(protected.tokens, sketch),
            # a sketch is linear in the inputs: that of A x is A times that of x
            query=extended(protected.query, exact_einsum("mri,mis->mrs", pair.a_q, sketch)),
            value=extended(protected.value, exact_einsum("mri,mis->mrs", pair.a_v, sketch)),
        )
        # the trace of a projection is the number of its directions
        used = jnp.mean(jnp.trace(protected.tokens, axis1=1, axis2=2)) / sketch.shape[1]
        metrics = {"used": Weighted(used, jnp.float32(1))}
        return ServerUpdate(params._replace(adapter=protected), state, metrics)

    return ServerRule("subspaces", update, reports=(input_sketch(options.sketch_columns),), when="task_end")
