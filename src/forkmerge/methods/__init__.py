"""How the tasks of one branch are combined in a step: one class per method, one file per family."""

from forkmerge.methods._arml import ARML
from forkmerge.methods._autolambda import AutoLambda
from forkmerge.methods._auxinash import AuxiNash
from forkmerge.methods._cagrad import CAGrad
from forkmerge.methods._dwa import DWA
from forkmerge.methods._equal import EW
from forkmerge.methods._famo import FAMO
from forkmerge.methods._gcs import GCS
from forkmerge.methods._gradnorm import GradNorm
from forkmerge.methods._imtl import IMTL, IMTL_G, IMTL_L
from forkmerge.methods._mgda import MGDA
from forkmerge.methods._nash import NashMTL
from forkmerge.methods._olaux import OL_AUX
from forkmerge.methods._rlw import RLW
from forkmerge.methods._surgery import GradVac, PCGrad, TargetAwareGradVac, TargetAwarePCGrad
from forkmerge.methods._uncertainty import UW
from forkmerge.methods.base import GramianMethod, LossMethod, MatrixMethod, Method, MethodState, View, adam, spread
from forkmerge.methods.context import Array, Setup
from forkmerge.methods.data_sheet import facts_of
from forkmerge.methods.registry import METHODS, flavours_markdown, method_from, methods_markdown, methods_table

__all__ = [
    "ARML",
    "DWA",
    "EW",
    "FAMO",
    "GCS",
    "IMTL",
    "IMTL_G",
    "IMTL_L",
    "METHODS",
    "MGDA",
    "OL_AUX",
    "RLW",
    "UW",
    "Array",
    "AutoLambda",
    "AuxiNash",
    "CAGrad",
    "GradNorm",
    "GradVac",
    "GramianMethod",
    "LossMethod",
    "MatrixMethod",
    "Method",
    "MethodState",
    "NashMTL",
    "PCGrad",
    "Setup",
    "TargetAwareGradVac",
    "TargetAwarePCGrad",
    "View",
    "adam",
    "facts_of",
    "flavours_markdown",
    "method_from",
    "methods_markdown",
    "methods_table",
    "spread",
]
