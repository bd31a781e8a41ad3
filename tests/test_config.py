from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selfcon.config import NAMES, Settings, differences, flatten, make_settings, read_yaml, write_yaml
from selfcon.errors import InputMissingError, UsageError
from selfcon.losses.methods import list_methods
from selfcon.paper import list_recipes, load_recipe
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.task import check_settings


def test_layers_and_dotted_names() -> None:
    settings = make_settings({"epochs": 3, "optim": {"name": "sgd"}}, {"optim.momentum": 0.5, "epochs": 4})
    assert (settings.epochs, settings.optim.name, settings.optim.momentum) == (4, "sgd", 0.5)
    assert make_settings({"model_options": {"zero_init_last": False}}).model_options == {"zero_init_last": False}
    assert "probe.schedule.milestones" in NAMES


def test_a_value_leaves_its_neighbours_alone() -> None:
    defaults = flatten(Settings().model_dump(mode="json"))
    for name, value in defaults.items():
        assert make_settings({name: value}) == Settings()
    probe = make_settings({"probe.schedule.gamma": 0.2, "probe.augment.flip": False}).probe
    assert (probe.schedule.kind, probe.augment.policy) == ("step", "simple")


def test_yaml_there_and_back(tmp_path: Path) -> None:
    settings = make_settings({"data": "a: b", "augment.scale": [0.5, 1.0], "lr": 1e-4, "keep_epochs": [3, 5]})
    (tmp_path / "config.yaml").write_text(write_yaml(settings))
    assert make_settings(read_yaml(tmp_path / "config.yaml")) == settings


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        collect_settings(None, {"epoch": 3, "lr": float("nan"), "method": "selfconn", "batch_size": 0, "exits": "two"})
    for words in ("'epochs'", "lr should be a finite number", "'selfcon'", "batch_size should be", "STAGE:STRUCTURE"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 0}, "epochs should be greater than or equal to 1, not 0"),
        ({"epochs": 2.5}, "epochs"),
        ({"seed": -1}, "seed should be greater than or equal to 0"),
        ({"optim.momentum": 1.0}, "optim.momentum should be less than 1"),
        ({"precision": "fp8"}, "precision should be 'fp64', 'fp32', 'bf16' or 'fp16'"),
        ({"keep_epochs": [200]}, "keep_epochs asks for epoch 200, and there are 100"),
        ({"optim": {"momentun": 0.5}}, "did you mean 'optim.momentum'"),
    ],
)
def test_wrong_settings(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_settings(given)


def test_yaml_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: !!python/object/apply:os.system ['touch owned']")
    with pytest.raises(UsageError, match="is not plain YAML"):
        read_yaml(path)
    path.write_text("- 1")
    with pytest.raises(UsageError, match="must hold settings by name"):
        read_yaml(path)
    with pytest.raises(InputMissingError):
        read_yaml(tmp_path / "none.yaml")
    assert not (tmp_path / "owned").exists()


def test_differences() -> None:
    assert differences(Settings(), make_settings({"loss.alpha": 2.0})) == ["loss.alpha: 1.0 -> 2.0"]


def test_one_place_by_several_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("birds", "other"):
        (tmp_path / name).mkdir()
    before = make_settings({"data": "birds"})
    for same in ("./birds", "birds/", str(tmp_path / "birds")):
        assert differences(before, make_settings({"data": same})) == []
    assert differences(before, make_settings({"data": "other"})) == ["data: 'birds' -> 'other'"]
    assert differences(before, make_settings({"data": "gone"})) == ["data: 'birds' -> 'gone'"]
    assert differences(before, make_settings({"data": "birds/"}), names=["birds"]) == ["data: 'birds' -> 'birds/'"]
    (tmp_path / "timm").mkdir()
    timms, own = (make_settings({"weights": weights}) for weights in ("timm", "./timm"))
    assert differences(timms, own) == ["weights: 'timm' -> './timm'"]


@pytest.mark.medium
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_sound(name: str) -> None:
    recipe = load_recipe(name)
    check_settings(make_settings(recipe.settings))
    head = recipe.describe().splitlines()[:3]
    assert [line.split(":")[0] for line in head] == ["# expected", "# cost", "# command"]


def test_recipes_hold_the_papers_settings(tmp_path: Path) -> None:
    names = list_recipes()
    for data, networks in {
        "cifar10": ("resnet18", "resnet50", "wrn16_8", "vgg16_bn"),
        "cifar100": ("resnet18", "resnet50", "wrn16_8", "vgg16_bn", "efficientnet_b0"),
        "tiny-imagenet": ("resnet18", "resnet50", "wrn16_8", "vgg16_bn"),
        "imagenet100": ("resnet18", "resnet50"),
        "imagenet": ("resnet18", "resnet34", "resnet50"),
    }.items():
        for network in networks:
            for method in ("ce", "supcon", "supcon-s", "selfcon", "selfcon-m"):
                assert f"{data}-{network}-{method}" in names
    assert {f"cifar100-resnet18-{method}" for method in list_methods()} <= set(names)

    selfcon = collect_settings("cifar100-resnet18-selfcon", {})
    assert (selfcon.epochs, selfcon.batch_size, selfcon.learning_rate, selfcon.probe_epochs) == (1000, 1024, 0.5, 100)
    assert (selfcon.loss.base_temperature, selfcon.exits, selfcon.optim.name) == (0.07, "2:fc", "sgd")
    assert collect_settings("cifar100-resnet18-selfcon", {"batch_size": 256}).learning_rate == 0.125
    assert collect_settings("cifar100-resnet18-selfcon", {"batch_size": 256, "lr": 0.3}).learning_rate == 0.3
    assert collect_settings("imagenet-resnet50-selfcon", {}).learning_rate == 0.125
    assert collect_settings("imagenet-resnet18-supcon", {}).learning_rate == 0.25
    assert collect_settings("imagenet100-resnet18-supcon", {}).learning_rate == 1.0
    assert collect_settings("cifar100-wrn16_8-selfcon", {}).exits == "1:same"
    assert collect_settings("cifar100-vgg16_bn-selfcon", {}).probe.lr == 0.1
    assert collect_settings("cifar100-resnet18-simclr", {}).loss.temperature == 0.5
    ce = collect_settings("cifar100-resnet18-ce", {})
    assert (ce.epochs, ce.learning_rate, ce.augment.policy) == (500, 0.8, "simple")

    (tmp_path / "mine.yaml").write_text("recipe: cifar100-resnet18-selfcon\nepochs: 7\nloss: {alpha: 0.5}\n")
    mine = collect_settings(str(tmp_path / "mine.yaml"), {})
    assert (mine.epochs, mine.loss.alpha, mine.loss.base_temperature) == (7, 0.5, 0.07)
    (tmp_path / "mine.yaml").write_text("recipe: cifar100-resnet18-selfcon\nbatch_size: 256\n")
    (tmp_path / "adamw.yaml").write_text("recipe: cifar100-resnet18-selfcon\noptim: {name: adamw}\n")
    assert collect_settings(str(tmp_path / "mine.yaml"), {}).learning_rate == 0.125
    assert collect_settings(str(tmp_path / "mine.yaml"), {"batch_size": 128}).learning_rate == 0.0625
    assert collect_settings(str(tmp_path / "adamw.yaml"), {}).learning_rate == 3e-3
    (tmp_path / "lr.yaml").write_text("data: x.npz\nlr: 0.01\noptim: {name: sgd}\n")
    assert collect_settings(str(tmp_path / "lr.yaml"), {"batch_size": 128}).lr == 0.005
    assert collect_settings("cifar100-resnet18-selfcon", {"optim.name": "adamw"}).learning_rate == 3e-3
    (tmp_path / "typo.yaml").write_text("data: x.npz\nepochs: many\nlr_: 1\n")
    with pytest.raises(
        UsageError, match=r"In .*typo.yaml: .*did you mean 'lr'.*epochs should be .*batch_size should be"
    ):
        collect_settings(str(tmp_path / "typo.yaml"), {"batch_size": "x"})
    loop = tmp_path / "loop.yaml"
    loop.write_text(f"recipe: {loop}\n")
    with pytest.raises(UsageError, match="builds on itself"):
        load_recipe(str(loop))
    with pytest.raises(UsageError, match="did you mean 'cifar100-resnet18-selfcon'"):
        load_recipe("cifar100-resnet-18-selfcon")


def test_a_path_is_no_name_and_a_value_no_section() -> None:
    assert make_settings({"data": Path("digits")}).data == "./digits"
    assert make_settings({"data": "digits"}).data == "digits"
    for wrong in ({"model_options": 5}, {"model_options": None}, {"model_options.a": 1, "model_options.a.b": 2}):
        with pytest.raises(UsageError, match="model_options"):
            make_settings(wrong)


def test_another_network_than_the_recipes(tmp_path: Path) -> None:
    wide = collect_settings("cifar100-wrn16_8-selfcon", {})
    assert collect_settings("cifar100-resnet18-selfcon", {"model": "wrn16_8"}) == wide
    (tmp_path / "mine.yaml").write_text("recipe: cifar100-resnet18-selfcon\nmodel: wrn16_8\n")
    assert collect_settings(str(tmp_path / "mine.yaml"), {}) == wide
    for recipe, other in (  # a probe's rate of the network's own, batches of another size, rates with them
        ("cifar100-resnet18-selfcon", "cifar100-vgg16_bn-selfcon"),
        ("cifar100-vgg16_bn-selfcon", "cifar100-resnet18-selfcon"),
        ("imagenet-resnet18-selfcon", "imagenet-resnet50-selfcon"),
        ("imagenet100-resnet18-supcon", "imagenet100-resnet50-supcon"),
    ):
        settings = collect_settings(other, {})
        assert collect_settings(recipe, {"model": settings.model}) == settings
    for network, exits in (("resnet34", "2:small"), ("convnext_atto", "2:small")):
        foreign = collect_settings("imagenet100-resnet18-supcon", {"model": network})
        assert (foreign.exits, foreign.lr) == (exits, 1.0)
    (tmp_path / "own.yaml").write_text("data: cifar100\nmethod: supcon\nmodel: resnet18\nepochs: 50\n")
    before, after = (collect_settings(str(tmp_path / "own.yaml"), more) for more in ({}, {"model": "vgg16_bn"}))
    assert differences(before, after) == [  # what belongs to networks, and nothing of the paper's recipe
        "exits: '2:fc' -> '3:fc'",
        "model: 'resnet18' -> 'vgg16_bn'",
        "probe.lr: None -> 0.1",
    ]
    mixed = collect_settings("cifar100-resnet18-best", {"model": "vgg16_bn"})
    assert (mixed.cutmix, mixed.epochs, mixed.probe.lr) == (0.5, 360, 0.1)
    (tmp_path / "any.yaml").write_text("data: x.npz\nmodel_options: {drop_rate: 0.1}\n")  # of whichever network
    for model in ("resnet18", "convnext_atto"):
        assert collect_settings(str(tmp_path / "any.yaml"), {"model": model}).model_options == {"drop_rate": 0.1}
    assert collect_settings(str(tmp_path / "any.yaml"), {}).model_options == {"drop_rate": 0.1}
    foreign = collect_settings("cifar100-resnet18-selfcon", {"model": "convnext_atto", "model_options.drop_rate": 0.1})
    assert (foreign.model_options, foreign.epochs) == ({"drop_rate": 0.1}, 1000)
    best = collect_settings("cifar100-resnet18-best", {"model": "resnet50"})
    assert (best.model_options, best.exits) == ({"zero_init_last": False}, "1:same,2:same,3:same")


def test_without_data_the_digits_are_taken() -> None:
    assert collect_settings(None, {}).width == 0.25
    assert collect_settings(None, {"data": "x.npz"}).width == 1.0
