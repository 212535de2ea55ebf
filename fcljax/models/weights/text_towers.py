"""Read the text side of a CLIP: its text tower, the projections of both towers and the
scale of their cosine, under the names of transformers or OpenAI.

`vit_micro` comes with a text tower that `experiments/clip_micro.py` trains.
"""

import dataclasses
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from fcljax.errors import InputError
from fcljax.models.clip import ClassTexts, packaged_tokens, padded, with_features
from fcljax.models.shapes import TEXT_TOWERS, Dtype, TextConfig, array_type
from fcljax.models.weights.checkpoints import Checkpoint, read_checkpoint
from fcljax.models.weights.pretrained import PretrainedText, read_text_encoder, to_device
from fcljax.models.weights.tensors import Tensors, float32
from fcljax.types import PyTree

FILES = {"vit_micro": "vit_micro_text.safetensors"}
CLIP = "hf:openai/clip-vit-base-patch32"  # for messages
# patterns of a tensor's name -> whether it is stored as torch's Linear has it, [out, in]
_TEXT_PROJECTION = {r"(.*\.)?text_projection\.weight": True, r"(.*\.)?text_projection": False}
_IMAGE_PROJECTION = {r"(.*\.)?visual_projection\.weight": True, r"(.*\.)?visual\.proj": False}
_SCALE = {r"(.*\.)?logit_scale": False}


def load_text_tower(name: str | None, checkpoint: str | None, width: int, dtype: Dtype) -> PretrainedText:
    """Load the text side of a network of images.

    Args:
      name: of the network of images; None: the checkpoint's, or vit_micro without one.
      checkpoint: as of `pretrained.load_backbone`.
      width: of the network's features.
      dtype: number format of products.

    Raises:
      InputError: if it has no text side, or a broken one.
    """
    if checkpoint is None:
        name = name or "vit_micro"
        if name not in FILES:
            raise _no_text(name)
        return _packaged(name, dtype)
    file = read_checkpoint(checkpoint)
    text_projection = _matrix(file, _TEXT_PROJECTION)
    image_projection = _matrix(file, _IMAGE_PROJECTION)
    scale = _find(file, _SCALE)
    if text_projection is None or image_projection is None or scale is None or scale[0].size != 1:
        raise _no_text(file.source)
    encoder = read_text_encoder(file)
    config = encoder.config
    shapes = (config.width, width)
    joint = text_projection.shape[1]
    if (len(text_projection), len(image_projection)) != shapes or image_projection.shape[1] != joint:
        raise InputError(
            f"checkpoint: {file.source!r} has projections {text_projection.shape} of texts and "
            f"{image_projection.shape} of images, and towers of width {shapes[0]} and {shapes[1]}"
        )
    logit_scale = float32("logit_scale", scale[0]).reshape(())
    return _built(config, encoder.params, text_projection, image_projection, logit_scale, file.folder, dtype)


def _no_text(source: str) -> InputError:
    return InputError(f"class_prompts: {source!r} has no text tower, as CLIP has; nearest: {CLIP}")


def _packaged(name: str, dtype: Dtype) -> PretrainedText:
    """Load the text tower that comes with the package."""
    file = read_checkpoint(str(resources.files("fcljax") / "assets" / FILES[name]))
    params = unflatten_dict({key: np.asarray(x, np.float32) for key, x in file.tensors.items()}, sep=".")
    projections = params["text_projection"], params["image_projection"]
    return _built(TEXT_TOWERS[name], params["text"], *projections, params["logit_scale"], None, dtype)


def _built(
    config: TextConfig,
    tower: PyTree,
    text_projection: np.ndarray,
    image_projection: np.ndarray,
    logit_scale: np.ndarray,
    tokenizer: Path | None,
    dtype: Dtype,
) -> PretrainedText:
    """Return a text side that computes in a number format."""
    config = dataclasses.replace(config, blocks=dataclasses.replace(config.blocks, dtype=dtype))
    tower = to_device(tower, array_type(dtype))
    scale = np.exp(logit_scale).astype(np.float32)
    return PretrainedText(config, tower, text_projection, image_projection, scale, tokenizer)


def _find(file: Checkpoint, patterns: dict[str, bool]) -> tuple[np.ndarray, bool] | None:
    """Return the first tensor whose name is one of the patterns, and the pattern's value."""
    tensors: Tensors = file.tensors
    for pattern, transposed in patterns.items():
        for name, x in tensors.items():
            if re.fullmatch(pattern, name):
                return x, transposed
    return None


def _matrix(file: Checkpoint, patterns: dict[str, bool]) -> np.ndarray | None:
    """Return a projection [in, out]; None if the file has none."""
    found = _find(file, patterns)
    if found is None or found[0].ndim != 2:
        return None
    matrix = float32("projection", found[0])
    return matrix.T if found[1] else matrix


# ---- the prompts of classes ----------------------------------------------------------------


def class_texts(text: PretrainedText, prompts: Sequence[str], contexts: int = 0) -> ClassTexts:
    """Return the text side with the prompts of classes.

    Args:
      text: the text side.
      prompts: [C].
      contexts: context vectors that stand before a prompt and take as many positions.

    Raises:
      InputError: for a prompt that is too long, and without a tokenizer.
    """
    if text.tokenizer is None:
        tokens = padded(packaged_tokens(text.config, prompts))
    else:
        tokens = _tokenized(text, prompts)
    room = text.config.length - contexts
    lengths = tokens["mask"].sum(axis=1)
    if lengths.max() > room:
        longest = prompts[int(lengths.argmax())]
        beside = f" beside {contexts} context vectors" if contexts else ""
        raise InputError(
            f"class_prompts: {longest[:60]!r} has {lengths.max()} tokens, and the text tower reads "
            f"{text.config.length}{beside}"
        )
    arrays = text.text_projection, text.image_projection, text.scale, tokens["ids"], tokens["mask"]
    nothing = np.zeros((len(prompts), text.joint), np.float32)
    return with_features(text.config, ClassTexts(text.tower, *map(jnp.asarray, (*arrays, nothing))))


def _tokenized(text: PretrainedText, prompts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the prompts' tokens by the tokenizer.json beside the weights.

    Raises:
      InputError: if it is missing, or of another vocabulary.
    """
    from fcljax.data.files.tokenizer_files import tokenize

    assert text.tokenizer is not None
    if not (text.tokenizer / "tokenizer.json").is_file():
        raise InputError(
            f"class_prompts: no tokenizer.json beside the weights in {str(text.tokenizer)!r}; put that of "
            "their repository there"
        )
    # one token more than the tower reads, by which `class_texts` sees a prompt that is
    # too long
    tokens = tokenize(prompts, text.tokenizer, text.config.length + 1)
    longest = tokens["mask"].sum(axis=1).max()
    tokens = {key: x[:, :longest] for key, x in tokens.items()}
    if tokens["ids"].max() >= text.config.vocabulary:
        raise InputError(
            f"class_prompts: the tokenizer has id {tokens['ids'].max()}, and the text tower "
            f"{text.config.vocabulary} ids; put the tokenizer.json of its repository there"
        )
    return tokens


def in_order(texts: ClassTexts, order: np.ndarray) -> ClassTexts:
    """Return the texts with the classes in another order [C]."""
    return texts._replace(ids=texts.ids[order], mask=texts.mask[order], features=texts.features[order])
