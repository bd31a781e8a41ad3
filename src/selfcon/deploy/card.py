"""The page that goes with a model: what it is, what it was trained on, what it is worth, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from selfcon.errors import printable

_SHOWN = 30  # classes


def write_card(
    *,
    name: str,
    facts: Mapping[str, Any],
    results: Mapping[str, Any],
    environment: Mapping[str, Any],
    calibration: Mapping[str, Any],
    costs: Mapping[str, int],
) -> str:
    """Markdown with the head that model hubs read."""
    accuracy: Mapping[str, Mapping[str, float]] = results.get("accuracy", {})
    network, classes = facts["network"], list(facts["classes"])
    head = {
        "library_name": "selfcon",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "supervised-contrastive-learning", "early-exit", str(facts["method"])],
        "model-index": [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": str(facts["data"]), "type": "image-folder"},
                        "metrics": [
                            {"type": "accuracy", "name": f"top 1, {leave}", "value": round(each["top1"], 2)}
                            for leave, each in accuracy.items()
                        ],
                    }
                ],
            }
        ],
    }
    told = {"top1": "top 1", "top5": "top 5", "mean_per_class": "mean of classes", "train_top1": "training images"}
    told = {key: title for key, title in told.items() if any(key in each for each in accuracy.values())}
    rows = [
        f"| {' | '.join((_plain(leave), *(_number(each.get(key)) for key in told)))} |"
        for leave, each in accuracy.items()
    ]
    exits = "none" if network["exits"] in ("", "none") else f"`{network['exits']}`"
    shown = ", ".join(_plain(each) for each in classes[:_SHOWN])
    more = f" and {len(classes) - _SHOWN} more" if len(classes) > _SHOWN else ""
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(),
        "---",
        f"# {_plain(name)}",
        "",
        f"A `{network['name']}` (width {network.get('width', 1.0):g}, exits {exits}) that tells {len(classes)} classes "
        f"of images apart, trained by the method `{facts['method']}` (selfcon {environment.get('selfcon', '')}).",
        "",
        "## Use",
        "",
        "```python",
        "import selfcon",
        "",
        'model = selfcon.load("THIS-FOLDER")',
        *_use_lines(len(classes), has_exits=exits != "none", leaves_early=_stored_early_exit(calibration) is not None),
        "```",
        "",
        "## Accuracy",
        "",
        f"On the test images of {_plain(str(facts['data']))}, of the last epoch, in percent:",
        "",
        f"| {' | '.join(('exit', *told.values()))} |",
        "|---" * (1 + len(told)) + "|",
        *rows,
        "",
        *_calibration_lines(calibration),
        "## Training",
        "",
        f"- data: {_plain(str(facts['data']))}, images of {facts['image_size']} pixels; SHA-256 of what was seen: "
        + ", ".join(f"{part} `{str(digest)[:16]}...`" for part, digest in facts.get("data_sha256", {}).items()),
        f"- {results.get('epochs', '?')} epochs, seed {results.get('seed', '?')}, "
        f"{results.get('seconds', 0):,.0f} s on {_plain(str(results.get('device', 'an unknown device')))}",
        f"- {costs['parameters']:,} parameters, {costs['multiply_adds'] / 1e9:.3f} billion multiply-adds an image",
        f"- command: `{printable(' '.join(environment.get('command', []))).replace('`', '')}`",
        "",
        "## Limits",
        "",
        f"- It knows these classes and no others: {shown}{more}. Whatever it is shown, it names one of them, unless "
        "`selfcon calibrate` found out which images are too strange or answers too unsure: it says `unknown` of them.",
        "- Accuracy is that on images like the ones above. Other cameras and other places must be tested.",
        "- Who or what is on the training images was not looked at, and neither was whether errors are evenly spread.",
        "",
    ]
    return "\n".join(lines)


def _use_lines(classes: int, *, has_exits: bool, leaves_early: bool) -> list[str]:
    together = "        # all exits together" if has_exits else ""
    lines = [f'model.predict(["image.jpg"], top={min(3, classes)}){together}']
    if leaves_early:
        lines.append('model.predict(["image.jpg"], exit="early")  # the first exit that is sure enough')
    return lines


def _calibration_lines(calibration: Mapping[str, Any]) -> list[str]:
    if not calibration:
        return ["Probabilities are not calibrated: `selfcon calibrate` of the run that this came from does it.", ""]
    held = calibration["held_out"]
    lines = [
        f"Calibration error, chosen on {held['chosen_on']} and measured on {held['told_of']}: "
        + ", ".join(
            f"{_plain(name)} {each['ece_before']:.1f} % before and {each['ece']:.1f} % after"
            for name, each in calibration["answers"].items()
        )
        + "."
    ]
    if early := _stored_early_exit(calibration):
        chosen = early["chosen"]
        lines.append(
            f"Leaving at the first exit that is sure enough ({early['criterion']}): {chosen['accuracy']:.1f} % for "
            f"{100 * chosen['cost']:.0f} % of the multiply-adds."
        )
    return [*lines, ""]


def _stored_early_exit(calibration: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what is known about early exit, unless its thresholds were left off the model."""
    early: Mapping[str, Any] = calibration.get("early_exit", {})
    return early if early and early.get("stored", True) else None  # earlier versions always stored them


def _plain(text: str) -> str:
    """Names as text: nothing that Markdown or a browser would take for markup."""
    quoted = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(f"&#{ord(letter)};" if letter in "<>&|`*_[]#" else letter for letter in quoted)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
