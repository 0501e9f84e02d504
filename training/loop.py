"""The training loop, in Accelerate's words and order, and what stands right before and after it."""

import pathlib

import torch
from accelerate.utils import send_to_device

from dataset.batches import load_batches
from runtime.errors import FailedError, StoppedError
from runtime.processes import StopRequest, gather_from_all
from training.checkpoints import load_checkpoint, register_state, save_checkpoint
from training.ema import WeightAverage
from training.launch import seed_module_randomness
from training.module import trainable_parameters
from training.optimizers import prepare_training, uses_deepspeed
from training.reporting import Metrics


def train(
    accelerator,
    module,
    dataset,
    batches,
    args,
    *,
    log,
    optimizer,
    steps,
    checkpoint=None,
    validation=None,
    trackers=None,
    expert=None,
    steps_before=0,
    is_followed=False,
):
    """Train `module` in place. With --ema it has the averaged weights at the end.

    Args:
        accelerator (`Accelerator`)
        module (`DiffusionTrainingModule`): What requires a gradient is trained.
        dataset (`TrainingDataset`)
        batches (`BatchPlan`)
        args (`argparse.Namespace`)
        log (`MemoryLog`)
        optimizer (`tuple`): From `find_optimizer`.
        steps (`range`): The optimizer steps to make, counted from 1.
        checkpoint (`pathlib.Path`, *optional*): Training state to go on from.
        validation (`Validation`, *optional*): Previews, and the loss of what is held out; not after the last step.
        trackers (`Trackers`, *optional*): Get the numbers too.
        expert (`str`, *optional*): Which of several transformers this is, for the record.
        steps_before (`int`):
            Steps that the run made on another transformer. They count in the numbers of checkpoints and in the record
            of the run, not in the schedule or in what is drawn: those are as in a run of this transformer alone.
        is_followed (`bool`): The run goes on with another transformer; its checkpoints begin with one of this end.

    Raises:
        FailedError: A trainable tensor gets no gradient, a loss is not finite, or a checkpoint cannot be written.
        StoppedError: A signal asked for it; a checkpoint of the last step that was made is complete.
    """
    model, optimizer, lr_scheduler, weights, average = _prepare(
        accelerator, module, args, log=log, optimizer=optimizer, last_step=steps.stop - 1, checkpoint=checkpoint
    )
    loader = load_batches(
        dataset,
        batches,
        process_index=accelerator.process_index,
        steps=steps,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    path = pathlib.Path(args.output_dir) / "metrics.jsonl"
    metrics = Metrics(
        accelerator,
        path,
        steps,
        batches,
        dataset,
        log=log,
        resumed_path=checkpoint and checkpoint.parent / path.name,
        trackers=trackers,
        expert=expert,
        steps_before=steps_before,
    )
    liveness = GradientLiveness(trainable_parameters(module))
    log.watch(module, optimizer, step=steps_before + steps.start, average=average.tensors)
    step, losses, sample_losses = steps.start - 1, [], []
    num_skipped = gather_from_all(accelerator, metrics.num_skipped)[0]
    with StopRequest(accelerator) as stop, metrics:

        def validate(number):
            with log.aside("previews"), average.applied(), metrics.aside():
                validation.run(number, trackers, is_stopped=lambda: stop.signal != 0)

        if steps and checkpoint is not None and validation is not None and validation.is_missing(steps_before + step):
            validate(steps_before + step)
            if stopped_by := stop.agreed():
                raise StoppedError(f"stopped by {stopped_by}; {checkpoint} is complete, go on from there")
        for batch in metrics.waiting_for(loader):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            if not losses:
                # The last step of an epoch may have fewer micro-batches than Accelerate counts up to.
                accelerator.step = args.gradient_accumulation_steps - len(batches.micro_batches(step + 1))
            with accelerator.accumulate(model):
                loss = model(batch) * batches.loss_weight(step + 1, len(losses), accelerator.process_index)
                losses.append(loss.detach())
                sample_losses.append(module.sample_losses)
                accelerator.backward(loss)
                weights.take_gradients()
                is_skipped = False
                if accelerator.sync_gradients:
                    grad_norm = clip_gradients(accelerator, weights, args.max_grad_norm)
                    lr = lr_scheduler.get_last_lr()[0]
                    if args.max_skipped_steps:
                        is_skipped = not grad_norm.isfinite().item()
                        num_skipped = num_skipped + 1 if is_skipped else 0
                if not is_skipped:
                    optimizer.step()
                if accelerator.sync_gradients:
                    weights.write_back()
                    lr_scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue

            step += 1
            if not is_skipped:
                average.step()
            metrics.add(
                step=step,
                loss=torch.stack(losses).sum() / args.gradient_accumulation_steps,
                sample_losses=torch.cat(sample_losses),
                lr=lr,
                grad_norm=grad_norm,
                may_be_bad=is_skipped and num_skipped <= args.max_skipped_steps,
            )
            losses, sample_losses = [], []
            # With several processes after the first step: DDP does not survive a second one with a silent tensor.
            if step == steps[: 2 if accelerator.num_processes == 1 else 1][-1]:
                liveness.check()
            number, is_last = steps_before + step, step == steps[-1]
            saves = args.checkpointing_steps is not None and (
                number % args.checkpointing_steps == 0 or (is_last and is_followed)
            )
            validates = not is_last and validation is not None and validation.is_due(number)
            if saves or validates or is_last or is_skipped or step % args.logging_steps == 0:
                metrics.flush()
            if saves:
                with metrics.aside():
                    save_checkpoint(accelerator, args, number, batches)
            if validates and not stop.agreed():
                validate(number)
            if stopped_by := stop.agreed():
                metrics.flush()
                if not saves:
                    save_checkpoint(accelerator, args, number, batches)
                raise StoppedError(
                    f"stopped by {stopped_by} after step {number}; checkpoint-{number} is complete, go on with "
                    "--resume_from_checkpoint latest"
                )
        metrics.close()
    average.replace_weights()


def _prepare(accelerator, module, args, *, log, optimizer, last_step, checkpoint):
    """Return what trains `module`, in the state of a checkpoint if there is one.

    Returns:
        `tuple` of the prepared module and optimizer, the schedule, the `MasterWeights` and their `WeightAverage`.
    """
    module.train()
    model, optimizer, lr_scheduler, weights = prepare_training(
        accelerator, module, args, optimizer=optimizer, last_step=last_step
    )
    average = WeightAverage(weights, args)
    log.point("prepared")
    register_state(accelerator, weights, average, lr_scheduler)
    seed_module_randomness(args.seed, accelerator.process_index)
    if checkpoint is not None:
        load_checkpoint(accelerator, checkpoint, lr_scheduler)
        rate = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"resumed from {checkpoint.name}, learning rate of the next step {rate:.3g}")
    return model, optimizer, lr_scheduler, weights, average


def clip_gradients(accelerator, weights, max_grad_norm):
    """Clip the whole gradient to `max_grad_norm` (0: not at all) and return its norm before, a scalar tensor."""
    if uses_deepspeed(accelerator):
        # The engine clipped and stepped in `backward`, by the same setting.
        return torch.as_tensor(accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm())
    if max_grad_norm > 0:
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
        self.hooks = []
        if self.silent:
            names = sorted(self.silent)
            raise FailedError(
                f"{len(names)} trainable tensors got no gradient in the first steps, such as {', '.join(names[:3])}: "
                "they would not be trained. Take them out of what is trained."
            )
