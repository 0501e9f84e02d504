"""Fine-tune Wan-Video, LoRA or full: text, image, or first and last frame to video.

On one device, on several, and on a CPU:
    python train_wan_video.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --dataset_path DIR ...
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_wan_video.py ...
    accelerate launch --config_file accelerate_configs/cpu.yaml train_wan_video.py ...
Runnable settings for each model: scripts/wan_video/.
"""

import functools

from training import command


# What --help shows; the defaults themselves depend on the model and are in its `WanVariant`.
VALUES = {
    "flags": ("num_frames", "fps", "clip_part", "task", "expert", "validation_image"),
    "divisor": "16 (TI2V-5B: 32)",
    "height": "480 (TI2V-5B: 704)",
    "width": "832 (TI2V-5B: 1280)",
    "num_frames": "81 (TI2V-5B: 121)",
    "fps": "16 (TI2V-5B: 24)",
    "lora_target_modules": "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2, add_k_proj,add_v_proj where present",
    "tasks": "TI2V-5B",
    "experts": "Wan2.2 A14B",
    "timestep_sampling": "uniform",
    "sigma_shift": "5, but 3 for Wan2.1 T2V and I2V up to 832x480 pixels",
    "dropped_caption": "an empty caption",
    "described_negative_prompt": "the one that the model's authors use, in Chinese",
    "guidance_scale": "5.0 (A14B: 4.0 and, for low noise, 3.0; from image to video 3.5)",
    "num_inference_steps": "50 (A14B: 40)",
}

if __name__ == "__main__":
    args = command.begin(__doc__, VALUES, resolve=False)  # before torch is imported

from pipelines.wan_video import WanVideo
from training.run import run


main = functools.partial(run, WanVideo)

if __name__ == "__main__":
    command.finish(main, args)
