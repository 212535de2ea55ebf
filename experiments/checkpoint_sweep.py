"""Checkpoints of other libraries, each written by its library or as trainings wrap them, read back here: the
features must be the source library's, or the file must be refused in one line.

It needs the libraries themselves (`make test-extras` makes their environment, .venv/weights). Nothing is
downloaded, for all weights are random:

    .venv/weights/bin/python experiments/checkpoint_sweep.py [--out checkpoints.json]

Outcomes: right (relative error of the features below 1e-3; of 16-bit files 2e-2, of bfloat16 1e-1), refused,
assumed (another activation, which a note says is assumed because the file does not tell it) and wrong. Exit
code 1 for any that is wrong, or that raises anything but InputError.
"""

import argparse
import collections
import dataclasses
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from flax import serialization, traverse_util
from timm.models.eva import Eva
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from fcljax.errors import InputError
from fcljax.models.networks import make_network
from fcljax.models.weights.pretrained import (
    Pretrained,
    WeightOptions,
    load_backbone,
    load_text_encoder,
)

SIDE = 32
PATCH = 8
WIDTH = 64
DEPTH = 2
CLASSES = 5
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A file to read."""

    name: str
    """The library or training that wrote it, and what is particular in it."""
    write: Callable[[Path], Path]
    """Writes the file, and what belongs beside it, into a folder; its path."""
    features: Callable[[torch.Tensor], torch.Tensor]
    """What the source computes of images [N, 3, SIDE, SIDE], or of the ids of texts [N, LENGTH]."""
    tolerance: float = 1e-3
    options: WeightOptions = WeightOptions()
    text: bool = False
    """Whether it reads texts."""


# ---- networks and what they compute ------------------------------------------------------------------------


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights and statistics under which images, tokens, heads and activations are told well apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        learned = dict(model.named_parameters())
        for name, x in sorted([*learned.items(), *model.named_buffers()]):
            if not x.is_floating_point():
                continue
            noise = torch.randn(x.shape, generator=generator)
            if name.endswith("running_var"):
                x.copy_(noise.abs() + 0.5)
            elif x.ndim == 1 and name.endswith("weight"):
                x.copy_(1 + 0.3 * noise)
            elif name in learned or "running" in name:
                x.copy_(noise * (1.2 / x[0].numel() ** 0.5 if x.ndim in (2, 4) else 0.3))
    return model.eval()


def class_token(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """timm's ViTs: the class token after the last norm."""
    return lambda image: model.forward_features(image)[:, 0]


def pooled(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """timm's convolutional networks: what the classifier reads."""
    return lambda image: model.forward_head(model.forward_features(image), pre_logits=True)


def read_by(model: nn.Module, head: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """torchvision's networks: what the module `head` reads."""

    def features(image: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = model.get_submodule(head).register_forward_hook(lambda m, inputs, out: seen.append(inputs[0]))
        model(image)
        hook.remove()
        return seen[0]

    return features


SIZES = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 1}
vit = partial(VisionTransformer, **SIZES, num_classes=CLASSES)
ROTARY: dict[str, Any] = {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "use_fc_norm": False}
DINOV3 = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "num_reg_tokens": 4}
fine = partial(nn.LayerNorm, eps=1e-5)
eva = partial(Eva, **SIZES, num_classes=0, init_values=1.0, **ROTARY)

TIMM_VITS: dict[str, Callable[[], nn.Module]] = {
    "plain": vit,
    "headless": partial(vit, num_classes=0),
    "layer scale": partial(vit, init_values=1e-5),
    "DeiT III": partial(vit, init_values=1e-5, no_embed_class=True),
    "FlexiViT": partial(vit, no_embed_class=True),
    "registers": partial(vit, reg_tokens=4, no_embed_class=True),
    "registers with positions": partial(vit, reg_tokens=4),
    "DINOv2 with registers": partial(vit, reg_tokens=4, no_embed_class=True, init_values=1e-5),
    "qk norm": partial(vit, qk_norm=True),
    "no qkv bias": partial(vit, qkv_bias=False),
    "no qkv bias, layer scale": partial(vit, qkv_bias=False, init_values=1e-5),
    "no projection bias": partial(vit, proj_bias=False),
    "no final norm": partial(vit, final_norm=False),
    "width 192": partial(vit, embed_dim=192, num_heads=3),
    "width 384": partial(vit, embed_dim=384, num_heads=6, depth=1),
    "So400m (1152)": partial(vit, embed_dim=1152, num_heads=16, mlp_ratio=3.7362, depth=1),
    "huge (1280)": partial(vit, embed_dim=1280, num_heads=16, depth=1),
    "giant (1408)": partial(vit, embed_dim=1408, num_heads=16, mlp_ratio=48 / 11, depth=1),
    "gigantic (1664)": partial(vit, embed_dim=1664, num_heads=16, mlp_ratio=64 / 13, depth=1),
    "distilled": partial(timm.create_model, "deit_tiny_distilled_patch16_224", img_size=SIDE, depth=1),
    "mean of patches": partial(vit, global_pool="avg"),
    "no class token": partial(vit, class_token=False, global_pool="avg"),
    "attention pool": partial(vit, global_pool="map", class_token=True),
    "gated MLP": partial(vit, mlp_layer=timm.layers.SwiGLUPacked),
    "parallel blocks": partial(vit, block_fn=timm.models.vision_transformer.ParallelThingsBlock),
    "post norm": partial(timm.create_model, "vit_base_patch16_rpn_224", img_size=SIDE, depth=1),
    "parallel scaling": partial(vit, block_fn=timm.models.vision_transformer.ParallelScalingBlock),
    "RMS norm": partial(vit, norm_layer=timm.layers.RmsNorm),
    "grey": partial(vit, in_chans=1),
    "DINOv3": partial(eva, **DINOV3, qkv_bias=False, norm_layer=fine),
    "DINOv3 qkvb": partial(eva, **DINOV3, norm_layer=fine),
    "RoPE-ViT": partial(eva, attn_type="rope"),
    "RoPE-ViT with registers": partial(eva, attn_type="rope", num_reg_tokens=4),
    "RoPE-ViT, mixed": partial(eva, attn_type="rope", rope_type="mixed"),
    "EVA": partial(Eva, **SIZES, num_classes=0, use_fc_norm=False),
    "EVA, scaled": partial(Eva, **SIZES, num_classes=0, use_fc_norm=False, init_values=1.0),
    "BEiT": partial(timm.models.beit.Beit, **SIZES, num_classes=0, use_abs_pos_emb=True, init_values=0.1),
    "BEiT, relative": partial(timm.models.beit.Beit, **SIZES, num_classes=0, use_rel_pos_bias=True),
}
CLIP_TOWERS = {
    "vit_base_patch32_clip_224": partial(vit, pre_norm=True, norm_layer=fine),
    "vit_base_patch32_clip_quickgelu_224": partial(
        vit, pre_norm=True, norm_layer=fine, act_layer=timm.layers.QuickGELU
    ),
}
resnet = partial(ResNet, block=BasicBlock, layers=(1, 1, 1, 1), num_classes=CLASSES)
TIMM_CONVNETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: timm.create_model("resnet18", num_classes=CLASSES),
    "resnet50": lambda: timm.create_model("resnet50", layers=(1, 1, 1, 1), num_classes=CLASSES),
    "resnet26d": lambda: timm.create_model("resnet26d", layers=(1, 1, 1, 1)),
    "resnet50_gn": lambda: timm.create_model("resnet50_gn", layers=(1, 1, 1, 1)),
    "resnetblur50": lambda: timm.create_model("resnetblur50", layers=(1, 1, 1, 1)),
    "resnetaa50": lambda: timm.create_model("resnetaa50", layers=(1, 1, 1, 1)),
    "seresnet50": lambda: timm.create_model("seresnet50", layers=(1, 1, 1, 1)),
    "ecaresnet26t": lambda: timm.create_model("ecaresnet26t", layers=(1, 1, 1, 1)),
    "wide_resnet50_2": lambda: timm.create_model("wide_resnet50_2", layers=(1, 1, 1, 1)),
    "resnext50_32x4d": lambda: timm.create_model("resnext50_32x4d", layers=(1, 1, 1, 1)),
    "densenet121": lambda: timm.create_model("densenet121", block_config=(2, 2, 2, 2), num_classes=CLASSES),
    "densenetblur121d": lambda: timm.create_model("densenetblur121d", block_config=(2, 2, 2, 2)),
    "convnext_tiny": lambda: timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), num_classes=CLASSES),
    "convnext_atto": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1)),
    "convnextv2_atto": lambda: timm.create_model("convnextv2_atto", depths=(1, 1, 1, 1)),
    "convnext_tiny_hnf": lambda: timm.create_model("convnext_tiny_hnf", depths=(1, 1, 1, 1)),
    "test_resnet": lambda: timm.create_model("test_resnet"),
    "test_convnext": lambda: timm.create_model("test_convnext"),
    "test_vit": lambda: timm.create_model("test_vit", img_size=SIDE),
}


# ---- files -------------------------------------------------------------------------------------------------


def state(model: nn.Module) -> Tensors:
    return {name: x.detach().clone().contiguous() for name, x in model.state_dict().items()}


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}{name}": x for name, x in tensors.items()}


def as_safetensors(
    tensors: Tensors, name: str = "weights.safetensors", **beside: object
) -> Callable[[Path], Path]:
    """Writes a safetensors file, and JSON files beside it."""

    def write(folder: Path) -> Path:
        safetensors.torch.save_file({key: x.clone() for key, x in tensors.items()}, folder / name)
        for key, value in beside.items():
            (folder / f"{key}.json").write_text(json.dumps(value))
        return folder / name

    return write


def as_torch(content: object, name: str = "weights.pth", **options: Any) -> Callable[[Path], Path]:
    """Writes a file by `torch.save`."""

    def write(folder: Path) -> Path:
        torch.save(content, folder / name, **options)
        return folder / name

    return write


def as_pretrained(model: Any, **options: Any) -> Callable[[Path], Path]:
    """Writes a folder by transformers' `save_pretrained`."""

    def write(folder: Path) -> Path:
        model.save_pretrained(folder, **options)
        return folder

    return write


def timm_config(name: str, model: Any) -> dict[str, object]:
    """config.json as timm's `save_for_hf` writes it, as far as it counts here."""
    pixels = {"mean": [0.5] * 3, "std": [0.5] * 3}
    return {"architecture": name, "num_features": model.num_features, "pretrained_cfg": pixels}


# ---- cases of each library ---------------------------------------------------------------------------------


def of_timm() -> Iterator[Case]:
    for name, make in TIMM_VITS.items():
        model = randomised(make())
        yield Case(f"timm ViT: {name}", as_safetensors(state(model)), class_token(model))
    for name, make in CLIP_TOWERS.items():
        model = randomised(make())
        config = timm_config(name, model)
        yield Case(f"timm {name}", as_safetensors(state(model), config=config), class_token(model))
        yield Case(f"timm {name}, no config.json", as_safetensors(state(model)), class_token(model))
    for name, make in TIMM_CONVNETS.items():
        model = randomised(make())
        features = class_token(model) if name == "test_vit" else pooled(model)
        yield Case(f"timm {name}", as_safetensors(state(model), config=timm_config(name, model)), features)


def of_torchvision() -> Iterator[Case]:
    models = torchvision.models
    tower = randomised(TorchvisionViT(SIDE, PATCH, DEPTH, 1, WIDTH, 3 * WIDTH, num_classes=CLASSES))
    yield Case("torchvision ViT", as_torch(state(tower)), read_by(tower, "heads"))
    for name in (
        "resnet18",
        "resnet50",
        "densenet121",
        "convnext_tiny",
        "resnext50_32x4d",
        "wide_resnet50_2",
    ):
        model = randomised(getattr(models, name)(num_classes=CLASSES))
        head = "classifier.2" if "convnext" in name else "classifier" if "dense" in name else "fc"
        yield Case(f"torchvision {name}", as_torch(state(model)), read_by(model, head))


HF = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 3 * WIDTH,
}
TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "ViT": lambda: transformers.ViTModel(transformers.ViTConfig(**HF)),
    "ViT for classes": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**HF)),
    "ViT, no qkv bias": lambda: transformers.ViTModel(transformers.ViTConfig(**HF, qkv_bias=False)),
    "ViT, gelu_new": lambda: transformers.ViTModel(transformers.ViTConfig(**HF, hidden_act="gelu_new")),
    "ViT, relu": lambda: transformers.ViTModel(transformers.ViTConfig(**HF, hidden_act="relu")),
    "ViT, epsilon 1e-5": lambda: transformers.ViTModel(transformers.ViTConfig(**HF, layer_norm_eps=1e-5)),
    "ViT-MSN": lambda: transformers.ViTMSNModel(transformers.ViTMSNConfig(**HF)),
    "DINOv2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**HF, mlp_ratio=3)),
    "DINOv2, no qkv bias": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**HF, mlp_ratio=3, qkv_bias=False)
    ),
    "DINOv2, gated": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**HF, mlp_ratio=3, use_swiglu_ffn=True)
    ),
    "DINOv2 with registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**HF, mlp_ratio=3)
    ),
    "DINOv3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**HF, num_register_tokens=4)),
    "DINOv3, gated": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**HF, num_register_tokens=4, use_gated_mlp=True)
    ),
    "CLIP's vision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**HF)),
    "CLIP's vision, gelu": lambda: transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**HF, hidden_act="gelu")
    ),
    "DeiT": lambda: transformers.DeiTModel(transformers.DeiTConfig(**HF)),
    "BEiT": lambda: transformers.BeitModel(transformers.BeitConfig(**HF)),
    "YOLOS": lambda: transformers.YolosModel(transformers.YolosConfig(**HF | {"image_size": [SIDE, SIDE]})),
    "SigLIP's vision": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**HF)),
    "Swin": lambda: transformers.SwinModel(
        transformers.SwinConfig(image_size=SIDE, embed_dim=24, depths=[1, 1])
    ),
    "ResNet": lambda: transformers.ResNetModel(
        transformers.ResNetConfig(hidden_sizes=[8, 16], depths=[1, 1])
    ),
    "ConvNeXt": lambda: transformers.ConvNextModel(transformers.ConvNextConfig(hidden_sizes=[8, 8, 8, 8])),
}


def of_transformers() -> Iterator[Case]:
    for name, make in TRANSFORMERS.items():
        model = randomised(make())
        yield Case(f"transformers {name}", as_pretrained(model), hidden(model))
    model = randomised(TRANSFORMERS["ViT"]())
    yield Case("transformers ViT, sharded", as_pretrained(model, max_shard_size="40KB"), hidden(model))
    tensors = state(model)
    config = model.config.to_dict()
    beside = as_safetensors(tensors, "vit.fp32.safetensors", config=config)
    yield Case("transformers ViT, config.json beside another name", beside, hidden(model))
    other = as_safetensors(tensors, config=config | {"hidden_size": 768, "num_attention_heads": 12})
    options = WeightOptions(heads=4)
    yield Case("transformers ViT, another's config.json", other, hidden(model), options=options)
    text = transformers.CLIPTextConfig(
        hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=99
    )
    both = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=HF)
    clip = randomised(transformers.CLIPModel(both))
    yield Case("transformers CLIP", as_pretrained(clip), hidden(clip.vision_model))
    mae = randomised(transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**HF, mask_ratio=0.0)))
    unshuffled = torch.arange((SIDE // PATCH) ** 2, dtype=torch.float32)[None]

    def encoded(image: torch.Tensor) -> torch.Tensor:
        return mae.vit(image, noise=unshuffled.expand(len(image), -1)).last_hidden_state[:, 0]

    yield Case("transformers ViTMAE with its decoder", as_pretrained(mae), encoded)


LENGTH = 12
PADDED = 7  # tokens of every second text, behind which there is padding
WORDS = 50
SMALL = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 96, "max_position_embeddings": 20}
CLIP_TEXT = transformers.CLIPTextConfig(**SMALL, eos_token_id=WORDS - 1)
DISTIL = {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}
TEXTS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "BERT with a head": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "BERT, gelu_new": lambda: transformers.BertModel(
        transformers.BertConfig(**SMALL, hidden_act="gelu_new", type_vocab_size=1)
    ),
    "BERT, relu": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, hidden_act="relu")),
    "RoBERTa": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SMALL)),
    "XLM-RoBERTa": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SMALL)),
    "CamemBERT": lambda: transformers.CamembertModel(transformers.CamembertConfig(**SMALL)),
    "DistilBERT": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
    "DistilBERT, sinusoidal": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(**DISTIL, sinusoidal_pos_embds=True)
    ),
    "CLIP's text": lambda: transformers.CLIPTextModel(CLIP_TEXT),
    "CLIP's text with a projection": lambda: transformers.CLIPTextModelWithProjection(CLIP_TEXT),
    "CLIP's text, gelu, end by the highest id": lambda: transformers.CLIPTextModel(
        transformers.CLIPTextConfig(**SMALL, eos_token_id=2, hidden_act="gelu")
    ),
    "CLIP, both towers": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(text_config=CLIP_TEXT.to_dict(), vision_config=HF)
    ),
    "ELECTRA": lambda: transformers.ElectraModel(transformers.ElectraConfig(**SMALL, embedding_size=WIDTH)),
    "MPNet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**SMALL)),
    "ALBERT": lambda: transformers.AlbertModel(transformers.AlbertConfig(**SMALL)),
    "T5": lambda: transformers.T5EncoderModel(transformers.T5Config(vocab_size=WORDS, d_model=WIDTH)),
}


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask: every text ends with CLIP's end token, and padding has RoBERTa's id."""
    ids = np.random.default_rng(0).integers(3, WORDS - 1, (6, LENGTH))
    ids[:, -1] = WORDS - 1
    ids[::2, PADDED - 1] = WORDS - 1
    ids[::2, PADDED:] = 1
    return ids, ids != 1


def of_texts() -> Iterator[Case]:
    """Text encoders of transformers, and of sentence-transformers with its two kinds of pooling."""
    for name, make in TEXTS.items():
        model = randomised(make())
        yield Case(f"transformers {name}", as_pretrained(model), first_token(model), text=True)
    model = randomised(TEXTS["BERT"]())
    for mode in ("mean_tokens", "cls_token", "max_tokens"):
        write = with_pooling(as_pretrained(model), {f"pooling_mode_{mode}": True})
        features = mean_token(model) if mode == "mean_tokens" else first_token(model)
        yield Case(f"sentence-transformers, {mode}", write, features, text=True)


def with_pooling(write: Callable[[Path], Path], pooling: dict[str, object]) -> Callable[[Path], Path]:
    """Writes sentence-transformers' file beside a network."""

    def write_both(folder: Path) -> Path:
        path = write(folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return path

    return write_both


def first_token(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The class token of BERT and its kin, or the end token of CLIP."""

    def features(ids: torch.Tensor) -> torch.Tensor:
        encoder = getattr(model, "text_model", getattr(model, "bert", model))
        output = encoder(ids, (ids != 1).long())
        if "CLIP" in type(model).__name__:
            return output.pooler_output
        return output.last_hidden_state[:, 0]

    return features


def mean_token(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mean over tokens that are no padding."""

    def features(ids: torch.Tensor) -> torch.Tensor:
        mask = (ids != 1)[..., None]
        return (model(ids, mask[..., 0].long()).last_hidden_state * mask).sum(1) / mask.sum(1)

    return features


def hidden(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The class token after the last norm; CLIP's norm comes after its last hidden state."""
    base = getattr(model, "vit", model)

    def features(image: torch.Tensor) -> torch.Tensor:
        out = base(image)
        name = type(base).__name__
        return out.pooler_output if name.startswith("CLIP") else out.last_hidden_state[:, 0]

    return features


def of_open_clip() -> Iterator[Case]:
    text = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 1, "layers": 1}
    vision = {"image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "layers": DEPTH}
    towers: dict[str, dict[str, Any]] = {
        "gelu": {"vision_cfg": vision},
        "quick_gelu": {"vision_cfg": vision, "quick_gelu": True},
        "head_width 16": {"vision_cfg": vision | {"head_width": 16}},
        "layer scale": {"vision_cfg": vision | {"ls_init_value": 0.1}},
        "no ln_pre": {"vision_cfg": vision | {"no_ln_pre": True}},
        "attentional pool": {"vision_cfg": vision | {"attentional_pool": True}},
        "ResNet": {"vision_cfg": vision | {"layers": [1, 1, 1, 1], "width": 16}},
    }
    for name, config in towers.items():
        model = randomised(open_clip.CLIP(embed_dim=WIDTH, text_cfg=text, **config))
        beside = {"model_cfg": {"embed_dim": WIDTH, "text_cfg": text, **config}}
        write = as_safetensors(state(model), "open_clip_model.safetensors", open_clip_config=beside)
        yield Case(f"open_clip {name}", write, open_clip_token(model))
    model = randomised(open_clip.CLIP(embed_dim=WIDTH, text_cfg=text, **towers["quick_gelu"]))
    yield Case("OpenAI's CLIP, state dict alone", as_torch(state(model)), open_clip_token(model))
    model = randomised(open_clip.CLIP(embed_dim=WIDTH, text_cfg=text, **towers["gelu"]))
    yield Case("open_clip gelu, state dict alone", as_torch(state(model)), open_clip_token(model))
    trunk = randomised(CLIP_TOWERS["vit_base_patch32_clip_224"](num_classes=0))
    tensors = prefixed("visual.trunk.", state(trunk)) | {"visual.head.proj.weight": torch.ones(4, WIDTH)}
    tensors |= prefixed("text.", {"token_embedding.weight": torch.ones(9, 3), "ln_final.bias": torch.ones(3)})
    timm_tower = {"vision_cfg": {"timm_model_name": "vit_base_patch32_clip_224", "image_size": SIDE}}
    write = as_safetensors(tensors, open_clip_config={"model_cfg": timm_tower})
    yield Case("open_clip with a tower of timm", write, class_token(trunk))


def open_clip_token(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The class token of open_clip's tower after its last norm, before the projection."""

    def features(image: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = model.visual.ln_post.register_forward_hook(lambda module, inputs, out: seen.append(out))
        model.visual(image)
        hook.remove()
        return seen[0][:, 0] if seen[0].ndim == 3 else seen[0]

    return features


# ---- as trainings save them --------------------------------------------------------------------------------


class ShortcutResNet(nn.Module):
    """A ResNet as most code for CIFAR writes it: a 3 x 3 stem, `shortcut` and `linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(ShortcutBlock(16, 16, 1))
        self.layer2 = nn.Sequential(ShortcutBlock(16, 32, 2), ShortcutBlock(32, 32, 1))
        self.linear = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.layer2(self.layer1(x)).mean((2, 3))


class ShortcutBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


PREFIXES = (
    "module.",
    "model.",
    "state_dict.",
    "model.module.",
    "_orig_mod.",
    "net.",
    "network.encoder.",
    "image_encoder.",
    "visual.trunk.",
    "model_state_dict.backbone.",
    "module.encoder_q.",
)


def of_trainings() -> Iterator[Case]:
    networks = {"ViT": randomised(vit()), "ResNet": randomised(resnet())}
    others = {"ViT": randomised(vit(), 1), "ResNet": randomised(resnet(), 1)}
    for kind, model in networks.items():
        features = class_token(model) if kind == "ViT" else pooled(model)
        own = state(model)
        other = state(others[kind])
        for prefix in PREFIXES:
            head = {"classifier_of_all.weight": torch.ones(3, WIDTH)}
            yield Case(f"{kind} under {prefix}", as_torch(prefixed(prefix, own) | head), features)
        for first, second in (
            ("teacher.backbone.", "student.module.backbone."),
            ("state_dict.", "state_dict_ema."),
            ("model.", "model_ema."),
            ("module.encoder_q.", "module.encoder_k."),
            ("online_network.", "target_network."),
            ("a.", "b."),
        ):
            both = prefixed(second, other) | prefixed(first, own)
            yield Case(f"{kind} under {first} beside {second}", as_torch(both), features)
        training = {"epoch": 3, "arch": "some", "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}
        whole = training | {"state_dict": own, "state_dict_ema": other}
        yield Case(f"{kind}, timm's training", as_torch(whole, "model_best.pth.tar"), features)
        whole = training | {"state_dict": prefixed("model.", own), "loops": {}, "callbacks": {}}
        yield Case(f"{kind}, Lightning's .ckpt", as_torch(whole, "last.ckpt"), features)
        yield Case(f"{kind}, .th", as_torch({"net": own, "acc": 9.5}, "best.th"), features)
        yield Case(f"{kind}, no suffix", as_torch(own, "weights"), features)
        yield Case(f"{kind}, before torch 1.6", as_torch(own, _use_new_zipfile_serialization=False), features)
        yield Case(f"{kind}, whole model", as_torch(model), features)
        half = {name: x.half() if x.is_floating_point() else x for name, x in own.items()}
        yield Case(f"{kind}, float16", as_safetensors(half), features, 2e-2)
        short = {name: x.bfloat16() if x.is_floating_point() else x for name, x in own.items()}
        yield Case(f"{kind}, bfloat16", as_torch(short), features, 1e-1)
        yield Case(f"{kind}, npz", as_npz(own), features)
        for head in ("fc", "classifier", "linear", "head.0", "projector.2"):
            bare = {name: x for name, x in own.items() if not name.startswith(("fc.", "head."))}
            extra = {f"{head}.weight": torch.ones(3, 9)}
            yield Case(f"{kind} with {head}", as_torch(bare | extra), features)
    moco = randomised(vit(embed_dim=384, num_heads=12, depth=1))
    both = prefixed("module.base_encoder.", state(moco))
    both |= prefixed("module.momentum_encoder.", {name: x + 1 for name, x in state(moco).items()})
    yield Case("MoCo v3, ViT-S", as_torch({"state_dict": both}, "vit-s-300ep.pth.tar"), class_token(moco))
    shortcut = randomised(ShortcutResNet())
    tensors = prefixed("module.", state(shortcut))
    yield Case("ResNet with shortcut and linear", as_torch({"net": tensors, "acc": 90.0}), shortcut)
    bare = {name: x for name, x in tensors.items() if "shortcut" not in name}
    yield Case("ResNet with shortcuts without weights", as_torch(bare), shortcut)
    peft = prefixed("base_model.model.", state(networks["ViT"]))
    peft = {name.replace("attn.qkv.", "attn.qkv.base_layer."): x for name, x in peft.items()}
    peft |= {
        f"base_model.model.blocks.{i}.attn.qkv.lora_A.default.weight": torch.ones(2, WIDTH) for i in (0, 1)
    }
    yield Case("peft's LoRA, not merged", as_torch(peft), class_token(networks["ViT"]))


def as_npz(tensors: Tensors) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "weights.npz", **{name: x.numpy() for name, x in tensors.items()})
        return folder / "weights.npz"

    return write


# ---- flax --------------------------------------------------------------------------------------------------


def of_flax() -> Iterator[Case]:
    """Files of flax with the names of Google's ViTs; their values are those of timm's ViT."""
    model = randomised(vit(num_classes=0))
    tree = google_names(model)
    flat: dict[str, Any] = traverse_util.flatten_dict({"params": tree}, sep="/")

    def msgpack(folder: Path) -> Path:
        (folder / "vit.msgpack").write_bytes(serialization.msgpack_serialize({"params": tree}))
        return folder / "vit.msgpack"

    def npz(folder: Path) -> Path:
        np.savez(folder / "vit.npz", **flat)
        return folder / "vit.npz"

    yield Case("Google's ViT as msgpack", msgpack, class_token(model))
    yield Case("Google's ViT under params/", npz, class_token(model))


def google_names(model: Any) -> dict[str, Any]:
    """The parameters of timm's ViT in Google's tree."""
    own = {name: x.numpy() for name, x in state(model).items()}
    width = WIDTH
    heads = 1

    def linear(name: str) -> dict[str, np.ndarray]:
        return {"kernel": own[f"{name}.weight"].T, "bias": own[f"{name}.bias"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": own[f"{name}.weight"], "bias": own[f"{name}.bias"]}

    transformer: dict[str, Any] = {"posembed_input": {"pos_embedding": own["pos_embed"]}}
    for i in range(DEPTH):
        block = f"blocks.{i}"
        qkv = linear(f"blocks.{i}.attn.qkv")
        parts = zip(
            ("query", "key", "value"),
            np.split(qkv["kernel"], 3, 1),
            np.split(qkv["bias"], 3),
            strict=True,
        )
        attention: dict[str, Any] = {
            part: {"kernel": w.reshape(width, heads, -1), "bias": b.reshape(heads, -1)}
            for part, w, b in parts
        }
        out = linear(f"{block}.attn.proj")
        attention["out"] = {"kernel": out["kernel"].reshape(heads, -1, width), "bias": out["bias"]}
        transformer[f"encoderblock_{i}"] = {
            "LayerNorm_0": norm(f"{block}.norm1"),
            "MultiHeadDotProductAttention_1": attention,
            "LayerNorm_2": norm(f"{block}.norm2"),
            "MlpBlock_3": {"Dense_0": linear(f"{block}.mlp.fc1"), "Dense_1": linear(f"{block}.mlp.fc2")},
        }
    transformer["encoder_norm"] = norm("norm")
    kernel = own["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    embedding = {"kernel": kernel, "bias": own["patch_embed.proj.bias"]}
    return {"cls": own["cls_token"], "embedding": embedding, "Transformer": transformer}


# ---- reading them ------------------------------------------------------------------------------------------


def ours(loaded: Pretrained, examples: Any) -> np.ndarray:
    network = make_network(loaded.config, loaded.mean, loaded.std)
    return np.asarray(network.apply(loaded.params, examples, None, False)[0].cls)


def outcome(case: Case) -> tuple[str, str]:
    """Right, refused, assumed or wrong, and what there is to say of it."""
    image = np.random.default_rng(0).normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    source = torch.from_numpy(image.transpose(0, 3, 1, 2).copy())
    examples: Any = image
    if case.text:
        ids, mask = texts()
        source = torch.from_numpy(ids)
        examples = {"ids": ids.astype(np.int32), "mask": mask}
    with tempfile.TemporaryDirectory() as folder:
        path = case.write(Path(folder))
        try:
            if case.text:
                loaded = load_text_encoder(str(path), "float32")
            else:
                loaded = load_backbone(None, str(path), SIDE, options=case.options)
        except InputError as error:
            return "refused", str(error)
        with torch.no_grad():
            wanted = case.features(source).float().numpy()
        found = ours(loaded, examples)
    error = np.inf
    if found.shape == wanted.shape:
        error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if error < case.tolerance:
        return "right", f"{error:.1e}"
    assumed = [note for note in loaded.notes if note.startswith("the activation")]
    return "assumed" if assumed else "wrong", f"{error:.1e}; {'; '.join(assumed or loaded.notes)}"


def main() -> int:
    """Read all; 1 if any is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file for all outcomes")
    parser.add_argument("--only", default="", help="only cases whose names have this pattern in them")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    counts: collections.Counter[str] = collections.Counter()
    outcomes = {}
    groups = (of_timm, of_torchvision, of_transformers, of_texts, of_open_clip, of_trainings, of_flax)
    for group in groups:
        for case in group():
            if not re.search(options.only, case.name):
                continue
            kind, text = outcome(case)
            counts[kind] += 1
            outcomes[case.name] = (kind, text)
            print(f"{kind:8} {case.name}: {text[:160]}", flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "assumed", "wrong")))
    if options.out:
        options.out.write_text(json.dumps(outcomes, indent=1) + "\n")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
