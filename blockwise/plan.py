"""MemoryPlan: a Mode for each block of each block list, from flags, or the fastest that fits a budget."""

import dataclasses
import itertools


ACTIVATIONS = ("park", "recompute", "keep")  # from the least memory to the least time


@dataclasses.dataclass(frozen=True)
class Mode:
    """How one block spends memory.

    Args:
        activations (`str`):
            What its backward pass needs is kept (`"keep"`), recomputed from its inputs (`"recompute"`), or recomputed
            from inputs that wait in host memory (`"park"`).
        weights (`str`): Where its frozen weights are: on the device (`"resident"`).
        units (`int`): In how many parts it is recomputed: 1.

    Raises:
        ValueError: A value is none of these.
    """

    activations: str = "keep"
    weights: str = "resident"
    units: int = 1

    def __post_init__(self):
        allowed = {"activations": ACTIVATIONS, "weights": ("resident",), "units": (1,)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"The {name} of a Mode are {getattr(self, name)!r}; allowed is one of {values}.")


class BudgetError(ValueError):
    """No plan fits.

    Args:
        smallest_bytes (`int`): The smallest budget that a plan fits.
    """

    def __init__(self, smallest_bytes):
        super().__init__(f"no plan takes less than {smallest_bytes} bytes")
        self.smallest_bytes = smallest_bytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a plan costs.

    Args:
        seconds (`float`): What it adds to the time of a step.
        parked_bytes (`int`): What it parks in host memory.
        peak_bytes (`int`): The most that the device holds at one moment.
    """

    seconds: float
    parked_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """A mode for every block of every block list.

    Args:
        modes (`dict[str, tuple[Mode, ...]]`):
            Name of a block list in the transformer (`"blocks"`, or nested, `"decoder.blocks"`) -> one mode for each
            of its blocks, in model order. The lists are in the order in which the model runs them.
    """

    modes: dict[str, tuple[Mode, ...]]

    @classmethod
    def uniform(cls, block_lists, mode):
        """Make the plan with one mode for every block.

        Args:
            block_lists (`dict[str, int]`): Name -> number of blocks, in the order in which the model runs them.
            mode (`Mode`, or `str`: its `activations`)
        """
        mode = mode if isinstance(mode, Mode) else Mode(mode)
        return cls({name: (mode,) * num_blocks for name, num_blocks in block_lists.items()})

    @classmethod
    def from_args(cls, args, block_lists):
        """Make the plan that the flags ask for.

        Args:
            args (`argparse.Namespace`):
                With `use_gradient_checkpointing`, `use_gradient_checkpointing_offload`, which implies it, and
                `checkpoint_blocks`: how many blocks at the start of each list they hold for, or None for all.
            block_lists (`dict[str, int]`): As for `uniform`.

        Raises:
            ValueError: `checkpoint_blocks` has neither one number nor one for each list.
        """
        mode = Mode("recompute" if args.use_gradient_checkpointing else "keep")
        mode = Mode("park") if args.use_gradient_checkpointing_offload else mode
        counts = args.checkpoint_blocks or list(block_lists.values())
        counts = counts * len(block_lists) if len(counts) == 1 else counts
        if len(counts) != len(block_lists):
            raise ValueError(
                f"--checkpoint_blocks has {len(counts)} numbers; allowed are one, or one for each of "
                f"{', '.join(block_lists)}."
            )
        modes = []
        for count, num_blocks in zip(counts, block_lists.values(), strict=True):
            modes += [mode] * min(count, num_blocks) + [Mode()] * (num_blocks - count)
        return cls._of(block_lists, modes)

    @classmethod
    def _of(cls, block_lists, modes):
        """Make a plan from the modes of all blocks, one after the other; the last one is not parked."""
        if modes[-1].activations == "park":
            # The last block is recomputed first, at once: there is no time to fetch anything for it.
            modes = [*modes[:-1], dataclasses.replace(modes[-1], activations="recompute")]
        remaining = iter(modes)
        return cls({name: tuple(itertools.islice(remaining, count)) for name, count in block_lists.items()})

    @classmethod
    def from_budget(cls, block_lists, budget_bytes, costs, *, modes=None, host_bytes=None):
        """Make the fastest plan that fits. A larger budget never gives a slower plan.

        A plan takes the modes in the order from the least memory to the least time: what is kept last is needed
        first, so it is gone from memory when the others are recomputed. Up to three modes are mixed: of equal blocks,
        with a limit for the device and one for the host, no optimum needs more.

        Args:
            block_lists (`dict[str, int]`): As for `uniform`.
            budget_bytes (`int`): What the device has.
            costs (`Callable[[list[MemoryPlan]], list[Cost]]`): What each of many plans costs.
            modes (`list[Mode]`, *optional*): In that order; by default park, recompute, keep.
            host_bytes (`int`, *optional*): The most that may be parked.

        Raises:
            BudgetError: None fits.
        """
        plans = list(cls._candidates(block_lists, [Mode(name) for name in ACTIVATIONS] if modes is None else modes))
        pairs = zip(plans, costs(plans), strict=True)
        pairs = [pair for pair in pairs if host_bytes is None or pair[1].parked_bytes <= host_bytes]
        fitting = [pair for pair in pairs if pair[1].peak_bytes <= budget_bytes]
        if not fitting:
            raise BudgetError(min(cost.peak_bytes for _, cost in pairs))
        # Of plans that take equally long the one that parks less, then the first.
        return min(fitting, key=lambda pair: (pair[1].seconds, pair[1].parked_bytes))[0]

    @classmethod
    def _candidates(cls, block_lists, modes):
        num_blocks = sum(block_lists.values())
        for chosen in itertools.combinations(modes, min(3, len(modes))):
            for ends in itertools.combinations_with_replacement(range(num_blocks + 1), len(chosen) - 1):
                limits = zip((0, *ends), (*ends, num_blocks), strict=True)
                sizes = [end - start for start, end in limits]
                yield cls._of(block_lists, [mode for mode, n in zip(chosen, sizes, strict=True) for _ in range(n)])

    def as_dict(self):
        """Return the plan in values that JSON takes: name of a list -> one `dict` with the values of each `Mode`."""
        return {name: [dataclasses.asdict(mode) for mode in modes] for name, modes in self.modes.items()}

    def describe(self):
        """Return for a person one line per block list, and one per run of equal blocks."""
        lines = []
        for name, modes in self.modes.items():
            activations = [mode.activations for mode in modes]
            num_checkpointed, num_parked = len(modes) - activations.count("keep"), activations.count("park")
            lines.append(f"{name}: {num_checkpointed} of {len(modes)} blocks checkpointed, {num_parked} offloaded")
            first = 0
            for mode, run in itertools.groupby(activations):
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
