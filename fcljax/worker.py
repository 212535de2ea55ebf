"""The child of `fcljax run --coordinator`, which does the work: python -m fcljax.worker
LOG ..."""

import os
import sys

from fcljax.cli import quiet_threads, reported
from fcljax.commands.running import run_as_process
from fcljax.runs.hosts import run_child

if __name__ == "__main__":
    quiet_threads()
    code = run_child(lambda log: reported(lambda: run_as_process(sys.argv[2:], log)), int(sys.argv[1]))
    # `os._exit` flushes nothing
    sys.stdout.flush(), sys.stderr.flush()
    # at once: jax's exit hooks would wait for processes that may be gone
    os._exit(code)
