"""The encoder against one written edge by edge, for sizes that the reference values don't have."""

import math

import pytest
import torch
from torch.nn.functional import one_hot, silu

from lightning_modules.ppiformer.checkpoint import BASIS, to_published
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.geometry import nearest_neighbors


class PlainEncoder:
    """Loops over edges with whole radial matrices, weights under their published names."""

    def __init__(self, state, heads, widths, depth, radius):
        self.state, self.heads, self.widths = state, heads, widths
        self.depth, self.radius = depth, radius
        basis = state[BASIS]
        self.across, self.along = basis[0, 0] + basis[0, 2], basis[1, 0] + basis[1, 2]
        self.turn = basis[0, 1]

    def linear(self, name, features, degree):
        weight = self.state[f"{name}.weights.{degree}"]
        return torch.einsum("nc...,cd->nd...", features, weight)

    def norm(self, name, x, v):
        scale = [self.state[f"{name}.transforms.{d}"].flatten() for d in (0, 1)]
        x = x / x.square().mean(-1, keepdim=True).sqrt() * scale[0]
        length = v.square().sum(-1).mean(-1).sqrt()
        return x, v / length[:, None, None] * scale[1][None, :, None]

    def radial(self, name, edge, inputs, outputs):
        hidden = edge
        for linear, scale in ((0, 2), (3, 5)):
            weight, bias = (self.state[f"{name}.{linear}.{part}"] for part in ("weight", "bias"))
            hidden = silu(weight @ hidden + bias)
            spread = (hidden.var(unbiased=False) + 1e-5).sqrt()
            hidden = (hidden - hidden.mean()) / spread * self.state[f"{name}.{scale}.gamma"]
        weight, bias = (self.state[f"{name}.6.{part}"] for part in ("weight", "bias"))
        return (weight @ hidden + bias).view(outputs, inputs)

    def turned(self, v, r):
        along = (v @ r)[:, None] * r
        cross = torch.linalg.cross(r.expand_as(v), v)
        return self.across * (v - along) + self.along * along + self.turn * cross

    def messages(self, name, features, outputs):
        ends = [
            [self.linear(f"{name}.{end}", features[d], d) for d in (0, 1)]
            for end in ("to_xi", "to_xj")
        ]
        result = {}
        for i, j in self.edges:
            r = (self.scaled[i] - self.scaled[j]) / self.distance[i, j]
            token = self.state["encoder.edge_emb.weight"][int(self.chain[i] == self.chain[j])]
            edge = torch.cat([token, self.distance[i, j][None]])
            for out in (0, 1):
                groups = (outputs[out] - outputs[out] // 2, outputs[out] // 2)
                parts = []
                for degree in (0, 1):
                    u = ends[0][degree][i] + ends[1][degree][j]
                    kernel = f"{name}.kernel_unary.({degree},{out}).rp"
                    value = self.radial(kernel, edge, len(u), groups[degree]) @ u
                    if degree and out:
                        value = self.turned(value, r)
                    elif degree:
                        value = value @ r
                    elif out:
                        value = value[:, None] * r
                    parts.append(value)
                result[i, j, out] = torch.cat(parts)
        return result

    def attention(self, name, features, degree, messages):
        width, nodes = self.widths[degree], len(self.scaled)
        query = self.linear(f"{name}.to_q", features, degree)
        own = self.linear(f"{name}.to_kv.self_interact", features, degree)
        out = self.state[f"{name}.to_kv.to_out.weights.{degree}"]
        updates = []
        for i in range(nodes):
            slots = [own[i]] + [
                torch.einsum("c...,cd->d...", messages[a, b, degree], out)
                for a, b in self.edges
                if a == i and self.distance[a, b] <= self.radius
            ]
            heads = []
            for head in range(self.heads):
                q = query[i, head * width : (head + 1) * width]
                key, value = torch.stack(slots)[:, 2 * head * width : 2 * (head + 1) * width].split(
                    width, 1
                )
                gap = (q - key + 1e-6).norm(dim=-1)
                weight = torch.softmax(-(gap.sum(1) if degree else gap) / math.sqrt(width), 0)
                heads.append(torch.einsum("s,s...->...", weight, value))
            updates.append(torch.cat(heads))
        return self.linear(f"{name}.to_out", torch.stack(updates), degree)

    def __call__(self, x, v, position, chain, neighbors):
        self.scaled, self.chain = position / 4, chain
        self.distance = (self.scaled[:, None] - self.scaled[None]).norm(dim=-1)
        rows = enumerate(neighbors.tolist())
        self.edges = [(i, j) for i, row in rows for j in dict.fromkeys(row) if j != i]
        name = "encoder.tp_in"
        channels = [self.state[f"{name}.to_out.weights.{d}"].shape[1] for d in (0, 1)]
        messages = self.messages(name, (x, v), channels)
        hidden = []
        for degree, own in enumerate((x, v)):
            pooled = torch.zeros(len(x), channels[degree], *[3] * degree, dtype=x.dtype)
            for i in range(len(x)):
                near = [e for e in self.edges if e[0] == i and self.distance[e] <= self.radius]
                for edge in near:
                    pooled[i] += messages[(*edge, degree)] / len(near)
            hidden.append(
                self.linear(f"{name}.to_out", pooled, degree)
                + self.linear(f"{name}.self_interact", own, degree)
            )
        for layer in range(self.depth):
            name = f"encoder.layers.blocks.{layer}.0"
            normed = self.norm(f"{name}.prenorm", *hidden)
            messages = self.messages(
                f"{name}.to_kv", normed, [2 * self.heads * width for width in self.widths]
            )
            hidden = [hidden[d] + self.attention(name, normed[d], d, messages) for d in (0, 1)]
            name = f"encoder.layers.blocks.{layer}.1"
            normed = self.norm(f"{name}.prenorm", *hidden)
            scalars, vectors = (self.linear(f"{name}.project_in", normed[d], d) for d in (0, 1))
            gates = 4 * channels[1]
            vectors = vectors * torch.sigmoid(scalars[:, :gates])[..., None]
            scalars = silu(scalars[:, gates:])
            hidden = [
                hidden[d] + self.linear(f"{name}.project_out", value, d)
                for d, value in enumerate((scalars, vectors))
            ]
        return self.norm("encoder.norm", *hidden)


@pytest.mark.parametrize(
    ("channels", "widths", "heads", "vectors", "nodes", "neighbors", "radius"),
    [
        # odd widths, and edges beyond the radius
        ((7, 5), (3, 3), 3, 1, 12, 5, 1.2),
        # fewer residues than neighbours, three vector features
        ((6, 3), (5, 2), 1, 3, 6, 10, 8.0),
    ],
)
def test_equals_the_plain_encoder(channels, widths, heads, vectors, nodes, neighbors, radius):
    torch.manual_seed(nodes)
    inputs = (20, vectors)
    encoder = SE3Encoder(
        channels, inputs, 2, heads, widths, 9, 3, radius, last_layer_scalar_only=False
    ).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        encoder.constants.copy_(torch.tensor([0.7, -0.2, 0.4]))
    position = 5 * torch.randn(nodes, 3, dtype=torch.float64)
    chain = torch.arange(nodes) % 2
    types = one_hot(torch.randint(20, (nodes,)), 20).double()
    directions = torch.randn(nodes, vectors, 3, dtype=torch.float64)
    near, exists = nearest_neighbors(position, neighbors)
    geometry = encoder.geometry(position, near, exists)
    # both within and beyond the radius, where there is one
    assert bool(geometry.within.any())
    assert bool(geometry.within[exists].all()) == (radius == 8.0)
    state = to_published({f"encoder.{k}": v for k, v in encoder.state_dict().items()})
    plain = PlainEncoder(state, heads, widths, 2, radius)
    with torch.no_grad():
        found = encoder(types, directions, chain, geometry)
        expected = plain(types, directions, position, chain, near)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
