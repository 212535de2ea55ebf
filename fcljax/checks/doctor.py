"""The checks of `fcljax doctor`: what a run needs of this machine, and how to get what
is missing.

The checks change nothing and download no data set. Only a finding that would keep every
run from starting counts as failed.
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
from fcljax.errors import InputError, install_command, one_line
from fcljax.files import check_folder, machine_memory
from fcljax.models.networks import network_name
from fcljax.models.weights.pretrained import ASSET_DIGESTS, load_any
from fcljax.runs.compile_cache import asked_folders

# failed: no run can start; missing: only some runs need it; warning: worth knowing
State = Literal["ok", "missing", "warning", "failed"]

SIDE = 1024  # of the self test's matrices: large enough that starting it costs nothing
SECONDS = 0.3  # for which the self test repeats its product
# Bytes below which free space is worth a warning: checkpoints of runs are small, prepared
# data sets are not.
LITTLE_DISK = 2**30
# extras of which no run needs anything, so that their absence is no finding
MAINTAINERS = ("accelerators-aot", "test", "docs", "notebook", "release")


class Finding(NamedTuple):
    """The result of one check."""

    section: str
    """Heading under which it is listed, such as "packages"."""
    name: str
    """The examined thing."""
    state: State
    """Whether a run can do with it."""
    value: str
    """The result, as text."""
    advice: str = ""
    """Advice to the user, a command if possible."""


def examine(
    checkpoints: Sequence[str] = (),
    data_dir: str | None = None,
) -> list[Finding]:
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
    # the checks are generators: each runs here, in this order
    return [finding for check in checks for finding in check]


def healthy(findings: Iterable[Finding]) -> bool:
    """Return whether a run can start."""
    return all(finding.state != "failed" for finding in findings)


# ---- packages --------------------------------------------------------------------------


def packages() -> Iterator[Finding]:
    """Examine Python, fcljax and the dependencies in the installed package's metadata."""
    yield Finding("packages", "python", "ok", platform.python_version())
    yield Finding("packages", "fcljax", "ok", __version__)
    try:
        requirements = [Requirement(text) for text in metadata.requires("fcljax") or ()]
    except metadata.PackageNotFoundError:
        advice = "pip install -e . (in a clone)"
        yield Finding("packages", "metadata", "warning", "fcljax runs from a folder; not installed", advice)
        return
    for requirement in requirements:
        # those of extras have a marker, such as extra == "flower", that is false here
        if _needed(requirement, ""):
            yield _package(requirement)
    extras = sorted(set(metadata.metadata("fcljax").get_all("Provides-Extra") or ()) - set(MAINTAINERS))
    for extra in extras:
        yield _extra(extra, [r for r in requirements if _needed(r, extra) and not _needed(r, "")])


def _needed(requirement: Requirement, extra: str) -> bool:
    """Return whether this machine needs a requirement; `extra` is "" for the package."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(requirement: Requirement) -> Finding:
    """Examine a package that every run needs."""
    problem = _problem(requirement)
    if problem:
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        return Finding("packages", requirement.name, "failed", problem, advice)
    return Finding("packages", requirement.name, "ok", metadata.version(requirement.name))


def _extra(name: str, requirements: Sequence[Requirement]) -> Finding:
    """Examine the packages of an optional dependency."""
    problems = [f"{r.name}: {problem}" for r in requirements if (problem := _problem(r))]
    if problems:
        return Finding("extras", name, "missing", "; ".join(problems), install_command(name))
    versions = [f"{r.name} {metadata.version(r.name)}" for r in requirements]
    return Finding("extras", name, "ok", ", ".join(versions))


def _problem(requirement: Requirement) -> str:
    """Return why a requirement is not met; "" if it is."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    # who has installed a pre-release of jax has done so on purpose
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, {requirement.specifier} is needed"
    # jax[cuda13] is met only if the packages are there that the extra of jax needs
    for extra in requirement.extras:
        for inner in map(Requirement, metadata.requires(requirement.name) or ()):
            if inner.marker and inner.marker.evaluate({"extra": extra}):
                problem = _problem(inner)
                if problem:
                    return f"{inner.name} {problem}"
    return ""


# ---- devices ---------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    """List the devices that JAX uses, with their memory."""
    try:
        in_use = jax.devices()
    except RuntimeError as error:
        advice = "unset JAX_PLATFORMS, or install JAX for this device: pip install -e '.[gpu]'"
        yield Finding("devices", "jax", "failed", one_line(str(error)), advice)
        return
    for device in in_use:
        # on a CPU jax has no limit of its own
        limit = (device.memory_stats() or {}).get("bytes_limit") or machine_memory()
        value = f"{device.device_kind}, {decimal(limit)} of memory"
        yield Finding("devices", f"{device.platform}:{device.id}", "ok", value)
    yield Finding("devices", "processor cores", "ok", str(os.cpu_count()))
    # the file of NVIDIA's driver: jax on the CPU beside it is almost always an oversight
    if in_use[0].platform == "cpu" and Path("/proc/driver/nvidia/version").exists():
        yield Finding(
            "devices",
            "NVIDIA GPU",
            "missing",
            "there is a GPU that JAX does not use",
            "pip install -e '.[gpu]'",
        )


def self_test() -> Iterator[Finding]:
    """Compile a matrix product, compare it with numpy's, and measure it."""
    name = f"product of {SIDE} x {SIDE}"
    try:
        close, compile_s, flops = _product()
    except RuntimeError as error:
        yield Finding(
            "self test", name, "failed", one_line(str(error)), "the device cannot compute; see above"
        )
        return
    value = f"compiled in {compile_s:.2f} s, {flops / 1e9:,.0f} GFLOP/s in float32"
    if close:
        yield Finding("self test", name, "ok", value)
    else:
        yield Finding("self test", name, "failed", "the device's result is not numpy's", "other drivers")


def _product() -> tuple[bool, float, float]:
    """Return whether the product is right, seconds to compile, operations per second."""
    host = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    x = jnp.asarray(host)
    began = time.perf_counter()
    # compiled by hand, so that the time of compiling is not in that of computing
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    compile_s = time.perf_counter() - began
    # accelerators round the factors to some ten bits; errors of a sum of SIDE products
    # grow with its root
    close = np.allclose(product(x, x), host @ host, atol=0.02 * SIDE**0.5)
    count = 0
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        # without waiting this would measure how fast products are queued
        product(x, x).block_until_ready()
        count += 1
    return bool(close), compile_s, 2 * SIDE**3 * count / (time.perf_counter() - began)


# ---- weights ---------------------------------------------------------------------------


def weights() -> Iterator[Finding]:
    """Compare the packaged files of weights with their checksums."""
    for name, known in ASSET_DIGESTS.items():
        file = resources.files("fcljax") / "assets" / name
        advice = "install fcljax again"
        if not file.is_file():
            yield Finding("packaged weights", name, "failed", "not there", advice)
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest == known:
            yield Finding("packaged weights", name, "ok", f"sha256 {digest[:16]}, as packaged")
        # a warning only: a user may have pretrained weights of their own
        else:
            value = f"sha256 {digest[:16]}, not {known[:16]}: rebuilt or damaged"
            yield Finding("packaged weights", name, "warning", value, advice)


def checkpoint(name: str) -> Finding:
    """Examine whether a run can read a file of weights."""
    try:
        network = load_any(name)
    # as a finding, so that one bad file does not hide the rest of the report
    except (InputError, OSError) as error:
        return Finding("checkpoints", name, "failed", one_line(str(error)), "fcljax convert --help")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(network.params))
    family = f"{network_name(network.config)} ({network.mapping})"
    value = f"{family}, {parameters:,} parameters, sha256 {network.digest[:16]}"
    return Finding("checkpoints", name, "ok", "; ".join((value, *network.notes)))


# ---- files -----------------------------------------------------------------------------


def folders(data_dir: str | None = None) -> Iterator[Finding]:
    """Examine folders: whether files can be written, bytes used and bytes free."""
    yield _folder("run directories (runs/)", Path("runs"), "fcljax run METHOD --out FOLDER", "failed")
    data = data_folder(data_dir)
    yield _folder("data sets and their cache", data, "--data-dir FOLDER, or set FCLJAX_DATA", "warning")
    cache_of_jax = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    compiled = [Path(cache_of_jax)] if cache_of_jax else asked_folders()
    if not compiled:
        yield Finding("folders", "compiled programs", "ok", "not kept: FCLJAX_COMPILED is off")
    else:
        # a run takes the first usable one; before the first run none may exist
        cache = next((folder for folder in compiled if folder.is_dir()), compiled[0])
        yield _folder("compiled programs", cache, "--compile-cache FOLDER, or off", "warning")


def _folder(name: str, folder: Path, advice: str, refused: State) -> Finding:
    """Examine one folder.

    Args:
      name: shown to the user.
      folder: need not exist.
      advice: how to choose another one.
      refused: the state if no file can be written there.
    """
    try:
        check_folder(folder)
    except InputError as error:
        return Finding("folders", name, refused, str(error).partition(": ")[2], advice)
    # a folder that does not exist yet has no disk: its nearest parent has
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    value = f"{folder}: {decimal(_used(folder))} used, {decimal(free)} free"
    if free < LITTLE_DISK:
        return Finding("folders", name, "warning", value, advice)
    return Finding("folders", name, "ok", value)


def _used(folder: Path) -> int:
    """Return the bytes of the files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # lstat, since a link's target may lie in another folder; a running process
            # may remove a file meanwhile
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            total += status.st_size
    return total


def datasets(data_dir: str | None = None) -> Iterator[Finding]:
    """Examine whether each named data set is present, else give the command for it."""
    for name, _, state in known_datasets(data_dir):
        why = state.removeprefix("not here: ")
        if why == state:
            yield Finding("data sets", name, "ok", state)
            continue
        usual = how_to_get(name, data_folder(data_dir))
        # data sets that fcljax can download have a command; the others say where to get
        # them
        command = usual
        if name in OFFICIAL:
            command = f"fcljax data prepare {name}"
        yield Finding("data sets", name, "missing", "not here" if why == usual else why, command)
