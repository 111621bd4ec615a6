"""Small runs of the training loop, and what is compared of them."""

from iternorm.experiments.jobs.registry import Context
from iternorm.experiments.recipe import Recipe

MLP = Recipe("generated-mnist", "mlp", "BN", 32, 0.1, 3, momentum=0.9, train_examples=200, test_examples=70, width=0.2)
WRN = Recipe(
    "generated-cifar10", "wrn-10-1", "BN", 16, 0.1, 2, momentum=0.9, nesterov=True, weight_decay=5e-4, dropout=0.3,
    augment=True, train_examples=64, test_examples=16, width=0.25, record_every=2,
)  # fmt: skip


def silent(done, total, **values):
    pass


def context(folder, step=silent, **options):
    return Context("cpu", step, folder, **options)


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights(folder):
    (path,) = folder.glob("checkpoint-*")
    return (path / "weights.safetensors").read_bytes(), (path / "momentum.safetensors").read_bytes()
