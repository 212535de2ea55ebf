"""Before any library starts: one core, and one thread of it. Imports nothing that computes."""

import os

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def one_core(core: int | None) -> None:
    """Bind this process to one core and every library to one thread on the processor.

    To be called before numpy, jax or torch are imported: they read the environment and the cores once.

    Args:
      core: its number; None: the lowest that the process may use.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0)) if core is None else core})
    os.environ |= dict.fromkeys(THREADS, "1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
