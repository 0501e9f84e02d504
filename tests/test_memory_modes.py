"""What benchmarks/memory_modes.py claims, measured again: slow, since times need an idle machine."""

import pytest
import torch

from benchmarks import memory_modes as benchmark
from blockwise import offload


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen_image", "wan_video"])
def test_half_a_budget_buys_back_most_of_the_time(family, capsys):
    """At most 0.92 of recomputing everything; equal gradients in all modes, which the benchmark checks itself."""
    torch.manual_seed(0)
    case = benchmark.Case(family, real_size=False, device=torch.device("cpu"))
    shares = benchmark.compare_modes(case, rounds=3)
    assert shares["half budget"] <= 0.92 and shares["keep"] < shares["half budget"]
    assert 0.9 < shares["park"] < 1.1
    benchmark.check_under_churn(case, num_steps=2)
    assert offload.counters()["pool_bytes"] == 0
    assert "gradients of all modes are equal" in capsys.readouterr().out


@pytest.mark.slow
def test_the_dispatcher_costs_little():
    """At most 0.3 ms per block above torch's own checkpoint called by hand."""
    assert all(milliseconds <= 0.3 for milliseconds in benchmark.dispatcher_overhead(torch.device("cpu")).values())


def test_torch_recipes_move_what_they_are_said_to_move():
    """By keyword nothing goes through `save_on_cpu`, by position all that a block is given."""

    class Block(torch.nn.Module):
        def forward(self, hidden_states, temb):
            return torch.tanh(hidden_states * temb)

    x = torch.randn(8, 4, requires_grad=True)
    for dispatch, expected in ((benchmark.save_by_keyword, 0), (benchmark.save_by_position, 2 * 8 * 4 * 4)):
        benchmark.CountedSaveOnCpu.num_bytes = 0
        dispatch(Block(), True, True, hidden_states=x * 1, temb=x * 2).sum().backward()
        assert benchmark.CountedSaveOnCpu.num_bytes == expected
