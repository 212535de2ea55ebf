"""The machine that a bench runs on: its name, and what its matrix products and copies reach."""

import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes until its arrays are there, and its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def profiled(call: Callable[[], Any]) -> tuple[float, jax.profiler.ProfileData]:
    """How long a call takes until its arrays are there, and what JAX's profiler saw of it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            taken = seconds(call)[0]
        (file,) = Path(folder).rglob("*.xplane.pb")
        return taken, jax.profiler.ProfileData.from_file(str(file))


def best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of so many calls, after one that compiles."""
    seconds(call)
    return min(seconds(call)[0] for _ in range(repeats))


def peak(size: int = 2048, repeats: int = 5, dtype: str = "float32", precision: str | None = None) -> float:
    """GFLOP/s of jax's matrix products of size x size.

    Args:
      size: rows and columns.
      repeats: the fastest counts.
      dtype: of the factors.
      precision: as `jax.default_matmul_precision` names it; None: the backend's default.
    """
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)  # a GPU multiplies equal numbers faster
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return 2 * size**3 / best(lambda: product(a, a), repeats) / 1e9


def numpy_peak(size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s of numpy's float32 matrix products."""
    a = np.ones((size, size), np.float32)
    return 2 * size**3 / best(lambda: a @ a, repeats) / 1e9


def device() -> str:
    """The first device that jax sees, in words."""
    first = jax.devices()[0]
    return f"{first.platform} {first.device_kind}"
