"""What a run works on: data on the device, the method, and a network that fits both."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from selfcon.config import Augment, Settings
from selfcon.data.images import read_size
from selfcon.data.parts import WHOLE
from selfcon.data.policies import Policy, get_policy
from selfcon.data.resident import has_room, make_resident
from selfcon.data.scan import in_threads
from selfcon.data.source import FileImages, Images, Source
from selfcon.data.sources import load
from selfcon.data.split import Split
from selfcon.data.streamed import make_streamed
from selfcon.data.thinning import thin
from selfcon.errors import BadImageError, SelfconWarning, UsageError, name_some
from selfcon.losses.methods import Method, get_method
from selfcon.networks.backbones import default_stem
from selfcon.networks.exits import parse_exits
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.options import bounded, check_options
from selfcon.networks.registry import create_model, list_models
from selfcon.networks.sync_norm import synchronise
from selfcon.networks.weights import find_timm_weights, hash_file, load_encoder, load_subnetworks, read_weights
from selfcon.progress import say
from selfcon.training.cached import cut_pieces
from selfcon.training.distributed import ALONE, World, own_device
from selfcon.training.logging import check_logs
from selfcon.training.loop import memory_format
from selfcon.workflows.leaks import find_copies, find_known
from selfcon.workflows.several import several

_FEW_SAMPLES = 128
_LARGEST_KEPT = 96  # pixels: above, crops are taken from the images as they are, and not from small copies


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # of `meta` there is none
        if device.type == "cuda" and ":" in name:
            torch.cuda.set_device(device)  # kernels of our own go to the current one
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        if "Expected one of" in reason:
            reason = "say cpu, cuda, cuda:1 or auto"
        raise UsageError(f"The device {name!r} cannot be used here: {reason}.") from error
    return device


@dataclass(frozen=True)
class Running:
    """How a run is made, which does not decide what comes out of it."""

    device: torch.device
    compile: bool | None
    log: Sequence[str]
    deterministic: bool = False
    trust: bool = False

    @classmethod
    def choose(
        cls, *, device: str, compile: bool | None, log: Sequence[str], deterministic: bool = False, trust: bool = False
    ) -> Self:
        """Refuse what cannot be had, before any work."""
        log = several(log)
        check_logs(log)
        return cls(own_device(choose_device(device)), compile, log, deterministic, trust)

    @contextmanager
    def as_asked(self) -> Iterator[None]:
        """Nothing is compiled or gives other bits the next time where that is not wanted."""
        with torch.compiler.set_stance("force_eager" if self.compile is False else "default"), self._reproducibly():
            yield

    @contextmanager
    def _reproducibly(self) -> Iterator[None]:
        """Where it is asked for; an operation that cannot is named."""
        if not self.deterministic:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix is multiplied
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        try:
            yield
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise UsageError(f"--deterministic cannot be had here: {str(error).splitlines()[0]}") from error
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.backends.cudnn.deterministic = before[1]


@dataclass(frozen=True)
class Task:
    """Everything that a run needs besides its folder."""

    settings: Settings
    method: Method
    source: Source
    train: Split
    val: Split | None
    test: Split
    size: int
    device: torch.device
    world: World = ALONE
    weights: dict[str, Tensor] | None = None  # to begin with, unless it has begun
    weights_sha256: str | None = None
    notes: Sequence[str] = ()  # what whoever reads the accuracy should know

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    def fingerprints(self) -> dict[str, str]:
        """What tells these data from others, by split."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        found = {name: data.fingerprint() for name, data in splits.items() if data is not None}
        return found if self.weights_sha256 is None else {**found, "weights": self.weights_sha256}

    def network_options(self, *, classifiers: bool) -> dict[str, Any]:
        """The arguments that build the network, as model.json keeps them."""
        settings, one_stage = self.settings, self.method.one_stage
        wants_projection = one_stage is None or one_stage.contrast > 0
        return {
            "name": settings.model,
            "exits": settings.exits if self.method.uses_exits else "none",
            "stem": settings.stem,
            "image_size": self.size,
            "width": settings.width,
            "norm": settings.norm,
            "projection_dim": settings.projection_dim if wants_projection else None,
            "num_classes": len(self.classes) if classifiers else None,
            "options": dict(settings.model_options),
        }

    def check_batches(self) -> None:
        """Refuse images too small for the network, and a last batch of one where batch normalisation needs more."""
        together = self.world.size == 1 or self._synchronises()
        alone = self._fewest_together() * (self.world.size if together else 1) * self.method.views == 1
        options = self.network_options(classifiers=False)
        name, exits, more = options.pop("name"), parse_exits(options.pop("exits")), options.pop("options")
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net = create_model(name, exits=exits, **options, **more)
                net(torch.empty(1 if alone else 2, 3, self.size, self.size))
        except NotImplementedError:
            return  # some networks cannot be tried so
        except RuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UsageError(f"{name} cannot take images of {self.size} pixels ({reason}).") from error
        except ValueError as error:
            if not alone:
                raise
            piece = self.settings.piece
            what = f"--batch-size than {self.settings.batch_size}" + (
                f", or --micro-batch than {piece}" if piece else ""
            )
            raise UsageError(
                f"A batch of an epoch, or a piece of one, would hold one image{'' if together else ' for a process'}, "
                f"too few for batch normalisation at {self.size} pixels: choose another {what}."
            ) from error

    def _fewest_together(self) -> int:
        """The fewest samples that a process has in the network at a time."""
        batch, piece, world = self.settings.batch_size, self.settings.piece, self.world.size
        wholes = {min(batch, len(self.train)), len(self.train) % batch} - {0}
        shares = [(whole // world, -(-whole // world)) for whole in wholes]
        parts = [cut_pieces(fewest, piece or most, (fewest, most)) for fewest, most in shares if fewest]
        return min((part.stop - part.start for each in parts for part in each), default=0)

    def check_shares(self) -> None:
        """Refuse batches that the processes cannot share."""
        world = self.world.size
        sizes = {"batch_size": self.settings.batch_size}
        if self.method.stages == 2:
            sizes["probe.batch_size"] = self.settings.probe.batch_size
        for name, size in sizes.items():
            if size % world:
                raise UsageError(f"{name} is {size}, which {world} processes cannot share evenly.")
            if 0 < (last := len(self.train) % size) < world:
                raise UsageError(
                    f"The last batch of an epoch would hold {last} images for {world} processes: "
                    f"choose another {name} than {size}."
                )

    def _synchronises(self) -> bool:
        """By default where a process sees so few samples that its own statistics would be poor ones."""
        chosen = self.settings.sync_bn
        return chosen if chosen is not None else self.settings.batch_size // self.world.size < _FEW_SAMPLES

    def build_network(self, *, classifiers: bool) -> MultiExitNetwork:
        """A fresh network on the device, its weights drawn from the seed."""
        options = self.network_options(classifiers=classifiers)
        name, exits, more = options.pop("name"), parse_exits(options.pop("exits")), options.pop("options")
        torch.manual_seed(self.settings.seed)
        net = create_model(name, exits=exits, **options, **more)
        if self.weights is not None:
            load_encoder(net.encoder, self.weights, str(self.settings.weights))
            taken = load_subnetworks(net.subnetworks, self.weights)
            say(f"The network begins with the weights in {weights_file(self.settings)}")
            fresh = [leave for leave in net.subnetworks if leave not in taken]
            if fresh and any(name.startswith("subnetworks.") for name in self.weights):
                say(f"note: there are no weights that fit {name_some(fresh)}: new ones are drawn")
        if self.world.size > 1 and self._synchronises():
            synchronise(net)
        if self.settings.precision == "fp64":
            net.double()
        return net.to(self.device, memory_format=memory_format(self.device))  # type: ignore[call-overload, no-any-return]


def make_policy(augment: Augment) -> Policy:
    """The policy that settings name."""
    policy = get_policy(augment.policy)
    colours = {name: getattr(policy, name) * augment.strength for name in ("brightness", "contrast", "saturation")}
    policy = replace(policy, scale=augment.scale, hue=min(0.5, policy.hue * augment.strength), **colours)
    return policy if augment.flip else replace(policy, flip_probability=0.0)


def check_settings(settings: Settings) -> Method:
    """Refuse before any work what no data could make right."""
    method = get_method(settings.method)
    for augment in (settings.augment, settings.probe.augment):
        make_policy(augment)
    exits = parse_exits(settings.exits)
    if method.uses_exits and not exits:
        raise UsageError(f"{method.name} needs a sub-network: give it exits, such as --exits 2:fc.")
    if settings.loss.learn_temperature and method.one_stage is not None and not method.one_stage.contrast:
        raise UsageError(f"{method.name} contrasts nothing, so there is no temperature to learn.")
    if settings.cutmix and not method.uses_labels:
        raise UsageError(f"{method.name} learns without labels, and cutmix mixes labels.")
    if settings.model_options.get("pretrained"):
        raise UsageError("Weights to begin with are named by --init; --init timm takes those that timm publishes.")
    check_options(settings.model_options, "model_options")
    try:
        with torch.device("meta"), bounded("model_options"), warnings.catch_warnings():  # names and shapes only
            warnings.simplefilter("ignore")
            create_model(
                settings.model,
                exits=exits if method.uses_exits else [],
                stem=settings.stem,
                image_size=settings.image_size,
                width=settings.width,
                norm=settings.norm,
                **settings.model_options,
            )
    except (RuntimeError, NotImplementedError) as error:
        del error  # some networks cannot be built so; they are looked at when the data are there
    return method


def weights_file(settings: Settings) -> Path:
    """The file of the weights to begin with: of a run, or with `timm` what timm publishes for the network."""
    if settings.weights == "timm":
        small = settings.model in list_models() and (settings.stem or default_stem(settings.image_size)) != "large"
        if settings.width != 1.0 or small:
            raise UsageError(
                "timm's weights are for the full --width and the stem of large images: --width 1 --stem large."
            )
        return find_timm_weights(settings.model)
    path = Path(str(settings.weights))
    return path / "model.safetensors" if path.is_dir() else path


def read_source(settings: Settings) -> Source:
    """The data that settings name, with their held-out part. What is tested on is the same for every seed."""
    source = load(
        settings.data,
        root=settings.data_root,
        class_list=settings.class_list,
        bad_images=settings.bad_images,
    ).hold_out(settings.val_fraction, settings.seed)
    source = thin(source, per_class=settings.per_class, imbalance=settings.imbalance, seed=settings.seed)
    return source if settings.limit_batches is None else source.limit(settings.limit_batches * settings.batch_size)


def prepare(
    settings: Settings,
    device: torch.device,
    world: World = ALONE,
    *,
    trust: bool = False,
    streamed_before: bool | None = None,
    began_with: str | None = None,
) -> Task:
    """Read the data and bring them to the device; a run that is gone on with reads them as it did before.

    One that has learnt since needs the weights no more that it `began_with`, whose hash this is.
    """
    method = check_settings(settings)
    weights = None
    if settings.weights is not None and began_with is None:
        weights, began_with = read_weights(weights_file(settings), trust=trust), hash_file(weights_file(settings))
    source = read_source(settings)
    with _advising_a_check():
        size = settings.image_size or _natural_size(source)
    streams = settings.stream if settings.stream is not None else streamed_before
    if streams is None:
        streams = _should_stream(source.train, size, settings, world)
    if streams and _uses_randaugment(settings):
        raise UsageError("RandAugment is for images that stay in memory: --stream false keeps them there.")

    def make(images: Images, like: Split | None = None) -> Split:
        if streams:  # what is trained with may stay in memory; the rest is read once in a while
            return make_streamed(images, size=size, device=device, like=like, budget=None if like is None else 0)
        return make_resident(images, size=size, device=device, like=like, part=world if like is None else WHOLE)

    with _advising_a_check():
        train = make(source.train)
        val = None if source.val is None else make(source.val, like=train)
        test = make(source.test, like=train)
    if settings.batch_size > len(train):
        warnings.warn(
            f"The batch of {settings.batch_size} holds all {len(train)} training images: each epoch is one step.",
            SelfconWarning,
            stacklevel=2,
        )
    notes: list[str] = []
    if world.rank == 0:
        if settings.weights not in (None, "timm"):
            notes = find_known(settings, weights_file(settings), source)
        notes += find_copies(train, val, test)
    for note in notes:
        warnings.warn(note, SelfconWarning, stacklevel=2)
    return Task(settings, method, source, train, val, test, size, device, world, weights, began_with, notes)


@contextmanager
def _advising_a_check() -> Iterator[None]:
    try:
        yield
    except BadImageError as error:
        raise BadImageError(f"{error} `selfcon data check` finds all such.") from error


def _should_stream(images: Images, size: int, settings: Settings, world: World) -> bool:
    """Where images are larger than what is kept of small ones, or do not fit this process nor several together."""
    if _uses_randaugment(settings):
        return False
    fits = world.size > 1 or has_room(torch.device("cpu"), 3 * size * size * len(images))
    return not fits or (size > _LARGEST_KEPT and images.shape != (size, size))


def _uses_randaugment(settings: Settings) -> bool:
    return any(make_policy(augment).randaugment for augment in (settings.augment, settings.probe.augment))


def find_size(source: Source) -> int | None:
    """The side of all images where they are squares of one size; of files, where those are small."""
    found: set[tuple[int, int] | None] = set()
    for images in source.splits().values():
        sizes = in_threads(read_size, images.paths) if isinstance(images, FileImages) else iter([images.shape])
        for size in sizes:
            found.add(size)
            if size is None or size[0] != size[1] or len(found) > 1:
                return None
            if isinstance(images, FileImages) and size[0] > _LARGEST_KEPT:
                return None
    ((side, _),) = found  # type: ignore[misc]
    return side


def _natural_size(source: Source) -> int:
    side = find_size(source)
    if side is None:
        raise UsageError(f"The images of {source.name} are brought to one size: choose it with --image-size.")
    return side
