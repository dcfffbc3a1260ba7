"""Every command of docs/reproduce.md runs: with tiny models, a few images and one update."""

from pathlib import Path

import pytest

from tests.tools.page_commands import (
    RUNNERS,
    TRAINING,
    Command,
    page_commands,
    shapes,
    weight_files,
    written_by,
)
from tests.tools.toy_world import make_data, run, shrink_models

QUICK = [
    pytest.param(command, id=shape, marks=[pytest.mark.heavy] if "--compile" in command.flags else [])
    for shape, command in shapes().items()
]
OTHERS = [command for command in page_commands() if shapes()[command.shape] != command]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    make_data(folder)
    return folder


@pytest.fixture(autouse=True)
def _world(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go into a folder of their own, which has the data by their names."""
    for entry in data.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXLAB_CACHE", str(tmp_path / "cache"))
    shrink_models(monkeypatch)


def test_every_command_has_a_runner_that_is_prepared_for_it() -> None:
    """A new verb or flag on the page needs to be told here how it is made short."""
    for command in page_commands():
        assert command.kind in RUNNERS, command
        assert command.flags <= RUNNERS[command.kind].flags, command
    for kind, runner in RUNNERS.items():
        used = [command.flags for command in page_commands() if command.kind == kind]
        assert frozenset().union(*used) == runner.flags, f"not on the page: {kind}"


def test_weights_that_commands_read_are_written_by_others() -> None:
    """By earlier ones, where something is trained: what is measured may take weights of a later table."""
    made: set[str] = set()
    for command in page_commands():
        read = {str(Path(file).parent) for file in weight_files(command.words)}
        assert read <= (made if command.verb in TRAINING else written_by().keys()), command
        if command.verb in TRAINING:
            made.add(command.arguments.out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", QUICK)
def test_a_command_of_every_shape_runs(command: Command) -> None:
    run(command)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_all_other_commands_run(command: Command) -> None:
    run(command)
