"""Sums over examples that no examples have, for experiments/torture.py: what a client reports to a closed
form, with one array replaced.

The honest reports are those of one client of a tiny federation in the first task, by the reference round.
Each lie must be left out; the honest report must not be.
"""

import dataclasses
import functools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from torture_common import Outcome

# a network of two blocks, width 16; the server's checks are those of any width
OPTIONS = {
    "afcl": {},
    "fedran": dict(projection=40, rank=12),
    "fedranpac": dict(projection=40),
    "fedslca": {},
    "lorm": dict(lora_blocks=2, lora_rank=3),
    "lorm, full": dict(lora_blocks=2, lora_rank=3, pair_gram="full"),
    "dolfin": dict(lora_blocks=2, lora_rank=3),
    "c2prompt": dict(coda_components=4, coda_length=2, coda_blocks=2),
    "fedncm": {},
    "fedclm": {},
    "fedproto": {},
    "fedrecon": {},
}


class Reported(NamedTuple):
    """What an honest client sent, and who checks it."""

    program: Any
    upload: Any
    holds: Any
    """holds(upload): whether each claim is possible."""


@functools.cache
def reports_of(name: str) -> list[Reported]:
    """The uploads of a method's first task that have claims besides their weight."""
    from fcljax import config
    from fcljax.checks import federation as tiny
    from fcljax.checks.examples import TINY, network
    from fcljax.federated import reference
    from fcljax.federated.claims import claims_hold
    from fcljax.federated.engine import RoundInputs
    from fcljax.models.vit import parameter_shapes
    from fcljax.runs.build import make_method
    from fcljax.types import Frozen, RoundContext

    values = dict(epochs=1, batch_size=4, lr=1e-3) | OPTIONS[name]
    settings = config.resolve(config.from_mapping(name.partition(",")[0], values, "torture"))
    vit = dataclasses.replace(TINY, depth=2)
    method = make_method(settings, tiny.SIZES, network(vit))
    draw = np.random.default_rng(0)
    image = jnp.asarray(draw.normal(size=(60, 8, 8, 3)), jnp.float32)
    # by numpy: each draw of JAX outside of a jitted function is compiled by itself
    shapes = parameter_shapes(vit)
    frozen = Frozen(jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32), shapes))
    label = np.arange(60) % tiny.SIZES.classes
    task = tiny.TASKS[0]
    partition = tiny.partition_of(label, task, tiny.EXAMPLES[0])

    def read(index: Any, _keys: Any, _augment: bool) -> Any:
        return image[index], jnp.asarray(label, jnp.int32)[index], None

    found = []
    server = jax.jit(method.init)(tiny.KEY, frozen)
    state = jax.jit(method.init_client)(tiny.KEY, server)
    context = RoundContext.on_host(frozen, task, 0, True)
    server = jax.jit(method.begin_task)(context, server, tiny.KEY)
    inputs = RoundInputs(frozen, image, partition, np.array([0]), task, 0, tiny.KEY, "round", True)
    broadcast = jax.jit(method.broadcast)(context, server)
    for this_round in method.rounds:
        program = this_round.program
        if not program.claims:
            continue
        of_client = reference.client_context(inputs, broadcast, 0)
        examples = partition.of_client(0)
        upload, _, _ = reference.train_client(program, of_client, state, examples, read, tiny.KEY)
        assert upload is not None, f"{name}: an honest upload is left out"
        holds = jax.jit(functools.partial(claims_hold, program))
        found.append(Reported(program, jax.device_get(upload), functools.partial(holds, of_client)))
    assert found, f"{name} has no claims"
    return found


def hostile_statistics(rng: random.Random, *_: object) -> Outcome:
    """One lie of one method."""
    name = rng.choice(list(OPTIONS))
    reported = rng.choice(reports_of(name))
    checked = {claim.name for claim in reported.program.claims}
    paths, tree = jax.tree_util.tree_flatten_with_path(reported.upload)
    places = [i for i, (path, leaf) in enumerate(paths) if _is_checked(path, checked) and np.size(leaf)]
    i = rng.choice(places)
    path, leaf = paths[i]
    lie, how = lied(rng, np.array(leaf))
    leaves = [lie if j == i else old for j, (_, old) in enumerate(paths)]
    possible = bool(np.all(reported.holds(tree.unflatten(leaves)))) and bool(np.isfinite(lie).all())
    what = f"{name}{jax.tree_util.keystr(path)} {how}"
    return Outcome("different" if possible else "survived", f"{what}: {'taken' if possible else 'left out'}")


def _is_checked(path: tuple, checked: set[str]) -> bool:
    return len(path) > 1 and getattr(path[1], "key", "") in checked


# ---- lies --------------------------------------------------------------------------------------------------


def lied(rng: random.Random, leaf: np.ndarray) -> tuple[np.ndarray, str]:
    """The array as no examples make it, and how."""
    if leaf.dtype.kind in "iu" or leaf.ndim == 0 or _counts(leaf):
        how = rng.choice((-1, 10**6, 10**9, -(10**9)))
        leaf.reshape(-1)[rng.randrange(leaf.size)] = how
        return leaf, f"count {how}"
    kinds = GENERAL
    if leaf.ndim > 1 and leaf.shape[-1] == leaf.shape[-2] and np.allclose(leaf, leaf.swapaxes(-1, -2)):
        kinds = GENERAL | GRAMS
    name = rng.choice(list(kinds))
    with np.errstate(over="ignore"):
        return kinds[name](rng, leaf).astype(leaf.dtype), name


def _counts(leaf: np.ndarray) -> bool:
    """Whether these are numbers of examples of classes."""
    return leaf.ndim == 1 and np.array_equal(leaf, np.round(leaf)) and leaf.max() <= 60


def _factor(rng: random.Random) -> float:
    """What nothing honest reaches: lengths of features are bounded within a factor of 15, movements within
    10,000 by ten learning rates a step."""
    return rng.choice((-1, 1)) * 10.0 ** rng.uniform(7, 37)


def _scale(leaf: np.ndarray) -> float:
    return float(np.abs(leaf).max()) or 1.0


def _entry(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    leaf.reshape(-1)[rng.randrange(leaf.size)] = _factor(rng) * _scale(leaf)
    return leaf


def _everywhere(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    return leaf + _factor(rng) * _scale(leaf)


def _not_a_number(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    leaf.reshape(-1)[rng.randrange(leaf.size)] = rng.choice((np.nan, np.inf, -np.inf))
    return leaf


def _trace(leaf: np.ndarray) -> np.ndarray:
    return np.maximum(np.trace(leaf, axis1=-2, axis2=-1)[..., None, None], 1.0)


def _indefinite(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    """One negative eigenvalue among the others."""
    draw = np.random.default_rng(rng.getrandbits(32))
    direction = draw.normal(size=leaf.shape[-1])
    direction /= np.linalg.norm(direction)
    return leaf - rng.uniform(1.1, 3) * _trace(leaf) * np.outer(direction, direction)


def _asymmetric(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    triangle = np.triu(np.ones(leaf.shape[-2:]), 1)
    return leaf + rng.choice((-1, 1)) * rng.uniform(0.2, 2) * _trace(leaf) * triangle


def _negative(_rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    return -leaf - _trace(leaf) * np.eye(leaf.shape[-1])


def _identity(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    return leaf + abs(_factor(rng)) * _trace(leaf) * np.eye(leaf.shape[-1])


def _diagonal(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    i = rng.randrange(leaf.shape[-1])
    leaf[..., i, i] = -rng.uniform(0.1, 10) * _trace(leaf)[..., 0, 0]
    return leaf


def _pair(rng: random.Random, leaf: np.ndarray) -> np.ndarray:
    """Two features that agree more than each with itself."""
    i, j = rng.sample(range(leaf.shape[-1]), 2)
    leaf[..., i, j] = leaf[..., j, i] = rng.uniform(1.5, 100) * _trace(leaf)[..., 0, 0]
    return leaf


GENERAL = {"entry": _entry, "everywhere": _everywhere, "not a number": _not_a_number}
GRAMS = {
    "indefinite": _indefinite,
    "asymmetric": _asymmetric,
    "negative": _negative,
    "identity": _identity,
    "diagonal": _diagonal,
    "pair": _pair,
}
