"""Rename the tensors of ViTs and text encoders to timm's names, and those of big_vision to
Google's.

Dialects are the names of DINOv2, DINOv3, CLIP's two towers, MoCo v3, torchvision's
ViT, BERT, DistilBERT, and flax. `naming` reads the result: scales of layers are `ls1` and `ls2`,
registers `reg_token`, the norm before the blocks `norm_pre`. Sources:
facebookresearch's dinov2, dinov3 and moco-v3, openai's CLIP (open_clip has the same
names), timm's Eva, transformers, torchvision and google-research's big_vision.
"""

import re
from typing import NamedTuple

import numpy as np

from fcljax.errors import InputError
from fcljax.models.shapes import Activation
from fcljax.models.weights.tensors import Tensors

Names = tuple[tuple[str, str], ...]


class Dialect(NamedTuple):
    """Names of a family's tensors, and facts that its files do not contain."""

    names: Names = ()
    """(pattern, timm's name); the first that matches counts."""
    pixels: str | None = None
    """Pixel range of the authors' training, of `pixels.NORMALISE`; None: unknown."""
    activation: Activation | None = None
    """Activation that is assumed if no file beside it has one; None: no assumption."""
    doubt: str = ""
    """Remark of the note on that assumption, if other networks have the same tensors."""
    rotary: bool = False
    """Queries and keys are rotated by the positions of their patches."""


_HF_ATTENTION = (
    (r"(.*)attention\.attention\.(query|key|value)\.", r"\1attn.\2."),
    (r"(.*)attention\.output\.dense\.", r"\1attn.proj."),
    # what transformers 5 writes
    (r"(.*)attention\.(q|k|v)_proj\.", r"\1attn.\2."),
    (r"(.*)attention\.o_proj\.", r"\1attn.proj."),
)
_PARTS = (
    (r"(.*norm\w*)\.gamma$", r"\1.weight"),  # of BERT's first files
    (r"(.*norm\w*)\.beta$", r"\1.bias"),
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
    # open_clip's names
    (r"transformer\.resblocks\.(\d+)\.ls_([12])\.gamma$", r"blocks.\1.ls\2.weight"),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_fc\.", r"blocks.\1.mlp.fc1."),
    (r"transformer\.resblocks\.(\d+)\.mlp\.c_proj\.", r"blocks.\1.mlp.fc2."),
)
_BERT = (
    (r"embeddings\.word_embeddings\.", "embed."),
    (r"embeddings\.position_embeddings\.weight$", "pos_embed"),
    (r"embeddings\.token_type_embeddings\.", "types."),
    (r"embeddings\.LayerNorm\.", "norm_pre."),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.", r"blocks.\1.attn.\2."),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.attn.proj."),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"blocks.\1.norm1."),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.", r"blocks.\1.mlp.fc1."),
    (r"encoder\.layer\.(\d+)\.output\.dense\.", r"blocks.\1.mlp.fc2."),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"blocks.\1.norm2."),
)
_DISTILBERT = (
    *_BERT[:4],
    (r"transformer\.layer\.(\d+)\.attention\.(q|k|v)_lin\.", r"blocks.\1.attn.\2."),
    (r"transformer\.layer\.(\d+)\.attention\.out_lin\.", r"blocks.\1.attn.proj."),
    (r"transformer\.layer\.(\d+)\.sa_layer_norm\.", r"blocks.\1.norm1."),
    (r"transformer\.layer\.(\d+)\.ffn\.lin([12])\.", r"blocks.\1.mlp.fc\2."),
    (r"transformer\.layer\.(\d+)\.output_layer_norm\.", r"blocks.\1.norm2."),
)
_CLIP_TEXT_HF = (
    (r"embeddings\.token_embedding\.", "embed."),
    (r"final_layer_norm\.", "norm."),
    *_CLIP_HF,
)
_CLIP_TEXT = ((r"token_embedding\.", "embed."), (r"ln_final\.", "norm."), *_CLIP)
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
    "BERT": Dialect(_BERT),
    "DistilBERT": Dialect(_DISTILBERT),
    "CLIP's text of transformers": Dialect(_CLIP_TEXT_HF),
    "CLIP's text": Dialect(_CLIP_TEXT),
    "timm": Dialect(),
    "transformers": Dialect(),
    "google": Dialect(),
    "fcljax": Dialect(),
}
# Prefixes of the names of MoCo v3's two networks. Names are timm's, but its small ViT has
# other heads (`naming._usual_heads`).
MOCO_V3 = ("base_encoder", "momentum_encoder")
_LEFT_OUT = re.compile(
    r"(embeddings\.)?mask_token|(.*\.)?position_ids|rope_embed(dings)?\.(periods|inv_freq)"
)
# DINOv3's positions are computed, and show no image size: that of its authors, in patches
# per side, is assumed
DINOV3_GRID = 16


class Translated(NamedTuple):
    """A network under timm's names, or Google's."""

    tensors: Tensors
    dialect: Dialect
    left_out: tuple[str, ...] = ()
    """Names of the file's tensors that are not in `tensors`."""


def from_flax(tensors: Tensors) -> Tensors:
    """Bring a file of flax to torch's names and layouts.

    Google's ViTs, big_vision's, and files that flax has not written stay as they are.
    """
    # flax joins names with slashes; Google's ViTs are recognised by their `embedding`
    kernels = [name for name in tensors if name.endswith("/kernel")]
    if not kernels or any(re.search(r"(^|/)embedding/kernel$", name) for name in kernels):
        return tensors
    renamed: Tensors = {}
    for name, x in tensors.items():
        module, _, leaf = name.rpartition("/")
        # flax has [in, out] and [row, column, in, out]
        if leaf == "kernel":
            x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T
        if leaf in ("kernel", "scale", "embedding"):
            leaf = "weight"
        renamed[f"{module}/{leaf}".replace("/", ".")] = x
    return renamed


def translate(tensors: Tensors, family: str = "timm") -> Translated:
    """Bring the tensors of a network to timm's names, or big_vision's to Google's.

    Args:
      tensors: by name, without a prefix.
      family: one of `DIALECTS`.

    Raises:
      InputError: for unsupported networks: with rotary positions other than DINOv3's, or
        with gated MLPs.
    """
    _refuse(tensors, family)
    dialect = DIALECTS[family]
    if family == "big_vision":
        return Translated(_rename_big_vision(tensors, dialect), dialect)
    if family in ("google", "fcljax"):
        return Translated(tensors, dialect)
    if family in ("timm", "transformers"):
        return Translated(_add_missing(_fuse_qkv(tensors)), dialect)
    left_out = tuple(name for name in tensors if _LEFT_OUT.fullmatch(name))
    tensors = {_rename(name, dialect.names): x for name, x in tensors.items() if name not in left_out}
    # CLIP has the class token [width] and positions [tokens, width], timm [1, tokens,
    # width]
    if family in ("CLIP", "CLIP of transformers") and "cls_token" in tensors:
        width = tensors["cls_token"].size
        tensors["cls_token"] = tensors["cls_token"].reshape(1, 1, -1)
        if "pos_embed" in tensors and tensors["pos_embed"].size % max(width, 1) == 0:
            tensors["pos_embed"] = tensors["pos_embed"].reshape(1, -1, width)
    tensors = _fuse_qkv(tensors)
    if dialect.rotary:
        tensors = _complete_dinov3(tensors)
    return Translated(_add_missing(tensors), dialect, left_out)


def _refuse(tensors: Tensors, family: str) -> None:
    unsupported = {
        r"(.*\.)?rope\.": "rotary positions other than DINOv3's (EVA-02)",
        r"(.*\.)?mlp\.(w[123]|w12|weights_in|gate_proj|fc1_g)\.": (
            "gated MLPs (DINOv2 giant, DINOv3 S+ and H+, EVA-02)"
        ),
    }
    if family != "DINOv3 of timm":
        unsupported[r"(.*\.)?blocks\.0\.gamma_1"] = (
            "scaled layers as BEiT, EVA and RoPE-ViT have them, and not DINOv3's registers"
        )
    for pattern, feature in unsupported.items():
        name = next((name for name in tensors if re.match(pattern, name)), None)
        if name is not None:
            raise InputError(
                f"checkpoint: {name} belongs to a network with {feature}, which is not supported here"
            )


def _rename_big_vision(tensors: Tensors, dialect: Dialect) -> Tensors:
    """Bring big_vision's tensors to the names of Google's first files.

    Blocks that are stacked (scan) become one by one, and the class token gets a
    position of zeros.
    """
    stacked = "Transformer/encoderblock/"
    renamed: Tensors = {}
    for name, x in tensors.items():
        if name.startswith(stacked) and x.ndim:
            # the first axis is that of the blocks
            for i, block in enumerate(x):
                block_name = f"Transformer/encoderblock_{i}/{name.removeprefix(stacked)}"
                renamed[_replace(block_name, dialect.names)] = block
        else:
            renamed[_replace(name, dialect.names)] = x
    position = "Transformer/posembed_input/pos_embedding"
    if position in renamed and "cls" in renamed:
        renamed[position] = _with_class_token(renamed[position])
    return renamed


def _complete_dinov3(tensors: Tensors) -> Tensors:
    """Add zeros for the positions and the biases that DINOv3 lacks.

    Raises:
      InputError: for a network with learned positions, which DINOv3 does not have.
    """
    if "pos_embed" in tensors:
        raise InputError("checkpoint: it has both DINOv3's names and pos_embed, which DINOv3 does not have")
    completed = dict(tensors)
    for name, x in tensors.items():
        # DINOv3 trains a bias of keys and multiplies it by this mask's zeros
        if name.endswith("attn.qkv.bias_mask"):
            bias = completed.get(name.removesuffix("_mask"))
            if bias is not None and bias.shape == x.shape:
                completed[name.removesuffix("_mask")] = bias * completed.pop(name)
        if name.endswith(("attn.qkv.weight", "attn.k.weight")):
            bias = f"{name.removesuffix('weight')}bias"
            completed.setdefault(bias, np.zeros(x.shape[:1], np.float32))
    if "cls_token" in completed:
        width = completed["cls_token"].size
        completed["pos_embed"] = np.zeros((1, 1 + DINOV3_GRID**2, width), np.float32)
    return completed


def _rename(name: str, names: Names) -> str:
    for patterns in (names, _HF_ATTENTION, _PARTS):
        name = _replace(name, patterns)
    return name


def _replace(name: str, names: Names) -> str:
    """Replace the beginning of a name by the first pattern that matches it."""
    for pattern, replacement in names:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", replacement, name)
    return name


def _fuse_qkv(tensors: Tensors) -> Tensors:
    """Concatenate queries, keys and values, with zeros for missing biases of keys.

    EVA, BEiT and timm's DINOv3 qkvb have no biases of keys.
    """
    fused = dict(tensors)
    for name, x in tensors.items():
        match = re.fullmatch(r"(.*attn\.)(query|q)(\.|_)(weight|bias)", name)
        if not match:
            continue
        module, query, dot, leaf = match.groups()
        parts = ("query", "key", "value") if query == "query" else ("q", "k", "v")
        qkv = [fused.pop(f"{module}{part}{dot}{leaf}", None) for part in parts]
        if leaf == "bias" and qkv[1] is None:
            qkv[1] = np.zeros_like(x)
        if any(x is None for x in qkv):
            raise InputError(f"checkpoint: {name} is there, but not the keys and values that go with it")
        fused[f"{module}qkv.{leaf}"] = np.concatenate([np.asarray(x) for x in qkv])
    return fused


def _add_missing(tensors: Tensors) -> Tensors:
    """Add zeros for tensors that some networks under timm's names lack.

    They are the class token's position (DeiT III, FlexiViT, networks with registers),
    and the bias of a patch embedding before a norm (CLIP). Positions of registers are
    added to the registers.
    """
    added: Tensors = {}
    position = tensors.get("pos_embed")
    if position is not None and position.ndim == 3 and "cls_token" in tensors:
        added |= _split_positions(position, tensors.get("reg_token"))
    kernel = tensors.get("patch_embed.proj.weight")
    if "norm_pre.weight" in tensors and kernel is not None and "patch_embed.proj.bias" not in tensors:
        added["patch_embed.proj.bias"] = np.zeros(len(kernel), np.float32)
    return tensors | added


def _split_positions(position: np.ndarray, registers: np.ndarray | None) -> Tensors:
    """Return positions of class token and patches, and registers with theirs."""
    tokens = position.shape[1]
    # 1 + n^2 positions include that of the class token
    if is_square(tokens - 1):
        return {}
    if is_square(tokens):
        return {"pos_embed": _with_class_token(position)}
    if registers is None or registers.ndim != 3:
        return {}
    # positions of class token, registers and patches
    first_patch = 1 + registers.shape[1]
    if first_patch == 1 or not is_square(tokens - first_patch):
        return {}
    patches = np.concatenate([position[:, :1], position[:, first_patch:]], axis=1)
    return {"pos_embed": patches, "reg_token": registers + position[:, 1:first_patch]}


def _with_class_token(position: np.ndarray) -> np.ndarray:
    """Put zeros before the patches' positions, for a class token that has none."""
    if position.ndim != 3 or not is_square(position.shape[1]):
        return position
    return np.pad(position, ((0, 0), (1, 0), (0, 0)))


def is_square(patches: int) -> bool:
    """Check whether so many patches are a square grid."""
    return patches > 0 and round(patches**0.5) ** 2 == patches
