"""The three lengths of a slot, in positions, and the one place where they become pages.

committed: ids in the request's log. valid: positions that hold the KV of committed ids; the bonus token has
none yet, so at most committed − 1 while a slot decodes. allocated: positions that pages are reserved for;
never shrinks while a slot lives.
"""


def pages_for(positions: int, page_size: int) -> int:
    """Whole pages that hold so many positions."""
    return -(-positions // page_size)


def useful_pages(max_num_seqs: int, max_model_len: int, page_size: int) -> int:
    """More than these a pool has no use for: slots that end keep their pages until the draft lets go."""
    return 2 * max_num_seqs * pages_for(max_model_len, page_size)


def most_nodes(committed: int, allocated: int, max_nodes: int, max_model_len: int) -> int:
    """How many tree nodes the next round may verify, root included; 0 if not even the root has its position.

    Node j stands at physical position committed − 1 + j. A node past max_model_len − 1 could not be
    committed.
    """
    return max(0, min(max_nodes, allocated - (committed - 1), max_model_len - committed))


def step_positions(committed: int, max_nodes: int, max_model_len: int) -> int:
    """Positions that a round needs for every node of a slot whose log has so many ids."""
    return max(committed, min(committed - 1 + max_nodes, max_model_len - 1))
