"""Statistical rejection sampling of candidates, for many prompts at once.

The target is pi_r(y|x) proportional to pi_sft(y|x) exp(r(x,y)/beta); the candidates are samples of
pi_sft. If they were drawn at another temperature, the target is that sharpened policy tilted,
unless rewards are corrected first (`corrected_reward`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.components.language.counter import counter_uniform, purpose

MODES = ("paper", "iid", "gumbel_topk", "best_of_n", "sft")


class Selection(NamedTuple):
    """Accepted candidates.

    Attributes:
        indices: `(prompts, n)` int64, in order of acceptance, -1 where fewer were accepted.
        count: `(prompts,)` int64, how many were accepted.
        passes: `(prompts,)` int64, passes over the candidates (1 for one-shot modes).
    """

    indices: Tensor
    count: Tensor  # type: ignore[assignment]
    passes: Tensor

    def rows(self) -> list[list[int]]:
        """Accepted indices of every prompt as lists."""
        pairs = zip(self.indices.tolist(), self.count.tolist(), strict=True)
        return [row[:n] for row, n in pairs]


def check_sampler(mode: str, n_candidates: int, n_select: int, beta: float) -> None:
    """Raise a `ValueError` on arguments that cannot be meant."""
    if mode not in MODES:
        raise ValueError(f"sampler must be one of {', '.join(MODES)}, got '{mode}'")
    if n_select < 2:
        raise ValueError(f"n_select must be >= 2 to make a pair, got {n_select}")
    if n_select > n_candidates:
        raise ValueError(
            f"n_select={n_select} is more than n_candidates={n_candidates}: lower n_select"
        )
    if mode in ("paper", "iid", "gumbel_topk") and not beta > 0:
        raise ValueError(f"beta must be > 0 for sampler={mode}, got {beta}; beta=0 is best_of_n")


def check_rewards(rewards: Tensor, prompts: Sequence[int] | None = None) -> None:
    """Raise when a reward is NaN or infinite, naming the prompt and the candidate.

    Args:
        rewards: `(prompts, candidates)`.
        prompts: Index of every prompt in the data set.
    """
    bad = (~rewards.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        name = prompts[row] if prompts is not None else row
        raise ValueError(
            f"the reward of candidate {column} of prompt {name} is {rewards[row, column].item()}: "
            "check the reward model"
        )


def corrected_reward(
    reward: Tensor, logps: Tensor, sampling_logps: Tensor, beta: float | Tensor
) -> Tensor:
    """Rewards that undo a sharpened proposal q: r + beta (log pi_sft - log q).

    Rejection sampling from q with these has the target pi_sft exp(r/beta) on the support of q.
    All arguments `(prompts, candidates)`.
    """
    scale = torch.as_tensor(beta, dtype=reward.dtype, device=reward.device)
    if scale.dim():
        scale = scale[:, None]
    return reward + scale * (logps - sampling_logps)


def text_keys(responses: Sequence[Sequence[Hashable]]) -> Tensor:
    """Number the distinct responses of every prompt: `(prompts, candidates)` int64.

    Args:
        responses: Candidates of every prompt, as texts or tuples of token ids; equal lengths.
    """
    rows = []
    for candidates in responses:
        seen: dict[Hashable, int] = {}
        rows.append([seen.setdefault(candidate, len(seen)) for candidate in candidates])
    return torch.tensor(rows, dtype=torch.int64)


def collapse(keys: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Collapse equal candidates: the first position stays, the last reward wins.

    This is what an insertion-ordered map from response to reward does. On small response spaces it
    turns the proposal into "uniform over distinct samples".

    Args:
        keys: `(prompts, candidates)` int64, equal for equal responses.
        rewards: `(prompts, candidates)`.

    Returns:
        `(prompts, candidates)` bool, which stay, and the rewards with the winner's in their place.
    """
    number = keys.shape[1]
    position = torch.arange(number, device=keys.device)
    slots = keys.new_full(keys.shape, -1)
    # a key is below the number of candidates, so it can serve as a slot
    last = slots.scatter_reduce(1, keys, position.expand_as(keys), "amax", include_self=True)
    first = slots.fill_(number).scatter_reduce(
        1, keys, position.expand_as(keys), "amin", include_self=True
    )
    return first.gather(1, keys) == position, rewards.gather(1, last.gather(1, keys))


def select(
    rewards: Tensor,
    n_select: int,
    beta: float | Tensor,
    mode: str = "paper",
    seed: int = 0,
    index: Tensor | None = None,
    valid: Tensor | None = None,
    keys: Tensor | None = None,
    reward_bound: float | None = None,
) -> Selection:
    """Select candidates of all prompts at once.

    Args:
        rewards: `(prompts, candidates)`, in the random order in which they were drawn.
        n_select: Wanted number of every prompt.
        beta: Temperature of the target in units of the reward; a number or one per prompt.
        mode: `paper` (rejection in passes without replacement), `iid` (one pass over a stream of
            proposals, exact when `reward_bound` is the supremum), `gumbel_topk` (importance
            resampling without replacement in one operation), `best_of_n`, `sft` (the first ones).
        seed: The uniform number of (seed, prompt index, pass, candidate) decides.
        index: `(prompts,)` global indices of the prompts; default 0, 1, ...
        valid: `(prompts, candidates)` bool, candidates that exist; default all.
        keys: `(prompts, candidates)`; given, equal candidates are collapsed (not in `iid` and
            `sft`, whose law is that of the proposals).
        reward_bound: Supremum of the reward for `iid`; None takes the largest of the pool.
    """
    prompts, number = rewards.shape
    index = torch.arange(prompts, device=rewards.device) if index is None else index
    remaining = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.clone()
    if keys is not None and mode not in ("iid", "sft"):
        first, rewards = collapse(keys, rewards)
        remaining &= first
    position = torch.arange(number, device=rewards.device)
    everyone = torch.arange(prompts, device=rewards.device)

    def uniforms(turn: int, rows: Tensor) -> Tensor:
        key = index[rows][:, None]
        return counter_uniform(seed, purpose(f"select/{mode}"), turn, key, position[None])

    if mode == "paper":
        return rejection_passes(rewards, n_select, beta, remaining, uniforms)
    if mode == "iid":
        bound = (
            rewards.masked_fill(~remaining, -torch.inf).amax(-1, keepdim=True)
            if reward_bound is None
            else torch.as_tensor(reward_bound, dtype=rewards.dtype, device=rewards.device)
        )
        if bool(((rewards > bound) & remaining).any()):
            raise ValueError(
                f"reward_bound={reward_bound} is below a reward of {rewards.max().item():.6g}"
            )
        accepted = remaining & (uniforms(0, everyone) < _acceptance(rewards, bound, beta))
        return _first(accepted, n_select)
    if mode == "sft":
        return _first(remaining, n_select)
    if mode == "gumbel_topk":
        gumbel = -torch.log(-torch.log(uniforms(0, everyone).clamp(min=1e-300)))
        score = rewards.double() / _column(beta, rewards) + gumbel
    elif mode == "best_of_n":
        score = rewards
    else:
        raise ValueError(f"sampler must be one of {', '.join(MODES)}, got '{mode}'")
    score = score.masked_fill(~remaining, -torch.inf)
    order = score.argsort(dim=-1, descending=True, stable=True)[:, :n_select]
    count = remaining.sum(-1).clamp(max=n_select)
    keep = torch.arange(order.shape[1], device=order.device) < count[:, None]
    return Selection(order.where(keep, -1), count, torch.ones_like(count))


def rejection_passes(
    rewards: Tensor,
    n_select: int,
    beta: float | Tensor,
    remaining: Tensor,
    uniforms: Callable[[int, Tensor], Tensor],
) -> Selection:
    """The paper's Algorithm 1 for all prompts together: a loop over passes, tensors over prompts.

    In every pass r_max is the largest remaining reward, a remaining candidate is accepted if
    u < exp((r - r_max)/beta), and the pass ends as soon as enough are accepted. The best remaining
    one is accepted in each pass, so there are at most `n_select` passes.

    Args:
        rewards: `(prompts, candidates)`.
        n_select: Wanted number.
        beta: Number or `(prompts,)`.
        remaining: `(prompts, candidates)` bool, candidates that exist.
        uniforms: Gives the `(rows, candidates)` numbers in [0, 1) of a pass and prompts (rows).
    """
    prompts, number = rewards.shape
    device = rewards.device
    # the last column takes what a pass accepts after enough
    indices = torch.full((prompts, n_select + 1), -1, dtype=torch.int64, device=device)
    passes = torch.zeros(prompts, dtype=torch.int64, device=device)
    pool = rewards.contiguous() / _column(beta, rewards)
    pool.masked_fill_(~remaining, -torch.inf)
    # one entry for each row of the pool: its prompt, how many more it wants, how many it has
    active = torch.arange(prompts, device=device)
    wanted = remaining.sum(-1).clamp_(max=n_select)
    count = torch.zeros_like(wanted)
    for turn in range(n_select):
        more = (count < wanted).nonzero().view(-1)
        if not len(more):
            break
        if len(more) < len(active):
            pool, active, wanted, count = (
                x.index_select(0, more) for x in (pool, active, wanted, count)
            )
        passes.index_fill_(0, active, turn + 1)
        chance = (pool - pool.amax(-1, keepdim=True)).exp_()
        hit = (uniforms(turn, active) < chance).view(-1).nonzero().view(-1)
        row = hit // number
        accepted = torch.bincount(row, minlength=len(active))
        # place of a hit among those of its prompt; `nonzero` lists them prompt by prompt
        before = accepted.cumsum(0) - accepted
        place = torch.arange(len(hit), device=device) + (count - before).index_select(0, row)
        prompt = active.index_select(0, row)
        indices[prompt, place.clamp_(max=n_select)] = hit - row * number
        pool.view(-1).index_fill_(0, hit, -torch.inf)
        count += accepted
    indices = indices[:, :n_select].contiguous()
    return Selection(indices, (indices >= 0).sum(-1), passes)


def _column(beta: float | Tensor, like: Tensor) -> Tensor:
    scale = torch.as_tensor(beta, dtype=torch.float64, device=like.device)
    return scale[:, None] if scale.dim() else scale


def _acceptance(rewards: Tensor, bound: Tensor, beta: float | Tensor) -> Tensor:
    return ((rewards - bound).double() / _column(beta, rewards)).exp()


def _first(accepted: Tensor, n_select: int) -> Selection:
    place = accepted.cumsum(-1) - 1
    accepted = accepted & (place < n_select)
    indices = torch.full(
        (accepted.shape[0], n_select), -1, dtype=torch.int64, device=accepted.device
    )
    row, column = accepted.nonzero(as_tuple=True)
    indices[row, place[row, column]] = column
    count = accepted.sum(-1)
    return Selection(indices, count, torch.ones_like(count))


def rejection_trace(
    candidates: Sequence[Hashable],
    rewards: Sequence[float],
    n_select: int,
    beta: float,
    uniforms: Iterable[float],
) -> tuple[list[Hashable], int]:
    """Algorithm 1 for one prompt, step by step, with a given stream of uniform numbers.

    The plain form of `rejection_passes`: one number is used for each visited candidate.

    Returns:
        Accepted candidates in order, and the number of passes.
    """
    stream: Iterator[float] = iter(uniforms)
    pool: dict[Hashable, float] = {}
    for candidate, reward in zip(candidates, rewards, strict=True):
        pool[candidate] = float(reward)
    accepted: list[Hashable] = []
    passes = 0
    scale = torch.tensor(beta, dtype=torch.float64)
    while len(accepted) < n_select and pool:
        passes += 1
        bound = max(pool.values())
        taken: list[Hashable] = []
        for candidate, reward in pool.items():
            chance = torch.exp((torch.tensor(reward, dtype=torch.float64) - bound) / scale).item()
            if next(stream) < chance:
                taken.append(candidate)
                if len(accepted) + len(taken) == n_select:
                    break
        accepted += taken
        for candidate in taken:
            del pool[candidate]
    return accepted, passes


def rejection_law(
    rewards: Sequence[float], n_select: int, beta: float
) -> dict[tuple[int, ...], float]:
    """Exact law of the ordered accepted tuple of Algorithm 1, by enumeration (small pools).

    Args:
        rewards: Rewards of distinct candidates in their order.
        n_select: Wanted number.
        beta: Temperature, > 0.

    Returns:
        Probability of every tuple of indices that can be accepted.
    """
    import math

    law: dict[tuple[int, ...], float] = {}

    def walk(done: tuple[int, ...], pool: tuple[int, ...], chance: float) -> None:
        """One pass over `pool`, whose accepted ones join `done`."""
        if len(done) == n_select or not pool:
            law[done] = law.get(done, 0.0) + chance
            return
        bound = max(rewards[i] for i in pool)

        def visit(place: int, accepted: tuple[int, ...], p: float) -> None:
            if p == 0.0:
                return
            if len(done) + len(accepted) == n_select or place == len(pool):
                left = tuple(i for i in pool if i not in accepted)
                walk(done + accepted, left, p)
                return
            accept = math.exp((rewards[pool[place]] - bound) / beta)
            visit(place + 1, (*accepted, pool[place]), p * accept)
            visit(place + 1, accepted, p * (1 - accept))

        visit(0, (), chance)

    walk((), tuple(range(len(rewards))), 1.0)
    return law


def inclusion_probability(law: dict[tuple[int, ...], float], number: int) -> list[float]:
    """Chance of every candidate to be accepted, from the law of the tuples."""
    return [sum(p for accepted, p in law.items() if i in accepted) for i in range(number)]
