"""An LSTM that predicts the next character, with SGD and gradient clipping."""

import torch

from .text import LanguageModel


class LSTMLanguageModel(LanguageModel):
    """An LSTM whose state is zero at the start of each sample, trained with momentum 0.9."""

    name = "lstm"
    batch = 48
    total_steps = 1500
    width, layers = 160, 1
    learning_rates = (2.0, 4.0, 8.0)
    clip = 0.25
    momentum = 0.9

    def model(self):
        return _LSTM(self.symbols, self.width, self.layers)

    def optimizer(self, model, learning_rate):
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=self.momentum)


class PlainLSTMLanguageModel(LSTMLanguageModel):
    """The same without momentum.

    The public code of gTop-k (hclhkbu/gtopkssgd, dl_trainer.py) also trains its LSTM without
    momentum, on the Penn Treebank.
    """

    name = "plain-lstm"
    learning_rates = (10.0, 20.0, 40.0)
    momentum = 0.0


class _LSTM(torch.nn.Module):
    def __init__(self, symbols, width, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(symbols, width)
        self.lstm = torch.nn.LSTM(width, width, layers, batch_first=True)
        self.output = torch.nn.Linear(width, symbols)

    def forward(self, tokens):
        return self.output(self.lstm(self.embedding(tokens))[0])
