"""One-stage losses against their formulas, on a network's output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

import selfcon
from selfcon.errors import NonFiniteError, UsageError
from selfcon.losses.one_stage import OneStage, logits_loss, soft_divergence

LABELS = torch.tensor([0, 1, 2, 1, 0, 3])


@pytest.fixture
def output() -> selfcon.Output:
    net = selfcon.create_model(
        "resnet18", width=0.125, stem="small", exits=[selfcon.Exit(2), selfcon.Exit(3)], num_classes=4
    )
    return net.double()(torch.randn(6, 3, 16, 16, dtype=torch.float64))


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) at T = 3, times 9, a sample at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for t, s in zip(teacher.detach(), student, strict=True):
        p, q = softmax(t / 3, 0), softmax(s / 3, 0)
        total = total + (p * (p.log() - q.log())).sum()
    return 9 * total / len(teacher)


def test_formulas(output: selfcon.Output) -> None:
    f, g2, g3 = (output.logits[name] for name in ("backbone", "exit2", "exit3"))
    ce = {name: cross_entropy(logits, LABELS) for name, logits in output.logits.items()}
    contrast = selfcon.get_method("selfcon").loss(output.projections_bved(), LABELS)
    expected = {
        "ce": ce["backbone"],
        "ce-sub": ce["backbone"] + ce["exit2"] + ce["exit3"],
        "sd": ce["backbone"] + 0.5 * (ce["exit2"] + divergence(f, g2)) + 0.5 * (ce["exit3"] + divergence(f, g3)),
        "selfcon-1stage": ce["backbone"] + ce["exit2"] + ce["exit3"] + 0.8 * contrast,
    }
    for name, value in expected.items():
        loss = selfcon.get_method(name).loss_from_output(output, LABELS)
        torch.testing.assert_close(loss, value, rtol=1e-10, atol=1e-10)


def test_defaults(output: selfcon.Output) -> None:
    taught = logits_loss(output.logits, LABELS, OneStage(distillation=0.5))
    softened = logits_loss(output.logits, LABELS, OneStage(0.0, 0.5, 0.0, softening=3.0))
    assert torch.equal(taught, softened)
    star, labels = selfcon.get_method("selfcon-star"), LABELS % 2
    expected = star.loss_from_output(output, labels, temperature=0.1, alpha=1.0)
    assert torch.equal(star.loss_from_output(output, labels), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_logits_are_not_looked_at(output: selfcon.Output) -> None:
    compiled = torch.compile(logits_loss, backend="eager", fullgraph=True)
    logits = {name: values.detach() for name, values in output.logits.items()}
    torch.testing.assert_close(compiled(logits, LABELS, OneStage()), logits_loss(logits, LABELS, OneStage()))


def test_the_teacher_is_not_taught() -> None:
    teacher, student = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    soft_divergence(teacher, student, 3.0).backward()
    assert teacher.grad is None
    assert student.grad is not None


@pytest.mark.parametrize("name", ["ce", "sd", "supcon-s", "selfcon"])
def test_a_part_of_the_network_is_not_taken_for_the_whole(name: str) -> None:
    net = selfcon.create_model("resnet18", width=0.125, stem="small", exits=[selfcon.Exit(2)], num_classes=4)
    images = torch.randn(6, 3, 16, 16)
    with pytest.raises(UsageError, match="needs the backbone's output, and this one stops at exit2"):
        selfcon.get_method(name).loss_from_output(net(images, upto="exit2"), LABELS)
    if selfcon.get_method(name).uses_exits:
        with pytest.raises(UsageError, match="needs a sub-network"):
            selfcon.get_method(name).loss_from_output(net(images, upto="backbone"), LABELS)


def test_any_integer_labels_will_do(output: selfcon.Output) -> None:
    ce = selfcon.get_method("ce")
    assert torch.equal(ce.loss_from_output(output, LABELS.int()), ce.loss_from_output(output, LABELS))


def test_contrastive_methods_take_the_projections(output: selfcon.Output) -> None:
    for name, views in (("selfcon", 1), ("selfcon-m", 2), ("supcon", 2)):
        method = selfcon.get_method(name)
        labels = LABELS[: 6 // views] % 2
        expected = method.loss(output.projections_bved(views), labels)
        assert torch.equal(method.loss_from_output(output, labels), expected)


def test_wrong_use(output: selfcon.Output) -> None:
    with pytest.raises(UsageError, match="ce needs logits"):
        selfcon.get_method("ce").loss(torch.randn(4, 1, 1, 8), LABELS[:4])
    with pytest.raises(UsageError, match="sd needs labels"):
        selfcon.get_method("sd").loss_from_output(output)
    with pytest.raises(UsageError, match="labels must be 0 to 3 for 4 classes, and one is 6"):
        selfcon.get_method("ce").loss_from_output(output, LABELS + 6)
    with pytest.raises(UsageError, match="labels must be 0 to 3 for 4 classes, and one is 4"):
        selfcon.get_method("ce").loss_from_output(output, LABELS + 1)
    with pytest.raises(UsageError, match=r"shape \[6\], one for each sample, not \[4\]"):
        selfcon.get_method("ce").loss_from_output(output, LABELS[:4])
    with pytest.raises(UsageError, match="must be integers"):
        selfcon.get_method("ce").loss_from_output(output, LABELS.float())
    with pytest.raises(TypeError, match="temprature"):
        selfcon.get_method("ce").loss_from_output(output, LABELS, temprature=1)  # type: ignore[call-arg]
    broken = replace(output, logits={name: logits / (name != "exit2") for name, logits in output.logits.items()})
    with pytest.raises(NonFiniteError, match="logits of exit2 hold NaN"):
        selfcon.get_method("ce").loss_from_output(broken, LABELS)
    bare = selfcon.Output(names=["backbone", "exit2"], features={})
    with pytest.raises(UsageError, match="create the model with num_classes"):
        selfcon.get_method("ce").loss_from_output(bare, LABELS)
    with pytest.raises(UsageError, match="create it with projection_dim"):
        selfcon.get_method("selfcon").loss_from_output(bare, LABELS)


def test_of_several_processes_none_is_alone_in_refusing(
    output: selfcon.Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(output, logits={name: logits / 0 for name, logits in output.logits.items()})
    with pytest.raises(NonFiniteError):
        logits_loss(broken.logits, LABELS, OneStage())
    monkeypatch.setattr("selfcon.losses.gather.world_size", lambda group: 2)
    monkeypatch.setattr("selfcon.losses.gather.weigh_share", lambda loss, count, group: loss)
    assert not selfcon.get_method("ce").loss_from_output(broken, LABELS).isfinite()
    with pytest.raises(NonFiniteError):  # it looks at nobody else
        selfcon.get_method("ce").loss_from_output(broken, LABELS, gather=False)
