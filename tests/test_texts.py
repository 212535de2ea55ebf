"""`--dataset texts:PATH`: texts in tables of the hub and in LEAF's JSON, hashed or by a tokenizer file."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fcljax import Model, cli
from fcljax.data.files import texts
from fcljax.data.files.sources import DataOptions, load_dataset
from fcljax.data.kinds import ArrayData, TextData, with_length
from fcljax.errors import InputError

WORDS = ["red car", "blue car", "old dog", "young dog"]


def tables(folder, **changed):
    """Four training and two test texts; the classes are named in another order than the alphabet's."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    facts = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["thing", "animal"]}}}}
    folder.mkdir()
    for split, rows in (("train", [0, 1, 2, 3]), ("test", [3, 0])):
        columns = {"text": [WORDS[i] for i in rows], "label": [i // 2 for i in rows]}
        columns["site"] = [f"s{i % 2}" for i in rows]
        if split == "train":
            columns |= changed
        table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(facts)})
        pq.write_table(table, folder / f"{split}-00000.parquet")
    (folder / "dataset_infos.json").write_text("{}")
    return f"texts:{folder}"


def leaf(path, user_data):
    counts = [len(data["y"]) for data in user_data.values()]
    path.write_text(json.dumps({"users": list(user_data), "num_samples": counts, "user_data": user_data}))
    return path


def load(name):
    return load_dataset(name, DataOptions())


def refusal(name):
    with pytest.raises(InputError) as error:
        load(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_texts_labels_and_columns_are_those_of_the_tables(tmp_path):
    data = load(tables(tmp_path / "own"))
    assert data.kind == TextData() and data.class_names == ("thing", "animal")
    np.testing.assert_array_equal(data.x_train["ids"], TextData().encode(WORDS)["ids"])
    np.testing.assert_array_equal(data.x_test["ids"], TextData().encode(["young dog", "red car"])["ids"])
    assert data.y_train.tolist() == [0, 0, 1, 1] and data.y_test.tolist() == [1, 0]
    assert data.columns["site"].tolist() == ["s0", "s1", "s0", "s1"] and "text" not in data.columns


def test_a_tokenizer_file_makes_tokens_of_an_encoder(tmp_path, monkeypatch):
    asked = []

    def tokenize(words, file):
        asked.append((words, file))
        return {"ids": np.full((len(words), 64), 7, np.int32), "mask": np.ones((len(words), 64), bool)}

    monkeypatch.setattr(texts, "tokenize", tokenize)
    data = load(f"{tables(tmp_path / 'own')},{tmp_path}/tokenizer.json")
    assert asked[0] == (WORDS, f"{tmp_path}/tokenizer.json")
    assert data.kind == ArrayData() and (data.x_train["ids"] == 7).all()


def test_padding_that_no_text_of_both_splits_needs_is_left_out(tmp_path, monkeypatch):
    def tokenize(words, _file):
        mask = np.arange(64) < np.array([[2 + word.count("o")] for word in words])
        return {"ids": np.where(mask, 9, 0).astype(np.int32), "mask": mask}

    monkeypatch.setattr(texts, "tokenize", tokenize)
    data = load(f"{tables(tmp_path / 'own')},{tmp_path}/tokenizer.json")
    assert data.x_train["ids"].shape == (4, 4) and data.x_test["mask"].shape == (2, 4)
    assert data.x_train["mask"].sum(1).tolist() == [2, 2, 4, 4]


def test_clients_of_leaf_are_a_column_and_tweets_have_their_text_in_the_fifth_field(tmp_path):
    tweet = ["1", "Mon", "NO_QUERY", "ann", "so sad today"]
    train = leaf(
        tmp_path / "train.json", {"ann": {"x": [tweet, tweet], "y": [0, 4]}, "bob": {"x": ["fine"], "y": [4]}}
    )
    test = leaf(tmp_path / "test.json", {"eve": {"x": ["fine", "sad"], "y": [4, 0]}})
    data = load(f"texts:{train},{test}")
    expected = TextData().encode(["so sad today", "so sad today", "fine"])
    np.testing.assert_array_equal(data.x_train["ids"], expected["ids"])
    assert data.class_names == ("0", "4") and data.y_train.tolist() == [0, 1, 1]
    assert data.columns["client"].tolist() == ["ann", "ann", "bob"]
    assert data.columns_test["client"].tolist() == ["eve", "eve"]


def test_a_fifth_of_each_class_of_one_file_is_for_testing(tmp_path):
    clients = {name: {"x": [f"{name} {i}" for i in range(10)], "y": ["a"] * 5 + ["b"] * 5} for name in "uv"}
    data = load(f"texts:{leaf(tmp_path / 'all.json', clients)}")
    assert np.bincount(data.y_test).tolist() == [2, 2] and len(data.y_train) == 16
    assert len(data.columns["client"]) == 16


def test_rows_without_a_text_or_a_label_are_named(tmp_path):
    assert "row 1: the column 'text' is ' '; expected text" in refusal(
        tables(tmp_path / "a", text=["x", " ", "y", "z"])
    )
    assert "row 2 (null) has no label; 1 of 4 examples have none" in refusal(
        tables(tmp_path / "b", label=[0, 0, None, 1])
    )
    numbers = leaf(tmp_path / "c.json", {"ann": {"x": [[1, 2]], "y": [0]}})
    assert "client 'ann': x holds [1, 2]; expected texts" in refusal(f"texts:{numbers}")
    assert "expected texts:DATA or texts:TRAIN,TEST" in refusal("texts:a,b,c")


def test_tables_of_images_name_the_form_of_texts(tmp_path):
    folder = tables(tmp_path / "own").removeprefix("texts:")
    assert refusal(f"hf:{folder}").endswith(f"; nearest: --dataset texts:{folder}")


@pytest.mark.long
def test_a_run_on_texts_of_leaf_s_clients(tmp_path):
    clients = {name: {"x": WORDS * 10, "y": [0, 1, 2, 3] * 10} for name in ("ann", "bob")}
    name = f"texts:{leaf(tmp_path / 'all.json', clients)}"
    options = ["--partition", "column:client", "--tasks", "2"]
    out = tmp_path / "run"
    assert cli.main(["run", "fedncm", "--dataset", name, *options, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["A_last"] == 1


def test_a_model_reads_texts_with_other_padding_and_refuses_longer_ones():
    def logits(_arrays, text, _mask):
        return jnp.stack([text["ids"].sum(1), 2 * text["mask"].sum(1)], axis=1).astype(jnp.float32)

    stored = {"ids": jax.ShapeDtypeStruct((3,), jnp.int32), "mask": jax.ShapeDtypeStruct((3,), jnp.bool_)}
    model = Model(logits, [], (2, 0, 0), np.array(["a", "b"]), None, stored)
    ids = np.array([[1, 1, 1], [1, 9, 0]], np.int32)
    text = {"ids": ids, "mask": ids > 0}
    expected = model.scores(text)
    np.testing.assert_array_equal(expected, [[3, 6], [10, 4]])
    for length in (5, 3):
        np.testing.assert_array_equal(model.scores(with_length(text, length)), expected)
    short = {name: array[1:, :2] for name, array in text.items()}
    np.testing.assert_array_equal(model.scores(short), expected[1:])
    longer = {"ids": np.ones((1, 4), np.int32), "mask": np.ones((1, 4), bool)}
    with pytest.raises(InputError, match=r"a text has 4 tokens, and the model reads 3; nearest: .*length=3"):
        model.predict(longer)


def test_a_pytree_with_ids_of_the_users_own_is_left_as_it_is():
    def logits(_arrays, tree, _mask):
        return jnp.stack([tree["ids"].sum(1), tree["mask"].sum(1)], axis=1).astype(jnp.float32)

    stored = {"ids": jax.ShapeDtypeStruct((2,), jnp.int32), "mask": jax.ShapeDtypeStruct((3,), jnp.bool_)}
    model = Model(logits, [], (1, 0, 0), np.array(["a", "b"]), None, stored)
    tree = {"ids": np.array([[4, 5]], np.int32), "mask": np.ones((1, 3), bool)}
    np.testing.assert_array_equal(model.scores(tree), [[9, 3]])
