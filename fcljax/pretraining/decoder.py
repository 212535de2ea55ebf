"""A decoder for a frozen encoder, as a masked autoencoder has one: `fcljax pretrain-decoder`.

The encoder sees a random quarter of an image's patches and stays as it is; the decoder learns to predict the
pixels of the others (He et al. 2022, with pMAE's choices, arXiv 2411.01916, section V-A: un-normalised pixels
as the target, 75 % masked, the encoder never trained). What the paper does not say is as MAE's release has
it: AdamW with betas (0.9, 0.95) and weight decay 0.05 on the matrices, a linear warm-up and half a cosine to
0, crops of 20 to 100 % of the area (bicubic) and flips.

The default data are the letters of `data.glyphs.PRETRAIN`, drawn afresh for every step, so the packaged
decoder has seen neither a digit nor one of the letters of `data.glyphs.GLYPHS`. Its learning rate was chosen
by the validation loss on 600 fresh letters after 600 steps of 64: peaks of 1e-3, 2e-3 and 4e-3 gave 0.393,
0.370 and 0.402.

The defaults took 13 minutes of one CPU core that was shared with other work (20 by the clock) and gave the
packaged file. Its validation loss (mean squared error of hidden patches, pixels in -1..1) is 0.240, where the
mean patch of each place has 0.478, and each image's own mean colour, if it were known, 0.236: from four
visible patches of 16 it tells paper, ink and where the letter lies, blurred, and little of the strokes. For
the record, measured once after everything was fixed: 0.237 on 600 images of GLYPHS (mean patch: 0.483), and
0.407 on the test digits of the set `digits`, for which their own mean patch is the better guess (0.228).
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
from fcljax.data.augment import Preprocess, clean_view, preset, sample_crops
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
from fcljax.options import check_ranges, option, resolved
from fcljax.pretraining.training import (
    VALIDATION_SEED,
    check_weights_file,
    command_line,
    fresh_letters,
    training_bar,
)
from fcljax.results import figures
from fcljax.runs import checkpoint
from fcljax.runs.inputs import load_network, load_split, tell_notes, with_constants
from fcljax.types import PyTree

LETTERS = "letters"
_EVERY = 20  # steps between updates of the progress bar
_POINTS = 50  # of the loss curve, at most
_PANEL = 8  # images in the figure
# what does not change what is trained
_ELSEWHERE = ("out", "resume", "checkpoint_every", "data_dir", "verify")


@dataclasses.dataclass(frozen=True)
class PretrainDecoderConfig(BackboneConfig, SplitConfig):
    """Options of `fcljax pretrain-decoder`, beside those of images and backbone that it shares with `fcljax
    run`. The packaged decoder was made with `--visible-weight 1`."""

    # letters: what the packaged encoder was trained on, drawn afresh for every step; or a data set as for
    # `fcljax run`, whose test images are not looked at
    dataset: str = LETTERS
    # share of each class's training images that is kept for the validation loss
    holdout: float = option(0.05, positive=True, below=1.0)
    validate: int = 600  # images of the validation loss, at most
    out: Path = Path("vit_micro_decoder.safetensors")  # where the decoder goes
    steps: int = 5000  # optimiser steps
    epochs: int | None = None  # passes over the training images, in place of steps
    batch_size: int = 64  # images per step
    # the peak learning rate for batches of 256: the peak is lr * batch_size / 256 (MAE's rule; it has 1.5e-4)
    lr: float = option(8e-3, positive=True, most=1.0)
    beta1: float = option(0.9, below=1.0)  # AdamW's decay of the mean gradient
    beta2: float = option(0.95, below=1.0)  # and of its square
    weight_decay: float = 0.05  # of the matrices
    warmup: float = option(0.05, most=1.0)  # share of the steps in which the learning rate rises from 0
    mask_ratio: float = option(0.75, positive=True, below=1.0)  # share of the patches that is hidden
    # weight of the visible patches' error in the loss: 0 as in MAE, whose output counts where patches were
    # hidden alone. pMAE's server trains on the whole output, which is noise where nothing was learned: 1 is
    # better there.
    visible_weight: float = option(0.0, most=1.0)
    # least share of the area that a crop of a photograph takes; letters and digits are not cropped
    crop_scale: float = option(0.2, positive=True, most=1.0)
    decoder_width: int = 96  # channels of the decoder's tokens; MAE: 512
    decoder_depth: int = 3  # its blocks; MAE: 8
    decoder_heads: int = 4  # its attention heads; MAE: 16
    decoder_mlp: int = 384  # hidden units of its blocks; MAE: 2048
    checkpoint_every: int = 500  # steps between checkpoints, in a folder beside `out`, removed at the end
    resume: bool = False  # go on from the newest checkpoint


Shown = tuple[np.ndarray, np.ndarray | None]  # images uint8 [N, H, W, 3], and sizes [N, 2] before squeezing


class Images(NamedTuple):
    """What is trained on.

    batch: from the number of a step to its images. per_epoch: steps that see each image once; None: no image
    is seen twice. held_out: images of the validation loss. crops: whether to crop and flip. digest: of data
    that are files.
    """

    batch: Callable[[int], Shown]
    per_epoch: int | None
    held_out: Shown
    crops: bool
    digest: str = ""


class Plan(NamedTuple):
    """All that jit specialises on."""

    config: PretrainDecoderConfig
    steps: int
    encoder: ViTConfig
    decoder: DecoderConfig
    preprocess: Preprocess
    crops: bool


class State(NamedTuple):
    """What training changes: the decoder's parameters, the optimiser's state, and the curve so far: mean
    training loss and validation loss of every stretch of steps."""

    params: PyTree
    opt: optax.OptState
    curve: Float[Array, "2 points"]


class Strips(NamedTuple):
    """Some images: what the encoder sees of them, hidden patches being grey; all that the decoder predicts,
    visible patches included, for which it was not trained; and the images themselves."""

    visible: UInt8[Array, "n H W 3"]
    predicted: UInt8[Array, "n H W 3"]
    original: UInt8[Array, "n H W 3"]


# ---- what is trained on ------------------------------------------------------------------------------------


def _letters(cfg: PretrainDecoderConfig, size: int) -> Images:
    if cfg.epochs is not None:
        raise InputError(f"epochs: {cfg.epochs} of letters, which are new in every step; give --steps")
    fields = glyph_fields(PRETRAIN)

    def draw(seed: int, step: int, count: int) -> Shown:
        gray, _ = fresh_letters(fields, seed, step, count, size, Style())
        return np.repeat(gray[..., None], 3, axis=-1), None

    held_out = draw(VALIDATION_SEED, 0, cfg.validate)
    return Images(lambda step: draw(cfg.seed, step, cfg.batch_size), None, held_out, crops=False)


def _from_dataset(cfg: PretrainDecoderConfig, size: int) -> Images:
    dataset = load_split(cfg, size)  # with training images held out in place of the test images
    count, batch = len(dataset.y_train), cfg.batch_size
    if count < batch:
        raise InputError(f"batch_size: {batch} of {count} training images; nearest: {count}")
    some = np.linspace(0, len(dataset.y_test) - 1, min(cfg.validate, len(dataset.y_test))).astype(int)

    def draw(step: int) -> Shown:
        epoch, place = divmod(step, count // batch)
        rows = np.sort(_order(cfg.seed, epoch, count)[place * batch : (place + 1) * batch])
        return _rows(dataset.x_train, dataset.size_train, rows)

    held_out = _rows(dataset.x_test, dataset.size_test, some)
    return Images(draw, count // batch, held_out, dataset.augment, dataset.digest)


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _rows(image: np.ndarray, size: np.ndarray | None, rows: np.ndarray | slice) -> Shown:
    return image[rows], None if size is None else size[rows]


def random_crops(
    preprocess: Preprocess,
    images: UInt8[Array, "batch height width 3"],
    keys: Key[Array, " batch"],
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch S S 3"]:
    """Random crops, resized (bicubic, antialiased, in grey levels) as MAE's, and flips, normalised.

    `data.augment.train_view` with another kernel; arguments as there.
    """
    stored = jnp.array(images.shape[1:3])
    whole = jnp.broadcast_to(stored, (len(images), 2)) if sizes is None else sizes
    boxes, flips = sample_crops(preprocess, whole, keys)
    side = preprocess.image_size

    def crop(image, box, flip, whole):
        box = box * jnp.tile(stored / whole, 2)  # in pixels as they are stored
        scale = side / box[2:]
        grey = jax.image.scale_and_translate(
            image.astype(jnp.float32), (side, side, 3), (0, 1), scale, -box[:2] * scale, "cubic"
        )
        return jnp.where(flip, grey[:, ::-1], grey)

    grey = jnp.clip(jnp.round(jax.vmap(crop)(images, boxes, flips, whole)), 0, 255).astype(jnp.uint8)
    return clean_view(dataclasses.replace(preprocess, margin=1.0), grey)  # of the right size: it normalises


# ---- one step ----------------------------------------------------------------------------------------------


def _reconstruct(
    plan: Plan, encoder: PyTree, params: PyTree, image: Array, masking: Masking
) -> Float[Array, "batch patches pixels"]:
    """The decoder's pixels from what the frozen encoder makes of the visible patches."""
    latent = apply_vit(plan.encoder, encoder, image, Injection(keep=masking.keep), full=True).tokens
    return decode(plan.decoder, params, resolved(latent), masking.restore)


def _optimiser(plan: Plan) -> optax.GradientTransformation:
    cfg = plan.config
    warmup = min(round(plan.steps * cfg.warmup), plan.steps - 1)
    peak = cfg.lr * cfg.batch_size / 256
    matrices = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, x: path[-1].key == "kernel", params
    )
    return optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, peak, warmup, plan.steps),
        cfg.beta1,
        cfg.beta2,
        weight_decay=cfg.weight_decay,
        mask=matrices,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    plan: Plan,
    encoder: PyTree,
    state: State,
    image: Array,
    size: Array | None,
    step: Array,
    point: Array,
    share: Array,
) -> tuple[State, Float[Array, ""]]:
    """One update and its loss on hidden patches, which counts for this share of a point of the curve."""
    views, masks = jax.random.split(jax.random.fold_in(_keys(plan.config.seed)[1], step))
    seen = clean_view(plan.preprocess, image, size)
    if plan.crops:
        seen = random_crops(plan.preprocess, image, jax.random.split(views, len(image)), size)
    masking = random_mask(masks, len(image), plan.encoder.grid**2, plan.config.mask_ratio)

    def objective(params: PyTree) -> tuple[Array, Array]:
        patches, weight = _reconstruct(plan, encoder, params, seen, masking), plan.config.visible_weight
        hidden = reconstruction_loss(patches, seen, masking.masked)
        visible = reconstruction_loss(patches, seen, ~masking.masked) if weight else 0.0
        return hidden + weight * visible, hidden

    (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, opt = _optimiser(plan).update(grads, state.opt, state.params)
    curve = state.curve.at[0, point].add(share * loss)
    return State(optax.apply_updates(state.params, updates), opt, curve), loss


def _keys(seed: int) -> Key[Array, "2"]:
    """Of the initial parameters, and of views and masks."""
    return jax.random.split(jax.random.key(seed))


# ---- held-out images ---------------------------------------------------------------------------------------


def _held_out(plan: Plan, image: Array, size: Array | None, first: Array) -> tuple[Array, Masking]:
    """The clean view, and masks that are the same whenever these images are looked at."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(VALIDATION_SEED), first + jnp.arange(len(image))
    )
    return (
        clean_view(plan.preprocess, image, size),
        random_mask(keys, len(image), plan.encoder.grid**2, plan.config.mask_ratio),
    )


@functools.partial(jax.jit, static_argnums=0)
def _score(
    plan: Plan, encoder: PyTree, params: PyTree, image: Array, size: Array | None, first: Array
) -> Array:
    seen, masking = _held_out(plan, image, size, first)
    return reconstruction_loss(_reconstruct(plan, encoder, params, seen, masking), seen, masking.masked)


@functools.partial(jax.jit, static_argnums=0)
def _score_constant(plan: Plan, patches: Array, image: Array, size: Array | None, first: Array) -> Array:
    seen, masking = _held_out(plan, image, size, first)
    return reconstruction_loss(jnp.broadcast_to(patches, (len(image), *patches.shape)), seen, masking.masked)


@functools.partial(jax.jit, static_argnums=0)
def _mean_patches(plan: Plan, image: Array, size: Array | None, first: Array) -> Array:
    return patchify(_held_out(plan, image, size, first)[0], plan.encoder.patch).mean(0)


def _average(f: Callable[..., Array], held_out: Shown, batch: int) -> Float[np.ndarray, "..."]:
    """The mean of f(image, size, first row) over all images; every one has as many hidden patches."""
    image, size = held_out
    parts = [_rows(image, size, slice(i, i + batch)) for i in range(0, len(image), batch)]
    means = [np.asarray(f(*part, i * batch), np.float64) for i, part in enumerate(parts)]
    return np.asarray(np.average(means, axis=0, weights=[len(part[0]) for part in parts]))


def validation_loss(plan: Plan, encoder: PyTree, params: PyTree, held_out: Shown) -> float:
    """Mean squared error over hidden patches, whose choice is fixed, of normalised pixels."""
    score = functools.partial(_score, plan, encoder, params)
    return float(_average(score, held_out, plan.config.batch_size))


def baseline_loss(plan: Plan, held_out: Shown) -> float:
    """The validation loss of the best guess that does not look: the mean patch of each place."""
    batch = plan.config.batch_size
    patches = jnp.asarray(_average(functools.partial(_mean_patches, plan), held_out, batch), jnp.float32)
    return float(_average(functools.partial(_score_constant, plan, patches), held_out, batch))


# ---- all steps ---------------------------------------------------------------------------------------------


def _vit_of(backbone: Pretrained) -> ViTConfig:
    if not isinstance(backbone.config, ViTConfig):
        raise InputError(
            f"backbone: {network_name(backbone.config)} has no patches to hide; nearest: 'vit_micro'"
        )
    return backbone.config


def _plan(cfg: PretrainDecoderConfig, backbone: Pretrained, images: Images) -> Plan:
    vit = _vit_of(backbone)
    patches = vit.grid**2
    if not 1 <= int(patches * (1 - cfg.mask_ratio)) < patches:
        raise InputError(
            f"mask_ratio: {cfg.mask_ratio} of {patches} patches leaves none hidden or none visible; nearest: "
            f"{1 - 1 / patches if cfg.mask_ratio > 0.5 else 1 / patches:.4g}"
        )
    decoder = DecoderConfig(
        vit.image_size,
        vit.patch,
        vit.width,
        cfg.decoder_width,
        cfg.decoder_depth,
        cfg.decoder_heads,
        cfg.decoder_mlp,
        cfg.dtype,
    )
    views = preset(resolved(cfg.preprocess), vit.image_size, fills_frame=not images.crops)
    views = dataclasses.replace(
        with_constants(views, cfg, backbone), crop_scale=(cfg.crop_scale, 1.0), flip=0.5
    )
    steps = cfg.steps if cfg.epochs is None else cfg.epochs * resolved(images.per_epoch)
    return Plan(_trained(cfg), steps, vit, decoder, views, images.crops)


def _trained(cfg: PretrainDecoderConfig) -> PretrainDecoderConfig:
    """The settings without those that do not matter: no new trace for another file."""
    return dataclasses.replace(cfg, out=Path(), resume=False, checkpoint_every=1, data_dir=None)


def _start(plan: Plan) -> State:
    params = init_decoder(_keys(plan.config.seed)[0], plan.decoder)
    return State(params, _optimiser(plan).init(params), jnp.zeros((2, min(plan.steps, _POINTS))))


def _train(
    cfg: PretrainDecoderConfig, plan: Plan, encoder: PyTree, images: Images, manager: CheckpointManager
) -> State:
    """The state after all steps that are left, or where the training has diverged.

    JAX runs one in the background while the next batch is read.
    """
    state, done = _begin(plan, manager)
    place = np.arange(plan.steps) * state.curve.shape[1] // plan.steps
    share = 1 / np.bincount(place).astype(np.float32)
    recent, validation = [], float("nan")
    with training_bar("pretrain-decoder", "loss", "validation") as bar:
        task = bar.add_task("", total=plan.steps, completed=done, loss=float("nan"), validation=validation)
        for step in range(done, plan.steps):
            point, last = place[step], step + 1 == plan.steps
            state, loss = _step(plan, encoder, state, *images.batch(step), step, point, share[point])
            recent = [*recent[-_EVERY + 1 :], loss]
            if last or place[step + 1] != point:
                validation = validation_loss(plan, encoder, state.params, images.held_out)
                state = state._replace(curve=state.curve.at[1, point].set(validation))
                if not np.isfinite(validation):
                    break
            if (step + 1) % cfg.checkpoint_every == 0 or last:
                checkpoint.save(manager, checkpoint.Snapshot(step + 1, state, {}))
            if (step + 1) % _EVERY == 0 or last:
                bar.update(task, completed=step + 1, loss=float(np.mean(recent)), validation=validation)
    checkpoint.finish(manager)
    return state


def _begin(plan: Plan, manager: CheckpointManager) -> tuple[State, int]:
    """The newest checkpoint, or the state before the first step, and how many steps it has behind it."""
    state = _start(plan)
    snapshot = checkpoint.latest(manager, state)
    return (state, 0) if snapshot is None else (snapshot.state, snapshot.step)


# ---- files -------------------------------------------------------------------------------------------------


def _folder(out: Path) -> Path:
    """Where the checkpoints of an unfinished training are."""
    return Path(out).with_suffix(".checkpoints")


def _check(cfg: PretrainDecoderConfig) -> None:
    """Everything that needs no file of weights or images."""
    check_ranges(cfg)
    check_weights_file(cfg.out)
    width, heads = cfg.decoder_width, cfg.decoder_heads
    if width % 4:  # of the fixed positions
        raise InputError(
            f"decoder_width: {width} is not a multiple of 4; nearest: {max(4, 4 * round(width / 4))}"
        )
    if width % heads:
        fitting = [count for count in range(1, width + 1) if width % count == 0]
        nearest = min(fitting, key=lambda count: abs(count - heads))
        raise InputError(
            f"decoder_heads: {heads} does not divide --decoder-width {width}; nearest: {nearest}"
        )
    folder = _folder(cfg.out)
    if cfg.resume and not (folder / "config.yaml").is_file():
        raise InputError(f"resume: there is no unfinished training in {str(folder)!r}; leave out --resume")
    if not cfg.resume and folder.exists():
        raise InputError(
            f"out: {str(folder)!r} holds an unfinished training; go on with --resume, or remove it"
        )


def _claim(cfg: PretrainDecoderConfig, backbone: Pretrained, images: Images) -> Path:
    """The folder for checkpoints, which says what they belong to.

    Raises:
      InputError: if it belongs to another training.
    """
    folder = _folder(cfg.out)
    facts = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in _ELSEWHERE}
    facts |= {"encoder_sha256": backbone.digest, "images_sha256": images.digest}
    if cfg.resume:
        differ = settings.differences(settings.load_yaml(folder / "config.yaml"), facts)
        if differ:
            raise InputError(f"resume: {str(folder)!r} was trained with other settings: {', '.join(differ)}")
        return folder
    folder.mkdir()
    write_text(folder / "config.yaml", yaml.safe_dump(facts, sort_keys=False))
    return folder


def _metadata(cfg: PretrainDecoderConfig, plan: Plan, backbone: Pretrained) -> dict[str, str]:
    return {
        **decoder_metadata(plan.decoder, plan.preprocess.mean, plan.preprocess.std, backbone.digest),
        "mask_ratio": str(cfg.mask_ratio),
        "steps": str(plan.steps),
        "command": command_line("pretrain-decoder", cfg, *_ELSEWHERE),
    }


def _draw(path: Path, plan: Plan, encoder: PyTree, state: State, held_out: Shown, baseline: float) -> None:
    """The loss curve, and what the decoder makes of some held-out images."""
    points = state.curve.shape[1]
    ends = (np.arange(1, points + 1) * plan.steps + points - 1) // points
    some = np.linspace(0, len(held_out[0]) - 1, min(_PANEL, len(held_out[0]))).astype(int)
    strips = _panel(plan, encoder, state.params, *_rows(*held_out, some))
    training, validation = np.asarray(state.curve)
    curves = {"training": training, "validation": validation}
    named = zip(strips._fields, map(np.asarray, strips), strict=True)
    figures.save(path, figures.reconstructions(ends, curves, baseline, dict(named)))


@functools.partial(jax.jit, static_argnums=0)
def _panel(plan: Plan, encoder: PyTree, params: PyTree, image: Array, size: Array | None) -> Strips:
    """Images and how they come out."""
    seen, masking = _held_out(plan, image, size, jnp.int32(0))
    patch, mean, std = plan.encoder.patch, jnp.array(plan.preprocess.mean), jnp.array(plan.preprocess.std)
    pixels = lambda x: (jnp.clip(x * std + mean, 0, 1) * 255).astype(jnp.uint8)
    predicted = unpatchify(_reconstruct(plan, encoder, params, seen, masking), patch)
    shown = jnp.where(hidden_pixels(masking.masked, patch), jnp.uint8(128), pixels(seen))
    return Strips(shown, pixels(predicted), pixels(seen))


def pretrain_decoder(config: PretrainDecoderConfig, console: Console | None = None) -> dict[str, object]:
    """Train a decoder and write it, atomically, with a figure (.png) beside it.

    The file holds float16 tensors under decoder.*, for `load_backbone`. The same config gives the same bytes
    on the same kind of machine, also if the training was cut off and resumed. Checkpoints are in a folder
    beside the file (.checkpoints), which is removed at the end.

    Args:
      config: which images, which encoder, which decoder, how.
      console: where notes go; standard error when None.

    Returns:
      What was done, by name: file, figure, seconds of this process, training loss at the end of the curve,
        and the validation loss of the decoder as stored and of the mean patch of each place.

    Raises:
      InputError: for bad settings or files, or a training that diverges.
    """
    began = time.monotonic()
    _check(config)
    cfg = settings.settle(config)
    name = "vit_micro" if cfg.backbone == "auto" else cfg.backbone
    # named as a file, a packaged encoder comes without the packaged decoder
    cfg = dataclasses.replace(cfg, checkpoint=packaged(name) if cfg.checkpoint is None else cfg.checkpoint)
    backbone = load_network(cfg, cfg.image_size)
    tell_notes(backbone.notes, console or Console(stderr=True))
    images = (_letters if cfg.dataset == LETTERS else _from_dataset)(cfg, backbone.config.image_size)
    plan = _plan(cfg, backbone, images)
    folder = _claim(cfg, backbone, images)
    with checkpoint.open_checkpoints(folder / "steps", keep=2) as manager:
        state = _train(cfg, plan, backbone.params, images, manager)
    stored = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), state.params)
    validation = validation_loss(plan, backbone.params, stored, images.held_out)
    if not np.isfinite(validation):
        shutil.rmtree(folder)  # nothing in it is worth going on with
        raise InputError(f"lr: {cfg.lr} made the training diverge; nearest to try: {cfg.lr / 10:g}")
    baseline, out = baseline_loss(plan, images.held_out), Path(cfg.out)
    save_native(out, {"decoder": stored}, _metadata(config, plan, backbone), "float16")
    _draw(
        out.with_suffix(".png"),
        plan,
        backbone.params,
        state._replace(params=stored),
        images.held_out,
        baseline,
    )
    shutil.rmtree(folder)
    return {
        "out": str(out),
        "figure": str(out.with_suffix(".png")),
        "bytes": out.stat().st_size,
        "steps": plan.steps,
        "seconds": round(time.monotonic() - began, 1),
        "training loss": round(float(state.curve[0, -1]), 4),
        "validation loss": round(validation, 4),
        "validation loss of the mean patch": round(baseline, 4),
    }
