"""The training loop, in Accelerate's words and order, and what comes right before and after it."""

import contextlib
import dataclasses
import pathlib

import torch
from accelerate.utils import send_to_device

from dataset.batches import load_batches
from runtime.errors import FailedError, StoppedError
from runtime.processes import StopRequest
from training.checkpoints import load_checkpoint, register_state, save_checkpoint
from training.ema import WeightAverage
from training.launch import seed_module_randomness
from training.metrics import Metrics, keep_steps_before
from training.module import trainable_parameters
from training.optimizers import prepare_training, uses_deepspeed


@dataclasses.dataclass
class Training:
    """The training of one transformer.

    Args:
        accelerator (`Accelerator`)
        args (`argparse.Namespace`)
        stage (`Stage`): Steps of the stages before count in the numbers of checkpoints and in the record of the run,
            not in the schedule or in what is drawn: those are as in a run of this transformer alone.
        module (`DiffusionTrainingModule`): What requires a gradient is trained.
        dataset (`TrainingDataset`)
        batches (`BatchPlan`)
        log (`MemoryLog`)
        optimizer (`tuple`): From `find_optimizer`.
        resumed_steps (`int`): The optimizer steps of this stage that are in the checkpoint.
        checkpoint (`pathlib.Path`, *optional*): Training state to resume from.
        validation (`Validation`, *optional*): Previews and the loss of held-out items; not after the last step.
    """

    accelerator: object
    args: object
    stage: object
    module: object
    dataset: object
    batches: object
    log: object
    optimizer: tuple
    resumed_steps: int = 0
    checkpoint: object = None
    validation: object = None

    @property
    def steps(self):
        """The optimizer steps to make, counted from 1."""
        return range(self.resumed_steps + 1, self.batches.last_step + 1)

    @property
    def steps_before(self):
        """How many steps the stages before make."""
        return self.stage.number * self.batches.last_step


def train(training):
    """Train a module in place. With --ema it has the averaged weights at the end.

    Args:
        training (`Training`)

    Raises:
        FailedError: A trainable tensor gets no gradient, a loss is not finite, or a checkpoint cannot be written.
        StoppedError: A signal asked for it; a checkpoint of the last step that was made is complete.
    """
    accelerator, args, batches = training.accelerator, training.args, training.batches
    model, optimizer, lr_scheduler, weights, average = _prepare(training)
    after = AfterStep(training, optimizer, average)
    # Without its bar, a reason for an early end would be printed on the line of it.
    with after.stop, after.metrics.bar, contextlib.closing(_load(training)) as loader:
        after.catch_up()
        for step in training.steps:
            num_micro_batches = len(batches.micro_batches(step))
            # The last step of an epoch may have fewer micro-batches than Accelerate counts up to.
            accelerator.step = args.gradient_accumulation_steps - num_micro_batches
            losses, sample_losses = [], []
            for number, batch in zip(range(num_micro_batches), loader, strict=False):
                with accelerator.accumulate(model):
                    loss = model(batch) * batches.loss_weight(step, number, accelerator.process_index)
                    losses.append(loss.detach())
                    sample_losses.append(training.module.sample_losses)
                    accelerator.backward(loss)
                    weights.take_gradients()
            # Gradients are in sync now: it was the last micro-batch.
            grad_norm = clip_gradients(accelerator, weights, args.max_grad_norm)
            lr = lr_scheduler.get_last_lr()[0]
            if not after.skips(grad_norm):
                optimizer.step()
            weights.write_back()
            lr_scheduler.step()
            optimizer.zero_grad()
            after(step, losses, sample_losses, lr=lr, grad_norm=grad_norm)
    training.log.end_training()
    average.replace_weights()


def _load(training):
    """Yield micro-batches on the device, made ahead of the steps."""
    accelerator, args = training.accelerator, training.args
    batches = load_batches(
        *(training.dataset, training.batches),
        process_index=accelerator.process_index,
        steps=training.steps,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    for batch in batches:
        yield send_to_device(batch, accelerator.device, non_blocking=True)


class AfterStep:
    """What follows an optimizer step: its numbers, a checkpoint, a validation, the end that a signal asks for.

    Args:
        training (`Training`)
        optimizer, average: As `train` has them.
    """

    def __init__(self, training, optimizer, average):
        self.training, self.average, self.is_skipped, self.saved_step = training, average, False, None
        accelerator, module = training.accelerator, training.module
        first_step = training.steps_before + training.steps.start
        self.num_skipped = keep_steps_before(first_step, accelerator, training.args.output_dir, training.checkpoint)
        self.metrics, self.stop = Metrics(training), StopRequest(accelerator)
        self.liveness = GradientLiveness(trainable_parameters(module))
        training.log.watch(module, optimizer, step=first_step, average=average.tensors)

    def catch_up(self):
        """Validate after the step of the checkpoint, where a run was killed in the middle of that."""
        training = self.training
        if training.steps and training.checkpoint is not None:
            number = training.steps_before + training.resumed_steps
            own = pathlib.Path(training.args.output_dir, f"checkpoint-{number}")
            if training.checkpoint.resolve() == own.resolve():
                self.saved_step = number
            self._validate_if_due(number)

    def _validate_if_due(self, number):
        training = self.training
        if training.validation is not None and training.validation.is_due(number):
            with training.log.aside("previews"), self.average.applied(), self.metrics.aside():
                training.validation.run(number, is_stopped=lambda: self.stop.signal != 0)
            self._end_if_stopped(number)

    def _save(self, number):
        training, self.saved_step = self.training, number
        self.metrics.flush()
        with self.metrics.aside():
            save_checkpoint(training.accelerator, training.args, number, training.batches)

    def _end_if_stopped(self, number):
        if stopped_by := self.stop.agreed():
            if self.saved_step != number:
                self._save(number)
            what_to_do = f"checkpoint-{number} is complete, continue with --resume_from_checkpoint latest"
            raise StoppedError(f"stopped by {stopped_by} after step {number}; {what_to_do}")

    def skips(self, grad_norm):
        """Return whether the step is left out, as --max_skipped_steps allows where its gradient is not finite."""
        if self.training.args.max_skipped_steps:
            self.is_skipped = not grad_norm.isfinite().item()
            self.num_skipped = self.num_skipped + 1 if self.is_skipped else 0
        return self.is_skipped

    def __call__(self, step, losses, sample_losses, *, lr, grad_norm):
        """Record a step, and do all that is due after it. Waits for the device only when it writes.

        Args:
            step (`int`)
            losses (`list[torch.Tensor]`, scalars): Of each micro-batch.
            sample_losses (`list[torch.Tensor]`): Of each sample of them.
            lr (`float`), grad_norm (`torch.Tensor`, a scalar, or `float`): See `Metrics.add`.
        """
        training, metrics = self.training, self.metrics
        accelerator, args, steps = training.accelerator, training.args, training.steps
        if not self.is_skipped:
            self.average.step()
        loss = torch.stack(losses).sum() / args.gradient_accumulation_steps
        may_be_bad = self.is_skipped and self.num_skipped <= args.max_skipped_steps
        metrics.add(step, loss, torch.cat(sample_losses), lr, grad_norm, may_be_bad)
        # With several processes after the first step: DDP does not survive a second one with a silent tensor.
        if step == steps[: 2 if accelerator.num_processes == 1 else 1][-1]:
            self.liveness.check()
        number, is_last = training.steps_before + step, step == steps[-1]
        if is_last or self.is_skipped or step % args.logging_steps == 0:
            metrics.flush()
        # A run that continues with another transformer has a checkpoint between the two.
        every = args.checkpointing_steps
        if every and (number % every == 0 or (is_last and not training.stage.is_last)):
            self._save(number)
        self._end_if_stopped(number)
        if not is_last:
            self._validate_if_due(number)


def _prepare(training):
    """Return what trains `module`, in the state of a checkpoint if there is one.

    Returns:
        `tuple` of the prepared module and optimizer, the schedule, the `MasterWeights` and their `WeightAverage`.
    """
    accelerator, args, module = training.accelerator, training.args, training.module
    module.train()
    model, optimizer, lr_scheduler, weights = prepare_training(
        accelerator, module, args, training.optimizer, training.batches.last_step
    )
    average = WeightAverage(weights, args)
    training.log.point("prepared")
    register_state(accelerator, weights, average, lr_scheduler)
    seed_module_randomness(args.seed, accelerator.process_index)
    if training.checkpoint is not None:
        load_checkpoint(accelerator, training.checkpoint, lr_scheduler)
        rate = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"resumed from {training.checkpoint.name}, learning rate of the next step {rate:.3g}")
    return model, optimizer, lr_scheduler, weights, average


def clip_gradients(accelerator, weights, max_grad_norm):
    """Clip the whole gradient to `max_grad_norm` (0: not at all); return its norm before, a scalar or `float`."""
    if max_grad_norm > 0 or uses_deepspeed(accelerator):
        # DeepSpeed's engine has clipped, by the same setting, and stepped in `backward`: this only asks for the norm.
        return accelerator.clip_grad_norm_(weights.masters, max_grad_norm)
    return torch.nn.utils.get_total_norm([master.grad for master in weights.masters if master.grad is not None])


class GradientLiveness:
    """Notices trainable parameters to which the backward pass brings nothing.

    Args:
        parameters (`dict[str, nn.Parameter]`): By name.
    """

    def __init__(self, parameters):
        self.silent = set(parameters)
        self.hooks = [
            # Also where DeepSpeed takes the gradients away at once.
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.silent.discard(name))
            for name, parameter in parameters.items()
        ]

    def check(self):
        """Stop listening, and raise `FailedError` with the names of those that got no gradient so far."""
        for hook in self.hooks:
            hook.remove()
        if self.silent:
            found = f"{len(self.silent)} trainable tensors got no gradient in the first steps, such as"
            raise FailedError(f"{found} {', '.join(sorted(self.silent)[:3])}: take them out of what is trained.")
