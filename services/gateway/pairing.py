"""Whether a service that said Hello is taken, and what a target is configured with. Reasons are for
people."""

from common.kv.lengths import useful_pages
from common.messages.lifecycle import DraftHello, TargetHello
from common.messages.stamp import PROTOCOL_VERSION
from services.gateway.options import CoordinatorOptions
from services.gateway.schedule import Limits

UNCHANGED_IN_FLIGHT = ("model", "plan", "vocab_size", "tokenizer")
SHARED_BY_A_PAIR = ("vocab_size", "tokenizer")


def limits_for(hello: TargetHello, options: CoordinatorOptions) -> Limits | str:
    """Pages as the given memory or the target's allows, and no more than are of use; or why there are
    none."""
    page_bytes = hello.kv_bytes_per_position * options.page_size
    if page_bytes <= 0:
        return f"target {hello.model} has {hello.kv_bytes_per_position} KV bytes per position: 1 is the least"
    max_model_len = min(options.max_model_len, hello.max_context)
    memory = options.kv_memory_bytes
    if memory is None:
        memory = hello.kv_positions * hello.kv_bytes_per_position
    pages = min(memory // page_bytes, useful_pages(options.max_num_seqs, max_model_len, options.page_size))
    if pages < 1:
        return f"KV memory of {memory} bytes is less than one page of {page_bytes} bytes: raise the KV memory"
    return Limits(
        max_num_seqs=options.max_num_seqs,
        max_rows=min(options.max_rows, hello.max_rows),
        chunk_rows=options.chunk_rows,
        max_nodes=options.max_nodes,
        max_model_len=min(max_model_len, pages * options.page_size + 1),
        pages=pages + 1,
        page_size=options.page_size,
    )


def target_refusal(hello: TargetHello, in_flight_with: TargetHello | None, tokenizer: str) -> str:
    """Why this target is not taken, or "". in_flight_with: the target that made the tokens of requests that
    have not ended. tokenizer: the fingerprint to expect, "" for any."""
    if hello.protocol != PROTOCOL_VERSION:
        return _other_protocol("target", hello.protocol)
    if tokenizer not in ("", hello.tokenizer):
        return (
            f"target {hello.model} has tokenizer {hello.tokenizer}, the gateway {tokenizer}: "
            "give both the same model"
        )
    if in_flight_with is not None:
        for name in UNCHANGED_IN_FLIGHT:
            was, is_ = getattr(in_flight_with, name), getattr(hello, name)
            if was != is_:
                return (
                    f"target came back with {name} {is_} instead of {was} while requests are in flight, "
                    "whose text would change: bring the old one back or let them end"
                )
    return ""


def draft_refusal(draft: DraftHello, target: TargetHello | None) -> str:
    """Why this draft is not taken, or "". Its vocabulary is compared once there is a target."""
    if draft.protocol != PROTOCOL_VERSION:
        return _other_protocol("draft", draft.protocol)
    if target is not None:
        for name in SHARED_BY_A_PAIR:
            drafts, targets = getattr(draft, name), getattr(target, name)
            if drafts != targets:
                return (
                    f"draft {draft.drafter} has {name} {drafts}, target {target.model} has {targets}: "
                    "give a drafter made for this model"
                )
    return ""


def _other_protocol(service: str, protocol: int) -> str:
    return f"the {service} speaks protocol {protocol}, the gateway {PROTOCOL_VERSION}: run one version"
