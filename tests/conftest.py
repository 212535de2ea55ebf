"""Before JAX starts: eight host devices for tests of the device mesh, cheap compilation of tiny models."""

import gc
import os
import sys
import tempfile
from importlib import metadata

import pytest

flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    # halves the time to compile; later versions refuse the flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(flags)
# what the user has prepared must not decide a test
os.environ["FCLJAX_DATA"] = tempfile.mkdtemp(prefix="fcljax-tests-")

OURS = ("test_", "toys", "micro", "small_runs")


@pytest.fixture(scope="module", autouse=True)
def free_compiled_programs():
    """Programs that a file has compiled are of no use to the next one, and a worker that keeps them all grows
    to several GB. What test modules have cached goes with them: nobody meets an engine half forgotten."""
    yield
    import jax

    for name in [name for name in sys.modules if name.startswith(OURS)]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    jax.clear_caches()
    gc.collect()
