import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mixlab.core.errors import ConfigError
from mixlab.evals.cost.compile_time import CompileTime, compile_time
from mixlab.evals.cost.execution import Execution


def test_two_processes_share_one_cache_that_is_empty_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[tuple[Path, list[Path]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        caches.append((cache, list(cache.iterdir())))
        (cache / "kernel").touch()
        assert json.loads(command[-1])["execution"]["compiled"]
        answer = {"trivial": 14.0 / len(caches), "model": 30.0 / len(caches), "graphs": 3}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(answer), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    found = compile_time("caformer_pico", (32, 32), batch=2, execution=Execution())
    assert found == CompileTime(cold=30.0, warm=15.0, trivial_cold=14.0, trivial_warm=7.0, graphs=3)
    (cold, before), (warm, after) = caches
    assert cold == warm
    assert (before, [path.name for path in after]) == ([], ["kernel"])
    assert not cold.exists()


def test_what_the_process_says_reaches_the_user() -> None:
    with pytest.raises(
        ConfigError, match="compile time of 'caformer_pic' cannot be measured: 'caformer_pic' is neither"
    ):
        compile_time("caformer_pic", (32, 32), batch=2, execution=Execution())


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_model_compiles_in_processes_of_its_own() -> None:
    found = compile_time("convformer_pico", (32, 32), batch=2, execution=Execution())
    assert found.graphs >= 1
    assert min(found.cold, found.warm, found.trivial_cold, found.trivial_warm) > 0
