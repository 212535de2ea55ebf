"""Run the command `fcljax completion bash|zsh|fish`: a script for completion in the
shell."""

from fcljax.commands.arguments import Words, parse
from fcljax.errors import InputError, choose

SHELLS = ("bash", "zsh", "fish")


def completion(arguments: list[str]) -> int:
    """Run `fcljax completion bash|zsh|fish`: print the script for that shell.

    Raises:
      InputError: for another shell.
    """
    about = "Print a script with which the shell completes commands, methods, options and values."
    shells, _ = parse({}, arguments, ["completion"], about, Words("|".join(SHELLS), SHELLS, files=False))
    if not shells:
        raise InputError(f"shell: none given; choose from: {', '.join(SHELLS)}; try: fcljax completion bash")
    if len(shells) > 1:
        raise InputError(f"shell: unexpected argument {shells[1]!r}; try: fcljax completion {shells[0]}")
    shell = choose("shell", shells[0], SHELLS)

    # after the checks: an error needs no import
    import argcomplete

    print(argcomplete.shellcode(["fcljax"], shell=shell))
    return 0
