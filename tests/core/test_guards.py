"""The guards act on a whole process, so each test starts one."""

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixlab.core.guards import ISA_VARIABLE, SAFE_ISA, advertises_amx, is_allocator_untouched, is_constant

IMPORTS = "import mixlab, torchvision, timm; print(timm.create_model('resnet10t').default_cfg['input_size'])"
TWICE = """
try:
    import torchvision
except RuntimeError:
    pass
import mixlab, torchvision.transforms
print("fine")
"""
BF16 = """
import torch
{before}
import mixlab
model = mixlab.create_model("caformer_pico", num_classes=3).eval()
try:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        print("finite", bool(model(torch.randn(2, 3, 64, 64)).isfinite().all()))
except mixlab.MixlabError as error:
    print("refused", error)
"""
USE_ONEDNN = "torch.nn.functional.conv2d(torch.randn(4, 3, 99, 99), torch.randn(16, 3, 3, 3))"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {key: value for key, value in os.environ.items() if key != ISA_VARIABLE}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**settings, **environment})


def test_torchvision_and_timm_import_after_mixlab() -> None:
    done = run(IMPORTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(3, 176, 176)"


def test_a_torchvision_import_that_failed_before_can_be_repeated() -> None:
    assert run(TWICE).stdout.strip() == "fine"


def test_a_torchvision_whose_operators_load_is_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    code = "import mixlab.core.guards as guards; print(guards._torchvision_schemas)"
    assert run(code, PYTHONPATH=str(tmp_path)).stdout.startswith("Library")
    shutil.copy(_ctypes.__file__, package / "_C.so")  # any library that loads
    assert run(code, PYTHONPATH=str(tmp_path)).stdout.strip() == "None"


def test_bf16_never_kills_the_process() -> None:
    done = run(BF16.format(before=""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finite True"), done.stdout


@pytest.mark.skipif(not advertises_amx(), reason="this CPU does not advertise AMX")
def test_bf16_too_late_to_be_made_safe_is_refused_or_works() -> None:
    done = run(BF16.format(before=USE_ONEDNN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finite True") or f"{ISA_VARIABLE}={SAFE_ISA}" in done.stdout


def test_bf16_runs_quietly_with_the_safe_instruction_set() -> None:
    done = run(BF16.format(before=USE_ONEDNN), **{ISA_VARIABLE: SAFE_ISA})
    assert done.stdout.startswith("finite True"), done.stderr
    assert "traps" not in done.stderr


def test_importing_mixlab_imports_nothing_that_only_some_tasks_need() -> None:
    heavy = (
        "torch._dynamo",
        "transformers",
        "torchmetrics",
        "faster_coco_eval",
        "torchvision.models.detection",
        "sklearn",
        "tensorboard",
        "mixlab.hub.hugging_face",
        "mixlab.hub.timm",
    )
    use = "mixlab.create_model('vil_pico').eval()(torch.randn(1, 3, 32, 32))"
    code = f"import sys, torch, mixlab; {use}; print([name for name in {heavy!r} if name in sys.modules])"
    code += "; import mixlab.dense.deformable_detr; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_a_constant_is_marked_as_the_compiler_does_it() -> None:
    def one() -> int:
        return 1

    def other() -> int:
        return 1

    assert vars(is_constant(one)) == vars(torch.compiler.assume_constant_result(other))


FAULTS = """
import resource, torch
import mixlab
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
for turn in range(12):
    if turn == 2:
        before = faults()
    several = [torch.ones(2**22) for _ in range(5)]  # 80 MB
    del several
held = resident()
mixlab.core.guards.return_freed_memory()
print(faults() - before, held - resident(), mixlab.core.guards.keep_freed_memory())
"""


needs_glibc = pytest.mark.skipif(
    not is_allocator_untouched(), reason="another C library, or one that is set up already"
)


@needs_glibc
def test_freed_memory_is_kept_until_it_is_returned() -> None:
    faults, returned, keeps = run(FAULTS).stdout.split()
    assert int(faults) < 50_000  # 80 MB are 20,480 pages, and the heap may grow once or twice
    assert int(returned) > 50_000  # KB
    assert keeps == "True"


@needs_glibc
@pytest.mark.parametrize("setting", [{"MIXLAB_KEEP_MEMORY": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_who_sets_up_memory_himself_is_left_alone(setting: dict[str, str]) -> None:
    told = run("import mixlab; print(mixlab.core.guards.keep_freed_memory())", **setting).stdout.strip()
    assert told == "False"  # what glibc does by itself is not the same in every process
