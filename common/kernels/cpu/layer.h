// A decoder layer over a batch of rows, in phases that threads share.
//
// Tensors are contiguous, bf16 unless said otherwise. Indices are int64.

#pragma once

#include "attention.h"
#include "crew.h"
#include "matrix.h"

namespace paceline {

constexpr int64_t kRowsPerNormTicket = 8;

struct Layer {
  const bf16* attention_norm;
  const bf16* mlp_norm;
  const bf16* query_norm;  // null: none
  const bf16* key_norm;
  Matrix qkv, output, gate_up, down;
};

// What all layers share; counts of tickets follow from it alone.
struct Shape {
  int64_t layers, hidden, inner, heads, kv_heads, head_dim;
  float eps, head_eps, scale;
  int32_t threads;
};

// Rows of a forward. positions, write_slots, key_starts: [rows]. Every row attends over keys 0 … position of its
// path, or as many as counts says, whose slots start at key_slots[key_starts[row]]. longest: most keys of a row.
// picked: rows of qkv that attend, null: all of them.
struct Rows {
  int64_t rows, longest;
  const int64_t *positions, *write_slots, *key_starts, *key_slots, *counts, *picked;
  const float *cosine, *sine;  // [positions, head_dim]
  bf16 *keys, *values;         // [layers, pool, kv_heads, head_dim]
  int64_t layer_stride;        // elements of one layer's keys
};

// residual [rows, hidden] is read and written; the rest is scratch: normed [rows, hidden], qkv [rows, heads + 2 ·
// kv_heads, head_dim], attended [rows, heads · head_dim], active [rows, inner], sums float32 [rows, widest input /
// 32]. capture_at[layer]: place of the residual stream that enters it in captured [rows, places · hidden], or −1.
struct Memory {
  bf16 *residual, *normed, *qkv, *attended, *active;
  float* sums;
  bf16* captured;
  const int32_t* capture_at;
  int64_t captures;
};

struct Step {
  const Layer* layers;
  Shape shape;
  Rows rows;
  Memory memory;
  Tickets qkv, output, gate_up, down;
  int32_t block_sums;

  void run(Walk& walk) const {
    for (int64_t layer = 0; layer < shape.layers; ++layer)
      if (!run_layer(walk, layer)) return;
  }

  bool run_layer(Walk& walk, int64_t number) const {
    const Inputs normed{memory.normed, shape.hidden, memory.sums};
    return walk.phase(row_tickets(), [&](int64_t t) { enter_rows(number, t); }) &&
           walk.phase(qkv.count(), [&](int64_t t) {
             multiply_ticket(layers[number].qkv, qkv, t, normed, rows.rows, Store<bf16>{memory.qkv});
           }) &&
           walk.phase(row_tickets(), [&](int64_t t) { place_rows(number, t); }) && finish_layer(walk, number);
  }

  int64_t row_tickets() const { return ceil_div(rows.rows, kRowsPerNormTicket); }

  // From attention on.
  bool finish_layer(Walk& walk, int64_t number) const {
    const Layer* layer = layers + number;
    const Memory& m = memory;
    const int64_t query_width = shape.heads * shape.head_dim;
    const Inputs normed{m.normed, shape.hidden, m.sums};
    return walk.phase(attention_units(), [&](int64_t t) { attend_unit(number, t); }) &&
           sum_inputs(walk, m.attended, query_width) &&
           walk.phase(output.count(), [&](int64_t t) {
             multiply_ticket(layer->output, output, t, Inputs{m.attended, query_width, m.sums}, rows.rows,
                             AddTo{m.residual});
           }) &&
           walk.phase(row_tickets(), [&](int64_t t) { norm_rows(layer->mlp_norm, t); }) &&
           walk.phase(gate_up.count(), [&](int64_t t) {
             multiply_ticket(layer->gate_up, gate_up, t, normed, rows.rows, SiluMul{m.active});
           }) &&
           sum_inputs(walk, m.active, shape.inner) &&
           walk.phase(down.count(), [&](int64_t t) {
             multiply_ticket(layer->down, down, t, Inputs{m.active, shape.inner, m.sums}, rows.rows,
                             AddTo{m.residual});
           });
  }

  template <class Work>
  void each_row(int64_t ticket, const Work& work) const {
    const int64_t first = ticket * kRowsPerNormTicket, end = first + kRowsPerNormTicket;
    for (int64_t row = first; row < end && row < rows.rows; ++row) work(row);
  }

  bool sum_inputs(Walk& walk, const bf16* x, int64_t width) const {
    if (!block_sums) return true;
    return walk.phase(row_tickets(), [&](int64_t t) {
      each_row(t, [&](int64_t row) { sum_blocks(x + row * width, width, memory.sums + row * (width / kBlock)); });
    });
  }

  void norm_rows(const bf16* weight, int64_t ticket) const {
    each_row(ticket, [&](int64_t row) {
      bf16* normed = memory.normed + row * shape.hidden;
      rms_norm(memory.residual + row * shape.hidden, weight, normed, shape.hidden, shape.eps);
      if (block_sums) sum_blocks(normed, shape.hidden, memory.sums + row * (shape.hidden / kBlock));
    });
  }

  void enter_rows(int64_t number, int64_t ticket) const {
    const int32_t place = memory.capture_at ? memory.capture_at[number] : -1;
    if (place >= 0)
      each_row(ticket, [&](int64_t row) {
        std::memcpy(memory.captured + (row * memory.captures + place) * shape.hidden,
                    memory.residual + row * shape.hidden, size_t(shape.hidden) * sizeof(bf16));
      });
    norm_rows(layers[number].attention_norm, ticket);
  }

  // Queries and keys get their norms and rotation; keys and values go to their places in the pool.
  void place_rows(int64_t number, int64_t ticket) const {
    const Layer& layer = layers[number];
    const int64_t stride = shape.kv_heads * shape.head_dim, width = shape.heads * shape.head_dim + 2 * stride;
    each_row(ticket, [&](int64_t row) {
      const float* cosine = rows.cosine + rows.positions[row] * shape.head_dim;
      const float* sine = rows.sine + rows.positions[row] * shape.head_dim;
      const int64_t place = number * rows.layer_stride + rows.write_slots[row] * stride;
      bf16* qkv = memory.qkv + row * width;
      for (int64_t head = 0; head < shape.heads + shape.kv_heads; ++head) {
        bf16* x = qkv + head * shape.head_dim;
        const bool query = head < shape.heads;
        if (layer.query_norm)
          rms_norm(x, query ? layer.query_norm : layer.key_norm, x, shape.head_dim, shape.head_eps);
        bf16* to = query ? x : rows.keys + place + (head - shape.heads) * shape.head_dim;
        rotate(x, cosine, sine, query ? shape.scale : 1.0f, to, shape.head_dim);
      }
      std::memcpy(rows.values + place, qkv + width - stride, size_t(stride) * sizeof(bf16));
    });
  }

  // Queries that share a pass over the keys; fewer where there would be less to do than threads.
  int64_t queries_each() const {
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t most = group < kMostQueries ? group : kMostQueries;
    return rows.rows * shape.kv_heads < 4 * shape.threads ? ceil_div(most, 2) : most;
  }
  int64_t parts() const { return ceil_div(shape.heads / shape.kv_heads, queries_each()); }
  int64_t attention_units() const { return rows.rows * shape.kv_heads * parts(); }

  void attend_unit(int64_t number, int64_t unit) const {
    const int64_t group = shape.heads / shape.kv_heads, stride = shape.kv_heads * shape.head_dim;
    const int64_t part = unit % parts(), head = unit / parts() % shape.kv_heads;
    const int64_t row = unit / parts() / shape.kv_heads;
    const int64_t each = queries_each();
    const int64_t first = head * group + part * each, left = group - part * each;
    const int64_t width = shape.heads * shape.head_dim + 2 * stride;
    const int64_t layer = number * rows.layer_stride + head * shape.head_dim;
    const Keys keys{rows.keys + layer, rows.values + layer, rows.key_slots + rows.key_starts[row],
                    rows.counts ? rows.counts[row] : rows.positions[row] + 1, stride};
    const int64_t from = rows.picked ? rows.picked[row] : row;
    thread_local std::vector<float> scores;
    const size_t needed = size_t(kMostQueries * ceil_div(rows.longest, kLanes) * kLanes);
    if (scores.size() < needed) scores.resize(needed);
    attend(int(left < each ? left : each), memory.qkv + from * width + first * shape.head_dim, keys,
           shape.head_dim, scores.data(), memory.attended + (row * shape.heads + first) * shape.head_dim);
  }
};

inline Step step_of(const Layer* layers, const Shape& shape, const Rows& rows, const Memory& memory) {
  const Layer& one = *layers;
  const bool sums = one.qkv.format == kQ4 || one.output.format == kQ4 || one.gate_up.format == kQ4 ||
                    one.down.format == kQ4;
  return Step{layers,
              shape,
              rows,
              memory,
              tickets_of(one.qkv, rows.rows),
              tickets_of(one.output, rows.rows),
              tickets_of(one.gate_up, rows.rows),
              tickets_of(one.down, rows.rows),
              sums};
}

}  // namespace paceline
