"""Compare the ViT with timm's on real ImageNet weights and real images: vit_tiny_patch16_224 at 224 pixels.

    python experiments/check_vit_tiny.py reference vit_tiny.npz out.npz [small.npz]
    python experiments/check_vit_tiny.py compare vit_tiny.npz out.npz

The first needs torch, timm, scikit-learn and Pillow, the second fcljax; class tokens and logits are compared.
`vit_tiny.npz` holds timm's state dict (mean and std of pixels are 0.5), `small.npz` small uint8 images as
`x_test` (CIFAR, say), of which 8 are enlarged. The photographs are the two that come with scikit-learn, in 8
crops each. The first step writes images and torch's outputs to out.npz, the second prints the largest
differences, relative to the largest value, and fails above 1e-3.

Measured on CPU in float32 (torch 2.13 and timm 1.0.31, jax 0.10.2), 16 crops and 8 CIFAR-100 test images:
class tokens differ by 1.3e-6, logits by 1.6e-6, and the likeliest class is the same for all 24 images (among
them 698, palace, and 985, daisy).
"""

import sys

import numpy as np

SIZE, TOLERANCE = 224, 1e-3


def crops(photograph: np.ndarray) -> list[np.ndarray]:
    """Left, middle, right: the largest square and two thirds of it, scaled; two pieces at their own scale."""
    from PIL import Image

    height, width = photograph.shape[:2]
    boxes = [
        (left, 0, side)
        for side in (height, 2 * height // 3)
        for left in (0, (width - side) // 2, width - side)
    ]
    boxes += [(0, height - SIZE, SIZE), (width - SIZE, 0, SIZE)]
    resize = lambda x: np.asarray(Image.fromarray(x).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    return [resize(photograph[top : top + side, left : left + side]) for left, top, side in boxes]


def gather(small: str | None) -> np.ndarray:
    """uint8 images [n, SIZE, SIZE, 3]."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    images = [crop for photograph in load_sample_images().images for crop in crops(photograph)]
    rows = np.load(small, allow_pickle=False)["x_test"][:8] if small else []
    return np.stack(
        images + [np.asarray(Image.fromarray(x).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for x in rows]
    )


def reference(weights: str, out: str, small: str | None = None) -> None:
    """timm's outputs for all images, to `out`."""
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    with np.load(weights, allow_pickle=False) as file:
        model.load_state_dict({name: torch.from_numpy(file[name]) for name in file.files})
    images = gather(small)
    x = torch.from_numpy((images.astype(np.float32) / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)
    with torch.no_grad():
        cls = model.forward_features(x)[:, 0]
        np.savez_compressed(out, image=images, cls=cls.numpy(), logits=model.head(cls).numpy())
    print(f"{len(images)} images; likeliest classes: {model.head(cls).argmax(1).tolist()}")


def compare(weights: str, out: str) -> None:
    """Our outputs against those in `out`; fails if they differ by more than TOLERANCE."""
    import jax

    from fcljax.models.vit import apply_vit
    from fcljax.models.weights.pretrained import load_backbone

    loaded = load_backbone("vit_ti16", weights, None)
    with np.load(out, allow_pickle=False) as file:
        images, expected = file["image"], {"cls": file["cls"], "logits": file["logits"]}
    x = (images.astype(np.float32) / 255 - np.asarray(loaded.mean, np.float32)) / np.asarray(
        loaded.std, np.float32
    )
    cls = np.asarray(jax.jit(lambda params, x: apply_vit(loaded.config, params, x).cls)(loaded.params, x))
    found = {"cls": cls, "logits": cls @ np.asarray(loaded.head["kernel"]) + np.asarray(loaded.head["bias"])}
    worst = {
        name: np.abs(found[name] - value).max() / np.abs(value).max() for name, value in expected.items()
    }
    same = (found["logits"].argmax(1) == expected["logits"].argmax(1)).sum()
    print(
        ", ".join(f"{name}: {value:.1e}" for name, value in worst.items())
        + f"; {same} of {len(images)} likeliest classes agree"
    )
    if not max(worst.values()) < TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    steps = {"reference": reference, "compare": compare}
    if len(sys.argv) < 4 or sys.argv[1] not in steps:
        sys.exit(__doc__)
    steps[sys.argv[1]](*sys.argv[2:])
