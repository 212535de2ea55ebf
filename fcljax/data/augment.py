"""From stored uint8 images to network inputs, inside jit: random crops in training, else a clean view.

Resampling is separable and linear in the image, so a crop, a resize and a flip are two small matrices per
image: no gathers, no loop over images, one trace. The matrices hold Pillow's kernels, stretched when
shrinking (antialias), truncated at the crop box and renormalised. Values are rounded to grey levels after
each pass, as in Pillow: the clean view equals torchvision's on PIL images.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from fcljax.data.geometry import PIPELINES, Geometry
from fcljax.errors import InputError, choose
from fcljax.pixels import NORMALISE

MARGIN = 256 / 224  # of the resized short side over the central crop, wherever a margin is left
_ATTEMPTS = 10  # of torchvision's RandomResizedCrop before it falls back to a central crop


@dataclass(frozen=True)
class Preprocess:
    """How images become network inputs. Static: hashable, an argument that jit specialises on.

    Training: a random crop that is resized (bilinear), or with `crop_scale` None the clean view's geometry;
    then a random flip and a random brightness. Clean: the short side (with `squash` both sides) resized to
    int(margin * image_size), then a central crop.

    Raises:
      InputError: for sizes, ranges or probabilities that make no sense, naming the field.
    """

    image_size: int  # side S of the square output
    mean: tuple[float, float, float] = NORMALISE["unit"][0]
    std: tuple[float, float, float] = NORMALISE["unit"][1]
    crop_scale: tuple[float, float] | None = (0.05, 1.0)  # crop's share of the area; None: no random crop
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of the crop's width / height
    flip: float = 0.5  # probability of a horizontal flip
    brightness: float = 0.0  # training images times a factor from 1 - brightness to 1 + brightness
    margin: float = MARGIN  # of the resized side over image_size, in the clean view
    squash: bool = False  # resize both sides, whatever the image's shape, and not the short one
    kernel: Literal["bicubic", "bilinear"] = "bicubic"  # of the clean view's resize

    def __post_init__(self) -> None:
        infinite = float("inf")
        scale = self.crop_scale
        ratio = self.crop_ratio
        checks = {
            "image_size": (self.image_size >= 1, "is not a number of pixels; choose 1 or more"),
            "margin": (1 <= self.margin < infinite, "leaves less than the central crop; choose 1 or more"),
            "crop_scale": (
                scale is None or 0 < scale[0] <= scale[1] <= 1,
                "is not a range within (0, 1]; such as (0.05, 1.0)",
            ),
            "crop_ratio": (
                0 < ratio[0] <= ratio[1] < infinite,
                "is not a range of positive ratios; such as (0.75, 1.33)",
            ),
            "flip": (0 <= self.flip <= 1, "is not a probability; choose 0 to 1"),
            "brightness": (0 <= self.brightness <= 1, "is not a share; choose 0 to 1"),
            "std": (all(value > 0 for value in self.std), "must be positive"),
        }
        for field, (valid, problem) in checks.items():
            if not valid:
                raise InputError(f"{field}: {getattr(self, field)} {problem}")

    @property
    def resized(self) -> int:
        """The side that the clean view resizes to before its central crop: 256 for 224, else rounded down."""
        return int(self.margin * self.image_size)

    def with_pixels(self, mean: tuple[float, float, float], std: tuple[float, float, float]) -> "Preprocess":
        """The same views, with pixels in [0, 1] normalised by this mean and standard deviation."""
        return replace(self, mean=mean, std=std)

    @property
    def geometry(self) -> Geometry:
        """How images of many sizes should be stored for these views."""
        return Geometry(int(MARGIN * self.image_size), self.resized, self.squash, self.kernel)


_RELEASE: dict[str, dict[str, Any]] = {  # each paper's released code, pixel range included
    "fppl": {},
    "pmae": {},
    "pilora": dict(crop_scale=None, brightness=63 / 255, margin=1.0, kernel="bilinear", normalise="cifar100"),
    "hepco": dict(crop_scale=(0.08, 1.0), margin=1.0, squash=True, kernel="bilinear"),
    "hepco_domainnet": dict(crop_scale=(0.08, 1.0), squash=True, kernel="bilinear"),
}


def input_pipeline(name: str, image_size: int, fills_frame: bool = False) -> Preprocess:
    """A paper's input pipeline as its release has it.

    Specifications: FPPL 1.2-1.3, pMAE 1.5, PILoRA 1.3-1.4, HePCo 1.2-1.3.

    Args:
      name: one of `PIPELINES`.
      image_size: side of the network's input.
      fills_frame: for images such as letters that reach their border, the clean view resizes them whole,
        without a margin.

    Raises:
      InputError: for an unknown name, or a size that is none.
    """
    options = dict(_RELEASE[choose("preprocess", name, PIPELINES)])
    mean, std = NORMALISE[options.pop("normalise", "unit")]
    if fills_frame:
        options["margin"] = 1.0
    return Preprocess(image_size, mean, std, **options)


def train_view(
    preprocess: Preprocess,
    images: UInt8[Array, "batch height width 3"],
    keys: Key[Array, " batch"],
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch S S 3"]:
    """The training view: random geometry, flip, brightness, normalisation.

    An image's view depends on the image and its key only.

    Args:
      preprocess: the pipeline.
      images: as they are stored.
      keys: one per image.
      sizes: height and width that each image had before it was squeezed to height x width (`Geometry`); None:
        pixels are square.
    """
    boxes, flips = sample_crops(preprocess, _whole(images, sizes), keys)
    if preprocess.crop_scale is None:
        grey = _clean_grey(preprocess, images, sizes)
        grey = jnp.where(flips[:, None, None, None], grey[:, :, ::-1], grey)
    else:
        grey = crop_resize(images, boxes, flips, preprocess.image_size, sizes)
    return _normalise(preprocess, _brighten(preprocess, grey, keys))


def clean_view(
    preprocess: Preprocess,
    images: UInt8[Array, "batch height width 3"],
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch S S 3"]:
    """The test view: resize, central crop, normalisation. Images of the right size are not resampled.

    Args:
      preprocess: the pipeline.
      images: as they are stored.
      sizes: as in `train_view`.
    """
    return _normalise(preprocess, _clean_grey(preprocess, images, sizes))


def _clean_grey(preprocess: Preprocess, images: Array, sizes: Array | None) -> Float[Array, "batch S S 3"]:
    height, width = images.shape[1:3]
    size = preprocess.image_size
    short = preprocess.resized
    kernel = _KERNELS[preprocess.kernel]
    if sizes is not None and not preprocess.squash:  # every image has its own long side
        rows, cols = (jnp.maximum(short, short * side // other) for side, other in (sizes.T, sizes.T[::-1]))
        return _resample(
            images, _central_weights(kernel, height, rows, size), _central_weights(kernel, width, cols, size)
        )
    # torchvision's Resize rounds the long side down
    rows = cols = short
    if not preprocess.squash:
        rows = max(short, short * height // width)
        cols = max(short, short * width // height)
    top = round((rows - size) / 2)
    left = round((cols - size) / 2)
    if (rows, cols) == (height, width):
        return images[:, top : top + size, left : left + size].astype(jnp.float32)
    vertical = _weights(kernel, height, (0, height), rows, top + np.arange(size))
    horizontal = _weights(kernel, width, (0, width), cols, left + np.arange(size))
    return _resample(images, vertical, horizontal)


def _central_weights(
    kernel: Callable, pixels: int, resized: Int[Array, " batch"], size: int
) -> Float[Array | np.ndarray, "batch size pixels"]:
    """A line of `pixels` is resized to `resized`, a length per image, and its central `size` are kept."""

    def of_image(resized: Array) -> Array | np.ndarray:
        start = jnp.round((resized - size) / 2).astype(jnp.int32)
        return _weights(kernel, pixels, (0, pixels), resized, start + jnp.arange(size))

    return jax.vmap(of_image)(resized)


def _whole(images: Array, sizes: Array | None) -> Int[Array, "batch 2"]:
    return jnp.broadcast_to(jnp.array(images.shape[1:3]), (images.shape[0], 2)) if sizes is None else sizes


def sample_crops(
    preprocess: Preprocess, whole: Int[Array, "batch 2"], keys: Key[Array, " batch"]
) -> tuple[Int[Array, "batch 4"], Bool[Array, " batch"]]:
    """Crop boxes (top, left, rows, columns) and flips, drawn as torchvision's RandomResizedCrop draws them.

    Args:
      preprocess: ranges and probabilities. With `crop_scale` None all boxes are the whole image.
      whole: height and width of each image, in whose pixels the boxes are.
      keys: one per image.
    """
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2 * _ATTEMPTS + 3,)))(keys)
    flips = draws[:, -1] < preprocess.flip
    if preprocess.crop_scale is None:
        return jnp.concatenate([jnp.zeros_like(whole), whole], 1), flips
    low, high = preprocess.crop_scale
    area = jnp.prod(whole.astype(jnp.float32), 1)[:, None] * (low + (high - low) * draws[:, :_ATTEMPTS])
    low, high = jnp.log(jnp.array(preprocess.crop_ratio))
    ratio = jnp.exp(low + (high - low) * draws[:, _ATTEMPTS : 2 * _ATTEMPTS])
    # [batch, attempts, (rows, columns)]
    sides = jnp.round(jnp.sqrt(jnp.stack([area / ratio, area * ratio], -1))).astype(jnp.int32)
    fits = jnp.all((sides > 0) & (sides <= whole[:, None]), -1)
    first = jnp.take_along_axis(sides, jnp.argmax(fits, 1)[:, None, None], 1)[:, 0]
    corner = jnp.floor(draws[:, -3:-1] * (whole - first + 1)).astype(jnp.int32)
    corner = jnp.minimum(corner, whole - first)  # u * n can round up to n
    box = jnp.concatenate([corner, first], 1)
    return jnp.where(jnp.any(fits, 1)[:, None], box, _central_boxes(preprocess.crop_ratio, whole)), flips


def crop_resize(
    images: UInt8[Array, "batch height width 3"],
    boxes: Int[Array, "batch 4"],
    flips: Bool[Array, " batch"],
    size: int,
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch size size 3"]:
    """Cut out the boxes (top, left, rows, columns), resize them (bilinear), mirror where `flips`.

    The boxes are in pixels of images of `sizes`, which are stored squeezed to height x width (None: as
    stored). Grey levels are 0..255.
    """
    height, width = images.shape[1:3]
    if sizes is not None:
        boxes = boxes * jnp.tile(jnp.array([height, width]) / sizes, (1, 2))  # no longer whole pixels
    top, left, rows, cols = boxes.T
    vertical = _box_weights(height, top, rows, size)
    horizontal = _box_weights(width, left, cols, size)
    return _resample(images, vertical, jnp.where(flips[:, None, None], horizontal[:, ::-1], horizontal))


def _box_weights(
    pixels: int, start: Array, length: Array, size: int
) -> Float[Array | np.ndarray, "batch size pixels"]:
    return jax.vmap(lambda *box: _weights(_triangle, pixels, box, size, jnp.arange(size)))(start, length)


def _central_boxes(ratio: tuple[float, float], whole: Int[Array, "batch 2"]) -> Int[Array, "batch 4"]:
    """Where no draw fits: the largest central box whose ratio is the nearest to the image's own."""
    height, width = whole.astype(jnp.float32).T
    rows = jnp.where(width / height < ratio[0], jnp.round(width / ratio[0]), height)
    cols = jnp.where(width / height > ratio[1], jnp.round(height * ratio[1]), width)
    sides = jnp.stack([rows, cols], 1).astype(jnp.int32)
    return jnp.concatenate([(whole - sides) // 2, sides], 1)


def _triangle(xp, x):
    return xp.maximum(0.0, 1.0 - abs(x))


def _cubic(xp, x):
    # Keys' kernel with a = -0.5, which is Pillow's (torch's tensor resize has -0.75)
    x = abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return xp.where(x < 1, near, xp.where(x < 2, far, 0.0))


_KERNELS = {"bicubic": _cubic, "bilinear": _triangle}


def _weights(
    kernel: Callable, pixels: int, box: tuple, resized: Array | int, out: Array | np.ndarray
) -> Float[Array | np.ndarray, "out pixels"]:
    """The weights of a line's pixels in its resized version.

    In float64, as Pillow has them, where `out` is a numpy array and so everything is known while tracing.

    Args:
      kernel: from distances to weights.
      pixels: of the line.
      box: start and length of the part that is resized.
      resized: the length that it gets.
      out: the wanted positions of the result.
    """
    xp = np if isinstance(out, np.ndarray) else jnp
    (start, length) = box
    scale = length / resized
    centre = start + (out + 0.5) * scale
    pixel = xp.arange(pixels)
    weight = kernel(xp, (pixel + 0.5 - centre[:, None]) / xp.maximum(scale, 1.0))
    touched = (pixel + 1 > start) & (pixel < start + length)
    weight = xp.where(touched, weight, 0.0)
    return weight / xp.sum(weight, 1, keepdims=True)


def _resample(
    images: Array, vertical: Array | np.ndarray, horizontal: Array | np.ndarray
) -> Float[Array, "batch S S 3"]:
    # Columns first and grey levels after each pass, like Pillow. Channels are between rows and columns, so
    # that both products are plain batched matrix products.
    batch, height, width, channels = images.shape
    rows = vertical.shape[-2]
    cols = horizontal.shape[-2]
    planar = images.transpose(0, 1, 3, 2).reshape(batch, height * channels, width).astype(jnp.float32)
    narrow = _grey(lambda weights: _dot(planar, jnp.swapaxes(weights, -1, -2)), horizontal)
    narrow = narrow.reshape(batch, height, channels * cols)
    resized = _grey(lambda weights: _dot(weights, narrow), vertical)
    return resized.reshape(batch, rows, channels, cols).transpose(0, 1, 3, 2)


def _grey(product: Callable, weights: Array | np.ndarray) -> Array:
    """Pillow's fixed-point arithmetic in float32: weights are multiples of 2**-22, halves are rounded up.

    Weights are small fractions, so ties are common and must not depend on rounding errors. They are split
    into multiples of 2**-11 and a rest: the products and sums of both with grey levels fit into 24 bits and
    are exact.
    """
    xp = np if isinstance(weights, np.ndarray) else jnp
    high = xp.round(weights * 2**11) / 2**11
    low = xp.round((weights - high) * 2**22) / 2**22
    whole = product(high) + 0.5
    floor = jnp.floor(whole)
    return jnp.clip(floor + jnp.floor(whole - floor + product(low)), 0.0, 255.0)


def _dot(a: Array | np.ndarray, b: Array | np.ndarray) -> Array:
    # HIGHEST, because an accelerator's default passes have fewer than 24 bits, and the products are small.
    return jnp.matmul(
        jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


def _brighten(preprocess: Preprocess, grey: Array, keys: Array) -> Array:
    """Every image times its own factor, rounded down to grey levels: torchvision's ColorJitter (on PIL)."""
    if not preprocess.brightness:
        return grey
    # A stream apart from the crops', so that brightness does not change them.
    draw = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (), minval=-1.0))(keys)
    factor = 1 + preprocess.brightness * draw
    return jnp.clip(jnp.floor(grey * factor[:, None, None, None]), 0.0, 255.0)


def _normalise(preprocess: Preprocess, grey: Array) -> Array:
    return (grey / 255.0 - jnp.array(preprocess.mean)) / jnp.array(preprocess.std)
