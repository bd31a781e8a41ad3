"""Claim: the service holds under load: no error, no growth of memory, and batches that pay.

Starts `selfcon serve` for a run and asks it for minutes from many connections, each with the next request as soon as
the last one is answered; then one by one; then hostile requests. A JSON line for each: percentiles of the latency
beside the model's own forward time, throughput, errors, and memory of the process over time.
    python benchmarks/serve_load.py RUN FOLDER-OF-IMAGES [--seconds 300] [--clients 16] [--hostile 500]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import selfcon
from selfcon.deploy.pictures import read_picture
from selfcon.workflows.inference import find_images

PORT = 8765


async def request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, kind: str, body: bytes
) -> tuple[int, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    length = 0
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return status, await reader.readexactly(length)


async def ask_for(seconds: float, clients: int, images: list[bytes]) -> tuple[list[float], int]:
    """Latencies of all answers, and how many were no 200."""
    times: list[float] = []
    errors = 0
    end = time.perf_counter() + seconds
    turn = itertools.cycle(images)

    async def client() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        while time.perf_counter() < end:
            start = time.perf_counter()
            status, _ = await request(reader, writer, "/v1/predict?exit=early", "image/jpeg", next(turn))
            times.append(time.perf_counter() - start)
            errors += status != 200
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return times, errors


async def attack(count: int, images: list[bytes]) -> dict[str, int]:
    """Damaged images and requests; statuses by their first digit."""
    rng, found = random.Random(0), dict[str, int]()
    kinds = [
        "image/jpeg",
        "image/png",
        "application/json",
        "application/octet-stream",
        "text/html",
        "",
        "image/svg+xml",
    ]
    paths = [
        "/v1/predict",
        "/v1/embed",
        "/v1/explain",
        "/v1/neighbours",
        "/v1/predict?top=-1",
        "/v1/predict?exit=%0d%0a",
    ]
    for _ in range(count):
        body = bytearray(rng.choice(images))
        for _ in range(rng.randint(1, 40)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.4:
            body = body[: rng.randrange(len(body))]
        if rng.random() < 0.2:
            body = bytearray(json.dumps({"images": [body.hex()] * rng.randint(0, 80)}).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        try:
            async with asyncio.timeout(20):
                status, _ = await request(reader, writer, rng.choice(paths), rng.choice(kinds), bytes(body))
            key = f"{status // 100}xx"
        except TimeoutError:
            key = "hang"
        found[key] = found.get(key, 0) + 1
        writer.close()
    return found


def memory_of(process: int) -> float:
    text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def percentiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {name: round(1000 * cuts[place - 1], 2) for name, place in (("p50", 50), ("p95", 95), ("p99", 99))}


def say(**row: object) -> None:
    print(json.dumps({"benchmark": "serve_load", **row}), flush=True)


async def work(
    options: argparse.Namespace, process: subprocess.Popen[bytes], images: list[bytes], scratch: Path
) -> None:
    await ask_for(5, options.clients, images)  # warm
    memory = [memory_of(process.pid)]
    before = set(scratch.rglob("*"))
    times: list[float] = []
    errors, start = 0, time.perf_counter()
    for _ in range(10):
        more, wrong = await ask_for(options.seconds / 10, options.clients, images)
        times += more
        errors += wrong
        memory.append(memory_of(process.pid))
    spent = time.perf_counter() - start
    say(
        what=f"{options.clients} clients",
        seconds=round(spent),
        requests=len(times),
        errors=errors,
        a_second=round(len(times) / spent, 1),
        milliseconds=percentiles(times),
        memory_MB=[round(each, 1) for each in memory],
    )
    single, wrong = await ask_for(min(20, options.seconds / 4), 1, images)
    rate = len(single) / sum(single)
    say(
        what="one by one", requests=len(single), errors=wrong, a_second=round(rate, 1), milliseconds=percentiles(single)
    )
    found = await attack(options.hostile, images)
    say(
        what="hostile",
        statuses=found,
        files_left=len(set(scratch.rglob("*")) - before),
        memory_MB=round(memory_of(process.pid), 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--hostile", type=int, default=500)
    options = parser.parse_args()
    images = [path.read_bytes() for path in find_images([options.folder])[:200]]
    model = selfcon.load(options.run, "cpu")
    crops = model.eye.stack([model.eye.crop(read_picture(images[0]))])
    forward = []
    for _ in range(30):
        start = time.perf_counter()
        model.answer(crops)
        forward.append(time.perf_counter() - start)
    say(what="the model's own forward of one image", milliseconds=round(1000 * statistics.median(forward), 2))
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", "selfcon", "serve", str(options.run.resolve()), "--port", str(PORT)]
        environment = {**os.environ, "TMPDIR": scratch}
        with subprocess.Popen([*words, "--rate", "100000", "--device", "cpu"], cwd=scratch, env=environment) as process:
            time.sleep(20)
            asyncio.run(work(options, process, images, Path(scratch)))
            process.terminate()
            say(what="SIGTERM", exit_code=process.wait(60))


if __name__ == "__main__":
    main()
