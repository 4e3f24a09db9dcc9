"""Train a recommender on MovieLens-100k, whose gradients are sparse, with ``horovodrun -np 2``.

The model is like NCF. A batch uses some rows of the embedding tables; the gradients of all other
rows are zero. ``make recommender`` runs this script. It prints a table and writes
build/results/recommender.json.
"""

import json
import math
import os
import sys
import time

from ranks import command_line, launch

BATCH, NEGATIVES, DIMENSION = 256, 4, 32


def split(users, items, timestamps):
    """Split the ratings: the latest item of each user is for the test.

    Returns:
        Train pairs, test pairs, number of items. Users and items are numbered from 0.
    """
    import numpy as np

    pairs = np.stack([users - 1, items - 1], axis=1)
    order = np.lexsort((items, timestamps, users))
    last = np.append(np.diff(users[order]) != 0, True)
    return pairs[order[~last]], pairs[order[last]], int(items.max())


def make_model(user_count, item_count):
    """Return a neural collaborative filtering model (He et al., 2017).

    It has a product of embeddings, and beside it a small network on other embeddings.
    """
    import torch

    class NCF(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)

            def table(rows):
                embedding = torch.nn.Embedding(rows, DIMENSION, sparse=True)
                torch.nn.init.normal_(embedding.weight, std=0.05)
                return embedding

            self.user_product, self.item_product = table(user_count), table(item_count)
            self.user_network, self.item_network = table(user_count), table(item_count)
            self.network = torch.nn.Sequential(
                torch.nn.Linear(2 * DIMENSION, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16),
                torch.nn.ReLU(),
            )  # fmt: skip
            self.output = torch.nn.Linear(DIMENSION + 16, 1)

        def forward(self, users, items):
            product = self.user_product(users) * self.item_product(items)
            network = self.network(
                torch.cat([self.user_network(users), self.item_network(items)], dim=1)
            )
            return self.output(torch.cat([product, network], dim=1)).squeeze(1)

    return NCF()


def hit_rate(model, test, seen, item_count):
    """Return the hit rate at 10.

    This is the fraction of users whose test item is among the 10 best of that item and 99 items
    that the user did not rate.
    """
    import numpy as np
    import torch

    random = np.random.default_rng(1)
    hits = 0
    with torch.no_grad():
        for user, item in test:
            others = random.permutation(item_count)
            others = others[~np.isin(others, seen[user])][:99]
            candidates = torch.from_numpy(np.append(others[others != item], item))
            scores = model(torch.full((candidates.numel(),), int(user)), candidates)
            hits += int((scores >= scores[-1]).sum() <= 10)
    return hits / len(test)


def worker(options):
    import horovod.torch as hvd
    import numpy as np
    import torch
    from datasets import movielens_100k

    import deepreduce_hvd as dr
    from deepreduce_hvd.statistics import totals

    hvd.init()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    users, items, _, timestamps = movielens_100k()
    train, test, item_count = split(users, items, timestamps)
    user_count = int(users.max())
    seen = [train[train[:, 0] == user, 1] for user in range(user_count)]
    nonzero = dr.Threshold(0)
    rows = {
        "none": None,
        "default": "default",
        "lossless: Bitmap": dr.Codec(nonzero, index=dr.Bitmap()),
        "lossless: RLE": dr.Codec(nonzero, index=dr.RLE()),
        "LloydMax 4 + RLE": dr.Codec(nonzero, index=dr.RLE(), value=dr.LloydMax(bits=4)),
        "QSGD 7 + Bitmap": dr.Codec(nonzero, index=dr.Bitmap(), value=dr.QSGD(bits=7)),
        "QSGD 7 + Bloom P0": dr.Codec(
            nonzero, index=dr.Bloom(fpr=0.6, policy="p0"), value=dr.QSGD(bits=7)
        ),
        "SKCompress": dr.Codec(nonzero, index=dr.Huffman(delta=True), value=dr.Quantile()),
    }
    results = []
    for number, (name, codec) in enumerate(rows.items(), 1):
        started = time.perf_counter()
        model = make_model(user_count, item_count)
        chosen = hvd.Compression.none
        if codec == "default":
            chosen = dr.Compressor(parameters=model.named_parameters())
        elif codec is not None:
            chosen = dr.Compressor(codec, memory=dr.NoMemory(), parameters=model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adagrad(model.parameters(), lr=0.05),
            named_parameters=model.named_parameters(),
            compression=chosen,
            sparse_as_dense=True,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        random = np.random.default_rng(0)
        seconds = []
        steps = len(train) // (hvd.size() * BATCH)  # the same number on every rank
        total = max(round(options.epochs * steps), 1)
        for epoch in range(math.ceil(total / steps)):
            order = random.permutation(len(train))
            wrong = random.integers(0, item_count, (len(train), NEGATIVES))
            for step in range(min(steps, total - epoch * steps)):
                first = (step * hvd.size() + hvd.rank()) * BATCH
                batch = train[order[first : first + BATCH]]
                pair_users = torch.from_numpy(np.repeat(batch[:, 0], 1 + NEGATIVES))
                pair_items = torch.from_numpy(
                    np.concatenate(
                        [batch[:, 1:], wrong[order[first : first + BATCH]]], axis=1
                    ).ravel()
                )
                truth = torch.zeros(BATCH, 1 + NEGATIVES)
                truth[:, 0] = 1
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(pair_users, pair_items), truth.view(-1)
                )
                loss.backward()
                optimizer.step()
                seconds.append(time.perf_counter() - began)
            if hvd.rank() == 0:
                print(
                    (
                        f"[{number}/{len(rows)}] {name:<18} epoch "
                        f"{epoch + 1}/{options.epochs:g}  loss {loss.item():.3f}  "
                        f"{time.perf_counter() - started:5.1f} s"
                    ),
                    flush=True,
                )
        dense = 4 * sum(parameter.numel() for parameter in model.parameters())
        sent = dense if codec is None else totals(chosen.stats())["sent_bytes"]
        sent = hvd.allreduce(torch.tensor([float(sent)], dtype=torch.float64), name="sent").item()
        results.append({
            "name": name, "hit_rate_at_10": hit_rate(model, test, seen, item_count),
            "bytes_per_step": sent, "share_of_dense": sent / dense,
            "seconds_per_step": float(np.median(seconds)),
        })  # fmt: skip
    if hvd.rank() == 0:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "data": "MovieLens-100k",
            "ranks": hvd.size(),
            "epochs": options.epochs,
            "rows": results,
        }
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def main():
    options = command_line(__doc__, "the ratings", 4, "recommender.json").parse_args()
    if options.worker:
        worker(options)
        return 0
    print(f"training with {options.processes} ranks; about 30 s a row on 2 cores\n", flush=True)
    status = launch(__file__, options.processes, sys.argv[1:])
    if status == 0:
        print(
            f"\n{'compression':<20}{'hit rate@10':>12}{'bytes per step':>16}{'of dense':>10}{'ms per step':>13}"
        )
        for row in json.loads(options.output.read_text())["rows"]:
            print(
                f"{row['name']:<20}{row['hit_rate_at_10']:>12.4f}{row['bytes_per_step']:>16,.0f}{row['share_of_dense']:>10.4f}{1e3 * row['seconds_per_step']:>13.1f}"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
