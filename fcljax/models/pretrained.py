"""Pretrained backbones from files: our own safetensors, and npz or safetensors with timm's ViT names and torch's layouts.

The tensors are checked one by one against the network they are meant for; nothing is unpickled.
"""

import dataclasses
import zipfile
import zlib
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from fcljax.errors import InputError, choose
from fcljax.files import atomic
from fcljax.models.vit import VITS, ViTConfig, parameter_shapes
from fcljax.types import PyTree

PACKAGED = {"vit_micro": "vit_micro.safetensors"}


def load_backbone(name: str, checkpoint: str | None, image_size: int | None, dtype: str = "float32") -> tuple[ViTConfig, PyTree]:
    """A backbone's static shape and its parameters, float32 or the compute type.

    Args:
      name: one of VITS.
      checkpoint: a .safetensors or .npz file; None takes the weights that ship with the package.
      image_size: side in pixels, a multiple of the patch size; None keeps the network's own. Position embeddings are interpolated.
      dtype: compute type; matrix parameters are stored in it, norms and embeddings stay float32.

    Raises:
      InputError: for an unknown name, a missing or broken file, or tensors that do not fit (the message says which).
    """
    native = VITS[choose("backbone", name, VITS)]
    size = native.image_size if image_size is None else image_size
    if size % native.patch:
        fitting = max(native.patch, round(size / native.patch) * native.patch)
        raise InputError(f"image_size: {size} is not a multiple of the patch size {native.patch} of {name}; nearest: {fitting}")
    if checkpoint is None and name not in PACKAGED:
        raise InputError(
            f"checkpoint: {name} needs a file of weights (.safetensors or .npz); only {', '.join(PACKAGED)} has its own"
        )
    path = Path(checkpoint) if checkpoint else Path(str(resources.files("fcljax") / "assets" / PACKAGED[name]))
    tensors = read_tensors(path)
    params = from_timm(tensors, native, name) if "patch_embed.proj.weight" in tensors else from_native(tensors, native, name)
    config = dataclasses.replace(native, image_size=size, dtype=dtype)
    params["pos"] = interpolate_positions(jnp.asarray(params["pos"]), config.grid)
    return config, jax.tree_util.tree_map_with_path(lambda path, x: _store(path, x, dtype), params)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a .npz or .safetensors file.

    Raises:
      InputError: if the file is missing, of another kind, truncated, or holds Python objects.
    """
    if not path.is_file():
        raise InputError(f"checkpoint: no file {str(path)!r}")
    try:
        if path.suffix == ".npz":
            # Our own handle, since np.load leaves its open when the archive is damaged, and takes a bare .npy under this name.
            with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if path.suffix == ".safetensors":
            return safetensors.numpy.load_file(path)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, safetensors.SafetensorError) as error:
        raise InputError(
            f"checkpoint: {str(path)!r} is damaged or not what its name says: {' '.join(str(error).split())}"
        ) from None
    raise InputError(f"checkpoint: {str(path)!r} has suffix {path.suffix!r}; valid: .safetensors, .npz")


def from_native(tensors: dict[str, np.ndarray], config: ViTConfig, name: str) -> PyTree:
    """Parameters from dotted names of our own.

    Raises:
      InputError: listing missing, unexpected or misshaped tensors.
    """
    wanted = flatten_dict(parameter_shapes(config), sep=".")
    _check(tensors, {key: value.shape for key, value in wanted.items()}, name)
    return unflatten_dict({key: np.asarray(tensors[key], np.float32) for key in wanted}, sep=".")


def from_timm(tensors: dict[str, np.ndarray], config: ViTConfig, name: str) -> PyTree:
    """Parameters from timm's names and torch's layouts (linear weights [out, in], patch convolution [out, 3, p, p]). A classification
    head is dropped.

    Raises:
      InputError: listing missing, unexpected or misshaped tensors.
    """
    names = _timm_names(config)
    body = {key: value for key, value in tensors.items() if not key.startswith("head.")}
    shapes = flatten_dict(parameter_shapes(config), sep=".")
    _check(body, {theirs: _torch_shape(ours, shapes[ours].shape, config) for ours, theirs in names.items()}, name)
    return unflatten_dict(
        {ours: _from_torch(ours, np.asarray(body[theirs], np.float32)) for ours, theirs in names.items()}, sep="."
    )


def save_native(path: str | Path, params: PyTree, metadata: dict[str, str], dtype: str = "float32") -> None:
    """Write parameters as safetensors under dotted names, atomically, with provenance in the metadata."""
    flat = {name: np.asarray(x).astype(dtype) for name, x in flatten_dict(params, sep=".").items()}
    with atomic(path) as temporary:
        safetensors.numpy.save_file(flat, temporary, metadata)


def interpolate_positions(position: Float[Array, "tokens width"], grid: int) -> Float[Array, "tokens2 width"]:
    """Position embeddings for grid x grid patches: bicubic (a = -0.5, antialiased) over the patch grid; the class token's stays."""
    cls, patches = position[:1], position[1:]
    side = round(patches.shape[0] ** 0.5)
    if side == grid:
        return position
    square = patches.reshape(side, side, -1)
    resized = jax.image.resize(square, (grid, grid, square.shape[-1]), "cubic", antialias=True)
    return jnp.concatenate([cls, resized.reshape(grid * grid, -1)])


def _store(path, x, dtype: str) -> Array:
    """Kernels and biases of matrix products in the compute type, all else float32."""
    matrix = any(getattr(part, "key", "") in ("patch", "qkv", "proj", "fc1", "fc2") for part in path)
    return jnp.asarray(x, dtype if matrix else "float32")


def _timm_names(config: ViTConfig) -> dict[str, str]:
    names = {"cls": "cls_token", "pos": "pos_embed"}
    pairs = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    modules = {"patch": ("kernel", "patch_embed.proj"), "norm": ("scale", "norm")}
    for i in range(config.depth):
        ours, theirs = f"block_{i:02d}", f"blocks.{i}"
        modules |= {f"{ours}.{part}": ("scale", f"{theirs}.{part}") for part in ("norm1", "norm2")}
        modules |= {f"{ours}.attn.{part}": ("kernel", f"{theirs}.attn.{part}") for part in ("qkv", "proj")}
        modules |= {f"{ours}.{part}": ("kernel", f"{theirs}.mlp.{part}") for part in ("fc1", "fc2")}
    for ours, (first, theirs) in modules.items():
        names |= {f"{ours}.{leaf}": f"{theirs}.{pairs[leaf]}" for leaf in (first, "bias")}
    return names


def _torch_shape(name: str, shape: tuple[int, ...], config: ViTConfig) -> tuple[int, ...]:
    if name == "patch.kernel":
        return (config.width, 3, config.patch, config.patch)
    if name in ("cls", "pos"):
        return (1, 1, *shape) if name == "cls" else (1, *shape)
    return shape[::-1]


def _from_torch(name: str, x: np.ndarray) -> np.ndarray:
    if name == "patch.kernel":
        return x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0])
    if name in ("cls", "pos"):
        return x.reshape(x.shape[-1]) if name == "cls" else x[0]
    return x.T


def _check(tensors: dict[str, np.ndarray], wanted: dict[str, tuple[int, ...]], name: str) -> None:
    wrong = [
        f"{key} has shape {tuple(tensors[key].shape)}, needs {shape}"
        for key, shape in wanted.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    missing = [key for key in wanted if key not in tensors]
    unexpected = [key for key in tensors if key not in wanted]
    found = {"misshaped": wrong, "missing": missing, "unexpected": unexpected}
    problems = [
        f"{kind}: {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
        for kind, keys in found.items()
        if keys
    ]
    if problems:
        raise InputError(f"checkpoint: does not fit {name}: {'; '.join(problems)}")
