"""Tiny networks as the files of several libraries hold them.

Written from our parameters outwards, by hand, so that what reads such files is not checked against itself.
"""

import jax
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict

from fcljax.models.mae import DecoderConfig, decoder_shapes
from fcljax.models.vit import ViTConfig, parameter_shapes

TINY = ViTConfig(image_size=8, patch=4, width=12, depth=2, heads=2, mlp=20)
TINY_DECODER = DecoderConfig(image_size=8, patch=4, encoder_width=12, width=16, depth=1, heads=16, mlp=24)
CLASSES = 7


def drawn(shapes, seed=0):
    """Normal numbers in a tree of these shapes."""
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: draw(size=x.shape).astype(np.float32), shapes)


def encoder(config=TINY, seed=0):
    return drawn(parameter_shapes(config), seed)


def decoder(config=TINY_DECODER, seed=1):
    return drawn(decoder_shapes(config), seed)


def head(width=TINY.width, seed=2):
    return drawn({"kernel": np.empty((width, CLASSES)), "bias": np.empty(CLASSES)}, seed)


def native(params, head=None, decoder=None):
    """Our own names."""
    tree = params | ({"head": head} if head else {}) | ({"decoder": decoder} if decoder else {})
    return flatten_dict(tree, sep=".")


def _linear(name, leaves):
    return {f"{name}.weight": np.ascontiguousarray(leaves["kernel"].T), f"{name}.bias": leaves["bias"]}


def _norm(name, leaves):
    return {f"{name}.weight": leaves["scale"], f"{name}.bias": leaves["bias"]}


def _convolution(name, leaves, patch):
    kernel = leaves["kernel"].reshape(patch, patch, 3, -1)  # row, column, channel in; channel out
    return {
        f"{name}.weight": np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)),
        f"{name}.bias": leaves["bias"],
    }


def _split(leaves):
    return [
        {"kernel": k, "bias": b}
        for k, b in zip(*(np.split(leaves[x], 3, axis=-1) for x in ("kernel", "bias")), strict=True)
    ]


def _timm_blocks(prefix, params):
    tensors = {}
    for i, name in enumerate(sorted(name for name in params if name.startswith("block_"))):
        block, at = params[name], f"{prefix}.{i}"
        tensors |= _norm(f"{at}.norm1", block["norm1"]) | _norm(f"{at}.norm2", block["norm2"])
        tensors |= _linear(f"{at}.attn.qkv", block["attn"]["qkv"]) | _linear(
            f"{at}.attn.proj", block["attn"]["proj"]
        )
        tensors |= _linear(f"{at}.mlp.fc1", block["fc1"]) | _linear(f"{at}.mlp.fc2", block["fc2"])
    return tensors


def timm(params, head=None, patch=TINY.patch):
    tensors = {"cls_token": params["cls"][None, None], "pos_embed": params["pos"][None]}
    tensors |= _convolution("patch_embed.proj", params["patch"], patch) | _timm_blocks("blocks", params)
    tensors |= _norm("norm", params["norm"]) if "norm" in params else {}
    return tensors | (_linear("head", head) if head else {})


def mae_decoder(params):
    tensors = {"mask_token": params["mask"][None, None], "decoder_pos_embed": params["pos"][None]}
    tensors |= _linear("decoder_embed", params["embed"]) | _timm_blocks("decoder_blocks", params)
    return tensors | _norm("decoder_norm", params["norm"]) | _linear("decoder_pred", params["predict"])


def _hf_blocks(prefix, params, version):
    old = version == 4
    qkv = [f"attention.attention.{x}" if old else f"attention.{x[0]}_proj" for x in ("query", "key", "value")]
    proj, fc1, fc2 = (
        ("attention.output.dense", "intermediate.dense", "output.dense")
        if old
        else ("attention.o_proj", "mlp.fc1", "mlp.fc2")
    )
    tensors = {}
    for i, name in enumerate(sorted(name for name in params if name.startswith("block_"))):
        block, at = params[name], f"{prefix}.{i}"
        tensors |= _norm(f"{at}.layernorm_before", block["norm1"]) | _norm(
            f"{at}.layernorm_after", block["norm2"]
        )
        for part, leaves in zip(qkv, _split(block["attn"]["qkv"]), strict=True):
            tensors |= _linear(f"{at}.{part}", leaves)
        tensors |= _linear(f"{at}.{proj}", block["attn"]["proj"])
        tensors |= _linear(f"{at}.{fc1}", block["fc1"]) | _linear(f"{at}.{fc2}", block["fc2"])
    return tensors


def huggingface(params, head=None, prefix="vit.", version=4, patch=TINY.patch):
    tensors = {
        "embeddings.cls_token": params["cls"][None, None],
        "embeddings.position_embeddings": params["pos"][None],
    }
    tensors |= _convolution("embeddings.patch_embeddings.projection", params["patch"], patch)
    tensors |= _hf_blocks("encoder.layer" if version == 4 else "layers", params, version) | _norm(
        "layernorm", params["norm"]
    )
    return wrapped(prefix, tensors) | (_linear("classifier", head) if head else {})


def huggingface_decoder(params, blocks="decoder_layers", version=4):
    tensors = {name: x for name, x in mae_decoder(params).items() if not name.startswith("decoder_blocks.")}
    return wrapped("decoder.", tensors | _hf_blocks(blocks, params, version))


def google(params, head=None, heads=TINY.heads, patch=TINY.patch):
    width = params["cls"].size
    tensors = {
        "cls": params["cls"][None, None],
        "Transformer/posembed_input/pos_embedding": params["pos"][None],
    }
    modules = {
        "embedding": {
            "kernel": params["patch"]["kernel"].reshape(patch, patch, 3, width),
            "bias": params["patch"]["bias"],
        }
    }
    modules |= {"Transformer/encoder_norm": params["norm"]} | ({"head": head} if head else {})
    for i, name in enumerate(sorted(name for name in params if name.startswith("block_"))):
        block, at = params[name], f"Transformer/encoderblock_{i}"
        attention, split = f"{at}/MultiHeadDotProductAttention_1", (heads, width // heads)
        for part, leaves in zip(("query", "key", "value"), _split(block["attn"]["qkv"]), strict=True):
            modules[f"{attention}/{part}"] = {
                "kernel": leaves["kernel"].reshape(width, *split),
                "bias": leaves["bias"].reshape(split),
            }
        out = block["attn"]["proj"]
        modules[f"{attention}/out"] = {"kernel": out["kernel"].reshape(*split, width), "bias": out["bias"]}
        modules |= {f"{at}/LayerNorm_0": block["norm1"], f"{at}/LayerNorm_2": block["norm2"]}
        modules |= {f"{at}/MlpBlock_3/Dense_0": block["fc1"], f"{at}/MlpBlock_3/Dense_1": block["fc2"]}
    return tensors | {
        f"{module}/{leaf}": x for module, leaves in modules.items() for leaf, x in leaves.items()
    }


def wrapped(prefix, tensors):
    return {f"{prefix}{name}": x for name, x in tensors.items()}


def projection_head(seed=3):
    """What DINO and iBOT train behind the backbone."""
    shapes = {
        "mlp.0.weight": (9, 12),
        "mlp.0.bias": (9,),
        "last_layer.weight_g": (5, 1),
        "last_layer.weight_v": (5, 9),
    }
    return drawn({f"head.{name}": np.empty(shape) for name, shape in shapes.items()}, seed)


def save(path, tensors, metadata=None):
    """A .npz or .safetensors file; the path."""
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:  # this library writes memory as it lies, whatever the strides say
        safetensors.numpy.save_file({name: x.copy(order="C") for name, x in tensors.items()}, path, metadata)
    return path


def same(a, b):
    """Equal trees, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
