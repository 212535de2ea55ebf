"""Deep visual prompts: separate tokens in every block, the same for all images and tasks
(Jia et al., ECCV 2022; the discriminative prompts of pMAE, section IV-A).

They join a block's input and are dropped after it. They do not depend on the image, so
there is no query.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fcljax.adapters.prompts import prompt_injection
from fcljax.models.vit import Injection, check_blocks
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task


@dataclasses.dataclass(frozen=True)
class VPTOptions:
    """Options of the adapter `vpt`; the values are pMAE's."""

    vpt_length: int = 20
    """Prompt tokens per block."""
    vpt_blocks: int = 5
    """Number of blocks with prompts, counted from the first."""


Prompts = Float[Array, "blocks length width"]


def vpt(options: VPTOptions, _sizes: Sizes, network: Network) -> Adapter:
    """Return the adapter of deep visual prompts in a ViT.

    Raises:
      InputError: for more blocks with prompts than the network has.
    """
    check_blocks("vpt_blocks", options.vpt_blocks, network)
    shape = (options.vpt_blocks, options.vpt_length, network.width)

    def init(key: PRNGKeyArray, _frozen) -> Prompts:
        return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)

    # [1, ...] broadcasts over the batch: all images get the same prompts
    def inject(_cached, trainable: Prompts, _query, _task: Task, _train: bool, _mask: Array) -> Injection:
        return prompt_injection(trainable[None])

    def prompt(
        _cached, trainable: Prompts, query: Array, _task: Task
    ) -> Float[Array, "batch blocks length width"]:
        return jnp.broadcast_to(trainable, (len(query), *shape))

    return Adapter(init, inject=inject, prompt=prompt)
