"""What comes from others is data: files of settings, run directories, uploads. Each test fails when its guard
is off."""

import pytest

from fcljax import cli, config
from fcljax.errors import InputError
from fcljax.studies import papers

# ---- no file runs Python -----------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder with a program that leaves a file behind when it is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\n")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", ["./evil.py", "evil.py:METHOD", "evil:METHOD"])
@pytest.mark.parametrize("place", ["method: {}", "method: [linear, {}]", "runs: [{{name: a, method: {}}}]"])
def test_a_sweeps_file_runs_no_program(method, place, trap, capsys):
    (trap / "sweep.yaml").write_text(place.format(f'"{method}"') + "\n")
    for options in ([], ["--dry-run"]):
        assert cli.main(["sweep", "sweep.yaml", *options]) == 2
        err = capsys.readouterr().err
        assert repr(method) in err and "--allow-code" in err and err.count("\n") == 1


def test_code_that_is_allowed_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('it is run')\n")
    (tmp_path / "sweep.yaml").write_text("method: ./mine.py\n")
    assert cli.main(["sweep", "sweep.yaml", "--dry-run", "--allow-code"]) == 2
    assert "it is run" in capsys.readouterr().err


def test_a_run_directory_and_a_file_of_settings_run_no_program(trap, capsys):
    (trap / "run").mkdir()
    (trap / "run" / "config.yaml").write_text("method: ./evil.py\n")
    for given in (["--resume", "run"], ["--config", "run/config.yaml"]):
        assert cli.main(["run", "linear", *given]) == 2
        assert "for method './evil.py'" in capsys.readouterr().err


def test_the_files_of_reproduce_run_no_program(trap):
    row = {"method": "./evil.py"}
    table = {"title": "", "source": "", "metrics": ["A_avg"], "upload": 1, "rows": [row]}
    paper = {"paper": "", "method": "fppl", "seeds": [1], "base": {}, "tables": {"t": table}, "verified": {}}
    with pytest.raises(InputError, match="evil.py.* is a program"):
        papers.parse("evil.yaml", paper)
    with pytest.raises(InputError, match="evil.py.* is a program"):
        papers.parse("evil.yaml", paper | {"method": "./evil.py", "tables": {}})


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["lr: 0.1\nlr: 0.2", "base: {tasks: 1, tasks: 2}", "- {a: 1, a: 2}"])
def test_a_key_that_is_there_twice_is_an_error(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text + "\n")
    with pytest.raises(InputError, match="twice"):
        config.load_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["config", "out", "resume", "faults", "dataset", "track", "seeds"])
def test_an_empty_value_is_an_error(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in ([f"--{name}", ""], [f"--{name}="], [f"--{name}", " "]):
        assert cli.main(["run", "linear", *words]) == 2
        assert f"{name}: it is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
