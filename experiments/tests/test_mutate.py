"""experiments/mutate.py, which measures whether tests notice small errors."""

import ast
import json
import sys

import small_runs

sys.path.append(str(small_runs.ROOT / "experiments"))

import mutate

TOY = """def mean(x, shift=1):
    return x.sum(axis=0) / 2 if shift > 0 else -x
"""


def test_the_fixed_sample_and_its_tests_are_still_there():
    kept, sources = json.loads(mutate.KEPT.read_text()), mutate.targets(small_runs.ROOT)
    stale = [why for entry in kept if (why := mutate.stale(entry, small_runs.ROOT, sources))]
    assert len(stale) <= len(kept) / 4, stale  # as `make mutants` has it
    assert all((small_runs.ROOT / f"tests/test_{name}.py").is_file() for name in mutate.TESTS)


def test_every_mutant_of_a_toy_is_another_program():
    found = mutate.mutants("toy.py", TOY)
    broken = [str(mutate.applied(TOY, each)) for each in found]
    assert "None" not in broken
    assert {ast.dump(ast.parse(each)) for each in broken}.isdisjoint({ast.dump(ast.parse(TOY))})
    assert len(set(broken)) == len(broken)
    changed = {(each.before, each.after) for each in found}
    assert {("shift > 0", "(shift >= 0)"), ("-x", "(x)"), ("2", "(3)")} <= changed
    assert ("x.sum(axis=0)", "(x.mean(axis=0))") in changed and ("x.sum(axis=0)", "(x.sum())") in changed


def test_a_line_that_moved_is_found_and_one_that_is_gone_is_not():
    mutant = next(each for each in mutate.mutants("toy.py", TOY) if each.after == "(shift >= 0)")
    assert "shift >= 0" in (mutate.applied("# above\n" + TOY, mutant) or "")
    assert mutate.applied(TOY.replace("shift > 0", "shift"), mutant) is None


def test_near_tests_import_the_file_and_the_one_with_its_name_is_first():
    mutant = mutate.Mutant("fcljax/methods/vfcl/vfcl.py", 1, "", 0, "", "")
    found = mutate.importing(small_runs.ROOT, mutant)
    assert found[0] == "tests/test_vfcl.py" and "tests/test_oracles.py" in found
    assert "tests/test_fppl.py" not in found
