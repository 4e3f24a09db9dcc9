"""The native core's binding for NumPy (csrc/api/python.cc).

The package's own modules wrap its functions.
"""

from typing import Any

def __getattr__(name: str) -> Any: ...
