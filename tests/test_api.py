"""`fcljax.run` on objects in memory, its result and its model; backbones and models of the user's own."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
from flax import linen, nnx
from jax import export
from sklearn.datasets import load_digits

import fcljax
from fcljax import api, cli
from fcljax.errors import InputError
from fcljax.federated.check import describe
from fcljax.models.own import own_config
from fcljax.parts.server import ServerRule, ServerUpdate
from fcljax.parts.simulation import simulate
from fcljax.runs.model import WITHOUT_DIGEST, _check_program
from fcljax.terminal import NotebookBar

PIXELS, DIGIT = load_digits(return_X_y=True)
X, Y = (PIXELS.reshape(-1, 8, 8) / 16).astype(np.float32)[:400], DIGIT[:400]
WORDS = np.array([f"digit {label}" for label in Y])
DATA = (X[:300], WORDS[:300], X[300:], WORDS[300:])
SHORT = {"tasks": 2, "clients": 2, "rounds": 2, "epochs": 2, "min_examples": 1, "lr": 0.05}
FLAT = fcljax.Backbone(lambda params, image: image.mean(-1).reshape(-1, 64) * params, jnp.ones(()), 8)


@dataclasses.dataclass(frozen=True)
class ShrinkOptions:
    shrink: float = 0.0
    """Weight of the penalty."""


def shrinking(options, run):
    def penalty(step, memory):
        return options.shrink * optax.tree.norm(step.trainable.classifier, squared=True)

    rules = (fcljax.ClientRule("shrink", loss=penalty),)
    learner = fcljax.linear_learner(run)
    return fcljax.federate(run, learner, loss=fcljax.cross_entropy_loss("seen"), client_rules=rules)


# labels of each of two tasks, in the caller's own words
TASKS = [[f"digit {label}" for label in some] for some in ((3, 1, 4, 5), (9, 2, 6, 8, 7, 0))]
OWN = fcljax.MethodEntry("a small classifier", ShrinkOptions, shrinking, adapter="linear")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a method, arrays and a network that are all objects of this file."""
    out = tmp_path_factory.mktemp("api") / "run"
    listed = {"tasks": TASKS}
    return fcljax.run(OWN, DATA, backbone=FLAT, out=out, progress=False, shrink=1e-4, **SHORT | listed)


def test_a_run_on_objects_in_memory_has_everything_that_a_run_has(result):
    metrics = result.metrics
    assert (metrics["method"], metrics["dataset"], metrics["backbone"]) == ("shrinking", "arrays", "own")
    assert metrics["config"]["shrink"] == 1e-4 and 0 < metrics["A_last"] < 1
    assert [[metrics["class_names"][c] for c in task] for task in metrics["task_classes"]] == TASKS
    np.testing.assert_array_equal(np.isnan(result.accuracy), [[False, True], [False, False]])
    assert {"accuracy", "matrix"} <= set(result.figures) and result.page.exists()
    assert "mean accuracy after the last task" in repr(result)
    assert result._repr_html_().count("<tr>") == 6 and "data:image/png;base64" in result._repr_html_()


@pytest.mark.parametrize(
    ("data", "tasks"),
    [(DATA, [["digit 9", "digit 3"], ["digit 2"]]), ("digits", [[5, 1], [9]])],
    ids=["arrays", "named data"],
)
def test_tasks_may_list_a_part_of_the_classes(data, tasks, capsys):
    """Numbers of named data are those of the whole data set."""
    result = fcljax.run("fedncm", data, backbone=FLAT, tasks=tasks, clients=2)
    if data is DATA:
        others = np.count_nonzero(~np.isin(Y, [2, 3, 9]))
        line = f"classes: 3 of 10; {others} of 400 examples have other labels and are left out"
        assert line in capsys.readouterr().err
    names = [[result.metrics["class_names"][c] for c in task] for task in result.metrics["task_classes"]]
    assert names == [[str(label) for label in task] for task in tasks]
    assert result.confusion.shape == (3, 4)
    predicted = result.predict(X[:60], preprocess=True)
    assert {*map(str, predicted)} <= {name for task in names for name in task}


def test_without_test_examples_owners_are_of_all_examples(capsys):
    short = {"backbone": FLAT, "tasks": 2}
    with pytest.raises(InputError, match=r"^partition: owners are int64 of shape \[300\]; .* shape \[400\]"):
        fcljax.run("fedncm", (X, Y), partition=Y[:300], **short)
    result = fcljax.run("fedncm", (X, Y), partition=np.arange(400) % 3, **short)
    test = sum(round(0.2 * count) for count in np.bincount(Y))
    said = capsys.readouterr().err
    assert f"data: {test} of 400 examples, a fifth of each class, are for testing" in said
    assert result.metrics["config"]["clients"] == 3 and result.confusion.sum() == test


def test_the_final_model_predicts_in_the_callers_labels_as_the_run_evaluated(result):
    predicted, classes = result.predict(DATA[2]), result.metrics["task_classes"]
    assert set(predicted) <= set(WORDS)
    names = np.array(result.metrics["class_names"])
    by_task = [
        np.mean(predicted[mine] == DATA[3][mine]) for mine in (np.isin(DATA[3], names[c]) for c in classes)
    ]
    np.testing.assert_allclose(by_task, result.accuracy[-1], atol=1e-6)


def test_a_saved_model_predicts_the_same_without_the_method(result, tmp_path):
    scores = result.model.scores(X[:70])
    file = result.save(tmp_path / "model.npz")
    again = fcljax.Model.load(file)
    np.testing.assert_allclose(again.scores(X[:70]), scores, rtol=1e-6)
    np.testing.assert_array_equal(again.predict(X[:70]), result.predict(X[:70]))
    enlarged = np.kron(X[:3], np.ones((1, 2, 2), np.float32))
    np.testing.assert_array_equal(again.predict([*enlarged], preprocess=True), result.predict(X[:3]))
    with pytest.raises(InputError, match="images: 4x4; the model takes 8x8; nearest: preprocess=True"):
        again.predict(X[:3, :4, :4])
    (tmp_path / "broken.npz").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="is not a saved model"):
        fcljax.Model.load(tmp_path / "broken.npz")
    before = dict(np.load(file)) | {"about": np.array('{"format": "fcljax-model-1", "image": [64, 8, 8]}')}
    np.savez(tmp_path / "before.npz", **before)
    with pytest.raises(InputError, match="older version wrote it, .* save it again"):
        fcljax.Model.load(tmp_path / "before.npz")
    about = '{"format": "fcljax-model-2", "image": [64, 8, 8]%s}'
    np.savez(tmp_path / "before.npz", **before | {"about": np.array(about % "")})
    with pytest.raises(InputError, match="does not say how its images were prepared: save it again"):
        fcljax.Model.load(tmp_path / "before.npz").predict(X[:3], preprocess=True)
    np.savez(tmp_path / "bad.npz", **before | {"about": np.array(about % ', "geometry": {"kernel": "box"}')})
    with pytest.raises(InputError, match="is not a saved model .* resizes with 'box'"):
        fcljax.Model.load(tmp_path / "bad.npz")


def test_a_model_says_which_images_are_padding(tmp_path):
    """Also after it was saved: the logits of a short batch count its images."""

    def count(arrays, image, mask):
        return jnp.full((len(image), 2), jnp.sum(mask)) + 0 * arrays[0] + 0 * image.sum()

    model = fcljax.Model(count, [jnp.zeros(2)], (4, 8, 8), np.arange(2))
    again = fcljax.Model.load(model.save(tmp_path / "model.npz"))
    for each in (model, again):
        assert each.scores(X[:9])[:, 0].tolist() == [4] * 8 + [1]


def saved_program(function, path):
    """The file of a model whose program is `function`, without the checks of `save`."""
    given = [jax.ShapeDtypeStruct((2,), jnp.float32)]
    images = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.uint8), jax.ShapeDtypeStruct((4,), jnp.bool_)
    exported = export.export(jax.jit(function), platforms=["cpu"])(given, *images)
    about = {"format": WITHOUT_DIGEST, "image": [4, 8, 8]}
    content = {"program": np.frombuffer(exported.serialize(), np.uint8), "array_0": np.zeros(2, np.float32)}
    np.savez(path, about=np.array(json.dumps(about)), labels=np.arange(2), **content)
    return path


def test_a_model_file_calls_no_native_code(tmp_path):
    def plain(arrays, image, mask):
        return jnp.zeros((4, 2)) + arrays[0] + image.sum() + mask.sum()

    def native(arrays, image, mask):
        return plain(arrays, image, mask) + jnp.linalg.cholesky(jnp.eye(2) + image.sum())[0]

    assert fcljax.Model.load(saved_program(plain, tmp_path / "plain.npz")).predict(X[:3]).tolist() == [0] * 3
    with pytest.raises(InputError, match="calls native code, 'lapack_spotrf_ffi'"):
        fcljax.Model.load(saved_program(native, tmp_path / "native.npz"))
    with pytest.raises(InputError, match="model: its program calls native code"):
        fcljax.Model(native, [jnp.zeros(2)], (4, 8, 8), np.arange(2)).save(tmp_path / "own.npz")
    assert not (tmp_path / "own.npz").exists()
    for call in ('stablehlo.custom_call @"strange name"(%0)', '"stablehlo.custom_call"(%0) <{target = "x"}>'):
        with pytest.raises(ValueError, match="native code"):
            _check_program(call)
    _check_program("%1 = stablehlo.custom_call @Sharding(%0)")
    with pytest.raises(ValueError, match="waits for its host"):
        _check_program("%1 = stablehlo.infeed %0")


def test_a_program_that_takes_or_returns_other_things_is_no_model(tmp_path):
    def three(arrays, image, mask):
        return jnp.zeros((4, 3)) + arrays[0][0] + image.sum() + mask.sum()

    with pytest.raises(
        InputError, match="is not a saved model .*returns \\(4, 3\\) for 4 examples and 2 labels"
    ):
        fcljax.Model.load(saved_program(three, tmp_path / "three.npz"))


def test_a_damaged_model_file_is_refused_when_it_is_loaded(tmp_path):
    """One byte anywhere: refused in one line, or of no influence."""

    def count(arrays, image, mask):
        return jnp.full((len(image), 2), jnp.sum(mask)) + arrays[0] + 0 * image.sum()

    model = fcljax.Model(count, [jnp.arange(2.0)], (4, 8, 8), np.arange(2))
    content = model.save(tmp_path / "model.npz").read_bytes()
    refused = 0
    for place in range(0, len(content), len(content) // 40):
        damaged = content[:place] + bytes([content[place] ^ 32]) + content[place + 1 :]
        (tmp_path / "damaged.npz").write_bytes(damaged)
        try:
            loaded = fcljax.Model.load(tmp_path / "damaged.npz")
        except InputError as error:
            assert "is not a saved model" in str(error) and "\n" not in str(error)
            refused += 1
        else:
            np.testing.assert_array_equal(loaded.scores(X[:4]), model.scores(X[:4]))
    assert refused > 20


def test_a_finished_run_is_resumed_only_with_the_same_arrays(result):
    given = {"out": result.folder, "resume": True, "progress": False, "backbone": FLAT}
    assert fcljax.run(OWN, DATA, shrink=1e-4, **given, **SHORT | {"tasks": TASKS}).metrics == result.metrics
    other = fcljax.Result(
        result.metrics, result.folder, result.settings, supplied=result.supplied._replace(dataset=None)
    )
    with pytest.raises(InputError, match="dataset: unknown name 'arrays'"):
        other.predict(X[:1])


@pytest.mark.long
def test_a_batch_is_cut_to_the_largest_client_and_a_line_says_so(tmp_path, capsys):
    short = SHORT | {"image_size": 8, "progress": True, "epochs": 1}
    runs = [
        fcljax.run("linear", DATA, batch_size=size, out=tmp_path / str(size), **short)
        for size in (1024, 10**9)
    ]
    assert runs[0].metrics["accuracy"] == runs[1].metrics["accuracy"]
    assert "batch size: " in capsys.readouterr().err and runs[1].settings.batch_size == 10**9
    again = fcljax.run("linear", DATA, batch_size=10**9, out=runs[1].folder, resume=True, **short)
    assert again.metrics == runs[1].metrics


@pytest.mark.long
def test_arrays_in_memory_give_the_results_of_the_same_arrays_in_a_file(tmp_path):
    np.savez(tmp_path / "own.npz", x_train=X[:300], y_train=Y[:300], x_test=X[300:], y_test=Y[300:])
    short = SHORT | {"image_size": 8, "progress": False}
    file = fcljax.run("linear", f"npz:{tmp_path / 'own.npz'}", **short).metrics
    arrays = fcljax.run("linear", (X[:300], Y[:300], X[300:], Y[300:]), **short).metrics
    assert file["accuracy"] == arrays["accuracy"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data": DATA[:3]}, "data: 3 arrays; expected (x, y) or (x, y, x_test, y_test)"),
        ({"data": (X[:10], Y[:10])}, "data: no class has three examples, of which one could test"),
        ({"data": (X[:5], *DATA[1:])}, "data: x has 5 examples but y has 300; they must match"),
        ({"data": (np.eye(10)[Y[:300]], *DATA[1:])}, "data: x has shape (300, 10); expected [N, H, W, 3]"),
        ({"data": (np.eye(10)[Y[:300]], *DATA[1:])}, "; for a table of numbers: backbone mlp"),
        ({"data": (X[:300] * 255, *DATA[1:])}, "data: x has values from 0 to 255"),
        ({"data": (X[:300] - 0.5, *DATA[1:])}, "nearest: (x - x.min()) / (x.max() - x.min())"),
        ({"data": (*DATA[:3], np.array(["one"] * 100))}, "data: y_test has the label one, and y has not"),
        ({"data": (X[:300], np.eye(10)[Y[:300]], *DATA[2:])}, "nearest: y.argmax(-1)"),
        ({"tasks": 99}, "tasks: 99 tasks cannot share 10 classes"),
        ({"tasks": [3, 7]}, "tasks: [3, 7] is neither a number nor a list of lists of labels"),
        ({"tasks": [["digit 1"], []]}, "tasks: task 2 has no labels"),
        (
            {"tasks": [["digit 1", "digit 11"]]},
            "tasks: no example has label 'digit 11'; did you mean 'digit 1'",
        ),
        ({"tasks": [[0], [1]]}, "tasks: no example has label '0'; choose from: digit 0, "),
        ({"tasks": [["digit 1"], ["digit 1"]]}, "tasks: label 'digit 1' is listed twice"),
        ({"tasks": TASKS, "task_sizes": [4, 6]}, "task_sizes: tasks has the labels of each task"),
        ({"shrnk": 1.0}, "options: unknown key 'shrnk'; did you mean 'shrink'?"),
        ({"adapter": "lora"}, "adapter: 'lora' works inside attention, but the backbone has none"),
        ({"resume": True}, "resume: there is no run directory to resume; give out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_one_line(changed, says):
    arguments = {"data": DATA, "backbone": FLAT, "progress": False} | SHORT | changed
    with pytest.raises(InputError) as error:
        fcljax.run(OWN, **arguments)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_channels_first_and_floats_become_grey_levels():
    from fcljax.data.files.arrays import checked_images

    grey = (255 * X[:4]).round().astype(np.uint8)
    colour = np.repeat(grey[..., None], 3, axis=-1)
    for images in (
        colour,
        colour.transpose(0, 3, 1, 2),
        grey,
        grey[:, None],
        X[:4],
        X[:4].astype(np.float16),
    ):
        np.testing.assert_array_equal(checked_images("data", "x", images), colour)


# ---- networks of the user's own ----------------------------------------------------------------------------


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.norm = nnx.Conv(3, 5, (3, 3), rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, image):
        return self.drop(self.norm(self.layer(image))).mean((1, 2))


def test_modules_of_flax_become_backbones():
    image = jax.random.uniform(jax.random.key(0), (2, 8, 8, 3))
    module = Convolution(nnx.Rngs(0))
    own = fcljax.Backbone.of(module, 8)
    module.eval()
    np.testing.assert_allclose(own.apply(own.params, image), module(image), rtol=1e-6)
    dense = linen.Dense(4)
    variables = dense.init(jax.random.key(1), image)
    other = fcljax.Backbone.of(dense, 8, variables)
    np.testing.assert_allclose(other.apply(other.params, image), dense.apply(variables, image), rtol=1e-6)
    assert own_config(own, describe).width == 5 and own.name == "Convolution"
    with pytest.raises(
        InputError, match="backbone: Dense is neither a flax.nnx module nor a flax.linen module"
    ):
        fcljax.Backbone.of(dense, 8)
    with pytest.raises(InputError, match="backbone: Dense is neither a name nor a Backbone"):
        api._network(dense)
    with pytest.raises(InputError, match="backbone: it reads images, and has no image_size"):
        api._network(module)


@pytest.mark.parametrize(
    ("apply", "says"),
    [
        (
            lambda params, image: image,
            "returned shape [2, 8, 8, 3] for 2 images; expected features [2, D]",
        ),
        (lambda params, image: (image, image), "returned tuple for 2 images"),
        (lambda params, image: image @ jnp.ones((5, 5)), "fails on images of shape [2, 8, 8, 3]"),
    ],
)
def test_a_backbone_that_makes_no_features_is_one_line_with_its_file(apply, says):
    with pytest.raises(InputError) as error:
        own_config(fcljax.Backbone(apply, (), 8), describe)
    assert str(error.value).startswith("backbone: test_api.py:") and says in str(error.value)


# ---- the middle layer --------------------------------------------------------------------------------------

VALUES = np.array([[1.0], [3.0], [5.0], [11.0], [2.0]], np.float32)
OWNER = ["b", "a", "a", "b", "c"]


def distance(model, x, y):
    return 0.5 * jnp.sum((x - model) ** 2, axis=-1)


def averaged(loss=distance, rounds=1, **options):
    client = fcljax.local_sgd(loss, optax.sgd(1.0), epochs=1, batch_size=4)
    method = fcljax.fedavg(jnp.zeros(1), client, **options)
    return simulate(method, VALUES, np.zeros(5, int), OWNER, rounds)


def test_one_step_to_the_mean_of_each_client_averages_to_the_mean_of_all():
    """Each client's model becomes the mean of its own values: 6, 4, 2, with 2, 2, 1 examples."""
    model, history = averaged()
    np.testing.assert_allclose(model, [22 / 5], rtol=1e-6)
    assert history[0]["participants"] == 3
    # the mean of half the squares before the step
    np.testing.assert_allclose(history[0]["loss"], np.mean(VALUES**2) / 2, rtol=1e-6)


@pytest.mark.long
def test_aggregation_rules_and_attacks_are_those_of_runs():
    np.testing.assert_allclose(averaged(aggregator="median").model, [4.0], rtol=1e-6)  # of 4, 6 and 2
    attacked = averaged(malicious=1, attack="sign_flip", aggregator="uniform").model
    np.testing.assert_allclose(attacked, [(-4 + 6 + 2) / 3], rtol=1e-6)  # the first id is client "a"
    np.testing.assert_allclose(averaged(clip_norm=1.0, aggregator="uniform").model, [1.0], rtol=1e-6)


@pytest.mark.long
def test_client_rules_join_the_loss():
    """Of two steps of 1/2 from 0 to a mean m, the second starts at m/2, where FedProx adds m/2 to the
    gradient -m/2: nothing moves any more. Without it the model ends at 3m/4."""
    client = fcljax.local_sgd(distance, optax.sgd(0.5), epochs=2, batch_size=4)
    for rules, share in (((), 0.75), ((fcljax.prox(1.0),), 0.5)):
        method = fcljax.fedavg(jnp.zeros(1), client, client_rules=rules)
        model, _ = simulate(method, VALUES, np.zeros(5, int), OWNER, rounds=1)
        np.testing.assert_allclose(model, [share * 22 / 5], rtol=1e-6)


def test_the_last_of_a_simulation_s_rounds_and_no_other_knows_that_it_is_the_last():
    def count(round, params, state):
        return ServerUpdate(params._replace(classifier=params.classifier + round.last), state)

    client = fcljax.local_sgd(distance, optax.sgd(0.0), epochs=1, batch_size=4)
    method = fcljax.fedavg(jnp.zeros(1), client, server_rules=(ServerRule("count", count),))
    assert simulate(method, VALUES, np.zeros(5, int), OWNER, rounds=3).model.tolist() == [1.0]


def mean_distance(model, x, y):
    return distance(model, x, y).mean()


def test_mistakes_of_a_simulation_are_one_line():
    with pytest.raises(
        InputError, match=r"loss: test_api.py:\d+ mean_distance\(\) returned shape \(\); .*leave out"
    ):
        averaged(mean_distance)
    with pytest.raises(InputError, match="loss: local_sgd gets 3 arguments"):
        averaged(lambda model, x: x)
    with pytest.raises(InputError, match="fedavg: unknown option 'agregator'"):
        averaged(agregator="median")
    with pytest.raises(InputError, match="simulate: x, y and owner have the shapes"):
        simulate(
            fcljax.fedavg(jnp.zeros(1), fcljax.local_sgd(distance, optax.sgd(1.0))),
            VALUES,
            OWNER,
            OWNER[1:],
            1,
        )


# ---- the package -------------------------------------------------------------------------------------------


def test_the_package_offers_what_an_author_needs_and_stays_cheap():
    assert not hasattr(fcljax, "Any") and "importlib" not in dir(fcljax)
    assert fcljax.Aggregate.__name__ == "Aggregate" and callable(fcljax.federate) and callable(fcljax.run)
    code = "import sys, fcljax; print([m for m in ('jax', 'numpy', 'rich', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=small_runs.ROOT)
    assert done.stdout == "[]\n"


def test_a_bar_in_a_notebook_needs_no_widgets():
    bar = NotebookBar("task {task.fields[t]}", "loss {task.fields[loss]}")
    bar.total, bar.fields = 4, {"t": "1", "loss": "-"}
    bar.handle = None
    bar.update(0, advance=3, t="2", loss="<b>")
    assert bar._repr_html_() == '<progress value="3" max="4"></progress> 3/4 task 2  loss &lt;b&gt;'


NAMED = """
from fcljax import MethodEntry, cross_entropy_loss, federate, linear_learner

def mine(options, run):
    return federate(run, linear_learner(run), loss=cross_entropy_loss())

METHOD = MethodEntry("without options", None, mine, adapter="linear", name="Mine")
"""


@pytest.mark.long
def test_an_entry_s_name_stands_in_the_tables(tmp_path, capsys):
    (tmp_path / "a_very_long_file_name_of_a_method.py").write_text(NAMED)
    file, out = str(tmp_path / "a_very_long_file_name_of_a_method.py"), str(tmp_path / "run")
    assert cli.main(["run", file, *small_runs.COMMON, "--rounds", "1", "--clients", "2", "--out", out]) == 0
    assert "Mine" in capsys.readouterr().out
    metrics = fcljax.Result.of(out, file).metrics
    assert (metrics["method"], metrics["config"]["method"]) == ("Mine", file)
    with pytest.raises(InputError, match="is a program, and a settings file cannot run one"):
        fcljax.Result.of(out)


def test_help_names_keys_and_arrays_by_their_aliases():
    for name in sorted({name for names in fcljax._MODULES.values() for name in names}):
        exported = getattr(fcljax, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            assert not re.search(r"jaxlib|typing\.", str(inspect.signature(exported))), name
