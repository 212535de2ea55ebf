"""Run files, tables and figures."""

import io
import itertools
import json
import subprocess
import sys
import types
from typing import Any, NamedTuple

import jax.numpy as jnp
import matplotlib.legend
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from small_runs import some

from fcljax import cli
from fcljax.errors import InputError
from fcljax.results import figures, metrics, run_folder

MATRIX = [[0.9], [0.7, 0.8], [0.6, 0.85, 0.9]]


def summary(**changes) -> dict[str, Any]:
    base = {"method": "fppl", "dataset": "cifar100", "backbone": "vit_b16", "seed": 0, "fidelity": "intended"}
    base |= metrics.summarize(MATRIX)
    base["communication"] = dict.fromkeys(
        ("upload_scalars", "upload_bytes", "download_scalars", "download_bytes"), 169060
    )
    base |= {
        "trainable_params": 84480,
        "time": {"compile_s": 10.0, "client_s": 100.0, "server_s": 2.0, "eval_s": 8.0},
    }
    base["trained_images_per_s"] = 123.4
    return base | {"client_images_per_s": 456.7, "slot_efficiency": 0.9, "traces": {"round": 1}} | changes


def write(folder, **changes):
    run_folder.write_json(folder / "summary.json", summary(**changes))
    return folder


def text_of(table, width=220) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def drawn(path, draw, *of):
    """The PNG of a figure."""
    return figures.save(path, draw(*of))


def has_color(image: np.ndarray, code: str, tolerance: int = 12) -> bool:
    wanted = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(image.astype(int) - wanted).max(-1) <= tolerance).any())


# files
# ------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: int
    right: Any


def test_json_is_strict_and_holds_arrays_and_named_tuples(tmp_path):
    path = tmp_path / "deep" / "x.json"
    loose = {
        "a": np.array([1.0, np.nan]),
        "b": Pair(1, jnp.float32(2)),
        "c": float("inf"),
        "d": np.int64(3),
        "e": (True, None),
    }
    run_folder.write_json(path, loose)
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert strict == {"a": [1.0, None], "b": {"left": 1, "right": 2.0}, "c": None, "d": 3, "e": [True, None]}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    run_folder.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        run_folder.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_an_interrupted_figure_leaves_the_old_one_and_no_temporary(tmp_path, monkeypatch):
    path = drawn(tmp_path / "c.png", figures.accuracy_curve, {"a": [0.5]})
    before = path.read_bytes()

    def interrupted(self, target, **options):
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figures.Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drawn(path, figures.accuracy_curve, {"a": [0.1]})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.png"]


def test_a_written_summary_is_read_back(tmp_path):
    assert run_folder.load_summary(write(tmp_path / "run")) == summary()


def refused(run_dir) -> str:
    with pytest.raises(InputError) as error:
        run_folder.load_summary(run_dir)
    assert "\n" not in str(error.value) and run_dir.name in str(error.value)
    return str(error.value)


def test_a_run_that_cannot_be_read_is_one_clear_line(tmp_path):
    assert "no directory" in refused(tmp_path / "absent")
    (tmp_path / "run").mkdir()
    assert "no summary.json" in refused(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    for broken in (b'{"method": ', b"\xff\xfe\x00", b""):
        path.write_bytes(broken)
        assert "not JSON" in refused(tmp_path / "run")
    path.write_text("[1, 2]")
    assert "not a JSON object" in refused(tmp_path / "run")


def test_missing_fields_are_named_the_nested_ones_too(tmp_path):
    whole = summary(time=3.0, forgetting={"paper": 0.1, "released": 0.1})
    del whole["A_last"], whole["traces"]
    run_folder.write_json(tmp_path / "summary.json", whole)
    times = ", ".join(f"time.{name}_s" for name in ("compile", "client", "server", "eval"))
    assert refused(tmp_path).endswith(f"lacks A_last, traces, forgetting.diagonal, {times}")


# figures
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 9, 30])
def test_curves_are_drawn_for_any_number_of_runs(tmp_path, count):
    image = pixels(
        drawn(
            tmp_path / "c.png",
            figures.accuracy_curve,
            {f"run {i}": [0.9, 0.8 - 0.01 * i] for i in range(count)},
        )
    )
    assert has_color(image, figures.PALETTE[0]) == (count > 0)


def test_curves_with_gaps_and_different_lengths_are_drawn(tmp_path):
    runs = {"a": np.array([0.9, np.nan, 0.7]), "b": [0.5], "c": [0.4, None]}
    assert has_color(
        pixels(drawn(tmp_path / "c.png", figures.accuracy_curve, runs, {"a": [0.1, 0.1, 0.1]})),
        figures.PALETTE[1],
    )


def test_reliability_draws_bins_with_examples_as_high_as_their_accuracy(tmp_path, monkeypatch):
    bars = []
    monkeypatch.setattr(figures.Axes, "bar", lambda self, x, height, **more: bars.append((x, height)))
    calibration = {"ece": 0.1, "examples": [3, 0, 1, 0], "accuracy": [0.5, None, 1.0, None]}
    assert pixels(drawn(tmp_path / "r.png", figures.reliability, calibration)).std() > 5
    (places, heights), (_, shares) = bars
    assert places.tolist() == [0, 0.5] and heights.tolist() == [50, 100] and shares.tolist() == [75, 0, 25, 0]


@pytest.mark.parametrize("tasks", [1, 3, 12, 25])
def test_matrices_of_any_size_are_drawn_and_small_ones_numbered(tmp_path, tasks, monkeypatch):
    numbers = []
    monkeypatch.setattr(figures.Axes, "text", lambda self, *args, **kwargs: numbers.append(args[2]))
    matrix = [[0.5 if i <= t else None for i in range(tasks)] for t in range(tasks)]
    assert pixels(drawn(tmp_path / "m.png", figures.accuracy_matrix, matrix)).std() > 5
    assert numbers == (["50.0"] * (tasks * (tasks + 1) // 2) if tasks <= 12 else [])


@pytest.mark.parametrize(
    "clients, classes, per_task",
    some([(1, 1, 1), (10, 20, 5), (40, 40, 10), (10, 100, 10), (60, 200, 5)], [(1, 1, 1), (60, 200, 5)]),
)
def test_holdings_are_drawn_for_few_and_for_many_classes(tmp_path, clients, classes, per_task):
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    tasks = np.arange(classes)[::-1].reshape(-1, per_task)
    assert pixels(drawn(tmp_path / "h.png", figures.class_counts, counts, tasks)).std() > 5


def test_holdings_follow_the_order_of_the_tasks(tmp_path):
    counts = np.array([[9, 0, 0, 0], [0, 0, 0, 5]])
    upper = lambda path: pixels(path)[:280]
    ordered = upper(drawn(tmp_path / "a.png", figures.class_counts, counts, [[3, 1, 2, 0, -1]]))
    np.testing.assert_array_equal(
        ordered, upper(drawn(tmp_path / "b.png", figures.class_counts, counts[:, [3, 1, 2, 0]]))
    )
    assert (ordered != upper(drawn(tmp_path / "c.png", figures.class_counts, counts))).any()


def test_holdings_without_any_rows_are_drawn(tmp_path):
    assert pixels(drawn(tmp_path / "h.png", figures.class_counts, np.zeros((3, 5), int))).size
    assert pixels(drawn(tmp_path / "g.png", figures.class_counts, np.zeros((3, 60), int))).size


def test_the_same_data_give_the_same_bytes(tmp_path):
    first, second = (
        drawn(tmp_path / f"{name}.png", figures.accuracy_matrix, np.array([[0.5]])).read_bytes()
        for name in "ab"
    )
    assert first == second


def test_a_busy_machine_gets_a_figure_without_a_warning(tmp_path, monkeypatch):
    """matplotlib warns if it took a second to place the legend."""
    clock = types.SimpleNamespace(perf_counter=itertools.count(0, 10).__next__)
    monkeypatch.setattr(matplotlib.legend, "time", clock)
    path = figures.save(tmp_path / "a.png", figures.accuracy_curve({"a": [0.5, 0.25]}))
    assert path.stat().st_size > 1000 and clock.perf_counter() > 10


def test_drawing_leaves_pyplot_alone(tmp_path):
    draw = "figures.save(sys.argv[1], figures.accuracy_curve({'a': [0.5]}))"
    code = f"import sys; from fcljax.results import figures; {draw}"
    code += "; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, tmp_path / "c.png"], check=True)


@pytest.mark.long
def test_matplotlib_is_imported_only_to_draw():
    code = "import sys; from fcljax.results import comparison, page, watch; from fcljax.runs import loop"
    code += "; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# folders of somebody else
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": [1]}, "seed: [1]; expected a whole number"),
        ({"seed": True}, "seed: True"),
        ({"method": {"a": 1}}, "method: {'a': 1}; expected text"),
        ({"dataset": None}, "dataset: None"),
        ({"A": "0.9"}, "A: '0.9'; expected shares from 0 to 1"),
        ({"A_last": 81.5}, "A_last: 81.5; expected a share"),
        ({"A_last": -0.5}, "A_last: -0.5; expected a share from 0 to 1"),
        ({"trainable_params": -1}, "trainable_params: -1; expected a number from 0"),
        (
            {"time": {"compile_s": 1.0, "client_s": -2.0, "server_s": 0.1, "eval_s": 0.5}},
            "expected seconds by name",
        ),
        ({"accuracy": [[0.5, None], [0.5]]}, "accuracy: "),
        (
            {"accuracy": [[0.5, 0.5]]},
            "accuracy: [[0.5, 0.5]]; expected shares from 0 to 1, as many rows as columns",
        ),
        ({"A": [], "accuracy": []}, "A: no value"),
        ({"time": {"compile_s": "1", "client_s": 1, "server_s": 1, "eval_s": 1}}, "time: "),
        ({"trained_images_per_s": {}}, "trained_images_per_s: {}"),
        ({"trainable_params": 10**400}, "trainable_params: "),
        ({"config": [1]}, "config: [1]; expected settings by name"),
        ({"communication_extra": {"late": {"upload_bytes": 1}}}, "communication_extra: "),
        ({"communication_total": {"upload_bytes": "a", "download_bytes": 1}}, "communication_total: "),
        ({"class_names": [1, 2]}, "class_names: [1, 2]; expected names"),
        ({"privacy": {"epsilon": "1"}}, "privacy: "),
        ({"warnings": [1]}, "warnings: [1]; expected lines of text"),
    ],
)
def test_a_summary_of_wrong_types_is_one_line_that_names_the_field(tmp_path, capsys, changes, says):
    write(tmp_path / "run", **changes)
    for command in ("compare", "report"):
        assert cli.main([command, str(tmp_path / "run")]) == 2
        err = capsys.readouterr().err
        assert "was not written by a run: " in err and says in err and err.count("\n") == 1


def test_lines_of_a_log_with_other_types_are_left_out(tmp_path):
    good = {"task": 0, "round": 1, "rejected": None, "gradient_share_own": 0.5, "loss": None}
    wrong = ({"task": True}, {"round": -1}, {"task": 2**70}, {"rejected": "1"}, {"gradient_share_own": []})
    lines = [good, *(good | change for change in wrong)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_folder.read_lines(tmp_path / "metrics.jsonl") == [good]
