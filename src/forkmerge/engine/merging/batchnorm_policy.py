"""BatchNorm statistics of a merge: averaged like parameters, or recomputed on the target's training data."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from torch import Tensor

from forkmerge.engine.merging.blend import Refresh
from forkmerge.engine.training.batchnorm import tracking_norms
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Training
from forkmerge.engine.training.state import State
from forkmerge.problem.batches import batches
from forkmerge.problem.definition import Context, Problem
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of, evaluating


def refresh_with(
    binding: ModelBinding, problem: Problem, *, training: Training, seed: int, count: int, step: int | None = None
) -> Refresh:
    """Return what recomputes the statistics of a new combination; see `recompute_statistics`."""
    return partial(recompute_statistics, binding, problem=problem, training=training, seed=seed, count=count, step=step)


def recompute_statistics(
    binding: ModelBinding,
    state: State,
    problem: Problem,
    *,
    training: Training,
    seed: int,
    count: int,
    step: int | None = None,
) -> None:
    """Recompute the BatchNorm statistics of a state on `count` batches of the target's training data, in place.

    Only normalisation layers run in training mode, with a cumulative average; layers the target's loss does not
    reach keep the statistics they have. Which batches these are is a function of `step`, the state's own where None.
    """
    step = state.step if step is None else step
    binding.attach_weights(state)
    norms = tracking_norms(binding.model)
    if not norms:
        return
    saved = [(m.momentum, _clone(m.running_mean), _clone(m.running_var), _clone(m.num_batches_tracked)) for m in norms]
    device, tasks = device_of(binding.model), [problem.target]
    with random_state_kept(), evaluating(binding.model):
        for module in norms:
            module.reset_running_stats()
            module.momentum = None
            module.train()
        for name, stream in problem.stream_map.items():
            if problem.target not in stream.tasks:
                continue
            bn_seed = derive(seed, "bn", step)
            with closing(batches(name, stream, range(count), bn_seed, device)) as feed:
                for position, batch in enumerate(feed):
                    call_seed = derive(bn_seed, name, position)
                    set_random_state(call_seed)
                    with training.autocast(device):
                        stream.losses(binding.model, batch, tasks, Context(step, call_seed))
        for module, (momentum, mean, var, tracked) in zip(norms, saved, strict=True):
            module.momentum = momentum
            if not module.num_batches_tracked:
                _restore(module.running_mean, mean)
                _restore(module.running_var, var)
            _restore(module.num_batches_tracked, tracked)
    binding.capture_buffers(state)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _restore(tensor: Tensor | None, saved: Tensor | None) -> None:
    if tensor is not None and saved is not None:
        tensor.copy_(saved)
