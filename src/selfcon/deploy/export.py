"""A trained model as files for other programs: ONNX whole and in stages, torch.export, timm's weights, a model hub.

Exported models take images [B, 3, S, S] in [0, 1], of any batch, and normalise them inside.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save as save_tensors
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

from selfcon.data.cutting import resize_to
from selfcon.deploy.trust import Trust
from selfcon.errors import SelfconError, UsageError
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.evaluation.early_exit import Rule, name_answers
from selfcon.networks.backbones import is_built_by_timm, stem_of, without_weights
from selfcon.networks.exits import BACKBONE
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.segments import Segment, cut_at_exits
from selfcon.training.checkpoint import plain

TOLERANCE = 1e-4
_OPSET = 18
_CHECKED = (1, 3)  # batch sizes


class Whole(nn.Module):
    """Images in [0, 1] to the logits of every exit and the calibrated probabilities of their ensemble."""

    def __init__(self, net: MultiExitNetwork, facts: dict[str, Any], trust: Trust) -> None:
        super().__init__()
        self.net, self.look = net, _Look(facts)
        self.temperature = trust.temperature(ENSEMBLE if len(net.names) > 1 else BACKBONE)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        logits = self.net(self.look(images)).logits
        each = [logits[name] for name in self.net.names]
        return *each, (torch.stack(each).mean(0) / self.temperature).softmax(1)


class _Look(nn.Module):
    """Normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(facts[name]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class _Step(nn.Module):
    """One segment: from what it was left (at first images) to what it leaves (but for the last) and its logits."""

    def __init__(self, segment: Segment, look: _Look | None, *, last: bool) -> None:
        super().__init__()
        self.segment, self.last = segment, last
        self.look: nn.Module = look or nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, _, logits = self.segment(self.look(x))
        return (logits,) if self.last else (x, logits)


def export_onnx(net: MultiExitNetwork, facts: dict[str, Any], trust: Trust, folder: Path) -> list[str]:
    """model.onnx: `logits_NAME` of every exit and `probabilities`; its metadata name the classes and the size."""
    outputs = [*(f"logits_{name}" for name in net.names), "probabilities"]
    module, size = Whole(net, facts, trust).eval(), int(facts["image_size"])
    _write_onnx(module, _images(size, 2), folder / "model.onnx", ["images"], outputs)
    _label_onnx(folder / "model.onnx", facts)
    run = _open_onnx(folder / "model.onnx")
    for batch in _CHECKED:
        images = _images(size, batch)
        with torch.no_grad():
            _compare("model.onnx", run(images.numpy()), module(images))
    return ["model.onnx"]


def _shorter_side(facts: dict[str, Any]) -> int:
    """What an image's is brought to, before the middle is cut out."""
    size = int(facts["image_size"])
    return resize_to(size) if facts.get("streamed") else size


def _thresholds(rule: Rule | None, count: int) -> tuple[float, ...]:
    """Of the answers before the last; without a rule nobody leaves early."""
    given = Rule().thresholds if rule is None else rule.thresholds
    return given if isinstance(given, tuple) else (given,) * count


def export_stages(net: MultiExitNetwork, facts: dict[str, Any], trust: Trust, folder: Path) -> list[str]:
    """stage-1.onnx and so on, each from what the one before left to its `logits`; stages.json says how to join them."""
    segments, size = cut_at_exits(net.eval()), int(facts["image_size"])
    x = _images(size, 2)
    files, tests = [], {batch: _images(size, batch) for batch in _CHECKED}
    for number, segment in enumerate(segments, start=1):
        last = number == len(segments)
        step = _Step(segment, _Look(facts) if number == 1 else None, last=last).eval()
        name = f"stage-{number}.onnx"
        outputs = ["logits"] if last else ["next_map", "logits"]
        _write_onnx(step, x, folder / name, ["images" if number == 1 else "map"], outputs)
        run = _open_onnx(folder / name)
        with torch.no_grad():
            for batch, given in tests.items():
                expected = step(given)
                _compare(name, run(given.numpy()), expected)
                tests[batch] = expected[0]
            x = step(x)[0]
        files.append(name)
    exits = [segment.name for segment in segments]
    answers = name_answers(exits)
    rule = trust.rule
    stages = {
        "stages": files,
        "exits": exits,
        "answers": answers,
        "temperatures": [trust.temperature(name) for name in answers],
        "criterion": rule.criterion if rule else "confidence",
        "thresholds": list(_thresholds(rule, len(exits) - 1)),
        "image_size": size,
        "shorter_side": _shorter_side(facts),
        "classes": list(facts["classes"]),
    }
    (folder / "stages.json").write_text(json.dumps(stages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [*files, "stages.json"]


def export_torch(net: MultiExitNetwork, facts: dict[str, Any], trust: Trust, folder: Path) -> list[str]:
    """model.pt2 for `torch.export.load`: the same inputs and outputs as model.onnx."""
    module, images = Whole(net, facts, trust).eval(), _images(int(facts["image_size"]), 2)
    with torch.no_grad(), _quietly():
        program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, folder / "model.pt2")
        loaded = torch.export.load(folder / "model.pt2").module()
        for batch in _CHECKED:
            images = _images(int(facts["image_size"]), batch)
            _compare("model.pt2", [each.numpy() for each in loaded(images)], module(images))
    return ["model.pt2"]


def export_timm(net: MultiExitNetwork, facts: dict[str, Any], trust: Trust, folder: Path) -> list[str]:
    """encoder.safetensors: the encoder's weights by timm's names; encoder.json says for which network, and loads it.

    Where timm builds the same network from its name, also the folder `timm` for its `create_model("local-dir:...")`.
    """
    encoder, network, size = net.to_timm().eval(), facts["network"], int(facts["image_size"])
    weights = save_tensors(plain(encoder.state_dict()))
    (folder / "encoder.safetensors").write_bytes(weights)
    seen = resolve_model_data_config(encoder)
    options = without_weights(network.get("options", {}))
    built = {
        "stem": stem_of(encoder, network.get("stem"), size),
        "width": network.get("width", 1.0),
        "norm": network.get("norm", "batch"),
    }
    arguments = {"image_size": size, **built, "projection_dim": None, **options}
    about = {
        "architecture": network["name"],
        "num_classes": 0,
        "num_features": net.width,
        **built,
        "options": options,
        **seen,
        "load": [
            "import selfcon; from safetensors.torch import load_file",
            f"net = selfcon.create_model({network['name']!r}, **{arguments!r})",
            "net.encoder.load_state_dict(load_file('encoder.safetensors'))",
        ],
    }
    (folder / "encoder.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    files = ["encoder.safetensors", "encoder.json"]
    if is_built_by_timm(encoder, network["name"], size, options) and _write_for_timm(
        encoder, network["name"].partition(".")[0], options, weights, folder / "timm"
    ):
        files += ["timm/config.json", "timm/model.safetensors"]
    return files


def _write_for_timm(
    encoder: nn.Module, architecture: str, options: dict[str, Any], weights: bytes, folder: Path
) -> bool:
    """What timm reads of a folder, as of a model hub; nothing where it cannot, such as of some without their head."""
    config: dict[str, Any] = dict(encoder.pretrained_cfg)  # type: ignore[arg-type]
    told = {
        "architecture": architecture,
        "num_classes": 0,
        "num_features": encoder.num_features,
        "model_args": options,
        "pretrained_cfg": {key: value for key, value in config.items() if key != "architecture"},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(weights)
    with torch.no_grad(), _quietly():
        try:
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        except RuntimeError:  # it takes such weights for those of an older version, and renames them
            shutil.rmtree(folder)
            return False
        for batch in _CHECKED:
            images = torch.rand(batch, *config["input_size"], generator=torch.Generator().manual_seed(batch))
            _compare("timm/model.safetensors", [loaded(images).numpy()], [encoder(images)])
    return True


FORMATS: dict[str, Callable[[MultiExitNetwork, dict[str, Any], Trust, Path], list[str]]] = {
    "onnx": export_onnx,
    "stages": export_stages,
    "torch": export_torch,
    "timm": export_timm,
}


def _images(size: int, batch: int) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def _write_onnx(module: nn.Module, x: Tensor, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    try:
        import onnxscript  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        raise UsageError("ONNX needs packages: pip install '.[export]' in selfcon's folder.") from None
    try:
        with torch.no_grad(), _quietly():
            torch.onnx.export(
                module,
                (x,),
                path,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamo=True,
                opset_version=_OPSET,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False,
            )
    except OSError:
        raise
    except Exception as error:  # whatever the exporter does not know
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"This network cannot be written as ONNX ({first}).") from error


def _label_onnx(path: Path, facts: dict[str, Any]) -> None:
    """What whoever has the file alone must know: the classes as JSON, in order, and how images are cut."""
    import onnx

    model, size = onnx.load(path), int(facts["image_size"])
    told = {"classes": json.dumps(list(facts["classes"])), "image_size": str(size)}
    onnx.helper.set_model_props(model, {**told, "shorter_side": str(_shorter_side(facts))})
    onnx.save(model, path)


def _open_onnx(path: Path) -> Callable[[np.ndarray], list[np.ndarray]]:
    try:
        import onnxruntime as ort  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise UsageError("ONNX needs packages: pip install '.[export]' in selfcon's folder.") from None
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})


def _compare(name: str, found: Sequence[np.ndarray], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(expected, found, strict=True):
        scale = max(1.0, float(ours.abs().max()))
        apart = float((ours - torch.from_numpy(np.asarray(theirs))).abs().max()) / scale
        if not apart <= TOLERANCE:
            raise SelfconError(f"{name} gives other answers than the model: {apart:.1e} apart.")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Exporters tell a lot that is not for users."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
