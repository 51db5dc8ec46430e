"""ddG from residue probabilities."""

import copy

import pytest
import torch

from lightning_modules.ppiformer import Scoring, ensemble_ddg
from lightning_modules.ppiformer.baselines import BLOSUM62, blosum62, constant, unigram
from lightning_modules.ppiformer.readout import (
    Mutations,
    group_by_positions,
    masked_marginals,
    reversed_mutations,
)
from lightning_modules.ppiformer.search import beam_search


def with_sets(b, sets, graphs=None):
    m = Mutations.of(b.types, sets)
    for name in ("point_node", "point_type", "point_mutation", "mutation_graph"):
        setattr(b, name, getattr(m, name))
    if graphs is not None:
        b.mutation_graph = torch.tensor(graphs)
    return b


@pytest.fixture
def mutated(make_batch):
    return with_sets(
        make_batch(),
        [[(2, 3)], [(2, 7)], [(5, 1), (9, 4)], [(9, 4), (5, 2)], [(20, 0)], [(20, 5), (33, 6)]],
        [0, 0, 0, 0, 1, 1],
    )


def score(network, b, **options):
    def encode(features):
        return network.embed(b, features)

    with torch.no_grad():
        return masked_marginals(encode, network.classifier, b, **options)


def test_position_sets_share_a_pass(mutated):
    variants = group_by_positions(mutated)
    assert variants.number == 2
    assert variants.of_mutation.tolist() == [0, 0, 1, 1, 0, 1]


def test_grouped_equals_one_by_one(small_network, mutated):
    network = small_network()
    grouped = score(network, mutated)
    for options in ({"grouped": False}, {"max_variants": 1}, {"grouped": False, "max_variants": 3}):
        assert (score(network, mutated, **options) - grouped).abs().max() < 1e-12
    sets = [[(2, 3)], [(2, 7)], [(5, 1), (9, 4)], [(9, 4), (5, 2)]]
    for number, points in enumerate(sets):
        alone = score(network, with_sets(copy.copy(mutated), [points]))
        assert (alone[0] - grouped[number]).abs() < 1e-12


def test_antisymmetry_and_zero(small_network, mutated):
    network = small_network()
    forward = score(network, mutated)
    for number in (0, 2, 5):
        rows = mutated.point_mutation == number
        swapped = copy.copy(mutated)
        swapped.types = mutated.types.clone()
        nodes, types = mutated.point_node[rows], mutated.point_type[rows]
        swapped.types[nodes] = types
        points = list(zip(nodes.tolist(), mutated.types[nodes].tolist(), strict=True))
        back = score(network, with_sets(swapped, [points], [int(mutated.mutation_graph[number])]))
        assert (back[0] + forward[number]).abs() < 1e-12
    same = with_sets(copy.copy(mutated), [[(4, int(mutated.types[4]))]])
    assert score(network, same)[0] == 0


def test_order_of_points(small_network, mutated):
    network = small_network()
    a = score(network, with_sets(copy.copy(mutated), [[(5, 1), (9, 4)]]))
    b = score(network, with_sets(copy.copy(mutated), [[(9, 4), (5, 1)]]))
    assert (a - b).abs() < 1e-12


def test_embedding_difference_is_odd(small_network, mutated):
    network = small_network(read_out="embedding_difference")
    single = with_sets(copy.copy(mutated), [[(5, 1), (9, 4)], [(20, 3)]], [0, 1])
    forward = network.ddg(single)[0]
    back = network.ddg(reversed_mutations(single))[0]
    assert (forward + back).abs().max() < 1e-12
    assert forward.abs().min() > 1e-6
    with pytest.raises(ValueError, match="mutations_per_interface=1"):
        reversed_mutations(mutated)


@pytest.mark.parametrize("read_out", ["wt_marginals", "embedding_concatenation"])
def test_other_read_outs_are_not_antisymmetric(small_network, mutated, read_out):
    network = small_network(read_out=read_out)
    single = with_sets(copy.copy(mutated), [[(5, 1), (9, 4)]])
    total = network.ddg(single)[0] + network.ddg(reversed_mutations(single))[0]
    assert total.abs().item() > 1e-6
    network.ddg(single)[0].sum().backward()
    assert network.encoder.edge_embedding.weight.grad.abs().sum() > 0


def test_unbound_reference(small_network, make_batch):
    """A mutation in a complex whose sides are far apart has no binding effect."""
    b = with_sets(make_batch((20,)), [[(2, 3)], [(15, 6)]])
    b.position[b.partner == 1] += torch.tensor([500.0, 0, 0])
    from lightning_modules.ppiformer.geometry import nearest_neighbors

    b.neighbors, b.exists = nearest_neighbors(b.position, 9)
    network = small_network(scoring=Scoring(unbound=True))
    assert network.ddg(b)[0].abs().max() < 1e-10
    near = with_sets(make_batch((20,)), [[(2, 3)], [(15, 6)]])
    assert network.ddg(near)[0].abs().min() > 1e-6


def test_contexts_and_ensemble(small_network, mutated):
    network = small_network(scoring=Scoring(contexts=3, context_ratio=0.3))
    mean, spread = network.ddg(mutated)
    again, _ = network.ddg(mutated)
    assert torch.equal(mean, again)
    assert (spread > 0).all()
    plain = small_network()
    other = copy.deepcopy(plain)
    with torch.no_grad():
        other.classifier.weight.mul_(2)
    mean, spread = ensemble_ddg([plain, other], mutated)
    values = torch.stack([plain.ddg(mutated)[0], other.ddg(mutated)[0]])
    assert torch.allclose(mean, values.mean(0))
    assert torch.allclose(spread, values.std(0, correction=0))


def test_beam_search_finds_the_best(small_network, make_batch):
    network, b = small_network(), make_batch((12,))
    found = network.design(b, sites=[1, 4], size=2, width=400)
    best = found[0][1]
    types = b.types.tolist()
    pairs = [
        {(1, s), (4, t)} for s in range(20) for t in range(20) if s != types[1] and t != types[4]
    ]
    singles = [{(n, t)} for n in (1, 4) for t in range(20) if t != types[n]]
    with torch.no_grad():
        values = network.ddg(b, Mutations.of(b.types, [sorted(p) for p in pairs + singles]))[0]
    assert best.ddg == pytest.approx(values.min().item())
    assert [d.ddg for _, d in found] == sorted(d.ddg for _, d in found)


def test_beam_of_additive_scores():
    gain = {(n, t): n - t for n in range(4) for t in range(5)}
    found = beam_search(lambda sets: [sum(gain[p] for p in s) for s in sets], gain, 3, 4)
    assert found[0].ddg == (0 - 4) + (1 - 4) + (2 - 4)


def test_baselines(mutated):
    assert constant(0.7)(mutated).tolist() == pytest.approx([0.7] * 6)
    counts = torch.ones(20)
    counts[3] = 100
    odds = unigram(counts)(mutated)
    same = with_sets(copy.copy(mutated), [[(2, int(mutated.types[2]))]])
    assert unigram(counts)(same)[0] == 0
    if mutated.types[2] != 3:
        assert odds[0] < 0  # a frequent mutant is taken for an improvement
    assert torch.equal(BLOSUM62, BLOSUM62.T)
    assert blosum62(same)[0] == 0
    assert (blosum62(mutated) > 0).all()
