from pathlib import Path

from mixlab import create_model, save_weights
from mixlab.evals.subjects import open_subject


def test_a_weight_file_may_have_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    path = tmp_path / "lr=1e-3.safetensors"
    save_weights(create_model("caformer_pico", num_classes=3), path)
    subject = open_subject(path)
    assert (subject.num_classes, subject.trained) == (3, True)
