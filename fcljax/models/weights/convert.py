"""Convert any file of weights to fcljax's format, with its facts and provenance (`fcljax
convert`)."""

import dataclasses
import json
from pathlib import Path, PurePosixPath
from typing import Literal

import jax

from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.models.weights import checkpoints, finding, text_encoders
from fcljax.models.weights.pretrained import (
    LoadedViT,
    WeightOptions,
    colour_text,
    find_network,
    load_convnet,
    load_vit,
    read_text_encoder,
    save_native,
    shape_text,
)
from fcljax.models.weights.sidecars import FORMAT
from fcljax.options import option
from fcljax.settings import Positions


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Options of `fcljax convert`."""

    heads: int | None = option(None, unset="the file's, else width / 64")
    """Number of attention heads."""
    decoder_heads: int | None = option(None, unset="the file's, else 16")
    """Number of attention heads in a masked autoencoder's decoder."""
    keep_head: bool = False
    """Keep the classification head, if the file has one."""
    part: str = "teacher"
    """Network to take from a file with several: teacher, student, or another part of the
    names."""
    image_size: int | None = option(None, unset="the network's own")
    """Side in pixels of the images; position embeddings are interpolated to it."""
    normalise: Literal["half", "unit", "imagenet"] | None = option(None, unset="the file's, or its kind's")
    """Pixel range that the network expects."""
    positions: Positions = "antialiased"
    """Interpolation of position embeddings."""
    text: bool = False
    """Take the text encoder of a file that has a network of images too (CLIP)."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format in which the weights are stored."""


def convert(
    source: str,
    target: str | None,
    options: ConvertOptions,
) -> list[tuple[str, str]]:
    """Write any checkpoint in fcljax's format, with its constants and provenance.

    Args:
      source: as `load_backbone`'s checkpoint.
      target: the .safetensors file to write, a new one; None takes the source's name, in
        the current folder.
      options: see there.

    Returns:
      The properties of the network and the file, as rows (property, value).

    Raises:
      InputError: as `load_backbone`, and if the target cannot be written or exists.
    """
    # before a file of gigabytes is read
    path = _target(source, target)
    file = checkpoints.read_checkpoint(source)
    if options.text or finding.only_text(file.tensors):
        return _convert_text(file, path, options)
    network = find_network(file, options.part)
    if network.family.reader != "vit":
        # first the errors of a run: a broken file would not be read as it is
        load_convnet(file, network, None, None, "float32", "auto")
        raise InputError(
            f"checkpoint: {source!r} holds a convolutional network, which is read as it is: "
            f"`fcljax run METHOD --checkpoint {source}`"
        )
    weight_options = WeightOptions(
        options.heads, options.decoder_heads, options.part, options.positions, options.normalise
    )
    loaded = load_vit(file, network, None, options.image_size, weight_options)
    params = dict(loaded.network.params)
    if loaded.network.head is not None and options.keep_head:
        params["head"] = loaded.network.head
    if loaded.network.decoder is not None:
        params["decoder"] = loaded.network.decoder[1]
    save_native(path, params, _metadata(loaded), options.dtype)
    notes = [("note", note) for note in loaded.notes]
    return [*_rows(loaded, options.keep_head), *notes, ("written to", str(path))]


def _convert_text(
    file: checkpoints.Checkpoint,
    path: Path,
    options: ConvertOptions,
) -> list[tuple[str, str]]:
    """Write a text encoder, and return its properties."""
    encoder = read_text_encoder(file)
    config = encoder.config
    facts = text_encoders.metadata(config)
    about = {"format": FORMAT, "source": file.source, "sha256": file.digest, "text": facts}
    save_native(path, encoder.params, about, options.dtype)
    rows = [("mapping", encoder.mapping)]
    rows += [(field, str(getattr(config.blocks, field))) for field in ("width", "depth", "heads", "mlp")]
    rows += [(field, str(getattr(config, field))) for field in ("vocabulary", "length", "pooling")]
    rows.append(("parameters", f"{sum(x.size for x in jax.tree.leaves(encoder.params)):,}"))
    rows.append(("sha256", file.digest))
    return [*rows, *(("note", note) for note in encoder.notes), ("written to", str(path))]


def _target(source: str, target: str | None) -> Path:
    """Return the file to write, which is checked before the network is read."""
    if target is None:
        # the name of the source, in the current folder
        name = Path(source).stem
        if source.startswith("hf:"):  # hf:OWNER/NAME@REVISION:FILE
            name = source.removeprefix("hf:").partition(":")[0].partition("@")[0]
        target = f"{PurePosixPath(name).name}.safetensors"
    path = Path(target)
    if path.suffix != ".safetensors":
        raise InputError(f"target: {str(path)!r} must end in .safetensors")
    # never replaced, since it may be the only copy of somebody's weights
    if path.exists() or path.is_symlink():
        raise InputError(f"target: {str(path)!r} exists; give another name")
    check_folder(path.parent, "target")
    return path


def _metadata(loaded: LoadedViT) -> dict[str, str]:
    file = loaded.source
    network = loaded.network
    # the provenance of the weights travels with them
    metadata = {
        "format": FORMAT,
        "source": file.source,
        "sha256": file.digest,
        "mapping": network.mapping,
        "config": shape_text(network.config),
        "mean": json.dumps(loaded.mean),
        "std": json.dumps(loaded.std),
    }
    if network.decoder:
        metadata["decoder"] = shape_text(network.decoder[0])
    if network.part:
        metadata["part"] = network.part
    return metadata


def _rows(loaded: LoadedViT, keep_head: bool) -> list[tuple[str, str]]:
    network = loaded.network
    config = network.config
    head = "none"
    if network.head:
        head = f"{network.head['bias'].size} classes, {'kept' if keep_head else 'dropped'}"
    decoder = "none"
    if network.decoder:
        shape = network.decoder[0]
        decoder = f"width {shape.width}, depth {shape.depth}, heads {shape.heads}"
    return [
        ("mapping", network.mapping + (f" ({network.part})" if network.part else "")),
        *((field, str(getattr(config, field))) for field in ("width", "depth", "heads", "mlp", "patch")),
        ("image size", str(config.image_size)),
        ("class token", "yes"),
        ("final norm", "yes" if config.final_norm else "no"),
        ("qkv", "fused" if network.fused else "split"),
        ("parameters", f"{sum(x.size for x in jax.tree.leaves(network.params)):,}"),
        ("head", head),
        ("decoder", decoder),
        ("mean", colour_text(loaded.mean)),
        ("std", colour_text(loaded.std)),
        ("sha256", loaded.source.digest),
    ]
