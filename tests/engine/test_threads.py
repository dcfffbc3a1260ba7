"""Several threads, processes and copies of a model, and other numbers of threads."""

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import mixlab
from mixlab.core.hooks import without_engine
from mixlab.engine.cache import CACHE
from mixlab.engine.kernels import has_wide_vectors

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="plans are for kernels with vectors of 8 or more")


def model_of(name: str = "vil_pico") -> mixlab.Backbone:
    torch.manual_seed(0)
    return mixlab.create_model(name, image_size=64).eval()


def run(model: mixlab.Backbone, image: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(image)


def test_two_threads_that_run_one_plan_at_once_have_memory_of_their_own() -> None:
    model, images = model_of(), torch.randn(12, 1, 3, 64, 64)
    wanted = [run(model, image) for image in images]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for output, expected in zip(pool.map(lambda image: run(model, image), images), wanted, strict=True):
                torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_thread_without_the_engine_leaves_it_to_the_others() -> None:
    model, image, answers = model_of(), torch.randn(1, 3, 64, 64), []
    with without_engine():
        run(model, image)
        assert not CACHE.entries(model)
        thread = threading.Thread(target=lambda: answers.append(run(model, image)))
        thread.start()
        thread.join()
    assert CACHE.entries(model)
    assert answers


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_runs_the_plans_that_it_inherits() -> None:
    model, image = model_of(), torch.randn(1, 3, 64, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
    try:
        wanted = run(model, image)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(run(model, image), wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads)


def test_another_number_of_threads_has_a_plan_of_its_own() -> None:
    model, image = model_of(), torch.randn(1, 3, 64, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(model, image)
        torch.set_num_threads(2)
        two = run(model, image)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert {key[4] for key in CACHE.entries(model)} == {1, 2}  # type: ignore[index]


def test_a_copy_has_plans_of_its_own() -> None:
    model, image = model_of(), torch.randn(1, 3, 64, 64)
    wanted = run(model, image)
    twin = copy.deepcopy(model)
    assert not CACHE.entries(twin)
    torch.testing.assert_close(run(twin, image), wanted, rtol=0, atol=0)
    with torch.no_grad():
        twin.get_parameter("head.classifier.weight").data.fill_(1)
    assert not torch.equal(run(twin, image), wanted)
    torch.testing.assert_close(run(model, image), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("assign", [True, False])
def test_loaded_weights_are_used_at_once(assign: bool) -> None:
    model, image = model_of(), torch.randn(1, 3, 64, 64)
    before = run(model, image)
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()}, assign=assign)
    with without_engine():
        wanted = run(model, image)
    assert not torch.allclose(wanted, before, rtol=1e-3)
    torch.testing.assert_close(run(model, image), wanted, rtol=1e-4, atol=1e-5)


def test_gradients_autocast_and_other_numbers_go_to_pytorch() -> None:
    model, image = model_of("convformer_pico"), torch.randn(1, 3, 64, 64)
    model(image).sum().backward()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(image)
    with torch.inference_mode():
        copy.deepcopy(model).double()(image.double())
        assert not CACHE.entries(model)
        model(image)
        assert CACHE.entries(model)
    model.train()
    with torch.no_grad():
        model(image)
    assert not CACHE.entries(model)


def test_intermediates_are_those_of_pytorch() -> None:
    model, image = model_of("hpx_former_pico"), torch.randn(2, 3, 64, 64)
    names = ("stem", "stages.0.blocks.0", "stages.1", "stages.3.blocks.0")
    with torch.inference_mode():
        with without_engine():
            wanted, maps = model.intermediates(image, names), model.pyramid(image)
        for name, found in model.intermediates(image, names).items():
            torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-5)
        for found, expected in zip(model.pyramid(image), maps, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
