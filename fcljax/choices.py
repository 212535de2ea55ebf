"""The choices of a run that have options of their own: one table each, written out.

To add a choice, write its file and add its line. A choice is a frozen dataclass: its
fields are its options, with help and ranges, and its instances do the work. Settings
are flat: on the command line and in YAML a choice is its name beside its options
(`--partition quantity --classes-per-client 2`), and the options of other choices do not
exist. Python takes the instance too (`partition=Quantity(classes_per_client=2)`), or
any object that does the same work.

The tables are known without the code, and so without JAX: the code of a choice is
loaded when it is chosen.
"""

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from fcljax.errors import InputError, Value, choose
from fcljax.options import check_ranges, fields_of, flag, load, only_read_by
from fcljax.user_files import is_program, load_object


class ChoiceEntry(NamedTuple):
    """One value of an option that has options of its own."""

    summary: str
    """One line for `fcljax list`."""
    kind: Any
    """The dataclass, or its "MODULE:NAME" in the package."""


PARTITIONS = {
    "dirichlet": ChoiceEntry(
        "classes spread by Dirichlet draws, once for all tasks (FPPL)",
        "data.partition:Dirichlet",
    ),
    "iid": ChoiceEntry("classes divided evenly, once for all tasks", "data.partition:IID"),
    "quantity": ChoiceEntry("some classes of each task per client (PILoRA)", "data.partition:Quantity"),
    "shards": ChoiceEntry("some shards of each task per client (PILoRA's release)", "data.partition:Shards"),
    "task_dirichlet": ChoiceEntry(
        "classes of each task spread by Dirichlet draws (PILoRA)",
        "data.partition:TaskDirichlet",
    ),
    "whole_classes": ChoiceEntry("whole classes, which clients share (GLFC)", "data.partition:WholeClasses"),
    "sampled": ChoiceEntry("clients that exist for one round (HePCo)", "data.sampled:Sampled"),
    "private": ChoiceEntry("a stream of tasks for each client (VFCL)", "data.streams:Private"),
    "file:PATH": ChoiceEntry("a file of examples and clients", "data.owners:ByOwner"),
    "column:NAME": ChoiceEntry("a column of the data set", "data.owners:ByOwner"),
}

TASK_SOURCES = {
    "class": ChoiceEntry("a task is made of classes", "data.task_schedule:ByClass"),
    "column:NAME": ChoiceEntry("a task is a domain, which a column names", "data.task_schedule:ByColumn"),
}

TASK_POOLS = {
    "same": ChoiceEntry("all clients have the same tasks, each its part (VFCL)", "data.streams:SameTasks"),
    "order": ChoiceEntry("neighbours in the class order", "data.streams:Neighbours"),
    "superclasses": ChoiceEntry("CIFAR-100's superclasses", "data.streams:Superclasses"),
    "sources": ChoiceEntry("neighbours within one data set of a mixture", "data.streams:WithinSources"),
}

AGGREGATORS = {
    "mean": ChoiceEntry("mean weighted by the numbers of examples", "federated.aggregators:Mean"),
    "uniform": ChoiceEntry("mean of all clients alike", "federated.aggregators:Uniform"),
    "median": ChoiceEntry("median of each coordinate", "federated.aggregators:Median"),
    "trimmed_mean": ChoiceEntry("mean without the extremes", "federated.aggregators:TrimmedMean"),
    "geometric_median": ChoiceEntry("least sum of distances (RFA)", "federated.aggregators:GeometricMedian"),
    "krum": ChoiceEntry("the upload nearest to its neighbours", "federated.aggregators:Krum"),
    "multi_krum": ChoiceEntry("mean of the uploads that Krum ranks first", "federated.aggregators:MultiKrum"),
    "centred_clipping": ChoiceEntry(
        "mean of clipped changes (CClip)", "federated.aggregators:CentredClipping"
    ),
}

SERVER_OPTIMISERS = {
    "none": ChoiceEntry("the merged value itself", "settings:NoOptions"),
    "momentum": ChoiceEntry("FedAvgM", "federated.server_optimisers:FedAvgM"),
    "adam": ChoiceEntry("FedAdam", "federated.server_optimisers:FedAdam"),
    "yogi": ChoiceEntry("FedYogi", "federated.server_optimisers:FedYogi"),
}

OPTIMISERS = {
    "adam": ChoiceEntry("Adam", "parts.optimisers:Adam"),
    "sgd": ChoiceEntry("gradient descent, with momentum", "parts.optimisers:SGD"),
    "adamw": ChoiceEntry("Adam with decoupled weight decay", "parts.optimisers:AdamW"),
}

LR_SCHEDULES = {
    "constant": ChoiceEntry("the same rate in all rounds", "parts.schedules:Constant"),
    "cosine": ChoiceEntry("half a cosine over the rounds of a task (PILoRA)", "parts.schedules:Cosine"),
    "step": ChoiceEntry("steps downward at milestones of a task (GLFC)", "parts.schedules:Step"),
    "cosine_lag": ChoiceEntry("cosine, a round late (PILoRA's release)", "parts.schedules:CosineLag"),
    "epoch_cosine": ChoiceEntry("a cosine over the epochs of a round (HePCo)", "parts.schedules:EpochCosine"),
    "epoch_cosine_lag": ChoiceEntry(
        "epoch_cosine, an epoch late (HePCo's release)", "parts.schedules:EpochCosineLag"
    ),
    "step_in_round": ChoiceEntry(
        "step, each for its round alone (GLFC's release)", "parts.schedules:StepInRound"
    ),
}

ATTACKS = {
    "sign_flip": ChoiceEntry(
        "negate all floating-point parameters of the upload", "federated.attacks:SignFlip"
    ),
    "scale": ChoiceEntry("multiply all floating-point parameters of the upload", "federated.attacks:Scaling"),
    "label_flip": ChoiceEntry(
        "mirror the labels of the client's task: class a of n becomes class n - 1 - a",
        "federated.attacks:LabelFlip",
    ),
    "nan": ChoiceEntry("send NaN for all floating-point parameters", "federated.attacks:NaN"),
    "weight": ChoiceEntry("claim a huge weight", "federated.attacks:Weight"),
    "counts": ChoiceEntry(
        "send the largest value for all integers and numbers of examples, and 1e-10 for standard deviations",
        "federated.attacks:Counts",
    ),
    "certain": ChoiceEntry(
        "send a tenth of the client's standard deviations, and add normal noise to all other arrays, with "
        "the root mean square of each array",
        "federated.attacks:Certain",
    ),
    "gram": ChoiceEntry(
        "negate sums over examples, and make them as large as the server's checks allow",
        "federated.attacks:Gram",
    ),
}

CHOICES: Mapping[str, Mapping[str, ChoiceEntry]] = {
    "partition": PARTITIONS,
    "tasks_by": TASK_SOURCES,
    "task_pool": TASK_POOLS,
    "aggregator": AGGREGATORS,
    "server_optimiser": SERVER_OPTIMISERS,
    "optimiser": OPTIMISERS,
    "lr_schedule": LR_SCHEDULES,
    "attack": ATTACKS,
}
"""Option -> its table."""


OWN = "own"  # stands in files for an object of the user's own


def summaries(name: str) -> dict[str, str]:
    """Return value -> summary, of an option that has options of its own."""
    return {value: entry.summary for value, entry in CHOICES[name].items()}


# ---- one choice ------------------------------------------------------------------------


def find_kind(name: str, value: object) -> type | None:
    """Return the dataclass of a choice; None for an object of the user's own, which has
    no options.

    Args:
      name: of the option, such as "partition".
      value: what was chosen: a name of the table, or an object.

    Raises:
      InputError: for an unknown name, with the nearest known one; for an object of
        which only text says what it needs.
    """
    if not isinstance(value, str):
        entry = name_of(name, value)
        if ":" in entry:
            raise InputError(f"{name}: {type(value).__name__} is written as text, {entry}")
        if entry:
            return type(value)
        return None
    if value == OWN:
        return None
    if is_program(value):
        loaded = load_object(name, value)
        if isinstance(loaded, type) and dataclasses.is_dataclass(loaded):
            return loaded
        return None
    table = CHOICES[name]
    # forms such as file:PATH carry a value of the user's
    kind, colon, rest = value.partition(":")
    form = next((entry for entry in table if entry.startswith(f"{kind}:")), "")
    if form and colon and rest.strip():
        return _loaded(name, form)
    return _loaded(name, choose(name, value, table))


@functools.cache
def _loaded(name: str, entry: str) -> type:
    return load("fcljax", CHOICES[name][entry].kind)


def name_of(name: str, value: object) -> str:
    """Return the table's name of a chosen object; "" for one that the table does not
    have."""
    if isinstance(value, str):
        return value
    place = f"{type(value).__module__}:{type(value).__name__}".removeprefix("fcljax.")
    # the table names a class as "MODULE:NAME", or holds it where a program has added it
    entries = (entry for entry, choice in CHOICES[name].items() if choice.kind in (place, type(value)))
    return next(entries, "")


def label_of(name: str, value: object) -> str:
    """Return what a choice is called in messages: its name, or that of the user's own
    object."""
    return name_of(name, value) or getattr(value, "__name__", type(value).__name__)


def chosen(name: str, settings: object) -> Any:
    """Return the object that was chosen, made of its options among the settings.

    Raises:
      InputError: for an object in memory of which only the name is left.
    """
    value = getattr(settings, name)
    if not isinstance(value, str):
        return _checked(name, value)
    kind = find_kind(name, value)
    if kind is None and is_program(value):
        return _checked(name, load_object(name, value))
    if kind is None:
        raise InputError(f"{name}: {value!r} was an object in memory; give it again")
    values = {}
    for field in fields_of(kind):
        values[field.name] = getattr(settings, field.name, field.default)
        if field.name in CHOICES and hasattr(settings, field.name):
            # a choice inside a choice, such as the task pool of private streams
            values[field.name] = chosen(field.name, settings)
    built = kind(**values)
    # classes of the package need no check
    if is_program(value):
        return _checked(name, built)
    return built


# option -> names of the arguments that its object is called with. Optimisers are not
# called: they have a method `build`, and `_checked` looks for that.
ARGUMENTS = {
    "partition": ("labels", "clients", "rng"),
    "aggregator": ("stacked", "reference", "weight", "valid", "key"),
    "lr_schedule": ("progress",),
    "attack": ("upload", "sender"),
}


def _checked(name: str, value: Any) -> Any:
    """Return an object of the user's own that can do the work of a choice.

    Raises:
      InputError: naming the choice, the object and what it lacks.
    """
    if name_of(name, value):
        return value
    if name in ARGUMENTS:
        arguments = f"({', '.join(ARGUMENTS[name])})"
        if not callable(value):
            raise InputError(f"{name}: {value!r} cannot be called with {arguments}")
        # without this check a wrong signature would be a traceback from inside jit
        try:
            inspect.signature(value).bind(*ARGUMENTS[name])
        except TypeError:
            called = label_of(name, value)
            raise InputError(
                f"{name}: {called} takes {inspect.signature(value)}, and {arguments} are given"
            ) from None
    elif "optimiser" in name and not hasattr(value, "build") and not is_optax(value):
        raise InputError(f"{name}: {value!r} is not an optax optimiser and has no method build")
    return value


def is_optax(value: object) -> bool:
    """Check whether an object is an optimiser of optax, which has a learning rate of
    its own."""
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def check_no_programs(values: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Check that no choice in a file of settings is a program, unless the user gave it
    too.

    Raises:
      InputError: naming the file, the choice and what to give.
    """
    for name in CHOICES:
        value = values.get(name)
        # a run directory from a stranger must not run code by being resumed or read
        if is_program(value) and given.get(name) != value:
            raise InputError(
                f"{where}: the {name} {value!r} is a program, and a settings file cannot run one; if you "
                f"trust it, give {flag(name)} {value}"
            )


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which a choice that was given as an object is its name beside
    its options."""
    written: dict[str, Any] = {}
    for name, value in values.items():
        written[name] = value
        if name not in CHOICES or isinstance(value, str):
            continue
        kind = find_kind(name, value)
        # an object of the user's own has no options, and stays itself
        if kind is not None:
            written[name] = name_of(name, value)
            written |= flat({field.name: getattr(value, field.name) for field in fields_of(kind)})
    return written


# ---- settings with the options of what was chosen --------------------------------------


def options_of(*names: str) -> dict[str, Any]:
    """Return option -> type, for the options of all values of these choices."""
    return {
        field.name: field.type
        for name in names
        for entry in CHOICES[name]
        for field in fields_of(_loaded(name, entry))
    }


def with_options(options: Value, values: Mapping[str, Any], typed: Collection[str] = ()) -> Value:
    """Return settings with these values, among which there may be choices and their
    options.

    Args:
      options: settings, a frozen dataclass.
      values: option -> value.
      typed: names of options that must be read, whatever their values.

    Raises:
      InputError: for an unknown choice, an option that the choices do not read, or a
        value out of range.
    """
    changes = flat(values)
    fields = fields_of(type(options))
    merged = flat({field.name: getattr(options, field.name) for field in fields}) | changes
    # back to the class without options of choices: other choices bring other ones
    base = getattr(type(options), "base", type(options))
    kind = class_with(base, selected(base, merged))
    names = {field.name for field in fields_of(kind)}
    check_unread(names, changes, merged, typed)
    # options of a choice that is no longer made are dropped
    changed = kind(**{name: value for name, value in merged.items() if name in names})
    check_ranges(changed)
    return changed


# a tuple, not a dict, because the classes made from it are cached by it (`class_with`)
Selected = tuple[tuple[str, Any], ...]
"""(option, what was chosen) for each choice of a run, in the order of the fields."""


def selected(base: type, values: Mapping[str, Any]) -> Selected:
    """Return what is chosen where an option has a table; nested choices follow what
    they belong to."""
    return tuple(_selected(base, values))


def _selected(kind: type, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field in fields_of(kind):
        if field.name in CHOICES:
            value = values.get(field.name)
            # files of earlier versions have null for the default
            if value is None:
                value = field.default
            yield field.name, name_of(field.name, value) or OWN
            # private streams have a task pool, which is a choice of its own
            nested = find_kind(field.name, value)
            if nested is not None:
                yield from _selected(nested, values)


@functools.cache
def class_with(base: type, choices: Selected) -> type:
    """Return a dataclass of settings with the options of what was chosen, each behind
    its choice.

    Args:
      base: the dataclass without them; what is chosen by default gives its type no
        other fields.
      choices: what was chosen.
    """
    kinds: list[type] = []
    fields = list(_fields(base, dict(choices), kinds))
    # no choice has options: the base class will do, under the name that others know
    if not kinds:
        return base
    return dataclasses.make_dataclass(
        base.__name__,
        fields,
        bases=(base,),
        frozen=True,
        namespace={
            "__doc__": base.__doc__,
            "base": base,
            "parts": tuple(kinds),
            "order": tuple(name for name, *_ in fields),
        },
    )


def _fields(kind: type, choices: Mapping[str, Any], kinds: list[type]) -> Iterator[tuple[str, Any, Any]]:
    for field in fields_of(kind):
        default = choices.get(field.name, field.default)
        yield (
            field.name,
            field.type,
            dataclasses.field(default=default, metadata=field.metadata),
        )
        if field.name not in CHOICES:
            continue
        nested = find_kind(field.name, default)
        if nested is not None and fields_of(nested):
            kinds.append(nested)
            yield from _fields(nested, choices, kinds)


@functools.cache
def readers(name: str) -> tuple[tuple[str, str], ...]:
    """Return (choice, its value) for all that have an option of this name."""
    return tuple(
        (choice, entry)
        for choice, table in CHOICES.items()
        for entry in table
        if any(field.name == name for field in fields_of(_loaded(choice, entry)))
    )


def check_unread(
    names: Collection[str],
    values: Mapping[str, Any],
    choices: Mapping[str, Any],
    typed: Collection[str] = (),
) -> None:
    """Check that what was chosen reads every value that is not as usual, or that was
    typed.

    Args:
      names: the options that are read.
      values: option -> value.
      choices: what was chosen where options have options of their own.
      typed: names of options that the user typed, whatever their values.

    Raises:
      InputError: naming the first option that nothing reads, and what would read it.
    """
    for name, value in values.items():
        if name in names or (name not in typed and is_usual(name, value)):
            continue
        reading = readers(name)
        if not reading:
            continue  # an unknown option, which is refused elsewhere
        # If two choices read it, name the inner one (`task_pool`, say): its outer one
        # (`partition`) is what made it an option at all.
        decider = next(
            (choice for choice, _ in reversed(reading) if choice in choices),
            reading[0][0],
        )
        entries = [entry for choice, entry in reading if choice == decider]
        now = "not chosen"
        if decider in choices:
            now = label_of(decider, choices[decider])
        raise InputError(
            f"{name}: {only_read_by(entries)}, and {decider} is {now!r}; nearest: "
            f"{flag(decider)} {entries[0]}"
        )


def is_usual(name: str, value: object) -> bool:
    """Check whether a value is the default of an option in a choice that has it, or
    stands for none."""
    return value is None or any(
        field.name == name and field.default == value
        for choice, entry in readers(name)
        for field in fields_of(_loaded(choice, entry))
    )
