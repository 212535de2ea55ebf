"""The checks of `fcljax doctor`: what a run needs of this machine, and how to get what is missing.

The checks change nothing and download no data set. Only a finding that would keep every run from starting
counts as failed.
"""

import hashlib
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from packaging.requirements import Requirement
from rich.filesize import decimal

from fcljax import __version__
from fcljax.data.files.download import OFFICIAL
from fcljax.data.files.listings import how_to_get
from fcljax.data.files.sources import data_folder, known_datasets
from fcljax.errors import InputError, one_line
from fcljax.files import check_folder, machine_memory
from fcljax.models.networks import network_name
from fcljax.models.weights.pretrained import ASSET_DIGESTS, load_backbone
from fcljax.runs.compile_cache import asked_folders

# failed: no run can start; missing: only some runs need it; warning: worth knowing
State = Literal["ok", "missing", "warning", "failed"]

SIDE = 1024  # of the matrices of the self test
SECONDS = 0.3  # for which the self test repeats its product
LITTLE_DISK = 2**30  # bytes; checkpoints of runs are small, prepared data sets are not
MAINTAINERS = (
    "accelerators-aot",
    "test",
    "docs",
    "notebook",
    "release",
)  # optional dependencies that no run needs


class Finding(NamedTuple):
    """The result of one check."""

    section: str  # such as "packages"
    name: str
    state: State
    value: str  # what was found, for people
    advice: str = ""  # what to do about it, a command if there is one


def examine(checkpoints: Sequence[str] = (), data_dir: str | None = None) -> list[Finding]:
    """Run all checks.

    Args:
      checkpoints: files of weights to read, as `--checkpoint` takes them.
      data_dir: folder of data sets, as `--data-dir` takes it.
    """
    checks = (
        packages(),
        devices(),
        self_test(),
        weights(),
        map(checkpoint, checkpoints),
        folders(data_dir),
        datasets(data_dir),
    )
    return [finding for check in checks for finding in check]


def healthy(findings: Iterable[Finding]) -> bool:
    """Can a run start?"""
    return all(finding.state != "failed" for finding in findings)


# ---- packages ----------------------------------------------------------------------------------------------


def packages() -> Iterator[Finding]:
    """Python, fcljax and its dependencies, as the installed package's metadata lists them."""
    yield Finding("packages", "python", "ok", platform.python_version())
    yield Finding("packages", "fcljax", "ok", __version__)
    try:
        stated = [Requirement(text) for text in metadata.requires("fcljax") or ()]
    except metadata.PackageNotFoundError:
        advice = "pip install -e . (in a checkout)"
        yield Finding("packages", "metadata", "warning", "fcljax runs from a folder; not installed", advice)
        return
    for requirement in stated:
        if _needed(requirement, ""):
            yield _package(requirement)
    extras = sorted(set(metadata.metadata("fcljax").get_all("Provides-Extra") or ()) - set(MAINTAINERS))
    for extra in extras:
        yield _extra(extra, [r for r in stated if _needed(r, extra) and not _needed(r, "")])


def _needed(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement) -> Finding:
    problem = _problem(requirement)
    advice = f"pip install '{requirement.name}{requirement.specifier}'" if problem else ""
    value = problem or metadata.version(requirement.name)
    return Finding("packages", requirement.name, "failed" if problem else "ok", value, advice)


def _extra(name: str, requirements: Sequence[Requirement]) -> Finding:
    problems = [f"{r.name}: {problem}" for r in requirements if (problem := _problem(r))]
    if problems:
        return Finding("extras", name, "missing", "; ".join(problems), f"pip install -e '.[{name}]'")
    return Finding(
        "extras", name, "ok", ", ".join(f"{r.name} {metadata.version(r.name)}" for r in requirements)
    )


def _problem(requirement: Requirement) -> str:
    """Why a requirement is not met; empty if it is."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is needed"
    of = (
        [Requirement(text) for text in metadata.requires(requirement.name) or ()]
        if requirement.extras
        else ()
    )
    for extra in requirement.extras:  # such as jax[cuda13]: what the other package's extra needs
        for inner in of:
            if inner.marker and inner.marker.evaluate({"extra": extra}):
                problem = _problem(inner)
                if problem:
                    return f"{inner.name} {problem}"
    return ""


# ---- devices -----------------------------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    """The devices that JAX uses, with their memory."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        advice = "unset JAX_PLATFORMS, or install JAX for this device: pip install -e '.[gpu]'"
        yield Finding("devices", "jax", "failed", one_line(str(error)), advice)
        return
    for device in found:
        limit = (device.memory_stats() or {}).get("bytes_limit") or machine_memory()
        value = f"{device.device_kind}, {decimal(limit)} of memory"
        yield Finding("devices", f"{device.platform}:{device.id}", "ok", value)
    yield Finding("devices", "processor cores", "ok", str(os.cpu_count()))
    if found[0].platform == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield Finding(
            "devices",
            "NVIDIA GPU",
            "missing",
            "there is one that JAX does not use",
            "pip install -e '.[gpu]'",
        )


def self_test() -> Iterator[Finding]:
    """Compile a matrix product, compare it with numpy's, and measure it."""
    name = f"product of {SIDE} x {SIDE}"
    try:
        close, compile_s, flops = _product()
    except RuntimeError as error:
        yield Finding(
            "self test", name, "failed", one_line(str(error)), "the device does not compute; see above"
        )
        return
    value = f"compiled in {compile_s:.2f} s, {flops / 1e9:,.0f} GFLOP/s in float32"
    if close:
        yield Finding("self test", name, "ok", value)
    else:
        yield Finding("self test", name, "failed", "the device's result is not numpy's", "other drivers")


def _product() -> tuple[bool, float, float]:
    """Whether the product is right, seconds to compile, and operations per second."""
    host = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    x = jnp.asarray(host)
    began = time.perf_counter()
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    compile_s = time.perf_counter() - began
    close = np.allclose(product(x, x), host @ host, atol=0.02 * SIDE**0.5)  # accelerators round to 10 bits
    count = 0
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        product(x, x).block_until_ready()
        count += 1
    return bool(close), compile_s, 2 * SIDE**3 * count / (time.perf_counter() - began)


# ---- weights -----------------------------------------------------------------------------------------------


def weights() -> Iterator[Finding]:
    """The packaged files of weights, by their checksums."""
    for name, known in ASSET_DIGESTS.items():
        file = resources.files("fcljax") / "assets" / name
        advice = "install fcljax again"
        if not file.is_file():
            yield Finding("packaged weights", name, "failed", "not there", advice)
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest == known:
            yield Finding("packaged weights", name, "ok", f"sha256 {digest[:16]}, as it was packaged")
        else:
            value = f"sha256 {digest[:16]}, not {known[:16]}: made anew, or damaged"
            yield Finding("packaged weights", name, "warning", value, advice)


def checkpoint(name: str) -> Finding:
    """Can a run read this file of weights?"""
    try:
        read = load_backbone(None, name, None)
    except (InputError, OSError) as error:
        return Finding("checkpoints", name, "failed", one_line(str(error)), "fcljax convert --help")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(read.params))
    value = (
        f"{network_name(read.config)} ({read.mapping}), {parameters:,} parameters, sha256 {read.digest[:16]}"
    )
    return Finding("checkpoints", name, "ok", "; ".join((value, *read.notes)))


# ---- files -------------------------------------------------------------------------------------------------


def folders(data_dir: str | None = None) -> Iterator[Finding]:
    """The folders of files: whether they can be written, how much is there, and how much room is left."""
    yield _folder("run directories (runs/)", Path("runs"), "fcljax run METHOD --out FOLDER", "failed")
    data = data_folder(data_dir)
    yield _folder("data sets and their cache", data, "--data-dir FOLDER, or set FCLJAX_DATA", "warning")
    theirs = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    compiled = [Path(theirs)] if theirs else asked_folders()
    if not compiled:
        yield Finding("folders", "compiled programs", "ok", "not kept: FCLJAX_COMPILED is off")
    else:
        there = next((folder for folder in compiled if folder.is_dir()), compiled[0])
        yield _folder("compiled programs", there, "--compile-cache FOLDER, or off", "warning")


def _folder(name: str, folder: Path, elsewhere: str, otherwise: State) -> Finding:
    try:
        check_folder(folder)
    except InputError as error:
        return Finding("folders", name, otherwise, str(error).partition(": ")[2], elsewhere)
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    value = f"{folder}: {decimal(_used(folder))} used, {decimal(free)} free"
    few = free < LITTLE_DISK
    return Finding("folders", name, "warning" if few else "ok", value, elsewhere if few else "")


def _used(folder: Path) -> int:
    """Bytes of the regular files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:  # it has gone meanwhile
                continue
            total += status.st_size
    return total


def datasets(data_dir: str | None = None) -> Iterator[Finding]:
    """All named data sets: whether they are here, or the command that gets them."""
    for name, _, state in known_datasets(data_dir):
        why = state.removeprefix("not here: ")
        if why == state:
            yield Finding("data sets", name, "ok", state)
            continue
        usual = how_to_get(name, data_folder(data_dir))
        command = f"fcljax data prepare {name}" if name in OFFICIAL else usual
        yield Finding("data sets", name, "missing", "not here" if why == usual else why, command)
