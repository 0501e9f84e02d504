"""Sigma laws against closed forms and diffusers; noise, target and loss by hand."""

import math
import statistics
import types

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from dataset.draws import Draw
from runtime.errors import RefusedError
from training.flow_matching import SigmaLaw, add_noise, flow_losses, flow_target, sigma_law


NORMAL = statistics.NormalDist()


def closed_form(sampling, shift, sigma):
    """P(sigma' <= sigma), written down from the definition of the law."""
    unshifted = sigma / (shift + sigma - shift * sigma)
    return unshifted if sampling == "uniform" else NORMAL.cdf(math.log(unshifted / (1 - unshifted)))


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.875, 1.0), (0.0, 0.9), (0.2, 0.4)])
def test_draws_follow_the_law(sampling, shift, ends):
    law = SigmaLaw(sampling, shift, *ends)
    draws = sorted(Draw(7, step, position).sigma(law) for step in range(1, 101) for position in range(40))
    assert ends[0] <= draws[0] and draws[-1] <= ends[1]
    low, high = (closed_form(sampling, shift, end) if 0 < end < 1 else float(end) for end in ends)
    # Kolmogorov-Smirnov distance of 4000 draws: above 0.031 in one of a thousand cases.
    cdf = [(closed_form(sampling, shift, sigma) - low) / (high - low) for sigma in draws]
    distance = max(max(abs(p - i / len(cdf)), abs(p - (i + 1) / len(cdf))) for i, p in enumerate(cdf))
    assert distance < 0.031


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_quantile_inverts_the_distribution_function(sampling):
    law = SigmaLaw(sampling, 3.0, 0.1, 0.95)
    for u in (0.0, 0.01, 0.5, 0.99, 1.0):
        low, high = law.cdf(0.1), law.cdf(0.95)
        assert law.cdf(law.quantile(u)) == pytest.approx(low + u * (high - low))
    assert SigmaLaw(sampling).quantile(0.0) == 0 and SigmaLaw(sampling).quantile(1.0) == 1


def test_law_of_the_flags():
    """The model's shift unless one is given; the sigmas that both the flags and the model allow, or a refusal."""

    def law(shift=None, low=0.0, high=1.0, model_range=(0.0, 1.0), **expert):
        args = types.SimpleNamespace(timestep_sampling="uniform", sigma_shift=shift, min_sigma=low, max_sigma=high)
        vars(args).update(expert)
        return sigma_law(args, 5.0, model_range)

    assert law() == SigmaLaw("uniform", 5.0, 0.0, 1.0)
    assert law(shift=3.0, low=0.5, high=0.8) == SigmaLaw("uniform", 3.0, 0.5, 0.8)
    assert law(low=0.5, model_range=(0.0, 0.9)) == SigmaLaw("uniform", 5.0, 0.5, 0.9)
    assert law(high=0.95, model_range=(0.9, 1.0)) == SigmaLaw("uniform", 5.0, 0.9, 0.95)
    for low, high, model_range in ((0.9, 1.0, (0.0, 0.9)), (0.0, 0.9, (0.9, 1.0)), (0.95, 1.0, (0.0, 0.9))):
        with pytest.raises(RefusedError, match=f"--min_sigma {low} and --max_sigma {high} leave nothing"):
            law(low=low, high=high, model_range=model_range)
    for name, ends, model_range in (("min", {"low": 0.5}, (0.9, 1.0)), ("max", {"high": 0.95}, (0.0, 0.9))):
        with pytest.raises(RefusedError, match=f"--{name}_sigma 0.[59]+ has no effect: the model"):
            law(**ends, model_range=model_range, expert="either")
        assert law(**ends, model_range=model_range, expert="both") == SigmaLaw("uniform", 5.0, *model_range)


def test_extreme_shifts():
    for shift in (1e-300, 1e300):
        assert 0 <= SigmaLaw("uniform", shift, 0.2, 1.0).quantile(0.5) <= 1


def test_shift_is_that_of_the_scheduler():
    sigmas = torch.linspace(1.0, 0.05, 20)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=sigmas.tolist())
    ours = [SigmaLaw("uniform", 3.0).quantile(float(sigma)) for sigma in sigmas]
    torch.testing.assert_close(scheduler.sigmas[:-1], torch.tensor(ours))


def test_a_draw_depends_on_seed_step_and_position_only():
    law = SigmaLaw("logit_normal")
    torch.manual_seed(0)
    first = Draw(1, 2, 3)
    sigma, noise = first.sigma(law), first.noise((4, 5))
    torch.manual_seed(99)
    again = Draw(1, 2, 3)
    assert torch.equal(again.noise((4, 5)), noise) and again.sigma(law) == sigma
    others = [Draw(0, 2, 3), Draw(1, 1, 3), Draw(1, 2, 4), Draw(1, 3, 2)]
    assert len({other.sigma(law) for other in others} | {sigma}) == 5
    assert not any(torch.equal(other.noise((4, 5)), noise) for other in others)


def test_caption_dropout_has_its_share():
    dropped = sum(Draw(0, step, 0).drops_caption(0.1) for step in range(4000))
    assert 320 < dropped < 480
    assert not any(Draw(0, step, 0).drops_caption(0.0) for step in range(100))


def test_noise_is_standard_normal():
    noise = Draw(0, 1, 0).noise((100_000,))
    assert noise.dtype == torch.float32 and abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


def test_noising_target_and_euler_step_agree():
    """From sigma 1 one Euler step of the stock scheduler along the target lands on the latents."""
    latents, noise = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    assert torch.equal(add_noise(latents, noise, torch.ones(2)), noise)
    assert torch.equal(add_noise(latents, noise, torch.zeros(2)), latents)
    sigmas = torch.tensor([0.25, 0.5])
    noisy = add_noise(latents, noise, sigmas)
    torch.testing.assert_close(noisy[0], 0.75 * latents[0] + 0.25 * noise[0])
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[0.5])
    step = scheduler.step(flow_target(latents, noise)[1:], scheduler.timesteps[0], noisy[1:]).prev_sample
    torch.testing.assert_close(step, latents[1:])


def test_loss_by_hand():
    prediction, target = torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor([[1.0, 1, 1], [2, 0, 0]])
    sigmas = torch.tensor([0.5, 0.25])
    loss = flow_losses(prediction, target, sigmas).mean()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx((1 + 4 / 3) / 2)
    weighted = flow_losses(prediction, target, sigmas, "sigma_sqrt").mean()
    assert weighted.item() == pytest.approx((1 * 4 + 4 / 3 * 16) / 2)
    assert flow_losses(prediction, target, sigmas, "cosmap").mean().item() != pytest.approx(loss.item())


def test_loss_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(2, 3\)"):
        flow_losses(torch.zeros(2, 1), torch.zeros(2, 3), torch.zeros(2))
