import pytest

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.evals.inspect.kernel_coverage import compare_coverage
from mixlab.evals.inspect.kernels import GLOBAL, learned_kernels
from mixlab.evals.subjects import open_subject


def test_every_model_has_a_line_over_its_blocks() -> None:
    """HyenaPixel, Figure 6: attention counts as 2, and what neither attends nor convolves leaves a gap."""
    mixers = ["hyena_pixel", "pool", "sepconv", "attention"]
    hybrid, pure = mixlab.create_model("caformer_pico", mixers=mixers), mixlab.create_model("hpx_former_pico")
    found, figures = compare_coverage([open_subject(hybrid), open_subject(pure)])
    lines = {name: dict(places) for name, places in found.data["coverage"].items()}
    names = list(lines)
    assert list(lines[names[0]]) == [0, 3, 4, 5, 6, 7]  # two blocks of pooling are left out
    assert lines[names[0]][7] == GLOBAL
    assert lines[names[0]][3] == pytest.approx(7 / 4)
    assert list(lines[names[1]].values()) == [block.coverage for block in learned_kernels(pure).values()]
    assert len(figures["coverage"].axes[0].lines) == 2
    assert sorted(figures) == sorted(picture.name for picture in found.pictures)
    assert [row[0] for row in found.table].count(names[1]) == len(lines[names[1]])


def test_models_that_cannot_be_compared_are_errors() -> None:
    one, plain = open_subject("hpx_former_pico"), open_subject("deit_tiny", image_size=32)
    with pytest.raises(ConfigError, match="two or more different models"):
        compare_coverage([one, open_subject("hpx_former_pico")])
    with pytest.raises(ConfigError, match="no kernels to show"):
        compare_coverage([one, plain])
