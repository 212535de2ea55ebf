"""From the names and shapes of a file's tensors to a Vision Transformer under our own names and layouts.

A network is a stack: an embedding, a learned token, positions, blocks, a norm and an output. That holds for
the encoder (patches, class token, head) and for the decoder of a masked autoencoder (latents, mask token,
pixels), so one table of names describes either. Kernels are [in, out] here, [out, in] in torch, and split by
heads in Google's files.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError, choose
from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.shapes import VITS
from fcljax.models.vit import ViTConfig, parameter_shapes
from fcljax.models.weights.dialects import translate
from fcljax.types import PyTree

Tensors = dict[str, np.ndarray]


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
    activation: Literal["gelu", "quick_gelu"] | None = None
    rotary_base: float | None = None


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

_WRAPPERS = {"model", "state_dict", "teacher", "student", "module", "backbone", "encoder", "vit", "_orig_mod"}
_NETWORK = {"backbone", "encoder", "vit"}  # wrappers beside which heads and decoders are
_ROLES = {"teacher", "student"}
_TRAINING = {"teacher", "student", "model", "state_dict", "backbone"}  # wrappers in checkpoints of a training
# Other content of a training's checkpoint, by its name in notes.
_IGNORED = {
    "teacher": r"teacher\..*",
    "student": r"student\..*",
    "optimizer and schedule": r"(optimizer|scaler|fp16_scaler|loss_scaler|lr_scheduler|scheduler|epoch|args)"
    r"(\..*)?",
    "centers of the loss": r"(dino|ibot)_loss\..*",
    "projection head": r"head\.(mlp|last_).*|head2\..*",
    "averaged copy": r"model_ema\..*",
    "masked_embed": r"masked_embed",
    "mask_token": r"(embeddings\.)?mask_token",
    "pooler": r"pooler\..*",
    "pre_logits": r"pre_logits[./].*",
}


class _Found(NamedTuple):
    """A network's tensors under a naming, by names without wrappers and without ignored content."""

    naming: Naming
    tensors: Tensors
    wrappers: frozenset[str]
    ignored: tuple[str, ...]  # keys of _IGNORED


class _Recipe(NamedTuple):
    """How one tensor of ours is made of theirs, which are joined on the last axis."""

    names: tuple[str, ...]
    theirs: tuple[int, ...]  # the shape of each
    ours: tuple[int, ...]  # the shape that it gets
    reverse: bool  # whether its axes are reversed first


def interpret(tensors: Tensors, name: str | None, facts: TensorFacts, part: str) -> Interpreted:
    """Find the network in `tensors`, check it tensor by tensor, and bring it to our names and layouts.

    Args:
      tensors: by name, as `checkpoints.read_checkpoint` gives them.
      name: one of VITS, which the tensors must fit; None takes the architecture from the tensors.
      facts: what is known already; it must not contradict the tensors.
      part: "teacher" or "student", for files that hold both.

    Raises:
      InputError: if there is no ViT, or one of a kind that is not supported, or tensors are missing,
        unexpected, misshaped or not finite.
    """
    translated = translate(tensors)
    found = _find(translated.tensors, choose("part", part, sorted(_ROLES)))
    naming = found.naming
    _refuse_other_networks(naming, found.tensors)
    if translated.rotary and not facts.rotary_base:
        facts = facts._replace(rotary_base=DINOV3_BASE)
    if not translated.rotary and naming.layout != "ours":
        facts = facts._replace(rotary_base=None)
    config, assumed = _architecture(naming, found.tensors, name, facts)
    if translated.activation and name is None:
        activation = facts.activation or translated.activation
        config = dataclasses.replace(config, activation=activation)
        assumed += [] if facts.activation else [f"the activation {activation} of its kind is assumed"]
    shapes, outputs = _shapes(parameter_shapes(dataclasses.replace(config, depth=1))), _outputs(found)
    if outputs is not None:
        shapes |= {"head.kernel": (config.width, outputs), "head.bias": (outputs,)}
    recipes = _recipes(naming, _OUR_ENCODER, shapes, config)
    decoder = _decoder(found, config, facts) if _has_decoder(found.tensors) else None
    wanted = recipes | {f"decoder {key}": each for key, each in (decoder[2] if decoder else {}).items()}
    check_tensors(found.tensors, _their_shapes(wanted), name or _describe(config))
    params = _build(found.tensors, recipes)
    head = params.pop("head", None)
    trained = {"mask_token", "masked_embed", "centers of the loss"} & set(found.ignored)
    return Interpreted(
        config,
        params,
        head,
        decoder and (decoder[0], _build(found.tensors, decoder[2])),
        "mae" if decoder and naming.mapping == "timm" else naming.mapping,
        fused=len(naming.modules["attn.qkv"]) == 1,
        part=next(iter(_ROLES & found.wrappers), None),
        torch_training=naming.layout == "torch" and bool(decoder or found.wrappers & _TRAINING or trained),
        notes=(
            *_notes(found, config, head),
            *translated.notes,
            *assumed,
            *(decoder[1] if decoder else ()),
        ),
        pixels=translated.pixels,
    )


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
    patch = math.isqrt((_outputs(_Found(naming, tensors, frozenset(), ())) or 3) // 3)
    width = _extent(tensors, _leaf(naming, naming.embed, "kernel"), 0, 1)
    encoder = ViTConfig(_grid(naming, tensors) * patch, patch, width, heads=1)  # as far as its decoder tells
    config, notes, recipes = _decoder(_Found(ENCODERS[0], tensors, frozenset(), ()), encoder, facts)
    check_tensors(tensors, _their_shapes(recipes), "a decoder")
    return config, _build(tensors, recipes), notes


def headless(head: PyTree) -> str:
    """The note on a head that is left out."""
    return f"the classification head of {head['bias'].size} classes is no part of the backbone"


def _notes(found: _Found, config: ViTConfig, head: PyTree | None) -> list[str]:
    notes = [f"the {role}'s weights were taken" for role in sorted(_ROLES & found.wrappers)]
    if head is not None:
        notes.append(headless(head))
    if found.ignored:
        notes.append(f"left out, being no part of the backbone: {', '.join(found.ignored)}")
    if "pre_logits" in found.ignored:
        notes.append(
            "a classification head behind pre_logits is left out too: it does not read the class token"
        )
    if not config.final_norm:
        notes.append("the network has no final norm")
    return notes


# ---- which network it is -----------------------------------------------------------------------------------


def _find(tensors: Tensors, part: str) -> _Found:
    """The network's tensors without the wrappers around their names, and the labels of ignored content."""
    prefix, naming = _prefix(tensors, part)
    wrappers = prefix.split(".")[:-1]
    outer = ".".join([*wrappers[:-1], ""]) if wrappers and wrappers[-1] in _NETWORK else prefix
    named: Tensors = {}
    for key, value in tensors.items():
        short = next((key.removeprefix(start) for start in (prefix, outer) if key.startswith(start)), key)
        if naming.layout == "torch":
            short = re.sub(r"^decoder\.(?=decoder_|mask_token$)", "", short)
        named[key if short in named else short] = value
    ignored = {}
    if naming.layout != "ours":
        ignored = {
            key: label for key in named for label, names in _IGNORED.items() if re.fullmatch(names, key)
        }
    if _has_decoder(named):
        ignored.pop("mask_token", None)
    if "pre_logits" in ignored.values():
        head = f"{naming.out}{_dot(naming)}"
        ignored |= {key: "classification head" for key in named if key.startswith(head)}
    kept = {key: value for key, value in named.items() if key not in ignored}
    labels = tuple(label for label in [*_IGNORED, "classification head"] if label in ignored.values())
    return _Found(_variant(ENCODERS, naming, kept), kept, frozenset(wrappers), labels)


def _prefix(tensors: Tensors, part: str) -> tuple[str, Naming]:
    """The prefix of the names of the one network to take, and its naming."""
    anchors = {_leaf(naming, naming.embed, "kernel"): naming for naming in reversed(ENCODERS)}
    at = {
        key.removesuffix(anchor): naming
        for key in tensors
        for anchor, naming in anchors.items()
        if key == anchor or key.endswith(f".{anchor}")
    }
    if not at:
        wanted = ", ".join(f"{anchor} ({naming.mapping})" for anchor, naming in reversed(anchors.items()))
        raise InputError(
            f"checkpoint: no Vision Transformer in it: none of {wanted}; "
            f"it holds: {_listed(list(tensors)) or 'no tensors'}"
        )
    known = {prefix: naming for prefix, naming in at.items() if set(prefix.split(".")[:-1]) <= _WRAPPERS}
    roles = {role: [prefix for prefix in known if role in prefix.split(".")] for role in sorted(_ROLES)}
    if any(roles.values()):
        if not roles[part]:
            raise InputError(
                f"part: the checkpoint has no {part}; choose {next(role for role in roles if roles[role])!r}"
            )
        known = {prefix: known[prefix] for prefix in roles[part]}
    if len(known) != 1:
        prefixes = ", ".join(repr(prefix) for prefix in known or at)
        problem = "several networks, under" if known else "a network under a wrapper of another kind:"
        raise InputError(
            f"checkpoint: it holds {problem} {prefixes}; "
            f"give a file of one network, bare or under {', '.join(sorted(_WRAPPERS))}"
        )
    return next(iter(known.items()))


def _variant(namings: tuple[Naming, ...], like: Naming, tensors: Tensors) -> Naming:
    """Of the namings of one mapping, that which names most of the first block's tensors."""

    def named(naming: Naming) -> int:
        modules = [f"{naming.block % 0}{module}" for modules in naming.modules.values() for module in modules]
        return sum(_leaf(naming, module, "bias") in tensors for module in modules)

    return max((naming for naming in namings if naming.mapping == like.mapping), key=named)


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


def _architecture(
    naming: Naming, tensors: Tensors, name: str | None, facts: TensorFacts
) -> tuple[ViTConfig, list[str]]:
    """The static shape of the tensors, or that of `name`, and what had to be assumed."""
    patch, width = _patches(naming, tensors)
    grid, norm = _grid(naming, tensors), {_leaf(naming, naming.norm, leaf) for leaf in ("scale", "bias")}
    depth, mlp = _blocks(naming, tensors), _mlp(naming, tensors, width)
    first, pre = naming.block % 0, _leaf(naming, NORM_PRE, "scale")
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
    heads, notes = (heads, []) if heads else _assumed_heads(config, naming)
    if width % heads:
        raise InputError(f"heads: {heads} does not divide the width {width}")
    return dataclasses.replace(config, heads=heads), notes


def _assumed_heads(config: ViTConfig, naming: Naming) -> tuple[int, list[str]]:
    """Heads leave no trace in fused or split matrices."""
    if naming.layout == "ours":
        for vit in VITS.values():
            if dataclasses.replace(vit, heads=1) == config:
                return vit.heads, []
    huge = config.width in (1280, 1408, 1664)  # from "huge" on, ViTs have 16 heads of more than 64 channels
    if config.width % 64 and not huge:
        raise InputError(
            f"heads: the checkpoint does not tell them, and its width {config.width} is no multiple of 64; "
            "give heads"
        )
    heads = 16 if huge else config.width // 64
    assumed = f"{heads} attention heads are assumed, {config.width // heads} channels each"
    return heads, [f"{assumed}: the checkpoint does not tell them"]


def _registers(naming: Naming) -> str:
    return "registers" if naming.layout == "ours" else "reg_token"


def _patches(naming: Naming, tensors: Tensors) -> tuple[int, int]:
    """Side of the patches and width, from the patch embedding."""
    shape = tensors[_leaf(naming, naming.embed, "kernel")].shape
    channels, square = None, (0, 0)
    if naming.layout == "ours" and len(shape) == 2:
        side = math.isqrt(shape[0] // 3)
        channels, square = 3 if shape[0] == 3 * side**2 else None, (side, side)
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
    return _extent(tensors, _leaf(naming, first, "bias"), 0, 4 * width)


def _outputs(found: _Found) -> int | None:
    naming, tensors = found.naming, found.tensors
    last = 0 if naming.layout == "torch" else -1
    kernel = _extent(tensors, _leaf(naming, naming.out, "kernel"), last, None)
    return _extent(tensors, _leaf(naming, naming.out, "bias"), 0, None) or kernel


def _extent(tensors: Tensors, name: str, axis: int, default):
    """Length of an axis, or the default if there is none, which the check that follows reports better."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else default


def _decoder(
    found: _Found, config: ViTConfig, facts: TensorFacts
) -> tuple[DecoderConfig, list[str], dict[str, _Recipe]]:
    """A masked autoencoder's decoder: its static shape, what had to be assumed, and where its tensors are."""
    naming, notes = _variant(DECODERS, found.naming, found.tensors), []
    width, heads = _extent(found.tensors, naming.token, -1, 512), facts.decoder_heads
    if heads is None:
        heads = 16 if width % 16 == 0 else config.heads  # MAE's are 16, whatever the encoder has
        notes = [f"{heads} attention heads of the decoder are assumed: the checkpoint does not tell them"]
    if heads < 1 or width < 1 or width % heads:
        raise InputError(
            f"decoder_heads: {heads} does not divide the decoder's width {width}; give --decoder-heads"
        )
    depth, mlp = _blocks(naming, found.tensors), _mlp(naming, found.tensors, width)
    decoder = DecoderConfig(config.image_size, config.patch, config.width, width, depth, heads, mlp)
    shapes = _shapes(decoder_shapes(dataclasses.replace(decoder, depth=1)))
    return decoder, notes, _recipes(naming, _OUR_DECODER, shapes, decoder)


def _describe(config: ViTConfig) -> str:
    return f"a ViT of {config.depth} blocks, width {config.width} and {config.grid} x {config.grid} patches"


# ---- its tensors -------------------------------------------------------------------------------------------

_Shapes = dict[str, tuple[int, ...]]


def _dot(naming: Naming) -> str:
    return "/" if naming.layout == "google" else "."


def _leaf(naming: Naming, module: str, leaf: str) -> str:
    return f"{module}{_dot(naming)}{'weight' if naming.layout == 'torch' and leaf != 'bias' else leaf}"


def _shapes(tree: PyTree) -> _Shapes:
    flat: dict[str, Any] = flatten_dict(tree, sep=".")
    return {name: leaf.shape for name, leaf in flat.items()}


def _recipes(
    theirs: Naming, ours: Naming, shapes: _Shapes, config: ViTConfig | DecoderConfig
) -> dict[str, _Recipe]:
    """For every tensor of ours, by name and in order, how it is made.

    Args:
      theirs, ours: the names of the file's stack and of our own.
      shapes: of our tensors, for a network of one block.
      config: the network's own shape.
    """
    recipes, first = {}, ours.block % 0
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
    patch, width, heads = config.patch, config.width, config.heads
    if layout == "ours":
        return shape
    if module == _OUR_ENCODER.embed and len(shape) == 2:
        return (width, 3, patch, patch) if layout == "torch" else (patch, patch, 3, width)
    if layout == "torch":
        return shape[::-1]
    if module == "attn.qkv":
        return (*shape[:-1], heads, width // heads)
    return (heads, width // heads, width) if module == "attn.proj" and len(shape) == 2 else shape


def _their_shapes(recipes: dict[str, _Recipe]) -> _Shapes:
    return {name: recipe.theirs for recipe in recipes.values() for name in recipe.names}


def check_tensors(tensors: Tensors, wanted: _Shapes, name: str) -> None:
    """Check that a file has exactly these tensors.

    Raises:
      InputError: naming the first tensors that are misshaped, missing or unexpected.
    """
    found = {
        "misshaped": [
            f"{key} has shape {tuple(tensors[key].shape)}, needs {shape}"
            for key, shape in wanted.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ],
        "missing": [key for key in wanted if key not in tensors],
        "unexpected": [key for key in tensors if key not in wanted],
    }
    problems = [f"{kind}: {_listed(keys)}" for kind, keys in found.items() if keys]
    if problems:
        raise InputError(f"checkpoint: does not fit {name}: {'; '.join(problems)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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


def float32(name: str, x: np.ndarray) -> np.ndarray:
    """A tensor as float32.

    Raises:
      InputError: if it holds no floating-point numbers, or some that are not finite.
    """
    if not (np.issubdtype(x.dtype, np.floating) or x.dtype == ml_dtypes.bfloat16):
        raise InputError(f"checkpoint: {name} holds {x.dtype}, and weights are floating-point numbers")
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise InputError(f"checkpoint: {name} has values that are not finite")
    return x


def reverse(x: np.ndarray) -> np.ndarray:
    """From torch's layout [out, in] or [out, in, row, column] to [in, out] or [row, column, in, out]."""
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T
