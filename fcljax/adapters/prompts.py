"""Task prompts that are fused per image by a gate on the un-prompted features.

FPPL, section III-B; release `prompt.py`, `linears.py`. Knows networks, nothing of federation: every function
takes prompts, queries and masks.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.models.heads import cosine, mask_logits
from fcljax.models.vit import Injection, check_blocks
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task


class Gate(NamedTuple):
    """The coslinear gate g_psi: a direction per task and a scale sigma (None, as in the paper, means 1)."""

    psi: Float[Array, "tasks width"]
    sigma: Float[Array, ""] | None


def init_prompts(
    key: PRNGKeyArray, tasks: int, blocks: int, length: int, width: int
) -> Float[Array, "tasks blocks length width"]:
    """All tasks' prompts, uniform in [-1, 1]. The release's pool of 4 times 5 flattens to length 20 too."""
    return jax.random.uniform(key, (tasks, blocks, length, width), minval=-1.0, maxval=1.0)


def init_gate(key: PRNGKeyArray, tasks: int, width: int, learnable_scale: bool) -> Gate:
    """psi uniform in +-1/sqrt(width), sigma 1."""
    bound = width**-0.5
    psi = jax.random.uniform(key, (tasks, width), minval=-bound, maxval=bound)
    return Gate(psi, jnp.ones(()) if learnable_scale else None)


def gate_weights(
    gate: Gate, query: Float[Array, "batch width"], seen: Bool[Array, " tasks"], soft: bool = True
) -> Float[Array, "batch tasks"]:
    """Fusion weights of tasks (in FPPL eq. 2): softmax of sigma * cos(q, psi_t), exactly 0 for unseen tasks.

    With soft False (the ablation without fusion) the best task gets weight 1, and the gate no gradient.
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
    """Fused prompts sum_t w[b, t] P[t] (FPPL eq. 2) with slot `task` taken from `current`.

    The other slots are constants, so only `current` gets a gradient.
    """
    is_current = (jnp.arange(prompts.shape[0]) == task)[:, None, None, None]
    return jnp.einsum(
        "bt,tmld->bmld", weights, jnp.where(is_current, current, jax.lax.stop_gradient(prompts))
    )


def prompt_injection(fused: Float[Array, "batch blocks length width"]) -> Injection:
    """Block m gets its own fresh prompts, whose outputs are dropped after the block."""
    return Injection(prompt={block: fused[:, block] for block in range(fused.shape[1])})


# ---- the adapter -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Options of the adapter `prompts`. Fields with default None take the value of the fidelity preset."""

    prompt_length: int = 20  # tokens per block
    prompt_blocks: int = 5  # blocks 0..4
    wo_fusion: bool = False  # ablation: the gate's best task alone, gate untrained
    gate_scale: Literal["learnable", "fixed"] | None = None  # is sigma trained and sent, or 1
    prompt_upload: Literal["current", "all"] | None = None  # prompts that cross the wire


FIDELITY = {
    "intended": dict(gate_scale="learnable", prompt_upload="current"),
    "paper": dict(gate_scale="fixed", prompt_upload="current"),
    "released": dict(gate_scale="learnable", prompt_upload="all"),
}


class Prompts(NamedTuple):
    """Prompts and their gate; as a part, `prompt` is that of the current task, [blocks, length, width]."""

    prompt: Float[Array, "tasks blocks length width"] | Float[Array, "blocks length width"]
    gate: Gate


class HeldPrompts(NamedTuple):
    """What clients hold besides their part: all prompts, and not the gate, which is in the part."""

    prompt: Float[Array, "tasks blocks length width"]


Held: TypeAlias = Prompts | HeldPrompts | tuple[()]  # the server's parameters, or what a client holds


def prompts(options: PromptOptions, sizes: Sizes, network: Network) -> Adapter:
    """FPPL's adapter: a prompt per task, fused for every image by a gate on its query (eq. 1, 2).

    With `prompt_upload` = "all" all prompts travel, as in the release, though only the current one trains.

    Args:
      options: resolved, no None.
      setting: the stream's sizes.
      network: a ViT.

    Raises:
      InputError: for more blocks with prompts than the network has.
    """
    check_blocks("prompt_blocks", options.prompt_blocks, network)
    whole = options.prompt_upload == "all"

    def init(key: PRNGKeyArray, frozen) -> Prompts:
        del frozen
        keys, width = jax.random.split(key), network.width
        prompt = init_prompts(keys[0], sizes.tasks, options.prompt_blocks, options.prompt_length, width)
        return Prompts(prompt, init_gate(keys[1], sizes.tasks, width, options.gate_scale == "learnable"))

    def part(params: Prompts, task: Task) -> Prompts:
        return params if whole else params._replace(prompt=params.prompt[task.index])

    def put(params: Prompts, task: Task, part: Prompts) -> Prompts:
        return part if whole else part._replace(prompt=params.prompt.at[task.index].set(part.prompt))

    def current(part: Prompts, task: Task) -> Prompts:
        return part._replace(prompt=part.prompt[task.index]) if whole else part

    def prompt(cached: Held, part: Prompts, query: Array, task: Task) -> Array:
        weights = gate_weights(part.gate, query, jnp.arange(sizes.tasks) <= task.index, not options.wo_fusion)
        past = cached if isinstance(cached, Prompts | HeldPrompts) and not whole else part
        return fuse(weights, past.prompt, current(part, task).prompt, task.index)

    def inject(cached: Held, part: Prompts, query: Array, task: Task, train: bool, mask: Array) -> Injection:
        del train, mask
        return prompt_injection(prompt(cached, part, query, task))

    return Adapter(
        init,
        _transfer,
        part,
        put,
        inject=inject,
        prompt=prompt,
        counted=current,
        queries=True,
        cached=lambda params: () if whole else HeldPrompts(params.prompt),
    )


def _transfer(params: Prompts, task: Task) -> Prompts:
    """Prompt transfer: p_t starts from p_{t-1}."""
    previous = params.prompt[jnp.maximum(task.index - 1, 0)]
    return params._replace(prompt=params.prompt.at[task.index].set(previous))
