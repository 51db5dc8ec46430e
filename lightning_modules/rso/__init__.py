"""Statistical rejection sampling preference optimisation, with DPO, SLiC, IPO, RAFT and ReST."""

from lightning_modules.rso.candidates import PairOptions
from lightning_modules.rso.losses import implicit_reward, preference_loss
from lightning_modules.rso.module import RSO
from lightning_modules.rso.optimal_policy import (
    beta_for_sample_size,
    effective_sample_size,
    optimal_policy,
    policy_value,
)
from lightning_modules.rso.pairing import by_scores, play
from lightning_modules.rso.pipeline import PairPipeline, Provenance, write_pairs
from lightning_modules.rso.policies import LanguagePolicy, TabularPolicy, TiltPolicy
from lightning_modules.rso.rejection_sampling import rejection_law, rejection_trace, select
from lightning_modules.rso.stages import RewardRanking, SupervisedFineTuning

__all__ = [
    "RSO",
    "LanguagePolicy",
    "PairOptions",
    "PairPipeline",
    "Provenance",
    "RewardRanking",
    "SupervisedFineTuning",
    "TabularPolicy",
    "TiltPolicy",
    "beta_for_sample_size",
    "by_scores",
    "effective_sample_size",
    "implicit_reward",
    "optimal_policy",
    "play",
    "policy_value",
    "preference_loss",
    "rejection_law",
    "rejection_trace",
    "select",
    "write_pairs",
]
