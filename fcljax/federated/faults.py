"""Hostile clients for simulations: a method some of whose clients misbehave. Everything else of the method,
its server included, stays as it is, so any method can be tried under any attack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fcljax.errors import InputError, choose
from fcljax.options import option
from fcljax.types import Batch, Ctx, Method, Phase, Program, PyTree, Task, Upload

HUGE = 1e6
ATTACKS = {
    "sign_flip": "all floating numbers of an upload are negated",
    "scale": "all floating numbers of an upload are multiplied by 1e6",
    "label_flip": "labels are mirrored within the client's task: class a of n becomes class n - 1 - a",
    "nan": "all floating numbers of an upload are NaN",
}
# what becomes of one floating leaf of an upload
_ON_LEAF: dict[str, Callable[[Array], Array]] = {
    "sign_flip": jnp.negative,
    "scale": lambda leaf: leaf * HUGE,
    "nan": lambda leaf: jnp.full_like(leaf, jnp.nan),
}


@dataclass(frozen=True)
class FaultOptions:
    """Which clients misbehave, and how."""

    hostile: int = option(0, least=0)  # clients that misbehave: those with the lowest ids
    # what they do; default: sign_flip
    attack: Literal["sign_flip", "scale", "label_flip", "nan"] | None = None


def corrupt(method: Method, attack: str, hostile: int) -> Method:
    """The method with clients 0 .. hostile - 1 misbehaving in every round that it plays.

    Whether a client is hostile is data, its id, so one compiled program serves all clients. Uploads are
    attacked in `mean`, `sum` and `gather`, floating leaves only; their weight stays. The client's own state
    and the metrics of its steps are what the honest program makes of its (mirrored) data.

    Args:
      method: any method.
      attack: a name in `ATTACKS`.
      hostile: number of hostile clients; 0 returns the method itself.

    Raises:
      InputError: an unknown attack, or hostile < 0.
    """
    choose("attack", attack, ATTACKS)
    if hostile < 0:
        raise InputError(f"hostile: must be at least 0, got {hostile}; 0 is an honest run")
    if hostile == 0:
        return method
    change = _mirrored if attack == "label_flip" else _attacked(_ON_LEAF[attack])
    rounds = tuple(each._replace(program=change(each.program, hostile)) for each in method.rounds)
    return method._replace(rounds=rounds)


def mirror_labels(label: Int[Array, " B"], task: Task) -> Int[Array, " B"]:
    """Class a of the task's n classes becomes class n - 1 - a. Labels of other tasks (rows recalled from
    memory) stay."""
    own = task.classes >= 0
    first = jnp.min(jnp.where(own, task.classes, jnp.iinfo(jnp.int32).max))
    last = jnp.max(jnp.where(own, task.classes, -1))
    return jnp.where((label >= first) & (label <= last), first + last - label, label)


def _mirrored(program: Program, hostile: int) -> Program:
    def phase(honest: Phase) -> Phase:
        def step(ctx: Ctx, local, batch: Batch, key):
            flips = (ctx.info.id < hostile) & batch.mask
            label = jnp.where(flips, mirror_labels(batch.label, ctx.task), batch.label)
            return honest.step(ctx, local, batch._replace(label=label), key)

        return honest._replace(step=step)

    return program._replace(phases=tuple(phase(each) for each in program.phases))


def _attacked(on_leaf: Callable[[Array], Array]) -> Callable[[Program, int], Program]:
    """A program whose hostile clients send other numbers."""

    def change(program: Program, hostile: int) -> Program:
        def finish(ctx: Ctx, local, state) -> tuple[Upload, PyTree]:
            upload, state = program.finish(ctx, local, state)
            tell = lambda leaf: _if_float(ctx.info.id < hostile, on_leaf, leaf)
            mean, sum_, gather = jax.tree.map(tell, (upload.mean, upload.sum, upload.gather))
            return upload._replace(mean=mean, sum=sum_, gather=gather), state

        return program._replace(finish=finish)

    return change


def _if_float(hostile: Array, on_leaf: Callable[[Array], Array], leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    return jnp.where(hostile, on_leaf(leaf), leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
