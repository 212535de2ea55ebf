"""`fcljax.read_clients`: LEAF's JSON and that with the parts of each client, for `fcljax.simulate`."""

import json

import numpy as np
import pytest

import fcljax
from fcljax import read_clients
from fcljax.errors import InputError

LEAF = {
    "users": ["u1", "u2"],
    "num_samples": [2, 1],
    "user_data": {
        "u1": {"x": [[0.5, 1.0], [0.25, 0.0]], "y": [1.0, 0.0]},
        "u2": {"x": [[1.0, 1.0]], "y": [2.0]},
    },
}


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_of_leaf_has_an_owner_for_each_example(tmp_path):
    data = read_clients(written(tmp_path / "a.json", LEAF | {"hierarchies": ["x", "y"]}))
    np.testing.assert_array_equal(data.x, np.array([[0.5, 1], [0.25, 0], [1, 1]], np.float32))
    assert data.x.dtype == np.float32 and data.y.dtype == np.int32 and data.y.tolist() == [1, 0, 2]
    assert data.owner.tolist() == ["u1", "u1", "u2"] and data.left_out == ("hierarchies",)


def test_a_folder_has_the_clients_of_all_its_files_and_empty_ones_are_told(tmp_path):
    written(tmp_path / "all_0.json", LEAF)
    more = {"u3": {"x": [[3, 4]], "y": [0.5]}, "u4": {"x": [], "y": []}}
    written(tmp_path / "all_1.json", {"users": ["u3", "u4"], "num_samples": [1, 0], "user_data": more})
    data = read_clients(tmp_path)
    assert data.owner.tolist() == ["u1", "u1", "u2", "u3"] and data.y.dtype == np.float32
    assert data.left_out == ("1 clients without examples (u4)",)
    written(tmp_path / "all_2.json", LEAF)
    with pytest.raises(InputError, match="the client 'u1' is in two files"):
        read_clients(tmp_path)


def test_parts_of_each_client_are_read_by_name(tmp_path):
    part = {"x": [[1, 2], [3, 4]], "y": ["dog", "cat"]}
    path = written(tmp_path / "a.json", {str(k): {"train": part, "test": part} for k in (1, 2)})
    data = read_clients(path, split="train")
    assert data.x.dtype == np.int32 and data.y.tolist() == [1, 0, 1, 0] and data.classes == ("cat", "dog")
    assert data.owner.tolist() == ["1", "1", "2", "2"] and data.left_out == ("test",)
    with pytest.raises(InputError, match="split: '' is not part of .*; choose from: test, train"):
        read_clients(path)
    with pytest.raises(InputError, match="split: 'train', and .* has no parts"):
        read_clients(written(tmp_path / "b.json", LEAF), split="train")


def test_text_becomes_the_places_of_its_characters(tmp_path):
    text = {"ann": {"x": ["abba", "bcab"], "y": ["c", "a"]}, "bob": {"x": ["caba"], "y": ["b"]}}
    data = read_clients(written(tmp_path / "a.json", text))
    assert data.characters == "abc" and data.x.tolist() == [[0, 1, 1, 0], [1, 2, 0, 1], [2, 0, 1, 0]]
    assert data.y.tolist() == [2, 0, 1]
    other = read_clients(tmp_path / "a.json", characters="cba")
    assert other.x[0].tolist() == [2, 1, 1, 2] and other.y.tolist() == [0, 2, 1]
    with pytest.raises(InputError, match="characters: 'a' occurs in x but is not one of the characters"):
        read_clients(tmp_path / "a.json", characters="bc")
    follows = {"ann": {"x": ["abb", "bca"], "y": ["bba", "cab"]}}
    assert read_clients(written(tmp_path / "b.json", follows)).y.tolist() == [[1, 1, 0], [2, 0, 1]]


@pytest.mark.long
def test_what_is_read_is_simulated(tmp_path):
    import jax.numpy as jnp
    import optax

    data = read_clients(written(tmp_path / "a.json", LEAF))
    # one step of rate 1 on the squared distance ends at the mean of the client's examples
    client = fcljax.local_sgd(lambda w, x, y: 0.5 * jnp.sum((x - w) ** 2, -1), optax.sgd(1.0))
    ended = fcljax.simulate(fcljax.fedavg(jnp.zeros(2), client), *data[:3], rounds=1)
    np.testing.assert_allclose(ended.model, data.x.mean(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds a list; expected an object"),
        ('{"a": {"x": [NaN], "y": [1]}}', "holds NaN, which is not a number in JSON"),
        ('{"a": {"x": [1e999], "y": [1]}}', "x holds a number that is too large"),
        ('{"a": {"x": [1], "y": [1]}, "a": {}}', "the client 'a' appears twice"),
        ({}, "has no examples"),
        ({"a": {"x": [1, 2], "y": [1]}}, "client 'a': 2 examples in x and 1 in y; they must match"),
        ({"a": {"x": [1]}}, "client 'a': y is not a list; it has: x"),
        ({"a": [1]}, "client 'a': a list; expected an object"),
        ({"a": {"x": [[1, 2], [1]], "y": [1, 2]}}, "client 'a': the examples of x have several shapes"),
        (
            {"a": {"x": [[1]], "y": [1]}, "b": {"x": [[1, 2]], "y": [1]}},
            "client 'b': the examples of x have another",
        ),
        ({"a": {"x": ["ab", "c"], "y": [1, 2]}}, "the texts of x have 1 to 2 characters"),
        ({"a": {"x": ["ab", 3], "y": [1, 2]}}, "x mixes text with numbers"),
        ({"a": {"x": [["a", "b"]], "y": [1]}}, "expected numbers or text"),
        ({"a": {"x": [None], "y": [1]}}, "expected numbers or text"),
        ({"a": {"x": [2**40], "y": [1]}}, "integers have at most 32 bits"),
        (LEAF | {"users": ["u1"]}, "its users are not those of its user_data"),
        (LEAF | {"num_samples": [2, 2]}, "user 'u2' has 1 examples, and num_samples says 2"),
        (LEAF | {"num_samples": [2]}, "does not have a number for each user"),
        (LEAF | {"user_data": []}, "its user_data is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, content, says):
    with pytest.raises(InputError) as error:
        read_clients(written(tmp_path / "a.json", content))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_is_no_text_is_one_line(tmp_path):
    with pytest.raises(InputError, match="clients: cannot read"):
        read_clients(tmp_path / "none.json")
    with pytest.raises(InputError, match="has no files named"):
        read_clients(tmp_path)
    (tmp_path / "a.json").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match="is not UTF-8"):
        read_clients(tmp_path / "a.json")
