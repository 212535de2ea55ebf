"""Compiled programs that the command line keeps between processes."""

import functools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import COMMON, ROOT

from fcljax.runs import compile_cache
from fcljax.runs.compile_cache import CachedProgram, oldest_beyond

# what jax looked up, found and wrote, as it reports it, and the exit code
COUNTING = """
import json, sys, jax
from collections import Counter
from fcljax import cli
heard = Counter()
jax.monitoring.register_event_listener(lambda event, **_: heard.update([event.rpartition("/")[2]]))
code = cli.main(sys.argv[1:])
print(json.dumps({"code": code, **heard}))
"""
TINY = ["run", "linear", *COMMON, "--tasks", "2", "--rounds", "1", "--clients", "2"]


def counts(arguments, **variables):
    """What jax did with its cache in a process of its own, and what was said on stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout.splitlines()[-1])
    assert heard.pop("code") == 0, done.stderr
    return heard, done.stderr


def files(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*-cache")}


@pytest.mark.long
def test_a_second_process_compiles_nothing_and_a_damaged_program_is_replaced(tmp_path):
    # all programs are kept here, for whether one takes longer than the bound is chance
    variables = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "FCLJAX_COMPILED": str(tmp_path / "c")}
    first, _ = counts([*TINY, "--out", str(tmp_path / "a")], **variables)
    kept = files(tmp_path / "c")
    assert first["cache_misses"] == len(kept) > 5
    assert [path.name for path in (tmp_path / "c").iterdir()] == [compile_cache.machine()]
    # another folder's name, and another run directory, are not in the keys
    (tmp_path / "c").rename(tmp_path / "d")
    variables["FCLJAX_COMPILED"] = str(tmp_path / "d")
    second, said = counts([*TINY, "--out", str(tmp_path / "b")], **variables)
    assert "cache_misses" not in second and second["cache_hits"] == second["compile_requests_use_cache"]
    assert files(tmp_path / "d") == kept
    metrics = [(tmp_path / run / "metrics.jsonl").read_bytes() for run in "ab"]
    assert metrics[0] == metrics[1]
    # one bit, which jax would not find where it compresses with zstandard
    damaged = max((tmp_path / "d").rglob("*-cache"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(flipped(damaged.read_bytes(), 1000))
    third, said = counts([*TINY, "--out", str(tmp_path / "e")], **variables)
    assert third["cache_misses"] == 1 and said.count("is damaged; it was removed and is compiled again") == 1
    assert set(files(tmp_path / "d")) == set(kept) and files(tmp_path / "d")[damaged.name][32:]


def test_a_folder_below_one_that_others_may_write_to_is_not_used(tmp_path):
    """Whoever may write to a folder may rename what is in it, unless it has the sticky bit."""
    above = tmp_path / "open"
    above.mkdir()
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):
        above.chmod(mode)
        why = compile_cache.why_not(above / "mine" / "compiled")
        assert (why is not None and "'," in why and "above" in why) == refused, why


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


def test_a_program_without_its_checksum_is_removed_and_never_read(tmp_path):
    damaged = []
    cache = compile_cache.CheckedCache(str(tmp_path / "new"), damaged.append)
    program = b"machine code " * 9
    assert cache.get("jit_f-1") is None
    cache.put("jit_f-1", program)
    assert cache.get("jit_f-1") == program and damaged == []
    (path,) = (tmp_path / "new").iterdir()
    whole = path.read_bytes()
    wrong = [flipped(whole, at) for at in range(len(whole))]
    for content in (*wrong, whole[:-1], whole[:20], b"", program, whole + b"x"):
        path.write_bytes(content)
        assert cache.get("jit_f-1") is None and not path.exists()
    assert damaged == ["jit_f-1"] * (len(wrong) + 5)


def test_a_jax_that_has_no_place_for_checksums_keeps_nothing(tmp_path, monkeypatch):
    from jax._src import compilation_cache

    settings, said = [], []
    monkeypatch.setattr(compile_cache.jax.config, "update", lambda *setting: settings.append(setting))
    monkeypatch.delattr(compilation_cache, "get_file_cache")
    compile_cache._set_up(tmp_path, said.append)
    assert settings == [OFF] and "cannot store their checksums" in said[0]


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_that_need_a_program_at_once_compile_it_once(is_kept, tmp_path, monkeypatch):
    """Locks are those of files, so that threads stand for processes. A program that is compiled faster than
    it is read is not kept, and both compile it."""
    from jax._src import compilation_cache, compiler

    compiled, kept, started, may_end = [], {}, threading.Event(), threading.Event()

    def compile_program(backend, executable_devices, compile_options, cache_key):
        compiled.append(cache_key)
        started.set()
        assert may_end.wait(10)
        if is_kept:
            kept[cache_key] = f"{cache_key} of {backend}"
        return f"{cache_key} of {backend}"

    def get(cache_key, compile_options, backend, executable_devices):
        return kept.get(cache_key), 1

    monkeypatch.setattr(compiler, "_compile_and_write_cache", compile_program)
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", get)
    for _ in range(2):  # a process may set up its cache again
        compile_cache.compile_once(tmp_path)
    first_waits = threading.Event()
    owned = compile_cache.owned
    # the second one is known to wait before the first one may end
    monkeypatch.setattr(
        compile_cache, "owned", lambda lock, wait: owned(lock, lambda: (wait(), first_waits.set()))
    )
    with ThreadPoolExecutor() as pool:
        call = functools.partial(compiler._compile_and_write_cache, "cpu", (), None, cache_key="jit_f-1")
        first = pool.submit(call)
        assert started.wait(10)
        second = pool.submit(call)
        assert first_waits.wait(10)
        other = pool.submit(compiler._compile_and_write_cache, "cpu", (), None, cache_key="jit_g-2")
        may_end.set()
        results = [each.result(10) for each in (first, second, other)]
        assert results == [*2 * ["jit_f-1 of cpu"], "jit_g-2 of cpu"]
    assert compiled.count("jit_f-1") == (1 if is_kept else 2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_locks_compiles_all_the_same(tmp_path, monkeypatch):
    from jax._src import compiler

    def compile_program(backend, executable_devices, compile_options, cache_key):
        return f"compiled {cache_key}"

    monkeypatch.setattr(compiler, "_compile_and_write_cache", compile_program)
    compile_cache.compile_once(tmp_path / "missing")
    assert compiler._compile_and_write_cache("cpu", (), None, cache_key="jit_f-1") == "compiled jit_f-1"


@pytest.fixture
def set_up(monkeypatch, tmp_path):
    """The folders that were set up; nothing in the environment decides any."""
    folders = []
    monkeypatch.setattr(compile_cache, "_set_up", lambda folder, say: folders.append(folder))
    monkeypatch.setattr(type(compile_cache.jax.config), "jax_compilation_cache_dir", None, raising=False)
    monkeypatch.setattr(compile_cache.jax.config, "update", lambda name, value: folders.append((name, value)))
    for name in ("FCLJAX_COMPILED", "FCLJAX_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folders


def kept_in(set_up, option=None):
    """The folder, above that of the machine, in which programs are kept, and what is said."""
    said = []
    compile_cache.keep(option, said.append)
    return [folder.parent if isinstance(folder, Path) else folder for folder in set_up], said


OFF = ("jax_enable_compilation_cache", False)


def test_where_programs_are_kept(set_up, tmp_path, monkeypatch):
    def place(option=None):
        set_up.clear()
        ((folder,), said) = kept_in(set_up, option)
        assert said == []
        return folder

    assert place() == tmp_path / "home" / ".cache" / "fcljax" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert place() == tmp_path / "xdg" / "fcljax" / "compiled"
    monkeypatch.setenv("FCLJAX_DATA", str(tmp_path / "data"))
    assert place() == tmp_path / "data" / "compiled"
    (tmp_path / "data" / "compiled").chmod(0o777)  # a folder that all share
    assert place() == tmp_path / "xdg" / "fcljax" / "compiled"
    monkeypatch.setenv("FCLJAX_COMPILED", "~/own")
    assert place() == tmp_path / "home" / "own"
    assert place(str(tmp_path / "option")) == tmp_path / "option"
    assert place("off") == OFF
    monkeypatch.setenv("FCLJAX_COMPILED", "off")
    assert place() == OFF


def test_jax_s_own_setting_is_left_alone_unless_there_is_an_option(set_up, tmp_path, monkeypatch):
    monkeypatch.setattr(type(compile_cache.jax.config), "jax_compilation_cache_dir", "/theirs")
    assert kept_in(set_up) == ([], [])
    assert kept_in(set_up, str(tmp_path / "own")) == ([tmp_path / "own"], [])


def test_a_folder_that_cannot_be_used_is_a_line_and_no_error(set_up, tmp_path):
    (tmp_path / "file").write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    inner = tmp_path / "own"
    (inner / compile_cache.machine()).mkdir(parents=True)
    (inner / compile_cache.machine()).chmod(0o775)
    whys = {tmp_path / "file" / "x": "Not a directory", shared: "other users may write"}
    for folder, why in (whys | {inner: "other users may write"}).items():
        found, (line,) = kept_in(set_up, str(folder))
        assert found == [] and why in line and str(folder) in line and "--compile-cache" in line


def test_the_oldest_programs_are_given_up(set_up, tmp_path, monkeypatch):
    entry = lambda name, size, used: CachedProgram(Path(name), size, used)
    old, middle, new = entry("a", 3, 1.0), entry("b", 4, 2.0), entry("c", 5, 3.0)
    assert oldest_beyond([middle, old, new], 12) == []
    assert oldest_beyond([middle, old, new], 9) == [old]
    assert oldest_beyond([middle, old, new], 8) == [middle, old]
    folder = tmp_path / "home" / ".cache" / "fcljax" / "compiled" / "jax-0.0"
    folder.mkdir(parents=True)
    for age, name in enumerate(("x-cache", "y-cache", "z-other")):
        (folder / name).write_bytes(b"12345")
        os.utime(folder / name, (age, age))
    monkeypatch.setattr(compile_cache, "MOST", 7)
    kept_in(set_up)
    assert {path.name for path in folder.iterdir()} == {"y-cache", "z-other"}
