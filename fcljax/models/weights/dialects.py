"""Files whose networks are a ViT under other names than timm's: DINOv2, DINOv3, CLIP's visual tower, MoCo v3,
torchvision's ViT, and what flax writes.

Each dialect renames a file's tensors to timm's names (big_vision's to Google's), so that `naming` reads them
all: scales of layers are `ls1` and `ls2`, registers `reg_token`, the norm before the blocks `norm_pre`.
Sources: facebookresearch's dinov2, dinov3 and moco-v3, openai's CLIP (open_clip has the same names), timm's
Eva, transformers, torchvision and google-research's big_vision.
"""

import re
from typing import NamedTuple

import numpy as np

from fcljax.errors import InputError
from fcljax.models.shapes import Activation
from fcljax.models.weights.tensors import Tensors

Names = tuple[tuple[str, str], ...]


class Dialect(NamedTuple):
    """Another way to name a ViT."""

    names: Names = ()
    """Patterns of names -> timm's, of which the first that matches counts."""
    pixels: str | None = None
    """The pixel range that its authors trained with, of `pixels.NORMALISE`; None: nothing is known."""
    activation: Activation | None = None
    """The activation that its networks have where nothing else is said; None: nothing is known."""
    doubt: str = ""
    """What a note says of that activation, where others have the same tensors."""
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
_TORCHVISION = (
    (r"class_token$", "cls_token"),
    (r"conv_proj\.", "patch_embed.proj."),
    (r"encoder\.pos_embedding$", "pos_embed"),
    (r"encoder\.ln\.", "norm."),
    (r"heads\.head\.", "head."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
)
_BIG_VISION = (
    (r"pos_embedding$", "Transformer/posembed_input/pos_embedding"),
    (r"(Transformer/encoderblock_\d+/)LayerNorm_1/", r"\1LayerNorm_2/"),
    (r"(Transformer/encoderblock_\d+/)MultiHeadDotProductAttention_0/", r"\1MultiHeadDotProductAttention_1/"),
    (r"(Transformer/encoderblock_\d+/)MlpBlock_0/", r"\1MlpBlock_3/"),
)
_TANH = "as its authors' code computes it; timm takes the exact form"
_QUICK = "its config.json would tell; timm's quickgelu variants and OpenAI's own have the same tensors"
# by `finding.FAMILIES`
DIALECTS = {
    "DINOv3 of transformers": Dialect(_DINOV3_HF, "imagenet", rotary=True),
    "DINOv3": Dialect(((r"storage_tokens$", "reg_token"),), "imagenet", rotary=True),
    "DINOv3 of timm": Dialect((), "imagenet", rotary=True),
    "CLIP of transformers": Dialect(_CLIP_HF, "clip", "quick_gelu"),
    "CLIP": Dialect(_CLIP, "clip", "quick_gelu"),
    "CLIP of timm": Dialect((), "clip", "gelu", _QUICK),
    "DINOv2 of transformers": Dialect(_DINOV2_HF, "imagenet"),
    "DINOv2": Dialect(((r"register_tokens$", "reg_token"),), "imagenet"),
    "torchvision": Dialect(_TORCHVISION, "imagenet"),
    "big_vision": Dialect(_BIG_VISION, None, "gelu_tanh", _TANH),
    "timm": Dialect(),
    "transformers": Dialect(),
    "google": Dialect(),
    "fcljax": Dialect(),
}
MOCO_V3 = ("base_encoder", "momentum_encoder")  # before the names of its two networks
# content beside the network in these files
_BESIDE = re.compile(r"(embeddings\.)?mask_token|(.*\.)?position_ids|rope_embed(dings)?\.(periods|inv_freq)")
DINOV3_GRID = 16  # patches per side of its authors' images; computed positions have no size of their own


class Translated(NamedTuple):
    """A network under timm's names, or Google's."""

    tensors: Tensors
    dialect: Dialect
    beside: tuple[str, ...] = ()
    """Names of tensors that are left out."""


def from_flax(tensors: Tensors) -> Tensors:
    """A file of flax under torch's names and in its layouts, as transformers has both; Google's ViTs and
    big_vision's stay as they are, and so does what no flax has written."""
    nested = [name for name in tensors if name.endswith("/kernel")]
    if not nested or any(re.search(r"(^|/)embedding/kernel$", name) for name in nested):
        return tensors
    found: Tensors = {}
    for name, x in tensors.items():
        module, _, leaf = name.rpartition("/")
        if leaf == "kernel":
            x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T
        leaf = "weight" if leaf in ("kernel", "scale", "embedding") else leaf
        found[f"{module}/{leaf}".replace("/", ".")] = x
    return found


def translate(tensors: Tensors, family: str = "timm") -> Translated:
    """The tensors of a network under timm's names; Google's names for big_vision's.

    Args:
      tensors: by name, without a prefix.
      family: one of `DIALECTS`.

    Raises:
      InputError: for networks with rotary positions of another kind than DINOv3's, or with gated MLPs, which
        are not supported.
    """
    _refuse(tensors, family)
    dialect = DIALECTS[family]
    if family in ("google", "big_vision", "fcljax"):
        return Translated(_google(tensors, dialect) if family == "big_vision" else tensors, dialect)
    if family in ("timm", "transformers"):
        return Translated(_completed(_joined(tensors)), dialect)
    kept = {_renamed(name, dialect.names): x for name, x in tensors.items() if not _BESIDE.fullmatch(name)}
    beside = tuple(name for name in tensors if _BESIDE.fullmatch(name))
    if family in ("CLIP", "CLIP of transformers") and "cls_token" in kept:
        width = kept["cls_token"].size
        kept["cls_token"] = kept["cls_token"].reshape(1, 1, -1)
        if "pos_embed" in kept and kept["pos_embed"].size % max(width, 1) == 0:
            kept["pos_embed"] = kept["pos_embed"].reshape(1, -1, width)
    kept = _joined(kept)
    if dialect.rotary:
        kept = _without_rotary_traces(kept)
    return Translated(_completed(kept), dialect, beside)


def _refuse(tensors: Tensors, family: str) -> None:
    other = (
        (r"(.*\.)?rope\.", "rotary positions other than DINOv3's (EVA-02)"),
        (
            r"(.*\.)?mlp\.(w[123]|w12|weights_in|gate_proj|fc1_g)\.",
            "gated MLPs (DINOv2 giant, DINOv3 S+ and H+, EVA-02)",
        ),
        (
            r"(.*\.)?blocks\.0\.gamma_1",
            "scaled layers as BEiT, EVA and RoPE-ViT have them, and not DINOv3's registers",
        ),
    )
    if family == "DINOv3 of timm":
        other = other[:2]
    for pattern, what in other:
        name = next((name for name in tensors if re.match(pattern, name)), None)
        if name is not None:
            raise InputError(f"checkpoint: {name} is of a network with {what}, which is not supported here")


def _google(tensors: Tensors, dialect: Dialect) -> Tensors:
    """big_vision's names as Google's first files have them, with a row of zeros for the class token's
    position, and one by one the blocks that were stacked (scan)."""
    stacked = "Transformer/encoderblock/"
    found: Tensors = {}
    for name, x in tensors.items():
        if name.startswith(stacked) and x.ndim:
            for i, block in enumerate(x):
                inner = f"Transformer/encoderblock_{i}/{name.removeprefix(stacked)}"
                found[_replaced(inner, dialect.names)] = block
        else:
            found[_replaced(name, dialect.names)] = x
    position = "Transformer/posembed_input/pos_embedding"
    if position in found and "cls" in found:
        found[position] = _with_class_token(found[position])
    return found


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
        name = _replaced(name, patterns)
    return name


def _replaced(name: str, names: Names) -> str:
    """Another name by the first pattern that its beginning matches."""
    for pattern, ours in names:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", ours, name)
    return name


def _joined(tensors: Tensors) -> Tensors:
    """Queries, keys and values as one tensor. Where keys have no biases, these are zeros: EVA, BEiT and
    timm's DINOv3 qkvb are stored so."""
    joined = dict(tensors)
    for name, x in tensors.items():
        match = re.fullmatch(r"(.*attn\.)(query|q)(\.|_)(weight|bias)", name)
        if not match:
            continue
        before, query, dot, leaf = match.groups()
        parts = ("query", "key", "value") if query == "query" else ("q", "k", "v")
        each = [joined.pop(f"{before}{part}{dot}{leaf}", None) for part in parts]
        if leaf == "bias" and each[1] is None:
            each[1] = np.zeros_like(x)
        if any(x is None for x in each):
            raise InputError(f"checkpoint: {name} is there, but not the keys and values that go with it")
        joined[f"{before}qkv.{leaf}"] = np.concatenate([np.asarray(x) for x in each])
    return joined


def _completed(tensors: Tensors) -> Tensors:
    """Under timm's names, with zeros for what such networks may lack: the class token's position (DeiT III,
    FlexiViT, networks with registers), and the bias of the patch embedding before a norm (CLIP). Positions of
    registers join the registers."""
    more: Tensors = {}
    position = tensors.get("pos_embed")
    if position is not None and position.ndim == 3 and "cls_token" in tensors:
        more |= _split_positions(position, tensors.get("reg_token"))
    kernel = tensors.get("patch_embed.proj.weight")
    if "norm_pre.weight" in tensors and kernel is not None and "patch_embed.proj.bias" not in tensors:
        more["patch_embed.proj.bias"] = np.zeros(len(kernel), np.float32)
    return tensors | more


def _split_positions(position: np.ndarray, registers: np.ndarray | None) -> Tensors:
    """Positions of the class token and the patches, and the registers with theirs."""
    tokens = position.shape[1]
    if is_square(tokens - 1):
        return {}
    if is_square(tokens):
        return {"pos_embed": _with_class_token(position)}
    extra = 0 if registers is None or registers.ndim != 3 else registers.shape[1]
    if registers is not None and extra and is_square(tokens - 1 - extra):
        patches = np.concatenate([position[:, :1], position[:, 1 + extra :]], axis=1)
        return {"pos_embed": patches, "reg_token": registers + position[:, 1 : 1 + extra]}
    return {}


def _with_class_token(position: np.ndarray) -> np.ndarray:
    """With a row of zeros first, for a class token that has no position."""
    if position.ndim != 3 or not is_square(position.shape[1]):
        return position
    return np.pad(position, ((0, 0), (1, 0), (0, 0)))


def is_square(number: int) -> bool:
    """Whether so many patches are a square grid."""
    return number > 0 and round(number**0.5) ** 2 == number
