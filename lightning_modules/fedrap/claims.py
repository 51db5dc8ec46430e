"""The scaled-down claims: what the paper reports, what it rests on, and where the method helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_modules.fedrap.ranking import hits, rank_among, rank_in_catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from lightning_modules.reproduce import Lab

MODEL, DATA = "--model.init_args.", "--data.init_args."
# Only the state after the last round is looked at.
QUICK = (
    "--trainer.limit_val_batches=0",
    "--checkpoint.save_top_k=0",
    "--checkpoint.save_last=false",
)
STRICT = f"{DATA}negative_pool=train_only"
AS_PUBLISHED = (
    f"{MODEL}personal_std=1.0",
    f"{MODEL}lr_personal=200.0",
    f"{MODEL}wd_personal=1e-5",
)


def _test(lab: Lab, config: str, *words: str) -> dict[str, float]:
    """Train, then the metrics of the test items after the last round."""
    run = lab.fit(f"fedrap/{config}.yaml", *QUICK, *words)
    (metrics,) = run.trainer.test(run.model, run.datamodule, verbose=False)
    return {name: float(value) for name, value in metrics.items()}


def own_frequency(data: Any) -> float:
    """HR@10 of ranking the items by how often the client itself has taken them."""
    whole = data.train_set[list(range(len(data.train_set)))]
    user = whole.client.repeat_interleave(whole.offsets.diff())
    counts = torch.zeros(data.n_users, data.n_items, dtype=torch.float64)
    counts.index_put_((user, whole.positive), torch.ones(len(user)).double(), accumulate=True)
    # Ties are broken by popularity.
    counts += torch.as_tensor(data.item_counts) * 1e-9
    held_out = data.test_set[list(range(len(data.test_set)))]
    nothing = torch.zeros_like(counts, dtype=torch.bool)
    return float(hits(rank_in_catalogue(counts, held_out.target, nothing), 10).mean())


def never_called_wrong(lab: Lab, pool: str, rounds: int) -> float:
    """HR@10 among 99 of ranking by how rarely an item was a training negative: no model at all.

    Args:
        lab: Builds the data.
        pool: Pool of the negatives.
        rounds: Rounds of negatives that are looked at.
    """
    data = lab.build(  # as in `leaking_negatives.yaml`
        "datamodules.Interactions",
        max_items=400,
        user_items=[20, 120],
        max_users=200,
        negative_pool=pool,
    )
    everyone = list(range(data.n_users))
    drawn = torch.zeros(data.n_users, data.n_items)
    for number in range(rounds):
        data.train_set.set_epoch(number)
        batch = data.train_set[everyone]
        user = batch.client.repeat_interleave(batch.offsets.diff())[:, None]
        ones = torch.ones_like(batch.negative, dtype=drawn.dtype)
        drawn.index_put_((user.expand_as(batch.negative), batch.negative), ones, accumulate=True)
    held_out = data.test_set[everyone]
    target = -drawn.gather(1, held_out.target[:, None])[:, 0]
    return float(hits(rank_among(target, -drawn.gather(1, held_out.negative)), 10).mean())


def reproduce(lab: Lab) -> None:
    """Measure all claims."""
    panels = {
        "Published protocol on purchases\n(99 sampled items)": _leak(lab),
        "Planted tastes, strict negatives\n(99 sampled items)": _planted(lab),
        "Next purchase, strict negatives\n(all 400 products)": _purchases(lab),
    }
    lab.figure("hit_rates", bars(panels))


def bars(panels: Mapping[str, Mapping[str, tuple[float, ...]]]) -> Figure:
    """Hit rates side by side.

    Args:
        panels: Title → name of a method → one hit rate, or two: leaking and strict negatives.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for ax, (title, rates) in zip(axes, panels.items(), strict=True):
        count = max(len(values) for values in rates.values())
        colours = ("#a4161a", "#1b6ca8") if count == 2 else ("#1b6ca8",)
        labels = ("leaking negatives", "strict negatives") if count == 2 else (None,)
        for part in range(count):
            heights = [values[part] for values in rates.values()]
            places = [i + (part - (count - 1) / 2) * 0.38 for i in range(len(rates))]
            drawn = ax.bar(places, heights, 0.36, color=colours[part], label=labels[part])
            ax.bar_label(drawn, fmt="%.3f", fontsize=8, padding=2)
        ax.set_xticks(range(len(rates)), list(rates), fontsize=9)
        ax.set_title(title, fontsize=10)
        ax.set_ylabel("HR@10")
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(y=0.2)
        if count == 2:
            ax.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    plt.close(figure)
    return figure


def _leak(lab: Lab) -> dict[str, tuple[float, ...]]:
    """The published protocol, and what remains of it with strict negatives."""
    key = "test/hr_paper"
    table: dict[str, list[float]] = {}
    for mode in ("additive", "local_only", "global_only"):
        word = f"{MODEL}mode={mode}"
        table[mode] = [
            _test(lab, "leaking_negatives", word, *more)[key] for more in ((), (STRICT,))
        ]
    lab.claim(
        "purchases, published protocol: FedRAP HR@10",
        table["additive"][0],
        at_least=0.95,
        published="authors' log on ML-100K, rounds 93 to 96: .986 to .989",
    )
    lab.claim(
        "purchases, published protocol: HR@10 of a shared table alone",
        table["global_only"][0],
        at_most=0.25,
    )
    lab.claim(
        "purchases, published protocol: HR@10 of clients that send nothing",
        table["local_only"][0],
        at_least=0.95,
    )
    lab.claim("purchases, strict negatives: FedRAP HR@10", table["additive"][1], at_most=0.25)
    memory = [never_called_wrong(lab, pool, 20) for pool in ("unobserved", "train_only")]
    lab.claim(
        "purchases, published protocol: HR@10 of counting negatives, no model",
        memory[0],
        at_least=0.95,
    )
    rows = ", ".join(
        f"{mode} {leaking:.3f} with leaking and {strict:.3f} with strict negatives"
        for mode, (leaking, strict) in table.items()
    )
    lab.note(f"The leak side by side, HR@10 among 99 sampled items (chance .100): {rows}.")
    lab.note(
        "No model, items ranked by how rarely they were a training negative in 20 rounds: "
        f"{memory[0]:.3f} with leaking and {memory[1]:.3f} with strict negatives."
    )
    return {
        "FedRAP": tuple(table["additive"]),
        "clients\nalone": tuple(table["local_only"]),
        "shared\ntable": tuple(table["global_only"]),
        "no model:\ncounting": tuple(memory),
    }


def _planted(lab: Lab) -> dict[str, tuple[float, ...]]:
    """Items new to the user, strict negatives, hidden tastes that are there to be found."""
    key = "test/hr_paper"
    restrained = _test(lab, "planted")[key]
    published = _test(lab, "planted", *AS_PUBLISHED)[key]
    popularity = _test(lab, "planted", f"{MODEL}mode=popularity", "--trainer.max_epochs=1")[key]
    lab.claim("planted tastes, strict: HR@10 of the restrained form", restrained, at_least=0.5)
    lab.claim(
        "planted tastes, strict: restrained form over popularity",
        restrained - popularity,
        at_least=0.1,
    )
    lab.claim("planted tastes, strict: HR@10 of the published form", published, at_most=0.25)
    lab.note(
        f"Planted tastes, strict negatives, HR@10: restrained {restrained:.3f}, as published "
        f"{published:.3f}, popularity {popularity:.3f}."
    )
    return {
        "restrained": (restrained,),
        "as\npublished": (published,),
        "popularity": (popularity,),
    }


def _purchases(lab: Lab) -> dict[str, tuple[float, ...]]:
    """Next purchase of real customers among all products, repeats included."""
    key = "test/hr"
    additive = lab.fit("fedrap/default.yaml", *QUICK)
    (metrics,) = additive.trainer.test(additive.model, additive.datamodule, verbose=False)
    ours = float(metrics[key])
    shared = _test(lab, "default", f"{MODEL}mode=global_only")[key]
    alone = _test(
        lab,
        "default",
        f"{MODEL}mode=local_only",
        f"{MODEL}personal_std=1.0",
        f"{MODEL}lr_personal=100.0",
        f"{MODEL}wd_personal=1e-5",
    )[key]
    popularity = _test(lab, "default", f"{MODEL}mode=popularity", "--trainer.max_epochs=1")[key]
    frequency = own_frequency(additive.datamodule)
    lab.claim("next purchase, strict: FedRAP over a shared table", ours - shared, at_least=0.05)
    lab.claim("next purchase, strict: FedRAP over popularity", ours - popularity, at_least=0.05)
    lab.claim("next purchase, strict: FedRAP over clients alone", ours - alone, at_least=-0.01)
    lab.note(
        f"Next purchase among all products, HR@10 on test: FedRAP {ours:.3f}, shared table "
        f"{shared:.3f}, clients alone {alone:.3f}, popularity {popularity:.3f}, the client's own "
        f"frequencies (no learning at all) {frequency:.3f}."
    )
    return {
        "FedRAP": (ours,),
        "shared\ntable": (shared,),
        "clients\nalone": (alone,),
        "popularity": (popularity,),
        "own\ncounts": (frequency,),
    }
