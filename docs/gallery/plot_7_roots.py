"""
Roots of matrices: Newton against minimax
=========================================

``iternorm.linalg`` computes inverse roots by matrix products. Newton takes the same step again and again; the minimax
steps are each the best for the eigenvalues that may still be there. A step works on each eigenvalue by itself, so a
line of numbers shows all of it.
"""

import matplotlib.pyplot as plt
import torch

from iternorm import linalg

# Eigenvalues from 1e-6 to 1, as a matrix of condition number one million has them.
eigenvalues = torch.logspace(-6, 0, 400, dtype=torch.float64)
p = 2
schedules = {
    "Newton": [(1 + 1 / p, -1 / p)] * 22,
    "minimax": linalg.minimax_coefficients(p, 1e-6, 1e-12),
}

figure, axes = plt.subplots(figsize=(7, 3.8))
for (name, steps), color in zip(schedules.items(), ("#0072b2", "#009e73"), strict=True):
    values, errors = eigenvalues.clone(), [(1 - eigenvalues).abs().max()]
    for a, b in steps:
        values = values * (a + b * values) ** p
        errors.append((1 - values).abs().max())
    axes.plot([max(float(error), 1e-15) for error in errors], "o-", color=color, label=name, markersize=4)
axes.set(yscale="log", xlabel="steps", ylabel="distance from 1, at worst", title="all eigenvalues from 1e-6 to 1")
axes.grid(True)
axes.legend()
plt.show()

# %%
# The same on matrices, in double precision.

basis = torch.linalg.qr(torch.randn(8, 64, 64, dtype=torch.float64))[0]
matrices = basis @ torch.diag_embed(torch.logspace(-6, 0, 64, dtype=torch.float64).expand(8, 64)) @ basis.mT
for method in ("newton", "minimax", "eigh"):
    root = linalg.inverse_root(matrices, p, method=method)
    error = (root @ matrices @ root - torch.eye(64)).abs().max()
    print(f"{method:8} |X A X - I| at most {error:.1e}")
