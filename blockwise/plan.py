"""MemoryPlan: for each block of each block list, where its activations live; from the flags, or from a budget."""

import dataclasses
import itertools


KEEP, RECOMPUTE, PARK = "keep", "recompute", "park"


class BudgetError(ValueError):
    """No plan fits.

    Args:
        smallest_bytes (`int`): The smallest budget that a plan fits.
    """

    def __init__(self, smallest_bytes):
        super().__init__(f"no plan takes less than {smallest_bytes} bytes")
        self.smallest_bytes = smallest_bytes


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What happens to the activations of every block.

    Args:
        modes (`dict[str, tuple[str, ...]]`):
            Name of a block list (an attribute of the transformer) -> for each block, in model order, `"keep"`,
            `"recompute"` or `"park"` (recompute from inputs parked in host memory).
    """

    modes: dict[str, tuple[str, ...]]

    @classmethod
    def from_args(cls, args, block_lists):
        """Make the plan that the flags ask for.

        Args:
            args (`argparse.Namespace`):
                With `use_gradient_checkpointing`, `use_gradient_checkpointing_offload`, which implies it, and
                `checkpoint_blocks`: how many blocks at the start of each list they hold for, or None for all.
            block_lists (`dict[str, int]`):
                Name -> number of blocks, in the order in which the model runs them.

        Raises:
            ValueError: `checkpoint_blocks` has neither one number nor one for each list.
        """
        mode = PARK if args.use_gradient_checkpointing_offload else KEEP
        if args.use_gradient_checkpointing and mode == KEEP:
            mode = RECOMPUTE
        counts = args.checkpoint_blocks or list(block_lists.values())
        if len(counts) == 1:
            counts = counts * len(block_lists)
        if len(counts) != len(block_lists):
            raise ValueError(
                f"--checkpoint_blocks has {len(counts)} numbers; allowed are one, or one for each of "
                f"{', '.join(block_lists)}."
            )
        modes = {
            name: (mode,) * min(count, num_blocks) + (KEEP,) * (num_blocks - count)
            for (name, num_blocks), count in zip(block_lists.items(), counts, strict=True)
        }
        if mode == PARK:
            # The very last block is recomputed first, at once: there is no time to fetch anything for it.
            last = list(modes)[-1]
            if modes[last][-1] == PARK:
                modes[last] = modes[last][:-1] + (RECOMPUTE,)
        return cls(modes)

    @classmethod
    def from_budget(cls, block_lists, budget_bytes, *, peak_bytes, parked_bytes, seconds, host_bytes=None):
        """Make the fastest plan that fits.

        Looked through are all plans that recompute the blocks up to one and keep those after it: what is kept last is
        needed first, so it is gone from memory when the others are recomputed. Of the recomputed ones those up to
        another are parked. A larger budget never gives a slower plan.

        Args:
            block_lists (`dict[str, int]`): As for `from_args`.
            budget_bytes (`int`): What the device has for the whole run.
            peak_bytes (`Callable[[dict], int]`): From the modes of a plan to the peak of the whole run.
            parked_bytes (`Callable[[dict], int]`): From the modes of a plan to the bytes that it parks.
            seconds (`Callable[[dict], float]`): From the modes of a plan to the time that it adds to a step.
            host_bytes (`int`, *optional*): The most that may be parked.

        Raises:
            BudgetError: None fits.
        """
        plans = list(cls._candidates(block_lists))
        if host_bytes is not None:
            plans = [plan for plan in plans if parked_bytes(plan.modes) <= host_bytes]
        # Of plans that take equally long the one that parks less; the sort is stable.
        plans.sort(key=lambda plan: (seconds(plan.modes), parked_bytes(plan.modes)))
        for plan in plans:
            if peak_bytes(plan.modes) <= budget_bytes:
                return plan
        raise BudgetError(min(peak_bytes(plan.modes) for plan in plans))

    @classmethod
    def _candidates(cls, block_lists):
        num_blocks = sum(block_lists.values())
        for num_recomputed in range(num_blocks + 1):
            # Never the very last block, which is recomputed first, at once.
            for num_parked in range(min(num_recomputed, num_blocks - 1) + 1):
                modes = [PARK] * num_parked + [RECOMPUTE] * (num_recomputed - num_parked)
                modes = iter(modes + [KEEP] * (num_blocks - num_recomputed))
                yield cls({name: tuple(itertools.islice(modes, count)) for name, count in block_lists.items()})

    def arguments(self, block_list):
        """Return the two memory arguments of a `model_fn`, each a list with one `bool` per block."""
        modes = self.modes[block_list]
        return {
            "use_gradient_checkpointing": [mode != KEEP for mode in modes],
            "use_gradient_checkpointing_offload": [mode == PARK for mode in modes],
        }

    def describe(self):
        """Return for a person one line per block list, and one per run of equal blocks."""
        lines = []
        for name, modes in self.modes.items():
            num_checkpointed = sum(mode != KEEP for mode in modes)
            lines.append(
                f"{name}: {num_checkpointed} of {len(modes)} blocks checkpointed, {modes.count(PARK)} offloaded"
            )
            first = 0
            for mode, run in itertools.groupby(modes):
                last = first + len(list(run)) - 1
                lines.append(f"  {name}.{first}" + (f" to {last}" if last > first else "") + f": {mode}")
                first = last + 1
        return lines


def per_block(flag, num_blocks):
    """Return one `bool` per block from a `bool` for all blocks or a sequence with one for each, in model order.

    Raises:
        ValueError: The sequence has another length.
    """
    flags = [flag] * num_blocks if isinstance(flag, bool) else list(flag)
    if len(flags) != num_blocks:
        raise ValueError(f"A memory argument has {len(flags)} entries for {num_blocks} blocks.")
    return flags
