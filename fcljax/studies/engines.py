"""Start the runs of a sweep: as processes of this machine, tasks of Ray, or jobs of
Slurm. All start the same command, whose files all machines must see under the same
names."""

import contextlib
import dataclasses
import getpass
import importlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from fcljax.errors import InputError, install_command, one_line
from fcljax.files import write_text
from fcljax.options import option
from fcljax.studies import jobs
from fcljax.studies.jobs import Job

# seconds between two looks at Slurm's queue, and after which a job that has left it
# without a result is lost
QUEUE_INTERVAL = 5.0
LOST = 60.0

Name = Literal["local", "ray", "slurm", "slurm-local"]


class ClusterTask(NamedTuple):
    """A run that was started."""

    code: Callable[[], int | None]
    """Its exit code; None while it runs."""
    stop: Callable[[int], object]
    """Ends it, as the signal of that number would."""


Start = Callable[[Job], ClusterTask]


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """Resources of a run in Slurm: the mapping `slurm` of a sweep's file."""

    partition: str | None = None
    time: int = 24 * 60  # minutes; a run that takes longer is queued again and resumes
    gpus: int = option(0, least=0)
    cpus: int = 4
    memory_gb: float | None = option(None, positive=True)  # default: the partition's
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    requeues: int = option(3, least=0)  # how often a run that timed out is queued again


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Resources of a run in Ray: the mapping `ray` of a sweep's file. RAY_ADDRESS names a
    cluster."""

    cpus: float = 1.0
    gpus: float = 0.0


@contextlib.contextmanager
def engine(
    name: Name,
    slurm: SlurmOptions,
    ray: RayOptions,
    folder: Path,
) -> Iterator[Start]:
    """Yield the function that starts runs, until the block ends. `folder` is for files
    of the engine.

    Raises:
      InputError: if the engine is not installed, or refuses.
    """
    if name == "local":
        yield _local
    elif name == "ray":
        with _ray(ray) as start:
            yield start
    else:
        yield _submitit(name, slurm, folder)


def _local(job: Job) -> ClusterTask:
    process = jobs.start(job)
    return ClusterTask(process.poll, process.send_signal)


@contextlib.contextmanager
def _ray(options: RayOptions) -> Iterator[Start]:
    ray = extra("ray", "ray")
    # a program that has started Ray itself keeps it; only our own is shut down
    must_start = not ray.is_initialized()
    if must_start:
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        # back to ours: Ray's handler ends the process before the runs have written their
        # checkpoints
        signal.signal(signal.SIGTERM, handler)
    remote = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=0)(jobs.run_job)

    def start(job: Job) -> ClusterTask:
        stop = jobs.stop_file(job)
        stop.unlink(missing_ok=True)
        running = remote.remote(job)

        def code() -> int | None:
            # timeout 0: the sweep asks every run in turn and must not block on one
            if not ray.wait([running], timeout=0)[0]:
                return None
            return _code(lambda: ray.get(running), job)

        # not by Ray's cancel, which can leave the run's own process behind; the task
        # watches for this file
        return ClusterTask(code, lambda number: write_text(stop, str(number)))

    try:
        yield start
    finally:
        if must_start:
            ray.shutdown()


def _submitit(name: Name, options: SlurmOptions, folder: Path) -> Start:
    submitit = extra("submitit", "slurm")
    cluster = "local"
    if name == "slurm":
        cluster = "slurm"
    try:
        executor = submitit.AutoExecutor(
            folder=folder, cluster=cluster, slurm_max_num_timeout=options.requeues
        )
    except RuntimeError as error:  # there is no Slurm
        raise InputError(f"engine: {name} cannot be used here: {error}") from None
    # an option without a value is left out, so that the cluster's default applies
    executor.update_parameters(**slurm_parameters(options))
    queued = _queue_reader()

    def start(job: Job) -> ClusterTask:
        # a callable with a checkpoint method, as submitit wants: when Slurm's time is
        # over, it queues the run again
        submitted = executor.submit(jobs.Again(), job)
        if name == "slurm":
            return slurm_task(submitted, job, queued)
        return ClusterTask(
            lambda: _code(submitted.result, job) if submitted.done() else None,
            lambda _number: submitted.cancel(),
        )

    return start


def slurm_task(submitted: Any, job: Job, queued: Callable[[], frozenset[str] | None]) -> ClusterTask:
    """Return a job of Slurm as a task.

    submitit asks Slurm's accounting about jobs that leave no result, at intervals of up to
    ten minutes. Without accounting it would wait for ever for a job that was cancelled
    before it began, or whose machine is lost. The queue is always there.

    Args:
      submitted: submitit's job.
      job: the run.
      queued: returns the numbers of the jobs in Slurm's queue; None: unknown.
    """
    stopped = math.inf
    missing = math.inf

    def code() -> int | None:
        nonlocal missing
        if submitted.paths.result_pickle.exists():
            return _code(submitted.result, job)
        numbers = queued()
        now = time.monotonic()
        if numbers is None or submitted.job_id in numbers:
            missing = math.inf
            return None
        # by then the list of the queue is newer than the job's end
        if now - stopped > QUEUE_INTERVAL:
            return 128 + signal.SIGTERM
        missing = min(missing, now)
        # the result of a job that has ended may arrive late on a shared file system
        if now - missing < LOST:
            return None
        return _code(lost, job)

    def lost() -> int:
        raise RuntimeError(f"Slurm's job {submitted.job_id} has left the queue without a result")

    def stop(_number: int) -> None:
        nonlocal stopped
        stopped = time.monotonic()
        submitted.cancel()

    return ClusterTask(code, stop)


def _queue_reader() -> Callable[[], frozenset[str] | None]:
    """Return a function that lists the user's jobs in Slurm's queue, asking at intervals."""
    numbers: frozenset[str] | None = None
    asked = -math.inf

    def read() -> frozenset[str] | None:
        nonlocal numbers, asked
        if time.monotonic() - asked > QUEUE_INTERVAL:
            command = ["squeue", "--user", getpass.getuser(), "--noheader", "--format=%A"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            # a controller that restarts does not answer for some seconds
            numbers = frozenset(answer.stdout.split()) if answer.returncode == 0 else None
            asked = time.monotonic()
        return numbers

    return read


def slurm_parameters(options: SlurmOptions) -> dict[str, Any]:
    """Return the options by submitit's names, without those that are not set."""
    parameters = {
        "timeout_min": options.time,
        "cpus_per_task": options.cpus,
        "mem_gb": options.memory_gb,
        "gpus_per_node": options.gpus or None,
        "slurm_partition": options.partition,
        "slurm_account": options.account,
        "slurm_qos": options.qos,
        "slurm_constraint": options.constraint,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def _code(result: Callable[[], int], job: Job) -> int:
    """Return the exit code of a run; if the engine lost it, the log gets the reason."""
    try:
        return result()
    # each engine has exceptions of its own for a lost machine or a killed worker; without
    # a line in the log the run would have failed without a reason
    except Exception as error:
        with open(job.log, "a", encoding="utf-8") as log:
            log.write(f"\nfcljax: the engine lost the run: {one_line(f'{type(error).__name__}: {error}')}\n")
        return 1


def extra(module: str, name: str) -> ModuleType:
    """Import a package that comes with an extra of fcljax.

    Raises:
      InputError: naming the extra, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"engine: {module} is not installed; install it with: {install_command(name)}"
        ) from None
