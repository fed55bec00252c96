"""The demonstration's parts: data as promised, results equal to pandas, both models trainable, pictures drawn."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import torch

import masked_dispatch as md
from examples.demo import cases, competition, data, digits, forecasting, models, plots, statistics, training


class Silent:
    """A progress bar that nobody sees."""

    def advance(self) -> None:
        pass


@pytest.fixture(scope="module")
def windows() -> data.Forecasting:
    return data.forecasting_data()


@pytest.fixture(scope="module")
def pictures() -> data.Digits:
    return data.digits_data()


def test_the_record_is_the_one_that_is_told_of() -> None:
    series = data.weekly_co2()
    assert len(series) == 2284
    assert series.isna().sum() == 59


def test_nothing_of_the_held_out_years_is_trained_on(windows: data.Forecasting) -> None:
    span = windows.train.past.shape[1] + windows.train.future.shape[1]
    assert windows.train.starts[-1] + span <= windows.held_out.starts[0]


def test_hidden_weeks_are_hidden_from_training_and_known_to_the_judge(windows: data.Forecasting) -> None:
    for part in (windows.train, windows.held_out):
        assert (part.future.isnan() | (part.future == part.truth)).all()
        assert part.future.isnan().sum() > part.truth.isnan().sum()


def test_digits_differ_from_the_truth_only_by_holes(pictures: data.Digits) -> None:
    holes = pictures.train.isnan()
    assert 0.39 < holes.float().mean() < 0.41
    assert torch.equal(pictures.train[~holes], pictures.train_truth[~holes])


def test_statistics_equal_those_of_pandas() -> None:
    for what, ours, theirs in statistics.comparisons(data.weekly_co2()):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, err_msg=what)


def two_steps(make_model: type[torch.nn.Module], batches: list[training.Batch]) -> training.Run:
    return training.train(make_model, [(md.from_nan(x), md.from_nan(y)) for x, y in batches[:2]], Silent())  # type: ignore[arg-type]


def test_the_transformer_learns_from_windows_with_holes(windows: data.Forecasting) -> None:
    part = windows.train
    run = two_steps(models.Forecaster, [(part.past[:8], part.future[:8]), (part.past[8:16], part.future[8:16])])
    assert run.losses[1] < run.losses[0]
    assert not any(md.is_masked_tensor(p.grad) for p in run.model.parameters())
    predicted = forecasting.forecast(run.model, windows, md.from_nan)
    assert np.isfinite(forecasting.error_in_ppm(predicted, windows))


def test_the_autoencoder_learns_from_digits_with_holes(pictures: data.Digits) -> None:
    run = two_steps(models.Autoencoder, digits.training_batches(pictures, epochs=1, size=16))
    assert all(p.isfinite().all() for p in run.model.parameters())
    restored = competition.filled(training.predict(run.model, md.from_nan(pictures.held_out[:4])))
    assert restored.isfinite().all()


def test_hidden_values_do_not_matter_to_a_model(windows: data.Forecasting) -> None:
    past = windows.held_out.past[:4]
    mask = ~past.isnan()
    model = models.Forecaster()
    outputs = [training.predict(model, md.masked_tensor(past.nan_to_num(fill), mask)) for fill in (0.0, 1e30)]
    assert torch.equal(outputs[0].get_data(), outputs[1].get_data())


def test_a_masked_window_is_a_window_without_its_missing_weeks(windows: data.Forecasting) -> None:
    torch.manual_seed(0)
    model = models.Forecaster().double()
    masked = model(md.from_nan(windows.held_out.past[:4].double()))
    for window, forecast in zip(windows.held_out.past[:4].double(), masked.to_tensor(torch.nan), strict=True):
        there = ~window.isnan()
        level = window[there].mean()
        weeks = model.embed((window[there] - level)[None, :, None]) + model.position[there]
        torch.testing.assert_close(forecast, level + model.head(model.encoder(weeks).mean(1))[0])


def test_filled_competitors_have_no_holes_left(windows: data.Forecasting, pictures: data.Digits) -> None:
    for competitor in forecasting.COMPETITORS[2:]:
        assert not competitor.prepare(windows.train.past).isnan().any()
    for competitor in digits.competitors(pictures)[2:]:
        assert not competitor.prepare(pictures.train).isnan().any()


@torch.sparse.check_sparse_tensor_invariants()
def test_adagrad_written_once_changes_only_rows_it_reaches() -> None:
    p, state = torch.ones(5, 2), torch.zeros(5, 2)
    g = torch.sparse_coo_tensor([[1, 3, 1]], torch.ones(3, 2), (5, 2))
    by_hand, state_by_hand = p.clone(), state.clone()
    for _ in range(3):
        cases.adagrad(p, cases.masked_rows(g), state, lr=0.1)
        cases.adagrad_by_hand(by_hand, g, state_by_hand, lr=0.1)
    torch.testing.assert_close(p, by_hand)
    torch.testing.assert_close(state, state_by_hand)
    assert (p[[0, 2, 4]] == 1).all()


def test_an_operator_of_ones_own_is_masked_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with md.registry.overlay():
        cases.own_operator()
    printed = capsys.readouterr().out
    assert "has no masked meaning" in printed
    assert "valid=2/3" in printed
    assert "P3 holds" in printed


def test_pictures_are_drawn(windows: data.Forecasting, pictures: data.Digits, tmp_path) -> None:
    forecasts = forecasting.Forecasts(windows, windows.held_out.truth)
    written = plots.draw(forecasts, digits.Restored(pictures, pictures.held_out_truth), tmp_path)
    assert [path.name for path in written] == ["co2_series.png", "digits.png", "masks.png"]
    for path in written:
        assert matplotlib.image.imread(path).std() > 0.05
