"""Pretrained backbones: from any kind of file that researchers have to a network and a file in our layout.

`checkpoints` reads files, `naming` knows the names; the image size, the compute type and the pixel constants
are settled here.
"""

import dataclasses
import json
import math
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from fcljax.errors import InputError, choose
from fcljax.files import atomic
from fcljax.models.mae import DecoderConfig, sincos_positions
from fcljax.models.vit import VITS, ViTConfig
from fcljax.models.weights import checkpoints, naming
from fcljax.pixels import NORMALISE
from fcljax.types import PyTree

PACKAGED = {"vit_micro": "vit_micro.safetensors"}
FORMAT = "fcljax-1"

_MATRICES = {"patch", "qkv", "proj", "fc1", "fc2", "embed", "predict"}
# Names that the authors' files have kept, of networks that were trained with ImageNet's constants.
_IMAGENET_NAMES = ("dino", "ibot", "deit", "mae")

Colour = tuple[float, float, float]


class Pretrained(NamedTuple):
    """A network with what is needed to use it.

    config: its static shape, at the image size that was asked for.
    params: the encoder, for `apply_vit`.
    head: {"kernel": [width, classes], "bias": [classes]} if the file has a classification head of the class
      token.
    decoder: static shape and parameters of a masked autoencoder's decoder, if the file has one.
    mean, std: what the weights expect to be taken off pixels in [0, 1], and what to divide them by.
    mapping: whose names the file has: fcljax, timm, huggingface, google or mae.
    digest: the file's sha256.
    notes: what a user should be told: what was assumed, left out, or changed.
    """

    config: ViTConfig
    params: PyTree
    head: PyTree | None
    decoder: tuple[DecoderConfig, PyTree] | None
    mean: Colour
    std: Colour
    mapping: str
    digest: str
    notes: tuple[str, ...]


# how position embeddings come to another image size: as timm does today, or as it did until version 0.6
Positions = Literal["antialiased", "plain"]


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Options of `fcljax convert`."""

    heads: int | None = None  # attention heads; default: as the file says, else width / 64
    # attention heads of a masked autoencoder's decoder; default: as the file says, else 16
    decoder_heads: int | None = None
    keep_head: bool = False  # keep the classification head, if there is one
    part: Literal["teacher", "student"] = "teacher"  # which network to take from a checkpoint that holds both
    # side in pixels; position embeddings are interpolated; default: the network's own
    image_size: int | None = None
    # pixel constants; default: as the file says or its kind suggests
    normalise: Literal["half", "unit", "imagenet"] | None = None
    positions: Positions = "antialiased"  # how position embeddings are interpolated
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # type in which all weights are stored


class _Loaded(NamedTuple):
    """A file's network at the image size that was asked for, still in numpy, with pixel constants."""

    source: checkpoints.Checkpoint
    network: naming.Network
    mean: Colour
    std: Colour
    notes: tuple[str, ...]


def load_backbone(
    name: str | None,
    checkpoint: str | None,
    image_size: int | None,
    dtype: str = "float32",
    *,
    heads: int | None = None,
    decoder_heads: int | None = None,
    part: str = "teacher",
    positions: Positions = "antialiased",
) -> Pretrained:
    """A pretrained network.

    Args:
      name: one of VITS, which the file must fit; None takes the architecture from the file, or vit_micro if
        there is none.
      checkpoint: a file (.safetensors, .npz, .pth, .pt, .bin) or hf:OWNER/NAME[@REVISION][:FILE]; None takes
        the weights that ship with the package.
      image_size: side in pixels, a multiple of the patch size; None keeps the network's own. Position
        embeddings are interpolated.
      dtype: compute type; matrix parameters are stored in it, norms and embeddings stay float32.
      heads: attention heads, for files that do not tell them.
      decoder_heads: the same for the decoder of a masked autoencoder.
      part: "teacher" or "student", which network to take from a checkpoint that holds both.
      positions: how position embeddings are interpolated (`interpolate_positions`).

    Raises:
      InputError: for an unknown name, a missing or broken file, or tensors that do not fit (the message says
        which).
    """
    if name is None and checkpoint is None:
        name = "vit_micro"
    if name is not None:
        _check_size(image_size, VITS[choose("backbone", name, VITS)], name)
    if checkpoint is None:
        if name not in PACKAGED:
            raise InputError(
                f"checkpoint: {name} needs a file of weights ({', '.join(checkpoints.SUFFIXES)}) "
                f"or hf:OWNER/NAME; only {', '.join(PACKAGED)} has its own"
            )
        checkpoint = str(resources.files("fcljax") / "assets" / PACKAGED[name])
    source, network, mean, std, notes = _load(
        name, checkpoint, image_size, naming.Facts(heads, decoder_heads), part, positions
    )
    decoder = network.decoder and (
        dataclasses.replace(network.decoder[0], dtype=dtype),
        _stored(network.decoder[1], dtype),
    )
    return Pretrained(
        config=dataclasses.replace(network.config, dtype=dtype),
        params=_stored(network.params, dtype),
        head=network.head and jax.tree.map(jnp.array, network.head),
        decoder=decoder,
        mean=mean,
        std=std,
        mapping=network.mapping,
        digest=source.digest,
        notes=notes,
    )


def convert(source: str, target: str | None, options: ConvertOptions) -> list[tuple[str, str]]:
    """Write any checkpoint as a file of our own.

    It keeps what is known of the checkpoint: architecture, heads, pixel constants, provenance.

    Args:
      source: as `load_backbone`'s checkpoint.
      target: the .safetensors file to write, a new one; None takes the source's name, in the current folder.
      options: see there.

    Returns:
      What was found and written, as rows (property, value).

    Raises:
      InputError: as `load_backbone`, and if the target cannot be written or exists.
    """
    path = _target(source, target)
    file, network, mean, std, notes = _load(
        None,
        source,
        options.image_size,
        naming.Facts(options.heads, options.decoder_heads),
        options.part,
        options.positions,
        options.normalise,
    )
    tree = dict(network.params)
    if network.head is not None and options.keep_head:
        tree["head"] = network.head
    if network.decoder is not None:
        tree["decoder"] = network.decoder[1]
    save_native(path, tree, _metadata(file, network, mean, std), options.dtype)
    return [
        *_rows(network, options, file, mean, std),
        *(("note", note) for note in notes),
        ("written to", str(path)),
    ]


def save_native(path: str | Path, params: PyTree, metadata: dict[str, str], dtype: str = "float32") -> None:
    """Write parameters as safetensors under dotted names, atomically, with provenance in the metadata.

    Raises:
      InputError: if a value is too large for the type.
    """
    flat = {}
    for name, x in flatten_dict(params, sep=".").items():
        with np.errstate(over="ignore"):
            # safetensors writes memory as it lies, so a transposed view would be written scrambled.
            flat[name] = np.asarray(x).astype(jnp.dtype(dtype), order="C")
        if dtype == "float16" and not np.isfinite(flat[name]).all():
            raise InputError(f"dtype: {name} has values beyond float16; choose 'bfloat16' or 'float32'")
    with atomic(path) as temporary:
        safetensors.numpy.save_file(flat, temporary, metadata)


def interpolate_positions(
    position: Float[Array, "tokens width"], grid: int, how: Positions = "antialiased"
) -> Float[Array, "tokens2 width"]:
    """Positions for grid x grid patches by bicubic interpolation; the class token's stays.

    Args:
      position: the class token's and those of side x side patches, row by row.
      grid: the new side, in patches.
      how: "antialiased" is what timm 1.0 and Pillow do (a = -0.5, a kernel as wide as the new patches);
        "plain" what timm 0.6 and most releases did, torch's `interpolate` (a = -0.75, always four values).
    """
    cls, patches = position[:1], position[1:]
    side = round(patches.shape[0] ** 0.5)
    if side == grid:
        return position
    square = patches.reshape(side, side, -1)
    if how == "plain":
        weights = jnp.asarray(_plain_bicubic(side, grid))
        resized = jnp.einsum("iy,jx,yxd->ijd", weights, weights, square)
    else:
        resized = jax.image.resize(square, (grid, grid, square.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([cls, resized.reshape(grid * grid, -1)])


def _plain_bicubic(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """Weights [new, old] of Keys' kernel on the four nearest places; beyond the border its value repeats."""
    place = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(place).astype(int) - 1
    weights = np.zeros((new, old))
    for tap in range(4):
        x = np.abs(place - (first + tap))
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        column = np.clip(first + tap, 0, old - 1)
        np.add.at(weights, (np.arange(new), column), np.where(x <= 1, near, far))
    return weights.astype(np.float32)


# ---- from a file to a network ------------------------------------------------------------------------------


def _load(
    name: str | None,
    checkpoint: str,
    image_size: int | None,
    facts: naming.Facts,
    part: str,
    positions: Positions,
    normalise: str | None = None,
) -> _Loaded:
    file = checkpoints.read(checkpoint)
    network = _with_epsilon(file, naming.interpret(file.tensors, name, _joined(facts, _told(file)), part))
    _check_size(image_size, network.config, name or "the checkpoint")
    network, resized = _resized(network, image_size, positions)
    mean, std, assumed = _constants(file, network, normalise)
    return _Loaded(file, network, mean, std, (*network.notes, *resized, *assumed))


def _check_size(image_size: int | None, vit: ViTConfig, name: str) -> None:
    if image_size is not None and (image_size % vit.patch or image_size < vit.patch):
        fitting = max(vit.patch, round(image_size / vit.patch) * vit.patch)
        raise InputError(
            f"image_size: {image_size} is not a multiple of the patch size {vit.patch} of {name}; "
            f"nearest: {fitting}"
        )


def _told(file: checkpoints.Checkpoint) -> naming.Facts:
    """What metadata or a config.json say of the network."""
    kind = file.metadata.get("format", "")
    if kind.startswith("fcljax") and kind != FORMAT:
        raise InputError(
            f"checkpoint: {file.source!r} has format {kind!r}, and this version reads {FORMAT!r}"
        )
    ours, decoder = (_object(file, key) for key in ("config", "decoder"))
    config = file.config
    if config.get("hidden_act", "gelu") != "gelu":
        raise InputError(
            f"checkpoint: config.json has hidden_act {config['hidden_act']!r}, "
            "and the network here has 'gelu'"
        )
    heads = ours.get("heads", config.get("num_attention_heads"))
    return naming.Facts(
        _whole(file, "heads", heads),
        _whole(file, "decoder heads", decoder.get("heads", config.get("decoder_num_attention_heads"))),
    )


def _with_epsilon(file: checkpoints.Checkpoint, network: naming.Network) -> naming.Network:
    """The network with its own LayerNorms' epsilon: if not said, 1e-12 in Hugging Face's ViTs, else 1e-6."""
    usual = 1e-12 if network.mapping == "huggingface" else 1e-6
    epsilon = _object(file, "config").get("epsilon", file.config.get("layer_norm_eps", usual))
    if not isinstance(epsilon, float) or not 0 < epsilon <= 1e-3:
        raise InputError(
            f"checkpoint: {file.source!r} says of itself that its LayerNorms have epsilon {epsilon!r}"
        )
    decoder = network.decoder and (
        dataclasses.replace(network.decoder[0], epsilon=epsilon),
        network.decoder[1],
    )
    return network._replace(config=dataclasses.replace(network.config, epsilon=epsilon), decoder=decoder)


def _object(file: checkpoints.Checkpoint, key: str) -> dict[str, Any]:
    """A JSON object in our own metadata; {} if the file is not ours or has none."""
    if file.metadata.get("format") != FORMAT or key not in file.metadata:
        return {}
    value = _decoded(file, key)
    if not isinstance(value, dict):
        raise InputError(f"checkpoint: {file.source!r} has broken metadata: {key}")
    return value


def _decoded(file: checkpoints.Checkpoint, key: str) -> Any:
    try:
        return json.loads(file.metadata[key])
    except (ValueError, RecursionError):
        raise InputError(f"checkpoint: {file.source!r} has broken metadata: {key}") from None


def _whole(file: checkpoints.Checkpoint, what: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"checkpoint: {file.source!r} says of itself that it has {value!r} {what}")
    return value


def _joined(asked: naming.Facts, told: naming.Facts) -> naming.Facts:
    for field, ours, theirs in zip(naming.Facts._fields, asked, told, strict=True):
        if ours is not None and ours < 1:
            raise InputError(f"{field}: {ours} is not positive")
        if None not in (ours, theirs) and ours != theirs:
            raise InputError(f"{field}: {ours} asked for, but the checkpoint has {theirs}")
    return naming.Facts(*(theirs if ours is None else ours for ours, theirs in zip(asked, told, strict=True)))


def _resized(
    network: naming.Network, image_size: int | None, positions: Positions
) -> tuple[naming.Network, list[str]]:
    """The network at another image size."""
    if image_size is None or image_size == network.config.image_size:
        return network, []
    old, config = network.config.grid, dataclasses.replace(network.config, image_size=image_size)
    position = interpolate_positions(jnp.asarray(network.params["pos"]), config.grid, positions)
    params = network.params | {"pos": np.asarray(position)}
    decoder = network.decoder
    if decoder is not None:
        decoder = (
            dataclasses.replace(decoder[0], image_size=image_size),
            _resized_decoder(*decoder, config.grid, positions),
        )
    note = (
        f"position embeddings were interpolated from {old} x {old} to {config.grid} x {config.grid} patches "
        f"({positions})"
    )
    return network._replace(config=config, params=params, decoder=decoder), [note]


def _resized_decoder(config: DecoderConfig, params: PyTree, grid: int, positions: Positions) -> PyTree:
    """Positions that follow the sin-cos formula follow it on the other grid too."""
    position = params["pos"]
    if config.width % 4 == 0 and np.allclose(
        position, sincos_positions(config.grid, config.width), atol=1e-5
    ):
        return params | {"pos": np.asarray(sincos_positions(grid, config.width))}
    return params | {"pos": np.asarray(interpolate_positions(jnp.asarray(position), grid, positions))}


def _constants(
    file: checkpoints.Checkpoint, network: naming.Network, normalise: str | None
) -> tuple[Colour, Colour, list[str]]:
    """Mean and standard deviation of pixels: as the user or the file says, or as its kind suggests."""
    if normalise is not None:
        return *NORMALISE[choose("normalise", normalise, NORMALISE)], []
    if "mean" in file.metadata and "std" in file.metadata:
        return _colour(file, "mean", _decoded(file, "mean")), _colour(file, "std", _decoded(file, "std")), []
    timm = file.config.get("pretrained_cfg")
    for beside, names in ((file.preprocessor, ("image_mean", "image_std")), (timm, ("mean", "std"))):
        if isinstance(beside, dict) and all(name in beside for name in names):
            return _colour(file, names[0], beside[names[0]]), _colour(file, names[1], beside[names[1]]), []
    named = network.mapping != "google" and any(
        word in PurePosixPath(file.source).name.lower() for word in _IMAGENET_NAMES
    )
    kind = "imagenet" if network.torch_training or named else "half"
    mean, std = NORMALISE[kind]
    assumed = f"pixel mean {_listed(mean)} and std {_listed(std)} are assumed ({kind})"
    return mean, std, [f"{assumed}: the checkpoint does not tell them"]


def _colour(file: checkpoints.Checkpoint, what: str, value: object) -> Colour:
    values = value if isinstance(value, list) else [value] * 3
    good = len(values) == 3 and all(isinstance(x, int | float) and math.isfinite(x) for x in values)
    if not good or ("std" in what and min(values) <= 0):
        raise InputError(f"checkpoint: {file.source!r} has a {what} that is not three numbers: {value!r}")
    red, green, blue = map(float, values)
    return red, green, blue


def _stored(tree: PyTree, dtype: str) -> PyTree:
    """Arrays of our own: kernels and biases of matrix products in the compute type, all else float32."""

    def store(path, x):
        matrix = any(getattr(part, "key", "") in _MATRICES for part in path)
        return jnp.array(x, dtype if matrix else "float32")

    return jax.tree_util.tree_map_with_path(store, tree)


# ---- from a network to a file of our own -------------------------------------------------------------------


def _target(source: str, target: str | None) -> Path:
    """Where to write, found out before the work is done."""
    name = (
        source.removeprefix("hf:").partition(":")[0].partition("@")[0]
        if source.startswith("hf:")
        else Path(source).stem
    )
    path = Path(target if target is not None else f"{PurePosixPath(name).name}.safetensors")
    if path.suffix != ".safetensors":
        raise InputError(f"target: {str(path)!r} must end in .safetensors")
    if path.exists() or path.is_symlink():
        raise InputError(f"target: {str(path)!r} exists; give another name")
    if not path.parent.is_dir():
        raise InputError(f"target: there is no folder {str(path.parent)!r}")
    return path


def _metadata(
    file: checkpoints.Checkpoint, network: naming.Network, mean: Colour, std: Colour
) -> dict[str, str]:
    def shape(config: ViTConfig | DecoderConfig) -> str:
        return json.dumps({key: value for key, value in dataclasses.asdict(config).items() if key != "dtype"})

    metadata = {"format": FORMAT, "source": file.source, "sha256": file.digest, "mapping": network.mapping}
    metadata |= {"config": shape(network.config), "mean": json.dumps(mean), "std": json.dumps(std)}
    metadata |= {"decoder": shape(network.decoder[0])} if network.decoder else {}
    return metadata | ({"part": network.part} if network.part else {})


def _rows(
    network: naming.Network, options: ConvertOptions, file: checkpoints.Checkpoint, mean: Colour, std: Colour
) -> list[tuple[str, str]]:
    c, decoder = network.config, network.decoder and network.decoder[0]
    size = sum(x.size for x in jax.tree.leaves(network.params))
    classes = network.head and network.head["bias"].size
    return [
        ("mapping", network.mapping + (f" ({network.part})" if network.part else "")),
        *((field, str(getattr(c, field))) for field in ("width", "depth", "heads", "mlp", "patch")),
        ("image size", str(c.image_size)),
        ("class token", "yes"),
        ("final norm", "yes" if c.final_norm else "no"),
        ("qkv", "fused" if network.fused else "split"),
        ("parameters", f"{size:,}"),
        ("head", f"{classes} classes, {'kept' if options.keep_head else 'dropped'}" if classes else "none"),
        (
            "decoder",
            f"width {decoder.width}, depth {decoder.depth}, heads {decoder.heads}" if decoder else "none",
        ),
        ("mean", _listed(mean)),
        ("std", _listed(std)),
        ("sha256", file.digest),
    ]


def _listed(colour: Colour) -> str:
    return ", ".join(f"{x:g}" for x in colour)
