"""Vision backbones whose token mixer is a choice."""

from mixlab import guards

guards.mend_torchvision()  # before anything imports torchvision or timm
guards.keep_freed_memory()

from mixlab.backbone import Backbone  # noqa: E402
from mixlab.ensemble import Ensemble  # noqa: E402
from mixlab.errors import MixlabError  # noqa: E402
from mixlab.evals.macs import macs  # noqa: E402
from mixlab.pyramid import PyramidAdapter  # noqa: E402
from mixlab.version import VERSION  # noqa: E402
from mixlab.weights import load_weights, save_weights  # noqa: E402
from mixlab.zoo import create_model, list_models  # noqa: E402

__version__ = VERSION
__all__ = [
    "Backbone",
    "Ensemble",
    "MixlabError",
    "PyramidAdapter",
    "__version__",
    "create_model",
    "list_models",
    "load_weights",
    "macs",
    "save_weights",
]
