"""What is drawn for a sample or an item: each a function of the seed and of its own place, of nothing else."""

import dataclasses
import zlib

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Draw:
    """What is drawn for one sample: a function of (seed, step, position in the global batch) and of nothing else.

    Args:
        seed, step, position (`int`):
            `step` is the optimizer step, from 1; `position` the sample's place in that step's global batch.
    """

    seed: int
    step: int
    position: int

    def _generator(self, purpose):
        # One stream per purpose, so that a flag which uses one of them leaves the others as they are.
        key = np.random.SeedSequence([self.seed, self.step, self.position, purpose]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(key[0]))

    def sigma(self, law):
        """Return a sigma (`float`) from a `SigmaLaw`."""
        return law.quantile(torch.rand((), generator=self._generator(0), dtype=torch.float64).item())

    def drops_caption(self, probability):
        """Return whether this sample is trained without its caption."""
        return torch.rand((), generator=self._generator(1), dtype=torch.float64).item() < probability

    def noise(self, shape):
        """Return standard normal noise of `shape`, fp32, made on the CPU: the same on every device."""
        return torch.randn(shape, generator=self._generator(2))


def keyed_draw(seed, item_id, *purpose):
    """Return a random generator for one item: adding an item to the dataset changes nothing for the others.

    Args:
        seed (`int`)
        item_id (`str`)
        *purpose (`int`): Tells several draws for one item apart.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(item_id.encode()), *purpose]))
