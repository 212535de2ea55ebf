"""Run the command `fcljax sweep FILE.yaml`."""

import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fcljax import config
from fcljax.commands.arguments import (
    ProgramOptions,
    Words,
    new_folder,
    parsed,
    passed_on,
    slug,
)
from fcljax.errors import InputError
from fcljax.options import check_ranges, option
from fcljax.runs import signals
from fcljax.terminal import say


@dataclasses.dataclass(frozen=True)
class SweepOptions(ProgramOptions):
    """Options of `fcljax sweep`."""

    out: str | None = option(None, unset="runs/sweep-FILE-TIME")
    """New folder for the sweep."""
    resume: str | None = option(None, unset="none")
    """Folder of a sweep to resume. Finished runs are not repeated; runs that FILE gained
    since are added."""
    jobs: int | None = option(None, unset="1, one per device of --devices, or all with Ray and Slurm")
    """Number of runs at a time."""
    engine: Literal["local", "ray", "slurm", "slurm-local"] = "local"
    """Where runs execute: processes of this machine (local), Ray tasks, Slurm jobs, or
    Slurm's job files on this machine, as a trial."""
    devices: str | None = option(None, unset="all for each run")
    """GPUs of this machine, e.g. 0,1,2,3; each run gets one of them."""
    dry_run: bool = False
    """Only list the runs."""
    allow_code: bool = False
    """Allow FILE to name programs, FILE.py or MODULE:NAME, as methods, and run them."""


def sweep(arguments: list[str]) -> int:
    """Run `fcljax sweep FILE.yaml [options]`; exit code 1 if a run failed."""
    about = "Run a grid of options, variants and seeds, some runs at a time."
    files, options = parsed(SweepOptions(), arguments, ["sweep"], about, Words("FILE.yaml"))
    if len(files) != 1:
        raise InputError("sweep: no file given; usage: fcljax sweep FILE.yaml [options]")

    # after parsing, because these import JAX: --help and a mistyped option answer at once
    from fcljax.results import page
    from fcljax.studies import grid, sweeps

    file = files[0]
    runs = grid.plan(file, options.allow_code)
    # before --dry-run, so that it finds wrong options too
    ways = ways_of(options, file, runs)
    console = Console()
    if options.dry_run:
        console.print(sweeps.plan_table(runs))
        return 0
    out = Path(options.resume or options.out or new_folder("sweep", slug(file)))
    code = ""
    if options.allow_code:
        code = " --allow-code"
    command = f"fcljax sweep {shlex.quote(file)} --resume {shlex.quote(str(out))}{code}"
    with signals.advised(lambda: sweeps.advice(out, command)):
        outcomes = sweeps.sweep(runs, out, options.resume is not None, ways, Console(stderr=True))
    tables, figure = sweeps.tables(outcomes, out)
    for table in tables:
        console.print(table)
    say(console, f"sweep folder: {out}")
    if figure:
        say(console, f"accuracy curve: {figure}")
        if page.try_report(
            sweeps.finished_folders(outcomes, out),
            out / page.NAME,
            lambda line: say(console, line),
        ):
            say(console, f"report: {out / page.NAME}")
    # for scripts: 0 only if every run has finished
    return int(any(outcome.state != "finished" for outcome in outcomes.values()))


def ways_of(options: SweepOptions, file: str, runs: list) -> Any:
    """Decide how a sweep's runs are made.

    Raises:
      InputError: for options that do not go together, an extra that is not installed,
        or a wrong mapping `slurm` or `ray` in the file.
    """
    from fcljax.studies import engines
    from fcljax.studies.sweeps import Ways

    if options.resume and options.out:
        raise InputError(f"resume: the sweep in {options.resume!r} already has a folder; leave out --out")
    devices = _devices(options, runs)
    if options.jobs and devices and options.jobs > len(devices):
        raise InputError(
            f"jobs: {options.jobs} runs at a time on {len(devices)} devices; nearest: {len(devices)}"
        )
    values = config.load_yaml(file)
    slurm = _part(engines.SlurmOptions, values.get("slurm"), f"{file}: slurm")
    ray = _part(engines.RayOptions, values.get("ray"), f"{file}: ray")
    # a list of the runs needs no engine
    if not options.dry_run:
        if options.engine == "ray":
            engines.extra("ray", "ray")
        elif options.engine != "local":
            engines.extra("submitit", "slurm")
    # Runs of one machine share its cores and memory, so one at a time is the default.
    # Ray and Slurm get all of them, and queue what they cannot start.
    at_a_time = options.jobs or (1 if options.engine == "local" else len(runs))
    slots = [None] * at_a_time
    if devices:
        slots = devices[: options.jobs]
    return Ways(slots, options.engine, slurm, ray, passed_on(options))


def _part(options: type, values: object, where: str) -> Any:
    if values is not None and not isinstance(values, dict):
        raise InputError(f"{where}: {values!r} does not map options to values")
    try:
        part = config.fill(options(), values or {}, "options")
        check_ranges(part)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix('options: ')}") from None
    return part


def _devices(options: SweepOptions, runs: list) -> list[str]:
    """Return the GPUs that `--devices` names, one for each run at a time.

    Raises:
      InputError: for anything else, and where runs could not see one alone.
    """
    if options.devices is None:
        return []
    names = [name.strip() for name in options.devices.split(",")]
    # numbers, or the UUIDs that nvidia-smi -L lists
    if len(set(names)) < len(names) or not all(
        re.fullmatch(r"\d{1,3}|(GPU|MIG)-[\w/-]+", name) for name in names
    ):
        raise InputError(f"devices: {options.devices!r} is not a list of distinct GPUs, such as 0,1,2,3")
    if options.engine != "local":
        raise InputError(f"devices: --engine {options.engine} assigns devices to runs; leave out --devices")
    # the runs inherit this variable, and would leave the GPUs alone
    if os.environ.get("JAX_PLATFORMS", "").lower() in ("cpu", "tpu"):
        raise InputError(f"devices: JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']!r}, which uses no GPU")
    # each run sees its own GPU and no other
    several = next((run for run in runs if run.cfg.devices > 1), None)
    if several:
        raise InputError(
            f"devices: the run {several.name} needs {several.cfg.devices} devices, but each run gets one"
        )
    return names
