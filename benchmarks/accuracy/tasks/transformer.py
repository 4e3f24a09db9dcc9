"""A transformer that predicts the next character, with AdamW."""

import torch

from .text import LanguageModel


class TransformerLanguageModel(LanguageModel):
    """A small transformer (pre-norm, causal attention)."""

    name = "transformer"
    batch = 48
    total_steps = 500
    width, layers, heads = 96, 2, 4
    learning_rates = (0.004, 0.008)

    def model(self):
        return _Transformer(self.symbols, self.context, self.width, self.layers, self.heads)

    def optimizer(self, model, learning_rate):
        return torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )


class _Transformer(torch.nn.Module):
    def __init__(self, symbols, context, width, layers, heads):
        super().__init__()
        self.embedding = torch.nn.Embedding(symbols, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.output = torch.nn.Linear(width, symbols)
        self.register_buffer(
            "mask", torch.nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, tokens):
        state = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            state = block(state, src_mask=self.mask, is_causal=True)
        return self.output(self.norm(state))
