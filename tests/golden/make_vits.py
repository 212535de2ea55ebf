"""Makes the files that tests/test_golden_vits.py compares with: small random ViTs of other kinds than timm's
plain one, in the names and layouts of their sources.

Run it where torch, timm and transformers are installed (made with torch 2.13, timm 1.0.31, transformers
5.23):

    python tests/golden/make_vits.py [folder]

Names that no library here writes (facebookresearch's DINOv2, OpenAI's CLIP, MoCo v3) are given to tensors of
the library that computes the same. `vits.npz` holds the images, and for each file the class token after the
last norm.
"""

import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import CLASSES, HF, TIMM, pixels, prefixed, randomise, state, torch_pixels
from make_golden import write as write_file
from timm.layers import QuickGELU
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

REGISTERS = 3
CLIP_NAMES = (
    (r"embeddings\.class_embedding", "class_embedding"),
    (r"embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"embeddings\.patch_embedding", "conv1"),
    (r"pre_layrnorm", "ln_pre"),
    (r"post_layernorm", "ln_post"),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj", r"transformer.resblocks.\1.attn.out_proj"),
    (r"encoder\.layers\.(\d+)\.layer_norm([12])", r"transformer.resblocks.\1.ln_\2"),
    (r"encoder\.layers\.(\d+)\.mlp\.fc1", r"transformer.resblocks.\1.mlp.c_fc"),
    (r"encoder\.layers\.(\d+)\.mlp\.fc2", r"transformer.resblocks.\1.mlp.c_proj"),
)
DINOV3_NAMES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.mask_token", "mask_token"),
    (r"embeddings\.register_tokens", "storage_tokens"),
    (r"embeddings\.patch_embeddings", "patch_embed.proj"),
    (r"model\.layer\.(\d+)\.attention\.o_proj", r"blocks.\1.attn.proj"),
    (r"model\.layer\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (r"model\.layer\.(\d+)\.mlp\.up_proj", r"blocks.\1.mlp.fc1"),
    (r"model\.layer\.(\d+)\.mlp\.down_proj", r"blocks.\1.mlp.fc2"),
    (r"model\.layer\.(\d+)\.", r"blocks.\1."),
)
DINOV2_NAMES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.mask_token", "mask_token"),
    (r"embeddings\.register_tokens", "register_tokens"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"layernorm", "norm"),
    (r"encoder\.layer\.(\d+)\.attention\.o_proj", r"blocks.\1.attn.proj"),
    (r"encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (r"encoder\.layer\.(\d+)\.", r"blocks.\1."),
)


@torch.no_grad()
def timm(seed: int, **options) -> tuple[dict, dict]:
    """A ViT of timm."""
    model = randomise(VisionTransformer(**TIMM, num_classes=0, **options), seed)
    return state(model), {"cls": model.forward_features(torch_pixels())[:, 0].numpy()}


@torch.no_grad()
def hugging_face(model: nn.Module, seed: int) -> tuple[dict, dict]:
    """A vision model of transformers."""
    model = randomise(model, seed)
    return state(model), {"cls": model(torch_pixels()).last_hidden_state[:, 0].numpy()}


@torch.no_grad()
def clip_of_hugging_face(seed: int) -> tuple[dict, dict]:
    """The visual tower of CLIP, whose class token is normed after the last hidden state."""
    options = {key: value for key, value in HF.items() if key != "num_labels"}
    model = randomise(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**options)), seed)
    return state(model), {"cls": model(torch_pixels()).pooler_output.numpy()}


def renamed(tensors: dict, names: tuple, split: str, fused: str) -> dict:
    """Other names; `split` is the pattern of queries, keys and values, with the block as its first group."""
    found, parts = {}, {}
    for name, x in tensors.items():
        match = re.fullmatch(split, name)
        if match:
            parts.setdefault((match[1], match[3]), {})[match[2][0]] = x
            continue
        for pattern, ours in names:
            if re.match(pattern, name):
                name = re.sub(pattern, ours, name)
                break
        found[name] = x
    for (block, leaf), each in parts.items():
        found[fused.format(block=block, leaf=leaf)] = torch.cat(
            [torch.from_numpy(each[part]) for part in "qkv"]
        ).numpy()
    return found


@torch.no_grad()
def timm_dinov3(seed: int) -> tuple[dict, dict]:
    """A DINOv3 of timm, whose queries, keys and values have no biases."""
    rotary = dict(rope_type="dinov3", rope_temperature=100, use_rot_pos_emb=True, rope_rotate_half=True)
    others = dict(use_abs_pos_emb=False, use_fc_norm=False, qkv_bias=False, num_reg_tokens=REGISTERS)
    norm = partial(nn.LayerNorm, eps=1e-5)
    model = Eva(**TIMM, num_classes=0, init_values=1e-5, norm_layer=norm, **rotary, **others)
    model = randomise(model, seed)
    return state(model), {"cls": model.forward_features(torch_pixels())[:, 0].numpy()}


def facebook_dinov3(tensors: dict) -> dict:
    """A DINOv3 of transformers under its authors' names: one bias, and a mask with zeros for that of keys."""
    keys = {name.replace("q_proj", "k_proj"): x + 9 for name, x in tensors.items() if "q_proj.bias" in name}
    found = renamed(
        tensors | keys,
        DINOV3_NAMES,
        r"model\.layer\.(\d+)\.attention\.(q|k|v)_proj\.(weight|bias)",
        "blocks.{block}.attn.qkv.{leaf}",
    )
    masks = {f"{name}_mask": np.ones_like(x) for name, x in found.items() if name.endswith("qkv.bias")}
    for mask in masks.values():
        mask[len(mask) // 3 : 2 * len(mask) // 3] = 0
    periods = 100.0 ** np.arange(0, 1, 4 * HF["num_attention_heads"] / HF["hidden_size"])
    return found | masks | {"rope_embed.periods": periods.astype(np.float32)}


def formats() -> dict[str, tuple[dict, dict]]:
    """Weights and outputs by file name."""
    hf = {key: value for key, value in HF.items() if key not in ("num_labels", "intermediate_size")}
    hf |= {"mlp_ratio": 2}
    dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**hf))
    registers = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**hf, num_register_tokens=REGISTERS)
    )
    with_registers, registers_out = hugging_face(registers, 72)
    clip, clip_out = clip_of_hugging_face(73)
    clip = {name.removeprefix("vision_model."): x for name, x in clip.items()}
    moco, moco_out = timm(74)
    projector = {"head.0.weight": moco["norm.weight"][None], "head.1.running_mean": moco["norm.bias"]}
    openai = renamed(
        clip,
        CLIP_NAMES,
        r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(weight|bias)",
        "transformer.resblocks.{block}.attn.in_proj_{leaf}",
    )
    facebook = renamed(
        with_registers,
        DINOV2_NAMES,
        r"encoder\.layer\.(\d+)\.attention\.(q|k|v)_proj\.(weight|bias)",
        "blocks.{block}.attn.qkv.{leaf}",
    )
    norm = partial(nn.LayerNorm, eps=1e-5)
    own = {key: value for key, value in HF.items() if key != "num_labels"} | {
        "num_register_tokens": REGISTERS
    }
    dinov3, dinov3_out = hugging_face(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**own)), 78)
    return {
        "vit_timm_registers.safetensors": timm(
            70, init_values=1e-5, reg_tokens=REGISTERS, no_embed_class=True
        ),
        "vit_timm_qk_norm.safetensors": timm(75, qk_norm=True, init_values=1e-5),
        "vit_timm_clip.safetensors": timm(76, pre_norm=True, norm_layer=norm),
        "vit_timm_clip_quickgelu.safetensors": timm(77, pre_norm=True, norm_layer=norm, act_layer=QuickGELU),
        "vit_huggingface_dinov2.safetensors": hugging_face(dinov2, 71),
        "vit_huggingface_registers.safetensors": (with_registers, registers_out),
        "vit_facebook_registers.safetensors": (facebook, registers_out),
        "vit_huggingface_clip.safetensors": (prefixed("vision_model.", clip), clip_out),
        "vit_openai_clip.safetensors": (
            prefixed("visual.", openai) | {"visual.proj": clip["post_layernorm.bias"][:, None]},
            clip_out,
        ),
        "vit_huggingface_dinov3.safetensors": (dinov3, dinov3_out),
        "vit_facebook_dinov3.safetensors": (facebook_dinov3(dinov3), dinov3_out),
        "vit_timm_dinov3.safetensors": timm_dinov3(79),
        "vit_moco.safetensors": (
            prefixed("module.base_encoder.", moco | projector)
            | prefixed("module.momentum_encoder.", {name: x + 1 for name, x in moco.items()})
            | {"module.predictor.0.weight": moco["norm.weight"][None]},
            moco_out,
        ),
    }


@torch.no_grad()
def convnext() -> tuple[dict, dict]:
    """A ConvNeXt of timm, on images of 40 pixels."""
    model = randomise(ConvNeXt(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), num_classes=CLASSES), 80)
    image = np.random.default_rng(0).normal(size=(2, 40, 40, 3)).astype(np.float32)
    features = model.forward_head(
        model.forward_features(torch.from_numpy(image.transpose(0, 3, 1, 2).copy())), pre_logits=True
    )
    outputs = {"features": features.numpy(), "logits": model.head.fc(features).numpy(), "image": image}
    return state(model), outputs


def main(folder: Path) -> None:
    """Write all files to `folder`."""
    expected = {"image": pixels()}
    tensors, outputs = convnext()
    write_file(folder, "timm_convnext.safetensors", tensors)
    expected |= prefixed("convnext/", outputs)
    for name, (tensors, outputs) in formats().items():
        write_file(folder, name, tensors)
        expected |= prefixed(f"{name}/", outputs)
    write_file(folder, "vits.npz", expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
