"""What to learn: the target, the streams of batches, the metrics; and every random number of a step."""

from forkmerge.problem.definition import Context, Evaluation, Losses, Metric, Predict, Problem, Stream, predict_pair

__all__ = ["Context", "Evaluation", "Losses", "Metric", "Predict", "Problem", "Stream", "predict_pair"]
