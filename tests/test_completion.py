"""Completion offers what is parsed, by the parser itself; and a real shell gets it."""

import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import argcomplete
import pytest
import small_runs

from fcljax import cli, config
from fcljax.adapters import ADAPTERS
from fcljax.commands import completion, running
from fcljax.methods import METHODS
from fcljax.options import flag, is_read
from fcljax.settings import HostOptions

MORE = {
    flag(each.name)
    for options in (running.Paths(), HostOptions())
    for each in dataclasses.fields(options)
    if is_read(each, options)
}


# Asks for each line as argcomplete's script does, in one process of its own: argcomplete takes file number 9.
ASK = """
import io, json, os, sys
import argcomplete
from fcljax import cli

original, answers = argcomplete.autocomplete, []
argcomplete.autocomplete = lambda parser, **more: original(
    parser, exit_method=sys.exit, output_stream=stream, **more
)
for line in json.load(sys.stdin):
    os.dup2(2, 9)
    stream = io.StringIO()
    os.environ |= {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "|", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " =:"}
    try:
        cli.main()
    except SystemExit:
        pass
    answers.append([word.strip() for word in stream.getvalue().split("|") if word])
print(json.dumps(answers))
"""


def offered(lines, folder):
    """What a shell is told for each line, in a folder with the file own.py."""
    (folder / "own.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps([f"fcljax {line}" for line in lines]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(small_runs.ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.long
def test_a_method_has_its_options_on_every_adapter_and_no_others(method, tmp_path):
    adapters = [name for name in ADAPTERS if name not in METHODS[method].excludes]
    lines = [f"run {method} --adapter {adapter} --" for adapter in adapters]
    for adapter, words in zip(adapters, offered(lines, tmp_path), strict=True):
        usual = config.preset(method, adapter)
        fields = [field for field in dataclasses.fields(type(usual)) if is_read(field, usual)]
        options = {flag(each.name) for each in fields} | MORE | {"--help"}
        options |= {flag(f"no_{each.name}") for each in fields if each.type is bool}
        assert set(words) == options - {"--method"} and len(words) == len(set(words))


CASES = [
    ("", [*cli.COMMANDS, "--version"]),
    ("ru", ["run"]),
    ("run fedavg-p", ["fedavg-prompt"]),
    ("run fppl --fid", ["--fidelity"]),
    ("run fppl --fidelity pa", ["paper"]),
    ("run fppl --fidelity=pa", ["paper"]),
    ("run fppl --prompt-l", ["--prompt-length"]),
    ("run fppl --lora-r", []),
    ("run fppl --adapter lora --lora-r", ["--lora-rank"]),
    ("run fppl --adapter=lora --lora-r", ["--lora-rank"]),
    ("run fppl --adapter lora --prompt-l", []),
    ("run fppl --adapter ", list(ADAPTERS)),
    ("run fppl --dataset cub", ["cub200"]),
    ("run fppl --augment ", ["true", "false"]),
    ("run ./ow", ["./own.py"]),
    ("run linear --tasks ", []),
    ("check linear --optimiser s", ["sgd"]),
    ("data pre", ["prepare"]),
    ("data prepare cub", ["cub200"]),
    ("data list --", ["--help", "--data-dir"]),
    ("data show digits --alph", ["--alpha"]),
    ("convert ./ow", ["./own.py"]),
    ("convert a --dtype ", ["float32", "float16", "bfloat16"]),
    ("compare ./ow", ["./own.py"]),
    ("completion f", ["fish"]),
    ("list --", ["--help"]),
    ("absent ", []),
]


@pytest.mark.long
def test_what_may_come_next_is_what_is_parsed(tmp_path):
    found = offered([typed for typed, _ in CASES], tmp_path)
    assert dict(zip([typed for typed, _ in CASES], found, strict=True)) == dict(CASES)


# ---- real shells -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a program `fcljax`, which is this one."""
    monkeypatch.chdir(tmp_path)
    program = Path("bin/fcljax")
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(small_runs.ROOT)!r})\n"
        "from fcljax.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent.absolute()}:{os.environ['PATH']}")


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@needs("fish")
def test_fish_completes(here):
    asked = "fcljax completion fish | source; complete -C 'fcljax run fedavg-p'"
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["fedavg-prompt"]


@pytest.mark.parametrize(
    ("shell", "arguments", "setup"),
    [
        pytest.param("bash", ["--norc", "-i"], "", marks=needs("bash")),
        pytest.param("zsh", ["-f", "-i"], "autoload -U compinit; compinit -u -D; ", marks=needs("zsh")),
    ],
)
def test_the_tab_key_completes_at_a_terminal(shell, arguments, setup, here):
    setup += f'eval "$(fcljax completion {shell})"'
    for typed, expected in (
        ("fcljax run fedavg-p", "fcljax run fedavg-prompt "),
        ("fcljax data list --data", "--data-dir "),
    ):
        assert expected in _tabbed([shell, *arguments], setup, typed, expected)


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
def test_the_command_prints_the_script_and_nothing_else(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert capsys.readouterr().out == argcomplete.shellcode(["fcljax"], shell=shell) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], ["try: fcljax completion bash"]), (["tcsh"], ["'tcsh'", "'zsh'"]), (["bash", "x"], ["'x'"])],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert cli.main(["completion", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(word in line for word in words)
