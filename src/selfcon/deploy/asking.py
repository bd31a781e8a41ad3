"""What a request asks for, in its address or as JSON; what a path does not know is refused, not ignored."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import replace

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfcon.deploy.batching import Wish
from selfcon.errors import unknown_name


class Wanted(BaseModel):
    """A batch: images as base64, and how to answer them."""

    model_config = ConfigDict(extra="forbid")

    images: list[str] = Field(min_length=1)
    exit: str = "ensemble"
    budget: float | None = None
    top: int = 1


OF_A_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": Wanted.model_json_schema()},
        },
    }
}


def parameters(request: Request) -> list[str]:
    """The names of what can be said about an answer, on the path of this request."""
    return [each.alias for each in request.scope["route"].dependant.query_params]


async def refuse_unknown(request: Request) -> None:
    """UsageError for a parameter that this path does not know."""
    known = parameters(request)
    for name in request.query_params:
        if name not in known:
            raise unknown_name("parameter", name, known)


def parse(body: bytes, wish: Wish, known: list[str]) -> tuple[list[str], Wish]:
    """The images of a JSON body, and a wish with what the body says about it over what was wished so far."""
    try:
        wanted = Wanted.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        raise HTTPException(400, f"{place}: {first['msg']}.") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "The request is no JSON.") from None
    said = wanted.model_dump(exclude={"images"}, exclude_unset=True)
    for name in said:
        if name not in known:
            raise unknown_name("field", name, ["images", *known])
    return wanted.images, replace(wish, **said)


def from_base64(text: str) -> bytes:
    """The bytes of an image."""
    try:
        return base64.b64decode(text.removeprefix("data:").partition("base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError):
        raise HTTPException(400, "An image is no base64.") from None
