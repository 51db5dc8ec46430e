"""The claim on model interfaces whose energy, and so whose best predictor, is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_modules.ppiformer.evaluation import evaluate
from lightning_modules.ppiformer.output import scatter_figure
from lightning_modules.ppiformer.residues import one_hot

if TYPE_CHECKING:
    from lightning_modules.reproduce import Lab


def site_perplexity(network: Any, batch: Any) -> tuple[float, float]:
    """Perplexity and accuracy of every residue hidden alone, all others visible.

    That is the question whose best answer the energy gives exactly.
    """
    size = int(batch.ptr.diff().max())
    node = torch.arange(len(batch.types))
    place = node - batch.ptr[batch.batch]
    features = one_hot(batch.types)[:, None].repeat(1, size, 1)
    features[node, place] = 0
    with torch.no_grad():
        logits = network(batch, features)[node, place]
    entropy = torch.nn.functional.cross_entropy(logits, batch.types)
    return float(entropy.exp()), float((logits.argmax(-1) == batch.types).float().mean())


def predict(network: Any, batch: Any) -> Any:
    """(mutations,) predicted ddG in kcal/mol."""
    with torch.no_grad():
        return network.ddg(batch)[0].double().numpy()


def ranking(predicted: Any, batch: Any) -> dict[str, float]:
    """Metrics of predicted ddG, means over interfaces."""
    target, group = batch.ddg.double().numpy(), batch.group.numpy()
    result: dict[str, float] = evaluate(predicted, target, group)["averaged"]
    return result


def network_of(run: Any) -> Any:
    """The trained network of a run, in evaluation mode."""
    return run.model.network.eval()


def reproduce(lab: Lab) -> None:
    """Pre-train, rank mutations without labels, fine-tune on few labels, and from scratch."""
    # one validation at the end is enough: the claims are measured on the test interfaces
    brief = ("--trainer.num_sanity_val_steps=0", "--trainer.limit_val_batches=1")
    pretrained = lab.fit("ppiformer/default.yaml", *brief, "--trainer.check_val_every_n_epoch=14")
    data: Any = pretrained.datamodule
    batch = data.test_set[list(range(len(data.test_set)))]
    network = network_of(pretrained)
    perplexity, accuracy = site_perplexity(network, batch)
    zero_shot = ranking(predict(network, batch), batch)

    potts, held_out = data.potts, slice(0, len(data.test_set))
    best = potts.conditional()[held_out]
    truth = potts.sequence[held_out]
    bayes = np.exp(-np.log(np.take_along_axis(best, truth[..., None], -1)).mean())
    counts = data.residue_counts.double()
    frequency = (counts / counts.sum()).numpy()
    unigram = np.exp(-np.log(frequency[truth]).mean())
    lab.note(
        f"Perplexity of a hidden residue on held-out interfaces: {perplexity:.2f}; Bayes optimum "
        f"{bayes:.2f}, unigram {unigram:.2f}. Accuracy {accuracy:.3f}, Bayes "
        f"{(best.argmax(-1) == truth).mean():.3f}."
    )
    lab.claim(
        "perplexity of a hidden residue",
        value=perplexity,
        at_most=10.2,
        published="not in the paper: the best possible value is known here",
    )
    lab.claim(
        "zero-shot Spearman per interface",
        value=zero_shot["Spearman"],
        at_least=0.65,
        published="pre-training alone ranks mutations",
    )
    path = lab.folder / "pretrained.ckpt"
    pretrained.trainer.save_checkpoint(path, weights_only=True)
    words = ("ppiformer/potts_finetune.yaml", *brief, "--trainer.check_val_every_n_epoch=30")
    tuned = lab.fit(*words, f"--model.init_args.weights={path}")
    scratch = lab.fit(*words)
    predicted = predict(network_of(tuned), batch)
    results = {
        "fine-tuned": ranking(predicted, batch),
        "from scratch": ranking(predict(network_of(scratch), batch), batch),
        "zero-shot": zero_shot,
    }
    lab.note(
        "; ".join(
            f"{name}: Spearman {r['Spearman']:.3f}, RMSE {r['RMSE']:.2f} kcal/mol"
            for name, r in results.items()
        )
    )
    lab.claim(
        "fine-tuned Spearman over training from scratch",
        value=results["fine-tuned"]["Spearman"] - results["from scratch"]["Spearman"],
        at_least=0.05,
        published="pre-training improves the ddG of held-out proteins",
    )
    summary = {"spearman": results["fine-tuned"]["Spearman"], "rmse": results["fine-tuned"]["RMSE"]}
    lab.figure("ddg", scatter_figure(predicted, batch.ddg.numpy(), batch.group.numpy(), summary))
