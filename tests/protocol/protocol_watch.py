"""The invariants, checked from outside after every event."""

from collections import Counter

from protocol_world import Job, Process, World
from toy_model import EOS, Violation, chain_of

from common.messages.rounds import Verdict, Verify
from services.draft.work import DraftWork
from services.gateway import events as gev
from services.gateway.coordinator import MAX_STRIKES, Coordinator
from services.target.slots import Slots
from services.target.work import RoundWork


class Watch:
    """Knows what every request has to say and sees every effect. Raises Violation."""

    def __init__(self, world: World, gateway: Coordinator, counters: Counter[str]) -> None:
        self.world = world
        self.gateway = gateway
        self.counters = counters
        self.jobs: dict[int, Job] = {}
        self._pages: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._work: frozenset[int] = frozenset()

    def gateway_effects(self, event: gev.Event, effects: list) -> None:
        """Everything that one event made the gateway do."""
        self._blame(event, effects)
        failures = 0
        for effect in effects:
            match effect:
                case gev.Send(message=Verify() as verify):
                    self._watch_verify(verify)
                case gev.Emit():
                    self._watch_emit(effect)
                case gev.Finished():
                    self._watch_finished(effect)
                case gev.Failed():
                    failures += self._watch_failed(effect)
        if failures > 1:
            raise Violation("more than one request failed at once")

    def _watch_verify(self, verify: Verify) -> None:
        working = {row.request for row in verify.live if row.verify or row.chunk_end > row.chunk_start}
        self._work = frozenset(working | {admit.request for admit in verify.admits})

    def _blame(self, event: gev.Event, effects: list) -> None:
        blamed = False
        if isinstance(event, gev.Received) and isinstance(event.message, Verdict) and event.message.error:
            blamed = event.message.stamp.target == self.gateway._target
        blamed = blamed or any(isinstance(effect, gev.TargetLost) for effect in effects)
        if blamed:
            for number in self._work:
                self.jobs[number].blamed += 1

    def _watch_emit(self, effect: gev.Emit) -> None:
        job = self.jobs[effect.request]
        if job.ended:
            raise Violation(f"request {effect.request} speaks after its end")
        text = job.sink.text
        if tuple(text[job.emitted :]) != effect.ids or len(effect.from_draft) != len(effect.ids):
            raise Violation(
                f"request {effect.request} emits {effect.ids}, committed was {text[job.emitted :]}"
            )
        job.emitted = len(text)
        self.counters["tokens"] += len(effect.ids)
        self.counters["accepted"] += effect.accepted
        if not 0 <= effect.accepted <= effect.drafted or sum(effect.from_draft) != effect.accepted:
            raise Violation(f"request {effect.request}: {effect}")

    def _end(self, effect: gev.Finished | gev.Failed) -> Job:
        job = self.jobs[effect.request]
        if job.ended:
            raise Violation(f"request {effect.request} ends twice")
        if job.emitted != len(job.sink.text):
            raise Violation(f"request {effect.request} ends with tokens that were not emitted")
        job.ended = effect
        return job

    def _watch_finished(self, effect: gev.Finished) -> None:
        job = self._end(effect)
        self.counters[f"finished:{effect.reason}"] += 1
        if effect.reason == "abort":
            if not job.aborted:
                raise Violation(f"request {effect.request} was aborted by nobody")
        elif job.sink.text != job.sink.due:
            raise Violation(f"request {effect.request} ends early: {job.sink.text} of {job.sink.due}")
        elif (effect.reason == "stop") != (job.sink.text[-1] == EOS):
            raise Violation(f"request {effect.request} ends with {effect.reason}: {job.sink.text}")

    def _watch_failed(self, effect: gev.Failed) -> int:
        """1 if the target is to blame."""
        job = self._end(effect)
        self.counters[f"failed:{effect.code}"] += 1
        if effect.code == "never_fits":
            if len(job.submit.prompt_ids) < self.world.max_model_len:
                raise Violation(f"request {effect.request} would have fitted: {effect.error}")
            return 0
        if job.blamed < MAX_STRIKES:
            raise Violation(f"request {effect.request} failed after {job.blamed} accidents: {effect.error}")
        return 1

    def trees(self, process: Process, work: RoundWork) -> None:
        """What the target verifies continues what is committed."""
        machine = process.machine
        slots = machine.slots
        for tree in work.trees:
            slot = slots.live[tree.slot]
            job = self.gateway.requests.by_id.get(slot.request)
            current = machine.epoch == self.gateway.epoch and machine.incarnation == self.gateway._target
            if job is None or not current or self.gateway.state != "verifying":
                continue
            if tree.base != len(job.ids) or tree.tokens[0] != job.ids[-1]:
                raise Violation(
                    f"a tree of {slot.request} continues {tree.base} ids, {len(job.ids)} are committed"
                )

    def draft_pages(
        self, process: Process, slots: Slots, work: DraftWork, table: dict[int, tuple[int, ...]]
    ) -> None:
        """Until the work ends, no page that it may touch belongs to anyone else."""
        owners: dict[int, tuple[int, int]] = {}
        for slot in slots.live.values():
            owners.update(dict.fromkeys(slot.pages, (slot.request, slot.generation)))
        for row in work.rows:
            for page in process.device.touched(row, table):
                owner = owners.get(page)
                if owner is not None and owner != row.key:
                    raise Violation(f"the draft of {row.key} works in page {page}, which is {owner}'s now")
                if owner is None and not any(page in entry.pages for entry in slots.retiring):
                    raise Violation(f"the draft of {row.key} works in page {page}, which is back in the pool")

    # Invariants

    def target(self, process: Process) -> None:
        slots = process.machine.slots
        if slots is None:
            return
        held: list[int] = []
        for slot in slots.live.values():
            held += slot.pages
            key = (process.machine.incarnation, slot.slot, slot.generation)
            before = self._pages.get(key, ())
            if tuple(slot.pages[: len(before)]) != before:
                raise Violation(f"pages of slot {slot.slot} changed from {before} to {slot.pages}")
            if len(before) != len(slot.pages):
                self._pages[key] = tuple(slot.pages)
        for entry in slots.retiring:
            held += entry.pages
        if 0 in held or len(set(held)) != len(held):
            raise Violation(f"pages are held twice or page 0 is given out: {sorted(held)}")
        if len(held) + slots.pool.free != slots.pool.pages - 1:
            raise Violation(f"{len(held)} pages held and {slots.pool.free} free of {slots.pool.pages - 1}")
        self.logs(slots.live.values(), process.machine.epoch)

    def logs(self, logs: object, epoch: int) -> None:
        """Nobody's log runs ahead of the gateway's."""
        if epoch != self.gateway.epoch:
            return
        for log in logs:
            number = log.request if hasattr(log, "request") else log.row.request
            job = self.jobs[number]
            prompt = job.submit.prompt_ids
            if len(log.ids) > len(prompt) + len(job.sink.text):
                raise Violation(f"a log of request {number} has {len(log.ids)} ids, more than were committed")
            if log.ids and chain_of(log.ids) != chain_of((*prompt, *job.sink.text)[: len(log.ids)]):
                raise Violation(f"a log of request {number} differs from what was committed")
