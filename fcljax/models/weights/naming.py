"""Bring the tensors of a file's Vision Transformer to fcljax's names and layouts.

A network is a stack: an embedding, a learned token, positions, blocks, a norm and an
output. That holds for the encoder (patches, class token, head) and for the decoder of a
masked autoencoder (latents, mask token, pixels), so one table of names describes
either. Kernels are [in, out] here, [out, in] in torch, and split by heads in Google's
files.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.shapes import VITS, Activation
from fcljax.models.vit import ViTConfig, parameter_shapes
from fcljax.models.weights import finding
from fcljax.models.weights.dialects import MOCO_V3, Dialect, translate
from fcljax.models.weights.tensors import Shapes, Tensors, check_tensors, float32, reverse, unreverse
from fcljax.types import PyTree


class Naming(NamedTuple):
    """The names that one library gives to a stack.

    Names of modules lack the leaf (kernel or scale, and bias); `token` and `pos` are
    whole names.
    """

    mapping: str
    layout: Literal["ours", "torch", "google"]
    embed: str
    token: str
    pos: str
    norm: str
    out: str
    block: str  # prefix of block %d
    # our name -> the file's; several become one of ours
    modules: Mapping[str, tuple[str, ...]]


class TensorFacts(NamedTuple):
    """Facts that tensors do not show: from the caller, metadata, a config.json."""

    heads: int | None = None
    decoder_heads: int | None = None
    activation: Activation | None = None
    rotary_base: float | None = None


class ViTSizes(NamedTuple):
    """Sizes of a ViT that the shapes of its tensors show."""

    width: int
    depth: int
    mlp: int
    patch: int


class NamedViT(NamedTuple):
    """A ViT's tensors with the naming that they follow."""

    naming: Naming
    tensors: Tensors
    prefix: str
    """The prefix that their names had in the file."""
    dialect: Dialect
    left_out: tuple[str, ...]
    """Names of the file's other tensors."""


class Interpreted(NamedTuple):
    """A network under our names, in our layouts: float32 arrays, or views."""

    config: ViTConfig  # at the file's image size
    params: PyTree
    head: PyTree | None
    decoder: tuple[DecoderConfig, PyTree] | None
    mapping: str
    fused: bool  # q, k and v are one tensor in the file
    part: str | None  # "teacher" or "student"
    # the file looks like those of DINO, iBOT, MAE and DeiT, which normalise by
    # ImageNet's constants
    torch_training: bool
    notes: tuple[str, ...]
    pixels: str | None = None  # pixel range of its family, of NORMALISE, if known


DINOV3_BASE = 100.0
# modules that only some networks' blocks have
OPTIONAL_MODULES = ("ls1", "ls2", "attn.q_norm", "attn.k_norm")


def _modules(
    norm1: str,
    qkv: str,
    proj: str,
    norm2: str,
    fc1: str,
    fc2: str,
) -> dict[str, tuple[str, ...]]:
    in_file = {"norm1": norm1, "attn.qkv": qkv, "attn.proj": proj, "norm2": norm2, "fc1": fc1, "fc2": fc2}
    # under our names in all files: `dialects` has renamed them
    optional = {name: (name,) for name in OPTIONAL_MODULES}
    return {name: tuple(modules.split()) for name, modules in in_file.items()} | optional


_OURS = _modules("norm1", "attn.qkv", "attn.proj", "norm2", "fc1", "fc2")
TIMM = _modules("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_HF4 = _modules(
    "layernorm_before",
    " ".join(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attention.output.dense",
    "layernorm_after",
    "intermediate.dense",
    "output.dense",
)
_HF5 = _modules(
    "layernorm_before",
    "attention.q_proj attention.k_proj attention.v_proj",
    "attention.o_proj",
    "layernorm_after",
    "mlp.fc1",
    "mlp.fc2",
)
_MHA = "MultiHeadDotProductAttention_1/"
_GOOGLE = _modules(
    "LayerNorm_0",
    " ".join(f"{_MHA}{part}" for part in ("query", "key", "value")),
    f"{_MHA}out",
    "LayerNorm_2",
    "MlpBlock_3/Dense_0",
    "MlpBlock_3/Dense_1",
)

_HF = (
    "embeddings.patch_embeddings.projection",
    "embeddings.cls_token",
    "embeddings.position_embeddings",
    "layernorm",
    "classifier",
)
_BIG = ("embedding", "cls", "Transformer/posembed_input/pos_embedding", "Transformer/encoder_norm", "head")
_PATCHES = ("patch_embed.proj", "cls_token", "pos_embed", "norm", "head")
_FCLJAX = ("decoder.embed", "decoder.mask", "decoder.pos", "decoder.norm", "decoder.predict")
_MAE = ("decoder_embed", "mask_token", "decoder_pos_embed", "decoder_norm", "decoder_pred")
ENCODERS = (
    Naming("fcljax", "ours", "patch", "cls", "pos", "norm", "head", "block_%02d.", _OURS),
    Naming("timm", "torch", *_PATCHES, "blocks.%d.", TIMM),
    Naming("huggingface", "torch", *_HF, "encoder.layer.%d.", _HF4),
    Naming("huggingface", "torch", *_HF, "layers.%d.", _HF5),
    Naming("google", "google", *_BIG, "Transformer/encoderblock_%d/", _GOOGLE),
)
DECODERS = (
    Naming("fcljax", "ours", *_FCLJAX, "decoder.block_%02d.", _OURS),
    Naming("timm", "torch", *_MAE, "decoder_blocks.%d.", TIMM),
    Naming("huggingface", "torch", *_MAE, "decoder_layers.%d.", _HF4),
    Naming("huggingface", "torch", *_MAE, "decoder_layers.%d.", _HF5),
    # what transformers 5 writes
    Naming("huggingface", "torch", *_MAE, "decoder_encoder.layer.%d.", _HF4),
)
_OUR_ENCODER = ENCODERS[0]
_TIMM_ENCODER = ENCODERS[1]
NORM_PRE = "norm_pre"  # the norm before the first block
_OUR_DECODER = Naming("fcljax", "ours", "embed", "mask", "pos", "norm", "predict", "block_%02d.", _OURS)

# wrappers in checkpoints of training runs
_TRAINING_WRAPPERS = {"teacher", "student", "model", "state_dict", "backbone"}
# content that no published network has
_TRAINING_CONTENT = ("mask_token", "masked_embed", "centers of the loss")


class _Recipe(NamedTuple):
    """The file's tensors that make one of ours, joined along the last axis."""

    names: tuple[str, ...]
    file_shape: tuple[int, ...]  # of each
    our_shape: tuple[int, ...]  # of each
    reverse: bool  # reverse the axes before reshaping


def name_tensors(network: finding.NetworkInFile) -> NamedViT:
    """Choose the naming that a file's ViT follows, and drop other tensors.

    Raises:
      InputError: if the network is of a kind that is not supported.
    """
    family = network.family.name
    translated = translate(network.tensors, family)
    mapping = {"transformers": "huggingface", "big_vision": "google"}.get(family, family)
    # `translate` has brought all other families to timm's names
    if mapping not in {naming.mapping for naming in ENCODERS}:
        mapping = "timm"
    naming = _best_naming(ENCODERS, mapping, translated.tensors)
    dialect = translated.dialect
    if _is_moco(network.prefix):
        dialect = dialect._replace(pixels="imagenet")
    # a file of our own holds one network, without other content
    if naming.layout == "ours":
        return NamedViT(naming, translated.tensors, network.prefix, dialect, network.left_out)
    # wrappers of pMAE's decoder stand before MAE's own names
    tensors = _without_wrapper(translated.tensors)
    _refuse_other_networks(naming, tensors)
    tensors, other_content = finding.split_content(tensors, _is_of_network(naming, tensors))
    left_out = (*network.left_out, *translated.left_out, *other_content)
    return NamedViT(naming, _with_biases(naming, tensors), network.prefix, dialect, left_out)


def _is_moco(prefix: str) -> bool:
    """Check whether a prefix is that of one of MoCo v3's two networks."""
    return finding.components(prefix)[-1:] in [(name,) for name in MOCO_V3]


def sizes(network: NamedViT) -> ViTSizes:
    """Return the sizes that the shapes of tensors show.

    Raises:
      InputError: if the embedding is not one of square patches of 3 channels.
    """
    naming = network.naming
    tensors = network.tensors
    patch, width = _patches(naming, tensors)
    return ViTSizes(width, _depth(naming, tensors), _mlp(naming, tensors, width), patch)


def interpret(network: NamedViT, name: str | None, facts: TensorFacts) -> Interpreted:
    """Check a network tensor by tensor, and bring it to our names and layouts.

    Args:
      network: as from `name_tensors`.
      name: one of VITS, which the tensors must fit; None takes the architecture from the tensors.
      facts: must not contradict the tensors.

    Raises:
      InputError: if it is of a kind that is not supported, or tensors are missing,
        unexpected, misshaped or not finite.
    """
    naming = network.naming
    tensors = network.tensors
    dialect = network.dialect
    # no tensor shows rotary positions: the family or a file beside it does
    if dialect.rotary and not facts.rotary_base:
        facts = facts._replace(rotary_base=DINOV3_BASE)
    if not dialect.rotary and naming.layout != "ours":
        facts = facts._replace(rotary_base=None)
    config, assumptions = _architecture(network, name, facts)
    if dialect.activation:
        config = dataclasses.replace(config, activation=facts.activation or dialect.activation)
        if not facts.activation:
            assumptions.append(_assumed_activation(dialect))
    # one block is enough, since all have equal shapes: `_recipes` repeats it
    shapes = _shapes(parameter_shapes(dataclasses.replace(config, depth=1)))
    outputs = _outputs(naming, tensors)
    if outputs is not None:
        shapes |= {"head.kernel": (config.width, outputs), "head.bias": (outputs,)}
    recipes = _recipes(naming, _OUR_ENCODER, shapes, config)

    # encoder and decoder are checked together: a tensor of neither is unexpected
    file_shapes = _file_shapes(recipes)
    decoder_parts = None
    if _has_decoder(tensors):
        decoder_parts = _decoder(network, config, facts)
    if decoder_parts:
        file_shapes |= _file_shapes(decoder_parts[2])
    check_tensors(tensors, file_shapes, name or _describe(config))
    params = _build(tensors, recipes)
    head = params.pop("head", None)
    decoder = None
    if decoder_parts:
        decoder_config, decoder_assumptions, decoder_recipes = decoder_parts
        decoder = (decoder_config, _build(tensors, decoder_recipes))
        assumptions = [*assumptions, *decoder_assumptions]

    wrappers = finding.components(network.prefix)
    content = any(finding.is_left_out(network.left_out, label) for label in _TRAINING_CONTENT)
    # A file with more than a network comes from a training in torch, whose images are
    # usually normalised by ImageNet's constants; published networks hold their weights
    # alone.
    training = bool(decoder or content or _TRAINING_WRAPPERS.intersection(wrappers))
    return Interpreted(
        config,
        params,
        head,
        decoder,
        "mae" if decoder and naming.mapping == "timm" else naming.mapping,
        fused=len(naming.modules["attn.qkv"]) == 1,
        part=next((role for role in finding.ROLES if role in wrappers), None),
        torch_training=naming.layout == "torch" and training,
        notes=(*_notes(network, config, head), *assumptions),
        pixels=dialect.pixels,
    )


def _assumed_activation(dialect: Dialect) -> str:
    note = f"the activation {dialect.activation} of its kind is assumed"
    if dialect.doubt:
        return f"{note}: {dialect.doubt}"
    return note


def is_decoder(tensors: Tensors) -> bool:
    """Check whether tensors are a decoder alone, under our names."""
    return bool(tensors) and all(name.startswith("decoder.") for name in tensors)


def interpret_decoder(
    tensors: Tensors,
    facts: TensorFacts,
) -> tuple[DecoderConfig, PyTree, list[str]]:
    """Return shape, parameters and assumptions of a decoder without its encoder.

    Args:
      tensors: for which `is_decoder` holds.
      facts: must not contradict the tensors.

    Raises:
      InputError: if tensors are missing, unexpected, misshaped or not finite.
    """
    naming = DECODERS[0]
    # pixels = 3 patch^2
    patch = math.isqrt((_outputs(naming, tensors) or 3) // 3)
    width = _length(tensors, _leaf(naming, naming.embed, "kernel"), 0, 1)
    # of the encoder a decoder knows width and patches alone; the other sizes are any
    encoder = ViTConfig(_grid(naming, tensors) * patch, patch, width, heads=1)
    network = NamedViT(ENCODERS[0], tensors, "", Dialect(), ())
    config, assumptions, recipes = _decoder(network, encoder, facts)
    check_tensors(tensors, _file_shapes(recipes), "a decoder")
    return config, _build(tensors, recipes), assumptions


def head_note(head: PyTree) -> str:
    """Return the note on a head that is left out."""
    return f"the classification head of {head['bias'].size} classes is not part of the backbone"


def _notes(network: NamedViT, config: ViTConfig, head: PyTree | None) -> list[str]:
    notes = finding.role_notes(network.prefix)
    if head is not None:
        notes.append(head_note(head))
    notes += finding.left_out_notes(network.left_out)
    if finding.is_left_out(network.left_out, "pre_logits"):
        notes.append(
            "a classification head behind pre_logits is left out too: it does not read the class token"
        )
    if not config.final_norm:
        notes.append("the network has no final norm")
    return notes


# ---- which tensors are the network's ---------------------------------------------------


def _without_wrapper(tensors: Tensors) -> Tensors:
    """Remove the prefix of pMAE's decoder before MAE's names."""
    return {re.sub(r"^decoder\.(?=decoder_|mask_token$)", "", name): x for name, x in tensors.items()}


def _is_of_network(naming: Naming, tensors: Tensors) -> Callable[[str], bool]:
    """Return a check of names that could also be other content.

    A head of the class token with a weight and a bias is the network's, and so is the
    mask token of a decoder.
    """
    head = {_leaf(naming, naming.out, leaf) for leaf in ("kernel", "bias")}
    # a head behind pre_logits does not read the class token
    pre_logits = any(name.startswith(("pre_logits.", "pre_logits/")) for name in tensors)
    of_network: set[str] = set()
    # weight and bias: one alone belongs to something else
    if head <= set(tensors) and not pre_logits:
        of_network |= head
    if _has_decoder(tensors):
        of_network.add("mask_token")
    return lambda name: name in of_network


def _with_biases(naming: Naming, tensors: Tensors) -> Tensors:
    """Add zero biases of queries, keys and values if no block has any."""
    # block numbers are part of the names
    block = re.sub("%(02)?d", r"\\d{1,9}", re.escape(naming.block))
    modules = "|".join(map(re.escape, naming.modules["attn.qkv"]))
    kernel = re.compile(f"({block}(?:{modules})){re.escape(_leaf(naming, '', 'kernel'))}")
    biases = {
        f"{match[1]}{_leaf(naming, '', 'bias')}": x.shape[1:] if naming.layout == "google" else x.shape[:1]
        for name, x in tensors.items()
        if (match := kernel.fullmatch(name))
    }
    # with any bias the file has them all, or the check of shapes reports those that it
    # lacks
    if not biases.keys().isdisjoint(tensors):
        return tensors
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in biases.items()}


def _best_naming(namings: tuple[Naming, ...], mapping: str, tensors: Tensors) -> Naming:
    """Return the naming of a mapping that matches most tensors of the first block."""

    def matches(naming: Naming) -> int:
        modules = [f"{naming.block % 0}{module}" for modules in naming.modules.values() for module in modules]
        return sum(_leaf(naming, module, "bias") in tensors for module in modules)

    return max((naming for naming in namings if naming.mapping == mapping), key=matches)


def _has_decoder(tensors: Tensors) -> bool:
    return any(key.startswith(("decoder_", "decoder.")) for key in tensors)


def _refuse_other_networks(naming: Naming, tensors: Tensors) -> None:
    """Refuse networks that would load, or nearly, but compute something else."""
    # DeiT's distilled networks average the predictions from two tokens
    distilled = r"dist_token|head_dist|(embeddings\.)?distillation_token|distillation_classifier"
    if any(re.match(distilled, key) for key in tensors):
        raise InputError(
            "checkpoint: a distilled network has a second token beside the class token, "
            "which is not supported here"
        )
    if any(key.startswith("fc_norm") for key in tensors):
        raise InputError(
            "checkpoint: fc_norm says that the features are means over patches, "
            "and the class token was not trained for them"
        )
    if naming.token not in tensors:
        raise InputError(
            f"checkpoint: it has no class token ({naming.token}), and the features here are the class token's"
        )


# ---- architecture ----------------------------------------------------------------------


def _architecture(
    network: NamedViT,
    name: str | None,
    facts: TensorFacts,
) -> tuple[ViTConfig, list[str]]:
    """Return the shape of the tensors, or of `name`, and what it assumes."""
    naming = network.naming
    tensors = network.tensors
    width, depth, mlp, patch = sizes(network)
    norm = {_leaf(naming, naming.norm, leaf) for leaf in ("scale", "bias")}
    # optional modules are looked for in the first block
    block = naming.block % 0
    pre_norm = _leaf(naming, NORM_PRE, "scale") in tensors
    epsilon = ViTConfig.epsilon
    # the epsilon is in no tensor; these two families have another one
    if pre_norm or facts.rotary_base:
        epsilon = 1e-5  # CLIP's and DINOv3's
    config = ViTConfig(
        _grid(naming, tensors) * patch,
        patch,
        width,
        depth,
        1,
        mlp,
        epsilon=epsilon,
        final_norm=not norm.isdisjoint(tensors),
        layer_scale=_leaf(naming, f"{block}ls1", "scale") in tensors,
        registers=_length(tensors, _registers(naming), -2, 0),
        qk_norm=_leaf(naming, f"{block}attn.q_norm", "scale") in tensors,
        pre_norm=pre_norm,
        activation=facts.activation or "gelu",
        rotary_base=float(facts.rotary_base or 0),
    )
    heads = _heads(network, facts)
    if name is not None:
        # a name fixes the number of heads
        if heads not in (None, VITS[name].heads):
            raise InputError(
                f"checkpoint: does not fit {name}: it has {heads} heads, needs {VITS[name].heads}"
            )
        return VITS[name], []
    assumptions = []
    if not heads:
        heads, assumptions = _assumed_heads(config, network)
    if width % heads:
        raise InputError(f"heads: {heads} does not divide the width {width}")
    return dataclasses.replace(config, heads=heads), assumptions


def _heads(network: NamedViT, facts: TensorFacts) -> int | None:
    """Return the number of heads, if the facts or Google's matrices show it."""
    naming = network.naming
    if naming.layout != "google":
        return facts.heads
    query = f"{naming.block % 0}{naming.modules['attn.qkv'][0]}"
    heads = _length(network.tensors, _leaf(naming, query, "kernel"), 1, None)
    if heads and facts.heads and heads != facts.heads:
        raise InputError(f"heads: {facts.heads} requested, but the checkpoint has {heads}")
    return facts.heads or heads


def _assumed_heads(config: ViTConfig, network: NamedViT) -> tuple[int, list[str]]:
    """Assume the usual number of heads, which fused matrices do not show."""
    if network.naming.layout == "ours":
        # our own shapes with the same tensors differ in heads alone
        for vit in VITS.values():
            if dataclasses.replace(vit, heads=1) == config:
                return vit.heads, []
    heads = _usual_heads(config, network.prefix)
    if heads is None:
        why = f"its width {config.width} is not a multiple of 64"
        if config.width % 64 == 0:
            why = f"networks of width {config.width} with MLPs of {config.mlp} have heads of several sizes"
        raise InputError(f"heads: the checkpoint does not state them, and {why}; give heads")
    assumed = f"{heads} attention heads are assumed, {config.width // heads} channels each"
    return heads, [f"{assumed}: the checkpoint does not state them"]


# Widths whose heads do not have 64 channels -> heads: So400m, huge, giant, and gigantic.
_WIDE = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}


def _usual_heads(config: ViTConfig, prefix: str) -> int | None:
    """Return the number of heads that authors give to such networks; None: unknown."""
    if _is_moco(prefix) and config.width == 384:
        return 12  # vits.py of MoCo v3: vit_small
    if config.width in _WIDE:
        return _WIDE[config.width]
    if config.width < VITS["vit_ti16"].width and config.mlp == 3 * config.width:
        return None  # timm's test_vit, with heads of 32 channels
    if config.width % 64:
        return None
    return config.width // 64


def _registers(naming: Naming) -> str:
    if naming.layout == "ours":
        return "registers"
    return "reg_token"


def _patches(naming: Naming, tensors: Tensors) -> tuple[int, int]:
    """Return the side of the patches and the width, from the patch embedding."""
    shape = tensors[_leaf(naming, naming.embed, "kernel")].shape
    # 0 for a shape that fits no layout: the comparison below then fails
    side = width = 0
    if naming.layout == "ours" and len(shape) == 2:
        width = shape[1]
        side = math.isqrt(shape[0] // 3)
    elif naming.layout == "torch" and len(shape) == 4:
        width = shape[0]
        side = shape[2]
    elif len(shape) == 4:
        width = shape[3]
        side = shape[0]
    expected = {"ours": (3 * side**2, width), "torch": (width, 3, side, side)}
    if shape != expected.get(naming.layout, (side, side, 3, width)) or not math.prod(shape):
        raise InputError(
            f"checkpoint: {naming.embed} is not an embedding of square patches of 3 channels: "
            f"it has shape {shape}"
        )
    return side, width


def _grid(naming: Naming, tensors: Tensors) -> int:
    """Return the patches per side, from the position embeddings.

    It is 1 if they are missing, which the check of all shapes reports.
    """
    tokens = _length(tensors, naming.pos, -2, 2)
    grid = math.isqrt(max(tokens - 1, 1))
    if tokens != 1 + grid**2:
        raise InputError(
            f"checkpoint: {tokens} position embeddings are not those of a class token "
            "and a square grid of patches"
        )
    return grid


def _depth(naming: Naming, tensors: Tensors) -> int:
    """Return one more than the highest index of a block, at most the number of
    tensors."""
    pattern = re.compile(re.sub("%(02)?d", r"(\\d{1,9})", re.escape(naming.block)))
    indices = [int(match[1]) for key in tensors if (match := pattern.match(key))]
    # a huge block number in a broken file must not allocate anything
    return min(max(indices, default=0) + 1, len(tensors))


def _mlp(naming: Naming, tensors: Tensors, width: int) -> int:
    hidden_layer = f"{naming.block % 0}{naming.modules['fc1'][0]}"
    # a length of 0, like a missing bias, is reported by the check of all shapes
    return _length(tensors, _leaf(naming, hidden_layer, "bias"), 0, 0) or 4 * width


def _outputs(naming: Naming, tensors: Tensors) -> int | None:
    axis = -1
    if naming.layout == "torch":
        axis = 0
    kernel = _length(tensors, _leaf(naming, naming.out, "kernel"), axis, None)
    return _length(tensors, _leaf(naming, naming.out, "bias"), 0, None) or kernel


def _length(tensors: Tensors, name: str, axis: int, default):
    """Return the length of an axis, or the default if it is missing: the check of all
    shapes reports that."""
    shape = ()
    if name in tensors:
        shape = tensors[name].shape
    if -len(shape) <= axis < len(shape):
        return shape[axis]
    return default


def _decoder(
    network: NamedViT, config: ViTConfig, facts: TensorFacts
) -> tuple[DecoderConfig, list[str], dict[str, _Recipe]]:
    """Return a decoder's shape, assumptions, and recipes of its tensors."""
    tensors = network.tensors
    assumptions = []
    naming = _best_naming(DECODERS, network.naming.mapping, tensors)
    width = _length(tensors, naming.token, -1, 512)
    heads = facts.decoder_heads
    if heads is None:
        # MAE has 16, whatever the encoder has
        heads = 16 if width % 16 == 0 else config.heads
        assumptions = [
            f"{heads} attention heads of the decoder are assumed: the checkpoint does not state them"
        ]
    if heads < 1 or width < 1 or width % heads:
        raise InputError(
            f"decoder_heads: {heads} does not divide the decoder's width {width}; give --decoder-heads"
        )
    depth = _depth(naming, tensors)
    mlp = _mlp(naming, tensors, width)
    decoder = DecoderConfig(config.image_size, config.patch, config.width, width, depth, heads, mlp)
    shapes = _shapes(decoder_shapes(dataclasses.replace(decoder, depth=1)))
    return decoder, assumptions, _recipes(naming, _OUR_DECODER, shapes, decoder)


def _describe(config: ViTConfig) -> str:
    return f"a ViT of {config.depth} blocks, width {config.width} and {config.grid} x {config.grid} patches"


# ---- tensors ---------------------------------------------------------------------------


def _leaf(naming: Naming, module: str, leaf: str) -> str:
    """Return the file's name of our leaf (kernel, scale or bias) of a module."""
    if naming.layout == "torch" and leaf != "bias":
        leaf = "weight"
    if naming.layout == "google":
        return f"{module}/{leaf}"
    return f"{module}.{leaf}"


def _shapes(tree: PyTree) -> Shapes:
    flat: dict[str, Any] = flatten_dict(tree, sep=".")
    return {name: leaf.shape for name, leaf in flat.items()}


def _recipes(
    in_file: Naming, ours: Naming, shapes: Shapes, config: ViTConfig | DecoderConfig
) -> dict[str, _Recipe]:
    """Return how each of our tensors is made, by name and in order.

    Args:
      in_file, ours: the names of the file's stack and of ours.
      shapes: of our tensors, for a network of one block.
      config: the network's shape.
    """
    recipes = {}
    first_block = ours.block % 0
    arrays = {ours.token: in_file.token, ours.pos: in_file.pos, "registers": _registers(in_file)}
    outside = {ours.embed: in_file.embed, ours.norm: in_file.norm, ours.out: in_file.out, NORM_PRE: NORM_PRE}
    for name, shape in shapes.items():
        # arrays without a module
        if name in arrays:
            # torch and Google store tokens and positions as [1, tokens, width]
            leading = ()
            if in_file.layout != "ours":
                leading = (1,) * (3 - len(shape))
            recipes[name] = _Recipe((arrays[name],), (*leading, *shape), shape, False)
            continue
        module, _, leaf = name.rpartition(".")
        inner = module.removeprefix(first_block)
        copies = []  # (our module, the file's modules)
        if module in outside:
            copies = [(module, [outside[module]])]
        if inner != module:
            # the recipe of block 0 holds for all blocks
            copies = [
                (ours.block % i + inner, [in_file.block % i + part for part in in_file.modules[inner]])
                for i in range(config.depth)
            ]
        for our_module, file_modules in copies:
            our_shape = (*shape[:-1], shape[-1] // len(file_modules))
            names = tuple(_leaf(in_file, file_module, leaf) for file_module in file_modules)
            file_shape = _file_shape(in_file.layout, inner, our_shape, config)
            # torch's [out, in, ...] is [..., in, out] reversed
            reverse_axes = in_file.layout == "torch"
            recipes[f"{our_module}.{leaf}"] = _Recipe(names, file_shape, our_shape, reverse_axes)
    return dict(sorted(recipes.items()))


def _file_shape(
    layout: str, module: str, shape: tuple[int, ...], config: ViTConfig | DecoderConfig
) -> tuple[int, ...]:
    """Return the shape, in the file's layout, of a tensor that has `shape` in ours."""
    patch = config.patch
    width = config.width
    heads = config.heads
    if layout == "ours":
        return shape
    if module == _OUR_ENCODER.embed and len(shape) == 2:
        if layout == "torch":
            return (width, 3, patch, patch)
        return (patch, patch, 3, width)
    if layout == "torch":
        return shape[::-1]
    if module == "attn.qkv":
        # Google splits q, k and v by heads
        return (*shape[:-1], heads, width // heads)
    if module == "attn.proj" and len(shape) == 2:
        return (heads, width // heads, width)
    return shape


def _file_shapes(recipes: dict[str, _Recipe]) -> Shapes:
    return {name: recipe.file_shape for recipe in recipes.values() for name in recipe.names}


def _build(tensors: Tensors, recipes: dict[str, _Recipe]) -> PyTree:
    """Make our parameters; a float32 tensor that is alone in its recipe stays a view."""
    flat = {}
    for name, recipe in recipes.items():
        parts = []
        for file_name in recipe.names:
            x = float32(file_name, tensors[file_name])
            if recipe.reverse:
                x = reverse(x)
            parts.append(x.reshape(recipe.our_shape))
        flat[name] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return unflatten_dict(flat, sep=".")


def timm_tensors(params: PyTree, config: ViTConfig) -> Tensors:
    """Return a ViT's parameters under timm's names, in torch's layouts.

    Args:
      params: of the network; "head" has {"kernel", "bias"} of a classifier, if there is one.
      config: the network's shape.
    """
    flat: dict[str, Any] = flatten_dict(params, sep=".")
    later_blocks = tuple(_OUR_ENCODER.block % block for block in range(1, config.depth))
    # a recipe repeats the shapes of the first block
    shapes = {name: x.shape for name, x in flat.items() if not name.startswith(later_blocks)}
    tensors = {}
    for name, recipe in _recipes(_TIMM_ENCODER, _OUR_ENCODER, shapes, config).items():
        # timm joins queries, keys and values as we do: one tensor for each of ours
        (file_name,) = recipe.names
        x = np.asarray(flat[name], np.float32)
        if recipe.reverse:
            x = unreverse(x.reshape(reverse(np.empty(recipe.file_shape, np.int8)).shape))
        tensors[file_name] = x.reshape(recipe.file_shape)
    return tensors
