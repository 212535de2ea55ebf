"""Train the decoder of a masked autoencoder for a frozen encoder: `fcljax
pretrain-decoder`.

The frozen encoder sees a random quarter of an image's patches; the decoder learns to
predict the pixels of the others (He et al. 2022, with pMAE's choices, arXiv 2411.01916,
section V-A: un-normalised pixels as the target, 75 % masked, the encoder never
trained). Where the paper is silent, MAE's release decides: AdamW with betas (0.9, 0.95)
and weight decay 0.05 on the matrices, a linear warm-up and half a cosine to 0, crops of
20 to 100 % of the area (bicubic) and flips.

The default data are the letters of `data.glyphs.PRETRAIN`, drawn afresh for every step,
so the packaged decoder has seen neither a digit nor a letter of `data.glyphs.GLYPHS`. Its
learning rate was chosen by the validation loss on 600 fresh letters after 600 steps of
64: peaks of 1e-3, 2e-3 and 4e-3 gave 0.393, 0.370 and 0.402.

The defaults took 13 minutes of one shared CPU core (20 by the clock) and gave the
packaged file. Its validation loss (mean squared error of hidden patches, pixels in
-1..1) is 0.240. The mean patch of each position has 0.478, and the mean colour of each
image, if it were known, 0.236. From four visible patches of 16 the decoder predicts
paper, ink and the position of the letter, blurred, but few strokes. Measured once after
everything was fixed: 0.237 on 600 images of GLYPHS (mean patch: 0.483), and 0.407 on
the test digits of the data set `digits`, for which their mean patch is better (0.228).
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from jaxtyping import Array, Float, Int, Key, UInt8
from orbax.checkpoint import CheckpointManager
from rich.console import Console

from fcljax import config as settings
from fcljax.config import BackboneConfig, SplitConfig
from fcljax.data.augment import Preprocess, clean_view, input_pipeline, sample_crops
from fcljax.data.files.dataset import check_images
from fcljax.data.glyphs import PRETRAIN, Style, glyph_fields
from fcljax.errors import InputError
from fcljax.files import write_text
from fcljax.models.mae import (
    DecoderConfig,
    Masking,
    decode,
    hidden_pixels,
    init_decoder,
    patchify,
    random_mask,
    reconstruction_loss,
    unpatchify,
)
from fcljax.models.networks import network_name
from fcljax.models.vit import Injection, ViTConfig, apply_vit
from fcljax.models.weights.pretrained import Pretrained, decoder_metadata, packaged, save_native
from fcljax.options import check_ranges, option
from fcljax.pretraining.training import (
    VALIDATION_SEED,
    as_stored,
    check_weights_file,
    command_line,
    fresh_letters,
    optimiser_step,
    training_bar,
    warmup_cosine,
)
from fcljax.results import figures
from fcljax.runs import checkpoint, signals
from fcljax.runs.inputs import load_network, load_split, report_notes, with_constants
from fcljax.types import PyTree

LETTERS = "letters"
_MOST_POINTS = 50  # of the loss curve
_PANEL = 8  # images in the figure
# options that do not influence the weights: a resumed training may change them, and the
# command in the file leaves them out
_WITHOUT_INFLUENCE = ("out", "resume", "checkpoint_every", "data_dir", "verify")


@dataclasses.dataclass(frozen=True)
class PretrainDecoderConfig(BackboneConfig, SplitConfig):
    """Options of `fcljax pretrain-decoder`, beside those of images and backbone of
    `fcljax run`.

    The packaged decoder was made with `--visible-weight 1`.
    """

    dataset: str = LETTERS
    """Letters drawn anew for every step, as for the packaged encoder (letters), or a data
    set as for `fcljax run`, without its test images."""
    holdout: float = option(0.05, positive=True, below=1.0)
    """Fraction of each class's training images for the validation loss."""
    validate: int = 600
    """Maximum number of images for the validation loss."""
    out: Path = Path("vit_micro_decoder.safetensors")
    """File of the decoder."""
    steps: int = 5000
    """Number of optimiser steps."""
    epochs: int | None = option(None, unset="as many as --steps")
    """Number of passes over the training images; replaces --steps."""
    batch_size: int = 64
    """Images per step."""
    lr: float = option(8e-3, positive=True, most=1.0)
    """Peak learning rate for batches of 256; the peak is lr * batch_size / 256 (MAE:
    1.5e-4)."""
    beta1: float = option(0.9, below=1.0)
    """Decay of the mean gradient in AdamW."""
    beta2: float = option(0.95, below=1.0)
    """Decay of the mean squared gradient in AdamW."""
    weight_decay: float = 0.05
    """Weight decay of the matrices."""
    warmup: float = option(0.05, most=1.0)
    """Fraction of the steps in which the learning rate rises from 0."""
    mask_ratio: float = option(0.75, positive=True, below=1.0)
    """Fraction of the patches to mask."""
    # With weight 0 the decoder's output for visible patches is noise. pMAE's server
    # trains on whole reconstructions, so for it 1 is better.
    visible_weight: float = option(0.0, most=1.0)
    """Weight of the visible patches' error in the loss (MAE: 0)."""
    crop_scale: float = option(0.2, positive=True, most=1.0)
    """Minimum area of a photograph's crop, as a fraction; letters and digits are not
    cropped."""
    decoder_width: int = 96
    """Channels of the decoder's tokens (MAE: 512)."""
    decoder_depth: int = 3
    """Blocks of the decoder (MAE: 8)."""
    decoder_heads: int = 4
    """Attention heads of the decoder (MAE: 16)."""
    decoder_mlp: int = 384
    """Hidden units of the decoder's blocks (MAE: 2048)."""
    checkpoint_every: int = 500
    """Steps between checkpoints, in a folder beside --out that is removed at the end."""
    resume: bool = False
    """Resume from the newest checkpoint."""


class StoredImages(NamedTuple):
    """Some images as they are stored."""

    image: Any  # uint8 [N, H, W, 3], of numpy or jax
    # [N, 2], before they were squeezed into a square; None: they are square
    size: Any = None

    def take(self, index: np.ndarray | slice) -> "StoredImages":
        """Return the images of this index."""
        return StoredImages(self.image[index], None if self.size is None else self.size[index])


class Images(NamedTuple):
    """The images of a training."""

    batch: Callable[[int], StoredImages]  # batch(step)
    steps_per_epoch: int | None  # None: no image is used twice
    held_out: StoredImages  # for the validation loss
    crops: bool  # crop and flip training images
    digest: str = ""  # of data sets


class DecoderPlan(NamedTuple):
    """All static arguments, on which jit specialises."""

    config: PretrainDecoderConfig
    steps: int
    encoder: ViTConfig
    decoder: DecoderConfig
    preprocess: Preprocess
    crops: bool


class DecoderState(NamedTuple):
    """The state of the training."""

    params: PyTree  # the decoder's
    opt: optax.OptState
    # training loss and validation loss; a point is the mean of several steps
    curve: Float[Array, "2 points"]


class StepPosition(NamedTuple):
    """The position of a step in the training."""

    step: int
    point: int  # of the loss curve
    weight: float  # of this step's loss in that point


class Strips(NamedTuple):
    """Some images for the figure."""

    visible: UInt8[Array, "n H W 3"]  # what the encoder sees; hidden patches are grey
    predicted: UInt8[Array, "n H W 3"]  # by the decoder, visible patches included
    original: UInt8[Array, "n H W 3"]


# ---- training images -------------------------------------------------------------------


def _letters(cfg: PretrainDecoderConfig, size: int) -> Images:
    if cfg.epochs is not None:
        raise InputError(
            f"epochs: {cfg.epochs} of letters, but letters are drawn new in every step; give --steps"
        )
    fields = glyph_fields(PRETRAIN)

    def draw(seed: int, step: int, count: int) -> StoredImages:
        grey, _label = fresh_letters(fields, seed, step, count, size, Style())
        return StoredImages(np.repeat(grey[..., None], 3, axis=-1))

    held_out = draw(VALIDATION_SEED, 0, cfg.validate)
    return Images(lambda step: draw(cfg.seed, step, cfg.batch_size), None, held_out, crops=False)


def _from_dataset(cfg: PretrainDecoderConfig, size: int) -> Images:
    # with `holdout`, the split's test images are held-out training images; the data set's
    # own test images are not read
    dataset = load_split(cfg, size)
    check_images("dataset", dataset)
    train = StoredImages(dataset.x_train, dataset.size_train)
    held_out = StoredImages(dataset.x_test, dataset.size_test)
    count = len(dataset.y_train)
    batch_size = cfg.batch_size
    if count < batch_size:
        raise InputError(f"batch_size: {batch_size} of {count} training images; nearest: {count}")
    steps_per_epoch = count // batch_size
    # evenly over the split, which is sorted by class: its first images would be of a few
    # classes
    validation = np.linspace(0, len(dataset.y_test) - 1, min(cfg.validate, len(dataset.y_test))).astype(int)

    def draw(step: int) -> StoredImages:
        epoch, i = divmod(step, steps_per_epoch)
        indices = _order(cfg.seed, epoch, count)[i * batch_size : (i + 1) * batch_size]
        # the order within a batch means nothing, and sorted rows of a file on disk are
        # read in one pass
        return train.take(np.sort(indices))

    return Images(draw, steps_per_epoch, held_out.take(validation), dataset.augment, dataset.digest)


# one epoch is kept: each of its steps asks for the order again
@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def random_crops(
    preprocess: Preprocess,
    images: UInt8[Array, "batch height width 3"],
    keys: Key[Array, " batch"],
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch S S 3"]:
    """Crop at random, resize as in MAE (bicubic, antialiased, in grey levels), flip and
    normalise.

    It is `data.augment.train_view` with another kernel; arguments as there.
    """
    stored_size = jnp.array(images.shape[1:3])
    original_sizes = jnp.broadcast_to(stored_size, (len(images), 2)) if sizes is None else sizes
    boxes, flips = sample_crops(preprocess, original_sizes, keys)
    side = preprocess.image_size

    def crop(image, box, flip, original_size):
        box = box * jnp.tile(stored_size / original_size, 2)  # in stored pixels
        # from input to output pixels: the box grows to the side, its corner moves to 0
        scale = side / box[2:]
        grey = jax.image.scale_and_translate(
            image.astype(jnp.float32), (side, side, 3), (0, 1), scale, -box[:2] * scale, "cubic"
        )
        return jnp.where(flip, grey[:, ::-1], grey)

    grey = jax.vmap(crop)(images, boxes, flips, original_sizes)
    # cubic weights overshoot at edges
    grey = jnp.clip(jnp.round(grey), 0, 255).astype(jnp.uint8)
    # images have the network's size, so this only normalises
    return clean_view(dataclasses.replace(preprocess, margin=1.0), grey)


# ---- one step --------------------------------------------------------------------------


def _reconstruct(
    plan: DecoderPlan, encoder: PyTree, params: PyTree, image: Array, masking: Masking
) -> Float[Array, "batch patches pixels"]:
    """Predict pixels from the frozen encoder's features of the visible patches."""
    latent = apply_vit(plan.encoder, encoder, image, Injection(keep=masking.keep), full=True).tokens
    assert latent is not None
    return decode(plan.decoder, params, latent, masking.restore)


def _optimiser(plan: DecoderPlan) -> optax.GradientTransformation:
    cfg = plan.config

    # weight decay on matrices alone, as in MAE: not on biases, norms and the mask token
    def matrices(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key == "kernel", params)

    return optax.adamw(
        warmup_cosine(cfg.lr * cfg.batch_size / 256, cfg.warmup, plan.steps),
        cfg.beta1,
        cfg.beta2,
        weight_decay=cfg.weight_decay,
        mask=matrices,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    plan: DecoderPlan,
    encoder: PyTree,
    state: DecoderState,
    batch: StoredImages,
    position: StepPosition,
) -> tuple[DecoderState, Float[Array, ""]]:
    """Update the decoder once, and return its loss on hidden patches."""
    image, size = batch
    _init_key, training_key = _keys(plan.config.seed)
    view_key, mask_key = jax.random.split(jax.random.fold_in(training_key, position.step))
    view = clean_view(plan.preprocess, image, size)
    if plan.crops:
        view = random_crops(plan.preprocess, image, jax.random.split(view_key, len(image)), size)
    masking = random_mask(mask_key, len(image), plan.encoder.grid**2, plan.config.mask_ratio)

    def objective(params: PyTree) -> tuple[Array, Array]:
        patches = _reconstruct(plan, encoder, params, view, masking)
        weight = plan.config.visible_weight
        hidden = reconstruction_loss(patches, view, masking.masked)
        visible = 0.0
        if weight:
            visible = reconstruction_loss(patches, view, ~masking.masked)
        return hidden + weight * visible, hidden

    # the reported loss is that of hidden patches, comparable over --visible-weight
    params, opt, loss = optimiser_step(_optimiser(plan), objective, state.params, state.opt)
    curve = state.curve.at[0, position.point].add(position.weight * loss)
    return DecoderState(params, opt, curve), loss


def _keys(seed: int) -> Key[Array, "2"]:
    """Return the key of the initial parameters, and that of views and masks."""
    return jax.random.split(jax.random.key(seed))


# ---- held-out images -------------------------------------------------------------------


def _held_out_views(plan: DecoderPlan, images: StoredImages, start: Array) -> tuple[Array, Masking]:
    """Return clean views and masks. `start` is the first image's position: masks depend on
    positions alone, not on the batch size or the step."""
    image, size = images
    positions = start + jnp.arange(len(image))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(VALIDATION_SEED), positions)
    masking = random_mask(keys, len(image), plan.encoder.grid**2, plan.config.mask_ratio)
    return clean_view(plan.preprocess, image, size), masking


@functools.partial(jax.jit, static_argnums=0)
def _loss(plan: DecoderPlan, encoder: PyTree, params: PyTree, images: StoredImages, start: Array) -> Array:
    view, masking = _held_out_views(plan, images, start)
    return reconstruction_loss(_reconstruct(plan, encoder, params, view, masking), view, masking.masked)


@functools.partial(jax.jit, static_argnums=0)
def _loss_of_constant(plan: DecoderPlan, patches: Array, images: StoredImages, start: Array) -> Array:
    view, masking = _held_out_views(plan, images, start)
    prediction = jnp.broadcast_to(patches, (len(images.image), *patches.shape))
    return reconstruction_loss(prediction, view, masking.masked)


@functools.partial(jax.jit, static_argnums=0)
def _mean_patches(plan: DecoderPlan, images: StoredImages, start: Array) -> Array:
    view, _masking = _held_out_views(plan, images, start)
    return patchify(view, plan.encoder.patch).mean(0)


def _mean_over_batches(
    function: Callable[[StoredImages, int], Array],
    held_out: StoredImages,
    batch_size: int,
) -> Float[np.ndarray, "..."]:
    """Return the mean of function(batch, position of its first image) over all images.

    Means of batches may be averaged, because all images have equally many hidden patches.
    """
    means = []
    weights = []
    for start in range(0, len(held_out.image), batch_size):
        batch = held_out.take(slice(start, start + batch_size))
        means.append(np.asarray(function(batch, start), np.float64))
        weights.append(len(batch.image))
    return np.asarray(np.average(means, axis=0, weights=weights))


def validation_loss(plan: DecoderPlan, encoder: PyTree, params: PyTree, held_out: StoredImages) -> float:
    """Return the mean squared error of normalised pixels over hidden patches, whose
    choice is fixed."""
    loss = functools.partial(_loss, plan, encoder, params)
    return float(_mean_over_batches(loss, held_out, plan.config.batch_size))


def baseline_loss(plan: DecoderPlan, held_out: StoredImages) -> float:
    """Return the validation loss of the best constant prediction: the mean patch of each
    position."""
    batch_size = plan.config.batch_size
    mean = _mean_over_batches(functools.partial(_mean_patches, plan), held_out, batch_size)
    loss = functools.partial(_loss_of_constant, plan, jnp.asarray(mean, jnp.float32))
    return float(_mean_over_batches(loss, held_out, batch_size))


# ---- all steps -------------------------------------------------------------------------


def _vit_of(backbone: Pretrained) -> ViTConfig:
    if not isinstance(backbone.config, ViTConfig):
        raise InputError(
            f"backbone: {network_name(backbone.config)} has no patches to hide; nearest: 'vit_micro'"
        )
    return backbone.config


def _plan(
    cfg: PretrainDecoderConfig,
    backbone: Pretrained,
    images: Images,
) -> DecoderPlan:
    vit = _vit_of(backbone)
    patches = vit.grid**2
    if not 1 <= int(patches * (1 - cfg.mask_ratio)) < patches:
        nearest = 1 / patches
        if cfg.mask_ratio > 0.5:
            nearest = 1 - 1 / patches
        raise InputError(
            f"mask_ratio: {cfg.mask_ratio} of {patches} patches leaves none hidden or none visible; nearest: "
            f"{nearest:.4g}"
        )
    decoder = DecoderConfig(
        vit.image_size,
        vit.patch,
        vit.width,
        cfg.decoder_width,
        cfg.decoder_depth,
        cfg.decoder_heads,
        cfg.decoder_mlp,
        # parameters that train stay float32
        "float32" if cfg.dtype == "auto" else cfg.dtype,
    )
    preprocess = input_pipeline(cfg.preprocess, vit.image_size, fills_frame=not images.crops)
    preprocess = with_constants(preprocess, cfg, backbone)
    preprocess = dataclasses.replace(preprocess, crop_scale=(cfg.crop_scale, 1.0), flip=0.5)
    steps = cfg.steps
    if cfg.epochs is not None:
        steps = cfg.epochs * (images.steps_per_epoch or 0)
    # options such as the output file need no new trace
    static = dataclasses.replace(cfg, out=Path(), resume=False, checkpoint_every=1, data_dir=None)
    return DecoderPlan(static, steps, vit, decoder, preprocess, images.crops)


def _train(
    plan: DecoderPlan,
    encoder: PyTree,
    images: Images,
    manager: CheckpointManager,
    checkpoint_every: int,
) -> DecoderState:
    """Do all remaining steps, and return the state, also if the training has diverged.

    JAX computes a step in the background while the next batch is read.
    """
    state, steps_done = _start_or_resume(plan, manager)
    # step -> point of the curve; a point is the mean over its steps, which are not
    # equally many where the points do not divide the steps
    points = np.arange(plan.steps) * state.curve.shape[1] // plan.steps
    weights = 1 / np.bincount(points).astype(np.float32)
    recent = []
    validation = float("nan")
    with training_bar("pretrain-decoder", plan.steps, steps_done, "loss", "validation") as show:
        for step in range(steps_done, plan.steps):
            point = points[step]
            is_last = step + 1 == plan.steps
            position = StepPosition(step, point, weights[point])
            state, loss = _step(plan, encoder, state, images.batch(step), position)
            recent = [*recent[-19:], loss]
            # at the last step of a point
            if is_last or points[step + 1] != point:
                validation = validation_loss(plan, encoder, state.params, images.held_out)
                state = state._replace(curve=state.curve.at[1, point].set(validation))
                # diverged: the caller says so. No checkpoint is written, since the state
                # is of no use.
                if not np.isfinite(validation):
                    break
            if (step + 1) % checkpoint_every == 0 or is_last:
                checkpoint.save(manager, checkpoint.Snapshot(step + 1, state, {}))
            show(step + 1, recent, [validation])
            signals.check()
    checkpoint.finish(manager)
    return state


def _initial_state(plan: DecoderPlan) -> DecoderState:
    init_key, _training_key = _keys(plan.config.seed)
    params = init_decoder(init_key, plan.decoder)
    curve = jnp.zeros((2, min(plan.steps, _MOST_POINTS)))
    return DecoderState(params, _optimiser(plan).init(params), curve)


def _start_or_resume(plan: DecoderPlan, manager: CheckpointManager) -> tuple[DecoderState, int]:
    """Return the state of the newest checkpoint, or the initial state, and the number of
    steps done."""
    state = _initial_state(plan)
    snapshot = checkpoint.latest(manager, state)
    if snapshot is None:
        return state, 0
    return snapshot.state, snapshot.step


# ---- files -----------------------------------------------------------------------------


def _checkpoints_folder(out: Path) -> Path:
    return Path(out).with_suffix(".checkpoints")


def _check_options(cfg: PretrainDecoderConfig) -> None:
    """Check all options before any file of weights or images is read."""
    check_ranges(cfg)
    check_weights_file(cfg.out)
    width = cfg.decoder_width
    heads = cfg.decoder_heads
    if width % 4:  # a quarter each for sines and cosines of rows and columns
        raise InputError(
            f"decoder_width: {width} is not a multiple of 4; nearest: {max(4, 4 * round(width / 4))}"
        )
    if width % heads:
        divisors = [count for count in range(1, width + 1) if width % count == 0]
        nearest = min(divisors, key=lambda count: abs(count - heads))
        raise InputError(
            f"decoder_heads: {heads} does not divide --decoder-width {width}; nearest: {nearest}"
        )
    folder = _checkpoints_folder(cfg.out)
    if cfg.resume and not (folder / "config.yaml").is_file():
        raise InputError(f"resume: there is no unfinished training in {str(folder)!r}; leave out --resume")
    if not cfg.resume and folder.exists():
        raise InputError(
            f"out: {str(folder)!r} holds an unfinished training; continue with --resume, or remove it"
        )


def _open_folder(
    cfg: PretrainDecoderConfig,
    backbone: Pretrained,
    images: Images,
) -> Path:
    """Make the folder of checkpoints with the settings of their training, or compare
    these to resume.

    Raises:
      InputError: if the folder belongs to another training.
    """
    folder = _checkpoints_folder(cfg.out)
    options = dataclasses.asdict(cfg)
    options = {name: value for name, value in options.items() if name not in _WITHOUT_INFLUENCE}
    options |= {"encoder_sha256": backbone.digest, "images_sha256": images.digest}
    if cfg.resume:
        differences = settings.differences(settings.load_yaml(folder / "config.yaml"), options)
        if differences:
            raise InputError(
                f"resume: {str(folder)!r} was trained with other settings: {', '.join(differences)}"
            )
        return folder
    # without exist_ok: a folder that another process has made meanwhile is not ours
    folder.mkdir()
    write_text(folder / "config.yaml", yaml.safe_dump(options, sort_keys=False))
    return folder


def _metadata(cfg: PretrainDecoderConfig, plan: DecoderPlan, backbone: Pretrained) -> dict[str, str]:
    return {
        **decoder_metadata(plan.decoder, plan.preprocess.mean, plan.preprocess.std, backbone.digest),
        "mask_ratio": str(cfg.mask_ratio),
        "steps": str(plan.steps),
        "command": command_line("pretrain-decoder", cfg, *_WITHOUT_INFLUENCE),
    }


def _draw(
    path: Path,
    plan: DecoderPlan,
    encoder: PyTree,
    state: DecoderState,
    held_out: StoredImages,
) -> None:
    """Draw the loss curve, and the decoder's predictions for some held-out images."""
    points = state.curve.shape[1]
    count = len(held_out.image)
    # number of steps at the end of each point, rounded up as `_train` assigns them
    last_steps = (np.arange(1, points + 1) * plan.steps + points - 1) // points
    panel = np.linspace(0, count - 1, min(_PANEL, count)).astype(int)
    strips = _strips(plan, encoder, state.params, held_out.take(panel))
    training, validation = np.asarray(state.curve)
    curves = {"training": training, "validation": validation}
    named_strips = dict(zip(Strips._fields, map(np.asarray, strips), strict=True))
    figure = figures.reconstructions(last_steps, curves, baseline_loss(plan, held_out), named_strips)
    figures.save(path, figure)


@functools.partial(jax.jit, static_argnums=0)
def _strips(
    plan: DecoderPlan,
    encoder: PyTree,
    params: PyTree,
    images: StoredImages,
) -> Strips:
    """Predict some images for the figure."""
    view, masking = _held_out_views(plan, images, jnp.int32(0))
    patch = plan.encoder.patch
    mean = jnp.array(plan.preprocess.mean)
    std = jnp.array(plan.preprocess.std)

    def pixels(x: Array) -> Array:
        return (jnp.clip(x * std + mean, 0, 1) * 255).astype(jnp.uint8)

    predicted = unpatchify(_reconstruct(plan, encoder, params, view, masking), patch)
    visible = jnp.where(hidden_pixels(masking.masked, patch), jnp.uint8(128), pixels(view))
    return Strips(visible, pixels(predicted), pixels(view))


def pretrain_decoder(
    config: PretrainDecoderConfig,
    console: Console | None = None,
) -> dict[str, object]:
    """Train a decoder and write it, atomically, with a figure (.png) beside it.

    The file has float16 tensors under decoder.*, for `load_backbone`. The same settings
    give the same bytes on the same kind of machine, also if the training was
    interrupted and resumed. Checkpoints are in a folder beside the file (.checkpoints),
    which is removed at the end.

    Args:
      config: images, encoder, decoder and training.
      console: for notes; None: standard error.

    Returns:
      A summary by name: file, figure, seconds of this process, training loss at the end
        of the curve, and the validation loss of the stored decoder and of the mean patch
        of each position.

    Raises:
      InputError: for bad settings or files, or a training that diverges.
    """
    start_time = time.monotonic()
    _check_options(config)
    cfg = config
    # by the path of its file: by name, the packaged encoder would come with its decoder,
    # and the new one is not trained from that
    if cfg.checkpoint is None:
        name = cfg.backbone
        if name == "auto":
            name = "vit_micro"
        cfg = dataclasses.replace(cfg, checkpoint=packaged(name))
    backbone = load_network(cfg, cfg.image_size)
    report_notes(backbone, console or Console(stderr=True))
    make_images = _from_dataset
    if cfg.dataset == LETTERS:
        make_images = _letters
    images = make_images(cfg, backbone.config.image_size)
    plan = _plan(cfg, backbone, images)
    folder = _open_folder(cfg, backbone, images)
    with checkpoint.open_checkpoints(folder / "steps", keep=2) as manager:
        state = _train(plan, backbone.params, images, manager, cfg.checkpoint_every)
    # of the rounded parameters, which runs will load
    stored = as_stored(state.params)
    validation = validation_loss(plan, backbone.params, stored, images.held_out)
    if not np.isfinite(validation):
        # not worth resuming; and with the folder there, the next try would be refused
        shutil.rmtree(folder)
        raise InputError(f"lr: {cfg.lr} made the training diverge; nearest to try: {cfg.lr / 10:g}")
    out = Path(cfg.out)
    save_native(out, {"decoder": stored}, _metadata(config, plan, backbone), "float16")
    figure = out.with_suffix(".png")
    state = state._replace(params=stored)
    _draw(figure, plan, backbone.params, state, images.held_out)
    # last: until both files are written, an interrupted call can be resumed
    shutil.rmtree(folder)
    return {
        "out": str(out),
        "figure": str(figure),
        "bytes": out.stat().st_size,
        "steps": plan.steps,
        "seconds": round(time.monotonic() - start_time, 1),
        "training loss": round(float(state.curve[0, -1]), 4),
        "validation loss": round(validation, 4),
        "validation loss of the mean patch": round(baseline_loss(plan, images.held_out), 4),
    }
