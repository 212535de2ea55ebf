"""The prompts of a data set's classes, for CLIP's text tower (`--class-prompts`)."""

import re
from collections.abc import Sequence

from fcljax.data.files.dataset import Dataset
from fcljax.data.files.names import DATASETS
from fcljax.errors import InputError, nearest
from fcljax.files import read_user_text
from fcljax.options import ClassPromptOptions, ContextOptions

FILE = "file:"
FILE_BYTES = 1 << 22  # most bytes of a file of prompts
EXAMPLE = "a photo of a {}"
# Numbers and WordNet's ids. A text tower knows no class by these, and its features of
# them would classify at chance.
_IDS = re.compile(r"[0-9]+|n[0-9]{8}")


def template_of(settings: object) -> str:
    """Return the template of the prompts that a run's settings ask for; "" for none.

    Raises:
      InputError: for a template without a place for the name.
    """
    if not isinstance(settings, ClassPromptOptions) or settings.class_prompts == "none":
        return ""
    template = settings.class_prompts
    if not template.startswith(FILE) and template.count("{}") != 1:
        raise InputError(
            f"class_prompts: {template!r} needs one {{}}, in place of the class's name; nearest: {EXAMPLE!r}"
        )
    return template


def contexts_of(settings: object) -> int:
    """Return the number of context vectors before a prompt."""
    if isinstance(settings, ContextOptions):
        return settings.context_length
    return 0


def prompts_of(template: str, dataset: Dataset) -> list[str]:
    """Return the prompt of each class [C].

    Args:
      template: as from `template_of`, not empty.
      dataset: whose classes have names.

    Raises:
      InputError: for classes whose names are not known, and a file that does not have the classes.
    """
    if template.startswith(FILE):
        return _prompts_in_file(template.removeprefix(FILE), dataset.class_names)
    names = [_spoken(name, dataset) for name in dataset.class_names]
    # numbers are names in the package's own data set of digits, and ids in a user's data
    of_user = dataset.name not in DATASETS
    if all(map(_IDS.fullmatch, names)) and (of_user or not names[0].isdecimal()):
        raise InputError(
            f"class_prompts: the classes of {dataset.name!r} have ids ({', '.join(names[:2])}) and no names; "
            "nearest: file:PATH, with a line CLASS, tab, PROMPT for each of them"
        )
    return [template.replace("{}", name) for name in names]


def _spoken(name: str, dataset: Dataset) -> str:
    """Return a class's name as words."""
    # in a mixture a class is called DATASET/CLASS
    if dataset.sources is not None:
        name = name.partition("/")[2]
    return " ".join(name.replace("_", " ").split())


def _prompts_in_file(path: str, names: Sequence[str]) -> list[str]:
    """Return the prompts of a file's lines "CLASS, tab, PROMPT", in the order of the classes.

    Raises:
      InputError: naming the file, the line and its fault.
    """
    where = f"class_prompts: {path!r}"
    prompts: dict[str, str] = {}
    for number, line in enumerate(read_user_text("class_prompts", path, FILE_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        name, tab, prompt = line.partition("\t")
        if not tab or not prompt.strip():
            raise InputError(f"{where}, line {number}: expected CLASS, tab, PROMPT")
        if name not in names:
            raise InputError(f"{where}, line {number}: no class is called {name!r}; {nearest(name, names)}")
        if name in prompts:
            raise InputError(f"{where}, line {number}: the class {name!r} appears twice; leave out one line")
        prompts[name] = prompt.strip()
    missing = [name for name in names if name not in prompts]
    if missing:
        raise InputError(f"{where} has no line for the class {missing[0]!r}, and {len(missing)} lack one")
    return [prompts[name] for name in names]
