"""Features of the frozen backbone, with which prompt methods choose their prompts.

They are computed once for each image whose input is deterministic. `fcljax embed` writes
them to files, which later runs read.
"""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fcljax.config import InputConfig
from fcljax.data.files.sources import data_folder
from fcljax.data.store import Split
from fcljax.data.streaming import Host, whole
from fcljax.files import atomic, open_regular
from fcljax.mesh import AnyMesh
from fcljax.runs import signals
from fcljax.runs.build import Experiment
from fcljax.runs.inputs import Inputs, network_of, read_clean
from fcljax.runs.predict import make_features
from fcljax.scenario import Scenario
from fcljax.types import Frozen, PyTree

Part = Literal["test", "train"]
PARTS: tuple[Part, ...] = ("test", "train")
# section of a run's time that counts the features of a split
TIMED_AS = {"train": "client", "test": "eval"}


@runtime_checkable
class Fill(Protocol):
    """Adds the features that tasks need."""

    def __call__(self, exp: Experiment, tasks: Iterable[int], section: Callable = ..., /) -> Experiment:
        """Return the experiment with the features that these tasks read."""
        ...


def frozen_features(
    inputs: Inputs,
    batch_size: int,
    on_progress: Callable[[int], None] = lambda images: None,
    mesh: AnyMesh | None = None,
) -> Callable[..., Array | np.ndarray]:
    """Return a function (frozen, split, index) -> class tokens [n, width] of images
    without augmentation.

    Without an index it computes those of all images.

    Args:
      inputs: the backbone and its preprocessing.
      batch_size: images per step of a device.
      on_progress: is called with the number of images since the last call.
      mesh: the devices that share the batches; None: the first one.
    """
    return make_features(*_of_batch(inputs), batch_size, on_progress, mesh)


def _of_batch(inputs: Inputs) -> tuple[Callable[[Frozen, Array], Array], Callable[[Split, Array], Array]]:
    """Return the function that computes class tokens, and the one that reads images."""
    network = network_of(inputs.backbone, inputs.preprocess)
    preprocess = inputs.preprocess

    def class_token(frozen: Frozen, image: Array) -> Array:
        return network.apply(frozen.network, image, None, False)[0].cls

    def read(split: Split, index: Array) -> Array:
        return read_clean(preprocess, split, index)

    return class_token, read


def make_fill(exp: Experiment, parts: tuple[Part, ...] = PARTS) -> Fill:
    """Return fill(exp, tasks, section), which adds the query features that these tasks read.

    It fills every split whose input is deterministic: the test split, and the training
    split if some phase reads it without augmentation. Tasks are filled in their order, so
    that the first round does not wait for images of later tasks, whose features are NaN
    until then. Features that `fcljax embed` has written are read all at once. `section`
    is entered as "eval" or "client", to time the work.

    Args:
      exp: the experiment.
      parts: the splits that are read.
    """
    queried = [part for part in parts if part in _queried(exp)]
    saved = {part: saved_features(exp.settings, exp.inputs, part) for part in queried}
    compute = frozen_features(exp.inputs, exp.settings.eval_batch_size, mesh=exp.engine.mesh)

    def features_after(exp: Experiment, part: Part, t: int) -> Array | np.ndarray:
        split = getattr(exp, part)
        cached = whole(split).query
        index = newly_evaluated(exp.scenario, t)
        if exp.method.names_classes:
            # classes of later tasks are evaluated too, so the first task fills everything
            index = np.arange(len(whole(split).label) if t == 0 else 0)
        if part == "train":
            index = newly_assigned(exp.scenario, t)
        if not len(index):
            if cached is not None:
                return cached
            # a first task without examples: one image gives the features' shape and type
            index = np.zeros(1, int)
        # without cached features: a split that has some is another structure, and the
        # loop would compile a second time
        computed = np.asarray(compute(exp.frozen, _with_query(split, None), index))
        if cached is None:
            shape = (len(whole(split).label), *computed.shape[1:])
            features = np.full(shape, np.nan, computed.dtype)
        else:
            features = np.array(cached)
        features[index] = computed
        return features

    def fill_part(exp: Experiment, part: Part, t: int) -> Experiment:
        split = getattr(exp, part)
        query = saved[part]
        if query is None:
            query = features_after(exp, part, t)
        elif whole(split).query is not None:
            return exp
        if not isinstance(split, Host):
            query = exp.engine.place(jnp.asarray(query))
        return _with_part(exp, part, _with_query(split, query))

    def fill(exp: Experiment, tasks: Iterable[int], section: Callable = contextlib.nullcontext) -> Experiment:
        for t, part in itertools.product(tasks, queried):
            signals.check()
            with section(TIMED_AS[part]):
                exp = fill_part(exp, part, t)
        return exp

    return fill


def with_queries(
    exp: Experiment, parts: tuple[Part, ...] = PARTS, tasks: Iterable[int] | None = None
) -> Experiment:
    """Return the experiment with the query features of these tasks, or of all."""
    if tasks is None:
        tasks = range(len(exp.scenario.tasks))
    return make_fill(exp, parts)(exp, tasks, contextlib.nullcontext)


def with_query_shapes(exp: Experiment) -> Experiment:
    """Return the experiment with shapes in place of all query features that it reads."""
    return functools.reduce(_with_shapes, _queried(exp), exp)


def _with_shapes(exp: Experiment, part: Part) -> Experiment:
    """Return the experiment with shapes in place of a split's query features."""
    part_split = getattr(exp, part)
    split = whole(part_split)
    if split.query is not None:
        return exp
    class_token, read = _of_batch(exp.inputs)

    def first_feature(frozen: Frozen, split: Split) -> Array:
        return class_token(frozen, read(split, jnp.zeros(1, jnp.int32)))

    feature = jax.eval_shape(first_feature, exp.frozen, split)
    query = jax.ShapeDtypeStruct((*split.label.shape, *feature.shape[1:]), feature.dtype)
    return _with_part(exp, part, _with_query(part_split, query))


def _with_part(exp: Experiment, part: Part, split: Split | Host) -> Experiment:
    """Return the experiment with another training or test split."""
    if part == "train":
        return exp._replace(train=split)
    return exp._replace(test=split)


def newly_assigned(scenario: Scenario, t: int) -> Int[np.ndarray, " n"]:
    """Return the indices of training images that some client has in task t and none had before."""
    of_tasks = [
        np.concatenate([partition.indices for partition in of_task])
        for of_task in scenario.partitions[: t + 1]
    ]
    return np.setdiff1d(of_tasks[-1], np.concatenate([of_tasks[-1][:0], *of_tasks[:-1]]))


def newly_evaluated(scenario: Scenario, t: int) -> Int[np.ndarray, " n"]:
    """Return the indices of test images that are evaluated after task t and were not before."""
    clients = (None, *range(len(scenario.partitions[0][0].class_examples)))
    # where test examples have a task, all clients are tested on the same ones
    if scenario.test_task is not None:
        clients = (None,)
    read = np.any([scenario.tests_seen(t, client) for client in clients], axis=0)
    if t:
        read &= ~np.any([scenario.tests_seen(t - 1, client) for client in clients], axis=0)
    return np.flatnonzero(read)


def _queried(exp: Experiment) -> tuple[Part, ...]:
    """Return the splits whose query features are computed once; see `make_fill`."""
    if not exp.method.queries:
        return ()
    # a training image is read clean if it is replayed, or if its phase does not augment
    phases = [phase for round_ in exp.method.rounds for phase in round_.program.phases]
    if any(phase.replay or not (phase.view.augment and exp.inputs.augments) for phase in phases):
        return ("test", "train")
    return ("test",)


def _with_query(split: Split | Host, query: PyTree) -> Split | Host:
    """Return the split with other query features."""
    if isinstance(split, Host):
        return split._replace(tree=split.tree._replace(query=query))
    return split._replace(query=query)


# ---- files -----------------------------------------------------------------------------


def feature_file(options: InputConfig, inputs: Inputs, part: Part) -> Path:
    """Return the file of a split's features.

    Its name depends on everything that decides their bits: weights, images, view, batches
    and device.
    """
    facts = {
        "weights": inputs.backbone.digest,
        "network": repr(inputs.backbone.config),
        "positions": options.positions,
        "view": repr(inputs.preprocess),
        "images": inputs.dataset.digest,
        "split": part,
        "batch": options.eval_batch_size,
        "computed by": [jax.__version__, jax.devices()[0].device_kind],
    }
    # named only where there are several, so that files of one device keep their names
    if options.devices > 1:
        facts["devices"] = options.devices
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return data_folder(options.data_dir) / "features" / f"{name}.npz"


def saved_features(options: InputConfig, inputs: Inputs, part: Part) -> Float[np.ndarray, "N D"] | None:
    """Return the features that `fcljax embed` has written; None unless they are intact.

    Where examples are held out, both splits are rows of the whole data set's training split.
    """
    labels = inputs.dataset.y_test
    if part == "train":
        labels = inputs.dataset.y_train
    shape = (len(labels), inputs.backbone.config.width)
    features = _intact(feature_file(options, inputs, part), shape)
    origin = inputs.dataset.origin
    if features is not None or origin is None:
        return features
    rows = getattr(origin, part)
    # a Flower server has one training example in place of the nodes'
    if len(rows) != len(labels):
        return None
    whole = inputs._replace(dataset=inputs.dataset._replace(digest=origin.digest))
    shape = (len(origin.train) + len(origin.test), shape[1])
    features = _intact(feature_file(options, whole, "train"), shape)
    if features is None:
        return None
    return features[rows]


def _intact(path: Path, shape: tuple[int, int]) -> Float[np.ndarray, "N D"] | None:
    """Return the features of a file; None without one, or if they are damaged or of another shape."""
    try:
        with open_regular(path) as stream, np.load(stream) as file:
            features = file["features"]
            sha256 = str(file["sha256"])
    # anything: a damaged file meets the parsers of zip and npy. They are computed again.
    except Exception:
        return None
    if features.shape != shape or features.dtype != np.float32 or sha256 != _sha256(features):
        return None
    return features


def save_features(
    options: InputConfig, inputs: Inputs, part: Part, features: Float[np.ndarray, "N D"]
) -> None:
    """Write the features of a split for later runs."""
    path = feature_file(options, inputs, part)
    with atomic(path) as temporary:
        np.savez(temporary, features=features, sha256=np.array(_sha256(features)))


def _sha256(features: np.ndarray) -> str:
    """Return the sha256 of the features' bytes."""
    return hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()
