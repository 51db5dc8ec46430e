"""The network against values of the published implementation."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from datamodules.interfaces.mutations import parse_mutation
from lightning_modules.ppiformer.checkpoint import from_published, to_published
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.losses import masked_loss
from lightning_modules.ppiformer.readout import Mutations, masked_marginals, wt_marginals
from lightning_modules.ppiformer.residues import class_weights, one_hot
from lightning_modules.ppiformer.tensor_product import (
    ROTATION_CONSTANTS,
    basis_from_constants,
    rotate_degree_one,
    rotation_constants,
)

MODELS = ["model_small", "model_radius"]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-4)], ids=["double", "single"]
)
@pytest.mark.parametrize("name", MODELS)
def test_outputs(published, name, dtype, tolerance):
    model = published(name, dtype)
    z = model.data
    scalars, vectors = model.embed(one_hot(model.batch.types, dtype))
    tight = 1e-12 if dtype == torch.float64 else tolerance
    np.testing.assert_allclose(scalars.detach(), z["type0"], atol=tight)
    np.testing.assert_allclose(vectors.detach(), z["type1"], atol=tight)
    logits = model.classifier(scalars).detach()
    np.testing.assert_allclose(logits, z["logits_unmasked"], atol=tolerance)
    masked = torch.from_numpy(z["masked"])
    hidden = model.classifier(model.embed(torch.from_numpy(z["f_masked"]).to(dtype))[0])
    np.testing.assert_allclose(hidden[masked].detach(), z["ssl_logits_masked"], atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(published, name):
    model = published(name)
    z = model.data
    masked = torch.from_numpy(z["masked"])
    logits = model.classifier(model.embed(torch.from_numpy(z["f_masked"]).double())[0])
    loss = masked_loss(
        logits[masked],
        model.batch.types[masked],
        model.batch.batch[masked],
        len(z["n_nodes"]),
        class_weights("published"),
        label_smoothing=0.05,
    )
    assert loss.per_graph.mean().item() == pytest.approx(float(z["ssl_loss"]), abs=1e-8)
    perplexity = loss.reference_perplexity.mean().item()
    assert perplexity == pytest.approx(float(z["ssl_perplexity"]), abs=1e-7)
    loss.per_graph.mean().backward()
    gradients = to_published(
        {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in _named(model)}
    )
    compared = [k for k in z.files if k.startswith("grad:")]
    assert len(compared) >= 8
    for key in compared:
        got = gradients[key[5:]]
        np.testing.assert_allclose(got, z[key].reshape(got.shape), atol=1e-9, err_msg=key)


def _named(model):
    yield from model.named_parameters()
    yield "encoder.constants", model.encoder.constants


def points_of(z, batch):
    """Mutations of the file as nodes and types."""
    index = {
        (str(c), int(n), str(i), int(g)): row
        for row, (c, n, i, g) in enumerate(
            zip(z["chain"], z["resnum"], z["ins"], batch.batch.tolist(), strict=True)
        )
    }
    sets = []
    for text, graph in zip(z["mut"].tolist(), z["mut_graph"].tolist(), strict=True):
        sets.append([(index[(*p.key, graph)], p.mutant) for p in parse_mutation(text)])
    mutations = Mutations.of(batch.types, sets)
    return mutations._replace(mutation_graph=torch.from_numpy(z["mut_graph"]))


@pytest.mark.parametrize("name", MODELS)
def test_ddg(published, name):
    model = published(name)
    z = model.data
    mutations = points_of(z, model.batch)

    def encode(features):
        return model.embed(features)[0]

    with torch.no_grad():
        masked = masked_marginals(encode, model.classifier, mutations)
        wild = wt_marginals(encode, model.classifier, mutations)
    np.testing.assert_allclose(masked, z["ddg_masked_marginals"], atol=1e-8)
    np.testing.assert_allclose(wild, z["ddg_wt_marginals"], atol=1e-8)
    error = (masked - torch.from_numpy(z["ddg_true"]).double()).square().mean()
    assert error.item() == pytest.approx(float(z["ddg_loss"]), abs=1e-7)


def test_degree_one_map(reference):
    z = np.load(reference / "tensor_product_degree1.npz")
    unit = torch.from_numpy(z["rel_pos"])
    unit = (unit / unit.norm(dim=1, keepdim=True))[:, :, None]
    vectors = torch.from_numpy(z["v"])[:, :, None]
    read = rotation_constants(torch.from_numpy(z["basis_1_1"]).double())
    for constants, tolerance in (
        (read, 1e-12),
        (torch.tensor(ROTATION_CONSTANTS, dtype=torch.float64), 1e-7),
    ):
        out = rotate_degree_one(vectors, unit, constants)[..., 0]
        np.testing.assert_allclose(out, z["out_1_to_1"], atol=tolerance)
    straight = torch.from_numpy(z["s"])[:, None] * unit[..., 0]
    np.testing.assert_allclose(straight, z["out_0_to_1"], atol=1e-12)
    along = (vectors * unit).sum((1, 2))
    np.testing.assert_allclose(along, z["out_1_to_0"], atol=1e-12)


def test_signs_of_the_basis_are_read():
    """Another sign of the singular vectors is another, equally valid, set of constants."""
    constants = torch.tensor([-0.76, 0.21, 0.41], dtype=torch.float64)
    assert torch.allclose(rotation_constants(basis_from_constants(constants)), constants)


def test_published_size_and_layout(reference):
    torch.manual_seed(0)
    layout = json.loads((reference / "published_checkpoint_layout.json").read_text())
    model = nn.Module()
    model.encoder = SE3Encoder(last_layer_scalar_only=False)
    model.classifier = nn.Linear(128, 20)
    assert sum(p.numel() for p in model.encoder.parameters()) == 12_330_786
    assert sum(p.numel() for p in model.classifier.parameters()) == 2_580
    published = to_published(model.state_dict())
    assert {k: list(v.shape) for k, v in published.items()} == layout["shapes"]
    back = from_published(published)
    for key, value in model.state_dict().items():
        assert torch.equal(back[key].to(value.dtype), value), key


def test_vector_branch_of_the_last_layer_is_left_out(published):
    """The same scalars, 455,424 parameters fewer, and no parameter without gradient."""
    model = published("model_small")
    full = sum(p.numel() for p in SE3Encoder(last_layer_scalar_only=False).parameters())
    assert full - sum(p.numel() for p in SE3Encoder().parameters()) == 455_424
    slim = SE3Encoder((16, 8), (20, 1), 2, 2, (8, 4), 16, 4).double()
    holder = nn.Module()
    holder.encoder, holder.classifier = slim, nn.Linear(16, 20).double()
    from lightning_modules.ppiformer.checkpoint import load_weights

    load_weights(holder, model.state())
    b = model.batch
    scalars, vectors = slim(one_hot(b.types, torch.float64), b.vectors, b.chain, model.geometry)
    assert vectors is None
    np.testing.assert_allclose(scalars.detach(), model.data["type0"], atol=1e-12)
    scalars.square().sum().backward()
    assert all(p.grad is not None for p in slim.parameters())


def test_state_dict_names_cover_the_reference(published):
    model = published("model_small")
    names = {k for k in model.state() if not re.search(r"\.beta$", k)}
    assert names <= set(to_published(model.state_dict()))
