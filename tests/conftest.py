"""Eight host-platform devices for the tests of the device mesh, and cheap compilation for tiny models, set
before JAX starts."""

import os
import tempfile
from importlib import metadata

flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if metadata.version("jaxlib").startswith("0.10."):
    flags.append(
        "--xla_cpu_use_fusion_emitters=false"
    )  # halves the time to compile; later versions refuse the flag
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ["FCLJAX_DATA"] = tempfile.mkdtemp(
    prefix="fcljax-tests-"
)  # what the user has prepared must not decide a test
