"""Describe the size at which images are stored, and the papers' input pipelines; without
JAX."""

from typing import Literal, NamedTuple

PIPELINES = {
    "fppl": "crops of 5 to 100 % of the area, flips; test: short side to 256/224 (bicubic), central crop; "
    "pixels in [0, 1]",
    "pmae": "as fppl; its reconstruction path normalises with ImageNet's constants on top",
    "pilora": "short side to the input size (bilinear), flips, brightness within 63/255; "
    "CIFAR-100's mean and standard deviation",
    "hepco": "crops of 8 to 100 % of the area, flips; test: both sides to the input size (bilinear); "
    "pixels in [0, 1]",
    "hepco_domainnet": "as hepco, but test: both sides to 256/224, central crop",
}


class Geometry(NamedTuple):
    """How images of many sizes are resized before storing, the one resize that jit
    cannot do.

    Whole training images are squeezed to train x train, whatever their shape; crops
    undo that with the original sizes. Test images are stored as the clean view needs
    them, without further resampling: the short side is resized to `test` and a central
    square cut out, or, with `squash`, both sides are resized.
    """

    train: int = 256  # side in pixels
    test: int = 256  # side in pixels
    squash: bool = False
    # Pillow's, antialiased; of the test images. Training images take bicubic.
    kernel: Literal["bicubic", "bilinear"] = "bicubic"
