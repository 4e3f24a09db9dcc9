"""Value codecs, one file each."""

from deepreduce_hvd.value.bfloat16 import BFloat16
from deepreduce_hvd.value.deflate import Deflate
from deepreduce_hvd.value.fit_dexp import FitDExp
from deepreduce_hvd.value.fit_poly import FitPoly
from deepreduce_hvd.value.float16 import Float16
from deepreduce_hvd.value.qsgd import QSGD
from deepreduce_hvd.value.quantile import Quantile
from deepreduce_hvd.value.raw_value import RawValue

__all__ = ["QSGD", "BFloat16", "Deflate", "FitDExp", "FitPoly", "Float16", "Quantile", "RawValue"]
