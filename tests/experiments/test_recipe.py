"""Recipes: what they accept, and how they become configurations."""

import json

import pytest

from iternorm.experiments.recipe import Recipe

BASIC = {"data": "cifar10", "model": "vgg", "norm": "BN", "batch_size": 256, "lr": 0.1, "epochs": 160}


def test_a_configuration_holds_what_is_not_the_default():
    recipe = Recipe(**BASIC, momentum=0.9, milestones=(60, 120), gamma=0.2)
    config = recipe.to_config("basic")
    assert config == {"job": "basic", **BASIC, "momentum": 0.9, "milestones": [60, 120], "gamma": 0.2}


def test_a_configuration_survives_json():
    recipe = Recipe(**BASIC, seed=2, momentum=0.9, milestones=(60, 120), gamma=0.2, channels_last=True, width=0.5)
    config = recipe.to_config("basic")
    assert json.loads(json.dumps(config)) == config
    assert Recipe.from_config(config) == recipe


def test_whole_and_floating_numbers_are_the_same_recipe():
    a, b = Recipe(**{**BASIC, "lr": 1}), Recipe(**{**BASIC, "lr": 1.0})
    assert json.dumps(a.to_config("x")) == json.dumps(b.to_config("x"))


def test_the_learning_rate_falls_after_its_milestones():
    recipe = Recipe(**BASIC, milestones=(60, 120), gamma=0.2)
    assert [recipe.learning_rate(epoch) for epoch in (0, 59)] == [0.1, 0.1]
    assert recipe.learning_rate(60) == recipe.learning_rate(119) == pytest.approx(0.02)
    assert recipe.learning_rate(120) == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data", ""),
        ("batch_size", 0),
        ("batch_size", 2.0),
        ("epochs", True),
        ("seed", -1),
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", "0.1"),
        ("momentum", 1),
        ("nesterov", True),
        ("augment", 1),
        ("weight_decay", -1e-4),
        ("milestones", (120, 60)),
        ("milestones", (0,)),
        ("milestones", 60),
        ("precision", "fp16"),
        ("record_every", 0),
        ("image_size", 0),
        ("width", 0),
    ],
)
def test_impossible_values_are_named(name, value):
    with pytest.raises(ValueError, match=rf"{name}=.* of a recipe"):
        Recipe(**{**BASIC, name: value})


def test_a_foreign_configuration_is_refused():
    with pytest.raises(ValueError, match="lacks epochs"):
        Recipe.from_config({name: value for name, value in BASIC.items() if name != "epochs"})
    with pytest.raises(ValueError, match="has dimension, which no recipe knows"):
        Recipe.from_config({**BASIC, "dimension": 4})
