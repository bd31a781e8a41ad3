"""The service: the model's answers, a clear refusal for everything else, and nothing left behind."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import selfcon
from tests.deploy.serving import serving
from tests.workflows.conftest import write_stripes

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from selfcon.deploy.gallery import Gallery
from selfcon.deploy.holder import Holder
from selfcon.deploy.limits import Limits, Rates
from selfcon.deploy.server import make_app
from selfcon.errors import UsageError
from selfcon.workflows.serving import _listen, make_gallery

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    data = write_stripes(folder / "stripes.npz", train=96)
    small: Any = {"width": 0.125, "epochs": 2, "batch_size": 32, "probe.epochs": 4, "device": "cpu"}
    selfcon.fit(data=str(data), out=folder / "run", **small)
    selfcon.calibrate(folder / "run", within=1, device="cpu")
    return folder


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[TestClient]:
    holder = Holder(place / "run", torch.device("cpu"))
    limits = Limits(bytes=200_000, images=4, rate=10_000)
    with TestClient(make_app(holder, make_gallery(place / "run", "cpu"), limits)) as found:
        yield found


def png(seed: int = 0, side: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


@pytest.mark.medium
def test_answers_are_the_models(client: TestClient, place: Path) -> None:
    model = selfcon.load(place / "run", "cpu")
    for query, options in (
        ("", {}),
        ("?exit=exit2&top=3", {"exit": "exit2", "top": 3}),
        ("?budget=0.9", {"budget": 0.9}),
    ):
        found = client.post(f"/v1/predict{query}", content=png(), headers=PNG).json()["predictions"][0]
        expected = model.predict(png(), **options)[0].to_dict()
        assert found.pop("probabilities") == pytest.approx(expected.pop("probabilities"), abs=1e-5)
        assert found.pop("strangeness") == pytest.approx(expected.pop("strangeness"), abs=1e-5)
        assert found == expected
    images = [base64.b64encode(each).decode() for each in (png(1), b"no image", png(2))]
    rows = client.post("/v1/predict", json={"images": images, "top": 2, "exit": "early"}).json()["predictions"]
    assert [len(row.get("classes", [])) for row in rows] == [2, 0, 2]
    assert "is not an image" in rows[1]["error"]
    features = client.post("/v1/embed", content=png(), headers=PNG).json()["features"][0]
    assert features["exit2"] == pytest.approx(model.embed([png()])["exit2"][0].tolist(), abs=1e-4)


def test_a_closer_look(client: TestClient) -> None:
    found = client.post("/v1/explain?top=4", content=png(), headers=PNG).json()
    assert list(found["exits"]) == ["exit2", "backbone"]
    assert [each["name"] for each in found["answers"]] == ["exit2", "ensemble"]
    for each in found["exits"].values():
        warm = np.array(each["map"])
        assert 0 <= warm.min() <= warm.max() <= 1
        assert sum(guess["probability"] for guess in each["classes"]) == pytest.approx(1, abs=1e-5)
    image = client.get("/v1/images/train/7.png").content
    nearest = client.post("/v1/neighbours?k=3&exit=exit2", content=image, headers=PNG).json()["neighbours"][0]
    assert nearest[0]["image"] == 7  # itself
    assert nearest[0]["cosine"] == pytest.approx(1, abs=1e-4)
    samples = client.get("/v1/samples").json()["samples"]
    assert len(samples) == 24
    assert client.get(f"/v1/images/test/{samples[0]['image']}.png").content.startswith(b"\x89PNG")


def test_nothing_that_is_asked_for_is_ignored(client: TestClient) -> None:
    image = base64.b64encode(png()).decode()
    found = client.post("/v1/explain", json={"images": [image], "top": 2}).json()
    assert [len(each["classes"]) for each in found["answers"]] == [2, 2]
    found = client.post("/v1/explain", json={"images": [image]}).json()
    assert [len(each["classes"]) for each in found["answers"]] == [4, 4]  # there are no five
    near = client.post("/v1/neighbours?k=3", json={"images": [image], "exit": "exit2"}).json()
    assert near == client.post("/v1/neighbours?k=3&exit=exit2", content=png(), headers=PNG).json()
    assert near != client.post("/v1/neighbours?k=3", content=png(), headers=PNG).json()
    broken = "\n".join(image[start : start + 76] for start in range(0, len(image), 76))  # as `base64` writes it
    assert near == client.post("/v1/neighbours", json={"images": [broken], "exit": "exit2", "k": 3}).json()
    assert len(client.post("/v1/predict?top=3", json={"images": [image]}).json()["predictions"][0]["classes"]) == 3
    refused = {
        "One image at a time": client.post("/v1/explain", json={"images": [image] * 2, "top": 2}),
        "Unknown parameter 'tops'; did you mean 'top'?": client.post("/v1/predict?tops=3", content=png(), headers=PNG),
        "Unknown parameter 'exits'; did you mean 'exit'?": client.post("/v1/neighbours?exits=exit2", content=png()),
        "Unknown parameter 'k'; valid: top.": client.post("/v1/explain?k=3", content=png(), headers=PNG),
        "Unknown parameter 'exit'; valid: none.": client.post("/v1/embed?exit=exit2", content=png(), headers=PNG),
        "Unknown field 'exit'; valid: images.": client.post("/v1/embed", json={"images": [image], "exit": "exit2"}),
        "Unknown field 'topp'; did you mean 'top'?": client.post("/v1/predict", json={"images": [image], "topp": 2}),
    }
    for words, response in refused.items():
        assert response.status_code == 400, words
        assert response.json()["error"].startswith(words)


def test_what_is_around_it(client: TestClient) -> None:
    assert client.get("/health").json()["status"] == "ok"
    client.post("/v1/predict", content=png(), headers=PNG)
    metrics = client.get("/metrics").text
    assert 'selfcon_requests_total{path="/v1/predict",status="200"}' in metrics
    assert "selfcon_answers_total" in metrics
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/predict", "/v1/embed", "/v1/neighbours", "/v1/explain", "/health"} <= set(paths)
    fields = {
        path: set(each["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"])
        for path, each in paths.items()
        if "post" in each
    }
    assert fields["/v1/embed"] == {"images"}
    assert fields["/v1/neighbours"] == {"images", "exit", "k"}
    near = paths["/v1/neighbours"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert (near["exit"]["default"], near["k"]["default"]) == ("backbone", 8)
    assert {"400", "422"} <= set(paths["/v1/embed"]["post"]["responses"])
    assert ["404" in paths[f"/v1/{name}"]["post"]["responses"] for name in ("embed", "neighbours")] == [False, True]
    assert client.head("/health").status_code == 200
    for path in ("/", "/page.js", "/page.css"):
        page = client.get(path)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text
        assert "https://" not in page.text
    about = client.get("/v1/model").json()
    assert about["costs"][-1] == 1
    assert about["exits"] == ["exit2", "backbone"]


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more than it holds."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def hostile() -> list[tuple[str, str, dict[str, Any]]]:
    """Requests that must be refused: method, path and what is sent."""
    good = base64.b64encode(png()).decode()
    bodies = [
        b"",
        b"no",
        b"GIF89a",
        png()[:40],
        bomb(60_000, 60_000),
        bomb(0, 0),
        b"\xff\xd8" * 40,
        b"<svg/>",
        b"MZ" * 99,
    ]
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", path, {"content": body, "headers": PNG})
        for path in ("/v1/predict", "/v1/embed", "/v1/explain", "/v1/neighbours")
        for body in bodies
    ]
    texts: list[Any] = [
        "{",
        "[]",
        "{}",
        "null",
        "3",
        '"x"',
        "[" * 3000,
        '{"images": []}',
        '{"images": 3}',
        '{"images": ["?"]}',
    ]
    texts += [json.dumps({"images": [good] * 5}), json.dumps({"images": [good], "nothing": 1})]
    texts += [json.dumps({"images": [good], "top": value}) for value in (0, -1, 99, "x", None, 1e99)]
    texts += [json.dumps({"images": [good], "exit": value}) for value in ("", "exit9", "../x", 3, None)]
    texts += [json.dumps({"images": [good], "budget": value}) for value in (0, -1, 2, "x", float("nan"), 1e-9)]
    found += [
        ("POST", "/v1/predict", {"content": text, "headers": {"content-type": "application/json"}}) for text in texts
    ]
    found += [
        ("POST", f"/v1/predict?{query}", {"content": png(), "headers": PNG})
        for query in (
            "top=0",
            "top=x",
            "top=99999999999999999999",
            "exit=%00",
            "exit=nowhere",
            "budget=nan",
            "budget=-1",
        )
    ]
    found += [
        ("POST", f"/v1/neighbours?{query}", {"content": png(), "headers": PNG}) for query in ("k=0", "k=9999", "exit=x")
    ]
    found += [
        ("POST", "/v1/predict", {"content": png(), "headers": {"content-type": kind}})
        for kind in ("text/html", "", "é;")
    ]
    found += [("POST", "/v1/predict", {"content": b"0" * 300_000, "headers": PNG})]
    odd = ("/v1/images/../../x/1.png", "/v1/images/train/-1.png", "/v1/images/train/999999.png", "/v1/images/etc/1.png")
    found += [("GET", path, {}) for path in (*odd, "/etc/passwd", "/%2e%2e/x", "/docs", "/v1/predict", "/page.html")]
    found += [("DELETE", "/v1/model", {}), ("PUT", "/", {}), ("POST", "/health", {})]
    return found


def test_whatever_is_wrong_is_a_4xx_with_a_sentence(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    requests = hostile()
    assert len(requests) > 80
    for method, path, sent in requests:
        try:
            response = client.request(method, path, **sent)
        except UnicodeEncodeError:  # what no client can send
            continue
        assert 400 <= response.status_code < 500, (method, path, sent, response.text)
        assert isinstance(response.json()["error"], str)
    assert client.post("/v1/predict", content=png(), headers=PNG).status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_limits_of_rate_and_of_waiting(place: Path) -> None:
    holder = Holder(place / "run", torch.device("cpu"))
    with TestClient(make_app(holder, None, Limits(rate=2))) as client:
        codes = [client.get("/v1/model").status_code for _ in range(8)]
        assert codes[:4] == [200] * 4
        assert 429 in codes
        assert {client.get("/health").status_code for _ in range(8)} == {200}  # whether it is there may be asked
    with TestClient(make_app(holder, None, Limits(waiting=0))) as client:
        assert client.post("/v1/predict", content=png(), headers=PNG).status_code == 429
        assert client.get("/v1/samples").status_code == 404  # without the run's data
    with TestClient(make_app(holder, None, Limits(), ["127.0.0.1"])) as client:
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("rate", "asked", "allowed"),
    [(200, 300, 200), (200, 1000, 200), (1, 1.5, 1), (1, 5, 1), (0.4, 0.3, 0.3), (0.1, 0.05, 0.05), (0.1, 3, 0.1)],
)
def test_who_asks_for_more_has_what_is_allowed(
    rate: float, asked: float, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rates, seconds, answered = 0.0, Rates(rate), int(20 + 100 / rate), 0
    monkeypatch.setattr("selfcon.deploy.limits.time.monotonic", lambda: clock)
    for number in range(int(seconds * asked)):
        clock = number / asked
        answered += rates.allows("somebody")
    assert 0.95 * seconds * allowed - 1 <= answered <= seconds * allowed + 1 + 2 * rate


def test_a_new_model_is_taken_and_a_broken_one_is_not(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    holder = Holder(tmp_path / "run", torch.device("cpu"))
    first = holder.model
    assert not holder.refresh()
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "model.safetensors").write_bytes(weights[:-100])
    assert not holder.refresh()
    assert holder.model is first
    (tmp_path / "run" / "model.safetensors").unlink()
    (tmp_path / "run" / "model.safetensors").mkdir()  # an error of the disk, in place of one
    assert not holder.refresh()
    (tmp_path / "run" / "model.safetensors").rmdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(weights)
    assert holder.refresh()
    assert holder.model is not first


@pytest.mark.parametrize("error", [MemoryError("for a moment"), OSError(5, "for a moment")])
def test_what_fails_for_a_moment_is_tried_again(error: Exception, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(place / "run", torch.device("cpu"))
    first = holder.model
    os.utime(place / "run" / "model.json")

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("selfcon.deploy.holder.load", fail)
        assert (holder.refresh(), holder.is_newest) == (False, False)
    assert not holder.refresh()  # not at once
    clock = time.monotonic() + 61
    monkeypatch.setattr("selfcon.deploy.holder.time.monotonic", lambda: clock)
    assert (holder.refresh(), holder.is_newest) == (True, True)
    assert holder.model is not first
    assert not holder.refresh()


@pytest.mark.parametrize("wait", [0.0, 600.0], ids=["later", "with the next model"])
def test_images_to_show_come_back(wait: float, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.deploy.server._LOOK_EVERY", 0.02)
    monkeypatch.setattr("selfcon.deploy.server._SHOW_AGAIN", wait)
    holder = Holder(place / "run", torch.device("cpu"))
    shown = make_gallery(place / "run", "cpu")
    found = iter((None, shown))  # the first time, the data are not at hand
    changes = [True, False, False] if wait == 0 else [True, False, True]
    monkeypatch.setattr(holder, "refresh", lambda: bool(changes and changes.pop(0)))
    with TestClient(make_app(holder, shown, Limits(), make_gallery=lambda: next(found))) as client:
        deadline = time.monotonic() + 30
        while (changes or client.get("/v1/samples").status_code != 200) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.get("/v1/samples").status_code == 200
        assert next(found, "all were asked for") == "all were asked for"


def test_the_images_shown_belong_to_the_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.deploy.server._LOOK_EVERY", 0.02)
    holder = Holder(place / "run", torch.device("cpu"))
    old, new = make_gallery(place / "run", "cpu"), make_gallery(place / "run", "cpu")
    assert old is not None
    made, asked = threading.Event(), threading.Event()

    def make() -> Gallery | None:
        asked.set()
        made.wait(30)
        return new

    with TestClient(make_app(holder, old, Limits(), make_gallery=make)) as client:
        assert client.get("/v1/samples").status_code == 200
        monkeypatch.setattr(holder, "refresh", lambda: not asked.is_set())
        assert asked.wait(30)
        assert client.get("/v1/samples").status_code == 404  # of the old model there is nothing to be shown any more
        made.set()
        deadline = time.monotonic() + 30
        while client.get("/v1/samples").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.get("/v1/samples").status_code == 200


def test_no_more_images_are_received_than_may_wait(place: Path) -> None:
    body = json.dumps({"images": [base64.b64encode(png()).decode()] * 3})
    with TestClient(make_app(Holder(place / "run", torch.device("cpu")), None, Limits(waiting=2))) as client:
        many = client.post("/v1/embed", content=body, headers={"Content-Type": "application/json"})
        assert many.status_code == 429
        assert client.post("/v1/embed", content=png(), headers=PNG).status_code == 200  # and nothing of it stays


def begin_request(port: int) -> tuple[socket.socket, bytes]:
    """A request that is all but sent, and the rest of it."""
    body = png()
    found = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = ["POST /v1/predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: image/png", f"Content-Length: {len(body)}"]
    found.sendall("\r\n".join([*head, "", ""]).encode() + body[:-1])
    return found, body[-1:]


@pytest.mark.medium
def test_requests_under_way_are_answered_before_it_ends(place: Path) -> None:
    stop = threading.Event()
    codes: list[int] = []
    with serving(place, "--no-gallery") as (port, process):

        def ask() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                while not stop.is_set():
                    try:
                        codes.append(client.post("/v1/predict", content=png(), headers=PNG).status_code)
                    except httpx.TransportError:
                        stop.set()  # it listens no more

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        # One that hangs before its request has begun keeps nobody waiting.
        hanging = socket.create_connection(("127.0.0.1", port))
        hanging.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        under_way = [begin_request(port) for _ in range(4)]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        for sent, rest in under_way:
            sent.sendall(rest)
        for sent, _ in under_way:
            assert sent.recv(1 << 16).startswith(b"HTTP/1.1 200")
            sent.close()
        for thread in threads:
            thread.join(30)
        assert process.wait(40) == 0
        hanging.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert len(codes) > 10
    assert set(codes) == {200}


@pytest.mark.medium
def test_a_client_that_hangs_is_told_and_others_are_answered(place: Path) -> None:
    import uvicorn

    app = make_app(Holder(place / "run", torch.device("cpu")), None, Limits(seconds=2))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(
                b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 999\r\n\r\nbeg"
            )
            url = f"http://127.0.0.1:{port}/v1/predict"
            assert httpx.post(url, content=png(), headers=PNG, timeout=20).status_code == 200
            answer = b""
            while part := slow.recv(4000):
                answer += part
                if b"seconds" in answer:
                    break
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"not sent within 2 seconds" in answer
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize("silence", [0.0, 1.1])
def test_the_page_says_unknown_where_the_service_does(place: Path, silence: float) -> None:
    """The page decides from what /v1/model and /v1/explain tell; its rule, written here as there."""
    holder = Holder(place / "run", torch.device("cpu"))
    names = ("exit2", "ensemble")
    holder.model.trust = replace(holder.model.trust, silence=dict.fromkeys(names, silence), silence_early={})
    with TestClient(make_app(holder, None, Limits(rate=10_000))) as client:
        model = client.get("/v1/model").json()
        assert model["part_seen"] == 1.0
        assert model["silence"] == dict.fromkeys(names, silence)
        compared = 0
        for seed in range(6):
            found = client.post("/v1/explain?top=1", content=png(seed), headers=PNG).json()["answers"]
            for point in model["curve"]:
                sure = [each["sureness"] >= low for each, low in zip(found, [*point["thresholds"], 0.0], strict=True)]
                chosen = found[sure.index(True)]
                silent = chosen["classes"][0]["probability"] < point["silence"].get(chosen["name"], 0.0)
                told = client.post(f"/v1/predict?budget={point['cost']}", content=png(seed), headers=PNG)
                (answer,) = told.json()["predictions"]
                if answer["exit"] == chosen["name"]:  # of several points of the same cost the service takes one
                    assert answer["unknown"] == (chosen["strange"] or silent)
                    assert answer["unknown"] or silence == 0
                    compared += 1
        assert compared


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_there_is_not(port: int) -> None:
    with pytest.raises(UsageError, match="--port takes 0 to 65535"):
        _listen("127.0.0.1", port)


@pytest.mark.parametrize(("host", "advice"), [("192.0.2.1", "--host takes"), ("127.0.0.1", "--port takes another")])
def test_what_cannot_be_listened_at_is_told_with_what_to_change(host: str, advice: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=advice):
            _listen(host, taken.getsockname()[1])


def test_a_model_without_classifiers_does_not_take_the_place_of_one_with(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    holder = Holder(tmp_path / "run", torch.device("cpu"))
    data = str(place / "stripes.npz")
    selfcon.pretrain(
        data=data, out=tmp_path / "run", overwrite=True, width=0.125, epochs=1, batch_size=32, device="cpu"
    )
    assert not holder.refresh()
    assert "so the old model stays" in capsys.readouterr().err
    assert holder.model.predict(png())
    with pytest.raises(UsageError, match="no classifiers yet"):
        Holder(tmp_path / "run", torch.device("cpu"))


@pytest.mark.medium
def test_a_network_that_does_not_run_by_stages_is_looked_at_without_maps(tmp_path: Path) -> None:
    data = write_stripes(tmp_path / "stripes.npz", train=64, side=32)
    small: Any = {"model": "test_vit", "stem": "large", "epochs": 1, "batch_size": 32, "device": "cpu"}
    selfcon.train(data=str(data), out=tmp_path / "run", method="selfcon-1stage", exits="1:fc", **small)
    holder = Holder(tmp_path / "run", torch.device("cpu"))
    assert not holder.model.segments
    with TestClient(make_app(holder, None, Limits())) as client:
        found = client.post("/v1/explain?top=2", content=png(), headers=PNG).json()
        (answer,) = client.post("/v1/predict?top=2", content=png(), headers=PNG).json()["predictions"]
    assert [each["exit"] for each in found["answers"]] == ["exit1", "backbone"]
    assert [each["map"] for each in found["exits"].values()] == [None, None]
    last = found["answers"][-1]
    assert [each["class"] for each in last["classes"]] == answer["classes"]
    assert [each["probability"] for each in last["classes"]] == pytest.approx(answer["probabilities"], abs=1e-5)
