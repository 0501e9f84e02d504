"""What training asks of a model: each file of this folder answers it with one subclass of `Family`.

All that differs between models is in such a subclass, and nothing of it anywhere else.
"""

import dataclasses
import inspect

import torch

from blockwise import stock
from pipelines import loading, weights


@dataclasses.dataclass(frozen=True)
class Stage:
    """One transformer that a run trains. A model of two experts has two stages, one after the other.

    Args:
        name (`str`, *optional*): Of the expert, and of the folder of its LoRA; None for an only transformer.
        subfolder (`str`): What the pipeline calls the transformer.
        sigma_range (`tuple[float, float]`): The lowest and highest sigma at which it is used.
        other (`str`, *optional*): What the pipeline calls the one that samples together with it.
        number (`int`): How many stages of this run come before it.
        is_last (`bool`): Whether none comes after it.
    """

    name: str | None = None
    subfolder: str = "transformer"
    sigma_range: tuple[float, float] = (0.0, 1.0)
    other: str | None = None
    number: int = 0
    is_last: bool = True


class Family:
    """A pipeline of one family, known from its configs. Weights are loaded only by the methods that say so.

    A subclass states the class attributes, and answers every question below that has no default.

    Args:
        pretrained_model_name_or_path (`str`): Folder of a diffusers pipeline, or its id on the hub.
        revision, variant (`str`, *optional*): As `from_pretrained` takes them.
        transformer_path (`str`, *optional*): See `loading.load_transformer`; replaces the transformer that is trained.
        dtype (`torch.dtype`): Of the transformer.

    Attributes:
        index (`dict`): The pipeline's model_index.json.
        skeleton (`nn.Module`): The transformer on the meta device, in the dtypes that it is trained in.
        tokenizer (`DiffusionPipeline`): The stock pipeline with nothing but its tokenizers.

    Raises:
        OSError, ValueError: The pipeline cannot be read, or is of another family.
    """

    # The stock pipelines that can be trained, the first of which loads; the classes of parts that have weights.
    pipelines = ()
    parts = {}
    # The parts that encode a caption, and those that encode an image or a clip.
    text_parts = ("text_encoder", "tokenizer")
    media_parts = ("vae",)
    is_video = False
    # Frames that a clip has at least.
    min_frames = 1
    # Height and width in pixels are multiples of it.
    divisor = 16
    # What replaces a caption that is dropped.
    dropped_caption = ""
    # The tensors of a caption (L, ...) whose L differs from caption to caption: they are padded, with a mask.
    padded = ("prompt_embeds",)
    # The further files of an item that it takes: {role, see `dataset.tables.ROLE_COLUMNS`: whether all need one}.
    roles = {}
    # How those are used, see `dataset.inspection.like_target`, which is the default.
    use_file = None
    # To be raised whenever the results of `encode_prompt` or `encode_media` change: cached ones are not read then.
    encoding_version = 1
    # What the stock pipeline calls the images that it starts from.
    image_arguments = ()

    def __init__(
        self,
        pretrained_model_name_or_path,
        *,
        revision=None,
        variant=None,
        transformer_path=None,
        dtype=torch.bfloat16,
    ):
        self.path, self.transformer_path, self.dtype = str(pretrained_model_name_or_path), transformer_path, dtype
        self.hub = {"revision": revision, "variant": variant}
        self.index = loading.check_pipeline(self.pipelines, self.parts, self.path, **self.hub)
        self.skeleton = loading.load_transformer_skeleton(
            self.transformer_class, self.path, dtype=dtype, transformer_path=transformer_path, **self.hub
        )
        with loading.built_from("tokenizer"):
            self.tokenizer = self.load_parts([name for name in self.index if name.startswith("tokenizer")])

    @classmethod
    def from_args(cls, args):
        """Return the family of the flags of the groups "model" and "training"."""
        dtype = torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
        names = ("pretrained_model_name_or_path", "revision", "variant", "transformer_path")
        return cls(**{name: getattr(args, name) for name in names}, dtype=dtype)

    # ---- what it is

    @property
    def transformer_class(self):
        """The class of the transformer."""
        return self.parts["transformer"][0]

    @property
    def pipeline_class(self):
        """The stock pipeline that samples what is trained."""
        return self.pipelines[0]

    @property
    def values(self):
        """Defaults that depend on the model, as `resolve_for_model` takes them; None where --help shows them all."""
        return None

    def resolve(self, args):
        """Take over what the flags choose of that which the model offers, such as a task."""

    @property
    def stages(self):
        """The `Stage`s that this run trains, in order."""
        return (Stage(),)

    @property
    def identity(self):
        """What makes it this model, for a checkpoint to remember: a `dict` of values that JSON takes."""
        return loading.describe(self.skeleton)

    @property
    def block_lists(self):
        """The number of blocks by the name of their list, in the order in which they run."""
        return stock.block_lists(self.skeleton)

    @property
    def never_trained(self):
        """The names of the modules that the architecture gives no gradient."""
        return []

    def check_lora_targets(self, targets):
        """Raise RefusedError if no library loads a LoRA of these layers."""

    def num_tokens(self, height, width, num_frames):
        """Return T, the tokens of a sample at a size in pixels."""
        raise NotImplementedError

    def sigma_shift(self, height, width):
        """Return by how much sigmas are shifted at a size in pixels, where no flag sets it."""
        raise NotImplementedError

    # ---- its encoders

    def encodings(self, item, caption):
        """Yield what is to be encoded of an item; the results together are its sample.

        Args:
            item (`dataset.inspection.Item`)
            caption (`str`): Its own, or the one that replaces it when it is dropped.

        Yields:
            `tuple[str, tuple[str, ...], tuple[str, ...]]`: Which encoder, `"captions"` or `"media"`; from which texts;
            from the files of which roles.
        """
        yield "captions", (caption,), ()
        yield "media", (), ("target",)

    @property
    def media_settings(self):
        """What an encoded image or clip depends on in addition to its encoders; values that JSON takes."""
        return None

    def encoder_identities(self, digests):
        """Return what results of each encoder depend on in addition to what they are made of.

        Args:
            digests (`dict[str, str]`): From `check_weights`.

        Raises:
            OSError: The pipeline is not on this machine.
        """

        def identity(parts):
            return weights.weights_identity(self.path, parts, digests, **self.hub), self.encoding_version

        return {"captions": identity(self.text_parts), "media": (*identity(self.media_parts), self.media_settings)}

    def count_prompt_tokens(self, prompt):
        """Return how many tokens `prompt` has, and how many of them the pipeline keeps."""
        raise NotImplementedError

    def embedded_tokens(self, num_tokens):
        """Return how many tokens the embedding of a caption has of which `num_tokens` are kept."""
        return num_tokens

    def load_prompt_encoder(self, device):
        """Load what `encode_prompt` takes, in bf16."""
        return self.load_parts(self.text_parts, dtype=torch.bfloat16).to(device)

    def encode_prompt(self, encoder, prompt):
        """Encode one caption exactly as the stock pipeline does.

        Returns:
            `dict[str, torch.Tensor]`: `prompt_embeds` (L, J), and what else the model takes of a text. Each tensor is
            stacked over a batch under its name, or padded if it is one of `padded`, and handed to `predict`.
        """
        raise NotImplementedError

    def load_media_encoder(self, device):
        """Load what `encode_media` takes, in fp32."""
        return self.load_parts(self.media_parts).to(device)

    def encode_media(self, encoder, pixel_values):
        """Encode pixels in [-1, 1], (3, height, width) or (3, N, height, width), to a `dict` of fp32 tensors.

        Together with the tensors of the caption it is a sample: `latents` (C, ...), and what conditions it.
        """
        raise NotImplementedError

    def encoder_skeletons(self, *, num_tokens, height, width, num_frames):
        """Build the encoders from their configs alone, without memory for their weights.

        Args:
            num_tokens (`int`): Of the longest caption.
            height, width (`int`), num_frames (`int`): Of a sample, in pixels and frames.

        Returns:
            `dict[str, tuple[list[nn.Module], Callable[[], dict[str, torch.Tensor]]]]`: Phase -> its modules, on the
            meta device, and what runs them, once they are elsewhere, as encoding a caption or an image does. Together
            the results are what a sample holds. "previews" has what these need in addition to the transformer.
        """
        raise NotImplementedError

    # ---- its weights

    digest_tensors = staticmethod(weights.digest_tensors)
    read_tensors = staticmethod(weights.read_tensors)

    def _part_names(self, pipeline_class):
        """Return the names of the parts that a stock pipeline of this model takes."""
        known = inspect.signature(pipeline_class.__init__).parameters
        return [name for name in known if isinstance(self.index.get(name), (list, tuple))]

    def load_parts(self, names, *, dtype=torch.float32, pipeline_class=None):
        """Load a stock pipeline on the CPU with nothing but some of its parts."""
        pipeline_class = pipeline_class or self.pipeline_class
        absent = dict.fromkeys(name for name in self._part_names(pipeline_class) if name not in names)
        return pipeline_class.from_pretrained(self.path, dtype=dtype, **absent, **self.hub)

    def parts_read(self, *, previews):
        """Return the parts whose weights a run reads, the transformer that it trains first."""
        stages = self.stages
        others = [stage.other for stage in stages if previews and stage.other is not None]
        encoders = [part for part in self.parts if not part.startswith("transformer")]
        return list(dict.fromkeys([*(stage.subfolder for stage in stages), *others, *encoders]))

    def check_weights(self, reads):
        """Return the digests of parts whose weights are here; see `loading.check_weights`."""
        return loading.check_weights(self.parts, self.path, reads, transformer_path=self.transformer_path, **self.hub)

    def fetch_weights(self, reads, checked):
        """Bring what is on the hub only to this machine; see `loading.fetch_weights`."""
        path = self.transformer_path
        return loading.fetch_weights(self.parts, self.path, reads, checked, transformer_path=path, **self.hub)

    def load_transformer(self, subfolder="transformer"):
        """Load a transformer on the CPU: of a `Stage`, or another one as the pipeline has it."""
        is_trained = subfolder in [stage.subfolder for stage in self.stages]
        return loading.load_transformer(
            self.transformer_class,
            self.path,
            dtype=self.dtype,
            transformer_path=self.transformer_path if is_trained else None,
            subfolder=subfolder,
            **self.hub,
        )

    # ---- a step

    def predict(self, transformer, noisy_latents, timestep, batch):
        """Predict the flow. Where activations live is on the blocks: see `blockwise.stock.install_plan`.

        Args:
            transformer (`nn.Module`)
            noisy_latents (`torch.Tensor` of shape (B, C, ...)): fp32.
            timestep (`torch.Tensor` of shape (B,)): fp32, in [0, 1000].
            batch (`dict`): From `collate`: the tensors of the samples.

        Returns:
            `torch.Tensor` of the shape of `noisy_latents`.
        """
        raise NotImplementedError

    def trained_part(self, flow):
        """Return the part of `flow` (B, C, ...) that the loss sees: all that the model is given with noise."""
        return flow

    # ---- previews and results

    def load_preview_pipeline(self):
        """Load the stock pipeline on the CPU without transformers and text encoder; the rest is in fp32."""
        parts = [name for name in self.index if not name.startswith("transformer") and name not in self.text_parts]
        return self.load_parts(parts)

    def guidance(self, scale):
        """Return what `sample` takes for a --guidance_scale."""
        return {"guidance_scale": scale}

    def sample(self, pipeline, prompt, negative_prompt, **settings):
        """Sample one preview as the stock pipeline does.

        Args:
            pipeline (`DiffusionPipeline`): From `load_preview_pipeline`, with its transformers.
            prompt, negative_prompt (`dict`): From `encode_prompt`; the second None: without guidance.
            settings: `images` (`list[PIL.Image.Image]`) to start from, `seed` of the noise, which is drawn on the
                CPU, `height` and `width` in pixels, `num_frames`, `num_inference_steps`, and those of `guidance`.

        Returns:
            `list[PIL.Image.Image]`: The image, or the frames.
        """
        raise NotImplementedError

    def lora_export_name(self, name):
        """Return the name in a LoRA file of a layer called `name` in diffusers."""
        return f"transformer.{name}"

    def lora_metadata(self, stage):
        """Return entries for the header of a LoRA file, `dict[str, str]`."""
        return {}

    def stock_pipeline(self, transformer):
        """Return the stock pipeline with nothing but a transformer, in the place of every one that it has."""
        known = inspect.signature(self.pipeline_class.__init__).parameters
        parts = dict.fromkeys(self._part_names(self.pipeline_class))
        return self.pipeline_class(**parts | {name: transformer for name in known if name.startswith("transformer")})
