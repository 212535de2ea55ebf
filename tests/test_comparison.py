"""Runs side by side: which belong together, means over seeds, and paired differences."""

import numpy as np
import pytest
from test_report import has_color, pixels, summary, text_of, write

from fcljax.comparison import Comparison
from fcljax.errors import InputError
from fcljax.results import comparison, figures, metrics
from fcljax.results.comparison import groups_of, labels_of, results_table


def test_the_table_shows_a_run_in_percent_and_all_that_it_sent():
    sent = {"upload_bytes": 1_234_500_000, "download_bytes": 170_000}
    text = text_of(results_table([summary(communication_total=sent)]))
    for cell in (
        "fppl",
        "cifar100",
        "vit_b16",
        "intended",
        "81.11",
        "78.33",
        "12.50",
        "1,234.50",
        "0.17",
        "2:00",
        "123.4",
    ):
        assert cell in text
    assert "10.00" in text_of(results_table([summary()], forgetting="released"))


def test_seeds_of_one_setting_get_a_row_with_mean_and_population_deviation():
    text = text_of(results_table([summary(seed=s, A_avg=a) for s, a in ((1, 0.70), (2, 0.72), (3, 0.75))]))
    assert "3 seeds" in text and "72.33±2.05" in text and "70.00" in text


def test_every_number_of_a_row_of_seeds_is_a_mean_over_them():
    """The second run sends, takes and processes three times as much as the first."""
    runs = [
        summary(
            seed=factor,
            communication_total={"upload_bytes": factor * 20_000_000, "download_bytes": factor * 50_000_000},
            time={"client_s": 10.0 * factor},
            trained_images_per_s=100.0 * factor,
        )
        for factor in (1, 3)
    ]
    row = next(line for line in text_of(results_table(runs)).splitlines() if "2 seeds" in line)
    assert row.split()[-5:] == ["40.00", "100.00", "20", "s", "200.0"]


OTHER = [{"method": "pilora"}, {"dataset": "cub"}, {"backbone": "tiny"}, {"fidelity": "paper"}, {"A": [0.5]}]


@pytest.mark.parametrize("change", OTHER)
def test_runs_that_differ_in_more_than_the_seed_stay_apart(change):
    assert "seeds" not in text_of(results_table([summary(), summary(seed=1, **change)]))


def test_the_same_seed_twice_is_not_called_two_seeds():
    assert "seeds" not in text_of(results_table([summary(), summary(A_avg=0.2)]))


def test_missing_numbers_show_as_a_dash():
    assert text_of(results_table([summary(trained_images_per_s=None)])).count(" -") == 3  # no totals either


def test_the_table_breaks_no_word_at_80_columns():
    sent = {"upload_bytes": 1_234_500_000, "download_bytes": 170_000_000}
    runs = [summary(method=name, communication_total=sent) for name in ("centralized-prompt", "fed-cprompt")]
    text = text_of(results_table(runs), width=80)
    assert "…" not in text
    seeds = [summary(seed=seed, A_avg=0.4 + seed / 9, communication_total=sent) for seed in (0, 1)]
    assert "45.56±5.56" in text_of(results_table(seeds), width=80)
    for word in ("prompt", "fed-cprompt", "A_last", "download", "examples/s", "1,234.50", "123.4"):
        assert word in text


@pytest.mark.parametrize(
    "seconds, shown", [(0.04, "0.04 s"), (59.0, "59 s"), (61.0, "1:01"), (18420.0, "5:07:00")]
)
def test_times_are_readable(seconds, shown):
    assert shown in text_of(results_table([summary(time={"client_s": seconds})]))


def test_compare_reads_runs_and_draws_one_curve_per_setting(tmp_path):
    runs = [write(tmp_path / f"f{s}", seed=s, A=[0.9, 0.8 - 0.1 * s, 0.7]) for s in (0, 1)]
    runs.append(write(tmp_path / "p", method="pilora"))
    (table,), figure = comparison.compare(runs, tmp_path / "out" / "curves.png")
    assert "2 seeds" in text_of(table) and "pilora" in text_of(table)
    image = pixels(figure)
    assert [has_color(image, color) for color in figures.PALETTE[:3]] == [True, True, False]


def test_compare_without_a_target_draws_nothing(tmp_path):
    run = write(tmp_path / "run")
    assert comparison.compare([run])[1] is None and [p.name for p in run.iterdir()] == ["summary.json"]


def test_comparing_nothing_is_refused():
    with pytest.raises(InputError, match="nothing to compare"):
        comparison.compare([])


def test_curves_of_like_runs_have_distinct_names(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(figures, "accuracy_curve", lambda runs, spread: seen.update(runs) or figures.Figure())
    changes = {"a": {}, "b": {}, "c": {"fidelity": "paper"}, "d": {"seed": 4, "A": [0.1]}}
    runs = [write(tmp_path / name, **change) for name, change in changes.items()]
    comparison.compare(runs, tmp_path / "x.png")
    assert len(seen) == 4 and "fppl / paper" in seen


CONFIG = {"lr": 1e-3, "alpha": 0.5, "lanes": None, "seed": 0, "dataset": "cifar100"}


def with_config(seed=0, values=None, **changes):
    return summary(seed=seed, config=CONFIG | {"seed": seed} | (values or {}), **changes)


def test_runs_with_other_settings_are_not_seeds_of_one_another_and_say_in_what_they_differ():
    runs = [with_config(0, {"lr": 1e-2, "alpha": 0.1}), with_config(1, {"alpha": 100})]
    assert [len(group.runs) for group in groups_of(runs)] == [1, 1]
    assert sorted(labels_of(runs).values()) == ["fppl alpha 0.1, lr 0.01", "fppl alpha 100, lr 0.001"]
    text = text_of(results_table(runs))
    assert "seeds" not in text and "fppl alpha 100, lr 0.001" in text


@pytest.mark.parametrize("change", [{"lanes": 4}, {"devices": 2}, {"data_budget": 100}, {"data_dir": "x"}])
def test_what_only_decides_where_a_run_is_made_parts_no_seeds(change):
    (group,) = groups_of([with_config(0), with_config(1, change)])
    assert group.name == "fppl (2 seeds)"


def test_what_another_method_has_besides_is_no_difference():
    runs = [with_config(), with_config(method="pilora", values={"lora_rank": 4})]
    assert list(labels_of(runs).values()) == ["fppl", "pilora"]


def test_personal_models_are_named_apart_from_the_global_one():
    sent = {"communication_total": {"upload_bytes": 1, "download_bytes": 2}}
    personal = {"personal": {"accuracy": []}, "personal_accuracy": [0.75, None]}
    runs = [with_config(**sent), with_config(method="ditto", **sent, **personal)]
    assert list(labels_of(runs).values()) == ["fppl", "ditto (personal)"]
    text = " ".join(text_of(results_table(runs)).split())
    assert "(personal): of the clients' personal models" in text
    assert "personal" not in text_of(results_table(runs[:1]))
    assert [row["model"] for row in Comparison(runs).rows()] == ["global", "personal"]


def test_rows_of_runs_that_lack_a_number_have_none():
    """Earlier versions wrote no total, and null for what was not timed."""
    run = with_config(communication_total=None)
    run["time"] = run["time"] | {"server_s": None}
    (row,) = Comparison([run]).rows()
    assert row["upload_bytes"] is None and row["download_bytes"] is None
    assert row["seconds"] == sum(seconds or 0 for seconds in run["time"].values())


def test_a_paired_difference_and_its_interval_by_hand():
    """Differences 1, 2 and 6: mean 3, deviation sqrt(7), and t(0.975, 2) = 4.302653."""
    mean, low, high = metrics.paired_difference([11.0, 22.0, 36.0], [10.0, 20.0, 30.0])
    half = 4.302653 * np.sqrt(7 / 3)
    np.testing.assert_allclose([mean, low, high], [3, 3 - half, 3 + half], rtol=1e-6)
    with pytest.raises(InputError, match="^seeds: 1 pairs"):
        metrics.paired_difference([1.0], [2.0])


def test_methods_with_the_same_seeds_are_compared_seed_by_seed(tmp_path):
    ours, theirs = (0.5, 0.6, 0.9), (0.4, 0.4, 0.3)
    runs = [write(tmp_path / f"a{i}", seed=i, A_last=value) for i, value in enumerate(ours)]
    runs += [
        write(tmp_path / f"b{i}", method="fedavg", seed=i, A_last=value) for i, value in enumerate(theirs)
    ]
    tables, _ = comparison.compare(runs)
    mean, low, high = metrics.paired_difference([50.0, 60.0, 90.0], [40.0, 40.0, 30.0])
    assert f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]" in text_of(tables[1]) and "fedavg" in text_of(tables[1])
    assert "population standard deviation" in " ".join(text_of(tables[0]).split())


def test_without_the_same_seeds_there_is_no_paired_difference(tmp_path):
    runs = [write(tmp_path / f"a{i}", seed=i) for i in (0, 1)]
    runs += [write(tmp_path / f"b{i}", method="fedavg", seed=i) for i in (0, 2)]
    assert len(comparison.compare(runs)[0]) == 1
    assert len(comparison.compare([runs[0], runs[2]])[0]) == 1  # one seed says nothing of an interval


def test_a_folder_of_seeds_stands_for_its_runs(tmp_path):
    for seed in (3, 4):
        write(tmp_path / "many" / f"seed-{seed}", seed=seed)
    tables, _ = comparison.compare([tmp_path / "many"])
    assert "2 seeds" in text_of(tables[0])
