"""Gradients of bf16 weights on two processes against those of one that has all micro-batches."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.optimizers import MasterWeights


NUM_MICRO_BATCHES, NUM_STEPS = 3, 3


class Model(nn.Module):
    """Weights in bf16, and one that stays in fp32, as in Wan."""

    def __init__(self):
        super().__init__()
        self.linears = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8)).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.linears(x).float() * self.scale).square().mean()


def batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(4, 64, generator=generator).to(torch.bfloat16)


def train(ranks, is_ddp):
    """Return the gradients of each optimizer step, and the number of tensors that were averaged."""
    torch.manual_seed(0)
    model = Model()
    if is_ddp:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    weights = MasterWeights(model)
    optimizer = torch.optim.SGD(weights.masters, lr=0.1)
    gradients, num_averaged = [], 0
    for step in range(NUM_STEPS):
        with mock.patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as all_reduce:
            for micro_batch in range(NUM_MICRO_BATCHES):
                is_last = micro_batch == NUM_MICRO_BATCHES - 1
                for rank in ranks:
                    with model.no_sync() if is_ddp and not is_last else contextlib.nullcontext():
                        (model(batch(step, micro_batch, rank)) / NUM_MICRO_BATCHES / len(ranks)).backward()
                    weights.take_gradients()
            num_averaged += all_reduce.call_count
        gradients.append([master.grad.clone() for master in weights.masters])
        optimizer.step()
        optimizer.zero_grad()
        weights.write_back()
        pairs = zip(weights.parameters.values(), weights.masters, strict=True)
        assert all(parameter.grad is None for parameter, master in pairs if parameter is not master)
    return gradients, num_averaged


def test_two_processes_add_up_in_fp32_as_one_does(on_two_ranks):
    """Each micro-batch that is added, and the average of the processes; with one communication in each step."""

    def check(rank):
        alone, none = train([0, 1], is_ddp=False)
        shared, num_averaged = train([rank], is_ddp=True)
        # Sums in bf16 are off by a part in 256.
        torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-7)
        # In the first step there is one bucket, or one for each kind; never one for each micro-batch.
        assert none == 0 and num_averaged == 2 * NUM_STEPS, num_averaged

    on_two_ranks(check)
