"""The report page: what it holds, that it loads nothing and escapes everything, and how it works in
Chromium."""

import functools
import html.parser
import importlib.util
import json
import re
import shlex
import shutil

import pytest
import small_runs
from test_report import summary

from fcljax import cli, config
from fcljax.commands import running
from fcljax.errors import InputError
from fcljax.results import charts, figures, page, repeat, run_folder
from fcljax.results.page import render
from fcljax.runs.summary import FIGURES

HOSTILE = ["<script>alert(1)</script>", "$x$ & \"'", "a\udc80\x00b", "</style>{{ 7*7 }}", "\u202egnp.exe"]
VOID = {"meta", "link", "br", "img"}
SECTIONS = ["results", "curves", "forgetting", "clients", "classes", "costs", "settings", "again"]


class Reader(html.parser.HTMLParser):
    """The page as lists: ids, text, addresses, rows of tables; and whether every tag is closed in turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.ids, self.links, self.rows, self.headings, self.tags = [], [], [], [], [], []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[name] for name in ("src", "href", "action", "data") if name in attrs]
        assert not [name for name in attrs if name.startswith("on") or name == "style"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.rows and self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def whole(**changes) -> dict:
    """A summary with all that the page has a part for."""
    size = {"scalars": 3, "bytes": 12}
    base = {
        "task_il": {"A_last": 0.9},
        "class_accuracy": [0.25, None, 1.0],
        "class_names": ["cat", "dog", "eel"],
        "client_accuracy": [0.5, 0.125],
        "communication_total": {"upload_bytes": 2_048_000, "download_bytes": 4_096_000},
        "communication_extra": {
            "task_start": {"upload_bytes": 3_000_000, "download_bytes": 0},
            "handover": {"upload_bytes": 0, "download_bytes": 5_000_000},
        },
        "extra_storage": size,
        "client_state": size,
        "server_state": size,
        "warnings": ["warning: training diverged"],
        "trained_images_per_s": 50.0,
        "config": {"lr": 0.1, "dataset": "digits"},
    }
    return summary(**{**base, **changes})


def named(*summaries) -> dict[str, dict]:
    return {f"runs/{i}": summary for i, summary in enumerate(summaries)}


def made(*summaries) -> Reader:
    return Reader(render(named(*summaries), ["runs"]))


def test_every_section_is_there_with_its_numbers():
    found = made(whole())
    assert [id for id in found.ids if id in SECTIONS] == SECTIONS
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["After task 3"] == ["60.00", "85.00", "90.00"] and rows["After task 1"] == ["90.00", "", ""]
    assert ["dog", "-"] in found.rows and ["cat", "25.00"] in found.rows and ["1", "12.50"] in found.rows
    assert ["Run", "paper", "released", "diagonal", "Backward transfer"] in found.rows
    assert ["fppl", "12.50", "10.00", "12.50", "-12.50"] in found.rows
    costs = ["fppl", "78.33", "2.05", "4.10", "0.17", "169,060", "0.17", "3.00", "5.00"]
    assert any(row[:9] == costs for row in found.rows)  # what is sent once a task besides the rounds
    first = next(row for row in found.rows if row[0] == "fppl")
    assert first[1:7] == ["81.11", "78.33", "12.50", "2.05", "4.10", "120.0"]
    assert ["fppl", "31.25", "12.50", "12.50"] in found.rows  # the mean of two clients, and the worse one
    assert "fppl: warning: training diverged" in found.text
    assert ["lr", "0.1"] in found.rows and "fcljax report runs" in found.text


def test_epsilon_is_a_column_where_a_run_has_one():
    private = whole(privacy={"epsilon": 2.5, "delta": 1e-3, "noise_multiplier": 1.0, "by_round": [[1, 2.5]]})
    rows = {row[0]: row for row in made(private, whole(method="pilora", privacy=None)).rows if len(row) == 13}
    assert (rows["Method"][12], rows["fppl"][12], rows["pilora"][12]) == ("Epsilon", "2.5", "-")
    assert not [row for row in made(whole(privacy=None)).rows if "Epsilon" in row]


def test_headings_are_in_order_and_ids_are_unique():
    found = made(whole(), whole(method="pilora"))
    assert found.headings[0] == 1 and set(found.headings[1:]) == {2}
    assert len(set(found.ids)) == len(found.ids)


def test_nothing_is_loaded_from_elsewhere():
    text = render({"runs/a": whole()}, ["runs/a"])
    assert "http:" not in text and "https:" not in text and "url(" not in page_style(text)
    assert all(link.startswith("#") or link == "data:," for link in Reader(text).links)
    assert "default-src 'none'" in text and len(text) < 200_000


def page_style(text: str) -> str:
    return text.partition("<style>")[2].partition("</style>")[0]


@functools.cache
def page_of_names(name: str) -> str:
    """The page of a run whose every name is this one."""
    found = whole(method=name, dataset=name, class_names=[name] * 3, config={name: name})
    return render({name: found}, [name])


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_of_a_user_are_text_and_nothing_else(name):
    """Wherever a user's text goes, the page has the same tags as with a harmless one, and is UTF-8."""
    text = page_of_names(name)
    assert Reader(text).tags == Reader(page_of_names("plain")).tags
    text.encode("utf-8")
    assert "<script>alert" not in text and "\x00" not in text and "\u202e" not in text
    assert "49" not in Reader(text).text.partition("fcljax report")[2]


def test_several_seeds_are_one_curve_and_keep_their_own_columns():
    other = [[0.7], [0.5, 0.6], [0.4, 0.65, 0.7]]
    runs = [
        whole(seed=0),
        whole(
            seed=1, A_last=0.5, accuracy=[[x for x in row] + [None] * (2 - t) for t, row in enumerate(other)]
        ),
    ]
    found = made(*runs, whole(method="pilora"))
    assert ["Client", "fppl, seed 0", "fppl, seed 1", "pilora"] in found.rows
    assert ["After task 1", "80.00", "", ""] in found.rows
    text = render(named(*runs), ["a"])
    assert text.count('<g class="curve c') == 1 and "--seeds=0,1" in text
    assert "fppl (2 seeds)" in text and "64.17±14.17" in text


def test_costs_of_several_seeds_are_means_over_them():
    """The second run has three times as much of everything."""
    costs = ("communication", "communication_total", "communication_extra", "extra_storage", "client_state")
    one = whole(seed=0)

    def thrice(value):
        return {name: thrice(each) for name, each in value.items()} if isinstance(value, dict) else 3 * value

    runs = [one, one | {"seed": 1} | {name: thrice(one[name]) for name in costs}]
    rows = made(*runs).rows
    sums = ["4.10±2.05", "8.19±4.10"]
    row = next(row for row in rows if row[1:] and row[1].startswith("78.33") and len(row) == 12)
    assert row[2:6] == [*sums, "0.34±0.17", "338120.0±169060.0"]
    assert row[7:9] == ["6.00±3.00", "10.00±5.00"]
    assert any(row[4:6] == sums for row in rows)  # the table of results


def test_a_summary_of_an_older_version_lacks_values_and_the_page_says_so():
    found = made(summary())
    assert [id for id in found.ids if id in SECTIONS] == SECTIONS
    for key in ("client_accuracy", "class_accuracy", "communication_total"):
        assert f"summary.json lacks '{key}'" in found.text
    assert "lacks" not in made(whole()).text


def test_a_page_shows_each_client_s_personal_model_and_says_so():
    personal = {"personal": {"accuracy": []}, "personal_accuracy": [0.25, 0.75], "client_accuracy": None}
    found = made(whole(), whole(method="ditto", **personal))
    assert ["0", "50.00", "25.00"] in found.rows and ["1", "12.50", "75.00"] in found.rows
    assert "ditto (personal)" in found.text and "personal models, each on the classes" in found.text
    assert "lacks" not in found.text


def test_settings_that_differ_stand_apart_from_those_that_are_shared():
    found = made(whole(), whole(config={"lr": 0.5, "dataset": "digits"}))
    assert ["lr", "0.1", "0.5"] in found.rows and ["dataset", "digits"] in found.rows


def test_runs_of_several_orders_of_classes_share_a_table():
    found = made(whole(), whole(seed=1, class_names=["eel", "cat", "dog"], class_accuracy=[0.125, 0.5, 0.75]))
    assert ["cat", "25.00", "50.00"] in found.rows and ["eel", "100.00", "12.50"] in found.rows


def test_charts_differ_without_colour_and_skip_what_is_missing():
    """20 curves: no two have the same marker, filling and dashes."""
    drawn = [str(charts.curve_key(i)) for i in range(20)]
    plain = {re.sub(r"#[0-9A-Fa-f]{6}", "#", each) for each in drawn}
    assert len(plain) == 20
    one = str(charts.curves({"a": [0.5, float("nan"), 0.7]}, {}, "label"))
    assert one.count("<title>") == 2 and "nan" not in one.lower()
    assert "a, 3: 70.00 %" in one
    for empty in (
        charts.curves({}, {}, "a"),
        charts.dots({"a": {"b": None}}, "a", ""),
        charts.scatter({"a": (0, 5.0)}, "a", "", ""),
    ):
        assert str(empty).startswith("<svg")


def test_every_mark_of_a_chart_has_its_title():
    titled = [
        (
            charts.curves({"a": [0.5, 0.25]}, {"a": [0.125, 0.0]}, "x"),
            ["a, 1: 50.00±12.50 %", "a, 2: 25.00±"],
        ),
        (charts.scatter({"a": (2048, 5.0), "b": (9, 6)}, "x", "", ""), ["a: 2,048; 5.00 %", "b: 9; 6.00 %"]),
        (charts.dots({"a": {"dog": 5.0, "cat": 10.0}}, "x", ""), ["a, dog: 5.00 %", "a, mean: 7.50 %"]),
    ]
    for chart, titles in titled:
        assert all(f"<title>{title}" in chart for title in titles), chart
    curve = re.findall(r"<path[^>]*>(?=<title>)", str(titled[0][0]))[1]
    assert "transform=" in curve, "titles are on the marks"


def test_a_chart_is_the_same_whenever_it_is_drawn_and_has_no_ids_or_styles():
    first, second = (str(charts.curves({"a": [0.5, 0.25]}, {}, "x")) for _ in range(2))
    assert first == second
    for word in ("id=", " style=", "http", "clip-path", "url("):
        assert word not in first


# ---- of real runs ------------------------------------------------------------------------------------------


def test_a_run_leaves_a_page_and_its_command_gives_the_same_settings():
    out = small_runs.finished("linear")
    text = (out / page.NAME).read_text()
    found = Reader(text)
    (command,) = re.findall(r"fcljax run linear [^\n]*", found.text)
    given = running.parse_run("linear", shlex.split(command)[3:], "", "")
    stored = json.loads((out / "summary.json").read_text())
    assert config.resolve(config.from_mapping("linear", given, "test")) == config.resolve(
        config.from_mapping("linear", stored["config"], "test")
    )
    assert len(command) < 300, "only what differs from the defaults"
    assert f"Made with {repeat.software_of(stored)}." in found.text
    assert len(stored["holdings"]) == 3 and sum(map(sum, stored["holdings"])) == 1438
    assert sorted(stored["class_names"]) == [str(i) for i in range(10)]
    assert stored["task_classes"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_command_of_an_unknown_method_names_every_setting():
    settings = {"seed": 3, "lr": -0.5, "augment": False, "wo_pool": True, "decoder": None}
    absent = {"method": "absent"} | settings
    assert repeat.names_to_give(absent) is None
    words = repeat.command(absent, None)
    assert words[2:] == ["absent", "--seed=3", "--lr=-0.5", "--no-augment", "--wo-pool", "--decoder=None"]


def copy_of_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("summary.json", "metrics.jsonl", "config.yaml"):
        shutil.copy(small_runs.finished("linear") / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("given", "all_of_them"), [(None, True), (5, True), ([["lr"]], True), (["lr"], False)]
)
def test_the_command_names_the_settings_that_the_summary_says(given, all_of_them, tmp_path):
    folder = copy_of_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"given": given}))
    text = Reader(page.report([folder]).read_text()).text
    (command,) = re.findall(r"fcljax run linear [^\n]*", text)
    assert f"--lr={summary['config']['lr']}" in command and ("--epochs=" in command) == all_of_them


def test_report_makes_the_page_of_runs_and_of_folders_of_folders_of_runs(tmp_path, capsys):
    run = copy_of_run(tmp_path)
    assert cli.main(["report", str(run)]) == 0
    assert "report: " in capsys.readouterr().out and (run / "report.html").exists()
    for place in ("sweep/a/seed-1", "sweep/a/seed-2", "sweep/.b.tmp-1/seed-1"):
        shutil.copytree(run, tmp_path / place)
    target = tmp_path / "own.html"
    assert cli.main(["report", str(tmp_path / "sweep"), "--out", str(target)]) == 0
    assert "2 runs of" in target.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["run: no run directory given"]),
        (["absent"], ["run: no directory 'absent'"]),
        (["run", "--out", "summary.json"], ["out: 'summary.json' is not a page's name", "'summary.html'"]),
        (["run", "--outt", "x"], ["'--outt'", "'--out'"]),
    ],
)
def test_mistakes_of_report_are_one_line(arguments, words, capsys):
    assert cli.main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)


@pytest.mark.long
def test_a_page_that_cannot_be_made_is_one_line_and_is_made_when_it_can_be(tmp_path, monkeypatch, capsys):
    run = copy_of_run(tmp_path)
    for name in FIGURES:
        figures.save(run / "figures" / name, figures.accuracy_curve({}))
    arguments = ["run", "linear", "--resume", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr(page, "render", lambda *_: 1 / 0)
        assert cli.main(arguments) == 0
    assert "report.html could not be made: ZeroDivisionError" in capsys.readouterr().err
    assert not (run / "report.html").exists()
    assert cli.main(arguments) == 0
    assert (run / "report.html").exists()


@pytest.mark.long
def test_the_page_of_a_comparison_does_not_replace_its_figure(tmp_path, capsys):
    run = copy_of_run(tmp_path)
    assert cli.main(["compare", str(run), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.html").exists() and (tmp_path / "both.png").exists()
    assert cli.main(["compare", str(run), "--out", str(tmp_path / "both.html")]) == 2
    assert "both.png" in capsys.readouterr().err
    (tmp_path / "mine.html").write_text("my notes")
    assert cli.main(["compare", str(run), "--out", str(tmp_path / "mine.pdf")]) == 2
    assert "mine.html" in capsys.readouterr().err and not (tmp_path / "mine.pdf").exists()
    assert (tmp_path / "mine.html").read_text() == "my notes"
    assert cli.main(["compare", str(run), "--out", str(tmp_path / "both.pdf")]) == 0  # our own page again
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")
    assert cli.main(["compare", str(run), "--out", str(tmp_path / "both.doc")]) == 2
    assert ".pdf" in capsys.readouterr().err


def test_lines_that_are_half_written_or_damaged_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"task": 0, "round": 0}\n{"task": \n[1]\n\xff\n{"task": 0, "round": 1}\n{"task": 0, "ro'
    )
    assert [line["round"] for line in run_folder.read_lines(path)] == [0, 1]
    assert run_folder.read_lines(tmp_path / "absent") == []


def test_the_page_of_no_run_is_refused():
    with pytest.raises(InputError):
        page.report([])


def luminance(color: str) -> float:
    """Relative luminance of #rgb or #rrggbb (WCAG 2)."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ink", ["ink", "link", "muted"])
def test_text_has_enough_contrast_in_light_and_in_dark(ink):
    """WCAG 2 asks for 4.5; the dark colours lie in the first media query."""
    light, _, dark = page._asset("page.css").partition("prefers-color-scheme: dark")
    papers = []
    for css in (light, dark):
        colors = dict(re.findall(r"--(\w+): (#\w+)", css))
        for paper in ("paper", "panel", "hover"):
            low, high = sorted(luminance(colors[name]) for name in (ink, paper))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)
        papers.append(luminance(colors["paper"]))
    assert papers[0] > 0.9 and papers[1] < 0.05


# ---- in a browser ------------------------------------------------------------------------------------------


def chromium():
    spec = importlib.util.spec_from_file_location("chromium", small_runs.ROOT / "experiments" / "chromium.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CAPTURE = """
navigator.clipboard.writeText = (text) => { window.taken = text; return Promise.resolve(); };
"""


@pytest.mark.long
@pytest.mark.skipif(chromium().binary() is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_works_in_chromium(width, tmp_path):
    path = tmp_path / "report.html"
    runs = named(whole(dataset='<b>"q", x</b>'), whole(method="pilora", A_last=0.25, A_avg=0.9))
    path.write_text(render(runs, ["a"]))
    with chromium().opened(path, width) as page_:
        run = page_.evaluate
        assert run("document.querySelectorAll('#curves g.curve > path').length") == 2
        line = "document.querySelector('#curves g.curve > path')"
        box = run(f"(b => [b.width, b.height])({line}.getBoundingClientRect())")
        assert box[0] > 100 and box[1] > 10
        assert run("document.documentElement.scrollWidth <= innerWidth"), (
            "the page itself does not scroll sideways"
        )
        rows = "document.querySelector('#results table').tBodies[0].rows"
        first = f"[...{rows}].map(row => row.cells[0].textContent)"
        before = run(first)
        head = "document.querySelectorAll('#results thead button')[2]"
        run(f"{head}.click()")
        assert run(first) == before[::-1] and run(f"{head}.closest('th').ariaSort") == "ascending"
        run(f"{head}.click()")
        assert run(first) == before
        run(CAPTURE + "document.querySelector('#results .tools button').click()")
        table = run("window.taken").splitlines()
        assert table[0].startswith("Method,A_avg,A_last,Forgetting,Upload (MB)") and len(table) == 3
        assert '"<b>""q"", x</b>"' in table[1] and table[1].split(",")[9] == "50.0"
        run("document.querySelectorAll('#results .tools button')[1].click()")
        latex = run("window.taken")
        assert (
            latex.startswith("\\begin{tabular}{lrrrrrrrrrrr}") and "A\\_last" in latex and "84,480" in latex
        )
        run("document.querySelector('.switches button').click()")
        assert run("getComputedStyle(document.querySelector('#curves g.curve')).display") == "none"
        run("document.querySelectorAll('.command button')[0].click()")
        assert run("window.taken").startswith("fcljax run fppl")
        run(
            "navigator.clipboard.writeText = () => Promise.reject(); document.execCommand = () => false;"
            "document.querySelector('#results .tools button').click()"
        )
        assert run("document.activeElement.value").startswith("Method,")
        paper = "getComputedStyle(document.body).backgroundColor"
        assert run(paper) == "rgb(255, 255, 255)"
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        page_.send("Emulation.setEmulatedMedia", features=[dark])
        assert run(paper) == "rgb(18, 18, 18)"
        assert run("getComputedStyle(document.querySelector('.chart')).filter") != "none"
        assert page_.errors == [] and page_.requests == [path.resolve().as_uri()]
