"""PPIformer: our evaluation against the dense padded one of the same network, in one run.

The dense peer does what the original encoder does: graphs padded to the largest, nearest neighbours
from all distances in every pass, and for every edge and layer the full radial matrices. It has the
same weights and gives the same numbers (checked here). Run: python benchmarks/ppiformer.py
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from datamodules.interfaces import idist
from datamodules.interfaces.graphs import build_graph, collate
from datamodules.interfaces.vendored import shipped_tables
from lightning_modules.ppiformer.geometry import nearest_neighbors
from lightning_modules.ppiformer.network import InterfaceNetwork
from lightning_modules.ppiformer.readout import Mutations, masked_marginals
from lightning_modules.ppiformer.residues import one_hot
from lightning_modules.ppiformer.tensor_product import TensorProduct


def dense_messages(self, scalars, vectors, edge, geometry):
    """Radial matrices of every edge, as the original makes them."""
    nodes, variants = scalars.shape[:2]
    neighbors = geometry.neighbors
    k = neighbors.shape[1]
    hidden = self.radial(edge.reshape(nodes * k, -1))
    columns = (scalars, vectors.flatten(1, 2))
    sums = [
        receiver(x)[:, None] + sender(x)[neighbors]
        for receiver, sender, x in zip(self.receiver, self.sender, columns, strict=True)
    ]
    results = []
    for index, ((degree, _), kernel) in enumerate(zip(self.pairs, self.kernels, strict=True)):
        width, size, group = kernel.shape
        matrix = hidden[index] @ kernel.permute(1, 0, 2).reshape(size, width * group)
        u = sums[degree].reshape(nodes * k, -1, width)
        out = torch.bmm(u, matrix.view(nodes * k, width, group))
        shape = (nodes, k, variants, 3, -1) if degree else (nodes, k, variants, -1)
        results.append(out.view(shape))
    return results


def padded(batch):
    """Every graph with as many residues as the largest; residues of the padding touch nobody."""
    sizes = batch.ptr.diff().tolist()
    most, graphs = max(sizes), len(sizes)
    rows = torch.cat([g * most + torch.arange(n) for g, n in enumerate(sizes)])

    def spread(x, fill=0):
        out = x.new_full((graphs * most, *x.shape[1:]), fill)
        out[rows] = x
        return out

    neighbors = torch.arange(graphs * most)[:, None].repeat(1, batch.neighbors.shape[1])
    neighbors[rows] = rows[batch.neighbors]
    return SimpleNamespace(
        position=spread(batch.position),
        types=spread(batch.types),
        chain=spread(batch.chain),
        vectors=spread(batch.vectors),
        neighbors=neighbors,
        exists=spread(batch.exists, False),
        rows=rows,
        sizes=sizes,
        most=most,
    )


class Dense:
    """The dense padded peer."""

    def __init__(self, network):
        self.network = network

    def __call__(self, batch, hidden=None):
        """Logits of all residues, those in `hidden` masked."""
        p = padded(batch)
        for start in range(0, len(p.position), p.most):
            # all distances again in every pass
            nearest_neighbors(p.position[start : start + p.most])
        features = one_hot(p.types)
        if hidden is not None:
            features[p.rows[hidden]] = 0
        ours, TensorProduct.messages = TensorProduct.messages, dense_messages
        try:
            return self.network(p, features)[p.rows]
        finally:
            TensorProduct.messages = ours


def clock(function, repeats):
    """Best CPU seconds of several runs: the machine may be busy."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def cropped(table, size):
    rows = np.argsort(((table.ca - table.ca.mean(0)) ** 2).sum(1))[:size]
    fields = ("ca", "n", "c", "types", "chain", "number", "insertion")
    part = {name: getattr(table, name)[np.sort(rows)] for name in fields}
    return build_graph(type(table)(f"{table.name}-{size}", **part))


def backward(output, network):
    network.zero_grad()
    output.square().mean().backward()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tables = list(shipped_tables().values())
    big = [table for table in tables if len(table) >= 200]
    network = InterfaceNetwork()
    with torch.no_grad():
        for p in network.parameters():
            if p.abs().max() == 0:
                nn.init.normal_(p, std=0.05)
    dense = Dense(network)
    print("published size, 12.3 M parameters, one thread, CPU seconds (best of 2)")
    head = ("ours fwd", "dense", "ratio", "ours f+b", "dense", "ratio")
    print(f"{'batch':>24} " + " ".join(f"{name:>9}" for name in head))
    for label, sizes in {
        "60 residues": [60],
        "120 residues": [120],
        "30+50+70+130 residues": [30, 50, 70, 130],
    }.items():
        batch = collate([cropped(big[i], n) for i, n in enumerate(sizes)])
        with torch.no_grad():
            error = (network(batch) - dense(batch)).abs().max()
            forward = [clock(lambda f=f, b=batch: f(b), 2) for f in (network, dense)]
        assert error < 1e-3, error
        both = [clock(lambda f=f, b=batch: backward(f(b), network), 2) for f in (network, dense)]
        print(
            f"{label:>24} {forward[0]:9.2f} {forward[1]:9.2f} {forward[1] / forward[0]:9.1f} "
            f"{both[0]:9.2f} {both[1]:9.2f} {both[1] / both[0]:9.1f}"
        )

    batch = collate([cropped(big[0], 60)])
    sites = list(range(0, 60, 12))
    types = batch.types.tolist()
    sets = [[(n, t)] for n in sites for t in range(20) if t != types[n]]
    mutations = Mutations.of(batch.types, sets)
    geometry = network.geometry(batch)
    with torch.no_grad():
        ours = clock(
            lambda: masked_marginals(
                lambda x: network.embed(batch, x, geometry), network.classifier, mutations
            ),
            1,
        )
        one = clock(lambda: dense(batch, torch.tensor([sites[0]])), 3)
    print(
        f"saturation scan, {len(sites)} sites, {len(sets)} mutations: ours {ours:.2f} s; "
        f"dense, one pass per mutation, {len(sets)} x {one:.2f} = {len(sets) * one:.1f} s; "
        f"ratio {len(sets) * one / ours:.0f}"
    )

    thousand = [tables[i % len(tables)] for i in range(1000)]
    residues = sum(len(table) for table in thousand)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs = clock(lambda: [build_graph(table) for table in thousand], 1)
        embedded = clock(
            lambda: np.stack([idist.embed(t.ca, t.types, t.chain) for t in thousand]), 1
        )
        few = [table for table in tables if len(table) < 80][:3]
        vectorised = clock(lambda: [idist.embed(t.ca, t.types, t.chain) for t in few], 3)
        loops = clock(lambda: [looped(t) for t in few], 1)
    print(
        f"1000 interfaces, {residues} residues: graphs {graphs:.1f} s, iDist {embedded:.1f} s; "
        f"iDist against loops over residue pairs: ratio {loops / vectorised:.0f}"
    )


def looped(table):
    """Embed with loops over pairs of residues."""
    total = {}
    for i in range(len(table)):
        intra, inter, n_intra, n_inter = np.zeros(20), np.zeros(20), 0, 0
        for j in range(len(table)):
            if i == j:
                continue
            weight = np.exp(-((np.linalg.norm(table.ca[i] - table.ca[j]) / 4) ** 2))
            if table.chain[i] == table.chain[j]:
                intra[table.types[j]] += weight
                n_intra += 1
            else:
                inter[table.types[j]] += weight
                n_inter += 1
        own = np.eye(20)[table.types[i]]
        value = own / 2 + (intra / max(n_intra, 1) - inter / max(n_inter, 1)) / 4
        total.setdefault(table.chain[i], []).append(value)
    return np.mean([np.mean(values, 0) for values in total.values()], 0)


if __name__ == "__main__":
    main()
