"""Vision backbones whose token mixer is a choice."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from mixlab.core import guards, moved

moved.install()
guards.mend_torchvision()  # before anything imports torchvision or timm
guards.keep_freed_memory()

import mixlab.engine.answers  # noqa: E402, F401
from mixlab.core.errors import MixlabError  # noqa: E402
from mixlab.core.version import VERSION  # noqa: E402
from mixlab.metrics.macs import macs  # noqa: E402
from mixlab.models.backbone import Backbone  # noqa: E402
from mixlab.models.ensemble import Ensemble  # noqa: E402
from mixlab.models.model import Model  # noqa: E402
from mixlab.models.pyramid import PyramidAdapter  # noqa: E402
from mixlab.models.weights import load_weights, save_weights  # noqa: E402
from mixlab.models.zoo import create_model, list_models  # noqa: E402

if TYPE_CHECKING:
    from mixlab.dense.detector import create_detector
    from mixlab.dense.files import load_dense
    from mixlab.dense.segmenter import create_segmenter
    from mixlab.deploy.optimize import optimize
    from mixlab.evals.quality.accuracy import evaluate, predict
    from mixlab.hub.hugging_face import from_hub, push_to_hub
    from mixlab.training.run import resume, train
    from mixlab.workflows.comparison import compare
    from mixlab.workflows.transfer import transfer

__version__ = VERSION
__all__ = [
    "Backbone",
    "Ensemble",
    "MixlabError",
    "Model",
    "PyramidAdapter",
    "__version__",
    "compare",
    "create_detector",
    "create_model",
    "create_segmenter",
    "evaluate",
    "from_hub",
    "list_models",
    "load_dense",
    "load_weights",
    "macs",
    "optimize",
    "predict",
    "push_to_hub",
    "resume",
    "save_weights",
    "train",
    "transfer",
]
LATER = {  # what not everybody needs is imported when it is asked for
    "compare": "mixlab.workflows.comparison",
    "create_detector": "mixlab.dense.detector",
    "create_segmenter": "mixlab.dense.segmenter",
    "evaluate": "mixlab.evals.quality.accuracy",
    "from_hub": "mixlab.hub.hugging_face",
    "load_dense": "mixlab.dense.files",
    "optimize": "mixlab.deploy.optimize",
    "predict": "mixlab.evals.quality.accuracy",
    "push_to_hub": "mixlab.hub.hugging_face",
    "resume": "mixlab.training.run",
    "train": "mixlab.training.run",
    "transfer": "mixlab.workflows.transfer",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    if importlib.util.find_spec(f"mixlab.{name}") is not None:  # also by its name in earlier releases
        return importlib.import_module(f"mixlab.{name}")
    raise AttributeError(f"module 'mixlab' has no attribute {name!r}")
