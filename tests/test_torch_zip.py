"""torch's zip files in every installation: tensors as they look, and nothing that is no tensor."""

import argparse
import collections
import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import vit_files as files
from torch_files import View, save_zip

from fcljax.errors import InputError
from fcljax.models.weights import checkpoints, torch_zip
from fcljax.models.weights.checkpoints import read_checkpoint
from fcljax.models.weights.pretrained import WeightOptions, load_backbone

ENCODER, DECODER = files.encoder(), files.decoder()
ARGS = argparse.Namespace(arch="vit_base", lr=0.1, betas=(0.9, 0.95))
PMAE = files.wrapped("encoder.", files.timm(ENCODER)) | files.wrapped("decoder.", files.mae_decoder(DECODER))
CONTENT = {
    "state dict": collections.OrderedDict(files.timm(ENCODER)),
    "mae": {
        "model": files.timm(ENCODER) | files.mae_decoder(DECODER),
        "args": ARGS,
        "epoch": 3,
        "optimizer": {"state": {0: {"exp_avg": np.ones(3, np.float32)}}},
        "scale": np.float64(0.5),
    },
    "pmae": {"model": PMAE},
    "dino": {
        "teacher": files.wrapped("backbone.", files.timm(ENCODER)),
        "student": files.wrapped("module.", files.wrapped("backbone.", files.timm(files.encoder(seed=9)))),
        "fp16_scaler": {"scale": 2.0, "growth": np.float32(2)},
        "args": ARGS,
    },
}


@pytest.mark.parametrize("kind", CONTENT)
def test_checkpoints_of_training_give_their_network(tmp_path, kind):
    loaded = load_backbone(
        None, save_zip(tmp_path / "a.pth", CONTENT[kind]), None, options=WeightOptions(heads=2)
    )
    files.same(loaded.params, jax.tree.map(jnp.asarray, ENCODER))
    assert (loaded.decoder is not None) == (kind in ("mae", "pmae"))


def test_tensors_are_read_as_they_look_whatever_their_type_and_however_they_lie(tmp_path):
    data = np.arange(24, dtype=np.float32)
    half = np.linspace(-1, 1, 7).astype(ml_dtypes.bfloat16)
    content = {
        "turned": View(data, 0, (4, 6), (1, 4)),
        "every second": View(data, 1, (11,), (2,)),
        "repeated": View(data, 3, (2, 5), (0, 1)),
        "empty": View(data, 24, (0, 3), (3, 1)),
        "scalar": View(data, 5, (), ()),
        "whole numbers": np.arange(5),
        "half": half,
        "double": np.linspace(0, 1, 3),
    }
    found = read_checkpoint(save_zip(tmp_path / "a.pth", content)).tensors
    np.testing.assert_array_equal(found["turned"], data.reshape(6, 4).T)
    np.testing.assert_array_equal(found["every second"], data[1:23:2])
    np.testing.assert_array_equal(found["repeated"], np.stack([data[3:8]] * 2))
    assert found["empty"].shape == (0, 3) and found["scalar"] == 5
    np.testing.assert_array_equal(found["whole numbers"], np.arange(5))
    np.testing.assert_array_equal(found["half"], half.astype(np.float32))
    assert found["half"].dtype == np.float32 and found["double"].dtype == np.float64


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refused(path, words):
    with pytest.raises(InputError) as caught:
        load_backbone(None, str(path), None, options=WeightOptions(heads=2))
    assert "\n" not in str(caught.value) and words in str(caught.value)


def test_a_file_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    path = save_zip(tmp_path / "a.pth", {"model": files.timm(ENCODER), "args": Bomb(tmp_path / "exploded")})
    refused(path, "would run posix.mkdir when unpickled")
    assert not (tmp_path / "exploded").exists()


def test_the_reader_knows_tensors_and_plain_containers_only_even_without_the_check_before_it(
    tmp_path, monkeypatch
):
    path = save_zip(tmp_path / "a.pth", {"x": Bomb(tmp_path / "exploded")})
    monkeypatch.setattr(checkpoints, "imports", lambda stream: [])
    refused(path, "it names posix.mkdir, which is neither a tensor nor a plain container")
    assert not (tmp_path / "exploded").exists()


def test_nothing_of_the_reader_itself_can_be_changed(tmp_path):
    by_name = REBUILD + b"}X\x01\x00\x00\x00aK\x01sb."  # BUILD on a function
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", by_name)
    refused(path, "the state of an object without state")
    assert not hasattr(torch_zip._tensor, "a")


REBUILD = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (REBUILD + b"(K\x01K\x02K\x03K\x04tR.", "cannot be decoded"),
        (REBUILD + b"(K\x01K\x02))tR.", "not described as torch does"),
        (REBUILD + b"(K\x01tR.", "cannot be decoded"),
        (b"\x80\x02K\x01Q.", "a storage is not described"),
        (b"\x80\x02(K\x01", "damaged or not of the type of its suffix"),
        (pickle.dumps([1, 2]), "it holds: no tensors"),
    ],
)
def test_pickles_that_make_no_sense_are_one_line(tmp_path, content, words):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    refused(tmp_path / "a.pth", words)


def test_storages_that_are_cut_off_or_of_another_machine_are_named(tmp_path):
    weights = {"model": files.timm(ENCODER)}
    refused(save_zip(tmp_path / "a.pth", weights, drop=4), "shorter than a tensor in it")
    refused(save_zip(tmp_path / "b.pth", weights, order=b"big"), "another kind of machine")
    too_far = {"x": View(np.ones(4, np.float32), 2, (3,), (1,))}
    refused(save_zip(tmp_path / "c.pth", too_far), "shorter than a tensor in it")
