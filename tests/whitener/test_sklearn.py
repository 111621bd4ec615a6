"""Whitener among scikit-learn's tools: arrays, pipelines, clones, and scikit-learn's own checks of an estimator."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from iternorm import Whitener

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn")


def digits():
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


def test_it_works_in_a_pipeline_with_arrays():
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline

    x, labels = digits()
    model = make_pipeline(Whitener("pca", n_components=30, eps=1e-3), LogisticRegression(max_iter=300))
    assert cross_val_score(model, x[:600], labels[:600], cv=3).mean() > 0.85
    model.set_params(whitener__n_components=5)
    assert model[:1].fit_transform(x).shape == (len(x), 5)


def test_pca_whitening_is_scikit_learns():
    from sklearn.decomposition import PCA

    x = digits()[0]
    theirs = PCA(20, whiten=True, svd_solver="full").fit(x)
    ours = Whitener("pca", n_components=20).fit(x)
    y = ours.transform(x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(np.abs(y), np.abs(theirs.transform(x)), atol=1e-8)
    np.testing.assert_allclose(ours.inverse_transform(y), theirs.inverse_transform(theirs.transform(x)), atol=1e-8)


def test_a_clone_has_the_parameters_and_no_fit():
    from sklearn.base import clone
    from sklearn.utils.validation import check_is_fitted

    whitener = Whitener("pca", 3, eps=0.5).fit(digits()[0])
    check_is_fitted(whitener)
    copy: Any = clone(whitener)
    assert copy.get_params() == whitener.get_params()
    assert repr(copy) == "Whitener(solver='pca', n_components=3, eps=0.5)"
    assert not copy.__sklearn_is_fitted__()


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "float64", ">f8", "int64", "longdouble"])
def test_arrays_of_any_number(dtype):
    x = digits()[0].astype(dtype)
    x.setflags(write=False)
    y = Whitener("pca", n_components=5).fit_transform(x)
    assert y.dtype == {"float16": "float16", "float32": "float32", ">f4": "float32"}.get(dtype, "float64")
    assert Whitener("pca", n_components=5).fit(x[::-1]).transform(x[:3].tolist()).shape == (3, 5)


@pytest.mark.parametrize("solver", ["zca", "pca"])
def test_scikit_learns_own_checks_pass(solver):
    from sklearn.utils.estimator_checks import check_estimator

    with warnings.catch_warnings():
        # They warn of checks that they skip.
        warnings.simplefilter("ignore")
        results = check_estimator(Whitener(solver), on_fail=None)
    assert len(results) > 30
    assert not [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"]


def test_tensors_need_neither_numpy_nor_scikit_learn():
    code = (
        "import sys\n"
        "for name in ('numpy', 'sklearn', 'safetensors'): sys.modules[name] = None\n"
        "import torch, iternorm\n"
        "x = torch.randn(20, 3)\n"
        "assert iternorm.Whitener().fit_transform(x).shape == (20, 3)\n"
        "try: iternorm.Whitener().transform(x)\n"
        "except ValueError as error: assert 'not fitted' in str(error)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_sparse_and_complex_data_are_refused():
    from scipy.sparse import csr_array

    with pytest.raises(TypeError, match=r"sparse matrix.*X\.toarray"):
        Whitener().fit(csr_array(np.eye(3)))
    with pytest.raises(ValueError, match="Complex data not supported"):
        Whitener().fit(np.eye(3, dtype=complex))
    whitener = Whitener().fit(torch.randn(20, 3).double())
    with pytest.raises(ValueError, match="contains NaN"):
        whitener.transform(np.full((2, 3), np.nan))


def test_parameters_of_a_grid_search_can_be_saved(tmp_path):
    pytest.importorskip("safetensors")
    x = digits()[0]
    whitener = Whitener("pca", n_components=np.int64(5), eps=np.float32(0.5)).fit(x)
    whitener.save(tmp_path / "whitener.safetensors")
    loaded = Whitener.load(tmp_path / "whitener.safetensors")
    assert loaded.get_params() == whitener.get_params()
    np.testing.assert_array_equal(loaded.transform(x), whitener.transform(x))
