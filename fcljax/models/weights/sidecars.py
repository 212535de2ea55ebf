"""What a file's own metadata, and the JSON files beside it, say of a network: heads, activation, epsilon,
pixel constants.

`config.json` and `preprocessor_config.json` of transformers, `config.json` of timm and
`open_clip_config.json` are read beside a file of any name. Where such a file speaks of a network of another
size, it belongs to another file and is not used, which a note says.
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
MOST_COLOUR = 1e6  # of a mean or deviation of pixels
# transformers' names of activations -> ours
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# where configs state a size
_SIZES = {
    "width": ("hidden_size", "width", "num_features"),
    "depth": ("num_hidden_layers", "layers"),
    "mlp": ("intermediate_size",),
    "patch": ("patch_size",),
}
# Networks of timm whose tensors are those of plain ones, and whose features are not.
_OTHER_ARCHITECTURES = re.compile(r"resnet\w*(blur|aa)\w*|densenetblur\w*|resnetrs\w*")


class Said(NamedTuple):
    """What is known of a network from elsewhere than its tensors."""

    facts: TensorFacts = TensorFacts()
    epsilon: float | None = None
    pixels: tuple[Colour, Colour] | None = None
    """Mean and standard deviation of pixels."""
    notes: tuple[str, ...] = ()


def said(file: Checkpoint, sizes: ViTSizes | None, width: int) -> Said:
    """What metadata and the files beside it say.

    Args:
      file: as `checkpoints.read_checkpoint` gives it.
      sizes: of a ViT; None for other networks.
      width: of the features.

    Raises:
      InputError: for values that make no sense, or a network that is not supported.
    """
    kind = file.metadata.get("format", "")
    if kind.startswith("fcljax") and kind != FORMAT:
        raise InputError(
            f"checkpoint: {file.source!r} has format {kind!r}, and this version reads {FORMAT!r}"
        )
    if kind == FORMAT:
        return _of_ours(file)
    known = {"width": width} if sizes is None else sizes._asdict()
    config, notes = _of_this_network("config.json", _vision(file.config), file.config, known)
    preprocessor = file.preprocessor if config or not file.config else {}
    clip, more = _of_this_network("open_clip_config.json", _tower(file.open_clip), file.open_clip, known)
    _refuse_architectures(config)
    pixels = _metadata_pixels(file) or _pixels(file, preprocessor, config, clip)
    vision = _vision(config)
    heads = vision.get("num_attention_heads", _heads_of_tower(clip))
    base = vision.get("rope_theta")
    if base is not None and not (isinstance(base, int | float) and 1 < base <= 1e6):
        raise InputError(f"checkpoint: {file.source!r} says that its rotary positions have base {base!r}")
    facts = TensorFacts(
        _whole(file, "heads", heads),
        _whole(file, "decoder heads", vision.get("decoder_num_attention_heads")),
        _activation(config, clip),
        base,
    )
    epsilon = vision.get("layer_norm_eps")
    return Said(facts, None if epsilon is None else checked_epsilon(file, epsilon), pixels, (*notes, *more))


def _of_ours(file: Checkpoint) -> Said:
    """Of a file that `fcljax convert` or a training wrote: it says all itself."""
    config, decoder = (object_of(file, key) for key in ("config", "decoder"))
    activation = config.get("activation")
    base = config.get("rotary_base")
    if base is not None and not (isinstance(base, int | float) and 1 < base <= 1e6):
        raise InputError(f"checkpoint: {file.source!r} says that its rotary positions have base {base!r}")
    if activation not in (None, "gelu", "quick_gelu", "gelu_tanh"):
        raise InputError(f"checkpoint: {file.source!r} says that its activation is {activation!r}")
    facts = TensorFacts(
        _whole(file, "heads", config.get("heads")),
        _whole(file, "decoder heads", decoder.get("heads")),
        activation,
        base,
    )
    epsilon = config.get("epsilon")
    return Said(facts, None if epsilon is None else checked_epsilon(file, epsilon), _metadata_pixels(file))


# ---- whether it is of this network -------------------------------------------------------------------------


def _of_this_network(
    name: str, part: dict[str, Any], config: dict[str, Any], known: dict[str, int]
) -> tuple[dict[str, Any], list[str]]:
    """The config, or {} and a note if its part on the network states another size."""
    for size, keys in _SIZES.items():
        for key in keys:
            value = part.get(key)
            if size in known and isinstance(value, int) and value != known[size]:
                return {}, [f"{name} beside the file is not used: it says {key} {value}, here {known[size]}"]
    return config, []


def _vision(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json, or its part on the visual tower (CLIP)."""
    vision = config.get("vision_config")
    return vision if isinstance(vision, dict) else config


def _model(open_clip: dict[str, Any]) -> dict[str, Any]:
    model = open_clip.get("model_cfg", open_clip)
    return model if isinstance(model, dict) else {}


def _tower(open_clip: dict[str, Any]) -> dict[str, Any]:
    """open_clip's part on the visual tower."""
    vision = _model(open_clip).get("vision_cfg")
    return vision if isinstance(vision, dict) else {}


def _heads_of_tower(open_clip: dict[str, Any]) -> int | None:
    tower = _tower(open_clip)
    width = tower.get("width")
    head = tower.get("head_width", 64)
    if not isinstance(width, int) or not isinstance(head, int) or head < 1 or width % head:
        return None
    return width // head


def _refuse_architectures(config: dict[str, Any]) -> None:
    name = config.get("architecture")
    if isinstance(name, str) and _OTHER_ARCHITECTURES.fullmatch(name.partition(".")[0]):
        raise InputError(
            f"checkpoint: config.json says that it is {name}, which has the tensors of a plain network and "
            "computes other features; it is not supported here"
        )


# ---- single values -----------------------------------------------------------------------------------------


def _activation(config: dict[str, Any], open_clip: dict[str, Any]) -> Activation | None:
    architecture = config.get("architecture", _tower(open_clip).get("timm_model_name"))
    if isinstance(architecture, str) and "quickgelu" in architecture:  # timm's name of CLIP's
        return "quick_gelu"
    if isinstance(architecture, str) and ("pretrained_cfg" in config or _tower(open_clip)):
        return "gelu"
    name = _vision(config).get("hidden_act")
    if name is None and _tower(open_clip):
        return "quick_gelu" if _model(open_clip).get("quick_gelu") else "gelu"
    if name is None:
        return None
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(
            f"checkpoint: config.json has hidden_act {name!r}, and the networks here have "
            f"{', '.join(map(repr, _ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def checked_epsilon(file: Checkpoint, value: object) -> float:
    """An epsilon of LayerNorms.

    Raises:
      InputError: if it is none.
    """
    if not isinstance(value, float) or not 0 < value <= 1e-3:
        raise InputError(
            f"checkpoint: {file.source!r} says of itself that its LayerNorms have epsilon {value!r}"
        )
    return value


def _whole(file: Checkpoint, what: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"checkpoint: {file.source!r} says of itself that it has {value!r} {what}")
    return value


def object_of(file: Checkpoint, key: str) -> dict[str, Any]:
    """A JSON object in our own metadata; {} if the file is not ours or has none.

    Raises:
      InputError: if it is none.
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


def _pixels(
    file: Checkpoint, preprocessor: dict[str, Any], config: dict[str, Any], open_clip: dict[str, Any]
) -> tuple[Colour, Colour] | None:
    """Mean and standard deviation of pixels, if a file beside it says them."""
    places = (
        (preprocessor, ("image_mean", "image_std")),
        (config.get("pretrained_cfg"), ("mean", "std")),
        (open_clip.get("preprocess_cfg"), ("mean", "std")),
    )
    for place, (mean, std) in places:
        if isinstance(place, dict) and mean in place and std in place:
            return colour(file, mean, place[mean]), colour(file, std, place[std])
    return None


def _metadata_pixels(file: Checkpoint) -> tuple[Colour, Colour] | None:
    """Mean and standard deviation of pixels in a file's own metadata."""
    if not {"mean", "std"} <= set(file.metadata):
        return None
    mean, std = (colour(file, key, _decoded(file, key)) for key in ("mean", "std"))
    return mean, std


def colour(file: Checkpoint, what: str, value: object) -> Colour:
    """Three numbers.

    Raises:
      InputError: if the value is none, or a standard deviation of zero.
    """
    values = value if isinstance(value, list) else [value] * 3
    good = len(values) == 3 and all(isinstance(x, int | float) and abs(x) <= MOST_COLOUR for x in values)
    if not good or ("std" in what and min(values) <= 0):
        raise InputError(
            f"checkpoint: {file.source!r} has a {what} that is not three numbers: {str(value)[:80]!r}"
        )
    red, green, blue = map(float, values)
    return red, green, blue
