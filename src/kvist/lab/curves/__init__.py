"""Hit rates over cache sizes: exact for LRU in one pass, the optimal bound, samples of traces that are too big."""

from kvist.lab.curves.curve import Curve, Knee, knee, regret, sizes_for
from kvist.lab.curves.distances import lru_curve, stack_distances
from kvist.lab.curves.optimal import optimal_curve
from kvist.lab.curves.references import References, references_of
from kvist.lab.curves.sampling import curve_of_sample, sampled_curve

__all__ = [
    "Curve", "Knee", "References", "curve_of_sample", "knee", "lru_curve", "optimal_curve", "references_of", "regret",
    "sampled_curve", "sizes_for", "stack_distances",
]  # fmt: skip
