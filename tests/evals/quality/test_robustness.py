"""Accuracy on corrupted, collected anew and attacked images, against answers that are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from mixlab import save_weights
from mixlab.cli.robustness import robustness as verb
from mixlab.cli.robustness import robustness_parser
from mixlab.core.errors import ConfigError, DataError, MixlabError
from mixlab.data.digits import open_digits
from mixlab.evals.quality.accuracy import evaluate
from mixlab.evals.quality.attacks import Attack
from mixlab.evals.quality.corruptions import SEVERITIES, Corrupt, alexnet_errors, corrupt, standard
from mixlab.evals.quality.examine import Feeding, Look, Pixels, Predictions, Watch, batches, examine
from mixlab.evals.quality.robustness import Trials, real_score, robustness
from mixlab.evals.quality.scores import Result, Score
from mixlab.evals.quality.variants import imagenet_places, open_prepared, open_variant, read_real, real_labels
from mixlab.evals.subjects import Subject, of_backbone
from mixlab.findings.findings import read_finding, write_finding
from mixlab.models.backbone import Backbone
from tests.evals.classifiers import SIDE, by_color, color, learn_digits

NOTHING = Trials(corruptions=(), attacks=())
QUICK = Feeding(batch=60, workers=0)


@pytest.fixture(scope="module")
def digits_model() -> Backbone:
    return learn_digits()


@pytest.fixture(scope="module")
def weights(digits_model: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "digits.safetensors"
    save_weights(digits_model, path)
    return path


def put(folder: Path, *colors: tuple[int, int, int], stem: str = "image") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(colors):
        Image.new("RGB", (SIDE, SIDE), one).save(folder / f"{stem}{number}.png")


def top1(subject: Subject, kind: str, root: Path) -> float:
    found, _ = robustness(
        [subject], None, tests=Trials(corruptions=(), attacks=(), variants={kind: root}), feeding=QUICK
    )
    value = found.data["models"][subject.name]["variants"][kind]["top1"]
    assert found.table == (("by color", value),)
    return float(value)


# -- variants of ImageNet ------------------------------------------------------------------------


def test_the_folders_of_imagenet_v2_are_numbers_not_words(tmp_path: Path) -> None:
    for number in (2, 10, 999):
        put(tmp_path / str(number), color(number))
    put(tmp_path / "100", color(100), color(3))
    assert top1(by_color(), "v2", tmp_path) == 80


def test_the_numbers_of_imagenet_v2_are_known_to_a_model_with_wordnet_names(tmp_path: Path) -> None:
    """Trained on folders in another order than ImageNet's: numbers are still those of ImageNet."""
    names = tuple(reversed(imagenet_places()))
    for number in (2, 10, 999):
        put(tmp_path / str(number), color(999 - number))
    assert top1(replace(by_color(), class_names=names), "v2", tmp_path) == 100


def test_the_folders_of_imagenet_sketch_are_wordnet_names(tmp_path: Path) -> None:
    names = {name: number for name, number in imagenet_places().items() if number in (0, 7, 999)}
    for name, number in names.items():
        put(tmp_path / name, color(number))
    assert top1(by_color(), "sketch", tmp_path) == 100


@pytest.mark.parametrize(
    ("kind", "inside", "outside"), [("a", "n01498041", "n01440764"), ("r", "n01443537", "n01440764")]
)
def test_only_the_classes_of_imagenet_a_and_r_are_compared(
    tmp_path: Path, kind: str, inside: str, outside: str
) -> None:
    """The first class is not among the 200: the next one counts, as long as it is."""
    places = imagenet_places()
    put(tmp_path / inside, color(places[outside], places[inside]), color(places[inside]))
    assert top1(by_color(), kind, tmp_path) == 100
    variant = open_variant(kind, tmp_path, by_color())
    assert variant.classes is not None
    assert len(variant.classes) == 200
    (whole,) = examine([by_color()], variant.data, QUICK)
    assert whole.score == Score(1, 2)
    put(tmp_path / outside, color(0))
    with pytest.raises(DataError, match=outside):
        open_variant(kind, tmp_path, by_color())


def test_classes_are_found_by_the_names_that_a_model_brings(tmp_path: Path, digits_model: Backbone) -> None:
    subject = of_backbone("digits", digits_model, None, trained=True)
    put(tmp_path / "7", color(0))
    assert open_variant("v2", tmp_path, subject).data.label(0) == 7
    put(tmp_path / "seven", color(0))
    with pytest.raises(DataError, match="'seven'"):
        open_variant("v2", tmp_path, subject)


def test_any_label_of_imagenet_real_is_right_and_images_without_one_are_left_out(tmp_path: Path) -> None:
    names = list(imagenet_places())
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
    answers = {1: 5, 2: 6, 3: 7, 4: 8}  # number of the image: what the model sees; all lie in the folder of class 5
    for number, seen in answers.items():
        Image.new("RGB", (SIDE, SIDE), color(seen)).save(
            tmp_path / "val" / names[5] / f"ILSVRC2012_val_{number:08d}.png"
        )
    real = tmp_path / "real.json"
    real.write_text(json.dumps([[5, 3], [900, 6], [], [9]]))
    found, _ = robustness([by_color()], tmp_path, tests=Trials(corruptions=(), attacks=(), real=real), feeding=QUICK)
    assert found.columns == ("model", "clean", "Real")
    assert list(found.table[0][1:]) == pytest.approx([25, 200 / 3])
    with pytest.raises(DataError, match="ILSVRC2012_val"):
        real_labels(open_digits("val"), [[1]])
    real.write_text("[[1000]]")
    with pytest.raises(DataError, match="from 0 to 999"):
        read_real(real, 1000)


def test_the_labels_that_timm_ships_are_those_of_all_50000_images() -> None:
    rows = read_real("timm", 1000)
    assert len(rows) == 50_000
    assert sum(not row for row in rows) == 3163  # Beyer et al.: 46,837 images are left
    told = Predictions(np.array([0, 1]), np.array([0, 0]), np.array([4, -1]))
    assert real_score(told, [frozenset({4}), frozenset({0})]) == Score(1, 2)


# -- ImageNet-C ----------------------------------------------------------------------------------


def test_a_prepared_imagenet_c_is_read_without_a_second_crop(tmp_path: Path) -> None:
    """The mean of the whole image names its class, that of the center another one."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[..., 0] = 4
    pixels[8:24, 8:24, 0] = 0  # a quarter of the area: the mean is 3
    pixels[..., 2] = 255
    places = {number: name for name, number in imagenet_places().items()}
    for severity, right in ((1, 3), (5, 4)):
        folder = tmp_path / "weather" / "fog" / str(severity) / places[right]
        folder.mkdir(parents=True)
        Image.fromarray(pixels).save(folder / "image.png")
    tests = Trials(corruptions=("fog",), severities=(1, 5), prepared=tmp_path, attacks=())
    found, _ = robustness([by_color(crop=0.5)], None, tests=tests, feeding=QUICK)
    scores = found.data["models"]["by color"]["corruptions"]["fog"]
    assert (scores["1"]["top1"], scores["5"]["top1"]) == (100, 0)
    assert dict(zip(found.columns, found.table[0], strict=True)) == {"model": "by color", "error": 50, "Fog": 50}
    with pytest.raises(DataError, match="no fog at severity 2"):
        open_prepared(tmp_path, "fog", 2, by_color())


def result(errors: dict[str, float]) -> Result:
    """A model with the same error, from 0 to 1, at all severities of a corruption."""
    whole = 1_000_000
    scores = {name: Score(round(whole * (1 - error)), whole) for name, error in errors.items()}
    return Result("model", corruptions={name: dict.fromkeys(SEVERITIES, score) for name, score in scores.items()})


def test_alexnet_has_an_mce_of_100() -> None:
    alexnet = result(alexnet_errors())
    assert alexnet.mce == pytest.approx(100, abs=1e-3)
    assert alexnet.error == pytest.approx(100 * np.mean(list(alexnet_errors().values())), abs=1e-3)


def test_the_row_of_sequencer_in_its_table_9_adds_up() -> None:
    row = [43.3, 42.0, 41.4, 55.2, 71.0, 51.8, 63.3, 44.2, 41.0, 41.9, 37.1, 33.8, 66.6, 50.4, 51.1]
    known = alexnet_errors()
    model = result({name: error / 100 * known[name] for name, error in zip(standard(), row, strict=True)})
    assert model.mce == pytest.approx(48.9, abs=0.05)
    assert model.corruption_error("fog") == pytest.approx(41.9, abs=1e-3)


def test_without_all_fifteen_and_all_severities_there_is_no_mce() -> None:
    errors = alexnet_errors()
    partial = result({name: errors[name] for name in list(errors)[:14]})
    assert partial.mce is None
    assert partial.error is not None
    whole = result({**errors, "saturate": 0.0})
    assert whole.error == pytest.approx(result(errors).error)  # extra ones do not count
    assert whole.corruption_error("saturate") is None
    del whole.corruptions["fog"][3]
    assert whole.mce is None
    other = result(errors)
    other.of_imagenet_c = False
    assert other.mce is None


# -- the same images for everybody ---------------------------------------------------------------


def pixels_by_index(feeding: Feeding) -> dict[int, Tensor]:
    transform = Pixels(Look((SIDE, 40), 1, 1.0, "bicubic"), Corrupt("frost", 3))
    loaded, total = batches(open_digits("val"), transform, feeding)
    found = {int(index): one for batch in loaded for index, one in zip(batch.indices, batch.images, strict=True)}
    assert len(found) == total
    return found


def test_corrupted_images_depend_on_seed_and_index_only() -> None:
    whole = pixels_by_index(Feeding(batch=64, workers=0, seed=3))
    some = pixels_by_index(Feeding(batch=7, workers=2, seed=3, images=30))
    assert len(some) == 30
    assert all(torch.equal(one, whole[index]) for index, one in some.items())
    other = pixels_by_index(Feeding(batch=64, workers=0, seed=4, images=30))
    assert not any(torch.equal(one, whole[index]) for index, one in other.items())


def test_the_function_gives_the_image_that_a_run_sees() -> None:
    look = Look((SIDE, 40), 1, 1.0, "bicubic")
    index, seen = max(pixels_by_index(Feeding(workers=0, seed=3, images=4)).items())
    clean = Pixels(look)(open_digits("val").read(index))
    levels = (255 * clean[0]).round().to(torch.uint8).numpy()
    assert np.array_equal(
        (255 * seen[0]).round().to(torch.uint8).numpy(), corrupt(levels, "frost", 3, seed=3, index=index)
    )


def test_clean_accuracy_is_that_of_eval(weights: Path) -> None:
    found, figures = robustness([weights], "digits", tests=NOTHING, feeding=QUICK)
    assert found.table[0][1] == pytest.approx(evaluate(weights, "digits", workers=0)["top1"])
    assert found.columns == ("model", "clean")
    assert not figures


def test_equal_scores_and_no_numbers_count_for_no_class() -> None:
    class Flat(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            values = torch.tensor([1.0, float("nan")]).repeat(len(images) // 2 + 1)[: len(images)]
            return values[:, None].expand(-1, 1000)

    subject = by_color()
    object.__setattr__(subject, "model", Flat())
    (told,) = examine([subject], open_digits("val"), QUICK)
    assert set(told.classes) == {-1}


# -- attacks and corruptions of a trained model --------------------------------------------------


def test_accuracy_falls_as_epsilon_grows_and_zero_is_clean(weights: Path, tmp_path: Path) -> None:
    attacks = tuple(Attack(kind=kind, epsilon=epsilon) for kind in ("fgsm", "pgd") for epsilon in (0, 4, 16, 48))
    some = Feeding(batch=60, workers=0, images=180)
    found, figures = robustness([weights], "digits", tests=Trials(corruptions=(), attacks=attacks), feeding=some)
    own = found.data["models"][str(weights)]
    assert own["clean"]["top1"] > 85
    for kind in ("fgsm", "pgd"):
        rows = {row["epsilon"]: row["top1"] for row in own["attacks"] if row["kind"] == kind}
        assert rows[0] == own["clean"]["top1"]
        assert rows[0] > rows[4] > rows[16] > rows[48]
        assert rows[48] < 30
    write_finding(found, tmp_path, figures)
    assert read_finding(tmp_path / "robustness.json").data == json.loads(json.dumps(found.data))
    assert (tmp_path / "robustness-epsilon.svg").stat().st_size > 1000


def test_a_model_that_does_not_repeat_itself_has_no_result(digits_model: Backbone) -> None:
    class Dice(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.rand(len(images), 10) + 0 * images.mean((1, 2, 3))[:, None]

    subject = of_backbone("dice", digits_model, None, trained=True)
    object.__setattr__(subject, "model", Dice())
    with pytest.raises(MixlabError, match="epsilon of 0"):
        robustness([subject], "digits", tests=Trials(corruptions=(), attacks=(Attack(kind="fgsm"),)), feeding=QUICK)


def test_corrupted_digits_are_harder_and_models_do_not_disturb_each_other(
    weights: Path, digits_model: Backbone
) -> None:
    tests = Trials(corruptions=("contrast", "gaussian_noise"), severities=(1, 5), attacks=())
    feeding = Feeding(batch=60, workers=0, images=120)
    larger = of_backbone("larger", digits_model, 48, trained=True)
    together, figures = robustness([weights, larger], "digits", tests=tests, feeding=feeding)
    alone, _ = robustness([larger], "digits", tests=tests, feeding=feeding)
    assert together.data["models"]["larger"] == alone.data["models"]["larger"]
    assert together.columns == ("model", "clean", "error", "Gauss.", "Contrast")
    noise = together.data["models"][str(weights)]["corruptions"]["gaussian_noise"]
    assert noise["1"]["top1"] > noise["5"]["top1"]
    assert sorted(figures) == ["robustness-corruptions", "robustness-severity"]


def test_ctrl_c_keeps_what_is_whole(weights: Path, tmp_path: Path) -> None:
    tests = Trials(corruptions=("brightness", "contrast"), severities=(1, 5), attacks=(Attack(kind="fgsm"),))
    some = Feeding(batch=24, workers=0, images=24)

    def stop_at(title: str) -> Watch:
        def watch(what: str, done: int, total: int) -> None:
            if what.startswith(title):
                raise KeyboardInterrupt

        return watch

    found, figures = robustness([weights], "digits", tests=tests, feeding=some, watch=stop_at("contrast 5"))
    assert found.settings["interrupted"]
    assert found.columns == ("model", "clean", "error", "Bright", "FGSM 1/255")
    write_finding(found, tmp_path, figures)
    early, figures = robustness([weights], "digits", tests=tests, feeding=some, watch=stop_at("brightness 1"))
    assert early.columns == ("model", "clean", "FGSM 1/255")
    assert list(figures) == ["robustness-epsilon"]
    with pytest.raises(KeyboardInterrupt):
        robustness([weights], "digits", tests=tests, feeding=some, watch=stop_at("clean"))


# -- errors --------------------------------------------------------------------------------------


def test_what_cannot_be_measured_is_said_before_anything_runs(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1000 classes apart; digits has 10"):
        robustness([by_color()], "digits")
    with pytest.raises(ConfigError, match="each once"):
        robustness([weights, weights], "digits")
    with pytest.raises(ConfigError, match="no images for corruptions and attacks"):
        robustness([weights], None)
    with pytest.raises(ConfigError, match="Nothing to measure"):
        robustness([weights], None, tests=NOTHING)
    with pytest.raises(ConfigError, match="sketch"):
        Trials(variants={"skech": tmp_path})
    with pytest.raises(ConfigError, match="tiny_imagenet"):
        Trials(severity_set="tiny_imagnet")
    with pytest.raises(DataError, match="not a folder"):
        robustness([by_color()], None, tests=Trials(corruptions=(), attacks=(), variants={"a": tmp_path / "nowhere"}))


def test_images_that_are_too_small_to_corrupt_and_crops_that_are_none_are_errors(weights: Path) -> None:
    with pytest.raises(ConfigError, match=r"32 pixels or more.*24 x 24"):
        robustness([weights], "digits", feeding=Feeding(image_size=24, workers=0))
    with pytest.raises(ConfigError, match="crop"):
        Feeding(crop=0)


def test_data_of_which_nothing_can_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "broken.png").write_text("no image")
    with pytest.raises(DataError, match="None of the images"):
        top1(by_color(), "v2", tmp_path)


def test_a_dollar_in_the_name_of_a_model_is_no_formula(tmp_path: Path) -> None:
    for number in range(2):
        put(tmp_path / "fog" / "1" / str(number), color(number))
    tests = Trials(corruptions=("fog",), severities=(1,), attacks=(), prepared=tmp_path)
    found, figures = robustness([replace(by_color(), name="run$x_{/a$")], None, tests=tests, feeding=QUICK)
    write_finding(found, tmp_path / "out", figures)


def test_other_classes_of_the_same_number_are_refused(weights: Path, tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "val" / f"class{number}", color(number))
    with pytest.raises(DataError, match="'0' / 'class0'"):
        robustness([weights], tmp_path, tests=NOTHING)


# -- the verb ------------------------------------------------------------------------------------


def test_the_verb_puts_several_models_into_one_table(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("resnet10t", num_classes=10).state_dict(), tmp_path / "resnet.safetensors")
    peer = f"timm:resnet10t={tmp_path / 'resnet.safetensors'}"
    words = "--images 24 --batch 24 --workers 0 --image-size 32 --severity-set cifar --severities 1 --epsilon 1 2"
    parsed = robustness_parser().parse_args(
        [str(weights), peer, "digits", *words.split(), "--corruptions", "noise", "fog", "--out", str(tmp_path / "out")]
    )
    verb(parsed)
    printed = capsys.readouterr()
    assert printed.err == ""
    header, *rows = printed.out.splitlines()
    for title in ("clean", "error", "Gauss.", "Fog", "FGSM 1/255", "PGD 2/255"):
        assert title in header
    assert [row.split()[0] for row in rows[:2]] == [str(weights), peer]
    found = read_finding(tmp_path / "out" / "robustness.json")
    assert len(found.table) == 2
    assert {picture.name for picture in found.pictures} == {
        "robustness-corruptions",
        "robustness-severity",
        "robustness-epsilon",
    }
    assert found.settings["severity_set"] == "cifar"


def test_the_verb_runs_variants_without_data(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        put(tmp_path / str(number), color(0))
    verb(
        robustness_parser().parse_args(
            [str(weights), "none", "--imagenet-v2", str(tmp_path), "--workers", "0", "--json"]
        )
    )
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == ["model", "V2"]
    with pytest.raises(ConfigError, match="is a file"):
        verb(robustness_parser().parse_args([str(weights), "digits", "--out", str(weights)]))
