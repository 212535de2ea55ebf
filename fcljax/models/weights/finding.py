"""The one network to take from a file: whose names it has, what stands before them, and what is beside it.

Every way in (`run`, `doctor`, `convert`, `embed`, a decoder's file) asks `find`, whatever the family.
A family is told by the name of one tensor, its anchor, and is taken only if the names that it must have are
there too. What stands before the anchor is the network's prefix, which may be any where the file holds one
network. Where it holds several, `part` or a known rule decides; otherwise the file is refused.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from fcljax.errors import InputError, choose
from fcljax.models.weights.tensors import Tensors, listed

Reader = Literal["vit", "convnet", "convnext"]


class Family(NamedTuple):
    """Networks that are told by the names of their tensors."""

    name: str
    """As `dialects.DIALECTS` and messages name it."""
    anchor: str
    """A pattern of the name, behind the prefix, of the tensor that tells it."""
    needs: tuple[str, ...] = ()
    """Patterns of names, each of which some tensor behind the prefix must have."""
    lacks: tuple[str, ...] = ()
    """Patterns of names that no tensor behind the prefix may have."""
    reader: Reader = "vit"


# The first whose anchor, needs and lacks fit counts.
FAMILIES = (
    Family(
        "DINOv3 of transformers", r"embeddings\.patch_embeddings\.weight", (r"embeddings\.register_tokens",)
    ),
    Family("DINOv3", r"storage_tokens", (r"cls_token", r"patch_embed\.proj\.weight")),
    Family(  # RoPE-ViTs have neither its registers nor its lack of a joint bias
        "DINOv3 of timm",
        r"blocks\.0\.gamma_1",
        (r"reg_token", r"cls_token"),
        (r"pos_embed", r"blocks\.0\.attn\.qkv\.bias"),
    ),
    Family("CLIP of transformers", r"pre_layrnorm\.weight", (r"embeddings\.class_embedding",)),
    Family("CLIP", r"ln_pre\.weight", (r"class_embedding", r"conv1\.weight")),
    Family(
        "CLIP of timm",
        r"norm_pre\.weight",
        (r"cls_token", r"patch_embed\.proj\.weight"),
        (r"patch_embed\.proj\.bias",),
    ),
    Family("DINOv2 of transformers", r"encoder\.layer\.0\.layer_scale1\.lambda1"),
    Family("DINOv2", r"blocks\.0\.ls1\.gamma", (r"patch_embed\.proj\.weight",)),
    Family("torchvision", r"conv_proj\.weight", (r"class_token", r"encoder\.pos_embedding")),
    Family("timm", r"patch_embed\.proj\.weight"),
    Family("transformers", r"embeddings\.patch_embeddings\.projection\.weight"),
    Family("fcljax", r"patch\.kernel"),
    Family(
        "big_vision", r"embedding/kernel", (r"pos_embedding|Transformer/encoderblock(_0)?/LayerNorm_1/scale",)
    ),
    Family("google", r"embedding/kernel"),
    Family("ResNet", r"layer1\.0\.conv1\.weight", reader="convnet"),
    Family("DenseNet", r"features\.denseblock1\.denselayer1\.conv\.?1\.weight", reader="convnet"),
    Family("ConvNeXt", r"stages\.0\.blocks\.0\.conv_dw\.weight", reader="convnext"),
    Family("ConvNeXt", r"features\.1\.0\.block\.0\.weight", reader="convnext"),
    Family("ConvNeXt", r"stages\.0\.0\.dwconv\.weight", reader="convnext"),
)
# Families that are not read, by a name that only they have.
_NOT_READ = {
    r"(.*\.)?embedder\.embedder\.convolution\.weight": "a ResNet of transformers",
    r"(.*\.)?encoder\.stages\.0\.layers\.0\.dwconv\.weight": "a ConvNeXt of transformers",
    r"(.*\.)?encoder\.layers\.0\.self_attn\.k_proj\.weight": "transformers' SigLIP or a text's tower",
    r"(.*\.)?layer1\.0\.residual_function\.0\.weight": "a ResNet under other names than torchvision's",
    r"(.*\.)?stage_1\.0\.conv_a\.weight": "a ResNet under other names than torchvision's",
    r"(.*\.)?features\.denseblock1\.0\.conv1\.weight": "a DenseNet under other names than torchvision's",
}

ROLES = ("teacher", "student")
# Of two networks that differ in one part of their prefix, the one that its authors use: taken -> left out.
_PAIRS = {"encoder_q": "encoder_k", "base_encoder": "momentum_encoder"}
_AVERAGED = re.compile(r"(?:(.*)_)?ema(?:_.*)?")
_OPTIMISER = re.compile(r"opt_states?|optimizer_states?|mu|nu|exp_avg(_sq)?|param_states")
# A head or decoder that lies one level above its network.
_ABOVE = re.compile(
    r"(head|classifier|fc|linear)[./](weight|bias|kernel)|(decoder\.)?(decoder_|mask_token).*"
)
# Other content of a training's checkpoint, by its name in notes.
_KNOWN = {
    "teacher": r"teacher\..*",
    "student": r"student\..*",
    "optimizer and schedule": r"(optimizer|optimizer_states?|scaler|fp16_scaler|loss_scaler|lr_scheduler"
    r"|scheduler|epoch|args|opt|opt_state|step)([./].*)?",
    "centers of the loss": r"(dino|ibot)_loss\..*",
    "projection head": r"head\.(mlp|last_).*|head2\..*",
    "averaged copy": r"(model|state_dict)_ema\..*",
    "masked_embed": r"masked_embed",
    "mask_token": r"(embeddings\.)?mask_token",
    "pooler": r"pooler[./].*",
    "pre_logits": r"pre_logits[./].*",
}
# Heads and counters, whatever their shape: nothing of a backbone reads them.
_HEAD = re.compile(
    r"(head|heads|fc|classifier|linear|last_linear|proj|projector|projection|projection_head|predictor|"
    r"visual_projection|logit_scale|logit_bias)([./].*)?|(.*\.)?(position_ids|num_batches_tracked)|"
    r"rope_embed(dings)?\.(periods|inv_freq)"
)
MOST_LABELS = 8  # in a note


class NetworkInFile(NamedTuple):
    """One network of a file."""

    family: Family
    prefix: str
    tensors: Tensors
    """By the names behind the prefix, with a head or a decoder that lies one level above."""
    beside: tuple[str, ...]
    """Names, without the prefix where they have it, of what is no part of the network."""


def find(tensors: Tensors, part: str) -> NetworkInFile:
    """The network to take.

    Args:
      tensors: by name, as `checkpoints.read_checkpoint` gives them.
      part: "teacher", "student", or any other part of the names before one of several networks.

    Raises:
      InputError: if there is no network, or several of which no rule takes one.
    """
    candidates = _candidates(tensors)
    if not candidates:
        raise InputError(_nothing(tensors))
    prefix = _chosen(list(candidates), part)
    others = [other for other in candidates if other != prefix and other.startswith(prefix)]
    own: Tensors = {}
    beside: list[str] = []
    above = _parent(prefix)
    for name, x in tensors.items():
        if name.startswith(prefix) and not any(name.startswith(other) for other in others):
            own[name.removeprefix(prefix)] = x
    for name, x in tensors.items():
        short = name.removeprefix(above)
        if name.startswith(prefix) and not any(name.startswith(other) for other in others):
            continue
        if name.startswith(above) and _ABOVE.fullmatch(short) and short not in own:
            own[short] = x
        else:
            beside.append(short)
    return NetworkInFile(candidates[prefix], prefix, own, tuple(beside))


def _candidates(tensors: Tensors) -> dict[str, Family]:
    """The family of each network, by its prefix."""
    found: dict[str, Family] = {}
    for family in FAMILIES:
        pattern = re.compile(rf"((?:.*[./])?){family.anchor}")
        for name in tensors:
            match = pattern.fullmatch(name)
            if match and match[1] not in found and _fits(family, match[1], tensors):
                found[match[1]] = family
    return found


def _fits(family: Family, prefix: str, tensors: Tensors) -> bool:
    """Whether the names that the family must have are there, and none that it may not have."""
    if not family.needs and not family.lacks:
        return True
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in names)

    return all(map(has, family.needs)) and not any(map(has, family.lacks))


def _nothing(tensors: Tensors) -> str:
    for pattern, what in _NOT_READ.items():
        name = next((name for name in tensors if re.fullmatch(pattern, name)), None)
        if name is not None:
            return f"checkpoint: {name} is of {what}, which is not read here; timm's and torchvision's are"
    holds = listed(list(tensors)) or "no tensors"
    return (
        "checkpoint: no Vision Transformer in it: no tensor has a name by which one is told, nor a ResNet, "
        f"DenseNet or ConvNeXt (docs/checkpoints.md); it holds: {holds}"
    )


# ---- one of several ----------------------------------------------------------------------------------------


def components(prefix: str) -> tuple[str, ...]:
    """The parts of a prefix."""
    return tuple(re.split(r"[./]", prefix)[:-1])


def _parent(prefix: str) -> str:
    """The prefix without its last part."""
    return re.sub(r"[^./]+[./]$", "", prefix)


def _chosen(prefixes: list[str], part: str) -> str:
    """The prefix of the network to take."""
    whole = list(prefixes)
    prefixes = _of_part(prefixes, part)
    rules: tuple[Callable[[str], bool], ...] = (_is_optimiser, _is_averaged, _is_second(prefixes))
    for rule in rules:
        rest = [prefix for prefix in prefixes if not rule(prefix)]
        prefixes = rest or prefixes
    if len(prefixes) == 1:
        return prefixes[0]
    names = sorted({name for prefix in prefixes for name in components(prefix)} - _shared(prefixes))
    way = f"choose one with --part {' or '.join(names)}, as of fcljax convert, " if names else ""
    raise InputError(
        f"checkpoint: it holds several networks, under {listed([repr(prefix) for prefix in whole])}; {way}"
        "or give a file of one network"
    )


def _of_part(prefixes: Sequence[str], part: str) -> list[str]:
    """Those of that part, where the file has parts."""
    chosen = [prefix for prefix in prefixes if part in components(prefix)]
    roles = [role for role in ROLES if any(role in components(prefix) for prefix in prefixes)]
    if chosen:
        return chosen
    if part in ROLES and roles:
        raise InputError(f"part: the checkpoint has no {part}; choose {roles[0]!r}")
    if part == ROLES[0]:  # the default, which says nothing of a file without teacher and student
        return list(prefixes)
    if part in ROLES:
        raise InputError(f"part: the checkpoint has no {part}: it is no file of a teacher and a student")
    names = {name for prefix in prefixes for name in components(prefix)} | set(ROLES)
    choose("part", part, sorted(names))
    return list(prefixes)


def _is_optimiser(prefix: str) -> bool:
    return any(_OPTIMISER.fullmatch(name) for name in components(prefix))


def _is_averaged(prefix: str) -> bool:
    return any(_AVERAGED.fullmatch(name) for name in components(prefix))


def _is_second(prefixes: Iterable[str]) -> Callable[[str], bool]:
    """Whether a prefix is that of the second network of a pair."""
    there = {name for prefix in prefixes for name in components(prefix)}
    second = {other for first, other in _PAIRS.items() if first in there}
    return lambda prefix: not second.isdisjoint(components(prefix))


def _shared(prefixes: Sequence[str]) -> set[str]:
    """The parts that all prefixes have."""
    return set.intersection(*(set(components(prefix)) for prefix in prefixes))


# ---- what is beside it -------------------------------------------------------------------------------------


def split_content(tensors: Tensors, keep: Callable[[str], bool]) -> tuple[Tensors, tuple[str, ...]]:
    """The network's tensors, and the names of known other content between them: heads and the like.

    Args:
      tensors: by the names behind the prefix.
      keep: whether a name is the network's, whatever it looks like.
    """
    others = tuple(name for name in tensors if not keep(name) and (_HEAD.fullmatch(name) or _label(name)))
    return {name: x for name, x in tensors.items() if name not in set(others)}, others


def _label(name: str) -> str | None:
    return next((label for label, pattern in _KNOWN.items() if re.fullmatch(pattern, name)), None)


def is_left_out(names: Iterable[str], label: str) -> bool:
    """Whether some of these names have that label."""
    return any(_label(name) == label for name in names)


def taken(prefix: str) -> list[str]:
    """The notes on the network that was taken of a teacher and a student."""
    return [f"the {role}'s weights were taken" for role in sorted(ROLES) if role in components(prefix)]


def left_out(names: Iterable[str]) -> list[str]:
    """The note on what is left out, with counts; none for nothing, nor for counters of batches."""
    counts = Counter(
        _label(name) or re.split(r"[./]", name)[0]
        for name in names
        if not name.endswith("num_batches_tracked")
    )
    if not counts:
        return []
    order = [label for label in _KNOWN if label in counts]
    order += sorted(label for label in counts if label not in _KNOWN)
    parts = [f"{label} ({counts[label]})" for label in order[:MOST_LABELS]]
    rest = sum(counts[label] for label in order[MOST_LABELS:])
    more = f" and {rest} others" if rest else ""
    return [f"left out, being no part of the backbone: {', '.join(parts)}{more}"]
