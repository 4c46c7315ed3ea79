"""Requests come and go: how each is taken in, ends, and is suspected of killing the target."""

from collections.abc import Iterable

from services.gateway import events as ev
from services.gateway.options import CoordinatorOptions
from services.gateway.pair import Pair
from services.gateway.requests import WAITING, Request, Requests

MAX_STRIKES = 3
"""A request that kills the target must not do so for ever, and one that was only there must not end for it:
processes die for reasons of their own, and may die twice."""


class Lifetimes:
    """A request ends with exactly one Finished or Failed. Effects go to the list that the Coordinator
    gives."""

    def __init__(self, options: CoordinatorOptions, pair: Pair) -> None:
        self.requests = Requests()
        self.effects: list[ev.Effect] = []
        self._options = options
        self._pair = pair

    def submit(self, event: ev.Submit) -> None:
        """Queue the request, or fail it if it could never fit."""
        if event.request in self.requests.by_id:
            raise ValueError(f"request {event.request} is already here: give every request a new id")
        request = self.requests.add(
            event.request, event.prompt_ids, event.sampling, event.max_tokens, event.priority, event.sink
        )
        if not event.prompt_ids or event.max_tokens < 1:
            self.fail(request, "never_fits", "a request needs a prompt id and room for a token")
        elif self._too_long(request):
            self.fail_too_long(request)

    def abort(self, event: ev.Abort) -> None:
        """End the request now; its slot goes with the next round of its group."""
        request = self.requests.by_id.get(event.request)
        if request is not None:
            self.finish(request, "abort")

    def finish(self, request: Request, reason: str) -> None:
        self.requests.remove(request)
        stats = request.stats()
        self.effects.append(
            ev.Finished(request.request, reason, stats, request.cached_tokens, request.admitted_at)
        )

    def fail(self, request: Request, code: str, error: str) -> None:
        self.requests.remove(request)
        stats = request.stats()
        self.effects.append(
            ev.Failed(request.request, code, error, stats, request.cached_tokens, request.admitted_at)
        )

    def fail_all(self, error: str) -> None:
        for request in list(self.requests.by_id.values()):
            self.fail(request, "error", error)

    @property
    def _max_model_len(self) -> int:
        return (self._pair.limits or self._options).max_model_len

    def _too_long(self, request: Request) -> bool:
        return len(request.ids) >= self._max_model_len

    def fail_too_long(self, request: Request) -> None:
        error = f"a log of {len(request.ids)} ids leaves no room for a token: "
        error += f"the limit is {self._max_model_len - 1} ids"
        self.fail(request, "never_fits", error)

    def fail_all_too_long(self) -> None:
        """The target that has come has less room than was thought."""
        for request in [one for one in self.requests.waiting if self._too_long(one)]:
            self.fail_too_long(request)

    def strike(self, request: Request, error: str) -> None:
        """The target, or its forward, failed while the request was at work."""
        request.strike()
        if request.strikes >= MAX_STRIKES:
            self.fail(request, "error", error)

    def replay_all(self, working: Iterable[int]) -> None:
        """The target is gone: every request goes back to the queue with its log. working: those that had work
        in rounds that never ended; they are suspects, and end when it happens to them again and again."""
        self.requests.releases.clear()
        for request in list(self.requests.by_id.values()):
            if request.state != WAITING:
                self.requests.requeue(request)
        for number in sorted(working):
            if number in self.requests.by_id:
                self.strike(
                    self.requests.by_id[number],
                    f"the target was lost {MAX_STRIKES} times at the same point of this request",
                )
