"""From stored uint8 images to what a network sees, inside jit: random crops for training, a clean view for everything else.

Resampling is separable and linear in the image, so a crop, a resize and a flip are two small matrices per image: no gathers, no
loop over images, one trace. The matrices hold Pillow's kernels, stretched when shrinking (antialias), cut off at the crop box and
renormalised, and values are rounded to grey levels after each pass as Pillow does; that reproduces torchvision on PIL images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from fcljax.errors import InputError

# Mean and standard deviation per channel, of pixels scaled to [0, 1].
NORMALISE = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

_ATTEMPTS = 10  # of torchvision's RandomResizedCrop before it falls back to a central crop


def short_side(image_size: int) -> int:
    """The short side images are resized to before the central crop: 256 for 224, and in proportion, rounded down."""
    return int(256 / 224 * image_size)


@dataclass(frozen=True)
class Preprocess:
    """How images become network inputs. Static: hashable, an argument that jit specialises on.

    Raises:
      InputError: for sizes, ranges or probabilities that make no sense, naming the field.
    """

    image_size: int  # side S of the square output
    mean: tuple[float, float, float] = NORMALISE["unit"][0]
    std: tuple[float, float, float] = NORMALISE["unit"][1]
    crop_scale: tuple[float, float] | None = (0.05, 1.0)  # range of the crop's share of the area; None: no random crop
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of the crop's width / height
    flip: float = 0.5  # probability of a horizontal flip
    resize: int | None = None  # short side before the central crop of the clean view; None: `short_side(image_size)`

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise InputError(f"image_size: {self.image_size} is not a number of pixels; choose 1 or more")
        if self.resize is not None and self.resize < self.image_size:
            raise InputError(f"resize: {self.resize} is smaller than image_size; choose {self.image_size} or more")
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise InputError(f"crop_scale: {self.crop_scale} is not a range within (0, 1]; such as (0.05, 1.0)")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < float("inf"):
            raise InputError(f"crop_ratio: {self.crop_ratio} is not a range of positive ratios; such as (0.75, 1.33)")
        if not 0 <= self.flip <= 1:
            raise InputError(f"flip: {self.flip} is not a probability; choose 0 to 1")
        if not all(value > 0 for value in self.std):
            raise InputError(f"std: {self.std} must be positive")


def train_view(
    preprocess: Preprocess, images: UInt8[Array, "batch height width 3"], keys: Key[Array, " batch"]
) -> Float[Array, "batch S S 3"]:
    """Random resized crop (bilinear), random flip, normalisation. An image's view depends on the image and its key only.

    With `crop_scale` None the clean view's geometry is kept and only the flip is random.
    """
    boxes, flips = sample_crops(preprocess, images.shape[1], images.shape[2], keys)
    if preprocess.crop_scale is None:
        clean = clean_view(preprocess, images)
        return jnp.where(flips[:, None, None, None], clean[:, :, ::-1], clean)
    return _normalise(preprocess, crop_resize(images, boxes, flips, preprocess.image_size))


def clean_view(preprocess: Preprocess, images: UInt8[Array, "batch height width 3"]) -> Float[Array, "batch S S 3"]:
    """Resize of the short side (bicubic), central crop, normalisation. Images that have the size already are not resampled."""
    _, height, width, _ = images.shape
    size = preprocess.image_size
    rows, cols = _resized(height, width, preprocess.resize or short_side(size))
    top, left = round((rows - size) / 2), round((cols - size) / 2)
    if (rows, cols) == (height, width):
        return _normalise(preprocess, images[:, top : top + size, left : left + size].astype(jnp.float32))
    vertical = _weights(_cubic, height, 0, height, rows, top + jnp.arange(size))
    horizontal = _weights(_cubic, width, 0, width, cols, left + jnp.arange(size))
    return _normalise(preprocess, _resample(images, vertical, horizontal))


def sample_crops(
    preprocess: Preprocess, height: int, width: int, keys: Key[Array, " batch"]
) -> tuple[Int[Array, "batch 4"], Bool[Array, " batch"]]:
    """Crop boxes (top, left, rows, columns) and flips, one key per image, as torchvision's RandomResizedCrop draws them.

    Area and log aspect ratio are uniform; the first of ten draws that fits the image is taken, else a central crop. With
    `crop_scale` None the boxes are the whole image.
    """
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2 * _ATTEMPTS + 3,)))(keys)
    flips = draws[:, -1] < preprocess.flip
    if preprocess.crop_scale is None:
        return jnp.broadcast_to(jnp.array([0, 0, height, width]), (len(draws), 4)), flips
    low, high = preprocess.crop_scale
    area = height * width * (low + (high - low) * draws[:, :_ATTEMPTS])
    low, high = jnp.log(jnp.array(preprocess.crop_ratio))
    ratio = jnp.exp(low + (high - low) * draws[:, _ATTEMPTS : 2 * _ATTEMPTS])
    sides = jnp.round(jnp.sqrt(jnp.stack([area / ratio, area * ratio], -1))).astype(jnp.int32)  # [batch, attempts, (rows, columns)]
    whole = jnp.array([height, width])
    fits = jnp.all((sides > 0) & (sides <= whole), -1)
    first = jnp.take_along_axis(sides, jnp.argmax(fits, 1)[:, None, None], 1)[:, 0]
    corner = jnp.floor(draws[:, -3:-1] * (whole - first + 1)).astype(jnp.int32)
    corner = jnp.minimum(corner, whole - first)  # u * n can round up to n
    box = jnp.concatenate([corner, first], 1)
    return jnp.where(jnp.any(fits, 1)[:, None], box, jnp.array(_central_box(preprocess.crop_ratio, height, width))), flips


def crop_resize(
    images: UInt8[Array, "batch height width 3"], boxes: Int[Array, "batch 4"], flips: Bool[Array, " batch"], size: int
) -> Float[Array, "batch size size 3"]:
    """Cut out the boxes (top, left, rows, columns), resize them (bilinear), mirror where `flips`. Grey levels 0..255."""
    height, width = images.shape[1:3]
    top, left, rows, cols = boxes.T
    vertical = _box_weights(height, top, rows, size)
    horizontal = _box_weights(width, left, cols, size)
    return _resample(images, vertical, jnp.where(flips[:, None, None], horizontal[:, ::-1], horizontal))


def _box_weights(pixels: int, start: Array, length: Array, size: int) -> Float[Array, "batch size pixels"]:
    return jax.vmap(lambda start, length: _weights(_triangle, pixels, start, length, size, jnp.arange(size)))(start, length)


def _central_box(ratio: tuple[float, float], height: int, width: int) -> tuple[int, int, int, int]:
    # Python's round and jnp.round both round half to even, as torchvision does.
    rows, cols = height, width
    if width / height < ratio[0]:
        rows = round(width / ratio[0])
    elif width / height > ratio[1]:
        cols = round(height * ratio[1])
    return (height - rows) // 2, (width - cols) // 2, rows, cols


def _resized(height: int, width: int, short: int) -> tuple[int, int]:
    return (short, int(short * width / height)) if height <= width else (int(short * height / width), short)


def _triangle(x: Array) -> Array:
    return jnp.maximum(0.0, 1.0 - jnp.abs(x))


def _cubic(x: Array) -> Array:
    # Keys' kernel with a = -0.5, which is Pillow's (torch's tensor resize has -0.75)
    x = jnp.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return jnp.where(x < 1, near, jnp.where(x < 2, far, 0.0))


def _weights(
    kernel: Callable[[Array], Array], pixels: int, start: Array | int, length: Array | int, resized: int, out: Int[Array, " out"]
) -> Float[Array, "out pixels"]:
    """How outputs `out` of `resized` weigh the pixels of a line when the stretch [start, start + length) of it is resized."""
    scale = length / resized
    centre = start + (out + 0.5) * scale
    pixel = jnp.arange(pixels)
    weight = kernel((pixel + 0.5 - centre[:, None]) / jnp.maximum(scale, 1.0))
    weight = jnp.where((pixel >= start) & (pixel < start + length), weight, 0.0)
    return weight / jnp.sum(weight, 1, keepdims=True)


def _resample(images: Array, vertical: Array, horizontal: Array) -> Float[Array, "batch S S 3"]:
    # Columns first and grey levels after each pass, like Pillow. Channels sit between rows and columns, so that both products are
    # plain batched matrix products. HIGHEST, because bfloat16 passes would cost half a grey level and the products are small.
    batch, height, width, channels = images.shape
    rows, cols = vertical.shape[-2], horizontal.shape[-2]
    dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    planar = images.transpose(0, 1, 3, 2).reshape(batch, height * channels, width).astype(jnp.float32)
    narrow = _grey(dot(planar, jnp.swapaxes(horizontal, -1, -2))).reshape(batch, height, channels * cols)
    return _grey(dot(vertical, narrow)).reshape(batch, rows, channels, cols).transpose(0, 1, 3, 2)


def _grey(values: Array) -> Array:
    # Pillow rounds halves up. Ties are common (weights are small fractions), and the margin keeps float32 noise from deciding them.
    return jnp.clip(jnp.floor(values + (0.5 + 2**-12)), 0.0, 255.0)


def _normalise(preprocess: Preprocess, grey: Array) -> Array:
    return (grey / 255.0 - jnp.array(preprocess.mean)) / jnp.array(preprocess.std)
