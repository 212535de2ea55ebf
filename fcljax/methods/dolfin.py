"""DOLFIN: orthogonal LoRA with a dual gradient projection memory (arXiv 2510.13567).

    task start  clients send the Gram matrices G of the pairs' inputs, and the server adds them
                A_t <- the first r left singular vectors of (I - P) G, transposed: directions
                       of the new task's inputs outside those of earlier tasks, onto which P
                       projects
                P   <- P + the next directions of G, until P explains the share epsilon_t
                       of G                                                      (DualGPM)
    client      trains B_t and the classifier on the network with the pairs of all tasks so far
    server      averages B_t and the classifier

A gradient of W is a sum of outer products with inputs. As the rows of A_t are orthogonal
to earlier inputs x, B_t A_t x = 0 whatever B_t: the new task does not change what earlier
ones compute, up to the share 1 - epsilon that P leaves out. All clients share A_t, so the
mean of B_t is the mean of their updates.

P learns a task's inputs before the task trains, so that one upload of G serves both.
In the first block the inputs are the same afterwards; in deeper ones they move with
the pairs before.

DualGPM (InfLoRA, CVPR 2024) keeps a basis of P, or of its complement where that has fewer
columns. The two differ in memory alone; here it is P itself, at a fixed shape.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.gram import no_pair_grams, pair_grams, possible_inputs
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.parts.subspaces import ROUNDING, extend_directions, outside
from fcljax.settings import Preset, with_headtune, with_mini
from fcljax.types import ClientContext, Method, Task, Weighted

Matrices = Float[Array, "blocks D D"]
# norm of each row of A, as in InfLoRA's release: that of the usual uniform draw of LoRA's A
ROW_LENGTH = 3**-0.5


@dataclasses.dataclass(frozen=True)
class DolfinOptions:
    """Options of DOLFIN; the values are those of InfLoRA's release for CIFAR-100."""

    memory_first: float = option(0.95, positive=True, most=1.0)
    """Fraction epsilon of the inputs' Gram matrix that the memory explains after the
    first task."""
    memory_last: float = option(1.0, positive=True, most=1.0)
    """Fraction epsilon that a task after the last would have: epsilon grows by the same
    step in every task, a T-th of the difference."""


_LORA = LoraOptions(lora_lr=5e-4, lora_rank=10, local_lora="products", global_lora="products")
PRESETS = with_headtune(
    with_mini({"intended": Preset(DolfinOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=5e-3)
)


def dolfin(options: DolfinOptions, run: Run) -> Method:
    """Compose DOLFIN."""
    return federate(
        run,
        sends_b_alone(linear_learner(run)),
        loss=cross_entropy_loss(),
        client_rules=(ClientRule("fixed_inputs", project=put_back_a),),
        server_rules=(orthogonal_inputs(options, run),),
    )


def sends_b_alone(model: Learner) -> Learner:
    """Return the learner whose clients send B without A, which all of them share."""

    def sends(trainable: Params, _task: Task) -> Params:
        # 2 r D fewer scalars per block: the upload is B and the classifier
        return trainable._replace(adapter=trainable.adapter._replace(a_q=(), a_v=()))

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        shared: Lora = model.trainable(params, task).adapter
        pair = trainable.adapter._replace(a_q=shared.a_q, a_v=shared.a_v)
        return model.merge(params, task, trainable._replace(adapter=pair))

    return model._replace(sends=sends, merge=merge)


def put_back_a(context: ClientContext, trainable: Params) -> Params:
    """Put A back after a step: neither the gradient nor weight decay may change it."""
    shared: Lora = context.payload.trainable.adapter
    pair = trainable.adapter._replace(a_q=shared.a_q, a_v=shared.a_v)
    return trainable._replace(adapter=pair)


# ---- the inputs of a task --------------------------------------------------------------


def input_grams() -> Report:
    """Report the sum of x x^T over all tokens x that a block's pairs read."""

    def add(step: ClientStep, total: Matrices) -> Matrices:
        return total + pair_grams(step, len(total))

    return Report("input_grams", no_pair_grams, add, merge="sum", possible=possible_inputs)


def orthogonal_inputs(options: DolfinOptions, run: Run) -> ServerRule:
    """Choose A of the new task, and extend the memory P [blocks, D, D] by its inputs."""

    def init(params: Params, _trainable: Params) -> Matrices:
        tasks, blocks, _, width = params.adapter.a_q.shape
        if tasks != run.sizes.tasks:
            # one pair for all tasks would overwrite the directions of the earlier ones
            raise InputError("lora_pairs: 'one' has no separate pair for a new task; nearest: 'task'")
        return jnp.zeros((blocks, width, width))

    def update(round: ServerRound, params: Params, memory: Matrices) -> ServerUpdate:
        gram = round.reports["input_grams"]
        task = round.task.index
        pairs: Lora = params.adapter
        rank = pairs.a_q.shape[2]
        # from the memory of the earlier tasks: this task's inputs join it below, and
        # would leave A no directions
        a = jax.vmap(lambda p, g: new_directions(p, g, rank))(memory, gram)
        # queries and values read the same inputs, so both pairs get the same A
        pairs = pairs._replace(a_q=pairs.a_q.at[task].set(a), a_v=pairs.a_v.at[task].set(a))
        epsilon = threshold(options, task, run.sizes.tasks)
        memory = jax.vmap(lambda p, g: extend_directions(p, g, epsilon))(memory, gram)
        # the trace of a projection is the number of its directions
        used = jnp.mean(jnp.trace(memory, axis1=1, axis2=2)) / memory.shape[1]
        metrics = {"used": Weighted(used, jnp.float32(1))}
        return ServerUpdate(params._replace(adapter=pairs), memory, metrics)

    return ServerRule("memory", update, init, reports=(input_grams(),), when="task_start")


def threshold(
    options: DolfinOptions,
    task: Int[Array, ""],
    tasks: int,
) -> Float[Array, ""]:
    """Return epsilon_t, which grows linearly over the tasks."""
    # divided by T, not T - 1, as in InfLoRA's release: the last task stays a step below
    growth = options.memory_last - options.memory_first
    return options.memory_first + growth * task / tasks


def new_directions(
    memory: Float[Array, "D D"], gram: Float[Array, "D D"], rank: int
) -> Float[Array, "rank D"]:
    """Return A_t, with rows of 0 if the memory leaves fewer directions than the rank."""
    vectors, values = outside(memory, gram)
    # singular vectors of value 0 are arbitrary, and may lie in the range of P
    exists = values[:rank] > ROUNDING * jnp.linalg.norm(gram)
    return ROW_LENGTH * jnp.where(exists[:, None], vectors[:, :rank].T, 0.0)
