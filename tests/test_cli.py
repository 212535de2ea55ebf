"""The command line: what it prints, what its options mean, and one line for every mistake, with nothing left
behind."""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import small_runs
import yaml
from PIL import Image

from fcljax import __version__, cli, config
from fcljax.adapters import ADAPTERS
from fcljax.checks.examples import TINY
from fcljax.checks.examples import network as network_of
from fcljax.choices import CHOICES, options_of
from fcljax.commands import running
from fcljax.commands.arguments import parse
from fcljax.data.files.sources import DATASETS
from fcljax.errors import SYNONYMS, InputError
from fcljax.methods import METHODS, find_method
from fcljax.models.shapes import VITS
from fcljax.models.vit import init_vit
from fcljax.models.weights.pretrained import save_native
from fcljax.options import is_read
from fcljax.runs.build import make_method
from fcljax.types import Sizes

OUT = "new-run"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def linear_run():
    return small_runs.finished("linear")


def everything(folder="."):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


def mistake(capsys, *arguments):
    """The one line that `fcljax ARGUMENTS` ends with."""
    before = everything()
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert everything() == before
    assert out == ""
    assert err.startswith("fcljax: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err.removeprefix("fcljax: ").rstrip("\n")


def program(*arguments, code, **options):
    """(stdout, stderr) of `python -m fcljax ARGUMENTS`."""
    environment = os.environ | {"PYTHONPATH": str(small_runs.ROOT)}
    done = subprocess.run(
        [sys.executable, *(code or ["-m", "fcljax"]), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        **({"env": environment} | options),
    )
    return done.returncode, done.stdout, done.stderr


# ---- mistakes on the command line --------------------------------------------------------------------------

COMMANDS = ("run", "check", "list", "compare", "pretrain")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["command", "'rnu'", "'run'"]),
        (["-v"], ["command", "'-v'"]),
        (["run"], ["method", "try: fcljax run fppl", "linear"]),
        (["run", "--tasks", "3"], ["method"]),
        (["run", "fpl"], ["method", "'fpl'", "'fppl'"]),
        (["run", "linear", "--taks", "3"], ["'--taks'", "'--tasks'"]),
        (["run", "linear", "--wo-pool"], ["--wo-pool", "fppl", "linear"]),
        (["run", "linear", "--adapter", "lra"], ["adapter", "'lra'", "'lora'"]),
        (["run", "linear", "--lora-rank", "2"], ["--lora-rank", "'lora'", "'linear'", "--adapter lora"]),
        (["run", "ewc", "--adapter", "prompts", "--lora-rank", "2"], ["--lora-rank", "'lora'", "'prompts'"]),
        (["run", "pilora", "--adapter", "linear", "--l1-weight", "1"], ["--l1-weight", "'lora'", "'linear'"]),
        (["run", "fedncm", "--adapter", "lora"], ["adapter", "fedncm", "'lora'", "nothing trains"]),
        (["run", "pilora", "--aggregator", "median"], ["aggregator", "'median'", "reweight", "'mean'"]),
        (["run", "fedncm", "--aggregator", "krum"], ["aggregator", "'krum'", "'mean'"]),
        (["run", "fedclm", "--clip-norm", "1"], ["clip_norm", "class_means", "'mean'"]),
        (["run", "fppl", "--clip-norm", "1", "--noise-multiplier", "1"], ["noise_multiplier", "debias"]),
        (["run", "linear", "--noise-multiplier", "1"], ["noise_multiplier", "--clip-norm"]),
        (["run", "linear", "--trim", "0.2"], ["trim", "trimmed_mean", "'mean'"]),
        (["run", "linear", "--server-step", "0.2"], ["server_step", "server_optimiser"]),
        (["run", "linear", "--momentum", "0.9"], ["momentum", "--optimiser sgd", "'adam'"]),
        (["run", "linear", "--malicious", "5"], ["malicious", "5 clients", "nearest: 4"]),
        (["run", "linear", "--attack", "nan"], ["attack", "'nan'", "--malicious 1"]),
        (["run", "linear", "--dp-delta", "1e-5"], ["dp_delta", "--noise-multiplier"]),
        (["run", "fedncm", "--prox-weight", "1"], ["prox", "nothing trains"]),
        (["check"], ["method", "try: fcljax check fppl"]),
        (["check", "fpl"], ["'fpl'", "'fppl'"]),
        (["run", "linear", "--tasks"], ["tasks", "needs a value"]),
        (["run", "linear", "3"], ["'3'", "--"]),
        (["run", "linear", "--tasks", "three"], ["tasks", "'three'", "whole number"]),
        (["run", "linear", "--tasks", "2.5"], ["tasks", "'2.5'", "whole number"]),
        (["run", "linear", "--tasks", "\u0662"], ["tasks", "whole number"]),
        (["run", "linear", "--lr", "\u0662"], ["lr", "number"]),
        (["run", "linear", "--lr", "fast"], ["lr", "'fast'", "number"]),
        (["run", "linear", "--lr", "nan"], ["lr", "nan", "0.01"]),
        (["run", "linear", "--lr", "-0.1"], ["lr", "-0.1", "positive"]),
        (["run", "linear", "--augment", "maybe"], ["augment", "'maybe'", "true"]),
        (["run", "linear", "--eval-every-round=yes"], ["eval_every_round", "--no-eval-every-round"]),
        (["run", "linear", "--lane-mode", "vmp"], ["lane_mode", "'vmp'", "'vmap'"]),
        (["run", "linear", "--dtype", "float16"], ["dtype", "'float16'", "'bfloat16'"]),
        (["run", "linear", "--fidelity", "papr"], ["fidelity", "'papr'", "'paper'"]),
        (["run", "linear", "--alpha", "0"], ["alpha", "0.0", "positive"]),
        (["run", "linear", "--alpha", "-1"], ["alpha", "-1.0", "positive"]),
        (["run", "linear", "--batch-size", "0"], ["batch_size", "0", "nearest valid value: 1"]),
        (["run", "linear", "--seed", "-1"], ["seed", "-1", "nearest valid value: 0"]),
        (["run", "linear", "--participation", "1.5"], ["participation", "1.5", "nearest valid value: 2"]),
        (["run", "fppl", "--unified-weight", "nan"], ["unified_weight", "nan"]),
        (["run", "fppl", "--unified-weight", "-1"], ["unified_weight", "-1.0"]),
        (["run", "fppl", "--prompt-blocks", "7"], ["prompt_blocks", "7", "6 blocks"]),
        (["run", "linear", "--dataset", "digts"], ["dataset", "'digts'", "'digits'"]),
        (["run", "linear", "--dataset", "npz:missing.npz"], ["dataset", "'missing.npz'"]),
        (["run", "linear", "--dataset", "folder:missing"], ["dataset", "no such folder: 'missing'"]),
        (["run", "linear", "--tasks", "11"], ["tasks", "11", "10 classes", "1 to 10"]),
        (["run", "linear", "--clients", "1000"], ["clients", "1000"]),
        (["run", "linear", "--devices", "1000"], ["devices", "1000", "nearest valid value"]),
        (["run", "linear", "--backbone", "vit_b17"], ["backbone", "'vit_b17'", "'vit_b16'"]),
        (["run", "linear", "--backbone", "vit_b16"], ["checkpoint", "vit_b16"]),
        (["run", "linear", "--image-size", "33"], ["image_size", "33", "nearest: 32"]),
        (["run", "linear", "--checkpoint", "missing.npz"], ["checkpoint", "'missing.npz'"]),
        (["run", "linear", "--config", "missing.yaml"], ["config", "'missing.yaml'"]),
        (["run", "linear", "--resume", "missing"], ["resume", "'missing'", "no config.yaml"]),
        (["run", "linear", "--resume", "."], ["resume", "'.'", "no config.yaml"]),
        (["run", "linear", "--resume", "a", "--out", "b"], ["resume", "'a'", "--out"]),
        (["list", "methods"], ["'methods'"]),
        (["compare"], ["run", "RUN_DIR"]),
        (["compare", "missing"], ["run", "'missing'"]),
        (["compare", "."], ["run", "summary.json"]),
        (["compare", ".", "--ot", "x.png"], ["'--ot'", "'--out'"]),
        (["pretrain", "--stps", "3"], ["'--stps'", "'--steps'"]),
        (["pretrain", "--steps", "0"], ["steps", "0"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in COMMANDS else None,
)
def test_a_mistake_is_one_line_that_says_what_would_be_valid(arguments, words, capsys):
    line = mistake(capsys, *arguments)
    for word in words:
        assert word in line


def test_no_message_advises_an_option_in_another_spelling_than_is_typed():
    """After the colon behind the field's name, options are written as `--batch-size`, not as batch_size."""
    names = {field.name for method in METHODS for field in dataclasses.fields(config.run_class(method))}
    several = "|".join(sorted(name for name in names if "_" in name))
    spelled = re.compile(rf"(?<![\w./'-])({several})(?![\w.'(=])")
    wrong, seen = [], 0
    for path in (small_runs.ROOT / "fcljax").rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if getattr(call.func, "id", "") != "InputError" or not isinstance(call.args[0], ast.JoinedStr):
                continue
            parts = (part.value for part in call.args[0].values if isinstance(part, ast.Constant))
            message = re.sub(r"^\w+: ", "", "{}".join(parts))
            wrong += [f"{path.name}:{call.lineno}: {name}" for name in spelled.findall(message)]
            seen += 1
    assert seen > 100 and wrong == []


# ---- mistakes in files -------------------------------------------------------------------------------------


def save_npz(path, label):
    image = np.zeros((len(label), 8, 8, 3), np.uint8)
    np.savez(path, x_train=image, y_train=np.asarray(label), x_test=image, y_test=np.asarray(label))


@pytest.mark.parametrize(
    ("label", "words"),
    [([0.0, 1.5] * 20, ["y_train", "float64", "integers"]), ([0, -1] * 20, ["y_train", "-1"])],
    ids=["fractions", "negative"],
)
def test_labels_must_be_integers_from_0(label, words, capsys):
    save_npz("data.npz", label)
    line = mistake(capsys, "run", "linear", "--dataset", "npz:data.npz", "--out", OUT)
    for word in ["dataset", "'data.npz'", *words]:
        assert word in line


def test_a_truncated_npz_is_named(capsys):
    save_npz("whole.npz", [0, 1] * 20)
    Path("data.npz").write_bytes(Path("whole.npz").read_bytes()[:-100])
    assert "'data.npz' is damaged" in mistake(
        capsys, "run", "linear", "--dataset", "npz:data.npz", "--out", OUT
    )


@pytest.mark.long
def test_a_checkpoint_of_another_shape_names_a_tensor(capsys):
    other = dataclasses.replace(VITS["vit_micro"], width=48, mlp=96)
    save_native("other.safetensors", init_vit(jax.random.key(0), other), {})
    line = mistake(
        capsys, "run", "linear", "--backbone", "vit_micro", "--checkpoint", "other.safetensors", "--out", OUT
    )
    assert "checkpoint: does not fit vit_micro" in line
    assert "block_00.attn.proj.kernel has shape (48, 48), needs (96, 96)" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- tasks\n- 3\n", ["map names to values"]),
        ("", ["map names to values"]),
        ("tasks: [3\n", ["not valid YAML"]),
        ("taks: 3\n", ["settings.yaml", "'taks'", "'tasks'"]),
        ("method: fppl\ntasks: 3\n", ["'fppl'", "'linear'"]),
        ("tasks: 2.5\n", ["tasks", "2.5", "whole number"]),
        ("tasks: true\n", ["tasks", "True", "whole number"]),
        ("tasks: [3]\n", ["tasks", "[3]", "whole number"]),
        ("tasks: null\n", ["tasks", "None", "whole number"]),
        ("lr: {a: 1}\n", ["lr", "{'a': 1}", "number"]),
        ("dataset: [digits]\n", ["dataset", "['digits']", "text"]),
        ("eval_every_round: 3\n", ["eval_every_round", "'3'", "true"]),
        ("normalise: halves\n", ["normalise", "'halves'", "'half'"]),
        ("alpha: .inf\n", ["alpha", "inf"]),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line(text, words, capsys):
    Path("settings.yaml").write_text(text)
    line = mistake(capsys, "run", "linear", "--config", "settings.yaml", "--out", OUT)
    for word in words:
        assert word in line


def test_a_config_file_that_is_no_text_is_named(capsys):
    Path("settings.yaml").write_bytes(b"\xff\xfe\x00")
    assert "'settings.yaml'" in mistake(capsys, "run", "linear", "--config", "settings.yaml", "--out", OUT)


# ---- mistakes about run directories ------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_directory_that_exists_is_left_as_it_is(linear_run, capsys):
    run = shutil.copytree(linear_run, "run")
    line = mistake(capsys, "run", "linear", "--out", str(run))
    assert "out: 'run' exists already" in line and "--resume run" in line


def test_a_file_is_no_run_directory(capsys):
    Path("file").write_text("mine")
    assert "out: 'file' exists already" in mistake(capsys, "run", "linear", "--out", "file")


def test_resuming_with_other_settings_names_them(linear_run, capsys):
    run = shutil.copytree(linear_run, "run")
    line = mistake(
        capsys, "run", "linear", "--resume", str(run), "--lr", "0.5", "--rounds", "3", "--alpha", "2"
    )
    assert line == "resume: 'run' was run with other settings: alpha (2.0, not 0.5), lr (0.5, not 0.01)"


def test_resuming_with_another_method_names_both(linear_run, capsys):
    run = shutil.copytree(linear_run, "run")
    line = mistake(capsys, "run", "fedavg", "--resume", str(run))
    assert "'linear'" in line and "'fedavg'" in line


@pytest.mark.parametrize("out", ["file/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_made_is_named(out, capsys):
    Path("file").write_text("a regular file")
    line = mistake(capsys, "run", "linear", *small_runs.OPTIONS["linear"], "--out", out)
    assert line.startswith(f"out: cannot write to {out!r}: ")


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        pytest.param(100, set(), marks=pytest.mark.long),
        pytest.param(
            1500, {".lock", "config.yaml", "checkpoints", "figures", "metrics.jsonl"}, marks=pytest.mark.long
        ),
    ],
)
def test_a_full_disk_is_one_line_and_no_summary(limit, left, linear_run, here):
    # No file may grow beyond the limit: too little for config.yaml in the one case, for the first checkpoint
    # in the other.
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "import sys; from fcljax.cli import main; sys.exit(main())"
    )
    options = {"env": small_runs.environment(here) | {"PYTHONWARNINGS": "ignore"}}
    code, out, err = program(
        "run", "linear", *small_runs.OPTIONS["linear"], "--out", OUT, code=["-c", code], **options
    )
    assert (code, out) == (2, "")
    assert "Traceback" not in err and "ERROR" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("fcljax: ")]
    assert OUT in line and "File too large" in line
    assert {path.name for path in Path(OUT).glob("*")} == left
    if not left:
        assert not Path(OUT).exists()


def test_compare_refuses_a_summary_that_is_not_one(linear_run, capsys):
    Path("run").mkdir()
    for text, word in (("{", "not JSON"), ("{}", "lacks"), ("[]", "lacks")):
        Path("run/summary.json").write_text(text)
        assert word in mistake(capsys, "compare", str(linear_run), "run")


def test_compare_cannot_write_its_figure_below_a_file(linear_run, capsys):
    Path("file").write_text("a regular file")
    assert "'file" in mistake(capsys, "compare", str(linear_run), "--out", "file/accuracy.png")


# ---- what works --------------------------------------------------------------------------------------------


def test_the_program_ends_with_the_exit_code_of_main():
    status, out, err = program("run", "fpl", code=None)
    assert (status, out) == (2, "")
    assert err == "fcljax: method: unknown value 'fpl'; did you mean 'fppl'?\n"


def test_version_and_usage(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(arguments) == 0
        usage = capsys.readouterr().out
        assert all(f"fcljax {command}" in usage for command in ("run", "list", "compare", "pretrain"))


def names_in_help(capsys, *arguments):
    """The options that the help of a run shows."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", *arguments, "--help"])
    return set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("method", small_runs.some(METHODS, ("fppl", "vfcl")))
def test_help_of_a_method_names_every_option_that_it_reads_and_no_other(method, capsys):
    preset = config.preset(method)
    shown = names_in_help(capsys, method)
    for field in dataclasses.fields(preset):
        named = f"--{field.name.replace('_', '-')}" in shown
        assert named == (field.name != "method" and is_read(field, preset)), field.name


def test_help_shows_what_the_options_beside_it_read(capsys):
    sampled = names_in_help(capsys, "pilora", "--partition", "sampled", "--aggregator", "krum")
    assert {"--split-ratio", "--long-tail", "--malicious-bound"} <= sampled
    usual = names_in_help(capsys, "pilora", "--server-optimiser", "adam", "--optimiser", "sgd")
    assert {"--server-adaptivity", "--momentum"} <= usual
    assert not {"--split-ratio", "--malicious-bound"} & usual
    decided = ["--dataset", "glyphs", "--clip-norm", "1", "--malicious", "1", "--coordinator", "auto"]
    needing = {"--glyph-train", "--noise-multiplier", "--attack", "--processes"}
    assert needing <= names_in_help(capsys, "pilora", *decided) and not needing & usual


@pytest.mark.parametrize("method", ["pilora", "fppl", "hepco", "vfcl", "pmae"])
def test_help_of_a_method_is_short(method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", method, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 285 and max(map(len, lines)) <= 80
    assert sum(line.startswith("  --") for line in lines) <= 102


def test_list_names_methods_data_sets_and_backbones(capsys):
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*METHODS, *ADAPTERS, *DATASETS, *VITS))
    assert re.search(r"fedncm +--adapter lora, prompts", text) and re.search(r"pilora +--aggregator", text)


def test_list_breaks_no_name_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    words = {word for line in lines for word in line.split()}
    assert {*METHODS, *ADAPTERS, *VITS} <= words


@pytest.mark.long
def test_what_list_says_cannot_work_is_refused_and_the_rest_is_not():
    """Adapters and aggregation rules, for every method: made, not run."""
    network = network_of(TINY)
    sizes = Sizes(classes=5, tasks=2, task_classes=3, clients=4, examples=9)

    def works(name, **options):
        try:
            resolved = config.resolve(config.from_mapping(name, options, "test"))
            make_method(resolved, sizes, network)
        except InputError:
            return False
        return True

    for name, entry in METHODS.items():
        for adapter in ADAPTERS:
            assert works(name, adapter=adapter) == (adapter not in entry.excludes), (name, adapter)
        for rule in ("uniform", "median", "krum", "centred_clipping"):
            # which is how their servers average
            beside = name in ("hepco", "fedweit") and rule == "uniform"
            assert works(name, aggregator=rule) == (beside or not entry.merges), (name, rule)
        assert works(name, server_optimiser="adam") == (not entry.merges), name
    assert works("pilora", aggregator="median", wo_reweight=True)
    assert works("fedweit", aggregator="median", client_sparsity=0.0)
    assert works("vfcl", aggregator="median", merge="average")
    assert not works("pilora", server_optimiser="adam", wo_reweight=True)


@pytest.mark.long
def test_compare_prints_both_runs_and_draws_them(linear_run, capsys):
    fppl_run = small_runs.finished("fppl")
    capsys.readouterr()
    assert cli.main(["compare", str(linear_run), str(fppl_run), "--out", "both.png"]) == 0
    text = capsys.readouterr().out
    for run in (linear_run, fppl_run):
        summary = json.loads((run / "summary.json").read_text())
        assert summary["method"] in text
        assert f"{100 * summary['A_avg']:.2f}" in text
    assert Path("both.png").read_bytes().startswith(b"\x89PNG")


def typed(options, line):
    return parse({"group": options}, line.split(), ["run"], "")[1]


def test_options_may_be_given_with_or_without_an_equals_sign_and_the_last_one_counts():
    given = typed(config.RunConfig(), "--tasks=2 --lr 1e-2 --tasks 4 --image_size None")
    assert given == {"tasks": 4, "lr": 0.01, "image_size": None}


def test_switches_are_turned_on_and_off():
    options = find_method("fppl").options("prompts")()
    assert typed(options, "--wo-pool") == {"wo_pool": True}
    assert typed(options, "--wo-pool --no-wo-pool") == {"wo_pool": False}
    assert typed(config.RunConfig(), "--augment false") == {"augment": False}


def test_options_win_over_the_config_file_and_the_rest_keeps_its_defaults():
    Path("settings.yaml").write_text(
        yaml.safe_dump({"method": "fppl", "tasks": 2, "lr": 0.5, "wo_pool": True})
    )
    resolved = running.settings("fppl", {"tasks": 4, "wo_pool": False}, running.Paths(config="settings.yaml"))
    assert (resolved.tasks, resolved.lr, resolved.wo_pool, resolved.rounds) == (
        4,
        0.5,
        False,
        config.RunConfig().rounds,
    )


def test_without_a_folder_the_run_goes_to_one_that_names_it(linear_run, monkeypatch, capsys):
    made = []
    summary = json.loads((linear_run / "summary.json").read_text())
    run = lambda cfg, out, *_, **__: made.append(out) or summary
    monkeypatch.setattr("fcljax.runs.loop.run", run)
    monkeypatch.setattr(time, "strftime", lambda form: "20300101-000000")
    for dataset in ("digits", "npz:some/where/my data.npz"):
        assert cli.main(["run", "linear", "--dataset", dataset, "--seed", "7"]) == 0
    names = ["runs/linear-digits-s7-20300101-000000-", "runs/linear-my-data-s7-20300101-000000-"]
    assert [out[:-6] for out in made] == names and made[0][-6:] != made[1][-6:]
    assert made[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (
            PermissionError(13, "Permission denied", "run/metrics.jsonl"),
            2,
            "cannot read or write 'run/metrics.jsonl': Permission denied",
        ),
        (KeyboardInterrupt(), 130, "stopped by SIGINT; the run had not started; nothing was written"),
    ],
)
def test_what_stops_a_run_from_outside_is_one_line(error, status, words, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise error

    monkeypatch.setattr("fcljax.runs.loop.run", stop)
    assert cli.main(["run", "linear", "--out", OUT]) == status
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


# ---- data, convert -----------------------------------------------------------------------------------------


def test_data_list_says_what_is_here_and_what_to_do_for_the_rest(capsys):
    assert cli.main(["data", "list", "--data-dir", "shelf"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(name.partition(":")[0] in out for name in DATASETS)
    assert "built in" in out and "not here" in out and "shelf" in out


def test_data_prepare_counts_and_checks(capsys):
    assert cli.main(["data", "prepare", "digits"]) == 0
    out = capsys.readouterr().out
    assert "1438" in out and "359" in out


@pytest.mark.long
def test_data_show_draws_images_and_who_holds_what(capsys):
    assert cli.main(["data", "show", "digits", "--clients", "4", "--alpha", "0.1", "--out", "pictures"]) == 0
    assert {path.name for path in Path("pictures").iterdir()} == {"images.png", "classes.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("pictures").iterdir())
    out = capsys.readouterr().out
    assert "1438" in out and "32x32" in out


@pytest.mark.long
def test_data_show_leaves_out_what_is_held_out(capsys):
    assert cli.main(["data", "show", "digits", "--holdout", "0.25", "--out", "pictures"]) == 0
    out = capsys.readouterr().out
    assert "1083" in out


@pytest.mark.long
def test_data_show_overwrites_nothing(capsys):
    Path("classes.png").write_text("mine")
    assert "classes.png' exists already" in mistake(capsys, "data", "show", "digits", "--out", ".")
    assert cli.main(["data", "show", "digits"]) == 0  # into a folder of its own
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("data-digits-") and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("command", ["report RUN", "predict RUN image.png", "data show digits"])
def test_a_result_goes_into_a_new_folder(command, linear_run):
    Image.new("RGB", (8, 8)).save("image.png")
    words = command.replace("RUN", str(linear_run)).split()
    suffix = {"report": ".html", "predict": ".csv"}.get(words[0], "")
    out = Path("new") / "folder" / f"result{suffix}"
    assert cli.main([*words, "--out", str(out)]) == 0
    assert out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data"], ["data: no command given", "list, prepare, show"]),
        (["data", "prepair"], ["'prepair'", "did you mean 'prepare'"]),
        (["data", "prepare"], ["dataset: no name given"]),
        (["data", "show", "--alpha", "1"], ["dataset: no name given"]),
        (["data", "prepare", "cifar1000"], ["'cifar1000'", "did you mean 'cifar100'"]),
        (["data", "prepare", "digits", "--store-size", "0"], ["store_size: 0", "nearest valid value: 1"]),
        (["data", "show", "digits", "--tasks", "11"], ["tasks: 11", "1 to 10"]),
        (["data", "prepare", "digits", "--holdout", "0.2"], ["unknown option '--holdout'"]),
        (["data", "prepare", "digits", "--positions", "plain"], ["unknown option '--positions'"]),
        (["data", "show", "digits", "--normalise", "unit"], ["unknown option '--normalise'"]),
        (["embed", "--augment"], ["unknown option '--augment'"]),
        (["list", "--json"], ["unknown option '--json'; there are none"]),
        (["export", "nowhere"], ["run: no directory 'nowhere'"]),
        (["convert"], ["convert: 0 files given", "SRC [DST]"]),
        (["convert", "a", "b", "c"], ["convert: 3 files given"]),
        (["convert", "absent.npz"], ["absent.npz"]),
        (["embed", "--preprocess", "hepko"], ["preprocess", "'hepko'", "'hepco'"]),
        (["embed", "--normalize", "unit"], ["--normalize", "--normalise"]),
        (
            ["run", "linear", "--dataset", "cifar100", "--data-dir", "nowhere"],
            ["'cifar100' is not here", "cifar-100-binary"],
        ),
        (
            ["run", "linear", "--data-budget", "1", "--eval-batch-size", "999"],
            ["data_budget: 1 MiB", "nearest valid value"],
        ),
    ],
)
def test_mistakes_with_data_and_checkpoints_are_one_line(arguments, words, capsys):
    line = mistake(capsys, *arguments)
    assert all(word in line for word in words), line


def test_convert_says_what_it_read_and_keeps_where_it_came_from(capsys):
    tiny = dataclasses.replace(VITS["vit_micro"], width=64, depth=1, heads=1, mlp=32)
    save_native("tiny.safetensors", init_vit(jax.random.key(0), tiny), {})
    assert cli.main(["convert", "tiny.safetensors", "converted.safetensors", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "64" in out and "converted.safetensors" in out
    assert "exists" in mistake(capsys, "convert", "tiny.safetensors", "converted.safetensors")


# ---- settings that show what runs --------------------------------------------------------------------------


def help_of(capsys, *arguments):
    """Option -> its default, as the help shows it."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", *arguments, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    shown = re.findall(r"(--[\w-]+) (?:(?!\[default: ).)*\[default: ([^\]]*)\]", text)
    assert len(re.findall(r"\[default: ", text)) == len(shown) and "None" not in text
    return dict(shown)


def test_help_shows_the_values_that_would_run(capsys):
    assert help_of(capsys, "pilora")["--lr-schedule"] == "cosine"
    released = help_of(capsys, "pilora", "--fidelity", "released")
    assert (released["--lr-schedule"], released["--global-lora"]) == ("cosine_lag", "first")
    assert (released["--preprocess"], released["--normalise"]) == ("pilora", "release")
    assert (released["--lr"], released["--fidelity"], released["--lanes"]) == (
        "0.1",
        "released",
        "0, chosen for the device",
    )
    Path("own.yaml").write_text("method: pilora\nfidelity: paper\nlr: 0.25\nadapter: prompts\n")
    from_file = help_of(capsys, "pilora", "--config", "own.yaml")
    assert (from_file["--lr"], from_file["--distance"], from_file["--gate-scale"]) == (
        "0.25",
        "squared",
        "fixed",
    )
    assert "--lora-rank" not in from_file and "--orthogonality-weight" not in from_file


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--learning-rate", "--lr"),
        ("--optimizer", "--optimiser"),
        ("--beta", "--alpha"),
        ("--dirichlet-alpha", "--alpha"),
        ("--num-clients", "--clients"),
        ("--num-rounds", "--rounds"),
        ("--hostile", "--malicious"),
        ("--byzantine", "--malicious"),
    ],
)
def test_the_field_s_other_names_lead_to_ours(theirs, ours, capsys):
    line = mistake(capsys, "run", "linear", theirs, "1")
    assert line.endswith(f"option: unknown option {theirs!r}; did you mean {ours!r}?")
    Path("own.yaml").write_text(f"{theirs[2:].replace('-', '_')}: 1\n")
    assert f"did you mean {ours[2:]!r}?" in mistake(capsys, "run", "linear", "--config", "own.yaml")


def test_every_synonym_leads_to_an_option():
    groups = (type(config.preset("pilora")), running.Paths)
    names = {field.name for options in groups for field in dataclasses.fields(options)}
    names |= options_of(*CHOICES).keys()
    assert set(SYNONYMS.values()) <= names and not set(SYNONYMS) & names


def test_alpha_is_understood_or_explained(capsys):
    assert typed(config.preset("linear"), "--alpha 0.1") == {"alpha": 0.1}
    line = mistake(capsys, "run", "linear", "--partition", "quantity", "--alpha", "2")
    assert "alpha: only dirichlet and task_dirichlet read it, and partition is 'quantity'" in line
    assert line.endswith("nearest: --partition dirichlet")


JAX, ARRAYS = ("jax", "flax", "optax"), ("matplotlib", "numpy")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--help; --version; list; completion bash", JAX + ARRAYS),
        ("data list", (*JAX, "matplotlib")),
        ("compare RUN --out NEW/accuracy.png; report RUN --out NEW/report.html", JAX),
    ],
)
def test_what_needs_no_jax_does_not_import_it(arguments, names, tmp_path):
    places = {"RUN": small_runs.finished("linear") if "RUN" in arguments else "", "NEW": tmp_path}
    for name, path in places.items():
        arguments = arguments.replace(name, str(path))
    code = f"""
import sys
from fcljax import cli
assert [cli.main(each.split()) for each in {arguments.split("; ")!r}] == [0] * {arguments.count(";") + 1}
heavy = [name for name in {names!r} if name in sys.modules]
print(heavy, file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=small_runs.ROOT)
    assert (done.returncode, done.stderr) == (0, "[]\n")
