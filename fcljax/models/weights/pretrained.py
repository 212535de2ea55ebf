"""Pretrained backbones: from any kind of file that researchers have to a network and a file in our layout.

`checkpoints` reads files, `naming` knows the names; the image size, the compute type and the pixel constants
are settled here, and a decoder of a masked autoencoder joins the encoder that it was trained on.
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
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from fcljax.errors import InputError, choose
from fcljax.files import atomic, check_folder
from fcljax.models.mae import DecoderConfig, sincos_positions
from fcljax.models.networks import Colour, ConvNetConfig, NetworkConfig, make_network
from fcljax.models.shapes import CONVNETS, PACKAGED, VITS
from fcljax.models.vit import ViTConfig
from fcljax.models.weights import checkpoints, naming, torchvision
from fcljax.options import option
from fcljax.pixels import NORMALISE
from fcljax.settings import Positions, Stem
from fcljax.types import PyTree

PACKAGED_DECODERS = {"vit_micro": "vit_micro_decoder.safetensors"}
# sha256 of these files as they were packaged
ASSET_DIGESTS = {
    "vit_micro.safetensors": "adf915dc34db6a2500d0ecc639604776fa4e257976121d106988c5dad090c551",
    "vit_micro_decoder.safetensors": "0c80298fd2dd86ef522c724af4bf864056f9ebeaf9f66d3d6e4aa7adc249568d",
}
FORMAT = "fcljax-1"

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # what safetensors calls them
_MATRICES = {"patch", "qkv", "proj", "fc1", "fc2", "embed", "predict"}
# Names that the authors' files have kept, of networks that were trained with ImageNet's constants.
_IMAGENET_NAMES = ("dino", "ibot", "deit", "mae")


class PretrainedDecoder(NamedTuple):
    """A masked autoencoder's decoder.

    config: its static shape, at the encoder's image size. params: for `decode`. mean, std: as a `Pretrained`
    has them, of the pixels that its encoder saw when it was trained, and that it predicts.
    """

    config: DecoderConfig
    params: PyTree
    mean: Colour
    std: Colour


class Pretrained(NamedTuple):
    """A network with what is needed to use it.

    config: its static shape, at the image size that was asked for.
    params: of the network, or of the encoder of an autoencoder.
    head: {"kernel": [width, classes], "bias": [classes]} if the file has a classification head of the class
      token.
    decoder: a masked autoencoder's decoder, if the file has one or another file was named.
    mean, std: what the weights expect to be taken off pixels in [0, 1], and what to divide them by.
    mapping: whose names the file has: fcljax, timm, huggingface, google, mae or torchvision; random: there
      is no file.
    digest: the file's sha256.
    notes: what a user should be told: what was assumed, left out, or changed.
    """

    config: NetworkConfig
    params: PyTree
    head: PyTree | None
    decoder: PretrainedDecoder | None
    mean: Colour
    std: Colour
    mapping: str
    digest: str
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Options of `fcljax convert`."""

    heads: int | None = option(None, unset="the file's, else width / 64")
    """Number of attention heads."""
    decoder_heads: int | None = option(None, unset="the file's, else 16")
    """Number of attention heads of a masked autoencoder's decoder."""
    keep_head: bool = False
    """Keep the classification head, if there is one."""
    part: Literal["teacher", "student"] = "teacher"
    """Network to take from a checkpoint that holds both."""
    image_size: int | None = option(None, unset="the network's own")
    """Side in pixels of the images, to which position embeddings are interpolated."""
    normalise: Literal["half", "unit", "imagenet"] | None = option(None, unset="the file's, or its kind's")
    """Pixel range that the network expects."""
    positions: Positions = "antialiased"
    """Interpolation of position embeddings."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format in which all weights are stored."""


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
    decoder: str | None = None,
    stem: Stem | None = None,
    seed: int = 0,
) -> Pretrained:
    """A pretrained network, or a convolutional one with random values.

    Args:
      name: one of VITS or CONVNETS, which the file must fit; None takes the architecture from the file, or
        vit_micro if there is none.
      checkpoint: a file (.safetensors, .npz, .pth, .pt, .bin) or `hf:OWNER/NAME[@REVISION][:FILE]`; None
        takes the weights that ship with the package.
      image_size: side in pixels, a multiple of the patch size; None keeps the network's own. Position
        embeddings are interpolated.
      dtype: compute type; matrix parameters are stored in it, norms and embeddings stay float32.
      heads: attention heads, for files that do not tell them.
      decoder_heads: the same for the decoder of a masked autoencoder.
      part: "teacher" or "student", which network to take from a checkpoint that holds both.
      positions: how position embeddings are interpolated (`interpolate_positions`).
      decoder: another file with a masked autoencoder's decoder, as `checkpoint` names files: one that `fcljax
        pretrain-decoder` wrote, or a checkpoint of a masked autoencoder, of which nothing else is taken. None
        takes what the encoder's file has; for the packaged vit_micro at its own image size the packaged one.
      stem: of a convolutional network without a file; None: "cifar" for images under 64 px, else "imagenet".
      seed: of the values of a convolutional network without a file.

    Raises:
      InputError: for an unknown name, a missing or broken file, or tensors that do not fit (the message says
        which).
    """
    if name is None and checkpoint is None:
        name = "vit_micro"
    if name is not None:
        choose("backbone", name, (*VITS, *CONVNETS))
    if name in VITS:
        _check_size(image_size, VITS[name], name)
    file = None if checkpoint is None else checkpoints.read(checkpoint)
    if name is not None and name in CONVNETS and file is None:
        _refuse_for_convnets({"heads": heads, "decoder": decoder})
        return _random_convnet(name, image_size, dtype, stem, seed)
    if file is not None and (name in CONVNETS or torchvision.is_convnet(file.tensors)):
        _refuse_for_convnets({"heads": heads, "decoder": decoder})
        return _convnet(name, file, image_size, dtype, stem)
    _refuse_stem(stem, name)
    if decoder is None and checkpoint is None:
        decoder = _packaged_decoder(name, image_size)
    file = checkpoints.read(packaged(name)) if file is None else file
    loaded = _loaded(file, name, image_size, naming.Facts(heads, decoder_heads), part, positions)
    joined, notes = _own_decoder(loaded), []
    if decoder is not None:
        joined, notes = _other_decoder(loaded, decoder, decoder_heads)
    network = loaded.network
    return Pretrained(
        config=dataclasses.replace(network.config, dtype=dtype),
        params=_stored(network.params, dtype),
        head=network.head and jax.tree.map(jnp.array, network.head),
        decoder=joined and _computing(joined, dtype),
        mean=loaded.mean,
        std=loaded.std,
        mapping=network.mapping,
        digest=loaded.source.digest,
        notes=(*loaded.notes, *notes),
    )


def _convnet(
    name: str | None, file: checkpoints.Checkpoint, image_size: int | None, dtype: str, stem: Stem | None
) -> Pretrained:
    """A ResNet or DenseNet of a file."""
    found = torchvision.interpret(file.tensors, name)
    if stem not in (None, found.config.stem):
        raise InputError(f"stem: {stem!r} asked for, but the checkpoint has {found.config.stem!r}")
    config = _sized(found.config, image_size, dtype)
    said, notes = _said_constants(file), []
    if said is None:
        said = NORMALISE["imagenet"]
        notes = [_assumed(*said, "imagenet")]
    if found.head is not None:
        notes.insert(0, naming.headless(found.head))
    params, head = jax.tree.map(jnp.asarray, (found.params, found.head))
    return Pretrained(config, params, head, None, *said, "torchvision", file.digest, tuple(notes))


def _random_convnet(
    name: str, image_size: int | None, dtype: str, stem: Stem | None, seed: int
) -> Pretrained:
    """Values that depend on the seed alone; pixels between -1 and 1."""
    config = CONVNETS[name]
    own = config.stem if image_size is None else "cifar" if image_size < 64 else "imagenet"
    config = _sized(dataclasses.replace(config, stem=stem or own), image_size, dtype)
    mean, std = NORMALISE["half"]
    params = make_network(config, mean, std).init(jax.random.key(seed))
    note = f"{name} has random values of seed {seed}: no checkpoint was named"
    return Pretrained(config, params, None, None, mean, std, "random", f"random-{name}-{seed}", (note,))


def _sized(config: ConvNetConfig, image_size: int | None, dtype: str) -> ConvNetConfig:
    """The network at another image size, which must leave a place in its last stage."""
    size = config.image_size if image_size is None else image_size
    if size < config.reduction:
        raise InputError(
            f"image_size: {size} is less than the {config.reduction} pixels that become one place of the "
            f"last stage; nearest: {config.reduction}"
        )
    return dataclasses.replace(config, image_size=size, dtype=dtype)


def _refuse_for_convnets(options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: {value!r} is of a ViT, and the backbone is a convolutional network")


def _refuse_stem(stem: Stem | None, name: str | None) -> None:
    if stem is not None:
        raise InputError(
            f"stem: {stem!r} is of a convolutional network, and the backbone is {name or 'a ViT'}; nearest: "
            f"--backbone resnet18"
        )


def _computing(decoder: PretrainedDecoder, dtype: str) -> PretrainedDecoder:
    """The decoder with matrix products in this type."""
    config = dataclasses.replace(decoder.config, dtype=dtype)
    return decoder._replace(config=config, params=_stored(decoder.params, dtype))


def packaged(name: str | None) -> str:
    """The file of weights that comes with the package.

    Raises:
      InputError: if there is none of that name.
    """
    if name not in PACKAGED:
        raise InputError(
            f"checkpoint: {name} needs a file of weights ({', '.join(checkpoints.SUFFIXES)}) "
            f"or hf:OWNER/NAME; only {', '.join(PACKAGED)} has its own"
        )
    return str(resources.files("fcljax") / "assets" / PACKAGED[name])


def _packaged_decoder(name: str | None, image_size: int | None) -> str | None:
    """None also where the file is not there: it is made anew with the encoder alone."""
    if name not in PACKAGED_DECODERS or image_size not in (None, VITS[name].image_size):
        return None
    file = resources.files("fcljax") / "assets" / PACKAGED_DECODERS[name]
    return str(file) if file.is_file() else None


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
    file = checkpoints.read(source)
    if torchvision.is_convnet(file.tensors):
        raise InputError(
            f"checkpoint: {source!r} holds a convolutional network, which is read as it is: "
            f"`fcljax run METHOD --checkpoint {source}`"
        )
    file, network, mean, std, notes = _loaded(
        file,
        None,
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

    The same parameters and metadata give the same bytes.

    Args:
      dtype: float32, float16 or bfloat16, of all tensors.

    Raises:
      InputError: if a value is too large for the type.
    """
    flat = {}
    for name, x in sorted(flatten_dict(params, sep=".").items()):
        with np.errstate(over="ignore"):
            # tobytes writes in C's order, whatever the order in memory
            flat[name] = np.asarray(x).astype(jnp.dtype(dtype))
        if dtype == "float16" and not np.isfinite(flat[name]).all():
            raise InputError(f"dtype: {name} has values beyond float16; choose 'bfloat16' or 'float32'")
    with atomic(path) as temporary:
        temporary.write_bytes(_safetensors(flat, metadata, _KINDS[dtype]))


def _safetensors(flat: dict[str, np.ndarray], metadata: dict[str, str], kind: str) -> bytes:
    """A safetensors file of these tensors in this order (the library's writer shuffles the metadata)."""
    header: dict[str, object] = {"__metadata__": metadata}
    ends = np.cumsum([0, *(x.nbytes for x in flat.values())]).tolist()
    for (name, x), start, end in zip(flat.items(), ends[:-1], ends[1:], strict=True):
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, *(x.tobytes() for x in flat.values())])


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


def _loaded(
    file: checkpoints.Checkpoint,
    name: str | None,
    image_size: int | None,
    facts: naming.Facts,
    part: str = "teacher",
    positions: Positions = "antialiased",
    normalise: str | None = None,
) -> _Loaded:
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
    epsilon = _epsilon(file, _object(file, "config").get("epsilon", file.config.get("layer_norm_eps", usual)))
    decoder = network.decoder and (
        dataclasses.replace(network.decoder[0], epsilon=epsilon),
        network.decoder[1],
    )
    return network._replace(config=dataclasses.replace(network.config, epsilon=epsilon), decoder=decoder)


def _epsilon(file: checkpoints.Checkpoint, value: object) -> float:
    if not isinstance(value, float) or not 0 < value <= 1e-3:
        raise InputError(
            f"checkpoint: {file.source!r} says of itself that its LayerNorms have epsilon {value!r}"
        )
    return value


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
    # stored in half precision they are rounded, by up to 2e-3 in bfloat16
    if config.width % 4 == 0 and np.allclose(
        position, sincos_positions(config.grid, config.width), atol=5e-3
    ):
        return params | {"pos": np.asarray(sincos_positions(grid, config.width))}
    return params | {"pos": np.asarray(interpolate_positions(jnp.asarray(position), grid, positions))}


def _constants(
    file: checkpoints.Checkpoint, network: naming.Network, normalise: str | None
) -> tuple[Colour, Colour, list[str]]:
    """Mean and standard deviation of pixels: as the user or the file says, or as its kind suggests."""
    if normalise is not None:
        return *NORMALISE[choose("normalise", normalise, NORMALISE)], []
    said = _said_constants(file)
    if said is not None:
        return *said, []
    named = network.mapping != "google" and any(
        word in PurePosixPath(file.source).name.lower() for word in _IMAGENET_NAMES
    )
    kind = "imagenet" if network.torch_training or named else "half"
    mean, std = NORMALISE[kind]
    return mean, std, [_assumed(mean, std, kind)]


def _said_constants(file: checkpoints.Checkpoint) -> tuple[Colour, Colour] | None:
    """Mean and standard deviation of pixels, if the file or one beside it says them."""
    if "mean" in file.metadata and "std" in file.metadata:
        return _colour(file, "mean", _decoded(file, "mean")), _colour(file, "std", _decoded(file, "std"))
    timm = file.config.get("pretrained_cfg")
    for beside, names in ((file.preprocessor, ("image_mean", "image_std")), (timm, ("mean", "std"))):
        if isinstance(beside, dict) and all(name in beside for name in names):
            return _colour(file, names[0], beside[names[0]]), _colour(file, names[1], beside[names[1]])
    return None


def _assumed(mean: Colour, std: Colour, kind: str) -> str:
    constants = f"pixel mean {_listed(mean)} and std {_listed(std)} are assumed ({kind})"
    return f"{constants}: the checkpoint does not tell them"


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


# ---- a decoder in a file of its own ------------------------------------------------------------------------


def _own_decoder(loaded: _Loaded) -> PretrainedDecoder | None:
    """The decoder in the encoder's file, which works with the file's own constants."""
    decoder = loaded.network.decoder
    return decoder and PretrainedDecoder(*decoder, loaded.mean, loaded.std)


def _other_decoder(encoder: _Loaded, source: str, heads: int | None) -> tuple[PretrainedDecoder, list[str]]:
    """The decoder in another file, at the encoder's image size, and what a user should be told."""
    try:
        file, decoder, notes = _read_decoder(encoder, source, heads)
    except InputError as error:  # what reads any file says checkpoint
        raise InputError(f"decoder: {str(error).removeprefix('checkpoint: ')}") from None
    mine, theirs = encoder.network.config, decoder.config
    for what, needs, has in (
        ("tokens of width", theirs.encoder_width, mine.width),
        ("patches of side", theirs.patch, mine.patch),
    ):
        if needs != has:
            raise InputError(
                f"decoder: {file.source!r} goes with {what} {needs}, and the encoder has {has}; train one "
                "for it with fcljax pretrain-decoder"
            )
    trained_on = file.metadata.get("encoder_sha256")
    if trained_on not in (None, encoder.source.digest, encoder.source.metadata.get("sha256")):
        notes = [*notes, f"the decoder was trained on another encoder, the file with sha256 {trained_on}"]
    if theirs.image_size != mine.image_size:
        params = _resized_decoder(theirs, decoder.params, mine.grid, "antialiased")
        decoder = decoder._replace(
            config=dataclasses.replace(theirs, image_size=mine.image_size), params=params
        )
    return decoder, notes


def _read_decoder(
    encoder: _Loaded, source: str, heads: int | None
) -> tuple[checkpoints.Checkpoint, PretrainedDecoder, list[str]]:
    """What a file's decoder is by itself, whatever the encoder: a file of a decoder alone, or a whole masked
    autoencoder."""
    file = checkpoints.read(source)
    facts = _joined(naming.Facts(None, heads), _told(file))
    if not naming.is_decoder(file.tensors):
        # heads change no shape; what the encoder has will do where the file does not tell
        facts = facts._replace(heads=facts.heads or encoder.network.config.heads)
        decoder = _own_decoder(_loaded(file, None, None, facts))
        if decoder is None:
            raise InputError(f"{file.source!r} has no decoder")
        return file, decoder, []
    config, params, notes = naming.interpret_decoder(file.tensors, facts)
    epsilon = _epsilon(file, _object(file, "decoder").get("epsilon", config.epsilon))
    config = dataclasses.replace(config, epsilon=epsilon)
    if not {"mean", "std"} <= set(file.metadata):
        notes = [*notes, "the decoder's file does not tell its pixel constants: the encoder's are assumed"]
        return file, PretrainedDecoder(config, params, encoder.mean, encoder.std), notes
    mean, std = (_colour(file, what, _decoded(file, what)) for what in ("mean", "std"))
    return file, PretrainedDecoder(config, params, mean, std), notes


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
    check_folder(path.parent, "target")
    return path


def _metadata(
    file: checkpoints.Checkpoint, network: naming.Network, mean: Colour, std: Colour
) -> dict[str, str]:
    metadata = {"format": FORMAT, "source": file.source, "sha256": file.digest, "mapping": network.mapping}
    metadata |= {"config": _shape(network.config), "mean": json.dumps(mean), "std": json.dumps(std)}
    metadata |= {"decoder": _shape(network.decoder[0])} if network.decoder else {}
    return metadata | ({"part": network.part} if network.part else {})


def decoder_metadata(config: DecoderConfig, mean: Colour, std: Colour, encoder: str) -> dict[str, str]:
    """What a file of a decoder alone says of itself for `load_backbone`.

    Args:
      config: its static shape.
      mean, std: as in PretrainedDecoder.
      encoder: sha256 of the file of the encoder that it was trained on.
    """
    return {
        "format": FORMAT,
        "decoder": _shape(config),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "encoder_sha256": encoder,
    }


def _shape(config: ViTConfig | DecoderConfig) -> str:
    return json.dumps({key: value for key, value in dataclasses.asdict(config).items() if key != "dtype"})


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
