"""Weights by timm's and the hub's names: found in the caches, downloaded by one command, resumed, checked."""

import hashlib
import json

import pytest
import vit_files as files
from test_checkpoints import COMMIT, blob
from test_checkpoints import hub as hub

from fcljax import cli, config
from fcljax.errors import InputError
from fcljax.models.weights.hub import find_weights, get_weights, is_hub_name, repository
from fcljax.runs.inputs import load_network

NAME = "someone/vit-tiny"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FCLJAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def put(hub):
    content = blob(files.huggingface(files.encoder(), files.head()))
    hub.files["model.safetensors"] = content
    hub.files["config.json"] = json.dumps({"num_attention_heads": 3, "layer_norm_eps": 1e-6}).encode()
    return content


def network():
    return load_network(config.BackboneConfig(backbone=NAME), None)


def test_names_of_timm_and_the_hub():
    for name in ("vit_base_patch16_224.augreg_in21k", "facebook/dinov2-base", "timm/resnet50.a1_in1k"):
        assert is_hub_name(name)
    for name in ("vit_b16", "auto", "vit.npz", "./own.safetensors", "/a/b", "a/b/c"):
        assert not is_hub_name(name)
    assert repository("resnet50.a1_in1k") == "timm/resnet50.a1_in1k" and repository(NAME) == NAME


def test_one_command_gets_the_weights_that_a_name_stands_for(hub, capsys):
    with pytest.raises(InputError, match="not here; get them with: fcljax weights get someone/vit-tiny"):
        network()
    content = put(hub)
    assert cli.main(["weights", "get", NAME]) == 0
    assert hashlib.sha256(content).hexdigest()[:20] in capsys.readouterr().out
    found = network()
    files.same(found.params, files.encoder())
    assert found.config.heads == 3  # of the config.json beside it
    hub.requests.clear()
    assert cli.main(["weights", "get", NAME]) == 0 and not hub.requests


def test_a_download_that_broke_off_is_resumed_and_checked(hub):
    content = put(hub)
    hub.cut.add("model.safetensors")
    with pytest.raises(InputError, match="broke off after 10 bytes .* can be resumed"):
        get_weights(NAME)
    with pytest.raises(InputError, match="are not here"):
        find_weights(NAME)
    hub.cut.clear()
    hub.served["model.safetensors"] = b"x" * 10 + content[10:]  # what comes first is here already
    assert get_weights(NAME).path.read_bytes() == content


def test_another_content_than_the_hub_states_is_removed(hub, folder):
    content = put(hub)
    hub.served["model.safetensors"] = content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(InputError, match="does not have the checksum of the official file and was removed"):
        get_weights(NAME)
    assert not list((folder / "data").rglob("model*"))


def test_the_cache_of_the_hubs_own_library_serves(folder):
    root = folder / "cache" / "models--someone--vit-tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(blob(files.huggingface(files.encoder(), files.head())))
    (snapshot / "config.json").write_text('{"num_attention_heads": 3, "layer_norm_eps": 1e-6}')
    files.same(network().params, files.encoder())


def test_what_the_hub_does_not_have_is_one_line(hub, capsys):
    assert cli.main(["weights", "get", NAME]) == 2
    assert "has no file model.safetensors or pytorch_model.bin on the hub" in capsys.readouterr().err
    assert cli.main(["weights", "get", "vit_b16"]) == 2
    assert "not a name on the hub; expected ARCHITECTURE.TAG" in capsys.readouterr().err
    assert cli.main(["weights"]) == 2
    assert "usage: fcljax weights get NAME" in capsys.readouterr().err


def test_a_name_and_a_file_are_not_given_together():
    both = config.BackboneConfig(backbone=NAME, checkpoint="a.npz")
    with pytest.raises(InputError, match="names weights, and --checkpoint names others"):
        load_network(both, None)
