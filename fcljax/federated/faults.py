"""Clients that fail or misbehave, for simulations: a wrapper around any method, whose
server stays as it is.

The faulty clients are either the same in every round (`corrupt`), or drawn in every
round anew, by (seed, task, round, client) (`with_faults`). Whether a client is faulty
is data, so one compiled program serves all.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.errors import InputError, choose, nearest
from fcljax.federated.claims import claims_hold
from fcljax.federated.keys import fold
from fcljax.settings import ATTACKS
from fcljax.types import (
    Batch,
    ClientContext,
    ClientState,
    Local,
    Method,
    Metrics,
    Phase,
    Program,
    PyTree,
    Round,
    Task,
    Upload,
)

HUGE = 1e6  # factor of "scale"
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
_GRAM = "gram"
CLAIMED = 1e30  # examples, or weight, of a lie
CERTAIN = -23.0  # the rho of a standard deviation of 1e-10, so of a precision of 1e20
CHECKED = {_COUNTS, _CERTAIN, _GRAM}  # attacks that some methods' uploads have nothing for
SHARPER = 9.9  # divisor of standard deviations that VFCL's server still takes for possible
# factors of the length of features that "gram" tries
LONGER = (1000.0, 100.0, 30.0, 10.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.0)


def _noisy(leaf: Array, key: PRNGKeyArray) -> Array:
    """Add normal noise as large as the leaf's root mean square."""
    root_mean_square = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
    # as large as the signal: a mean over honest clients is
    # disturbed, yet every number is plausible
    return leaf + (root_mean_square * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)


def _sharper(rho: Array, _key: PRNGKeyArray) -> Array:
    """Return the rho of standard deviations softplus(rho) that are `SHARPER` times
    smaller."""
    # the inverse of softplus: rho = log(exp(sigma / SHARPER) - 1)
    return jnp.log(jnp.expm1(jax.nn.softplus(rho) / SHARPER))


# Sums over examples by the name of their field or report. If every feature is c times as
# long, they are c to this power as large. `_LINEAR` are negated too; squares cannot be.
_LINEAR = {"products": 1, "feature": 1, "query": 2, "value": 2, "kernel": 2, "affinity": 0}
_OF_SQUARES = ("gram", "outer", "square", "trace", "pairs", "head", "task_grams")
_SQUARES = {"factor": 1, **dict.fromkeys(_OF_SQUARES, 2)}
_DIRECTIONS = "input_grams"  # Gram matrices whose directions count: all become equal

# changes of one floating leaf of an upload: (leaf, key) -> leaf
_LEAF_ATTACKS: dict[str, Callable[[Array, PRNGKeyArray], Array]] = {
    "sign_flip": lambda leaf, key: -leaf,
    "scale": lambda leaf, key: leaf * HUGE,
    "nan": lambda leaf, key: jnp.full_like(leaf, jnp.nan),
    "inf": lambda leaf, key: jnp.full_like(leaf, jnp.inf),
    "late": lambda leaf, key: jnp.full_like(leaf, jnp.nan),
    "noise": _noisy,
    _CERTAIN: _noisy,
}


def parse_faults(text: str) -> dict[str, float]:
    """Read 'NAME=SHARE,NAME=SHARE', or 'none': fault -> share of the clients.

    Raises:
      InputError: for an unknown fault, one that is given twice, a share outside [0, 1], or shares of more
        than 1 together.
    """
    shares: dict[str, float] = {}
    if text == "none":
        return shares
    for part in text.split(","):
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
    """Draw the one fault of a client in a round: its index in the order of the shares;
    -1: none."""
    key = fold(jax.random.key(seed), task, round_, client)
    # a uniform draw falls into an interval as long as the fault's share
    # a client has one fault at most: the intervals do not overlap
    interval_ends = np.cumsum(list(shares.values()), dtype=np.float32)
    index = jnp.searchsorted(jnp.asarray(interval_ends), jax.random.uniform(key), side="right")
    return jnp.where(index < len(interval_ends), index, -1)


def reached(
    shares: Mapping[str, float],
    seed: int,
    task: int,
    round_: int,
    ids: Int[np.ndarray, " n"],
) -> Int[np.ndarray, " m"]:
    """Return the clients among `ids` that do not drop out of a round."""
    if not shares.get(_DROP) or not len(ids):
        return ids

    def fault(client: Array) -> Array:
        return drawn_fault(shares, seed, jnp.int32(task), jnp.int32(round_), client)

    faults = jax.vmap(fault)(jnp.asarray(ids, jnp.int32))
    # drawn on the host with the same keys as inside of
    # jit: both must agree on who is absent
    return ids[np.asarray(faults) != list(shares).index(_DROP)]


class _Faults(NamedTuple):
    """The faults of a simulation."""

    names: tuple[str, ...]
    index: Callable[[ClientContext], Int[Array, ""]]  # index(context) -> the client's fault among them, or -1

    def has(self, context: ClientContext, name: str) -> Bool[Array, ""]:
        """Return whether the client has a fault."""
        return self.index(context) == self.names.index(name)


def corrupt(method: Method, attack: str, malicious: int) -> Method:
    """Return the method with clients 0 .. malicious - 1 misbehaving in every round.

    Uploads are attacked in `mean`, `sum` and `gather`, floating leaves only, but for
    claims. The client's state and the metrics of its steps are what the honest program
    makes of its (mirrored) data.

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
    # data, not a Python decision: honest and malicious clients run the same program
    faults = _Faults((attack,), lambda context: jnp.where(context.client.id < malicious, 0, -1))
    return method._replace(rounds=tuple(_faulty(this_round, faults) for this_round in method.rounds))


def with_faults(
    method: Method, shares: Mapping[str, float], seed: int, uploads: tuple[Upload, ...]
) -> Method:
    """Return the method with faults that depend on (seed, task, round, client) alone.

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

    def index(context: ClientContext) -> Array:
        return drawn_fault(shares, seed, context.task.index, context.client.round, context.client.id)

    faults = _Faults(tuple(shares), index)
    method = method._replace(rounds=tuple(_faulty(this_round, faults) for this_round in method.rounds))
    if _STALE in shares:
        method = _with_stale_uploads(method, faults, uploads)
    return method


# ---- what they do ------------------------------------------------------------------------------------------


def _faulty(this_round: Round, faults: _Faults) -> Round:
    """Return the round with clients that mirror labels and change uploads, if that is
    their fault."""
    program = this_round.program
    if _LABELS in faults.names:
        # only training reads labels, but reports of class
        # sums do too: every phase is mirrored
        program = program._replace(phases=tuple(_mirrored(phase, faults) for phase in program.phases))
    upload_faults = [name for name in faults.names if name in (*_LEAF_ATTACKS, _WEIGHT, _COUNTS, _GRAM)]

    def finish(context: ClientContext, local: Local, state: ClientState) -> tuple[Upload, ClientState]:
        upload, state = program.finish(context, local, state)
        for name in upload_faults:
            faulty = faults.has(context, name)
            if name == _GRAM:
                upload = _worst_sums(program, context, upload, faulty)
            else:
                upload = _changed(upload, faulty, name, context)
        return upload, state

    if not upload_faults:
        return this_round._replace(program=program)
    return this_round._replace(program=program._replace(finish=finish))


def _changed(upload: Upload, faulty: Array, name: str, context: ClientContext) -> Upload:
    """Return the upload with its floating leaves or its claims changed, if the client is
    faulty."""
    if name == _WEIGHT:
        weight = jnp.asarray(upload.weight, jnp.float32)
        return upload._replace(weight=jnp.where(faulty, CLAIMED, weight))
    if name == _COUNTS:
        parts = jax.tree.map_with_path(
            functools.partial(_claimed, faulty), (upload.mean, upload.sum, upload.gather)
        )
        return upload._replace(mean=parts[0], sum=parts[1], gather=parts[2])
    leaves, structure = jax.tree.flatten_with_path((upload.mean, upload.sum, upload.gather))
    # independent of the run's seed: the noise is the same whatever else a run draws
    key = fold(jax.random.key(0), context.client.id, context.client.round)

    def change(i: int, path: tuple, leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        # counts and ids are integers: "counts" alone lies about them
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        attack = _LEAF_ATTACKS[name]
        if name == _CERTAIN and _is_rho(path):
            attack = _sharper
        return jnp.where(faulty, attack(leaf, jax.random.fold_in(key, i)), leaf)

    attacked = [change(i, path, leaf) for i, (path, leaf) in enumerate(leaves)]
    mean, sum_, gather = jax.tree.unflatten(structure, attacked)
    return upload._replace(mean=mean, sum=sum_, gather=gather)


def _worst_sums(program: Program, context: ClientContext, upload: Upload, faulty: Array) -> Upload:
    """Return the upload with its sums over examples negated, if the client is faulty.

    They are those of features that are as many times as long as the server's checks allow.
    """
    upload = jax.tree.map(jnp.asarray, upload)
    checked = {claim.name for claim in program.claims}

    def lie(factor: Array) -> Upload:
        lies = jax.tree.map_with_path(functools.partial(_negated_sum, checked, factor), upload)
        return upload._replace(sum=lies.sum, gather=lies.gather)

    def is_believed(factor: Array) -> Bool[Array, ""]:
        return jnp.all(claims_hold(program, context, lie(factor)))

    factors = jnp.asarray(LONGER)
    believed = jax.lax.map(is_believed, factors)
    worst = lie(factors[jnp.argmax(believed)])
    return jax.tree.map(lambda lied, honest: jnp.where(faulty, lied, honest), worst, upload)


def _negated_sum(checked: set[str], factor: Array, path: tuple, leaf: Array) -> Array:
    """Return a sum in a checked report for features `factor` times as long, negated if it can be; other
    leaves as they are."""
    name = _sum_name(path)
    # of a report, the path is that of the upload's field, the report's name, ...
    if len(path) < 2 or getattr(path[1], "key", "") not in checked:
        return leaf
    if name in _LINEAR:
        return (-leaf * factor ** _LINEAR[name]).astype(leaf.dtype)
    if name in _SQUARES:
        return (leaf * factor ** _SQUARES[name]).astype(leaf.dtype)
    if name == _DIRECTIONS:
        width = leaf.shape[-1]
        mean = jnp.trace(leaf, axis1=-2, axis2=-1) / width
        return (factor**2 * mean[..., None, None] * jnp.eye(width)).astype(leaf.dtype)
    return leaf


def _sum_name(path: tuple) -> str:
    """Return the name of the field or the report that a leaf of an upload is."""
    return getattr(path[-1], "name", None) or getattr(path[-1], "key", "")


def _claimed(faulty: Array, path: tuple, leaf: Array) -> Array:
    """Return a leaf with a lie in its place, if it claims something and the client is
    faulty."""
    leaf = jnp.asarray(leaf)
    claim = _claim(path, leaf.dtype)
    if claim is None:
        return leaf
    return jnp.where(faulty, jnp.asarray(claim, leaf.dtype), leaf)


def _claim(path: tuple, dtype: jnp.dtype) -> float | int | None:
    """Return what "counts" makes of a leaf: the largest integer, a huge number of
    examples, or the rho of a Gaussian that is certain; None: it stays."""
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).max)
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    if "examples" in name:
        return CLAIMED
    if _is_rho(path):
        return CERTAIN
    return None


def _is_rho(path: tuple) -> bool:
    """Return whether a Gaussian's standard deviations are made of a leaf."""
    return ".rho" in jax.tree_util.keystr(path)


def check_claims(names: Collection[str], uploads: tuple[Upload, ...]) -> None:
    """Check that "counts", "certain" and "gram", if they are among the faults, change what they name in
    uploads of these shapes.

    Raises:
      InputError: if clients send nothing that is counted, no standard deviations, or no sums over examples.
    """
    arrays = [(upload.mean, upload.sum, upload.gather) for upload in uploads]
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if _COUNTS in names and all(_claim(path, leaf.dtype) is None for path, leaf in leaves):
        raise InputError("attack: clients of this method send no 'counts' or precisions; nearest: 'weight'")
    if _CERTAIN in names and not any(_is_rho(path) for path, _ in leaves):
        raise InputError("attack: clients of this method are not 'certain'; nearest: 'sign_flip'")
    reports = jax.tree_util.tree_leaves_with_path([(upload.sum, upload.gather) for upload in uploads])
    # a gathered classifier has a kernel too
    sums = {*_LINEAR, *_SQUARES, _DIRECTIONS} - {"kernel"}
    if _GRAM in names and not any(_sum_name(path) in sums for path, _ in reports):
        raise InputError("attack: clients of this method send no sums ('gram'); nearest: 'sign_flip'")


def mirror_labels(label: Int[Array, " B"], task: Task) -> Int[Array, " B"]:
    """Replace class a of the task's n classes by class n - 1 - a. Labels of other tasks
    (replayed examples) stay."""
    is_class = task.classes >= 0  # not padding
    # by the task's range of class numbers, since padding has -1
    lowest = jnp.min(jnp.where(is_class, task.classes, jnp.iinfo(jnp.int32).max))
    highest = jnp.max(jnp.where(is_class, task.classes, -1))
    return jnp.where((label >= lowest) & (label <= highest), lowest + highest - label, label)


def _mirrored(honest: Phase, faults: _Faults) -> Phase:
    """Return the phase with clients that mirror labels, if that is their fault."""

    def step(
        context: ClientContext,
        local: Local,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Local, Metrics]:
        # padding keeps its label, which nothing reads
        flips = faults.has(context, _LABELS) & batch.mask
        label = jnp.where(flips, mirror_labels(batch.label, context.task), batch.label)
        return honest.step(context, local, batch._replace(label=label), key)

    return honest._replace(step=step)


# ---- uploads that are sent again ---------------------------------------------------------------------------


class LastUpload(NamedTuple):
    """A client's state, where clients can send old uploads again."""

    state: ClientState  # the state of the method
    uploads: tuple[Upload, ...]  # the client's latest honest upload in each of the method's rounds
    exists: tuple[Bool[Array, ""] | Float[Array, ""], ...]  # whether there is one yet


def _with_stale_uploads(
    method: Method,
    faults: _Faults,
    uploads: tuple[Upload, ...],
) -> Method:
    """Return the method with clients that keep their uploads, to send them again."""

    def init_client(key: PRNGKeyArray, server: PyTree) -> LastUpload:
        no_uploads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), uploads)
        # zeros of an upload that never was are not sent: `exists` is False
        return LastUpload(method.init_client(key, server), no_uploads, (jnp.bool_(False),) * len(uploads))

    def of_method(predict: Callable | None) -> Callable | None:
        """Return a prediction with a client's state, which gets the state of the
        method."""
        if predict is None:
            return None
        return lambda round_context, server, state, batch: predict(round_context, server, state.state, batch)

    return method._replace(
        init_client=init_client,
        rounds=tuple(_stale(this_round, index, faults) for index, this_round in enumerate(method.rounds)),
        predict_client=of_method(method.predict_client),
        predict_drawn=of_method(method.predict_drawn),
    )


def _stale(this_round: Round, index: int, faults: _Faults) -> Round:
    """Return the round with clients that send their previous upload again, if that is
    their fault."""
    program = this_round.program

    def start(context: ClientContext, state: LastUpload, key: PRNGKeyArray) -> Local:
        return program.start(context, state.state, key)

    def finish(
        context: ClientContext,
        local: Local,
        state: LastUpload,
    ) -> tuple[Upload, LastUpload]:
        upload, method_state = program.finish(context, local, state.state)
        last_upload = state.uploads[index]
        # the upload's shapes were taken from another
        # trace: weights may be Python numbers there
        upload = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), upload, last_upload)
        stale = faults.has(context, _STALE) & state.exists[index]
        sent = jax.tree.map(lambda old, new: jnp.where(stale, old, new), last_upload, upload)
        uploads = list(state.uploads)
        exists = list(state.exists)
        # the honest upload, also where a stale one was
        # sent: staleness is one round, not all
        uploads[index] = upload
        exists[index] = jnp.bool_(True)
        return sent, LastUpload(method_state, tuple(uploads), tuple(exists))

    program_buffer = program.replay_buffer
    replay_buffer = None
    if program_buffer is not None:

        def replay_buffer(state: LastUpload) -> Array:
            return program_buffer(state.state)

    stale_program = program._replace(start=start, finish=finish, replay_buffer=replay_buffer)
    return this_round._replace(program=stale_program)
