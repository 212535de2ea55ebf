"""FFA-LoRA: federated LoRA with the factor A frozen (Sun et al., ICLR 2024, arXiv
2403.12313).

    start      all clients have the same random A, which is never trained or sent
    client     trains B, which starts at 0, and the classifier, and sends both
    server     averages B: the mean of the products B_k A is the product of the mean with A

Averaging LoRA's factors A and B separately misses the mean of the clients' updates, since
the mean of products is not the product of means. With one A for all clients it is exact,
at half of the bytes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PyTree

from fcljax.adapters.lora import LoraOptions
from fcljax.models.vit import Injection, Lora
from fcljax.parts.federate import Run, federate, linear_learner
from fcljax.parts.learner import Adapter, cross_entropy_loss
from fcljax.settings import NoOptions, Preset, with_headtune, with_mini
from fcljax.types import Method, Task

PRESETS = with_headtune(
    with_mini(
        {"intended": Preset(NoOptions(), adapters=(LoraOptions(lora_pairs="one", lora_lr=1e-3),))},
        lr=1e-2,
        lora_lr=1e-3,
    )
)


class FactorB(NamedTuple):
    """The trainable factor of a task's pair."""

    query: Float[Array, "blocks D r"]
    value: Float[Array, "blocks D r"]


def ffa_lora(_options: NoOptions, run: Run) -> Method:
    """Compose FFA-LoRA."""
    run = run._replace(adapter=frozen_a(run.adapter))
    return federate(run, linear_learner(run), loss=cross_entropy_loss())


def frozen_a(lora: Adapter) -> Adapter:
    """Return LoRA in which only B trains. The parameters of all tasks stay LoRA's pairs."""

    def trainable(pairs: Lora, task: Task) -> FactorB:
        pair = lora.trainable(pairs, task)
        return FactorB(pair.b_q, pair.b_v)

    def merge(pairs: Lora, task: Task, factor: FactorB) -> Lora:
        return lora.merge(pairs, task, with_factor(pairs, task, factor))

    def with_factor(pairs: Lora, task: Task, factor: FactorB) -> Lora:
        slot = slot_of(pairs, task)
        return Lora(pairs.a_q[slot], factor.query, pairs.a_v[slot], factor.value)

    def cached(pairs: Lora) -> Lora:
        # clients need A of the task's pair, and the whole pairs of earlier tasks
        return pairs

    def inject(
        pairs: Lora,
        factor: FactorB,
        query: PyTree,
        task: Task,
        train: bool,
        mask: Bool[Array, " batch"],
    ) -> Injection:
        assert lora.inject is not None
        return lora.inject(pairs, with_factor(pairs, task, factor), query, task, train, mask)

    def lasting(factor: FactorB) -> FactorB | tuple[()]:
        # LoRA says whether there is one pair for all tasks; it does not read A for that
        pair = Lora(None, factor.query, None, factor.value)  # pyrefly: ignore[bad-argument-type]
        return factor if lora.lasting(pair) else ()

    return lora._replace(trainable=trainable, merge=merge, cached=cached, inject=inject, lasting=lasting)


def slot_of(pairs: Lora, task: Task) -> ArrayLike:
    """Return the index of a task's pair; there may be one for all tasks."""
    return jnp.minimum(task.index, len(pairs.a_q) - 1)
