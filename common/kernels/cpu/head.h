// The one layer of an EAGLE-3 head, and the ranking of what it predicts.

#pragma once

#include <limits>

#include "layer.h"

namespace paceline {

// layer: attention_norm, query_norm and key_norm are null; qkv reads the norms of embedding and feature side by
// side. norm: before lm_head. embedding: [ids, hidden].
struct Head {
  Layer layer;
  const bf16 *input_norm, *feature_norm, *norm;
  const bf16* embedding;
  Matrix lm_head;
  float logit_scale;
  int32_t norm_before_residual, norm_output;
};

// features: [rows, hidden], the target's fused states, or (fed_back) the head's own outputs, of which parents names
// one for each row; null: the row's own. ids: [rows]. last: rows whose outputs are wanted, their numbers stand in
// Rows::picked. entered: scratch [rows, 2 · hidden].
struct HeadRows {
  const bf16* features;
  const int64_t* parents;
  const int64_t* ids;
  bf16* entered;
  int64_t last;
  int32_t fed_back;
};

// Rows write their keys and values; those picked attend and go on to Memory::residual [last, hidden], the outputs.
struct HeadLayer {
  const Head* head;
  HeadRows in;
  Step all, last;

  bool run(Walk& walk) const {
    const Inputs entered{in.entered, 2 * all.shape.hidden, nullptr};
    return walk.phase(all.row_tickets(), [&](int64_t t) { enter_rows(t); }) &&
           walk.phase(all.qkv.count(), [&](int64_t t) {
             multiply_ticket(head->layer.qkv, all.qkv, t, entered, all.rows.rows, Store<bf16>{all.memory.qkv});
           }) &&
           walk.phase(all.row_tickets(), [&](int64_t t) { all.place_rows(0, t); }) &&
           walk.phase(last.row_tickets(), [&](int64_t t) { pick_rows(t); }) && last.finish_layer(walk, 0);
  }

  const bf16* feature_of(int64_t row) const {
    return in.features + (in.parents ? in.parents[row] : row) * all.shape.hidden;
  }

  void enter_rows(int64_t ticket) const {
    const Shape& shape = all.shape;
    all.each_row(ticket, [&](int64_t row) {
      bf16* embedded = in.entered + row * 2 * shape.hidden;
      bf16* feature = embedded + shape.hidden;
      const bf16* given = feature_of(row);
      rms_norm(head->embedding + in.ids[row] * shape.hidden, head->input_norm, embedded, shape.hidden, shape.eps);
      if (in.fed_back && head->norm_output) {
        rms_norm(given, head->norm, feature, shape.hidden, shape.eps);
        given = feature;
      }
      rms_norm(given, head->feature_norm, feature, shape.hidden, shape.eps);
    });
  }

  void pick_rows(int64_t ticket) const {
    const Shape& shape = all.shape;
    last.each_row(ticket, [&](int64_t row) {
      const int64_t from = last.rows.picked[row];
      bf16* residual = last.memory.residual + row * shape.hidden;
      const bf16* given = feature_of(from);
      if (head->norm_before_residual) given = in.entered + (2 * from + 1) * shape.hidden;
      else if (in.fed_back && head->norm_output)
        return rms_norm(given, head->norm, residual, shape.hidden, shape.eps);
      std::memcpy(residual, given, size_t(shape.hidden) * sizeof(bf16));
    });
  }
};

inline HeadLayer head_layer_of(const Head* head, const Shape& shape, const Rows& rows, const HeadRows& in,
                               const Memory& memory) {
  Rows last = rows;
  last.rows = in.last;
  return HeadLayer{head, in, step_of(&head->layer, shape, rows, memory), step_of(&head->layer, shape, last, memory)};
}

// outputs: [rows, hidden]. normed: scratch of that size. logits: float32 [rows, draft ids]. scores: float32 [rows,
// width], log-probabilities of the most probable ids [rows, width], int64, the most probable first.
struct Ranked {
  int64_t rows, width;
  const bf16* outputs;
  bf16* normed;
  float* logits;
  float* scores;
  int64_t* ids;
};

// The largest values and where they stand, largest first, the lower index first among equals.
inline void largest(const float* values, int64_t size, int64_t width, float* found, int64_t* at) {
  for (int64_t i = 0; i < width; ++i) {
    found[i] = -std::numeric_limits<float>::infinity();
    at[i] = 0;
  }
  __m512 least = _mm512_set1_ps(found[width - 1]);
  for (int64_t first = 0; first < size; first += kLanes) {
    const __mmask16 there = lanes(size - first);
    uint32_t above = _mm512_mask_cmp_ps_mask(there, load(values + first, there), least, _CMP_GT_OQ);
    for (; above; above &= above - 1) {
      const int64_t index = first + __builtin_ctz(above);
      int64_t place = width - 1;
      if (!(values[index] > found[place])) continue;
      for (; place > 0 && values[index] > found[place - 1]; --place) {
        found[place] = found[place - 1];
        at[place] = at[place - 1];
      }
      found[place] = values[index];
      at[place] = index;
      least = _mm512_set1_ps(found[width - 1]);
    }
  }
}

inline float log_sum(const float* values, int64_t size, float highest) {
  __m512 sum = _mm512_setzero_ps();
  const __m512 top = _mm512_set1_ps(highest);
  for (int64_t first = 0; first < size; first += kLanes) {
    const __mmask16 there = lanes(size - first);
    sum = _mm512_mask_add_ps(sum, there, sum, exponential(_mm512_sub_ps(load(values + first, there), top)));
  }
  return highest + __builtin_logf(sum_of(sum));
}

struct HeadRank {
  const Head* head;
  Shape shape;
  Ranked at;
  Tickets tickets;

  bool run(Walk& walk) const {
    const Inputs normed{at.normed, shape.hidden, nullptr};
    return walk.phase(at.rows, [&](int64_t row) {
      rms_norm(at.outputs + row * shape.hidden, head->norm, at.normed + row * shape.hidden, shape.hidden, shape.eps);
    }) && walk.phase(tickets.count(), [&](int64_t t) {
      multiply_ticket(head->lm_head, tickets, t, normed, at.rows, Store<float>{at.logits});
    }) && walk.phase(at.rows, [&](int64_t row) { rank_row(row); });
  }

  void rank_row(int64_t row) const {
    const int64_t size = head->lm_head.outputs;
    float* logits = at.logits + row * size;
    if (head->logit_scale != 1.0f)
      for (int64_t i = 0; i < size; ++i) logits[i] *= head->logit_scale;
    float* scores = at.scores + row * at.width;
    largest(logits, size, at.width, scores, at.ids + row * at.width);
    const float total = log_sum(logits, size, scores[0]);
    for (int64_t i = 0; i < at.width; ++i) scores[i] -= total;
  }
};

}  // namespace paceline
