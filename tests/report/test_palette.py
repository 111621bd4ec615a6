"""One colour for a normalization, in every figure."""

from iternorm.report import palette


def test_a_norm_has_one_colour():
    assert palette.color_of("DBN") == palette.color_of("DBN-16") == palette.color_of("DBN-16-L1")
    assert palette.color_of("SyncIterNorm T=5 d=64") == palette.color_of("IterNorm-L1") == "#cc79a7"
    assert palette.color_of("MyNorm") is None
    colors = palette.colors_of(["BN", "MyNorm", "YourNorm", "DBN-16"])
    assert colors["BN"] == "#0072b2"
    assert len(set(colors.values())) == 4


def test_norms_of_one_figure_differ_in_colour_unless_they_are_named():
    names = ["DBN-16", "BN", "DBN", "DBN-32"]
    colors = palette.colors_of(names)
    assert colors["DBN-16"] == palette.color_of("DBN")
    assert len(set(colors.values())) == 4
    assert list(palette.colors_of(names, named=True).values()) == [palette.color_of(name) for name in names]
