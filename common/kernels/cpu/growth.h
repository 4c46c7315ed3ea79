// Greedy token trees of an EAGLE-3 head, all levels in one job. `services/draft/eagle/growth.py` is the reference.

#pragma once

#include <algorithm>
#include <atomic>

#include "head.h"

namespace paceline {

constexpr int64_t kMostLevels = 64;

// Trees of several slots. width, levels: as Shape.width and Shape.levels there. most: the largest budget.
// budgets, bases: [slots]. outputs: [slots, hidden], what the head makes of the bonus tokens.
// known: physical positions of the slots' valid entries in keys and values [places, kv_heads, head_dim], slot by slot,
// counts of each. tokens, parents: [slots, most], sizes: [slots], the results; parents count from the root, which is 0.
struct Growth {
  int64_t slots, width, levels, most;
  const int64_t *budgets, *bases, *target_ids;
  const bf16* outputs;
  const bf16 *keys, *values;
  const int64_t *known, *counts;
  const float *cosine, *sine;
  int64_t *tokens, *parents, *sizes;
};

inline int64_t level_width(const Growth& g, int64_t level) { return std::min(g.width, g.most - level + 1); }

inline int64_t expanded_nodes(const Growth& g) {
  int64_t nodes = 0;
  for (int64_t level = 1; level < g.levels; ++level) nodes += level_width(g, level + 1);
  return nodes;
}

// Hands out pieces of one allocation. Without memory it only counts.
struct Scratch {
  uint8_t* memory;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = memory ? (T*)(memory + used) : nullptr;
    used += ceil_div(count * int64_t(sizeof(T)), 64) * 64;
    return piece;
  }
};

// A slot's pool: every node that was seen, a level behind the other. frontier: nodes to expand next.
struct Pool {
  double* scores;
  int64_t *ids, *parents, *frontier;
  int64_t* paths;  // [width, levels], numbers of each frontier node's ancestors among the nodes expanded
  int64_t* order;  // scratch
};

// firsts: where a slot's entries stand in `entry_keys` and `entry_values`, its own copy of what is read, and where its
// nodes' do. reads: [rows, levels + longest], places that a row reads.
struct GrowthMemory {
  Pool* pools;
  int64_t *sizes, *expanded, *firsts, *trees;
  bf16 *entry_keys, *entry_values;
  int64_t *behind, *ids, *positions, *writes, *starts, *key_counts, *picked, *reads;
  int64_t longest;
  bf16 *outputs[2], *normed, *entered, *qkv, *attended, *active;
  float *logits, *scores;
  int64_t* best;
};

inline GrowthMemory memory_of(const Head& head, const Shape& shape, const Growth& g, Scratch& scratch) {
  GrowthMemory m{};
  const int64_t rows = g.slots * std::min(g.width, g.most);
  const int64_t seen = g.width + g.levels * g.width * g.width;
  const int64_t query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
  int64_t known = 0;
  for (int64_t slot = 0; slot < g.slots; ++slot) {
    known += g.counts[slot];
    m.longest = std::max(m.longest, g.counts[slot]);
  }
  m.pools = scratch.take<Pool>(g.slots);
  for (int64_t slot = 0; slot < g.slots; ++slot) {
    const Pool pool{scratch.take<double>(seen),    scratch.take<int64_t>(seen),
                    scratch.take<int64_t>(seen),   scratch.take<int64_t>(g.width),
                    scratch.take<int64_t>(2 * g.width * g.levels), scratch.take<int64_t>(seen)};
    if (scratch.memory) m.pools[slot] = pool;
  }
  for (int64_t** each : {&m.sizes, &m.expanded, &m.firsts, &m.trees}) *each = scratch.take<int64_t>(g.slots);
  const int64_t places = known + g.slots * expanded_nodes(g);
  m.entry_keys = scratch.take<bf16>(places * key);
  m.entry_values = scratch.take<bf16>(places * key);
  for (int64_t** each : {&m.behind, &m.ids, &m.positions, &m.writes, &m.starts, &m.key_counts, &m.picked})
    *each = scratch.take<int64_t>(rows);
  m.reads = scratch.take<int64_t>(rows * (g.levels + m.longest));
  for (bf16** each : {&m.outputs[0], &m.outputs[1], &m.normed}) *each = scratch.take<bf16>(rows * shape.hidden);
  m.entered = scratch.take<bf16>(rows * 2 * shape.hidden);
  m.qkv = scratch.take<bf16>(rows * (query + 2 * key));
  m.attended = scratch.take<bf16>(rows * query);
  m.active = scratch.take<bf16>(rows * shape.inner);
  m.logits = scratch.take<float>(rows * head.lm_head.outputs);
  m.scores = scratch.take<float>(rows * g.width);
  m.best = scratch.take<int64_t>(rows * g.width);
  if (scratch.memory) {
    int64_t first = 0;
    for (int64_t slot = 0; slot < g.slots; ++slot) {
      m.firsts[slot] = first;
      first += g.counts[slot];
      m.trees[slot] = known + slot * expanded_nodes(g);
      m.sizes[slot] = m.expanded[slot] = 0;
    }
  }
  return m;
}

// Whether all trees were settled before a level: (step << 1) | settled. Every thread reads it between phases, also one
// that comes so late that another job has begun; that one finds another step and leaves.
inline std::atomic<uint64_t>* settled_at() {
  static std::atomic<uint64_t> settled[kMostLevels];
  return settled;
}

// head: a copy, for a thread that comes when the caller's may be gone.
struct HeadGrowth {
  Head head;
  Shape shape;
  Growth g;
  GrowthMemory m;

  void run(Walk& walk) const {
    if (!walk.phase(g.slots, [&](int64_t slot) { copy_entries(slot); })) return;
    if (!rank(walk, g.outputs, g.slots, level_width(g, 1))) return;
    for (int64_t level = 1; level <= g.levels; ++level) {
      if (!walk.phase(g.slots, [&](int64_t slot) { take_children(slot, level); })) return;
      if (!walk.phase(1, [&](int64_t) {
            const bool settled = level == g.levels || all_settled();
            settled_at()[level].store(uint64_t(walk.step()) << 1 | settled, std::memory_order_release);
          }))
        return;
      const uint64_t settled = settled_at()[level].load(std::memory_order_acquire);
      if (settled >> 1 != walk.step()) return;
      if (settled & 1) break;
      const int64_t width = level_width(g, level + 1);
      const bf16* features = level == 1 ? g.outputs : m.outputs[level % 2];
      bf16* made = m.outputs[(level + 1) % 2];
      if (!layer(features, made, g.slots * width).run(walk) || !rank(walk, made, g.slots * width, width)) return;
    }
    walk.phase(g.slots, [&](int64_t slot) { choose_best(slot); });
  }

  bool rank(Walk& walk, const bf16* outputs, int64_t rows, int64_t width) const {
    const Ranked ranked{rows, width, outputs, m.normed, m.logits, m.scores, m.best};
    return HeadRank{&head, shape, ranked, tickets_of(head.lm_head, rows)}.run(walk);
  }

  HeadLayer layer(const bf16* features, bf16* made, int64_t count) const {
    const Rows rows{count, m.longest + g.levels, m.positions, m.writes, m.starts, m.reads, m.key_counts, m.picked,
                    g.cosine, g.sine, m.entry_keys, m.entry_values, 0};
    const HeadRows in{features, m.behind, m.ids, m.entered, count, 1};
    const Memory memory{made, m.normed, m.qkv, m.attended, m.active, nullptr, nullptr, nullptr, 0};
    return head_layer_of(&head, shape, rows, in, memory);
  }

  void copy_entries(int64_t slot) const {
    const int64_t size = shape.kv_heads * shape.head_dim;
    for (int64_t at = m.firsts[slot]; at < m.firsts[slot] + g.counts[slot]; ++at) {
      std::memcpy(m.entry_keys + at * size, g.keys + g.known[at] * size, size_t(size) * sizeof(bf16));
      std::memcpy(m.entry_values + at * size, g.values + g.known[at] * size, size_t(size) * sizeof(bf16));
    }
  }

  // What was ranked behind the nodes expanded last become nodes of this level, the best of them its frontier.
  void take_children(int64_t slot, int64_t level) const {
    const Pool& pool = m.pools[slot];
    const int64_t children = level_width(g, level), expanded = level == 1 ? 1 : children;
    const int64_t first = m.sizes[slot];
    int64_t size = first;
    for (int64_t node = 0; node < expanded; ++node) {
      const int64_t row = slot * expanded + node, parent = level == 1 ? -1 : pool.frontier[node];
      for (int64_t child = 0; child < children; ++child, ++size) {
        const float score = m.scores[row * children + child];
        // What is not a number, because the head's own numbers overflowed, is as good as impossible.
        pool.scores[size] = score == score ? double(score) + (parent < 0 ? 0.0 : pool.scores[parent])
                                           : -std::numeric_limits<double>::infinity();
        pool.ids[size] = g.target_ids[m.best[row * children + child]];
        pool.parents[size] = parent;
      }
    }
    m.sizes[slot] = size;
    if (level < g.levels) enter_frontier(slot, level, first, children, expanded);
  }

  void enter_frontier(int64_t slot, int64_t level, int64_t first, int64_t children, int64_t expanded) const {
    const Pool& pool = m.pools[slot];
    const int64_t width = level_width(g, level + 1), stride = g.levels + m.longest;
    sort_by_score(pool, first, m.sizes[slot]);
    // Paths of the level before stand in one half, those of this one come into the other.
    const int64_t* above = pool.paths + (level + 1) % 2 * g.width * g.levels;
    int64_t* paths = pool.paths + level % 2 * g.width * g.levels;
    for (int64_t at = 0; at < width; ++at) {
      const int64_t node = pool.order[at], row = slot * width + at, behind = (node - first) / children;
      pool.frontier[at] = node;
      int64_t* path = paths + at * g.levels;
      if (level > 1) std::copy(above + behind * g.levels, above + behind * g.levels + level - 1, path);
      path[level - 1] = m.expanded[slot] + at;
      m.behind[row] = slot * expanded + behind;
      m.ids[row] = pool.ids[node];
      m.positions[row] = g.bases[slot] + level - 2;  // the entry of a token at position p rotates by p − 1
      m.writes[row] = m.trees[slot] + path[level - 1];
      m.picked[row] = row;
      m.starts[row] = row * stride;
      m.key_counts[row] = level + g.counts[slot];
      int64_t* reads = m.reads + row * stride;
      for (int64_t i = 0; i < level; ++i) reads[i] = m.trees[slot] + path[i];
      for (int64_t i = 0; i < g.counts[slot]; ++i) reads[level + i] = m.firsts[slot] + i;
    }
    m.expanded[slot] += width;
  }

  // pool.order: nodes first … end − 1, the most probable first.
  static void sort_by_score(const Pool& pool, int64_t first, int64_t end) {
    for (int64_t at = 0; at < end - first; ++at) pool.order[at] = first + at;
    std::stable_sort(pool.order, pool.order + (end - first),
                     [&](int64_t a, int64_t b) { return pool.scores[a] > pool.scores[b]; });
  }

  // No descendant of a frontier can be among the best: paths only become less probable.
  bool all_settled() const {
    for (int64_t slot = 0; slot < g.slots; ++slot) {
      const Pool& pool = m.pools[slot];
      if (m.sizes[slot] < g.budgets[slot]) return false;
      sort_by_score(pool, 0, m.sizes[slot]);
      const int64_t last = pool.order[std::max<int64_t>(0, g.budgets[slot] - 1)];
      if (pool.scores[pool.frontier[0]] > pool.scores[last]) return false;
    }
    return true;
  }

  // A parent is at least as probable as its child and was seen before: it is chosen if the child is.
  void choose_best(int64_t slot) const {
    const Pool& pool = m.pools[slot];
    sort_by_score(pool, 0, m.sizes[slot]);
    int64_t count = std::min(g.budgets[slot], m.sizes[slot]);
    while (count > 0 && !(pool.scores[pool.order[count - 1]] > -std::numeric_limits<double>::infinity())) --count;
    std::sort(pool.order, pool.order + count);
    for (int64_t at = 0; at < count; ++at) {
      const int64_t node = pool.order[at];
      const int64_t* found = std::find(pool.order, pool.order + at, pool.parents[node]);
      g.tokens[slot * g.most + at] = pool.ids[node];
      g.parents[slot * g.most + at] = pool.parents[node] < 0 ? 0 : found - pool.order + 1;
    }
    g.sizes[slot] = count;
  }
};

}  // namespace paceline
