"""Before JAX starts: eight host devices for tests of the device mesh, cheap compilation of tiny models."""

import os
import tempfile
from importlib import metadata

flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    # halves the time to compile; later versions refuse the flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(flags)
# what the user has prepared must not decide a test
os.environ["FCLJAX_DATA"] = tempfile.mkdtemp(prefix="fcljax-tests-")
