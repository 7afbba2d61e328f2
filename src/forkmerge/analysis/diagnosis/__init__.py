"""`forkmerge diagnose`: what every auxiliary does to a target, within a budget of time."""

from forkmerge.analysis.diagnosis.diagnosis import conclude, diagnose, read_diagnosis

__all__ = ["conclude", "diagnose", "read_diagnosis"]
