"""The invariants, checked from outside after every event."""

from collections import Counter

from protocol_world import Job, Process, World
from toy_model import EOS, Violation, chain_of

from common.messages.rounds import Verdict, Verify
from services.draft.work import DraftWork
from services.gateway import events as gev
from services.gateway.coordinator import Coordinator
from services.gateway.lifetimes import MAX_STRIKES
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
        self._work: dict[int, frozenset[int]] = {}
        self._cached: dict[int, frozenset[int]] = {}

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
        self._work[verify.group] = frozenset(working | {admit.request for admit in verify.admits})
        at_work = frozenset().union(
            *(
                self._work.get(group.number, frozenset())
                for group in self.gateway.groups
                if group.round is not None
            )
        )
        requests = self.gateway.requests.by_id
        if len(at_work) > 1 and any(number in requests and requests[number].suspect for number in at_work):
            raise Violation(f"of {sorted(at_work)}, which work at once, one may kill the target")

    def _blame(self, event: gev.Event, effects: list) -> None:
        blamed: frozenset[int] = frozenset()
        if isinstance(event, gev.Received) and isinstance(event.message, Verdict):
            verdict = event.message
            if verdict.error and verdict.stamp.target == self.gateway.target:
                blamed = self._work.get(verdict.group, frozenset())
        if any(isinstance(effect, gev.TargetLost) for effect in effects):
            blamed = frozenset().union(*self._work.values())
            self._work.clear()
        for number in blamed:
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
            current = machine.epoch == self.gateway.epoch and machine.incarnation == self.gateway.target
            if job is None or not current or self.gateway.groups[work.group].state != "verifying":
                continue
            if tree.base != len(job.ids) or tree.tokens[0] != job.ids[-1]:
                raise Violation(
                    f"a tree of {slot.request} continues {tree.base} ids, {len(job.ids)} are committed"
                )

    def draft_pages(
        self, process: Process, slots: Slots, work: DraftWork, table: dict[int, tuple[int, ...]]
    ) -> None:
        """Until the work ends, its slots hold every page that it may touch."""
        for row in work.rows:
            holds = {
                page
                for slot in slots.live.values()
                if (slot.request, slot.generation) == row.key
                for page in slot.pages
            }
            holds.update(page for entry in slots.retiring if entry.slot == row.slot for page in entry.pages)
            for page in process.device.touched(row, table):
                if page not in holds:
                    raise Violation(f"the draft of {row.key} works in page {page}, which is not its own now")

    def capture(self, process: Process, draft: Process | None, work: RoundWork) -> None:
        """Hidden rows are written when the round asks for them, to a block that the draft is done with."""
        capture = work.capture
        if capture is None:
            return
        verify = process.machine.groups.rounds[work.group]._round.verify
        if not verify.capture or not capture.layers:
            raise Violation(f"round {work.round} captures hidden rows that it was not asked for")
        if draft is None or draft.region != capture.draft or draft.machine.groups is None:
            return
        reading = [row.hidden for row in draft.running.rows] if draft.running else []
        reading += [log.hidden for log in draft.machine.groups.logs]
        for rows in reading:
            if any(hidden.block == capture.block for hidden in rows):
                raise Violation(f"round {work.round} writes to block {capture.block}, which is being read")

    def writes(self, slots: Slots, work: RoundWork) -> None:
        """The target writes to no page that anyone else holds or can find."""
        size = slots.pool.page_size
        written = [
            chunk.pages[position // size]
            for chunk in work.chunks
            for position in range(chunk.start, chunk.start + len(chunk.ids))
        ]
        written += [
            tree.pages[(tree.base - 1 + node) // size]
            for tree in work.trees
            for node in range(len(tree.tokens))
            if (tree.base - 1 + node) // size < len(tree.pages)
        ]
        for page in written:
            if page in slots.cache.pages or slots.pool.references(page) != 1:
                raise Violation(f"round {work.round} writes to page {page}, which is shared")

    # Invariants

    def target(self, process: Process) -> None:
        slots = process.machine.slots
        if slots is None:
            return
        held: Counter[int] = Counter()
        for slot in slots.live.values():
            held.update(set(slot.pages))
            if len(set(slot.pages)) != len(slot.pages):
                raise Violation(f"slot {slot.slot} holds a page twice: {slot.pages}")
            if slot.cached > len(slot.ids) - 1:
                raise Violation(f"the bonus token of slot {slot.slot} was found in the cache")
            key = (process.machine.incarnation, slot.slot, slot.generation)
            before = self._pages.get(key, ())
            if tuple(slot.pages[: len(before)]) != before:
                raise Violation(f"pages of slot {slot.slot} changed from {before} to {slot.pages}")
            if len(before) != len(slot.pages):
                self._pages[key] = tuple(slot.pages)
                if not before and slot.cached:
                    self.counters["prefix_hits"] += 1
        for entry in slots.retiring:
            held.update(entry.pages)
        self._references(slots, held)
        cached = slots.cache.pages
        self.counters["forgotten_pages"] += len(
            self._cached.get(process.machine.incarnation, cached) - cached
        )
        self._cached[process.machine.incarnation] = cached
        self.logs(slots.live.values(), process.machine.epoch)

    def _references(self, slots: Slots, held: Counter[int]) -> None:
        """held: how many slots, live or retiring, hold a page. Every page is free, or held by them and the
        cache."""
        pool, cached = slots.pool, slots.cache.pages
        for page, holders in held.items():
            if holders > 1 and page not in cached:
                raise Violation(f"page {page} is held twice and not in the cache")
        known = [page for page in held if held[page]] + [page for page in cached if not held[page]]
        for page in known:
            if pool.references(page) != held[page] + (page in cached):
                raise Violation(
                    f"page {page} has {pool.references(page)} references, {held[page]} slots hold it,"
                    f" cached: {page in cached}"
                )
        if 0 in known or len(known) + pool.free != pool.pages - 1:
            raise Violation(f"{len(known)} pages held and {pool.free} free of {pool.pages - 1}")
        if set(slots.cache.idle) != {page for page in cached if not held[page]}:
            raise Violation(f"{slots.cache.idle} count as idle, slots hold {dict(held)} of {sorted(cached)}")

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
