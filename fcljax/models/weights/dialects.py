"""Files whose networks are a ViT under other names than timm's: DINOv2, DINOv3, CLIP's visual tower, MoCo v3.

Each dialect renames a file's tensors to timm's names, so that `naming` reads them all: scales of layers are
`ls1` and `ls2`, registers `reg_token`, the norm before the blocks `norm_pre`. Sources: facebookresearch's
dinov2, dinov3 and moco-v3, openai's CLIP (open_clip has the same names), timm's Eva, and transformers.
"""

import re
from typing import Literal, NamedTuple

import numpy as np

from fcljax.errors import InputError

Activation = Literal["gelu", "quick_gelu"]
Tensors = dict[str, np.ndarray]
Names = tuple[tuple[str, str], ...]


class Dialect(NamedTuple):
    """Another way to name a ViT."""

    name: str
    anchor: str
    """A pattern of the name that tells it, whose group is the prefix of the network's names."""
    names: Names
    """Patterns of names -> timm's, of which the first that matches counts."""
    pixels: str
    """The pixel range that its authors trained with, of `pixels.NORMALISE`."""
    activation: Activation = "gelu"
    rotary: bool = False
    """Whether queries and keys are rotated by the places of their patches; a file does not tell it."""


_HF_ATTENTION = (
    (r"(.*)attention\.attention\.(query|key|value)\.", r"\1attn.\2."),
    (r"(.*)attention\.output\.dense\.", r"\1attn.proj."),
    (r"(.*)attention\.(q|k|v)_proj\.", r"\1attn.\2."),  # what transformers 5 writes
    (r"(.*)attention\.o_proj\.", r"\1attn.proj."),
)
_PARTS = (
    (r"(.*ls[12])\.gamma$", r"\1.weight"),
    (r"(.*)layer_scale([12])\.lambda1$", r"\1ls\2.weight"),
    (r"(.*)gamma_([12])$", r"\1ls\2.weight"),
    (r"(.*)mlp\.up_proj\.", r"\1mlp.fc1."),
    (r"(.*)mlp\.down_proj\.", r"\1mlp.fc2."),
)
_CLIP_HF = (
    (r"embeddings\.class_embedding$", "cls_token"),
    (r"embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"pre_layrnorm\.", "norm_pre."),
    (r"post_layernorm\.", "norm."),
    (r"encoder\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.", r"blocks.\1.attn.\2."),
    (r"encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"encoder\.layers\.(\d+)\.layer_norm([12])\.", r"blocks.\1.norm\2."),
    (r"encoder\.layers\.(\d+)\.mlp\.", r"blocks.\1.mlp."),
)
_CLIP = (
    (r"class_embedding$", "cls_token"),
    (r"positional_embedding$", "pos_embed"),
    (r"conv1\.", "patch_embed.proj."),
    (r"ln_pre\.", "norm_pre."),
    (r"ln_post\.", "norm."),
    (r"transformer\.resblocks\.(\d+)\.attn\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"transformer\.resblocks\.(\d+)\.attn\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"transformer\.resblocks\.(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.", r"blocks.\1.mlp.fc1."),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.", r"blocks.\1.mlp.fc2."),
)
_DINOV2_HF = (
    (r"embeddings\.cls_token$", "cls_token"),
    (r"embeddings\.register_tokens$", "reg_token"),
    (r"embeddings\.position_embeddings$", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"layernorm\.", "norm."),
    (r"encoder\.layer\.(\d+)\.", r"blocks.\1."),
)
_DINOV3_HF = (
    (r"embeddings\.cls_token$", "cls_token"),
    (r"embeddings\.register_tokens$", "reg_token"),
    (r"embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"(model\.)?layer\.(\d+)\.", r"blocks.\2."),
)
DIALECTS = (
    Dialect(
        "DINOv3 of transformers",
        r"(.*)embeddings\.patch_embeddings\.weight$",
        _DINOV3_HF,
        "imagenet",
        rotary=True,
    ),
    Dialect("DINOv3", r"(.*)storage_tokens$", ((r"storage_tokens$", "reg_token"),), "imagenet", rotary=True),
    Dialect("DINOv3 of timm", r"(.*)blocks\.0\.gamma_1$", (), "imagenet", rotary=True),
    Dialect("CLIP of transformers", r"(.*)pre_layrnorm\.weight$", _CLIP_HF, "clip", "quick_gelu"),
    Dialect("CLIP", r"(.*)ln_pre\.weight$", _CLIP, "clip", "quick_gelu"),
    Dialect(
        "DINOv2 of transformers", r"(.*)encoder\.layer\.0\.layer_scale1\.lambda1$", _DINOV2_HF, "imagenet"
    ),
    Dialect("DINOv2", r"(.*)blocks\.0\.ls1\.gamma$", ((r"register_tokens$", "reg_token"),), "imagenet"),
    Dialect("MoCo v3", r"(.*)base_encoder\.blocks\.0\.norm1\.weight$", (), "imagenet"),
)
# content beside the network in these files, by the names without its prefix
_BESIDE = re.compile(
    r"(embeddings\.)?mask_token|(.*\.)?position_ids|proj|head\.\d.*|rope_embed(dings)?\.(periods|inv_freq)"
)
DINOV3_GRID = 16  # patches per side of its authors' images; computed positions have no size of their own


class Translated(NamedTuple):
    """A file under timm's names."""

    tensors: Tensors
    pixels: str | None = None
    """The pixel range of its kind; None: `naming` decides."""
    activation: Activation | None = None
    rotary: bool = False
    notes: tuple[str, ...] = ()


def translate(tensors: Tensors) -> Translated:
    """The tensors of a file under timm's names, if they are in one of the dialects; else as they are.

    Raises:
      InputError: for networks with rotary positions of another kind than DINOv3's, or with gated MLPs, which
        are not supported.
    """
    _refuse(tensors)
    for dialect in DIALECTS:
        found = next((m for name in tensors if (m := re.match(dialect.anchor, name))), None)
        if found:
            return _translated(tensors, dialect, found[1])
    return Translated(_completed(tensors))


def _refuse(tensors: Tensors) -> None:
    other = (
        (r"(.*\.)?rope\.", "rotary positions other than DINOv3's (EVA-02)"),
        (
            r"(.*\.)?mlp\.(w[123]|w12|weights_in|gate_proj|fc1_g)\.",
            "gated MLPs (DINOv2 giant, DINOv3 S+ and H+, EVA-02)",
        ),
    )
    for pattern, what in other:
        name = next((name for name in tensors if re.match(pattern, name)), None)
        if name is not None:
            raise InputError(f"checkpoint: {name} is of a network with {what}, which is not supported here")


def _translated(tensors: Tensors, dialect: Dialect, prefix: str) -> Translated:
    base = f"{prefix}base_encoder." if dialect.name == "MoCo v3" else prefix
    own = {name.removeprefix(base): x for name, x in tensors.items() if name.startswith(base)}
    kept = {_renamed(name, dialect.names): x for name, x in own.items() if not _BESIDE.fullmatch(name)}
    if dialect.name == "CLIP":  # the text's tower may lie under the same, empty prefix
        kept = {name: x for name, x in kept.items() if re.match(r"cls|pos|reg|patch|norm|blocks", name)}
    left_out = len(tensors) - len(kept)
    notes = (f"{left_out} tensors beside the network were left out",) if left_out else ()
    if dialect.activation == "quick_gelu":
        width = kept["cls_token"].size
        kept = {**kept, "cls_token": kept["cls_token"].reshape(1, 1, -1)}
        kept["pos_embed"] = kept["pos_embed"].reshape(1, -1, width)
    if dialect.rotary:
        kept = _without_rotary_traces(kept)
    tensors = _completed(_joined(kept))
    return Translated(tensors, dialect.pixels, dialect.activation, dialect.rotary, notes)


def _without_rotary_traces(tensors: Tensors) -> Tensors:
    """DINOv3's tensors with zeros for what it lacks: learned positions, and biases of keys or of all three.

    Raises:
      InputError: for a network with learned positions, which is none of DINOv3's.
    """
    if "pos_embed" in tensors:
        raise InputError("checkpoint: it has both DINOv3's names and pos_embed, which DINOv3 does not have")
    found = dict(tensors)
    for name, x in tensors.items():
        if name.endswith("attn.qkv.bias_mask"):  # its zeros are the biases of keys
            bias = found.get(name.removesuffix("_mask"))
            if bias is not None and bias.shape == x.shape:
                found[name.removesuffix("_mask")] = bias * found.pop(name)
        if name.endswith(("attn.qkv.weight", "attn.k.weight")):
            bias = f"{name.removesuffix('weight')}bias"
            found.setdefault(bias, np.zeros(x.shape[:1], np.float32))
    if "cls_token" in found:
        found["pos_embed"] = np.zeros((1, 1 + DINOV3_GRID**2, found["cls_token"].size), np.float32)
    return found


def _renamed(name: str, names: Names) -> str:
    for patterns in (names, _HF_ATTENTION, _PARTS):
        for pattern, ours in patterns:
            if re.match(pattern, name):
                name = re.sub(f"^{pattern}", ours, name)
                break
    return name


def _joined(tensors: Tensors) -> Tensors:
    """Queries, keys and values as one tensor, and scales by the names of weights."""
    joined = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(.*attn\.)(query|q)\.(weight|bias)", name)
        if not match:
            continue
        before, query, leaf = match.groups()
        parts = ("query", "key", "value") if query == "query" else ("q", "k", "v")
        each = [joined.pop(f"{before}{part}.{leaf}", None) for part in parts]
        if any(x is None for x in each):
            raise InputError(f"checkpoint: {name} is there, but not the keys and values that go with it")
        joined[f"{before}qkv.{leaf}"] = np.concatenate([np.asarray(x) for x in each])
    return joined


def _completed(tensors: Tensors) -> Tensors:
    """Under timm's names, with zeros for what such networks may lack: the class token's position beside
    registers, and the bias of the patch embedding before a norm (CLIP)."""
    more: Tensors = {}
    position = tensors.get("pos_embed")
    patches = 0 if position is None or position.ndim != 3 else position.shape[1]
    if position is not None and "reg_token" in tensors and patches and patches == round(patches**0.5) ** 2:
        more["pos_embed"] = np.pad(position, ((0, 0), (1, 0), (0, 0)))
    kernel = tensors.get("patch_embed.proj.weight")
    if "norm_pre.weight" in tensors and kernel is not None and "patch_embed.proj.bias" not in tensors:
        more["patch_embed.proj.bias"] = np.zeros(len(kernel), np.float32)
    return tensors | more
