"""What comes from others is data: files of settings, run directories, uploads. Each test fails when its guard
is off."""

import json
import re
import shutil
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs
import torch_files
from packaging.version import Version

from fcljax import cli, config
from fcljax.bridges import node
from fcljax.checks import examples
from fcljax.errors import InputError
from fcljax.federated import claims
from fcljax.federated.communication import Traffic
from fcljax.federated.engine import RoundReport
from fcljax.methods import METHODS, pmae
from fcljax.methods.glfc import glfc
from fcljax.methods.glfc.lenet import init_lenet
from fcljax.methods.glfc.proxy import Gradients
from fcljax.methods.hepco import hepco
from fcljax.methods.vfcl import vfcl
from fcljax.methods.vfcl.conflation import softplus_inverse
from fcljax.methods.vfcl.posterior import of_gaussian
from fcljax.models.weights import checkpoints, torch_zip
from fcljax.parts import class_gaussians, reports, ridge
from fcljax.parts.classifiers import Sums
from fcljax.parts.federate import Payload
from fcljax.parts.learner import Params
from fcljax.results import run_folder
from fcljax.runs.build import make_method
from fcljax.runs.records import NOT_EVALUATED, Records
from fcljax.runs.summary import warnings_of
from fcljax.studies import papers, typed
from fcljax.types import ClientContext, ClientInfo, Sizes, Upload

# ---- no file runs Python -----------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder with a program that leaves a file behind when it is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\n")
    yield tmp_path
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", ["./evil.py", "evil.py:METHOD", "evil:METHOD"])
@pytest.mark.parametrize("place", ["method: {}", "method: [linear, {}]", "runs: [{{name: a, method: {}}}]"])
def test_a_sweeps_file_runs_no_program(method, place, trap, capsys):
    (trap / "sweep.yaml").write_text(place.format(f'"{method}"') + "\n")
    for options in ([], ["--dry-run"]):
        assert cli.main(["sweep", "sweep.yaml", *options]) == 2
        err = capsys.readouterr().err
        assert repr(method) in err and "--allow-code" in err and err.count("\n") == 1


def test_a_leaderboards_file_runs_no_program(trap, capsys):
    (trap / "board.yaml").write_text("search: {holdout: 0.25}\nmethods: {./evil.py: {}}\n")
    for options in ([], ["--dry-run"]):
        assert cli.main(["leaderboard", "board.yaml", *options]) == 2
        err = capsys.readouterr().err
        assert "./evil.py" in err and "--allow-code" in err and err.count("\n") == 1


def test_code_that_is_allowed_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise RuntimeError('it is run')\n")
    (tmp_path / "sweep.yaml").write_text("method: ./mine.py\n")
    assert cli.main(["sweep", "sweep.yaml", "--dry-run", "--allow-code"]) == 2
    assert "it is run" in capsys.readouterr().err


def test_a_run_directory_and_a_file_of_settings_run_no_program(trap, capsys):
    (trap / "run").mkdir()
    (trap / "run" / "config.yaml").write_text("method: ./evil.py\n")
    for given in (["--resume", "run"], ["--config", "run/config.yaml"]):
        assert cli.main(["run", "linear", *given]) == 2
        assert "of method './evil.py'" in capsys.readouterr().err


def test_the_files_of_reproduce_run_no_program(trap):
    row = {"method": "./evil.py"}
    table = {"title": "", "source": "", "metrics": ["A_avg"], "upload": 1, "rows": [row]}
    paper = {"paper": "", "method": "fppl", "seeds": [1], "base": {}, "tables": {"t": table}, "verified": {}}
    with pytest.raises(InputError, match="evil.py.* is a program"):
        papers.parse_paper("evil.yaml", paper)
    with pytest.raises(InputError, match="evil.py.* is a program"):
        papers.parse_paper("evil.yaml", paper | {"method": "./evil.py", "tables": {}})


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["lr: 0.1\nlr: 0.2", "base: {tasks: 1, tasks: 2}", "- {a: 1, a: 2}"])
def test_a_key_that_is_there_twice_is_an_error(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text + "\n")
    with pytest.raises(InputError, match="twice"):
        config.load_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0777", "'0777' is 511 in YAML; write 511, or text in quotes"),
        ("0x1F", "'0x1F' is 31"),
        ("0b11", "'0b11' is 3"),
        ("1_000", "'1_000' is 1000"),
        ("1:30", "'1:30' is 90"),
        ("1:30.5", "'1:30.5' is 90.5"),
        ("[1, {a: 010}]", "'010' is 8"),
        ("yes", "'yes' is true in YAML; write true"),
        ("Off", "'Off' is false"),
        ("2020-01-01", "is a date in YAML"),
        ("!!int '0777'", "'0777' is 511"),
    ],
)
def test_a_value_that_yaml_reads_as_another_is_an_error(text, said, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"method: linear\nseed: {text}\n")
    with pytest.raises(InputError, match=rf"a\.yaml': line 2: .*{re.escape(said)}") as error:
        config.load_yaml(path)
    assert "\n" not in str(error.value)


def test_values_that_mean_what_they_say_are_read(tmp_path):
    values = {
        "0": 0,
        "-3": -3,
        "+5": 5,
        "1.5": 1.5,
        "1e-3": "1e-3",
        "true": True,
        "'0777'": "0777",
        "~": None,
    }
    text = "\n".join(f"k{i}: {written}" for i, written in enumerate(values))
    (tmp_path / "a.yaml").write_text(text + "\n")
    assert list(config.load_yaml(tmp_path / "a.yaml").values()) == list(values.values())
    assert config.from_mapping("linear", {"lr": "1e-3"}, "test").lr == 1e-3
    assert typed.converted(list[float], ["1e-1", 3], "factors") == [0.1, 3]
    with pytest.raises(InputError, match="^task_sizes: 1.5 is a number, and text is needed"):
        config.from_mapping("linear", {"task_sizes": 1.50}, "test")


@pytest.mark.parametrize("name", ["config", "out", "resume", "faults", "dataset", "track", "seeds"])
def test_an_empty_value_is_an_error(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in ([f"--{name}", ""], [f"--{name}="], [f"--{name}", " "]):
        assert cli.main(["run", "linear", *words]) == 2
        assert f"{name}: the value is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    settings = config.preset("linear")
    (tmp_path / "config.yaml").write_text(config.to_yaml(settings))  # an option's default may be no text
    values = config.load_yaml(tmp_path / "config.yaml")
    assert config.from_mapping("linear", values, "config").faults == settings.faults


# ---- what a client claims ----------------------------------------------------------------------------------

CLAIMS = {
    "hepco": ["class_examples"],
    "vfcl": ["precision"],
    "pmae": ["restore"],
    "glfc": ["gradients"],
    "lga": ["gradients"],
    "fedncm": ["class_sums"],
    "fedproto": ["class_sums"],
    "fedclm": ["class_sums"],
    "fedrecon": ["embeddings"],
    "fedslca": ["statistics"],
    "lorm": ["responses", "task_grams"],
    "regmean": ["responses"],
    "dolfin": ["input_grams"],
    "fot": ["input_sketch"],
    "c2prompt": ["affinity", "moments"],
    "afcl": ["moments"],
    "fedranpac": ["split"],
    "stsa": ["moments"],
    "ccvr": ["statistics"],
    "fedran": ["summary"],
    "fedavg": [],
    "scaffold": [],
}


def context(examples=10, payload=()):
    info = ClientInfo(jnp.int32(0), jnp.int32(examples), jnp.zeros(3, jnp.int32), jnp.int32(0))
    return ClientContext((), payload, (), (), info)


@pytest.mark.parametrize("weight", [-1.0, 11.0, 1e30, jnp.nan, jnp.inf])
def test_a_weight_is_between_nothing_and_the_clients_examples(weight):
    assert claims.possible_weight(context(), Upload(weight=10))
    assert claims.possible_weight(context(0), Upload(weight=1.0))
    assert not claims.possible_weight(context(), Upload(weight=weight))


@pytest.mark.parametrize("counts", [[-1, 0, 0], [11, 0, 0], [5, 5, 1], [2**31 - 1] * 3, [jnp.nan, 0, 0]])
def test_numbers_of_examples_are_those_of_a_client_with_so_many(counts):
    assert claims.possible_counts(jnp.array([4, 6, 0]), jnp.int32(10))
    assert not claims.possible_counts(jnp.array(counts), jnp.int32(10))
    if counts[0] is not jnp.nan:
        assert not hepco.possible_examples(context(), jnp.array(counts))
    sums = Sums(jnp.ones((3, 2)), jnp.array(counts, jnp.float32))
    assert not reports.possible_sums(context(), sums)


def test_sums_of_products_are_those_of_a_client_with_so_many_examples():
    """Features that are all alike reach every bound; anything more is refused."""
    ones, label = jnp.full((10, 4), 2.0), jnp.zeros(10, jnp.int32)
    honest = ridge.add_examples(ridge.no_moments(4, 3), ones, label, jnp.ones(10, bool))
    assert ridge.possible_moments(context(), honest)
    lies = (
        honest._replace(gram=honest.gram.at[0, 1].mul(1.1)),
        honest._replace(gram=honest.gram.at[2, 2].set(-1.0)),
        honest._replace(products=honest.products.at[0, 0].mul(1.1)),
        honest._replace(examples=jnp.float32(11)),
        honest._replace(examples=jnp.float32(-1)),
        honest._replace(gram=honest.gram.at[0, 0].set(jnp.nan)),
    )
    assert not any(ridge.possible_moments(context(), lie) for lie in lies)


def test_class_statistics_are_those_of_a_client_with_so_many_examples():
    x = jnp.full((10, 4), 2.0)
    honest = class_gaussians.ClassSums(x.sum(0)[None], (x.T @ x)[None], jnp.array([10]))
    assert class_gaussians.possible_statistics(context(), honest)
    lies = (
        honest._replace(feature=1.1 * honest.feature),
        honest._replace(outer=-honest.outer),
        honest._replace(examples=jnp.array([11])),
        honest._replace(examples=jnp.array([9])),
    )
    assert not any(class_gaussians.possible_statistics(context(), lie) for lie in lies)


@pytest.mark.parametrize(
    ("factor", "possible"),
    [(1.0, True), (0.2, True), (3.0, True), (0.05, False), (0, False), (jnp.inf, False), (jnp.nan, False)],
)
def test_a_round_of_training_makes_no_posterior_a_hundred_times_as_precise(factor, possible):
    def params(sigma):
        return Params(of_gaussian(jnp.zeros(4), jnp.full(4, sigma)), (), {}, ())

    mine = params(0.02)
    rho = softplus_inverse(jnp.float32(0.02 * factor)) if 0 < factor < jnp.inf else factor or -jnp.inf
    lie = mine.adapter.rho.at[2].set(rho)
    upload = Upload(params(0.02)._replace(adapter=mine.adapter._replace(rho=lie)), (), {})
    assert vfcl.possible_precision(context(payload=Payload(mine, {})), upload) == possible


def test_images_to_restore_have_patches_that_exist_and_are_no_more_than_the_examples():
    honest = pmae.Restore(jnp.ones((2, 3, 5, 4)), jnp.zeros((2, 3, 9), jnp.int32), jnp.ones((2, 3), bool))
    assert pmae.possible_tokens(context(6), honest)
    assert not pmae.possible_tokens(context(5), honest)
    for place in (-1, 9, 2**31 - 1):
        lie = honest._replace(order=honest.order.at[0, 0, 0].set(place))
        assert not pmae.possible_tokens(context(6), lie)


def test_gradients_of_prototypes_are_of_probabilities_and_no_variance_is_negative():
    """The gradient of a bias is a probability minus 0 or 1."""
    network = init_lenet(jax.random.key(0), 8, 8, 3)
    honest = Gradients(
        network._replace(bias=jnp.array([[0.9, -1.0, 0.1]])), jnp.ones(1, bool), jnp.float32(0.5)
    )
    assert glfc.possible_gradients(context(), honest)
    for bias in (1.1, -1.1, jnp.nan):
        gradient = honest.gradient._replace(bias=honest.gradient.bias.at[0, 0].set(bias))
        assert not glfc.possible_gradients(context(), honest._replace(gradient=gradient))
    for spread in (-1e-3, jnp.nan):
        assert not glfc.possible_gradients(context(), honest._replace(spread=jnp.float32(spread)))


def test_uploads_that_are_left_out_beside_the_rounds_are_in_their_lines():
    """Such as class sums that are sent once a task."""
    records, sent = Records(), Traffic(0, 0, 0, 0)
    before = RoundReport({}, rejected=2, impossible={"class_sums": 2})
    report = RoundReport({}, participants=3, rejected=1, impossible={"class_sums": 1, "weight": 1})
    for each in (before, RoundReport({})):
        records.count(each)
    line = records.record(0, 0, report, NOT_EVALUATED, sent, [before, RoundReport({})])
    assert (line["rejected"], line["rejected_besides"]) == (1, 2)
    assert line["impossible"] == {"class_sums": 3, "weight": 1}
    assert "rejected_besides" not in records.record(0, 1, RoundReport({}), NOT_EVALUATED, sent)
    assert "rejected 3 uploads in 1 of 2 rounds" in warnings_of(records, config.preset("fppl"))[0]
    records.count(before)
    records.record(1, 0, RoundReport({}), NOT_EVALUATED, sent, [before])
    assert "rejected 5 uploads in 2 of 3 rounds" in warnings_of(records, config.preset("fppl"))[0]


@pytest.mark.long
@pytest.mark.parametrize("attack", ["weight", "counts"])
def test_a_liar_is_left_out_counted_and_named(attack, tmp_path, capsys):
    """Two of five clients lie; what the others sent is merged as if there were no others."""
    method, out = ("fedavg", "weight") if attack == "weight" else ("fedncm", "class_sums")
    options = ["--clients", "5", "--tasks", "1", "--rounds", "1", "--epochs", "1", "--image-size", "8"]
    folder = tmp_path / "run"
    given = ["--dataset", "glyphs", "--attack", attack, "--malicious", "2", *options]
    assert cli.main(["run", method, *given, "--out", str(folder)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rejected_uploads"] == 2 and summary["A_last"] > 0
    assert f"with their number: {out} (2)" in capsys.readouterr().err
    line = json.loads((folder / "metrics.jsonl").read_text())
    assert line["impossible"] == {out: 2} and line["rejected"] + line.get("rejected_besides", 0) == 2


@pytest.mark.long
def test_the_table_of_uploads_names_every_method():
    text = (small_runs.ROOT / "docs" / "trust.md").read_text().partition("## What uploads reveal")[2]
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|$", text, re.M)
    named = [name for names, _ in rows for name in names.split(", ")]
    assert sorted(named) == sorted(METHODS)
    # methods that are said to send nothing else make no claims but of weights and precisions
    network = examples.network(examples.TINY)
    sizes = Sizes(classes=5, tasks=2, task_classes=3, clients=4, examples=9)
    plain = next(names for names, sent in rows if sent.startswith("what trains: "))
    for name in plain.split(", "):
        settings = config.resolve(config.from_mapping(name, {}, "test"))
        rounds = make_method(settings, sizes, network).rounds
        assert not [claim.name for each in rounds for claim in each.program.claims], name


@pytest.mark.parametrize("name", CLAIMS)
def test_what_clients_say_of_themselves_is_checked(name):
    """A method's program has the claims that `test_numbers_of_examples_...` and its neighbours try."""
    network = examples.network(examples.TINY)
    sizes = Sizes(classes=5, tasks=2, task_classes=3, clients=4, examples=9)
    settings = config.resolve(config.from_mapping(name, {}, "test"))
    programs = [each.program for each in make_method(settings, sizes, network).rounds]
    checked = [claim.name for program in programs for claim in claims.claims_of(program)]
    assert sorted({*checked}) == sorted(["weight", *CLAIMS[name]])
    assert checked.count("weight") == len(programs)


# ---- dependencies ------------------------------------------------------------------------------------------

# the first versions without a published advisory
SAFE = {"pillow": "11.3", "jinja2": "3.1.6", "setuptools": "78.1.1", "fonttools": "4.60.2", "ray": "2.52"}


@pytest.mark.parametrize("name", SAFE)
def test_no_bound_of_a_dependency_admits_a_version_with_a_published_advisory(name):
    given = (small_runs.ROOT / "setup.cfg").read_text() + (small_runs.ROOT / "pyproject.toml").read_text()
    bounds = re.findall(rf"\b{name}(?:\[\w+\])?>=([\d.]+)", given)
    pinned = re.findall(rf"^{name}==([\d.]+)", (small_runs.ROOT / "requirements.txt").read_text(), re.M)
    assert bounds
    for version in bounds + pinned:
        assert Version(version) >= Version(SAFE[name])


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", small_runs.some(run_folder.SEALED, ["summary.json"]))
def test_a_changed_result_is_told_of(name, tmp_path, capsys):
    shutil.copytree(small_runs.finished("linear"), tmp_path / "run")
    assert run_folder.changed_files(tmp_path / "run") == []
    with (tmp_path / "run" / name).open("a") as file:
        file.write("\n")
    said = f"{name} has changed since the run"
    for command in (["compare", "run"], ["report", "run"]):
        assert cli.main([*command[:1], str(tmp_path / "run")]) == 0
        assert said in capsys.readouterr().err.replace("\n", "")
    assert said in (tmp_path / "run" / "report.html").read_text()
    assert cli.main(["run", "linear", "--resume", str(tmp_path / "run")]) == 0
    assert said in capsys.readouterr().err.replace("\n", "")


def test_digests_that_are_no_digests_are_told_of(tmp_path):
    assert run_folder.changed_files(tmp_path) == []
    for text in ("{", "[]", "", "[" * 2000, "{}"):
        (tmp_path / run_folder.DIGESTS).write_text(text)
        (tmp_path / "summary.json").write_text("{}")
        assert run_folder.changed_files(tmp_path)


# ---- weights -----------------------------------------------------------------------------------------------


def test_dicts_that_hold_each_other_many_times_over_end():
    inner = {"a": 1}
    for _ in range(30):
        inner = {"a": inner, "b": inner}
    with pytest.raises(ValueError, match="more than 100,000 entries"):
        list(torch_zip.tensors_in("", inner, float))
    for _ in range(40):
        inner = {"a": inner}
    with pytest.raises(ValueError, match="32 levels"):
        list(torch_zip.tensors_in("", inner, float))
    assert list(torch_zip.tensors_in("", {"a": {"b": 1.0}, "optimizer": {"c": 2.0}, "d": 3.0}, float)) == [
        ("a.b", 1.0),
        ("d", 3.0),
    ]


def test_a_tensor_has_no_more_numbers_than_its_storage(tmp_path):
    few = torch_files.View(np.ones(1, np.float32), 0, (30_000,), (0,))
    torch_files.save_zip(tmp_path / "a.pt", {"w": few})
    with pytest.raises(ValueError, match="times the bytes|more numbers than its storage"):
        torch_zip.read_torch_zip(tmp_path / "a.pt")


def test_a_pickle_that_is_packed_many_times_over_is_not_looked_through(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}" + b"0}" * 2**18 + b".")
    monkeypatch.setattr(checkpoints, "imports", lambda stream: pytest.fail("it was looked through"))
    with pytest.raises(InputError, match="unpacks to more than 16 times"):
        checkpoints.read_tensors(tmp_path / "a.pth")


@pytest.mark.parametrize(
    "header", ["(" * 500, "{'descr': '<f4'", "[]", "{'descr': 'x', 'shape': (1,)}", "9" * 5000]
)
def test_an_array_whose_header_is_none_is_refused(header, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("w.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    with pytest.raises(InputError, match="w has no numpy header"):
        checkpoints.read_tensors(tmp_path / "a.npz")


# ---- a federation on machines ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"client": 7}, "partition-id: 7 of 3"),
        ({"client": 10**18}, "partition-id"),
        ({"examples": [10**18, 1]}, "most that a server makes room"),
        ({"examples": [10**9, 1]}, "most that a server makes room"),
        ({"examples": [-1, 1]}, "expected a number"),
        ({"examples": [1]}, "expected a number"),
    ],
)
def test_what_a_node_says_of_itself_is_bounded(said, words):
    mine = node.Facts(-1, [], {"clients": 3}, {})
    honest = node.Facts(0, [5, 6], {"clients": 3}, {})
    node.check_facts(mine, honest, 2)
    with pytest.raises(InputError, match=words):
        node.check_facts(mine, honest._replace(**said), 2)


def test_a_run_directory_whose_name_is_not_utf8_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "linear", "--out", "r\udcff"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_ratio_that_no_memory_holds_is_refused(capsys):
    assert cli.main(["run", "hepco", "--replay-ratio", "1e21"]) == 2
    assert "replay_ratio: 1e+21 is too large; nearest valid value: 100" in capsys.readouterr().err
