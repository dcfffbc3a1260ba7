import json
import math
from pathlib import Path

import pytest

from mixlab.core.errors import ConfigError
from mixlab.report import Budget, Comparison, Point, describe_machine, read_comparison, write_comparison
from tests.report.invented import comparison, model, several


def test_mean_and_spread_over_seeds() -> None:
    three = model("a", 96.0, 97.0, 98.0)
    assert (three.mean, three.spread) == (97.0, 1.0)
    assert (model("b", 96.0).mean, model("b", 96.0).spread) == (96.0, None)
    assert (model("c").mean, model("c").spread) == (None, None)


def test_json_round_trip(tmp_path: Path) -> None:
    whole = several(
        3,
        2,
        budget=Budget(max_ms=3.5, max_params=10),
        command="mixlab compare",
        settings={"optimizer.lr": "0.001"},
        machine=describe_machine(),
    )
    write_comparison(whole, tmp_path / "results.json")
    assert read_comparison(tmp_path / "results.json") == whole
    assert Comparison.parse(json.loads(json.dumps(whole.plain()))) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_loss_that_is_not_finite_becomes_nothing() -> None:
    diverged = comparison(model("a", 10.0, curves=((Point(1, math.nan, math.inf, 10.0),),)))
    text = json.dumps(diverged.plain(), allow_nan=False)
    assert Comparison.parse(json.loads(text)).models[0].curves == ((Point(1, None, None, 10.0),),)


def test_ranked_puts_models_without_accuracy_last() -> None:
    assert [m.name for m in comparison(model("a"), model("b", 1.0), model("c", 2.0)).ranked()] == ["c", "b", "a"]


def test_wrong_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_comparison(path)
    for text, said in (("{", "not a comparison in JSON"), ("[]", "not a mapping"), ('{"titel": 1}', "'titel'")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_comparison(path)
    row = several(1, 1).plain()
    with pytest.raises(ConfigError, match="strings to strings"):
        Comparison.parse({**row, "machine": {"cores": 2}})


def test_impossible_values_are_errors() -> None:
    with pytest.raises(ConfigError, match="every model once"):
        comparison(model("a", 1.0), model("a", 2.0))
    with pytest.raises(ConfigError, match="percent"):
        model("a", 101.0)
    with pytest.raises(ConfigError, match="above 0"):
        Budget(max_ms=0.0)
