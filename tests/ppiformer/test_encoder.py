"""Symmetries and edge cases of the network."""

import copy
from types import SimpleNamespace

import pytest
import torch

from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.geometry import build_geometry, nearest_neighbors
from lightning_modules.ppiformer.readout import Mutations
from lightning_modules.ppiformer.residues import one_hot
from lightning_modules.ppiformer.tensor_product import ROTATION_CONSTANTS, rotate_degree_one


def rotation(seed=0, reflect=False):
    q, _ = torch.linalg.qr(
        torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    return q if (torch.det(q) < 0) == reflect else -q


def full(network):
    """The encoder of a network with its vector output."""
    torch.manual_seed(0)
    e = SE3Encoder((8, 6), (20, 1), 2, 2, (4, 3), 8, 3, last_layer_scalar_only=False).double()
    with torch.no_grad():
        for p in e.parameters():
            if p.abs().max() == 0:
                p.normal_(0, 0.2)
    return e


def run(encoder, b):
    geometry = encoder.geometry(b.position, b.neighbors, b.exists)
    return encoder(one_hot(b.types, b.vectors.dtype), b.vectors, b.chain, geometry)


def moved(b, q, shift):
    b = copy.copy(b)
    b.position = b.position @ q.T + shift
    b.vectors = b.vectors @ q.T
    return b


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
def test_equivariance(make_batch, dtype):
    # not 1e-12: the attention adds 1e-6 to every component of a difference, as published
    tolerance = 1e-5
    encoder, b, q = full(None), make_batch(), rotation()
    shift = torch.tensor([30.0, -20.0, 5.0], dtype=torch.float64)
    encoder = encoder.to(dtype)

    def cast(batch):
        batch = copy.copy(batch)
        batch.position, batch.vectors = batch.position.to(dtype), batch.vectors.to(dtype)
        return batch

    scalars, vectors = run(encoder, cast(b))
    rotated, rotated_vectors = run(encoder, cast(moved(b, q, shift)))
    assert (rotated - scalars).abs().max() < tolerance
    assert (rotated_vectors - vectors @ q.T.to(dtype)).abs().max() < tolerance


def test_reflection_is_seen(make_batch):
    encoder, b = full(None), make_batch()
    mirrored, _ = run(encoder, moved(b, rotation(reflect=True), 0))
    assert (mirrored - run(encoder, b)[0]).abs().max() > 1e-3


def test_tensor_product_equivariance_to_rounding():
    g = torch.Generator().manual_seed(0)
    q = rotation()
    unit = torch.nn.functional.normalize(torch.randn(50, 3, 1, generator=g, dtype=q.dtype), dim=1)
    v = torch.randn(50, 3, 4, generator=g, dtype=q.dtype)
    constants = torch.tensor(ROTATION_CONSTANTS, dtype=q.dtype)
    turned = rotate_degree_one(q @ v, q @ unit, constants)
    assert (turned - q @ rotate_degree_one(v, unit, constants)).abs().max() < 1e-10
    # the direction at which a construction by axis and angle is singular
    down = torch.tensor([0.0, -1.0, 0.0], dtype=q.dtype)[None, :, None].requires_grad_()
    rotate_degree_one(v[:1], down, constants).sum().backward()
    assert torch.isfinite(down.grad).all()


def test_e3nn_agrees_on_the_degree_one_map():
    """The map is the span of the three couplings of two vectors: trace, cross, traceless."""
    o3 = pytest.importorskip("e3nn.o3")
    w = [o3.wigner_3j(1, order, 1).double() for order in (0, 1, 2)]
    g = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(3, generator=g, dtype=torch.float64), dim=0)
    # e3nn's order of a degree-1 vector is that of its own spherical harmonics: x, y, z
    harmonics = [o3.spherical_harmonics(order, unit, True, "integral") for order in (0, 1, 2)]
    matrices = [torch.einsum("aob,o->ab", m, h.to(m)) for m, h in zip(w, harmonics, strict=True)]
    constants = torch.tensor(ROTATION_CONSTANTS, dtype=torch.float64)
    ours = rotate_degree_one(torch.eye(3, dtype=torch.float64), unit[:, None], constants)
    basis = torch.stack([m.flatten() for m in matrices], 1)
    residual = torch.linalg.lstsq(basis, ours.flatten()[:, None]).solution
    assert (basis @ residual - ours.flatten()[:, None]).abs().max() < 1e-6
    assert (residual.abs() > 1e-3).all()


def slice_graph(b, number):
    start, stop = int(b.ptr[number]), int(b.ptr[number + 1])
    names = ("position", "types", "chain", "partner", "vectors", "exists")
    part = {name: getattr(b, name)[start:stop] for name in names}
    return SimpleNamespace(
        **part,
        neighbors=b.neighbors[start:stop] - start,
        key=b.key[number : number + 1],
        batch=torch.zeros(stop - start, dtype=torch.int64),
        ptr=torch.tensor([0, stop - start]),
    )


def test_batch_mates_do_not_matter(small_network, make_batch):
    """Also for graphs with fewer residues than neighbours, where the original pads."""
    network = small_network()
    b = make_batch((9, 2, 31))
    together = network(b)
    for number in range(3):
        alone = network(slice_graph(b, number))
        rows = slice(int(b.ptr[number]), int(b.ptr[number + 1]))
        assert (together[rows] - alone).abs().max() < 1e-12


def test_order_of_residues_does_not_matter(small_network, make_batch):
    network, b = small_network(), make_batch((25,))
    order = torch.randperm(25, generator=torch.Generator().manual_seed(3))
    shuffled = copy.copy(b)
    for name in ("position", "types", "chain", "vectors"):
        setattr(shuffled, name, getattr(b, name)[order])
    shuffled.neighbors, shuffled.exists = nearest_neighbors(shuffled.position)
    assert (network(shuffled) - network(b)[order]).abs().max() < 1e-12


def test_radius_masks_both_degrees(make_batch):
    """Moving a residue beyond the radius further away changes nothing; the original differs."""
    b = make_batch((12,))
    b.position[-1] = b.position.mean(0) + torch.tensor([60.0, 0, 0])
    far = copy.copy(b)
    far.position = b.position.clone()
    far.position[-1] += torch.tensor([1.0, 3.0, 0.0])
    changes = {}
    for reference in (False, True):
        torch.manual_seed(0)
        encoder = full(None)
        encoder.reference_attention = reference
        changes[reference] = (run(encoder, far)[0] - run(encoder, b)[0])[:-1].abs().max()
    assert changes[False] < 1e-12
    assert changes[True] > 1e-6


def test_variants_equal_separate_passes(small_network, make_batch):
    network, b = small_network(), make_batch()
    g = torch.Generator().manual_seed(1)
    features = one_hot(torch.randint(20, (40, 3), generator=g), torch.float64)
    together = network(b, features)
    for variant in range(3):
        assert (together[:, variant] - network(b, features[:, variant])).abs().max() < 1e-12


def test_degenerate_geometry_has_finite_gradients(small_network, make_batch):
    """Coincident residues, no backbone, no neighbour within the radius, all types hidden."""
    network, b = small_network(), make_batch((12, 2))
    b.position[3] = b.position[2]
    b.position[13] = b.position[12] + 200.0
    b.vectors = torch.zeros_like(b.vectors).requires_grad_()
    b.position.requires_grad_()
    logits = network(b, torch.zeros(14, 20, dtype=torch.float64))
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert torch.isfinite(b.vectors.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


def test_gradients_are_exact(small_network, make_batch):
    network, b = small_network(depth=1), make_batch((6,), k=4)
    features = torch.rand(6, 20, dtype=torch.float64, requires_grad=True)
    geometry = network.geometry(b)

    def value(x, v):
        b.vectors = v
        return network.embed(b, x, geometry)

    assert torch.autograd.gradcheck(value, (features, b.vectors.clone().requires_grad_()))


def test_every_parameter_gets_a_gradient(small_network, make_batch):
    network = small_network()
    network(make_batch()).square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_activation_checkpointing_changes_nothing(small_network, make_batch):
    b = make_batch()
    gradients = []
    for on in (False, True):
        network = small_network(activation_checkpointing=on)
        network(b).square().sum().backward()
        gradients.append([p.grad for p in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"gate_heads": True}, {"vectors": 3}, {"encoder": "egnn"}, {"chain_tokens": False}]
)
def test_options_stay_invariant(small_network, make_batch, options):
    network, b = small_network(**options), make_batch()
    if options.get("vectors") == 3:
        b.vectors = torch.cat([b.vectors, b.vectors.roll(1, 0), b.vectors.roll(2, 0)], 1)
    out = network(b)
    assert (network(moved(b, rotation(), 3.0)) - out).abs().max() < 1e-5
    other = copy.copy(b)
    other.chain = torch.zeros_like(b.chain)
    seen = (network(other) - out).abs().max() > 1e-6
    assert bool(seen) == options.get("chain_tokens", True)


def test_attention_export(small_network, make_batch):
    network, b = small_network(), make_batch()
    layers = network.attention(b)
    # the last layer has no vector branch
    assert [(a["layer"], a["degree"]) for a in layers] == [(0, 0), (0, 1), (1, 0)]
    for a in layers:
        assert a["weight"].shape == (40, 11, 2)
        assert torch.allclose(a["weight"].sum(1), torch.ones(40, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="EGNN"):
        small_network(encoder="egnn").attention(b)


def test_half_precision_geometry(make_batch):
    b = make_batch()
    g = build_geometry(b.position.bfloat16(), b.neighbors, b.exists)
    assert g.distance.dtype == torch.float32
    encoder = full(None).float()
    with torch.autocast("cpu", torch.bfloat16):
        b.position, b.vectors = b.position.float(), b.vectors.float()
        scalars, _ = run(encoder, b)
    exact, _ = run(encoder, b)
    assert scalars.dtype == torch.float32
    assert (scalars - exact).abs().max() < 0.3


def test_mutations_helper():
    m = Mutations.of(torch.zeros(5).long(), [[(1, 2)], [(3, 4), (0, 1)]])
    assert m.point_node.tolist() == [1, 3, 0]
    assert m.point_mutation.tolist() == [0, 1, 1]
