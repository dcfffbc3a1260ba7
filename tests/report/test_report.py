"""The page of `mixlab report`: what it takes, what it shows, and what it says about inputs that it cannot use."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mixlab.cli.reporting import report as verb
from mixlab.cli.reporting import report_parser
from mixlab.core.errors import ConfigError, MixlabError
from mixlab.report import Point
from mixlab.report.report import collect
from mixlab.report.report_page import render_report
from mixlab.report.scatter import AXES, Group, ScatterMark, frontier, groups
from tests.report.invented import model
from tests.report.invented_inputs import CORRUPTIONS, compared, everything, robustness, trained, unknown
from tests.report.test_page import Page
from tests.training.tiny import tiny

HOSTILE = "</script><img src=x onerror=alert(1)> & \"q\" 'a' $x$ {{ 7 * 7 }}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return everything(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def text(inputs: list[Path]) -> str:
    return render_report(collect(inputs))


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def scatter_data(text: str) -> Any:
    (found,) = re.findall(r'id="scatter-data">(.*?)</script>', text, re.S)
    return json.loads(found)


# -- what is on it ---------------------------------------------------------------------------------


def test_every_kind_of_input_has_its_section(page: Page) -> None:
    tasks = ("Classification on digits", "Segmentation on digit-scenes", "Detection on digit-scenes")
    kinds = ("Effective receptive fields", "Robustness", "Weather")
    for title in ("Accuracy against cost", "Comparisons", *tasks, *kinds, "To repeat it"):
        assert title in page.text, title


def test_the_overview_leads_to_everything(page: Page, text: str, inputs: list[Path]) -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    links = [link["href"] for link in page.all("a")]
    assert {str(link)[1:] for link in links} <= ids
    assert len(links) == 8 + len(inputs)  # the contents, and a row each
    for path in inputs:
        assert str(path) in page.text


def test_ids_are_unique_and_references_meet_them(text: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= set(ids)
    assert set(re.findall(r'aria-labelledby="([^"]+)"', text)) <= set(ids)


def test_nothing_is_loaded_from_elsewhere(page: Page, text: str) -> None:
    assert not re.search(r"https?://|@import|<link", re.sub(r"data:[\w/+;-]+,[\w+/=]+", "", text))
    assert {str(image["src"])[:5] for image in page.all("img") if "src" in image} == {"data:"}


def test_pictures_are_inside_the_page_with_their_captions(page: Page, inputs: list[Path]) -> None:
    found = {str(image["alt"]): str(image["src"]) for image in page.all("img") if image.get("src")}
    kind, content = found["What the centre of the last map listens to"].split(",")
    assert kind == "data:image/svg+xml;base64"
    folder = next(path for path in inputs if path.name == "erf")
    assert base64.b64decode(content) == (folder / "erf.svg").read_bytes()


def test_a_huge_drawing_is_shown_as_pixels(tmp_path: Path) -> None:
    folder = robustness(tmp_path, "a", 10)
    with (folder / "bars_a.svg").open("a") as opened:
        opened.write("<!--" + 700_000 * "x" + "-->")
    (one,) = collect([folder]).instruments
    assert str(one.drawings[0].uri).startswith("data:image/png")


def test_the_words_of_runs_are_those_of_their_task(page: Page) -> None:
    for name in ("test top-1 %", "test mIoU %", "test box AP %", "71.50", "41.20", "3, not finished"):
        assert name in page.text
    assert "mask AP" not in page.text  # -1 stands for: there are no masks


def test_robustness_bars_put_models_side_by_side(text: str) -> None:
    rows = dict(re.findall(r'<div class="row"><span>(.*?)</span>(.*?)</div></div>', text, re.S))
    rows = {re.sub("<wbr>", "", label): bars for label, bars in rows.items()}
    assert set(CORRUPTIONS) <= set(rows)
    shares = re.findall(r"--share: ([\d.]+); --colour: var\(--series-(\d)\)", rows["gaussian_noise"])
    assert shares == [("0.12", "0"), ("0.15", "1")]
    assert re.findall(r"<b>(.*?)</b>", rows["FGSM 1/255"]) == ["68.0", "65.0"]


def test_robustness_under_other_settings_is_not_put_side_by_side(tmp_path: Path) -> None:
    one, other = robustness(tmp_path / "a", "a", 10), robustness(tmp_path / "b", "b", 20)
    file = other / "robustness.json"
    file.write_text(file.read_text().replace('"digits"', '"cifar10:x"'))
    assert render_report(collect([one, other])).count('<figure class="bars"') == 4


def test_an_unknown_kind_is_shown_as_it_is(page: Page) -> None:
    assert "A kind from elsewhere" in page.text
    values = [cell.get("data-value") for cell in page.all("td")]
    assert "10.5" in values
    assert "<i>dry</i>" in page.text


def test_a_wide_table_is_rid_of_what_says_nothing(tmp_path: Path) -> None:
    columns = ("model", *(f"c{index}" for index in range(11)), "empty")
    rows = tuple((name, speed, *(10 * ["same"]), None) for name, speed in (("a", 1), ("b", 2)))
    page = Page(render_report(collect([unknown(tmp_path, columns=columns, table=rows)])))
    heads = page.text.partition("A kind from elsewhere")[2]
    assert "empty" not in heads
    assert page.text.count("same") == 10


def test_commands_and_machines_are_there(page: Page) -> None:
    assert "mixlab compare '*_pico' --data digits" in page.text
    assert "config.json --out NEW_FOLDER" in page.text
    assert page.text.count("invented") == 1  # equal machines once


# -- the chart -------------------------------------------------------------------------------------


def test_the_chart_holds_every_model_and_cost(text: str) -> None:
    (group,) = scatter_data(text)
    assert [axis["label"] for axis in group["axes"]] == ["latency", "MACs", "parameters", "peak memory", "images/s"]
    assert group["marks"][0]["name"] == "caformer_pico"
    assert len(group["marks"]) == 4
    latency = group["axes"][0]
    assert [group["marks"][index]["name"] for index in latency["frontier"]] == [
        "coat_lite_pico",
        "convformer_pico",
        "caformer_pico",
    ]
    sequencer = next(mark for mark in group["marks"] if mark["name"] == "sequencer2d_pico")
    assert "peak_mb" not in sequencer["costs"]
    assert sequencer["texts"]["latency"] == "12.0 ms"


def test_the_arithmetic_of_a_training_is_a_cost(tmp_path: Path) -> None:
    short = tiny(tmp_path / "short", changes={"schedule.epochs": 1, "schedule.warmup_epochs": 0})
    tiny(tmp_path / "long")
    tiny(tmp_path / "frozen", weights=str(short.folder / "final.safetensors"), freeze_layers=1)
    report = collect([tmp_path])
    (group,) = groups(report)
    assert "training compute (FLOP)" in [axis["label"] for axis in group.plain()["axes"]]
    found = {mark.name: mark.costs.get("train_flops") for mark in group.marks}
    images, step = 1078, 3 * 2 * group.marks[0].costs["macs"]
    assert found == {
        "caformer_pico (short)": pytest.approx(step * images),
        "caformer_pico (long)": pytest.approx(step * images * 2),
        "caformer_pico (frozen)": None,  # it has a shorter way back, nobody knows how short
    }
    page = Page(render_report(report))
    assert "training FLOP" in page.text


def test_a_run_that_did_not_write_down_its_images_has_no_compute(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    row = json.loads((run.folder / "result.json").read_text())
    assert row.pop("train_images") == 1078
    (run.folder / "result.json").write_text(json.dumps(row))
    (group,) = groups(collect([run.folder]))
    assert set(group.marks[0].costs) == {"params", "macs"}


def test_more_images_per_second_are_better() -> None:
    rows = (("fast", 90, 100), ("slow", 95, 10), ("beaten", 80, 50), ("twin", 95, 10))
    marks = [
        ScatterMark(name, "", score, "", None, {"images_per_second": cost, "macs": cost}) for name, score, cost in rows
    ]
    axes = {axis.name: axis for axis in AXES}
    assert frontier(marks, axes["images_per_second"]) == [0, 1, 3]
    assert frontier(marks, axes["macs"]) == [1, 3]
    assert frontier(marks, axes["peak_mb"]) == []


def test_different_data_never_share_a_chart(tmp_path: Path) -> None:
    report = collect([compared(tmp_path / "a"), compared(tmp_path / "b", data="cifar10:x", title="Other")])
    assert [group.data for group in groups(report)] == ["digits", "cifar10:x"]


def test_different_machines_are_spoken_of(tmp_path: Path) -> None:
    one, other = compared(tmp_path / "a"), compared(tmp_path / "b", machine={"processor": "another"}, title="Again")
    assert "come from different machines" in render_report(collect([one, other]))
    assert "come from different machines" not in render_report(collect([one]))


def test_marks_are_data_that_a_script_can_read() -> None:
    group = Group("d", "top-1 %", [ScatterMark(HOSTILE, "x", 90.0, "90%", None, {"macs": 1.0})])
    assert json.loads(json.dumps(group.plain()))["marks"][0]["name"] == HOSTILE


# -- safety ----------------------------------------------------------------------------------------


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    compared(tmp_path / "c", title=HOSTILE, data=HOSTILE, machine={HOSTILE: HOSTILE}, models=(model(HOSTILE, 97.0),))
    trained(tmp_path / "t", model=HOSTILE, data=HOSTILE)
    unknown(
        tmp_path / "u", title=HOSTILE, columns=(HOSTILE, "b"), table=((HOSTILE, HOSTILE),), settings={HOSTILE: HOSTILE}
    )
    text = render_report(collect([tmp_path], title=HOSTILE))
    page = Page(text)
    assert len(page.all("script")) == 2
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert {str(image.get("src", "data:"))[:5] for image in page.all("img")} == {"data:"}
    assert page.text.count(HOSTILE) >= 12
    assert scatter_data(text)[0]["marks"][0]["name"] == HOSTILE
    assert "49" not in page.text.partition("Overview")[0]


def test_a_hostile_drawing_is_only_an_image(tmp_path: Path) -> None:
    folder = robustness(tmp_path, "a", 10)
    (folder / "bars_a.svg").write_text("<svg onload='alert(1)'><script>alert(1)</script></svg>")
    text = render_report(collect([folder]))
    assert "onload" not in text
    assert "alert" not in text


def test_pictures_are_only_taken_from_beside_the_numbers(tmp_path: Path) -> None:
    folder = robustness(tmp_path / "a", "a", 10)
    file = folder / "robustness.json"
    file.write_text(file.read_text().replace('"bars_a"', '"../secret"'))
    (tmp_path / "secret.png").write_bytes(b"secret")
    with pytest.raises(ConfigError, match=r"'../secret' is not the plain name"):
        collect([folder])


def test_equal_inputs_give_equal_bytes(tmp_path: Path, inputs: list[Path], text: str) -> None:
    assert render_report(collect(inputs)) == text
    for name in ("a.html", "b.html"):
        verb(report_parser().parse_args([*map(str, inputs), "--out", str(tmp_path / name)]))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


# -- which inputs ----------------------------------------------------------------------------------


def test_a_folder_of_folders_is_walked_and_everything_counts_once(inputs: list[Path]) -> None:
    root = inputs[0].parent
    whole = collect([root, *inputs, inputs[0] / "comparison.json", root / "runs" / "first" / "result.json"])
    assert (len(whole.comparisons), len(whole.runs), len(whole.instruments)) == (1, 4, 4)


def test_the_runs_of_a_comparison_are_part_of_it(tmp_path: Path) -> None:
    folder = compared(tmp_path / "c")
    trained(folder / "caformer_pico" / "seed0")
    robustness(folder / "robustness", "a", 10)
    report = collect([folder])
    assert (len(report.runs), len(report.instruments)) == (0, 1)
    assert len(collect([folder / "caformer_pico" / "seed0"]).runs) == 1


def test_json_of_others_does_no_harm(tmp_path: Path) -> None:
    compared(tmp_path / "c")
    (tmp_path / "package.json").write_text('{"name": "x", "version": 1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    assert len(collect([tmp_path]).comparisons) == 1


def test_runs_of_the_same_model_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [trained(tmp_path / name / "seed0") for name in ("a", "b")]
    page = Page(render_report(collect(folders)))
    assert "caformer_pico (a/seed0)" in page.text
    assert "caformer_pico (b/seed0)" in page.text


def test_a_run_without_an_evaluation_is_spoken_of(tmp_path: Path) -> None:
    folder = trained(tmp_path / "r", finished=False)
    (folder / "metrics.json").unlink()
    assert "Without any evaluation so far: caformer_pico" in Page(render_report(collect([folder]))).text


def test_a_real_run_has_parameters_macs_and_a_place_in_the_chart(tmp_path: Path) -> None:
    tiny(tmp_path / "run")
    report = collect([tmp_path / "run"])
    (run,) = report.runs
    assert run.finished
    assert run.params
    assert run.macs
    (group,) = groups(report)
    assert group.marks[0].costs == {"params": run.params, "macs": run.macs, "train_flops": run.train_flops}
    assert len(Page(render_report(report)).all("svg")) >= 3


def test_a_loss_that_is_no_number_leaves_the_page_whole(tmp_path: Path) -> None:
    folder = trained(tmp_path / "r")
    for name in ("metrics.json", "result.json"):
        (folder / name).write_text(re.sub(r'"train_loss": [\d.]+', '"train_loss": NaN', (folder / name).read_text()))
    page = Page(render_report(collect([folder])))
    assert "training loss" not in page.text
    assert "validation loss" in page.text


def test_one_evaluation_has_a_whole_epoch_on_its_axis(tmp_path: Path) -> None:
    row = model("a", 97.0, curves=((Point(2, 1.0, 1.0, 90.0),),))
    text = render_report(collect([compared(tmp_path, models=(row,))]))
    assert "1.96" not in text


# -- errors ----------------------------------------------------------------------------------------


def broken(folder: Path, name: str, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)
    return folder


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    paths = [
        tmp_path / "absent",
        broken(tmp_path / "cut", "robustness.json", '{"kind": "robust'),
        broken(tmp_path / "empty", "notes.txt", ""),
        broken(tmp_path / "odd", "comparison.json", '{"models": [], "seeds": [], "recipe": "x"}'),
        compared(tmp_path / "good"),
    ]
    with pytest.raises(ConfigError) as caught:
        collect(paths)
    told = str(caught.value)
    for path, word in zip(paths, ("does not exist", "not whole JSON", "holds nothing", "needs title"), strict=False):
        assert re.search(f"{path}.*{word}", told), told
    assert "Expected a folder of `mixlab compare`" in told
    assert "run their commands again, or leave them out" in told
    assert str(paths[-1]) not in told


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("notes.json", "{}", "nothing that a report can show"),
        ("x.json", '{"kind": "x", "title": "t", "columns": ["a"], "table": [[1, 2]]}', "rows of 1 cells"),
        ("x.json", '{"kind": "x", "title": "t", "columns": ["a"], "table": [[[1]]]}', "neither text nor number"),
        ("x.json", '{"kind": "x", "title": "t", "columns": ["a"], "table": [], "settings": 3}', "not a finding"),
        ("config.json", '{"model": "m", "data": "d", "recipe": 3}', "recipe"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, name: str, content: str, word: str) -> None:
    file = broken(tmp_path, name, content) / name
    with pytest.raises(MixlabError, match=word) as caught:
        collect([file])
    assert str(file) in str(caught.value)


def test_metrics_that_are_none_are_named(tmp_path: Path) -> None:
    folder = trained(tmp_path / "r", finished=False)
    (folder / "metrics.json").write_text("3")
    with pytest.raises(ConfigError, match=f"metrics of {folder}"):
        collect([folder])


def test_robustness_numbers_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = robustness(tmp_path, "a", 10)
    file = folder / "robustness.json"
    file.write_text(file.read_text().replace('"top1"', '"top_one"'))
    with pytest.raises(ConfigError, match="numbers of a are not what `mixlab robustness` writes"):
        render_report(collect([folder]))


def test_a_lost_picture_is_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = robustness(tmp_path / "in", "a", 10)
    for kind in ("svg", "png"):
        (folder / f"bars_a.{kind}").unlink()
    verb(report_parser().parse_args([str(folder), "--out", str(tmp_path / "p.html")]))
    assert str(folder / "bars_a") in capsys.readouterr().err
    assert "was not beside the numbers" in (tmp_path / "p.html").read_text()


# -- the verb --------------------------------------------------------------------------------------


def test_the_verb_says_what_it_wrote(tmp_path: Path, inputs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "report.html"
    verb(report_parser().parse_args([*map(str, inputs), "--out", str(target), "--title", "Mine & yours"]))
    assert capsys.readouterr().out == f"1 comparison, 4 runs, 4 findings; page: {target}\n"
    assert "<title>Mine &amp; yours</title>" in target.read_text()


@pytest.mark.parametrize("out", ["page", "page.json", "folder.html"])
def test_out_must_be_a_page(tmp_path: Path, inputs: list[Path], out: str) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=r"--out is the page to write.*\.html"):
        verb(report_parser().parse_args([str(inputs[0]), "--out", str(tmp_path / out)]))


def test_nothing_is_written_where_something_is_wrong(tmp_path: Path) -> None:
    folder = compared(tmp_path / "c")
    target = tmp_path / "p.html"
    with pytest.raises(ConfigError):
        verb(report_parser().parse_args([str(folder), str(tmp_path / "absent"), "--out", str(target)]))
    assert not target.exists()
