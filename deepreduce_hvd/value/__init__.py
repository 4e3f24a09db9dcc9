"""Value codecs, one file each."""

from deepreduce_hvd.value.bfloat16 import BFloat16
from deepreduce_hvd.value.fit_dexp import FitDExp
from deepreduce_hvd.value.fit_poly import FitPoly
from deepreduce_hvd.value.float16 import Float16
from deepreduce_hvd.value.qsgd import QSGD
from deepreduce_hvd.value.raw_value import RawValue

__all__ = ["BFloat16", "FitDExp", "FitPoly", "Float16", "QSGD", "RawValue"]
