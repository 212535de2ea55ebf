"""Run the command `fcljax list`: what can be named on the command line."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fcljax.commands.arguments import parse
from fcljax.options import flag
from fcljax.terminal import add_row, new_table


def list_(arguments: list[str]) -> int:
    """Run `fcljax list`: what can be named on the command line, and what does not go
    together."""
    about = "List methods, adapters, data sets, backbones and incompatible combinations."
    parse({}, arguments, ["list"], about)

    from fcljax.adapters import ADAPTERS
    from fcljax.choices import CHOICES, summaries
    from fcljax.data.files.names import DATASETS
    from fcljax.data.geometry import PIPELINES
    from fcljax.methods import METHODS
    from fcljax.models.shapes import CONVNETS, PACKAGED, VITS

    backbones = {
        name: f"{vit.depth} blocks, width {vit.width}, patch {vit.patch}, {vit.image_size} px; "
        + ("weights are packaged" if name in PACKAGED else "needs --checkpoint")
        for name, vit in VITS.items()
    } | {
        name: f"features of width {net.width}, {net.image_size} px; random values without --checkpoint"
        for name, net in CONVNETS.items()
    }
    # names that are no fixed ones: timm's and the hub's
    backbones["NAME.TAG or OWNER/NAME"] = "weights of timm or the hub; `fcljax weights get` downloads them"
    methods = [(name, entry.adapter, entry.summary) for name, entry in METHODS.items()]
    adapters = {name: entry.summary for name, entry in ADAPTERS.items()}
    incompatible = []
    for name, entry in METHODS.items():
        # a line for each reason, since a method mostly excludes several adapters for one
        adapters_by_reason: dict[str, list[str]] = {}
        for adapter, why in entry.excludes.items():
            adapters_by_reason.setdefault(why, []).append(adapter)
        for why, excluded in adapters_by_reason.items():
            incompatible.append((name, f"--adapter {', '.join(excluded)}", why))
    for name, entry in METHODS.items():
        if entry.merges:
            incompatible.append((name, "--aggregator", f"{entry.merges}: mean alone"))
    console = Console()
    console.print(_listing("methods", methods, ("method", "adapter", "what it is")))
    by_title = {
        "adapters": adapters,
        "data sets": DATASETS,
        "backbones": backbones,
        "pipelines": PIPELINES,
        **{flag(name): summaries(name) for name in CHOICES},
    }
    for title, rows in by_title.items():
        console.print(_listing(title, list(rows.items())))
    console.print(_listing("incompatible combinations", incompatible, ("method", "with", "why")))
    return 0


def _listing(
    title: str,
    rows: Sequence[Sequence[str]],
    columns: Sequence[str] = ("", ""),
) -> Table:
    """Return a table whose names are never broken; the last column takes the rest of
    the width."""
    table = new_table(*columns, title=title)
    table.show_header = any(columns)
    # names are copied to the command line, and a broken one is of no use
    table.columns[0].no_wrap = True
    for row in rows:
        add_row(table, *row)
    return table
