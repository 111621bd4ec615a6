"""Labels make the layers they name, in the places they name."""

import pytest
from torch import nn

import iternorm
from iternorm.networks.norms import is_iterated, make_norm, place_norms


@pytest.mark.parametrize(
    ("label", "kind", "attributes"),
    [
        ("BN", "BatchNorm", {}),
        ("DBN", "DecorrelatedBatchNorm", {"group_size": None, "solver": "zca"}),
        ("DBN-16", "DecorrelatedBatchNorm", {"group_size": 16, "solver": "zca"}),
        ("DBN-16 pca", "DecorrelatedBatchNorm", {"group_size": 16, "solver": "pca"}),
        ("IterNorm T=5", "IterNorm", {"group_size": None, "num_iters": 5}),
        ("IterNorm T=0", "IterNorm", {"group_size": None, "num_iters": 0}),
        ("IterNorm T=7 d=64", "IterNorm", {"group_size": 64, "num_iters": 7}),
        # One channel a group is what BatchNorm computes, but the label asks for our layer.
        ("IterNorm T=5 d=1", "IterNorm", {"group_size": 1, "num_iters": 5}),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_label_makes_its_layer(label, kind, attributes, rank):
    layer = make_norm(label, eps=1e-3, rank=rank)(160)
    package = nn if kind == "BatchNorm" else iternorm
    assert type(layer) is getattr(package, f"{kind}{rank}d")
    assert (layer.num_features, layer.eps, layer.affine, layer.momentum) == (160, 1e-3, True, 0.1)
    assert {name: getattr(layer, name) for name in attributes} == attributes


@pytest.mark.parametrize("rank", [1, 2])
def test_sync_before_iternorm_synchronizes(rank):
    layer = make_norm("SyncIterNorm T=3 d=32", eps=1e-4, rank=rank)(64)
    assert type(layer) is iternorm.SyncIterNorm
    assert (layer.num_features, layer.eps, layer.group_size, layer.num_iters) == (64, 1e-4, 32, 3)
    assert make_norm("SyncIterNorm T=3")(64).group_size is None


def test_plain_is_no_norm():
    assert make_norm("plain") is None
    assert place_norms("plain") == (None, None, None)


def test_only_iternorms_are_iterated():
    assert [
        label for label in ("plain", "BN", "DBN-16", "IterNorm T=5 d=64", "SyncIterNorm T=5") if is_iterated(label)
    ] == [
        "IterNorm T=5 d=64",
        "SyncIterNorm T=5",
    ]


def kinds(label):
    return [None if make is None else type(make(8)).__name__ for make in place_norms(label)]


def test_a_placed_label_says_where_its_layer_stands():
    assert kinds("BN") == ["BatchNorm2d", "BatchNorm2d", None]
    assert kinds("IterNorm T=5 d=64") == ["IterNorm2d", "IterNorm2d", None]
    assert kinds("DBN-16-L1") == ["BatchNorm2d", "DecorrelatedBatchNorm2d", None]
    assert kinds("IterNorm-L1") == ["BatchNorm2d", "IterNorm2d", None]
    assert kinds("IterNorm-Full") == ["IterNorm2d", "IterNorm2d", None]
    assert kinds("IterNorm-L1+DF") == ["BatchNorm2d", "IterNorm2d", "IterNorm1d"]
    assert kinds("SyncIterNorm-L1+DF") == ["BatchNorm2d", "SyncIterNorm", "SyncIterNorm"]
    assert kinds("DBN-16 pca-L1") == kinds("DBN-16-L1")


def test_placed_labels_carry_eps_and_the_papers_setting():
    placed = place_norms("IterNorm-L1+DF", eps=1e-3)
    first, features = placed.first_norm(64), placed.feature_norm(512)
    assert [(layer.eps, layer.group_size, layer.num_iters) for layer in (first, features)] == [(1e-3, 64, 5)] * 2
    assert placed.norm(64).eps == 1e-3
    assert place_norms("DBN-16-L1").first_norm(64).group_size == 16
    # A label that says more than the word keeps what it says.
    other = place_norms("IterNorm T=3 d=32-Full").norm(64)
    assert (other.num_iters, other.group_size) == (3, 32)


@pytest.mark.parametrize(
    "label", ["iternorm t=5", "IterNorm T5", "BatchNorm", "DBN16", "DBN-0", "IterNorm T=5 d=0", ""]
)
def test_an_unknown_label_is_an_error_that_names_it_and_the_known_ones(label):
    for make in (make_norm, place_norms):
        with pytest.raises(ValueError, match=f"no norm is called '{label}'.*names are like plain, BN"):
            make(label)


def test_the_nearest_labels_are_named():
    with pytest.raises(ValueError, match="did you mean 'IterNorm T=5' or"):
        make_norm("IterNrm T=5")
    with pytest.raises(ValueError, match="did you mean 'IterNorm-L1' or"):
        place_norms("IterNorm-L2")
    with pytest.raises(ValueError, match="did you mean 'DBN-16-L1'"):
        place_norms("DBN16-L1")


def test_a_place_needs_a_network_with_places_and_a_norm():
    with pytest.raises(ValueError, match="'DBN-16-L1': L1 is a place in a ResNet, this network has none; use 'DBN-16'"):
        make_norm("DBN-16-L1")
    with pytest.raises(ValueError, match="'plain-L1': plain is no normalization"):
        place_norms("plain-L1")
    with pytest.raises(ValueError, match="rank=3: 1"):
        make_norm("BN", rank=3)  # pyright: ignore[reportArgumentType]
