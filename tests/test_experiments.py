"""The papers' tables of the package: every row is a run with the paper's settings and upload."""

import dataclasses
import json
import re
import typing

import jax
import pytest
import small_runs

from fcljax import config
from fcljax.commands import running
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated import communication
from fcljax.models.mae import DecoderConfig, autoencoder, decoder_shapes
from fcljax.models.networks import make_network
from fcljax.models.shapes import CONVNETS, VITS
from fcljax.models.vit import parameter_shapes, vit_network
from fcljax.runs.build import Experiment, make_method
from fcljax.runs.traffic import payload_shapes, traffic_by_round
from fcljax.scenario import Scenario
from fcljax.settings import Fidelity
from fcljax.studies import paper_tables as tables
from fcljax.studies import papers, reproduce
from fcljax.studies.papers import Row
from fcljax.types import Frozen, Sizes

FOLDER = papers.FOLDER
FILES = sorted(FOLDER.glob("*.yaml"))
PAPERS = {path.stem: papers.parse_paper(str(path), config.load_yaml(path)) for path in FILES}
TABLES = [(system, table) for system, paper in PAPERS.items() for table in paper.tables]
COLUMNS = {
    f"{column.system} {column.key}": column
    for system, table in TABLES
    for column in papers.columns(str(FOLDER / f"{system}.yaml"), PAPERS[system], table)
}
CLASSES = {
    "imagenet_r_hepco": 200,
    "domainnet": 345,
    "imagenet_r": 200,
    "cub200": 200,
    "cifar100": 100,
    "tiny_imagenet": 200,
    "mix:cifar10+cifar100+folder:mnist+folder:svhn+fashion_mnist+folder:traffic_signs+folder:facescrub"
    "+folder:not_mnist": 293,
}
TOTAL_ROUNDS = {"imagenet_r": {200}, "cub200": {200}, "cifar100": {200, 400}}


def columns(system):
    """The columns of a paper's tables."""
    return [column for column in COLUMNS.values() if column.system == system]


def own(column):
    """The settings of the paper's own method without options."""
    method = column.paper.method
    return reproduce.settings_of(column, Row(method, {}, ()))


@pytest.fixture
def column(request):
    """A column by its name."""
    return COLUMNS[request.param]


def some(prefix, step):
    """A few of the columns whose names begin so, all in `make test-long`."""
    names = [name for name in COLUMNS if name.startswith(prefix)]
    return pytest.mark.parametrize("column", small_runs.some(names, names[::step]), indirect=True)


def test_every_paper_is_there():
    assert list(PAPERS) == ["fppl", "hepco", "pilora", "pmae", "vfcl"]
    assert all(paper.method == name for name, paper in PAPERS.items())


def test_every_row_of_fppl_in_the_papers_tables_is_there():
    sets = ("table1", "figure3a")
    names = {f"{table} {name}" for table in sets for name in ("imagenet-r", "cub-200")} | {"table2"}
    names |= {f"table3 {parts}" for parts in ("none", "u", "f", "uf", "d", "ud", "fd", "ufd")}
    names |= {f"table4 {clients}-clients" for clients in (10, 20, 30, 40)}
    names |= {f"{table} {name}" for table in ("table5", "figure3b") for name in ("iid", "beta0.5")}
    names |= {f"figure4 {data}{alpha}" for data in "rc" for alpha in (0.01, 0.05, 0.1, 0.5, 1)}
    assert {column.key for column in columns("fppl")} == names
    baselines = ["ewc", "lwf", "l2p", "dualprompt", "coda-prompt", "fedslca", "glfc", "fppl"]
    for table in ("table1", "figure3b"):
        (first, *_) = papers.find_columns(FOLDER, "fppl", table)
        assert [row.method for row in first.rows] == baselines


@some("", 4)
def test_every_row_is_a_run(column):
    assert column.entry.title and column.entry.source and column.rows
    assert len(set(column.seeds)) == len(column.seeds)
    for row in column.rows:
        cfg = reproduce.settings_of(column, row)
        given = running.parse_run(row.method, papers.words_of(row.options), "run", "")
        assert {name: getattr(cfg, name) for name in given} == given
        assert cfg.seed == column.seeds[0]
        shared = ("dataset", "checkpoint", "tasks", "fidelity", "lr", "rounds")
        assert all(
            getattr(cfg, name) == column.settings.get(name, getattr(cfg, name))
            for name in shared
            if name not in given
        )


@pytest.mark.long
def test_every_metric_is_a_summarys():
    summary = json.loads((small_runs.finished("linear") / "summary.json").read_text())
    metrics = {metric for column in COLUMNS.values() for metric in column.metrics}
    assert len(metrics) > 5 and all(tables.value_of(summary, metric) is not None for metric in metrics)


def test_what_is_not_a_rows_own_is_dropped_and_nothing_else():
    (column,) = papers.find_columns(FOLDER, "vfcl", "table1")
    row = next(row for row in column.rows if row.method == "glfc")
    cfg = reproduce.settings_of(column, row)
    assert (cfg.lr, cfg.full_lr, cfg.optimiser) == (0.01, 0.01, "sgd") and not hasattr(cfg, "prior_weight")
    first, *_ = papers.find_columns(FOLDER, "hepco", "table1")
    cfg = reproduce.settings_of(first, first.rows[1])
    assert (cfg.partition, cfg.clients, cfg.rounds, cfg.epochs) == ("iid", 1, 1, 20)
    wrong = column._replace(settings=dict(column.settings) | {"prior_wait": 1})
    with pytest.raises(InputError, match=r"vfcl.yaml: table1: row 'glfc': .*unknown key 'prior_wait'"):
        reproduce.settings_of(wrong, row)


@some("fppl", 5)
def test_settings_are_the_papers(column):
    cfg = own(column)
    assert cfg.tasks * cfg.rounds in TOTAL_ROUNDS[cfg.dataset]
    assert CLASSES[cfg.dataset] % cfg.tasks == 0
    assert (cfg.backbone, cfg.image_size, cfg.normalise) == ("vit_b16", 224, "unit")
    assert (cfg.epochs, cfg.batch_size, cfg.server_epochs, cfg.server_batch_size) == (5, 128, 5, 128)
    assert cfg.lr == cfg.server_lr


@some("fppl", 5)
def test_nothing_that_the_paper_fixes_is_left_to_a_default(column):
    values = set(column.settings)
    fixed = {"tasks", "clients", "partition", "rounds", "epochs", "batch_size", "lr", "seed", "fidelity"}
    # a preset may change; what made the table's numbers does not
    readings = [
        dataclasses.asdict(config.preset("fppl", fidelity=name)) for name in typing.get_args(Fidelity)
    ]
    disputed = {name for name in readings[0] if len({reading[name] for reading in readings}) > 1}
    disputed -= {"positions"}  # which weights decide
    assert fixed | {"normalise", "augment", "alpha"} | disputed <= values


def network_with_shapes(name):
    """A backbone and the shapes of its parameters."""
    if name in CONVNETS:
        network = make_network(CONVNETS[name], (0.0,) * 3, (1.0,) * 3)
        return network, Frozen(jax.eval_shape(network.init, jax.random.key(0)))
    vit, decoder = VITS[name], DecoderConfig()
    network = vit_network(vit, autoencoder=autoencoder(vit, decoder))
    return network, Frozen(parameter_shapes(vit), decoder_shapes(decoder))


@some("", 30)
def test_the_upload_is_what_a_client_sends(column):
    method, cfg = column.paper.method, own(column)
    classes = CLASSES[cfg.dataset]
    sizes = Sizes(classes, cfg.tasks, classes // cfg.tasks, cfg.clients, cfg.rounds, examples=100)
    network, frozen = network_with_shapes(cfg.backbone)
    built = make_method(cfg, sizes, network)
    nothing = Scenario(None, None, make_tasks(classes, cfg.tasks), None, None)
    unused = Experiment(*[None] * len(Experiment._fields))
    key = jax.random.key(0)
    exp = unused._replace(method=built, frozen=frozen, scenario=nothing, sizes=sizes, key=key)
    sent, *others = traffic_by_round(exp, payload_shapes(exp))
    assert not any(other.upload_scalars for other in others)
    restore = payload_shapes(exp).uploads[0].gather if method == "pmae" else ()  # images, counted apart
    assert column.upload == sent.upload_scalars - communication.count_scalars(restore)


def test_the_columns_of_table_three_turn_the_parts_on_that_their_names_say():
    for column in papers.find_columns(FOLDER, "fppl", "table3"):
        cfg = own(column)
        on = {"u": not cfg.wo_unified, "f": not cfg.wo_fusion, "d": not cfg.wo_debias}
        assert "".join(part for part, is_on in on.items() if is_on) == column.name.replace("none", "")


# ---- HePCo -------------------------------------------------------------------------------------------------


def test_every_table_of_hepco_has_its_columns():
    sets = ("cifar-100", "imagenet-r", "domainnet")
    names = [f"table1 {name}" for name in sets] + ["table3", "table4"]
    names += [f"figure3 k{ratio}" for ratio in (0.2, 0.4, 0.6, 0.8, 1.0)]
    names += [f"table2 {name}_{imbalance}" for name in sets for imbalance in (0.05, 0.01)]
    assert {column.key for column in columns("hepco")} == set(names)


@some("hepco", 4)
def test_the_settings_of_hepco_are_the_papers(column):
    cfg = own(column)
    assert (cfg.clients, cfg.rounds, cfg.epochs, cfg.batch_size, cfg.lr) == (5, 10, 10, 64, 1e-3)
    ratio = float(column.name[1:]) if column.table == "figure3" else 0.6
    assert (cfg.partition, cfg.split_ratio, cfg.category_ratio) == ("sampled", 0.1, ratio)
    assert (cfg.pool_size, cfg.pool_length, cfg.pool_blocks) == (100, 20, 5)
    assert (cfg.backbone, cfg.normalise, cfg.aggregator) == ("vit_b16", "release", "uniform")
    assert cfg.imbalance == (float(column.name.rpartition("_")[2]) if column.table == "table2" else 1)
    for baseline in ("fedavg-prompt", "fedprox", "fed-cprompt", "fedavg-ft", "fedlwf-mc", "cfed", "target"):
        assert reproduce.settings_of(column, Row(baseline, {}, ())).rounds == 10


# ---- pMAE --------------------------------------------------------------------------------------------------

ALPHAS = ("0.5", "0.1", "0.05")


def test_every_table_and_figure_of_pmae_has_its_columns():
    names = [f"table{table} {kind}_b{x}" for table in (1, 2) for kind in ("sup", "ibot") for x in ALPHAS]
    names += [f"table{table} b{x}" for table in (3, 4) for x in ALPHAS] + ["figure7", "figure8"]
    names += [f"figure{figure} {kind}_b{x}" for figure in (5, 6) for kind in ("sup", "ibot") for x in ALPHAS]
    assert {column.key for column in columns("pmae")} == set(names)


@some("pmae", 7)
def test_the_settings_of_pmae_are_the_papers(column):
    cfg = own(column)
    assert (cfg.tasks, cfg.clients, cfg.rounds, cfg.epochs, cfg.batch_size) == (20, 10, 10, 5, 128)
    assert (cfg.restore_images, cfg.mask_ratio, cfg.tune_epochs, cfg.tune_batch) == (4, 0.75, 5, 128)
    assert (cfg.lr, cfg.tune_lr, cfg.vpt_length, cfg.vpt_blocks, cfg.recon_length) == (1e-3, 1e-3, 20, 5, 5)
    assert (cfg.backbone, cfg.normalise, cfg.partition) == ("vit_b16", "unit", "dirichlet")
    ibot = column.table in ("table4", "figure8") or "ibot" in column.name
    assert ("ibot" in cfg.checkpoint) == ibot
    assert cfg.alpha == (float(column.name.rpartition("b")[2]) if column.name else 0.5)
    pairs = [f"{name}{more}" for name in ("l2p", "dualprompt", "coda-prompt") for more in ("", "-pmae")]
    for method in pairs:
        assert reproduce.settings_of(column, Row(method, {}, ())).rounds == 10


# ---- VFCL --------------------------------------------------------------------------------------------------


def test_every_table_of_vfcl_with_accuracies_is_there():
    names = {f"table{i}" for i in (1, 2, 4, 5, 6, 7, 10, 11)}
    names |= {f"figure{name}" for name in ("4a", "4b", "8", "10", "12")}
    names |= {f"figure5 {tasks}-tasks" for tasks in (5, 10, 20)}
    assert {column.key for column in columns("vfcl")} == names


@some("vfcl", 3)
def test_the_settings_of_vfcl_are_the_papers(column):
    cfg = own(column)
    tasks = int(column.name.partition("-")[0]) if column.table == "figure5" else 10
    assert (cfg.tasks, cfg.epochs, cfg.batch_size, cfg.lr, cfg.full_lr) == (tasks, 5, 32, 0.01, 0.01)
    assert (cfg.prior_weight, cfg.global_share, cfg.mc_samples, cfg.exemplars) == (1.0, 0.5, 1, 20)
    assert (cfg.partition, cfg.optimiser, cfg.momentum) == ("private", "sgd", 0.0)
    fedweit = column.key in ("table5", "table6")
    assert (cfg.clients, cfg.rounds) == ((5, 20) if fedweit else (10, 10))
    assert (cfg.task_pool != "same") == fedweit and (getattr(cfg, "category_ratio", None) == 0.5) == (
        not fedweit
    )
    assert cfg.backbone == ("densenet121" if column.key in ("table10", "table11") else "resnet18")


# ---- PILoRA ------------------------------------------------------------------------------------------------

COLUMNS_OF_PILORA = {
    "table1": ("a6", "a4", "a2", "b0.5", "b0.1", "b0.05"),
    "table2": ("a12", "a8", "a4", "b0.5", "b0.1", "b0.05"),
    "table3": ("a6", "b0.5"),
    "figure4": tuple(f"{name}_{clients}" for name in ("a6", "b0.5") for clients in (10, 15, 20)),
}


def test_every_column_of_piloras_tables_is_there():
    names = {f"{table} {name}" for table, known in COLUMNS_OF_PILORA.items() for name in known}
    assert names == {column.key for column in columns("pilora")}


@some("pilora", 5)
def test_the_settings_of_pilora_are_the_papers(column):
    cfg = own(column)
    name, _, clients = column.name.partition("_")
    assert (cfg.partition, cfg.classes_per_client if name[0] == "a" else cfg.alpha) == (
        ("quantity", int(name[1:])) if name[0] == "a" else ("task_dirichlet", float(name[1:]))
    )
    assert (cfg.tasks, cfg.clients, cfg.rounds) == (10, int(clients or 10), 30)
    assert (cfg.epochs, cfg.batch_size) == (5, 64)
    assert cfg.lr == (5e-3 if cfg.dataset == "tiny_imagenet" else 2e-3)
    assert (cfg.backbone, cfg.preprocess, cfg.normalise) == ("vit_b16", "pilora", "release")


# ---- the list of what the papers show ----------------------------------------------------------------------

# how many tables and figures each paper has
SHOWN = {"fppl": (5, 4), "pilora": (3, 4), "hepco": (4, 3), "pmae": (4, 10), "vfcl": (11, 12)}
ROMAN = ("I", "II", "III", "IV", "V")


def listed(system):
    """The rows of a paper's list in docs/reproducing.md: (what of the paper, the cell with the command)."""
    text = (small_runs.ROOT / "docs" / "reproducing.md").read_text()
    part = re.split(r"\n### ", text.partition("## What the papers show")[2])[1 + list(SHOWN).index(system)]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    assert rows[0][2] == f"`fcljax reproduce {system}`"
    return [(name, command) for name, _, command in rows[2:]]


@pytest.mark.parametrize("system", SHOWN)
def test_the_list_has_every_table_and_figure_of_a_paper_and_every_entry_of_its_file(system):
    rows = listed(system)
    assert all(command for _, command in rows)
    found = {"table": set(), "figure": set()}
    for name, _ in rows:
        kind, _, numbers = name.replace("figures", "figure").partition(" ")
        numbers = [number.partition("(")[0] for number in numbers.split(", ")]
        found[kind] |= {ROMAN.index(each) + 1 if each in ROMAN else int(each) for each in numbers}
    tables_, figures_ = SHOWN[system]
    assert found == {"table": set(range(1, tables_ + 1)), "figure": set(range(1, figures_ + 1))}
    commands = {each for _, command in rows for each in re.findall(r"`((?:table|figure)\d+[ab]?)`", command)}
    assert commands == set(PAPERS[system].tables)


@pytest.mark.parametrize(("system", "table"), small_runs.some(TABLES, TABLES[::4]))
def test_every_entry_plans_at_mini_scale(system, table):
    made = reproduce.plan(papers.find_columns(FOLDER, system, table), "mini", None)
    assert made.runs and not [part.label for part in made.parts if part.why]


def test_the_means_of_printed_curves_are_the_printed_averages():
    """VFCL's tables print A_t of each task and their mean."""
    found = [(column.key, row) for column in columns("vfcl") for row in column.rows if row.curve]
    assert len(found) > 35
    off = {f"{key} {row.words()}": sum(row.curve) / 10 - row.numbers[0].mean for key, row in found}
    off = {name: difference for name, difference in off.items() if abs(difference) > 0.07}
    assert off == {}
