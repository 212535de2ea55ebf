"""Make the packaged digits in several domains: plain, turned, inverted, noisy and
blurred.

As in rotated MNIST, every domain has all images, and images of the two splits stay apart.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFilter

Images = UInt8[np.ndarray, "N H W 3"]

DEGREES = 45.0  # counter-clockwise
NOISE = 64.0  # standard deviation in grey levels
RADIUS = 2.5  # of the Gaussian blur, in pixels


def _plain(images: Images) -> Images:
    return images


def _turned(images: Images) -> Images:
    return _map_images(images, lambda image: image.rotate(DEGREES, Image.Resampling.BILINEAR))


def _inverted(images: Images) -> Images:
    return 255 - images


def _noisy(images: Images) -> Images:
    """Add noise, the same in all channels and in every run."""
    # not the run's seed: the noise is part of the data set
    noise = np.random.RandomState(0).normal(0, NOISE, images.shape[:3])
    return np.clip(np.rint(images + noise[..., None]), 0, 255).astype(np.uint8)


def _blurred(images: Images) -> Images:
    return _map_images(images, lambda image: image.filter(ImageFilter.GaussianBlur(RADIUS)))


def _map_images(images: Images, change: Callable[[Image.Image], Image.Image]) -> Images:
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in images])


SHIFTS: dict[str, Callable[[Images], Images]] = {
    "plain": _plain,
    "turned": _turned,
    "inverted": _inverted,
    "noisy": _noisy,
    "blurred": _blurred,
}


def shifted(images: Images) -> UInt8[np.ndarray, "M H W 3"]:
    """Return each image in all domains, [5 N, H, W, 3].

    The domains of an image are neighbours, so that --holdout, which takes from the end,
    takes all of them.
    """
    domains = [shift(images) for shift in SHIFTS.values()]
    return np.stack(domains, axis=1).reshape(-1, *images.shape[1:])
