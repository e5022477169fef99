"""Known mistakes in plain words, each as changes of functions of the oracle or of capabilities of its adapter."""

from rlcanary.bugs.mistakes.misplaced import MISPLACED
from rlcanary.bugs.mistakes.objective import OBJECTIVE_MISTAKES
from rlcanary.bugs.mistakes.planting import Patches
from rlcanary.bugs.mistakes.sampling import SAMPLING_MISTAKES
from rlcanary.bugs.mistakes.signals import SIGNAL_MISTAKES
from rlcanary.bugs.mistakes.splits import SPLIT_MISTAKES
from rlcanary.bugs.mistakes.training import TRAINING_MISTAKES

MISTAKES: dict[str, Patches] = {
    **OBJECTIVE_MISTAKES,
    **SPLIT_MISTAKES,
    **SIGNAL_MISTAKES,
    **MISPLACED,
    **SAMPLING_MISTAKES,
    **TRAINING_MISTAKES,
}
