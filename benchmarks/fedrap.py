"""A federated round of all clients at once against a plain loop over the clients.

Both do the same mathematics at the size of MovieLens-100K (943 clients, 1682 items, width 32,
100 000 positives with 4 negatives each, 10 local epochs), on synthetic data, on one thread, in one
run. The loop is what one writes in PyTorch: autograd, dense tables, dense SGD with weight decay,
one client after the other; it runs on a part of the clients and is scaled to all of them. Seconds
are processor seconds, which a busy machine disturbs least.

Run: ``python benchmarks/fedrap.py``
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time

import numpy as np
import torch
from torch import nn

from lightning_modules.fedrap.federation import Federation
from lightning_modules.fedrap.local_training import LocalTraining
from lightning_modules.fedrap.objective import Objective
from lightning_modules.fedrap.personal_store import LazyPersonal, dense_bytes
from lightning_modules.fedrap.schedule import Samples, shuffled_order
from lightning_modules.fedrap.settings import Federating

USERS, ITEMS, WIDTH, POSITIVES, NEGATIVES = 943, 1682, 32, 100_000, 4


def synthetic(seed: int = 0) -> Samples:
    """Log-normal activity as in rating data; at least 20 positives a user."""
    draw = np.random.default_rng(seed)
    activity = draw.lognormal(0.0, 1.0, USERS)
    counts = 20 + np.floor(activity / activity.sum() * (POSITIVES - 20 * USERS)).astype(int)
    counts = np.minimum(counts, 700)
    client, item, label = [], [], []
    for user, count in enumerate(counts):
        shuffled = draw.permutation(ITEMS)
        negative = draw.choice(shuffled[count:], (count, NEGATIVES))
        client.append(np.full(count * (1 + NEGATIVES), user))
        item.append(np.concatenate([shuffled[:count, None], negative], 1).ravel())
        label.append(np.tile([1] + [0] * NEGATIVES, count))
    return Samples(*(torch.from_numpy(np.concatenate(x)) for x in (client, item, label)))


class Client(nn.Module):
    """FedRAP's model of one client."""

    def __init__(self) -> None:
        super().__init__()
        self.personal = nn.Embedding(ITEMS, WIDTH)
        self.common = nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Linear(WIDTH, 1)


def plain_client(
    state: dict, common: torch.Tensor, items: torch.Tensor, labels: torch.Tensor, t: LocalTraining
) -> tuple[dict, torch.Tensor]:
    """One client's round by autograd and torch.optim.SGD."""
    client = Client()
    client.load_state_dict(state)
    with torch.no_grad():
        client.common.weight.copy_(common)
    groups = [
        {"params": client.score.parameters(), "lr": t.lr_network},
        {"params": [client.personal.weight, client.common.weight], "lr": t.lr_common},
    ]
    optimizer = torch.optim.SGD(groups, weight_decay=t.decay_common)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, t.step_decay)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(t.epochs):
        order = torch.randperm(len(items))
        for part in order.split(2048):
            d, c = client.personal(items[part]), client.common(items[part])
            loss = bce(client.score(d + c)[:, 0], labels[part])
            loss = loss - t.objective.independence * (d - c).square().mean()
            loss = loss + t.objective.sparsity * c.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return client.state_dict(), client.common.weight.detach()


def main() -> None:
    """Time both and print the ratio, at the size of MovieLens-100K and for a longer catalogue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=48, help="clients of the plain loop")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the vectorised one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compare(arguments.clients, arguments.rounds)
    globals().update(USERS=150, ITEMS=10_000, POSITIVES=16_000)
    compare(min(arguments.clients, 12), 1)


def compare(timed: int, rounds: int) -> None:
    """One size: time both, print seconds, ratio and memory."""
    torch.manual_seed(0)
    print(f"{USERS} clients, {ITEMS} items, width {WIDTH}, {POSITIVES} positives")
    samples = synthetic()
    training = LocalTraining(
        Objective(0.01, 0.01), 0.5, 200.0, 200.0, 1e-4, 1e-4, 1e-4, epochs=10, tolerance=0.0
    )
    first = Client()
    state = first.state_dict()

    chosen = torch.linspace(0, USERS - 1, timed).long()
    labels = samples.label.float()
    seconds, rows, common = 0.0, 0, state["common.weight"].clone()
    total = torch.zeros_like(common)
    for number, user in enumerate([int(chosen[0]), *chosen.tolist()]):
        mine = samples.client == user
        items, truth = samples.item[mine], labels[mine]
        start = time.process_time()
        plain_client({k: v.clone() for k, v in state.items()}, common, items, truth, training)
        total += common
        if number:  # the first call warms up
            seconds += time.process_time() - start
            rows += int(mine.sum())
    loop = seconds / timed * USERS

    federation = Federation(
        common,
        state["personal.weight"],
        state["score.weight"][0],
        state["score.bias"],
        USERS,
        Federating(),
    )
    client = torch.arange(USERS)
    times = []
    for number in range(rounds + 1):
        start = time.process_time()
        order = shuffled_order(samples.client, client, 2048, 10, 0, number)
        federation.train_clients(client, samples, order, training)
        federation.finish_round()
        times.append(time.process_time() - start)
    ours = min(times[1:])
    print(f"plain loop   {loop:8.2f} CPU s a round ({timed} of {USERS} clients timed)")
    print(f"vectorised   {ours:8.2f} CPU s a round (best of {rounds})")
    print(f"ratio        {loop / ours:8.1f}")

    dense = dense_bytes(USERS, ITEMS, WIDTH, torch.float32)
    lazy = LazyPersonal(state["personal.weight"], USERS)
    key = torch.unique(samples.client * ITEMS + samples.item)
    lazy.key, lazy.value = key, torch.zeros(len(key), WIDTH)
    print(
        f"memory of D  dense {dense / 1e6:.0f} MB, touched rows after one round "
        f"{lazy.bytes() / 1e6:.0f} MB ({len(key) / USERS / ITEMS:.0%} of the rows)"
    )
    big = dense_bytes(6040, 3706, WIDTH, torch.float32)
    print(f"             at MovieLens-1M size dense {big / 1e9:.2f} GB; two ranks hold half each")


if __name__ == "__main__":
    main()
