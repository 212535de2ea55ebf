"""Decode one image from an untrusted file to RGB pixels of the size in which they are stored.

The header is read first: an image that is too small, too large or not of 8 bits is
refused before a pixel is decoded. Resizing is Pillow's own, with the rounding of
torchvision's Resize and CenterCrop, so that stored test images equal theirs bit by bit.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from fcljax.data.geometry import Geometry
from fcljax.errors import InputError, reason
from fcljax.files import open_regular

# a file, its content, its pixels, grey (C = 1) or RGB, or the reason why there is no
# image
Picture = Path | bytes | UInt8[np.ndarray, "H W C"] | InputError
Fit = Callable[[Image.Image], Image.Image]

T = TypeVar("T")

MAX_PIXELS = 40_000_000  # images with as many or more are refused

# The formats that Pillow may recognise by a file's content. Some of its other readers
# start programs, such as Ghostscript for EPS.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
# the endings of such files, in small letters
SUFFIXES = frozenset({".apng", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".webp"})
# 8 bits or less a channel
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}
_KERNELS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class Decoded(NamedTuple):
    """One image as it is stored, and its original size."""

    pixels: UInt8[np.ndarray, "h w 3"]
    height: int  # in pixels, before `fit`
    width: int


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Pillow's warnings inside the block.

    Dangerous images are refused anyway; other warnings concern unused metadata. Filters
    belong to the process and not to a thread, so wrap the loop and not the decoding of
    one image.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        yield


def fits(geometry: Geometry) -> tuple[Fit, Fit]:
    """Return the functions that bring training and test images to the size of `geometry`."""
    kernel = _KERNELS[geometry.kernel]
    test = resize_whole if geometry.squash else centre
    return partial(resize_whole, side=geometry.train), partial(test, side=geometry.test, kernel=kernel)


def fit_to(geometry: Geometry, height: int, width: int) -> Fit:
    """Return a function that brings images to height x width as `geometry` does to a square.

    With `squash` it resizes whole images, else the largest central part of this shape.
    """
    kernel = _KERNELS[geometry.kernel]
    if geometry.squash:
        return lambda image: image.resize((width, height), kernel)
    if height == width:
        return partial(centre, side=height, kernel=kernel)
    return partial(_central_part, height=height, width=width, kernel=kernel)


def _central_part(image: Image.Image, height: int, width: int, kernel: Image.Resampling) -> Image.Image:
    """Resize the largest central part of the shape height x width to it."""
    scale = min(image.height / height, image.width / width)
    left = (image.width - scale * width) / 2
    top = (image.height - scale * height) / 2
    box = (left, top, left + scale * width, top + scale * height)
    return image.resize((width, height), kernel, box=box)


def resize_whole(
    image: Image.Image, side: int, kernel: Image.Resampling = Image.Resampling.BICUBIC
) -> Image.Image:
    """Resize the whole image to side x side, whatever its shape."""
    return image.resize((side, side), kernel)


def centre(image: Image.Image, side: int, kernel: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """Resize the short side to `side` and crop the centre, as torchvision does on PIL."""
    short, long = sorted(image.size)
    length = int(side * long / short)
    columns = side
    rows = length
    if image.width > image.height:
        columns = length
        rows = side
    left = int(round((columns - side) / 2.0))
    top = int(round((rows - side) / 2.0))
    if columns * rows < MAX_PIXELS:
        return image.resize((columns, rows), kernel).crop((left, top, left + side, top + side))
    # Of an image so narrow that all of it would have MAX_PIXELS or more (at 224 pixels:
    # 800 times as long as wide), only the square is computed, which can differ by a few
    # grey levels.
    x = image.width / columns
    y = image.height / rows
    right = min((left + side) * x, image.width)
    bottom = min((top + side) * y, image.height)
    return image.resize((side, side), kernel, box=(left * x, top * y, right, bottom))


def size_of(picture: Picture, name: str) -> tuple[int, int]:
    """Read height and width in pixels from the header.

    Raises:
      InputError: for a file that is no image or cannot be decoded, naming `name`.
      OSError: for a file that cannot be opened, or is no regular one.
    """
    if isinstance(picture, InputError):
        raise picture
    if isinstance(picture, np.ndarray):
        return picture.shape[0], picture.shape[1]
    return _open(picture, name, lambda image: (image.height, image.width))


def decode(picture: Picture, name: str, fit: Fit | None = None) -> Decoded:
    """Decode the pixels in RGB, and apply `fit`.

    Transparency is dropped, orientation tags are ignored.

    Raises:
      InputError: naming `name`, for a truncated file, a file that is no image, a side of
        one pixel, 40 megapixels or more, and more than 8 bits per channel.
      OSError: for a file that cannot be opened.
    """
    if isinstance(picture, InputError):
        raise picture
    if isinstance(picture, np.ndarray):
        height, width, _ = picture.shape
        pixels = np.ascontiguousarray(np.broadcast_to(picture, (height, width, 3)))
        if fit is not None:
            pixels = np.asarray(fit(Image.fromarray(pixels)))
        return Decoded(pixels, height, width)
    return _open(picture, name, partial(_decoded, fit=fit))


def pixels_of(image: Image.Image, name: str) -> UInt8[np.ndarray, "H W 3"]:
    """Return the pixels of an opened image in RGB, as `decode` reads them from files.

    Raises:
      InputError: for a side of one pixel, 40 megapixels or more, and more than 8 bits per channel.
    """
    _check_header(image, name)
    return _decoded(image, None).pixels


def _decoded(image: Image.Image, fit: Fit | None) -> Decoded:
    if "transparency" in image.info:
        # Pillow warns about palettes with transparent entries unless they pass through
        # RGBA
        image = image.convert("RGBA")
    rgb = image.convert("RGB")
    if fit is not None:
        rgb = fit(rgb)
    return Decoded(np.asarray(rgb), image.height, image.width)


def _open(picture: Path | bytes, name: str, read: Callable[[Image.Image], T]) -> T:
    with io.BytesIO(picture) if isinstance(picture, bytes) else open_regular(picture) as stream:
        try:
            with Image.open(stream, formats=_FORMATS) as image:
                _check_header(image, name)
                return read(image)
        except (InputError, MemoryError):
            raise
        except Image.DecompressionBombError as error:
            raise InputError(
                f"dataset: {name!r} is too large, far more than {MAX_PIXELS // 10**6} megapixels"
            ) from error
        except UnidentifiedImageError as error:
            raise InputError(
                f"dataset: {name!r} is not a readable image (no JPEG, PNG, GIF, BMP or WebP)"
            ) from error
        # anything: Pillow's decoders raise errors of many kinds on a damaged image
        except Exception as error:
            raise InputError(f"dataset: {name!r} is not a readable image ({reason(error)})") from error


def _check_header(image: Image.Image, name: str) -> None:
    size = f"{image.width}x{image.height} pixels"
    if min(image.size) < 2:
        raise InputError(f"dataset: {name!r} is too small, {size}; the least is 2x2")
    if image.width * image.height >= MAX_PIXELS:
        raise InputError(
            f"dataset: {name!r} is too large, {size}; "
            f"images must have less than {MAX_PIXELS // 10**6} megapixels"
        )
    if image.mode not in _MODES:
        raise InputError(
            f"dataset: {name!r} has pixels of mode {image.mode!r}; convert it to 8 bits per channel"
        )
