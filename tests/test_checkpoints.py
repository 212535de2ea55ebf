"""Files of weights: what is read, and what is refused in one line. The hub is played by a local server."""

import hashlib
import http.server
import io
import json
import os
import pickle
import re
import struct
import sys
import threading
import time
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import vit_files as files
from hypothesis import given, settings
from hypothesis import strategies as st

from fcljax.errors import InputError
from fcljax.models.weights import checkpoints
from fcljax.models.weights.checkpoints import imports, read_checkpoint
from fcljax.models.weights.pretrained import load_backbone

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b/c": np.array([1.5], np.float16),
    "empty": np.zeros((0, 2)),
}


def refuses(path, message):
    with pytest.raises(InputError, match=message) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


# ---- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_tensors_come_back_as_they_were_with_the_file_s_digest(tmp_path, suffix):
    path = files.save(tmp_path / f"some{suffix}", TENSORS)
    found = read_checkpoint(path)
    equal(found.tensors, TENSORS)
    assert (found.digest, found.source) == (hashlib.sha256(path.read_bytes()).hexdigest(), f"some{suffix}")
    assert found.metadata == found.config == found.preprocessor == {}


@pytest.mark.parametrize(
    "kind",
    [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
    ],
)
def test_every_type_of_a_safetensors_file_is_read(tmp_path, kind):
    tensors = {
        "x": np.array([[0, 1, 1]]).astype(getattr(ml_dtypes, kind, kind)),
        "scalar": np.zeros((), kind if kind != "bfloat16" else "f4"),
    }
    found = read_checkpoint(files.save(tmp_path / "a.safetensors", tensors, {"who": "we"}))
    equal(found.tensors, tensors)
    assert found.metadata == {"who": "we"}


def test_float32_tensors_of_a_safetensors_file_are_views_of_it(tmp_path):
    found = read_checkpoint(files.save(tmp_path / "a.safetensors", TENSORS)).tensors["a"]
    assert not found.flags.owndata and not found.flags.writeable


def test_json_beside_a_file_of_any_name_is_read(tmp_path):
    for name in ("config", "preprocessor_config", "open_clip_config"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"of": name}))
    model, other = (
        read_checkpoint(files.save(tmp_path / f"{name}.safetensors", TENSORS)) for name in ("model", "other")
    )
    for found in (model, other):
        assert (found.config, found.preprocessor) == ({"of": "config"}, {"of": "preprocessor_config"})
        assert found.open_clip == {"of": "open_clip_config"}
    (tmp_path / "config.json").write_text("{")
    refuses(tmp_path / "model.safetensors", "config.json' is not JSON")


# ---- files that do not work --------------------------------------------------------------------------------


def test_missing_files_folders_and_other_kinds_are_named(tmp_path):
    refuses(tmp_path / "absent.npz", "checkpoint: no file '.*absent.npz'")
    refuses(tmp_path, "checkpoint: no file")
    (tmp_path / "weights.h5").write_bytes(b"anything")
    refuses(tmp_path / "weights.h5", r"suffix '.h5'; valid: .safetensors, .npz, .msgpack, .pth, .pt, .bin, ")


@pytest.mark.parametrize("suffix", checkpoints.SUFFIXES)
@pytest.mark.parametrize("content", ["half", "nothing", "text", "tar"])
def test_damaged_files_are_named(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    if suffix in checkpoints.TORCH:
        torch_zip(path, b"\x80\x02}q\x00.", padding=1000)
    else:
        files.save(path, {"x": np.ones(1000)})
    whole = path.read_bytes()
    path.write_bytes(
        {
            "half": whole[: len(whole) // 2],
            "nothing": b"",
            "text": b"<html>no</html>\n" * 50,
            "tar": bytes(10240),
        }[content]
    )
    refuses(
        path, f"checkpoint: '.*weights{re.escape(suffix)}' is damaged or not of the type of its suffix: ."
    )


@settings(max_examples=60)
@given(suffix=st.sampled_from([".safetensors", ".npz"]), at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_changed_byte_gives_tensors_or_one_line(tmp_path_factory, suffix, at, byte):
    path = files.save(tmp_path_factory.mktemp("a") / f"a{suffix}", TENSORS)
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content)
    try:
        read_checkpoint(path)
    except InputError as error:
        assert "\n" not in str(error)


def test_bit_rot_in_a_compressed_npz_and_a_bare_array_under_its_name_are_named(tmp_path):
    np.savez_compressed(tmp_path / "rot.npz", x=np.random.default_rng(0).normal(size=500))
    content = bytearray((tmp_path / "rot.npz").read_bytes())
    content[len(content) // 3 : len(content) // 3 + 64] = bytes(64)
    (tmp_path / "rot.npz").write_bytes(content)
    refuses(tmp_path / "rot.npz", "damaged or not of the type of its suffix")
    np.save(tmp_path / "bare.npy", np.ones(3))
    (tmp_path / "bare.npy").rename(tmp_path / "bare.npz")
    refuses(
        tmp_path / "bare.npz", "damaged or not of the type of its suffix: BadZipFile: File is not a zip file"
    )


def test_an_array_that_claims_more_than_it_holds_is_not_allocated(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue() + bytes(40))
    refuses(tmp_path / "a.npz", "damaged .*: x is cut off")


def test_a_type_that_numpy_has_not_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    refuses(tmp_path / "a.safetensors", "x is of type F8_E4M3")


def test_python_objects_in_an_npz_are_never_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([Bomb(tmp_path / "exploded")], dtype=object))
    refuses(
        tmp_path / "a.npz",
        "damaged or not of the type of its suffix: .*pickled objects, which are never read",
    )
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["../up.npy", "a/../../up.npy", "/etc/up.npy", "C:\\up.npy", "..\\up.npy"])
@pytest.mark.parametrize("suffix", [".npz", ".pth"])
def test_members_outside_an_archive_are_refused_by_name(tmp_path, name, suffix):
    path = tmp_path / f"a{suffix}"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"")
        archive.writestr("a/data.pkl", b"\x80\x02}q\x00.")
    refuses(path, f"contains a file named {re.escape(repr(name))}, which points outside of it$")


@pytest.mark.parametrize("suffix", [".npz", ".pth"])
def test_an_archive_that_would_unpack_to_too_much_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(5):
            archive.writestr(f"{i}.npy", b"")
            archive.filelist[i].file_size = 2**32 - 2  # what the directory at the end of the archive will say
    refuses(path, r"would unpack to 20.0 GiB, and the limit is 16.0 GiB$")


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "a.safetensors"
    path.touch()
    os.truncate(path, checkpoints.FILE_LIMIT + 1)  # takes no space
    refuses(path, "is larger than 64 GiB$")


# ---- torch files, as far as they can be judged without torch -----------------------------------------------


def torch_zip(path, content, padding=0):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(padding))
        archive.writestr("archive/version", b"3\n")


def torch_legacy(path, content):
    head = [pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    path.write_bytes(b"".join(head) + content + pickle.dumps([], 2) + bytes(64))


KINDS = {"zip": torch_zip, "legacy": torch_legacy}
HARMLESS = b"\x80\x02(ctorch._utils\n_rebuild_tensor_v2\nctorch\nFloatStorage\nccollections\nOrderedDict\n"
HARMLESS += b"cargparse\nNamespace\ncnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nctorch\nbfloat16\nt."


@pytest.mark.parametrize("suffix", checkpoints.TORCH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_by_name_and_does_not_run(tmp_path, suffix, kind, protocol):
    path = tmp_path / f"a{suffix}"
    KINDS[kind](path, pickle.dumps({"model": {"x": Bomb(tmp_path / "exploded")}}, protocol))
    refuses(path, "would run posix.mkdir when unpickled, so it is not loaded")
    assert not (tmp_path / "exploded").exists()


def test_a_bare_pickle_that_would_run_code_is_refused_by_name_and_does_not_run(tmp_path):
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refuses(tmp_path / "a.pt", "would run posix.mkdir")
    assert not (tmp_path / "exploded").exists()
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"x": 1}))
    refuses(
        tmp_path / "a.pt", "damaged or not of the type of its suffix: it does not begin as torch's files do"
    )


def test_without_torch_a_file_of_old_torch_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    torch_legacy(tmp_path / "a.pth", HARMLESS)
    refuses(
        tmp_path / "a.pth",
        r"torch before 1.6: pip install -e '.\[torch\]' in a clone of fcljax, or convert it once",
    )


def test_names_alone_are_no_tensors(tmp_path):
    torch_zip(tmp_path / "a.pth", HARMLESS)
    assert read_checkpoint(tmp_path / "a.pth").tensors == {}


def test_a_zip_without_a_pickle_is_no_torch_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("x", b"")
    refuses(tmp_path / "a.pth", "damaged or not of the type of its suffix: it has no data.pkl")


def test_every_pickle_of_an_archive_is_looked_at(tmp_path):
    torch_zip(tmp_path / "a.pth", HARMLESS)
    with zipfile.ZipFile(tmp_path / "a.pth", "a") as archive:
        archive.writestr("archive/constants.pkl", b"cos\nsystem\n.")
    refuses(tmp_path / "a.pth", "would run os.system")


text = {
    word: b"\x8c" + bytes([len(word)]) + word.encode()
    for word in ("posix", "system", "collections", "OrderedDict")
}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (HARMLESS.split(b"ccoll")[0] + b"t.", ["torch._utils._rebuild_tensor_v2", "torch.FloatStorage"]),
        (b"(ios\nsystem\n.", ["os.system"]),
        (b"\x80\x02\x82\x01.", ["copyreg extension 1"]),
        (b"\x80\x04" + text["posix"] + text["system"] + b"\x93.", ["posix.system"]),
        (b"\x80\x04" + text["posix"] + b"\x94" + text["system"] + b"\x940h\x00h\x01\x93.", ["posix.system"]),
        (
            b"\x80\x04"
            + text["posix"]
            + text["system"]
            + text["collections"]
            + text["OrderedDict"]
            + b"00\x93.",
            ["?.?"],
        ),
        (
            b"\x80\x04"
            + text["posix"]
            + text["system"]
            + text["collections"]
            + b"\x85"
            + text["OrderedDict"]
            + b"\x860\x93.",
            ["?.?"],
        ),
        (b"\x80\x04\x93.", ["?"]),
        (b"N.", []),
    ],
)
def test_imports_are_read_off_opcodes_and_a_hidden_one_is_never_taken_for_a_harmless_one(content, names):
    assert imports(io.BytesIO(content)) == names


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "torch.hub.load",
        "torch.load",
        "torch._utils.x",
        "numpy.load",
        "collections.x",
        "os.system",
    ],
)
def test_what_acts_on_the_outside_is_not_among_the_harmless(tmp_path, name):
    module, _, function = name.rpartition(".")
    torch_zip(tmp_path / "a.pth", f"c{module}\n{function}\n.".encode())
    refuses(tmp_path / "a.pth", f"would run {re.escape(name)} when unpickled")


# ---- the hub -----------------------------------------------------------------------------------------------

COMMIT = "c0ffee" + "0" * 34


class Hub(http.server.ThreadingHTTPServer):
    """A hub with one repository.

    files: content by name. served: what GET sends instead. cut: names whose GET ends after ten bytes.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.served, self.cut, self.requests = {}, {}, set(), []

    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        hub = self.server
        hub.requests.append(f"{self.command} {self.path}")
        found = re.fullmatch(
            r"/someone/vit-tiny/resolve/(main|v1|c0ffee0+)/(.+)", self.path.partition("?")[0]
        )
        if not found or found[2] not in hub.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if found else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        name, content = found[2], hub.files[found[2]]
        etag = (
            hashlib.sha256(content).hexdigest()
            if name.endswith((".safetensors", ".bin"))
            else hashlib.sha1(content).hexdigest()
        )
        if body:
            content = hub.served.get(name, content)
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[start : 10 if name in hub.cut else None])
            self.close_connection = True


@pytest.fixture
def hub(tmp_path, monkeypatch):
    library = pytest.importorskip("huggingface_hub.utils")
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
    library.disable_progress_bars()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def blob(tensors):
    return safetensors.numpy.save({name: x.copy(order="C") for name, x in tensors.items()})


def cached(tmp_path):
    """Files and links in the cache, without what marks it as one."""
    found = [path for path in (tmp_path / "cache").rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(path.name for path in found if path.name != "CACHEDIR.TAG")


def test_a_network_comes_from_the_hub_with_its_heads_and_constants(hub):
    encoder = files.encoder()
    hub.files["model.safetensors"] = blob(files.huggingface(encoder, files.head()))
    hub.files["config.json"] = json.dumps({"num_attention_heads": 3, "layer_norm_eps": 1e-6}).encode()
    hub.files["preprocessor_config.json"] = json.dumps(
        {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}
    ).encode()
    loaded = load_backbone(None, "hf:someone/vit-tiny", None)
    files.same(loaded.params, encoder)
    assert (loaded.config.heads, loaded.mean, loaded.std) == (3, (0.1,) * 3, (0.2,) * 3)
    assert loaded.digest == hashlib.sha256(hub.files["model.safetensors"]).hexdigest()


@pytest.mark.parametrize(
    "spec", ["hf:someone/vit-tiny", "hf:someone/vit-tiny@v1", "hf:someone/vit-tiny@v1:model.safetensors"]
)
def test_revision_and_file_can_be_named(hub, spec):
    hub.files["model.safetensors"] = blob(TENSORS)
    found = read_checkpoint(spec)
    equal(found.tensors, TENSORS)
    assert found.source == (spec if spec.endswith("safetensors") else f"{spec}:model.safetensors")
    # the hub's library may ask a server for its own sake, once in a process
    asked = [request for request in hub.requests if "/api/" not in request]
    assert all(f"/resolve/{'v1' if '@' in spec else 'main'}/" in request for request in asked)


def test_a_file_in_a_folder_has_its_own_config(hub):
    hub.files |= {
        "b16/weights.safetensors": blob(TENSORS),
        "config.json": b'{"of": "all"}',
        "b16/config.json": b'{"of": "b16"}',
    }
    assert read_checkpoint("hf:someone/vit-tiny:b16/weights.safetensors").config == {"of": "b16"}


@pytest.mark.long
def test_the_second_time_nothing_is_downloaded_and_without_the_hub_the_cache_serves(hub, monkeypatch):
    hub.files["model.safetensors"] = blob(TENSORS)
    read_checkpoint("hf:someone/vit-tiny")
    hub.requests.clear()
    read_checkpoint("hf:someone/vit-tiny")
    assert not [request for request in hub.requests if request.startswith("GET")]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    equal(read_checkpoint("hf:someone/vit-tiny").tensors, TENSORS)
    refuses(
        "hf:someone/vit-tiny:other.safetensors",
        "cannot reach the hub for 'other.safetensors' .*and the cache does not have it$",
    )


def test_torch_weights_are_taken_where_there_are_no_others(hub, tmp_path):
    torch_zip(tmp_path / "a.bin", pickle.dumps(Bomb(tmp_path / "exploded")))
    hub.files["pytorch_model.bin"] = (tmp_path / "a.bin").read_bytes()
    refuses("hf:someone/vit-tiny", "pytorch_model.bin' would run posix.mkdir")


def test_repositories_and_files_that_are_not_there_are_named(hub):
    refuses(
        "hf:someone/vit-tiny", "'hf:someone/vit-tiny' has no file model.safetensors or pytorch_model.bin$"
    )
    refuses("hf:someone/vit-tiny:a.npz", "has no file a.npz$")
    refuses("hf:someone/other", "cannot get 'model.safetensors' of 'hf:someone/other' from the hub: .")


@pytest.mark.parametrize("spec", ["hf:", "hf:vit", "hf:a/b/c", "hf:a/b@", "hf:a/b:"])
def test_a_place_that_is_none_is_refused_with_the_form(spec):
    refuses(spec, "is not hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME@REVISION:FILE$")


def test_without_the_library_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses(
        "hf:someone/vit-tiny",
        r"needs the hub's library: pip install -e '.\[hub\]' in a clone .*, or give the path of a file$",
    )
    refuses("hf:someone/vit-tiny:weights.h5", "suffix '.h5'")


def test_content_that_differs_from_the_hub_s_checksum_is_refused_and_removed(hub, tmp_path):
    hub.files["model.safetensors"] = blob(TENSORS)
    hub.served["model.safetensors"] = hub.files["model.safetensors"][:-1] + b"\x07"
    refuses("hf:someone/vit-tiny", "differs from the hub's checksum [0-9a-f]{64}; it was removed, try again$")
    assert cached(tmp_path) == []
    hub.served.clear()
    equal(read_checkpoint("hf:someone/vit-tiny").tensors, TENSORS)


def test_a_cached_file_that_has_rotted_is_refused_and_removed(hub, tmp_path):
    hub.files["model.safetensors"] = blob(TENSORS)
    read_checkpoint("hf:someone/vit-tiny")
    (rotten,) = (tmp_path / "cache").glob("*/blobs/" + "?" * 64)
    rotten.write_bytes(rotten.read_bytes()[:-1] + b"\x07")
    refuses("hf:someone/vit-tiny", "differs from the hub's checksum")
    assert not rotten.exists() and "model.safetensors" not in cached(tmp_path)
    equal(read_checkpoint("hf:someone/vit-tiny").tensors, TENSORS)


@pytest.mark.parametrize("way", ["short", "dropped"])
def test_a_download_that_is_cut_off_is_refused_and_removed(hub, tmp_path, way):
    hub.files["model.safetensors"] = blob(TENSORS)
    if way == "short":
        hub.served["model.safetensors"] = hub.files["model.safetensors"][:-20]
    else:
        hub.cut.add("model.safetensors")
    refuses("hf:someone/vit-tiny", "cannot get 'model.safetensors' of 'hf:someone/vit-tiny' from the hub: .")
    assert cached(tmp_path) == []
    hub.served.clear()
    hub.cut.clear()
    equal(read_checkpoint("hf:someone/vit-tiny").tensors, TENSORS)


def test_a_config_that_is_cut_off_is_refused_and_the_weights_stay(hub, tmp_path):
    hub.files |= {"model.safetensors": blob(TENSORS), "config.json": b'{"num_attention_heads": 3}'}
    hub.served["config.json"] = b'{"num_att'
    refuses("hf:someone/vit-tiny", "cannot get 'config.json'")
    assert "model.safetensors" in cached(tmp_path) and "config.json" not in cached(tmp_path)
