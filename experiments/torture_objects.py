"""Objects of Python, right and wrong, for experiments/torture.py.

These are arguments of `simulate`, `fedavg`, `local_sgd`, `fcljax.run`, `Model.predict` and `read_clients`.
What is wrong must raise `InputError` with one line; what is right must be read as it was meant.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torture_data
from torture_common import Call, Outcome, judged

LEVELS = 5 * np.arange(24) + 18  # of the images, one for each example


def object_input(rng: random.Random, folder: Path, *_: object) -> Outcome:
    """What became of a generated call."""
    folder.mkdir()
    return judged(rng.choice(GENERATORS)(rng, folder))


# ---- values that nobody expects ----------------------------------------------------------------------------


def _masked(array: np.ndarray) -> Any:
    return np.ma.masked_array(array, np.arange(array.size).reshape(array.shape) == 0)


WRONG_VALUES: dict[str, Callable[[np.ndarray], Any]] = {
    "None": lambda x: None,
    "text": lambda x: "data",
    "an object": lambda x: object(),
    "a set": lambda x: {1, 2},
    "a generator": lambda x: (row for row in x),
    "an iterator": lambda x: iter(x.tolist()),
    "a function": lambda x: len,
    "a number": lambda x: 3.0,
    "complex": lambda x: x.astype(complex),
    "dates": lambda x: np.zeros(len(x), "datetime64[s]"),
    "objects": lambda x: np.array([None] * len(x)),
    "a record": lambda x: np.zeros(len(x), [("a", int)]),
    "ragged": lambda x: [[1.0] * (i % 3 + 1) for i in range(len(x))],
    "text inside": lambda x: [*x[:-1].tolist(), "a"] if x.ndim == 1 else [["a"] * x.shape[1]] * len(x),
    "one less": lambda x: x[1:],
    "one more": lambda x: np.concatenate([x, x[:1]]),
    "none": lambda x: x[:0],
    "masked": _masked,
    "a list of masked": lambda x: [_masked(np.atleast_1d(row)) for row in x],
    "wide integers": lambda x: np.full(x.shape, 2**40),
    "huge integers": lambda x: [10**30] * len(x),
}
WRONG_OWNERS: dict[str, Callable[[np.ndarray], Any]] = {
    **{name: value for name, value in WRONG_VALUES.items() if "integers" not in name},
    "floats": lambda x: np.arange(len(x)) / 2,
    "booleans": lambda x: np.arange(len(x)) > 3,
    "a column": lambda x: np.arange(len(x))[:, None],
    "bytes": lambda x: np.array([b"a"] * len(x)),
}
WRONG_WHOLE = (0, -1, -(10**30), 1.5, 10**30, float("nan"), "2", "", None, [1], (), {}, object(), True, 1j)
WRONG_SHARES = (0, -0.5, 1.5, 10**9, float("nan"), float("inf"), "half", None, [0.5], True, {}, 1j)


# ---- simulate ----------------------------------------------------------------------------------------------


def _simulate(**given: Any) -> Any:
    """A simulation of least squares on 24 examples of three clients, with some arguments of another kind."""
    import jax.numpy as jnp
    import optax

    import fcljax

    x = np.linspace(-1, 1, 72, dtype=np.float32).reshape(24, 3)
    usual: dict[str, Any] = {"x": x, "y": x[:, 0], "owner": np.repeat([0, 1, 2], 8), "rounds": 1}
    usual |= {"model": jnp.zeros(3), "loss": lambda w, x, y: (x @ w - y) ** 2, "optimiser": optax.sgd(0.1)}
    merged = usual | given
    local = {name: merged.pop(name) for name in ("epochs", "batch_size") if name in merged}
    client = fcljax.local_sgd(merged.pop("loss"), merged.pop("optimiser"), **local)
    client = merged.pop("client", client)
    model = merged.pop("model")
    shared = {name: merged.pop(name) for name in list(merged) if name in FEDAVG or name == "unknown"}
    method = merged.pop("method", None) or fcljax.fedavg(model, client, **shared)
    return fcljax.simulate(method, **merged)


FEDAVG: dict[str, tuple[Any, ...]] = {
    "malicious": (-1, 4, 1.5, "1", None, True, 10**30, float("nan")),
    "attack": ("sign", "", None, 3, ["sign_flip"], object()),
    "aggregator": ("media", "", None, 1, ["mean"]),
    "trim": (-0.1, 0.5, 2, "a", None, float("nan"), True),
    "clip_norm": (-1.0, "a", None, float("nan"), float("inf"), [1]),
    "noise_multiplier": (-1.0, "a", None, float("nan"), [1]),
    "server_optimiser": ("adagrad", "", None, 2),
    "server_step": (-1.0, "a", float("nan"), [0.1]),
    "client_rules": (None, "prox", (None,), 3, (1, 2), [object()]),
    "server_rules": (None, "x", (None,), 3, [object()]),
}
WRONG_MODELS: dict[str, Any] = {
    "None": None,
    "text": "model",
    "nothing": {},
    "an empty list": [],
    "text inside": {"w": "a"},
    "whole numbers": {"w": np.arange(3)},
    "complex": {"w": np.ones(3, complex)},
    "objects": {"w": np.array([None])},
    "an object": object(),
    "a masked array": _masked(np.ones(3, np.float32)),
    "a function": len,
    "ragged": {"w": [np.ones(3), "a"]},
}
WRONG_LOSSES: dict[str, Any] = {
    "None": None,
    "text": "mse",
    "two arguments": lambda w, x: x @ w,
    "four arguments": lambda w, x, y, z: x @ w,
    "the mean": lambda w, x, y: np.float32(0) + ((x @ w - y) ** 2).mean(),
    "another shape": lambda w, x, y: (x @ w - y)[:, None],
    "nothing": lambda w, x, y: None,
    "text back": lambda w, x, y: "a",
    "a pair": lambda w, x, y: ((x @ w - y) ** 2, 1),
    "an error": lambda w, x, y: 1 / 0,
    "a name that is not there": lambda w, x, y: w["kernel"],
    "an if": lambda w, x, y: x @ w if x[0, 0] > 0 else y,
    "float()": lambda w, x, y: x @ w * float(y[0]),
    "numpy": lambda w, x, y: np.sort(np.asarray(x @ w)),
}
WRONG_OPTIMISERS = (None, "sgd", 0.1, {}, object(), len, [0.1])


def _simulation(rng: random.Random, folder: Path) -> Call:
    """A simulation with one wrong argument."""
    name = rng.choice(
        ("x", "x", "y", "y", "owner", "rounds", "participation", "seed", "method", "leaf", "client")
    )
    x = np.ones((24, 3), np.float32)
    if name in ("x", "y", "owner", "leaf"):
        kinds = WRONG_OWNERS if name == "owner" else WRONG_VALUES
        kind = rng.choice(list(kinds))
        value = kinds[kind](x if name in ("x", "leaf") else x[:, 0])
        given = {"x": {"a": x, "b": value}} if name == "leaf" else {name: value}
        return Call(f"simulate: {name}: {kind}", lambda: _simulate(**given))
    wrong: Any = {
        "rounds": WRONG_WHOLE,
        "seed": tuple(value for value in WRONG_WHOLE if value != 0),
        "participation": WRONG_SHARES,
        "method": ("fedavg", 3, object(), len, {"a": 1}),
        "client": (None, "sgd", 3, {}),
    }[name]
    value = rng.choice(wrong)
    return Call(f"simulate: {name}: {value!r:.40}", lambda: _simulate(**{name: value}))


def _averaging(rng: random.Random, folder: Path) -> Call:
    """`fedavg` or `local_sgd` with one wrong argument."""
    name = rng.choice(("model", "loss", "optimiser", "epochs", "batch_size", "unknown", *FEDAVG))
    if name in ("model", "loss"):
        kinds = WRONG_MODELS if name == "model" else WRONG_LOSSES
        kind = rng.choice(list(kinds))
        return Call(f"fedavg: {name}: {kind}", lambda: _simulate(**{name: kinds[kind]}))
    usual = {"optimiser": WRONG_OPTIMISERS, "unknown": (1,), "epochs": WRONG_WHOLE, "batch_size": WRONG_WHOLE}
    value = rng.choice((usual | FEDAVG)[name])
    return Call(f"fedavg: {name}: {value!r:.40}", lambda: _simulate(**{name: value}))


RIGHT_TARGETS: dict[str, Callable[[np.ndarray], Any]] = {
    "floats": lambda y: y,
    "a list": lambda y: y.tolist(),
    "float64": lambda y: y.astype(np.float64),
    "signs": lambda y: np.sign(y).astype(int),
    "counts": lambda y: np.arange(len(y), dtype=np.uint64),
    "half floats": lambda y: y.astype(np.float16),
}


def _right_simulation(rng: random.Random, folder: Path) -> Call:
    """A right simulation, whose first loss is known."""
    kind = rng.choice(list(RIGHT_TARGETS))
    batch_size = rng.choice((1, 7, 32, 10**9))
    y = RIGHT_TARGETS[kind](np.linspace(-1, 1, 72, dtype=np.float32).reshape(24, 3)[:, 0])

    def call() -> str:
        import optax

        given = {"optimiser": optax.sgd(0.0), "batch_size": batch_size, "rounds": np.int64(1)}
        loss = _simulate(y=y, **given).history[0]["loss"]
        expected = float(np.mean(np.asarray(y, float) ** 2))
        return "" if abs(loss - expected) <= 1e-3 * expected else f"loss {loss}, not {expected}"

    return Call(f"simulate: {kind}, batches of {batch_size}", call, right=True)


# ---- arrays, data sets and images --------------------------------------------------------------------------


def _arrays(rng: random.Random, folder: Path) -> Call:
    """Four arrays or a Dataset for `fcljax.run`, of which at most one is wrong."""
    from fcljax import Dataset
    from fcljax.data.files.arrays import checked_dataset, dataset_of_arrays

    x = np.stack([np.full((8, 9), level, np.uint8) for level in LEVELS])
    y = np.arange(24) % 3
    wrong = rng.choice(("", "", "image", "label", "value"))
    image = rng.choice(list(torture_data.READ_ARRAYS))
    label = rng.choice(list(torture_data.ARRAY_LABELS))
    whole = rng.random() < 0.5
    if whole and label == "text":
        label = "numbers"
    images: Any = torture_data.READ_ARRAYS[image](x)
    labels: Any = torture_data.ARRAY_LABELS[label](y, 3)
    kind = f"{image}, labels as {label}"
    if wrong == "image":
        kind = f"images: {(which := rng.choice(list(torture_data.WRONG_ARRAYS)))}"
        images = torture_data.WRONG_ARRAYS[which](x)
    elif wrong == "label":
        # objects that are all integers are labels
        kinds = [name for name in torture_data.WRONG_ARRAY_LABELS if name != "objects"]
        kind = f"labels: {(which := rng.choice(kinds))}"
        labels = torture_data.WRONG_ARRAY_LABELS[which](y, 3)
    elif wrong == "value":
        kind = f"value: {(which := rng.choice(list(WRONG_VALUES)))}"
        if rng.random() < 0.5:
            images = WRONG_VALUES[which](x.reshape(24, -1) / 255)
        else:
            labels = WRONG_VALUES[which](y)
            which = "labels " + which
    test = (torture_data.READ_ARRAYS[image](x), torture_data.ARRAY_LABELS[label](y, 3))

    def call() -> str:
        if whole:
            found = checked_dataset(Dataset("mine", images, labels, *test, ("0", "1", "2")))
        else:
            found = dataset_of_arrays((images, labels, *test)).dataset
        levels = np.asarray(found.x_train)[:, 4, 4, 0]
        right = np.abs(levels.astype(int) - LEVELS).max() <= 1 and found.y_train.tolist() == y.tolist()
        return "" if right else f"levels {levels.tolist()}, labels {found.y_train.tolist()}"

    return Call(f"{'Dataset' if whole else 'arrays'}: {kind}", call, right=not wrong)


def _run(rng: random.Random, folder: Path) -> Call:
    """`fcljax.run` with one wrong argument."""
    import fcljax

    x = np.stack([np.full((8, 8), level, np.uint8) for level in LEVELS])
    y = np.arange(24) % 3
    data = (x, y, x, y)
    wrong: dict[str, tuple[Any, ...]] = {
        "data": (None, 3, "", "nowhere", data[:3], {"x": x}, [x], object(), (*data, x), np.zeros(4)),
        "partition": tuple(kind(y) for name, kind in WRONG_OWNERS.items() if name not in ("text", "None")),
        "tasks": (0, -1, 99, "2", [[]], [[0, 1], [9]], [0, 1], [[0, 0], [1, 2]], {}, 1.5, [[0], None], True),
        "out": ("", "/dev/null/x", "\0", b"a", 3, object()),
        "backbone": (None, 3, "nowhere", object(), len, ""),
        "epochs": (0, -1, 1.5, "a", [1], {}, float("nan"), 10**30),
        "lr": (-1.0, "a", float("nan"), float("inf"), [0.1], {}, object()),
        "clients": (0, -1, 10**9, "a", 1.5, [], {}),
        "unknown": (1,),
        "class_order": ([0, 1], [0, 1, 1], "a", [[0]], {}, 3.5, [None, 1, 2]),
        "resume": (True,),
        "method": (None, 3, "", "nowhere", object(), len, b"linear", ["linear"]),
    }
    name = rng.choice(list(wrong))
    value = rng.choice(wrong[name])
    given: dict[str, Any] = {"data": data, "tasks": 3, "image_size": 8, "rounds": 1, "epochs": 1}
    given |= {"progress": False, "method": "linear", "min_examples": 1, name: value}

    return Call(f"run: {name}: {value!r:.60}", lambda: fcljax.run(**given))


def _pictures(rng: random.Random, folder: Path) -> Call:
    """Images for `Model.predict`, right or wrong. The model's logits are the levels that it gets."""
    import jax.numpy as jnp
    from PIL import Image

    from fcljax import Model
    from fcljax.data.geometry import Geometry

    logits = lambda arrays, image, mask: image[:, 4:5, 4, 0] * jnp.float32(1)
    model = Model(logits, [], (4, 8, 9), np.arange(1), Geometry(9, 8))
    x = np.stack([np.full((8, 9), level, np.uint8) for level in LEVELS])
    preprocess = rng.random() < 0.7
    if rng.random() < 0.4:
        wrong = {**torture_data.WRONG_ARRAYS, **WRONG_VALUES}
        left_out = ("one image less", "one less", "one more")
        kind = rng.choice([name for name in wrong if name not in left_out])
        images = wrong[kind](x if kind in torture_data.WRONG_ARRAYS else x.reshape(24, -1))
        return Call(f"predict: {kind}, {preprocess}", lambda: model.scores(images, preprocess))
    kind = rng.choice((*torture_data.READ_ARRAYS, "Pillow", "sizes", "modes"))
    if kind == "Pillow":
        images = [Image.fromarray(image) for image in x]
    elif kind == "sizes":
        preprocess = True
        images = [np.full((rng.randrange(2, 40), rng.randrange(2, 40)), level, np.uint8) for level in LEVELS]
    elif kind == "modes":
        modes = ("L", "RGB", "RGBA", "P", "LA")
        images = [Image.fromarray(image).convert(rng.choice(modes)) for image in x]
    else:
        images = torture_data.READ_ARRAYS[kind](x)

    def call() -> str:
        levels = model.scores(images, preprocess)[:, 0]
        return "" if np.abs(levels - LEVELS).max() <= 1 else f"levels {levels.tolist()}"

    return Call(f"predict: {kind}, {preprocess}", call, right=True)


# ---- JSON of clients ---------------------------------------------------------------------------------------

STRANGE = (None, "", "a", 3, -1, 1.5, 10**400, [], [1], [[1], [1, 2]], {}, {"x": 1}, True, [None], ["a", 1])


def _clients(rng: random.Random, folder: Path) -> Call:
    """A JSON file of clients, right or with one strange value."""
    from fcljax import read_clients

    users: dict[str, Any] = {f"u{k}": {"x": [[k, i] for i in range(3)], "y": [k] * 3} for k in range(3)}
    leaf = rng.random() < 0.5
    content: dict[str, Any] = users
    if leaf:
        content = {"users": list(users), "num_samples": [3] * 3, "user_data": users}
    right = rng.random() < 0.2
    kind = "right"
    if not right:
        container: Any = rng.choice((content, users, users["u1"], users["u1"]["x"], users["u1"]["y"]))
        places = range(len(container)) if isinstance(container, list) else list(container)
        place = rng.choice(list(places))
        strange = [value for value in STRANGE if value != container[place]]
        if container is users["u1"]["y"]:
            strange = [
                value for value in strange if not isinstance(value, bool | int | float) or value == 10**400
            ]
        container[place] = rng.choice(strange)
        kind = f"{place!r} is {container[place]!r:.40}"
        if container is content and leaf and place == "num_samples" and container[place] is None:
            right = True  # LEAF's numbers may be missing
    path = folder / "clients.json"
    path.write_text(json.dumps(content))

    def call() -> str:
        found = read_clients(path)
        same = found.x[:, 0].tolist() == found.y.tolist() == [int(name[1]) for name in found.owner]
        return "" if same and len(found.y) == 9 else "other examples"

    return Call(f"clients: {kind}", call, right)


GENERATORS: tuple[Callable[[random.Random, Path], Call], ...] = (
    _simulation,
    _simulation,
    _averaging,
    _averaging,
    _right_simulation,
    _arrays,
    _arrays,
    _run,
    _run,
    _pictures,
    _clients,
)
