"""Load pretrained backbones from the usual kinds of files of weights.

`checkpoints` reads files, `finding` finds the network in each, `naming`, `torchvision`
and `convnext` know the names of tensors, and `sidecars` reads metadata. This module
decides image size, compute type and pixel constants, and joins a masked autoencoder's
decoder to its encoder.
"""

import dataclasses
import json
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from fcljax.errors import InputError, choose
from fcljax.files import atomic
from fcljax.models.mae import DecoderConfig, sincos_positions
from fcljax.models.networks import Colour, ConvNetConfig, NetworkConfig, make_network
from fcljax.models.shapes import (
    CONVNETS,
    OF_A_RUN,
    PACKAGED,
    TEXT_ENCODERS,
    VITS,
    ConvNeXtConfig,
    Dtype,
    TextConfig,
    array_type,
)
from fcljax.models.vit import ViTConfig
from fcljax.models.weights import (
    checkpoints,
    convnext,
    dialects,
    finding,
    naming,
    sidecars,
    text_encoders,
    torchvision,
)
from fcljax.models.weights.sidecars import FORMAT
from fcljax.pixels import NORMALISE
from fcljax.settings import Positions, StemChoice
from fcljax.types import PyTree

PACKAGED_DECODERS = {"vit_micro": "vit_micro_decoder.safetensors"}
# sha256 of the packaged files
ASSET_DIGESTS = {
    "vit_micro.safetensors": "adf915dc34db6a2500d0ecc639604776fa4e257976121d106988c5dad090c551",
    "vit_micro_decoder.safetensors": "0c80298fd2dd86ef522c724af4bf864056f9ebeaf9f66d3d6e4aa7adc249568d",
    "vit_micro_text.safetensors": "705f3c6fc0f77ed34f5fa1c48cfb80032e5dd9ada36cd0567667a798e50a48b8",
    "text_micro.safetensors": "f828f7d2b17af51974667506b0a5979b1f43d94e5ae99a7c69165c0666d002b1",
}
# fields of some ViTs' shapes
VARIANTS = ("layer_scale", "registers", "qk_norm", "pre_norm", "post_norm", "activation", "rotary_base")

_SAFETENSORS_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# modules of matrix products, whose parameters are stored in the compute type
_MATRICES = {"patch", "qkv", "proj", "fc1", "fc2", "embed", "predict"}
# Words in file names of networks whose authors normalised images by ImageNet's
# constants; no tensor tells.
_IMAGENET_NAMES = ("dino", "ibot", "deit", "mae")


class PretrainedDecoder(NamedTuple):
    """A masked autoencoder's decoder."""

    config: DecoderConfig  # at the encoder's image size
    params: PyTree  # for `decode`
    # pixel constants of its encoder's training images, in which it also predicts
    mean: Colour
    std: Colour


class PretrainedText(NamedTuple):
    """The text side of a CLIP."""

    config: TextConfig
    tower: PyTree
    """Parameters of the text tower."""
    text_projection: Float[np.ndarray, "token_width E"]
    image_projection: Float[np.ndarray, "width E"]
    scale: Float[np.ndarray, ""]
    """The factor of the cosine."""
    tokenizer: Path | None
    """Folder of the tokenizer.json; None: the packaged tower's tokens are hashes of words."""

    @property
    def joint(self) -> int:
        """Return E, the width of the space of both towers."""
        return self.text_projection.shape[1]


class Pretrained(NamedTuple):
    """A network with its constants and the notes on how it was loaded."""

    config: NetworkConfig  # at the requested image size
    params: PyTree  # of the network, or of the encoder of an autoencoder
    # {"kernel": [width, classes], "bias": [classes]} if the file has a classification
    # head of the class token
    head: PyTree | None
    # a masked autoencoder's, from this file or another
    decoder: PretrainedDecoder | None
    mean: Colour  # subtracted from pixels in [0, 1]
    std: Colour  # by which these pixels are then divided
    # whose names the file has: fcljax, timm, huggingface, google, mae or torchvision;
    # random: no file
    mapping: str
    digest: str  # the file's sha256
    notes: tuple[str, ...]  # for the user: what was assumed, left out, or changed
    # the text side of a CLIP, where a run asks for it
    text: PretrainedText | None = None


class WeightOptions(NamedTuple):
    """How to read a file of weights."""

    heads: int | None = None  # attention heads, if the file does not contain them
    decoder_heads: int | None = None  # the same for the decoder of a masked autoencoder
    # the network to take from a file of several: teacher, student, or another part of
    # the names before one
    part: str = "teacher"
    positions: Positions = "antialiased"  # interpolation of position embeddings
    # pixel constants, of NORMALISE; None: the file's, else its family's
    normalise: str | None = None
    # Another file with a masked autoencoder's decoder, named as `checkpoint` is: one
    # that `fcljax pretrain-decoder` wrote, or a checkpoint of a masked autoencoder, of
    # which only the decoder is taken. None takes the decoder of the encoder's file; for
    # the packaged vit_micro at its own image size the packaged one.
    decoder: str | None = None
    # of a convolutional network without a file; auto: "cifar" for images under 64 px,
    # else "imagenet"
    stem: StemChoice = "auto"
    seed: int = 0  # of the values of a convolutional network without a file
    # matrix parameters stay float32 in memory, whatever the compute type
    trains: bool = False


class LoadedViT(NamedTuple):
    """A file's ViT at the requested image size, still in numpy, with pixel constants."""

    source: checkpoints.Checkpoint
    network: naming.Interpreted
    mean: Colour
    std: Colour
    notes: tuple[str, ...]


def load_backbone(
    name: str | None,
    checkpoint: str | None,
    image_size: int | None,
    dtype: Dtype = "float32",
    options: WeightOptions = WeightOptions(),  # noqa: B008
) -> Pretrained:
    """Load a pretrained network, or make a convolutional one with random values.

    Args:
      name: one of VITS or CONVNETS, which the file must fit; None takes the architecture
        from the file, or vit_micro if there is none.
      checkpoint: a file or folder, as of `checkpoints.read_checkpoint`, or
        `hf:OWNER/NAME[@REVISION][:FILE]`; None takes the packaged weights.
      image_size: side in pixels, a multiple of the patch size; None keeps the network's
        own. Position embeddings are interpolated.
      dtype: compute type; matrix parameters are stored in it unless the network trains,
        norms and embeddings stay float32.
      options: of the weights.

    Raises:
      InputError: for an unknown name, a missing or broken file, or tensors that do not fit.
    """
    if name is None and checkpoint is None:
        name = "vit_micro"
    if name is not None:
        choose("backbone", name, (*VITS, *CONVNETS))
    if name in VITS:
        _check_size(image_size, VITS[name], name)
    file = None
    network = None
    if checkpoint is not None:
        file = checkpoints.read_checkpoint(checkpoint)
        network = find_network(file, options.part)
    if name in CONVNETS or (network and network.family.reader != "vit"):
        for option in ("heads", "decoder"):
            if getattr(options, option) is not None:
                raise InputError(
                    f"{option}: {getattr(options, option)!r} is an option of a ViT, but the backbone is a "
                    "convolutional network"
                )
        if file is None or network is None:
            assert name is not None  # one of CONVNETS
            return _random_convnet(name, image_size, dtype, options)
        return load_convnet(file, network, name, image_size, dtype, options.stem)
    if options.stem != "auto":
        raise InputError(
            f"stem: {options.stem!r} is an option of a convolutional network, but the backbone is "
            f"{name or 'a ViT'}; nearest: --backbone resnet18"
        )
    decoder_source = options.decoder
    if decoder_source is None and checkpoint is None:
        # only the packaged encoder has a packaged decoder, made from its own features
        decoder_source = _packaged_decoder(name, image_size)
    if file is None or network is None:
        file = checkpoints.read_checkpoint(packaged(name))
        network = find_network(file, options.part)
    # convolutional networks have returned above
    loaded = load_vit(file, network, name, image_size, options)
    stored = "float32" if options.trains else array_type(dtype)
    decoder = _decoder_in_file(loaded)
    notes = []
    if decoder_source is not None:
        # a decoder from another file replaces the one in this file
        decoder, notes = _load_decoder(loaded, decoder_source, options.decoder_heads)
    if decoder:
        config = dataclasses.replace(decoder.config, dtype=dtype)
        decoder = decoder._replace(config=config, params=to_device(decoder.params, stored))
    vit = loaded.network
    return Pretrained(
        config=dataclasses.replace(vit.config, dtype=dtype),
        params=to_device(vit.params, stored),
        head=vit.head and jax.tree.map(jnp.array, vit.head),
        decoder=decoder,
        mean=loaded.mean,
        std=loaded.std,
        mapping=vit.mapping,
        digest=file.digest,
        notes=(*loaded.notes, *notes),
    )


def find_network(file: checkpoints.Checkpoint, part: str) -> finding.NetworkInFile:
    """Return the network of a file.

    Raises:
      InputError: as `finding.find`.
    """
    return finding.find(dialects.from_flax(file.tensors), part)


def load_convnet(
    file: checkpoints.Checkpoint,
    network: finding.NetworkInFile,
    name: str | None,
    image_size: int | None,
    dtype: Dtype,
    stem: StemChoice,
) -> Pretrained:
    """Load the convolutional network of a file.

    Raises:
      InputError: as `load_backbone`.
    """
    if network.family.reader == "vit":
        raise InputError(
            f"checkpoint: does not fit {name}: it contains a Vision Transformer ({network.family.name})"
        )
    # families of convolutional networks name their tensors in one of two ways
    reader = torchvision
    if network.family.reader == "convnext":
        reader = convnext
    convnet = reader.interpret(network.tensors, name)
    file_stem = getattr(convnet.config, "stem", None)
    if stem not in ("auto", file_stem):
        raise InputError(
            f"stem: {stem!r} requested, but the checkpoint has {file_stem or 'one of its own'!r}"
        )
    config = _at_size(convnet.config, image_size, dtype)
    facts = sidecars.read_facts(file, None, convnet.config.width)
    notes = []
    if convnet.head is not None:
        notes.append(naming.head_note(convnet.head))
    notes += finding.role_notes(network.prefix)
    notes += finding.left_out_notes((*network.left_out, *convnet.left_out))
    notes += facts.notes
    pixels = facts.pixels
    if pixels is None:
        pixels = NORMALISE["imagenet"]
        notes.append(_assumed_pixels(*pixels, "imagenet"))
    params, head = jax.tree.map(jnp.asarray, (convnet.params, convnet.head))
    return Pretrained(config, params, head, None, *pixels, "torchvision", file.digest, tuple(notes))


def _random_convnet(
    name: str,
    image_size: int | None,
    dtype: Dtype,
    options: WeightOptions,
) -> Pretrained:
    """Draw values that depend on the seed alone; pixels are between -1 and 1."""
    config = CONVNETS[name]
    seed = options.seed
    if isinstance(config, ConvNeXtConfig):
        if options.stem != "auto":
            raise InputError(
                f"stem: {options.stem!r} is not of {name}, which has one of its own; leave it out"
            )
    elif options.stem != "auto":
        config = dataclasses.replace(config, stem=options.stem)
    elif image_size is not None:
        stem = "imagenet"
        if image_size < 64:
            stem = "cifar"
        config = dataclasses.replace(config, stem=stem)
    config = _at_size(config, image_size, dtype)
    mean, std = NORMALISE["half"]
    params = make_network(config, mean, std).init(jax.random.key(seed))
    note = f"{name} has random values of seed {seed}: no checkpoint was named"
    return Pretrained(config, params, None, None, mean, std, "random", f"random-{name}-{seed}", (note,))


def _at_size(
    config: ConvNetConfig,
    image_size: int | None,
    dtype: Dtype,
) -> ConvNetConfig:
    """Change the image size, which must leave a position in the last stage."""
    size = config.image_size
    if image_size is not None:
        size = image_size
    if size < config.reduction:
        raise InputError(
            f"image_size: {size} is less than the {config.reduction} pixels that become one position of the "
            f"last stage; nearest: {config.reduction}"
        )
    return dataclasses.replace(config, image_size=size, dtype=dtype)


def packaged(name: str | None) -> str:
    """Return the file of weights that comes with the package.

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
    if name not in PACKAGED_DECODERS or image_size not in (None, VITS[name].image_size):
        return None
    file = resources.files("fcljax") / "assets" / PACKAGED_DECODERS[name]
    # `fcljax pretrain-decoder` may be making it anew
    return str(file) if file.is_file() else None


def load_text_encoder(checkpoint: str | None, dtype: Dtype, trains: bool = False) -> Pretrained:
    """Load a text encoder.

    Args:
      checkpoint: as of `load_backbone`; None: `text_micro`, which comes with the package and
        `experiments/text_encoder.py` trains.
      dtype: number format of its products; matrix parameters are stored in its type.
      trains: whether the parameters train, and so are stored as float32.

    Raises:
      InputError: for a file without a text encoder, of another architecture, or broken.
    """
    if checkpoint is None:
        file = checkpoints.read_checkpoint(packaged("text_micro"))
        tensors = {key: np.asarray(value, np.float32) for key, value in file.tensors.items()}
        params = unflatten_dict(tensors, sep=".")
        encoder = text_encoders.InterpretedText(TEXT_ENCODERS["text_micro"], params, "fcljax", ())
    else:
        file = checkpoints.read_checkpoint(checkpoint)
        encoder = read_text_encoder(file)
    config = encoder.config
    config = dataclasses.replace(config, blocks=dataclasses.replace(config.blocks, dtype=dtype))
    params = to_device(encoder.params, "float32" if trains else array_type(dtype))
    none = (0.0, 0.0, 0.0)
    one = (1.0, 1.0, 1.0)
    return Pretrained(config, params, None, None, none, one, encoder.mapping, file.digest, encoder.notes)


def load_any(checkpoint: str) -> Pretrained:
    """Load the network of a file, which may be a text encoder.

    Args:
      checkpoint: as of `load_backbone`.

    Raises:
      InputError: as `load_backbone`.
    """
    if finding.only_text(checkpoints.read_checkpoint(checkpoint).tensors):
        return load_text_encoder(checkpoint, "float32")
    return load_backbone(None, checkpoint, None)


def read_text_encoder(file: checkpoints.Checkpoint) -> text_encoders.InterpretedText:
    """Return the text encoder of a file.

    Raises:
      InputError: as `load_text_encoder`.
    """
    text_encoders.check_architecture(file.config)
    network = finding.find(dialects.from_flax(file.tensors), WeightOptions().part, text=True)
    return text_encoders.interpret(network, file)


def save_native(
    path: str | Path,
    params: PyTree,
    metadata: dict[str, str],
    dtype: str = "float32",
) -> None:
    """Write parameters as safetensors, atomically, with their provenance.

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
        temporary.write_bytes(_safetensors(flat, metadata, _SAFETENSORS_TYPES[dtype]))


def _safetensors(
    flat: dict[str, np.ndarray],
    metadata: dict[str, str],
    dtype: str,
) -> bytes:
    """Return a safetensors file of these tensors in this order.

    The library's writer shuffles the metadata, so the same tensors would give different
    files.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, x in flat.items():
        start = end
        end = start + x.nbytes
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, *(x.tobytes() for x in flat.values())])


def decoder_metadata(
    config: DecoderConfig,
    mean: Colour,
    std: Colour,
    encoder: str,
) -> dict[str, str]:
    """Return the metadata of a file of a decoder alone, for `load_backbone`.

    Args:
      config: the decoder's static shape.
      mean, std: as in PretrainedDecoder.
      encoder: sha256 of the file of the encoder that it was trained on.
    """
    return {
        "format": FORMAT,
        "decoder": shape_text(config),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "encoder_sha256": encoder,
    }


def shape_text(config: ViTConfig | DecoderConfig) -> str:
    """Return a shape as JSON, without VARIANTS that have their default."""
    defaults = dataclasses.asdict(ViTConfig())
    return json.dumps(
        {
            key: value
            for key, value in dataclasses.asdict(config).items()
            if key not in OF_A_RUN and not (key in VARIANTS and value == defaults[key])
        }
    )


def interpolate_positions(
    position: Float[Array, "tokens width"], grid: int, how: Positions = "antialiased"
) -> Float[Array, "tokens2 width"]:
    """Interpolate the patches' position embeddings to grid x grid, bicubically.

    Args:
      position: the class token's and those of side x side patches, row by row.
      grid: the new side, in patches.
      how: "antialiased" as timm 1.0 and Pillow (a = -0.5, a kernel as wide as the new
        patches); "plain" as timm 0.6, most releases and torch's `interpolate` (a = -0.75,
        always four values).
    """
    cls = position[:1]
    side = round((len(position) - 1) ** 0.5)
    if side == grid:
        return position
    square = position[1:].reshape(side, side, -1)
    if how == "plain":
        weights = jnp.asarray(_plain_bicubic(side, grid))
        resized = jnp.einsum("iy,jx,yxd->ijd", weights, weights, square)
    else:
        resized = jax.image.resize(square, (grid, grid, square.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([cls, resized.reshape(grid * grid, -1)])


def _plain_bicubic(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """Return the weights [new, old] of Keys' kernel on the four nearest positions.

    Beyond the border, the border's value repeats.
    """
    position = (np.arange(new) + 0.5) * old / new - 0.5
    leftmost = np.floor(position).astype(int) - 1
    weights = np.zeros((new, old))
    for tap in range(4):
        x = np.abs(position - (leftmost + tap))
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        column = np.clip(leftmost + tap, 0, old - 1)
        np.add.at(weights, (np.arange(new), column), np.where(x <= 1, near, far))
    return weights.astype(np.float32)


# ---- from a file to a network ----------------------------------------------------------


def load_vit(
    file: checkpoints.Checkpoint,
    network: finding.NetworkInFile,
    name: str | None,
    image_size: int | None,
    options: WeightOptions,
) -> LoadedViT:
    """Load the ViT of a file.

    Args:
      file: as from `checkpoints.read_checkpoint`.
      network: of that file, as from `find_network`.
      name, image_size, options: as of `load_backbone`.

    Raises:
      InputError: as `load_backbone`.
    """
    named = naming.name_tensors(network)
    sizes = naming.sizes(named)
    facts = sidecars.read_facts(file, sizes, sizes.width)
    tensor_facts = _merge_facts(options.heads, options.decoder_heads, facts.tensors)
    vit = _with_epsilon(naming.interpret(named, name, tensor_facts), facts.epsilon)
    _check_size(image_size, vit.config, name or "the checkpoint")
    vit, size_notes = _resize(vit, image_size, options.positions)
    mean, std, pixel_notes = _pixel_constants(file, vit, facts.pixels, options.normalise)
    return LoadedViT(file, vit, mean, std, (*vit.notes, *facts.notes, *size_notes, *pixel_notes))


def _check_size(image_size: int | None, vit: ViTConfig, name: str) -> None:
    if image_size is not None and (image_size % vit.patch or image_size < vit.patch):
        nearest = max(vit.patch, round(image_size / vit.patch) * vit.patch)
        raise InputError(
            f"image_size: {image_size} is not a multiple of the patch size {vit.patch} of {name}; "
            f"nearest: {nearest}"
        )


def _with_epsilon(network: naming.Interpreted, epsilon: float | None) -> naming.Interpreted:
    """Set the epsilon of all LayerNorms; None: 1e-12 in Hugging Face's ViTs, else as the
    config has it."""
    if epsilon is None:
        epsilon = 1e-12 if network.mapping == "huggingface" else network.config.epsilon
    decoder = network.decoder
    if decoder:
        decoder = (dataclasses.replace(decoder[0], epsilon=epsilon), decoder[1])
    return network._replace(config=dataclasses.replace(network.config, epsilon=epsilon), decoder=decoder)


def _merge_facts(
    heads: int | None, decoder_heads: int | None, facts: naming.TensorFacts
) -> naming.TensorFacts:
    """Add the user's numbers of heads, which must not contradict the file's."""
    for field, option, in_file in (
        ("heads", heads, facts.heads),
        ("decoder_heads", decoder_heads, facts.decoder_heads),
    ):
        if option is not None and option < 1:
            raise InputError(f"{field}: {option} is not positive")
        if None not in (option, in_file) and option != in_file:
            raise InputError(f"{field}: {option} requested, but the checkpoint has {in_file}")
    return facts._replace(heads=heads or facts.heads, decoder_heads=decoder_heads or facts.decoder_heads)


def _resize(
    network: naming.Interpreted, image_size: int | None, positions: Positions
) -> tuple[naming.Interpreted, list[str]]:
    """Interpolate the positions to another image size; note it if they changed."""
    if image_size is None or image_size == network.config.image_size:
        return network, []
    old = network.config.grid
    config = dataclasses.replace(network.config, image_size=image_size)
    position = interpolate_positions(jnp.asarray(network.params["pos"]), config.grid, positions)
    params = network.params | {"pos": np.asarray(position)}
    decoder = network.decoder
    if decoder is not None:
        decoder_config = dataclasses.replace(decoder[0], image_size=image_size)
        decoder = (decoder_config, _resize_decoder(*decoder, config.grid, positions))
    note = (
        f"position embeddings were interpolated from {old} x {old} to {config.grid} x {config.grid} patches "
        f"({positions})"
    )
    return network._replace(config=config, params=params, decoder=decoder), [note]


def _resize_decoder(
    config: DecoderConfig,
    params: PyTree,
    grid: int,
    positions: Positions,
) -> PyTree:
    """Recompute sin-cos positions; interpolate any others."""
    position = params["pos"]
    # computed positions that were stored in bfloat16, which rounds them by up to 2e-3,
    # are recognised too
    if config.width % 4 == 0 and np.allclose(
        position, sincos_positions(config.grid, config.width), atol=5e-3
    ):
        return params | {"pos": np.asarray(sincos_positions(grid, config.width))}
    return params | {"pos": np.asarray(interpolate_positions(jnp.asarray(position), grid, positions))}


def _pixel_constants(
    file: checkpoints.Checkpoint,
    network: naming.Interpreted,
    in_file: tuple[Colour, Colour] | None,
    normalise: str | None,
) -> tuple[Colour, Colour, list[str]]:
    """Return mean and standard deviation of pixels, with a note if they are assumed.

    The user's choice counts first, then the file's constants, then those of the
    network's family.
    """
    if normalise is not None:
        return *NORMALISE[choose("normalise", normalise, NORMALISE)], []
    if in_file is not None:
        return *in_file, []
    file_name = PurePosixPath(file.source).name.lower()
    imagenet_name = network.mapping != "google" and any(word in file_name for word in _IMAGENET_NAMES)
    if network.pixels:
        kind = network.pixels
    elif network.torch_training or imagenet_name:
        kind = "imagenet"
    else:
        kind = "half"
    mean, std = NORMALISE[kind]
    return mean, std, [_assumed_pixels(mean, std, kind)]


def _assumed_pixels(mean: Colour, std: Colour, kind: str) -> str:
    constants = f"pixel mean {colour_text(mean)} and std {colour_text(std)} are assumed ({kind})"
    return f"{constants}: the checkpoint does not state them"


def to_device(tree: PyTree, dtype: str) -> PyTree:
    """Copy parameters to the device, those of matrix products in this type."""

    def store(path, x):
        matrix = any(getattr(part, "key", "") in _MATRICES for part in path)
        # cast by numpy: jax would compile a program for each shape
        return jax.device_put(np.array(x, jnp.dtype(dtype if matrix else "float32")))

    return jax.tree_util.tree_map_with_path(store, tree)


# ---- decoders --------------------------------------------------------------------------


def _decoder_in_file(loaded: LoadedViT) -> PretrainedDecoder | None:
    """Return the decoder in the encoder's file, with its pixel constants."""
    decoder = loaded.network.decoder
    return decoder and PretrainedDecoder(*decoder, loaded.mean, loaded.std)


def _load_decoder(
    encoder: LoadedViT,
    source: str,
    heads: int | None,
) -> tuple[PretrainedDecoder, list[str]]:
    """Load the decoder of another file at the encoder's image size, and notes."""
    try:
        file, decoder, notes = _read_decoder(encoder, source, heads)
    # readers of files name the option `checkpoint`, but the user gave --decoder
    except InputError as error:
        raise InputError(f"decoder: {str(error).removeprefix('checkpoint: ')}") from None
    vit = encoder.network.config
    config = decoder.config
    for what, needed, width in (
        ("tokens of width", config.encoder_width, vit.width),
        ("patches of side", config.patch, vit.patch),
    ):
        if needed != width:
            raise InputError(
                f"decoder: {file.source!r} goes with {what} {needed}, and the encoder has {width}; train one "
                "for it with fcljax pretrain-decoder"
            )
    trained_on = file.metadata.get("encoder_sha256")
    if trained_on not in (None, encoder.source.digest, encoder.source.metadata.get("sha256")):
        notes = [*notes, f"the decoder was trained on another encoder, the file with sha256 {trained_on}"]
    if config.image_size != vit.image_size:
        params = _resize_decoder(config, decoder.params, vit.grid, "antialiased")
        config = dataclasses.replace(config, image_size=vit.image_size)
        decoder = decoder._replace(config=config, params=params)
    return decoder, notes


def _read_decoder(
    encoder: LoadedViT, source: str, heads: int | None
) -> tuple[checkpoints.Checkpoint, PretrainedDecoder, list[str]]:
    """Read a file's decoder, alone or within a whole masked autoencoder."""
    file = checkpoints.read_checkpoint(source)
    if not naming.is_decoder(file.tensors):
        network = find_network(file, WeightOptions().part)
        try:
            loaded = load_vit(file, network, None, None, WeightOptions(decoder_heads=heads))
        # If its encoder's heads are not known, any number will do: they change no
        # shape, and only the decoder is used. Other errors come again.
        except InputError:
            any_heads = encoder.network.config.heads
            loaded = load_vit(file, network, None, None, WeightOptions(any_heads, heads))
        decoder = _decoder_in_file(loaded)
        if decoder is None:
            raise InputError(f"{file.source!r} has no decoder")
        return file, decoder, []
    facts = sidecars.read_facts(file, None, 0)
    tensor_facts = _merge_facts(None, heads, facts.tensors)
    config, params, notes = naming.interpret_decoder(file.tensors, tensor_facts)
    # fcljax writes the epsilon into its files; no tensor shows it
    epsilon = sidecars.object_of(file, "decoder").get("epsilon", config.epsilon)
    config = dataclasses.replace(config, epsilon=sidecars.checked_epsilon(file, epsilon))
    if facts.pixels is None:
        notes = [*notes, "the decoder's file does not tell its pixel constants: the encoder's are assumed"]
        return file, PretrainedDecoder(config, params, encoder.mean, encoder.std), notes
    return file, PretrainedDecoder(config, params, *facts.pixels), notes


def colour_text(colour: Colour) -> str:
    """Format a colour."""
    return ", ".join(f"{x:g}" for x in colour)
