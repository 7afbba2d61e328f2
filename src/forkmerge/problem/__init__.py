"""What to learn: the target, the streams of batches, the metrics; and every random number of a step."""

from forkmerge.problem.definition import Context, Evaluation, Metric, Problem, Stream

__all__ = ["Context", "Evaluation", "Metric", "Problem", "Stream"]
