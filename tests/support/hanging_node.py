"""`noloco-node` whose device hangs in its third inner step, which it notices within seconds.

Run it as a script with the arguments of `noloco-node`.
"""

import threading

from noloco_p2p.cli.node import main
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.stage_values import StepLabel, StepResult
from noloco_p2p.node import pauses

HUNG_S, LAST_STEP = 2.0, 2


def hang() -> None:
    """Make the device of this process hang after LAST_STEP."""
    pauses.HUNG_S, pauses.LOOK_S = HUNG_S, HUNG_S / 4
    inner_step = TorchStage.inner_step

    def hanging(stage: TorchStage, label: StepLabel) -> StepResult:
        if label.inner_step > LAST_STEP:
            threading.Event().wait()
        return inner_step(stage, label)

    TorchStage.inner_step = hanging  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    hang()
    main()
