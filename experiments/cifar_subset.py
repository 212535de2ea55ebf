"""Some images of each class of a folder of images, small enough to be sent to a machine with a GPU.

    python experiments/cifar_subset.py CIFAR100 build/cifar100_250 --train 250 --test 20
    fcljax sweep experiments/sweep_cifar224.yaml --out runs/cifar224      # on the GPU, after it

CIFAR100 has folders train/CLASS and test/CLASS. The first images by name are written without loss as WebP:
48 MB for 250 training and 20 test images of each class of CIFAR-100, where the PNG files have 60.
"""

import argparse
from pathlib import Path

from PIL import Image


def main() -> None:
    """Write the subset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--train", type=int, default=250, help="images of each class")
    parser.add_argument("--test", type=int, default=20, help="images of each class")
    options = parser.parse_args()
    counts = {"train": options.train, "test": options.test}
    size = sum(copied(options.source / split, options.target / split, n) for split, n in counts.items())
    print(f"{options.target}: {size / 1e6:.1f} MB")


def copied(source: Path, target: Path, count: int) -> int:
    """Write the first `count` images of each class, and return their bytes."""
    size = 0
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        images = sorted(folder.iterdir())[:count]
        if len(images) < count:
            raise SystemExit(f"{folder}: has {len(images)} images, and {count} are asked for")
        (target / folder.name).mkdir(parents=True, exist_ok=True)
        for image in images:
            file = target / folder.name / f"{image.stem}.webp"
            Image.open(image).convert("RGB").save(file, lossless=True, quality=100, method=4)
            size += file.stat().st_size
    return size


if __name__ == "__main__":
    main()
