"""The files in experiments/ are claims: each says where its numbers come from, loads, and sends what it
says."""

import json
import shlex
from pathlib import Path

import jax
import pytest
import small_runs
import yaml

from fcljax.adapters import ADAPTERS
from fcljax.commands import reproducing, running
from fcljax.data.tasks import make_tasks
from fcljax.errors import InputError
from fcljax.federated import communication
from fcljax.methods import METHODS
from fcljax.models.mae import DecoderConfig, autoencoder, decoder_shapes
from fcljax.models.networks import make_network
from fcljax.models.shapes import CONVNETS, VITS
from fcljax.models.vit import parameter_shapes, vit_network
from fcljax.runs.build import Experiment, make_method
from fcljax.runs.summary import payload_shapes, traffic_by_round
from fcljax.scenario import Scenario
from fcljax.studies import paper_tables as tables
from fcljax.studies import reproduce
from fcljax.types import Frozen, Sizes

FOLDER = small_runs.ROOT / "experiments"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if tables.MARK in path.read_text())
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


def table_of(file):
    """The file as `fcljax reproduce` reads it."""
    return tables.parse(str(file), file.read_text(), yaml.safe_load(file.read_text()))


def header(file):
    """The lines of the header that come once: field -> text."""
    return table_of(file).fields


def parts(command):
    """(method, where its settings come from, other options) of a command."""
    program, verb, method, *options = shlex.split(command)
    assert (program, verb) == ("fcljax", "run")
    given = running.parse_run(method, options, "", "")
    paths = {name: given.pop(name) for name in ("config", "out", "resume") if name in given}
    return method, paths, given


def load(file):
    """(method, settings) of the command in the header."""
    method, paths, given = parts(header(file)["run"])
    return method, running.settings(method, given, running.Paths(**paths | {"config": str(file)}))


# a few of them here, all in `make test-long`
each = pytest.mark.parametrize("file", small_runs.some(FILES, FILES[::12]), ids=lambda file: file.stem)
PILORA = sorted(FOLDER.glob("pilora_*.yaml"))
each_of_pilora = pytest.mark.parametrize(
    "file", small_runs.some(PILORA, PILORA[::5]), ids=lambda file: file.stem
)
FPPL = sorted(FOLDER.glob("fppl_*.yaml"))
each_of_fppl = pytest.mark.parametrize("file", small_runs.some(FPPL, FPPL[::5]), ids=lambda file: file.stem)


def test_every_row_of_fppl_in_the_papers_tables_has_a_file():
    ablation = [f"fppl_table3_{parts}" for parts in ("none", "u", "f", "uf", "d", "ud", "fd", "ufd")]
    clients = [f"fppl_table4_{clients}-clients" for clients in (20, 30, 40)]
    others = [
        "fppl_table1_imagenet-r",
        "fppl_table1_cub-200",
        "fppl_table5_iid",
        "fppl_table5_beta0.5",
        "fppl_cifar-100",
    ]
    assert {*ablation, *clients, *others} <= {file.stem for file in FILES}


@each
def test_the_header_names_source_expectation_status_and_cost(file):
    assert table_of(file).title and table_of(file).rows
    found = header(file)
    assert (
        found["status"] == "unverified" or found["cost"] != "not measured"
    )  # who has run it knows what it cost


@each
def test_the_command_in_the_header_runs_this_file(file, monkeypatch):
    monkeypatch.chdir(small_runs.ROOT)
    method, paths, given = parts(header(file)["run"])
    assert Path(paths["config"]).samefile(file)
    assert running.settings(method, given, running.Paths(**paths)) == load(file)[1]
    assert yaml.safe_load(file.read_text()).get("method", method) == method


@each
def test_the_first_seed_of_the_header_is_the_files(file):
    first, *others = table_of(file).seeds
    assert load(file)[1].seed == first
    assert len({first, *others}) == 1 + len(others)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_row_is_a_run(file):
    table = table_of(file)
    for row in table.rows:
        given = reproducing.read(row.method, row.options)
        cfg = reproduce.settings_of(table, row, reproducing.read)
        assert {name: getattr(cfg, name) for name in given} == given
        shared = ("dataset", "checkpoint", "tasks", "seed", "fidelity", "lr", "rounds")
        assert all(
            getattr(cfg, name) == table.settings.get(name, getattr(cfg, name))
            for name in shared
            if name not in given
        )


def test_every_metric_is_a_summarys():
    summary = json.loads((small_runs.finished("linear") / "summary.json").read_text())
    metrics = {metric for file in FILES for metric in table_of(file).metrics}
    assert len(metrics) > 5 and all(tables.value_of(summary, metric) is not None for metric in metrics)


def test_the_row_of_a_files_own_method_has_its_settings():
    for file in FILES[::8]:
        table, (method, cfg) = table_of(file), load(file)
        plain = [row for row in table.rows if row.words() == method]
        assert [reproduce.settings_of(table, row, reproducing.read) for row in plain] == [cfg] * len(plain)


def test_what_is_not_a_rows_own_is_dropped_and_nothing_else():
    table = table_of(FOLDER / "vfcl_table1.yaml")
    row = next(row for row in table.rows if row.method == "glfc")
    cfg = reproduce.settings_of(table, row, reproducing.read)
    assert (cfg.lr, cfg.full_lr, cfg.optimiser) == (0.01, 0.01, "sgd") and not hasattr(cfg, "prior_weight")
    alone = table_of(FOLDER / "hepco_table1_cifar-100.yaml").rows[1]
    cfg = reproduce.settings_of(table_of(FOLDER / "hepco_table1_cifar-100.yaml"), alone, reproducing.read)
    assert (cfg.partition, cfg.clients, cfg.rounds, cfg.epochs) == ("iid", 1, 1, 20)
    wrong = table._replace(settings=dict(table.settings) | {"prior_wait": 1})
    with pytest.raises(InputError, match=r"vfcl_table1.yaml: row 'glfc': .*unknown key 'prior_wait'"):
        reproduce.settings_of(wrong, row, reproducing.read)


@each_of_fppl
def test_settings_are_the_papers(file):
    _, cfg = load(file)
    assert cfg.tasks * cfg.rounds in TOTAL_ROUNDS[cfg.dataset]
    assert CLASSES[cfg.dataset] % cfg.tasks == 0
    assert (cfg.backbone, cfg.image_size, cfg.normalise) == ("vit_b16", 224, "unit")
    assert (cfg.epochs, cfg.batch_size, cfg.server_epochs, cfg.server_batch_size) == (5, 128, 5, 128)
    assert cfg.lr == cfg.server_lr


@each_of_fppl
def test_nothing_that_the_paper_fixes_is_left_to_a_default(file):
    values = set(yaml.safe_load(file.read_text()))
    fixed = {
        "tasks",
        "clients",
        "partition",
        "rounds",
        "epochs",
        "batch_size",
        "lr",
        "seed",
        "fidelity",
        "normalise",
        "augment",
    }
    # a preset may change; what made the table's numbers does not
    disputed = set(METHODS["fppl"].fidelity["intended"]) | set(ADAPTERS["prompts"].fidelity["intended"])
    assert fixed | disputed <= values
    assert values >= {"alpha"} or load(file)[1].partition == "iid"


def network_with_shapes(name):
    """A backbone and the shapes of its parameters."""
    if name in CONVNETS:
        network = make_network(CONVNETS[name], (0.0,) * 3, (1.0,) * 3)
        return network, Frozen(jax.eval_shape(network.init, jax.random.key(0)))
    vit, decoder = VITS[name], DecoderConfig()
    network = vit_network(vit, autoencoder=autoencoder(vit, decoder))
    return network, Frozen(parameter_shapes(vit), decoder_shapes(decoder))


@each
def test_the_upload_in_the_header_is_what_a_client_sends(file):
    method, cfg = load(file)
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
    rest = sent.upload_scalars - communication.scalars(restore)
    assert header(file)["upload"].startswith(f"{rest:,} numbers per client and round")


def test_the_rows_of_table_three_turn_the_parts_on_that_their_names_say():
    for file in FOLDER.glob("fppl_table3_*.yaml"):
        parts = file.stem.removeprefix("fppl_table3_").replace("none", "")
        _, cfg = load(file)
        on = {"u": not cfg.wo_unified, "f": not cfg.wo_fusion, "d": not cfg.wo_debias}
        assert "".join(part for part, is_on in on.items() if is_on) == parts


# ---- HePCo -------------------------------------------------------------------------------------------------

HEPCO = sorted(FOLDER.glob("hepco_*.yaml"))
each_of_hepco = pytest.mark.parametrize(
    "file", small_runs.some(HEPCO, HEPCO[::4]), ids=lambda file: file.stem
)


def test_every_table_of_hepco_has_its_files():
    sets = ("cifar-100", "imagenet-r", "domainnet")
    names = [f"table1_{name}" for name in sets] + ["table3", "table4"]
    names += [f"table2_{name}_{imbalance}" for name in sets for imbalance in (0.05, 0.01)]
    assert {file.stem for file in FILES if file.stem.startswith("hepco")} == {
        f"hepco_{name}" for name in names
    }


@each_of_hepco
def test_the_settings_of_hepco_are_the_papers(file):
    method, cfg = load(file)
    assert (cfg.clients, cfg.rounds, cfg.epochs, cfg.batch_size, cfg.lr) == (5, 10, 10, 64, 1e-3)
    assert (cfg.partition, cfg.split_ratio, cfg.category_ratio) == ("sampled", 0.1, 0.6)
    assert (cfg.pool_size, cfg.pool_length, cfg.pool_blocks) == (100, 20, 5)
    assert (cfg.backbone, cfg.normalise, cfg.aggregator) == ("vit_b16", "release", "uniform")
    assert cfg.imbalance == (float(file.stem.rpartition("_")[2]) if "table2" in file.stem else 1)
    if file.stem == "hepco_table3":  # it says what HePCo's generators see
        return
    for baseline in ("fedavg-prompt", "fedprox", "fed-cprompt", "fedavg-ft", "fedlwf-mc", "cfed", "target"):
        assert running.settings(baseline, {}, running.Paths(config=str(file))).rounds == 10


# ---- pMAE --------------------------------------------------------------------------------------------------

PMAE = sorted(FOLDER.glob("pmae_*.yaml"))
each_of_pmae = pytest.mark.parametrize("file", small_runs.some(PMAE, PMAE[::7]), ids=lambda file: file.stem)
BETAS = ("0.5", "0.1", "0.05")


def test_every_table_and_figure_of_pmae_has_its_files():
    names = [f"table{table}_{kind}_b{beta}" for table in (1, 2) for kind in ("sup", "ibot") for beta in BETAS]
    names += [f"table{table}_b{beta}" for table in (3, 4) for beta in BETAS] + ["figure7", "figure8"]
    assert {file.stem for file in PMAE} == {f"pmae_{name}" for name in names}


@each_of_pmae
def test_the_settings_of_pmae_are_the_papers(file):
    _, cfg = load(file)
    assert (cfg.tasks, cfg.clients, cfg.rounds, cfg.epochs, cfg.batch_size) == (20, 10, 10, 5, 128)
    assert (cfg.restore_images, cfg.mask_ratio, cfg.tune_epochs, cfg.tune_batch) == (4, 0.75, 5, 128)
    assert (cfg.lr, cfg.tune_lr, cfg.vpt_length, cfg.vpt_blocks, cfg.recon_length) == (1e-3, 1e-3, 20, 5, 5)
    assert (cfg.backbone, cfg.normalise, cfg.partition) == ("vit_b16", "unit", "dirichlet")
    ibot = "table4" in file.stem or "ibot" in file.stem or "figure8" in file.stem
    assert ("ibot" in cfg.checkpoint) == ibot
    assert cfg.alpha == (0.5 if "figure" in file.stem else float(file.stem.rpartition("_b")[2]))
    pairs = [f"{name}{more}" for name in ("l2p", "dualprompt", "coda-prompt") for more in ("", "-pmae")]
    for method in pairs:
        assert running.settings(method, {}, running.Paths(config=str(file))).rounds == 10


# ---- VFCL --------------------------------------------------------------------------------------------------

VFCL = sorted(FOLDER.glob("vfcl_*.yaml"))


def test_every_table_of_vfcl_with_accuracies_has_its_file():
    assert {file.stem for file in VFCL} == {f"vfcl_table{table}" for table in (1, 2, 4, 5, 6, 7, 10, 11)}


@pytest.mark.parametrize("file", small_runs.some(VFCL, VFCL[::3]), ids=lambda file: file.stem)
def test_the_settings_of_vfcl_are_the_papers(file):
    _, cfg = load(file)
    assert (cfg.tasks, cfg.epochs, cfg.batch_size, cfg.lr, cfg.full_lr) == (10, 5, 32, 0.01, 0.01)
    assert (cfg.prior_weight, cfg.global_share, cfg.samples, cfg.exemplars) == (1.0, 0.5, 1, 20)
    assert (cfg.partition, cfg.optimiser, cfg.momentum) == ("private", "sgd", None)
    fedweit = file.stem in ("vfcl_table5", "vfcl_table6")
    assert (cfg.clients, cfg.rounds) == ((5, 20) if fedweit else (10, 10))
    assert (cfg.pool is not None) == fedweit and (cfg.category_ratio == 0.5) == (not fedweit)
    assert cfg.backbone == ("densenet121" if file.stem in ("vfcl_table10", "vfcl_table11") else "resnet18")


# ---- PILoRA ------------------------------------------------------------------------------------------------

COLUMNS = {
    1: ("a6", "a4", "a2", "b0.5", "b0.1", "b0.05"),
    2: ("a12", "a8", "a4", "b0.5", "b0.1", "b0.05"),
    3: ("a6", "b0.5"),
}


def test_every_column_of_pilora_s_tables_has_a_file():
    assert {f"pilora_table{table}_{column}" for table in COLUMNS for column in COLUMNS[table]} <= {
        file.stem for file in FILES
    }


@each_of_pilora
def test_the_settings_of_a_column_are_the_papers(file):
    _, cfg = load(file)
    column = file.stem.rpartition("_")[2]
    assert (cfg.partition, cfg.classes_per_client if column[0] == "a" else cfg.alpha) == (
        ("quantity", int(column[1:])) if column[0] == "a" else ("task_dirichlet", float(column[1:]))
    )
    assert (cfg.tasks, cfg.clients, cfg.rounds, cfg.epochs, cfg.batch_size) == (10, 10, 30, 5, 64)
    tiny = cfg.dataset == "tiny_imagenet"
    assert (cfg.lr, cfg.lora_lr) == ((5e-3, 5e-6) if tiny else (2e-3, 1e-5))
    assert (cfg.backbone, cfg.preprocess, cfg.normalise) == ("vit_b16", "pilora", "release")
