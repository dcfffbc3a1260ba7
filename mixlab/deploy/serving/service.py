"""The way of a request's images: checked, admitted, decoded, batched, answered."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mixlab.core.errors import MixlabError, require
from mixlab.deploy.serving.answers import About, Asked, Milliseconds
from mixlab.deploy.serving.batching import Batcher, Done
from mixlab.deploy.serving.images import blank_image, check_image
from mixlab.deploy.serving.limits import HELD_BODIES, Limits, Overload, Refusal, Room
from mixlab.deploy.serving.metrics import Metrics
from mixlab.deploy.serving.predictors import predictor_for
from mixlab.models.dense_model import DenseModel
from mixlab.models.model import Model

DECODERS = 2  # threads; each holds one decoded image
AHEAD = 4  # batches that are prepared while one is in the model
log = logging.getLogger("mixlab.serve")


class Service:
    """A model with its queue."""

    def __init__(self, model: Model | DenseModel, name: str, limits: Limits, *, batch: int, wait_ms: float) -> None:
        require(batch >= 1, f"a batch of 1 image or more; got {batch}.")
        require(0 <= wait_ms <= 1000 * limits.timeout, f"wait_ms from 0 to the timeout; got {wait_ms}.")
        require(limits.queue >= limits.max_images, f"a queue of max_images ({limits.max_images}) or more.")
        self.name, self.limits = name, limits
        self.predictor = predictor_for(model)
        self.waiting = 0  # images that were admitted and have no result yet
        self.metrics = Metrics(lambda: self.waiting)
        self.room = Room(HELD_BODIES * limits.max_bytes)
        most = batch if self.predictor.stacks else 1
        self.batcher = Batcher(self.predictor.run, most=most, wait=wait_ms / 1000, coming=lambda: self.waiting)
        self.slots = asyncio.Semaphore(AHEAD * batch)
        self.decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="mixlab-decode")

    async def start(self) -> None:
        """One image goes through the model before the first request: it is slow, and a broken model shows."""
        self.batcher.start()
        await self.one(blank_image(), self.predictor.fullest)
        self.batcher.watch = self.metrics.batch

    async def stop(self) -> None:
        """Requests have been answered by now; what is left belongs to clients that gave up."""
        self.decoders.shutdown(cancel_futures=True)
        await asyncio.to_thread(self.batcher.close, self.limits.timeout)

    def about(self) -> About:
        own, limits = self.predictor, self.limits
        return About(
            task=own.task,
            model=self.name,
            classes=own.classes,
            image_size=list(own.image_size),
            max_bytes=limits.max_bytes,
            max_pixels=limits.max_pixels,
            max_images=limits.max_images,
            timeout=limits.timeout,
        )

    async def predict(self, images: Sequence[bytes], asked: Asked, since: float) -> Any:
        """The answer for all images, or the refusal that the first bad one deserves. `since`: when the request came."""
        read = time.perf_counter()
        if self.waiting + len(images) > self.limits.queue:
            raise Overload(f"{self.waiting} images wait already.")
        self.waiting += len(images)
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self.check(images)
                found = await asyncio.gather(*(self.one(data, asked) for data in images), return_exceptions=True)
        except TimeoutError:
            raise Overload(f"No answer within {self.limits.timeout:g} seconds.") from None
        finally:
            self.waiting -= len(images)
        done = [sound(outcome, place, len(images)) for place, outcome in enumerate(found, 1)]
        spent = timing(since, read, max(one.took for one in done))
        return self.predictor.answer(model=self.name, results=[one.value for one in done], milliseconds=spent)

    async def check(self, images: Sequence[bytes]) -> None:
        """Headers of all images first: nothing is predicted for a request that will be refused by one of them."""
        for place, data in enumerate(images, 1):
            try:
                await self.in_thread(check_image, data, self.limits)
            except Refusal as refusal:
                raise refusal.about(place, len(images)) from None

    async def one(self, data: bytes, asked: Asked) -> Done:
        async with self.slots:
            prepared = await self.in_thread(self.predictor.prepare, data, asked)
            return await asyncio.wrap_future(self.batcher.submit(prepared))

    async def in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function, *arguments)


def timing(since: float, read: float, model: float) -> Milliseconds:
    total = time.perf_counter() - since
    reading = read - since
    parts = {"reading": reading, "waiting": max(total - reading - model, 0.0), "model": model, "total": total}
    return Milliseconds(**{name: round(1000 * seconds, 3) for name, seconds in parts.items()})


def sound(outcome: Done | BaseException, place: int, count: int) -> Done:
    """The result, or the refusal that an error means."""
    if isinstance(outcome, Done):
        return outcome
    if isinstance(outcome, Refusal):
        raise outcome.about(place, count)
    if isinstance(outcome, MixlabError):
        raise Refusal(422, str(outcome)).about(place, count)
    if isinstance(outcome, Exception):
        log.error("The model failed.", exc_info=outcome)
        raise Refusal(500, "The model failed on this image; the server's log says why.").about(place, count)
    raise outcome
