"""Fed-TaLoRA: one LoRA pair for all tasks, calibrated after aggregation (arXiv
2505.12318).

    client    trains one pair B, A, which all tasks share, and the classifier
    server    averages both factors and the classifier, and adds the error of this to a
              residual of the weights:
                  R <- R + sum_k p_k B_k A_k - (sum_k p_k B_k) (sum_k p_k A_k)

The mean of products is not the product of means. With the residual R the network computes
what the mean of the clients' updates would: W_0 + R + B A = W_0 + R_old + sum_k p_k B_k
A_k. The pair keeps its rank r. R has D^2 parameters for each matrix and is sent to
clients in every round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.federated.rules import weighted_mean
from fcljax.models.products import exact_einsum, exact_matmul
from fcljax.models.vit import Injection, Lora
from fcljax.parts.client import ClientRule, OfEachClient
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, Learner, Params, cross_entropy_loss
from fcljax.parts.server import ServerRound, ServerRule, ServerUpdate
from fcljax.settings import NoOptions, Preset, with_headtune, with_mini
from fcljax.types import ClientContext, Method, Task

_LORA = LoraOptions(lora_pairs="one", lora_lr=1e-3)
PRESETS = with_headtune(
    with_mini({"intended": Preset(NoOptions(), adapters=(_LORA,))}, lr=1e-2, lora_lr=1e-3)
)


class Residual(NamedTuple):
    """R, which is added to the weights of queries and values."""

    query: Float[Array, "blocks D D"]
    value: Float[Array, "blocks D D"]


class Calibrated(NamedTuple):
    """The parameters of the adapter."""

    pairs: PyTree
    """Of LoRA."""
    residual: Residual


def fed_talora(_options: NoOptions, run: Run) -> Method:
    """Compose Fed-TaLoRA."""
    run = run._replace(adapter=calibrated(run.adapter))
    return federate(
        run,
        sends_pair_alone(linear_learner(run)),
        loss=cross_entropy_loss(),
        client_rules=(ClientRule("fixed_residual", project=put_back_residual),),
        server_rules=(ServerRule("calibration", calibrate, reports=(OfEachClient("adapter"),)),),
    )


# ---- the adapter and the client --------------------------------------------------------


def calibrated(lora: Adapter) -> Adapter:
    """Return LoRA on weights to which the residual is added."""

    def init(key: PRNGKeyArray, frozen: PyTree) -> Calibrated:
        pairs: Lora = lora.init(key, frozen)
        _, blocks, _, width = pairs.a_q.shape
        zeros = jnp.zeros((blocks, width, width))
        return Calibrated(pairs, Residual(zeros, zeros))

    def trainable(params: Calibrated, task: Task) -> Calibrated:
        return params._replace(pairs=lora.trainable(params.pairs, task))

    def merge(params: Calibrated, task: Task, trainable: Calibrated) -> Calibrated:
        return trainable._replace(pairs=lora.merge(params.pairs, task, trainable.pairs))

    def cached(params: Calibrated) -> PyTree:
        # the residual changes in every round, so it is part of the payload
        return lora.cached(params.pairs)

    def counted(trainable: Calibrated, _task: Task) -> Lora:
        return trainable.pairs

    def inject(
        cached: PyTree,
        trainable: Calibrated,
        query: PyTree,
        task: Task,
        train: bool,
        mask: Bool[Array, " batch"],
    ) -> Injection:
        assert lora.inject is not None
        pairs = cached
        # in evaluation the cache is the server's parameters
        if isinstance(cached, Calibrated):
            pairs = cached.pairs
        injection: Injection = lora.inject(pairs, trainable.pairs, query, task, train, mask)
        # the residual is a constant at clients: only the server changes it
        residual = jax.lax.stop_gradient(trainable.residual)
        updates = {block: with_residual(pair, residual, block) for block, pair in injection.lora.items()}
        return injection._replace(lora=updates)

    return lora._replace(
        init=init, trainable=trainable, merge=merge, cached=cached, inject=inject, counted=counted
    )


def with_residual(pair: Lora, residual: Residual, block: int) -> Lora:
    """Return B A + R as a pair of rank r + D: `[B, R] [A; I]`.

    The network then needs no second kind of update.
    """
    identity = jnp.eye(pair.a_q.shape[1])
    return Lora(
        jnp.concatenate([pair.a_q, identity]),
        jnp.concatenate([pair.b_q, residual.query[block]], axis=1),
        jnp.concatenate([pair.a_v, identity]),
        jnp.concatenate([pair.b_v, residual.value[block]], axis=1),
    )


def sends_pair_alone(model: Learner) -> Learner:
    """Return the learner whose clients do not send the residual back."""

    def sends(trainable: Params, _task: Task) -> Params:
        # the server knows the residual, which has 2 D^2 scalars per block
        return trainable._replace(adapter=trainable.adapter.pairs)

    return model._replace(sends=sends)


def put_back_residual(context: ClientContext, trainable: Params) -> Params:
    """Put the residual back after a step: weight decay must not change it."""
    received: Calibrated = context.payload.trainable.adapter
    adapter = trainable.adapter._replace(residual=received.residual)
    return trainable._replace(adapter=adapter)


# ---- the server ------------------------------------------------------------------------


def calibrate(round: ServerRound, params: Params, state: tuple) -> ServerUpdate:
    """Merge the pairs to their mean, and add the mean's error to the residual."""
    pairs: Lora = round.reports["adapter"]
    old: Calibrated = round.learner.adapter.trainable(params.adapter, round.task)
    # the residual needs each client's pair, so this rule averages the pairs itself
    mean: Lora = weighted_mean(pairs, round.weights, round.valid)
    difference = Residual(
        missed(pairs.a_q, pairs.b_q, mean.a_q, mean.b_q, round.weights, round.valid),
        missed(pairs.a_v, pairs.b_v, mean.a_v, mean.b_v, round.weights, round.valid),
    )
    new = Calibrated(mean, jax.tree.map(jnp.add, old.residual, difference))
    # without a valid upload the mean is 0, and the adapter must stay
    any_upload = jnp.sum(jnp.where(round.valid, round.weights, 0.0)) > 0
    merged = jax.tree.map(lambda new, old: jnp.where(any_upload, new, old), new, old)
    adapter = round.learner.adapter.merge(params.adapter, round.task, merged)
    return ServerUpdate(params._replace(adapter=adapter), state)


def missed(
    a: Float[Array, "P blocks rank D"],
    b: Float[Array, "P blocks D rank"],
    mean_a: Float[Array, "blocks rank D"],
    mean_b: Float[Array, "blocks D rank"],
    weights: Float[Array, " P"],
    valid: Bool[Array, " P"],
) -> Float[Array, "blocks D D"]:
    """Return sum_k p_k B_k A_k - mean_b mean_a over the valid clients."""
    p = jnp.where(valid, weights, 0.0)
    # `tiny` avoids 0 / 0 without a valid upload
    p = p / jnp.maximum(jnp.sum(p), jnp.finfo(p.dtype).tiny)
    # an invalid upload may be NaN, and 0 times NaN is NaN
    a = jnp.where(valid[:, None, None, None], a, 0.0)
    b = jnp.where(valid[:, None, None, None], b, 0.0)
    return exact_einsum("k,kmdr,kmre->mde", p, b, a) - exact_matmul(mean_b, mean_a)
