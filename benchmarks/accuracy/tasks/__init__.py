"""The tasks of the accuracy laboratory: data, model, optimizer, schedule and metric.

The data sets and the recommender's model are those of examples/, which PYTHONPATH must have.
"""

from .base import Task
from .lstm import LSTMLanguageModel, PlainLSTMLanguageModel
from .ncf import AdagradRecommender, Recommender
from .resnet import ResidualNetwork
from .transformer import TransformerLanguageModel
from .vgg import VGG

__all__ = ["TASKS", "Task"]

_KINDS = (
    TransformerLanguageModel, ResidualNetwork, VGG, LSTMLanguageModel, PlainLSTMLanguageModel,
    Recommender, AdagradRecommender,
)  # fmt: skip

TASKS = {kind.name: kind for kind in _KINDS}
