"""Wrong objects of Python: one line that names what is wrong, and a model that shows itself in one line."""

import inspect
import io

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import fcljax
from fcljax import cli
from fcljax.data.files.images import decode, fits
from fcljax.data.geometry import Geometry
from fcljax.errors import InputError
from fcljax.parts.server import ServerUpdate
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
        (
            "class Options:\n    strength: float = 1.0",
            "own.py: Options is not a dataclass; write @dataclasses",
        ),
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
    with pytest.raises(InputError, match="out: '' is not a run directory"):
        fcljax.run("linear", out="")


def test_a_method_that_is_none_is_refused():
    with pytest.raises(InputError, match="method: list; expected a name of fcljax list"):
        inspect.unwrap(fcljax.run)(["linear"])  # without the checks of types that tests have


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"server_rules": 3}, "server_rules: 3; expected a tuple of ServerRule"),
        ({"client_rules": (None,)}, "client_rules: None is not a ClientRule"),
        ({"model": np.ma.masked_array([1.0])}, "model: parameter  is a masked array"),
    ],
)
def test_rules_and_models_of_fedavg_that_are_none_are_refused(given, says):
    client = fcljax.local_sgd(lambda w, x, y: x @ w, optax.sgd(0.1))
    with pytest.raises(InputError, match=says):
        inspect.unwrap(fcljax.fedavg)(**{"model": jnp.zeros(1), "client": client} | given)


def test_a_data_set_under_the_name_of_the_command_line_is_refused():
    with pytest.raises(InputError, match="dataset: give it as data='glyphs'"):
        fcljax.run("linear", dataset="glyphs")


def test_a_model_shows_itself_in_one_line_and_refuses_images_of_several_sizes():
    model = Model(lambda arrays, image, mask: image, [jnp.zeros((3, 1000))], (4, 8, 8), np.arange(3))
    assert repr(model) == "Model(3 classes, images of 8x8, 3,000 parameters)"
    with pytest.raises(InputError, match="images: they are of several sizes; resize them to 8x8"):
        model.predict([np.zeros((8, 8, 3), np.uint8), np.zeros((9, 8, 3), np.uint8)])
    masked = np.ma.masked_array(np.zeros((1, 8, 8, 3), np.uint8), False)
    for images, preprocess in ((masked, False), ([masked[0]], False)):
        with pytest.raises(InputError, match="images: x is a masked array"):
            model.predict(images, preprocess)


PICTURES = [np.random.default_rng(i).integers(0, 256, (9 + 5 * i, 31 - 4 * i, 3), np.uint8) for i in range(5)]


def network_input(side: tuple[int, int], geometry: Geometry | None = None) -> Model:
    """A model whose logits are the pixels that reach its network."""
    image = (2, *side)
    logits = lambda arrays, image, mask: image.reshape(len(image), -1) * jnp.float32(1)
    return Model(logits, [], image, np.arange(3), geometry)


@pytest.mark.parametrize("geometry", [Geometry(9, 8), Geometry(9, 8, squash=True, kernel="bilinear")])
def test_a_model_prepares_images_of_any_size_as_the_files_of_a_test_set_are(geometry):
    model = network_input((8, 8), geometry)
    expected = []
    for picture in PICTURES:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG")
        expected.append(decode(file.getvalue(), "a", fits(geometry)[1]).pixels.ravel())
    given = [PICTURES[0] / 255, Image.fromarray(PICTURES[1]), *PICTURES[2:]]
    np.testing.assert_array_equal(model.scores(given, preprocess=True), expected)
    with pytest.raises(InputError, match="of several sizes; nearest: preprocess=True"):
        model.predict(given)
    with pytest.raises(InputError, match="images: 9x31; the model takes 8x8; nearest: preprocess=True"):
        model.predict(PICTURES[:1])
    with pytest.raises(InputError, match=r"shape \(19, 23, 3\) is one image; nearest: images\[None\]"):
        model.predict(PICTURES[2], preprocess=True)
    with pytest.raises(InputError, match="x\\[1\\] is uint16; .* nearest: x / 1023"):
        model.predict([PICTURES[0], np.full((9, 9, 3), 600, np.uint16)], preprocess=True)


def test_images_that_are_wider_than_high_lose_their_margins_alone():
    model = network_input((4, 6), Geometry())
    wide = np.zeros((8, 20, 3), np.uint8)
    wide[:, 4:16] = 255  # the central 12 of 20 columns have the shape 4 x 6
    white, _ = model.scores([wide, wide[:4, :6]], preprocess=True)
    assert (white > 200).all()


@pytest.mark.parametrize("mode", ["P", "YCbCr", "CMYK", "RGBA", "L", "1"])
def test_images_of_pillow_are_read_as_files_are(mode):
    white = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    assert (network_input((8, 8)).scores([white] * 3) >= 254).all()
    with pytest.raises(InputError, match="mode 'I;16'; convert it to 8 bits"):
        network_input((8, 8)).scores([Image.fromarray(np.full((8, 8), 40000, np.uint16))])


@pytest.mark.parametrize("where", ["loss", pytest.param("server", marks=pytest.mark.long)])
def test_a_traced_value_that_is_kept_for_another_trace_is_one_line_with_the_users_line(where):
    kept = []

    def loss(model, x, y):
        error = (x @ model - y) ** 2
        kept.append(error)
        return error + 0 * kept[0] if where == "loss" else error

    def update(server_round, params, state):
        return ServerUpdate(params, jnp.sum(kept[0]))

    rules = (fcljax.ServerRule("late", init=lambda key, params: jnp.zeros(()), update=update),)
    client = fcljax.local_sgd(loss, optax.sgd(0.1), batch_size=4)
    method = fcljax.fedavg(jnp.zeros(3), client, server_rules=rules if where == "server" else ())
    x = np.ones((8, 3), np.float32)
    with pytest.raises(InputError, match="method: a traced value is kept .* another trace") as raised:
        fcljax.simulate(method, x, x[:, 0], np.arange(8) % 2, 2)
    line = loss.__code__.co_firstlineno + 1
    assert f"test_python_objects.py:{line} loss() made it" in str(raised.value)
