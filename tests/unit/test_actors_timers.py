import asyncio
from collections.abc import Callable

from common.actors.actor import Actor, ActorContext
from common.actors.supervisor import RestartPolicy, Supervisor

Step = Callable[["Scripted"], None]


class Scripted(Actor[object]):
    """Runs steps that it is told; records every other message, and ends the test at "end"."""

    def __init__(self, log: list[object], end: asyncio.Event) -> None:
        self.log, self.end = log, end

    async def started(self, context: ActorContext[object]) -> None:
        self.context = context

    async def receive(self, message: object) -> None:
        if callable(message):
            await message(self)
            return
        self.log.append(message)
        if message == "end":
            self.end.set()


async def run_script(*steps: Callable[[Scripted], object]) -> list[object]:
    log: list[object] = []
    end = asyncio.Event()
    policy = RestartPolicy(first_pause_s=0.0, longest_pause_s=0.0)
    async with Supervisor() as actors:
        ref = actors.spawn("scripted", lambda: Scripted(log, end), policy=policy)
        for step in steps:
            ref.tell(step)
        async with asyncio.timeout(10):
            await end.wait()
    return log


async def wait_for_waiting(actor: Scripted, count: int) -> None:
    while actor.context.ref.stats().waiting < count:
        await asyncio.sleep(0)


async def test_a_timer_is_delivered_as_its_message() -> None:
    async def step(actor: Scripted) -> None:
        actor.context.timers.set("late", 0.02, "end")
        actor.context.timers.set("soon", 0.01, "soon")

    assert await run_script(step) == ["soon", "end"]


async def test_setting_a_name_again_replaces_the_timer() -> None:
    async def step(actor: Scripted) -> None:
        actor.context.timers.set("deadline", 0.0, "old")
        actor.context.timers.set("deadline", 0.0, "new")
        actor.context.timers.set("other", 0.01, "end")

    assert await run_script(step) == ["new", "end"]


async def test_a_firing_that_waits_in_the_mailbox_is_taken_back() -> None:
    async def step(actor: Scripted) -> None:
        timers = actor.context.timers
        timers.set("replaced", 0.0, "old")
        timers.set("cancelled", 0.0, "cancelled")
        await wait_for_waiting(actor, 2)
        timers.set("replaced", 0.0, "new")
        timers.cancel("cancelled")
        timers.cancel("never set")
        timers.set("end", 0.01, "end")

    assert await run_script(step) == ["new", "end"]


async def test_timers_end_with_the_instance_that_set_them() -> None:
    async def fail(actor: Scripted) -> None:
        actor.context.timers.set("waiting", 0.0, "fired")
        await wait_for_waiting(actor, 2)
        actor.context.timers.set("running", 0.005, "running")
        raise ValueError

    async def after(actor: Scripted) -> None:
        actor.context.timers.set("end", 0.02, "end")

    assert await run_script(fail, after) == ["end"]
