"""Paths of modules before they moved into packages: imports of them, and run folders that name them, go on working."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_ROOT = __name__.partition(".")[0]
# Where a module's names are now, relative to the package; a module that was divided has several places.
_MOVED = {
    "_demo_text": "cli.demo_text",
    "ahead": "problem.prefetch",
    "algorithms._composed": "algorithms.composed",
    "algorithms._config": "algorithms.resolved_config",
    "algorithms._equal_compute": "algorithms.equal_compute",
    "algorithms._fit": "algorithms.fit",
    "algorithms._forkmerge": "algorithms.forkmerge",
    "algorithms._judge": "algorithms.validation",
    "algorithms._merger": "algorithms.end_of_round",
    "algorithms._posttrain": "algorithms.post_train",
    "algorithms._progress": "algorithms.checkpoint",
    "algorithms._rounds": "algorithms.rounds",
    "algorithms._settings": "algorithms.settings",
    "algorithms._weightgrid": "algorithms.weight_grid",
    "analysis.budget": "analysis.diagnosis.budget",
    "analysis.lessons": "analysis.transfer_runs",
    "analysis.pictures": "analysis.feature_map",
    "analysis.pieces": "analysis.diagnosis.pieces",
    "analysis.plaindata": "engine.storage.records",
    "analysis.verdicts": "report.verdict_table",
    "analysis.why": "analysis.replayed_search",
    "arithmetic": "engine.merging.arithmetic",
    "attic": "engine.training.release_memory",
    "auxiliaries": "problem.made_auxiliaries",
    "branch": "engine.training.branch engine.training.options",
    "candidates": "engine.merging.candidates engine.merging.arithmetic",
    "checks": "algorithms.preflight",
    "codec": "engine.storage.json_codec",
    "combining": "engine.training.combine_tasks",
    "compare_cli": "cli.compare cli.arguments cli.commands cli.methods",
    "compare_options": "experiments.compare_options",
    "comparison_tables": "report.comparison_tables",
    "compiling": "engine.training.torch_compile",
    "cli.run_progress": "algorithms.events.run_progress",
    "console": "algorithms.events.progress algorithms.events.run_progress cli.progress algorithms.table_data "
    "cli.terminal",
    "contenders": "experiments.compared_methods experiments.cost_of_run",
    "copying": "algorithms.own_loop.copy_training",
    "course": "engine.merging.race_over_examples",
    "demo": "cli.demo",
    "devices": "engine.executors.devices",
    "diagnose_cli": "cli.diagnose cli.commands",
    "disk": "engine.storage.atomic_files",
    "dividing": "problem.split_dataset",
    "execution": "engine.executors.branch_worker engine.executors.branch_execution engine.executors.serial",
    "experiment": "experiments.comparison experiments.events",
    "experiments.units": "algorithms.table_data",
    "export": "algorithms.export",
    "factories": "engine.training.optimizers",
    "feed": "problem.batches",
    "figures": "cli.demo_figure",
    "foresight": "experiments.cost_of_comparison report.cost_table",
    "fork": "algorithms.own_loop.fork",
    "formats": "engine.training.memory_format",
    "gradients": "engine.training.task_gradients",
    "history": "algorithms.saved_run",
    "loop": "engine.training.step_loop",
    "measuring": "engine.merging.measure_candidate",
    "memory": "engine.executors.shared_memory",
    "merging": "engine.merging.find_merge engine.merging.blend engine.merging.synchronise engine.merging.state_dicts "
    "engine.merging.batchnorm_policy",
    "methods._base": "methods.base",
    "methods._facts": "methods.data_sheet",
    "methods._module_state": "methods.torchjd.module_state",
    "methods._registry": "methods.registry",
    "methods._torchjd": "methods.torchjd.adapter",
    "methods._torchjd_names": "methods.torchjd.names",
    "metrics": "problem.metrics",
    "mixtures": "algorithms.mixtures engine.merging.relevance",
    "norms": "engine.training.batchnorm",
    "order": "problem.example_order problem.randomness",
    "outcomes": "experiments.run_results",
    "pace": "cli.comparison_progress",
    "parallel": "engine.executors.branch_execution engine.executors.process_executor",
    "plan": "experiments.cost_of_run",
    "pool": "engine.executors.parallel_calls",
    "pretraining": "experiments.pretraining",
    "probe": "engine.training.method_context",
    "racing": "engine.merging.race",
    "reading": "problem.batch_reader",
    "recipe": "experiments.recipe",
    "records": "experiments.results_file",
    "report.drawing": "report.matplotlib_figure",
    "report.interactive": "report.plotly_figure",
    "report.saved": "report.saved_results",
    "report_cli": "cli.report cli.commands",
    "run": "algorithms.run_record algorithms.table_data",
    "schedule": "engine.executors.load_balance",
    "scoring": "problem.scoring",
    "sealed": "algorithms.measure_test_split",
    "searches": "engine.merging.searches",
    "session": "cli.terminal",
    "sharing": "engine.training.shared_parameters",
    "shelf": "engine.executors.shared_rows engine.executors.state_bytes",
    "solvers": "methods.solvers",
    "state": "engine.training.state",
    "statistics": "experiments.paired_statistics",
    "store": "engine.storage.run_folder engine.storage.lock",
    "summary": "experiments.summary",
    "sums": "problem.exact_sum",
    "tables": "report.table algorithms.table_data",
    "trial": "experiments.comparison_run",
    "views": "cli.print_run",
    "words": "methods.option_syntax",
    "workbench": "engine.training.model_binding",
    "workers": "engine.executors.worker_team engine.executors.executor engine.executors.devices",
}
MODULES = {f"{_ROOT}.{old}": [f"{_ROOT}.{new}" for new in places.split()] for old, places in _MOVED.items()}


def current_modules(path: str) -> list[str]:
    """Return where the names of an old module are now; nothing for a path that has not moved."""
    if path in MODULES:
        return MODULES[path]
    parent, _, name = path.rpartition(".")
    return [f"{package}.{name}" for package in current_modules(parent)] if parent else []


class MovedPaths(MetaPathFinder, Loader):
    """Finds a module of an old path as one whose names are looked up in the modules that have them now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a path that has moved; every other path is somebody else's."""
        places = current_modules(fullname)
        is_there = fullname in MODULES or any(find_spec(each) is not None for each in places)
        return ModuleSpec(fullname, self) if is_there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that is empty until a name is asked for."""
        return ModuleType(spec.name, f"Moved to {', '.join(current_modules(spec.name))}.")

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look names up; those of a package that moved have modules of their own."""
        module.__path__ = []

        def look_up(name: str) -> Any:
            for path in current_modules(module.__name__):
                current = import_module(path)
                if hasattr(current, name) and not name.startswith("__"):
                    return getattr(current, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = look_up  # type: ignore[method-assign]


def current_paths(text: str) -> list[str]:
    """Return what `module:qualname` of an old path may be called now; nothing for a path that has not moved."""
    module, colon, name = text.partition(":")
    return [f"{path}:{name}" for path in current_modules(module)] if colon else []
