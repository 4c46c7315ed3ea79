"""Who says what to whom, as the types that each socket decodes, and where each socket is."""

from pathlib import Path

from common.messages.lifecycle import (
    Configure,
    Configured,
    ConfigureDraft,
    DraftGone,
    DraftHello,
    DraftReady,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    Refused,
    SelfTest,
    SelfTestReply,
    StartOver,
    TargetHello,
)
from common.messages.rounds import Behind, Consumed, Proposal, Propose, Verdict, Verify

GatewayToTarget = Configure | JoinDraft | DraftGone | StartOver | Refused | Heartbeat | Verify
TargetToGateway = TargetHello | Configured | DraftRegion | Heartbeat | Verdict
GatewayToDraft = ConfigureDraft | StartOver | Refused | Heartbeat | Propose
DraftToGateway = DraftHello | DraftReady | Behind | Heartbeat
DraftToTarget = SelfTest | Proposal | Consumed
TargetToDraft = SelfTestReply | Verdict
ToGateway = TargetToGateway | DraftToGateway


def peer_address(run_dir: str, service: str) -> str:
    """The ipc address that a service binds."""
    return f"ipc://{Path(run_dir) / service}.sock"
