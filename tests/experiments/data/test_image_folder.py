"""Pictures of all kinds, folders of them, and the augmentation of ImageNet."""

import random
from collections import Counter

import pytest
import torch

from iternorm.experiments.data import generated, image_folder, pictures
from iternorm.experiments.data.seeds import mixed
from iternorm.experiments.data.sources import open_source
from iternorm.experiments.recipe import Recipe

Image = pytest.importorskip("PIL.Image")

MEAN = torch.tensor(pictures.MEAN, dtype=torch.float64).view(3, 1, 1)
STD = torch.tensor(pictures.STD, dtype=torch.float64).view(3, 1, 1)


def recipe(data="pictures", batch_size=8, **values):
    return Recipe(data, "resnet-18", "BN", batch_size, 0.1, 1, **{"image_size": 32, **values})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data folder with a generated image folder as its ImageNet."""
    folder = tmp_path_factory.mktemp("data")
    generated.write_folder(folder / "pictures")
    return folder


def gradient(width=40, height=30):
    """A picture in RGB whose three planes differ."""
    picture = Image.new("RGB", (width, height))
    picture.putdata([(5 * x, 8 * y, 3 * (x + y)) for y in range(height) for x in range(width)])
    return picture


@pytest.mark.parametrize(("mode", "suffix"), [("L", "png"), ("L", "jpg"), ("1", "png"), ("LA", "png"), ("I;16", "png")])
def test_grey_pictures_have_three_equal_planes(mode, suffix, tmp_path):
    grey = gradient().convert("L")
    if mode == "I;16":
        picture = Image.new(mode, grey.size)
        picture.putdata([257 * value for value in grey.tobytes()])
    else:
        picture = grey.convert(mode)
    picture.save(tmp_path / f"a.{suffix}")
    values = pictures.pixels(pictures.read_rgb(tmp_path / f"a.{suffix}"))
    assert values.shape == (30, 40, 3)
    assert torch.equal(values[..., 0], values[..., 1])
    assert torch.equal(values[..., 0], values[..., 2])
    if mode != "1":
        expected = torch.tensor(list(grey.tobytes())).view(30, 40)
        assert (values[..., 0].int() - expected).abs().max() <= (8 if suffix == "jpg" else 0)


@pytest.mark.parametrize(
    ("mode", "suffix", "tolerance"),
    [("CMYK", "jpg", 24), ("CMYK", "tif", 2), ("YCbCr", "jpg", 24), ("RGBA", "png", 0), ("RGB", "webp", 40)],
)
def test_colours_survive_their_mode(mode, suffix, tolerance, tmp_path):
    picture = gradient()
    picture.convert(mode).save(tmp_path / f"a.{suffix}")
    read = pictures.read_rgb(tmp_path / f"a.{suffix}")
    assert read.mode == "RGB"
    difference = pictures.pixels(read).int() - pictures.pixels(picture).int()
    assert difference.abs().max() <= tolerance


def test_palettes_with_transparency(tmp_path):
    picture = gradient().quantize(16)
    # One opacity for each colour, which a plain conversion to RGB warns about.
    picture.save(tmp_path / "a.png", transparency=bytes(range(16)))
    read = pictures.read_rgb(tmp_path / "a.png")
    assert torch.equal(pictures.pixels(read), pictures.pixels(picture.convert("RGB")))


def broken(path, kind):
    gradient(200, 200).save(path)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"<html></html>", "cut": content[: len(content) // 2]}[kind])


@pytest.mark.parametrize("kind", ["empty", "text", "cut"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_broken_picture_is_named(kind, suffix, tmp_path):
    broken(tmp_path / f"a.{suffix}", kind)
    with pytest.raises(
        ValueError, match=rf"a\.{suffix} is not a picture that can be read: .*; replace it or remove it"
    ):
        pictures.read_rgb(tmp_path / f"a.{suffix}")
    with pytest.raises(FileNotFoundError, match=r"b\.png"):
        pictures.read_rgb(tmp_path / "b.png")


def test_the_centre_is_cut_from_the_scaled_picture():
    for size in ((100, 60), (60, 100), (60, 60)):
        picture = pictures.centre(gradient(*size), 32, 28)
        assert picture.size == (28, 28)
    # A picture that is not scaled.
    expected = pictures.pixels(gradient(41, 32))[2:30, 6:34]
    assert torch.equal(pictures.pixels(pictures.centre(gradient(41, 32), 32, 28)), expected)


@pytest.mark.parametrize("size", [(500, 375), (64, 64), (300, 40), (1, 1), (2, 50)])
def test_random_boxes_lie_inside_and_have_the_areas_and_shapes_that_are_asked_for(size: tuple[int, int]):
    choices = random.Random(0)
    boxes = [pictures.random_box(*size, choices) for _ in range(500)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
    if size == (500, 375):
        areas = torch.tensor([(r - x) * (b - y) / (500 * 375) for x, y, r, b in boxes])
        aspects = torch.tensor([(r - x) / (b - y) for x, y, r, b in boxes])
        assert 0.075 < areas.min() < 0.1
        assert 0.9 < areas.max() <= 1
        assert 0.74 < aspects.min() < 0.8
        assert 1.25 < aspects.max() < 1.35
        assert len(Counter(boxes)) > 450
    if size == (300, 40):
        # Too long for most: the square in the middle.
        assert (130, 0, 170, 40) in boxes


def slowly_coloured(image, choices):
    """The Lua code's steps one after the other, on a picture ``[3, H, W]`` in [0, 1]."""

    def grey(x):
        return 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]

    for kind in choices.sample(("brightness", "contrast", "saturation"), 3):
        alpha = 1 + choices.uniform(-0.4, 0.4)
        if kind == "brightness":
            image = alpha * image
        elif kind == "contrast":
            image = alpha * image + (1 - alpha) * grey(image).mean()
        else:
            image = alpha * image + (1 - alpha) * grey(image)
    deviations = [0.2175, 0.0188, 0.0045]
    axes = torch.tensor([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    for axis, deviation in enumerate(deviations):
        image = image + choices.gauss(0, 0.1) * deviation * axes[:, axis].double().view(3, 1, 1)
    return image


def test_one_map_of_colours_is_all_the_steps():
    orders = set()
    for seed in range(20):
        image = torch.rand(3, 6, 5, dtype=torch.float64)
        expected = slowly_coloured(image, random.Random(seed))
        colours = pictures.random_colours(image.mean((1, 2)), random.Random(seed))
        found = torch.einsum("ij,jhw->ihw", colours[:, :3], image) + colours[:, 3].view(3, 1, 1)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
        orders.add(tuple(random.Random(seed).sample(range(3), 3)))
    assert len(orders) > 3


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_against_one_picture_at_a_time(made, augment, channels_last):
    asked = recipe(augment=augment, seed=3, train_examples=20, channels_last=channels_last)
    source = open_source(asked, "cpu", folder=made, num_workers=0)
    _, train, _ = image_folder.find_examples(made / "pictures")
    generator = torch.Generator().manual_seed(mixed(3, 5))
    order = torch.randperm(20, generator=generator)[:16]
    batches = list(source.train_batches(5))
    assert [len(labels) for _, labels in batches] == [8, 8]
    for (image, label), index in zip(
        ((x, y) for images, labels in batches for x, y in zip(images, labels, strict=True)), order.tolist(), strict=True
    ):
        choices = random.Random(mixed(3, 5, index))
        picture = pictures.read_rgb(train.path(index))
        picture = pictures.random_crop(picture, 32, choices) if augment else pictures.centre(picture, 37, 32)
        expected = pictures.pixels(picture).permute(2, 0, 1).double() / 255
        if augment:
            expected = slowly_coloured(expected, choices)
        torch.testing.assert_close(image.double(), (expected - MEAN) / STD, atol=1e-5, rtol=0)
        assert label == train.labels[index]
        assert train.path(index).parent.name == f"class{int(label):02}"
    format = torch.channels_last if channels_last else torch.contiguous_format
    assert batches[0][0].is_contiguous(memory_format=format)


def test_crops_are_mirrored_half_of_the_time():
    # Dark on the left in the picture itself, whatever part of it is taken.
    picture = Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).convert("RGB")
    choices = random.Random(0)
    crops = [pictures.pixels(pictures.random_crop(picture, 16, choices))[..., 0].double() for _ in range(200)]
    mirrored = sum(bool(crop[:, 0].mean() > crop[:, -1].mean()) for crop in crops)
    assert 60 < mirrored < 140


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_workers_does_not_matter(made, num_workers):
    alone, several = (
        open_source(recipe(augment=True), "cpu", folder=made, num_workers=count) for count in (0, num_workers)
    )
    state = torch.get_rng_state()
    for mine, theirs in zip(
        [*alone.train_batches(1), *alone.test_batches()],
        [*several.train_batches(1), *several.test_batches()],
        strict=True,
    ):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not ours"
    assert not torch.equal(next(several.train_batches(1))[0], next(several.train_batches(2))[0])


def test_shares_of_processes_put_together(made):
    asked = recipe(batch_size=12, augment=True, test_examples=7)
    alone = open_source(asked, "cpu", folder=made, num_workers=0)
    ranks = [open_source(asked, "cpu", rank=rank, world_size=3, folder=made, num_workers=0) for rank in range(3)]
    parts = zip(*(rank.train_batches(0) for rank in ranks), strict=True)
    for (images, labels), part in zip(alone.train_batches(0), parts, strict=True):
        assert torch.equal(torch.cat([piece[0] for piece in part]), images)
        assert torch.equal(torch.cat([piece[1] for piece in part]), labels)
    labels = torch.cat([labels for rank in ranks for _, labels in rank.test_batches()])
    assert torch.equal(labels, torch.arange(7))


def test_the_generated_folder_is_like_the_real_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = open_source(recipe("generated-imagenet", image_size=None), "cpu", num_workers=0)
    assert source.in_shape == (3, 224, 224)
    assert (source.num_classes, source.num_train, source.num_test, source.iterations_per_epoch) == (12, 96, 48, 12)
    images, labels = next(source.train_batches(0))
    assert images.shape == (8, 3, 224, 224)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    (folder,) = tmp_path.iterdir()
    modes = Counter()
    for path in (folder / "train").rglob("*.jpg"):
        with Image.open(path) as opened:
            modes[opened.mode] += 1
    assert modes == {"L": 12, "CMYK": 12, "RGB": 72}
    del source
    assert not folder.exists()


def test_the_first_examples_have_all_classes(made):
    classes, train, val = image_folder.find_examples(made / "pictures")
    assert len(classes) == 12
    assert train.labels[:12].tolist() == list(range(12))
    assert val.labels.tolist() == list(range(12)) * 4
    assert all(train.path(index).is_file() for index in range(len(train)))
    assert len({train.path(index) for index in range(len(train))}) == 96


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_picture_in_a_folder_is_named(tmp_path, num_workers):
    generated.write_folder(tmp_path / "pictures")
    broken(tmp_path / "pictures" / "val" / "class03" / "2.jpg", "cut")
    source = open_source(recipe(), "cpu", folder=tmp_path, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"val/class03/2\.jpg is not a picture that can be read") as raised:
        list(source.test_batches())
    assert "Traceback" not in str(raised.value)
    # One that vanishes after the folder was looked through.
    (tmp_path / "pictures" / "train" / "class01" / "0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"class01/0\.jpg"):
        list(source.train_batches(0))


def folder_of(root, layout):
    for name, files in layout.items():
        (root / name).mkdir(parents=True)
        for file in files:
            gradient().save(root / name / file)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"train/a": ["0.jpg"]}, r"pictures has no folder val/, but train: train/CLASS"),
        ({"val/a": ["0.jpg"]}, r"pictures has no folder train/, but val"),
        ({"dogs": ["0.jpg"], "cats": []}, r"pictures has no folder train/, but cats, dogs"),
        ({"train/a": ["0.jpg"], "val": ["0.jpg", "1.jpg"]}, r"val has no class folders, but 2 images: sort the images"),
        ({"train/a": ["0.jpg"], "val": []}, r"val has no class folders, but no images: sort the images"),
        (
            {"train/a": ["0.jpg"], "train/b": ["0.jpg"], "val/b": ["0.jpg"], "val/c": ["0.jpg"]},
            r"classes of .*pictures differ: a only in train/; c only in val/",
        ),
        (
            {**{f"train/{name}": ["0.jpg"] for name in "abcde"}, "val/a": ["0.jpg"]},
            r"differ: b, c, d, ... only in train/\. Both",
        ),
        (
            {"train/a": ["0.jpg"], "train/b": [], "val/a": ["0.jpg"], "val/b": []},
            r"train/b holds no images \(.*\): put some there, or remove b/ from both",
        ),
    ],
)
def test_folders_that_are_not_imagenets(tmp_path, layout, expected):
    folder_of(tmp_path / "pictures", layout)
    with pytest.raises(ValueError, match=expected):
        open_source(recipe(), "cpu", folder=tmp_path)


def test_a_missing_folder(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match="imagenet is missing, and folders of images cannot be downloaded: put the images"
    ):
        open_source(recipe("imagenet"), "cpu", folder=tmp_path)
    with pytest.raises(ValueError, match=r"data='pictures' of a recipe: known are .*, and folders of images"):
        open_source(recipe(), "cpu", folder=tmp_path)
    monkeypatch.setenv("ITERNORM_DATA", str(tmp_path / "typo"))
    with pytest.raises(ValueError, match=r"\(--data or ITERNORM_DATA\) is .*typo, which does not exist"):
        open_source(recipe("imagenet"), "cpu")
    (tmp_path / "typo" / "holidays").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"holds other things \(holidays\)"):
        open_source(recipe("imagenet"), "cpu")


def test_odd_names_and_other_files(tmp_path):
    layout = {f"{split}/{name}": ["ü ñ.JPEG"] for split in ("train", "val") for name in ("chien d'été", "猫")}
    folder_of(tmp_path / "pictures", layout)
    (tmp_path / "pictures" / "train" / "猫" / "notes.txt").write_text("not a picture")
    (tmp_path / "pictures" / "train" / "猫" / "._a.jpg").write_text("not a picture either")
    (tmp_path / "pictures" / "train" / ".cache").mkdir()
    source = open_source(recipe(batch_size=2), "cpu", folder=tmp_path, num_workers=0)
    assert (source.num_classes, source.num_train) == (2, 2)
    assert len(list(source.train_batches(0))) == 1


def test_a_folder_with_an_images_name_is_no_image_and_a_link_to_nothing_is_named(tmp_path):
    folder_of(tmp_path / "pictures", {"train/a": ["0.jpg"], "val/a": ["0.jpg"]})
    (tmp_path / "pictures" / "val" / "a" / "dir.jpg").mkdir()
    assert open_source(recipe(batch_size=1), "cpu", folder=tmp_path, num_workers=0).num_test == 1
    link = tmp_path / "pictures" / "val" / "a" / "1.jpg"
    link.symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(ValueError, match=r"val/a/1.jpg leads to no file: repair the link or remove it"):
        open_source(recipe(batch_size=1), "cpu", folder=tmp_path)


def test_too_many_are_asked_for(made):
    with pytest.raises(ValueError, match="train_examples=97 of a recipe: pictures has 96"):
        open_source(recipe(train_examples=97), "cpu", folder=made)
    with pytest.raises(ValueError, match="batch_size=97 of a recipe: there are 96"):
        open_source(recipe(batch_size=97), "cpu", folder=made)
    with pytest.raises(ValueError, match="cannot be shared by 3"):
        open_source(recipe(), "cpu", folder=made, world_size=3)


def test_workers_are_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr(image_folder.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert image_folder.available_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert image_folder.available_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert image_folder.available_cores() == 1
