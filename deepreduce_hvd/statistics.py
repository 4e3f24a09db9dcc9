"""The statistics of a compressor, for each parameter: bytes sent, error and time."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepreduce_hvd import container
from deepreduce_hvd.numpy_backend import decode_sum_numpy

#: The columns of stats(), in order, with their meaning.
FIELDS = {
    "elements": "elements of the parameter",
    "dense_bytes": (
        "bytes of the gradient uncompressed. On PyTorch it is 0 until a gradient of the parameter "
        "is exchanged, so that totals leave out parameters without gradients; on TensorFlow it is "
        "known from the start."
    ),
    "sent_bytes": (
        "bytes that this rank passed to collectives in the last step, with small control messages. "
        "With Horovod, these are 16 bytes per compressed gradient, and 24 if its parameter may be "
        "an embedding table (on PyTorch until this is known; twice as many for float64 on "
        "TensorFlow). "
        "On PyTorch, a check that all ranks are present adds 4 bytes per rank and step, counted "
        "for one parameter. With DDP and fully_shard, each collective has a control message of 16 "
        "bytes plus 8 per rank instead, counted for one parameter of each bucket. Padding of "
        "payloads to equal lengths is not counted. A job of one rank sends nothing."
    ),
    "header_bytes": (
        "of these, bytes of the payload header. The four parts of a payload are 0 for a gradient "
        "that has no payload of its own, because it was sent uncompressed or together with others."
    ),
    "index_bytes": "of these, bytes of the index section",
    "value_bytes": "of these, bytes of the value section",
    "order_bytes": "of these, bytes of the order section",
    "sent_values": "values in the payload",
    "relative_error": (
        "norm of the part that the payload does not contain / norm of gradient plus residual; "
        "None if unknown"
    ),
    "encode_seconds": "mean over all steps of this job",
    "decode_seconds": "mean over all steps of this job, all ranks' payloads",
    "steps": "steps so far; TensorFlow counts those of compressed parameters only",
    "rounds": "consecutive collectives in the last step; 0 for the framework's own allreduce",
    "communicator": (
        "the communicator that was used, with the reason if it was chosen automatically; None "
        "if nothing was exchanged"
    ),
    "path": (
        "'compressed'; 'dense', through the framework's own allreduce; 'fp16', the same as "
        "float16; 'sparse', through Horovod's own allgather; 'none' if nothing was exchanged yet, "
        "or with only one rank"
    ),
}


#: in a summary, below the table
_NOT_IN_PAYLOADS = (
    "The columns header, index, value and order are the parts of payloads. sent B also has small "
    "control messages, and gradients without a payload of their own, such as uncompressed ones."
)


def row(
    elements,
    dense_bytes,
    sent_bytes,
    steps,
    encode_seconds,
    decode_seconds,
    *,
    path,
    payload,
    kept,
    rounds=0,
    communicator=None,
    untimed_steps=0,
):
    """Return the statistics of one parameter.

    Args:
        elements: the number of elements of the parameter.
        dense_bytes: the size of the uncompressed gradient in bytes.
        sent_bytes: the bytes that this rank handed to the collectives in the last step.
        steps: the number of steps so far.
        encode_seconds, decode_seconds: the total time in all ``steps`` but the untimed ones.
        path: how the gradient is sent, as in :data:`FIELDS`.
        payload: (n,) uint8, the last payload of this rank; None if there is none.
        kept: (d,) float32, what the payloads so far have not carried; None if that is not known.
        rounds: the number of collectives one after another in the last step.
        communicator: how the gradient was exchanged.
        untimed_steps: how many of ``steps`` another job made, whose state was loaded.
    """
    timed = max(steps - untimed_steps, 1)
    figures = {
        "elements": elements, "dense_bytes": dense_bytes, "sent_bytes": sent_bytes,
        "header_bytes": 0, "index_bytes": 0, "value_bytes": 0, "order_bytes": 0, "sent_values": 0,
        "relative_error": 0.0 if path in ("dense", "sparse") else None,
        "encode_seconds": encode_seconds / timed,
        "decode_seconds": decode_seconds / timed,
        "steps": steps, "rounds": rounds, "communicator": communicator, "path": path,
    }  # fmt: skip
    if payload is None:
        return figures
    parts = container.read(payload)
    figures.update(
        header_bytes=container.HEADER.size, index_bytes=len(parts.index),
        value_bytes=len(parts.values),
        order_bytes=len(parts.order_map), sent_values=parts.count,
    )  # fmt: skip
    if kept is not None and not parts.flags & container.NON_FINITE:
        accumulated = decode_sum_numpy([payload], kept.copy(), 1.0)
        # squares of float32 numbers may be too large or too small for float32
        norm, left = (float(np.linalg.norm(one.astype(np.float64))) for one in (accumulated, kept))
        figures["relative_error"] = left / norm if norm > 0 else 0.0
    return figures


def totals(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Add up statistics over all parameters.

    Args:
        stats: the result of :meth:`Compressor.stats`.

    Returns:
        A dictionary with the sums over all parameters. Its keys are the fields "elements",
        "dense_bytes", "sent_bytes", "header_bytes", "index_bytes", "value_bytes", "order_bytes",
        "sent_values", "encode_seconds" and "decode_seconds".
    """
    additive = (
        "elements", "dense_bytes", "sent_bytes", "header_bytes", "index_bytes", "value_bytes",
        "order_bytes", "sent_values", "encode_seconds", "decode_seconds",
    )  # fmt: skip
    return {field: sum(row[field] for row in stats.values()) for field in additive}


def summary_table(stats: Mapping[str, Mapping[str, Any]]) -> str:
    """Format statistics as a table.

    Args:
        stats: the result of :meth:`Compressor.stats`.

    Returns:
        A text with a line of column heads, one line per parameter and a line of totals. Sizes are
        in bytes, "enc ms" and "dec ms" in milliseconds. "share" is the bytes sent divided by the
        bytes of the dense gradient.
    """
    heads = (
        "parameter",
        "elements",
        "dense B",
        "sent B",
        "share",
        "header",
        "index",
        "value",
        "order",
        "rel. error",
        "enc ms",
        "dec ms",
        "path",
    )

    def line(name, row, error, path):
        return (
            name, f"{row['elements']:,}", f"{row['dense_bytes']:,}", f"{row['sent_bytes']:,}",
            f"{row['sent_bytes'] / row['dense_bytes']:.4f}" if row["dense_bytes"] else "-",
            f"{row['header_bytes']:,}", f"{row['index_bytes']:,}", f"{row['value_bytes']:,}",
            f"{row['order_bytes']:,}",
            "-" if error is None else f"{error:.4f}",
            f"{1e3 * row['encode_seconds']:.3f}", f"{1e3 * row['decode_seconds']:.3f}", path,
        )  # fmt: skip

    rows = [
        heads,
        *(line(name, row, row["relative_error"], row["path"]) for name, row in stats.items()),
    ]
    rows.append(line("total", totals(stats), None, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, len(heads) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def summary_lines(stats, ranks, frozen, unregistered=None):
    """Return the lines of :meth:`Compressor.summary`: the table, and notes for the user.

    Args:
        stats: the result of :meth:`Compressor.stats`.
        ranks: the number of ranks that the compressor exchanges with, including this one.
        frozen: names of the parameters that are not trained.
        unregistered: what :meth:`BaseAdapter.unregistered` returned.
    """
    why = why_nothing(stats, ranks, unregistered)
    if why is None:
        return [summary_table(stats), _NOT_IN_PAYLOADS, *notes(stats, frozen)]
    return [why] if ranks == 1 else [summary_table(stats), why]


def why_nothing(stats, ranks, unregistered=None):
    """Return a sentence for the user if no gradient was exchanged, else None.

    The arguments are those of :func:`summary_lines`.
    """
    if any(row["path"] != "none" for row in stats.values()):
        return None
    if unregistered is not None:
        return f"Nothing was exchanged: {unregistered}."
    if ranks == 1:
        return (
            "Nothing was exchanged: there is one rank here. Start the script with "
            "`horovodrun -np 2 python ...`, or with `torchrun` and register(ddp_model)."
        )
    return (
        "Nothing has been exchanged yet. If the model was trained, its gradients did not reach the "
        "compressor: see 'Nothing is compressed' in docs/troubleshooting.md."
    )


def notes(stats, frozen=()):
    """Return notes for the user on gradients that were not compressed, as a list of sentences.

    The arguments are those of :func:`summary_lines`.
    """
    without = [name for name, row in stats.items() if row["path"] == "none"]
    unused = [name for name in without if name not in frozen]
    sparse = [name for name, row in stats.items() if row["path"] == "sparse"]
    found = []
    if len(unused) < len(without):
        names = _listed([name for name in without if name in frozen])
        found.append(f"No gradient is exchanged for frozen parameters: {names}.")
    if unused:
        found.append(
            f"No gradient has been exchanged yet for {_listed(unused)}. Is it "
            "used? Did Horovod's optimizer, or the model of register(), get the same parameters? "
            "Under Horovod, sparse gradients need sparse_as_dense=True."
        )
    if sparse:
        found.append(
            f"Sparse gradients were not compressed for {_listed(sparse)}. Give "
            "DistributedOptimizer sparse_as_dense=True to compress them."
        )
    return found


def _listed(names, most=5):
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def write_scalars(writer, stats, step):
    """Write the scalars of one step.

    Args:
        writer: TensorBoard ``SummaryWriter``.
        stats: rows of :meth:`Compressor.stats`.
        step: number of the step.
    """
    for field, value in totals(stats).items():
        writer.add_scalar(f"deepreduce/{field}", value, step)
    for name, row in stats.items():
        writer.add_scalar(f"deepreduce_sent_bytes/{name}", row["sent_bytes"], step)
    errors = {
        name: row["relative_error"]
        for name, row in stats.items()
        if row["relative_error"] is not None
    }
    for name, error in errors.items():
        writer.add_scalar(f"deepreduce_relative_error/{name}", error, step)
    if errors:
        writer.add_scalar("deepreduce/relative_error", sum(errors.values()) / len(errors), step)
