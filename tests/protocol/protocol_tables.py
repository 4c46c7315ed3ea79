"""The state × event tables of docs/protocol.md, printed from the machines.

`PYTHONPATH=. python tests/protocol/protocol_tables.py` writes them into the page.
"""

from pathlib import Path

from common.actors.table import render
from services.draft import link as draft_link
from services.draft import rounds as draft_rounds
from services.gateway import group, pair
from services.target import link as target_link
from services.target import rounds as target_rounds

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TABLES = {
    "gateway: the round": (group.ROUND_TABLE, group.Group),
    "gateway: the target": (pair.TARGET_TABLE, pair.Pair),
    "gateway: the draft": (pair.DRAFT_TABLE, pair.Pair),
    "target": (target_link.TABLE, target_link.TargetLink),
    "target: the round": (target_rounds.TABLE, target_rounds.Rounds),
    "draft": (draft_link.TABLE, draft_link.DraftLink),
    "draft: the round": (draft_rounds.TABLE, draft_rounds.Rounds),
}


def page_with_tables(page: str) -> str:
    """The page with what stands between each table's marks replaced by the table as it is."""
    for name, (table, machine) in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = head + begin + "\n" + render(table, machine) + "\n" + end + tail
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
