"""Makes texts.npz, which tests/test_golden_texts.py compares with: small random text encoders of
transformers, the config.json of each, and their features of two texts.

Run it where torch and transformers are installed (made with torch 2.14.1, transformers 5.24.0):

    python tests/golden/make_texts.py [folder]
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_golden import randomise, state
from torch import nn

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 14,
}
DISTIL = {"vocab_size": 30, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
VISION = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "intermediate_size": 24}
# a whole text and one with padding; 29 is CLIP's end token, 1 RoBERTa's padding
IDS = np.array([[3, 4, 5, 6, 7, 8, 9, 10, 11, 29], [3, 12, 13, 14, 15, 29, 1, 1, 1, 1]])
MASK = IDS != 1
TYPES = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]] * 2)


def rounded(model: nn.Module, seed: int) -> nn.Module:
    """Random weights that half precision holds exactly."""
    return randomise(model, seed).half().float().eval()


def tokens(model: nn.Module, **more: torch.Tensor) -> torch.Tensor:
    """The last hidden state of the texts."""
    return model(torch.from_numpy(IDS), torch.from_numpy(MASK).long(), **more).last_hidden_state


@torch.no_grad()
def encoders() -> dict[str, tuple[nn.Module, dict[str, np.ndarray]]]:
    """Models and outputs by name."""
    bert = rounded(transformers.BertModel(transformers.BertConfig(**SIZES)), 90)
    hidden = tokens(bert)
    mask = torch.from_numpy(MASK)[..., None]
    of_types = tokens(bert, token_type_ids=torch.from_numpy(TYPES))
    bert_outputs = {
        "first": hidden[:, 0],
        "mean": (hidden * mask).sum(1) / mask.sum(1),
        "types": of_types[:, 0],
    }
    roberta = transformers.RobertaConfig(**SIZES, type_vocab_size=1, hidden_act="gelu_new")
    roberta = rounded(transformers.RobertaModel(roberta, add_pooling_layer=False), 91)
    distil = transformers.DistilBertConfig(**DISTIL, max_position_embeddings=12)
    distil = rounded(transformers.DistilBertModel(distil), 92)
    text = SIZES | {"eos_token_id": 29, "bos_token_id": 3, "pad_token_id": 1}
    clip = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)
    clip = rounded(transformers.CLIPModel(clip), 93)
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 3, 8, 8)).astype(np.float32))
    both = clip(torch.from_numpy(IDS), image, torch.from_numpy(MASK).long())
    clip_outputs = {
        "end": clip.text_model(torch.from_numpy(IDS), torch.from_numpy(MASK).long()).pooler_output,
        "logits": both.logits_per_image,
        "image": image.permute(0, 2, 3, 1),
    }
    return {
        "bert": (bert, bert_outputs),
        "roberta": (roberta, {"first": tokens(roberta)[:, 0]}),
        "distilbert": (distil, {"first": tokens(distil)[:, 0]}),
        "clip": (clip, clip_outputs),
    }


def main(folder: Path) -> None:
    """Write the file."""
    arrays = {"ids": IDS, "mask": MASK, "types": TYPES}
    for name, (model, outputs) in encoders().items():
        tensors = state(model)
        # one array, because a member of an npz takes 250 bytes
        arrays[f"{name}/weights"] = np.concatenate([x.ravel() for x in tensors.values()]).astype(np.float16)
        arrays[f"{name}/shapes"] = np.array(json.dumps({key: x.shape for key, x in tensors.items()}))
        arrays |= {f"{name}/{key}": x.numpy() for key, x in outputs.items()}
        arrays[f"{name}/config"] = np.array(json.dumps(model.config.to_diff_dict()))
    # pyrefly: ignore[bad-argument-type]  # no array is named allow_pickle
    np.savez_compressed(folder / "texts.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
