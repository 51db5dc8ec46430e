"""From selected responses to labelled pairs: first round, tournament, best against worst."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.language.counter import counter_uniform, purpose

RANKINGS = ("first_round", "tournament", "best_worst")
LABELS = ("argmax", "bt_sample")


class Match(NamedTuple):
    """One comparison: which prompt (row), winner and loser (candidates), log-odds of the winner."""

    prompt: int
    winner: int
    loser: int
    logit: float


Prefer = Callable[[list[int], list[int], list[int]], Tensor]
"""Log-odds `(matches,)` that the first candidate beats the second, of (prompts, first, second)."""


def check_pairing(ranking: str, label: str, min_margin: float) -> None:
    """Raise a `ValueError` on arguments that cannot be meant."""
    if ranking not in RANKINGS:
        raise ValueError(f"ranking must be one of {', '.join(RANKINGS)}, got '{ranking}'")
    if label not in LABELS:
        raise ValueError(f"label must be one of {', '.join(LABELS)}, got '{label}'")
    if min_margin < 0:
        raise ValueError(f"min_margin must be >= 0, got {min_margin}")


def shuffled(selected: Sequence[Sequence[int]], index: Tensor, seed: int) -> list[list[int]]:
    """Every prompt's selected candidates in a random order, fixed by (seed, prompt index)."""
    width = max((len(row) for row in selected), default=0)
    if not width:
        return [[] for _ in selected]
    noise = counter_uniform(
        seed, purpose("pairing"), index[:, None], torch.arange(width, device=index.device)[None]
    ).tolist()
    return [
        [c for _, c in sorted(zip(u, row, strict=False), key=lambda item: item[0])]
        for u, row in zip(noise, selected, strict=True)
    ]


def play(
    order: Sequence[Sequence[int]],
    prefer: Prefer,
    ranking: str = "first_round",
    label: str = "argmax",
    seed: int = 0,
    index: Tensor | None = None,
    scores: Tensor | None = None,
    min_margin: float = 0.0,
) -> list[Match]:
    """Pair and label the candidates of all prompts, one call of the judge per round.

    Args:
        order: Candidates of every prompt in the order in which they are paired.
        prefer: The judge, rho as log-odds.
        ranking: `first_round` pairs (1, 2), (3, 4), ... and drops an odd one; `tournament` lets
            winners go on, an odd one passes to the next round at the end of the list;
            `best_worst` pairs the candidates with the largest and smallest score.
        label: `argmax` (the one rho prefers) or `bt_sample` (drawn with the odds of rho, which the
            maximum-likelihood argument needs).
        seed: Seed of `bt_sample`.
        index: `(prompts,)` global indices, for `bt_sample`; default 0, 1, ...
        scores: `(prompts, candidates)`, for `best_worst`.
        min_margin: Drop pairs whose |log-odds| is smaller. They still decide a tournament.

    Returns:
        Matches by prompt, in order of play.
    """
    check_pairing(ranking, label, min_margin)
    index = torch.arange(len(order)) if index is None else index.cpu()
    if ranking == "best_worst":
        if scores is None:
            raise ValueError("ranking=best_worst needs the scores of the candidates")
        table = scores.tolist()
        order = [
            [max(row, key=lambda c: line[c]), min(row, key=lambda c: line[c])] if row else []
            for row, line in zip(order, table, strict=True)
        ]
        order = [row if len(set(row)) > 1 else [] for row in order]
    matches: list[list[Match]] = [[] for _ in order]
    alive = [list(row) for row in order]
    turn = 0
    while True:
        prompts, first, second = [], [], []
        for prompt, row in enumerate(alive):
            for k in range(0, len(row) - 1, 2):
                prompts.append(prompt)
                first.append(row[k])
                second.append(row[k + 1])
        if not prompts:
            break
        logits = prefer(prompts, first, second).double().cpu()
        if label == "argmax":
            wins = (logits >= 0).tolist()
        else:
            u = counter_uniform(
                seed, purpose("label"), index[torch.tensor(prompts)], turn,
                torch.tensor(first), torch.tensor(second),
            )  # fmt: skip
            wins = (u < logits.sigmoid()).tolist()
        survivors: list[list[int]] = [[] for _ in order]
        rows = zip(prompts, first, second, wins, logits.tolist(), strict=True)
        for prompt, a, b, win, logit in rows:
            winner, loser = (a, b) if win else (b, a)
            survivors[prompt].append(winner)
            if abs(logit) >= min_margin:
                matches[prompt].append(Match(prompt, winner, loser, logit if win else -logit))
        if ranking != "tournament":
            break
        for prompt, row in enumerate(alive):
            if len(row) % 2:
                survivors[prompt].append(row[-1])
        alive = survivors
        turn += 1
    return [match for row in matches for match in row]


def by_scores(scores: Tensor) -> Prefer:
    """A judge that knows pointwise rewards: rho = sigma(r(y1) - r(y2)).

    Args:
        scores: `(prompts, candidates)`.
    """

    def prefer(prompts: list[int], first: list[int], second: list[int]) -> Tensor:
        row = torch.tensor(prompts, device=scores.device)
        return (
            scores[row, torch.tensor(first, device=scores.device)]
            - scores[row, torch.tensor(second, device=scores.device)]
        )

    return prefer


def rest_targets(
    scores: Tensor, threshold: float = 0.7, per_prompt: bool = False
) -> list[list[int]]:
    """ReST: candidates whose reward, min-max normalised over all of them, is above the threshold.

    Args:
        scores: `(prompts, candidates)`.
        threshold: In [0, 1).
        per_prompt: Normalise every prompt by itself, so that each has a target.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be in [0, 1), got {threshold}")
    low, high = scores.aminmax(dim=-1, keepdim=True)
    if not per_prompt:
        low, high = low.min(), high.max()
    normed = (scores - low) / (high - low).clamp(min=torch.finfo(scores.dtype).tiny)
    return [row.nonzero().flatten().tolist() for row in normed > threshold]


def raft_targets(scores: Tensor) -> list[list[int]]:
    """RAFT: the best candidate of every prompt; `(prompts, candidates)` scores."""
    return [[int(best)] for best in scores.argmax(-1)]
