"""Makes the files that tests/test_weight_forms.py compares with: tiny random ViTs in forms that no other file
of this folder has.

Run it where torch, torchvision, timm, transformers and flax are installed (made with torch 2.14, torchvision
0.29, timm 1.0.31, transformers 5.24, flax 0.12), with a checkout of google-research's big_vision (made with
commit 0127fb6):

    python tests/golden/make_forms.py FOLDER_OF_BIG_VISION [folder]

and, for the file of flax, where transformers 4 still has its classes of flax (made with transformers 4.49):

    python tests/golden/make_forms.py flax [folder]

`vits.forms.npz` and `vits.flax.npz` hold for each file the class token after the last norm, of the images of
`vits.npz`.
"""

import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIDE, PATCH, WIDTH, DEPTH, HEADS, MLP, CLASSES = 16, 4, 16, 2, 2, 40, 7
SIZES = {
    "img_size": SIDE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": HEADS,
    "mlp_ratio": MLP / WIDTH,
}
HF = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
}
REGISTERS = 3


def pixels() -> np.ndarray:
    """The images of make_golden.py, in rows, columns, channels."""
    return np.random.default_rng(0).normal(size=(4, SIDE, SIDE, 3)).astype(np.float32)


def drawn(tree, seed: int):
    """A tree of arrays with values that tell tokens and heads apart."""
    import jax

    draw = np.random.default_rng(seed)

    def value(path, x):
        noise = draw.normal(size=x.shape)
        if getattr(path[-1], "key", "") == "scale":
            return (1 + 0.3 * noise).astype(np.float32)
        return ((1.5 / np.sqrt(WIDTH) if x.ndim > 1 else 0.3) * noise).astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, tree)


def of_timm(model, seed: int) -> tuple[dict, np.ndarray]:
    """The tensors and the class token of a network of timm."""
    import torch
    from make_golden import randomise, state, torch_pixels

    with torch.no_grad():
        model = randomise(model, seed)
        return state(model), model.forward_features(torch_pixels())[:, 0].numpy()


def of_torchvision(seed: int) -> tuple[dict, np.ndarray]:
    """torchvision's ViT; its head reads the class token."""
    import torch
    from make_golden import randomise, state, torch_pixels
    from torchvision.models.vision_transformer import VisionTransformer

    model = randomise(VisionTransformer(SIDE, PATCH, DEPTH, HEADS, WIDTH, MLP, num_classes=CLASSES), seed)
    seen = []
    model.heads.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        model(torch_pixels())
    return state(model), seen[0].numpy()


def of_transformers(seed: int) -> tuple[dict, np.ndarray]:
    """A ViT of transformers without biases of queries, keys and values."""
    import torch
    import transformers
    from make_golden import randomise, state, torch_pixels

    config = transformers.ViTConfig(**HF, qkv_bias=False)
    model = randomise(transformers.ViTModel(config, add_pooling_layer=False), seed)
    with torch.no_grad():
        return state(model), model(torch_pixels()).last_hidden_state[:, 0].numpy()


def of_big_vision(folder: Path, scan: bool, seed: int) -> tuple[dict, np.ndarray]:
    """big_vision's ViT with a class token, by its own code; its other modules are not needed for that."""
    import flax
    import jax

    sys.path.insert(0, str(folder))
    for name in ("big_vision.utils", "big_vision.models.common"):
        sys.modules.setdefault(name, types.ModuleType(name))
    from big_vision.models import vit

    sizes = {"width": WIDTH, "depth": DEPTH, "mlp_dim": MLP, "num_heads": HEADS, "scan": scan}
    model = vit.Model(CLASSES, patch_size=(PATCH, PATCH), pool_type="tok", **sizes)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), pixels()))
    variables = drawn(flax.core.unfreeze(shapes), seed)
    _, out = model.apply(variables, pixels())
    return flax.traverse_util.flatten_dict(variables, sep="/"), np.asarray(out["head_input"])


def torch_files(big_vision: Path) -> dict[str, tuple[dict, np.ndarray]]:
    """Weights and class tokens by file name."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

    vit = partial(VisionTransformer, **SIZES, num_classes=0)
    rotary = dict(rope_type="dinov3", rope_temperature=100, use_rot_pos_emb=True, rope_rotate_half=True)
    others = dict(use_abs_pos_emb=False, use_fc_norm=False, num_reg_tokens=REGISTERS, init_values=1e-5)
    dinov3 = Eva(**SIZES, num_classes=0, norm_layer=partial(nn.LayerNorm, eps=1e-5), **rotary, **others)
    return {
        "vit_deit3.safetensors": of_timm(vit(no_embed_class=True, init_values=1e-5), 90),
        "vit_register_positions.safetensors": of_timm(vit(reg_tokens=REGISTERS), 91),
        "vit_timm_no_bias.safetensors": of_timm(vit(qkv_bias=False), 92),
        "vit_timm_dinov3_qkvb.safetensors": of_timm(dinov3, 93),
        "vit_torchvision.safetensors": of_torchvision(94),
        "vit_huggingface_no_bias.safetensors": of_transformers(95),
        "vit_big_vision.npz": of_big_vision(big_vision, False, 96),
        "vit_big_vision_scan.npz": of_big_vision(big_vision, True, 97),
    }


def flax_files(folder: Path) -> dict[str, np.ndarray]:
    """Writes vit_flax.msgpack and vit_flax_clip.msgpack, as transformers 4 does; their class tokens."""
    import transformers
    from flax.serialization import to_bytes

    options = {"input_shape": (1, SIDE, SIDE, 3), "seed": 0}
    vit = transformers.FlaxViTModel(transformers.ViTConfig(**HF), **options)
    clip = transformers.FlaxCLIPVisionModel(transformers.CLIPVisionConfig(**HF), **options)
    image, found = pixels().transpose(0, 3, 1, 2), {}
    for seed, (name, model) in enumerate({"vit_flax": vit, "vit_flax_clip": clip}.items(), 98):
        model.params = drawn(model.params, seed)
        (folder / f"{name}.msgpack").write_bytes(to_bytes(model.params))
        out = model(image)
        cls = out.last_hidden_state[:, 0] if model is vit else out.pooler_output
        found[f"{name}.msgpack"] = np.asarray(cls)
    return found


def main(what: str, folder: Path) -> None:
    """Write all files to `folder`."""
    if what == "flax":
        arrays: dict[str, Any] = flax_files(folder)
        np.savez_compressed(folder / "vits.flax.npz", **arrays)
        return
    from make_golden import write

    found = torch_files(Path(what))
    for name, (tensors, _) in found.items():
        write(folder, name, tensors)
    features: dict[str, Any] = {name: cls for name, (_, cls) in found.items()}
    np.savez_compressed(folder / "vits.forms.npz", **features)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
