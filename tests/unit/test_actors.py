import asyncio
import itertools

import pytest

from common.actors.actor import Actor, ActorContext
from common.actors.errors import ActorStopped, AskTimeout, MailboxFull
from common.actors.supervisor import Escalation, RestartPolicy, Supervisor

AT_ONCE = RestartPolicy(first_pause_s=0.0, longest_pause_s=0.0, max_failures=3)


class Echo(Actor[str]):
    """Answers with what it got, and raises when told to fail."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def started(self, context: ActorContext[str]) -> None:
        self.log.append("started")

    async def receive(self, message: str) -> str:
        if message == "fail":
            raise ValueError("told to")
        self.log.append(message)
        return message.upper()

    async def stopped(self) -> None:
        self.log.append("stopped")


class Gated(Actor[str]):
    """Works on each message until the gate is opened."""

    def __init__(self, log: list[str], gate: asyncio.Event, entered: asyncio.Event) -> None:
        self.log, self.gate, self.entered = log, gate, entered

    async def receive(self, message: str) -> str:
        self.log.append(f"begin {message}")
        self.entered.set()
        await self.gate.wait()
        self.log.append(f"end {message}")
        return message


async def test_an_actor_gets_messages_in_order_and_answers_questions() -> None:
    log: list[str] = []
    async with Supervisor() as actors:
        ref = actors.spawn("echo", lambda: Echo(log))
        ref.tell("a")
        ref.tell("b")
        assert await ref.ask("c", 10) == "C"
    assert log == ["started", "a", "b", "c", "stopped"]


async def test_one_message_at_a_time() -> None:
    log: list[str] = []
    gate, entered = asyncio.Event(), asyncio.Event()
    async with Supervisor() as actors:
        ref = actors.spawn("gated", lambda: Gated(log, gate, entered))
        ref.tell("a")
        ref.tell("b")
        await entered.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert log == ["begin a"]
        gate.set()
        await ref.ask("c", 10)
    assert log == ["begin a", "end a", "begin b", "end b", "begin c", "end c"]


async def test_a_full_mailbox_refuses_and_says_so() -> None:
    gate, entered = asyncio.Event(), asyncio.Event()
    async with Supervisor() as actors:
        ref = actors.spawn("gated", lambda: Gated([], gate, entered), mailbox_capacity=2)
        ref.tell("in work")
        await entered.wait()
        ref.tell("a")
        ref.tell("b")
        with pytest.raises(MailboxFull, match=r"'gated' is full \(2 messages\)"):
            ref.tell("c")
        with pytest.raises(MailboxFull):
            await ref.ask("d", 10)
        assert ref.post("owed")
        assert (ref.stats().waiting, ref.stats().refused) == (3, 2)
        gate.set()


async def test_a_question_that_is_not_answered_in_time_ends_with_ask_timeout() -> None:
    gate, entered = asyncio.Event(), asyncio.Event()
    log: list[str] = []
    async with Supervisor() as actors:
        ref = actors.spawn("gated", lambda: Gated(log, gate, entered))
        ref.tell("in work")
        await entered.wait()
        with pytest.raises(AskTimeout, match=r"'gated' did not answer str within 0.01 s"):
            await ref.ask("too late", 0.01)
        gate.set()
        await ref.ask("later", 10)
    assert "begin too late" not in log  # whoever gave up is not worked for


async def test_a_failed_actor_starts_again_and_keeps_its_waiting_messages() -> None:
    log: list[str] = []
    async with Supervisor() as actors:
        ref = actors.spawn("echo", lambda: Echo(log), policy=AT_ONCE)
        ref.tell("a")
        ref.tell("fail")
        ref.tell("b")
        assert await ref.ask("c", 10) == "C"
    assert log == ["started", "a", "stopped", "started", "b", "c", "stopped"]


async def test_the_asker_of_the_question_that_failed_hears_of_it() -> None:
    async with Supervisor() as actors:
        ref = actors.spawn("echo", lambda: Echo([]), policy=AT_ONCE)
        with pytest.raises(ActorStopped, match=r"'echo' failed on the question: ValueError\('told to'\)"):
            await ref.ask("fail", 10)
        assert await ref.ask("still here", 10) == "STILL HERE"


async def test_an_actor_that_fails_too_often_is_escalated_and_its_waiters_are_answered() -> None:
    async with Supervisor() as actors:
        ref = actors.spawn("echo", lambda: Echo([]), policy=AT_ONCE)
        for _ in range(3):
            ref.tell("fail")
        waiting = asyncio.ensure_future(ref.ask("never reached", 10))
        with pytest.raises(Escalation, match="actor 'echo' failed 3 times") as escalation:
            await actors.escalated()
        assert isinstance(escalation.value.__cause__, ValueError)
        with pytest.raises(ActorStopped):
            await waiting
        with pytest.raises(ActorStopped):
            ref.tell("too late")


async def test_failures_outside_the_window_do_not_escalate() -> None:
    policy = RestartPolicy(first_pause_s=0.0, longest_pause_s=0.0, max_failures=2, window_s=60.0)
    seconds = itertools.count(step=61.0)
    async with Supervisor(clock=lambda: next(seconds)) as actors:
        ref = actors.spawn("echo", lambda: Echo([]), policy=policy)
        for _ in range(10):
            ref.tell("fail")
        assert await ref.ask("alive", 10) == "ALIVE"


def test_pauses_between_restarts_double_up_to_the_longest() -> None:
    policy = RestartPolicy(first_pause_s=0.1, longest_pause_s=0.5)
    assert [policy.pause_s(n) for n in (1, 2, 3, 4, 50)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])


async def test_an_actor_that_cannot_be_made_or_started_is_escalated() -> None:
    class Unstartable(Echo):
        async def started(self, context: ActorContext[str]) -> None:
            raise OSError("no model")

    def unmakeable() -> Echo:
        raise OSError("no file")

    for make in (lambda: Unstartable([]), unmakeable):
        async with Supervisor() as actors:
            actors.spawn("broken", make, policy=AT_ONCE)
            with pytest.raises(Escalation, match="OSError"):
                await actors.escalated()


async def test_a_cancelled_inner_task_is_a_failure_and_not_the_end_of_the_actor() -> None:
    class Awaiting(Echo):
        async def receive(self, message: str) -> str:
            if message == "cancel":
                inner = asyncio.ensure_future(asyncio.sleep(60))
                inner.cancel()
                await inner
            return await super().receive(message)

    async with Supervisor() as actors:
        ref = actors.spawn("awaiting", lambda: Awaiting([]), policy=AT_ONCE)
        with pytest.raises(ActorStopped, match="CancelledError"):
            await ref.ask("cancel", 10)
        assert await ref.ask("alive", 10) == "ALIVE"


async def test_stopping_ends_in_reverse_order_and_answers_every_waiter() -> None:
    log: list[str] = []

    class Named(Echo):
        def __init__(self, name: str) -> None:
            super().__init__([])
            self.name = name

        async def stopped(self) -> None:
            log.append(self.name)

    gate, entered = asyncio.Event(), asyncio.Event()
    actors = Supervisor()
    for name in ("first", "second"):
        actors.spawn(name, lambda name=name: Named(name))
    hung = actors.spawn("hung", lambda: Gated([], gate, entered))
    in_work = asyncio.ensure_future(hung.ask("in work", 60))
    await entered.wait()
    waiting = asyncio.ensure_future(hung.ask("waiting", 60))
    await asyncio.sleep(0)
    await actors.stop(grace_s=0.01)
    await actors.stop()
    assert log == ["second", "first"]
    for question in (in_work, waiting):
        with pytest.raises(ActorStopped):
            await question
    await actors.escalated()


async def test_stopping_does_not_wait_for_the_pause_before_a_restart() -> None:
    slow = RestartPolicy(first_pause_s=3600.0, longest_pause_s=3600.0)
    actors = Supervisor()
    ref = actors.spawn("echo", lambda: Echo([]), policy=slow)
    with pytest.raises(ActorStopped):
        await ref.ask("fail", 10)
    async with asyncio.timeout(10):
        await actors.stop(grace_s=3600.0)


async def test_an_error_in_the_stopped_hook_does_not_hide_anything() -> None:
    class Untidy(Echo):
        async def stopped(self) -> None:
            raise OSError("cannot tidy up")

    async with Supervisor() as actors:
        ref = actors.spawn("untidy", lambda: Untidy([]), policy=AT_ONCE)
        ref.tell("fail")
        assert await ref.ask("alive", 10) == "ALIVE"


async def test_two_actors_of_one_name_are_refused() -> None:
    async with Supervisor() as actors:
        actors.spawn("echo", lambda: Echo([]))
        with pytest.raises(ValueError, match="'echo' runs already"):
            actors.spawn("echo", lambda: Echo([]))
