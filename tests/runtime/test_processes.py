"""What processes do together: an error on one is raised on all, and sharded tensors become whole."""

import types

import pytest
import torch

from runtime.errors import FailedError, RefusedError
from runtime.processes import full_tensors, on_main_process, together


def accelerator(rank, num_processes=2):
    return types.SimpleNamespace(process_index=rank, is_main_process=rank == 0, num_processes=num_processes)


def outcome(function, *arguments):
    """What a function returns, or the class and the text of its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


def fail(error):
    raise error


def test_an_error_on_one_process_is_raised_on_all(on_two_ranks):
    def work(rank):
        here = accelerator(rank)
        return [
            outcome(together, here, lambda: f"rank {rank}"),
            outcome(together, here, lambda: fail(OSError("the disk is full")) if rank == 1 else "done"),
            outcome(together, here, lambda: fail(RefusedError("no such token")) if rank == 0 else "done"),
            outcome(on_main_process, here, lambda: f"written by {rank}"),
            outcome(on_main_process, here, lambda: fail(KeyError("a"))),
        ]

    values = ["rank 0", "rank 1"]
    full, refused, lacks = "the disk is full", (RefusedError, "no such token"), "'a'"
    assert on_two_ranks(work) == [
        [values, (FailedError, full), refused, "written by 0", (KeyError, lacks)],
        [values, (OSError, full), refused, "written by 0", (FailedError, lacks)],
    ]


def test_one_process_raises_its_own_error():
    with pytest.raises(KeyError, match="a"):
        on_main_process(accelerator(0, num_processes=1), lambda: fail(KeyError("a")))


def test_sharded_tensors_are_gathered(on_two_ranks):
    """Also one that does not divide evenly; one that is not sharded is the same memory."""

    def work(rank):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        whole = torch.arange(15.0).reshape(5, 3)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert sharded.to_local().shape[0] == 3 - rank
        gathered = dict(full_tensors([("sharded", torch.nn.Parameter(sharded)), ("whole", whole)]))
        assert gathered["whole"].data_ptr() == whole.data_ptr() and not gathered["sharded"].requires_grad
        return gathered["sharded"].tolist() == whole.tolist()

    assert on_two_ranks(work) == [True, True]
