"""One training run of one task, with ranks simulated in one process."""

import types

import numpy as np
import torch
from virtual_ranks import EstimatingRanks, VirtualRanks

import deepreduce_hvd as dr
from deepreduce_hvd.planning.policies import Policy
from deepreduce_hvd.schedule.dag import CODEC, DENSE
from deepreduce_hvd.torch import prepare


def train(task, candidate, size, seed, learning_rate, on_progress=None, make_ranks=VirtualRanks):
    """Train a new model.

    Args:
        task: one of :mod:`tasks`.
        candidate: one of :mod:`candidates`.
        size: number of ranks.
        seed: seed of the weights, the data order and the random choices of codecs.
        learning_rate: maximum of the schedule.
        on_progress: function of (steps done, total steps, loss).
        make_ranks: :class:`~virtual_ranks.VirtualRanks` or a function that returns such ranks; not
            used for a candidate with ``estimates``.

    Returns:
        {"metric": value on the test data, "bytes": bytes per rank and step, "loss": last losses}.
        A run whose loss is not finite ends early with a metric of None.
    """
    torch.manual_seed(seed)
    model = task.model()
    named = dict(model.named_parameters())
    shapes = {name: parameter.numel() for name, parameter in named.items()}
    codec = candidate.codec(task) if callable(candidate.codec) else candidate.codec
    memory = candidate.memory(task) if callable(candidate.memory) else candidate.memory
    stages = codec, memory, candidate.communicator
    settings = {"dense_below": candidate.dense_below, "seed": seed}
    if candidate.finds_tables:
        settings["columns"] = {
            name: one.shape[1] for name, one in named.items() if one.dim() == 2 and name in codec
        }
    if candidate.estimates is None:
        ranks = make_ranks(size, shapes, *stages, **settings)
    else:
        ranks = EstimatingRanks(size, shapes, *stages, **settings, momentum=candidate.estimates)
    optimizer = task.optimizer(model, learning_rate)
    slots = {
        name: types.SimpleNamespace(
            name=name,
            parameter=parameter,
            steps=1,
            untimed_steps=0,
            uncompressed_path=None,
            is_table=None,
            successor=None,
        )
        for name, parameter in named.items()
    }
    if candidate.prepared:
        _prepare(optimizer, ranks, slots)
    total = task.total_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.rate(step, total))
    losses = []
    for step, batches in enumerate(task.batches(size, seed)):
        gradients = []
        mean_loss = 0.0
        for batch in batches:
            model.zero_grad(set_to_none=True)
            loss = task.loss(model, batch)
            loss.backward()
            mean_loss += float(loss.detach()) / size
            if task.clip is not None and candidate.clips_before:
                _clip(model, task.clip * candidate.clip_factor * size**0.5)
            gradients.append(
                {name: p.grad.detach().reshape(-1).numpy().copy() for name, p in named.items()}
            )
        losses.append(mean_loss)
        if not np.isfinite(mean_loss):
            return {"metric": None, "bytes": ranks.sent_bytes / max(ranks.steps, 1), "steps": step}
        for name, summed in ranks.mean(gradients).items():
            named[name].grad.copy_(torch.from_numpy(summed).view_as(named[name]))
        for name, slot in slots.items():
            slot.is_table = None if name in ranks.undecided else name in ranks.tables
        if task.clip is not None and not candidate.clips_before:
            _clip(model, task.clip * candidate.clip_factor)
        optimizer.step()
        schedule.step()
        if on_progress is not None:
            on_progress(step + 1, total, mean_loss)
    return {
        "metric": task.evaluate(model),
        "bytes": ranks.sent_bytes / ranks.steps,
        "steps": total,
        "loss": float(np.mean(losses[-50:])),
    }


def _clip(model, norm):
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def _prepare(optimizer, ranks, slots):
    """Prepare the optimizer as :func:`deepreduce_hvd.prepare` does for a real compressor."""
    # without compression, the settings are those for the default codec
    codecs = ranks.codecs or dict.fromkeys(ranks.large, dr.recommended_codec())
    policies = {
        name: Policy(CODEC, codecs[name], ranks.memories.get(name, dr.Residual()))
        if name in codecs
        else Policy(DENSE)
        for name in slots
    }
    compressor = types.SimpleNamespace(
        policies=policies,
        first_policies=policies,
        table_candidates=frozenset(ranks.undecided),
        adapter=types.SimpleNamespace(
            slots=slots,
            transport=None,
            sends_nothing=lambda slot: False,
            why_unused=lambda slots: None,
        ),
    )
    return prepare.prepare(optimizer, compressor)
