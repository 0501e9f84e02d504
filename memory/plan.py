"""MemoryPlan: for each block of each block list, where its activations live."""

import dataclasses


KEEP, RECOMPUTE, PARK = "keep", "recompute", "park"


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

    def arguments(self, block_list):
        """Return the two memory arguments of a `model_fn`, each a list with one `bool` per block."""
        modes = self.modes[block_list]
        return {
            "use_gradient_checkpointing": [mode != KEEP for mode in modes],
            "use_gradient_checkpointing_offload": [mode == PARK for mode in modes],
        }

    def describe(self):
        """Return one line per block list, for a person."""
        return [
            f"{name}: {sum(mode != KEEP for mode in modes)} of {len(modes)} blocks checkpointed, "
            f"{modes.count(PARK)} offloaded"
            for name, modes in self.modes.items()
        ]


def per_block(flag, num_blocks):
    """Return one `bool` per block from a `bool` for all blocks or a sequence with one for each, in model order.

    Raises:
        ValueError: The sequence has another length.
    """
    flags = [flag] * num_blocks if isinstance(flag, bool) else list(flag)
    if len(flags) != num_blocks:
        raise ValueError(f"A memory argument has {len(flags)} entries for {num_blocks} blocks.")
    return flags
