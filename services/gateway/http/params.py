"""From a request body to one GenerationSpec per choice and the form of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.admission import MAX_INT32, GenerationParams, build_spec, fix_seed, invalid
from services.gateway.engine import GenerationSpec
from services.gateway.http.forms import Form, Wants
from services.gateway.http.front import Front
from services.gateway.http.schemas import GenerationRequest


def plan_choices(
    front: Front,
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    form: type[Form],
    *,
    prompt_param: str,
    max_completion_tokens: int | None = None,
) -> tuple[list[GenerationSpec], Form]:
    """n choices for each prompt, prompt by prompt. max_completion_tokens goes before max_tokens.

    Raises RequestError.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true.")
    n = 1 if body.n is None else body.n
    most = front.settings.max_choices
    if not 1 <= n <= most:
        raise invalid("n", f"`n` must be from 1 to {most}.")
    if n * len(prompts) > most:
        raise invalid("n", f"{len(prompts)} prompts with `n` {n} make more than {most} choices: send fewer.")
    if max_completion_tokens is not None and not 1 <= max_completion_tokens <= MAX_INT32:
        raise invalid("max_completion_tokens", f"`max_completion_tokens` must be from 1 to {MAX_INT32}.")
    params = GenerationParams(
        max_tokens=body.max_tokens if max_completion_tokens is None else max_completion_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
    )
    info, seed = front.engine.info, fix_seed(body.seed)
    specs: list[GenerationSpec] = []
    for prompt in prompts:
        for _ in range(n):
            specs.append(
                build_spec(info, prompt, params, seed=seed, choice=len(specs), prompt_param=prompt_param)
            )
    prompt_tokens = [len(spec.prompt_ids) for spec in specs]
    return specs, form(info.model, seed, prompt_tokens, n, Wants.of(body))
