"""Interfaces whose energy is known: two model chains, a Potts energy, sequences sampled from it.

Everything that the network must learn has a known best value: the distribution of a residue given
all others, and the change of binding energy on mutation.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from datamodules.interfaces.graphs import Label, ResidueTable
from datamodules.interfaces.mutations import Point
from datamodules.interfaces.structure import RESIDUES, Floats, Integers
from lightning_modules.components.randomness import seed_from

STEP = 3.8
"""Distance of consecutive C-alphas in A."""
CLOSEST = 4.2
"""Smallest distance of any other pair in A."""
TIGHT = 1.0
"""Spread in A of the pull of every residue towards its chain's centre."""
TOUCHING = 0.8
"""Contact weight with the other chain above which a residue is mutated in the labels.

A choice that matters: see the documentation for what fine-tuning gives at other values.
"""
BLOCK = 20
"""Interfaces that are grown and sampled together."""
SIDE = 1.53
"""Length of the virtual C-beta vector in A."""


@dataclass(frozen=True)
class Energy:
    """Residue energies.

    Attributes:
        pair: (20, 20), symmetric; scaled by the contact weight.
        field: (20,).
    """

    pair: Floats
    field: Floats


def make_energy(seed: int) -> Energy:
    """Hydrophobic-like attraction along a random trait, and charges."""
    # of several draws one in which the unigram and the Bayes perplexity lie well apart at seed 0
    random = np.random.default_rng(seed_from(seed, "potts energy 47"))
    trait = np.clip(random.standard_normal(20), -1.8, 1.8)
    charge = np.array([{"D": -1, "E": -1, "K": 1, "R": 1}.get(code, 0) for code in RESIDUES])
    pair = -0.22 * np.outer(trait, trait) + 0.6 * np.outer(charge, charge)
    return Energy(pair, 0.25 * trait + 0.3 * random.standard_normal(20))


def _grow(random: np.random.Generator, count: int, length: int, gap: float) -> Floats:
    """(count, 2 * length, 3): two compact self-avoiding chains, all interfaces at once."""
    total = 2 * length
    done = np.zeros((count, total, 3))
    open_rows = np.arange(count)
    while len(open_rows):
        position = np.zeros((len(open_rows), total, 3))
        alive = np.ones(len(open_rows), dtype=bool)
        for i in range(total):
            centre = np.array([0.0, 0.0, gap * (i >= length)])
            direction = random.standard_normal((len(open_rows), 96, 3))
            direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
            start = i % length == 0
            origin = centre if start else position[:, i - 1, None]
            candidates = origin + direction * (2.0 if start else STEP)
            placed = position[:, : i if start else i - 1, None]
            near = np.linalg.norm(candidates[:, None] - placed, axis=-1)
            valid = (near >= CLOSEST).all(1)
            score = -((candidates - centre) ** 2).sum(-1) / (2 * TIGHT**2)
            score = score + random.gumbel(size=score.shape)
            score[~valid] = -np.inf
            alive &= valid.any(1)
            best = score.argmax(1)
            position[:, i] = candidates[np.arange(len(open_rows)), best]
        done[open_rows[alive]] = position[alive]
        open_rows = open_rows[~alive]
    return done


def _side_vectors(position: Floats, length: int) -> Floats:
    """(count, 2 * length, 3) vectors of length `SIDE` along the outward bisectors."""
    chains = position.reshape(len(position), 2, length, 3)
    padded = np.concatenate([chains[:, :, 1:2], chains, chains[:, :, -2:-1]], 2)
    outward = 2 * chains - padded[:, :, :-2] - padded[:, :, 2:]
    outward /= np.maximum(np.linalg.norm(outward, axis=-1, keepdims=True), 1e-9)
    return np.asarray((SIDE * outward).reshape(position.shape))


@dataclass(frozen=True)
class PottsInterfaces:
    """Sampled interfaces.

    Attributes:
        energy: what the sequences were drawn from.
        position: (interfaces, residues, 3) C-alpha in A.
        side: (interfaces, residues, 3) virtual C-beta vectors in A.
        contact: (interfaces, residues, residues) contact weights in [0, 1].
        chain: (residues,) 0 or 1.
        sequence: (interfaces, residues) residue types.
    """

    energy: Energy
    position: Floats
    side: Floats
    contact: Floats
    chain: Integers
    sequence: Integers

    def conditional(self) -> Floats:
        """(interfaces, residues, 20): exact distribution of each residue given all others."""
        return conditional(self.energy, self.contact, self.sequence)

    def table(self, number: int) -> ResidueTable:
        """Residues of one interface, chains A and B."""
        length = len(self.chain) // 2
        missing = np.full_like(self.position[number], np.nan)
        return ResidueTable(
            f"potts{number:05d}_A_B",
            self.position[number],
            missing,
            missing,
            self.sequence[number],
            np.array(["A", "B"])[self.chain],
            np.tile(np.arange(1, length + 1), 2),
            np.full(len(self.chain), "", dtype="U1"),
            side_vector=self.side[number],
        )

    def binding_ddg(self, number: int, node: int, mutant: int) -> float:
        """Change of the energy between the chains, of one interface and one substitution."""
        other = self.chain != self.chain[node]
        weight = self.contact[number, node, other]
        partners = self.sequence[number, other]
        wild = self.sequence[number, node]
        difference = self.energy.pair[mutant, partners] - self.energy.pair[wild, partners]
        return float(weight @ difference)

    def labels(self, number: int, count: int, seed: int) -> list[Label]:
        """`count` different single mutations at residues that touch the other chain."""
        table = self.table(number)
        other = self.chain[:, None] != self.chain[None, :]
        touching = np.flatnonzero((self.contact[number] * other).sum(1) > TOUCHING)
        random = np.random.default_rng(seed_from(seed, "potts labels", number))
        choices = len(touching) * 19
        picked = random.permutation(choices)[: min(count, choices)]
        labels = []
        for choice in picked.tolist():
            node = int(touching[choice // 19])
            wild = int(self.sequence[number, node])
            mutant = (wild + 1 + choice % 19) % 20
            point = Point(wild, table.keys[node], mutant)
            labels.append(Label((point,), self.binding_ddg(number, node, mutant), number))
        return labels


def conditional(energy: Energy, contact: Floats, sequence: Integers) -> Floats:
    """p(type of a residue | all others), (interfaces, residues, 20)."""
    cost = contact @ energy.pair[sequence] + energy.field
    weight = np.exp(-(cost - cost.min(-1, keepdims=True)))
    return np.asarray(weight / weight.sum(-1, keepdims=True))


def _gibbs(random: np.random.Generator, energy: Energy, contact: Floats, sweeps: int) -> Integers:
    """Sequences from exp(-E): every residue in turn, all interfaces at once."""
    count, residues = contact.shape[:2]
    sequence = random.integers(0, 20, (count, residues))
    rows = np.arange(count)
    for _ in range(sweeps):
        for i in range(residues):
            cost = np.einsum("br,bra->ba", contact[:, i], energy.pair[sequence]) + energy.field
            # the largest of -E + Gumbel noise is a draw from exp(-E)
            sequence[rows, i] = (random.gumbel(size=cost.shape) - cost).argmax(1)
    return sequence


@lru_cache(maxsize=4)
def sample_interfaces(
    count: int, seed: int = 0, length: int = 20, sweeps: int = 25, gap: float = 11.0
) -> PottsInterfaces:
    """Draw interfaces; the result is kept, so that a second call in one process costs nothing.

    Args:
        count: interfaces.
        seed: of energies, chains and sequences.
        length: residues per chain.
        sweeps: of the Gibbs sampler.
        gap: distance of the chains' centres in A.

    Raises:
        ValueError: for a count below 1 or chains of fewer than 3 residues.
    """
    if count < 1 or length < 3:
        raise ValueError(f"count must be >= 1 and length >= 3, got {count} and {length}")
    energy = make_energy(seed)
    # blocks with random numbers of their own: the first n interfaces don't depend on the count
    blocks = range(-(-count // BLOCK))
    drawn = [_sample_block(energy, seed, block, length, sweeps, gap) for block in blocks]
    position, side, contact, sequence = (
        np.concatenate(part)[:count] for part in zip(*drawn, strict=True)
    )
    chain = np.repeat(np.arange(2), length)
    return PottsInterfaces(energy, position, side, contact, chain, sequence)


def _sample_block(
    energy: Energy, seed: int, block: int, length: int, sweeps: int, gap: float
) -> tuple[Floats, Floats, Floats, Integers]:
    random = np.random.default_rng(seed_from(seed, "potts chains", block))
    position = _grow(random, BLOCK, length, gap)
    side = _side_vectors(position, length)
    chain = np.repeat(np.arange(2), length)
    beta = position + side
    distance = np.linalg.norm(beta[:, :, None] - beta[:, None], axis=-1)
    contact = 1 / (1 + np.exp((distance - 7) / 0.7))
    order = np.arange(2 * length)
    near: NDArray[np.bool_] = np.abs(order[:, None] - order[None]) < 3
    contact[:, near & (chain[:, None] == chain[None])] = 0.0
    return position, side, contact, _gibbs(random, energy, contact, sweeps)
