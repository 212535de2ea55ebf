"""Clients that fail or misbehave, for simulations: a wrapper around any method, whose
server stays as it is.

The faulty clients are either the same in every round (`corrupt`), or drawn in every
round anew, by (seed, task, round, client) (`with_faults`). Whether a client is faulty
is data, so one compiled program serves all.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fcljax.choices import chosen, label_of, summaries
from fcljax.errors import InputError, nearest
from fcljax.federated.attacks import Infinite, NaN, Noise, same_shape
from fcljax.federated.check import in_users_code
from fcljax.federated.keys import fold
from fcljax.settings import FaultOptions
from fcljax.types import (
    Attack,
    Batch,
    ClientContext,
    ClientState,
    LabelAttack,
    Local,
    Method,
    Metrics,
    Phase,
    PyTree,
    Round,
    Sender,
    Upload,
)

ATTACKS = summaries("attack")
FAULTS = ATTACKS | {
    "inf": "send infinity for all floating-point parameters",
    "noise": "add normal noise to each array of the upload, with the array's root mean square",
    "stale": "send the previous upload again; the first upload is right",
    "late": "train, but miss the round: the server ignores the upload",
    "drop": "take no part in the round: no training, and the client's state is unchanged",
}
_DROP = "drop"
_STALE = "stale"
# faults that change uploads as attacks do, but that no attacker chooses. A late upload is
# sent as NaN: the server ignores it as it ignores uploads that are not finite
_ACCIDENTS = {"inf": Infinite(), "noise": Noise(), "late": NaN()}


def attack_of(value: str | Attack) -> Attack:
    """Return the attack of a name with its default options; an object is checked.

    Raises:
      InputError: for an unknown name, or an object that cannot be called with an upload.
    """
    return chosen("attack", FaultOptions(attack=value))


def acting(names: Collection[str]) -> dict[str, Attack]:
    """Return fault -> its attack, for the faults that change labels or uploads."""
    # in the order of the names, by which a client's fault is drawn
    return {name: _ACCIDENTS.get(name) or attack_of(name) for name in names if name not in (_DROP, _STALE)}


def parse_faults(text: str) -> dict[str, float]:
    """Read 'NAME=SHARE,NAME=SHARE', or 'none': fault -> share of the clients.

    Raises:
      InputError: for an unknown fault, one that is given twice, a share outside [0, 1],
        or shares of more than 1 together.
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


# ---- which clients are faulty ----------------------------------------------------------


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
    # each fault has an interval of [0, 1] as long as its share. They do not overlap, so a
    # client has at most one fault
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

    # drawn here on the host with the same keys as inside of the compiled program: a
    # client that drops out has no other fault
    faults = jax.vmap(fault)(jnp.asarray(ids, jnp.int32))
    return ids[np.asarray(faults) != list(shares).index(_DROP)]


class _Faults(NamedTuple):
    """The faults of a simulation."""

    names: tuple[str, ...]
    attacks: Mapping[str, Attack]
    # index(context) -> the client's fault, an index into `names`; -1: none
    index: Callable[[ClientContext], Int[Array, ""]]

    def has(self, context: ClientContext, name: str) -> Bool[Array, ""]:
        """Return whether the client has a fault."""
        return self.index(context) == self.names.index(name)


def corrupt(method: Method, attack: str | Attack, malicious: int) -> Method:
    """Return the method with clients 0 .. malicious - 1 misbehaving in every round.

    The client's state and the metrics of its steps are what the honest program makes of
    its data, whose labels an attack may change.

    Args:
      method: any method.
      attack: a name in `ATTACKS`, or an attack.
      malicious: number of malicious clients; 0 returns the method itself.

    Raises:
      InputError: an unknown attack, or malicious < 0.
    """
    attack = attack_of(attack)
    if malicious < 0:
        raise InputError(f"malicious: must be at least 0, got {malicious}; 0 is an honest run")
    if malicious == 0:
        return method
    # `where` on the client's id: honest and malicious clients run the same program
    name = label_of("attack", attack)
    faults = _Faults(
        (name,),
        {name: attack},
        lambda context: jnp.where(context.client.id < malicious, 0, -1),
    )
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
      uploads: shapes of one client's upload in each of the method's rounds, which
        clients that send stale uploads keep.
    """
    if not shares:
        return method

    def index(context: ClientContext) -> Array:
        return drawn_fault(shares, seed, context.task.index, context.client.round, context.client.id)

    faults = _Faults(tuple(shares), acting(shares), index)
    method = method._replace(rounds=tuple(_faulty(this_round, faults) for this_round in method.rounds))
    if _STALE in shares:
        method = _with_stale_uploads(method, faults, uploads)
    return method


# ---- what they do ----------------------------------------------------------------------


def _faulty(this_round: Round, faults: _Faults) -> Round:
    """Return the round with clients that mirror labels and change uploads, if that is
    their fault."""
    program = this_round.program
    for name, attack in faults.attacks.items():
        if isinstance(attack, LabelAttack):
            # every phase has the attack's labels: reports read labels as training does
            phases = tuple(_mislabelled(phase, faults, name, attack) for phase in program.phases)
            program = program._replace(phases=phases)

    def finish(context: ClientContext, local: Local, state: ClientState) -> tuple[Upload, ClientState]:
        upload, state = program.finish(context, local, state)
        # `finish` gets no key, so the attack's key is made from the client and the round
        key = fold(jax.random.key(0), context.client.id, context.client.round)
        for name, attack in faults.attacks.items():
            attacked = _attacked(attack, upload, Sender(context, program, key))
            upload = _lying_if(faults.has(context, name), attacked, upload)
        return upload, state

    if not faults.attacks:
        return this_round
    return this_round._replace(program=program._replace(finish=finish))


def _attacked(attack: Attack, upload: Upload, sender: Sender) -> Upload:
    """Return what an attack makes of an upload.

    Raises:
      InputError: naming the user's attack, if it raises or returns something else.
    """
    try:
        lie = attack(upload, sender)
    except Exception as error:
        raise in_users_code("attack", error) from error
    if not same_shape(upload, lie):
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (lie, upload)]
        called = label_of("attack", attack)
        raise InputError(f"attack: {called} returned {shapes[0]}; needed: {shapes[1]}")
    return lie


def _lying_if(faulty: Bool[Array, ""], lie: Upload, honest: Upload) -> Upload:
    """Return the lie of a faulty client, and the honest upload of any other."""

    def leaf_of_upload(lie_leaf: PyTree, honest_leaf: PyTree) -> PyTree:
        # a leaf that the attack leaves alone needs no `where`
        if lie_leaf is honest_leaf:
            return honest_leaf
        honest_leaf = jnp.asarray(honest_leaf)
        return jnp.where(faulty, _as_dtype(jnp.asarray(lie_leaf), honest_leaf.dtype), honest_leaf)

    return jax.tree.map(leaf_of_upload, lie, honest)


def _as_dtype(claim: Array, dtype: jnp.dtype) -> Array:
    """Return a claim as the type of the honest leaf; integers end at their limits."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(claim.dtype, jnp.floating):
        limits = jnp.iinfo(dtype)
        # the largest integer has no equal among floats, and the next float is too large
        largest = np.nextafter(np.asarray(limits.max, claim.dtype), np.asarray(0, claim.dtype))
        claim = jnp.clip(claim, limits.min, largest)
    return claim.astype(dtype)


def check_attacks(attacks: Collection[Attack], uploads: tuple[Upload, ...]) -> None:
    """Check that uploads of these shapes have something that each attack changes.

    Raises:
      InputError: naming the attack and the nearest one that changes something.
    """
    for attack in attacks:
        check = getattr(attack, "check", None)
        if check is not None:
            check(uploads)


def _mislabelled(honest: Phase, faults: _Faults, name: str, attack: LabelAttack) -> Phase:
    """Return the phase with clients that train on an attack's labels, if that is their
    fault."""

    def step(
        context: ClientContext,
        local: Local,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Local, Metrics]:
        # padding keeps its label, which nothing reads
        flips = faults.has(context, name) & batch.mask
        label = jnp.where(flips, attack.labels(batch.label, context.task), batch.label)
        return honest.step(context, local, batch._replace(label=label), key)

    return honest._replace(step=step)


# ---- uploads that are sent again -------------------------------------------------------


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
        # zeros that are never sent, because `exists` is False
        no_uploads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), uploads)
        return LastUpload(
            method.init_client(key, server),
            no_uploads,
            (jnp.bool_(False),) * len(uploads),
        )

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
        # a weight may be a Python number, but the state has arrays
        upload = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), upload, last_upload)
        stale = faults.has(context, _STALE) & state.exists[index]
        old_or_new = jax.tree.map(lambda old, new: jnp.where(stale, old, new), last_upload, upload)
        uploads = list(state.uploads)
        exists = list(state.exists)
        # the new upload, also where the old one was sent: an upload is late by one round
        uploads[index] = upload
        exists[index] = jnp.bool_(True)
        return old_or_new, LastUpload(method_state, tuple(uploads), tuple(exists))

    program_buffer = program.replay_buffer
    replay_buffer = None
    if program_buffer is not None:

        def replay_buffer(state: LastUpload) -> Array:
            return program_buffer(state.state)

    stale_program = program._replace(start=start, finish=finish, replay_buffer=replay_buffer)
    return this_round._replace(program=stale_program)
