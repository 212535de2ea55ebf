"""Attacks of malicious clients: options and functions of the choice `--attack`.

An attack is called where a malicious client would send its honest upload
(`types.Attack`). Two more methods are optional: `labels(label, task)` changes the
labels that the client trains on, and `check(uploads)` refuses methods whose uploads
hold nothing to attack.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from fcljax.errors import InputError
from fcljax.federated.claims import claims_hold
from fcljax.options import option
from fcljax.types import PyTree, Sender, Task, Upload

CERTAIN = -23.0  # rho of a standard deviation of 1e-10, which is a precision of 1e20
SHARPER = 9.9  # divisor of standard deviations that VFCL's server still accepts
CLAIMED = 1e30  # number of examples, or weight, that a lie claims
# factors of the length of features that `Gram` tries
LONGER = (1000.0, 100.0, 30.0, 10.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.0)

# Sums over examples, by the name of their field or report, with an exponent p: features
# that are c times as long make the sum c^p times as large. Sums in `_LINEAR` may have
# either sign, and `Gram` negates them; sums of squares cannot be negative.
_LINEAR = {
    "products": 1,
    "feature": 1,
    "query": 2,
    "value": 2,
    "kernel": 2,
    "changes": 2,
    "affinity": 0,
}
_OF_SQUARES = ("gram", "grams", "outer", "square", "trace", "pairs", "head", "task_grams")
_SQUARES = {"factor": 1, **dict.fromkeys(_OF_SQUARES, 2)}
# Sums of which the server takes the main directions, Gram matrices and FOT's sketches:
# `Gram` makes all directions equal
_DIRECTIONS = "input_grams"
_SKETCHES = "input_sketch"


@dataclasses.dataclass(frozen=True)
class SignFlip:
    """Negate all floating-point parameters of the upload."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return map_floats(upload, lambda path, leaf, number: -leaf)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Multiply all floating-point parameters of the upload."""

    attack_factor: float = option(1e6, positive=True)
    """What the attack multiplies all parameters by."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return map_floats(upload, lambda path, leaf, number: leaf * self.attack_factor)


@dataclasses.dataclass(frozen=True)
class NaN:
    """Send NaN for all floating-point parameters."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return map_floats(upload, lambda path, leaf, number: jnp.full_like(leaf, jnp.nan))


@dataclasses.dataclass(frozen=True)
class Infinite:
    """Send infinity for all floating-point parameters."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return map_floats(upload, lambda path, leaf, number: jnp.full_like(leaf, jnp.inf))


@dataclasses.dataclass(frozen=True)
class Noise:
    """Add normal noise to each array, as large as the array's root mean square."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        def add_noise(path: tuple, leaf: Array, number: int) -> Array:
            return _noisy(leaf, jax.random.fold_in(sender.key, number))

        return map_floats(upload, add_noise)


@dataclasses.dataclass(frozen=True)
class LabelFlip:
    """Train on mirrored labels, and send what that gives."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return upload

    def labels(self, label: Int[Array, " B"], task: Task) -> Int[Array, " B"]:
        """Return the labels that the client trains on."""
        return mirror_labels(label, task)


@dataclasses.dataclass(frozen=True)
class Weight:
    """Claim a huge weight."""

    claimed_weight: float = option(CLAIMED, positive=True)
    """Weight that malicious clients claim."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        return upload._replace(weight=jnp.asarray(self.claimed_weight, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Counts:
    """Send the largest integers and numbers of examples, and tiny standard deviations."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        def claimed(path: tuple, leaf: Array, number: int) -> Array:
            claim = _claim(path, leaf.dtype)
            if claim is None:
                return leaf
            return jnp.full_like(leaf, claim)

        return _map(upload, claimed)

    def check(self, uploads: tuple[Upload, ...]) -> None:
        """Raise InputError if clients send nothing that is counted and no precision."""
        leaves = _leaves(uploads)
        if all(_claim(path, leaf.dtype) is None for path, leaf in leaves):
            raise InputError(
                "attack: clients of this method send no 'counts' or precisions; nearest: 'weight'"
            )


@dataclasses.dataclass(frozen=True)
class Certain:
    """Send small standard deviations, as far as VFCL's server believes them, and
    noise."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        def change(path: tuple, leaf: Array, number: int) -> Array:
            if _is_rho(path):
                return _sharper(leaf)
            return _noisy(leaf, jax.random.fold_in(sender.key, number))

        return map_floats(upload, change)

    def check(self, uploads: tuple[Upload, ...]) -> None:
        """Raise InputError if clients send no standard deviations."""
        if not any(_is_rho(path) for path, _ in _leaves(uploads)):
            raise InputError("attack: clients of this method are not 'certain'; nearest: 'sign_flip'")


@dataclasses.dataclass(frozen=True)
class Gram:
    """Negate sums over examples, as of the longest features that the server's checks
    allow."""

    def __call__(self, upload: Upload, sender: Sender) -> Upload:
        upload = jax.tree.map(jnp.asarray, upload)
        checked = {claim.name for claim in sender.program.claims}

        def lie(factor: Array) -> Upload:
            def negated(path: tuple, leaf: Array) -> Array:
                return _negated_sum(checked, factor, path, leaf)

            lies = jax.tree.map_with_path(negated, upload)
            return upload._replace(sum=lies.sum, gather=lies.gather)

        def is_believed(factor: Array) -> Bool[Array, ""]:
            return jnp.all(claims_hold(sender.program, sender.context, lie(factor)))

        factors = jnp.asarray(LONGER)
        believed = jax.lax.map(is_believed, factors)
        # argmax gives the first True, and factors descend
        return lie(factors[jnp.argmax(believed)])

    def check(self, uploads: tuple[Upload, ...]) -> None:
        """Raise InputError if clients send no sums over examples."""
        reports = jax.tree_util.tree_leaves_with_path([(upload.sum, upload.gather) for upload in uploads])
        # "kernel" is no evidence: a gathered classifier has one too
        names = {*_LINEAR, *_SQUARES, _DIRECTIONS, _SKETCHES} - {"kernel"}
        if not any(_sum_name(path) in names for path, _ in reports):
            raise InputError("attack: clients of this method send no sums ('gram'); nearest: 'sign_flip'")


# ---- changes of an upload ----------------------------------------------------------------------------------

# change(path, leaf, number) -> the leaf that is sent instead; the number tells leaves apart
Change = Callable[[tuple, Array, int], Array]


def map_floats(upload: Upload, change: Change) -> Upload:
    """Return the upload with its floating leaves changed, except for its weight.

    Counts and ids are integers, which only `Counts` changes.
    """

    def of_floats(path: tuple, leaf: Array, number: int) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return change(path, leaf, number)

    return _map(upload, of_floats)


def _map(upload: Upload, change: Change) -> Upload:
    """Return the upload with its leaves in mean, sum and gather changed."""
    channels = (upload.mean, upload.sum, upload.gather)
    leaves, structure = jax.tree.flatten_with_path(channels)
    changed = [change(path, jnp.asarray(leaf), number) for number, (path, leaf) in enumerate(leaves)]
    mean, sum_, gather = jax.tree.unflatten(structure, changed)
    return upload._replace(mean=mean, sum=sum_, gather=gather)


def _leaves(uploads: tuple[Upload, ...]) -> list[tuple[tuple, jax.ShapeDtypeStruct]]:
    """Return (path, leaf) of the mean, sum and gather of uploads."""
    channels = [(upload.mean, upload.sum, upload.gather) for upload in uploads]
    return jax.tree_util.tree_leaves_with_path(channels)


def _noisy(leaf: Array, key: PRNGKeyArray) -> Array:
    """Add normal noise as large as the leaf's root mean square."""
    root_mean_square = jnp.sqrt(jnp.mean(jnp.square(leaf.astype(jnp.float32))))
    # as large as the leaf itself: it disturbs a mean, and every number is plausible
    return leaf + (root_mean_square * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)


def _sharper(rho: Array) -> Array:
    """Return the rho of standard deviations softplus(rho) that are `SHARPER` times
    smaller."""
    # the inverse of softplus: rho = log(exp(sigma / SHARPER) - 1)
    return jnp.log(jnp.expm1(jax.nn.softplus(rho) / SHARPER))


def mirror_labels(label: Int[Array, " B"], task: Task) -> Int[Array, " B"]:
    """Replace the a-th of the task's n classes by the (n - 1 - a)-th. Labels of other tasks
    (replayed examples) stay."""
    # sorted, padding (-1) last; a client's own task may have gaps between its class numbers
    is_class = task.classes >= 0
    classes = jnp.sort(jnp.where(is_class, task.classes, jnp.iinfo(jnp.int32).max))
    position = jnp.searchsorted(classes, label)
    # a label outside the task gets a position too; clipped, it is compared and stays
    is_of_task = classes[jnp.clip(position, max=classes.size - 1)] == label
    mirrored = classes[jnp.sum(is_class) - 1 - position]
    return jnp.where(is_of_task, mirrored, label)


def _claim(path: tuple, dtype: jnp.dtype) -> float | int | None:
    """Return what `Counts` makes of a leaf: the largest integer, a huge number of
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
    """Return whether a leaf is the rho of a Gaussian, whose sigma = softplus(rho)."""
    return ".rho" in jax.tree_util.keystr(path)


def _negated_sum(checked: set[str], factor: Array, path: tuple, leaf: Array) -> Array:
    """Return a sum in a checked report for features `factor` times as long, negated if
    it can be; other leaves as they are."""
    name = _sum_name(path)
    # the path of a report's leaf is: the upload's field, the report's name, ...
    if len(path) < 2 or getattr(path[1], "key", "") not in checked:
        return leaf
    if name in _LINEAR:
        return (-leaf * factor ** _LINEAR[name]).astype(leaf.dtype)
    if name in _SQUARES:
        return (leaf * factor ** _SQUARES[name]).astype(leaf.dtype)
    if name == _DIRECTIONS:
        # factor^2 times the trace, equally in all directions
        width = leaf.shape[-1]
        mean = jnp.trace(leaf, axis1=-2, axis2=-1) / width
        return (factor**2 * mean[..., None, None] * jnp.eye(width)).astype(leaf.dtype)
    if name == _SKETCHES:
        # a sketch X Omega [D, s] estimates the square root of the Gram matrix
        width, columns = leaf.shape[-2:]
        energy = jnp.sum(leaf**2, axis=(-2, -1)) / min(width, columns)
        return (factor * jnp.sqrt(energy)[..., None, None] * jnp.eye(width, columns)).astype(leaf.dtype)
    return leaf


def _sum_name(path: tuple) -> str:
    """Return the name of the innermost field, or else of the report, to which a leaf of an
    upload belongs."""
    fields = [key.name for key in path[2:] if hasattr(key, "name")]
    return fields[-1] if fields else getattr(path[-1], "key", "")


def same_shape(honest: PyTree, lie: PyTree) -> bool:
    """Check whether what an attack returned has the structure and shapes of the honest
    upload."""
    if jax.tree.structure(honest) != jax.tree.structure(lie):
        return False
    return jax.tree.map(jnp.shape, honest) == jax.tree.map(jnp.shape, lie)
