"""`fcljax.run`: a run from Python, on data, methods and networks that may be objects in
memory."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import io
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import numpy as np
from jaxtyping import Float, Int
from rich.console import Console

from fcljax import config
from fcljax.choices import CHOICES, check_no_programs, name_of
from fcljax.config import RunConfig
from fcljax.data.files.any_arrays import dataset_of_any_arrays
from fcljax.data.files.arrays import (
    NAME,
    as_array,
    checked_dataset,
    dataset_of_arrays,
    held_out_in_words,
)
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.sources import DataOptions, load_dataset
from fcljax.data.files.subsets import chosen_classes
from fcljax.data.kinds import are_tokens
from fcljax.data.owners import OWNER
from fcljax.errors import InputError, nearest
from fcljax.federated.check import describe
from fcljax.files import read_user_text
from fcljax.methods import MethodEntry, check_no_code
from fcljax.models.own import Backbone, is_flax_module, own_config
from fcljax.models.weights.pretrained import Pretrained
from fcljax.results import page
from fcljax.results.comparison import is_personal, megabytes
from fcljax.results.run_folder import CONFUSION, PREDICTIONS, load_summary
from fcljax.run_options import RunOptions
from fcljax.runs import checkpoint, loop
from fcljax.runs.build import NOTHING, Supplied
from fcljax.runs.model import Model, model_of_run
from fcljax.runs.resume import stored_settings
from fcljax.settings import ARRAY_NETS, TEXT_NETS
from fcljax.terminal import say
from fcljax.types import Metric

LISTED = ("class_order", "classes", "task_sizes")  # options that take lists
Data = str | Dataset | Sequence[Any]
MOST_OF_TABLE = 1 << 30  # bytes: the confusion matrix of 10,000 classes has 200 MB
# a default must not be a new dict that callers could share and change
NO_METRICS: Mapping[str, Metric] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A finished run. It shows itself in a notebook."""

    metrics: dict[str, Any]
    """The content of summary.json, such as `metrics["A_last"]`."""
    folder: Path
    """The run directory. A temporary one is removed with the result."""
    settings: RunConfig
    """All settings of the run."""
    supplied: Supplied = dataclasses.field(default=NOTHING, repr=False)
    """Inputs of the run that were in memory and are in no file."""
    labels: np.ndarray | None = dataclasses.field(default=None, repr=False)
    """The caller's labels, in the order of the data set's numbers."""

    @classmethod
    def of(cls, folder: str | Path, method: str | MethodEntry | None = None) -> Result:
        """Return the result of a run directory, made by `fcljax run` or `fcljax.run`.

        Args:
          folder: the run directory.
          method: as of the run; it may be left out for a method of the package.

        Raises:
          InputError: if the run is not finished, or its method is a program that was
            not given.
        """
        summary = load_summary(folder)
        values = config.load_yaml(Path(folder) / "config.yaml")
        if method is None:
            method = str(values.get("method"))
            check_no_code(method, str(folder), "if you trust it, give it: Result.of(folder, method)")
        check_no_programs(values, {}, str(folder))
        settings = config.from_mapping(method, values, "config.yaml")
        return cls(summary, Path(folder), settings)

    @property
    def accuracy(self) -> Float[np.ndarray, "T T"]:
        """Return Class-IL accuracy on the test images of task i after task t, [t, i];
        NaN before task i."""
        return np.array(self.metrics["accuracy"], float)

    @property
    def confusion(self) -> Int[np.ndarray, "C C+1"]:
        """Return the number of test images by true and predicted class after the last
        task, in the order of `metrics["class_names"]`; the last column has those without
        a prediction.

        Raises:
          InputError: for a run of an earlier version, which has no confusion.csv.
        """
        return np.array([row[1:] for row in self._table(CONFUSION)[1:]], int)

    @property
    def predictions(self) -> dict[str, np.ndarray]:
        """Return the predictions after the last task: column of predictions.csv -> values;
        `pandas.DataFrame` takes them.

        Raises:
          InputError: for a run without predictions.csv: of an earlier version, or with
            more than 1,000,000 predictions of personal models.
        """
        header, *rows = self._table(PREDICTIONS)
        # reshape: a table without rows is [0, columns] too
        columns = dict(zip(header, np.array(rows, str).reshape(-1, len(header)).T, strict=True))
        for name in {"client", "index", "task"} & {*header}:
            columns[name] = columns[name].astype(int)
        probability = columns["probability"]
        # NaN where an output was not finite, and nothing is predicted
        columns["probability"] = np.where(probability == "", "nan", probability).astype(float)
        return columns

    def _table(self, name: str) -> list[list[str]]:
        """Read a CSV file of the run directory.

        Raises:
          InputError: for a run of an earlier version, which has no such file.
        """
        path = self.folder / name
        what = path.stem
        if not path.exists():
            raise InputError(f"{what}: {str(path)!r} does not exist; an earlier version wrote the run")
        text = read_user_text(what, path, MOST_OF_TABLE)
        # names of classes may contain line breaks
        return list(csv.reader(io.StringIO(text, newline="")))

    @property
    def figures(self) -> dict[str, Path]:
        """Return the run's pictures: name -> file."""
        return {path.stem: path for path in sorted((self.folder / "figures").glob("*.png"))}

    @property
    def page(self) -> Path:
        """Return the path of the report, for a browser."""
        return self.folder / page.NAME

    @cached_property
    def model(self) -> Model:
        """Return the final global model."""
        return self.client_model(None)

    def client_model(self, client: int | None) -> Model:
        """Return the final model of a client that keeps one of its own; None: the
        global one.

        Raises:
          InputError: if there is no such model.
        """
        return model_of_run(self.settings, self.folder, self.supplied, self.labels, client)

    def predict(self, images: Any, preprocess: bool = False) -> np.ndarray:
        """Predict labels of images with the final model, see `Model.predict`."""
        return self.model.predict(images, preprocess)

    def save(self, path: str | Path) -> Path:
        """Write the final model as one file, for `Model.load`."""
        return self.model.save(path)

    def export(self, folder: str | Path, network: bool = False) -> list[str]:
        """Write the global model for other libraries, see `fcljax export`.

        Args:
          folder: the folder to make.
          network: whether to write the network's parameters too.

        Returns:
          A line for each file.

        Raises:
          InputError: for a folder that exists, or a model that is not made of parts.
        """
        from fcljax.runs.export import export

        return export(self.settings, self.folder, self.metrics, folder, network, self.supplied)

    def facts(self) -> dict[str, str]:
        """Return the main results, in words."""
        summary = self.metrics
        total = summary["communication_total"]
        traffic = total["upload_bytes"] + total["download_bytes"]
        whose = ""
        if is_personal(summary):
            whose = " of personal models"
        return {
            "method": f"{summary['method']} on {summary['dataset']}, {summary['backbone']}",
            f"mean accuracy{whose} after the last task": _percent(summary["A_last"]),
            f"mean accuracy{whose} over all tasks": _percent(summary["A_avg"]),
            "forgetting": _percent(summary["forgetting"]["paper"]),
            "sent and received": f"{megabytes(traffic)} MB",
            "time": f"{sum(summary['time'].values()):.0f} s",
        }

    def __repr__(self) -> str:
        """Return a line for each of the main results."""
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td>" for k, v in self.facts().items()
        )
        curve = self.figures.get("accuracy")
        table = f"<table>{rows}</table>"
        if not curve:
            return table
        # in the page itself: a notebook that is saved or sent keeps the picture
        data = base64.b64encode(curve.read_bytes()).decode()
        return f'{table}<img alt="accuracy after each task" width="480" src="data:image/png;base64,{data}">'


def _percent(share: float | None) -> str:
    """Return a share in percent; "-" where there is none, as of forgetting after one
    task."""
    if share is None:
        return "-"
    return f"{100 * share:.1f} %"


# The package's methods have the options of `RunOptions`, so that editors complete them
# and type checkers find wrong ones.
@overload
def run(
    method: str,
    data: Data = ...,
    *,
    backbone: Any = ...,
    partition: Any = ...,
    tasks: int | Sequence[Any] | None = ...,
    out: str | Path | None = ...,
    resume: bool = ...,
    progress: bool = ...,
    metrics: Mapping[str, Metric] = ...,
    **options: Unpack[RunOptions],
) -> Result: ...


# an entry of the user's own may have options of its own
@overload
def run(
    method: MethodEntry,
    data: Data = ...,
    *,
    backbone: Any = ...,
    partition: Any = ...,
    tasks: int | Sequence[Any] | None = ...,
    out: str | Path | None = ...,
    resume: bool = ...,
    progress: bool = ...,
    metrics: Mapping[str, Metric] = ...,
    **options: Any,
) -> Result: ...


def run(
    method: str | MethodEntry,
    data: Data = "digits",
    *,
    backbone: Any = "auto",
    partition: Any = None,
    tasks: int | Sequence[Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    metrics: Any = NO_METRICS,
    **options: Any,
) -> Result:
    """Train and evaluate a method.

    Args:
      method: a name of `fcljax list`, FILE.py, or a `MethodEntry`.
      data: the name of a data set; arrays (x, y, x_test, y_test), or (x, y), of which a
        random fifth of each class is for testing; or a `Dataset`. Images are uint8, or
        float in [0, 1]; with a backbone for other data, x is any array [N, ...] or a
        pytree of them. Labels are integers or text.
      backbone: the name of a network, such as `mlp` for tables and `conv1d` for series;
        None: the numbers themselves are the features; or your own, a `Backbone` or a
        flax.nnx module.
      partition: as `--partition`; or the client of each training example [N], integers
        or text; with (x, y), of each example.
      tasks: how many; or the labels of each task, such as [[0, 1], [2, 3, 4]], which are
        then all classes of the run; None: the method's number.
      out: the run directory, a new one; None: a temporary one, which is removed with
        the result.
      resume: continue the run in `out`. What was in memory must be given again.
      progress: whether a bar shows the rounds. Warnings about the training appear in
        any case.
      metrics: name -> function of `types.Predictions`, measured beside accuracy on the
        test examples.
      options: any option of `fcljax run METHOD`, such as `clients=20, alpha=0.1`; lists
        for `class_order`, `classes` and `task_sizes`.

    Returns:
      Metrics, figures, the report and the final model.

    Raises:
      InputError: in one line that names the option, its value and the nearest valid one.
    """
    _check_arguments(method, out, options)
    _check_metrics(metrics)
    backbone = "identity" if backbone is None else backbone
    examples, labels = _examples(data, backbone, _array_options(options))
    chosen, owners = _partition(partition)
    supplied = Supplied(examples, _network(backbone, examples), owners, metrics)
    options |= _tasks(tasks, options, examples, labels)
    stated = options | {name: _listed(options[name]) for name in LISTED if name in options}
    stated["dataset"] = _name_of_data(data, examples)
    stated["backbone"] = backbone if isinstance(backbone, str) else "auto"
    # an adapter that the user names wins over the usual one
    stated = _adapter(method, examples, backbone) | stated | chosen
    settings = _settings(method, stated, out, resume)
    config.check_given(settings, options)
    observer = loop.Observer(console=Console(stderr=True, quiet=not progress))
    _say_examples(observer, data, examples, stated.get("classes"))
    # a result reads its tables, figures and model from files
    folder = Path(out or tempfile.mkdtemp(prefix="fcljax-"))
    try:
        summary = loop.run(settings, folder, resume, observer, supplied)
    # BaseException: Ctrl-C leaves nothing in the folder of temporary files either
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if not progress:
        # with progress the run has printed them
        for line in summary.get("warnings", ()):
            say(Console(stderr=True), line)
    # the run may have decided learning rates and number formats, which its file holds
    values = config.load_yaml(folder / "config.yaml") | _in_memory(settings)
    settings = config.from_mapping(method, values, "config.yaml")
    result = Result(summary, folder, settings, supplied, labels)
    if out is None:
        weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def _settings(
    method: str | MethodEntry, stated: dict[str, Any], out: str | Path | None, resume: bool
) -> RunConfig:
    """Return the settings of a run: those that are stated, and of a resumed run its own.

    Raises:
      InputError: for wrong settings, or a run to resume that is not given.
    """
    values = {}
    if resume:
        if out is None:
            raise InputError("resume: there is no run directory to resume; give out")
        values = config.load_yaml(Path(out) / "config.yaml")
    # the directory may be somebody else's, and must not run code by being resumed
    check_no_programs(values, stated, "resume")
    values = stored_settings(values, stated.get("devices"))
    return config.from_mapping(method, values | stated, "options")


def _name_of_data(data: Data, examples: Dataset | None) -> str:
    """Return what the settings call the data set."""
    if isinstance(data, str):
        return data
    if examples:
        return examples.name
    return NAME


def _check_metrics(metrics: Any) -> None:
    """Check that metrics are functions with names.

    Raises:
      InputError: naming the first that is not.
    """
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics: {type(metrics).__name__}; expected a dict of name -> function")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"metrics: {name!r} is not a name such as 'balanced_accuracy'")
        if not callable(metric):
            raise InputError(f"metrics: {name} is {metric!r}; expected a function of Predictions")


def _check_arguments(method: Any, out: Any, options: Mapping[str, Any]) -> None:
    """Check a run's method, and that its directory is a path, if one is given.

    Raises:
      InputError: for anything else, or a data set among the options.
    """
    if not isinstance(method, str | MethodEntry):
        raise InputError(
            f"method: {type(method).__name__}; expected a name of fcljax list, FILE.py or a MethodEntry"
        )
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"out: {type(out).__name__}; expected the path of a run directory")
    if out is not None and not str(out):
        raise InputError("out: '' is not a run directory; leave it out for a temporary one")
    if "dataset" in options:
        raise InputError(f"dataset: give it as data={options['dataset']!r}, the second argument of run")


def _partition(partition: Any) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the option that names or is a partition, and the owners of the examples if
    they are given."""
    if partition is None:
        return {}, None
    if isinstance(partition, str) or callable(partition) or name_of("partition", partition):
        return {"partition": partition}, None
    # owners become a column of the data set, as if a file had listed them
    return {"partition": f"column:{OWNER}"}, as_array("partition", "owners", partition)


def _in_memory(settings: RunConfig) -> dict[str, Any]:
    """Return the choices that are objects of the user's own, which no file holds."""
    values = vars(settings)
    return {name: values[name] for name in CHOICES if not isinstance(values.get(name, ""), str)}


def _tasks(
    tasks: Any, options: Mapping[str, Any], examples: Dataset | None, labels: np.ndarray | None
) -> dict[str, Any]:
    """Return the options that make these tasks. Classes that no task lists are left out.

    Raises:
      InputError: for tasks without classes, or options beside them that say the same.
    """
    if tasks is None or isinstance(tasks, int | np.integer):
        if tasks is None:
            return {}
        return {"tasks": int(tasks)}
    if isinstance(tasks, str) or not all(isinstance(task, list | tuple | np.ndarray) for task in tasks):
        raise InputError(
            f"tasks: {tasks!r} is neither a number nor a list of lists of labels, as [[0, 1], [2]]"
        )
    # no class, no examples: such a task would leave the model unchanged
    empty = next((t for t, task in enumerate(tasks) if not len(task)), None)
    if empty is not None or not len(tasks):
        raise InputError(f"tasks: task {(empty or 0) + 1} has no labels")
    # tasks are consecutive pieces of the class order, so they say both
    both = next((name for name in ("class_order", "task_sizes") if name in options), None)
    if both:
        raise InputError(f"{both}: tasks has the labels of each task; leave out one of them")
    order = [str(label) for task in tasks for label in task]
    _check_labels(order, _names_of(examples, labels))
    listed = {"task_sizes": _listed([len(task) for task in tasks])}
    if len(order) > 1:
        listed["class_order"] = _listed(order)
    if "classes" in options or (examples is not None and len(order) == len(examples.class_names)):
        return listed
    return listed | {"classes": _listed(order)}


def _say_examples(observer: loop.Observer, data: Data, examples: Dataset | None, classes: str | None) -> None:
    """Count the examples of (x, y) that are for testing, and those in memory of classes
    that a run does not use."""
    if examples is None:
        return
    if examples.num_rows and not isinstance(data, str | Dataset):
        observer.say(f"data: {held_out_in_words(len(examples.y_test), examples.num_rows)}")
    if classes is None:
        return
    used = chosen_classes(classes, examples.class_names)
    label = np.concatenate([examples.y_train, examples.y_test])
    others = np.count_nonzero(~np.isin(label, used))
    observer.say(
        f"classes: {len(used)} of {len(examples.class_names)}; {others:,} of {len(label):,} examples have "
        "other labels and are left out"
    )


def _names_of(examples: Dataset | None, labels: np.ndarray | None) -> Collection[str]:
    """Return what tasks may call the classes of examples in memory; none: the run loads the data."""
    if examples is None:
        return ()
    if labels is not None:
        return examples.class_names
    # labels of a `Dataset` are numbers, whatever the names of its classes
    return {*examples.class_names, *map(str, range(len(examples.class_names)))}


def _check_labels(order: Sequence[str], names: Collection[str]) -> None:
    """Check that tasks list each label once, and labels that examples in memory have.

    Raises:
      InputError: for the first one that they do not.
    """
    repeated = next((label for label, count in Counter(order).items() if count > 1), None)
    if repeated is not None:
        raise InputError(f"tasks: label {repeated!r} is listed twice")
    unknown = next((label for label in order if names and label not in names), None)
    if unknown is not None:
        raise InputError(f"tasks: no example has label {unknown!r}; {nearest(unknown, names)}")


def _listed(value: Any) -> Any:
    """Return a list as the command line writes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value


def _array_options(options: Mapping[str, Any]) -> DataOptions:
    """Return the options of loading data that are no images, whose types `check_given` checks later."""
    skip_corrupt = bool(options.get("skip_corrupt"))
    return DataOptions(data_dir=options.get("data_dir"), skip_corrupt=skip_corrupt, as_arrays=True)


def _examples(data: Data, backbone: Any, options: DataOptions) -> tuple[Dataset | None, np.ndarray | None]:
    """Return the examples in memory, and the caller's own labels.

    Arrays are images for a backbone that reads images; otherwise they may have any shape.
    """
    if isinstance(data, str):
        # the run itself loads named data; only a network of the user's own that reads no
        # images must see an example first (`_network`)
        if isinstance(backbone, str) or getattr(backbone, "image_size", 0):
            return None, None
        return load_dataset(data, options), None
    if isinstance(data, Dataset):
        return checked_dataset(data), None
    reads_images = isinstance(backbone, str) or _reads_images(backbone)
    if not reads_images or (isinstance(backbone, str) and backbone in (*ARRAY_NETS, *TEXT_NETS)):
        return dataset_of_any_arrays(data)
    if isinstance(data, list | tuple) and data and (_is_texts(data[0]) or are_tokens(data[0])):
        return dataset_of_any_arrays(data)
    return dataset_of_arrays(data)


def _adapter(method: str | MethodEntry, examples: Dataset | None, backbone: Any) -> dict[str, Any]:
    """Return the adapter of a run that names none, if its examples in memory are no
    images."""
    if examples is None or examples.kind is None:
        return {}
    attention = isinstance(backbone, str) and backbone not in ARRAY_NETS and are_tokens(examples.x_train)
    return {"adapter": config.usual_adapter(method, attention)}


def _reads_images(backbone: Any) -> bool:
    return isinstance(backbone, Backbone) and backbone.image_size > 0


def _is_texts(values: Any) -> bool:
    """Check whether examples are a list or an array of texts."""
    return isinstance(values, list | np.ndarray) and len(values) > 0 and isinstance(values[0], str)


def _network(backbone: Any, examples: Dataset | None = None) -> Pretrained | None:
    """Return the caller's own network."""
    if isinstance(backbone, str):
        return None
    if is_flax_module(backbone):
        backbone = Backbone.of(backbone)
    if not isinstance(backbone, Backbone):
        kind = type(backbone).__name__
        raise InputError(
            f"backbone: {kind} is neither a name nor a Backbone; nearest: Backbone.of(module, pixels)"
        )
    example = None
    if examples is not None and examples.kind is not None:
        example = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
            examples.x_train,
        )
    elif not backbone.image_size:
        raise InputError("backbone: it reads images, and has no image_size; give their side in pixels")
    # `own_config` calls the network on shapes alone, so a mistake in it is reported in
    # one line before any training
    shape = own_config(backbone, describe, example)
    # by the digest a resumed run checks that it gets the same network
    digest = checkpoint.digest_of_tree(backbone.params)
    return Pretrained(shape, backbone.params, None, None, backbone.mean, backbone.std, "own", digest, ())
