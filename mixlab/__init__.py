"""Vision backbones whose token mixer is a choice."""

import importlib
from typing import TYPE_CHECKING, Any

from mixlab import guards

guards.mend_torchvision()  # before anything imports torchvision or timm
guards.keep_freed_memory()

import mixlab.engine.answers  # noqa: E402
from mixlab.backbone import Backbone  # noqa: E402
from mixlab.ensemble import Ensemble  # noqa: E402
from mixlab.errors import MixlabError  # noqa: E402
from mixlab.evals.macs import macs  # noqa: E402
from mixlab.pyramid import PyramidAdapter  # noqa: E402
from mixlab.version import VERSION  # noqa: E402
from mixlab.weights import load_weights, save_weights  # noqa: E402
from mixlab.zoo import create_model, list_models  # noqa: E402

if TYPE_CHECKING:
    from mixlab.dense.detector import create_detector
    from mixlab.dense.files import load_dense
    from mixlab.dense.segmenter import create_segmenter
    from mixlab.deploy.optimise import optimize
    from mixlab.evals.accuracy import evaluate, predict
    from mixlab.hub import from_hub, push_to_hub
    from mixlab.tasks.comparison import compare
    from mixlab.tasks.transfer import transfer
    from mixlab.training.run import resume, train

__version__ = VERSION
__all__ = [
    "Backbone",
    "Ensemble",
    "MixlabError",
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
    "compare": "mixlab.tasks.comparison",
    "create_detector": "mixlab.dense.detector",
    "create_segmenter": "mixlab.dense.segmenter",
    "evaluate": "mixlab.evals.accuracy",
    "from_hub": "mixlab.hub",
    "load_dense": "mixlab.dense.files",
    "optimize": "mixlab.deploy.optimise",
    "predict": "mixlab.evals.accuracy",
    "push_to_hub": "mixlab.hub",
    "resume": "mixlab.training.run",
    "train": "mixlab.training.run",
    "transfer": "mixlab.tasks.transfer",
}


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'mixlab' has no attribute {name!r}")
