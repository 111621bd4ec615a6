import pytest
import torch

from iternorm.whitening import groups


@pytest.mark.parametrize(
    ("num_features", "group_size", "sizes"),
    [
        (160, 64, [64, 64, 32]),
        (8, 4, [4, 4]),
        (8, 3, [3, 3, 2]),
        (5, None, [5]),
        (5, 64, [5]),
        (3, 1, [1, 1, 1]),
        (1, 1, [1]),
        (7, 6, [6, 1]),
    ],
)
def test_channels_are_taken_in_order_and_the_last_group_holds_the_remainder(num_features, group_size, sizes):
    parts = groups.parts(num_features, group_size)
    assert [part.size for part in parts for _ in range(part.count)] == sizes
    assert [part.first for part in parts] == [0, len(sizes) - 1][: len(parts)]
    assert [c for part in parts for c in range(num_features)[part.channels]] == list(range(num_features))
    assert groups.num_groups(num_features, group_size) == len(sizes)
    assert groups.effective_size(num_features, group_size) == sizes[0]


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, None])
def test_padding_and_unpadding_are_inverse(group_size):
    vector = torch.arange(1.0, 8.0)
    padded = groups.pad_vector(vector, group_size)
    assert padded.shape == (groups.num_groups(7, group_size), groups.effective_size(7, group_size))
    torch.testing.assert_close(groups.unpad_vector(padded, 7), vector)
    assert padded.sum() == vector.sum()


def test_matrices_of_parts_are_views_of_the_padded_whole_and_padding_is_zero():
    parts = groups.parts(10, 4)
    matrices = [torch.randn(part.count, part.size, part.size) for part in parts]
    padded = groups.pad(matrices)
    assert padded.shape == (3, 4, 4)
    for part, matrix in zip(parts, matrices, strict=True):
        torch.testing.assert_close(part.of(padded), matrix)
        assert part.of(padded).data_ptr() >= padded.data_ptr()
        part.of(padded).zero_()
    assert not padded.any()
