import pytest

import mixlab
from mixlab.evals.cost.summary import count_model, describe_parts, stored_counts, summarize
from mixlab.models.zoo import model_config


@pytest.mark.parametrize("name", mixlab.list_models())
def test_stored_counts_are_right(name: str) -> None:
    assert stored_counts()[name] == count_model(name), "run `make counts`"


@pytest.mark.parametrize("name", ["randformer_s12", "coat_tiny", "sequencer2d_s"])
def test_the_parts_add_up_to_the_model(name: str) -> None:
    config = model_config(name)
    parts, whole = describe_parts(config, (224, 224)), summarize(name)
    assert sum(part.params for part in parts) == whole.params
    assert sum(part.frozen for part in parts) == whole.frozen
    assert sum(part.macs for part in parts) == whole.macs


def test_a_model_without_classes_ends_in_its_features() -> None:
    assert describe_parts(model_config("caformer_pico", num_classes=0), (32, 32))[-1].output == (128,)
