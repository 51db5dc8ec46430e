"""Reference values and small networks of these tests."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modules.ppiformer.checkpoint import load_weights
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.geometry import nearest_neighbors
from lightning_modules.ppiformer.network import InterfaceNetwork

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture
def reference():
    """Folder of the reference files."""
    return REFERENCE


def random_batch(sizes=(17, 23), chains=2, k=10, seed=0, dtype=torch.float64):
    """Graphs of random residues with the fields of a batch."""
    g = torch.Generator().manual_seed(seed)
    parts, neighbors, exists, start = [], [], [], 0
    for size in sizes:
        position = 6 * torch.randn(size, 3, generator=g, dtype=dtype)
        local, found = nearest_neighbors(position, k)
        neighbors.append(local + start)
        exists.append(found)
        parts.append(position)
        start += size
    nodes = sum(sizes)
    ptr = torch.tensor([0, *np.cumsum(sizes)])
    return SimpleNamespace(
        position=torch.cat(parts),
        types=torch.randint(20, (nodes,), generator=g),
        chain=torch.cat([torch.arange(n) * chains // n for n in sizes]),
        partner=torch.cat([torch.arange(n) * chains // n for n in sizes]),
        vectors=torch.randn(nodes, 1, 3, generator=g, dtype=dtype),
        neighbors=torch.cat(neighbors),
        exists=torch.cat(exists),
        key=torch.arange(len(sizes)) + 7,
        batch=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        ptr=ptr,
    )


def randomised(module, seed=0):
    """Give zero-initialised outputs values, so that every path matters."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.abs().max() == 0:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    return module


@pytest.fixture
def small_network():
    """Network with all outputs non-zero, double precision."""

    def build(**options):
        torch.manual_seed(0)
        arguments = {
            "channels": (8, 6),
            "depth": 2,
            "heads": 2,
            "head_widths": (4, 3),
            "radial_hidden": 8,
            "edge_embedding": 3,
        }
        return randomised(InterfaceNetwork(**{**arguments, **options})).double()

    return build


@pytest.fixture
def make_batch():
    """See `random_batch`."""
    return random_batch


class Published(nn.Module):
    """An encoder and classifier with the weights of a reference file."""

    def __init__(self, name, dtype=torch.float64):
        super().__init__()
        self.data = np.load(REFERENCE / f"{name}.npz")
        c = json.loads(str(self.data["config"]))
        self.encoder = SE3Encoder(
            c["dim"],
            c["dim_in"],
            c["depth"],
            c["heads"],
            c["dim_head"],
            c["radial_hidden_dim"],
            c["edge_dim"],
            c["valid_radius"],
            c["divide_coords_by"],
            reference_attention=name == "model_radius",
            last_layer_scalar_only=False,
        )
        self.classifier = nn.Linear(c["dim"][0], 20)
        self.to(dtype)
        load_weights(self, self.state(), name)
        z = self.data
        sizes = z["n_nodes"].tolist()
        self.batch = random_batch(sizes, dtype=dtype)
        neighbors, exists, start = [], [], 0
        position = torch.from_numpy(z["coords"]).to(dtype)
        for size in sizes:
            local, found = nearest_neighbors(position[start : start + size], c["num_neighbors"])
            neighbors.append(local + start)
            exists.append(found)
            start += size
        self.batch.position = position
        self.batch.neighbors, self.batch.exists = torch.cat(neighbors), torch.cat(exists)
        self.batch.types = torch.from_numpy(z["aa"])
        self.batch.chain = torch.from_numpy(np.unique(z["chain"], return_inverse=True)[1])
        self.batch.vectors = torch.from_numpy(z["virtual_cb"]).to(dtype)[:, None]
        self.geometry = self.encoder.geometry(position, self.batch.neighbors, self.batch.exists)

    def state(self):
        return {k[3:]: torch.from_numpy(self.data[k]) for k in self.data.files if k[:3] == "sd:"}

    def embed(self, features):
        b = self.batch
        return self.encoder(features, b.vectors, b.chain, self.geometry)


@pytest.fixture
def published():
    """Build the network of a reference file."""
    return Published
