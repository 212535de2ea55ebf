"""Task prompts that a gate on the features without prompts fuses for each image (FPPL,
section III-B; release `prompt.py`, `linears.py`).
"""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.adapters.slots import Slots
from fcljax.models.heads import cosine, mask_logits
from fcljax.models.products import exact_einsum
from fcljax.models.vit import Injection, check_blocks
from fcljax.parts.learner import Adapter
from fcljax.types import Network, Sizes, Task


class Gate(NamedTuple):
    """The coslinear gate g_psi."""

    psi: Float[Array, "tasks width"]
    """A direction per task."""
    sigma: Float[Array, ""] | None
    """A scale; None, as in the paper: 1."""


def init_prompts(
    key: PRNGKeyArray, tasks: int, blocks: int, length: int, width: int
) -> Float[Array, "tasks blocks length width"]:
    """Return new prompts of all tasks, uniform in [-1, 1].

    The release's pool of 4 prompts of 5 tokens flattens to length 20 too.
    """
    return jax.random.uniform(key, (tasks, blocks, length, width), minval=-1.0, maxval=1.0)


def init_gate(key: PRNGKeyArray, tasks: int, width: int, learnable_scale: bool) -> Gate:
    """Return a new gate: psi uniform in +-1/sqrt(width), sigma 1."""
    bound = width**-0.5
    psi = jax.random.uniform(key, (tasks, width), minval=-bound, maxval=bound)
    if learnable_scale:
        return Gate(psi, jnp.ones(()))
    return Gate(psi, None)


def gate_weights(
    gate: Gate,
    query: Float[Array, "batch width"],
    seen: Bool[Array, " tasks"],
    soft: bool = True,
) -> Float[Array, "batch tasks"]:
    """Return the fusion weights of tasks (in FPPL eq. 2): softmax of sigma * cos(q,
    psi_t).

    Weights of unseen tasks are exactly 0. With soft False (the ablation without fusion)
    the best task has weight 1, and the gate gets no gradient.
    """
    score = cosine(query, gate.psi, eps=1e-12)
    if gate.sigma is not None:
        score = gate.sigma * score
    score = mask_logits(score, seen)
    if not soft:
        # argmax has no gradient, so the gate does not train
        return jax.nn.one_hot(jnp.argmax(score, axis=-1), score.shape[-1])
    return jax.nn.softmax(score)


def fuse(
    weights: Float[Array, "batch tasks"],
    prompts: Float[Array, "tasks blocks length width"],
    current: Float[Array, "blocks length width"],
    task: Int[Array, ""],
) -> Float[Array, "batch blocks length width"]:
    """Return sum_t w[b, t] P[t] (FPPL eq. 2), with `current` as P[task].

    The other prompts are constants, so only `current` gets a gradient.
    """
    is_current = (jnp.arange(prompts.shape[0]) == task)[:, None, None, None]
    prompts = jnp.where(is_current, current, jax.lax.stop_gradient(prompts))
    # block by block: on a CPU the gradient of all at once writes each image's prompts
    # four times
    fused = [exact_einsum("tld,bt->bld", prompts[:, block], weights) for block in range(prompts.shape[1])]
    return jnp.stack(fused, axis=1)


def prompt_injection(fused: Float[Array, "batch blocks length width"]) -> Injection:
    """Return the injection of prompts into blocks, dropped after each block."""
    return Injection(prompt=dict(enumerate(jnp.unstack(fused, axis=1))))


# ---- the adapter -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Options of the adapter `prompts`."""

    prompt_length: int = 20
    """Prompt tokens per block."""
    prompt_blocks: int = 5
    """Number of blocks with prompts, counted from the first."""
    wo_fusion: bool = False
    """Ablation: use the prompt of the gate's best task alone, with an untrained gate."""
    gate_scale: Literal["learnable", "fixed"] = "learnable"
    """Train and send the gate's scale sigma (learnable), or fix it at 1."""
    prompt_upload: Literal["current", "all"] = "current"
    """Prompts that clients and server send: those of the current task, or of all
    tasks."""


PRESETS = {
    "intended": PromptOptions(),
    "paper": PromptOptions(gate_scale="fixed"),
    "released": PromptOptions(prompt_upload="all"),
}


class Prompts(NamedTuple):
    """Prompts and their gate.

    The trainable prompt is that of the current task, [blocks, length, width].
    """

    prompt: Float[Array, "tasks blocks length width"] | Float[Array, "blocks length width"]
    gate: Gate


class CachedPrompts(NamedTuple):
    """The prompts of all tasks, as clients cache them. The gate is part of the payload."""

    prompt: Float[Array, "tasks blocks length width"]


# the server's parameters, or a client's cache
Cached: TypeAlias = Prompts | CachedPrompts | tuple[()]


def prompts(options: PromptOptions, sizes: Sizes, network: Network) -> Adapter:
    """Return FPPL's adapter: a prompt per task, fused by a gate on the query (eq. 1, 2).

    With `prompt_upload` = "all" clients send all prompts, as in the release; only the
    current one trains.

    The network is a ViT.

    Raises:
      InputError: for more blocks with prompts than the network has.
    """
    check_blocks("prompt_blocks", options.prompt_blocks, network)
    slots = Slots(("prompt",), whole=options.prompt_upload == "all")

    def init(key: PRNGKeyArray, _frozen) -> Prompts:
        keys = jax.random.split(key)
        prompt = init_prompts(
            keys[0], sizes.tasks, options.prompt_blocks, options.prompt_length, network.width
        )
        learnable_scale = options.gate_scale == "learnable"
        gate = init_gate(keys[1], sizes.tasks, network.width, learnable_scale)
        return Prompts(prompt, gate)

    def cached(params: Prompts) -> Cached:
        # prompts of all tasks are part of the payload
        if slots.whole:
            return ()
        return CachedPrompts(params.prompt)

    def prompt(cached: Cached, trainable: Prompts, query: Array, task: Task) -> Array:
        seen = jnp.arange(sizes.tasks) <= task.index
        weights = gate_weights(trainable.gate, query, seen, not options.wo_fusion)
        # the trainable prompts are those of all tasks where clients send all of them
        all_prompts = trainable
        if isinstance(cached, Prompts | CachedPrompts) and not slots.whole:
            all_prompts = cached
        current = slots.counted(trainable, task).prompt
        return fuse(weights, all_prompts.prompt, current, task.index)

    def inject(
        cached: Cached, trainable: Prompts, query: Array, task: Task, _train: bool, _mask: Array
    ) -> Injection:
        return prompt_injection(prompt(cached, trainable, query, task))

    return Adapter(
        init,
        _transfer,
        trainable=slots.trainable,
        merge=slots.merge,
        inject=inject,
        prompt=prompt,
        counted=slots.counted,
        lasting=slots.lasting,
        queries=True,
        cached=cached,
    )


def _transfer(params: Prompts, task: Task) -> Prompts:
    """Start p_t from p_{t-1} (prompt transfer)."""
    # in the first task index 0 copies itself
    previous = params.prompt[jnp.maximum(task.index - 1, 0)]
    return params._replace(prompt=params.prompt.at[task.index].set(previous))
