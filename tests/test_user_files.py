"""Files that people write: partitions, class orders and settings as Excel, R, pandas and numpy write them."""

import io
import json
import pickle
import shutil

import numpy as np
import pytest
import small_runs

from fcljax import cli, config
from fcljax.data.files.dataset import Dataset, natural_order
from fcljax.data.owners import find_owners, owners_csv, read_tasks, says_tasks
from fcljax.errors import InputError
from fcljax.runs import resume
from fcljax.scenario import order_of_classes

PIXELS = np.zeros((4, 8, 8, 3), np.uint8)
PETS = Dataset("pets", PIXELS, np.array([0, 1, 2, 0]), PIXELS, np.array([0, 1, 2, 0]), ("cat", "dog", "a,b"))
NAMES = ["ü", "ann", "", "ü"]  # the third example belongs to nobody
TABLE = "example,client\n0,ü\n1,ann\n3,ü\n"


def written(folder, content):
    path = folder / "given"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return f"file:{path}"


def owners(folder, content):
    found = find_owners(PETS, written(folder, content))
    return ["" if client < 0 else found.names[client] for client in found.client]


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def cells(text):
    return "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in text.splitlines())


TABLES = {
    "byte-order mark": TABLE.encode("utf-8-sig"),
    "all quoted": cells(TABLE),
    "byte-order mark, quoted, CRLF": cells(TABLE).replace("\n", "\r\n").encode("utf-8-sig"),
    "old Mac": TABLE.replace("\n", "\r"),
    "semicolons": TABLE.replace(",", ";"),
    "tabs": TABLE.replace(",", "\t"),
    "blank rows": "\n" + TABLE + ",\n\n , \n",
    "upper case, another order": "Client , EXAMPLE\nann,1\nü,0\nü,3\n",
    "json": json.dumps({"ü": [0, 3], "ann": [1]}),
    "json, byte-order mark": json.dumps({"ü": [3, 0], "ann": [1], "nobody": []}).encode("utf-8-sig"),
    "npz": npz(**{"ü": np.array([0, 3]), "ann": np.array([1], np.uint8)}),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_partition_is_read_as_other_programs_write_it(form, tmp_path):
    assert owners(tmp_path, TABLES[form]) == NAMES


def test_a_partition_is_the_client_of_each_example_or_the_examples_of_each_client(tmp_path):
    for content in (
        npy(np.array([1, 10, 2, 1])),
        npy(np.array(["1", "10", "2", "1"])),
        "[1, 10, 2, 1]",
        '["1", "10", "2", "1"]',
    ):
        assert owners(tmp_path, content) == ["1", "10", "2", "1"]
    assert owners(tmp_path, "[[2], [], [0, 3]]") == ["2", "", "0", "2"]
    assert find_owners(PETS, written(tmp_path, "[1, 10, 2, 1]")).names == ("1", "2", "10")


def test_the_column_of_tasks_is_found_in_every_header(tmp_path):
    table = "example,client,task\n0,a,first\n1,a,second\n2,b,second\n"
    for content in (
        table,
        cells(table),
        table.encode("utf-8-sig"),
        table.replace(",", ";").replace("\n", "\r"),
    ):
        partition = written(tmp_path, content)
        assert says_tasks(partition) and read_tasks(partition, PETS).tolist() == [0, 1, 1, -1]
        partition = written(tmp_path, owners_csv(PETS, partition))
        assert read_tasks(partition, PETS).tolist() == [0, 1, 1, -1]


def test_names_that_look_like_numbers_are_put_in_order():
    long = "1" * 6000
    names = ["²", long, "10", "9", "007", "٣", "b"]
    assert natural_order(names) == ["007", "9", "10", long, "b", "²", "٣"]


HEAD = "example,client\n"
BAD_PARTITIONS = {
    "example,client,tasks\n0,a,1\n": "unknown column 'tasks'; did you mean 'task'?",
    '"","example","client"\n"1","0","a"\n': "it numbers the rows: write the file without it (pandas:",
    "example,client,client\n0,a,b\n": "the column 'client' appears twice",
    "example,client,example\n0,a,1\n": "the column 'example' appears twice",
    "example,file,client\n0,a.png,b\n": "has the columns 'example' and 'file'; leave out one of them",
    HEAD + "9" * 5000 + ",a\n": "a value of 5,000 characters",
    HEAD + "9" * 500 + ",a\n": "pets has training examples 0 to 3",
    HEAD + "²,a\n": "example '²'; pets has training examples 0 to 3",
    HEAD + "0," + "a" * 201 + "\n": "a client of 201 characters; at most 200",
    HEAD + "0," + "a" * 200_000 + "\n": "it is not CSV: field larger than field limit",
    HEAD + '0,"a\n1,b\n': "it is not CSV: unexpected end of data",
    HEAD + '0,"a\n1"x,b\n': "line 3: it is not CSV",
    HEAD + '0,"a\nb"\n': "is not of one line; is a quotation mark missing?",
    HEAD + "0,a\0\n": "is not of one line",
    TABLE.encode("utf-16"): "byte 0 (0xff) is not UTF-8; save it as UTF-8",
    TABLE.encode("latin-1"): "(0xfc) is not UTF-8",
    pickle.dumps({"a": [0]}): "is a pickle, which is a program and is never loaded; write it as JSON",
    npy(np.array([None, 1, 2, 3])): "is not an array of numbers or text",
    npy(np.arange(5)): "int64 of shape [5]; expected the client of each of the 4 training examples",
    npy(np.eye(4)): "float64 of shape [4, 4]; expected the client",
    npy(np.arange(4))[:-3]: "is not an array of numbers or text",
    npz(a=np.array([0.5])): "example 0.5",
    npz(a=np.array([[0], [1]])): "client 'a': expected a list of the numbers of its training examples",
    npz(a=np.array([0]))[:-30]: "cannot be read",
    '{"a": [0], "a": [1]}': "the client 'a' appears twice",
    '{"a": [0, 1], "b": [1]}': "client 'b': example 1 has an owner already",
    '{"a": [4]}': "client 'a': example 4; pets has training examples 0 to 3",
    '{"a": [-1]}': "example -1",
    '{"a": [true]}': "example True",
    '{"a": [1.0]}': "example 1.0",
    '{"a": {"b": [0]}}': "client 'a': expected a list",
    '{"a": 0}': "client 'a': expected a list",
    '{"": [0]}': "no client",
    "{}": "gives no example to any client",
    "[]": "0 values; expected the client of each of the 4",
    "[0, 1, 2, -1]": "example 3 has client -1; expected a number from 0, or text",
    npy(np.array([0, -1, 1, 1])): "example 1 has client -1; expected a number from 0, or text",
    "[0, 1, 2, null]": "example 3 has client None",
    "[0, 1, 2, 0.5]": "example 3 has client 0.5",
    "[" * 99_999: "is not JSON",
    "[" + "9" * 5000 + "]": "is not JSON",
    '{"a": [0]': "is not JSON",
    "": "its first line is ''; expected 'example,client'",
}


@pytest.mark.parametrize("content", BAD_PARTITIONS, ids=range(len(BAD_PARTITIONS)))
def test_a_wrong_partition_is_one_line_that_names_the_place(content, tmp_path):
    with pytest.raises(InputError) as error:
        owners(tmp_path, content)
    said = str(error.value)
    assert said.startswith("partition: ") and BAD_PARTITIONS[content] in said and "\n" not in said


def order(folder, content):
    options = config.from_mapping("linear", {"class_order": written(folder, content)}, "test")
    return order_of_classes(PETS, options, np.random.RandomState(0)).tolist()


def test_an_order_of_classes_is_lines_commas_json_or_an_array(tmp_path):
    for content in (
        "dog\r\na,b\r\ncat\r\n".encode("utf-8-sig"),
        "dog\ra,b\rcat",
        'dog, "a,b", cat\n',
        "1,2,0",
        '["dog", "a,b", "cat"]',
        "\ufeff[1, 2, 0]",
        npy(np.array([1, 2, 0])),
        npy(np.array(["dog", "a,b", "cat"])),
    ):
        assert order(tmp_path, content) == [1, 2, 0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1, 2", "is not JSON"),
        ("[[1], 2, 0]", "[1] is not a class; expected names, or numbers from 0"),
        ("[true, 2, 0]", "True is not a class"),
        ("[" * 9999, "is not JSON"),
        (npy(np.array([0.0, 1.0, 2.0])), "float64 of shape [3]; expected the classes"),
        (npy(np.array([[0, 1, 2]])), "int64 of shape [1, 3]"),
        (npy(np.array([None])), "is not an array of numbers or text"),
        (npz(order=np.arange(3)), "is a pickle or an archive; expected text, JSON or a .npy array"),
        (pickle.dumps([0, 1, 2]), "is a pickle or an archive"),
        ("dog\ncat\n²\n", "no class '²'"),
        ("dog\ncat\n".encode("utf-16"), "is not UTF-8"),
        ('"dog,cat', "unexpected end of data"),
        ("", "0 of 3 classes"),
    ],
)
def test_a_wrong_order_of_classes_is_one_line(content, says, tmp_path):
    with pytest.raises(InputError) as error:
        order(tmp_path, content)
    assert str(error.value).startswith("class_order: ") and says in str(error.value)


def test_what_is_wrong_with_a_file_is_one_line_of_the_program(tmp_path, capsys):
    run = ["run", "linear", "--out", str(tmp_path / "run")]
    for option, content, says in (
        ("--partition", HEAD + "0,a\n1,²\n" + "9" * 5000 + ",a", "line 4: a value of 5,000 characters"),
        ("--partition", "example;client;tasks\r0;a;1\r", "unknown column 'tasks'; did you mean 'task'?"),
        ("--partition", npy(np.array([{"a": [0]}])), "is not an array of numbers or text"),
        ("--class-order", '["0", "0"]', "class_order: class '0' appears twice"),
    ):
        assert cli.main([*run, option, written(tmp_path, content)]) == 2
        err = capsys.readouterr().err
        assert says in err and err.startswith("fcljax: ") and err.count("\n") == 1
        assert not (tmp_path / "run").exists()


# ---- files that a run began with ---------------------------------------------------------------------------


def test_every_file_that_a_setting_names_has_a_digest(tmp_path):
    files = {
        "class_order": (b"cat\ndog\na,b\n", b"dog\ncat\na,b\n"),
        "class_list": (b"n01\nn02\n", b"n02\nn01\n"),
        "partition": (TABLE.encode(), TABLE.replace("1,ann", "2,ann").encode()),
        "method": (OWN_METHOD.encode(), OWN_METHOD.replace("fine", "other").encode()),
    }
    for name, (before, after) in files.items():
        path = tmp_path / (f"{name}.py" if name == "method" else name)
        path.write_bytes(before)
        given = {name: f"file:{path}" if name in ("class_order", "partition") else str(path)}
        if name == "class_list":
            # no other data set reads it
            given["dataset"] = "imagenet100"
        settings = config.from_mapping(given.pop("method", "linear"), given, "test")
        had = resume.given_digests(settings, PETS)
        assert len(had) == 1 and resume.given_digests(settings, PETS) == had
        path.write_bytes(after)
        now = resume.given_digests(settings, PETS)
        assert now.keys() == had.keys() and now != had
    assert resume.given_digests(config.from_mapping("linear", {}, "test"), PETS) == {}


OWN_METHOD = """
import fcljax
from fcljax.methods.fedavg import plain

METHOD = fcljax.MethodEntry("fine", None, plain, "linear")
"""


@pytest.mark.long
def test_a_run_is_resumed_only_with_the_order_of_classes_and_the_method_that_it_began_with(tmp_path, capsys):
    order, method, out = tmp_path / "order", tmp_path / "mine.py", tmp_path / "run"
    order.write_text("\n".join("3104562789"))
    method.write_text(OWN_METHOD)
    short = [*small_runs.COMMON, "--rounds", "1", "--clients", "2", "--class-order", f"file:{order}"]
    assert cli.main(["run", str(method), *short, "--tasks", "2", "--out", str(out)]) == 0
    changes = (
        (order, "\n".join("0123456789"), "the classes of the class order differ from those of the run"),
        (method, OWN_METHOD + "# 1", "the lines of the method's file differ from those of the run"),
    )
    resume = ["run", str(method), "--resume", str(out)]
    for finished in (True, False):
        if not finished:
            (out / "summary.json").unlink()
            shutil.rmtree(out / "figures")
        capsys.readouterr()
        for path, changed, says in changes:
            before = path.read_text()
            path.write_text(changed)
            assert cli.main(resume) == 2
            err = capsys.readouterr().err
            assert says in err and "restore the old ones" in err and err.count("\n") == 1
            path.write_text(before)
        if finished:
            assert cli.main(resume) == 0
    # what it says counts, and not how
    order.write_text(json.dumps([int(name) for name in "3104562789"]))
    assert cli.main(resume) == 0
