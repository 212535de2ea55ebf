"""`fcljax.run_seeds` and `fcljax.compare`."""

import pytest
import small_runs

import fcljax

TINY = dict(tasks=2, clients=2, rounds=1, epochs=1, image_size=8, progress=False)


@pytest.fixture(scope="module")
def seeds():
    return fcljax.run_seeds("fedncm", seeds=2, **TINY)


@pytest.mark.long
def test_seeds_are_runs_that_differ_only_in_the_seed(seeds):
    first, second = (result.metrics for result in seeds)
    assert [first["seed"], second["seed"]] == [2023, 2024]
    assert first["config"] | {"seed": 2024} == second["config"]
    assert first["holdings"] != second["holdings"]


def test_a_comparison_shows_mean_and_deviation_over_seeds(seeds, tmp_path):
    table = fcljax.compare(seeds, [small_runs.finished("linear")])
    mean = sum(result.metrics["A_last"] for result in seeds) / 2
    assert f"{100 * mean:.2f}±" in repr(table)
    assert "linear" in repr(table) and "<pre>" in table._repr_html_()
    rows = table.rows()
    assert [row["method"] for row in rows] == ["fedncm", "fedncm", "linear"]
    assert rows[0]["A_last"] == seeds[0].metrics["A_last"]
    assert table.figure(tmp_path / "curve.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: fcljax.compare(), "runs: nothing to compare"),
        (lambda: fcljax.compare([3]), "runs: int is no run"),
        (lambda: fcljax.run_seeds("linear", seeds=[1, 1]), "seeds: '1,1,' must be different"),
        (lambda: fcljax.run_seeds("linear", seeds=0), "seeds: 0 runs; nearest: 1"),
        (lambda: fcljax.run_seeds("linear", seed=3), "seed: 3 has no effect beside seeds"),
    ],
)
def test_what_cannot_be_compared_or_repeated_is_one_line(call, line):
    with pytest.raises(fcljax.InputError) as error:
        call()
    assert str(error.value).startswith(line)
