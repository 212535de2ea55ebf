"""Find the one network of a file: its family, the prefix of its names, and what the
file holds besides.

`run`, `doctor`, `convert`, `embed` and the readers of decoders all call `find`,
whatever the family. A family is recognised by the name of one tensor, its anchor, if
the other names that it needs are there too. What stands before the anchor is the
network's prefix. A file of one network may have any prefix. Of several networks, `part`
or a known rule chooses; otherwise the file is refused.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from fcljax.errors import InputError, choose
from fcljax.models.weights.tensors import Tensors, listed

Reader = Literal["vit", "convnet", "convnext", "text"]


class Family(NamedTuple):
    """Networks that are recognised by the names of their tensors; patterns are of names
    without prefix."""

    name: str
    """As `dialects.DIALECTS` and messages name it."""
    anchor: str
    """A pattern of the name of the tensor that shows the family."""
    needs: tuple[str, ...] = ()
    """Patterns of names, each of which some tensor must have."""
    lacks: tuple[str, ...] = ()
    """Patterns of names that no tensor may have."""
    reader: Reader = "vit"


# A network is of the first family whose anchor, needs and lacks fit, so special names
# come before those of families that share their tensors: CLIP of timm before timm.
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
    Family(
        "BERT",
        r"embeddings\.word_embeddings\.weight",
        (r"encoder\.layer\.0\.attention\.self\.query\.weight",),
        reader="text",
    ),
    Family(
        "DistilBERT",
        r"embeddings\.word_embeddings\.weight",
        (r"transformer\.layer\.0\.attention\.q_lin\.weight",),
        reader="text",
    ),
    Family(  # SigLIP's text has a head
        "CLIP's text of transformers",
        r"embeddings\.token_embedding\.weight",
        lacks=(r"head\.weight",),
        reader="text",
    ),
    Family("CLIP's text", r"token_embedding\.weight", (r"ln_final\.weight",), reader="text"),
    Family("fcljax's text", r"embed", (r"block_00\.attn\.qkv\.kernel",), reader="text"),
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
# Of two networks that differ in one part of their prefix: the one that its authors
# evaluate -> its averaged copy.
_PAIRS = {"encoder_q": "encoder_k", "base_encoder": "momentum_encoder"}
_AVERAGED = re.compile(r"(?:(.*)_)?ema(?:_.*)?")
_OPTIMISER = re.compile(r"opt_states?|optimizer_states?|mu|nu|exp_avg(_sq)?|param_states")
# A head or decoder that lies one level above its network.
_ONE_LEVEL_UP = re.compile(
    r"(head|classifier|fc|linear)[./](weight|bias|kernel)|(decoder\.)?(decoder_|mask_token).*"
)
# Other content of a training's checkpoint, by its label in notes.
_OTHER_CONTENT = {
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
# Heads and counters, which no part of a backbone reads.
_HEAD = re.compile(
    r"(head|heads|fc|classifier|linear|last_linear|proj|projector|projection|projection_head|predictor|"
    r"visual_projection|text_projection|logit_scale|logit_bias)([./].*)?|(.*\.)?(position_ids|num_batches_tracked)|"
    r"rope_embed(dings)?\.(periods|inv_freq)"
)
MOST_LABELS = 8  # in a note


class NetworkInFile(NamedTuple):
    """One network of a file."""

    family: Family
    prefix: str
    tensors: Tensors
    """By names without prefix, with a head or a decoder that lies one level above."""
    left_out: tuple[str, ...]
    """Names of the file's other tensors, without the part that they share with the
    prefix."""


def find(tensors: Tensors, part: str, text: bool = False) -> NetworkInFile:
    """Return the network of a file.

    Args:
      tensors: by name, as from `checkpoints.read_checkpoint`.
      part: "teacher", "student", or any other part of the prefix of one of several networks.
      text: whether it reads text, and else images; CLIP's files have both.

    Raises:
      InputError: if there is no network, or several of which no rule chooses one.
    """
    families = _families(tensors)
    prefixes = [prefix for prefix, family in families.items() if (family.reader == "text") == text]
    if not prefixes:
        raise InputError(_no_network(tensors, [family.name for family in families.values()], text))
    prefix = _choose_prefix(prefixes, part)
    # of a network inside another one: every name begins with the prefix ""
    nested = tuple(other for other in families if other != prefix and other.startswith(prefix))
    network: Tensors = {}
    remaining: Tensors = {}
    for name, x in tensors.items():
        if name.startswith(prefix) and not name.startswith(nested):
            network[name.removeprefix(prefix)] = x
        else:
            remaining[name] = x
    left_out = []
    # a head or a decoder of module.backbone is often at module.head
    parent = re.sub(r"[^./]+[./]$", "", prefix)
    for name, x in remaining.items():
        short = name.removeprefix(parent)
        if name.startswith(parent) and _ONE_LEVEL_UP.fullmatch(short) and short not in network:
            network[short] = x
        else:
            left_out.append(short)
    return NetworkInFile(families[prefix], prefix, network, tuple(left_out))


def only_text(tensors: Tensors) -> bool:
    """Check whether all networks of a file read text."""
    families = _families(tensors).values()
    return bool(families) and all(family.reader == "text" for family in families)


def _families(tensors: Tensors) -> dict[str, Family]:
    """Return the family of each network in a file, by the network's prefix."""
    families: dict[str, Family] = {}
    for family in FAMILIES:
        pattern = re.compile(rf"((?:.*[./])?){family.anchor}")
        for name in tensors:
            match = pattern.fullmatch(name)
            if match and match[1] not in families and _fits(family, match[1], tensors):
                families[match[1]] = family
    return families


def _fits(family: Family, prefix: str, tensors: Tensors) -> bool:
    """Check that a prefix has the names that the family needs, and no others."""
    if not family.needs and not family.lacks:
        return True
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in names)

    return all(map(has, family.needs)) and not any(map(has, family.lacks))


def _no_network(tensors: Tensors, others: list[str], text: bool) -> str:
    if others:
        wanted, nearest = "images", "--dataset text"
        if text:
            wanted, nearest = "text", "hf:sentence-transformers/all-MiniLM-L6-v2"
        return f"checkpoint: no network in it reads {wanted}: it is of {others[0]}; nearest: {nearest}"
    if text:
        holds = listed(list(tensors)) or "no tensors"
        return f"checkpoint: no text encoder in it (docs/checkpoints.md); it holds: {holds}"
    for pattern, family in _NOT_READ.items():
        name = next((name for name in tensors if re.fullmatch(pattern, name)), None)
        if name is not None:
            return f"checkpoint: {name} is of {family}, which is not read here; timm's and torchvision's are"
    holds = listed(list(tensors)) or "no tensors"
    return (
        "checkpoint: no Vision Transformer in it: no tensor has a name that shows one, nor a ResNet, "
        f"DenseNet or ConvNeXt (docs/checkpoints.md); it holds: {holds}"
    )


# ---- one of several --------------------------------------------------------------------


def components(prefix: str) -> tuple[str, ...]:
    """Split a prefix at its dots or slashes."""
    return tuple(re.split(r"[./]", prefix)[:-1])


def _all_components(prefixes: Iterable[str]) -> set[str]:
    return {name for prefix in prefixes for name in components(prefix)}


def _choose_prefix(prefixes: list[str], part: str) -> str:
    """Return the prefix of the network that `part` or a rule chooses."""
    candidates = _of_part(prefixes, part)
    # In this order: states of an optimiser, averaged copies, second networks of pairs.
    # A rule that would drop all networks drops none.
    rules: tuple[Callable[[str], bool], ...] = (_is_optimiser, _is_averaged, _is_second(candidates))
    for rule in rules:
        preferred = [prefix for prefix in candidates if not rule(prefix)]
        candidates = preferred or candidates
    if len(candidates) == 1:
        return candidates[0]
    shared = set.intersection(*(set(components(prefix)) for prefix in candidates))
    parts = sorted(_all_components(candidates) - shared)
    advice = ""
    if parts:
        advice = f"choose one with --part {' or '.join(parts)}, as of fcljax convert, "
    raise InputError(
        f"checkpoint: it holds several networks, under {listed([repr(prefix) for prefix in prefixes])}; "
        f"{advice}or give a file of one network"
    )


def _of_part(prefixes: list[str], part: str) -> list[str]:
    """Return the part's prefixes; all, for the default, of a file without parts."""
    chosen = [prefix for prefix in prefixes if part in components(prefix)]
    if chosen:
        return chosen
    parts = _all_components(prefixes)
    roles = [role for role in ROLES if role in parts]
    if part in ROLES and roles:
        raise InputError(f"part: the checkpoint has no {part}; choose {roles[0]!r}")
    # "teacher" is the default of `part`, and asks for nothing in a file without roles
    if part == ROLES[0]:
        return prefixes
    if part in ROLES:
        raise InputError(f"part: the checkpoint has no {part}: it is not a file of a teacher and a student")
    choose("part", part, sorted(parts | set(ROLES)))
    return prefixes


def _is_optimiser(prefix: str) -> bool:
    return any(_OPTIMISER.fullmatch(name) for name in components(prefix))


def _is_averaged(prefix: str) -> bool:
    return any(_AVERAGED.fullmatch(name) for name in components(prefix))


def _is_second(prefixes: Iterable[str]) -> Callable[[str], bool]:
    """Return a check for the second networks of pairs."""
    present = _all_components(prefixes)
    second = {right for left, right in _PAIRS.items() if left in present}
    return lambda prefix: not second.isdisjoint(components(prefix))


# ---- other content ---------------------------------------------------------------------


def split_content(
    tensors: Tensors,
    keep: Callable[[str], bool],
) -> tuple[Tensors, tuple[str, ...]]:
    """Return the network's tensors, and the names of known other content such as heads.

    Args:
      tensors: by names without prefix.
      keep: tells that a name is the network's, even if it looks like other content.
    """
    other = tuple(name for name in tensors if not keep(name) and (_HEAD.fullmatch(name) or _label(name)))
    return {name: x for name, x in tensors.items() if name not in set(other)}, other


def _label(name: str) -> str | None:
    return next((label for label, pattern in _OTHER_CONTENT.items() if re.fullmatch(pattern, name)), None)


def is_left_out(names: Iterable[str], label: str) -> bool:
    """Check whether some of these names have that label."""
    return any(_label(name) == label for name in names)


def role_notes(prefix: str) -> list[str]:
    """Return a note on the role, teacher or student, of the network that was taken."""
    return [f"the {role}'s weights were taken" for role in sorted(ROLES) if role in components(prefix)]


def left_out_notes(names: Iterable[str]) -> list[str]:
    """Return a note on tensors that are left out, by label; none without any."""
    counts = Counter(
        _label(name) or re.split(r"[./]", name)[0]
        for name in names
        if not name.endswith("num_batches_tracked")
    )
    if not counts:
        return []
    labels = [label for label in _OTHER_CONTENT if label in counts]
    labels += sorted(label for label in counts if label not in _OTHER_CONTENT)
    parts = [f"{label} ({counts[label]})" for label in labels[:MOST_LABELS]]
    remaining = sum(counts[label] for label in labels[MOST_LABELS:])
    more = ""
    if remaining:
        more = f" and {remaining} others"
    return [f"left out, being no part of the backbone: {', '.join(parts)}{more}"]
