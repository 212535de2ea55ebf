"""Official archives are downloaded or resumed, checked, unpacked safely, and failures leave nothing else."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import os
import socket
import struct
import tarfile
import threading
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fcljax.archives import leads_out
from fcljax.data.augment import Geometry
from fcljax.data.files import download
from fcljax.data.files.download import OFFICIAL, Archive, fetch
from fcljax.data.files.listings import NAMED
from fcljax.data.files.sources import DataOptions, known_datasets, load_dataset, prepare
from fcljax.errors import InputError

WNIDS = ("n01443537", "n01484850")


class Server(namedtuple("Server", "url files asked behaviour")):
    """Files to serve by name, the requests so far as (path, range, agent), and how to misbehave."""


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, *args, server_state):
        self.state = server_state
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def do_GET(self):
        files, asked, behaviour = self.state
        asked.append((self.path, self.headers["Range"], self.headers["User-Agent"]))
        if self.path.startswith("/old/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/old"))
            self.end_headers()
            return
        content = files.get(self.path.partition("?")[0][1:])
        if content is None or "status" in behaviour:
            self.send_error(behaviour.get("status", 404))
            return
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if self.headers["Range"] else 0
        start = 0 if behaviour.get("no_range") else start
        self.send_response(206 if start else 200)
        if start:
            self.send_header(
                "Content-Range",
                behaviour.get("content_range", f"bytes {start}-{len(content) - 1}/{len(content)}"),
            )
        if not behaviour.get("no_length"):
            self.send_header("Content-Length", str(behaviour.get("length", len(content) - start)))
        self.end_headers()
        self.wfile.write(content[start : behaviour.get("cut", len(content))])
        if "hang" in behaviour:
            self.wfile.flush()
            behaviour["hang"].wait(20)
        if behaviour.get("reset"):
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


@pytest.fixture
def server(monkeypatch):
    for variable in ("no_proxy", "NO_PROXY"):  # a proxy is not to be asked for the machine's own files
        monkeypatch.setenv(variable, "127.0.0.1")
    files, asked, behaviour = {}, [], {}
    running: Any = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, server_state=(files, asked, behaviour))
    )
    running.handle_error = lambda *args: None  # a client that hangs up is part of the test
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    yield Server(f"http://127.0.0.1:{running.server_port}", files, asked, behaviour)
    running.shutdown()
    running.server_close()
    thread.join()


def offer(server, file, content, takes, below="", **changes):
    """Serve a file; the archive that it is."""
    server.files[file] = content
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} | changes
    return Archive(url=f"{server.url}/{file}", takes=takes, below=below, **facts)


def image(number, size=(6, 6)):
    stream = io.BytesIO()
    Image.new("RGB", size, (number, 3, 7)).save(stream, "PNG")
    return stream.getvalue()


def packed_tar(members, mode="w"):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as packed:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                info.type, info.linkname = content
                packed.addfile(info)
            else:
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def packed_zip(members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if isinstance(content, tuple):
                info.external_attr, content = content[0] << 16, content[1]
            packed.writestr(info, content)
    return stream.getvalue()


def renditions(count=10):
    return {
        f"imagenet-r/{wnid}/{index:02d}.jpg": image(100 * label + index)
        for label, wnid in enumerate(WNIDS)
        for index in range(count)
    }


@pytest.fixture
def birds(server):
    members = {
        f"CUB_200_2011/images/{bird}/{index}.jpg": image(index)
        for bird in ("001.Auk", "002.Owl")
        for index in range(10)
    }
    more = {
        "attributes.txt": np.random.RandomState(0).bytes(5000),
        "CUB_200_2011/images/001.Auk/._0.jpg": b"of a file manager",
        "CUB_200_2011/bounding_boxes.txt": b"1",
    }
    return offer(server, "CUB_200_2011.tgz", packed_tar(members | more, "w:gz"), "CUB_200_2011/images")


def quiet():
    return Console(file=io.StringIO(), width=400)


def get(name, archives, folder, **options):
    fetch(name, archives, folder, instead="put the files there", console=quiet(), **options)


def refusal(name, archives, folder, **options):
    with pytest.raises(InputError) as error:
        get(name, archives, folder, **options)
    message = str(error.value)
    assert "\n" not in message and "127.0.0.1" not in message
    return message


def load(name, folder):
    return load_dataset(name, DataOptions(geometry=Geometry(12, 8), data_dir=folder, console=quiet()))


def left(folder):
    """What lies in a data folder, but for the empty files that processes lock."""
    for file in folder.glob(".*.lock"):
        assert file.stat().st_size == 0
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def partial_file(folder, archive):
    (part,) = left(folder)
    assert archive.file in part and part.endswith(".part")
    return folder / part


# The whole way


def test_an_archive_is_downloaded_unpacked_and_loads(server, tmp_path, birds):
    get("cub200", [birds], tmp_path / "new" / "data")
    data = load("cub200", tmp_path / "new" / "data")
    assert data.class_names == ("001.Auk", "002.Owl") and len(data.y_train) == 16 and len(data.y_test) == 4
    (request,) = server.asked
    assert request[1] is None and request[2].startswith("fcljax/")


def test_only_what_is_wanted_of_an_archive_is_written(tmp_path, birds):
    get("cub200", [birds], tmp_path)
    assert left(tmp_path) == sorted(
        f"CUB_200_2011/images/{bird}/{index}.jpg" for bird in ("001.Auk", "002.Owl") for index in range(10)
    )


def test_an_unpacked_tree_equals_the_official_one(server, tmp_path):
    members = renditions()
    get(
        "imagenet_r",
        [
            offer(
                server,
                "imagenet-r.tar",
                packed_tar({"./imagenet-r/README.txt": b"read"} | members),
                "imagenet-r",
            )
        ],
        tmp_path,
    )
    assert (tmp_path / "imagenet-r" / "README.txt").read_bytes() == b"read"
    assert all((tmp_path / name).read_bytes() == content for name, content in members.items())
    for path in ("imagenet-r", "imagenet-r/README.txt"):
        assert os.access(tmp_path / path, os.R_OK) and (tmp_path / path).stat().st_mode & 0o044 == 0o044
    assert load("imagenet_r", tmp_path).digest == load("imagenet_r_hepco", tmp_path).digest


def domains(server):
    archives = []
    for number, domain in enumerate(("clipart", "infograph", "painting", "quickdraw", "real", "sketch")):
        members = {f"{domain}/": b""} | {
            f"{domain}/{label}/{n}.png": image(10 * number + n) for label in ("ant", "zoo") for n in range(5)
        }
        archives.append(offer(server, f"groundtruth/{domain}.zip", packed_zip(members), domain, "domainnet"))
    return archives


def test_several_archives_make_one_data_set(server, tmp_path):
    get("domainnet", domains(server), tmp_path)
    data = load("domainnet", tmp_path)
    assert data.class_names == ("ant", "zoo") and len(data.y_train) == 48 and len(data.y_test) == 12
    assert sorted(path.name for path in (tmp_path / "domainnet").iterdir()) == sorted(
        archive.takes for archive in domains(server)
    )


def test_a_set_whose_last_archive_fails_is_not_there_at_all(server, tmp_path):
    archives = domains(server)
    sketch = server.files.pop("groundtruth/sketch.zip")
    assert "sketch.zip was refused by the server (HTTP status 404)" in refusal(
        "domainnet", archives, tmp_path
    )
    assert len(left(tmp_path)) == 5 and all(file.endswith(".part") for file in left(tmp_path))
    server.files["groundtruth/sketch.zip"] = sketch
    server.asked.clear()
    get("domainnet", archives, tmp_path)
    assert [path for path, *_ in server.asked] == ["/groundtruth/sketch.zip"]
    assert len(left(tmp_path)) == 60


def test_omniglot_is_found_where_it_is_unpacked(server, tmp_path):
    archives = [
        offer(
            server,
            f"{part}.zip",
            packed_zip({f"{part}/{alphabet}/character01/{n}.png": image(n) for n in range(20)}),
            part,
            "omniglot",
        )
        for part, alphabet in (("images_background", "Latin"), ("images_evaluation", "Zulu"))
    ]
    get("omniglot", archives, tmp_path)
    data = load("omniglot", tmp_path)
    assert data.class_names == ("Latin/character01", "Zulu/character01") and len(data.y_test) == 10


def fashion(server):
    def idx(array):
        return gzip.compress(
            struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
        )

    archives = []
    for split, count in (("train", 20), ("t10k", 10)):
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (
            ("images-idx3", labels[:, None, None] + np.zeros((1, 28, 28), np.uint8)),
            ("labels-idx1", labels),
        ):
            archives.append(offer(server, f"{split}-{kind}-ubyte.gz", idx(array), "", "fashion_mnist"))
    return tuple(archives)


def test_prepare_downloads_what_is_not_here(server, tmp_path, monkeypatch):
    monkeypatch.setitem(OFFICIAL, "fashion_mnist", fashion(server))
    (tmp_path / "fashion_mnist").mkdir()
    (tmp_path / "fashion_mnist" / "notes.txt").write_text("the user's own")
    assert prepare("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet())).counts == (20, 10)
    data = load_dataset("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet()))
    assert data.x_train[:, 5, 5, 0].tolist() == data.y_train.tolist() == list(range(10)) * 2
    names = [archive.file for archive in OFFICIAL["fashion_mnist"]]
    assert sorted(path.name for path in (tmp_path / "fashion_mnist").iterdir()) == sorted(
        ["notes.txt", *names]
    )
    prepare("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet()))
    assert len(server.asked) == 4


def test_a_prepared_download_does_without_the_network_from_then_on(server, tmp_path, monkeypatch):
    monkeypatch.setitem(OFFICIAL, "fashion_mnist", fashion(server))
    first = prepare("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet()))
    server.behaviour["status"] = 500
    assert prepare("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet())).digest == first.digest
    assert dict((name, state) for name, _, state in known_datasets(tmp_path))["fashion_mnist"] == "prepared"


def test_a_failed_download_names_the_official_files_and_where_to_put_them(server, tmp_path, monkeypatch):
    server.behaviour["status"] = 503
    monkeypatch.setitem(OFFICIAL, "fashion_mnist", fashion(server))
    with pytest.raises(InputError) as error:
        prepare("fashion_mnist", DataOptions(data_dir=tmp_path, console=quiet()))
    message = str(error.value)
    refused = "train-images-idx3-ubyte.gz was refused by the server (HTTP status 503)"
    assert f"cannot download 'fashion_mnist': {refused}" in message
    assert NAMED["fashion_mnist"].put in message and str(tmp_path) in message and "\n" not in message
    assert left(tmp_path) == []


def test_a_redirected_address_and_one_with_a_query_are_followed(server, tmp_path, birds):
    get("cub200", [birds._replace(url=f"{server.url}/old/CUB_200_2011.tgz?download=1")], tmp_path)
    assert [path for path, *_ in server.asked] == [
        "/old/CUB_200_2011.tgz?download=1",
        "/CUB_200_2011.tgz?download=1",
    ]
    assert len(load("cub200", tmp_path).y_train) == 16


def test_a_server_that_does_not_say_how_long_a_file_is_will_do(server, tmp_path, birds):
    server.behaviour["no_length"] = True
    get("cub200", [birds], tmp_path)
    assert len(left(tmp_path)) == 20


def test_two_at_once_download_once(server, tmp_path, birds):
    threads = [threading.Thread(target=get, args=("cub200", [birds], tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1 and len(left(tmp_path)) == 20


def test_progress_is_shown_on_a_terminal_only(tmp_path, birds):
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
        fetch("cub200", [birds], tmp_path / str(terminal), instead="", console=console)
        text = console.file.getvalue()
        assert ("━" in text) == ("\x1b" in text) == terminal
        assert f"downloading cub200, {birds.bytes:,} bytes, to {tmp_path / str(terminal)}" in text


# Broken connections


@pytest.mark.parametrize(
    "behaviour", [{"cut": 700}, {"cut": 700, "no_length": True}, {"cut": 700, "reset": True}]
)
def test_a_download_that_broke_off_is_resumed(server, tmp_path, birds, behaviour):
    server.behaviour.update(behaviour)
    message = refusal("cub200", [birds], tmp_path)
    assert "cannot download 'cub200': CUB_200_2011.tgz broke off after" in message and message.endswith(
        "or put the files there"
    )
    got = partial_file(tmp_path, birds).stat().st_size if left(tmp_path) else 0
    # a reset may overtake what was sent before it
    assert 0 <= got <= 700 if behaviour.get("reset") else got == 700
    server.behaviour.clear()
    get("cub200", [birds], tmp_path)
    assert server.asked[-1][1] == (f"bytes={got}-" if got else None)
    assert len(left(tmp_path)) == 20 and len(load("cub200", tmp_path).y_train) == 16


def test_a_server_that_knows_no_ranges_sends_all_of_it_again(server, tmp_path, birds):
    server.behaviour.update(cut=700, no_range=True)
    refusal("cub200", [birds], tmp_path)
    del server.behaviour["cut"]
    get("cub200", [birds], tmp_path)
    assert server.asked[-1][1] == "bytes=700-" and len(left(tmp_path)) == 20


def test_a_download_of_which_nothing_came_leaves_nothing(server, tmp_path, birds):
    server.behaviour["cut"] = 0
    assert "broke off after 0 bytes" in refusal("cub200", [birds], tmp_path) and left(tmp_path) == []


def test_what_came_of_another_version_is_not_continued(server, tmp_path, birds):
    server.behaviour["cut"] = 700
    refusal("cub200", [birds], tmp_path)
    server.behaviour.clear()
    get(
        "cub200",
        [offer(server, "CUB_200_2011.tgz", server.files["CUB_200_2011.tgz"] + b"\0", birds.takes)],
        tmp_path,
    )
    assert [part for _, part, _ in server.asked] == [None, None]


def test_a_server_that_falls_silent_is_given_up(server, tmp_path, birds):
    server.behaviour.update(cut=700, hang=threading.Event())
    assert "TimeoutError" in refusal("cub200", [birds], tmp_path, timeout=0.2)
    server.behaviour.pop("hang").set()
    assert left(tmp_path) == [] or partial_file(tmp_path, birds).stat().st_size <= 700


def test_a_server_that_is_not_there_is_one_line(server, tmp_path, birds):
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        gone = birds._replace(url=f"http://127.0.0.1:{unused.getsockname()[1]}/CUB_200_2011.tgz")
        message = refusal("cub200", [gone], tmp_path)
    assert "CUB_200_2011.tgz cannot be reached (ConnectionRefusedError" in message and left(tmp_path) == []


@pytest.mark.parametrize("status", [403, 404, 416, 500])
def test_an_http_error_keeps_what_has_come_unless_it_cannot_be_resumed(server, tmp_path, birds, status):
    server.behaviour["cut"] = 700
    refusal("cub200", [birds], tmp_path)
    server.behaviour["status"] = status
    assert f"(HTTP status {status})" in refusal("cub200", [birds], tmp_path)
    assert left(tmp_path) == [] if status == 416 else partial_file(tmp_path, birds).stat().st_size == 700


def test_another_part_than_the_one_asked_for_is_not_taken(server, tmp_path, birds):
    server.behaviour["cut"] = 700
    refusal("cub200", [birds], tmp_path)
    server.behaviour["content_range"] = "bytes 0-9/10"
    assert "was answered with another part than asked for" in refusal("cub200", [birds], tmp_path)
    assert left(tmp_path) == []


# Files that are not the official ones


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1] + b"?", lambda content: b"<html>" + content[6:]]
)
def test_a_file_with_another_checksum_is_refused_and_removed(server, tmp_path, birds, damage):
    server.files["CUB_200_2011.tgz"] = damage(server.files["CUB_200_2011.tgz"])
    assert "CUB_200_2011.tgz does not have the checksum of the official file" in refusal(
        "cub200", [birds], tmp_path
    )
    assert left(tmp_path) == []


def test_a_partial_file_that_was_damaged_is_found_out_and_removed(server, tmp_path, birds):
    server.behaviour["cut"] = 700
    refusal("cub200", [birds], tmp_path)
    partial_file(tmp_path, birds).write_bytes(b"x" * 700)
    server.behaviour.clear()
    assert "does not have the checksum" in refusal("cub200", [birds], tmp_path)
    assert left(tmp_path) == []
    get("cub200", [birds], tmp_path)


def test_a_file_of_another_length_is_refused_before_it_is_read(server, tmp_path, birds):
    server.files["CUB_200_2011.tgz"] = b"moved"
    message = refusal("cub200", [birds], tmp_path)
    assert f"has 5 bytes on the server, the official file {birds.bytes:,}" in message and left(tmp_path) == []


def test_a_file_that_does_not_end_is_cut_and_removed(server, tmp_path, birds):
    server.files["CUB_200_2011.tgz"] += b"more"
    server.behaviour["no_length"] = True
    assert "is longer than the official file" in refusal("cub200", [birds], tmp_path) and left(tmp_path) == []


# Unpacking

GOOD = {"cub/a/1.jpg": b"good"}
LINK = (0o120777, "../../outside")


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("x.zip", packed_zip(GOOD | {"../outside": b"bad"}), "'../outside', which points outside of it"),
        ("x.zip", packed_zip(GOOD | {"cub/a/../../../outside": b"bad"}), "which points outside of it"),
        ("x.zip", packed_zip(GOOD | {"/outside": b"bad"}), "'/outside', which points outside of it"),
        ("x.zip", packed_zip(GOOD | {"cub\\..\\..\\outside": b"bad"}), "which points outside of it"),
        ("x.zip", packed_zip(GOOD | {"C:\\outside": b"bad"}), "which points outside of it"),
        ("x.zip", packed_zip(GOOD | {"cub/link": LINK}), "'cub/link', which is not a regular file"),
        ("x.zip", packed_zip(GOOD | {"cub/bomb": bytes(1 << 22)}), "holds more than 10 times its own size"),
        ("x.zip", packed_zip({"other/1.jpg": b""}), "has no files in cub"),
        ("x.zip", b"PK no archive", "cannot be unpacked (BadZipFile"),
        ("x.tar", packed_tar(GOOD | {"../outside": b"bad"}), "'../outside', which points outside of it"),
        ("x.tar", packed_tar(GOOD | {"/outside": b"bad"}), "'/outside', which points outside of it"),
        (
            "x.tar",
            packed_tar(GOOD | {"cub/link": (tarfile.SYMTYPE, "../../outside")}),
            "'cub/link', which is not a regular file",
        ),
        (
            "x.tar",
            packed_tar(GOOD | {"cub/link": (tarfile.LNKTYPE, "cub/a/1.jpg")}),
            "'cub/link', which is not a regular file",
        ),
        (
            "x.tar",
            packed_tar(GOOD | {"cub/pipe": (tarfile.FIFOTYPE, "")}),
            "'cub/pipe', which is not a regular file",
        ),
        (
            "x.tgz",
            packed_tar(GOOD | {"cub/bomb": bytes(1 << 22)}, "w:gz"),
            "holds more than 10 times its own size",
        ),
        ("x.tgz", packed_tar(GOOD, "w:gz")[:-20], "cannot be unpacked (EOFError"),
        ("x.tar", b"no archive", "cannot be unpacked (ReadError"),
    ],
    # a gzip file holds the time it was made
    ids=lambda value: "content" if isinstance(value, bytes) else value,
)
def test_what_an_archive_should_not_hold_is_refused_and_nothing_stays(server, tmp_path, file, content, words):
    folder = tmp_path / "data" / "folder"
    message = refusal("cub200", [offer(server, file, content, "cub")], folder)
    assert f"cannot download 'cub200': {file} " in message and words in message
    assert left(folder) == [] and [path.name for path in folder.iterdir()] == [".cub.lock"]
    assert not any(path.name == "outside" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "member, out",
    [("a/b.c", False), ("a..b/..c", False), ("..", True), ("a/..", True), ("\\a", True), ("D:a", True)],
)
def test_paths_that_lead_out_are_recognised(member, out):
    assert leads_out(member) == out


def test_a_kill_while_unpacking_leaves_the_archive_to_the_next_try(server, tmp_path, birds, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "_move", killed)
        with pytest.raises(KeyboardInterrupt):
            get("cub200", [birds], tmp_path)
    assert partial_file(tmp_path, birds).stat().st_size == birds.bytes
    # as by a process that could not clean up
    (tmp_path / ".CUB_200_2011.tmp-left" / "CUB_200_2011").mkdir(parents=True)
    get("cub200", [birds], tmp_path)
    assert len(server.asked) == 1 and len(left(tmp_path)) == 20 and not list(tmp_path.glob(".*tmp*"))


def test_what_is_in_the_way_is_named_and_stays(tmp_path, birds):
    (tmp_path / "CUB_200_2011").mkdir()
    (tmp_path / "CUB_200_2011" / "images").symlink_to("nowhere")
    message = refusal("cub200", [birds], tmp_path)
    assert message.startswith("data_dir: cannot write 'cub200'") and "images' is in the way" in message
    assert (tmp_path / "CUB_200_2011" / "images").is_symlink() and len(left(tmp_path)) == 1


def test_a_folder_without_room_is_refused_before_anything_is_asked_for(server, tmp_path, birds, monkeypatch):
    usage = namedtuple("Usage", "total used free")(10**12, 10**12, 1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage)
    message = refusal("cub200", [birds], tmp_path)
    assert "has 1,000 bytes left" in message and "choose another with --data-dir" in message
    assert server.asked == [] and left(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path, birds):
    (tmp_path / "file").write_text("no folder")
    assert refusal("cub200", [birds], tmp_path / "file").startswith(
        f"data_dir: cannot write 'cub200' to {str(tmp_path / 'file')!r}"
    )


# The table


def test_the_official_archives_fit_the_layouts_that_are_looked_for():
    by_hand = {"cars196", "imagenet_a"}
    assert set(OFFICIAL) == {name for name, named in NAMED.items() if named.tfds} - by_hand | {
        "tiny_imagenet"
    }
    for name, archives in OFFICIAL.items():
        assert len({archive.place.parts[0] for archive in archives}) == 1
        assert len({archive.place for archive in archives}) == len(archives)
        for archive in archives:
            assert len(archive.sha256) == 64 and set(archive.sha256) <= set("0123456789abcdef")
            if name not in ("mnist", "fashion_mnist", "omniglot", "domainnet"):
                assert f"{archive.place}/" in NAMED[name].put
            assert archive.file.endswith(
                (".zip", ".tar", ".tar.gz", ".tgz") if archive.takes else "-ubyte.gz"
            )


def test_the_official_archives_are_those_of_the_registry_of_tensorflow_datasets():
    (root,) = map(Path, importlib.util.find_spec("tensorflow_datasets").submodule_search_locations)
    lines = [
        path.read_text().splitlines()
        for folder, ending in (("url_checksums", "txt"), ("datasets", "tsv"))
        for path in sorted((root / folder).rglob(f"*.{ending}"))
    ]
    registry = {
        line.split("\t")[0]: line.split("\t")[1:3] for part in lines for line in part if line.count("\t") >= 2
    }
    known = [
        archive
        for name, archives in OFFICIAL.items()
        for archive in archives
        if name not in ("domainnet", "tiny_imagenet")
    ]
    assert [registry[archive.url] for archive in known] == [
        [str(archive.bytes), archive.sha256] for archive in known
    ]
