"""The average of the trained weights over the steps, which is what is exported and previewed with --ema."""

import contextlib

from diffusers.training_utils import EMAModel

from runtime.processes import full_tensors


class WeightAverage:
    """diffusers' exponential moving average of the fp32 masters; without --ema it does nothing.

    After n updates its decay is (1 + n) / (10 + n), at most --ema_decay: the first update takes the weights as they
    are. It is fp32, as the masters are.

    Args:
        weights (`MasterWeights`)
        args (`argparse.Namespace`): With `ema`, `ema_decay`, `offload_ema` and `training_mode`.
    """

    def __init__(self, weights, args):
        self.weights, self.model = weights, None
        if args.ema:
            self.on_host = args.offload_ema
            # In one go where there are few weights: it takes as much memory as they do.
            self.model = EMAModel(self._masters(), decay=args.ema_decay, foreach=args.training_mode == "lora")

    def _masters(self):
        if not self.on_host:
            return self.weights.masters
        return [master.detach().cpu().requires_grad_() for master in self.weights.masters]

    @property
    def tensors(self):
        """The average of each trained parameter; an empty list without --ema."""
        return [] if self.model is None else self.model.shadow_params

    def step(self):
        """Update the average after an optimizer step. Waits for the device only if the average is on the host."""
        if self.model is not None:
            self.model.step(self._masters())

    def state_dict(self):
        """Return what a checkpoint holds of the average. Every process must call it."""
        tensors = full_tensors(zip(self.weights.parameters, self.tensors, strict=True))
        return self.model.state_dict() | {"shadow_params": [tensor for _, tensor in tensors]}

    def load_state_dict(self, state):
        """Continue the average of a checkpoint, on the device unless --offload_ema."""
        self.model.load_state_dict(state)
        if not self.on_host:
            self.model.to(self.weights.masters[0].device)

    def replace_weights(self):
        """Replace what is trained by the averaged weights for good."""
        if self.model is not None:
            self.model.copy_to(self.weights.masters)
            self.weights.write_back()

    @contextlib.contextmanager
    def applied(self):
        """Context in which what is trained has the averaged weights."""
        if self.model is not None:
            self.model.store(self.weights.masters)
        self.replace_weights()
        try:
            yield
        finally:
            if self.model is not None:
                self.model.restore(self.weights.masters)
                self.weights.write_back()
