"""Completion offers what is parsed, in real shells."""

import dataclasses
import functools
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import small_runs

from fcljax import cli, config
from fcljax.adapters import ADAPTERS
from fcljax.commands import completion, running
from fcljax.methods import METHODS
from fcljax.options import flag
from fcljax.runs import hosts

MORE = {flag(each.name) for kind in (running.Paths, hosts.HostOptions) for each in dataclasses.fields(kind)}


@functools.cache
def table():
    return completion.words(cli.COMMANDS)


def offered(method, adapter):
    keys = ("run -", f"run {method} -", f"run @{adapter} -", f"run {method}@{adapter} -")
    return [word for key in keys for word in table().get(key, ())]


@pytest.mark.parametrize("method", small_runs.some(METHODS, ("fppl", "ewc")))
def test_a_method_has_its_options_on_every_adapter_and_no_others(method):
    for adapter in (name for name in ADAPTERS if name not in METHODS[method].excludes):
        fields = [
            each for each in dataclasses.fields(config.run_class(method, adapter)) if each.name != "method"
        ]
        options = {flag(each.name) for each in fields} | MORE
        options |= {flag(f"no_{each.name}") for each in fields if each.type is bool}
        words = offered(method, adapter)
        assert set(words) == options and len(words) == len(set(words))
    assert table()[f"run {method} @"] == (METHODS[method].adapter,)


def test_every_command_and_its_options_are_offered():
    assert set(cli.COMMANDS) < set(table()[""])
    assert table()["compare -"] == ("--out",)
    assert {"--force", "--no-force", "--data-dir"} <= set(table()["data prepare -"])
    assert "--alpha" in table()["data show -"] and "--mask-ratio" in table()["pretrain-decoder -"]
    assert table()["data =--data-dir"] == (completion.FILES,)


def test_values_are_those_that_are_taken():
    assert table()["run =--fidelity"] == ("intended", "paper", "released", "improved")
    assert table()["run =--adapter"] == tuple(ADAPTERS)
    assert table()["run =--tasks"] == (completion.NOTHING,)
    assert table()["run =--augment"] == ("true", "false")
    assert table()["convert =--dtype"] == ("float32", "float16", "bfloat16")


CASES = [
    (["ru"], ["run"]),
    (["run", "fedavg-p"], ["fedavg-prompt"]),
    (["run", "fppl", "--fid"], ["--fidelity"]),
    (["run", "fppl", "--fidelity", "pa"], ["paper"]),
    (["run", "fppl", "--prompt-l"], ["--prompt-length"]),
    (["run", "fppl", "--lora-r"], []),
    (["run", "fppl", "--adapter", "lora", "--lora-r"], ["--lora-rank"]),
    (["run", "fppl", "--adapter", "lora", "--prompt-l"], []),
    (["run", "./own.py", "--round"], ["--rounds"]),
    (["run", "./ow"], ["./own.py"]),
    (["run", "linear", "--tasks", ""], []),
    (["check", "linear", "--optimiser", "s"], ["sgd"]),
    (["data", "pre"], ["prepare"]),
    (["data", "prepare", "cub"], ["cub200"]),
    (["data", "list", "--"], ["--data-dir", "--help"]),
    (["convert", "./ow"], ["./own.py"]),
    (["compare", "./ow"], ["./own.py"]),
    (["completion", "f"], ["fish"]),
    (["list", "--"], ["--help"]),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("")


def script(shell):
    """The script as a file in the current folder, under the name that zsh wants."""
    Path("scripts").mkdir(exist_ok=True)
    path = Path("scripts/_fcljax").absolute()
    path.write_text(completion.SHELLS[shell](table()))
    return path


def said(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@needs("bash")
def test_bash_completes(here):
    ask = 'COMP_WORDS=(fcljax "$@"); COMP_CWORD=$#; _fcljax; printf "%s " "${COMPREPLY[@]}"; echo'
    calls = "\n".join(f"next {' '.join(map(repr, words))}" for words, _ in CASES)
    out = said("bash", "-c", f"source {script('bash')}; complete -p fcljax; next() {{ {ask}; }}\n{calls}")
    first, *lines = out.splitlines()
    assert first == "complete -F _fcljax fcljax"
    assert [line.split() for line in lines] == [expected for _, expected in CASES]


@needs("bash")
def test_bash_takes_an_equals_sign_for_a_word_of_its_own(here):
    ask = 'COMP_WORDS=(fcljax run linear --fidelity = i); COMP_CWORD=5; _fcljax; echo "${COMPREPLY[*]}"'
    assert said("bash", "-c", f"source {script('bash')}; {ask}").split() == ["intended", "improved"]


@needs("fish")
def test_fish_completes(here):
    calls = "\n".join(f"complete -C 'fcljax {' '.join(words)}'; echo ." for words, _ in CASES)
    out = said("fish", "--no-config", "-c", f"source {script('fish')}\n{calls}")
    found = [[line.partition("\t")[0] for line in part.split("\n") if line] for part in out.split(".\n")[:-1]]
    assert list(map(sorted, found)) == [sorted(expected) for _, expected in CASES]


@pytest.mark.parametrize(
    ("shell", "arguments", "setup"),
    [
        pytest.param("bash", ["--norc", "-i"], "source {path}", marks=needs("bash")),
        pytest.param(
            "zsh",
            ["-f", "-i"],
            "fpath=({path.parent} $fpath); autoload -U compinit; compinit -u -D",
            marks=needs("zsh"),
        ),
    ],
)
def test_the_tab_key_completes_at_a_terminal(shell, arguments, setup, here):
    path = script(shell)
    for typed, expected in (
        ("fcljax run fedavg-p", "fcljax run fedavg-prompt "),
        ("fcljax run fppl --fidelity=rel", "--fidelity=released "),
        ("fcljax run fppl --adapter lora --lora-ra", "--lora-rank "),
    ):
        assert expected in _tabbed([shell, *arguments], setup.format(path=path), typed, expected)


def _tabbed(command, setup, typed, expected):
    """What a terminal shows once `typed` and the tab key are pressed, up to what is expected."""
    terminal, end = os.openpty()
    ends = {"stdin": end, "stdout": end, "stderr": end}
    with subprocess.Popen(
        command, **ends, env=os.environ | {"TERM": "dumb"}, start_new_session=True
    ) as process:
        os.close(end)
        try:
            os.write(terminal, f"{setup}; echo rea''dy\n".encode())
            _until(terminal, "ready\r\n")
            os.write(terminal, f"{typed}\t".encode())
            return _until(terminal, expected)
        finally:
            process.kill()
            os.close(terminal)


def _until(terminal, expected):
    shown, end = b"", time.monotonic() + 60
    while expected.encode() not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536)
    return shown.decode(errors="replace")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_command_prints_the_script_and_nothing_else(shell, monkeypatch, capsys):
    known = table()
    monkeypatch.setattr(completion, "words", lambda commands: known if commands is cli.COMMANDS else {})
    assert cli.main(["completion", shell]) == 0
    assert capsys.readouterr().out == completion.SHELLS[shell](table())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ["try: fcljax completion bash"]), (["tcsh"], ["'tcsh'", "'zsh'"]), (["bash", "x"], ["'x'"])],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert cli.main(["completion", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(word in line for word in words)
