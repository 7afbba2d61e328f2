"""Task weights from a Gramian: pure functions `G [K, K] -> w [K]` for the update direction d = Σ w_i g_i.

`G_ij = ⟨g_i, g_j⟩` holds the inner products of the K task gradients on the shared parameters; it is all that these
methods need, so their cost does not depend on the size of the model. Every solver

- works on the cosines `C_ij = G_ij / (‖g_i‖ ‖g_j‖)`, so neither a common scale of the gradients nor very different
  norms of the tasks cost precision;
- leaves out tasks whose gradient is zero or not finite: they get weight 0, the others are combined as if they were
  alone, and `clean` names them;
- returns finite weights for every input; what it falls back on where its method has no solution is in its docstring.
"""

from forkmerge.methods.solvers._arml import arml_step
from forkmerge.methods.solvers._cagrad import Rescale, cagrad
from forkmerge.methods.solvers._gcs import gcs
from forkmerge.methods.solvers._gramian import Matrix, Vector, clean
from forkmerge.methods.solvers._imtl import imtl_g
from forkmerge.methods.solvers._mgda import min_norm, min_norm_frank_wolfe
from forkmerge.methods.solvers._nash import nash, nash_jacobian
from forkmerge.methods.solvers._nash_truncated import nash_truncated
from forkmerge.methods.solvers._quadratic import solve_nonnegative
from forkmerge.methods.solvers._surgery import gradvac, pcgrad

__all__ = [
    "Matrix",
    "Rescale",
    "Vector",
    "arml_step",
    "cagrad",
    "clean",
    "gcs",
    "gradvac",
    "imtl_g",
    "min_norm",
    "min_norm_frank_wolfe",
    "nash",
    "nash_jacobian",
    "nash_truncated",
    "pcgrad",
    "solve_nonnegative",
]
