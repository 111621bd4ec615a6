"""Public functions: check the arguments and hand them over, nothing else.

What `impl` means is in `iternorm.whitening.dispatch`.
"""

from iternorm.functional.batch import decorrelated_batch_norm, iter_norm
from iternorm.functional.samples import group_whitening, instance_whitening

__all__ = ["decorrelated_batch_norm", "group_whitening", "instance_whitening", "iter_norm"]
