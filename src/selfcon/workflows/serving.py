"""`selfcon serve`: a run as a service on this machine."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from selfcon.deploy.gallery import Gallery
from selfcon.errors import SelfconError, UsageError
from selfcon.evaluation.accuracy import embed
from selfcon.progress import say
from selfcon.report.plots import spread
from selfcon.workflows.task import choose_device
from selfcon.workflows.trained import open_run

_SHOWN, _KNOWN = 24, 5000  # test images to try, training images to be neighbours
_LAST_PORT = 65535
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    run_folder: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    rate: float = 200.0,
    gallery: bool = True,
) -> None:
    """Answer requests until a signal; those that are under way are finished first."""
    try:
        import uvicorn

        from selfcon.deploy.holder import Holder
        from selfcon.deploy.limits import Limits
        from selfcon.deploy.server import make_app
    except ImportError:
        raise UsageError("The service needs packages: pip install '.[serve]' in selfcon's folder.") from None
    if not rate > 0:
        raise UsageError(f"Requests a second must be more than 0, not {rate:g}.")
    holder = Holder(Path(run_folder), choose_device(device))
    shown = make_gallery(run_folder, device) if gallery else None
    hosts = (*_LOOPBACK, "[::1]") if host in _LOOPBACK else ("*",)
    app = make_app(holder, shown, Limits(rate=rate), hosts, lambda: make_gallery(run_folder, device))

    class Server(uvicorn.Server):
        """As uvicorn's, but a signal that was obeyed is no error."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=30,
    )
    with _listen(host, port) as listening:
        place = f"http://{'[' + host + ']' if ':' in host else host}:{listening.getsockname()[1]}"
        say(f"{Path(run_folder).resolve().name} answers at {place}")
        if host not in _LOOPBACK:
            say("note: this service can be reached from other machines, and asks nobody who they are")
        Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket there, so that nothing is promised that another program has taken."""
    if not 0 <= port <= _LAST_PORT:
        raise UsageError(f"--port takes 0 to {_LAST_PORT}, not {port}.")
    try:
        return _open(host, port)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "--port takes another one" if taken else "--host takes an address or a name of this machine"
        raise UsageError(f"The service cannot listen at {host}:{port} ({error.strerror}): {advice}.") from None


def _open(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


def make_gallery(run_folder: str | Path, device: str) -> Gallery | None:
    """The run's images to show; None where its data are not at hand any more."""
    try:
        run = open_run(run_folder, device)
        train, test = run.split("train"), run.split("test")
    except SelfconError as error:
        say(f"note: no images to show beside answers ({error})")
        return None
    some = spread(len(train), _KNOWN)
    known = train.take(some.to(train.device))
    features = {
        name: torch.nn.functional.normalize(each) for name, each in embed(run.net, known, size=run.size).items()
    }
    classes, shown = run.facts["classes"], spread(len(test), _SHOWN)
    splits = {"train": train, "test": test}
    return Gallery(
        features=features,
        rows=some.tolist(),
        labels=[classes[label] for label in known.labels.tolist()],
        samples=[{"image": int(row), "class": classes[int(test.labels[row])]} for row in shown],
        picture=lambda split, number: splits[split].pictures(torch.tensor([number]))[0],
        counts={name: len(each) for name, each in splits.items()},
    )
