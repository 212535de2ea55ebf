"""Wrong objects of Python: one line that names what is wrong, and a model that shows itself in one line."""

import jax.numpy as jnp
import numpy as np
import pytest

import fcljax
from fcljax import cli
from fcljax.errors import InputError
from fcljax.runs.model import Model

METHOD = """
import dataclasses
import fcljax
from fcljax.methods.fedavg import plain

{options}

METHOD = fcljax.MethodEntry("own", Options, plain, "linear")
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("class Options:\n    strength: float = 1.0", "own.py: Options is no dataclass; write @dataclasses"),
        (
            "@dataclasses.dataclass(frozen=True)\nclass Options:\n"
            "    weights: dict = dataclasses.field(default_factory=dict)",
            "own.py: Options.weights has a default_factory; an option is a number",
        ),
        ("@dataclasses.dataclass\nclass Options:\n    strength: float", "Options.strength has no default"),
    ],
)
def test_options_of_a_method_that_cannot_be_are_one_line_with_the_file(tmp_path, capsys, options, says):
    (tmp_path / "own.py").write_text(METHOD.format(options=options))
    assert cli.main(["run", str(tmp_path / "own.py"), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_an_empty_run_directory_is_refused():
    with pytest.raises(InputError, match="out: '' is no run directory"):
        fcljax.run("linear", out="")


def test_a_data_set_under_the_name_of_the_command_line_is_refused():
    with pytest.raises(InputError, match="dataset: give it as data='glyphs'"):
        fcljax.run("linear", dataset="glyphs")


def test_a_model_shows_itself_in_one_line_and_refuses_images_of_several_sizes():
    model = Model(lambda arrays, image, mask: image, [jnp.zeros((3, 1000))], (4, 8, 8), np.arange(3))
    assert repr(model) == "Model(3 classes, images of 8x8, 3,000 parameters)"
    with pytest.raises(InputError, match="images: they are not of one size; resize them"):
        model.predict([np.zeros((8, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8)])
    with pytest.raises(InputError, match="images: a masked array"):
        model.predict(np.ma.masked_array(np.zeros((1, 8, 8, 3), np.uint8), False))
