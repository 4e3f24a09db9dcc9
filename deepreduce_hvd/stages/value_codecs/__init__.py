"""Value codecs, one per file."""

from deepreduce_hvd.stages.value_codecs.bfloat16 import BFloat16
from deepreduce_hvd.stages.value_codecs.deflate import Deflate
from deepreduce_hvd.stages.value_codecs.fit_dexp import FitDExp
from deepreduce_hvd.stages.value_codecs.fit_poly import FitPoly
from deepreduce_hvd.stages.value_codecs.float16 import Float16
from deepreduce_hvd.stages.value_codecs.lloyd_max import LloydMax
from deepreduce_hvd.stages.value_codecs.qsgd import QSGD
from deepreduce_hvd.stages.value_codecs.quantile import Quantile
from deepreduce_hvd.stages.value_codecs.raw_value import RawValue

__all__ = [
    "QSGD",
    "BFloat16",
    "Deflate",
    "FitDExp",
    "FitPoly",
    "Float16",
    "LloydMax",
    "Quantile",
    "RawValue",
]
