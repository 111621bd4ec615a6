"""Folders of images that are kept on the device: the same pictures as one at a time, cut and coloured all at once."""

from typing import Any

import pytest
import torch

from iternorm.experiments.data import generated, image_folder, kept_images, pictures
from iternorm.experiments.data.kept_images import epoch_choices, resampling
from iternorm.experiments.data.sources import open_source
from iternorm.experiments.jobs.registry import Plan
from iternorm.experiments.paper import imagenette
from iternorm.experiments.recipe import Recipe

Image = pytest.importorskip("PIL.Image")


def recipe(batch_size=8, **values):
    options = {"image_size": 32, "kept_on_device": True, **values}
    return Recipe("pictures", "resnet-18", "BN", batch_size, 0.1, 1, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    generated.write_folder(folder / "pictures")
    return folder


@pytest.mark.parametrize("box", [(0, 0, 56, 56), (3, 10, 20, 50), (40, 0, 56, 13), (7, 7, 39, 39)])
def test_two_products_scale_a_part_as_pillow_does(box):
    # Of few contrasts, because Pillow cuts off at 0 and 255 after the first product too.
    picture = Image.effect_noise((56, 56), 20).convert("RGB")
    expected = picture.resize((32, 32), Image.Resampling.BICUBIC, box=box)
    left, top, right, bottom = (torch.tensor([float(side)], dtype=torch.float64) for side in box)
    across, down = resampling(left, right - left, 56, 32), resampling(top, bottom - top, 56, 32)
    found = down @ pictures.pixels(picture)[..., 0].float() @ across.mT
    # Pillow rounds to bytes after each of the two products.
    difference = found[0].clamp(0, 255) - pictures.pixels(expected)[..., 0].float()
    assert difference.abs().max() < 1.6
    torch.testing.assert_close(across.sum(-1), torch.ones(1, 32))


def test_choices_have_the_areas_shapes_and_colours_that_are_asked_for():
    asked = Recipe("pictures", "resnet-18", "BN", 10, 0.1, 1, seed=3)
    choices = epoch_choices(asked, 5000, epoch=2)
    assert choices.shape == (15, 5000)
    assert torch.equal(choices, epoch_choices(asked, 5000, epoch=2))
    assert not torch.equal(choices, epoch_choices(asked, 5000, epoch=3))
    index, left, top, width, height, flip = choices[:6]
    assert sorted(index.tolist()) == list(range(5000))
    for start, size in ((left, width), (top, height)):
        assert start.min() >= 0
        assert (start + size).max() <= 1 + 1e-12
    area, aspect = width * height, width / height
    assert 0.08 <= area.min() < 0.1
    assert 0.9 < area.max() <= 1
    assert 0.75 - 1e-9 <= aspect.min() < 0.78
    assert 1.3 < aspect.max() <= 4 / 3 + 1e-9
    assert 0.45 < flip.mean() < 0.55
    assert choices[6:9].sort(0).values.T.unique(dim=0).tolist() == [[0, 1, 2]]
    assert len(choices[6:9].T.unique(dim=0)) == 6
    assert 0.6 <= choices[9:12].min() < 0.61
    assert 1.39 < choices[9:12].max() <= 1.4
    assert choices[12:].std() == pytest.approx(0.1, rel=0.05)


def test_augmented_batches_against_one_picture_at_a_time(made):
    asked = recipe(augment=True, seed=3, train_examples=20)
    source = open_source(asked, "cpu", folder=made)
    _, train, _ = image_folder.find_examples(made / "pictures")
    choices = epoch_choices(asked, 20, 5)
    found = [pair for batch in source.train_batches(5) for pair in zip(*batch, strict=True)]
    assert len(found) == 16
    for (image, label), (index, left, top, width, height, flip, *colours) in zip(
        found, choices.T.tolist(), strict=True
    ):
        picture = pictures.centre(pictures.read_rgb(train.path(int(index))), 56, 56)
        box = tuple(56 * side for side in (left, top, left + width, top + height))
        crop = picture.resize((32, 32), Image.Resampling.BICUBIC, box=box)
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else crop
        values = pictures.pixels(crop).permute(2, 0, 1).double()
        kinds, alphas, light = torch.tensor([colours], dtype=torch.float64).split(3, 1)
        (map_,) = pictures.colour_maps(values.mean((1, 2))[None] / 255, kinds, alphas, light)
        map_ = pictures.normalizing(map_)
        expected = torch.einsum("ij,jhw->ihw", map_[:, :3], values) + map_[:, 3].view(3, 1, 1)
        # Two levels of a byte, Pillow's rounding, after a factor of up to 1.4 * 1.4 and a division by 0.22.
        torch.testing.assert_close(image.double(), expected, atol=2 * 1.4**2 / 255 / 0.22, rtol=0)
        assert label == train.labels[int(index)]


@pytest.mark.parametrize("channels_last", [False, True])
def test_without_augmentation_they_are_the_folders_own(made, channels_last):
    options = {"train_examples": 20, "channels_last": channels_last, "test_examples": 30}
    kept: Any = open_source(recipe(**options), "cpu", folder=made)
    read: Any = open_source(recipe(**options, kept_on_device=False), "cpu", folder=made, num_workers=0)
    assert kept.record == read.record
    assert (kept.num_classes, kept.num_train, kept.num_test) == (12, 20, 30)
    for mine, theirs in zip(
        [*kept.train_batches(1), *kept.test_batches()], [*read.train_batches(1), *read.test_batches()], strict=True
    ):
        torch.testing.assert_close(mine[0], theirs[0])
        assert mine[0].stride() == theirs[0].stride()
        assert torch.equal(mine[1], theirs[1])


def test_shares_of_processes_put_together(made):
    asked = recipe(batch_size=12, augment=True, test_examples=7)
    alone = open_source(asked, "cpu", folder=made)
    ranks = [open_source(asked, "cpu", rank=rank, world_size=3, folder=made) for rank in range(3)]
    parts = zip(*(rank.train_batches(0) for rank in ranks), strict=True)
    for (images, labels), part in zip(alone.train_batches(0), parts, strict=True):
        torch.testing.assert_close(torch.cat([piece[0] for piece in part]), images)
        assert torch.equal(torch.cat([piece[1] for piece in part]), labels)
    labels = torch.cat([labels for rank in ranks for _, labels in rank.test_batches()])
    assert torch.equal(labels, torch.arange(7))


def test_a_broken_picture_is_named(tmp_path):
    generated.write_folder(tmp_path / "pictures")
    (tmp_path / "pictures" / "val" / "class03" / "2.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"val/class03/2\.jpg is not a picture that can be read"):
        open_source(recipe(), "cpu", folder=tmp_path)


def test_data_that_always_are_on_the_device():
    with pytest.raises(ValueError, match="kept_on_device=True of a recipe: generated-mnist always is, False is needed"):
        open_source(Recipe("generated-mnist", "mlp", "BN", 2, 0.1, 1, kept_on_device=True), "cpu")


def record_of(*arguments, **options) -> Any:
    """What a source tells of its data, which not every source does."""
    source: Any = open_source(*arguments, **options)
    return source.record


def test_the_record_tells_folders_apart(made, tmp_path):
    record = record_of(recipe(), "cpu", folder=made)
    assert {name: record[name] for name in record if name != "listing_sha256"} == {
        "name": "pictures", "classes": 12, "train_images": 96, "test_images": 48,
    }  # fmt: skip
    generated.write_folder(tmp_path / "pictures")
    assert record_of(recipe(), "cpu", folder=tmp_path) == record
    path = tmp_path / "pictures" / "train" / "class00" / "0.jpg"
    path.rename(path.with_name("a.jpg"))
    assert record_of(recipe(), "cpu", folder=tmp_path)["listing_sha256"] != record["listing_sha256"]


def test_a_folder_that_is_not_imagenet_cannot_stand_in_its_rows(tmp_path, monkeypatch):
    generated.write_folder(tmp_path / "imagenet")
    asked = Recipe("imagenet", "resnet-18", "BN", 8, 0.1, 1, image_size=32)
    expected = (
        r"imagenet holds 12 classes, 96 training and 48 validation images, and ImageNet has 1,000 classes, 1,281,167 "
        r"training and 50,000 validation images: .* `iternorm run imagenette`"
    )
    with pytest.raises(ValueError, match=expected):
        open_source(asked, "cpu", folder=tmp_path)
    monkeypatch.setattr(image_folder, "IMAGENET", (12, 96, 48))
    assert record_of(asked, "cpu", folder=tmp_path)["name"] == "imagenet"


def test_imagenette_has_rows_of_its_own():
    recipes = [Recipe.from_config(config) for config in imagenette.jobs(Plan())]
    assert len(recipes) == 15
    assert {(each.data, each.kept_on_device, each.image_size) for each in recipes} == {("imagenette", True, 128)}
    rows = imagenette.compare([])
    assert {row.paper for row in rows} == {""}
    assert not any("top-5" in row.what for row in rows)


def test_the_kept_side_is_that_of_imagenettes_files():
    assert round(128 * kept_images._KEPT) == 224
