"""Flow matching: how sigmas are drawn, how latents are noised, what is predicted, how the loss is weighted.

`sigma` is in [0, 1], 1 being pure noise; `timestep` is 1000 * sigma. Both stay in fp32.
"""

import dataclasses
import math
import statistics

from diffusers.training_utils import compute_loss_weighting_for_sd3

from runtime.errors import RefusedError


@dataclasses.dataclass(frozen=True)
class SigmaLaw:
    """A law of sigma on (0, 1): a base law, shifted towards noise, then conditioned on an interval.

    Args:
        timestep_sampling (`str`):
            `"uniform"`, or `"logit_normal"`: the logistic function of a standard normal variable.
        shift (`float`):
            s in s * sigma / (1 + (s - 1) * sigma), the shift of `FlowMatchEulerDiscreteScheduler`.
        min_sigma, max_sigma (`float`):
            Sigma is drawn from the shifted law given that it lies between the two.
    """

    timestep_sampling: str = "uniform"
    shift: float = 1.0
    min_sigma: float = 0.0
    max_sigma: float = 1.0

    def cdf(self, sigma):
        """Return P(sigma' <= `sigma`) of the shifted law, before it is conditioned."""
        base = sigma / (self.shift * (1 - sigma) + sigma)
        if self.timestep_sampling == "uniform" or base in (0, 1):
            return base
        return statistics.NormalDist().cdf(math.log(base / (1 - base)))

    def quantile(self, u):
        """Return the sigma below which the conditioned law has the share `u`, in [0, 1], of its mass."""
        low, high = self.cdf(self.min_sigma), self.cdf(self.max_sigma)
        u = low + u * (high - low)
        is_plain = self.timestep_sampling == "uniform" or u in (0, 1)
        base = u if is_plain else 1 / (1 + math.exp(-statistics.NormalDist().inv_cdf(u)))
        sigma = self.shift * base / (1 + (self.shift - 1) * base) if base < 1 else 1.0
        # Against the last bit of rounding only: an expert is never to see the other one's side.
        return min(max(sigma, self.min_sigma), self.max_sigma)


def sigma_law(args, model_shift, sigma_range=(0.0, 1.0)):
    """Return the `SigmaLaw` that the flags ask for.

    Args:
        args (`argparse.Namespace`)
        model_shift (`float`): Holds where no shift was given.
        sigma_range (`tuple[float, float]`): The sigmas at which the model is used at all.

    Raises:
        RefusedError: `--min_sigma` and `--max_sigma` leave nothing of `sigma_range`.
    """
    shift = model_shift if args.sigma_shift is None else args.sigma_shift
    low, high = max(args.min_sigma, sigma_range[0]), min(args.max_sigma, sigma_range[1])
    used = f"the model (or its expert) is used for sigmas from {sigma_range[0]} to {sigma_range[1]} only"
    if low >= high:
        raise RefusedError(f"--min_sigma {args.min_sigma} and --max_sigma {args.max_sigma} leave nothing: {used}.")
    for name in ("min_sigma", "max_sigma"):
        value = getattr(args, name)
        # Of two experts each may have one of the ends.
        if value not in (0.0, 1.0, low, high) and getattr(args, "expert", None) != "both":
            raise RefusedError(f"--{name} {value} has no effect: {used}.")
    return SigmaLaw(args.timestep_sampling, shift, low, high)


def add_noise(latents, noise, sigmas):
    """Return (1 - sigma) * latents + sigma * noise.

    Args:
        latents, noise (`torch.Tensor` of shape (B, ...)): fp32.
        sigmas (`torch.Tensor` of shape (B,)): fp32.
    """
    sigmas = sigmas.view(-1, *[1] * (latents.ndim - 1))
    return (1 - sigmas) * latents + sigmas * noise


def flow_target(latents, noise):
    """Return what the transformer is to predict: the velocity noise - latents."""
    return noise - latents


def flow_losses(prediction, target, sigmas, loss_weighting="none"):
    """Return the loss of each sample (B,): squared error in fp32, mean over the sample, weighted.

    Args:
        prediction, target (`torch.Tensor` of shape (B, ...)): Of equal shapes.
        sigmas (`torch.Tensor` of shape (B,))
        loss_weighting (`str`): `"none"`, or a scheme of diffusers' `compute_loss_weighting_for_sd3`.

    Raises:
        ValueError: The shapes differ.
    """
    if prediction.shape != target.shape:
        raise ValueError(f"The prediction has shape {tuple(prediction.shape)}, its target {tuple(target.shape)}.")
    losses = (prediction.float() - target.float()).square().flatten(1).mean(1)  # (B,)
    if loss_weighting != "none":
        losses = losses * compute_loss_weighting_for_sd3(loss_weighting, sigmas)
    return losses
