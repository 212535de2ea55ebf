"""The inputs of a run: a backbone with its weights, and the examples of a data set as it
reads them.

Files are read here; everything after works on what was loaded.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt8
from rich.console import Console

from fcljax.config import (
    BackboneConfig,
    ImageConfig,
    InputConfig,
    PartitionConfig,
    RunConfig,
    SplitConfig,
    TrainConfig,
    preset_of,
)
from fcljax.data.augment import Preprocess, clean_view, input_pipeline, train_view
from fcljax.data.files.dataset import Dataset, check_images
from fcljax.data.files.names import has_arrays
from fcljax.data.files.sources import DataOptions, hold_out, load_dataset
from fcljax.data.files.subsets import with_classes
from fcljax.data.kinds import ArrayData, Kind, TextData, are_tokens, described
from fcljax.data.store import Split
from fcljax.data.streaming import Host
from fcljax.errors import InputError
from fcljax.files import machine_memory
from fcljax.mesh import mesh_of
from fcljax.models.clip import ClassTexts, text_tower
from fcljax.models.dense import random_array_net
from fcljax.models.mae import autoencoder
from fcljax.models.networks import example_of, make_network, reads_images
from fcljax.models.shapes import NO_KERNEL, AttentionKernel, Dtype, TextConfig
from fcljax.models.text import check_text
from fcljax.models.vit import ViTConfig
from fcljax.models.weights.hub import find_weights, is_hub_name
from fcljax.models.weights.pretrained import Pretrained, WeightOptions, load_backbone, load_text_encoder
from fcljax.models.weights.text_towers import CLIP, class_texts, load_text_tower
from fcljax.options import DecoderOptions, SurrogateOptions
from fcljax.pixels import NORMALISE
from fcljax.runs.class_prompts import contexts_of, prompts_of, template_of
from fcljax.settings import ARRAY_NETS, TEXT_NETS
from fcljax.terminal import say
from fcljax.types import Network, PyTree

# Share of a device's memory for images without --data-budget. The rest is for the network
# and for what its steps need.
RESIDENT_SHARE = 0.5

# Settings of images, which are refused for other data. `checkpoint` names a text
# encoder too, and is allowed for texts.
OF_IMAGES = (
    "checkpoint",
    "heads",
    "image_size",
    "normalise",
    "positions",
    "preprocess",
    "stem",
    "store_size",
)


class Inputs(NamedTuple):
    """A backbone, a data set, and how its stored examples become the backbone's input."""

    backbone: Pretrained
    dataset: Dataset
    preprocess: Preprocess | Kind
    augments: bool  # whether the training view differs from the clean one
    # images of another data set, where the settings ask for some
    surrogate: np.ndarray | tuple = ()
    # its test examples are the held-out ones of `early_stop`
    validated: Dataset | None = None
    # prompts of the classes, where the settings ask for them
    texts: ClassTexts | None = None


def load_inputs(
    cfg: InputConfig, dataset: Dataset | None = None, backbone: Pretrained | None = None
) -> Inputs:
    """Load the backbone and the data set that the settings name.

    Args:
      cfg: what to load.
      dataset: examples to use instead of those that the settings name.
      backbone: a network to use instead of the one that the settings name.

    Raises:
      InputError: for settings or files that cannot work.
    """
    if dataset is None and has_arrays(cfg.dataset, cfg.backbone):
        dataset = load_split(cfg, 224)
    if dataset is not None and dataset.kind is not None:
        return _array_inputs(cfg, dataset, dataset.kind, backbone)
    if cfg.backbone in (*ARRAY_NETS, *TEXT_NETS) and backbone is None:
        raise InputError(
            f"backbone: {cfg.backbone!r} reads arrays, and {cfg.dataset} has images; nearest: 'auto'"
        )
    # before data and weights are read, which may take minutes
    if template_of(cfg) and backbone is not None:
        raise InputError(
            f"class_prompts: a backbone of your own has no text tower, as CLIP has; nearest: {CLIP}"
        )
    if backbone is None:
        backbone = with_text_side(cfg, load_network(cfg, cfg.image_size, cfg.seed))
    size = backbone.config.image_size
    if dataset is None:
        dataset = load_split(cfg, size)
    # Objects fill the frame in data sets that suggest no crops (digits, glyphs): these
    # images are resized as a whole, without the margin.
    preprocess = input_pipeline(cfg.preprocess, size, fills_frame=not dataset.augment)
    preprocess = with_constants(preprocess, cfg, backbone)
    surrogate = ()
    if isinstance(cfg, SurrogateOptions):
        surrogate = surrogate_images(cfg, cfg, size)
    texts = texts_of(cfg, backbone, dataset)
    return Inputs(backbone, dataset, preprocess, dataset.augment, surrogate, texts=texts)


def with_text_side(cfg: InputConfig, backbone: Pretrained) -> Pretrained:
    """Return a network that the settings name, with its text side where they ask for class
    names.

    Raises:
      InputError: if it has none.
    """
    if not template_of(cfg):
        return backbone
    name, checkpoint = named_weights(cfg)
    return backbone._replace(text=load_text_tower(name, checkpoint, backbone.config.width, compute_type(cfg)))


def texts_of(cfg: InputConfig, backbone: Pretrained, dataset: Dataset) -> ClassTexts | None:
    """Return the text side of a network with the prompts of a data set's classes; None where
    the settings ask for none.

    Raises:
      InputError: as `prompts_of` and `class_texts`.
    """
    if backbone.text is None:
        return None
    prompts = prompts_of(template_of(cfg), dataset)
    return class_texts(backbone.text, prompts, contexts_of(cfg))


def _array_inputs(cfg: InputConfig, dataset: Dataset, kind: Kind, backbone: Pretrained | None) -> Inputs:
    """Return the inputs of data that are no images.

    The packaged networks read columns that are standardised by the training examples.

    Raises:
      InputError: for settings that only images have, and a network that cannot read the examples.
    """
    _check_no_image_options(cfg, dataset)
    if backbone is not None:
        if reads_images(backbone.config):
            check_images("backbone", dataset)
        return Inputs(backbone, dataset, kind, augments=False)
    # ids of a tokenizer need the text encoder, whatever checkpoint it is loaded from
    x = dataset.x_train
    if cfg.backbone in TEXT_NETS or are_tokens(x) and (cfg.backbone == "auto" or is_hub_name(cfg.backbone)):
        return Inputs(_text_encoder(cfg, dataset, kind), dataset, kind, augments=False)
    name = _array_net(cfg, x)
    if not isinstance(kind, ArrayData) or not isinstance(x, np.ndarray):
        nearest = "a flax.nnx module of your own, from Python"
        if isinstance(kind, TextData):
            nearest = repr(TEXT_NETS[0])
        raise InputError(
            f"backbone: {name!r} reads one array of numbers, and an example of {dataset.name} is "
            f"{described(x)}; nearest: {nearest}"
        )
    config, params = random_array_net(name, x.shape[1:], compute_type(cfg), cfg.seed)
    notes = ()
    if config.hidden:
        notes = (f"{name} has random values of seed {cfg.seed}",)
    none = (0.0, 0.0, 0.0)
    network = Pretrained(
        config, params, None, None, none, (1.0, 1.0, 1.0), "random", f"random-{name}-{cfg.seed}", notes
    )
    return Inputs(network, dataset, kind.standardised(x), augments=False)


def _text_encoder(cfg: InputConfig, dataset: Dataset, kind: Kind) -> Pretrained:
    """Load the text encoder that the settings name, by default the packaged one.

    Raises:
      InputError: for a file that has none, and for texts that it cannot read.
    """
    packaged, checkpoint = named_weights(cfg)
    if packaged and checkpoint:
        raise InputError(
            f"backbone: {packaged!r} has its own weights, and --checkpoint names others; leave one out"
        )
    encoder = load_text_encoder(checkpoint, compute_type(cfg), network_trains(cfg))
    name = checkpoint or TEXT_NETS[0]
    if checkpoint and isinstance(kind, TextData):
        raise InputError(
            f"checkpoint: {name!r} reads ids of a tokenizer, and {dataset.name} has hashes of words; "
            "nearest: --dataset texts:PATH,FOLDER/tokenizer.json, or from Python ids and masks: "
            "fcljax.run(method, ({'ids': ids, 'mask': mask}, y))"
        )
    assert isinstance(encoder.config, TextConfig)
    for examples in (dataset.x_train, dataset.x_test):
        check_text(f"backbone: {name!r}", examples, encoder.config)
    return encoder


def _array_net(cfg: InputConfig, x: PyTree) -> str:
    """Return the name of the network for arrays.

    By default classifiers on frozen features get the numbers themselves, since a network
    of random values that never trains would only mix them.

    Raises:
      InputError: for a network of images.
    """
    if cfg.backbone in ARRAY_NETS:
        return cfg.backbone
    # series are [N, time, channels], rows of tables [N, columns]
    default = "conv1d" if getattr(x, "ndim", 2) == 3 else "mlp"
    if isinstance(x, dict) and "ids" in x:
        default = TEXT_NETS[0]
    if cfg.backbone != "auto":
        raise InputError(
            f"backbone: {cfg.backbone!r} reads images, and an example is {described(x)}; nearest: {default!r}"
        )
    if isinstance(cfg, TrainConfig) and cfg.adapter == "linear":
        return "identity"
    return default


def _check_no_image_options(cfg: InputConfig, dataset: Dataset) -> None:
    """Check that nothing was asked for that only images have.

    Raises:
      InputError: naming the option.
    """
    # a preset may set options of images, which then were not asked for
    usual = preset_of(cfg) if isinstance(cfg, RunConfig) else type(cfg)()
    names = [name for name in OF_IMAGES if getattr(cfg, name) != getattr(usual, name)]
    if are_tokens(dataset.x_train):
        names = [name for name in names if name != "checkpoint"]
    if getattr(cfg, "augment", None):
        names.append("augment")
    if getattr(cfg, "class_prompts", "") != getattr(usual, "class_prompts", ""):
        names.append("class_prompts")
    if names:
        raise InputError(
            f"{names[0]}: {getattr(cfg, names[0])!r} is for images, and the data set {dataset.name!r} has "
            f"{described(dataset.x_train)}; leave it out"
        )


def load_network(cfg: BackboneConfig, image_size: int | None, seed: int = 0) -> Pretrained:
    """Load the network that the settings name. Without weights it has random values,
    which `seed` decides.

    Raises:
      InputError: as `load_backbone`, and for the name of weights that are not here.
    """
    name, checkpoint = named_weights(cfg)
    decoder = None
    if isinstance(cfg, DecoderOptions):
        decoder = cfg.decoder
    weights = WeightOptions(
        heads=cfg.heads,
        positions=cfg.positions,
        decoder=decoder,
        stem=cfg.stem,
        seed=seed,
        trains=network_trains(cfg),
    )
    return load_backbone(name, checkpoint, image_size, compute_type(cfg), weights)


def named_weights(cfg: BackboneConfig) -> tuple[str | None, str | None]:
    """Return the architecture and the file of weights that the settings name.

    Raises:
      InputError: for the name of weights that are not here.
    """
    if cfg.backbone == "auto":
        return None, cfg.checkpoint
    if not is_hub_name(cfg.backbone):
        return cfg.backbone, cfg.checkpoint
    if cfg.checkpoint is not None:
        raise InputError(
            f"backbone: {cfg.backbone!r} names weights, and --checkpoint names others; leave one out"
        )
    folder = cfg.data_dir if isinstance(cfg, ImageConfig) else None
    return None, str(find_weights(cfg.backbone, folder))


# Methods with which a whole network, trained in bfloat16, reached the accuracies of
# float32 within the noise of three seeds (docs/accelerators.md). Others stay in float32
# until they are measured.
TRAIN_IN_BFLOAT16 = ("fedavg-ft", "glfc", "target", "vfcl")


def network_trains(cfg: BackboneConfig) -> bool:
    """Return whether clients train the whole network."""
    return isinstance(cfg, TrainConfig) and cfg.adapter == "full"


def compute_type(cfg: BackboneConfig, backend: str | None = None) -> Dtype:
    """Return the number format of the backbone's products.

    Unless the settings name one, it is bfloat16 on an accelerator, for a network that trains
    only with the methods of `TRAIN_IN_BFLOAT16`.

    Args:
      cfg: the settings.
      backend: as jax names it; None: that of this process.
    """
    if cfg.dtype != "auto":
        return cfg.dtype
    if (backend or jax.default_backend()) == "cpu":
        return "float32"
    measured = isinstance(cfg, RunConfig) and cfg.method in TRAIN_IN_BFLOAT16
    if network_trains(cfg) and not measured:
        return "float32"
    return "bfloat16"


def network_of(
    backbone: Pretrained,
    preprocess: Preprocess | Kind | None = None,
    remat: bool = False,
    kernel: AttentionKernel = NO_KERNEL,
) -> Network:
    """Return the network of a file of weights as methods see it, with its decoder if it has one.

    Args:
      backbone: the weights.
      preprocess: gives the pixel constants; None: those of the weights.
      remat: as of `make_network`.
      kernel: as of `ViTConfig`.
    """
    pixels = preprocess if isinstance(preprocess, Preprocess) else backbone
    shape = backbone.config
    decoder = backbone.decoder
    masked_autoencoder = None
    if isinstance(shape, ViTConfig):
        shape = dataclasses.replace(shape, kernel=kernel)
        if decoder is not None:
            decoder_shape = dataclasses.replace(decoder.config, kernel=kernel)
            masked_autoencoder = autoencoder(shape, decoder_shape, decoder.mean, decoder.std)
    network = make_network(shape, pixels.mean, pixels.std, masked_autoencoder, remat)
    if backbone.text is None:
        return network
    return network._replace(text=text_tower(backbone.text.config, backbone.text.joint))


def with_constants(preprocess: Preprocess, cfg: BackboneConfig, backbone: Pretrained) -> Preprocess:
    """Return the views with the pixel constants that the settings ask for."""
    if cfg.normalise == "release":
        return preprocess
    if cfg.normalise == "checkpoint":
        return preprocess.with_pixels(backbone.mean, backbone.std)
    return preprocess.with_pixels(*NORMALISE[cfg.normalise])


def load_split(cfg: SplitConfig, image_size: int) -> Dataset:
    """Load the part that the settings use of the data set that they name.

    Raises:
      InputError: as `load_dataset` and `used_part`.
    """
    dataset = load_dataset(cfg.dataset, image_options(cfg, image_size), verify=cfg.verify)
    return used_part(dataset, cfg)


def used_part(dataset: Dataset, cfg: SplitConfig) -> Dataset:
    """Return the examples of the classes that the settings name, without those that they
    hold out.

    Raises:
      InputError: for classes or a share that the data set cannot meet.
    """
    if isinstance(cfg, PartitionConfig) and cfg.classes != "all":
        dataset = with_classes(dataset, cfg.classes)
    if not cfg.holdout:
        return dataset
    return hold_out(dataset, cfg.holdout)


def surrogate_images(
    cfg: InputConfig, options: SurrogateOptions, image_size: int
) -> UInt8[np.ndarray, "S side side 3"]:
    """Load training images of another data set under the clean view, as grey levels.

    Raises:
      InputError: for a data set that is missing, or that of the run.
    """
    default = "digits" if cfg.dataset == "glyphs" else "glyphs"
    name = default if options.surrogate == "other" else options.surrogate
    if name == cfg.dataset:
        raise InputError(f"surrogate: {name!r} is the run's own data set; name another, such as {default!r}")
    try:
        dataset = load_dataset(name, image_options(cfg, image_size), verify=cfg.verify)
    except InputError as error:
        raise InputError(f"surrogate: {str(error).removeprefix('dataset: ')}") from None
    check_images("surrogate", dataset)
    chosen = np.random.default_rng(cfg.seed).permutation(len(dataset.y_train))[: options.surrogate_images]
    plain = input_pipeline(cfg.preprocess, image_size, fills_frame=not dataset.augment)
    view = jax.jit(partial(clean_view, plain.with_pixels(*NORMALISE["unit"])))
    size = dataset.size_train

    def grey_levels(index: np.ndarray) -> np.ndarray:
        image_size = None if size is None else jnp.asarray(size[index])
        pixels = view(dataset.x_train[index], image_size)
        return np.round(np.asarray(pixels) * 255).astype(np.uint8)

    # a chunk at a time: views are float32, four times as large as the grey levels
    return np.concatenate([grey_levels(chosen[i : i + 256]) for i in range(0, len(chosen), 256)])


def report_notes(backbone: Pretrained, console: Console) -> None:
    """Print what a user should know about the weights."""
    for note in backbone.notes:
        say(console, f"checkpoint: {note}")


def image_options(cfg: ImageConfig, image_size: int) -> DataOptions:
    """Return the options of `load_dataset` and `prepare` under these settings, for a
    network that takes images of image_size pixels."""
    geometry = input_pipeline(cfg.preprocess, image_size).geometry
    return DataOptions(
        geometry=geometry._replace(train=cfg.store_size or geometry.train),
        data_dir=cfg.data_dir,
        class_list="" if cfg.class_list == "none" else cfg.class_list,
        skip_corrupt=cfg.skip_corrupt,
        glyph_train=cfg.glyph_train,
        glyph_test=cfg.glyph_test,
        seed=cfg.seed,
        as_arrays=has_arrays(cfg.dataset, getattr(cfg, "backbone", "auto")),
    )


def clean_input(preprocess: Preprocess | Kind, stored: PyTree, size: Array | None = None) -> PyTree:
    """Return the network's input of stored examples; of images, the clean view."""
    if isinstance(preprocess, Preprocess):
        return clean_view(preprocess, stored, size)
    return preprocess.read(stored)


def read_clean(preprocess: Preprocess | Kind, split: Split, index: Array) -> PyTree:
    """Read examples of a split as network input, without augmentation."""
    examples = _take(split, index)
    return clean_input(preprocess, examples.input, examples.size)


def inputs_of(
    preprocess: Preprocess | Kind, augments: bool, split: Split, index: Array, keys: Array, augment: bool
) -> tuple[PyTree, Array, Array | None]:
    """Read examples for the engine: the network's input, the labels, and the query
    features where they are cached and valid."""
    examples = _take(split, index)
    if augment and augments and isinstance(preprocess, Preprocess):
        # no query features: the cached ones are of the clean view
        return train_view(preprocess, examples.input, keys, examples.size), examples.label, None
    return clean_input(preprocess, examples.input, examples.size), examples.label, examples.query


def _take(split: Split, index: Array) -> PyTree:
    """Return a split of these examples."""
    # The barrier keeps XLA from fusing the gather with what follows. Otherwise the
    # arithmetic after it would be compiled differently for arrays of another length, and
    # images on the host would not give the same bits as resident ones.
    return jax.lax.optimization_barrier(jax.tree.map(lambda array: array[index], split))


# ---- images on the device or on the host -----------------------------------------------


def make_splits(
    dataset: Dataset, labels: tuple[np.ndarray, np.ndarray], budget: int | None, eval_batch_size: int
) -> tuple[Split | Host, Split | Host]:
    """Return training and test split, on the device if both fit into the budget, else on
    the host: the larger one, or both.

    Args:
      dataset: the images.
      labels: of the training and the test images, in the numbering of the caller.
      budget: MiB of device memory for images; None: a share of the device's memory.
      eval_batch_size: images per evaluation step; a window of test images has at least two.

    Raises:
      InputError: for a budget in which two windows of two evaluation steps do not fit.
    """
    train = Split(dataset.x_train, labels[0].astype(np.int32), dataset.size_train)
    test = Split(dataset.x_test, labels[1].astype(np.int32), dataset.size_test)
    available_bytes = device_memory() * RESIDENT_SHARE
    example_bytes = max(split.example_bytes for split in (train, test))
    # Two splits with two windows each share the budget, so a window has a quarter of
    # it. It must hold two evaluation steps (`predict._Loops.steps`).
    least_bytes = 8 * eval_batch_size * example_bytes
    if budget is not None:
        available_bytes = budget * 2**20
    if budget is not None and available_bytes < least_bytes:
        least = -(-least_bytes // 2**20)
        raise InputError(
            f"data_budget: {budget} MiB cannot hold windows of {2 * eval_batch_size} images; nearest valid "
            f"value: {least}"
        )
    if train.input_bytes + test.input_bytes <= available_bytes:
        return _resident(train), _resident(test)
    # a split on the host has two windows on the device, one of which is read while the
    # other is used
    window_bytes = available_bytes / 4
    if test.input_bytes <= available_bytes / 2:
        return _host(train, window_bytes), _resident(test)
    return _host(train, window_bytes), _host(test, window_bytes)


def device_mesh(devices: int) -> Mesh | None:
    """Return a mesh of the first devices; None for one device, which needs no mesh.

    Raises:
      InputError: if there are fewer.
    """
    available = jax.device_count()
    if devices > available:
        raise InputError(f"devices: {devices} requested; nearest valid value: {available}")
    if devices <= 1:
        return None
    return mesh_of(jax.devices()[:devices])


def device_memory() -> int:
    """Return the bytes of memory of this process's first device; of the machine for a CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit or machine_memory()


def _resident(split: Split) -> Split:
    """Put a split on the device. `jnp.asarray` would compile a program for each shape."""
    return jax.device_put(split)


def _host(split: Split, window_bytes: float) -> Host:
    return Host(split, int(window_bytes // split.example_bytes))


# ---- the network's cost ----------------------------------------------------------------


def forward_pass(backbone: Pretrained) -> tuple[jax.stages.Traced, PyTree]:
    """Trace the forward pass of one example; return the trace and the example's shapes."""
    network = network_of(backbone)
    example = example_of(backbone.config)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), example)
    apply = jax.jit(lambda params, batch: network.apply(params, batch, None, False))
    return apply.trace(backbone.params, batch), batch


def forward_flops(backbone: Pretrained) -> float:
    """Return the floating-point operations of the forward pass of one example, as XLA
    counts them; where it does not, two for each parameter."""
    traced, _ = forward_pass(backbone)
    costs = traced.lower().cost_analysis() or {}
    # the network `identity` has no products and no parameters, and callers divide by this
    return costs.get("flops") or 2.0 * sum(leaf.size for leaf in jax.tree.leaves(backbone.params)) or 1.0
