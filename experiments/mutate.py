"""What share of small errors in the code do the tests catch?

    python experiments/mutate.py --sample 300 --out runs/mutants   # a random sample; goes on where it stopped
    python experiments/mutate.py --sample 300 --near --out runs/near   # only tests that import its file
    python experiments/mutate.py --kept                            # the fixed sample that CI runs

A mutant is the package with one small error: a sign turned, a bound moved, a condition negated, a sum made a
mean, an argument left out. It is caught if a test fails or does not end. Each is tried in a copy of the
repository, with the test files that execute its line, quickest first; nothing here changes the repository but
`--keep`, which writes the fixed sample: mutants that were caught, and the test that caught each.
"""

import argparse
import ast
import dataclasses
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
KEPT = REPOSITORY / "experiments" / "mutants.json"

# what a method is: its file, what it is made of, and what merges uploads
TARGETS = (
    "fcljax/methods/**/*.py",
    "fcljax/adapters/*.py",
    "fcljax/parts/*.py",
    "fcljax/federated/*.py",
    "fcljax/models/prototypes.py",
)
# the test files that look at those
TESTS = (
    "adapters",
    "aggregation",
    "baselines",
    "check",
    "communication",
    "conformance",
    "federate",
    "fppl",
    "hepco",
    "inputs",
    "invariance",
    "invariance_fppl",
    "lora",
    "options",
    "outside",
    "pilora",
    "pmae_adapters",
    "privacy",
    "prototypes",
    "replay",
    "rounds",
    "surrogates",
    "terms",
)
# imported once, before a process is forked for each mutant
HEAVY = (
    "jax",
    "jax.numpy",
    "flax.linen",
    "optax",
    "chex",
    "orbax.checkpoint",
    "matplotlib.pyplot",
    "sklearn",
    "hypothesis",
    "beartype",
    "rich",
    "safetensors",
    "jaxtyping",
    "pytest",
    "numpy",
)

OPERATORS: dict[type, Any] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
FUNCTIONS = {
    "sum": "mean",
    "mean": "sum",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "argmax": "argmin",
    "argmin": "argmax",
    "any": "all",
    "all": "any",
    "zeros": "ones",
    "ones": "zeros",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "sqrt": "square",
    "exp": "log",
    "add": "subtract",
    "subtract": "add",
}
# parts of a program that say nothing of what it computes
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Delete, ast.Assert)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One small error: in the line with the text `line`, at byte `column`, `before` becomes `after`."""

    path: str
    number: int  # of the line, from 1
    line: str
    column: int
    before: str
    after: str

    def key(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.before}:{self.after}"

    def __str__(self) -> str:
        plain = lambda text: " ".join(text.split())
        return f"{self.path}:{self.number}: {plain(self.before)} -> {plain(self.after)}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of an expression."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.Compare(left, [operator], [right]):
            yield ast.Compare(left, [OPERATORS[type(operator)]()], [right])
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(OPERATORS[type(operator)](), values)
        case ast.UnaryOp(ast.USub(), ast.Constant(int())):
            yield ast.Constant(0)  # as an axis, -1 and 1 are often the same
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(2 * value or 1.0)
        case ast.IfExp(_, body, otherwise):
            yield from (body, otherwise)
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    match node.func, node.args:
        case ast.Attribute(value, name), arguments if name in FUNCTIONS:
            yield ast.Call(ast.Attribute(value, FUNCTIONS[name]), arguments, node.keywords)
        case ast.Attribute(_, "where"), [condition, yes, no]:
            yield ast.Call(node.func, [condition, no, yes], node.keywords)
        case ast.Attribute(_, "stop_gradient"), [argument]:
            yield argument
    for dropped in node.keywords:
        if dropped.arg not in (None, "strict"):
            yield ast.Call(node.func, node.args, [word for word in node.keywords if word is not dropped])


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a program that compute something: no annotations, decorators, docstrings, messages."""
    if isinstance(node, SKIPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a guard, as an assertion is
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from expressions(part)


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text; lines within parentheses over several lines count by
    the first."""
    found = []
    for node in expressions(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue  # others, such as arguments, have no place in the text
        before = ast.get_source_segment(source, node)
        if before is None:
            continue
        for after in changes(node):
            line = source.splitlines()[node.lineno - 1]
            text = f"({ast.unparse(ast.fix_missing_locations(after))})"
            found.append(Mutant(path, node.lineno, line, node.col_offset, before, text))
    return found


def applied(source: str, mutant: Mutant) -> str | None:
    """The file with the error in it; None if the line is no longer there. Of equal lines it is the nearest to
    where the line was."""
    starts = {}
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        at = start + len(line.encode()[: mutant.column].decode(errors="replace"))
        if line.rstrip("\n") == mutant.line and source.startswith(mutant.before, at):
            starts[abs(number - mutant.number)] = at
        start += len(line)
    if not starts:
        return None
    at = starts[min(starts)]
    return source[:at] + mutant.after + source[at + len(mutant.before) :]


def targets(root: Path) -> dict[str, str]:
    """The text of each file that is mutated."""
    files = sorted(path for pattern in TARGETS for path in root.glob(pattern))
    return {str(path.relative_to(root)): path.read_text() for path in files}


# ----------------------------------------------------------------------------------------------------------
# Running tests on a copy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of tests ended in."""

    caught: bool
    by: str  # the test that failed first; "" if none did
    seconds: float


class Watch:
    """A plugin of pytest that remembers the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report):
        self.failed = self.failed or (report.nodeid if report.failed else "")


def prepare(folder: Path) -> Path:
    """A copy of the repository to break, and this process made ready to be forked: what is slow to import is
    imported, and no backend of JAX runs."""
    copy = folder / "copy"
    for name in ("fcljax", "tests", "experiments", "docs"):  # and no results or environments
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, REPOSITORY.iterdir()):
        shutil.copy(file, copy)
    (folder / "compiled").mkdir(exist_ok=True)
    os.environ["FCLJAX_TESTS"] = str(folder)
    os.environ["PYTHONPATH"] = str(copy)  # of processes that tests start
    sys.path.insert(0, str(copy / "tests"))
    importlib.import_module("conftest")
    for name in HEAVY:
        importlib.import_module(name)
    del sys.modules["conftest"]
    sys.path[0] = str(copy)
    return copy


def tested(copy: Path, tests: list[str], limit: float, watch: Callable | None = None) -> Outcome:
    """Run tests in a process of their own until one fails; one that does not end within `limit` seconds is
    killed, which counts as caught."""
    start = time.monotonic()
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        _run(copy, tests, write, watch)
    os.close(write)
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() - start > limit:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return Outcome(True, "no test: it did not end", time.monotonic() - start)
        time.sleep(0.05)
    with os.fdopen(read) as answer:
        code, _, by = (answer.read() or "1 killed").partition(" ")
    # 5: no test ran (a kept one has gone, or is long now), which catches nothing
    return Outcome(code not in ("0", "5"), by, round(time.monotonic() - start, 1))


def _run(copy: Path, tests: list[str], write: int, watch: Callable | None):
    """What the forked process does; it never returns."""
    import pytest

    os.setsid()
    scratch = Path(tempfile.mkdtemp(dir=copy.parent))  # runs that tests share are made by this mutant
    (scratch / "compiled").symlink_to(copy.parent / "compiled")
    os.environ["FCLJAX_TESTS"] = str(scratch)
    os.chdir(copy)
    with open(copy.parent / "output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        seen = Watch()
        end = watch() if watch else None
        options = ["-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not long"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins were imported before
        code = int(pytest.main([*options, *tests], plugins=[seen]))
        if end:
            end()
    shutil.rmtree(scratch, ignore_errors=True)
    os.write(write, f"{code} {seen.failed}".encode())
    os._exit(0)


def executed(copy: Path, out: Path) -> dict[str, dict]:
    """For each test file its seconds, and the lines of the targets that it executes; kept in `out`."""
    file = out / "executed.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    lines = copy.parent / "lines.json"
    for name in TESTS:
        test = f"tests/test_{name}.py"
        if not (copy / test).is_file():
            sys.exit(f"{test} has gone; update TESTS")
        if test in known:
            continue
        outcome = tested(copy, [test], 1800, watch=lambda: _trace(copy, lines))
        if outcome.caught:
            sys.exit(f"{test} fails without any mutant: {outcome.by}")
        seconds = tested(copy, [test], 1800).seconds
        known[test] = {"seconds": seconds, "lines": json.loads(lines.read_text())}
        file.write_text(json.dumps(known))
        print(f"{test}: {seconds:.0f} s", flush=True)
    return known


def _trace(copy: Path, file: Path) -> Callable:
    """Note which lines of the targets are executed, until the function that this returns is called."""
    import coverage

    tracer = coverage.Coverage(data_file=None, include=[str(copy / pattern) for pattern in TARGETS])
    tracer.start()

    def end():
        tracer.stop()
        data = tracer.get_data()
        lines = {
            os.path.relpath(path, copy): sorted(data.lines(path) or ()) for path in data.measured_files()
        }
        file.write_text(json.dumps(lines))

    return end


def relevant(known: dict[str, dict], mutant: Mutant, height: int) -> list[str]:
    """The test files that execute a mutant's lines, quickest first."""
    lines = range(mutant.number, mutant.number + height)
    touches = lambda test: any(line in known[test]["lines"].get(mutant.path, ()) for line in lines)
    return sorted(filter(touches, known), key=lambda test: known[test]["seconds"])


def importing(copy: Path, mutant: Mutant) -> list[str]:
    """The test files that import a mutant's file, the one named after it first, then by their length."""
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    whole = re.escape(module)
    part = rf"{re.escape(package)} import [^\n]*\b{name}"
    imports = re.compile(rf"^(from|import) ({whole}|{part})\b", re.MULTILINE)
    texts = {path: path.read_text() for path in sorted((copy / "tests").glob("test_*.py"))}
    found = [path for path, text in texts.items() if imports.search(text) or path.stem == f"test_{name}"]
    found.sort(key=lambda path: (path.stem != f"test_{name}", len(texts[path])))
    return [str(path.relative_to(copy)) for path in found]


def attempt(copy: Path, mutant: Mutant, tests: list[str], limit: float) -> Outcome:
    """Run tests on the copy with a mutant in it.

    Raises:
      ValueError: if its line is not there.
    """
    file = copy / mutant.path
    source = file.read_text()
    broken = applied(source, mutant)
    if broken is None:
        raise ValueError(f"{mutant}: the line is not there")
    try:
        file.write_text(broken)
        return tested(copy, tests, limit)
    finally:
        file.write_text(source)


# ----------------------------------------------------------------------------------------------------------
# The two ways to call this


def explore(copy: Path, out: Path, number: int, seed: int, only: str, near: bool) -> list[dict]:
    """Try a random sample of all mutants; what `out` has of it already is not tried again."""
    out.mkdir(parents=True, exist_ok=True)
    known = None if near else executed(copy, out)
    everything = [m for path, text in targets(copy).items() if only in path for m in mutants(path, text)]
    chosen = random.Random(seed).sample(everything, min(number, len(everything)))
    print(f"{len(chosen)} of {len(everything)} mutants")
    log = out / "mutants.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    tried = {record["key"]: record for record in done}
    for count, mutant in enumerate(chosen):
        if mutant.key() not in tried:
            record = _explored(copy, mutant, known)
            tried[mutant.key()] = record
            with log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{count + 1}/{len(chosen)} {_line(record)}", flush=True)
    return [tried[mutant.key()] for mutant in chosen]


def _explored(copy: Path, mutant: Mutant, known: dict[str, dict] | None) -> dict:
    if known is None:
        tests = importing(copy, mutant)
        limit = 3600.0
    else:
        tests = relevant(known, mutant, mutant.before.count("\n") + 1)
        limit = 120 + 5 * sum(known[test]["seconds"] for test in tests)
    outcome = attempt(copy, mutant, tests, limit) if tests else Outcome(False, "", 0.0)
    return {"key": mutant.key(), "mutant": dataclasses.asdict(mutant)} | dataclasses.asdict(outcome)


def _line(record: dict) -> str:
    mutant = Mutant(**record["mutant"])
    return f"{'caught  ' if record['caught'] else 'SURVIVED'} {record['seconds']:5.0f} s {mutant}"


def keep(records: list[dict], number: int, seed: int):
    """Write a fixed sample of those that a test caught and whose lines are still there."""
    sources = targets(REPOSITORY)
    here = lambda record: applied(sources[record["mutant"]["path"]], Mutant(**record["mutant"])) is not None
    caught = [record for record in records if record["caught"] and "::" in record["by"] and here(record)]
    chosen = random.Random(seed).sample(caught, min(number, len(caught)))
    text = [{"mutant": record["mutant"], "by": record["by"]} for record in chosen]
    KEPT.write_text(json.dumps(text, indent=1) + "\n")


def table(records: list[dict]) -> str:
    """The share that is caught, by file, and the survivors, as Markdown."""
    every = Counter(record["mutant"]["path"] for record in records)
    caught = Counter(record["mutant"]["path"] for record in records if record["caught"])
    rows = [f"| {path} | {caught[path]} of {count} |" for path, count in sorted(every.items())]
    share = f"{sum(caught.values())} of {len(records)}: {sum(caught.values()) / len(records):.1%}"
    survivors = [f"- `{Mutant(**r['mutant'])}`" for r in records if not r["caught"]]
    return "\n".join(["| file | caught |", "|---|---|", *rows, f"| all | {share} |", "", *survivors])


def located(mutant: Mutant, sources: dict[str, str]) -> Mutant | None:
    """A mutant in its own file or, if its line has moved to one other file, there; None if it is gone."""
    places = [path for path, source in sources.items() if applied(source, mutant) is not None]
    if mutant.path in places:
        return mutant
    return dataclasses.replace(mutant, path=places[0]) if len(places) == 1 else None


def stale(entry: dict, copy: Path, sources: dict[str, str]) -> str:
    """Why an entry of the fixed sample cannot be tried any more; "" if it can."""
    mutant = Mutant(**entry["mutant"])
    (file, _, test) = entry["by"].partition("::")
    if located(mutant, sources) is None:
        return (
            "its line has gone"
            if mutant.path in sources
            else "its file has gone, and its line is nowhere else"
        )
    name = test.partition("[")[0]
    if not (copy / file).is_file() or f"def {name}(" not in (copy / file).read_text():
        return f"its test has gone: {entry['by']}"
    return ""


def check_kept(copy: Path) -> int:
    """Try the fixed sample, each with the test that caught it. Those that cannot be tried any more are listed
    with the reason; it fails if a mutant survives, or if a quarter of the sample cannot be tried."""
    kept = json.loads(KEPT.read_text())
    sources = targets(copy)
    reasons = [stale(entry, copy, sources) for entry in kept]
    survived = 0
    for entry, reason in zip(kept, reasons, strict=True):
        if reason:
            continue
        mutant = located(Mutant(**entry["mutant"]), sources)
        assert mutant is not None, entry  # what is gone is stale
        outcome = attempt(copy, mutant, [entry["by"]], 600)
        survived += not outcome.caught
        print(f"{'caught' if outcome.caught else 'SURVIVED':8} {mutant} by {entry['by']}", flush=True)
    gone = sum(map(bool, reasons))
    print(f"{len(kept) - gone - survived} passed, {survived} failed, {gone} cannot be tried any more")
    for entry, reason in zip(kept, reasons, strict=True):
        if reason:
            print(f"STALE    {Mutant(**entry['mutant'])}: {reason}")
    if gone:
        print("renew the sample: python experiments/mutate.py --sample 300 --keep 16")
    return int(survived > 0 or gone > len(kept) / 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="try the fixed sample alone")
    parser.add_argument("--sample", type=int, default=300, help="mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="part of the path of files to mutate")
    near = "try the test files that import a mutant's file alone, so that survivors may be caught by others"
    parser.add_argument("--near", action="store_true", help=near)
    parser.add_argument("--keep", type=int, default=0, help="write so many caught ones as the fixed sample")
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"), help="where results are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fcljax-mutants-") as folder:
        copy = prepare(Path(folder))
        if arguments.kept:
            return check_kept(copy)
        out = arguments.out.resolve()
        records = explore(copy, out, arguments.sample, arguments.seed, arguments.only, arguments.near)
    if arguments.keep:
        keep(records, arguments.keep, arguments.seed)
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
