"""Equivariant product of node features and edge directions for degrees 0 and 1, in Cartesian form.

The radial matrix of an edge is never stored: its last linear map is contracted with node features
first, so the cost per edge is that of the 64 hidden values of the radial network and not that of
the 18,432 weights they would produce.

Inside the network scalars are (nodes, variants, channels) and vectors (nodes, variants, 3,
channels): channels last.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_modules.ppiformer.geometry import Geometry

ROTATION_CONSTANTS = (3**-0.5 + 30**-0.5, 3**-0.5 - 2 * 30**-0.5, -(6**-0.5))
"""(alpha, beta, gamma) of the degree 1 to 1 map ``alpha v_perp + beta v_par + gamma r x v``."""

PAIRS = ((0, 0), (1, 0), (0, 1), (1, 1))
"""(input degree, output degree), in the order in which the radial networks are stacked."""


def rotation_constants(basis: Tensor) -> Tensor:
    """alpha, beta, gamma from the 3 x 3 buffer ``basis:(1,1)`` of a published checkpoint.

    The signs of that buffer come from a singular value decomposition and may differ from file to
    file, so they must be read and not assumed.

    Args:
        basis: (3, 3).

    Returns:
        (3,), same dtype.
    """
    if basis.shape != (3, 3):
        raise ValueError(f"basis must have shape (3, 3), got {tuple(basis.shape)}")
    return torch.stack([basis[0, 0] + basis[0, 2], basis[1, 0] + basis[1, 2], basis[0, 1]])


def basis_from_constants(constants: Tensor) -> Tensor:
    """A 3 x 3 ``basis:(1,1)`` buffer with the given constants (inverse of `rotation_constants`)."""
    alpha, beta, gamma = constants
    basis = constants.new_zeros(3, 3)
    basis[0, 0] = basis[2, 2] = alpha / 2
    basis[0, 2] = basis[2, 0] = alpha / 2
    basis[1, 0] = basis[1, 2] = beta / 2
    basis[0, 1], basis[2, 1] = gamma, -gamma
    return basis


def rotate_degree_one(vectors: Tensor, unit: Tensor, constants: Tensor) -> Tensor:
    """The degree 1 to 1 map ``T v = alpha (v - (v.r) r) + beta (v.r) r + gamma (r x v)``.

    Args:
        vectors: (..., 3, channels).
        unit: broadcastable to (..., 3, 1), direction r from sender to receiver.
        constants: (3,), alpha, beta, gamma.

    Returns:
        Same shape as ``vectors``.
    """
    vectors = vectors.to(torch.promote_types(vectors.dtype, unit.dtype))
    alpha, beta, gamma = constants.to(vectors.dtype).unbind()
    along = (vectors * unit).sum(-2, keepdim=True)
    turned = torch.linalg.cross(unit.expand_as(vectors), vectors, dim=-2)
    result: Tensor = alpha * vectors + (beta - alpha) * along * unit + gamma * turned
    return result


class Regroup(torch.autograd.Function):
    """Rows in another order, where every row is wanted at most once.

    The gradient is then a gather as well, without the scattered sums of ordinary indexing.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """`rows[..., index, :]`, with zeros where the index is one past the last row."""
        ctx.save_for_backward(index, inverse)
        return functional.pad(rows, (0, 0, 0, 1)).index_select(-2, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The inverse regrouping."""
        index, inverse = ctx.saved_tensors
        return regroup(gradients[0], inverse, index), None, None


def regroup(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """See `Regroup`."""
    result: Tensor = Regroup.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return result


class Linear(nn.Module):
    """Channel mixing of one degree without bias, initialised N(0, 1) / sqrt(inputs), or zero."""

    def __init__(self, inputs: int, outputs: int, zero: bool = False) -> None:
        super().__init__()
        weight = (
            torch.zeros(inputs, outputs)
            if zero
            else torch.randn(inputs, outputs) / math.sqrt(inputs)
        )
        self.weight = nn.Parameter(weight)

    def forward(self, features: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return features @ self.weight


def split_channels(channels: int) -> tuple[int, int]:
    """Output channels fed by input degree 0 and by degree 1; the first group is the larger."""
    return channels - channels // 2, channels // 2


class RadialNetworks(nn.Module):
    """The hidden layers of several radial networks, evaluated together.

    Each is Linear-SiLU-LN-Linear-SiLU-LN with a scale and no shift in the normalisations.

    Args:
        networks: how many.
        inputs: edge features (embedding of the chain token and the distance).
        hidden: width.
    """

    def __init__(self, networks: int, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

        def uniform(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))

        self.weight_in = uniform(networks, hidden, inputs, fan_in=inputs)
        self.bias_in = uniform(networks, hidden, fan_in=inputs)
        self.scale_in = nn.Parameter(torch.ones(networks, hidden))
        self.weight_hidden = uniform(networks, hidden, hidden, fan_in=hidden)
        self.bias_hidden = uniform(networks, hidden, fan_in=hidden)
        self.scale_hidden = nn.Parameter(torch.ones(networks, hidden))

    def forward(self, edge: Tensor) -> Tensor:
        """(edges, inputs) to (networks, edges, hidden + 1); the last value is 1, for the bias."""
        shape = (self.hidden,)
        value = edge @ self.weight_in.transpose(1, 2) + self.bias_in[:, None]
        value = functional.layer_norm(functional.silu(value), shape) * self.scale_in[:, None]
        value = torch.baddbmm(self.bias_hidden[:, None], value, self.weight_hidden.transpose(1, 2))
        value = functional.layer_norm(functional.silu(value), shape) * self.scale_hidden[:, None]
        return functional.pad(value, (0, 1), value=1.0)


class TensorProduct(nn.Module):
    """Edge messages from sums of receiver and sender features, weighted by radial networks.

    Args:
        inputs: channels of degree 0 and 1.
        outputs: channels of degree 0 and 1; a 0 for degree 1 leaves the vector outputs out.
        edge_inputs: edge features.
        hidden: width of the radial networks.
    """

    def __init__(
        self, inputs: tuple[int, int], outputs: tuple[int, int], edge_inputs: int, hidden: int
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        degrees = (0, 1) if outputs[1] else (0,)
        self.pairs = tuple(pair for pair in PAIRS if pair[1] in degrees)
        self.receiver = nn.ModuleList(Linear(width, width) for width in inputs)
        self.sender = nn.ModuleList(Linear(width, width) for width in inputs)
        self.radial = RadialNetworks(len(self.pairs), edge_inputs, hidden)
        # (inputs, hidden + 1, group): the layout of the product below, so that no transpose is made
        # in the forward pass.
        self.kernels = nn.ParameterList(
            torch.empty(inputs[i], hidden + 1, split_channels(outputs[o])[i]).uniform_(
                -(hidden**-0.5), hidden**-0.5
            )
            for i, o in self.pairs
        )
        self.self_slot = nn.ModuleList(Linear(inputs[d], outputs[d]) for d in degrees)
        self.out = nn.ModuleList(Linear(outputs[d], outputs[d]) for d in degrees)

    def _contract(self, kernel: Tensor, features: Tensor) -> Tensor:
        """(nodes, columns, inputs) with a kernel to (nodes, hidden + 1, columns * group)."""
        nodes, columns, width = features.shape
        hidden, group = kernel.shape[1:]
        product = (features.reshape(-1, width) @ kernel.reshape(width, -1)).view(
            nodes, columns, hidden, group
        )
        return product.transpose(1, 2).reshape(nodes, hidden, columns * group)

    def messages(
        self, scalars: Tensor, vectors: Tensor, edge: Tensor, geometry: Geometry
    ) -> list[Tensor]:
        """Per pair the radial matrix times the summed features of both ends, without direction.

        Returns:
            For each pair (nodes, k, variants, group) or (nodes, k, variants, 3, group) for input
            degree 1.
        """
        nodes, variants = scalars.shape[:2]
        k = geometry.neighbors.shape[1]
        hidden = self.radial(edge.reshape(nodes * k, -1))
        order = geometry.by_sender.reshape(-1)
        grouped = regroup(hidden, order, geometry.slot).unbind(0)
        radial = hidden.unbind(0)
        columns = (scalars, vectors.flatten(1, 2))
        receivers = [linear(x) for linear, x in zip(self.receiver, columns, strict=True)]
        senders = [linear(x) for linear, x in zip(self.sender, columns, strict=True)]
        results = []
        for index, ((degree, _), kernel) in enumerate(zip(self.pairs, self.kernels, strict=True)):
            phi = radial[index].view(nodes, k, -1)
            phi_sender = grouped[index].view(nodes, -1, phi.shape[-1])
            received = torch.bmm(phi, self._contract(kernel, receivers[degree]))
            sent = torch.bmm(phi_sender, self._contract(kernel, senders[degree]))
            sent = regroup(sent.flatten(0, 1), geometry.slot, order).view_as(received)
            shape = (nodes, k, variants, 3, -1) if degree else (nodes, k, variants, -1)
            results.append((received + sent).view(shape))
        return results

    def forward(
        self, scalars: Tensor, vectors: Tensor, edge: Tensor, geometry: Geometry, constants: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Edge values of both degrees, before pooling and before the output map.

        Args:
            scalars: (nodes, variants, inputs[0]).
            vectors: (nodes, variants, 3, inputs[1]).
            edge: (nodes, k, edge_inputs).
            geometry: neighbours and directions.
            constants: (3,), alpha, beta, gamma.

        Returns:
            (nodes, k, variants, outputs[0]) and (nodes, k, variants, 3, outputs[1]) or None.
        """
        values = dict(zip(self.pairs, self.messages(scalars, vectors, edge, geometry), strict=True))
        unit = geometry.unit[:, :, None, :, None].to(scalars.dtype)
        degree_zero = torch.cat([values[0, 0], (values[1, 0] * unit).sum(-2)], dim=-1)
        if not self.outputs[1]:
            return degree_zero, None
        straight = values[0, 1].unsqueeze(-2) * unit
        return degree_zero, torch.cat(
            [straight, rotate_degree_one(values[1, 1], unit, constants)], dim=-1
        )
