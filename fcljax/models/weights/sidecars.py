"""Read facts on a network from a file's metadata and the JSON files beside it.

The facts are heads, activation, epsilon, rotary base and pixel constants. `config.json`
and `preprocessor_config.json` of transformers, `config.json` of timm and
`open_clip_config.json` are read beside a file of any name. A JSON file with another
size than the network's belongs to another file: it is not used, and a note says so.
"""

import json
import re
from typing import Any, NamedTuple

from fcljax.errors import InputError
from fcljax.models.networks import Colour
from fcljax.models.shapes import Activation
from fcljax.models.weights.checkpoints import Checkpoint
from fcljax.models.weights.naming import TensorFacts, ViTSizes

FORMAT = "fcljax-1"
MOST_COLOUR = 1e6  # largest mean or standard deviation of pixels
# transformers' names -> ours
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# our sizes -> the keys of configs
_SIZES = {
    "width": ("hidden_size", "width", "num_features"),
    "depth": ("num_hidden_layers", "layers"),
    "mlp": ("intermediate_size",),
    "patch": ("patch_size",),
}
# Networks of timm whose tensors are those of plain ones, and whose features are not.
_OTHER_ARCHITECTURES = re.compile(r"resnet\w*(blur|aa)\w*|densenetblur\w*|resnetrs\w*")


class NetworkFacts(NamedTuple):
    """Facts on a network from elsewhere than its tensors."""

    tensors: TensorFacts = TensorFacts()
    epsilon: float | None = None
    pixels: tuple[Colour, Colour] | None = None
    """Mean and standard deviation of pixels."""
    notes: tuple[str, ...] = ()


def read_facts(file: Checkpoint, sizes: ViTSizes | None, width: int) -> NetworkFacts:
    """Read the facts in a file's metadata and in the files beside it.

    Args:
      file: as from `checkpoints.read_checkpoint`.
      sizes: of a ViT; None for other networks.
      width: of the features.

    Raises:
      InputError: for values that make no sense, or a network that is not supported.
    """
    file_format = file.metadata.get("format", "")
    if file_format.startswith("fcljax") and file_format != FORMAT:
        raise InputError(
            f"checkpoint: {file.source!r} has format {file_format!r}, and this version reads {FORMAT!r}"
        )
    # Written by `fcljax convert` or by a training here: its metadata have all facts,
    # and the files beside it are not asked.
    if file_format == FORMAT:
        config = object_of(file, "config")
        activation = config.get("activation")
        if activation not in (None, "gelu", "quick_gelu", "gelu_tanh"):
            raise InputError(f"checkpoint: {file.source!r} says that its activation is {activation!r}")
        decoder_heads = object_of(file, "decoder").get("heads")
        keys = ("heads", "rotary_base", "epsilon")
        return _checked_facts(file, config, keys, decoder_heads, activation, _metadata_pixels(file), [])
    expected = {"width": width} if sizes is None else sizes._asdict()
    # the config.json of a download folder may be another network's, of another size
    config, notes = _if_of_network("config.json", _vision(file.config), file.config, expected)
    # a preprocessor beside the config of another network belongs to that network
    preprocessor = {}
    if config or not file.config:
        preprocessor = file.preprocessor
    clip, clip_notes = _if_of_network(
        "open_clip_config.json", _vision_tower(file.open_clip), file.open_clip, expected
    )
    _refuse_architectures(config)
    pixels = _metadata_pixels(file) or _sidecar_pixels(file, preprocessor, config, clip)
    vision = {"num_attention_heads": _heads_of_tower(clip)} | _vision(config)
    decoder_heads = vision.get("decoder_num_attention_heads")
    keys = ("num_attention_heads", "rope_theta", "layer_norm_eps")
    activation = _activation(config, clip)
    return _checked_facts(file, vision, keys, decoder_heads, activation, pixels, [*notes, *clip_notes])


def _checked_facts(
    file: Checkpoint,
    config: dict[str, Any],
    keys: tuple[str, str, str],
    decoder_heads: object,
    activation: Activation | None,
    pixels: tuple[Colour, Colour] | None,
    notes: list[str],
) -> NetworkFacts:
    """Check a config's values; `keys` name heads, rotary base and epsilon."""
    heads, rotary_base, epsilon = map(config.get, keys)
    if rotary_base is not None and not (isinstance(rotary_base, int | float) and 1 < rotary_base <= 1e6):
        raise InputError(
            f"checkpoint: {file.source!r} says that its rotary positions have base {rotary_base!r}"
        )
    tensors = TensorFacts(
        positive_integer(file, "heads", heads),
        positive_integer(file, "decoder heads", decoder_heads),
        activation,
        rotary_base,
    )
    if epsilon is not None:
        epsilon = checked_epsilon(file, epsilon)
    return NetworkFacts(tensors, epsilon, pixels, tuple(notes))


# ---- parts of configs ------------------------------------------------------------------


def _if_of_network(
    name: str, part: dict[str, Any], config: dict[str, Any], expected: dict[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config, or {} and a note if its part on the network has another size."""
    for size, keys in _SIZES.items():
        for key in keys:
            value = part.get(key)
            if size in expected and isinstance(value, int) and value != expected[size]:
                note = f"{name} beside the file is not used: it says {key} {value}, here {expected[size]}"
                return {}, [note]
    return config, []


def _vision(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json, or its part on the visual tower (CLIP)."""
    vision = config.get("vision_config")
    if isinstance(vision, dict):
        return vision
    return config


def _model(open_clip: dict[str, Any]) -> dict[str, Any]:
    model = open_clip.get("model_cfg", open_clip)
    if isinstance(model, dict):
        return model
    return {}


def _vision_tower(open_clip: dict[str, Any]) -> dict[str, Any]:
    """Return open_clip's part on the visual tower."""
    vision = _model(open_clip).get("vision_cfg")
    if isinstance(vision, dict):
        return vision
    return {}


def _heads_of_tower(open_clip: dict[str, Any]) -> int | None:
    tower = _vision_tower(open_clip)
    width = tower.get("width")
    # open_clip states the width of a head; 64 is its default
    head_width = tower.get("head_width", 64)
    if not isinstance(width, int) or not isinstance(head_width, int) or head_width < 1 or width % head_width:
        return None
    return width // head_width


def _refuse_architectures(config: dict[str, Any]) -> None:
    name = config.get("architecture")
    if isinstance(name, str) and _OTHER_ARCHITECTURES.fullmatch(name.partition(".")[0]):
        raise InputError(
            f"checkpoint: config.json says that it is {name}, which has the tensors of a plain network and "
            "computes other features; it is not supported here"
        )


# ---- single values ---------------------------------------------------------------------


def _activation(config: dict[str, Any], open_clip: dict[str, Any]) -> Activation | None:
    tower = _vision_tower(open_clip)
    architecture = config.get("architecture", tower.get("timm_model_name"))
    # timm's names of CLIP's networks
    if isinstance(architecture, str) and "quickgelu" in architecture:
        return "quick_gelu"
    if isinstance(architecture, str) and ("pretrained_cfg" in config or tower):
        return "gelu"
    name = _vision(config).get("hidden_act")
    if name is None and tower:
        if _model(open_clip).get("quick_gelu"):
            return "quick_gelu"
        return "gelu"
    return None if name is None else activation_of(name)


def activation_of(name: object) -> Activation:
    """Return our name of an activation of transformers.

    Raises:
      InputError: for another one.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(
            f"checkpoint: config.json has hidden_act {name!r}, and the networks here have "
            f"{', '.join(map(repr, _ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def checked_epsilon(file: Checkpoint, value: object) -> float:
    """Return the epsilon of LayerNorms that a file states.

    Raises:
      InputError: if it is no number in (0, 1e-3].
    """
    if not isinstance(value, float) or not 0 < value <= 1e-3:
        raise InputError(f"checkpoint: {file.source!r} says that its LayerNorms have epsilon {value!r}")
    return value


def positive_integer(file: Checkpoint, what: str, value: object) -> int | None:
    """Return a number that a file states; None if it states none.

    Raises:
      InputError: if it is no whole number from 1.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"checkpoint: {file.source!r} says that it has {value!r} {what}")
    return value


def object_of(file: Checkpoint, key: str) -> dict[str, Any]:
    """Return a JSON object of our own metadata; {} if the file is not ours or lacks it.

    Raises:
      InputError: if the value is no JSON object.
    """
    if file.metadata.get("format") != FORMAT or key not in file.metadata:
        return {}
    value = _decoded(file, key)
    if not isinstance(value, dict):
        raise InputError(f"checkpoint: {file.source!r} has broken metadata: {key}")
    return value


def _decoded(file: Checkpoint, key: str) -> Any:
    try:
        return json.loads(file.metadata[key])
    except (ValueError, RecursionError):
        raise InputError(f"checkpoint: {file.source!r} has broken metadata: {key}") from None


def _sidecar_pixels(
    file: Checkpoint,
    preprocessor: dict[str, Any],
    config: dict[str, Any],
    open_clip: dict[str, Any],
) -> tuple[Colour, Colour] | None:
    """Return mean and standard deviation of pixels, if a file beside it has both."""
    sources = (
        (preprocessor, ("image_mean", "image_std")),
        (config.get("pretrained_cfg"), ("mean", "std")),
        (open_clip.get("preprocess_cfg"), ("mean", "std")),
    )
    for source, (mean, std) in sources:
        if isinstance(source, dict) and mean in source and std in source:
            return _colour(file, mean, source[mean]), _colour(file, std, source[std])
    return None


def _metadata_pixels(file: Checkpoint) -> tuple[Colour, Colour] | None:
    """Return mean and standard deviation of pixels, if a file's metadata has both."""
    if not {"mean", "std"} <= set(file.metadata):
        return None
    return _colour(file, "mean", _decoded(file, "mean")), _colour(file, "std", _decoded(file, "std"))


def _colour(file: Checkpoint, what: str, value: object) -> Colour:
    """Return three numbers; a single number stands for three.

    Raises:
      InputError: for other values, or a standard deviation of zero.
    """
    # one number stands for all three
    values = value if isinstance(value, list) else [value] * 3
    numbers = all(isinstance(x, int | float) and abs(x) <= MOST_COLOUR for x in values)
    if len(values) != 3 or not numbers or ("std" in what and min(values) <= 0):
        raise InputError(
            f"checkpoint: {file.source!r} has a {what} that is not three numbers: {str(value)[:80]!r}"
        )
    red, green, blue = map(float, values)
    return red, green, blue
