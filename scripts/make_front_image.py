"""Put the samples of the demo next to its memory plot, for the front page.

bash scripts/demo.sh && .venv/bin/python scripts/make_front_image.py outputs/demo docs/demo.jpg
"""

import argparse
import pathlib

from PIL import Image


HEIGHT = 560  # pixels


def join_images(images, height):
    """Return images (`list[PIL.Image.Image]`), scaled to one height, next to each other on white."""
    images = [image.convert("RGB").resize((image.width * height // image.height, height)) for image in images]
    joined = Image.new("RGB", (sum(image.width for image in images), height), "white")
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width
    return joined


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo_dir", type=pathlib.Path, help="what scripts/demo.sh left")
    parser.add_argument("output", type=pathlib.Path, help="image file to write")
    options = parser.parse_args()
    images = [Image.open(options.demo_dir / name) for name in ("samples.png", "memory.png")]
    join_images(images, HEIGHT).save(options.output, quality=68, optimize=True)


if __name__ == "__main__":
    main()
