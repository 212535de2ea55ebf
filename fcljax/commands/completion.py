"""`fcljax completion bash|zsh|fish`: a script that completes commands, methods, options and their values.

Every command is asked for its options (`ASK`), so what is completed is what is parsed. The answers become one
table of words that may come next; each shell gets the table as a function, and a few lines that look into it.

Keys of the table: "" for the commands; "run" for what may follow a command; "run -" for its options;
"run fppl -" for those that one method has besides; "run @lora -" for an adapter's; "run fppl@lora -" for what
only the two together have; "run fppl @" for the method's own adapter; "run =--fidelity" for an option's
values. The word FILES stands for names of files, NOTHING for a value that nobody can guess, such as a number.
"""

import dataclasses
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from fcljax.commands.arguments import ASK, Asked, parse
from fcljax.errors import InputError, choose
from fcljax.options import flag

FILES, NOTHING = ":files", ":nothing"

Command = Callable[[list[str]], int]
Words = dict[str, tuple[str, ...]]
Fields = Mapping[str, dataclasses.Field]


def completion(arguments: list[str], commands: Mapping[str, Command]) -> int:
    """`fcljax completion bash|zsh|fish`: prints the script for that shell.

    Raises:
      InputError: for another shell.
    """
    named = bool(arguments) and not arguments[0].startswith("-")
    parse({}, arguments[named:], "fcljax completion bash|zsh|fish", "A script that says where it goes.")
    if not named:
        raise InputError(f"shell: none given; choose from: {', '.join(SHELLS)}; try: fcljax completion bash")
    shell = SHELLS[choose("shell", arguments[0], SHELLS)]
    print(shell(words(commands)), end="")
    return 0


# ---- the table ---------------------------------------------------------------------------------------------


def words(commands: Mapping[str, Command]) -> Words:
    """What may come next, by what was typed; the module's text has the keys."""
    from fcljax.commands.data import SUBCOMMANDS
    from fcljax.data.files.sources import DATASETS
    from fcljax.methods import METHODS

    table: Words = {"": (*commands, "--help", "--version")}
    for name, command in commands.items():
        table |= _by_method(name, command) if name in ("run", "check") else _options(name, asked(command, []))
    for name, command in SUBCOMMANDS.items():
        named = name != "list"
        table |= _options(f"data {name}", asked(command, ["digits"] if named else []), "data")
        if named:
            table[f"data {name}"] = (*(each for each in DATASETS if ":" not in each), FILES)
    methods = (*METHODS, FILES)
    table |= {"run": methods, "check": methods, "data": tuple(SUBCOMMANDS), "completion": tuple(SHELLS)}
    return table | dict.fromkeys(("compare", "convert", "doctor"), (FILES,))


def asked(command: Command, arguments: Sequence[str]) -> Fields:
    """The options that a command has after these arguments; none where it wants another word first."""
    try:
        command([*arguments, ASK])
    except Asked as answer:
        return answer.fields
    except InputError:
        return {}
    raise AssertionError("a command went to work though it was asked for its options")


def _options(key: str, fields: Fields, command: str | None = None) -> Words:
    """The options of a command, and their values."""
    found = {f"{key} -": _flags(fields.values())} if fields else {}
    return found | {f"{command or key} ={flag(name)}": values for name, values in _values(fields).items()}


def _by_method(command: str, function: Command) -> Words:
    """The options of `run` and `check`, which depend on method and adapter: those of all, of a method, of an
    adapter, and of the two together."""
    from fcljax.adapters import ADAPTERS
    from fcljax.methods import METHODS

    pairs = [(m, a) for m, entry in METHODS.items() for a in ADAPTERS if a not in entry.excludes]
    of = {(m, a): asked(function, [m, "--adapter", a]) for m, a in pairs}
    shared = _common(of.values())
    own = {m: _common(of[pair] for pair in pairs if pair[0] == m) - shared for m in METHODS}
    adapters = {a: _common(of[pair] for pair in pairs if pair[1] == a) - shared for a in ADAPTERS}
    table: Words = {}
    for (m, a), fields in of.items():
        for name, known in _values(fields).items():  # methods may have options of one name and other values
            key = f"{command} ={flag(name)}"
            table[key] = tuple(dict.fromkeys((*table.get(key, ()), *known)))
        both = set(fields) - shared - own[m] - adapters[a]
        for key, names in (("", shared), (f" {m}", own[m]), (f" @{a}", adapters[a]), (f" {m}@{a}", both)):
            table[f"{command}{key} -"] = _flags(field for name, field in fields.items() if name in names)
        table[f"{command} {m} @"] = (METHODS[m].adapter,)
    return {key: found for key, found in table.items() if found}


def _common(sets: Iterable[Fields]) -> set[str]:
    return set.intersection(*(set(fields) for fields in sets))


def _flags(fields: Iterable[dataclasses.Field]) -> tuple[str, ...]:
    """Options as they are typed; a switch has one to turn it off too."""
    flags = []
    for field in fields:
        flags += [flag(field.name)] + ([flag(f"no_{field.name}")] if field.type is bool else [])
    return tuple(flags)


def _values(fields: Fields) -> Words:
    """What may follow each option that takes a value."""
    return {name: _values_of(field) for name, field in fields.items() if field.type is not bool}


def _values_of(field: dataclasses.Field) -> tuple[str, ...]:
    from fcljax.adapters import ADAPTERS
    from fcljax.data.files.sources import DATASETS
    from fcljax.models.networks import CONVNETS
    from fcljax.models.vit import VITS

    named = {
        "adapter": tuple(ADAPTERS),
        "backbone": ("auto", *VITS, *CONVNETS),
        "dataset": tuple(name for name in DATASETS if ":" not in name),
    }
    parts = typing.get_args(field.type)
    kinds = (field.type, *parts)
    choices = [typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal]
    if field.name in named:
        return named[field.name]
    if choices:
        return tuple(map(str, choices[0]))
    if bool in parts:
        return "true", "false"
    return (FILES,) if str in kinds else (NOTHING,)


# ---- shells ------------------------------------------------------------------------------------------------


def _cases(table: Words) -> dict[tuple[str, ...], list[str]]:
    """Keys that have the same words, by the words."""
    found: dict[tuple[str, ...], list[str]] = {}
    for key, known in table.items():
        found.setdefault(known, []).append(key)
    return found


def _bourne(table: Words) -> str:
    """The table as a function for bash and zsh, and the one that finds what may come next."""
    lines = ["_fcljax_words() {", '    case "$1" in']
    for known, keys in _cases(table).items():
        patterns = "|".join(map(shlex.quote, keys))
        lines.append(f"        {patterns}) printf '%s\\n' {shlex.join(known)} ;;")
    return "\n".join([*lines, "    esac", "}", ""]) + _BOURNE


# arguments: the word in hand, then the words between fcljax and it
_BOURNE = """
_fcljax_next() {
    local cur="$1" word prev adapter found
    shift
    if [ $# -eq 0 ]; then _fcljax_words ""; return; fi
    for word in "$@"; do
        case "$prev" in --adapter) adapter="$word" ;; esac
        case "$word" in --adapter=*) adapter="${word#--adapter=}" ;; esac
        prev="$word"
    done
    found="$(_fcljax_words "$1 =$prev")"
    if [ -n "$found" ]; then printf '%s\\n' "$found"; return; fi
    case "$cur" in
        -*) ;;
        *)
            found=
            if [ $# -eq 1 ]; then found="$(_fcljax_words "$1")"; fi
            if [ $# -eq 2 ]; then found="$(_fcljax_words "$1 $2")"; fi
            case "$1" in compare|convert|doctor) found="$(_fcljax_words "$1")" ;; esac
            if [ -n "$found" ]; then printf '%s\\n' "$found"; return; fi ;;
    esac
    adapter="${adapter:-$(_fcljax_words "$1 $2 @")}"
    _fcljax_words "$1 -"
    _fcljax_words "$1 $2 -"
    _fcljax_words "$1 @$adapter -"
    _fcljax_words "$1 $2@$adapter -"
    printf '%s\\n' --help
}
"""


def bash(table: Words) -> str:
    """The script for bash. Bash takes --option=value for three words, which are joined here."""
    return f"""# fcljax completion bash > ~/.local/share/bash-completion/completions/fcljax
{_bourne(table)}
_fcljax() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" word typed=() found
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [ "$word" != "=" ]; then typed+=("$word"); fi
    done
    if [ "$cur" = "=" ]; then cur=; fi
    found="$(_fcljax_next "$cur" "${{typed[@]}}")"
    COMPREPLY=()
    case "$found" in
        *{FILES}*) compopt -o filenames 2> /dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    esac
    found="${{found//{FILES}/}}"
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -W "${{found//{NOTHING}/}}" -- "$cur")
}}
complete -F _fcljax fcljax
"""


def zsh(table: Words) -> str:
    """The script for zsh."""
    return f"""#compdef fcljax
# fcljax completion zsh > "${{fpath[1]}}/_fcljax"
{_bourne(table)}
_fcljax() {{
    local cur="${{words[CURRENT]}}" flag=
    local -a typed=("${{(@)words[2,CURRENT-1]}}") found
    if [[ "$cur" == --*=* ]]; then
        flag="${{cur%%=*}}"
        typed+=("$flag")
        cur="${{cur#*=}}"
        compset -P '*='
    fi
    found=("${{(@f)$(_fcljax_next "$cur" "${{typed[@]}}")}}")
    if (( ${{found[(Ie){FILES}]}} )); then _files; fi
    found=("${{(@)found:#:*}}")
    compadd -a found
}}
if [ "$funcstack[1]" = "_fcljax" ]; then _fcljax "$@"; else compdef _fcljax fcljax; fi
"""


def fish(table: Words) -> str:
    """The script for fish."""
    quote = lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    row = lambda names: " ".join(map(quote, names))
    cases = "".join(
        f"        case {row(keys)}\n            printf '%s\\n' {row(known)}\n"
        for known, keys in _cases(table).items()
    )
    return f"""# fcljax completion fish > ~/.config/fish/completions/fcljax.fish
function _fcljax_words
    switch "$argv[1]"
{cases}    end
end
{_FISH}"""


_FISH = """
function _fcljax_next
    set -l typed (commandline -opc)[2..-1]
    set -l cur (commandline -ct)
    set -l prefix
    if string match -q -- '--*=*' $cur
        set -l parts (string split -m 1 = -- $cur)
        set typed $typed $parts[1]
        set prefix "$parts[1]="
        set cur $parts[2]
    end
    for word in (_fcljax_candidates "$cur" $typed)
        switch $word
            case ':nothing'
            case ':files'
                for path in (__fish_complete_path "$cur")
                    printf '%s%s\\n' "$prefix" "$path"
                end
            case '*'
                printf '%s%s\\n' "$prefix" $word
        end
    end
end

function _fcljax_candidates
    set -l cur $argv[1]
    set -l typed $argv[2..-1]
    if test (count $typed) -eq 0
        _fcljax_words ''
        return
    end
    set -l adapter
    set -l prev
    for word in $typed
        if test "$prev" = --adapter
            set adapter $word
        end
        if string match -q -- '--adapter=*' $word
            set adapter (string replace -- '--adapter=' '' $word)
        end
        set prev $word
    end
    set -l found (_fcljax_words "$typed[1] =$prev")
    if test (count $found) -eq 0; and not string match -q -- '-*' "$cur"
        if test (count $typed) -eq 1
            set found (_fcljax_words "$typed[1]")
        else if test (count $typed) -eq 2
            set found (_fcljax_words "$typed[1] $typed[2]")
        end
        if contains -- $typed[1] compare convert doctor
            set found (_fcljax_words "$typed[1]")
        end
    end
    if test (count $found) -gt 0
        printf '%s\\n' $found
        return
    end
    set -l method "$typed[2]"
    if test -z "$adapter"
        set adapter (_fcljax_words "$typed[1] $method @")
    end
    _fcljax_words "$typed[1] -"
    _fcljax_words "$typed[1] $method -"
    _fcljax_words "$typed[1] @$adapter -"
    _fcljax_words "$typed[1] $method@$adapter -"
    printf '%s\\n' --help
end
complete -c fcljax -f -a '(_fcljax_next)'
"""

SHELLS: dict[str, Callable[[Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
