"""A federated round of all clients at once against loops over the clients.

All do the same mathematics at the size of MovieLens-100K (943 clients, 1682 items, width 32,
100 000 positives with 4 negatives each, 10 local epochs), on synthetic data, on one thread, in one
run. The loops are what one writes in PyTorch: autograd, dense tables, dense SGD with weight decay,
one client after the other. They differ in how batches are made: the usual way is a ``DataLoader``
over a ``TensorDataset`` per client, the tuned one splits a permutation. They run on a part of the
clients and are scaled to all of them. Seconds are processor seconds, which a busy machine disturbs
least; the compiler's time is printed apart.

Run: ``python benchmarks/fedrap.py``
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_modules.fedrap.federation import Federation
from lightning_modules.fedrap.local_training import LocalTraining
from lightning_modules.fedrap.native import native_step
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


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def split_permutation(items: torch.Tensor, labels: torch.Tensor) -> Batches:
    """The batches of an epoch, made as cheaply as PyTorch can."""
    for part in torch.randperm(len(items)).split(2048):
        yield items[part], labels[part]


def data_loader(items: torch.Tensor, labels: torch.Tensor) -> Batches:
    """The batches of an epoch, made the usual way."""
    yield from DataLoader(TensorDataset(items, labels), batch_size=2048, shuffle=True)


def plain_client(
    state: dict,
    common: torch.Tensor,
    items: torch.Tensor,
    labels: torch.Tensor,
    t: LocalTraining,
    batches: Callable[[torch.Tensor, torch.Tensor], Batches],
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
        for part, truth in batches(items, labels):
            d, c = client.personal(part), client.common(part)
            loss = bce(client.score(d + c)[:, 0], truth)
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


def loop_seconds(
    timed: int,
    samples: Samples,
    state: dict,
    training: LocalTraining,
    batches: Callable[[torch.Tensor, torch.Tensor], Batches],
) -> float:
    """A round of a loop over the clients, from some evenly spaced by their activity."""
    by_activity = torch.bincount(samples.client).argsort()
    chosen = by_activity[((torch.arange(timed) + 0.5) / timed * USERS).long()].tolist()
    labels, common = samples.label.float(), state["common.weight"].clone()
    total, seconds = torch.zeros_like(common), 0.0
    for number, user in enumerate([chosen[0], *chosen]):
        mine = samples.client == user
        items, truth = samples.item[mine], labels[mine]
        own = {k: v.clone() for k, v in state.items()}
        start = time.process_time()
        total += plain_client(own, common, items, truth, training, batches)[1]
        if number:  # the first call warms up
            seconds += time.process_time() - start
    return seconds / timed * USERS


def round_seconds(
    rounds: int, samples: Samples, state: dict, training: LocalTraining, compiled: bool
) -> tuple[float, torch.Tensor]:
    """The best of some vectorised rounds, and the common table after the first."""
    federation = Federation(
        state["common.weight"],
        state["personal.weight"],
        state["score.weight"][0],
        state["score.bias"],
        USERS,
        Federating(compile=compiled),
    )
    client = torch.arange(USERS)
    times, first = [], torch.empty(0)
    for number in range(rounds + 1):
        start = time.process_time()
        order = shuffled_order(samples.client, client, 2048, 10, 0, number)
        federation.train_clients(client, samples, order, training)
        federation.finish_round()
        times.append(time.process_time() - start)
        first = federation.common.clone() if number == 0 else first
    return min(times[1:]), first


def compare(timed: int, rounds: int) -> None:
    """One size: time all, print seconds, ratios and memory."""
    torch.manual_seed(0)
    print(f"{USERS} clients, {ITEMS} items, width {WIDTH}, {POSITIVES} positives")
    samples = synthetic()
    training = LocalTraining(
        Objective(0.01, 0.01), 0.5, 200.0, 200.0, 1e-4, 1e-4, 1e-4, epochs=10, tolerance=0.0
    )
    state = Client().state_dict()
    usual = loop_seconds(timed, samples, state, training, data_loader)
    tuned = loop_seconds(timed, samples, state, training, split_permutation)
    start = time.perf_counter()
    kernel = native_step(torch.float32, WIDTH)
    building = time.perf_counter() - start
    print(f"loop, DataLoader per client and epoch  {usual:7.2f} CPU s a round ({timed} timed)")
    print(f"loop, tuned batches                    {tuned:7.2f} CPU s a round ({timed} timed)")
    tables = []
    for compiled in (False, True) if kernel else (False,):
        ours, table = round_seconds(rounds, samples, state, training, compiled)
        tables.append(table)
        name = "vectorised, compile=True" if compiled else "vectorised"
        print(
            f"{name:38} {ours:7.2f} CPU s a round (best of {rounds}): {usual / ours:.1f} times "
            f"the DataLoader loop, {tuned / ours:.1f} times the tuned one"
        )
    if kernel:
        apart = float((tables[0] - tables[1]).abs().max())
        print(f"compiling took {building:.2f} s; common tables after a round {apart:.1e} apart")

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
