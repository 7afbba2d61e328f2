"""`torch.compile` for the modules that a problem's functions call."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import parent_process
from typing import Any

import torch
from torch import nn

from forkmerge.errors import ProblemError, unknown_name

# Every kind of pass has a compiled form of its own: each task, training and evaluation, each batch size of either.
_FORMS = 4096


@contextmanager
def compiled(model: nn.Module, how: bool | str, check: Callable[[], object]) -> Iterator[None]:
    """Compile a model's forward passes while the context lasts, and find out first whether they can be.

    Args:
        model: The module; names, hooks and pickles of it stay as they are.
        how: False for not at all, True for torch's default, or the name of another backend.
        check: Fails where the run would.
    """
    if not how:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_settings())
        stack.callback(_take_back, model)
        install(model, how)
        try:
            check()
        except Exception as error:
            raise ProblemError(
                f"the model cannot be compiled with compile={how!r}: {_reason(error)}. Leave compile out, or try "
                "another backend; 'aot_eager' needs no compiler."
            ) from error
        yield


def install(model: nn.Module, how: bool | str) -> None:
    """Let the model, and the submodules that a loss function may call by themselves, run compiled.

    Compilation happens at the first call of each, in the process that makes it. Shapes are fixed in every compiled
    form: one that adapts to what it has met before would make a run's bits depend on its past.
    """
    backend = backend_of(how)
    if parent_process() is not None:  # a worker trains for nobody else: there is nothing to give back
        for config, settings in _configs():
            for key, value in settings.items():
                setattr(config, key, value)
    for module in _entrances(model):
        if module._compiled_call_impl is None:
            # What `Module.compile` sets, and pickles leave out; but that one passes over torch's own containers.
            module._compiled_call_impl = torch.compile(_call_of(module), backend=backend, dynamic=False)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let the model run as it is written, hooks of all its modules included, while the context lasts."""
    forms = [(module, module._compiled_call_impl) for module in model.modules()]
    try:
        for module, _ in forms:
            module._compiled_call_impl = None
        yield
    finally:
        for module, form in forms:
            module._compiled_call_impl = form


def backend_of(how: bool | str) -> str:
    """Return the name of the backend, refusing those that do not exist or cannot follow a branch's weights."""
    if how is True:
        return "inductor"
    if how == "cudagraphs":
        raise ProblemError("compile='cudagraphs' remembers where weights are, and branches change that: use True.")
    backends = [str(name) for name in torch.compiler.list_backends(None) if name != "cudagraphs"]
    if how not in backends:
        raise ProblemError("compile: " + unknown_name("backend", how, backends))
    return str(how)


def _entrances(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    pending = list(model.children())
    while pending:
        module = pending.pop(0)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            pending = [*module.children(), *pending]
        else:
            yield module


def _call_of(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Compiled forms are kept per code object: one of its own for every module.
    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def _configs() -> list[tuple[Any, dict[str, Any]]]:
    """Return what compiled runs set differently in torch, by the module that holds it, as far as this release can."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # Beyond the limits torch goes on uncompiled without an error, and the bits would depend on when.
    limits = {"recompile_limit": _FORMS, "accumulated_recompile_limit": _FORMS, "fail_on_recompile_limit_hit": True}
    configs: list[tuple[Any, dict[str, Any]]] = [
        (torch._dynamo.config, limits),
        # Gradient methods pass backward through one graph several times.
        (torch._functorch.config, {"donated_buffer": False}),
        # Kernels are otherwise chosen by timing them; releases before 2.10 do not know the setting.
        (torch._inductor.config, {"deterministic": True}),
    ]
    return [(config, {k: value for k, value in settings.items() if hasattr(config, k)}) for config, settings in configs]


@contextmanager
def _settings() -> Iterator[None]:
    with ExitStack() as stack:
        for config, settings in _configs():
            stack.enter_context(config.patch(settings))
        yield


def _reason(error: Exception) -> str:
    """Return the first line of torch's long account; the next one, too, where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")


def _take_back(model: nn.Module) -> None:
    for module in _entrances(model):
        module._compiled_call_impl = None
