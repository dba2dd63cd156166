"""What this node tells of itself to whoever asks (core.status). Reads only, and may be called from any thread."""

from statistics import median

from noloco_p2p.core.status import Serving, Status, Trouble
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.state import NodeState


def status(node: NodeState, door: MicrobatchServer, now: float) -> Status:
    """This node at `now` on the loop's clock, which is the monotonic one. Every age is one of this moment."""
    members, took, stepped_at = node.members, tuple(node.steps_took), node.stepped_at
    calls = sorted(node.calls.copy().values(), key=lambda call: (call[2], call[0], str(call[1])))
    return Status(
        advert=node.advert,
        run_name=node.manifest.name,
        stages=node.manifest.stages,
        steps=node.manifest.steps,
        inner_steps=node.inner_steps,
        start_replicas=node.manifest.start_replicas,
        waits=node.waits.current(now),
        serving=tuple(Serving(caller, why, max(0.0, now - since)) for caller, why, since in calls),
        seen=members.seen(now=now),
        deserted={stage: max(0.0, now - since) for stage, since in sorted(node.deserted.items())},
        step_took_s=median(took) if took else None,
        since_step_s=None if stepped_at is None else max(0.0, now - stepped_at),
        in_flight=door.intake.in_flight,
        waiting=door.intake.waiting,
        troubles=tuple(
            Trouble(name, message, max(0.0, now - since))
            for name, (message, since) in sorted(node.troubles.copy().items())
        ),
    )
