"""Fine-tune Qwen-Image, LoRA or full.

On one device, on several, and on a CPU:
    python train_qwen_image.py --pretrained_model_name_or_path Qwen/Qwen-Image --dataset_path DIR --output_dir DIR
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_qwen_image.py ...
    accelerate launch --config_file accelerate_configs/cpu.yaml train_qwen_image.py ...
Runnable settings for each model: scripts/qwen_image/.
"""

import functools

from training import command


# What --help shows, and the defaults.
VALUES = {
    "divisor": 16,
    "height": 1024,
    "width": 1024,
    "lora_target_modules": (
        "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,"
        "img_mlp.net.0.proj,img_mlp.net.2,txt_mlp.net.0.proj,txt_mlp.net.2"
    ),
    "timestep_sampling": "logit_normal",
    "sigma_shift": "the model's own for the size of each image (2.00 at 1024x1024)",
    "dropped_caption": 'the caption " "',
    "negative_prompt": " ",
    "described_negative_prompt": 'a blank, " "',
    "guidance_scale": 4.0,
    "num_inference_steps": 50,
}

if __name__ == "__main__":
    args = command.begin(__doc__, VALUES)  # before torch is imported

from pipelines.qwen_image import QwenImage
from training.run import run


main = functools.partial(run, QwenImage)

if __name__ == "__main__":
    command.finish(main, args)
