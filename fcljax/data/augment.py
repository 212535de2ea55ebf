"""Turn stored uint8 images into network inputs inside jit: random crops in training,
else a clean view.

Resampling is separable and linear in the image, so a crop, a resize and a flip are two
small matrices per image: no gathers, no loop over images, one trace. The matrices
contain Pillow's kernels, stretched when shrinking (antialias), truncated at the crop
box and renormalised. Values are rounded to grey levels after each pass, as in Pillow:
the clean view equals torchvision's on PIL images.
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

# the ratio of the resized short side to the central crop that ImageNet models are
# tested with
MARGIN = 256 / 224
# torchvision's RandomResizedCrop tries so often before it takes a central crop
_ATTEMPTS = 10


@dataclass(frozen=True)
class Preprocess:
    """How images become network inputs; a static argument, on which jit specialises.

    Training: a random crop that is resized (bilinear), or with `crop_scale` None the
    clean view's geometry; then a random flip and a random brightness. Clean: the short
    side (with `squash` both sides) resized to int(margin * image_size), then a central
    crop.

    Raises:
      InputError: for sizes, ranges or probabilities that make no sense, naming the field.
    """

    image_size: int  # side S of the square output
    mean: tuple[float, float, float] = NORMALISE["unit"][0]
    std: tuple[float, float, float] = NORMALISE["unit"][1]
    # crop's share of the area; None: no random crop
    crop_scale: tuple[float, float] | None = (0.05, 1.0)
    # range of the crop's width / height
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5  # probability of a horizontal flip
    # training images times a factor from 1 - brightness to 1 + brightness
    brightness: float = 0.0
    margin: float = MARGIN  # ratio of the resized side to image_size, in the clean view
    # resize both sides instead of the short one, whatever the image's shape
    squash: bool = False
    kernel: Literal["bicubic", "bilinear"] = "bicubic"  # of the clean view's resize

    def __post_init__(self) -> None:
        def check(field: str, valid: bool, problem: str) -> None:
            if not valid:
                raise InputError(f"{field}: {getattr(self, field)} {problem}")

        infinity = float("inf")
        scale = self.crop_scale
        in_unit_range = scale is None or 0 < scale[0] <= scale[1] <= 1
        positive_range = 0 < self.crop_ratio[0] <= self.crop_ratio[1] < infinity
        check("image_size", self.image_size >= 1, "is not a number of pixels; choose 1 or more")
        check("margin", 1 <= self.margin < infinity, "leaves less than the central crop; choose 1 or more")
        check("crop_scale", in_unit_range, "is not a range within (0, 1]; such as (0.05, 1.0)")
        check("crop_ratio", positive_range, "is not a range of positive ratios; such as (0.75, 1.33)")
        check("flip", 0 <= self.flip <= 1, "is not a probability; choose 0 to 1")
        check("brightness", 0 <= self.brightness <= 1, "is not a share; choose 0 to 1")
        check("std", all(value > 0 for value in self.std), "must be positive")

    @property
    def resized(self) -> int:
        """Return the side before the clean view's central crop: 256 for 224, rounded down."""
        return int(self.margin * self.image_size)

    def with_pixels(
        self,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> "Preprocess":
        """Return the same views with this mean and standard deviation of pixels in [0, 1]."""
        return replace(self, mean=mean, std=std)

    @property
    def geometry(self) -> Geometry:
        """Return how to store images of many sizes for these views."""
        return Geometry(int(MARGIN * self.image_size), self.resized, self.squash, self.kernel)


# pipelines of the papers' releases, pixel range included
_RELEASES: dict[str, dict[str, Any]] = {
    "fppl": {},
    "pmae": {},
    "pilora": dict(crop_scale=None, brightness=63 / 255, margin=1.0, kernel="bilinear", normalise="cifar100"),
    "hepco": dict(crop_scale=(0.08, 1.0), margin=1.0, squash=True, kernel="bilinear"),
    "hepco_domainnet": dict(crop_scale=(0.08, 1.0), squash=True, kernel="bilinear"),
}


def input_pipeline(name: str, image_size: int, fills_frame: bool = False) -> Preprocess:
    """Return the input pipeline of a paper's release.

    Specifications: FPPL 1.2-1.3, pMAE 1.5, PILoRA 1.3-1.4, HePCo 1.2-1.3.

    Args:
      name: one of `PIPELINES`.
      image_size: side of the network's input in pixels.
      fills_frame: the clean view resizes whole images, without a margin; for letters and
        other images that reach their border.

    Raises:
      InputError: for an unknown name or an invalid size.
    """
    # a copy: the table of releases must not change
    options = dict(_RELEASES[choose("preprocess", name, PIPELINES)])
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
    """Return the training view: random geometry, flip, brightness, normalisation.

    An image's view depends on the image and its key only.

    Args:
      preprocess: the pipeline.
      images: as they are stored.
      keys: one per image.
      sizes: height and width of each image before it was squeezed to height x width
        (`Geometry`); None: pixels are square.
    """
    if sizes is None:
        # nothing was squeezed: the sizes before are those as stored
        original = jnp.broadcast_to(jnp.array(images.shape[1:3]), (images.shape[0], 2))
    else:
        original = sizes
    boxes, flips = sample_crops(preprocess, original, keys)
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
    """Return the test view: resize, central crop, normalisation. Images of the right
    size are not resampled.

    Args:
      preprocess: the pipeline.
      images: as they are stored.
      sizes: as in `train_view`.
    """
    return _normalise(preprocess, _clean_grey(preprocess, images, sizes))


def _clean_grey(
    preprocess: Preprocess,
    images: Array,
    sizes: Array | None,
) -> Float[Array, "batch S S 3"]:
    """Return the grey levels of the clean view."""
    height, width = images.shape[1:3]
    size = preprocess.image_size
    short = preprocess.resized
    kernel = _KERNELS[preprocess.kernel]
    if sizes is not None and not preprocess.squash:
        # the long side differs from image to image
        heights, widths = sizes.T
        rows = jnp.maximum(short, short * heights // widths)
        columns = jnp.maximum(short, short * widths // heights)
        vertical = _central_weights(kernel, height, rows, size)
        horizontal = _central_weights(kernel, width, columns, size)
        return _resample(images, vertical, horizontal)
    rows = columns = short
    if not preprocess.squash:
        # torchvision's Resize rounds the long side down
        rows = max(short, short * height // width)
        columns = max(short, short * width // height)
    top = round((rows - size) / 2)
    left = round((columns - size) / 2)
    # stored at the right size already, as `Geometry` stores test images: only cropped
    if (rows, columns) == (height, width):
        return images[:, top : top + size, left : left + size].astype(jnp.float32)
    vertical = _weights(kernel, height, (0, height), rows, top + np.arange(size))
    horizontal = _weights(kernel, width, (0, width), columns, left + np.arange(size))
    return _resample(images, vertical, horizontal)


def _central_weights(
    kernel: Callable, pixels: int, resized: Int[Array, " batch"], size: int
) -> Float[Array | np.ndarray, "batch size pixels"]:
    """Return weights by image that resize a line to `resized` pixels and crop `size`."""

    def of_image(resized: Array) -> Array | np.ndarray:
        start = jnp.round((resized - size) / 2).astype(jnp.int32)
        return _weights(kernel, pixels, (0, pixels), resized, start + jnp.arange(size))

    return jax.vmap(of_image)(resized)


def sample_crops(
    preprocess: Preprocess, sizes: Int[Array, "batch 2"], keys: Key[Array, " batch"]
) -> tuple[Int[Array, "batch 4"], Bool[Array, " batch"]]:
    """Draw crop boxes (top, left, rows, columns) and flips as torchvision's
    RandomResizedCrop does.

    Args:
      preprocess: ranges and probabilities. With `crop_scale` None all boxes are the whole image.
      sizes: height and width of each image, in whose pixels the boxes are.
      keys: one per image.
    """
    # Each image has a key, so its crop does not depend on the batch that it is in. Ten
    # areas, ten ratios, a corner (2) and a flip.
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2 * _ATTEMPTS + 3,)))(keys)
    flips = uniform[:, -1] < preprocess.flip
    if preprocess.crop_scale is None:
        return jnp.concatenate([jnp.zeros_like(sizes), sizes], 1), flips
    low, high = preprocess.crop_scale
    scale = low + (high - low) * uniform[:, :_ATTEMPTS]
    area = jnp.prod(sizes.astype(jnp.float32), 1)[:, None] * scale
    # log-uniform, so that wide and tall crops are equally likely
    low, high = jnp.log(jnp.array(preprocess.crop_ratio))
    ratio = jnp.exp(low + (high - low) * uniform[:, _ATTEMPTS : 2 * _ATTEMPTS])
    # [batch, attempts, (rows, columns)]: torchvision tries one after the other and
    # takes the first that fits; here all are drawn, and argmax finds the first
    sides = jnp.round(jnp.sqrt(jnp.stack([area / ratio, area * ratio], -1))).astype(jnp.int32)
    fits = jnp.all((sides > 0) & (sides <= sizes[:, None]), -1)
    side = jnp.take_along_axis(sides, jnp.argmax(fits, 1)[:, None, None], 1)[:, 0]
    # the corner is uniform over the places that fit
    corner = jnp.floor(uniform[:, -3:-1] * (sizes - side + 1)).astype(jnp.int32)
    corner = jnp.minimum(corner, sizes - side)  # u * n can round up to n
    box = jnp.concatenate([corner, side], 1)
    fallback = _central_boxes(preprocess.crop_ratio, sizes)
    return jnp.where(jnp.any(fits, 1)[:, None], box, fallback), flips


def crop_resize(
    images: UInt8[Array, "batch height width 3"],
    boxes: Int[Array, "batch 4"],
    flips: Bool[Array, " batch"],
    size: int,
    sizes: Int[Array, "batch 2"] | None = None,
) -> Float[Array, "batch size size 3"]:
    """Crop boxes (top, left, rows, columns), resize them (bilinear), mirror by `flips`.

    Boxes are in pixels of images of `sizes`, which are stored squeezed to height x
    width (None: as stored). Grey levels are 0..255.
    """
    height, width = images.shape[1:3]
    if sizes is not None:
        # from pixels before squeezing to pixels as stored, which gives fractions of
        # pixels
        boxes = boxes * jnp.tile(jnp.array([height, width]) / sizes, (1, 2))
    top, left, rows, columns = boxes.T
    vertical = _box_weights(height, top, rows, size)
    horizontal = _box_weights(width, left, columns, size)
    return _resample(images, vertical, jnp.where(flips[:, None, None], horizontal[:, ::-1], horizontal))


def _box_weights(
    pixels: int, start: Array, length: Array, size: int
) -> Float[Array | np.ndarray, "batch size pixels"]:
    return jax.vmap(lambda *box: _weights(_triangle, pixels, box, size, jnp.arange(size)))(start, length)


def _central_boxes(
    ratio: tuple[float, float],
    sizes: Int[Array, "batch 2"],
) -> Int[Array, "batch 4"]:
    """Return the largest central boxes with the nearest allowed ratio of sides."""
    height, width = sizes.astype(jnp.float32).T
    # the whole image, cut on the side that is too long for the range of ratios
    rows = jnp.where(width / height < ratio[0], jnp.round(width / ratio[0]), height)
    columns = jnp.where(width / height > ratio[1], jnp.round(height * ratio[1]), width)
    sides = jnp.stack([rows, columns], 1).astype(jnp.int32)
    return jnp.concatenate([(sizes - sides) // 2, sides], 1)


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
    kernel: Callable,
    pixels: int,
    box: tuple,
    resized: Array | int,
    out: Array | np.ndarray,
) -> Float[Array | np.ndarray, "out pixels"]:
    """Return the weights of a line's pixels in its resized version.

    Args:
      kernel: from distances to weights.
      pixels: length of the line.
      box: start and length of the part that is resized.
      resized: length that this part gets.
      out: positions of the result to compute.
    """
    # In numpy where nothing is traced: in float64, as Pillow computes its weights, and as
    # constants of the program.
    xp = jnp
    if isinstance(out, np.ndarray):
        xp = np
    start, length = box
    scale = length / resized
    centre = start + (out + 0.5) * scale
    pixel = xp.arange(pixels)
    weight = kernel(xp, (pixel + 0.5 - centre[:, None]) / xp.maximum(scale, 1.0))
    # pixels outside of the box have no weight, as if the image were cut there
    inside = (pixel + 1 > start) & (pixel < start + length)
    weight = xp.where(inside, weight, 0.0)
    return weight / xp.sum(weight, 1, keepdims=True)


def _resample(
    images: Array, vertical: Array | np.ndarray, horizontal: Array | np.ndarray
) -> Float[Array, "batch S S 3"]:
    """Resize columns, then rows, with grey levels after each pass, as Pillow does."""
    batch, height, width, channels = images.shape
    rows = vertical.shape[-2]
    columns = horizontal.shape[-2]
    # with channels between rows and columns both passes are plain batched matrix
    # products, which GPUs and TPUs are built for
    planar = images.transpose(0, 1, 3, 2).reshape(batch, height * channels, width).astype(jnp.float32)
    narrow = _grey_levels(lambda weights: _dot(planar, jnp.swapaxes(weights, -1, -2)), horizontal)
    narrow = narrow.reshape(batch, height, channels * columns)
    resized = _grey_levels(lambda weights: _dot(weights, narrow), vertical)
    return resized.reshape(batch, rows, channels, columns).transpose(0, 1, 3, 2)


def _grey_levels(product: Callable, weights: Array | np.ndarray) -> Array:
    """Compute Pillow's fixed-point products in float32: weights are multiples of 2**-22,
    halves round up."""
    # Weights are small fractions, so ties are common and must not depend on rounding
    # errors. They are split into multiples of 2**-11 and a rest: the products and sums
    # of both with grey levels fit into 24 bits and are exact.
    xp = jnp
    if isinstance(weights, np.ndarray):
        xp = np
    high = xp.round(weights * 2**11) / 2**11
    low = xp.round((weights - high) * 2**22) / 2**22
    level = product(high) + 0.5
    # the sum of both products would not fit into 24 bits, so whole levels are set aside
    floor = jnp.floor(level)
    return jnp.clip(floor + jnp.floor(level - floor + product(low)), 0.0, 255.0)


def _dot(a: Array | np.ndarray, b: Array | np.ndarray) -> Array:
    # accelerators would round factors to bfloat16 or tf32, and the sums need all 24 bits
    precision = jax.lax.Precision.HIGHEST
    return jnp.matmul(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), precision=precision)


def _brighten(preprocess: Preprocess, grey: Array, keys: Array) -> Array:
    """Multiply each image by a random factor, rounded down (torchvision's ColorJitter)."""
    if not preprocess.brightness:
        return grey
    # a key of its own: with and without brightness an image has the same crop
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (), minval=-1.0))(keys)
    factor = 1 + preprocess.brightness * uniform
    return jnp.clip(jnp.floor(grey * factor[:, None, None, None]), 0.0, 255.0)


def _normalise(preprocess: Preprocess, grey: Array) -> Array:
    return (grey / 255.0 - jnp.array(preprocess.mean)) / jnp.array(preprocess.std)
