"""DOLFIN: orthogonal LoRA with a dual gradient projection memory (arXiv 2510.13567).

    task start  clients send the Gram matrices G of what the pairs read, and the server adds them up
                A_t <- the first r left singular vectors of (I - P) G, transposed: directions of the new
                       task's inputs outside those of earlier tasks, which P projects onto
                P   <- P + the next directions of G, until P explains the share epsilon_t of G     (DualGPM)
    client      trains B_t and the classifier, on the network with the pairs of all tasks so far
    server      averages B_t and the classifier

A gradient of W is a sum of outer products with inputs. As the rows of A_t are orthogonal to earlier inputs,
B_t A_t x = 0 for these, whatever B_t: the new task changes nothing of what earlier ones compute, up to the
share 1 - epsilon that P leaves out. All clients share A_t, so the mean of B_t is the mean of their updates.

P takes a task's inputs in before the task trains: one upload of G serves both. In the first block the inputs
are the same afterwards; deeper ones move with the pairs before them.

DualGPM (InfLoRA, CVPR 2024) keeps a basis of P, or of its complement where that has fewer columns. The two
differ in memory alone; here it is P itself, at a fixed shape.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fcljax.adapters.lora import LoraOptions
from fcljax.errors import InputError
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.models.vit import Lora
from fcljax.options import option
from fcljax.parts.client import ClientRule, ClientStep, Report
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Learner, Params, cross_entropy_loss
from fcljax.parts.reports import inputs_of_pairs
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import Preset
from fcljax.types import ClientContext, Method, Task, Weighted

Matrices = Float[Array, "blocks D D"]
NOTHING = 1e-6  # singular values below this share of the Gram matrix's norm are rounding
LENGTH = 3**-0.5  # of A's rows: that of the usual uniform draw (InfLoRA's release)


@dataclasses.dataclass(frozen=True)
class DolfinOptions:
    """Options of DOLFIN; the values are those of InfLoRA's release for CIFAR-100."""

    memory_first: float = option(0.95, positive=True, most=1.0)
    """Fraction epsilon of the inputs' Gram matrix that the memory explains after the
    first task."""
    memory_last: float = option(1.0, positive=True, most=1.0)
    """Fraction epsilon after the last task; it grows by the same step in every task."""


_LORA = LoraOptions(lora_lr=5e-4, lora_rank=10, local_lora="products", global_lora="products")
PRESETS = {"intended": Preset(DolfinOptions(), adapters=(_LORA,))}


def dolfin(options: DolfinOptions, run: Run) -> Method:
    """DOLFIN as a method."""
    return federate(
        run,
        sends_b_alone(linear_learner(run)),
        loss=cross_entropy_loss(),
        client_rules=(ClientRule("fixed_inputs", project=put_back_a),),
        server_rules=(orthogonal_inputs(options, run),),
    )


def sends_b_alone(model: Learner) -> Learner:
    """The learner whose clients do not send A, which all of them share."""

    def sends(trainable: Params, task: Task) -> Params:
        del task
        return trainable._replace(adapter=trainable.adapter._replace(a_q=(), a_v=()))

    def merge(params: Params, task: Task, trainable: Params) -> Params:
        own: Lora = model.trainable(params, task).adapter
        pair = trainable.adapter._replace(a_q=own.a_q, a_v=own.a_v)
        return model.merge(params, task, trainable._replace(adapter=pair))

    return model._replace(sends=sends, merge=merge)


def put_back_a(context: ClientContext, trainable: Params) -> Params:
    """A does not train; it is put back after every step, also against weight decay."""
    shared: Lora = context.payload.trainable.adapter
    return trainable._replace(adapter=trainable.adapter._replace(a_q=shared.a_q, a_v=shared.a_v))


# ---- the inputs of a task ----------------------------------------------------------------------------------


def input_grams() -> Report:
    """The sum of x x^T over all tokens x that a block's pairs read."""

    def init(context: ClientContext) -> Matrices:
        blocks, _, width = context.payload.trainable.adapter.a_q.shape
        return jnp.zeros((blocks, width, width))

    def add(step: ClientStep, total: Matrices) -> Matrices:
        x = inputs_of_pairs(step, len(total))
        return total + exact_einsum("mnd,mne->mde", x, x)

    return Report("input_grams", init, add, merge="sum", possible=possible_gram)


def possible_gram(context: ClientContext, gram: Matrices) -> Bool[Array, ""]:
    """No product is larger than the sums of squares allow (Cauchy and Schwarz)."""
    del context
    squares = jnp.diagonal(gram, 0, 1, 2)
    root = jnp.sqrt(jnp.maximum(squares, 0)) * (1 + 1e-3)  # up to rounding
    return jnp.all(squares >= 0) & jnp.all(jnp.abs(gram) <= root[:, :, None] * root[:, None, :])


def orthogonal_inputs(options: DolfinOptions, run: Run) -> ServerRule:
    """A of the task that begins, and the memory P [blocks, D, D] of what all tasks so far read."""

    def init(params: Params, trainable: Params) -> Matrices:
        del trainable
        tasks, blocks, _, width = params.adapter.a_q.shape
        if tasks != run.sizes.tasks:
            raise InputError("lora_pairs: 'one' has no pair for a new task's inputs; nearest: 'task'")
        return jnp.zeros((blocks, width, width))

    def update(round: ServerRound, params: Params, memory: Matrices) -> ServerUpdate:
        gram = round.reports["input_grams"]
        number = round.task.index
        pairs: Lora = params.adapter
        a = jax.vmap(lambda p, g: new_directions(p, g, pairs.a_q.shape[2]))(memory, gram)
        new = pairs._replace(a_q=pairs.a_q.at[number].set(a), a_v=pairs.a_v.at[number].set(a))
        epsilon = threshold(options, number, run.sizes.tasks)
        memory = jax.vmap(lambda p, g: extend_directions(p, g, epsilon))(memory, gram)
        used = jnp.mean(jnp.trace(memory, axis1=1, axis2=2)) / memory.shape[1]
        metrics = {"used": Weighted(used, jnp.float32(1))}
        return ServerUpdate(params._replace(adapter=new), memory, metrics)

    return ServerRule("memory", update, init, reports=(input_grams(),), when="task_start")


def threshold(options: DolfinOptions, task: Int[Array, ""], tasks: int) -> Float[Array, ""]:
    """epsilon_t, which grows linearly over the tasks."""
    return options.memory_first + (options.memory_last - options.memory_first) * task / tasks


def outside(memory: Float[Array, "D D"], gram: Float[Array, "D D"]) -> tuple[Array, Array]:
    """Left singular vectors [D, D] and singular values [D] of (I - P) G."""
    left, values, _ = jnp.linalg.svd(gram - exact_matmul(memory, gram))
    return left, values


def new_directions(
    memory: Float[Array, "D D"], gram: Float[Array, "D D"], rank: int
) -> Float[Array, "rank D"]:
    """A_t; rows of 0 where the memory leaves fewer directions than the rank."""
    left, values = outside(memory, gram)
    real = values[:rank] > NOTHING * jnp.linalg.norm(gram)
    return LENGTH * jnp.where(real[:, None], left[:, :rank].T, 0.0)


def extend_directions(
    memory: Float[Array, "D D"], gram: Float[Array, "D D"], epsilon: Float[Array, ""]
) -> Float[Array, "D D"]:
    """P with the fewest directions of (I - P) G that make it explain the share epsilon of G's squares."""
    left, values = outside(memory, gram)
    total = jnp.maximum(jnp.sum(gram**2), jnp.finfo(gram.dtype).tiny)
    energy = values**2 / total
    explained = 1 - jnp.sum(energy) + jnp.cumsum(energy) - energy  # before each direction joins
    joins = (explained < epsilon) & (values > NOTHING * jnp.sqrt(total))
    new = memory + exact_matmul(jnp.where(joins, left, 0.0), left.T)
    values, vectors = jnp.linalg.eigh((new + new.T) / 2)  # a projection up to rounding: made one again
    return exact_matmul(jnp.where(values > 0.5, vectors, 0.0), vectors.T)
