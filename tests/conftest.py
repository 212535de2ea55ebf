"""Before JAX starts: eight host devices for tests of the device mesh, cheap compilation of tiny models, and
each program compiled once."""

import collections
import functools
import gc
import inspect
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import typing
from importlib import metadata
from pathlib import Path

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from hypothesis import settings
from jaxtyping import _decorator

flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
TESTED_JAX = metadata.version("jaxlib").startswith("0.10.")
if TESTED_JAX:
    # The first halves the time to compile; the second, machine code of a program in one piece, saves a sixth
    # of the rest. Later versions may refuse them.
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(flags)
# One folder for all processes of pytest-xdist, which inherit the variable.
OWNER = "FCLJAX_TESTS" not in os.environ
if OWNER:
    os.environ["FCLJAX_TESTS"] = tempfile.mkdtemp(prefix="fcljax-tests-")
SCRATCH = Path(os.environ["FCLJAX_TESTS"])
ON_DISK = 0.1  # seconds, what takes longer to compile is kept there
# what the user has prepared must not decide a test
os.environ["FCLJAX_DATA"] = str(SCRATCH / f"data-{os.getpid()}")
os.environ |= {
    "OPENBLAS_NUM_THREADS": "1",  # the processes of pytest-xdist share the cores
    "JAX_COMPILATION_CACHE_DIR": str(SCRATCH / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(ON_DISK),
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # they put the folder's name into the keys
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # no test reads where in the source a program's parts are from
}
# A shell's background jobs, and what they start, ignore SIGINT, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish():
    if OWNER:
        shutil.rmtree(SCRATCH, ignore_errors=True)


# Tracing makes many short-lived objects, which the default threshold looks through again and again.
gc.set_threshold(20_000, 20, 20)

# Property tests try the same values every time: what they find belongs to the change that broke it.
settings.register_profile("fcljax", derandomize=True, deadline=None)
settings.load_profile("fcljax")

# after all that JAX reads when it starts
import jax  # noqa: E402

# ---- checks of signatures ----------------------------------------------------------------------------------

with_shapes = jaxtyping.jaxtyped
without_shapes = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def has_shapes(annotation) -> bool:
    """Whether a type, or a part of it, is one of jaxtyping's. Text may be anything."""
    if isinstance(annotation, str) or type(annotation).__module__.startswith("jaxtyping"):
        return True
    return any(map(has_shapes, typing.get_args(annotation)))


def checked(*functions, typechecker):
    """In place of `jaxtyping.jaxtyped`, whose two checkers of each function are costly to make and to call.
    What has shapes goes through it, and what has none to beartype itself. An inner function without
    shapes, which is made anew in every call, stays as it is. Checks are made at the first call: a process
    that runs tests imports every module, and makes its inner functions again and again."""
    if not any(map(inspect.isfunction, functions)):
        return with_shapes(*functions, typechecker=typechecker)
    (function,) = functions
    shapes = any(map(has_shapes, function.__annotations__.values()))
    if not shapes and "<locals>" in function.__qualname__:
        return function
    make = functools.partial(with_shapes, typechecker=typechecker) if shapes else without_shapes
    checker = functools.cache(lambda: make(function))

    @functools.wraps(function)
    def with_checks(*args, **kwargs):
        return checker()(*args, **kwargs)

    # in tracebacks it is one of the type checks, and no line of a user's
    with_checks.__code__ = with_checks.__code__.replace(co_filename="<@beartype at the first call>")
    return with_checks


modules: tuple[typing.Any, ...] = (jaxtyping, _decorator)
for module in modules:
    module.jaxtyped = checked

# ---- compiled programs -------------------------------------------------------------------------------------


def share_contexts(programs: int = 100) -> None:
    """Lower so many programs in one context of MLIR. JAX makes a context for each program, which is a fifth
    of what a program of one operation takes."""
    from jax._src.interpreters import mlir  # JAX's own, which another version may not have

    make, count = mlir.make_ir_context, itertools.count()

    @functools.lru_cache(maxsize=1)
    def of_group(group: int):
        return make()

    mlir.make_ir_context = lambda: of_group(next(count) // programs)


def share_programs(most: int = 1_000) -> None:
    """Keep the last so many programs that are too small for the disk, and take one of them where an equal one
    would be compiled: that of an engine in another test, or an operation on arrays of the same shapes in
    another file. Equal programs have the key by which JAX looks for them on the disk."""
    from jax._src import compiler as jax_compiler  # JAX's own too

    compiler: typing.Any = jax_compiler
    compile_and_write, kept = compiler._compile_and_write_cache, collections.OrderedDict()

    def compiled(backend, module, devices, options, callbacks, name, key):
        cache_folder = jax.config.values["jax_compilation_cache_dir"]
        own = key, cache_folder, tuple(device.id for device in devices)
        if own in kept:
            kept.move_to_end(own)
            return kept[own]
        start = time.monotonic()
        program = compile_and_write(backend, module, devices, options, callbacks, name, key)
        if time.monotonic() - start < ON_DISK and not callbacks:
            kept[own] = program
        if len(kept) > most:
            kept.popitem(last=False)
        return program

    compiler._compile_and_write_cache = compiled


if TESTED_JAX:
    share_contexts()
    share_programs()

OURS = ("test_", "toys", "micro", "small_runs")


@pytest.fixture(scope="module", autouse=True)
def free_compiled_programs():
    """Programs that a file has compiled are of no use to the next one, and a worker that keeps them all grows
    to several GB. What test modules have cached goes with them: nobody meets an engine half forgotten."""
    yield
    for name in [name for name in sys.modules if name.startswith(OURS)]:
        for value in vars(sys.modules[name]).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    jax.clear_caches()
    gc.collect()
    # what is left stays to the end: later collections need not look through it again
    gc.freeze()
