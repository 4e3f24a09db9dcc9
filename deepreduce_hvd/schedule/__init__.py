"""Predict the seconds of a step, and choose which gradients share a message and how it is sent.

Everything here is arithmetic on measured numbers. It needs NumPy and no framework.
docs/schedule.md explains the model.
"""

from deepreduce_hvd.schedule.costs import Traffic, hierarchical, speedup_bound, traffic
from deepreduce_hvd.schedule.dag import Event, Message, Timeline, timeline
from deepreduce_hvd.schedule.density import hidden_density, lags
from deepreduce_hvd.schedule.links import Link, Network
from deepreduce_hvd.schedule.merge import (
    finish_seconds,
    finish_with_selection,
    optimal_merge,
    optimal_merge_with_selection,
    selection_cost,
)
from deepreduce_hvd.schedule.optimum import optimal_plan
from deepreduce_hvd.schedule.parameter import Parameter
from deepreduce_hvd.schedule.plan import Plan
from deepreduce_hvd.schedule.profile import Profile, layer_times
from deepreduce_hvd.schedule.published_rules import mg_wfbp, omgs, single_message, wfbp
from deepreduce_hvd.schedule.tables import Fit, Table

__all__ = [
    "Event",
    "Fit",
    "Link",
    "Message",
    "Network",
    "Parameter",
    "Plan",
    "Profile",
    "Table",
    "Timeline",
    "Traffic",
    "finish_seconds",
    "finish_with_selection",
    "hidden_density",
    "hierarchical",
    "lags",
    "layer_times",
    "mg_wfbp",
    "omgs",
    "optimal_merge",
    "optimal_merge_with_selection",
    "optimal_plan",
    "selection_cost",
    "single_message",
    "speedup_bound",
    "timeline",
    "traffic",
    "wfbp",
]
