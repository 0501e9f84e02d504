"""Parking under DDP and FSDP2, on two processes."""

import pytest


PROGRAM = '''
import os
import sys

sys.path.insert(0, os.getcwd())  # the root of the repository

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from blockwise import offload
from blockwise.checkpointing import gradient_checkpoint_forward as dispatch

offload.MIN_PARKED_BYTES = 1024
NUM_BLOCKS, NUM_STEPS = 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states, temb):
        return hidden_states + torch.tanh(self.linear(nn.functional.dropout(hidden_states, 0.2)) * temb)


class Model(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode, self.blocks = mode, nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, hidden_states, temb):
        hidden_states, temb = hidden_states * 1, temb * 1
        for index, block in enumerate(self.blocks):
            parks = self.mode == "park" and index < NUM_BLOCKS - 1
            hidden_states = dispatch(block, self.mode != "keep", parks, hidden_states=hidden_states, temb=temb)
        return hidden_states.square().mean()


def gradients(wrapper, mode):
    """Return the gradients of this process after two accumulated micro-batches in each of some steps."""
    torch.manual_seed(0)
    model = Model(mode)
    model.blocks[1].requires_grad_(False)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())
    grads = []
    for step in range(NUM_STEPS):
        offload.reset_counters()
        for micro_batch in range(2):
            last = micro_batch == 1
            if wrapper == "ddp":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            model(torch.randn(40, 32), torch.randn(40, 32)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if wrapper == "fsdp2" else parameter.grad
                grads.append(grad.clone())
                parameter.grad = None
    return grads


dist.init_process_group("gloo")
plain = gradients(sys.argv[1], "keep")
assert len(plain) == NUM_STEPS * 2 * (NUM_BLOCKS - 1) and all(grad.abs().sum() > 0 for grad in plain)
for mode in ("recompute", "park"):
    grads = gradients(sys.argv[1], mode)
    for k, (grad, expected) in enumerate(zip(grads, plain, strict=True)):
        assert torch.equal(grad, expected), f"{mode}: gradient {k} differs"
counters = offload.counters()
assert counters["parked_tensors"] == 2 * (NUM_BLOCKS - 1), counters
assert counters["bytes_to_device"] == 2 * (NUM_BLOCKS - 2) * 40 * 32 * 4, counters
assert counters["pool_bytes"] == 0, counters
dist.barrier()
sys.stdout.flush()
os._exit(0)  # threads of torch's process groups now and then abort the interpreter when it ends
'''


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_gradients_equal_those_without_checkpointing(wrapper, on_two_processes, tmp_path):
    """With dropout, a frozen block and accumulation; the bytes parked are the hidden states of all but the last."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    on_two_processes(program, wrapper)
