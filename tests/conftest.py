"""Eight host-platform devices for the tests of the device mesh, set before JAX starts. Models here are tiny, so compile cheaply."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
