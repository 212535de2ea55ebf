"""Clients that fail or misbehave, for simulations: a wrapper around any method, whose server stays as it is.

The faulty clients are either the same in every round (`corrupt`), or drawn in every round anew, by (seed,
task, round, client) (`with_faults`). Whether a client is faulty is data, so one compiled program serves all.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError, choose, nearest
from fcljax.settings import ATTACKS
from fcljax.types import (
    Batch,
    ClientContext,
    ClientState,
    Local,
    Method,
    Metrics,
    Phase,
    PyTree,
    Round,
    Task,
    Upload,
)

HUGE = 1e6
FAULTS = ATTACKS | {
    "inf": "send infinity for all floating-point parameters",
    "noise": "add normal noise to each array of the upload, with the array's root mean square",
    "stale": "send the previous upload again; the first upload is right",
    "late": "train, but miss the round: the server ignores the upload",
    "drop": "take no part in the round: no training, and the client's state is unchanged",
}
_DROP = "drop"
_STALE = "stale"
_LABELS = "label_flip"
_WEIGHT = "weight"
_COUNTS = "counts"
_CERTAIN = "certain"
CLAIMED = 1e30
CERTAIN = -23.0  # the rho of a standard deviation of 1e-10, so of a precision of 1e20
CHECKED = {_COUNTS, _CERTAIN}  # attacks that some methods' uploads have nothing for
SHARPER = 9.9  # times, of standard deviations: what VFCL's server takes for possible


def _noisy(leaf: Array, key: PRNGKeyArray) -> Array:
    size = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
    return leaf + (size * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)


def _sharper(rho: Array, key: PRNGKeyArray) -> Array:
    return jnp.log(jnp.expm1(jax.nn.softplus(rho) / SHARPER))


# what becomes of one floating leaf of an upload
_ON_LEAF: dict[str, Callable[[Array, PRNGKeyArray], Array]] = {
    "sign_flip": lambda leaf, key: -leaf,
    "scale": lambda leaf, key: leaf * HUGE,
    "nan": lambda leaf, key: jnp.full_like(leaf, jnp.nan),
    "inf": lambda leaf, key: jnp.full_like(leaf, jnp.inf),
    "late": lambda leaf, key: jnp.full_like(leaf, jnp.nan),
    "noise": _noisy,
    _CERTAIN: _noisy,
}


def parse_faults(text: str) -> dict[str, float]:
    """Fault -> share of the clients, of 'NAME=SHARE,NAME=SHARE', or of 'none'.

    Raises:
      InputError: for an unknown fault, one that is given twice, a share outside [0, 1], or shares of more
        than 1 together.
    """
    shares: dict[str, float] = {}
    for part in text.split(",") if text != "none" else ():
        name, _, value = part.strip().partition("=")
        if name not in FAULTS:
            raise InputError(f"faults: unknown value {name!r}; {nearest(name, FAULTS)}")
        if name in shares:
            raise InputError(f"faults: {name!r} appears twice; give it one probability")
        shares[name] = _share(name, value)
    if sum(shares.values()) > 1 + 1e-9:
        raise InputError(f"faults: the probabilities sum to {sum(shares.values()):g}; nearest: 1")
    return shares


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = float("nan")
    if not 0 <= share <= 1:
        raise InputError(f"faults: {name}={value[:40]!r} is not a probability; choose 0 to 1")
    return share


# ---- which clients are faulty ------------------------------------------------------------------------------


def drawn_fault(
    shares: Mapping[str, float],
    seed: int,
    task: Int[Array, ""],
    round_: Int[Array, ""],
    client: Int[Array, ""],
) -> Int[Array, ""]:
    """The index, in the order of the shares, of a client's one fault in a round; -1: none."""
    key = jax.random.key(seed)
    for number in (task, round_, client):
        key = jax.random.fold_in(key, number)
    edges = np.cumsum(list(shares.values()), dtype=np.float32)
    index = jnp.searchsorted(jnp.asarray(edges), jax.random.uniform(key), side="right")
    return jnp.where(index < len(edges), index, -1)


def reached(
    shares: Mapping[str, float], seed: int, task: int, round_: int, ids: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " m"]:
    """The clients among `ids` that do not drop out of a round."""
    if not shares.get(_DROP) or not len(ids):
        return ids

    def fault(client: Array) -> Array:
        return drawn_fault(shares, seed, jnp.int32(task), jnp.int32(round_), client)

    faults = jax.vmap(fault)(jnp.asarray(ids, jnp.int32))
    return ids[np.asarray(faults) != list(shares).index(_DROP)]


class _Fault(NamedTuple):
    """The faults of a simulation."""

    names: tuple[str, ...]  # what they are called
    fault: Callable[[ClientContext], Int[Array, ""]]  # fault(context) -> index of the client's fault, or -1

    def has(self, context: ClientContext, name: str) -> Bool[Array, ""]:
        return self.fault(context) == self.names.index(name)


def corrupt(method: Method, attack: str, malicious: int) -> Method:
    """The method with clients 0 .. malicious - 1 misbehaving in every round.

    Uploads are attacked in `mean`, `sum` and `gather`, floating leaves only, but for claims.
    The client's own state and the metrics of its steps are what the honest program makes of its (mirrored)
    data.

    Args:
      method: any method.
      attack: a name in `ATTACKS`.
      malicious: number of malicious clients; 0 returns the method itself.

    Raises:
      InputError: an unknown attack, or malicious < 0.
    """
    choose("attack", attack, ATTACKS)
    if malicious < 0:
        raise InputError(f"malicious: must be at least 0, got {malicious}; 0 is an honest run")
    if malicious == 0:
        return method
    fault = _Fault((attack,), lambda context: jnp.where(context.client.id < malicious, 0, -1))
    return method._replace(rounds=tuple(_faulty(each, fault) for each in method.rounds))


def with_faults(
    method: Method, shares: Mapping[str, float], seed: int, uploads: tuple[Upload, ...]
) -> Method:
    """The method with faults that depend on (seed, task, round, client) alone.

    Clients that drop out are left to the caller of the rounds (`reached`).

    Args:
      method: any method.
      shares: of `parse_faults`; empty returns the method itself.
      seed: of the draw.
      uploads: shapes of one client's upload in each of the method's rounds, which clients that send stale
        uploads keep.
    """
    if not shares:
        return method

    def drawn(context: ClientContext) -> Array:
        return drawn_fault(shares, seed, context.task.index, context.client.round, context.client.id)

    fault = _Fault(tuple(shares), drawn)
    method = method._replace(rounds=tuple(_faulty(each, fault) for each in method.rounds))
    return _repeating(method, fault, uploads) if _STALE in shares else method


# ---- what they do ------------------------------------------------------------------------------------------


def _faulty(each: Round, fault: _Fault) -> Round:
    """The round with clients that mirror labels and change uploads, if that is their fault."""
    program = each.program
    if _LABELS in fault.names:
        program = program._replace(phases=tuple(_mirrored(phase, fault) for phase in program.phases))
    names = [name for name in fault.names if name in (*_ON_LEAF, _WEIGHT, _COUNTS)]

    def finish(context: ClientContext, local: Local, state: ClientState) -> tuple[Upload, ClientState]:
        upload, state = program.finish(context, local, state)
        for name in names:
            upload = _changed(upload, fault.has(context, name), name, context)
        return upload, state

    return each._replace(program=program._replace(finish=finish) if names else program)


def _changed(upload: Upload, faulty: Array, name: str, context: ClientContext) -> Upload:
    """The upload with its floating leaves, or with what it claims changed, if the client is faulty."""
    if name == _WEIGHT:
        weight = jnp.asarray(upload.weight, jnp.float32)
        return upload._replace(weight=jnp.where(faulty, CLAIMED, weight))
    if name == _COUNTS:
        parts = jax.tree.map_with_path(
            functools.partial(_claimed, faulty), (upload.mean, upload.sum, upload.gather)
        )
        return upload._replace(mean=parts[0], sum=parts[1], gather=parts[2])
    leaves, tree = jax.tree.flatten_with_path((upload.mean, upload.sum, upload.gather))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), context.client.id), context.client.round)

    def change(i: int, path: tuple, leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        sharper = name == _CERTAIN and _is_rho(path)
        return jnp.where(
            faulty, (_sharper if sharper else _ON_LEAF[name])(leaf, jax.random.fold_in(key, i)), leaf
        )

    mean, sum_, gather = jax.tree.unflatten(tree, [change(i, *each) for i, each in enumerate(leaves)])
    return upload._replace(mean=mean, sum=sum_, gather=gather)


def _claimed(faulty: Array, path: tuple, leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    claim = _claim(path, leaf.dtype)
    return leaf if claim is None else jnp.where(faulty, jnp.asarray(claim, leaf.dtype), leaf)


def _claim(path: tuple, dtype: jnp.dtype) -> float | int | None:
    """What "counts" makes of a leaf: the largest integer, a huge number of examples, or the rho of a Gaussian
    that is certain; None: it stays."""
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max)
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return CLAIMED if "examples" in name else CERTAIN if _is_rho(path) else None


def _is_rho(path: tuple) -> bool:
    """Is this a leaf of which a Gaussian's standard deviations are made?"""
    return ".rho" in jax.tree_util.keystr(path)


def check_claims(names: Collection[str], uploads: tuple[Upload, ...]) -> None:
    """Check that "counts" and "certain", if they are among the faults, change what they name in uploads of
    these shapes.

    Raises:
      InputError: if clients send nothing that is counted, or no standard deviations.
    """
    sent = [(upload.mean, upload.sum, upload.gather) for upload in uploads]
    leaves = jax.tree_util.tree_leaves_with_path(sent)
    if _COUNTS in names and all(_claim(path, leaf.dtype) is None for path, leaf in leaves):
        raise InputError("attack: clients of this method send no 'counts' or precisions; nearest: 'weight'")
    if _CERTAIN in names and not any(_is_rho(path) for path, _ in leaves):
        raise InputError("attack: clients of this method are not 'certain'; nearest: 'sign_flip'")


def mirror_labels(label: Int[Array, " B"], task: Task) -> Int[Array, " B"]:
    """Class a of the task's n classes becomes class n - 1 - a. Labels of other tasks (replayed examples)
    stay."""
    own = task.classes >= 0
    first = jnp.min(jnp.where(own, task.classes, jnp.iinfo(jnp.int32).max))
    last = jnp.max(jnp.where(own, task.classes, -1))
    return jnp.where((label >= first) & (label <= last), first + last - label, label)


def _mirrored(honest: Phase, fault: _Fault) -> Phase:
    def step(context: ClientContext, local: Local, batch: Batch, key: PRNGKeyArray) -> tuple[Local, Metrics]:
        flips = fault.has(context, _LABELS) & batch.mask
        label = jnp.where(flips, mirror_labels(batch.label, context.task), batch.label)
        return honest.step(context, local, batch._replace(label=label), key)

    return honest._replace(step=step)


# ---- uploads that are sent again ---------------------------------------------------------------------------


class LastUpload(NamedTuple):
    """A client's state, where clients can send old uploads again."""

    own: ClientState  # what the method keeps
    last: tuple[Upload, ...]  # the client's latest own upload in each of the method's rounds
    there: tuple[Bool[Array, ""] | Float[Array, ""], ...]  # whether there is one


def _repeating(method: Method, fault: _Fault, uploads: tuple[Upload, ...]) -> Method:
    """The method with clients that keep their uploads, to send them again."""

    def init_client(key: PRNGKeyArray, server: PyTree) -> LastUpload:
        nothing = tuple(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), each) for each in uploads)
        return LastUpload(method.init_client(key, server), nothing, (jnp.bool_(False),) * len(uploads))

    def with_own(predict: Callable | None) -> Callable | None:
        """A prediction with a client's state, given what the method keeps of it."""

        if predict is None:
            return None

        return lambda round_context, server, state, batch: predict(round_context, server, state.own, batch)

    return method._replace(
        init_client=init_client,
        rounds=tuple(_repeated(each, i, fault) for i, each in enumerate(method.rounds)),
        predict_client=with_own(method.predict_client),
        predict_drawn=with_own(method.predict_drawn),
    )


def _repeated(each: Round, index: int, fault: _Fault) -> Round:
    program = each.program

    def start(context: ClientContext, state: LastUpload, key: PRNGKeyArray) -> Local:
        return program.start(context, state.own, key)

    def finish(context: ClientContext, local: Local, state: LastUpload) -> tuple[Upload, LastUpload]:
        made, own = program.finish(context, local, state.own)
        made = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), made, state.last[index])
        again = fault.has(context, _STALE) & state.there[index]
        sent = jax.tree.map(lambda old, new: jnp.where(again, old, new), state.last[index], made)
        last = list(state.last)
        there = list(state.there)
        last[index] = made
        there[index] = jnp.bool_(True)
        return sent, LastUpload(own, tuple(last), tuple(there))

    buffer = program.replay_buffer
    own_buffer = buffer and (lambda state: buffer(state.own))
    return each._replace(program=program._replace(start=start, finish=finish, replay_buffer=own_buffer))
