"""What every command starts from: a backbone with its weights, and the images of a data set in the range that
it expects.

Reads files; all that comes after works on what is loaded here.
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt8
from rich.console import Console

from fcljax.config import BackboneConfig, ImageConfig, InputConfig, SplitConfig
from fcljax.data.augment import Preprocess, clean_view, preset, train_view
from fcljax.data.files.dataset import Dataset
from fcljax.data.files.sources import DataOptions, data_folder, hold_out, load_dataset
from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.files import atomic, machine_memory, open_regular
from fcljax.mesh import mesh_of
from fcljax.models.mae import autoencoder
from fcljax.models.networks import make_network
from fcljax.models.vit import ViTConfig
from fcljax.models.weights.pretrained import Pretrained, WeightOptions, load_backbone
from fcljax.options import SurrogateOptions, resolved
from fcljax.pixels import NORMALISE
from fcljax.runs.features import make_features
from fcljax.terminal import say
from fcljax.types import Network, PyTree

# of a device's memory that images may take when no budget is given: the rest is for the network at work
RESIDENT_SHARE = 0.5


class Inputs(NamedTuple):
    """A backbone, a data set, and how the images become its input."""

    backbone: Pretrained
    dataset: Dataset
    preprocess: Preprocess
    augments: bool  # does the training view differ from the clean one?
    surrogate: np.ndarray | tuple = ()  # images of another data set, where the settings ask for some


def load_inputs(cfg: InputConfig, dataset: Dataset | None = None) -> Inputs:
    """Load the backbone and the data set that the settings name.

    Args:
      cfg: what to load.
      dataset: images to take in place of those that the settings name.

    Raises:
      InputError: for anything in the settings or files that cannot work.
    """
    backbone = load_network(cfg, cfg.image_size, cfg.decoder, cfg.seed)
    size = backbone.config.image_size
    dataset = load_split(cfg, size) if dataset is None else dataset
    # Data sets that suggest no crops (digits, glyphs) fill their frame: they are resized as a whole, without
    # the margin.
    preprocess = preset(resolved(cfg.preprocess), size, fills_frame=not dataset.augment)
    preprocess = with_constants(preprocess, cfg, backbone)
    other = surrogate_images(cfg, cfg, size) if isinstance(cfg, SurrogateOptions) else ()
    return Inputs(backbone, dataset, preprocess, dataset.augment, other)


def load_network(
    cfg: BackboneConfig, image_size: int | None, decoder: str | None = None, seed: int = 0
) -> Pretrained:
    """The network that the settings name; `seed` is of random values, where it has no weights.

    Raises:
      InputError: as `load_backbone`.
    """
    return load_backbone(
        None if cfg.backbone == "auto" else cfg.backbone,
        cfg.checkpoint,
        image_size,
        cfg.dtype,
        WeightOptions(
            heads=cfg.heads, positions=resolved(cfg.positions), decoder=decoder, stem=cfg.stem, seed=seed
        ),
    )


def network_of(backbone: Pretrained, preprocess: Preprocess | None = None) -> Network:
    """The network of a file of weights as methods see it, with its decoder if it has one.

    Args:
      preprocess: how its images are made, of which it keeps the pixel constants; None: those of the weights.
    """
    pixels, pair = backbone if preprocess is None else preprocess, None
    if backbone.decoder and isinstance(backbone.config, ViTConfig):
        decoder = backbone.decoder
        pair = autoencoder(backbone.config, decoder.config, decoder.mean, decoder.std)
    return make_network(backbone.config, pixels.mean, pixels.std, pair)


def with_constants(preprocess: Preprocess, cfg: BackboneConfig, backbone: Pretrained) -> Preprocess:
    """The views with the pixel constants that the settings ask for."""
    if cfg.normalise == "release":
        return preprocess
    if cfg.normalise == "checkpoint":
        return preprocess.with_pixels(backbone.mean, backbone.std)
    return preprocess.with_pixels(*NORMALISE[resolved(cfg.normalise)])


def load_split(cfg: SplitConfig, image_size: int) -> Dataset:
    """The data set that the settings name, without what they hold out.

    Raises:
      InputError: as `load_dataset`.
    """
    dataset = load_dataset(cfg.dataset, image_options(cfg, image_size), verify=cfg.verify)
    return hold_out(dataset, cfg.holdout) if cfg.holdout else dataset


def surrogate_images(
    cfg: InputConfig, options: SurrogateOptions, image_size: int
) -> UInt8[np.ndarray, "S side side 3"]:
    """Training images of another data set under the clean view, as grey levels.

    Raises:
      InputError: for a data set that is not there, or the run's own.
    """
    if options.surrogate == cfg.dataset:
        raise InputError(f"surrogate: {options.surrogate!r} is the run's own data set; name another")
    try:
        dataset = load_dataset(options.surrogate, image_options(cfg, image_size), verify=cfg.verify)
    except InputError as error:
        raise InputError(f"surrogate: {str(error).removeprefix('dataset: ')}") from None
    rows = np.random.default_rng(cfg.seed).permutation(len(dataset.y_train))[: options.surrogate_images]
    plain = preset(resolved(cfg.preprocess), image_size, fills_frame=not dataset.augment)
    view = jax.jit(partial(clean_view, plain.with_pixels(*NORMALISE["unit"])))
    size = dataset.size_train

    def grey(some: np.ndarray) -> np.ndarray:
        unit = view(dataset.x_train[some], None if size is None else jnp.asarray(size[some]))
        return np.round(np.asarray(unit) * 255).astype(np.uint8)

    # a chunk at a time: the views are four times as large as the grey levels
    return np.concatenate([grey(rows[i : i + 256]) for i in range(0, len(rows), 256)])


def tell(inputs: Inputs, console: Console) -> None:
    """What a user should know of the weights."""
    tell_notes(inputs.backbone.notes, console)


def tell_notes(notes: tuple[str, ...], console: Console) -> None:
    """The notes that a file of weights comes with."""
    for note in notes:
        say(console, f"checkpoint: {note}")


def image_options(cfg: ImageConfig, image_size: int) -> DataOptions:
    """The options of `load_dataset` and `prepare` under these settings, for a network that sees image_size
    pixels."""
    geometry = preset(resolved(cfg.preprocess), image_size).geometry
    return DataOptions(
        geometry=geometry._replace(train=cfg.store_size or geometry.train),
        data_dir=cfg.data_dir,
        class_list=cfg.class_list,
        skip_corrupt=cfg.skip_corrupt,
        glyph_train=cfg.glyph_train,
        glyph_test=cfg.glyph_test,
        seed=cfg.seed,
    )


def read_clean(preprocess: Preprocess, split: Split, rows: Array) -> Float[Array, "B S S 3"]:
    """These rows of a split as network input, under the clean view."""
    mine = _take(split, rows)
    return clean_view(preprocess, mine.image, mine.size)


def fetch(preprocess: Preprocess, augments: bool, split: Split, rows: Array, keys: Array, augment: bool):
    """What the engine reads: rows of a split as network input, with the query features where they are cached
    and still hold."""
    mine = _take(split, rows)
    if augment and augments:
        return train_view(preprocess, mine.image, keys, mine.size), mine.label, None
    return clean_view(preprocess, mine.image, mine.size), mine.label, mine.query


def _take(split: Split, rows: Array) -> PyTree:
    """A split of these rows, of jax's arrays alone."""
    # The barrier keeps XLA from fusing the gather with what follows. Without it the arithmetic after it would
    # be compiled another way for arrays of another length, and images on the host would not give the bits of
    # resident ones.
    return jax.lax.optimization_barrier(jax.tree.map(lambda array: array[rows], split))


# ---- where the images lie ----------------------------------------------------------------------------------


def make_splits(
    dataset: Dataset,
    train_label: np.ndarray,
    test_label: np.ndarray,
    budget: int | None,
    eval_batch_size: int,
) -> tuple[Split | Host, Split | Host]:
    """Training and test split: on the device if both fit into the budget, else the larger one, or both, on
    the host.

    Args:
      dataset: the images.
      train_label: labels that go with the training images, in whatever numbering the caller uses.
      test_label: labels that go with the test images.
      budget: MiB of device memory for images; None takes a share of what the device has.
      eval_batch_size: images per evaluation step, the least that a window of test images holds.

    Raises:
      InputError: for a budget that does not hold two windows of two evaluation steps for either split.
    """
    train = Split(dataset.x_train, train_label.astype(np.int32), dataset.size_train)
    test = Split(dataset.x_test, test_label.astype(np.int32), dataset.size_test)
    room = device_memory() * RESIDENT_SHARE if budget is None else budget * 2**20
    one = max(split.image.nbytes // len(split.label) for split in (train, test))
    if budget is not None and room < 8 * eval_batch_size * one:
        least = -(-8 * eval_batch_size * one // 2**20)
        raise InputError(
            f"data_budget: {budget} MiB hold no windows of {2 * eval_batch_size} images; nearest valid "
            f"value: {least}"
        )
    if train.image.nbytes + test.image.nbytes <= room:
        return _resident(train), _resident(test)
    if test.image.nbytes <= room / 2:  # the training split has two windows, each a quarter of the room
        return _host(train, room / 4), _resident(test)
    return _host(train, room / 4), _host(test, room / 4)


def device_mesh(devices: int) -> Mesh | None:
    """The first so many devices; None for one, which needs no mesh.

    Raises:
      InputError: if there are not so many.
    """
    available = jax.device_count()
    if devices > available:
        raise InputError(f"devices: {devices} asked for; nearest valid value: {available}")
    return mesh_of(jax.devices()[:devices]) if devices > 1 else None


def device_memory() -> int:
    """Bytes of memory of the first device of this process; of the machine for a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit or machine_memory()


def _resident(split: Split) -> Split:
    return jax.tree.map(jnp.asarray, split)


def _host(split: Split, window: float) -> Host:
    return Host(split, int(window // (split.image.nbytes // len(split.label))))


# ---- frozen features ---------------------------------------------------------------------------------------


def frozen_features(
    inputs: Inputs,
    batch_size: int,
    advance: Callable[[int], None] = lambda rows: None,
    mesh: Mesh | None = None,
) -> Callable[..., Array | np.ndarray]:
    """(params, split, rows) -> the backbone's class token [n, width] of these images, by default of all,
    under the clean view: what prompt methods query. `advance` is told how many images more are done; the
    devices of `mesh` share the batches."""
    network, preprocess = network_of(inputs.backbone, inputs.preprocess), inputs.preprocess
    features = lambda frozen, image: network.apply(frozen.network, image, None, False)[0].cls
    return make_features(
        features, lambda split, rows: read_clean(preprocess, split, rows), batch_size, advance, mesh
    )


def forward_pass(backbone: Pretrained) -> tuple[jax.stages.Traced, jax.ShapeDtypeStruct]:
    """One image's way through the network, traced but not compiled, and the image."""
    network, side = network_of(backbone), backbone.config.image_size
    image = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    features = jax.jit(lambda params, image: network.apply(params, image, None, False))
    return features.trace(backbone.params, image), image


def forward_flops(backbone: Pretrained) -> float:
    """Floating-point operations of one image on its way through the network, as XLA counts them; where it
    does not, two for each parameter."""
    counted = forward_pass(backbone)[0].lower().cost_analysis() or {}
    return counted.get("flops") or 2.0 * sum(leaf.size for leaf in jax.tree.leaves(backbone.params))


def feature_file(cfg: InputConfig, inputs: Inputs, part: str) -> Path:
    """Where the frozen features of a split ("train" or "test") are kept between runs. The name stands for
    everything that decides their bits: weights, images, view, batches, and what computes them."""
    facts = {
        "weights": inputs.backbone.digest,
        "network": repr(inputs.backbone.config),
        "positions": cfg.positions,
        "view": repr(inputs.preprocess),
        "images": inputs.dataset.digest,
        "split": part,
        "batch": cfg.eval_batch_size,
        "computed by": [jax.__version__, jax.devices()[0].device_kind],
    } | ({"devices": cfg.devices} if cfg.devices > 1 else {})
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return data_folder(cfg.data_dir) / "features" / f"{name}.npz"


def saved_features(cfg: InputConfig, inputs: Inputs, part: str) -> Float[np.ndarray, "N D"] | None:
    """The features that `fcljax embed` has left for these settings, if they are there and whole."""
    rows = len(inputs.dataset.y_train if part == "train" else inputs.dataset.y_test)
    try:
        with open_regular(feature_file(cfg, inputs, part)) as stream, np.load(stream) as file:
            features, sha256 = file["features"], str(file["sha256"])
    except Exception:  # a damaged file may raise anything in the parsers of zip and npy
        return None
    whole = features.shape == (rows, inputs.backbone.config.width) and features.dtype == np.float32
    return features if whole and sha256 == _sha256(features) else None


def save_features(cfg: InputConfig, inputs: Inputs, part: str, features: Float[np.ndarray, "N D"]) -> None:
    """Keep the features of a split for the runs to come."""
    path = feature_file(cfg, inputs, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        np.savez(temporary, features=features, sha256=np.array(_sha256(features)))


def _sha256(features: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()
