"""From the names and shapes of a file's tensors to a Vision Transformer under our own names and layouts.

A network is a stack: an embedding, a learned token, positions, blocks, a norm and an output. That holds for
the encoder (patches, class token, head) and for the decoder of a masked autoencoder (latents, mask token,
pixels), so one table of names describes either. Kernels are [in, out] here, [out, in] in torch, and split by
heads in Google's files.
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
from fcljax.models.weights.tensors import Shapes, Tensors, check_tensors, float32, reverse
from fcljax.types import PyTree


class Naming(NamedTuple):
    """How one kind of file names a stack. Names of modules lack the leaf (kernel or scale, and bias)."""

    mapping: str
    layout: Literal["ours", "torch", "google"]
    embed: str
    token: str  # a whole name
    pos: str  # a whole name
    norm: str
    out: str
    block: str  # prefix of block %d
    modules: Mapping[str, tuple[str, ...]]  # ours -> theirs; several are joined into one of ours


class TensorFacts(NamedTuple):
    """What is known of a network from elsewhere than its tensors: the caller, metadata, a config.json."""

    heads: int | None = None
    decoder_heads: int | None = None
    activation: Activation | None = None
    rotary_base: float | None = None


class ViTSizes(NamedTuple):
    """What the shapes of tensors tell of a ViT."""

    width: int
    depth: int
    mlp: int
    patch: int


class NamedViT(NamedTuple):
    """A ViT's tensors under a naming, with what is known of their kind and what is left out."""

    naming: "Naming"
    tensors: Tensors
    prefix: str
    """What stood before their names."""
    dialect: Dialect
    beside: tuple[str, ...]
    """Names of what is left out."""


class Interpreted(NamedTuple):
    """A network under our names and in our layouts, float32 numpy arrays, some of them views."""

    config: ViTConfig  # at the file's image size
    params: PyTree
    head: PyTree | None
    decoder: tuple[DecoderConfig, PyTree] | None
    mapping: str
    fused: bool  # whether q, k and v were one tensor
    part: str | None  # "teacher" or "student"
    # whether it looks like the files of DINO, iBOT, MAE and DeiT, which normalise by ImageNet's constants
    torch_training: bool
    notes: tuple[str, ...]
    pixels: str | None = None  # the pixel range of its kind, of NORMALISE, where that is known


DINOV3_BASE = 100.0
SOME_HAVE = ("ls1", "ls2", "attn.q_norm", "attn.k_norm")  # modules of some networks' blocks


def _modules(norm1: str, qkv: str, proj: str, norm2: str, fc1: str, fc2: str) -> dict[str, tuple[str, ...]]:
    ours = ("norm1", "attn.qkv", "attn.proj", "norm2", "fc1", "fc2")
    named = {
        name: tuple(theirs.split())
        for name, theirs in zip(ours, (norm1, qkv, proj, norm2, fc1, fc2), strict=True)
    }
    return named | {name: (name,) for name in SOME_HAVE}  # under timm's names, see `dialects`


_OURS = _modules("norm1", "attn.qkv", "attn.proj", "norm2", "fc1", "fc2")
_TIMM = _modules("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
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
    Naming("timm", "torch", *_PATCHES, "blocks.%d.", _TIMM),
    Naming("huggingface", "torch", *_HF, "encoder.layer.%d.", _HF4),
    Naming("huggingface", "torch", *_HF, "layers.%d.", _HF5),
    Naming("google", "google", *_BIG, "Transformer/encoderblock_%d/", _GOOGLE),
)
DECODERS = (
    Naming("fcljax", "ours", *_FCLJAX, "decoder.block_%02d.", _OURS),
    Naming("timm", "torch", *_MAE, "decoder_blocks.%d.", _TIMM),
    Naming("huggingface", "torch", *_MAE, "decoder_layers.%d.", _HF4),
    Naming("huggingface", "torch", *_MAE, "decoder_layers.%d.", _HF5),
    Naming("huggingface", "torch", *_MAE, "decoder_encoder.layer.%d.", _HF4),  # what transformers 5 writes
)
_OUR_ENCODER = ENCODERS[0]
NORM_PRE = "norm_pre"  # the norm before the first block
_OUR_DECODER = Naming("fcljax", "ours", "embed", "mask", "pos", "norm", "predict", "block_%02d.", _OURS)

_TRAINING = {"teacher", "student", "model", "state_dict", "backbone"}  # wrappers in checkpoints of a training
_TRAINED = ("mask_token", "masked_embed", "centers of the loss")  # what only trainings of such networks have


class _Recipe(NamedTuple):
    """How one tensor of ours is made of theirs, which are joined on the last axis."""

    names: tuple[str, ...]
    theirs: tuple[int, ...]  # the shape of each
    ours: tuple[int, ...]  # the shape that it gets
    reverse: bool  # whether its axes are reversed first


def named(found: finding.NetworkInFile) -> NamedViT:
    """A ViT of a file under one of the namings.

    Raises:
      InputError: if it is of a kind that is not supported.
    """
    translated = translate(found.tensors, found.family.name)
    mapping = {"transformers": "huggingface", "big_vision": "google"}.get(
        found.family.name, found.family.name
    )
    known = {naming.mapping for naming in ENCODERS}
    naming = _variant(ENCODERS, mapping if mapping in known else "timm", translated.tensors)
    dialect = translated.dialect
    if _is_moco(found.prefix):
        dialect = dialect._replace(pixels="imagenet")
    if naming.layout == "ours":
        return NamedViT(naming, translated.tensors, found.prefix, dialect, found.beside)
    tensors = _without_wrapper(translated.tensors)
    _refuse_other_networks(naming, tensors)
    kept, beside = finding.split_content(tensors, _is_of_network(naming, tensors))
    beside = (*found.beside, *translated.beside, *beside)
    return NamedViT(naming, _with_biases(naming, kept), found.prefix, dialect, beside)


def _is_moco(prefix: str) -> bool:
    """Whether a network is one of MoCo v3's two, by what stood before its names."""
    return finding.components(prefix)[-1:] in [(name,) for name in MOCO_V3]


def sizes(network: NamedViT) -> ViTSizes:
    """What the shapes tell.

    Raises:
      InputError: if the embedding is none of square patches of 3 channels.
    """
    naming = network.naming
    tensors = network.tensors
    patch, width = _patches(naming, tensors)
    return ViTSizes(width, _blocks(naming, tensors), _mlp(naming, tensors, width), patch)


def interpret(network: NamedViT, name: str | None, facts: TensorFacts) -> Interpreted:
    """Check a network tensor by tensor, and bring it to our names and layouts.

    Args:
      network: as `named` gives it.
      name: one of VITS, which the tensors must fit; None takes the architecture from the tensors.
      facts: what is known already; it must not contradict the tensors.

    Raises:
      InputError: if it is of a kind that is not supported, or tensors are missing, unexpected, misshaped or
        not finite.
    """
    naming = network.naming
    tensors = network.tensors
    dialect = network.dialect
    if dialect.rotary and not facts.rotary_base:
        facts = facts._replace(rotary_base=DINOV3_BASE)
    if not dialect.rotary and naming.layout != "ours":
        facts = facts._replace(rotary_base=None)
    config, assumed = _architecture(network, name, facts)
    if dialect.activation:
        config = dataclasses.replace(config, activation=facts.activation or dialect.activation)
        assumed += [] if facts.activation else [_assumed_activation(dialect)]
    shapes = _shapes(parameter_shapes(dataclasses.replace(config, depth=1)))
    outputs = _outputs(naming, tensors)
    if outputs is not None:
        shapes |= {"head.kernel": (config.width, outputs), "head.bias": (outputs,)}
    recipes = _recipes(naming, _OUR_ENCODER, shapes, config)
    decoder = _decoder(network, config, facts) if _has_decoder(tensors) else None
    wanted = recipes | {f"decoder {key}": each for key, each in (decoder[2] if decoder else {}).items()}
    check_tensors(tensors, _their_shapes(wanted), name or _describe(config))
    params = _build(tensors, recipes)
    head = params.pop("head", None)
    trained = any(finding.is_left_out(network.beside, label) for label in _TRAINED)
    wrappers = finding.components(network.prefix)
    return Interpreted(
        config,
        params,
        head,
        decoder and (decoder[0], _build(tensors, decoder[2])),
        "mae" if decoder and naming.mapping == "timm" else naming.mapping,
        fused=len(naming.modules["attn.qkv"]) == 1,
        part=next((role for role in finding.ROLES if role in wrappers), None),
        torch_training=naming.layout == "torch"
        and bool(decoder or _TRAINING.intersection(wrappers) or trained),
        notes=(*_notes(network, config, head), *assumed, *(decoder[1] if decoder else ())),
        pixels=dialect.pixels,
    )


def _assumed_activation(dialect: Dialect) -> str:
    note = f"the activation {dialect.activation} of its kind is assumed"
    return f"{note}: {dialect.doubt}" if dialect.doubt else note


def is_decoder(tensors: Tensors) -> bool:
    """Whether they are a decoder alone, under our names."""
    return bool(tensors) and all(name.startswith("decoder.") for name in tensors)


def interpret_decoder(tensors: Tensors, facts: TensorFacts) -> tuple[DecoderConfig, PyTree, list[str]]:
    """A decoder that comes without its encoder: static shape, parameters, assumptions.

    Args:
      tensors: for which `is_decoder` holds.
      facts: what is known already; it must not contradict the tensors.

    Raises:
      InputError: if tensors are missing, unexpected, misshaped or not finite.
    """
    naming = DECODERS[0]
    patch = math.isqrt((_outputs(naming, tensors) or 3) // 3)
    width = _extent(tensors, _leaf(naming, naming.embed, "kernel"), 0, 1)
    encoder = ViTConfig(_grid(naming, tensors) * patch, patch, width, heads=1)  # as far as its decoder tells
    alone = NamedViT(ENCODERS[0], tensors, "", Dialect(), ())
    config, notes, recipes = _decoder(alone, encoder, facts)
    check_tensors(tensors, _their_shapes(recipes), "a decoder")
    return config, _build(tensors, recipes), notes


def headless(head: PyTree) -> str:
    """The note on a head that is left out."""
    return f"the classification head of {head['bias'].size} classes is no part of the backbone"


def _notes(network: NamedViT, config: ViTConfig, head: PyTree | None) -> list[str]:
    notes = finding.taken(network.prefix)
    if head is not None:
        notes.append(headless(head))
    notes += finding.left_out(network.beside)
    if finding.is_left_out(network.beside, "pre_logits"):
        notes.append(
            "a classification head behind pre_logits is left out too: it does not read the class token"
        )
    if not config.final_norm:
        notes.append("the network has no final norm")
    return notes


# ---- which tensors are its own -----------------------------------------------------------------------------


def _without_wrapper(tensors: Tensors) -> Tensors:
    """Without the name of pMAE's decoder before those of MAE's."""
    return {re.sub(r"^decoder\.(?=decoder_|mask_token$)", "", name): x for name, x in tensors.items()}


def _is_of_network(naming: Naming, tensors: Tensors) -> Callable[[str], bool]:
    """Whether a name that could be other content is the network's: a head of the class token with a weight
    and a bias, and the mask token of a decoder."""
    head = {_leaf(naming, naming.out, leaf) for leaf in ("kernel", "bias")}
    pre_logits = any(name.startswith(("pre_logits.", "pre_logits/")) for name in tensors)
    keeps_head = head <= set(tensors) and not pre_logits
    has_decoder = _has_decoder(tensors)

    def keep(name: str) -> bool:
        return (keeps_head and name in head) or (has_decoder and name == "mask_token")

    return keep


def _with_biases(naming: Naming, tensors: Tensors) -> Tensors:
    """With zeros for the biases of queries, keys and values where no block has any (qkv_bias=False)."""
    block = re.sub("%(02)?d", r"\\d{1,9}", re.escape(naming.block))
    modules = "|".join(map(re.escape, naming.modules["attn.qkv"]))
    kernel = re.compile(f"({block}(?:{modules})){re.escape(_leaf(naming, '', 'kernel'))}")
    biases = {
        f"{match[1]}{_leaf(naming, '', 'bias')}": x.shape[1:] if naming.layout == "google" else x.shape[:1]
        for name, x in tensors.items()
        if (match := kernel.fullmatch(name))
    }
    if not biases.keys().isdisjoint(tensors):
        return tensors
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in biases.items()}


def _variant(namings: tuple[Naming, ...], mapping: str, tensors: Tensors) -> Naming:
    """Of the namings of one mapping, that which names most of the first block's tensors."""

    def count(naming: Naming) -> int:
        modules = [f"{naming.block % 0}{module}" for modules in naming.modules.values() for module in modules]
        return sum(_leaf(naming, module, "bias") in tensors for module in modules)

    return max((naming for naming in namings if naming.mapping == mapping), key=count)


def _has_decoder(tensors: Tensors) -> bool:
    return any(key.startswith(("decoder_", "decoder.")) for key in tensors)


def _refuse_other_networks(naming: Naming, tensors: Tensors) -> None:
    """Refuse networks whose tensors would load, or nearly, and that compute something else."""
    second = r"dist_token|head_dist|(embeddings\.)?distillation_token|distillation_classifier"
    if any(re.match(second, key) for key in tensors):
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


# ---- its architecture --------------------------------------------------------------------------------------


def _architecture(network: NamedViT, name: str | None, facts: TensorFacts) -> tuple[ViTConfig, list[str]]:
    """The static shape of the tensors, or that of `name`, and what had to be assumed."""
    naming = network.naming
    tensors = network.tensors
    width, depth, mlp, patch = sizes(network)
    grid = _grid(naming, tensors)
    norm = {_leaf(naming, naming.norm, leaf) for leaf in ("scale", "bias")}
    first = naming.block % 0
    pre = _leaf(naming, NORM_PRE, "scale")
    config = ViTConfig(grid * patch, patch, width, depth, 1, mlp, final_norm=not norm.isdisjoint(tensors))
    config = dataclasses.replace(
        config,
        layer_scale=_leaf(naming, f"{first}ls1", "scale") in tensors,
        registers=_extent(tensors, _registers(naming), -2, 0),
        qk_norm=_leaf(naming, f"{first}attn.q_norm", "scale") in tensors,
        pre_norm=pre in tensors,
        activation=facts.activation or "gelu",
        epsilon=1e-5 if pre in tensors or facts.rotary_base else ViTConfig.epsilon,  # CLIP's and DINOv3's
        rotary_base=float(facts.rotary_base or 0),
    )
    has = None
    if naming.layout == "google":
        query = f"{naming.block % 0}{naming.modules['attn.qkv'][0]}"
        has = _extent(tensors, _leaf(naming, query, "kernel"), 1, None)
    if has and facts.heads and has != facts.heads:
        raise InputError(f"heads: {facts.heads} asked for, but the checkpoint has {has}")
    heads = facts.heads or has
    if name is not None:
        if heads not in (None, VITS[name].heads):
            raise InputError(
                f"checkpoint: does not fit {name}: it has {heads} heads, needs {VITS[name].heads}"
            )
        return VITS[name], []
    heads, notes = (heads, []) if heads else _assumed_heads(config, network)
    if width % heads:
        raise InputError(f"heads: {heads} does not divide the width {width}")
    return dataclasses.replace(config, heads=heads), notes


def _assumed_heads(config: ViTConfig, network: NamedViT) -> tuple[int, list[str]]:
    """Heads leave no trace in fused or split matrices."""
    if network.naming.layout == "ours":
        for vit in VITS.values():
            if dataclasses.replace(vit, heads=1) == config:
                return vit.heads, []
    heads = _usual_heads(config, network.prefix)
    if heads is None:
        why = f"its width {config.width} is no multiple of 64"
        if config.width % 64 == 0:
            why = f"networks of width {config.width} with MLPs of {config.mlp} have heads of several sizes"
        raise InputError(f"heads: the checkpoint does not tell them, and {why}; give heads")
    assumed = f"{heads} attention heads are assumed, {config.width // heads} channels each"
    return heads, [f"{assumed}: the checkpoint does not tell them"]


# Widths whose heads have another size than 64 channels: So400m, huge, giant, and gigantic.
_WIDE = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}


def _usual_heads(config: ViTConfig, prefix: str) -> int | None:
    """As the authors of such networks have them; None: unknown."""
    if _is_moco(prefix) and config.width == 384:
        return 12  # vits.py of MoCo v3: vit_small
    if config.width in _WIDE:
        return _WIDE[config.width]
    if config.width < VITS["vit_ti16"].width and config.mlp == 3 * config.width:
        return None  # timm's test_vit, with heads of 32 channels
    return None if config.width % 64 else config.width // 64


def _registers(naming: Naming) -> str:
    return "registers" if naming.layout == "ours" else "reg_token"


def _patches(naming: Naming, tensors: Tensors) -> tuple[int, int]:
    """Side of the patches and width, from the patch embedding."""
    shape = tensors[_leaf(naming, naming.embed, "kernel")].shape
    channels = None
    square = (0, 0)
    if naming.layout == "ours" and len(shape) == 2:
        side = math.isqrt(shape[0] // 3)
        channels = 3 if shape[0] == 3 * side**2 else None
        square = (side, side)
    elif len(shape) == 4:
        channels, square = (shape[1], shape[2:]) if naming.layout == "torch" else (shape[2], shape[:2])
    if channels != 3 or square[0] != square[1] or not math.prod(shape):
        raise InputError(
            f"checkpoint: {naming.embed} is no embedding of square patches of 3 channels: "
            f"it has shape {shape}"
        )
    return square[0], shape[0 if naming.layout == "torch" else -1]


def _grid(naming: Naming, tensors: Tensors) -> int:
    """Patches per side, from the position embeddings; 1 if they are missing, which is found later."""
    tokens = _extent(tensors, naming.pos, -2, 2)
    grid = math.isqrt(max(tokens - 1, 1))
    if tokens != 1 + grid**2:
        raise InputError(
            f"checkpoint: {tokens} position embeddings are not those of a class token "
            "and a square grid of patches"
        )
    return grid


def _blocks(naming: Naming, tensors: Tensors) -> int:
    """One more than the highest index of a block; a wild index counts no further than there are tensors."""
    pattern = re.compile(re.sub("%(02)?d", r"(\\d{1,9})", re.escape(naming.block)))
    found = [int(match[1]) + 1 for key in tensors if (match := pattern.match(key))]
    return min(max(found, default=1), len(tensors))


def _mlp(naming: Naming, tensors: Tensors, width: int) -> int:
    first = f"{naming.block % 0}{naming.modules['fc1'][0]}"
    # a length of 0, like a missing bias, is reported by the check of all shapes
    return _extent(tensors, _leaf(naming, first, "bias"), 0, 0) or 4 * width


def _outputs(naming: Naming, tensors: Tensors) -> int | None:
    last = 0 if naming.layout == "torch" else -1
    kernel = _extent(tensors, _leaf(naming, naming.out, "kernel"), last, None)
    return _extent(tensors, _leaf(naming, naming.out, "bias"), 0, None) or kernel


def _extent(tensors: Tensors, name: str, axis: int, default):
    """Length of an axis, or the default if there is none, which the check that follows reports better."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else default


def _decoder(
    network: NamedViT, config: ViTConfig, facts: TensorFacts
) -> tuple[DecoderConfig, list[str], dict[str, _Recipe]]:
    """A masked autoencoder's decoder: its static shape, what had to be assumed, and where its tensors are."""
    tensors = network.tensors
    notes = []
    naming = _variant(DECODERS, network.naming.mapping, tensors)
    width = _extent(tensors, naming.token, -1, 512)
    heads = facts.decoder_heads
    if heads is None:
        heads = 16 if width % 16 == 0 else config.heads  # MAE's are 16, whatever the encoder has
        notes = [f"{heads} attention heads of the decoder are assumed: the checkpoint does not tell them"]
    if heads < 1 or width < 1 or width % heads:
        raise InputError(
            f"decoder_heads: {heads} does not divide the decoder's width {width}; give --decoder-heads"
        )
    depth = _blocks(naming, tensors)
    mlp = _mlp(naming, tensors, width)
    decoder = DecoderConfig(config.image_size, config.patch, config.width, width, depth, heads, mlp)
    shapes = _shapes(decoder_shapes(dataclasses.replace(decoder, depth=1)))
    return decoder, notes, _recipes(naming, _OUR_DECODER, shapes, decoder)


def _describe(config: ViTConfig) -> str:
    return f"a ViT of {config.depth} blocks, width {config.width} and {config.grid} x {config.grid} patches"


# ---- its tensors -------------------------------------------------------------------------------------------


def _dot(naming: Naming) -> str:
    return "/" if naming.layout == "google" else "."


def _leaf(naming: Naming, module: str, leaf: str) -> str:
    return f"{module}{_dot(naming)}{'weight' if naming.layout == 'torch' and leaf != 'bias' else leaf}"


def _shapes(tree: PyTree) -> Shapes:
    flat: dict[str, Any] = flatten_dict(tree, sep=".")
    return {name: leaf.shape for name, leaf in flat.items()}


def _recipes(
    theirs: Naming, ours: Naming, shapes: Shapes, config: ViTConfig | DecoderConfig
) -> dict[str, _Recipe]:
    """For every tensor of ours, by name and in order, how it is made.

    Args:
      theirs, ours: the names of the file's stack and of our own.
      shapes: of our tensors, for a network of one block.
      config: the network's own shape.
    """
    recipes = {}
    first = ours.block % 0
    single = {ours.token: theirs.token, ours.pos: theirs.pos, "registers": _registers(theirs)}
    outside = {ours.embed: theirs.embed, ours.norm: theirs.norm, ours.out: theirs.out, NORM_PRE: NORM_PRE}
    for name, shape in shapes.items():
        if name in single:
            lead = () if theirs.layout == "ours" else (1,) * (3 - len(shape))
            recipes[name] = _Recipe((single[name],), (*lead, *shape), shape, False)
            continue
        module, _, leaf = name.rpartition(".")
        inner = module.removeprefix(first)
        copies = [(module, [outside[module]])] if module in outside else []
        if inner != module:
            copies = [
                (ours.block % i + inner, [theirs.block % i + each for each in theirs.modules[inner]])
                for i in range(config.depth)
            ]
        for mine, modules in copies:
            part = (*shape[:-1], shape[-1] // len(modules))
            names = tuple(_leaf(theirs, each, leaf) for each in modules)
            their_shape = _their_shape(theirs.layout, inner, part, config)
            recipes[f"{mine}.{leaf}"] = _Recipe(names, their_shape, part, theirs.layout == "torch")
    return dict(sorted(recipes.items()))


def _their_shape(
    layout: str, module: str, shape: tuple[int, ...], config: ViTConfig | DecoderConfig
) -> tuple[int, ...]:
    """The shape, in their layout, of a tensor that has `shape` in ours."""
    patch = config.patch
    width = config.width
    heads = config.heads
    if layout == "ours":
        return shape
    if module == _OUR_ENCODER.embed and len(shape) == 2:
        return (width, 3, patch, patch) if layout == "torch" else (patch, patch, 3, width)
    if layout == "torch":
        return shape[::-1]
    if module == "attn.qkv":
        return (*shape[:-1], heads, width // heads)
    return (heads, width // heads, width) if module == "attn.proj" and len(shape) == 2 else shape


def _their_shapes(recipes: dict[str, _Recipe]) -> Shapes:
    return {name: recipe.theirs for recipe in recipes.values() for name in recipe.names}


def _build(tensors: Tensors, recipes: dict[str, _Recipe]) -> PyTree:
    """Our parameters; float32 tensors that need no joining stay views."""
    flat = {}
    for ours, recipe in recipes.items():
        parts = []
        for name in recipe.names:
            x = float32(name, tensors[name])
            if recipe.reverse:
                x = reverse(x)
            parts.append(x.reshape(recipe.ours))
        flat[ours] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
    return unflatten_dict(flat, sep=".")
