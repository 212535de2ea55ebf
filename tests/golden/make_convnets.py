"""Makes the files of convolutional networks that tests/test_convnets.py compares with, with torchvision.

Run it where torch and torchvision are installed (made with torch 2.15, torchvision 0.29):

    python tests/golden/make_convnets.py [folder]

torchvision_NAME.safetensors are state dictionaries of narrow networks, built of torchvision's own blocks and
played by its own forward; their running statistics are those of a few batches in training. `convnets.npz`
holds the images and the features and logits of each in evaluation.
"""

import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

SIDE, CHANNELS, CLASSES = 40, 4, 7


class Narrow(ResNet):
    """torchvision's ResNet with fewer channels; `cifar` has the first layers of small images."""

    def __init__(self, layers: list[int], cifar: bool, block: type[nn.Module] = BasicBlock):
        super().__init__(block, layers)
        self.inplanes = CHANNELS
        size, stride = (3, 1) if cifar else (7, 2)
        self.conv1 = nn.Conv2d(3, CHANNELS, size, stride, size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS)
        for i, blocks in enumerate(layers):
            stage = self._make_layer(block, CHANNELS * 2**i, blocks, stride=2 if i else 1)
            setattr(self, f"layer{i + 1}", stage)
        self.fc = nn.Linear(CHANNELS * 8 * block.expansion, CLASSES)
        if cifar:
            self.maxpool = nn.Identity()


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "resnet": Narrow([1, 2, 1, 1], cifar=False),
        "resnet_cifar": Narrow([1, 1, 1, 1], cifar=True),
        "densenet": DenseNet(4, (2, 1, 2), 8, num_classes=CLASSES),
        "resnet_bottleneck": Narrow([1, 2, 1, 1], False, Bottleneck),
    }


def settle(network: nn.Module) -> None:
    """Statistics and affine parameters that are not those of the start."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
        network.train()
        for _ in range(5):
            network(torch.randn(8, 3, SIDE, SIDE))
        network.eval()


def features(network: nn.Module, image: torch.Tensor) -> torch.Tensor:
    """What the classifier reads."""
    seen = []
    head = network.classifier if isinstance(network, DenseNet) else network.fc
    head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        network(image)
    return seen[0]


def main(folder: Path) -> None:
    image = np.random.default_rng(0).normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    pixels, expected = torch.from_numpy(image.transpose(0, 3, 1, 2)), {"image": image}
    for name, network in networks().items():
        settle(network)
        expected[f"{name}.features"] = features(network, pixels).numpy()
        expected[f"{name}.logits"] = network(pixels).detach().numpy()
        safetensors.torch.save_file(network.state_dict(), folder / f"torchvision_{name}.safetensors")
    np.savez(folder / "convnets.npz", **expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
