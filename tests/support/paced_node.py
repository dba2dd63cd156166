"""`noloco-node` that pauses after each inner step, for swarms that train only in order to be watched.

Run it as a script with the arguments of `noloco-node`. At full speed, even the tests' tiny models keep a core busy.
"""

import time

from noloco_p2p.cli.node import main
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.stage_values import StepLabel, StepResult

REST_S = 0.2


def pace() -> None:
    """Make the device of this process pause after each inner step from now on."""
    inner_step = TorchStage.inner_step

    def slower(stage: TorchStage, label: StepLabel) -> StepResult:
        result = inner_step(stage, label)
        time.sleep(REST_S)
        return result

    TorchStage.inner_step = slower  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    pace()
    main()
