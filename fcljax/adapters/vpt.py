"""Deep visual prompts: separate tokens in every block, the same for all images and tasks (Jia et al., ECCV
2022; the discriminative prompts of pMAE, section IV-A, specification 1.4).

They join a block's input and are dropped after it. They do not depend on the image, so there is no query.
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


def vpt(options: VPTOptions, sizes: Sizes, network: Network) -> Adapter:
    """The adapter of deep visual prompts.

    Args:
      options: of the prompts.
      sizes: not read: the prompts are the same for all tasks.
      network: a ViT.

    Raises:
      InputError: for more blocks with prompts than the network has.
    """
    del sizes
    check_blocks("vpt_blocks", options.vpt_blocks, network)
    shape = (options.vpt_blocks, options.vpt_length, network.width)

    def init(key: PRNGKeyArray, frozen) -> Prompts:
        """Uniform in [-1, 1]."""
        del frozen
        return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)

    def inject(cached, trainable: Prompts, query, task: Task, train: bool, mask: Array) -> Injection:
        del cached, query, task, train, mask
        return prompt_injection(trainable[None])

    def prompt(
        cached, trainable: Prompts, query: Array, task: Task
    ) -> Float[Array, "batch blocks length width"]:
        del cached, task
        return jnp.broadcast_to(trainable, (len(query), *shape))

    return Adapter(init, inject=inject, prompt=prompt)
