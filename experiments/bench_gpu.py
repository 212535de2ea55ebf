"""fcljax on an accelerator: FPPL on a ViT-B/16 at 224 px by lanes, and what it could reach.

    python experiments/bench_gpu.py                      # 9 minutes at the most, on a GPU
    python experiments/bench_gpu.py --small --minutes 3  # tiny sizes, on any machine: does it work?
    python experiments/bench_gpu.py --only ceilings "bfloat16 vmap"

Each series is a process of its own that is stopped when its share of the time is over: the ceilings of
matrix products and copies; attention; a round with cuDNN's; the kernels of a round; what compilation waits
for; FPPL's rounds in bfloat16 and float32 with 1 to 16 lanes; evaluation; training of the whole network by
number format; pfl-research's benchmark on CIFAR-10; the authors' algorithm as a plain loop in torch, if
torch sees a GPU; images that stay on the host. Most of the time is compilation: not all of it fits, and two
runs with --only have the time of two.

Every line of JSON is printed (and with --out written) when it is found, so that a run that is cut off has
what it found; tables in Markdown come at the end, and which lanes and mode would be the default.

Images are random and of the network's size; images/s counts those that pass through a client's network, the
prototype pass included. TFLOP/s are useful ones (peers/prompted.py, useful_flops): their share of the ceiling
is against the matrix product of the same type. Memory is the peak of the series so far, whose lanes ascend.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
Found = dict[str, Any]
# the most of the whole time that each may take; where few are asked for, more in proportion
SHARES = {
    "ceilings": 0.1,
    "attention": 0.1,
    "cudnn": 0.1,
    "gelu": 0.15,
    "profile": 0.2,
    "compilation": 0.25,
    "bfloat16 vmap": 0.35,
    "evaluation": 0.2,
    "torch": 0.25,
    "whole network": 0.15,
    "pfl-cifar10": 0.15,
    "float32 vmap": 0.35,
    "streaming": 0.25,
    "bfloat16 loop": 0.35,
}
OTHERS = (
    "attention",
    "cudnn",
    "gelu",
    "evaluation",
    "torch",
    "whole network",
    "pfl-cifar10",
    "streaming",
)  # what is measured besides training
CLOSE = 0.97  # of the best rate: fewer lanes that reach it are the better default
# the product whose rate is the ceiling: jax's default on NVIDIA's GPUs is TF32, torch's is full precision
CEILINGS = {"bfloat16": "bfloat16", "float32": "float32, default precision"}
TORCH_CEILINGS = {
    "bfloat16": "bfloat16",
    "float32": "float32, highest precision",
    "float32, TF32 allowed": "float32, default precision",
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it work?")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), metavar="SERIES")
    parser.add_argument("--out", type=Path, help="a file to which the lines of JSON are added too")
    parser.add_argument("--series", choices=SHARES, help=argparse.SUPPRESS)  # what a process of its own does
    options = parser.parse_args()
    if options.series:
        return play(options.series, options.small)
    found: list[Found] = []
    until = time.monotonic() + 60 * options.minutes
    whole = 60 * options.minutes / min(1.0, sum(SHARES[name] for name in options.only))
    for name in options.only:
        for line in in_a_process(name, options.small, until, whole * SHARES[name]):
            found.append(line)
            if "begins" not in line:
                tell(line, options.out)
    print(markdown(found), flush=True)


def play(name: str, small: bool) -> None:
    """A series, in this process."""
    from peers import accelerator

    sizes = accelerator.SMALL if small else accelerator.FULL
    accelerator.play_series(name, sizes, lambda line: print(json.dumps(line), flush=True))


def in_a_process(name: str, small: bool, until: float, most: float) -> Iterable[Found]:
    """The lines of a series as they come. What it had no time for, or broke on, is a line too."""
    left = min(until - time.monotonic(), most)
    if left <= 0:
        yield {"series": name, "failed": "not tried: the time is over"}
        return
    command = [sys.executable, str(HERE), "--series", name, *(["--small"] if small else [])]
    # torch's process needs the GPU's memory, of which jax would take most
    own = {"JAX_PLATFORMS": "cpu"} if name == "torch" else {}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = {"series": name}
    then = []
    errors = []
    with subprocess.Popen(command, env={**os.environ, **own}, **pipes) as process:
        alarm = threading.Timer(left, process.kill)
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        alarm.start()
        reader.start()
        try:
            for text in process.stdout or ():
                line = json.loads(text)
                begun = line.get("begins", {"series": name})
                then = line.get("then", then)
                yield line
            code = process.wait()
            late = not alarm.is_alive()
        finally:
            process.kill()
            alarm.cancel()
            reader.join()
    if code:
        said = errors[-1].strip()[:200] if errors else f"exit code {code}"
        yield begun | {"failed": f"stopped: over its {left:.0f} s" if late else said}
        yield from (each | {"failed": "not tried: its series was stopped"} for each in then)


def tell(line: Found, out: Path | None) -> None:
    """A line of JSON, on the terminal and in the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


# ---- tables ------------------------------------------------------------------------------------------------


def markdown(found: Sequence[Found]) -> str:
    """Everything that was found, and the default that it speaks for."""
    ceiling = {line["ceiling"]: line for line in found if "ceiling" in line}
    head = [f"{line['device']}, {line['processor']}, jax {line['jax']}" for line in found if "device" in line]
    lines = ["", *head, "", "| ceiling | |", "|---|---|"]
    for name, line in ceiling.items():
        value = f"{line['tflops']:.3g} TFLOP/s" if "tflops" in line else f"{line['gb_s']:.3g} GB/s"
        lines.append(f"| {name} | {value} |")
    columns = ("FPPL", "mode", "lanes", "images/s", "range", "of the ceiling", "compilation, s", "peak, GiB")
    lines += ["", f"| {' | '.join(columns)} |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [training_row(line, ceiling) for line in found if "training" in line and "begins" not in line]
    lines += ["", "| other | images/s | range | of the ceiling |", "|---|---|---|---|"]
    lines += [other_row(line, ceiling) for line in found if {*line} & {*OTHERS}]
    lines += [f"| {line['series']} | {line['failed']} | | |" for line in found if "series" in line]
    lines += ["", "| kernels of a round | s | share |", "|---|---|---|"]
    lines += [profile_row(line) for line in found if "profile" in line]
    lines += ["", "| compilation | s | CPU s |", "|---|---|---|"]
    lines += [compilation_row(line) for line in found if "compilation" in line]
    return "\n".join([*lines, "", *defaults(found)])


def training_row(line: Found, ceiling: dict[str, Found]) -> str:
    """One setting of lanes."""
    start = f"| {line['training']} | {line['mode']} | {line['lanes']} |"
    if "failed" in line:
        return f"{start} {line['failed']} | | | | |"
    memory = "unknown" if line["peak_gib"] is None else f"{line['peak_gib']:.2f}"
    share = share_of(line, ceiling, CEILINGS[line["training"]])
    return f"{start} {rate(line)} | {share} | {line['compilation_s']:.1f} | {memory} |"


def other_row(line: Found, ceiling: dict[str, Found]) -> str:
    """Attention, evaluation, torch, and where images lie."""
    kind = next(name for name in OTHERS if name in line)
    details = [kind, line[kind], line.get("type", "")]
    if line.get("apart"):
        details.append(f"{line['apart']:.1e} from XLA's")
    if "whole_s" in line:
        details.append(f"1,500 rounds in {line['whole_s'] / 60:.3g} min")
    if "forward_images_s" in line:
        details.append(f"forwards alone {line['forward_images_s']:,.0f} images/s")
    what = ", ".join(filter(None, details))
    if "images_s" not in line:
        return f"| {what} | {line.get('failed', '')} | | |"
    top = TORCH_CEILINGS[line["type"]] if "type" in line else CEILINGS.get(line[kind], "")
    return f"| {what} | {rate(line)} | {share_of(line, ceiling, top)} |"


def profile_row(line: Found) -> str:
    """Kernels of one name."""
    share = f"{line['share']:.1%}" if "share" in line else f"the round takes {line['round_s']:.3g} s"
    return f"| {line['profile']} | {line['s']:.3g} | {share} |"


def compilation_row(line: Found) -> str:
    """A training step, compiled with these options."""
    if "failed" in line:
        return f"| {line['compilation']} | {line['failed']} | |"
    return f"| {line['compilation']} | {line['s']:.1f} | {line['cpu_s']:.1f} |"


def rate(line: Found) -> str:
    """Images per second and their range, as two cells."""
    between = f"{line['lowest']:,.0f} to {line['highest']:,.0f}" if "lowest" in line else ""
    return f"{line['images_s']:,.0f} | {between}"


def share_of(line: Found, ceiling: dict[str, Found], name: str) -> str:
    """Useful FLOPs over the ceiling of this name, if both are known."""
    top = ceiling.get(name)
    return f"{line['tflops'] / top['tflops']:.1%}" if top and "tflops" in line else ""


def defaults(found: Sequence[Found]) -> list[str]:
    """For each type, the fewest lanes that come close to the best."""
    lines = []
    for dtype in CEILINGS:
        mine = [line for line in found if line.get("training") == dtype and "images_s" in line]
        if not mine:
            continue
        top = max(line["images_s"] for line in mine)
        close = [line for line in mine if line["images_s"] >= CLOSE * top]
        chosen = min(close, key=lambda line: (line["lanes"], -line["images_s"]))
        lines.append(
            f"Default for {dtype}: {chosen['lanes']} lanes, {chosen['mode']} "
            f"({chosen['images_s']:,.0f} images/s; the best has {top:,.0f})."
        )
    return lines


if __name__ == "__main__":
    main()
