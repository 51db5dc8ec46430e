"""Metrics against the released predictions."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from datamodules.interfaces.vendored import asset
from lightning_modules.ppiformer.evaluation import design_table, evaluate
from lightning_modules.ppiformer.metrics import GroupedDDG, Perplexity


def test_skempi_test_metrics(reference):
    expected = json.loads((reference / "skempi_test_metrics.json").read_text())
    rows = pd.read_csv(reference / "skempi_test_predictions.csv.gz")
    protein = {c: p for p, cs in expected["protein_to_complexes"].items() for c in cs}
    assert rows["method"].nunique() == 8
    for method, table in rows.groupby("method"):
        assert len(table) == 219
        predicted = table["ddG_pred"].fillna(expected["impute_value"]).to_numpy()
        groups = table["complex"].map(protein).to_numpy()
        result = evaluate(predicted, table["ddG"].to_numpy(), groups)
        for name, metrics in expected["per_protein"][method].items():
            assert result["per_group"][name] == pytest.approx(metrics, abs=1e-9)
        for key in ("averaged", "rounded_then_averaged"):
            assert result[key] == pytest.approx(expected["overall"][method][key], abs=1e-9)


@pytest.mark.parametrize(
    ("study", "file", "table", "known", "listed"),
    [
        ("SARS_CoV_2_antibody", "7FAE", "7FAE_mutations.csv.gz", "stabilizing", "stabilizing"),
        (
            "staphylokinase",
            "SAK",
            "SAK_activities.csv",
            "Activity enhancement",
            "2x activity enhancement",
        ),
    ],
)
def test_case_studies(reference, study, file, table, known, listed):
    expected = json.loads((reference / "case_study_metrics.json").read_text())[study]
    rows = pd.read_csv(reference / f"case_{file}_predictions.csv.gz")
    truth = pd.read_csv(asset(table))
    improving = truth["Mutation(s)"][truth[known]].tolist()
    reported = truth["Mutation(s)"][truth[listed]].tolist()
    for method, values in expected.items():
        part = rows[rows["method"] == method]
        result = design_table(
            part["mutstr"].tolist(), part["ddG_pred"].to_numpy(), improving, reported
        )
        assert len(part) == values["n"]
        for name, value in values.items():
            if name not in ("n", "max_rank_difference_to_recomputed"):
                assert result[name] == pytest.approx(value, abs=1e-9), (method, name)


def test_metric_is_over_rows_and_not_batches():
    g = torch.Generator().manual_seed(0)
    target, noise = torch.randn(2, 60, generator=g)
    predicted = target + noise
    group = torch.arange(60) % 3
    metric = GroupedDDG(minimum=10, thresholds=(0.0, -0.5))
    for rows in torch.randperm(60, generator=g).split(7):
        metric.update(predicted[rows], target[rows], group[rows])
    result = metric.compute()
    whole = evaluate(predicted.double().numpy(), target.double().numpy(), group.numpy())
    assert result["spearman"] == pytest.approx(whole["averaged"]["Spearman"])
    assert result["rmse"] == pytest.approx(whole["averaged"]["RMSE"])
    assert (result["groups"], result["mutations"]) == (3, 60)
    assert "precision@-0.5" in result
    small = GroupedDDG(minimum=21)
    small.update(predicted, target, group)
    assert "spearman" not in small.compute()
    empty = GroupedDDG()
    empty.add_nothing(torch.device("cpu"))
    assert empty.compute() == {"mutations": 0.0}


def test_undefined_correlation_warns():
    with pytest.warns(UserWarning, match="2 row"):
        result = evaluate(np.array([0.0, 1.0]), np.array([1.0, 2.0]), [0, 0])
    assert np.isnan(result["averaged"]["Spearman"])
    with pytest.warns(UserWarning, match="differ"):
        evaluate(np.zeros(5), np.arange(5.0), [0] * 5)


def test_evaluation_refuses_bad_rows():
    with pytest.raises(ValueError, match="length"):
        evaluate(np.zeros(2), np.zeros(3), [0, 0])
    with pytest.raises(ValueError, match="impute"):
        evaluate(np.array([np.nan, 0]), np.zeros(2), [0, 0])
    with pytest.raises(ValueError, match="SC1A"):
        design_table(["AC1S"], [0.0], ["SC1A"])


def test_perplexity_is_weighted_by_rows():
    metric = Perplexity()
    metric.update(torch.tensor([1.0, 1.0, 1.0]))
    metric.update(torch.tensor([3.0]))
    assert metric.compute().item() == pytest.approx(np.exp(1.5))
