"""What training Wan-Video takes of a GPU's memory, predicted on a CPU with fake tensors. NOT measured on a GPU.

    python benchmarks/wan_video_memory.py [--model Wan2.1-T2V-14B]    # without a model all of them, two minutes

Method: weights, adapters, masters and optimizer state are counted. One step of `WanVideoTrainingModule` then runs at
its real size on tensors without content, and every storage is followed from its first use to its end: with 2 blocks
and with 4, and the line through the two gives the peak of all blocks (it is the same bytes as with all of them).
Parked inputs are subtracted: all but the last block's are in host memory at the peak, pinned in powers of two.

Batch 1, 512 text tokens. LoRA: rank 32, the default layers, AdamW. Full: adamw_8bit, the peak of the backward pass.

Limits: the CUDA context, fragmentation, workspaces and copies in flight come on top. The CPU's flash attention stands
for CUDA's, which saves the same tensors. The CPU has no fused RMSNorm and would save fp32 copies, so it is replaced.
"""

import argparse
import math
import pathlib
import sys
import weakref
from unittest import mock

import torch
from diffusers import WanTransformer3DModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from pipelines.wan_video import default_lora_targets  # noqa: E402
from train_wan_video import WanVideoTrainingModule  # noqa: E402
from training.module import add_lora, find_lora_targets, train_all_weights  # noqa: E402


GIB = 2**30
CLIP_480P, CLIP_720P, CLIP_TI2V = (81, 480, 832), (81, 720, 1280), (121, 704, 1280)  # frames, height, width
I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
TI2V = {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30}
# What the config of the published transformer says other than the class does by default, and the clips to look at.
MODELS = {
    "Wan2.1-T2V-1.3B": ({"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, [CLIP_480P]),
    "Wan2.1-T2V-14B": ({}, [CLIP_480P, CLIP_720P]),
    "Wan2.1-I2V-14B-480P": (I2V, [CLIP_480P]),
    "Wan2.1-I2V-14B-720P": (I2V, [CLIP_720P]),
    "Wan2.1-FLF2V-14B-720P": (I2V | {"pos_embed_seq_len": 514}, [CLIP_720P]),
    "Wan2.2-T2V-A14B": ({}, [CLIP_480P, CLIP_720P]),  # of both A14B one expert, which is trained alone
    "Wan2.2-I2V-A14B": ({"in_channels": 36}, [CLIP_480P, CLIP_720P]),
    "Wan2.2-TI2V-5B": (TI2V, [CLIP_TI2V]),  # from image to video: each token has its own timestep
}


class FusedRMSNorm(torch.autograd.Function):
    """Saves and returns what the fused CUDA kernel does, in size."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, but for those of the tensors `known` beforehand."""

    def __init__(self, known):
        super().__init__()
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                assert storage.nbytes() < 16 * GIB, f"not flash attention: {func} made {tuple(tensor.shape)}"
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def forget(self, key, nbytes):
        self.seen.remove(key)
        self.live -= nbytes


def make_transformer(config, mode):
    """Return what training starts from, without memory for it: `from_pretrained` in bf16 leaves some modules fp32."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel(**config)
    for name, parameter in transformer.named_parameters():
        if not set(name.split(".")) & set(transformer._keep_in_fp32_modules):
            parameter.data = parameter.data.to(torch.bfloat16)
    if mode == "full":
        train_all_weights(transformer, never_trained=[])
    else:
        targets = find_lora_targets(transformer, default_lora_targets(transformer), never_trained=[])
        args = argparse.Namespace(lora_rank=32, lora_alpha=32.0, lora_dropout=0.0, seed=0)
        add_lora(transformer, targets, args)
    return transformer


def latent_grid(config, clip):
    """Return frames, height and width of the latents of `clip`."""
    factor = 16 if config.out_channels == TI2V["out_channels"] else 8
    return 1 + (clip[0] - 1) // 4, clip[1] // factor, clip[2] // factor


def peak_of_step(config, clip, mode, *, use_gradient_checkpointing):
    """Return the highest number of bytes in a step beside the weights and, of a LoRA, its gradients."""
    transformer = make_transformer(config, mode)
    config = transformer.config
    grid = latent_grid(config, clip)
    with FakeTensorMode(allow_non_fake_inputs=True):
        transformer.to_empty(device="cpu")  # now, since PEFT cannot add adapters to fake tensors
        known = [*transformer.parameters(), *transformer.buffers()]
        if mode == "lora":
            for parameter in filter(lambda parameter: parameter.requires_grad, transformer.parameters()):
                parameter.grad = torch.empty_like(parameter)
                known.append(parameter.grad)
        module = WanVideoTrainingModule(
            transformer,
            first_frame_is_clean=config.out_channels == TI2V["out_channels"],
            use_gradient_checkpointing=use_gradient_checkpointing,
        )
        with LiveBytes(known) as live, mock.patch("torch.nn.functional.rms_norm", _rms_norm):
            batch = {"sigmas": torch.empty(1), "prompt_embeds": torch.empty(1, 512, 4096, dtype=torch.bfloat16)}
            batch |= {name: torch.empty(1, config.out_channels, *grid) for name in ("latents", "noise")}
            if config.in_channels != config.out_channels:
                batch["condition"] = torch.empty(1, config.in_channels - config.out_channels, *grid)
            if config.image_dim is not None:
                num_images = 1 if config.pos_embed_seq_len is None else 2
                batch["image_embeds"] = torch.empty(1, num_images, 257, config.image_dim)
            module(batch).backward()
    return live.peak


def _rms_norm(x, normalized_shape, weight, eps):
    return FusedRMSNorm.apply(x, weight)


def predict(name, clip, mode):
    """Return the figures of a model by their names, bytes but for `num_parameters` and `num_trained`."""
    config, _ = MODELS[name]
    transformer = make_transformer(config, mode)
    base = [p for name, p in transformer.named_parameters() if ".lora_" not in name]
    trained = [p for p in transformer.parameters() if p.requires_grad]
    num_blocks, num_trained = len(transformer.blocks), sum(p.numel() for p in trained)
    figures = {"num_parameters": sum(p.numel() for p in base), "num_trained": num_trained}
    figures["weights"] = sum(p.nbytes for p in base)
    if mode == "lora":
        constant, grads_of_block = figures["weights"] + 16 * num_trained, 0
    else:
        masters = sum(4 * p.numel() for p in trained if p.dtype != torch.float32)
        constant = figures["weights"] + masters + (2 + 2 * 4 / 256) * num_trained
        grads_of_block = sum(p.nbytes for p in transformer.blocks[0].parameters())
        figures["at_the_step"] = constant + 4 * num_trained
    for key, recompute in (("keep", False), ("recompute", True)):
        low, high = (
            peak_of_step(config | {"num_layers": n}, clip, mode, use_gradient_checkpointing=recompute) for n in (2, 4)
        )
        figures[f"{key}_of_block"] = (high - low) / 2
        figures[key] = constant + low + (num_blocks - 2) * (high - low) / 2
    # Recomputed, what grows with every block is its input or, if that is more, its gradients. These cannot be parked.
    figures["park"] = figures["recompute"] - (num_blocks - 1) * (figures["recompute_of_block"] - grads_of_block)
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    input_of_block = 2 * math.prod(latent_grid(transformer.config, clip)) // 4 * width
    figures["pinned_host"] = (num_blocks - 1) * 2 ** (input_of_block - 1).bit_length()
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, diffusers' WanTransformer3DModel, batch 1; GiB")
    columns = ("weights", "at_the_step", "keep_of_block", "keep", "recompute", "park", "pinned_host")
    print(f"{'model':21} {'clip':12} mode {'trained':>9} {' '.join(f'{column:>13}' for column in columns)}")
    for mode in ("lora", "full"):
        for name in [options.model] if options.model else MODELS:
            for clip in MODELS[name][1]:
                figures = predict(name, clip, mode)
                cells = [f"{figures[c] / GIB:13.2f}" if c in figures else f"{'':13}" for c in columns]
                size = f"{clip[2]}x{clip[1]}x{clip[0]}"
                print(f"{name:21} {size:12} {mode} {figures['num_trained'] / 1e6:8.1f}M {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
