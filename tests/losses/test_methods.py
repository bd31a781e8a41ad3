"""Every contrastive method equals the paper's sums, in value and in gradient."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.errors import NonFiniteError, SelfconWarning, UsageError
from selfcon.losses import Tally, Term, contrastive_loss, methods
from selfcon.losses.methods import standing_in
from selfcon.losses.one_stage import OneStage
from selfcon.networks.multi_exit import Output
from tests.losses import oracle

CONTRASTIVE = [
    *(name for name in selfcon.list_methods() if selfcon.get_method(name).stages == 2),
    *selfcon.list_methods(released=True),
]


def random_labels(kind: str, samples: int, rng: torch.Generator) -> Tensor:
    if kind == "one class":
        return torch.zeros(samples, dtype=torch.long)
    if kind == "all distinct":
        return torch.randperm(samples, generator=rng)
    if kind == "some singletons":
        labels = torch.randint(0, 2, (samples,), generator=rng)
        labels[: samples // 3] = torch.arange(samples // 3) + 2
        return labels
    return torch.randint(0, max(1, samples // 3), (samples,), generator=rng)


@pytest.mark.parametrize("kind", ["random", "some singletons", "one class", "all distinct"])
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_loss_and_gradient_equal_the_papers_sums(name: str, kind: str) -> None:
    method = selfcon.get_method(name)
    rng = torch.Generator().manual_seed(CONTRASTIVE.index(name))
    for case in range(int(os.environ.get("SELFCON_CASES", "60"))):
        samples = 1 + case % 12
        exits = 1 + int(torch.randint(0, 4, (), generator=rng)) if method.uses_exits else 1
        dim = int(torch.randint(2, 9, (), generator=rng))
        temperature = 0.02 * 250 ** float(torch.rand((), generator=rng))
        alpha = 2 * float(torch.rand((), generator=rng)) if case % 5 else 0.0
        labels = random_labels(kind, samples, rng)
        values = torch.randn(samples, method.views, exits, dim, dtype=torch.float64, generator=rng)
        ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SelfconWarning)  # batches without any positive are among them
            loss = method.loss(ours, labels, temperature=temperature, alpha=alpha)
        expected = oracle.loss(name, theirs, labels, temperature=temperature, alpha=alpha)
        loss.backward()
        expected.backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        assert abs(loss.item() - expected.item()) <= 1e-10 * max(1, abs(expected.item()))
        assert (ours.grad - theirs.grad).abs().max() <= 1e-10 * max(1, float(theirs.grad.abs().max()))


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_gradcheck(name: str) -> None:
    method = selfcon.get_method(name)
    features = torch.randn(4, method.views, 3, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 2])
    assert torch.autograd.gradcheck(lambda x: method.loss(x, labels, temperature=0.5, alpha=0.7), features)


def test_base_temperature_is_the_released_scale() -> None:
    features, labels = torch.randn(6, 1, 2, 8), torch.tensor([0, 0, 1, 1, 2, 2])
    method = selfcon.get_method("selfcon")
    released = method.loss(features, labels, temperature=0.1, base_temperature=0.07)
    torch.testing.assert_close(released, method.loss(features, labels, temperature=0.1) * (0.1 / 0.07))


@pytest.mark.parametrize("name", ["supcon", "simclr"])
def test_methods_of_the_backbone_ignore_further_exits(name: str) -> None:
    features, labels = torch.randn(6, 2, 3, 8), torch.tensor([0, 0, 1, 1, 2, 2])
    method = selfcon.get_method(name)
    torch.testing.assert_close(method.loss(features, labels), method.loss(features[:, :, :1], labels))


def test_anchors_without_positives_are_left_out_and_counted() -> None:
    tally = Tally()
    features, labels = torch.randn(4, 1, 1, 8), torch.tensor([0, 0, 1, 2])
    method = selfcon.get_method("supcon-s")
    loss = method.loss(features, labels, tally=tally)
    assert (tally.anchors, tally.left_out, tally.empty_batches) == (4, 2, 0)
    method.loss(features, labels, tally=tally)
    assert (tally.anchors, tally.left_out) == (8, 4)
    expected = oracle.loss("supcon-s", features.double(), labels, temperature=0.1, alpha=1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_tally_that_is_there_from_the_start_is_compiled_once() -> None:
    tally = Tally.on(torch.device("cpu"))
    counted = tally.count("left_out")
    compiled = torch.compile(
        lambda x, y: selfcon.get_method("supcon-s").loss(x, y, tally=tally), backend="eager", fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(torch.randn(4, 1, 1, 8), torch.tensor([0, 0, 1, 2]))
    assert (tally.anchors, tally.left_out, int(counted)) == (12, 6, 6)


def test_anchors_are_counted_by_term() -> None:
    tally = Tally()
    assert (tally.anchors, tally.left_out, tally.empty_batches, tally.non_finite) == (0, 0, 0, 0)
    features, labels = torch.randn(4, 2, 3, 8), torch.tensor([0, 0, 1, 2])
    selfcon.get_method("selfcon-m-star").loss(features, labels, tally=tally)
    assert tally.anchors == 4 * 2 * 1 + 4 * 2 * 2  # of the backbone, and of two sub-networks
    selfcon.get_method("selfcon-m").loss(features, labels, tally=tally)
    assert tally.anchors == 24 + 4 * 2 * 3
    assert tally.left_out == 0


def test_the_only_anchor_is_a_mean_of_one() -> None:
    features = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    term = Term(anchors="F", positives="G", negatives="F+G")
    f, *g = torch.nn.functional.normalize(features[0, 0], dim=1)
    s = torch.stack([f @ each for each in g]) / 0.1
    torch.testing.assert_close(contrastive_loss(features, None, [term]), s.logsumexp(0) - s.mean())


def test_a_starred_loss_of_the_backbone_alone_says_so() -> None:
    features, labels = torch.randn(4, 1, 1, 8), torch.tensor([0, 0, 1, 1])
    with pytest.warns(SelfconWarning, match="anchors at sub-networks"):
        loss = selfcon.get_method("selfcon-star").loss(features, labels)
    torch.testing.assert_close(loss, selfcon.get_method("supcon-s").loss(features, labels) / 2)


def test_a_batch_without_any_positive_gives_zero_and_says_so() -> None:
    tally = Tally()
    features = torch.randn(3, 1, 1, 8, requires_grad=True)
    with pytest.warns(SelfconWarning, match="no anchor of this batch has a positive"):
        loss = selfcon.get_method("supcon-s").loss(features, torch.arange(3), tally=tally)
    loss.backward()
    assert loss.item() == 0
    assert features.grad is not None
    assert features.grad.abs().sum() == 0
    assert tally.empty_batches == 1


def test_the_table_of_methods() -> None:
    assert set(selfcon.list_methods()) == {
        *("ce", "ce-sub", "sd", "selfcon-1stage", "simclr", "supcon", "supcon-s", "selfcon", "selfcon-m"),
        *("selfcon-su", "selfcon-mu", "selfcon-star", "selfcon-m-star", "selfcon-su-star", "selfcon-mu-star"),
    }
    assert selfcon.list_methods() == sorted(selfcon.list_methods())
    selfcon_m = selfcon.get_method("selfcon-m")
    assert (selfcon_m.views, selfcon_m.uses_labels, selfcon_m.uses_exits, selfcon_m.stages) == (2, True, True, 2)
    assert (selfcon.get_method("simclr").uses_labels, selfcon.get_method("ce").stages) == (False, 1)


GOOD = torch.randn(4, 1, 2, 8)
LABELS = torch.tensor([0, 0, 1, 1])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("features", "labels", "options", "words"),
    [
        (GOOD[:, 0], LABELS, {}, r"shape \[B, V, E, D\].* not \[4, 2, 8\]"),
        (GOOD[:0], LABELS[:0], {}, "no part empty"),
        (GOOD.expand(4, 2, 2, 8), LABELS, {}, "selfcon contrasts 1 view of each sample"),
        (GOOD, LABELS[:3], {}, r"shape \[4\], one for each sample, not \[3\]"),
        (GOOD, LABELS.float(), {}, "must be integers"),
        (GOOD, None, {}, "selfcon needs labels"),
        (GOOD.long(), LABELS, {}, "floating point"),
        (GOOD, LABELS, {"temperature": 0.0}, "temperature must be a finite number of at least 1e-06, not 0.0"),
        (GOOD, LABELS, {"temperature": float("nan")}, "temperature must be"),
        (GOOD, LABELS, {"temperature": 1e-40}, "temperature must be"),
        (GOOD, LABELS, {"temperature": "0.1"}, "temperature must be a number"),
        (
            GOOD,
            LABELS,
            {"temperature": torch.tensor(-0.5)},
            "temperature must be a finite number of at least 1e-06, not",
        ),
        (GOOD, LABELS, {"temperature": torch.zeros(1)}, "temperature must be a finite number"),
        (GOOD, LABELS, {"temperature": torch.tensor(float("nan"))}, "temperature must be a finite number"),
        (GOOD.numpy(), LABELS, {}, "features must be a tensor, not ndarray"),
        (GOOD, LABELS.tolist(), {}, "labels must be a tensor, not list"),
        (GOOD, LABELS, {"alpha": -1.0}, "alpha must be a finite number of at least 0"),
        (GOOD, LABELS, {"base_temperature": 0.0}, "base_temperature must be"),
        (GOOD, LABELS, {"implementation": "dens"}, "did you mean 'dense'"),
        (GOOD, LABELS, {"gather": True}, "torchrun"),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(features: Any, labels: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        selfcon.get_method("selfcon").loss(features, labels, **options)
    assert caught.value.exit_code == 64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_where_nothing_is_checked_a_wrong_temperature_is_nan() -> None:
    compiled = torch.compile(selfcon.get_method("selfcon").loss, backend="eager")
    for temperature in (-0.1, 0.0, 0.1):
        loss = compiled(GOOD, LABELS, temperature=torch.tensor(temperature))
        assert loss.isnan() == (temperature <= 0)


@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("shape", [(4, 8), (4, 2, 8), (4, 1, 2, 8, 1), (4, 0, 2, 8)])
def test_every_method_names_the_shape_it_was_given(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape(f"not {list(shape)}.")):
        selfcon.get_method(name).loss(torch.randn(shape), LABELS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_features_are_refused_on_the_cpu(bad: float) -> None:
    features = torch.randn(4, 1, 2, 8)
    features[2, 0, 1, 3] = bad
    with pytest.raises(NonFiniteError, match=r"in 1 of 4 samples \(first: sample 2\)") as caught:
        selfcon.get_method("selfcon").loss(features, LABELS)
    assert caught.value.exit_code == 76


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_where_nothing_is_checked_a_tally_counts_non_finite_features() -> None:
    features = torch.randn(4, 1, 2, 8)
    features[2, 0, 1, 3] = float("nan")
    tally = Tally()
    compiled = torch.compile(selfcon.get_method("selfcon").loss, backend="eager")
    assert compiled(features, LABELS, tally=tally).isnan()
    assert tally.non_finite == 1


def test_an_unknown_method_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="Unknown method 'selfcon-start'; did you mean 'selfcon-star'"):
        selfcon.get_method("selfcon-start")
    with pytest.raises(UsageError, match="valid: ce, ce-sub, "):
        selfcon.get_method("???")


def test_a_method_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.losses.methods._METHODS", dict(methods._METHODS))
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})
    mine = selfcon.Method(name="mine", paper="", uses_exits=False, terms=(Term("F", "F", "F"),))
    assert selfcon.add_method(mine) is mine
    assert selfcon.get_method("mine") is mine
    assert methods.describe_added("selfcon") is None
    assert methods.describe_added("mine")["terms"][0]["anchors"] == "F"  # type: ignore[index]
    other = replace(mine, views=2)
    assert selfcon.add_method(other) is selfcon.get_method("mine")  # as a cell of a notebook does that is run again
    assert methods.describe_added("mine")["views"] == 2  # type: ignore[index]
    for taken in ("selfcon", "selfcon-mu-released"):
        with pytest.raises(UsageError, match=f"There is a method '{taken}' already"):
            selfcon.add_method(replace(mine, name=taken))


@pytest.mark.medium
def test_what_a_script_added_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = """
import json, math, sys
from dataclasses import dataclass, field
import torch
import selfcon
from selfcon.described import describe

class Base(selfcon.Method):
    def loss(self, features, labels=None, **options):
        return features.{}()

@dataclass(frozen=True, kw_only=True)
class Own(Base):
    square: object = lambda x: x * x
    some: object = frozenset("abcdefg")
    nothing: float = math.nan
    pairs: dict = field(default_factory=lambda: {{(1, 2): 0.5}})
    anchors: object = field(default_factory=lambda: torch.arange(5000.0))

print(json.dumps(describe(Own(name="own", paper="", uses_exits=False))))
"""
    told: dict[str, list[dict[str, Any]]] = {}
    for reduce in ("mean", "mean", "sum"):
        path = tmp_path / "own.py"
        path.write_text(script.format(reduce))
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
        told.setdefault(reduce, []).append(json.loads(done.stdout))
    assert told["mean"][0] == told["mean"][1]
    assert {key for key in told["sum"][0] if told["sum"][0][key] != told["mean"][0][key]} == {"code"}
    assert told["sum"][0]["class"] == ["Own", "Base"]


def test_what_each_method_wants() -> None:
    """Views, labels, exits, stages, as the paper has them."""
    expected = {
        "supcon": (2, True, False, 2),
        "supcon-s": (1, True, False, 2),
        "selfcon": (1, True, True, 2),
        "selfcon-m": (2, True, True, 2),
        "selfcon-star": (1, True, True, 2),
        "selfcon-m-star": (2, True, True, 2),
        "simclr": (2, False, False, 2),
        "selfcon-su": (1, False, True, 2),
        "selfcon-mu": (2, False, True, 2),
        "selfcon-su-star": (1, False, True, 2),
        "selfcon-mu-star": (2, False, True, 2),
        "ce": (1, True, False, 1),
        "ce-sub": (1, True, True, 1),
        "sd": (1, True, True, 1),
        "selfcon-1stage": (1, True, True, 1),
    }
    methods = {name: selfcon.get_method(name) for name in selfcon.list_methods()}
    found = {name: (m.views, m.uses_labels, m.uses_exits, m.stages) for name, m in methods.items()}
    assert found == expected


def test_defaults_and_exits_that_do_not_count() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    for name in ("supcon", "simclr"):
        features = torch.randn(4, 2, 3, 5)
        method = selfcon.get_method(name)
        assert torch.equal(method.loss(features, labels), method.loss(features[:, :, :1], labels))
    star, features = selfcon.get_method("selfcon-star"), torch.randn(4, 1, 2, 5)
    assert torch.equal(star.loss(features, labels), star.loss(features, labels, alpha=1.0, temperature=0.1))
    assert star.loss(features, labels) != star.loss(features, labels, alpha=2.0)
    plain = contrastive_loss(features, labels, star.terms)
    assert torch.equal(plain, contrastive_loss(features, labels, star.terms, alpha=1.0, temperature=0.1))
    views, terms = torch.randn(4, 2, 2, 5), selfcon.get_method("selfcon-mu").terms
    assert torch.equal(contrastive_loss(views, None, terms), selfcon.get_method("selfcon-mu").loss(views))


@pytest.mark.parametrize("name", [name for name in CONTRASTIVE if selfcon.get_method(name).views == 2])
@pytest.mark.parametrize("rows", [32, 33])
def test_two_view_methods_refuse_one_label_per_row(name: str, rows: int) -> None:
    method, features = selfcon.get_method(name), torch.randn(rows, 8)
    output = Output(["backbone", "exit2"], {}, {"backbone": features, "exit2": features})
    views = "needs two" if rows % 2 == 0 else "2"
    with pytest.raises(UsageError, match=f"{views} views per image, all first views and then all second views"):
        method.loss_from_output(output, torch.arange(rows) % 4)
    if method.uses_labels is False:  # others refuse a list in any case
        with pytest.raises(UsageError, match="all first views and then all second views"):
            method.loss_from_output(output, [0] * rows)  # type: ignore[arg-type]


def test_one_label_for_all_rows_is_no_pair() -> None:
    output = Output(["backbone"], {}, {"backbone": torch.randn(4, 8)})
    for labels in (torch.tensor(1), torch.zeros(2, dtype=torch.long)):
        selfcon.get_method("simclr").loss_from_output(output, labels)  # which ignores labels otherwise


@pytest.mark.parametrize(("gather", "calls"), [(None, 1), (False, 0), (True, 1)])
def test_a_share_is_weighed_unless_the_loss_is_that_of_one_process(
    gather: bool | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def weigh(loss: torch.Tensor, count: int, group: object) -> torch.Tensor:
        counts.append(count)
        return loss

    monkeypatch.setattr("selfcon.losses.gather.weigh_share", weigh)
    output = Output(["backbone"], {}, logits={"backbone": torch.randn(6, 3)})
    selfcon.get_method("ce").loss_from_output(output, torch.arange(6) % 3, gather=gather)
    assert counts == [6] * calls


def test_methods_without_exits_contrast_with_the_backbone_of_the_memory() -> None:
    method, features, labels = selfcon.get_method("supcon-s"), torch.randn(6, 1, 2, 8), torch.arange(6) % 2
    memory, known = torch.randn(5, 2, 8), torch.arange(5) % 2
    whole = method.loss(features, labels, memory=(memory, known))
    assert torch.equal(whole, method.loss(features, labels, memory=(memory[:, :1], known)))


def test_a_method_of_a_script_stands_in_by_its_description() -> None:
    for described in (None, "not a mapping"):
        with standing_in("absent", described):  # type: ignore[arg-type]
            assert "absent" not in selfcon.list_methods()
    with standing_in("selfcon", {"views": 2}):
        assert selfcon.get_method("selfcon").views == 1
    assert "selfcon" in selfcon.list_methods()
    with standing_in("absent", {}):
        method = selfcon.get_method("absent")
        assert (method.views, method.uses_labels, method.uses_exits, method.one_stage) == (1, True, False, None)
    with standing_in("absent", {"views": 2, "uses_labels": False, "uses_exits": True}):
        method = selfcon.get_method("absent")
        assert (method.views, method.uses_labels, method.uses_exits) == (2, False, True)
    with standing_in("absent", {"one_stage": {"contrast": 1.0}}):
        assert selfcon.get_method("absent").one_stage is not None
    assert "absent" not in selfcon.list_methods()


def test_one_process_is_no_ring() -> None:
    method = selfcon.get_method("selfcon")
    assert torch.equal(method.loss(GOOD, LABELS, gather="ring"), method.loss(GOOD, LABELS))
    with pytest.raises(NonFiniteError):
        method.loss(GOOD / 0, LABELS, gather="ring")


def test_sets_and_methods_that_cannot_be_meant() -> None:
    assert Term("G+F", "F", "F") == Term("F+G", "F", "F")  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"anchors": "H"}, "Unknown set of anchors 'H'"),
        ({"negatives": "f"}, "set of negatives"),
        ({"share": "half"}, "Unknown share of a term 'half'"),
    ]
    for changes, words in wrong:
        with pytest.raises(UsageError, match=words):
            Term(**{"anchors": "F", "positives": "F", "negatives": "F", **changes})
    term = Term("F", "F", "F")
    methods: list[tuple[dict[str, Any], str]] = [
        ({"terms": ()}, "contrasts nothing"),
        ({"views": 0}, "one view or more"),
        ({"one_stage": OneStage()}, "no terms of its own"),
        ({"one_stage": OneStage(), "terms": (), "views": 2}, "of one view with labels"),
        ({"uses_exits": False, "terms": (Term("G", "F", "F"),)}, "uses_exits must be True"),
    ]
    for changes, words in methods:
        with pytest.raises(UsageError, match=words):
            selfcon.Method(**{"name": "mine", "paper": "", "uses_exits": True, "terms": (term,), **changes})


def test_labels_in_a_column_and_exits_in_words() -> None:
    loss, features = selfcon.SupConLoss(), torch.randn(4, 2, 5)
    assert torch.equal(loss(features, LABELS[:4]), loss(features, LABELS[:4, None]))
    net = selfcon.create_model("resnet18", exits="1:fc,2:fc", width=0.125, image_size=16)
    assert net.names == ["backbone", "exit1", "exit2"]
