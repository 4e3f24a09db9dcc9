"""The native core's binding for NumPy (csrc/api/python.cc), whose functions the package's own modules wrap."""

from typing import Any

def __getattr__(name: str) -> Any: ...
