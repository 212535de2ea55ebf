"""Runs on data that are no images: tables, series, pytrees; what cannot work is refused in one line."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_runs import assert_same_run, some

import fcljax
from fcljax.commands.running import Paths
from fcljax.commands.running import settings as settings_of
from fcljax.data.files.any_arrays import checked_examples, dataset_of_any_arrays
from fcljax.data.files.csv_files import csv_dataset
from fcljax.data.files.sources import DataOptions, load_dataset
from fcljax.data.kinds import ArrayData, TextData
from fcljax.errors import InputError
from fcljax.methods import METHODS, find_method
from fcljax.models.products import attention, masked_attention
from fcljax.models.shapes import TextConfig
from fcljax.models.text import apply_text, check_text, init_text
from fcljax.models.vit import Injection, Lora, Prefix, attention_inputs
from fcljax.runs.build import build

LABEL = np.arange(120) % 4
RNG = np.random.default_rng(0)
SERIES = (RNG.normal(size=(120, 16, 2)) + LABEL[:, None, None]).astype(np.float32)
SHORT = {"clients": 2, "rounds": 1, "tasks": 2, "progress": False}


def refusal(function, *arguments, **options):
    with pytest.raises(InputError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


class Pairs(nnx.Module):
    """Reads {"series": [B, 16, 2], "code": int [B, 3]}."""

    def __init__(self):
        self.table = nnx.Embed(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, inputs):
        return jnp.concatenate([inputs["series"].mean(1), self.table(inputs["code"]).mean(1)], -1)


# ---- the gate ----------------------------------------------------------------------------------------------


def test_numbers_are_stored_in_at_most_32_bits():
    values = {"a": np.ones((3, 2)), "b": np.arange(3), "c": np.ones((3, 1), np.uint8), "d": np.ones(3, bool)}
    stored = checked_examples("data", "x", values).input
    kinds = {name: (array.dtype.name, array.shape) for name, array in stored.items()}
    assert kinds == {
        "a": ("float32", (3, 2)),
        "b": ("int32", (3, 1)),
        "c": ("uint8", (3, 1)),
        "d": ("bool", (3, 1)),
    }


def test_columns_are_standardised_by_the_training_examples():
    x = np.array([[1.0, 5.0], [3.0, 5.0]])
    kind = ArrayData().standardised(x)
    np.testing.assert_allclose(kind.read(jnp.asarray(x, jnp.float32)), [[-1, 0], [1, 0]])


def test_a_token_has_the_same_id_in_every_text():
    ids, mask = TextData(length=4).encode(["Red car!", "car 12 red x y"]).values()
    assert ids[0, 0] == ids[1, 2] and ids[0, 1] == ids[1, 0]
    assert mask.tolist() == [[True, True, True, False], [True] * 4] and ids[0, 3] == 0


def test_without_test_examples_a_fifth_of_each_class_is_for_testing():
    dataset = dataset_of_any_arrays((SERIES, LABEL)).dataset
    assert np.bincount(dataset.y_test).tolist() == [6] * 4 and len(dataset.y_train) == 96
    both = np.concatenate([dataset.x_train, dataset.x_test])
    assert sorted(both[:, 0, 0].tolist()) == sorted(SERIES[:, 0, 0].tolist())


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ([[1, 2], [3]], "x is not an array: its values have several shapes"),
        (
            np.array([[0.0, np.nan]] * 3),
            "x has 3 values that are NaN or infinite in 32 bits, the first at [0, 1]",
        ),
        (np.array([[1e300]] * 3), "NaN or infinite in 32 bits"),
        ({"ids": np.ones((3, 4)), "mask": np.ones((2, 4))}, "x['ids'] has 3 examples and x['mask'] 2"),
        (np.array([["a"], ["b"]]), "expected an array of numbers, or of one text for each example"),
        (np.array([2**40] * 3), "x has integers beyond 32 bits; nearest: x.astype('float32')"),
        (np.empty((3, 0)), "x has shape (3, 0)"),
        ({}, "x has no arrays"),
        (np.array([{}, []], object), "expected an array of numbers"),
    ],
)
def test_examples_that_cannot_be_read_are_refused(x, says):
    assert says in refusal(checked_examples, "data", "x", x)


def test_splits_of_other_shapes_are_refused():
    arrays = (SERIES, LABEL, SERIES[:, :8], LABEL)
    assert "of x is float32 [16, 2] and of x_test float32 [8, 2]" in refusal(dataset_of_any_arrays, arrays)
    assert "expected (x, y) or (x, y, x_test, y_test)" in refusal(dataset_of_any_arrays, arrays[:3])


# ---- CSV ---------------------------------------------------------------------------------------------------

ROWS = [f"{number},{'red' if number % 2 else 'blue'},{number / 4},{number % 2}" for number in range(20)]
HEADER = "age,colour,width,label"


def written(tmp_path, *rows, header=HEADER, name="table.csv"):
    (tmp_path / name).write_text("\n".join([header, *rows]) + "\n")
    return f"csv:{tmp_path / name}"


def test_a_table_has_a_column_for_each_text(tmp_path):
    notes = []
    dataset = csv_dataset(written(tmp_path, *ROWS), notes.append)
    assert dataset.x_train.shape == (16, 4) and dataset.x_test.shape == (4, 4)
    age, blue, red, width = dataset.x_train.T
    np.testing.assert_array_equal(red, age % 2)
    np.testing.assert_array_equal(blue, 1 - red)
    np.testing.assert_array_equal(width, age / 4)
    assert dataset.columns["colour"].tolist() == np.where(red == 1, "red", "blue").tolist()
    assert "4 of 20 examples" in notes[0] and "colour (2)" in notes[1]


def test_the_test_table_may_be_a_file_of_its_own(tmp_path):
    first = written(tmp_path, *ROWS)
    second = written(tmp_path, *ROWS[:3], name="test.csv").removeprefix("csv:")
    dataset = csv_dataset(f"{first},{second}", print)
    assert dataset.x_test[:, 0].tolist() == [0, 1, 2] and len(dataset.y_train) == 20


@pytest.mark.parametrize(
    ("rows", "header", "says"),
    [
        (
            ROWS,
            "age,colour,width,kind",
            "has no column label, class, target, y; it has: age, colour, width, kind",
        ),
        (ROWS, "age,colour,class,label", "has the label columns class and label"),
        (ROWS, "age,age,width,label", "the column 'age' comes twice"),
        ([*ROWS, "1,red,,0"], HEADER, "line 22: the column 'width' is empty"),
        (
            [*ROWS, "1,red,1,"],
            HEADER,
            "line 22 has no label; 1 of 21 examples have none: leave them out",
        ),
        (
            [f"{i},red,1,{i % 2 * 2 - 1}" for i in range(20)],
            HEADER,
            "line 2 has the label -1; write the classes -1 and 1 as 0 and 1",
        ),
        (
            [*ROWS, "1,red,nan,0"],
            HEADER,
            "line 22: the column 'width' has 'nan', which is not a finite number",
        ),
        ([*ROWS, "1,red,0"], HEADER, "line 22: 3 values for 4 columns"),
        (
            [f"{i},text {i},1,{i % 2}" for i in range(20)],
            HEADER,
            "the column 'colour' has 20 different texts",
        ),
        ([], HEADER, "has no rows below its header"),
        (["0", "1"], "label", "has only the column 'label'"),
    ],
    ids=lambda _value: "",
)
def test_a_table_that_cannot_be_read_is_refused_by_line(tmp_path, rows, header, says):
    assert says in refusal(csv_dataset, written(tmp_path, *rows, header=header), print)


def test_a_category_of_test_rows_alone_is_refused(tmp_path):
    second = written(tmp_path, "1,green,0,0", name="test.csv").removeprefix("csv:")
    said = refusal(csv_dataset, f"{written(tmp_path, *ROWS)},{second}", print)
    assert "line 2: the column 'colour' has 'green', which no training row has" in said


# ---- text --------------------------------------------------------------------------------------------------

SMALL = TextConfig(
    vocabulary=32,
    length=6,
    blocks=dataclasses.replace(TextConfig().blocks, width=8, depth=2, heads=2, mlp=16),
)
TEXT = {"ids": np.array([[3, 4, 5, 0, 0, 0]] * 2, np.int32), "mask": np.array([[1, 1, 1, 0, 0, 0]] * 2, bool)}
PARAMS = init_text(jax.random.key(0), SMALL)


@pytest.mark.parametrize("adapter", some(["none", "prompt", "prefix", "tokens", "lora"], ["none", "lora"]))
def test_nothing_reads_padding_and_every_adapter_is_read(adapter):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    injection = {
        "none": None,
        "prompt": Injection(prompt={0: draw(3, 8)}),
        "prefix": Injection(prefix={1: Prefix(draw(2, 3, 8), draw(2, 3, 8))}),
        "tokens": Injection(tokens=draw(3, 8)),
        "lora": Injection(lora={0: Lora(draw(2, 8), draw(8, 2), draw(2, 8), draw(8, 2))}),
    }[adapter]
    feature = apply_text(SMALL, PARAMS, TEXT, injection).cls
    other = {**TEXT, "ids": TEXT["ids"] + np.array([0, 0, 0, 7, 8, 9], np.int32)}
    shorter = {name: array[:, :3] for name, array in TEXT.items()}
    np.testing.assert_array_equal(apply_text(SMALL, PARAMS, other, injection).cls, feature)
    np.testing.assert_allclose(apply_text(SMALL, PARAMS, shorter, injection).cls, feature, atol=1e-5)
    plain = apply_text(SMALL, PARAMS, TEXT).cls
    assert (adapter == "none") == bool(np.allclose(plain, feature, atol=1e-4))


def test_padding_is_no_input_of_a_lora_pair():
    longer = attention_inputs(PARAMS, apply_text(SMALL, PARAMS, TEXT), 2)
    texts = {name: array[:, :3] for name, array in TEXT.items()}
    shorter = attention_inputs(PARAMS, apply_text(SMALL, PARAMS, texts), 2)
    gram = jnp.einsum("mbnd,mbne->mde", longer, longer)
    np.testing.assert_allclose(gram, jnp.einsum("mbnd,mbne->mde", shorter, shorter), atol=1e-4)


def test_attention_with_a_mask_that_hides_nothing_is_attention():
    q, k, v = jax.random.normal(jax.random.key(2), (3, 2, 2, 5, 4))
    expected = attention(q, k, v)
    np.testing.assert_allclose(masked_attention(q, k, v, jnp.ones((2, 1, 5), bool)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ids": TEXT["ids"] + 40}, "id 45 is not below the vocabulary of 32"),
        ({"mask": TEXT["mask"][:, :5]}, "mask is bool of shape (2, 5); expected bool [2, 6], of ids"),
        ({"mask": TEXT["ids"]}, "mask is int32"),
        (
            {"ids": np.zeros((2, 7), int), "mask": np.ones((2, 7), bool)},
            "expected integers [N, L] with L up to 6",
        ),
        ({"words": TEXT["ids"]}, "reads a list of texts, or a dict of ids [N, L] and mask [N, L]"),
    ],
)
def test_tokens_that_an_encoder_cannot_read_are_refused(changed, says):
    assert says in refusal(check_text, "data", TEXT | changed, SMALL)


def test_the_packaged_texts_are_of_ten_packages():
    dataset = load_dataset("text")
    assert dataset.class_names[:3] == ("asyncio", "distutils", "email") and len(dataset.class_names) == 10
    assert dataset.x_train["ids"].shape == (1184, 64) and len(dataset.y_test) == 296
    check_text("data", dataset.x_train, TextConfig())


# ---- what fits to what -------------------------------------------------------------------------------------


def test_npz_files_hold_numbers_of_any_shape(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=SERIES, y_train=LABEL, x_test=SERIES[:8], y_test=LABEL[:8])
    dataset = load_dataset(f"npz:{tmp_path / 'x.npz'}", DataOptions(as_arrays=True))
    np.testing.assert_array_equal(dataset.x_train, SERIES)
    assert dataset.kind == ArrayData()


def test_tables_of_scikit_learn_are_named():
    shapes = {name: load_dataset(name).x_train.shape for name in ("wine", "breast_cancer", "digits_table")}
    assert shapes == {"wine": (142, 13), "breast_cancer": (456, 30), "digits_table": (1438, 64)}


def test_a_method_whose_adapter_needs_attention_trains_the_whole_network_of_a_table():
    names = {
        method: settings_of(method, {"dataset": "wine"}, Paths()).adapter for method in ("ewc", "linear")
    }
    assert names == {"ewc": "full", "linear": "linear"}
    assert settings_of("ewc", {}, Paths()).adapter == "lora"


def test_a_network_of_random_values_trains_faster_than_a_pretrained_one():
    rates = {
        (method, dataset): settings_of(method, {"dataset": dataset, "adapter": "full"}, Paths()).full_lr
        for method, dataset in (("ewc", "wine"), ("ewc", "digits"), ("fedlwf-mc", "wine"))
    }
    assert rates == {("ewc", "wine"): 1e-3, ("ewc", "digits"): 1e-5, ("fedlwf-mc", "wine"): 1e-4}


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("target", {}, "method: target reads pixels, and wine has arrays; nearest: 'lwf'"),
        ("pmae", {}, "method: pmae reads pixels, and wine has arrays; nearest: 'icarl'"),
        ("ewc", {"adapter": "lora"}, "'lora' works inside attention, but the backbone has none"),
        ("lorm", {}, "nearest: a method that trains another adapter, such as 'ewc'"),
        (
            "ewc",
            {"backbone": "vit_b16"},
            "'vit_b16' reads images, and an example is float32 [13]; nearest: 'mlp'",
        ),
        ("ewc", {"backbone": "conv1d"}, "'conv1d' reads series [steps, channels]"),
        ("ewc", {"image_size": 8}, "image_size: 8 is for images, and the data set 'wine' has float32 [13]"),
        ("ewc", {"augment": True}, "augment: True is for images"),
        (
            "ewc",
            {"dataset": "text", "backbone": "mlp"},
            "an example of text is ['ids'] int32 [64], ['mask'] bool [64]",
        ),
        ("ewc", {"dataset": "text", "backbone": "vit_b16"}, "'vit_b16' reads images"),
        ("glfc", {"dataset": "text"}, "method: glfc reads pixels, and text has text; nearest: 'icarl'"),
        ("ewc", {"backbone": "text_micro"}, "a text encoder reads a list of texts"),
        ("ewc", {"dataset": "mix:wine+digits"}, "'wine' has arrays, and images are needed"),
        ("ewc", {"dataset": "digits", "backbone": "mlp"}, "'mlp' reads arrays, and digits has images"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(method, options, says):
    options = {"dataset": "wine", "tasks": 3, "clients": 2} | options
    assert says in refusal(lambda: build(settings_of(method, options, Paths())))


def test_methods_that_read_pixels_name_methods_that_read_any_data():
    named = {name: find_method(name).instead for name in METHODS if find_method(name).instead}
    assert len(named) == 13 and not any(find_method(instead).instead for instead in named.values())


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_on_a_table_resumes_predicts_and_is_saved(tmp_path):
    dataset = load_dataset("wine")
    arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    options = SHORT | {"tasks": 3, "rounds": 2, "backbone": "mlp"}
    result = fcljax.run("ewc", arrays, out=tmp_path / "whole", **options)
    cut = tmp_path / "cut"
    shutil.copytree(result.folder, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "6")  # of six rounds
    fcljax.run("ewc", arrays, out=cut, resume=True, **options)
    assert_same_run(cut, result.folder)
    predicted = result.predict(dataset.x_test)
    np.testing.assert_allclose(np.mean(predicted == dataset.y_test), result.metrics["A_last"], atol=0.2)
    again = fcljax.Model.load(result.save(tmp_path / "model.npz"))
    np.testing.assert_array_equal(again.predict(dataset.x_test), predicted)
    assert "[13]" in repr(again) and "make them equal" in refusal(again.predict, dataset.x_test[:, :5])


@pytest.mark.long
def test_a_pytree_trains_in_a_module_of_the_users_own(tmp_path):
    x = {"series": SERIES, "code": RNG.integers(0, 8, (120, 3))}
    result = fcljax.run("fedavg-ft", (x, LABEL), backbone=Pairs(), **SHORT)
    assert result.predict(x).shape == (120,)
    again = fcljax.Model.load(result.save(tmp_path / "model.npz"))
    np.testing.assert_array_equal(again.predict(x), result.predict(x))


def test_rows_without_a_label_are_skipped_for_a_network_of_the_users_own_too(tmp_path):
    name = written(tmp_path, *ROWS, "20,red,5,")
    options = SHORT | {"tasks": 1, "min_examples": 1, "backbone": nnx.Linear(4, 8, rngs=nnx.Rngs(0))}
    assert "line 22 has no label" in refusal(fcljax.run, "fedncm", name, **options)
    result = fcljax.run("fedncm", name, skip_corrupt=True, **options)
    assert np.isfinite(result.metrics["A_last"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table", "series"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_every_kind_of_data_or_is_refused_by_name(method, kind):
    data, options = {"table": ("wine", {"tasks": 3}), "series": ((SERIES, LABEL), {"backbone": "conv1d"})}[
        kind
    ]
    try:
        result = fcljax.run(method, data, **SHORT | options)
    except InputError as error:
        assert "nearest" in str(error) and "\n" not in str(error)
        return
    assert np.isfinite(result.metrics["A_last"])
