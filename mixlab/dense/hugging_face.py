"""Our backbones as backbones of transformers: any of its heads that takes a `backbone_config` takes ours.

Importing this module registers them with `AutoConfig` and `AutoBackbone`.
"""

from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from transformers import AutoBackbone, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.modeling_outputs import BackboneOutput

from mixlab.core.errors import ConfigError
from mixlab.models.backbone import Backbone
from mixlab.models.build import build
from mixlab.models.config import ModelConfig
from mixlab.models.pyramid import STRIDES, PyramidAdapter
from mixlab.models.zoo import model_config

Levels = Literal["native", "adapted", "learned"]


class MixlabBackboneConfig(BackboneConfigMixin, PreTrainedConfig):
    """A backbone's whole description (`backbone.config.plain()`) and the maps it hands on, all of them unless told.

    Make one with `backbone_config`.
    """

    model_type = "mixlab"

    architecture: dict[str, Any] | None = None
    levels: str = "native"
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.levels not in get_args(Levels):
            raise ConfigError(f"levels must be one of {', '.join(get_args(Levels))}; got {self.levels!r}.")
        features, indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        kwargs.pop("stage_names", None)  # a file holds them; the architecture says them
        self.stage_names = [f"stage{level + 1}" for level in range(len(self.map_channels))]
        if features is None and indices is None:
            features = list(self.stage_names)
        self.set_output_features_output_indices(out_features=features, out_indices=indices)
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, model: ModelConfig, **settings: Any) -> Self:
        """A config for a described backbone; `settings` are `levels` and one of `out_features` and `out_indices`."""
        return cls(architecture=model.plain(), **settings)

    @property
    def model(self) -> ModelConfig:
        """The checked description of the backbone."""
        if self.architecture is None:
            raise ConfigError(
                "A Mixlab backbone config without an architecture; use mixlab.dense.hugging_face.backbone_config(NAME)."
            )
        return ModelConfig.parse(self.architecture)

    @property
    def map_channels(self) -> list[int]:
        """Channels of every map, also of those that are not handed on; none for an empty config."""
        if self.architecture is None:  # what transformers makes to learn the defaults
            return []
        native = self.model.dims * (len(self.model.taps) or 1)
        return list(native) if self.levels == "native" else [native[at] for at in sources(len(native))]

    # What some heads ask a backbone's config for.

    @property
    def num_channels(self) -> int:
        return self.model.in_channels

    @property
    def hidden_sizes(self) -> list[int]:
        """Channels of the maps that are handed on."""
        return [self.map_channels[at] for at in self.out_indices]


class MixlabBackbone(BackboneMixin, PreTrainedModel):
    """A backbone with transformers' interface; `backbone` is the model itself, `maps` the adapter if there is one.

    It starts with our own initialization. For weights: `mixlab.load_weights(model.backbone, FILE,
    replace_classifier=True)`.
    """

    config: MixlabBackboneConfig
    config_class = MixlabBackboneConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    has_attentions = False
    supports_gradient_checkpointing = False
    _supports_sdpa = True  # whatever is asked for: the mixers choose their own attention

    def __init__(self, config: MixlabBackboneConfig) -> None:
        super().__init__(config)
        self.maps = build_maps(config)
        self.num_features = config.map_channels
        # transformers builds on the meta device before it fills in a file; what the file lacks is then still empty
        self.hollow = any(tensor.is_meta for tensor in self.parameters())
        self.post_init()

    @property
    def backbone(self) -> Backbone:
        model = self.maps.backbone if isinstance(self.maps, PyramidAdapter) else self.maps
        assert isinstance(model, Backbone)
        return model

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        if output_attentions:
            raise ConfigError("Mixlab's backbones do not hand out attention; use `model.backbone.explain`.")
        adapted = isinstance(self.maps, PyramidAdapter)
        maps: Any = self.maps(pixel_values) if adapted else self.backbone.pyramid(pixel_values)
        chosen = tuple(maps[at] for at in self.out_indices)
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BackboneOutput(feature_maps=chosen, hidden_states=tuple(maps) if asked else None)
        return output if return_dict is not False else output.to_tuple()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """transformers calls this for every module, this one last; ours are initialized unless built without memory."""
        if module is self and self.hollow and not any(tensor.is_meta for tensor in self.parameters()):
            fill_gaps(self)
            self.hollow = False


def build_maps(config: MixlabBackboneConfig) -> Backbone | PyramidAdapter:
    """On the default device. For the meta device by way of the CPU: transformers patches torch.linspace meanwhile."""
    device = torch.get_default_device()
    with torch.device("cpu" if device.type == "meta" else device):
        backbone = build(config.model)
        native = config.levels == "native"
        maps = backbone if native else PyramidAdapter(backbone, learned=config.levels == "learned")
    return maps.to(device)


@torch.no_grad()
def fill_gaps(model: MixlabBackbone) -> None:
    """Fresh values for whatever a file did not bring: missing parameters, and buffers that no file holds."""
    tensors = {**dict(model.maps.named_parameters()), **dict(model.maps.named_buffers())}
    gaps = {name: own for name, own in tensors.items() if not getattr(own, "_is_hf_initialized", False)}
    if gaps:
        fresh = build_maps(model.config)
        values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        for name, own in gaps.items():
            own.copy_(values[name])


def sources(native: int) -> tuple[int, ...]:
    """Which native map each adapted one comes from, as `PyramidAdapter` chooses them."""
    return tuple(round(level * (native - 1) / (len(STRIDES) - 1)) for level in range(len(STRIDES)))


def backbone_config(
    name: str,
    *,
    levels: Levels = "native",
    out_features: list[str] | None = None,
    out_indices: list[int] | None = None,
    **overrides: Any,
) -> MixlabBackboneConfig:
    """What a head of transformers takes as `backbone_config`; `overrides` are those of `mixlab.create_model`.

    `levels`: "native" hands on the backbone's own maps; "adapted" brings them to strides 4, 8, 16 and 32, which most
    heads expect, and "learned" does so with trained steps. `out_indices` (from 0) or `out_features` ("stage1", ...)
    choose among them.
    """
    model = model_config(name, **{"num_classes": 0, **overrides})
    return MixlabBackboneConfig.of(model, levels=levels, out_features=out_features, out_indices=out_indices)


def register() -> None:
    """Make `AutoConfig` and `AutoBackbone` know the model type "mixlab"; again does no harm."""
    AutoConfig.register(MixlabBackboneConfig.model_type, MixlabBackboneConfig, exist_ok=True)
    AutoBackbone.register(MixlabBackboneConfig, MixlabBackbone, exist_ok=True)


register()
