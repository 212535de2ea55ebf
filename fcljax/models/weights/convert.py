"""`fcljax convert`: any file of weights as one of our own, which keeps what is known of it."""

import dataclasses
import json
from pathlib import Path, PurePosixPath
from typing import Literal

import jax

from fcljax.errors import InputError
from fcljax.files import check_folder
from fcljax.models.weights import checkpoints
from fcljax.models.weights.pretrained import (
    Loaded,
    WeightOptions,
    colour_text,
    convolutional,
    find,
    loaded,
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
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Number format in which the weights are stored."""


def convert(source: str, target: str | None, options: ConvertOptions) -> list[tuple[str, str]]:
    """Write any checkpoint as a file of our own, with its architecture, pixel constants and provenance.

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
    file = checkpoints.read_checkpoint(source)
    network = find(file, options.part)
    if network.family.reader != "vit":
        convolutional(file, network, None, None, "float32", "auto")  # raises where a run would
        raise InputError(
            f"checkpoint: {source!r} holds a convolutional network, which is read as it is: "
            f"`fcljax run METHOD --checkpoint {source}`"
        )
    how = WeightOptions(
        options.heads, options.decoder_heads, options.part, options.positions, options.normalise
    )
    found = loaded(file, network, None, options.image_size, how)
    tree = dict(found.network.params)
    if found.network.head is not None and options.keep_head:
        tree["head"] = found.network.head
    if found.network.decoder is not None:
        tree["decoder"] = found.network.decoder[1]
    save_native(path, tree, _metadata(found), options.dtype)
    notes = [("note", note) for note in found.notes]
    return [*_rows(found, options.keep_head), *notes, ("written to", str(path))]


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


def _metadata(found: Loaded) -> dict[str, str]:
    file = found.source
    network = found.network
    metadata = {"format": FORMAT, "source": file.source, "sha256": file.digest, "mapping": network.mapping}
    metadata["config"] = shape_text(network.config)
    metadata |= {"mean": json.dumps(found.mean), "std": json.dumps(found.std)}
    metadata |= {"decoder": shape_text(network.decoder[0])} if network.decoder else {}
    return metadata | ({"part": network.part} if network.part else {})


def _rows(found: Loaded, keep_head: bool) -> list[tuple[str, str]]:
    network = found.network
    head = "none"
    decoder = "none"
    config = network.config
    if network.head:
        head = f"{network.head['bias'].size} classes, {'kept' if keep_head else 'dropped'}"
    if network.decoder:
        theirs = network.decoder[0]
        decoder = f"width {theirs.width}, depth {theirs.depth}, heads {theirs.heads}"
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
        ("mean", colour_text(found.mean)),
        ("std", colour_text(found.std)),
        ("sha256", found.source.digest),
    ]
