"""Learning-rate schedule, parameter groups, and Muon against PyTorch's own."""

import copy
import itertools
import math

import pytest
import torch

from config.schema import TrainSettings
from engine.optimizer import AdamW, Muon, learning_rate_at, make_optimizer, orthogonalize
from model import GPT, GPTConfig


def schedule(**changes: object) -> TrainSettings:
    return TrainSettings(**{"learning_rate": 1.0, "min_lr": 0.1, "warmup_iters": 10, "max_iters": 110} | changes)  # type: ignore[arg-type]


def test_T08_warm_up_starts_above_zero_is_linear_and_peaks_at_its_end() -> None:
    rates = [learning_rate_at(step, schedule()) for step in range(12)]
    assert rates[0] > 0
    steps = [later - earlier for earlier, later in itertools.pairwise(rates[:11])]
    assert all(step == pytest.approx(rates[0]) for step in steps)
    assert rates[10] == 1.0 == max(rates) and rates[11] < 1.0


@pytest.mark.parametrize(("decay", "halfway"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_T08_decay_goes_from_the_peak_to_min_lr_and_stays(decay: str, halfway: float) -> None:
    settings = schedule(lr_decay=decay)
    assert learning_rate_at(10, settings) == 1.0
    assert learning_rate_at(60, settings) == pytest.approx(halfway)
    end = 1.0 if decay == "constant" else 0.1
    assert learning_rate_at(110, settings) == learning_rate_at(500, settings) == pytest.approx(end)


def test_T08_cosine_is_not_linear() -> None:
    quarter = {decay: learning_rate_at(35, schedule(lr_decay=decay)) for decay in ("cosine", "linear")}
    assert quarter["cosine"] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert quarter["linear"] == pytest.approx(0.1 + 0.9 * 0.75)


def test_T08_lr_decay_iters_moves_the_end_and_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate_at(60, schedule(lr_decay_iters=60)) == pytest.approx(0.1)
    assert learning_rate_at(0, schedule(warmup_iters=0)) == 1.0
    assert learning_rate_at(5, schedule(warmup_iters=0, max_iters=0)) == pytest.approx(0.1)


def tiny() -> GPT:
    return GPT(GPTConfig(block_size=8, vocab_size=30, n_layer=2, n_head=2, n_embd=8, norm_placement="pre"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_T19_every_parameter_is_in_one_group_and_only_matrices_decay(optimizer: str) -> None:
    model = tiny()
    decay: dict[int, float] = {}
    for part in make_optimizer(model, TrainSettings(optimizer=optimizer, weight_decay=0.3)).parts:
        for group in part.param_groups:
            for parameter in group["params"]:
                assert id(parameter) not in decay, "counted twice"
                decay[id(parameter)] = group["weight_decay"]
    for name, parameter in model.named_parameters():
        assert decay.pop(id(parameter)) == (0.3 if parameter.dim() >= 2 else 0.0), name
    assert not decay


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest() -> None:
    model = tiny()
    muon, adamw = make_optimizer(model, TrainSettings(optimizer="muon")).parts
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    by_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in by_muon) == (name.startswith("blocks.") and parameter.dim() == 2), name


@pytest.mark.parametrize("rows_columns", [(8, 8), (8, 32), (1, 5)])
def test_orthogonalized_matrices_have_singular_values_near_one(rows_columns: tuple[int, int]) -> None:
    exact = torch.linalg.svd(torch.randn(5, *rows_columns), full_matrices=False)
    matrices = exact.U * torch.linspace(0.3, 1.0, min(rows_columns)) @ exact.Vh
    result = orthogonalize(matrices).float()
    assert result.shape == matrices.shape
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    closest = (exact.U @ exact.Vh).flatten(1)
    cosine = torch.nn.functional.cosine_similarity(result.flatten(1), closest)
    assert cosine.min() > 0.95


def test_muon_makes_the_same_updates_as_pytorchs() -> None:
    shapes = [(8, 8), (8, 32), (8, 8), (32, 8), (16, 4)]
    ours = [torch.randn(shape).requires_grad_() for shape in shapes]
    theirs = [parameter.detach().clone().requires_grad_() for parameter in ours]
    start = [parameter.detach().clone() for parameter in ours]
    our_muon = Muon(ours, lr=0.02, weight_decay=0.1)
    their_muon = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        our_muon.step()
        their_muon.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() < 0.02 * moved, "bfloat16 rounds a batched product differently, no more than that"


def test_muon_refuses_vectors_and_skips_parameters_without_gradient() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.zeros(3, requires_grad=True)], lr=1.0, weight_decay=0.0)
    still = torch.ones(2, 2, requires_grad=True)
    Muon([still], lr=1.0, weight_decay=0.5).step()
    assert torch.equal(still, torch.ones(2, 2))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_state_survives_saving(optimizer: str) -> None:
    settings = TrainSettings(optimizer=optimizer)
    models = [tiny(), tiny()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make_optimizer(model, settings) for model in models]
    idx = torch.randint(0, 30, (4, 8))

    def step(which: int) -> None:
        models[which](idx, idx)[1].backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    step(0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for which in (0, 1):
        step(which)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_taking_back_the_state_keeps_the_settings_of_now(optimizer: str) -> None:
    before = make_optimizer(tiny(), TrainSettings(optimizer=optimizer, weight_decay=0.1, beta1=0.9))
    after = make_optimizer(tiny(), TrainSettings(optimizer=optimizer, weight_decay=0.7, beta1=0.5))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert {group["weight_decay"] for group in after.param_groups} == {0.7, 0.0}
    assert {group["betas"][0] for group in after.param_groups if "betas" in group} == {0.5}


def test_T02_a_loss_scaler_takes_or_skips_an_update_as_a_whole() -> None:
    """One overflow anywhere: neither Muon's matrices nor AdamW's vectors move. (The scaler runs on the CPU here.)"""
    model = tiny()
    optimizer, scaler = make_optimizer(model, TrainSettings(optimizer="muon")), torch.amp.GradScaler("cpu")
    start = copy.deepcopy(model.state_dict())
    idx = torch.randint(0, 30, (4, 8))
    scaler.scale(model(idx, idx)[1]).backward()
    model.blocks[0].attention.query.weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    scaler.scale(model(idx, idx)[1]).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.token_embedding.weight, start["token_embedding.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_of_another_shape_is_refused(optimizer: str) -> None:
    """The fused kernels would read beyond its end."""
    made = make_optimizer(tiny(), TrainSettings(optimizer=optimizer))
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    for part, name in ((0, "exp_avg" if optimizer == "adamw" else "momentum_buffer"), (-1, "exp_avg_sq")):
        for broken in (torch.zeros(3), None, [1.0]):
            states = copy.deepcopy(made.state_dict())
            states[part]["state"][0][name] = broken
            with pytest.raises(ValueError, match="for a parameter of shape"):
                made.load_state_dict(states)


def test_adamw_is_pytorchs_own() -> None:
    ours, theirs = [torch.nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2)]
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "fused": True}
    optimizers = [AdamW([ours], **options), torch.optim.AdamW([theirs], **options)]
    for step in range(4):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, float(step - 1)) * torch.arange(4.0)
            optimizer.step()
            optimizer.zero_grad()
            assert parameter.grad is None
    assert torch.equal(ours, theirs) and not torch.equal(ours, torch.arange(12.0).view(3, 4))
    saved, expected = (optimizer.state_dict() for optimizer in optimizers)
    assert torch.equal(saved["state"][0]["exp_avg_sq"], expected["state"][0]["exp_avg_sq"])
