"""Write missing golden files. Existing ones are never rewritten, because they define the format."""

import pathlib
import textwrap

from codecs_table import INDEX, VALUE, gradient

import deepreduce_hvd as dr
from deepreduce_hvd.numpy_backend import encode_numpy

directory = pathlib.Path(__file__).resolve().parents[1] / "conformance" / "golden" / "v1"
for name in [*INDEX, *VALUE]:
    path = directory / f"{name}.hex"
    if path.exists():
        continue
    codec = dr.Codec(dr.TopK(0.1), index=INDEX.get(name), value=VALUE.get(name))
    data, _ = encode_numpy(codec, dr.NoMemory(), gradient(300), (), 0.0, 1, 2, 3, 4)
    path.write_text("\n".join(textwrap.wrap(data.tobytes().hex(), 64)) + "\n")
    print(f"wrote {path}")
