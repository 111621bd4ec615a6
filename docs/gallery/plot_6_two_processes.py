"""
Two processes, one batch
========================

With several processes each has a share of the batch. ``SyncIterNorm`` whitens with the mean and covariance of all
shares together, so two halves give what the whole batch gives. Without it each half is whitened by itself.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import iternorm
from iternorm.report.palette import color_of

# %%
# What each process runs. It is a file of its own, because ``torchrun`` starts it twice.

WORKER = """
import sys

import torch
import torch.distributed as dist

import iternorm

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
share = torch.load(f"{folder}/batch.pt").chunk(2)[rank]
layer = iternorm.IterNorm1d(16)
outputs = {
    "local": layer(share),
    "synchronized": iternorm.convert_sync_iternorm(layer)(share),
}
torch.save({name: output.detach() for name, output in outputs.items()}, f"{folder}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""

batch = torch.randn(96, 16) @ torch.randn(16, 16)
with tempfile.TemporaryDirectory() as folder:
    torch.save(batch, f"{folder}/batch.pt")
    Path(folder, "worker.py").write_text(WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The files say whether the work is done: gloo may abort a process that is already on its way out
    # (pytorch/pytorch#179291), and torchrun then ends with an error.
    subprocess.run([*torchrun, f"{folder}/worker.py", folder], check=False)
    shares = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]

# %%
# One process with the whole batch is what they should agree with.

with torch.no_grad():
    whole = iternorm.IterNorm1d(16)(batch)
figure, panels = plt.subplots(1, 2, figsize=(8, 4), sharey=True)
for axes, name in zip(panels, ("local", "synchronized"), strict=True):
    output = torch.cat([share[name] for share in shares])
    difference = (output - whole).abs().max()
    print(f"{name}: largest difference to the whole batch {difference:.1e}")
    axes.plot([-3, 3], [-3, 3], color="#7d8590", linewidth=1)
    axes.plot(whole.flatten(), output.flatten(), ".", color=color_of("IterNorm T=5"), markersize=4, alpha=0.7)
    axes.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal", xlabel="one process, whole batch", title=name)
    axes.grid(True)
panels[0].set_ylabel("two processes, half a batch each")
plt.show()
