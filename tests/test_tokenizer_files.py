"""`fcljax.tokenize`: texts by a tokenizer file; what it cannot read is one line."""

import importlib.util
import inspect
import json

import numpy as np
import pytest

import fcljax
from fcljax.errors import InputError

# as the library writes it; the file pads on the left, which no encoder here reads
WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "a": 3, "red": 4, "car": 5}
FILE = {
    "version": "1.0",
    "truncation": None,
    "padding": {
        "strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    },
    "added_tokens": [],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(FILE))
    (tmp_path / "other.json").write_text("{}")
    return tmp_path


# without the tests' type checks, which would come first
tokenize = inspect.unwrap(fcljax.tokenize)


def refusal(*arguments, **options):
    with pytest.raises(InputError) as error:
        tokenize(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_padding_follows_a_text_and_long_texts_are_cut(folder):
    pytest.importorskip("tokenizers")
    tokens = fcljax.tokenize(["A red car", "the red red red red car", ""], folder, length=5)
    expected = [[2, 3, 4, 5, 0], [2, 1, 4, 4, 4], [2, 0, 0, 0, 0]]
    np.testing.assert_array_equal(tokens["ids"], expected)
    np.testing.assert_array_equal(tokens["mask"], np.array(expected) > 0)
    assert tokens["ids"].dtype == np.int32 and tokens["mask"].dtype == bool


def test_what_is_no_tokenizer_is_refused(folder):
    assert "expected a list of texts" in refusal("one text", folder)
    assert "expected a list of texts" in refusal([["a", "b"]], folder)
    assert "length: 0; expected" in refusal(["a"], folder, length=0)
    pytest.importorskip("tokenizers")
    assert "does not exist; expected a tokenizer.json" in refusal(["a"], folder / "none.json")
    assert "other.json' cannot be used" in refusal(["a"], folder / "other.json")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "needs tokenizers; install it with: pip install -e '.[text]'" in refusal(["a"], "tokenizer.json")
