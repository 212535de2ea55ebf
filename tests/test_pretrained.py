"""Weights from files: our own names, timm's names with torch's layouts, position embeddings for other grids, and broken files."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax.traverse_util import flatten_dict
from PIL import Image

from fcljax.errors import InputError
from fcljax.models.pretrained import from_native, from_timm, interpolate_positions, load_backbone, read_tensors, save_native
from fcljax.models.vit import VITS, ViTConfig, apply_vit, parameter_shapes

TINY = ViTConfig(image_size=8, patch=4, width=12, depth=2, heads=2, mlp=20)
draw = np.random.default_rng(0).normal


def random(*shape):
    return draw(size=shape).astype(np.float32)


@pytest.fixture
def params():
    return jax.tree.map(lambda x: random(*x.shape), parameter_shapes(TINY))


@pytest.fixture
def timm():
    """What timm's state dict of such a network holds, head included."""
    w = TINY.width
    tensors = {"cls_token": random(1, 1, w), "pos_embed": random(1, 5, w), "head.weight": random(7, w), "head.bias": random(7)}
    tensors |= {"patch_embed.proj.weight": random(w, 3, 4, 4), "patch_embed.proj.bias": random(w)}
    shapes = {"norm1": (w,), "attn.qkv": (3 * w, w), "attn.proj": (w, w), "norm2": (w,), "mlp.fc1": (20, w), "mlp.fc2": (w, 20)}
    layers = {f"blocks.{i}.{name}": shape for i in range(TINY.depth) for name, shape in shapes.items()} | {"norm": (w,)}
    for name, shape in layers.items():
        tensors |= {f"{name}.weight": random(*shape), f"{name}.bias": random(shape[0])}
    return tensors


@pytest.fixture
def known(monkeypatch):
    """The tiny network under a name of its own."""
    monkeypatch.setitem(VITS, "tiny", TINY)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def refuses(path, message):
    with pytest.raises(InputError, match=message) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)


# ---- our own format ------------------------------------------------------------------------------------------------------------------


def test_saved_parameters_come_back_bit_for_bit_with_their_provenance(tmp_path, params):
    path = tmp_path / "weights.safetensors"
    save_native(path, params, {"source": "drawn at random"})
    same(from_native(read_tensors(path), TINY, "tiny"), params)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"source": "drawn at random"}
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_half_precision_files_load_as_float32(tmp_path, params):
    path = tmp_path / "weights.safetensors"
    save_native(path, params, {}, dtype="float16")
    loaded = from_native(read_tensors(path), TINY, "tiny")
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float16)), loaded, params)


def test_the_packaged_network_needs_no_file():
    config, params = load_backbone("vit_micro", None, None)
    assert config == VITS["vit_micro"]
    same(jax.tree.map(jnp.shape, params), jax.tree.map(lambda x: x.shape, parameter_shapes(config)))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


# ---- timm's names and torch's layouts ------------------------------------------------------------------------------------------------


def test_linear_weights_are_transposed_and_vectors_are_not(timm):
    params, x = from_timm(timm, TINY, "tiny"), random(3, TINY.width)
    for ours, theirs in ((params["block_01"]["attn"]["qkv"], "blocks.1.attn.qkv"), (params["block_00"]["fc1"], "blocks.0.mlp.fc1")):
        torch = x @ timm[f"{theirs}.weight"].T + timm[f"{theirs}.bias"]
        np.testing.assert_allclose(x @ ours["kernel"] + ours["bias"], torch, rtol=1e-6)
    np.testing.assert_array_equal(params["norm"]["scale"], timm["norm.weight"])
    np.testing.assert_array_equal(params["block_00"]["norm2"]["bias"], timm["blocks.0.norm2.bias"])
    np.testing.assert_array_equal(params["cls"], timm["cls_token"][0, 0])
    np.testing.assert_array_equal(params["pos"], timm["pos_embed"][0])
    same(jax.tree.map(np.shape, params), jax.tree.map(lambda x: x.shape, parameter_shapes(TINY)))


def test_the_patch_kernel_acts_as_torchs_convolution(timm):
    image, params = random(2, 8, 8, 3), from_timm(timm, TINY, "tiny")
    torch = jax.lax.conv(image.transpose(0, 3, 1, 2), timm["patch_embed.proj.weight"], (4, 4), "VALID")
    torch = torch.reshape(2, TINY.width, 4).transpose(0, 2, 1) + timm["patch_embed.proj.bias"] + timm["pos_embed"][:, 1:]
    embedded = jax.jit(lambda params, image: apply_vit(TINY, params, image).taps["embed"])(params, image)
    np.testing.assert_allclose(embedded[:, 1:], torch, atol=1e-5)
    np.testing.assert_allclose(embedded[:, 0], np.tile(timm["cls_token"][0] + timm["pos_embed"][0, :1], (2, 1)), rtol=1e-6)


def test_npz_and_safetensors_give_the_same_network_and_the_head_is_dropped(tmp_path, timm, known):
    np.savez(tmp_path / "a.npz", **timm)
    safetensors.numpy.save_file(timm, tmp_path / "a.safetensors")
    (config, one), (_, other) = (load_backbone("tiny", str(tmp_path / f"a.{kind}"), None) for kind in ("npz", "safetensors"))
    assert config == TINY
    same(one, other)
    same(one, jax.tree.map(jnp.asarray, from_timm(timm, TINY, "tiny")))


def test_matrices_take_the_compute_type_and_norms_and_embeddings_stay_float32(tmp_path, timm, known):
    np.savez(tmp_path / "a.npz", **timm)
    config, params = load_backbone("tiny", str(tmp_path / "a.npz"), None, "bfloat16")
    assert config.dtype == "bfloat16"
    kinds = {name: x.dtype.name for name, x in flatten_dict(params, sep=".").items()}
    exact = {name for name in kinds if name in ("cls", "pos") or "norm" in name}
    assert kinds == {name: "float32" if name in exact else "bfloat16" for name in kinds}
    assert len(exact) == 2 + 2 + 4 * TINY.depth


# ---- other image sizes ---------------------------------------------------------------------------------------------------------------


def test_positions_of_the_same_grid_stay_bit_for_bit():
    position = jnp.asarray(random(10, 4))
    np.testing.assert_array_equal(interpolate_positions(position, 3), position)


@pytest.mark.parametrize("grid", [3, 7, 12])
def test_constant_positions_stay_constant(grid):
    resized = interpolate_positions(jnp.full((26, 2), 1.5), grid)
    assert resized.shape == (1 + grid**2, 2)
    np.testing.assert_allclose(resized, 1.5, rtol=1e-5)


@pytest.mark.parametrize("grid", [8, 24])
def test_positions_are_resampled_as_pillows_bicubic_does(grid):
    rows, columns = np.mgrid[:14, :14] / 14
    maps = np.stack([np.sin(5 * rows + columns), np.cos(4 * columns) * rows], axis=-1).astype(np.float32)
    cls = random(1, 2)
    resized = interpolate_positions(jnp.asarray(np.concatenate([cls, maps.reshape(-1, 2)])), grid)
    pillow = [np.asarray(Image.fromarray(maps[..., i]).resize((grid, grid), Image.Resampling.BICUBIC)) for i in range(2)]
    np.testing.assert_allclose(resized[1:].reshape(grid, grid, 2), np.stack(pillow, axis=-1), atol=1e-5)
    np.testing.assert_array_equal(resized[:1], cls)


def test_another_image_size_gives_another_grid_and_touches_positions_only(tmp_path, timm, known):
    np.savez(tmp_path / "a.npz", **timm)
    (native, before), (config, after) = (load_backbone("tiny", str(tmp_path / "a.npz"), size) for size in (8, 16))
    assert (native.grid, config.grid, config.image_size) == (2, 4, 16)
    np.testing.assert_allclose(after["pos"], interpolate_positions(before["pos"], 4), rtol=1e-6)
    same(before | {"pos": 0}, after | {"pos": 0})


@pytest.mark.parametrize(("size", "nearest"), [(225, 224), (30, 32), (3, 16)])
def test_an_image_size_that_is_no_multiple_of_the_patch_is_refused_with_the_nearest(size, nearest):
    with pytest.raises(InputError, match=rf"image_size: {size} .* patch size 16 of vit_b16; nearest: {nearest}$"):
        load_backbone("vit_b16", None, size)


# ---- files that do not work ----------------------------------------------------------------------------------------------------------


def test_unknown_networks_and_networks_without_weights_are_named():
    with pytest.raises(InputError, match="backbone: unknown value 'vit_b17'; did you mean 'vit_b16'?"):
        load_backbone("vit_b17", None, None)
    with pytest.raises(InputError, match="checkpoint: vit_b16 needs a file of weights .*only vit_micro"):
        load_backbone("vit_b16", None, None)


def test_missing_files_and_folders_are_named(tmp_path):
    refuses(tmp_path / "absent.npz", "checkpoint: no file '.*absent.npz'")
    refuses(tmp_path, "checkpoint: no file")


def test_files_of_another_kind_are_refused_by_their_suffix(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"anything")
    refuses(path, r"suffix '.pth'; valid: .safetensors, .npz")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", ["half", "nothing", "text"])
def test_damaged_files_are_named(tmp_path, timm, suffix, content):
    path = tmp_path / f"weights{suffix}"
    (np.savez if suffix == ".npz" else lambda path, **x: safetensors.numpy.save_file(x, path))(path, **timm)
    whole = path.read_bytes()
    path.write_bytes({"half": whole[: len(whole) // 2], "nothing": b"", "text": b"<html>not found</html>\n" * 50}[content])
    refuses(path, f"checkpoint: '.*weights{re.escape(suffix)}' is damaged or not what its name says")


def test_bit_rot_in_a_compressed_npz_and_a_bare_array_under_its_name_are_named(tmp_path, timm):
    np.savez_compressed(tmp_path / "rot.npz", **timm)
    content = bytearray((tmp_path / "rot.npz").read_bytes())
    content[len(content) // 3 : len(content) // 3 + 64] = bytes(64)
    (tmp_path / "rot.npz").write_bytes(content)
    refuses(tmp_path / "rot.npz", "damaged or not what its name says")
    np.save(tmp_path / "bare.npy", random(3))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    refuses(tmp_path / "bare.npz", "damaged or not what its name says: File is not a zip file")


def test_python_objects_in_an_npz_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("exploded").touch, ())

    np.savez(tmp_path / "pickled.npz", **{"patch_embed.proj.weight": np.array([Bomb()], dtype=object)})
    refuses(tmp_path / "pickled.npz", "damaged or not what its name says: .*allow_pickle")
    assert not (tmp_path / "exploded").exists()


def test_tensors_that_do_not_fit_are_named(timm, params):
    timm["blocks.1.mlp.fc2.weight"] = random(TINY.width, 21)
    timm["blocks.2.norm1.bias"] = timm.pop("norm.bias")
    with pytest.raises(InputError) as caught:
        from_timm(timm, TINY, "tiny")
    assert str(caught.value) == (
        "checkpoint: does not fit tiny: misshaped: blocks.1.mlp.fc2.weight has shape (12, 21), needs (12, 20); "
        "missing: norm.bias; unexpected: blocks.2.norm1.bias"
    )
    with pytest.raises(InputError, match="missing: block_00.norm1.bias, block_00.norm1.scale"):
        from_native({k: v for k, v in flatten_dict(params, sep=".").items() if "block_00.norm1" not in k}, TINY, "tiny")


def test_a_long_list_of_tensors_is_cut_after_three(timm):
    with pytest.raises(InputError, match=r"missing: [^,]*, [^,]*, [^,]* and 27 more$"):
        from_timm({}, TINY, "tiny")
    with pytest.raises(InputError, match=r"unexpected: blocks.1.\S+, blocks.1.\S+, blocks.1.\S+ and 9 more$"):
        from_timm(timm, dataclasses.replace(TINY, depth=1), "tiny")
