"""A trained model as a service: answers, features, neighbours, and one page to look at it.

Uploads are kept in memory while they are answered, and nowhere else. Whatever a client does wrong is a 4xx with a
sentence. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from PIL import Image
from starlette.exceptions import HTTPException as PlainHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

import selfcon
from selfcon.data.images import FORMATS, Pixels, decode
from selfcon.deploy.asking import REFUSALS, describe_body, from_base64, parameters, parse, refuse_unknown
from selfcon.deploy.batching import Batcher, BusyError, Wish
from selfcon.deploy.gallery import Gallery
from selfcon.deploy.holder import Holder
from selfcon.deploy.insight import look_closer
from selfcon.deploy.limits import Limits, Rates
from selfcon.deploy.meters import Meters
from selfcon.deploy.predictor import Predictor
from selfcon.errors import BadImageError, UsageError
from selfcon.evaluation.early_exit import Rule
from selfcon.progress import say

_LIKELIEST = 5  # classes that are told of an image that is looked at closely
_LOOK_EVERY = 1.0  # seconds between looks at the run folder
_SHOW_AGAIN = 600.0  # seconds until images to show are asked for again, where there were none
_PAGE = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
_SAFE = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "media-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(
    holder: Holder,
    gallery: Gallery | None,
    limits: Limits,
    hosts: Sequence[str] = ("*",),
    make_gallery: Callable[[], Gallery | None] = lambda: None,
) -> FastAPI:
    """The service for a model; `hosts` are the names that it answers to.

    When the model changes, `make_gallery` is asked for the images that go with the new one.
    """
    meters, rates = Meters(), Rates(limits.rate)
    service = _Service(holder, gallery, limits, meters, make_gallery)
    app = FastAPI(
        title="selfcon",
        version=selfcon.__version__,
        lifespan=service.life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    @app.middleware("http")
    async def surround(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        start = time.perf_counter()
        # Whoever asks whether the service is there is always answered.
        if request.url.path != "/health" and not rates.allows(request.client.host if request.client else ""):
            response: Response = _refuse(429, "Too many requests: slow down.")
        else:
            response = await _guarded(go_on, request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        meters.requests.labels(path, str(response.status_code)).inc()
        meters.seconds.labels(path).observe(time.perf_counter() - start)
        for name, value in _SAFE.items():
            response.headers.setdefault(name, value)
        return response

    @app.exception_handler(PlainHTTPException)
    async def told(request: Request, error: PlainHTTPException) -> Response:
        return _refuse(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def explained(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _refuse(400, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}.")

    service.add_routes(app)
    return app


async def _guarded(go_on: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    try:
        return await go_on(request)
    except BusyError:
        return _refuse(429, "Too many images wait for their answer: try again later.", {"Retry-After": "1"})
    except BadImageError as error:
        return _refuse(422, str(error))
    except UsageError as error:
        return _refuse(400, str(error))


def _refuse(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)


class _Service:
    """What each path does."""

    def __init__(
        self,
        holder: Holder,
        gallery: Gallery | None,
        limits: Limits,
        meters: Meters,
        make_gallery: Callable[[], Gallery | None],
    ) -> None:
        self.holder, self.gallery, self.limits, self.meters = holder, gallery, limits, meters
        self.make_gallery = make_gallery
        self.batcher = Batcher(most_waiting=limits.waiting, watch=self.meters.batches.observe)
        self.readers = ThreadPoolExecutor(4, thread_name_prefix="read")
        self.being_read = 0  # images, from before their request is received

    @contextlib.asynccontextmanager
    async def life(self, app: FastAPI) -> AsyncIterator[None]:
        """From before the first request to after the last one."""
        tasks = [asyncio.create_task(self.batcher.work()), asyncio.create_task(self._watch())]
        yield
        for task in tasks:
            task.cancel()
        for pool in (self.batcher.thread, self.readers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        """Take new models as they come; features of the old one say nothing about the new one."""
        shown, due = self.gallery is not None, 0.0
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            if await asyncio.to_thread(self.holder.refresh):
                self.gallery, due = None, 0.0
            if shown and self.gallery is None and self.holder.is_newest and time.monotonic() >= due:
                due = time.monotonic() + _SHOW_AGAIN
                try:
                    self.gallery = await asyncio.to_thread(self.make_gallery)
                except Exception as error:  # answers do not need it
                    say(f"note: no images to show beside answers of the new model ({error!r})")

    def add_routes(self, app: FastAPI) -> None:
        for path in _PAGE:
            app.get(f"/{path}", include_in_schema=False)(self._page(path))
        app.get("/health")(self.health)
        app.head("/health", include_in_schema=False)(self.health)
        app.get("/metrics", response_class=Response)(self.metrics)
        app.get("/v1/model")(self.describe)
        for answer in (self.predict, self.embed, self.neighbours, self.explain):
            asked = {name: each.default for name, each in signature(answer).parameters.items() if name != "request"}
            app.post(
                f"/v1/{answer.__name__}",
                openapi_extra=describe_body(asked),
                responses={status: each for status, each in REFUSALS.items() if status != 404 or "k" in asked},
                dependencies=[Depends(refuse_unknown)],
            )(answer)
        app.get("/v1/samples")(self.samples)
        app.get("/v1/images/{split}/{number}.png", response_class=Response)(self.image)

    def _page(self, path: str) -> Callable[[], Response]:
        name, kind = _PAGE[path]
        content = files("selfcon.deploy").joinpath("page", name).read_bytes()
        return lambda: Response(content, media_type=kind)

    def health(self) -> dict[str, Any]:
        """Whether the service is there, and since when its model is."""
        return {"status": "ok", "model": self.holder.folder.resolve().name, "loaded": self.holder.since}

    def metrics(self) -> Response:
        """Counters and times for Prometheus."""
        return self.meters.as_response()

    def describe(self) -> dict[str, Any]:
        """The model: classes, exits, and what early answers cost."""
        model = self.holder.model
        criterion = model.trust.rule.criterion if model.trust.rule else None
        curve = [
            {
                "thresholds": each.thresholds,
                "cost": each.cost,
                "accuracy": each.accuracy,
                "silence": model.trust.silence_under(Rule(criterion or "confidence", each.thresholds)),
            }
            for each in model.trust.curve
        ]
        return {
            "name": self.holder.folder.resolve().name,
            "network": model.facts["network"]["name"],
            "method": model.facts["method"],
            "classes": model.classes,
            "exits": model.exits,
            "image_size": model.eye.size,
            "part_seen": model.eye.part,
            "calibrated": bool(model.trust.temperatures),
            "criterion": criterion,
            "thresholds": model.trust.rule.thresholds if model.trust.rule else None,
            "curve": curve,
            "silence": model.trust.silence,
            "costs": model.trust.costs,
            "gallery": self.gallery is not None,
        }

    async def predict(
        self,
        request: Request,
        exit: str = "ensemble",  # noqa: A002 - the word for it
        top: int = 1,
        budget: float | None = None,
    ) -> dict[str, Any]:
        """The likeliest classes of an image (its bytes as the body) or of several (as JSON)."""
        model = self.holder.model
        crops, wish = await self._read(request, Wish(exit, budget, top), model)
        good = [crop for crop in crops if not isinstance(crop, BadImageError)]
        if not good:
            raise crops[0]  # type: ignore[misc]
        answers = iter(await self.batcher.ask(good, wish, model))
        rows: list[dict[str, Any]] = []
        for crop in crops:
            if isinstance(crop, BadImageError):
                rows.append({"error": str(crop)})
            else:
                answer = next(answers)
                self.meters.answers.labels(answer.exit).inc()
                rows.append(answer.to_dict())
        return {"predictions": rows}

    async def embed(self, request: Request) -> dict[str, Any]:
        """The features of every exit, of one image or several."""
        model = self.holder.model
        crops, _ = await self._all_good(request, Wish(), model)
        features = await self._in_turn(lambda: model.embed_crops(crops))
        return {
            "features": [{name: each[row].tolist() for name, each in features.items()} for row in range(len(crops))]
        }

    async def neighbours(self, request: Request, exit: str = "backbone", k: int = 8) -> dict[str, Any]:  # noqa: A002
        """The nearest training images of an image, by the features of an exit."""
        gallery, model = self._gallery(), self.holder.model
        crops, wish = await self._all_good(request, Wish(exit, k=k), model)
        if wish.exit not in gallery.features:
            raise UsageError(f"There is no exit {wish.exit!r}; there are {', '.join(gallery.features)}.")
        features = await self._in_turn(lambda: model.embed_crops(crops))
        return {"neighbours": [gallery.neighbours(feature, wish.exit, wish.k) for feature in features[wish.exit]]}

    async def explain(self, request: Request, top: int | None = None) -> dict[str, Any]:
        """What every exit thinks of an image, its likeliest classes (five, or all of fewer), and where it looks."""
        model = self.holder.model
        usual = min(_LIKELIEST, len(model.classes))
        crops, wish = await self._all_good(request, Wish(top=usual if top is None else top), model)
        if len(crops) > 1:
            raise UsageError(f"One image at a time is looked at closely, not {len(crops)}.")
        if not 1 <= wish.top <= len(model.classes):
            raise UsageError(f"The likeliest 1 to {len(model.classes)} classes can be told, not {wish.top}.")
        found: dict[str, Any] = await self._in_turn(lambda: look_closer(model, crops[0], top=wish.top))
        return found

    def samples(self) -> dict[str, Any]:
        """Some test images to try."""
        return {"samples": self._gallery().samples}

    def image(self, split: str, number: int) -> Response:
        """An image of the run's data."""
        found = self._gallery().png(split, number)
        if found is None:
            raise HTTPException(404, "There is no such image.")
        return Response(found, media_type="image/png")

    def _gallery(self) -> Gallery:
        if self.gallery is None:
            raise HTTPException(
                404, "There are no images to show: the run's data are not at hand, or were not to be shown."
            )
        return self.gallery

    async def _in_turn(self, work: Callable[[], Any]) -> Any:
        """In the thread that also answers, so that nothing computes at the same time."""
        return await asyncio.get_running_loop().run_in_executor(self.batcher.thread, work)

    async def _all_good(self, request: Request, wish: Wish, model: Predictor) -> tuple[list[Pixels], Wish]:
        crops, wish = await self._read(request, wish, model)
        for crop in crops:
            if isinstance(crop, BadImageError):
                raise crop
        return crops, wish  # type: ignore[return-value]

    @contextlib.contextmanager
    def _admitted(self, images: int) -> Iterator[None]:
        """While so many more images are received and decoded, all of which takes memory."""
        if self.being_read + images > self.limits.waiting:
            raise BusyError
        self.being_read += images
        try:
            yield
        finally:
            self.being_read -= images

    async def _read(self, request: Request, wish: Wish, model: Predictor) -> tuple[list[Pixels | BadImageError], Wish]:
        with self._admitted(1):
            return await self._receive(request, wish, model)

    async def _receive(
        self, request: Request, wish: Wish, model: Predictor
    ) -> tuple[list[Pixels | BadImageError], Wish]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.startswith("image/") and kind not in ("application/octet-stream", "application/json"):
            raise HTTPException(
                415,
                "Send an image as it is, with Content-Type: image/jpeg or so, or several as JSON: "
                '{"images": [BASE64, ...]}.',
            )
        body = await self._body(request)
        images = [body]
        if kind == "application/json":
            texts, wish = parse(body, wish, parameters(request))
            if len(texts) > self.limits.images:
                raise HTTPException(413, f"A request holds at most {self.limits.images} images.")
            images = [from_base64(each) for each in texts]
        loop = asyncio.get_running_loop()
        with self._admitted(len(images) - 1):
            reading = (loop.run_in_executor(self.readers, self._crop, each, model) for each in images)
            return list(await asyncio.gather(*reading)), wish

    async def _body(self, request: Request) -> bytes:
        too_large = HTTPException(413, f"A request holds at most {self.limits.bytes:,} bytes.")
        with contextlib.suppress(ValueError):
            if int(request.headers.get("content-length", "0")) > self.limits.bytes:
                raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.bytes:
                        raise too_large
        except TimeoutError:
            raise HTTPException(408, f"The request was not sent within {self.limits.seconds:g} seconds.") from None
        except ClientDisconnect:
            raise HTTPException(400, "The request was broken off.") from None
        return bytes(body)

    def _crop(self, data: bytes, model: Predictor) -> Pixels | BadImageError:
        try:
            with contextlib.suppress(Exception), Image.open(BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > self.limits.pixels:
                    return BadImageError(
                        f"The image has {image.width} x {image.height} pixels, more than "
                        f"{self.limits.pixels / 1e6:.0f} million."
                    )
            return model.eye.crop(decode(Path("The image"), data).pixels)
        except BadImageError as error:
            return error
