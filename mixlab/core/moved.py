"""Old names of modules go on importing: `import mixlab.backbone` gives the module `mixlab.models.backbone` itself.

Other programs and pickles know the names of earlier releases. Each is one row of a table, and the module that an
old name gives is the very same object as under its new name.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MOVED = {
    "mixlab.backbone": "mixlab.models.backbone",
    "mixlab.build": "mixlab.models.build",
    "mixlab.choices": "mixlab.core.choices",
    "mixlab.class_map": "mixlab.models.class_map",
    "mixlab.config": "mixlab.models.config",
    "mixlab.coscale": "mixlab.models.coscale",
    "mixlab.deploy.compile": "mixlab.engine.compile",
    "mixlab.deploy.optimise": "mixlab.deploy.optimize",
    "mixlab.deploy.quantise": "mixlab.deploy.quantize",
    "mixlab.ensemble": "mixlab.models.ensemble",
    "mixlab.errors": "mixlab.core.errors",
    "mixlab.evals.accuracy": "mixlab.evals.quality.accuracy",
    "mixlab.evals.attacks": "mixlab.evals.quality.attacks",
    "mixlab.evals.bench": "mixlab.evals.cost.bench",
    "mixlab.evals.bench_activations": "mixlab.evals.cost.bench_activations",
    "mixlab.evals.bench_case": "mixlab.evals.cost.bench_case",
    "mixlab.evals.bench_figures": "mixlab.evals.cost.bench_figures",
    "mixlab.evals.bench_mixers": "mixlab.evals.cost.bench_mixers",
    "mixlab.evals.classes": "mixlab.evals.quality.classes",
    "mixlab.evals.compile_time": "mixlab.evals.cost.compile_time",
    "mixlab.evals.compute": "mixlab.evals.cost.compute",
    "mixlab.evals.corruptions": "mixlab.evals.quality.corruptions",
    "mixlab.evals.dense": "mixlab.evals.quality.dense",
    "mixlab.evals.detection": "mixlab.metrics.detection",
    "mixlab.evals.disagreement": "mixlab.evals.quality.disagreement",
    "mixlab.evals.erf": "mixlab.evals.inspect.erf",
    "mixlab.evals.erf_gallery": "mixlab.evals.inspect.erf_gallery",
    "mixlab.evals.examine": "mixlab.evals.quality.examine",
    "mixlab.evals.execution": "mixlab.evals.cost.execution",
    "mixlab.evals.gradients": "mixlab.evals.inspect.gradients",
    "mixlab.evals.imagenet": "mixlab.evals.cost.imagenet",
    "mixlab.evals.kernel_coverage": "mixlab.evals.inspect.kernel_coverage",
    "mixlab.evals.kernels": "mixlab.evals.inspect.kernels",
    "mixlab.evals.look": "mixlab.evals.inspect.look",
    "mixlab.evals.macs": "mixlab.metrics.macs",
    "mixlab.evals.maps": "mixlab.evals.inspect.maps",
    "mixlab.evals.mixer_alone": "mixlab.evals.cost.mixer_alone",
    "mixlab.evals.own_grid": "mixlab.evals.quality.own_grid",
    "mixlab.evals.phases": "mixlab.evals.cost.phases",
    "mixlab.evals.reported": "mixlab.evals.cost.reported",
    "mixlab.evals.reported_figure": "mixlab.evals.cost.reported_figure",
    "mixlab.evals.resized": "mixlab.evals.quality.resized",
    "mixlab.evals.resolution": "mixlab.evals.quality.resolution",
    "mixlab.evals.robustness": "mixlab.evals.quality.robustness",
    "mixlab.evals.run_compute": "mixlab.evals.cost.run_compute",
    "mixlab.evals.saliency": "mixlab.evals.inspect.saliency",
    "mixlab.evals.scaling": "mixlab.evals.cost.scaling",
    "mixlab.evals.scores": "mixlab.evals.quality.scores",
    "mixlab.evals.segmentation": "mixlab.dense.segmentation",
    "mixlab.evals.shadow_memory": "mixlab.evals.cost.shadow_memory",
    "mixlab.evals.speed": "mixlab.evals.cost.speed",
    "mixlab.evals.summary": "mixlab.evals.cost.summary",
    "mixlab.evals.truncation": "mixlab.evals.inspect.truncation",
    "mixlab.evals.turns": "mixlab.metrics.timing",
    "mixlab.evals.variants": "mixlab.evals.quality.variants",
    "mixlab.evals.whole_task": "mixlab.evals.cost.whole_task",
    "mixlab.files": "mixlab.core.files",
    "mixlab.fitting": "mixlab.models.fitting",
    "mixlab.fixed_filter": "mixlab.models.fixed_filter",
    "mixlab.fused": "mixlab.engine.retired",
    "mixlab.grid": "mixlab.core.grid",
    "mixlab.guards": "mixlab.core.guards",
    "mixlab.heads": "mixlab.models.heads",
    "mixlab.implicit_filter": "mixlab.models.implicit_filter",
    "mixlab.init": "mixlab.models.init",
    "mixlab.kept": "mixlab.engine.retired",
    "mixlab.layers": "mixlab.models.layers",
    "mixlab.layouts": "mixlab.models.layouts",
    "mixlab.mixers": "mixlab.models.mixers",
    "mixlab.model_card": "mixlab.hub.model_card",
    "mixlab.modules": "mixlab.models.modules",
    "mixlab.native": "mixlab.engine.kernels",
    "mixlab.opaque": "mixlab.engine.retired",
    "mixlab.papers": "mixlab.models.papers",
    "mixlab.position": "mixlab.models.position",
    "mixlab.pyramid": "mixlab.models.pyramid",
    "mixlab.released": "mixlab.models.released",
    "mixlab.report.drawing": "mixlab.findings.drawing",
    "mixlab.report.findings": "mixlab.findings.findings",
    "mixlab.report.panels": "mixlab.findings.panels",
    "mixlab.report.results": "mixlab.findings.results",
    "mixlab.report.robustness": "mixlab.evals.quality.robustness_figure",
    "mixlab.report.svg": "mixlab.findings.svg",
    "mixlab.stems": "mixlab.models.stems",
    "mixlab.tasks": "mixlab.training.tasks",
    "mixlab.tasks.comparison": "mixlab.workflows.comparison",
    "mixlab.tasks.transfer": "mixlab.workflows.transfer",
    "mixlab.tf32": "mixlab.core.tf32",
    "mixlab.timm": "mixlab.hub.timm",
    "mixlab.timm_backbone": "mixlab.hub.timm_backbone",
    "mixlab.training.optimise": "mixlab.training.optimizer",
    "mixlab.training.processes": "mixlab.core.processes",
    "mixlab.training.side_by_side": "mixlab.workflows.side_by_side",
    "mixlab.version": "mixlab.core.version",
    "mixlab.weights": "mixlab.models.weights",
    "mixlab.zoo": "mixlab.models.zoo",
}


class MovedLoader(Loader):
    """Loads the module at its new name, and leaves it as it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.name)
        self.own_spec = module.__spec__  # the import system puts the old name's into its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Give what `python -m OLD_NAME` runs."""
        spec = importlib.util.find_spec(self.name)
        loader = None if spec is None else spec.loader
        return loader.get_code(self.name) if hasattr(loader, "get_code") else None  # type: ignore[union-attr]


class MovedFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = new_name(fullname)
        return None if name is None else ModuleSpec(fullname, MovedLoader(name), is_package=False)


def new_name(name: str) -> str | None:
    """Return where a module of an earlier release lives today, or None for a name that did not move."""
    if name in MOVED:
        return MOVED[name]
    parent, _, leaf = name.rpartition(".")
    above = new_name(parent) if parent else None
    return None if above is None else f"{above}.{leaf}"


def install() -> None:
    """Make old names importable, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
