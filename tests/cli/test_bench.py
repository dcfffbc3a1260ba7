import json
from pathlib import Path

import pytest
import torch

from mixlab.cli import bench as verb
from mixlab.core.errors import ConfigError, TrainingError
from mixlab.evals.cost import bench as module
from mixlab.evals.cost.bench_case import BenchRow, Case, Conditions, row_of
from mixlab.evals.cost.compute import count_macs
from mixlab.findings.findings import read_finding

QUICK = ["--seconds", "0.01", "--rounds", "2"]


def run(*words: str) -> int:
    return verb.bench(verb.bench_parser().parse_args(list(words)))


def test_models_print_a_table_and_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["caformer_pico", "--sizes", "32x48", "--batches", "2", "--skip", "memory", "--out", str(tmp_path)]
    assert run(*words, *QUICK) == 0
    header, row, shared, written = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["model", "mode", "image_size"]
    assert row.split()[:3] == ["caformer_pico", "inference", "32x48"]
    assert "machine" not in header
    assert shared.startswith("all rows: ")
    assert "machine" in shared
    assert written == f"written: {tmp_path / 'bench.json'}"
    assert "machine" in read_finding(tmp_path / "bench.json").columns
    assert (tmp_path / "throughput.svg").exists()


def test_json_is_the_whole_finding(capsys: pytest.CaptureFixture[str]) -> None:
    run("caformer_pico", "--sizes", "32", "--batches", "2", "--skip", "memory", "--json", *QUICK)
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "bench"
    assert found["data"]["rows"][0]["image_size"] == [32, 32]


def test_ctrl_c_prints_and_writes_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(case: Case, conditions: Conditions) -> BenchRow:
        if case.batch == 2:
            raise KeyboardInterrupt
        return row_of(case, conditions, images_per_second=1.0, best_ms=1.0, spread=0.0)

    monkeypatch.setattr(module, "measure_case", interrupt)
    assert run("caformer_pico", "--sizes", "32", "--batches", "1", "2", "--out", str(tmp_path)) == 130
    assert "caformer_pico" in capsys.readouterr().out
    assert len(read_finding(tmp_path / "bench.json").table) == 1


def test_models_are_changed_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--model-set", "mixers=pool", "mlp_ratio=1"]
    run("caformer_pico", "--sizes", "32", "--batches", "2", "--skip", "memory", *changes, *QUICK)
    assert "changes mixers=pool mlp_ratio=1" in capsys.readouterr().out
    run("caformer_pico", "--compute", "--sizes", "32", "--json", *changes)
    found = json.loads(capsys.readouterr().out)
    assert found["data"]["rows"][0]["macs"] == count_macs("caformer_pico", 32, {"mixers": "pool", "mlp_ratio": 1})


def test_mixers_take_options_and_print_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    run("--mixers", "pool", "hyena_pixel:filter=separable,kernel=5", "--lengths", "16", "64", "--dim", "8", *QUICK)
    out = capsys.readouterr().out
    assert "hyena_pixel filter=separable kernel=5" in out
    assert "exponent of time" in out


def test_activations_print_flops(capsys: pytest.CaptureFixture[str]) -> None:
    run("--activations", "ReLU", "--units", "64", *QUICK)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["activation", "source", "flops"]
    assert [line.startswith(name) for line, name in zip(lines[1:3], ("ReLU", "GELU (Equation 9)"), strict=True)]


def test_compute_prints_macs_or_all_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    run("caformer_pico", "--compute", "--sizes", "32", "64")
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "model",
        "height",
        "width",
        "GMACs",
        "GFLOPs",
        "exponent",
    ]
    run("vil_pico", "--compute", "--recipe", "digits", "--images", "1000", "--tflops", "10", "--drop-path", "mask")
    header, row = capsys.readouterr().out.splitlines()
    assert header.endswith("GPU hours at 10 TFLOP/s")
    assert row.split()[:2] == ["vil_pico", "digits"]


@pytest.mark.parametrize(
    ("words", "recipes"),
    [
        ([], {"vil_tiny": ["vision_lstm_imagenet_192", "vision_lstm_imagenet_224"], "caformer_pico": ["digits"]}),
        (["digits"], {"vil_tiny": ["digits"], "caformer_pico": ["digits"]}),
    ],
)
def test_each_model_has_recipes_of_its_own(
    words: list[str], recipes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run("vil_tiny", "caformer_pico", "--compute", "--json", "--recipe", *words, "caformer_pico=digits")
    assert json.loads(capsys.readouterr().out)["settings"]["recipes"] == recipes


def test_a_bare_recipe_takes_those_of_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    run("caformer_pico", "vil_pico", "--compute", "--recipe", "--json")
    recipes = json.loads(capsys.readouterr().out)["settings"]["recipes"]
    assert recipes == {"caformer_pico": ["from_scratch_small"], "vil_pico": ["from_scratch_small"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing: MODEL"),
        (["caformer_pico", "--mixers", "pool"], "takes no models"),
        (["--mixers", "--activations"], "at a time"),
        (["caformer_pico", "--lengths", "16"], "--lengths is for --mixers"),
        (["caformer_pico", "--compute", "--training"], "--training is for models or --activations"),
        (["--mixers", "--model-set", "bias=true"], "--model-set is for models or --compute"),
        (["caformer_pico", "--model-set", "bias"], "--model-set takes KEY=VALUE"),
        (["caformer_pico", "--compute", "--model-set", "biass=true"], "Unknown model option 'biass'"),
        (["caformer_pico", "--optimizer", "adamw"], "add --training"),
        (["caformer_pico", "--compute", "--images", "9"], "add --recipe"),
        (["caformer_pico", "--compute", "--recipe", "caformer_pic=digits"], "Did you mean 'caformer_pico'"),
        (["ensemble_hpx_conv_s18", "--compute", "--recipe"], "is an ensemble"),
        (["timm:resnet18", "--compute", "--recipe"], "Only named models of Mixlab have recipes"),
        (["deit3_small", "--compute", "--recipe"], "No paper of Mixlab's describes how 'deit3_small' was trained"),
        (["caformer_pico", "--compute", "--recipe", "digits", "--sizes", "32"], "does not go with --recipe"),
        (["--mixers", "pool", "--batches", "1", "2"], "takes one value here"),
        (["--mixers", "pool:size"], "takes KEY=VALUE"),
        (["caformer_pico", "--sizes", "big"], "got 'big'"),
        (["caformer_pico", "--out", "/dev/null"], "is a file"),
    ],
)
def test_words_that_do_not_go_together_are_errors(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*words)


@pytest.mark.parametrize("mode", [["--mixers", "pool"], ["--activations", "ReLU"], ["caformer_pico"]])
def test_every_measurement_takes_a_device(mode: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="no CUDA device"):
        run(*mode, "--device", "cuda:0")
