#!/usr/bin/env python3
"""Make the packaged text data: docstrings of Python's standard library, by package.

    python experiments/text_data.py fcljax/assets/docstrings.json.gz

The classes are ten packages, with at most 150 docstrings each, in the order of files and lines. Of every text
the first 64 tokens are kept. The docstrings of all other modules train the packaged text encoder
(`text_encoder.py`): no text and no class is in both.
"""

import ast
import gzip
import json
import sys
import sysconfig
from pathlib import Path

CLASSES = (
    "asyncio",
    "distutils",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "tkinter",
    "unittest",
    "xml",
)
MOST = 150
FEWEST_WORDS = 6  # of a docstring
MOST_CHARACTERS = 400
NO_LIBRARY = ("site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data")
LICENCE = (
    "Docstrings of Python's standard library, Copyright (c) 2001-2023 Python Software Foundation; All Rights "
    "Reserved. Python Software Foundation License Version 2, https://docs.python.org/3/license.html"
)


def docstrings() -> dict[str, list[str]]:
    """Return the docstrings of each module or package below the standard library, without repetitions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, list[str]] = {}
    known: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if set(parts) & set(NO_LIBRARY):
            continue
        for text in of_file(path):
            if text not in known and len(text.split()) >= FEWEST_WORDS:
                known.add(text)
                texts.setdefault(parts[0].removesuffix(".py"), []).append(text)
    return texts


def of_file(path: Path) -> list[str]:
    """Return the docstrings of a file, each in one line; none for a file that Python cannot parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [" ".join(text.split())[:MOST_CHARACTERS] for text in found if text]


def main() -> None:
    """Write the file that the argument names."""
    texts = docstrings()
    content = {
        "licence": LICENCE,
        "python": sys.version.split()[0],
        "texts": {name: texts[name][:MOST] for name in CLASSES},
    }
    text = json.dumps(content, indent=0, ensure_ascii=False)
    # without the time, so that the same texts give the same file
    Path(sys.argv[1]).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print({name: len(kept) for name, kept in content["texts"].items()})


if __name__ == "__main__":
    main()
