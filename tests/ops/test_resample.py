import torch

from mixlab.core.grid import Grid
from mixlab.ops.resample import resample_mixing_matrix


def test_the_same_grid_changes_nothing() -> None:
    matrix = torch.rand(12, 12).softmax(-1)
    assert resample_mixing_matrix(matrix, Grid(3, 4), Grid(3, 4)) is matrix


def test_local_averaging_stays_local() -> None:
    """An identity matrix on a large grid is near the identity after it has been halved."""
    halved = resample_mixing_matrix(torch.eye(64), Grid(8, 8), Grid(4, 4))
    torch.testing.assert_close(halved.sum(1), torch.ones(16))
    assert (halved.argmax(1) == torch.arange(16)).all()


def test_uniform_mixing_stays_uniform() -> None:
    larger = resample_mixing_matrix(torch.full((6, 6), 1 / 6), Grid(2, 3), Grid(5, 4))
    torch.testing.assert_close(larger, torch.full((20, 20), 1 / 20))
