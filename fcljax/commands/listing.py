"""`fcljax list`: what can be named on the command line."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from fcljax.commands.arguments import parse
from fcljax.terminal import add_row, plain_text


def list_(arguments: list[str]) -> int:
    """`fcljax list`: what can be named on the command line, and what does not go together."""
    parse(
        {}, arguments, ["list"], "List methods, adapters, data sets, backbones and incompatible combinations."
    )

    from fcljax.adapters import ADAPTERS
    from fcljax.data.files.names import DATASETS
    from fcljax.data.geometry import PIPELINES
    from fcljax.methods import METHODS
    from fcljax.models.shapes import CONVNETS, PACKAGED, VITS
    from fcljax.settings import ATTACKS

    backbones = {
        name: f"{vit.depth} blocks, width {vit.width}, patch {vit.patch}, {vit.image_size} px; "
        + ("weights are packaged" if name in PACKAGED else "needs --checkpoint")
        for name, vit in VITS.items()
    } | {
        name: f"features of width {each.width}, {each.image_size} px; random values without --checkpoint"
        for name, each in CONVNETS.items()
    }
    backbones["NAME.TAG or OWNER/NAME"] = "weights of timm or the hub; `fcljax weights get` downloads them"
    methods = [(name, entry.adapter, entry.summary) for name, entry in METHODS.items()]
    adapters = {name: entry.summary for name, entry in ADAPTERS.items()}
    excluded = [
        (name, f"--adapter {', '.join(a for a, each in entry.excludes.items() if each == why)}", why)
        for name, entry in METHODS.items()
        for why in dict.fromkeys(entry.excludes.values())
    ]
    merging = [(name, "--aggregator", f"{e.merges}: mean alone") for name, e in METHODS.items() if e.merges]
    console = Console()
    console.print(_listing("methods", methods, ("method", "adapter", "what it is")))
    plain = {
        "adapters": adapters,
        "data sets": DATASETS,
        "backbones": backbones,
        "pipelines": PIPELINES,
        "attacks": ATTACKS,
    }
    for title, rows in plain.items():
        console.print(_listing(title, list(rows.items())))
    console.print(_listing("incompatible combinations", [*excluded, *merging], ("method", "with", "why")))
    return 0


def _listing(title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ("", "")) -> Table:
    """A table without lines whose names are never broken; the last column takes the rest of the width."""
    table = Table(
        title=plain_text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=any(columns),
    )
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index == 0)
    for row in rows:
        add_row(table, *row)
    return table
