"""Bad files of weights for experiments/torture.py: networks of which one thing is wrong, other files, and
wrong JSON beside good weights. Each is read by `run`, `convert` or `embed`."""

import io
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import serialization, traverse_util
from safetensors.numpy import save
from torture_common import Bad

WIDTH = 64
MLP = 8
Tensors = dict[str, np.ndarray]
SUFFIXES = ("", ".safetensors", ".npz", ".bin", ".pth.tar", ".ckpt", ".th", ".msgpack", ".h5")


def vit() -> Tensors:
    """A ViT of one block under timm's names."""
    shapes = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 5, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, 4, 4),
        "patch_embed.proj.bias": (WIDTH,),
        "blocks.0.attn.qkv.weight": (3 * WIDTH, WIDTH),
        "blocks.0.attn.qkv.bias": (3 * WIDTH,),
        "blocks.0.attn.proj.weight": (WIDTH, WIDTH),
        "blocks.0.attn.proj.bias": (WIDTH,),
        "blocks.0.mlp.fc1.weight": (MLP, WIDTH),
        "blocks.0.mlp.fc1.bias": (MLP,),
        "blocks.0.mlp.fc2.weight": (WIDTH, MLP),
        "blocks.0.mlp.fc2.bias": (WIDTH,),
    }
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def resnet() -> Tensors:
    """A ResNet of one block under torchvision's names."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (4, 3, 3, 3)}
    shapes |= {f"layer1.0.conv{i}.weight": (4, 4, 3, 3) for i in (1, 2)}
    for norm in ("bn1", "layer1.0.bn1", "layer1.0.bn2"):
        shapes |= {f"{norm}.{leaf}": (4,) for leaf in ("weight", "bias", "running_mean", "running_var")}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def _word(rng: random.Random) -> str:
    return "".join(rng.choices("abcxyz_0", k=rng.randrange(1, 9)))


# ---- one thing wrong in a network --------------------------------------------------------------------------


def _missing(rng: random.Random, tensors: Tensors) -> Tensors:
    # without these it is a network of another kind, which is read
    may_lack = ("blocks.0.attn.qkv.bias",)
    del tensors[rng.choice([name for name in tensors if name not in may_lack])]
    return tensors


def _misshaped(rng: random.Random, tensors: Tensors) -> Tensors:
    name = rng.choice(list(tensors))
    shape = [rng.randrange(4) for _ in range(rng.randrange(5))]
    return tensors | {name: np.zeros(shape, np.float32)}


def _not_finite(rng: random.Random, tensors: Tensors) -> Tensors:
    name = rng.choice(list(tensors))
    return tensors | {name: np.full_like(tensors[name], rng.choice((np.nan, np.inf, -np.inf)))}


def _whole_numbers(rng: random.Random, tensors: Tensors) -> Tensors:
    name = rng.choice(list(tensors))
    return tensors | {name: tensors[name].astype(rng.choice((np.int8, np.uint8, np.int64, np.bool_)))}


def _unexpected(rng: random.Random, tensors: Tensors) -> Tensors:
    inside = "blocks.0." if "cls_token" in tensors else "layer1.0."
    return tensors | {f"{inside}x{_word(rng)}": np.ones(3, np.float32)}


def _two(rng: random.Random, tensors: Tensors) -> Tensors:
    first = f"a{_word(rng)}."
    second = f"b{_word(rng)}."
    return {f"{prefix}{name}": x for prefix in (first, second) for name, x in tensors.items()}


def _none(rng: random.Random, tensors: Tensors) -> Tensors:
    return {_word(rng): x for x in tensors.values()}


def _other_kind(rng: random.Random, tensors: Tensors) -> Tensors:
    """Tensors that only other networks have."""
    vits = ("blocks.0.gamma_1", "dist_token", "fc_norm.weight", "rope.freqs", "blocks.0.mlp.w12.weight")
    resnets = ("layer1.0.se.fc1.weight", "layer1.0.conv3.weight", "layer1.0.downsample.0.weight")
    name = rng.choice(vits if "cls_token" in tensors else resnets)
    return tensors | {name: np.ones(3, np.float32)}


WRONG = (_missing, _misshaped, _not_finite, _whole_numbers, _unexpected, _two, _none, _other_kind)


def _npz(tensors: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **tensors)
    return stream.getvalue()


def _msgpack(tensors: Tensors) -> bytes:
    tree = traverse_util.unflatten_dict({name.replace(".", "/"): x for name, x in tensors.items()}, sep="/")
    return serialization.msgpack_serialize(tree)


WRITERS: tuple[Callable[[Tensors], bytes], ...] = (_npz, save, save)


def _command(rng: random.Random, name: str) -> list[str]:
    return rng.choice(
        (
            ["run", "linear", "--out", "r", "--checkpoint", name],
            ["convert", name, "out.safetensors"],
            ["embed", "--checkpoint", name, "--out", "out.npz"],
        )
    )


def _network(rng: random.Random) -> Bad:
    tensors = rng.choice((vit, resnet))()
    change = rng.choice(WRONG)
    prefix = rng.choice(("", "", "module.", f"{_word(rng)}.{_word(rng)}."))
    changed = {f"{prefix}{name}": x for name, x in change(rng, tensors).items()}
    name = f"w{rng.choice(SUFFIXES)}"
    content = rng.choice(WRITERS)(changed)
    return Bad(f"weights with {change.__name__.strip('_')}", _command(rng, name), {name: content})


# ---- other files -------------------------------------------------------------------------------------------


def _kind(rng: random.Random) -> Bad:
    beginning = rng.choice(
        (
            b"\x89HDF\r\n",
            b"\x1f\x8b",
            b"version https://git-lfs",
            b"GGUF",
            b"<!DOCTYPE",
            b"PK\x03\x04",
            b"\x80\x02",
        )
    )
    name = f"w{rng.choice(SUFFIXES)}"
    return Bad(
        "weights of another kind", _command(rng, name), {name: beginning + rng.randbytes(rng.randrange(600))}
    )


def _flax(rng: random.Random) -> Bad:
    """msgpack that is cut, describes an array as none is, or holds no network."""
    whole = _msgpack({_word(rng): np.ones(5, np.float32)})
    array = struct.pack(">BBB", 0xC7, rng.randrange(40), 1) + rng.randbytes(rng.randrange(40))
    content = rng.choice((whole, whole[: rng.randrange(1, len(whole))], b"\x81\xa1a" + array))
    return Bad("msgpack", _command(rng, "w.msgpack"), {"w.msgpack": content})


JSONS = ("[]", "{", "1", "null", "\udcff", "[" * 9999, '{"weight_map": []}', '{"weight_map": {"a": 1}}')
VALUES: tuple[object, ...] = ("x", -1, 0, 1.5, None, [], {}, True, "9" * 999, [1, 2], float("inf"))


def _index(rng: random.Random) -> Bad:
    """An index of several files of which one is missing, elsewhere or none."""
    homes = ("../w.safetensors", "/etc/passwd", "absent.safetensors", "", "index.json", "a\0b")
    text = json.dumps({"weight_map": {"cls_token": rng.choice((*homes, *VALUES))}})
    name = "model.safetensors.index.json"
    content = rng.choice((text, text, rng.choice(JSONS))).encode(errors="surrogateescape")
    return Bad("index of weights", _command(rng, rng.choice((".", name))), {name: content})


def _beside(rng: random.Random) -> Bad:
    """Good weights beside a JSON file of which one value is wrong."""
    wrong = [value for value in VALUES if value is not None]
    config = rng.choice(
        (
            {"num_attention_heads": rng.choice(wrong)},
            {"layer_norm_eps": rng.choice(wrong)},
            {"hidden_act": rng.choice(wrong)},
            {"rope_theta": rng.choice([value for value in wrong if value != 1.5])},
            {"pretrained_cfg": {"mean": rng.choice(("x", [], {}, [1, 2])), "std": [1, 1, 1]}},
            {"architecture": "resnetblur50"},
        )
    )
    text = json.dumps(config)
    content = rng.choice((text, text, rng.choice(JSONS[:5]))).encode(errors="surrogateescape")
    return Bad("JSON beside weights", _command(rng, "w.bin"), {"w.bin": save(vit()), "config.json": content})


GENERATORS: tuple[Callable[[random.Random], Bad], ...] = (_network, _network, _kind, _flax, _index, _beside)
