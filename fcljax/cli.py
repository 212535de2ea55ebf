"""The program `fcljax`: finds the command, and says in one line what went wrong. Each command has its own
place in `fcljax/commands`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fcljax import __version__
from fcljax.errors import InputError, choose, one_line
from fcljax.options import load
from fcljax.runs import signals

USAGE = """usage: fcljax COMMAND ...

  fcljax run METHOD [options]    train and evaluate a method; `fcljax run METHOD --help` lists its options
  fcljax run ./FILE.py [options] the same for a method of your own; also MODULE:NAME
  fcljax check METHOD [options]  does a method, of yours or ours, hold what all must? On tiny data
  fcljax list                    methods, adapters, data sets and backbones, and what does not go together
  fcljax compare RUN_DIR...      tables and a figure over finished runs, and over folders of them
  fcljax report RUN_DIR...       one HTML page over finished runs, which loads nothing
  fcljax watch RUN_DIR           follow runs in the terminal, also those of another machine
  fcljax sweep FILE.yaml         many runs: a grid of options, variants and seeds, some at a time
  fcljax tune METHOD NAME=RANGE...   options chosen on held-out training images, such as lr=log:1e-4..1e-1
  fcljax reproduce SYSTEM TABLE  the rows of a paper's table, its numbers beside ours
  fcljax leaderboard FILE.yaml   methods side by side, the learning rates of each searched alike
  fcljax data list               data sets, and whether they are here
  fcljax data prepare NAME       download where possible, decode once, check
  fcljax data show NAME          images, and which client would hold which class
  fcljax weights get NAME        download weights by timm's or the hub's name, resumed and checked
  fcljax convert SRC [DST]       a checkpoint of another library as .safetensors with its provenance
  fcljax embed [options]         frozen features of a data set, as .npz and for the runs to come
  fcljax pretrain [options]      train the packaged micro ViT again, on rendered glyphs
  fcljax pretrain-decoder [options]   a masked autoencoder's decoder for a frozen encoder
  fcljax plan METHOD --chip NAME  does a run fit a GPU or TPU that is not here, and how long is a round
  fcljax doctor [CHECKPOINT...]  can a run start here, what is missing, and the command that gets it
  fcljax completion SHELL        a script that completes commands and options, for bash, zsh or fish
  fcljax --version
"""

# where each command is, which is imported when it is called
COMMANDS = {
    "run": "running:run",
    "check": "running:check",
    "list": "listing:list_",
    "compare": "comparing:compare",
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
    """Run one command; bad input is one line on stderr and exit code 2. `arguments` are the program's own
    when None."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        return reported(_complete)
    if arguments is None:
        quiet_threads()
        arguments = sys.argv[1:]
    return reported(lambda: dispatch(list(arguments)))


def reported(command: Callable[[], int]) -> int:
    """A command's exit code; what ends it is said in one line."""
    try:
        with signals.terminable():
            return command()
    except InputError as error:
        print(f"fcljax: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, as `head` does: nothing is left to say
        return 141
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        said = one_line(f"cannot read or write{where}: {error.strerror or error}")
        print(f"fcljax: {said}", file=sys.stderr)
    except MemoryError as error:
        print(f"fcljax: {one_line(f'memory: there is not enough of it here: {error}')}", file=sys.stderr)
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
    """Tell the shell how what is typed could go on."""
    from fcljax.commands.arguments import Words, parse, typed_so_far

    typed = typed_so_far()
    if not typed:
        parse({}, [], [], "", Words("COMMAND", (*COMMANDS, "--version"), files=False))
    return dispatch(typed)


def quiet_threads() -> None:
    """When a checkpoint cannot be written, Orbax logs tracebacks and TensorStore prints another, from their
    threads and even after the error has reached us as one line. Only that line is for the user. This changes
    the process, so only the program itself does it."""
    import absl.logging

    hook = sys.unraisablehook
    absl.logging.set_verbosity(absl.logging.FATAL)

    def without_closed_loops(error: Any) -> None:
        if "Event loop is closed" not in str(error.exc_value):
            hook(error)

    sys.unraisablehook = without_closed_loops
