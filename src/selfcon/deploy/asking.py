"""What a request asks for, in its address or as JSON; what a path does not know is refused, not ignored."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    k: int = 8


class Refusal(BaseModel):
    """What was wrong, in a sentence."""

    error: str


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": meaning}
    for status, meaning in {
        400: "Something was asked for that is not there",
        404: "There are no training images to compare with",
        408: "The request came too slowly",
        413: "The request is too large",
        415: "The body is neither an image nor JSON",
        422: "An image cannot be read",
        429: "Too many requests, or too many images are waiting",
    }.items()
}


def describe_body(usual: Mapping[str, Any]) -> dict[str, Any]:
    """For OpenAPI: an image, or JSON with images and what can be said about their answers, which is else the usual."""
    schema = Wanted.model_json_schema()
    fields = schema["properties"]
    schema["properties"] = {
        "images": fields["images"],
        **{name: {**fields[name], "default": value} for name, value in usual.items()},
    }
    kinds = {"image/*": {"schema": {"type": "string", "format": "binary"}}, "application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": kinds}}


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
        if first["type"] == "extra_forbidden":
            raise unknown_name("field", first["loc"][0], ["images", *known]) from None
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
        text = "".join(text.split())  # programs that encode break it into lines
        return base64.b64decode(text.removeprefix("data:").partition("base64,")[2] or text, validate=True)
    except (binascii.Error, ValueError):
        raise HTTPException(400, "An image is no base64.") from None
