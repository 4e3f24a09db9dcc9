"""What a compressor reports: bytes handed to the collective, error and time, for each parameter."""

#: the columns of stats(), in order, with what they mean
FIELDS = {
    "elements": "elements of the parameter",
    "dense_bytes": "bytes of the gradient uncompressed",
    "sent_bytes": "bytes that this rank handed to the collectives in the last step, the three-number probe included",
    "header_bytes": "of these, payload header",
    "index_bytes": "of these, index section",
    "value_bytes": "of these, value section",
    "order_bytes": "of these, order section",
    "sent_values": "values in the payload",
    "relative_error": "norm of what the payload does not carry / norm of gradient plus residual; None where it is not known",
    "encode_seconds": "mean over all steps",
    "decode_seconds": "mean over all steps, all ranks' payloads",
    "steps": "steps so far",
    "path": "'compressed', or 'dense' through Horovod's own allreduce",
}


def totals(stats):
    """Sums of the additive fields over all parameters."""
    additive = ("elements", "dense_bytes", "sent_bytes", "header_bytes", "index_bytes", "value_bytes", "order_bytes",
                "sent_values", "encode_seconds", "decode_seconds")  # fmt: skip
    return {field: sum(row[field] for row in stats.values()) for field in additive}


def summary_table(stats):
    """:meth:`Compressor.stats` as text: a line a parameter, a line of totals."""
    heads = ("parameter", "elements", "dense B", "sent B", "share", "header", "index", "value", "order", "rel. error", "enc ms", "dec ms", "path")

    def line(name, row, error, path):
        return (
            name, f"{row['elements']:,}", f"{row['dense_bytes']:,}", f"{row['sent_bytes']:,}",
            f"{row['sent_bytes'] / row['dense_bytes']:.4f}" if row["dense_bytes"] else "-",
            f"{row['header_bytes']:,}", f"{row['index_bytes']:,}", f"{row['value_bytes']:,}", f"{row['order_bytes']:,}",
            "-" if error is None else f"{error:.4f}",
            f"{1e3 * row['encode_seconds']:.3f}", f"{1e3 * row['decode_seconds']:.3f}", path,
        )  # fmt: skip

    rows = [heads, *(line(name, row, row["relative_error"], row["path"]) for name, row in stats.items())]
    rows.append(line("total", totals(stats), None, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column in (0, len(heads) - 1) else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )
