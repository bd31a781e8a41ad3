"""The settings of a run: everything that decides its result, validated, in YAML and by dotted names.

What does not decide the result (device, output folder, logging) is not here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from selfcon.errors import InputMissingError, UsageError, unknown_name

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32 - 1)]


def _as_list(value: Any) -> Any:
    """On a command line, 5 is the list of it and 5,10 a list of two."""
    if isinstance(value, str):
        return value.split(",")
    return [value] if isinstance(value, int | float) else value


Several = BeforeValidator(_as_list)


class Section(BaseModel):
    """Settings that belong together. They cannot be changed, and unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


Kind = TypeVar("Kind", bound=Section)


class Optim(Section):
    """The optimiser. `weight_decay=None`: 0.05 for AdamW, 1e-4 for the others. `clip_norm` bounds the whole gradient.

    AdamW is the default because the paper's SGD takes thousands of steps to leave the point where all features are
    equal, which is where aligning the exits leads first; the recipes of the paper use SGD.
    """

    name: Literal["sgd", "adamw", "lars"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative | None = None
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    clip_norm: Positive | None = None

    @model_validator(mode="after")
    def _check_nesterov(self) -> Optim:
        if self.nesterov and (self.name != "sgd" or not self.momentum):
            raise ValueError("nesterov goes with sgd and a momentum above 0")
        return self


class Schedule(Section):
    """How the learning rate moves; `cosine` is the paper's, which moves once an epoch.

    `warmup_epochs=None`: 10, at most a fifth, for batches of 1024 or more, and with `smooth-cosine` in pretrainings of
    2,000 updates or more, too; none elsewhere.
    """

    kind: Literal["smooth-cosine", "cosine", "step", "constant"] = "smooth-cosine"
    warmup_epochs: Annotated[int, Field(ge=0)] | None = None
    warmup_from: NotNegative = 0.01
    floor: Share = 1e-3
    milestones: Annotated[tuple[Share, ...], Several] = (0.6, 0.8)
    gamma: Share = 0.1


class Loss(Section):
    """`base_temperature=0.07` is the scale of the paper's code, with which its learning rates were found.

    With `learn_temperature`, the temperature is where training begins. With `ring`, several processes pass their
    features around instead of gathering them all.
    """

    temperature: Annotated[float, Field(ge=1e-6)] = 0.1
    learn_temperature: bool = False
    alpha: NotNegative = 1.0
    base_temperature: Annotated[float, Field(ge=1e-6)] | None = None
    implementation: Literal["auto", "dense", "tiled", "triton"] = "auto"
    ring: bool = False


class Augment(Section):
    """Which policy, the least and largest share of an image that a crop takes, and whether it may be mirrored.

    `strength` multiplies how far brightness, contrast, saturation and hue may go, where a policy moves them.
    """

    policy: str = "standard"
    scale: tuple[Share, Share] = (0.2, 1.0)
    flip: bool = True
    strength: Annotated[float, Field(ge=0, le=5)] = 1.0


class Probe(Section):
    """Linear classifiers on the frozen encoder. `epochs=None`: 100, but at most 10 times those of the pretraining.

    `lr=None`: 8 over the mean squared length of each exit's features, their mean taken out.
    """

    epochs: Count | None = None
    batch_size: Count = 512
    lr: Positive | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NotNegative = 0.0
    augment: Augment = Augment(policy="simple")  # never mirrored where the pretraining's images are not
    schedule: Schedule = Schedule(kind="step", warmup_epochs=0)


class Watch(Section):
    """kNN accuracy of the backbone on a sample of the held-out (or training) images, every few epochs; 0 is never.

    `test_in_probe` notes the test accuracy after every epoch of the probe, to see what choosing the best would add;
    nothing is chosen by it.
    """

    knn_every: Annotated[int, Field(ge=0)] = 10
    knn_samples: Count = 1000
    test_in_probe: bool = False


class Settings(Section):
    """Everything that decides the result of a run."""

    data: str = "digits"
    data_root: str = "data"
    class_list: str | None = None
    bad_images: Literal["error", "skip"] = "error"
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    image_size: Count | None = None
    stream: bool | None = None
    limit_batches: Count | None = None
    per_class: Count | None = None
    imbalance: Annotated[float, Field(ge=1)] | None = None
    sampler: Literal["plain", "balanced"] = "plain"

    model: str = "resnet18"
    width: Positive = 1.0
    stem: Literal["small", "small-pool", "large"] | None = None
    exits: str = "2:fc"
    norm: Literal["batch", "group"] = "batch"
    projection_dim: Count = 128
    model_options: dict[str, Any] = {}
    weights: str | None = None

    method: str = "selfcon"
    epochs: Count = 100
    batch_size: Count = 256
    micro_batch: Count | None = None
    cutmix: Share = 0.0
    lr: Positive | None = None
    seed: Seed = 0
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    sync_bn: bool | None = None
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    keep_epochs: Annotated[tuple[Count, ...], Several] = ()

    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    augment: Augment = Augment()
    probe: Probe = Probe()
    watch: Watch = Watch()

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if late := [epoch for epoch in self.keep_epochs if epoch > self.epochs]:
            raise ValueError(f"keep_epochs asks for epoch {late[0]}, and there are {self.epochs}")
        if self.micro_batch is not None and self.loss.learn_temperature:
            raise ValueError("micro_batch and loss.learn_temperature do not go together")
        return self

    @property
    def learning_rate(self) -> float:
        """The one given; else 3e-3 for AdamW, and for the others the paper's for the batch."""
        if self.lr is not None:
            return self.lr
        return 3e-3 if self.optim.name == "adamw" else 0.5 * self.batch_size / 1024

    @property
    def piece(self) -> int | None:
        """How many samples are in the network at a time, where those are not the whole batch."""
        return self.micro_batch if self.micro_batch is not None and self.micro_batch < self.batch_size else None

    @property
    def probe_epochs(self) -> int:
        """How long the linear classifiers are trained."""
        return self.probe.epochs or min(100, 10 * self.epochs)


_MEANT = {"init": "weights", "base": "recipe"}
"""What a file may call what the command line calls --init, and what it builds on."""


def make_settings(*layers: Mapping[str, Any]) -> Settings:
    """Settings from layers of dotted names and values, later ones over earlier ones; all mistakes in one error."""
    # Over all defaults, so that one value of a section does not reset its neighbours.
    tree: dict[str, Any] = Settings().model_dump(mode="json")
    wrong: list[str] = []
    for layer in layers:
        for name, value in flatten(layer).items():
            if name not in NAMES and not name.startswith("model_options."):
                error = unknown_name("setting", name, NAMES)
                if name in _MEANT:
                    error = UsageError(f"Unknown setting {name!r}; did you mean {_MEANT[name]!r}?")
                wrong.append(str(error).rstrip(".?"))
                continue
            place: Any = tree
            *sections, last = name.split(".")
            for section in sections:
                place = place.setdefault(section, {}) if isinstance(place, dict) else {}
            if isinstance(place, dict):
                place[last] = _as_text(name, value) if isinstance(value, os.PathLike) else value
            else:
                wrong.append(f"{'.'.join(sections)} is a value, and so has no {last}")
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        wrong += [_describe(each) for each in error.errors()]
    if wrong:
        raise UsageError("; ".join(wrong) + ".")
    return settings


def _as_text(name: str, value: os.PathLike[str]) -> str:
    """A path as it is written; to data, so that nobody takes it for the name of a set."""
    text = os.fspath(value)
    return text if name != "data" or os.sep in text else f"{os.curdir}{os.sep}{text}"


def make_section(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """A section of these values, or a sentence about all that are wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UsageError("; ".join(_describe(each) for each in error.errors()) + ".") from error


def _describe(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"] if part not in ("function-after", "constrained-int"))
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    given = error["input"]
    if name in ("data", "model") and not isinstance(given, str | int | float | list | dict | None):
        adds = {"data": "selfcon.data.add_source", "model": "timm.models.register_model"}[name]
        return f"{name} is a name, not a {type(given).__name__}: {adds} gives it one (docs/guides/research.md)"
    return f"{name} {message}, not {given!r}" if name else message


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; `model_options` keeps its own names below it."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        elif not isinstance(value, Mapping):
            flat[name] = value
    return flat


def _names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _names(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


NAMES = tuple(_names(Settings))
"""Every setting by its dotted name."""
PROBE_NAMES = tuple(name for name in NAMES if name.startswith("probe.") or name == "watch.test_in_probe")
"""Those that a probe of a trained encoder can have for itself."""


def choices_of_settings(section: type[BaseModel] = Settings, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """The words that a setting can be, of those that take one of a few."""
    found: dict[str, tuple[str, ...]] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= choices_of_settings(kind, f"{prefix}{name}.")
        words = [word for each in (kind, *get_args(kind)) if get_origin(each) is Literal for word in get_args(each)]
        if words:
            found[f"{prefix}{name}"] = tuple(words)
    return found


_LARGEST_FILE = 1 << 20
_DEEPEST = 16


def _check_shape(path: Path, text: str) -> None:
    """Refuse what would grow beyond its text, or nest without end, before anything is built of it."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise UsageError(f"{path} uses aliases, which settings do not take.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise UsageError(f"{path} nests deeper than settings do.")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of settings. Tags that would build Python objects are refused, and aliases, which can grow."""
    if not path.is_file():
        raise InputMissingError(f"There is no file {path}.")
    if path.stat().st_size > _LARGEST_FILE:
        raise UsageError(f"{path} is larger than settings can be.")
    try:
        text = path.read_text(encoding="utf-8")
        _check_shape(path, text)
        tree = yaml.safe_load(text)
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not plain YAML: {type(error).__name__}.") from error
    except yaml.YAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""  # type: ignore[attr-defined]
        raise UsageError(f"{path}{where} is not plain YAML: {getattr(error, 'problem', error)}.") from error
    except (ValueError, OverflowError) as error:  # dates that are none, numbers of thousands of digits
        raise UsageError(f"{path} holds a value that cannot be: {str(error).rstrip('.')}.") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UsageError(f"{path} must hold settings by name.")
    return tree


def read_like(path: Path, settings: Section) -> Section:
    """The settings in a YAML file, of the same kind as others."""
    tree = read_yaml(path)
    if isinstance(settings, Settings):
        return make_settings(tree)
    try:
        return type(settings).model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{path} holds settings of another kind: {_describe(error.errors()[0])}") from error


def write_yaml(settings: Section) -> str:
    """All settings, as `read_yaml` reads them."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


_PLACES = ("data", "data_root", "class_list", "weights")


def same_path(one: str | None, other: str | None, names: Sequence[str] = ()) -> bool:
    """Whether two paths lead to the same place; `names` are no paths."""
    if one is None or other is None or {one, other} & {*names}:
        return one == other
    try:
        return Path(one).resolve() == Path(other).resolve()
    except (OSError, ValueError):  # no path
        return False


def differences(old: Section, new: Section, *, names: Sequence[str] = ()) -> list[str]:
    """The settings that differ, each as `name: old -> new`; `names` are of data sets, and no paths."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
        and not (name in _PLACES and same_path(before.get(name), after.get(name), [*names, "timm"]))
    ]
