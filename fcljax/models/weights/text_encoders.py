"""Read text encoders under the names of transformers, OpenAI or fcljax: BERT, RoBERTa,
DistilBERT, those of sentence-transformers, and CLIP's text tower.

`dialects` brings their names to timm's. No tensor shows heads, activation, padding or pooling: a
config.json beside the file does, or the metadata of a file of fcljax.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from fcljax.errors import InputError, nearest
from fcljax.models.shapes import Activation, Pooling, TextConfig, ViTConfig
from fcljax.models.text import init_text
from fcljax.models.vit import POST_NORMS
from fcljax.models.weights import finding, naming, sidecars
from fcljax.models.weights.checkpoints import Checkpoint
from fcljax.models.weights.dialects import translate
from fcljax.models.weights.tensors import Shapes, Tensors, check_tensors, float32
from fcljax.types import PyTree


class TextFacts(NamedTuple):
    """Facts on a text encoder that its tensors do not show."""

    heads: int
    activation: Activation = "gelu"
    epsilon: float = 1e-12
    pooling: Pooling = "first"
    end: int | None = None
    causal: bool = False
    skipped: int = 0
    """Positions before the first token's."""
    notes: tuple[str, ...] = ()


class Architecture(NamedTuple):
    """What a `model_type` of transformers stands for."""

    width: str = "hidden_size"
    """The key of the width in its config.json."""
    heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    after_padding: bool = False
    """Positions are counted from the id of padding (RoBERTa)."""
    clip: bool = False
    """Tokens read those before them, and the end token's output is the feature."""


_BERT = Architecture()
_ROBERTA = Architecture(after_padding=True)
_CLIP = Architecture(clip=True)
ARCHITECTURES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Architecture("dim", "n_heads", "activation"),
    "clip": _CLIP,
    "clip_text_model": _CLIP,
}
_EPSILON = {False: 1e-12, True: 1e-5}  # transformers' defaults; the key is `clip`
_OPENAI = "heads of 64 channels and quick_gelu are assumed, as in OpenAI's networks"
# the names of a file of fcljax's metadata
_KEPT = ("heads", "activation", "epsilon", "pooling", "end", "causal")
_ARRAYS = {"embed": "embed.weight", "pos": "pos_embed", "types": "types.weight"}  # ours -> timm's
_POOLING: dict[str, Pooling] = {"cls": "first", "cls_token": "first", "mean": "mean", "mean_tokens": "mean"}


class InterpretedText(NamedTuple):
    """A text encoder under our names and in our layouts: float32 numpy arrays."""

    config: TextConfig
    params: PyTree
    mapping: str
    notes: tuple[str, ...]


def check_architecture(config: dict[str, Any]) -> None:
    """Check that a config.json, if there is one, is of a text encoder that is read here.

    Raises:
      InputError: with the nearest one, or the setting that no encoder here has.
    """
    kind = config.get("model_type")
    if kind is not None and kind not in ARCHITECTURES:
        raise InputError(
            f"checkpoint: config.json says model_type {kind!r}, which is no text encoder that is read here; "
            f"{nearest(kind, ARCHITECTURES)}"
        )
    for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if config.get(key, usual) != usual:
            raise InputError(
                f"checkpoint: config.json says {key} {config[key]!r}, and the encoders here have {usual!r}"
            )


def interpret(network: finding.NetworkInFile, file: Checkpoint) -> InterpretedText:
    """Check a text encoder tensor by tensor, and bring it to our names and layouts.

    Args:
      network: as from `finding.find`.
      file: with the files beside it.

    Raises:
      InputError: if it is of a kind that is not supported, or tensors are missing, unexpected, misshaped or
        not finite.
    """
    if network.family.name == "fcljax's text":
        return _build(network.tensors, _own_facts(file), _own_name, network.left_out)
    facts = _facts(network, file)
    translated = translate(network.tensors, network.family.name)
    tensors, others = finding.split_content(translated.tensors, lambda _name: False)
    left_out = (*network.left_out, *translated.left_out, *others)
    if "pos_embed" in tensors:
        tensors["pos_embed"] = tensors["pos_embed"][facts.skipped :]
    return _build(tensors, facts, _timm_name, left_out)


def _build(
    tensors: Tensors, facts: TextFacts, name_in_file: Callable[[str], str], left_out: Sequence[str]
) -> InterpretedText:
    config = _config(tensors, facts, name_in_file)
    shapes = _shapes(config)
    names = {name: name_in_file(name) for name in shapes}
    # torch's kernels are [out, in]
    transposed = {name for name in shapes if name_in_file is _timm_name and name.endswith(".kernel")}
    file_shapes = {
        names[name]: shape[::-1] if name in transposed else shape for name, shape in shapes.items()
    }
    check_tensors(tensors, file_shapes, _describe(config))
    flat = {name: float32(in_file, tensors[in_file]) for name, in_file in names.items()}
    flat |= {name: flat[name].T for name in transposed}
    mapping = "fcljax" if name_in_file is _own_name else "huggingface"
    notes = (*finding.left_out_notes(left_out), *facts.notes)
    return InterpretedText(config, unflatten_dict(flat, sep="."), mapping, notes)


def metadata(config: TextConfig) -> str:
    """Return the facts that the tensors of an encoder do not show, as JSON, for a file of fcljax."""
    facts = dataclasses.asdict(config.blocks) | dataclasses.asdict(config)
    return json.dumps({key: facts[key] for key in _KEPT})


# ---- facts -------------------------------------------------------------------------------------------------


def _facts(network: finding.NetworkInFile, file: Checkpoint) -> TextFacts:
    """Return what config.json, or open_clip_config.json, says of the encoder.

    Raises:
      InputError: if it is missing, or says what no encoder here has.
    """
    config = file.config
    tower = config.get("text_config")
    if isinstance(tower, dict):  # CLIP's has both towers
        config = {"model_type": config.get("model_type"), **tower}
    kind = config.get("model_type")
    if kind is None and network.family.name == "CLIP's text":
        return _openai_facts(network, file)
    if kind is None:
        raise InputError(
            f"checkpoint: no config.json beside {file.source!r} says which encoder it is (model_type, heads, "
            "activation); put that of its repository there"
        )
    architecture = ARCHITECTURES[kind]
    width = _width(network.tensors)
    if config.get(architecture.width, width) != width:
        raise InputError(
            f"checkpoint: config.json says {architecture.width} {config[architecture.width]!r}, and the file "
            f"has width {width}; put the file's own there"
        )
    heads = sidecars.positive_integer(file, "heads", config.get(architecture.heads))
    if heads is None:
        raise InputError(f"checkpoint: config.json has no {architecture.heads}")
    default = "quick_gelu" if architecture.clip else "gelu"
    activation = sidecars.activation_of(config.get(architecture.activation, default))
    epsilon = config.get("layer_norm_eps", _EPSILON[architecture.clip])
    facts = TextFacts(heads, activation, sidecars.checked_epsilon(file, epsilon))
    if architecture.clip:
        # transformers' first CLIP configs say 2, whatever the vocabulary is: there the end
        # token is the one with the highest id
        end = config.get("eos_token_id", 49407)
        return facts._replace(pooling="end", causal=True, end=None if end == 2 else end)
    # RoBERTa counts positions from the id of padding, so the first ones are never read
    if architecture.after_padding:
        padding = config.get("pad_token_id", 1)
        facts = facts._replace(skipped=(padding if isinstance(padding, int) else 1) + 1)
    pooling = _pooling(file)
    word = "the class token" if pooling == "first" else "the mean over tokens"
    return facts._replace(pooling=pooling, notes=(f"the feature of a text is {word}",))


def _width(tensors: Tensors) -> int:
    """Return the width of the embeddings' matrices; files of old versions also have ids of positions."""
    matrices = (x for name, x in tensors.items() if "embedding" in name and name.endswith(".weight"))
    return next(x.shape[-1] for x in matrices if x.ndim == 2)


def _pooling(file: Checkpoint) -> Pooling:
    """Return the pooling of sentence-transformers' 1_Pooling/config.json; without one the first token's.

    Raises:
      InputError: for one that no encoder here has.
    """
    modes = file.pooling.get("pooling_mode")
    if modes is None:
        modes = [
            key.removeprefix("pooling_mode_")
            for key, value in file.pooling.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    modes = modes if isinstance(modes, list) else [modes]
    if not file.pooling:
        return "first"
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise InputError(
            f"checkpoint: 1_Pooling/config.json says pooling {', '.join(map(str, modes))!r}; read are "
            "'cls_token' and 'mean_tokens'"
        )
    return _POOLING[modes[0]]


def _openai_facts(network: finding.NetworkInFile, file: Checkpoint) -> TextFacts:
    """Return the facts on CLIP's text tower under OpenAI's names, beside which open_clip writes a config."""
    model = file.open_clip.get("model_cfg", {})
    tower = model.get("text_cfg", {}) if isinstance(model, dict) else {}
    activation: Activation = "quick_gelu"
    if tower and not model.get("quick_gelu"):
        activation = "gelu"
    heads = sidecars.positive_integer(file, "heads", tower.get("heads"))
    width = network.tensors["token_embedding.weight"].shape[-1]
    notes = () if tower else (_OPENAI,)
    return TextFacts(heads or max(width // 64, 1), activation, 1e-5, "end", None, True, notes=notes)


def _own_facts(file: Checkpoint) -> TextFacts:
    """Return the facts in the metadata of a file of fcljax.

    Raises:
      InputError: if they are missing.
    """
    facts = sidecars.object_of(file, "text")
    if set(facts) != set(_KEPT):
        raise InputError(f"checkpoint: {file.source!r} has no metadata of a text encoder; convert it again")
    sidecars.positive_integer(file, "heads", facts["heads"])
    sidecars.checked_epsilon(file, facts["epsilon"])
    for key, valid in (("activation", Activation), ("pooling", Pooling)):
        if facts[key] not in get_args(valid):
            raise InputError(f"checkpoint: {file.source!r} says that its {key} is {facts[key]!r}")
    return TextFacts(**facts)


# ---- shapes and names --------------------------------------------------------------------------------------


def _own_name(name: str) -> str:
    return name


def _timm_name(name: str) -> str:
    """Return timm's name of one of our tensors."""
    if name in _ARRAYS:
        return _ARRAYS[name]
    module, _, leaf = name.rpartition(".")
    leaf = leaf if leaf == "bias" else "weight"
    block = re.fullmatch(r"block_(\d+)\.(.+)", module)
    if block is None:
        return f"{module}.{leaf}"
    # timm has the norms of post-norm blocks under the names of pre-norm ones
    (inner,) = naming.TIMM[block[2].removeprefix("post_")]
    return f"blocks.{int(block[1])}.{inner}.{leaf}"


def _config(tensors: Tensors, facts: TextFacts, name_in_file: Callable[[str], str]) -> TextConfig:
    """Return the static shape that tensors and facts show.

    Raises:
      InputError: for embeddings of another rank, and heads that do not divide the width.
    """

    def size(name: str, axis: int, rank: int) -> int:
        x = tensors.get(name_in_file(name))
        if x is None or x.ndim != rank or not x.size:
            shape = "is missing" if x is None else f"has shape {x.shape}"
            raise InputError(f"checkpoint: {name_in_file(name)} {shape}; needed are {rank} axes")
        return x.shape[axis]

    def has(name: str) -> bool:
        return name_in_file(name) in tensors

    width = size("embed", 1, 2)
    if width % facts.heads:
        raise InputError(f"heads: {facts.heads} does not divide the width {width}")
    numbers = [int(match[1]) for name in tensors if (match := re.match(r"blocks?[._](\d{1,9})\.", name))]
    blocks = ViTConfig(
        width=width,
        # a huge number in a broken file must not allocate anything
        depth=min(max(numbers, default=0) + 1, len(tensors)),
        heads=facts.heads,
        mlp=size("block_00.fc1.bias", 0, 1),
        epsilon=facts.epsilon,
        final_norm=has("norm.scale"),
        pre_norm=has("norm_pre.scale"),
        # other libraries' names do not show it: encoders without a final norm have these
        post_norm=has(f"block_00.{POST_NORMS[0]}.scale") and not has("norm.scale"),
        activation=facts.activation,
    )
    positions = size("pos", 0, 2)
    if facts.pooling == "learned":
        positions -= 1
    types = size("types", 0, 2) if has("types") else 0
    return TextConfig(
        size("embed", 0, 2),
        positions,
        blocks,
        pooling=facts.pooling,
        end=facts.end,
        causal=facts.causal,
        types=types,
    )


def _shapes(config: TextConfig) -> Shapes:
    """Return the shapes of all our tensors by name; all blocks have those of the first."""
    one = dataclasses.replace(config, blocks=dataclasses.replace(config.blocks, depth=1))
    tree = jax.eval_shape(lambda: init_text(jax.random.key(0), one))
    flat: dict[str, Any] = flatten_dict(tree, sep=".")
    shapes: Shapes = {}
    for name, leaf in flat.items():
        copies = [name]
        if name.startswith("block_00."):
            copies = [name.replace("block_00", f"block_{i:02d}", 1) for i in range(config.blocks.depth)]
        shapes |= dict.fromkeys(copies, leaf.shape)
    return shapes


def _describe(config: TextConfig) -> str:
    return f"a text encoder of {config.blocks.depth} blocks, width {config.width}, {config.length} positions"
