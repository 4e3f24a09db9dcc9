"""The tasks of the accuracy laboratory: data, model, optimizer, schedule and metric."""

import pathlib
import sys

# for the data sets and the recommender's model
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples"))

from .base import Task
from .lstm import LSTMLanguageModel
from .ncf import Recommender
from .resnet import ResidualNetwork
from .transformer import TransformerLanguageModel
from .vgg import VGG

__all__ = ["TASKS", "Task"]

TASKS = {
    kind.name: kind
    for kind in (TransformerLanguageModel, ResidualNetwork, VGG, LSTMLanguageModel, Recommender)
}
