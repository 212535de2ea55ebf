"""The program `fcljax`: find the command, run it, and report an error in one line. Each
command has a module in `fcljax/commands`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fcljax import __version__
from fcljax.errors import InputError, choose, one_line
from fcljax.options import load
from fcljax.runs import signals

USAGE = """usage: fcljax COMMAND ...

  fcljax run METHOD [options]     train and evaluate a method; its --help lists the options
  fcljax run ./FILE.py [options]  train and evaluate your own method; also MODULE:NAME
  fcljax check METHOD [options]   test a method's invariants on tiny data, yours or a built-in one
  fcljax list                     list methods, adapters, data sets, backbones and incompatible combinations
  fcljax compare RUN_DIR...       compare finished runs, or folders of runs: tables and a figure
  fcljax predict RUN_DIR IMAGE... predict classes of images with the model of a finished run
  fcljax export RUN_DIR           write a finished run's adapter and classifier for PEFT and timm
  fcljax report RUN_DIR...        write a self-contained HTML report of finished runs
  fcljax watch RUN_DIR            follow runs in the terminal, also runs on another machine
  fcljax sweep FILE.yaml          run a grid of options, variants and seeds
  fcljax tune METHOD NAME=RANGE...  search options on held-out training examples, e.g. lr=log:1e-4..1e-1
  fcljax reproduce SYSTEM TABLE   run the rows of a paper's table and compare its numbers with ours
  fcljax leaderboard FILE.yaml    compare methods, each with the same search of learning rates
  fcljax data list                list data sets and whether this machine has them
  fcljax data prepare NAME        download a data set where possible, decode it once and check it
  fcljax data show NAME           draw images, and the classes of each client's partition
  fcljax weights get NAME         download weights by timm's or the hub's name
  fcljax convert SRC [DST]        convert another library's checkpoint to .safetensors
  fcljax embed [options]          compute a data set's frozen features, as .npz and for later runs
  fcljax pretrain [options]       train the packaged micro ViT on rendered glyphs
  fcljax pretrain-decoder [options]  train a masked autoencoder's decoder for a frozen encoder
  fcljax plan METHOD --chip NAME  estimate memory and round time on a GPU or TPU you do not have
  fcljax doctor [CHECKPOINT...]   check that a run can start here, and print the command for what is missing
  fcljax completion SHELL         print a completion script for bash, zsh or fish
  fcljax --version
"""

# command -> MODULE:FUNCTION in fcljax/commands. Modules are imported when they are
# called: most import JAX, which takes a second that --help and completion must not
# take.
COMMANDS = {
    "run": "running:run",
    "check": "running:check",
    "list": "listing:list_",
    "compare": "comparing:compare",
    "predict": "predicting:predict",
    "export": "exporting:export",
    "report": "report:report",
    "watch": "watch:watch",
    "sweep": "sweeping:sweep",
    "tune": "tuning:tune",
    "reproduce": "reproducing:reproduce",
    "leaderboard": "leaderboard:leaderboard",
    "data": "data:data",
    "weights": "weights:weights",
    "convert": "weights:convert",
    "embed": "weights:embed",
    "pretrain": "weights:pretrain",
    "pretrain-decoder": "weights:pretrain_decoder",
    "plan": "planning:plan",
    "doctor": "health:doctor",
    "completion": "completion:completion",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2.

    Args:
      arguments: of the command line; None: those of this program.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        return reported(_complete)
    if arguments is None:
        quiet_threads()
        arguments = sys.argv[1:]
    return reported(lambda: dispatch(list(arguments)))


def reported(command: Callable[[], int]) -> int:
    """Run a command, report its error in one line, and return the exit code."""
    # Errors that a user can act on. Any other is a fault of ours, and keeps its
    # traceback.
    try:
        with signals.terminable():
            return command()
    except InputError as error:
        print(f"fcljax: {error}", file=sys.stderr)
    # The reader of our output has gone, as `head` does after ten lines. stderr is
    # closed, or Python would report the same pipe again when it exits; 141 is a shell's
    # code for SIGPIPE.
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        where = ""
        if error.filename:
            where = f" {str(error.filename)!r}"
        line = one_line(f"cannot read or write{where}: {error.strerror or error}")
        print(f"fcljax: {line}", file=sys.stderr)
    except MemoryError as error:
        print(f"fcljax: {one_line(f'memory: this machine has too little: {error}')}", file=sys.stderr)
    except KeyboardInterrupt as stop:
        number = signals.number_of(stop)
        print(signals.last_line(number, getattr(stop, "advice", "")), file=sys.stderr)
        return 128 + number
    return 2


def dispatch(arguments: list[str]) -> int:
    """Find the command and run it.

    Raises:
      InputError: for an unknown command or anything wrong that the command finds.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    return load("fcljax.commands", COMMANDS[choose("command", arguments[0], COMMANDS)])(arguments[1:])


def _complete() -> int:
    """Print completions of the typed words for the shell."""
    from fcljax.commands.arguments import Words, parse, typed_so_far

    typed = typed_so_far()
    if not typed:
        parse({}, [], [], "", Words("COMMAND", (*COMMANDS, "--version"), files=False))
    return dispatch(typed)


def quiet_threads() -> None:
    """Silence Orbax's and TensorStore's threads after a checkpoint could not be written.

    They print tracebacks even after the error has been reported in one line. This changes
    the process, so only the program does it, not the library.
    """
    import absl.logging

    hook = sys.unraisablehook
    absl.logging.set_verbosity(absl.logging.FATAL)

    def without_closed_loops(error: Any) -> None:
        # Orbax's coroutines that are collected after their loop has ended
        if "Event loop is closed" not in str(error.exc_value):
            hook(error)

    sys.unraisablehook = without_closed_loops
