"""Arriving: choosing a stage, waiting for the others, joining a run under way (design.md §4, Start, and §6)."""

from noloco_p2p.core import members as membership
from noloco_p2p.duties.rounds import Rounds
from noloco_p2p.duties.seat import Seat
from noloco_p2p.duties.watch import Watch
from noloco_p2p.errors import PeerError


class Arrival:
    """The way of one node from its first announcement to its first step."""

    def __init__(self, seat: Seat, watch: Watch, rounds: Rounds) -> None:
        self._seat = seat
        self._watch = watch
        self._rounds = rounds
        self._said = ""

    async def choose_stage(self) -> None:
        """Settle on a stage: the emptiest one, until two readings in a row show that nobody need move."""
        seat, manifest, quiet = self._seat, self._seat.manifest, 0
        await self._watch.next_reading()
        while not (seat.advert.settled or seat.draining):
            others = seat.members.all()
            stage = membership.stage_to_take(seat.advert, others, manifest.stages)
            missing = membership.lacking(
                seat.advert, others, manifest.stages, manifest.start_replicas, membership.PRESENT
            )
            if stage != seat.index:
                seat.update(stage=stage)
                seat.pulse()
                quiet = 0
            elif self._run_has_begun() or not missing:
                quiet += 1
                if quiet == 2:
                    seat.update(settled=True)
            else:
                quiet = 0
                self._say_missing(missing)
            await self._watch.next_reading()
        seat.event("info", message=f"holds stage {seat.index} of {manifest.stages}")

    async def wait_for_others(self) -> None:
        """Until every stage has `start_replicas`; a run that has begun is joined at the newest snapshot of a mate."""
        seat, manifest = self._seat, self._seat.manifest
        # Who was there before the others began starts with them, whatever is announced meanwhile.
        late = self._run_has_begun()
        seat.enter("made", "the weights are made")

        def may_begin() -> bool:
            missing = membership.lacking(
                seat.advert,
                seat.members.all(),
                manifest.stages,
                manifest.start_replicas,
                membership.IN_ROUNDS,
            )
            if missing and not self._run_has_begun():
                self._say_missing(missing)
                return seat.draining
            return True

        await seat.until(may_begin)
        if seat.draining:
            return
        seat.enter("begin")
        if late:
            await self._catch_up()
        seat.enter("synced", "joined the run under way" if late else "everybody is here")

    def _run_has_begun(self) -> bool:
        return any(a.state in ("training", "finished") for a in self._seat.members.all())

    def _say_missing(self, missing: dict[int, int]) -> None:
        what = "waiting for " + ", ".join(f"{n} more of stage {s}" for s, n in sorted(missing.items()))
        if what != self._said:
            self._said = what
            self._seat.event("info", message=what)

    async def _catch_up(self) -> None:
        """A later joiner adopts step, round and the newest snapshot of one replica of its stage."""
        seat = self._seat
        donors = seat.members.of_stage(seat.index, membership.HOLDING)
        for donor in donors:
            try:
                described = await seat.world.transport.describe(donor)
                theirs = await self._rounds.adopt(donor)
            except PeerError as error:
                seat.event("warning", message=f"could not start from {donor.peer_id}: {error}")
                continue
            seat.update(step=min(float(seat.manifest.steps), max(0.0, described.step)))
            seat.event("info", message=f"starts from round {theirs.round} of {donor.peer_id}, step {seat.step}")
            return
        clocks = [a.step for a in seat.members.all()]
        seat.update(
            step=max(clocks, default=0.0), outer_round=max((a.outer_round for a in seat.members.all()), default=0)
        )
        self._rounds.done = seat.advert.outer_round
        seat.event("warning", message=f"stage {seat.index} has no replica to start from: it begins with fresh weights")
