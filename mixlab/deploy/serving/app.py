"""The HTTP face: routes, their OpenAPI description, who may call them, and errors as JSON with a reason."""

import base64
import contextlib
import hashlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from mixlab.core.version import VERSION
from mixlab.deploy.serving.answers import About, Health, Problem
from mixlab.deploy.serving.body import FORM, IMAGE_TYPES, read_images
from mixlab.deploy.serving.gate import Gate
from mixlab.deploy.serving.limits import RETRY_SECONDS, Refusal
from mixlab.deploy.serving.metrics import CONTENT_TYPE
from mixlab.deploy.serving.multipart import FIELD
from mixlab.deploy.serving.service import Service

REASONS = {
    400: "The body is malformed or incomplete.",
    401: "A token is needed: Authorization: Bearer TOKEN.",
    408: "The body did not arrive in time.",
    413: "Too many bytes, pixels or images.",
    415: "Neither a form nor an image.",
    421: "The Host header names another server.",
    422: "Not a readable image, or a parameter that does not fit.",
    500: "The model failed.",
    503: "Too much work at once; see Retry-After.",
}
UNREAD = (400, 401, 408, 413, 415, 421)  # the rest of the body may still be on its way: the connection is closed


def build_app(service: Service, *, token: str | None, hosts: frozenset[str] | None) -> FastAPI:
    """`hosts` are the names that requests may call the server by; None: any."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    # the documentation pages of FastAPI load scripts from elsewhere
    app = FastAPI(
        title="Mixlab", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None,
        description=f"{service.name}, {service.predictor.task}",
    )  # fmt: skip
    app.state.service = service
    guards = [] if token is None else [Depends(token_check(token))]
    app.include_router(open_routes(service))
    app.include_router(guarded_routes(service, (401, 421) if guards else (421,)), dependencies=guards)
    for kind, answer in ((Refusal, refused), (HTTPException, failed), (RequestValidationError, invalid)):
        app.add_exception_handler(kind, answer)
    app.add_middleware(Gate, metrics=service.metrics, hosts=hosts)
    return app


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem, "description": REASONS[status]} for status in statuses}


def plain_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same for routes whose own answer is not JSON: by itself FastAPI would give errors their type."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"content": content, "description": REASONS[status]} for status in statuses}


def token_check(token: str) -> Callable[..., None]:
    expected = token.encode()
    bearer = HTTPBearer(auto_error=False)

    def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        if given is None or not hmac.compare_digest(given.credentials.encode(), expected):
            raise Refusal(401, "This server needs its token: Authorization: Bearer TOKEN.")

    return check


# -- routes --------------------------------------------------------------------------------------


def open_routes(service: Service) -> APIRouter:
    router = APIRouter()
    text, policy = page()

    @router.get("/", response_class=HTMLResponse, responses=plain_problems(421), summary="A page to try images on")
    async def index() -> HTMLResponse:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    @router.get("/healthz", responses=problems(421, 503), summary="Whether the model's thread is alive")
    async def healthz() -> Health:
        if not service.batcher.alive:
            raise Refusal(503, "The thread of the model has ended. Restart the server.")
        return Health()

    return router


def guarded_routes(service: Service, refusals: tuple[int, ...]) -> APIRouter:
    """`refusals` are those that any of them may be met with."""
    router = APIRouter()
    asked_type, answer_type = service.predictor.asked, service.predictor.answer

    @router.get("/about", responses=problems(*refusals), summary="What is served, and the limits of a request")
    async def about() -> About:
        return service.about()

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=plain_problems(*refusals),
        summary="Counters for Prometheus",
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @router.post(
        "/predict",
        response_model=answer_type,
        responses=problems(*refusals, 400, 408, 413, 415, 422, 500, 503),
        openapi_extra={"requestBody": body_description(service.limits.max_images)},
        summary="What the model sees in one or many images",
    )
    async def predict(request: Request, asked: Annotated[asked_type, Query()]) -> Any:  # type: ignore[valid-type]
        since = time.perf_counter()
        images, held = await read_images(request, service.limits, service.room)
        try:
            return await service.predict(images, asked, since)
        finally:
            service.room.give_back(held)

    return router


def body_description(most: int) -> dict[str, Any]:
    binary = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "properties": {FIELD: {"type": "array", "items": binary, "minItems": 1, "maxItems": most}},
        "required": [FIELD],
        "additionalProperties": False,
    }
    kinds = {f"image/{kind}": {"schema": binary} for kind in IMAGE_TYPES}
    return {"required": True, "content": {FORM: {"schema": form}, **kinds}}


def page() -> tuple[str, str]:
    """The page and its policy: its own style and script, its own server, nothing else."""
    text = resources.files("mixlab.deploy.serving").joinpath("page.html").read_text("utf-8")
    style, script = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)[0] for tag in ("style", "script"))
    marks = [base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() for own in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{marks[0]}'; script-src 'sha256-{marks[1]}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


# -- errors --------------------------------------------------------------------------------------


def refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return problem(error.status, error.reason, error.image)


def failed(request: Request, error: Exception) -> JSONResponse:
    """What the router itself refuses: an unknown path or method."""
    assert isinstance(error, HTTPException)
    told = {404: "There is no such path. See /openapi.json.", 405: "This path takes another method; see Allow."}
    answer = problem(error.status_code, told.get(error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})
    return answer


def invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    told = [f"{'.'.join(str(part) for part in one['loc'][1:])}: {one['msg']}" for one in error.errors()]
    return problem(422, f"The query does not fit. {'; '.join(told)}.")


def problem(status: int, reason: str, image: int | None = None) -> JSONResponse:
    headers = {"Connection": "close"} if status in UNREAD else {}
    if status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(Problem(detail=reason, image=image).model_dump(), status, headers)
