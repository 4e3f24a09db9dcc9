"""When which gradient travels how: a model of the time of a step, and the plan that it makes best.

Everything here is arithmetic on measured numbers. It needs NumPy and no framework.
docs/schedule.md explains the model.
"""

from deepreduce_hvd.schedule.costs import (
    Fit,
    Link,
    Network,
    Table,
    Traffic,
    hierarchical,
    speedup_bound,
    traffic,
)
from deepreduce_hvd.schedule.merge import (
    finish_seconds,
    finish_with_selection,
    mg_wfbp,
    omgs,
    optimal_merge,
    optimal_merge_with_selection,
    selection_cost,
    single_message,
    wfbp,
)
from deepreduce_hvd.schedule.profile import Parameter, Profile, layer_times

__all__ = [
    "Fit",
    "Link",
    "Network",
    "Parameter",
    "Profile",
    "Table",
    "Traffic",
    "finish_seconds",
    "finish_with_selection",
    "hierarchical",
    "layer_times",
    "mg_wfbp",
    "omgs",
    "optimal_merge",
    "optimal_merge_with_selection",
    "selection_cost",
    "single_message",
    "speedup_bound",
    "traffic",
    "wfbp",
]
