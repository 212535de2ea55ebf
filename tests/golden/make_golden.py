"""Makes the files that tests/test_golden.py compares with: small random networks of other libraries.

Those are the libraries that published weights come from. Run it where torch, timm and transformers are
installed (made with torch 2.13, timm 1.0.31, transformers 5.23):

    python tests/golden/make_golden.py [folder]

Every format is one file of weights, in the names and layouts of its source. Checkpoints that are torch
pickles at the source are stored as safetensors under the flattened names of their nested dictionaries, so
that the tests need no torch. `expected.npz` holds the images, and for each file what the source library made
of them: cls (class token after the final norm), logits, and for autoencoders the noise that drew the mask,
the predicted pixels and the loss. The weights are drawn large enough for attention to be far from uniform.

transformers adds 1e-12 to the variance in layer norms, all others 1e-6: taking one for the other moves the
outputs below by at most 6e-6.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import transformers
from timm.models.vision_transformer import VisionTransformer

SIDE, PATCH, WIDTH, DEPTH, HEADS, MLP, CLASSES = 16, 4, 24, 2, 2, 60, 7
DECODER = 20  # width; its MLP is wider by the same factor as the encoder's
TIMM = {
    "img_size": SIDE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": DEPTH,
    "num_heads": HEADS,
    "mlp_ratio": MLP / WIDTH,
}
HF = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "num_labels": CLASSES,
}
HF_DECODER = {
    "decoder_hidden_size": DECODER,
    "decoder_num_hidden_layers": DEPTH,
    "decoder_num_attention_heads": HEADS,
    "decoder_intermediate_size": DECODER * MLP // WIDTH,
}
GOOGLE_NORMS = {"norm1": "LayerNorm_0", "norm2": "LayerNorm_2"}
# of an autoencoder, from the names in files of transformers; queries, keys and values are fused first
FACEBOOK_NAMES = (
    ("vit.embeddings.position_embeddings", "pos_embed"),
    ("vit.embeddings.cls_token", "cls_token"),
    ("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("vit.layernorm", "norm"),
    ("vit.encoder.layer.", "blocks."),
    ("decoder.decoder_layers.", "decoder_blocks."),
    ("decoder.decoder_", "decoder_"),
    ("decoder.mask_token", "mask_token"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("attention.output.dense", "attn.proj"),
    ("attention.attention.qkv", "attn.qkv"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)

Tensors = dict[str, np.ndarray]


def random_like(name: str, x: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Weights under which a network tells images, tokens and heads well apart."""
    noise = draw.normal(size=x.shape)
    if x.ndim == 1 and name.endswith(("weight", "scale")):
        return (1 + 0.3 * noise).astype(np.float32)
    fan_in = x[0].size if x.ndim in (2, 4) else 1
    return np.asarray((1.5 / np.sqrt(fan_in) if x.ndim > 1 else 0.3) * noise, np.float32)


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    draw = np.random.default_rng(seed)
    with torch.no_grad():
        for name, x in sorted(model.named_parameters()):
            x.copy_(torch.from_numpy(random_like(name, x.numpy(), draw)))
    return model.eval()


def state(model: torch.nn.Module) -> Tensors:
    return {name: x.detach().numpy().copy() for name, x in model.state_dict().items()}


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}{name}": x for name, x in tensors.items()}


def pixels() -> np.ndarray:
    """Images in rows, columns, channels."""
    return np.random.default_rng(0).normal(size=(4, SIDE, SIDE, 3)).astype(np.float32)


def torch_pixels() -> torch.Tensor:
    return torch.from_numpy(pixels().transpose(0, 3, 1, 2).copy())


def write(folder: Path, name: str, tensors: Tensors) -> None:
    """A .npz or .safetensors file, put in place when it is complete."""
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=Path(name).suffix)
    os.close(handle)
    if name.endswith(".npz"):
        arrays: dict[str, Any] = dict(tensors)
        np.savez_compressed(temporary, **arrays)
    else:
        safetensors.numpy.save_file(
            {key: np.ascontiguousarray(x) for key, x in tensors.items()}, temporary, {"format": "pt"}
        )
    os.chmod(temporary, 0o644)
    os.replace(temporary, folder / name)


@torch.no_grad()
def timm_outputs(model: VisionTransformer) -> Tensors:
    cls = model.forward_features(torch_pixels())[:, 0]
    return (
        {"cls": cls.numpy(), "logits": model.head(cls).numpy()} if model.num_classes else {"cls": cls.numpy()}
    )


def timm_model(seed: int, classes: int) -> VisionTransformer:
    return randomise(VisionTransformer(**TIMM, num_classes=classes), seed)


def projection_head(seed: int, layers: tuple[str, ...]) -> Tensors:
    """What self-supervision puts behind its backbone: an MLP, and weight-normed layers without bias."""
    shapes = {"mlp.0.weight": (16, WIDTH), "mlp.0.bias": (16,), "mlp.2.weight": (16, 16), "mlp.2.bias": (16,)}
    shapes |= {"mlp.4.weight": (8, 16), "mlp.4.bias": (8,)}
    for layer in layers:
        shapes |= {f"{layer}.weight_g": (12, 1), f"{layer}.weight_v": (12, 8)}
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def self_supervised(seed: int, heads: tuple[str, ...], rest: Tensors) -> tuple[Tensors, Tensors]:
    """A training checkpoint of DINO or iBOT: the student wrapped for several devices, the teacher not."""
    teacher, student = timm_model(seed, 0), timm_model(seed + 1, 0)
    tensors = dict(rest)
    for i, (prefix, model) in enumerate({"teacher": teacher, "student.module": student}.items()):
        tensors |= prefixed(f"{prefix}.backbone.", state(model)) | prefixed(
            f"{prefix}.head.", projection_head(seed + 2 + i, heads)
        )
    return tensors, {"cls": timm_outputs(teacher)["cls"], "student_cls": timm_outputs(student)["cls"]}


def google(seed: int, folder: Path) -> tuple[Tensors, Tensors]:
    """Arrays as google-research/vision_transformer releases them; timm's own reader makes them a model."""
    size = WIDTH // HEADS
    shapes = {
        "cls": (1, 1, WIDTH),
        "embedding/kernel": (PATCH, PATCH, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "Transformer/posembed_input/pos_embedding": (1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "head/kernel": (WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }
    shapes |= {f"Transformer/encoder_norm/{leaf}": (WIDTH,) for leaf in ("scale", "bias")}
    for block in (f"Transformer/encoderblock_{i}" for i in range(DEPTH)):
        shapes |= {
            f"{block}/{norm}/{leaf}": (WIDTH,) for norm in GOOGLE_NORMS.values() for leaf in ("scale", "bias")
        }
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes |= {
                f"{attention}/{part}/kernel": (WIDTH, HEADS, size),
                f"{attention}/{part}/bias": (HEADS, size),
            }
        shapes |= {f"{attention}/out/kernel": (HEADS, size, WIDTH), f"{attention}/out/bias": (WIDTH,)}
        shapes |= {
            f"{block}/MlpBlock_3/Dense_0/kernel": (WIDTH, MLP),
            f"{block}/MlpBlock_3/Dense_0/bias": (MLP,),
        }
        shapes |= {
            f"{block}/MlpBlock_3/Dense_1/kernel": (MLP, WIDTH),
            f"{block}/MlpBlock_3/Dense_1/bias": (WIDTH,),
        }
    draw = np.random.default_rng(seed)
    tensors = {name: google_array(name, shape, draw) for name, shape in shapes.items()}
    write(folder, "google.npz", tensors)
    model = VisionTransformer(**TIMM, num_classes=CLASSES).eval()
    model.load_pretrained(str(folder / "google.npz"))
    return tensors, timm_outputs(model)


def google_array(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    noise = draw.normal(size=shape)
    if name.endswith("scale"):
        return (1 + 0.3 * noise).astype(np.float32)
    fan_in = MLP if name.endswith("Dense_1/kernel") else 3 * PATCH**2 if name == "embedding/kernel" else WIDTH
    return (
        (0.3 if name.endswith("bias") else 1.5 / np.sqrt(fan_in) if "kernel" in name else 1.5) * noise
    ).astype(np.float32)


def saved(model: transformers.PreTrainedModel) -> Tensors:
    """What transformers writes to a file.

    Version 5 renames modules in memory but keeps the old names in files; for the decoder of an autoencoder it
    misses that, and the names that published files have are put back here.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = safetensors.numpy.load_file(Path(folder) / "model.safetensors")
        tensors = {
            name.replace("decoder.decoder_encoder.layer.", "decoder.decoder_layers."): x
            for name, x in tensors.items()
        }
        safetensors.numpy.save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        again = type(model).from_pretrained(folder).state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(again[name], x), name
    return tensors


@torch.no_grad()
def huggingface(seed: int) -> tuple[Tensors, Tensors]:
    model = randomise(transformers.ViTForImageClassification(transformers.ViTConfig(**HF)), seed)
    assert model.config.layer_norm_eps == 1e-12
    cls = model.vit(torch_pixels()).last_hidden_state[:, 0]
    return saved(model), {"cls": cls.numpy(), "logits": model(torch_pixels()).logits.numpy()}


@torch.no_grad()
def huggingface_features(seed: int) -> tuple[Tensors, Tensors]:
    """A network without classes: no prefix, and a pooler on top that nobody reads.

    In the names that version 5 has in memory, which a state dict carries that is saved by other means.
    """
    model = randomise(transformers.ViTModel(transformers.ViTConfig(**HF)), seed)
    return state(model), {"cls": model(torch_pixels()).last_hidden_state[:, 0].numpy()}


def positions(width: int) -> torch.Tensor:
    """The fixed positions of published autoencoders, which transformers 5 leaves at zero in a new model."""
    wave = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    cells = [(row, column) for row in range(SIDE // PATCH) for column in range(SIDE // PATCH)]
    patches = [
        np.concatenate([f(at * wave) for at in (column, row) for f in (np.sin, np.cos)])
        for row, column in cells
    ]
    return torch.from_numpy(np.stack([np.zeros(width), *patches])[None].astype(np.float32))


@torch.no_grad()
def autoencoder(seed: int, eps: float) -> tuple[Tensors, Tensors]:
    """In the names of transformers. eps: its default of 1e-12, or the 1e-6 of the code of the names below."""
    config = transformers.ViTMAEConfig(**HF, **HF_DECODER, mask_ratio=0.75, layer_norm_eps=eps)
    model = randomise(transformers.ViTMAEForPreTraining(config), seed)
    model.vit.embeddings.position_embeddings.copy_(positions(WIDTH))
    model.decoder.decoder_pos_embed.copy_(positions(DECODER))
    noise = torch.from_numpy(
        np.random.default_rng(seed + 1).random((4, (SIDE // PATCH) ** 2)).astype(np.float32)
    )
    out = model(torch_pixels(), noise=noise)
    expected = {
        "noise": noise.numpy(),
        "prediction": out.logits.numpy(),
        "masked": out.mask.numpy(),
        "loss": out.loss.numpy(),
    }
    model.config.mask_ratio = 0.0
    in_order = torch.arange(noise.shape[1], dtype=torch.float32).expand_as(noise)
    return saved(model), expected | {
        "cls": model.vit(torch_pixels(), noise=in_order).last_hidden_state[:, 0].numpy()
    }


def facebook(tensors: Tensors) -> Tensors:
    """An autoencoder in the names of facebookresearch/mae."""
    split = ("query", "key", "value")
    fused = {name: x for name, x in tensors.items() if not any(f".{part}." in name for part in split)}
    for name in (name for name in tensors if ".query." in name):
        fused[name.replace("query", "qkv")] = np.concatenate(
            [tensors[name.replace("query", part)] for part in split]
        )
    for old, new in FACEBOOK_NAMES:
        fused = {name.replace(old, new): x for name, x in fused.items()}
    return fused


def pmae(tensors: Tensors) -> Tensors:
    """The same in the names of pMAE's release, which keeps encoder and decoder apart."""
    parts = {True: "model.decoder.", False: "model.encoder."}
    return {parts[name.startswith(("decoder_", "mask_token"))] + name: x for name, x in tensors.items()}


def formats(folder: Path) -> dict[str, tuple[Tensors, Tensors]]:
    """Weights and outputs by file name."""
    timm, deit = timm_model(1, CLASSES), timm_model(2, CLASSES)
    center = {"dino_loss.center": np.zeros((1, 12), np.float32)}
    ibot_rest = {
        "ibot_loss.center": np.zeros((1, 12), np.float32),
        "ibot_loss.center2": np.zeros((1, 1, 12), np.float32),
        "student.module.backbone.masked_embed": np.ones((1, WIDTH), np.float32),
    }
    mae, mae_out = autoencoder(30, 1e-6)
    pmae_tensors, pmae_out = autoencoder(40, 1e-6)
    return {
        "timm.safetensors": (state(timm), timm_outputs(timm)),
        "timm.npz": (state(timm), timm_outputs(timm)),
        "deit.safetensors": (prefixed("model.", state(deit)), timm_outputs(deit)),
        "google.npz": google(3, folder),
        "huggingface.safetensors": huggingface(4),
        "huggingface_features.safetensors": huggingface_features(5),
        "huggingface_mae.safetensors": autoencoder(20, 1e-12),
        "mae.safetensors": (prefixed("model.", facebook(mae)), mae_out),
        "pmae.safetensors": (pmae(facebook(pmae_tensors)), pmae_out),
        "dino.safetensors": self_supervised(50, ("last_layer",), center),
        "ibot.safetensors": self_supervised(60, ("last_layer", "last_layer2"), ibot_rest),
    }


def main(folder: Path) -> None:
    """Write all files to `folder`."""
    expected = {"image": pixels()}
    for name, (tensors, outputs) in formats(folder).items():
        write(folder, name, tensors)
        expected |= prefixed(f"{name}/", outputs)
    write(folder, "expected.npz", expected)
    for path in sorted(folder.glob("*.npz")) + sorted(folder.glob("*.safetensors")):
        print(f"{path.name:36} {path.stat().st_size:8,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
