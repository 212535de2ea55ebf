"""State dicts, whole checkpoints and files that would run code, with torch: run where `fcljax[torch]` is."""

import argparse
import collections
import os
import pickle
import pickletools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vit_files as files

from fcljax.errors import InputError
from fcljax.models.vit import apply_vit
from fcljax.models.weights import checkpoints
from fcljax.models.weights.checkpoints import read_checkpoint
from fcljax.models.weights.convert import ConvertOptions, convert
from fcljax.models.weights.pretrained import WeightOptions, load_backbone

torch = pytest.importorskip("torch")

ENCODER, DECODER, HEAD = files.encoder(), files.decoder(), files.head()
STUDENT = files.encoder(seed=9)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def tensors(arrays):
    return collections.OrderedDict((name, torch.from_numpy(x.copy())) for name, x in arrays.items())


def save(path, content, **options):
    torch.save(content, path, **options)
    return str(path)


def optimiser():
    """A state dict after one step, with a learning rate as schedules of numpy leave it."""
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight])
    weight.sum().backward()
    adam.step()
    state = adam.state_dict()
    state["param_groups"][0]["lr"] = np.linspace(0, 1, 5)[3]
    return state


def training(**networks):
    """A checkpoint as DINO, iBOT and MAE write theirs."""
    args = argparse.Namespace(arch="vit_base", patch_size=16, lr=0.1, betas=(0.9, 0.95), output_dir=".")
    return networks | {
        "optimizer": optimiser(),
        "epoch": 3,
        "args": args,
        "fp16_scaler": {"scale": 2.0, "growth": np.float32(2)},
    }


def self_supervised():
    head, center = files.projection_head(), {"center": torch.zeros(1, 5)}
    student = files.wrapped("module.", files.wrapped("backbone.", files.timm(STUDENT)) | head)
    teacher = files.wrapped("backbone.", files.timm(ENCODER)) | head
    return training(student=tensors(student), teacher=tensors(teacher), dino_loss=center)


CONTENT = {
    "state dict": lambda: tensors(files.timm(ENCODER)),
    "deit": lambda: {"model": tensors(files.timm(ENCODER, HEAD))},
    "mae": lambda: training(
        model=tensors(files.timm(ENCODER) | files.mae_decoder(DECODER)), scaler={"scale": 65536.0}
    ),
    "pmae": lambda: {
        "model": tensors(
            files.wrapped("encoder.", files.timm(ENCODER))
            | files.wrapped("decoder.", files.mae_decoder(DECODER))
        )
    },
    "dino": self_supervised,
    "huggingface": lambda: dict(tensors(files.huggingface(ENCODER))),
    "parameters": lambda: {name: torch.nn.Parameter(x) for name, x in tensors(files.timm(ENCODER)).items()},
}


@pytest.mark.parametrize("kind", CONTENT)
@pytest.mark.parametrize("zipped", [True, False])
def test_state_dicts_and_whole_checkpoints_give_their_network(tmp_path, kind, zipped):
    path = save(tmp_path / "a.pth", CONTENT[kind](), _use_new_zipfile_serialization=zipped)
    loaded = load_backbone(None, path, None, options=WeightOptions(heads=2))
    files.same(loaded.params, jax.tree.map(jnp.asarray, ENCODER))
    assert (loaded.decoder is not None, loaded.head is not None) == (kind in ("mae", "pmae"), kind == "deit")
    assert any("assumed (imagenet)" in note for note in loaded.notes) == (
        kind in ("mae", "pmae", "dino", "deit")
    )


def test_the_student_of_a_whole_checkpoint_can_be_had(tmp_path):
    path = save(tmp_path / "checkpoint.pth", self_supervised())
    files.same(
        load_backbone(None, path, None, options=WeightOptions(heads=2, part="student")).params, STUDENT
    )


def test_numpy_scalars_are_read_under_the_names_of_old_and_new_numpy(tmp_path):
    path = save(tmp_path / "a.pth", CONTENT["dino"]())
    new, old = (b"numpy._core.multiarray", b"numpy.core.multiarray")
    content = pickled(path)
    other = content.replace(new, old) if new in content else content.replace(old, new)
    assert other != content
    rewritten = tmp_path / "b.pth"
    repack(path, rewritten, other)
    files.same(load_backbone(None, str(rewritten), None, options=WeightOptions(heads=2)).params, ENCODER)


def pickled(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def repack(source, target, content):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))


@pytest.mark.parametrize("suffix", checkpoints.TORCH)
def test_every_suffix_of_torch_is_read(tmp_path, suffix):
    path = save(tmp_path / f"a{suffix}", CONTENT["state dict"]())
    files.same(load_backbone(None, path, None, options=WeightOptions(heads=2)).params, ENCODER)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_floating_point_types_load_as_float32(tmp_path, dtype):
    content = {name: x.to(getattr(torch, dtype)) for name, x in CONTENT["state dict"]().items()}
    expected = {name: x.to(torch.float32).numpy() for name, x in content.items()}
    found = load_backbone(
        None, save(tmp_path / "a.pth", content), None, options=WeightOptions(heads=2)
    ).params
    np.testing.assert_array_equal(found["block_01"]["fc1"]["kernel"], expected["blocks.1.mlp.fc1.weight"].T)
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_tensors_that_share_memory_or_lie_turned_are_read_as_they_look(tmp_path):
    content = CONTENT["state dict"]()
    name = "blocks.0.mlp.fc1.weight"
    content[name] = content[name].t().contiguous().t()
    content["norm.weight"] = torch.arange(24.0)[::2]
    expected = {name: x.numpy().copy() for name, x in content.items()}
    found = read_checkpoint(save(tmp_path / "a.pth", content)).tensors
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


def test_a_torch_file_converts_to_one_that_needs_no_torch(tmp_path):
    path = save(tmp_path / "a.pth", CONTENT["mae"]())
    convert(path, str(tmp_path / "ours.safetensors"), ConvertOptions(heads=2))
    before, after = (
        load_backbone(None, path, None, options=WeightOptions(heads=2)),
        load_backbone(None, str(tmp_path / "ours.safetensors"), None),
    )
    files.same((before.params, before.decoder), (after.params, after.decoder))
    assert (before.config, before.mean, before.std) == (after.config, after.mean, after.std)


# ---- what is refused ---------------------------------------------------------------------------------------


def refuses(path, message):
    with pytest.raises(InputError, match=message) as caught:
        load_backbone(None, str(path), None, options=WeightOptions(heads=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_that_would_run_code_is_refused_and_does_not_run(tmp_path, zipped, protocol):
    content = {"model": CONTENT["state dict"](), "args": Bomb(tmp_path / "exploded")}
    path = save(tmp_path / "a.pth", content, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    refuses(path, "would run posix.mkdir when unpickled")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_torchs_own_guard_stands_behind_ours(tmp_path, monkeypatch, zipped):
    path = save(tmp_path / "a.pth", {"x": Bomb(tmp_path / "exploded")}, _use_new_zipfile_serialization=zipped)
    monkeypatch.setattr(checkpoints, "imports", lambda stream: list(pickletools.genops(stream))[:0])
    refuses(
        path,
        "'.*a.pth' is not loaded, because .*; save its state dict alone",
    )
    assert not (tmp_path / "exploded").exists()


def test_a_whole_module_is_refused_by_name(tmp_path):
    refuses(
        save(tmp_path / "a.pth", torch.nn.Linear(2, 3)),
        "would run torch.nn.modules.linear.Linear when unpickled",
    )


def test_what_holds_no_network_is_named(tmp_path):
    refuses(save(tmp_path / "a.pth", {"x": torch.ones(3)}), "no Vision Transformer in it: .*it holds: x$")
    refuses(save(tmp_path / "b.pth", [1, 2]), "it holds: no tensors")
    refuses(save(tmp_path / "c.pth", torch.ones(3)), "no Vision Transformer in it")
    loop = {}
    loop["model"] = loop
    refuses(save(tmp_path / "d.pth", loop), "damaged or not of the type of its suffix")
    refuses(
        save(tmp_path / "e.pth", {"x": torch.ones(3).to_sparse()}),
        "would run torch._utils._rebuild_sparse_tensor",
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_files_are_named(tmp_path, zipped):
    path = tmp_path / "a.pth"
    save(path, CONTENT["state dict"](), _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for length in (len(whole) // 4, len(whole) - 3000):
        path.write_bytes(whole[:length])
        refuses(path, "'.*a.pth' is damaged or not of the type of its suffix: .")


def test_a_pickle_alone_is_no_torch_file(tmp_path):
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"x": 1}))
    refuses(tmp_path / "a.pt", "damaged or not of the type of its suffix")


# ---- networks of the libraries themselves ------------------------------------------------------------------


def differs(loaded, image, expected):
    """The largest difference between our class token and theirs, as a share of the largest of theirs."""
    ours = apply_vit(loaded.config, loaded.params, jnp.asarray(image)).cls
    return float(np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max())


IMAGE = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)


def channels_first(image):
    return torch.from_numpy(np.ascontiguousarray(image.transpose(0, 3, 1, 2)))


def test_a_model_that_transformers_saved_computes_the_same_here(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "image_size": 32,
    }
    model = transformers.ViTModel(transformers.ViTConfig(patch_size=8, initializer_range=0.1, **shape)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(channels_first(IMAGE)).last_hidden_state[:, 0].numpy()
    loaded = load_backbone(None, str(tmp_path / "model.safetensors"), None)
    assert loaded.config.heads == 4
    assert loaded.config.epsilon == 1e-12
    assert differs(loaded, IMAGE, expected) < 1e-4
    state = save(tmp_path / "state.pth", model.state_dict())  # under the names that the running model has
    assert differs(load_backbone(None, state, None, options=WeightOptions(heads=4)), IMAGE, expected) < 1e-4


def test_a_state_dict_of_timm_computes_the_same_here(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(channels_first(IMAGE)), pre_logits=True).numpy()
        logits = model(channels_first(IMAGE)).numpy()
    loaded = load_backbone(None, save(tmp_path / "a.pth", model.state_dict()), None)
    assert loaded.config.heads == 3
    assert differs(loaded, IMAGE, expected) < 1e-4
    features = apply_vit(loaded.config, loaded.params, jnp.asarray(IMAGE)).cls
    np.testing.assert_allclose(features @ loaded.head["kernel"] + loaded.head["bias"], logits, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deit_tiny_distilled_patch16_224", "distilled"),
        ("vit_small_patch14_dinov2", "unexpected: blocks.0.ls1.gamma"),
        (
            "vit_small_patch14_reg4_dinov2",
            "not those of a class token and a square grid|unexpected: .*reg_token|ls1.gamma",
        ),
        ("vit_base_patch16_clip_224", "norm_pre"),
        ("vit_base_patch16_siglip_224", "no class token|not those of a class token"),
        ("beit_base_patch16_224", "fc_norm|missing|unexpected"),
        ("resnet18", "no Vision Transformer in it"),
    ],
)
def test_networks_of_timm_that_are_others_are_refused(tmp_path, name, message):
    timm = pytest.importorskip("timm")
    options = {} if name == "resnet18" else {"depth": 1}
    refuses(save(tmp_path / "a.pth", timm.create_model(name, **options).state_dict()), message)
