"""L2P: prompts of a pool are chosen by their keys and go through the whole network (Wang
et al., CVPR 2022), as in pMAE's release.

The prompts stand between class token and patches, all with the class token's position
embedding; the classifier reads the mean of their outputs. In the paper each image gets
the prompts with the nearest keys. In the release each image votes for its nearest keys,
and all images of a batch get the prompts with the most votes. By default batches vote
only in training, so that neither a prediction nor what clients measure depends on the
other images of a batch. Padding has no vote. A server that trains chooses as in evaluation.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.models.heads import cosine, reduce_rows
from fcljax.models.vit import Injection
from fcljax.parts.learner import Adapter
from fcljax.types import Features, Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class L2POptions:
    """Options of the adapter `l2p`; the values are those of pMAE's release."""

    l2p_size: int = 10
    """Number of prompts in the pool."""
    l2p_length: int = 5
    """Tokens of a prompt."""
    l2p_top_k: int = 5
    """Number of prompts chosen for an image."""
    l2p_key_weight: float = 0.1
    """Weight of the cosine similarity of the chosen keys and the query."""
    l2p_train_batchwise: bool = True
    """Train a batch with the same prompts, those with the most votes."""
    l2p_eval_batchwise: bool = False
    """Evaluate a batch with the same prompts. Predictions then depend on the batch."""


PRESETS = {
    "intended": L2POptions(),
    "paper": L2POptions(l2p_train_batchwise=False),
    "released": L2POptions(l2p_eval_batchwise=True),
}


class KeyedPrompts(NamedTuple):
    """Prompts and their keys. All of them train in every task."""

    prompt: Float[Array, "size length width"]
    key: Float[Array, "size width"]


def l2p(options: L2POptions, _sizes: Sizes, network: Network) -> Adapter:
    """Return L2P's adapter for a ViT; its pool is the same for all tasks.

    Raises:
      InputError: for a choice of more prompts than there are.
    """
    if options.l2p_top_k > options.l2p_size:
        raise InputError(
            f"l2p_top_k: {options.l2p_top_k} of a pool of {options.l2p_size}; nearest: {options.l2p_size}"
        )

    def init(key: PRNGKeyArray, _frozen) -> KeyedPrompts:
        size = options.l2p_size
        prompt_key, key_key = jax.random.split(key)
        prompt = uniform(prompt_key, (size, options.l2p_length, network.width))
        return KeyedPrompts(prompt, uniform(key_key, (size, network.width)))

    def choose(trainable: KeyedPrompts, query: Array, train: bool, mask: Array) -> Int[Array, "batch top_k"]:
        batchwise = options.l2p_eval_batchwise
        if train:
            batchwise = options.l2p_train_batchwise
        score = cosine(query, trainable.key)
        return choose_prompts(score, mask, options.l2p_top_k, batchwise)

    def tokens(
        trainable: KeyedPrompts, query: Array, train: bool, mask: Array
    ) -> Float[Array, "batch tokens width"]:
        prompts = trainable.prompt[choose(trainable, query, train, mask)]
        return prompts.reshape(len(query), -1, network.width)

    def prompt(
        _cached, trainable: KeyedPrompts, query: Array, _task: Task
    ) -> Float[Array, "batch tokens width"]:
        # for servers that distil prompts: their latents have no padding
        no_padding = jnp.ones(len(query), bool)
        return tokens(trainable, query, False, no_padding)

    def inject(
        _cached, trainable: KeyedPrompts, query: Array, _task: Task, train: bool, mask: Array
    ) -> Injection:
        return Injection(tokens=tokens(trainable, query, train, mask))

    def loss(
        _cached: tuple, trainable: KeyedPrompts, query: Array, _task: Task, mask: Array
    ) -> Float[Array, ""]:
        # the same choice as in `inject`, whose prompts this step trains
        index = choose(trainable, query, True, mask)
        similarity = key_similarity(trainable.key, query, index, mask)
        return -options.l2p_key_weight * similarity

    batchwise = ()
    if options.l2p_eval_batchwise:
        batchwise = ("l2p_eval_batchwise",)
    return Adapter(
        init,
        inject=inject,
        prompt=prompt,
        loss=loss,
        feature=mean_of_prompts,
        truncated=True,
        queries=True,
        batchwise=batchwise,
        train_batchwise=options.l2p_train_batchwise and not options.l2p_eval_batchwise,
    )


def uniform(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Return initial values of prompts or keys, uniform in [-1, 1]."""
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)


def mean_of_prompts(features: Features) -> Float[Array, "batch width"]:
    """Return the classifier's input, the mean over the prompts' outputs."""
    if features.prompts is None:
        raise InputError("l2p: the network gives back no injected tokens; it works on a vision transformer")
    return features.prompts.mean(axis=1)


def choose_prompts(
    score: Float[Array, "batch size"],
    mask: Bool[Array, " batch"],
    count: int,
    batchwise: bool,
) -> Int[Array, "batch count"]:
    """Choose the prompts with the highest scores, or with the most votes of the batch.

    Among prompts with equally many votes the one with the lower index wins.
    """
    nearest = jax.lax.top_k(score, count)[1]
    if not batchwise:
        return nearest
    ballots = jax.nn.one_hot(nearest, score.shape[1]) * mask[:, None, None]
    votes = jnp.sum(ballots, axis=(0, 1))
    # votes are small integers and often tie: `top_k` then takes the lower index
    return jnp.broadcast_to(jax.lax.top_k(votes, count)[1], nearest.shape)


def key_similarity(
    key: Float[Array, "size width"],
    query: Float[Array, "batch width"],
    index: Int[Array, "batch count"],
    mask: Bool[Array, " batch"],
) -> Float[Array, ""]:
    """Return the mean over examples of the summed cosines of query and chosen keys."""
    similarity = jnp.take_along_axis(cosine(query, key), index, axis=1)
    return reduce_rows(jnp.sum(similarity, axis=1), mask, jnp.sum(mask), "mean")
