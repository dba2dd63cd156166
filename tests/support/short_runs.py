"""Settings of simulated runs that last a few inner steps."""

from noloco_p2p.config import EvaluationSettings, LimitSettings, OuterSettings, RunManifest


def manifest_for(replicas: tuple[int, ...], steps: int, **changes: object) -> RunManifest:
    base = RunManifest(
        stages=len(replicas),
        start_replicas=min(replicas),
        steps=steps,
        sequence_length=4,
        microbatch_size=1,
        microbatches_per_step=3,
        outer=OuterSettings(rule="noloco", inner_steps=4, deadline_s=2.0),
        evaluation=EvaluationSettings(every_steps=None, microbatches=2),
    )
    return RunManifest.model_validate(base.model_dump() | changes)


LIMITS = LimitSettings(microbatch_deadline_s=4.0, patience_floor_s=0.6, linger_s=10.0, drain_s=5.0)
