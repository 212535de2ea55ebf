"""Every function that the methods' pages name beside an equation or a method is called when the method runs:
a table that names code which no run reaches would be wrong."""

import functools
import inspect
import re
import sys
from pathlib import Path

import pytest
from micro import DATA, FROZEN, STREAM, method_of, read
from small_runs import some
from test_conformance import OPTIONS
from test_docs import DOCS, PAPERS, equations, found

from fcljax.federated.check import Example, check_method
from fcljax.methods import find_method

ROW = re.compile(r"^\| `([^`]+)` \| [^|]+ \| ([^|]*`fcljax\.[^|]+) \|$", re.MULTILINE)


def baselines():
    """(method, names of functions) of every row of the tables of smaller methods."""
    text = "".join((DOCS / "methods" / f"{page}.md").read_text() for page in ("baselines", "frontier"))
    return [(method, re.findall(r"`(fcljax(?:\.\w+)+)`", last)) for method, last in ROW.findall(text)]


NAMED = {page: [name for _, _, names in equations(page) for name in names] for page in PAPERS}
NAMED |= dict(baselines())


def code_of(name):
    """Where a function's code begins; behind decorators."""
    code = inspect.unwrap(found(name)).__code__
    return Path(code.co_filename).name, code.co_qualname, code.co_firstlineno


def not_called_by(work, names):
    """Those of the functions that `work` does not call."""
    waiting = {code_of(name): name for name in names}

    def watch(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_qualname in functions:
            waiting.pop((Path(code.co_filename).name, code.co_qualname, code.co_firstlineno), None)

    functions, before = {each[1] for each in waiting}, sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return sorted(waiting.values())


def run(method, fidelity="intended", **options):
    """Make a method and trace all that an engine calls in a round, before it, after it and in evaluation. The
    task is traced too, so that this is a round of any task."""
    made = method_of(
        method, **{"epochs": 2, "batch_size": 4, "fidelity": fidelity} | OPTIONS[method] | options
    )
    check_method(made, read, Example(FROZEN, DATA, STREAM[1]))


def run_each(method):
    """The same at each of a smaller method's presets: its row names what any of them computes."""
    for fidelity in ("intended",) if method in PAPERS else find_method(method).presets:
        run(method, fidelity)
    if method == "fedran":
        # with more examples than features clients add up a Gram matrix
        run(method, projection=8, rank=4, server_rank=8)


CASES = some(NAMED, ())


@pytest.mark.parametrize("method", CASES)
def test_every_function_that_a_page_names_is_called_when_its_method_runs(method):
    assert len(NAMED[method]) > 0
    assert not_called_by(functools.partial(run_each, method), NAMED[method]) == []


def test_a_function_that_no_run_reaches_is_found():
    unused = "fcljax.methods.vfcl.conflation.conflate_sums"
    names = [*NAMED["linear"], unused]
    assert not_called_by(functools.partial(run, "linear"), names) == [unused]
