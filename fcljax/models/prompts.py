"""Task prompts that are fused per image by a gate on the un-prompted features (FPPL, section III-B; release
`prompt.py`, `linears.py`).

Knows networks, nothing of federation: every function takes prompts, queries and masks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.models.heads import cosine, mask_logits
from fcljax.models.vit import Injection


class Gate(NamedTuple):
    """The coslinear gate g_psi: one direction per task and a scale sigma. The paper has no scale (sigma None,
    which stands for 1)."""

    psi: Float[Array, "tasks width"]
    sigma: Float[Array, ""] | None


def init_prompts(
    key: PRNGKeyArray, tasks: int, blocks: int, length: int, width: int
) -> Float[Array, "tasks blocks length width"]:
    """All tasks' prompts, uniform in [-1, 1]. The release stores length 20 as a pool of 4 times 5, which
    flattens to the same."""
    return jax.random.uniform(key, (tasks, blocks, length, width), minval=-1.0, maxval=1.0)


def init_gate(key: PRNGKeyArray, tasks: int, width: int, learnable_scale: bool) -> Gate:
    """psi uniform in +-1/sqrt(width), sigma 1."""
    bound = width**-0.5
    psi = jax.random.uniform(key, (tasks, width), minval=-bound, maxval=bound)
    return Gate(psi, jnp.ones(()) if learnable_scale else None)


def gate_weights(
    gate: Gate, query: Float[Array, "batch width"], seen: Bool[Array, " tasks"], soft: bool = True
) -> Float[Array, "batch tasks"]:
    """Fusion weights over the seen tasks (FPPL eq. 2): softmax of sigma * cos(q, psi_t), exactly 0 for tasks
    not seen.

    With soft False the best task gets weight 1 and no gradient reaches the gate (the ablation without
    fusion).
    """
    score = cosine(query, gate.psi, eps=1e-12)
    score = mask_logits(score if gate.sigma is None else gate.sigma * score, seen)
    if not soft:
        return jax.nn.one_hot(jnp.argmax(score, axis=-1), score.shape[-1])
    return jax.nn.softmax(score)


def fuse(
    weights: Float[Array, "batch tasks"],
    prompts: Float[Array, "tasks blocks length width"],
    current: Float[Array, "blocks length width"],
    task: Int[Array, ""],
) -> Float[Array, "batch blocks length width"]:
    """Fused prompts sum_t w[b, t] P[t] (FPPL eq. 1) with slot `task` taken from `current`: the other slots
    are constants, so only `current` gets a gradient."""
    is_current = (jnp.arange(prompts.shape[0]) == task)[:, None, None, None]
    return jnp.einsum(
        "bt,tmld->bmld", weights, jnp.where(is_current, current, jax.lax.stop_gradient(prompts))
    )


def prompt_injection(fused: Float[Array, "batch blocks length width"]) -> Injection:
    """Block m gets its own fresh prompts, whose outputs are dropped after the block."""
    return Injection(prompt={block: fused[:, block] for block in range(fused.shape[1])})
