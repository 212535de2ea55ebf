"""Pretrained backbones: from the usual kinds of files of weights to a network.

`checkpoints` reads files, `finding` takes one network of each, `naming`, `torchvision` and `convnext` know
the names of tensors, `sidecars` what else is said. The image size, the compute type and the pixel constants
are decided here, and a masked autoencoder's decoder joins its encoder.
"""

import dataclasses
import json
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float

from fcljax.errors import InputError, choose
from fcljax.files import atomic
from fcljax.models.mae import DecoderConfig, sincos_positions
from fcljax.models.networks import Colour, ConvNetConfig, NetworkConfig, make_network
from fcljax.models.shapes import CONVNETS, OF_A_RUN, PACKAGED, VITS, ConvNeXtConfig
from fcljax.models.vit import ViTConfig
from fcljax.models.weights import checkpoints, convnext, dialects, finding, naming, sidecars, torchvision
from fcljax.models.weights.sidecars import FORMAT
from fcljax.pixels import NORMALISE
from fcljax.settings import Positions, StemChoice
from fcljax.types import PyTree

PACKAGED_DECODERS = {"vit_micro": "vit_micro_decoder.safetensors"}
# sha256 of these files as they were packaged
ASSET_DIGESTS = {
    "vit_micro.safetensors": "adf915dc34db6a2500d0ecc639604776fa4e257976121d106988c5dad090c551",
    "vit_micro_decoder.safetensors": "0c80298fd2dd86ef522c724af4bf864056f9ebeaf9f66d3d6e4aa7adc249568d",
}
VARIANTS = (
    "layer_scale",
    "registers",
    "qk_norm",
    "pre_norm",
    "activation",
    "rotary_base",
)  # fields of some ViTs' shapes

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # what safetensors calls them
_MATRICES = {"patch", "qkv", "proj", "fc1", "fc2", "embed", "predict"}
# Names that the authors' files have kept, of networks that were trained with ImageNet's constants.
_IMAGENET_NAMES = ("dino", "ibot", "deit", "mae")


class PretrainedDecoder(NamedTuple):
    """A masked autoencoder's decoder."""

    config: DecoderConfig  # at the encoder's image size
    params: PyTree  # for `decode`
    mean: Colour  # pixel constants of the images that its encoder saw in training, and that it predicts
    std: Colour


class Pretrained(NamedTuple):
    """A network with what is needed to use it."""

    config: NetworkConfig  # at the image size that was asked for
    params: PyTree  # of the network, or of the encoder of an autoencoder
    # {"kernel": [width, classes], "bias": [classes]} if the file has a classification head of the class token
    head: PyTree | None
    decoder: PretrainedDecoder | None  # a masked autoencoder's, from this file or another
    mean: Colour  # what the weights expect to be subtracted from pixels in [0, 1]
    std: Colour  # and what to divide them by
    # whose names the file has: fcljax, timm, huggingface, google, mae or torchvision; random: no file
    mapping: str
    digest: str  # the file's sha256
    notes: tuple[str, ...]  # for the user: what was assumed, left out, or changed


class WeightOptions(NamedTuple):
    """How a file of weights is read."""

    heads: int | None = None  # attention heads, for files that do not tell them
    decoder_heads: int | None = None  # the same for the decoder of a masked autoencoder
    # the network to take from a file of several: teacher, student, or another part of the names before one
    part: str = "teacher"
    positions: Positions = "antialiased"  # how position embeddings are interpolated
    normalise: str | None = None  # pixel constants, of NORMALISE; None: the file's, else those of its kind
    # Another file with a masked autoencoder's decoder, named as `checkpoint` is: one that `fcljax
    # pretrain-decoder` wrote, or a checkpoint of a masked autoencoder, of which nothing else is taken. None
    # takes what the encoder's file has; for the packaged vit_micro at its own image size the packaged one.
    decoder: str | None = None
    # of a convolutional network without a file; auto: "cifar" for images under 64 px, else "imagenet"
    stem: StemChoice = "auto"
    seed: int = 0  # of the values of a convolutional network without a file


class Loaded(NamedTuple):
    """A file's network at the image size that was asked for, still in numpy, with pixel constants."""

    source: checkpoints.Checkpoint
    network: naming.Interpreted
    mean: Colour
    std: Colour
    notes: tuple[str, ...]


def load_backbone(
    name: str | None,
    checkpoint: str | None,
    image_size: int | None,
    dtype: str = "float32",
    options: WeightOptions = WeightOptions(),  # noqa: B008
) -> Pretrained:
    """A pretrained network, or a convolutional one with random values.

    Args:
      name: one of VITS or CONVNETS, which the file must fit; None takes the architecture from the file, or
        vit_micro if there is none.
      checkpoint: a file or folder, as `checkpoints.read_checkpoint` takes them, or
        `hf:OWNER/NAME[@REVISION][:FILE]`; None takes the weights that ship with the package.
      image_size: side in pixels, a multiple of the patch size; None keeps the network's own. Position
        embeddings are interpolated.
      dtype: compute type; matrix parameters are stored in it, norms and embeddings stay float32.
      options: see there.

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
    file = None if checkpoint is None else checkpoints.read_checkpoint(checkpoint)
    network = None if file is None else find(file, options.part)
    if name in CONVNETS or (network and network.family.reader != "vit"):
        for option in ("heads", "decoder"):
            if getattr(options, option) is not None:
                raise InputError(
                    f"{option}: {getattr(options, option)!r} is of a ViT, and the backbone is a "
                    "convolutional network"
                )
        if file is None or network is None:
            assert name is not None  # one of CONVNETS
            return _random_convnet(name, image_size, dtype, options)
        return convolutional(file, network, name, image_size, dtype, options.stem)
    if options.stem != "auto":
        raise InputError(
            f"stem: {options.stem!r} is of a convolutional network, and the backbone is {name or 'a ViT'}; "
            "nearest: --backbone resnet18"
        )
    decoder = options.decoder
    if decoder is None and checkpoint is None:
        decoder = _packaged_decoder(name, image_size)
    if file is None or network is None:
        file = checkpoints.read_checkpoint(packaged(name))
        network = find(file, options.part)
    found = loaded(file, network, name, image_size, options)
    joined = _own_decoder(found)
    notes = []
    if decoder is not None:
        joined, notes = _other_decoder(found, decoder, options.decoder_heads)
    if joined:
        config = dataclasses.replace(joined.config, dtype=dtype)
        joined = joined._replace(config=config, params=_stored(joined.params, dtype))
    vit = found.network
    return Pretrained(
        config=dataclasses.replace(vit.config, dtype=dtype),
        params=_stored(vit.params, dtype),
        head=vit.head and jax.tree.map(jnp.array, vit.head),
        decoder=joined,
        mean=found.mean,
        std=found.std,
        mapping=vit.mapping,
        digest=file.digest,
        notes=(*found.notes, *notes),
    )


def find(file: checkpoints.Checkpoint, part: str) -> finding.NetworkInFile:
    """The one network of a file.

    Raises:
      InputError: as `finding.find`.
    """
    return finding.find(dialects.from_flax(file.tensors), part)


def convolutional(
    file: checkpoints.Checkpoint,
    network: finding.NetworkInFile,
    name: str | None,
    image_size: int | None,
    dtype: str,
    stem: StemChoice,
) -> Pretrained:
    """A convolutional network of a file.

    Raises:
      InputError: as `load_backbone`.
    """
    if network.family.reader == "vit":
        raise InputError(
            f"checkpoint: does not fit {name}: a Vision Transformer is in it ({network.family.name})"
        )
    kind = convnext if network.family.reader == "convnext" else torchvision
    found = kind.interpret(network.tensors, name)
    own = getattr(found.config, "stem", None)
    if stem not in ("auto", own):
        raise InputError(f"stem: {stem!r} asked for, but the checkpoint has {own or 'one of its own'!r}")
    config = _sized(found.config, image_size, dtype)
    said = sidecars.said(file, None, found.config.width)
    notes = [] if found.head is None else [naming.headless(found.head)]
    notes += [
        *finding.taken(network.prefix),
        *finding.left_out((*network.beside, *found.beside)),
        *said.notes,
    ]
    pixels = said.pixels
    if pixels is None:
        pixels = NORMALISE["imagenet"]
        notes.append(_assumed(*pixels, "imagenet"))
    params, head = jax.tree.map(jnp.asarray, (found.params, found.head))
    return Pretrained(config, params, head, None, *pixels, "torchvision", file.digest, tuple(notes))


def _random_convnet(name: str, image_size: int | None, dtype: str, options: WeightOptions) -> Pretrained:
    """Values that depend on the seed alone; pixels between -1 and 1."""
    config = CONVNETS[name]
    seed = options.seed
    if isinstance(config, ConvNeXtConfig):
        if options.stem != "auto":
            raise InputError(
                f"stem: {options.stem!r} is not of {name}, which has one of its own; leave it out"
            )
    else:
        own = config.stem if image_size is None else "cifar" if image_size < 64 else "imagenet"
        config = dataclasses.replace(config, stem=own if options.stem == "auto" else options.stem)
    config = _sized(config, image_size, dtype)
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


def decoder_metadata(config: DecoderConfig, mean: Colour, std: Colour, encoder: str) -> dict[str, str]:
    """The metadata of a file of a decoder alone, for `load_backbone`.

    Args:
      config: its static shape.
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
    """A static shape as metadata; what few networks have is there for those alone."""
    usual = dataclasses.asdict(ViTConfig())
    return json.dumps(
        {
            key: value
            for key, value in dataclasses.asdict(config).items()
            if key not in OF_A_RUN and not (key in VARIANTS and value == usual[key])
        }
    )


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
    cls = position[:1]
    patches = position[1:]
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


def loaded(
    file: checkpoints.Checkpoint,
    network: finding.NetworkInFile,
    name: str | None,
    image_size: int | None,
    options: WeightOptions,
) -> Loaded:
    """The ViT of a file.

    Args:
      file: as it was read.
      network: of that file, as `find` gives it.
      name, image_size, options: as of `load_backbone`.

    Raises:
      InputError: as `load_backbone`.
    """
    named = naming.named(network)
    sizes = naming.sizes(named)
    said = sidecars.said(file, sizes, sizes.width)
    facts = _joined(naming.TensorFacts(options.heads, options.decoder_heads), said.facts)
    vit = _with_epsilon(naming.interpret(named, name, facts), said.epsilon)
    _check_size(image_size, vit.config, name or "the checkpoint")
    vit, resized = _resized(vit, image_size, options.positions)
    mean, std, assumed = _constants(file, vit, said.pixels, options.normalise)
    return Loaded(file, vit, mean, std, (*vit.notes, *said.notes, *resized, *assumed))


def _check_size(image_size: int | None, vit: ViTConfig, name: str) -> None:
    if image_size is not None and (image_size % vit.patch or image_size < vit.patch):
        fitting = max(vit.patch, round(image_size / vit.patch) * vit.patch)
        raise InputError(
            f"image_size: {image_size} is not a multiple of the patch size {vit.patch} of {name}; "
            f"nearest: {fitting}"
        )


def _with_epsilon(network: naming.Interpreted, said: float | None) -> naming.Interpreted:
    """The network with its own LayerNorms' epsilon: if not said, 1e-12 in Hugging Face's ViTs, else 1e-6."""
    usual = 1e-12 if network.mapping == "huggingface" else network.config.epsilon
    epsilon = usual if said is None else said
    decoder = network.decoder and (
        dataclasses.replace(network.decoder[0], epsilon=epsilon),
        network.decoder[1],
    )
    return network._replace(config=dataclasses.replace(network.config, epsilon=epsilon), decoder=decoder)


def _joined(asked: naming.TensorFacts, said: naming.TensorFacts) -> naming.TensorFacts:
    for field in ("heads", "decoder_heads"):
        ours = getattr(asked, field)
        theirs = getattr(said, field)
        if ours is not None and ours < 1:
            raise InputError(f"{field}: {ours} is not positive")
        if None not in (ours, theirs) and ours != theirs:
            raise InputError(f"{field}: {ours} asked for, but the checkpoint has {theirs}")
    heads = asked.heads or said.heads
    decoder_heads = asked.decoder_heads or said.decoder_heads
    return said._replace(heads=heads, decoder_heads=decoder_heads)


def _resized(
    network: naming.Interpreted, image_size: int | None, positions: Positions
) -> tuple[naming.Interpreted, list[str]]:
    """The network at another image size."""
    if image_size is None or image_size == network.config.image_size:
        return network, []
    old = network.config.grid
    config = dataclasses.replace(network.config, image_size=image_size)
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
    file: checkpoints.Checkpoint,
    network: naming.Interpreted,
    said: tuple[Colour, Colour] | None,
    normalise: str | None,
) -> tuple[Colour, Colour, list[str]]:
    """Mean and standard deviation of pixels: as the user or the file says, or as its kind suggests."""
    if normalise is not None:
        return *NORMALISE[choose("normalise", normalise, NORMALISE)], []
    if said is not None:
        return *said, []
    named = network.mapping != "google" and any(
        word in PurePosixPath(file.source).name.lower() for word in _IMAGENET_NAMES
    )
    kind = network.pixels or ("imagenet" if network.torch_training or named else "half")
    mean, std = NORMALISE[kind]
    return mean, std, [_assumed(mean, std, kind)]


def _assumed(mean: Colour, std: Colour, kind: str) -> str:
    constants = f"pixel mean {colour_text(mean)} and std {colour_text(std)} are assumed ({kind})"
    return f"{constants}: the checkpoint does not tell them"


def _stored(tree: PyTree, dtype: str) -> PyTree:
    """Arrays of our own: kernels and biases of matrix products in the compute type, all else float32. Cast by
    numpy, for JAX compiles a program for each shape."""

    def store(path, x):
        matrix = any(getattr(part, "key", "") in _MATRICES for part in path)
        return jax.device_put(np.array(x, jnp.dtype(dtype if matrix else "float32")))

    return jax.tree_util.tree_map_with_path(store, tree)


# ---- a decoder in a file of its own ------------------------------------------------------------------------


def _own_decoder(loaded: Loaded) -> PretrainedDecoder | None:
    """The decoder in the encoder's file, which works with the file's own constants."""
    decoder = loaded.network.decoder
    return decoder and PretrainedDecoder(*decoder, loaded.mean, loaded.std)


def _other_decoder(encoder: Loaded, source: str, heads: int | None) -> tuple[PretrainedDecoder, list[str]]:
    """The decoder in another file, at the encoder's image size, and what a user should be told."""
    try:
        file, decoder, notes = _read_decoder(encoder, source, heads)
    except InputError as error:  # what reads any file says checkpoint
        raise InputError(f"decoder: {str(error).removeprefix('checkpoint: ')}") from None
    mine = encoder.network.config
    theirs = decoder.config
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
    encoder: Loaded, source: str, heads: int | None
) -> tuple[checkpoints.Checkpoint, PretrainedDecoder, list[str]]:
    """What a file's decoder is by itself, whatever the encoder: a file of a decoder alone, or a whole masked
    autoencoder."""
    file = checkpoints.read_checkpoint(source)
    if not naming.is_decoder(file.tensors):
        # heads change no shape; what the encoder has will do where the file does not tell
        network = find(file, WeightOptions().part)
        try:
            found = loaded(file, network, None, None, WeightOptions(decoder_heads=heads))
        except InputError:
            usual = encoder.network.config.heads
            found = loaded(file, network, None, None, WeightOptions(usual, heads))
        decoder = _own_decoder(found)
        if decoder is None:
            raise InputError(f"{file.source!r} has no decoder")
        return file, decoder, []
    said = sidecars.said(file, None, 0)
    facts = _joined(naming.TensorFacts(None, heads), said.facts)
    config, params, notes = naming.interpret_decoder(file.tensors, facts)
    epsilon = sidecars.object_of(file, "decoder").get("epsilon", config.epsilon)
    config = dataclasses.replace(config, epsilon=sidecars.checked_epsilon(file, epsilon))
    if said.pixels is None:
        notes = [*notes, "the decoder's file does not tell its pixel constants: the encoder's are assumed"]
        return file, PretrainedDecoder(config, params, encoder.mean, encoder.std), notes
    return file, PretrainedDecoder(config, params, *said.pixels), notes


def colour_text(colour: Colour) -> str:
    """A colour in a line."""
    return ", ".join(f"{x:g}" for x in colour)
