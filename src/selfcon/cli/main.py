"""The application: a table of verbs, and the one place where errors become sentences and exit codes.

A verb is a module with `add_arguments(parser)` and `run(options) -> exit code`; only the one asked for is imported.
Those that take settings are given the words that are no flags, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import warnings
from importlib import import_module
from typing import TextIO

import selfcon
from selfcon.cli.parsing import Parser
from selfcon.cli.settings import show_all_settings
from selfcon.errors import (
    HungError,
    SelfconError,
    SelfconWarning,
    StoppedError,
    UsageError,
    is_shortage,
    printable,
    unknown_name,
)
from selfcon.progress import speaks

_OUT_OF_MEMORY, _INTERRUPTED = 78, 130
_SECONDS_FOR_THE_FIRST = 10.0  # to say what is wrong: torchrun ends all processes as soon as one has ended
_SPINS = "1000"  # enough for the short waits within a run; torch reads it when it is imported

VERBS = {
    "fit": ("selfcon.cli.fit", "train, probe every exit and their ensemble, write a report: the main job"),
    "pretrain": ("selfcon.cli.pretrain", "train an encoder by a contrastive method"),
    "probe": ("selfcon.cli.probe", "train linear classifiers on a pretrained run"),
    "train": ("selfcon.cli.train", "train encoder and classifier together"),
    "evaluate": ("selfcon.cli.evaluate", "accuracy of a run on any split, by exit"),
    "knn": ("selfcon.cli.knn", "accuracy of the nearest neighbours in a run's features"),
    "predict": ("selfcon.cli.predict", "what is on images: classes, probabilities, the exit that answered"),
    "embed": ("selfcon.cli.embed", "features of images at every exit, into a file"),
    "calibrate": ("selfcon.cli.calibrate", "how far to believe a run, when to leave early, when to say nothing"),
    "report": ("selfcon.cli.report", "one page to share, about one run or many"),
    "serve": ("selfcon.cli.serve", "a service with a page, on this machine"),
    "export": ("selfcon.cli.export", "the model for other programs: ONNX, torch.export, timm, a model hub"),
    "analyze information": ("selfcon.cli.analyze.information", "what features know of input, label and each other"),
    "analyze bounds": ("selfcon.cli.analyze.bounds", "the paper's propositions where the truth is known"),
    "analyze gradients": ("selfcon.cli.analyze.gradients", "how much gradient reaches each layer, by method"),
    "analyze gradcam": ("selfcon.cli.analyze.gradcam", "where the loss looks, by exit and by method"),
    "analyze generalization": ("selfcon.cli.analyze.generalization", "training and test accuracy, by run and epoch"),
    "analyze embedding": ("selfcon.cli.analyze.embedding", "maps of every exit's features, and who is near whom"),
    "analyze cost": ("selfcon.cli.analyze.cost", "parameters, multiply-adds, memory and time a step"),
    "transfer classify": ("selfcon.cli.transfer.classify", "other classes: linear, nearest neighbours, fine-tuning"),
    "transfer segment": ("selfcon.cli.transfer.segment", "semantic segmentation with DeepLabV3+ on VOC or COCO"),
    "transfer detect": ("selfcon.cli.transfer.detect", "object detection with RetinaNet on VOC or COCO"),
    "transfer corruption": ("selfcon.cli.transfer.corruption", "what corrupted images cost, by exit"),
    "reproduce": ("selfcon.cli.reproduce", "the paper's tables and figures: list, show, plan, run, compare"),
    "doctor": ("selfcon.cli.doctor", "what this machine has, and what to expect of given data and settings"),
    "bench": ("selfcon.cli.bench", "how fast this machine trains, beside the ways of others"),
    "recipes": ("selfcon.cli.recipes", "the experiments of the paper by name, for --recipe"),
    "completion": ("selfcon.cli.completion", "what a shell needs to complete all this"),
    "data check": ("selfcon.cli.data_check", "read every image of a data set and tell what is wrong with it"),
    "data pack": ("selfcon.cli.data_pack", "decode a data set once into a file that opens at once"),
}

GROUPS = {
    "analyze": "why it works: information, bounds, gradients, gradcam, generalization, embedding, cost",
    "transfer": "what an encoder is worth elsewhere: classify, segment, detect, corruption",
    "data": "check or pack a data set",
}
"""Verbs of two words by their first, and what they are for."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code: 0 done, 64 wrong usage, 65 bad data, and so on as `selfcon.errors` says."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _share_cores()
    debug = "--debug" in arguments
    silent = contextlib.nullcontext() if speaks() else contextlib.redirect_stdout(io.StringIO())
    with warnings.catch_warnings(), silent:
        warnings.showwarning = _show_warning
        try:
            sys.exit(run([argument for argument in arguments if argument != "--debug"]))
        except SelfconError as error:
            if debug:
                raise
            _say(str(error), own=not error.of_all)
            if error.of_all and not speaks() and not isinstance(error, StoppedError):
                time.sleep(_SECONDS_FOR_THE_FIRST)
            if isinstance(error, HungError) or (_is_distributed() and not isinstance(error, StoppedError)):
                _exit_at_once(error.exit_code)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            _say("Interrupted.")
            sys.exit(_INTERRUPTED)
        except BrokenPipeError:  # the reader has seen enough
            sys.stdout = None
            sys.exit(0)
        except MemoryError:
            _say("There is not enough memory for this.", own=True)
            sys.exit(_OUT_OF_MEMORY)
        except Exception as error:
            if debug:
                raise
            if is_shortage(error):
                _say("There is not enough memory for this.", own=True)
                sys.exit(_OUT_OF_MEMORY)
            what = f"{type(error).__name__}: {error}"
            _say(f"This is a bug of selfcon ({what}); --debug shows where it came from.", own=True)
            sys.exit(SelfconError.exit_code)


def _is_distributed() -> bool:
    """Return whether a launcher such as torchrun started several processes."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _exit_at_once(code: int) -> None:
    """Exit without the usual end of Python, which waits for threads that hang and aborts if those of gloo still run."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _share_cores() -> None:
    """Let OpenMP's threads wait asleep for each other, not awake: otherwise two runs side by side hardly get on."""
    if "OMP_WAIT_POLICY" not in os.environ:  # what somebody asked for stays
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def run(arguments: list[str]) -> int:
    """The exit code of one command."""
    verb, rest = _find_verb(arguments)
    if verb is None:
        group = arguments[0] if arguments and arguments[0] in GROUPS else None
        sys.stdout.write(selfcon.__version__ + "\n" if "--version" in arguments else _overview(group))
        return 0
    module = import_module(VERBS[verb][0])
    parser = Parser(prog=f"selfcon {verb}", description=module.__doc__)
    module.add_arguments(parser)
    if getattr(module, "takes_settings", False):
        options, words = parser.parse_known_args(rest)
        if options.help_all:
            show_all_settings(getattr(options, "recipe", None), data=getattr(options, "data", None))
            return 0
        code: int = module.run(options, words)
    else:
        code = module.run(parser.parse(rest))
    return code


def _find_verb(arguments: list[str]) -> tuple[str | None, list[str]]:
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        return None, []
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if verb in VERBS:
            return verb, arguments[words:]
    if arguments[0] in GROUPS:
        below = {verb.split()[1] for verb in VERBS if verb.startswith(arguments[0] + " ")}
        if arguments[1:2] in (["-h"], ["--help"]):
            return None, []
        if len(arguments) < 2 or arguments[1].startswith("-"):
            raise UsageError(f"selfcon {arguments[0]} is followed by {' or '.join(sorted(below))}.")
        raise unknown_name(f"verb after {arguments[0]}", arguments[1], below)
    if arguments[0].startswith("-"):
        raise UsageError(f"A verb comes first, and {arguments[0]} is none; `selfcon --help` lists them.")
    raise unknown_name("verb", arguments[0], {verb.split()[0] for verb in VERBS})


def _overview(group: str | None = None) -> str:
    """All verbs, those of a group in one line; or the verbs of a group."""
    shown = {}
    for verb, (_, summary) in VERBS.items():
        first, _, second = verb.partition(" ")
        if group is None:
            shown[f"{first} ..." if second else verb] = GROUPS[first] if second else summary
        elif first == group:
            shown[second] = summary
    width = max(map(len, shown)) + 3
    lines = [f"  {verb:{width}s}{summary}" for verb, summary in shown.items()]
    name = f"selfcon {group}" if group else "selfcon"
    about = f"{GROUPS[group].capitalize()}." if group else "Supervised contrastive learning of images from one view."
    return "\n".join(
        [
            f"usage: {name} VERB [options]        {name} VERB --help tells its options",
            "",
            about,
            "",
            *lines,
            "",
            "  --version    --debug (show where an error came from)",
            "",
        ]
    )


def _say(sentence: str, *, own: bool = False) -> None:
    """Tell the user; of several processes the first does, and each of what may be its `own` trouble."""
    if speaks():
        sys.stderr.write(f"selfcon: {printable(sentence)}\n")
    elif own:
        sys.stderr.write(f"selfcon: process {os.environ['RANK']}: {printable(sentence)}\n")


def _show_warning(  # noqa: PLR0917 - as `warnings` calls it
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings as sentences, without a place in code that the reader of a command's output did not write."""
    label = "note" if issubclass(category, SelfconWarning) else category.__name__
    _say(f"{label}: {message}")
