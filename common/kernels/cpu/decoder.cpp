// A decoder's layers over a batch of rows in one call, for bfloat16 activations on CPUs with AVX-512 BF16.
//
// Tensors are contiguous, bf16 unless said otherwise. Indices are int64.

#include "attention.h"
#include "crew.h"
#include "matrix.h"

namespace paceline {
namespace {

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
// path, whose slots start at key_slots[key_starts[row]]. longest: most keys of a row.
struct Rows {
  int64_t rows, longest;
  const int64_t *positions, *write_slots, *key_starts, *key_slots;
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
    const Layer* layer = layers + number;
    const Memory& m = memory;
    const int64_t row_tickets = ceil_div(rows.rows, kRowsPerNormTicket);
    const int64_t query_width = shape.heads * shape.head_dim;
    const Inputs normed{m.normed, shape.hidden, m.sums};
    return walk.phase(row_tickets, [&](int64_t t) { enter_rows(number, t); }) &&
           walk.phase(qkv.count(), [&](int64_t t) {
             multiply_ticket(layer->qkv, qkv, t, normed, rows.rows, Store<bf16>{m.qkv});
           }) &&
           walk.phase(row_tickets, [&](int64_t t) { place_rows(number, t); }) &&
           walk.phase(attention_units(), [&](int64_t t) { attend_unit(number, t); }) &&
           sum_inputs(walk, m.attended, query_width) &&
           walk.phase(output.count(), [&](int64_t t) {
             multiply_ticket(layer->output, output, t, Inputs{m.attended, query_width, m.sums}, rows.rows,
                             AddTo{m.residual});
           }) &&
           walk.phase(row_tickets, [&](int64_t t) { norm_rows(layer->mlp_norm, t); }) &&
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
    return walk.phase(ceil_div(rows.rows, kRowsPerNormTicket), [&](int64_t t) {
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
                    rows.positions[row] + 1, stride};
    thread_local std::vector<float> scores;
    const size_t needed = size_t(kMostQueries * ceil_div(rows.longest, kLanes) * kLanes);
    if (scores.size() < needed) scores.resize(needed);
    attend(int(left < each ? left : each), memory.qkv + row * width + first * shape.head_dim, keys,
           shape.head_dim, scores.data(), memory.attended + (row * shape.heads + first) * shape.head_dim);
  }
};

// out [rows, outputs] = x [rows, inputs] Wᵀ + bias, bf16 or float32. sums: scratch as in Memory.
struct Product {
  Matrix matrix;
  const bf16* x;
  void* out;
  float* sums;
  int64_t rows;
  int32_t wide;
  Tickets tickets;

  void run(Walk& walk) const {
    const Inputs in{x, matrix.inputs, sums};
    if (matrix.format == kQ4 && !walk.phase(rows, [&](int64_t row) {
          sum_blocks(x + row * matrix.inputs, matrix.inputs, sums + row * (matrix.inputs / kBlock));
        }))
      return;
    walk.phase(tickets.count(), [&](int64_t t) {
      if (wide) multiply_ticket(matrix, tickets, t, in, rows, Store<float>{(float*)out});
      else multiply_ticket(matrix, tickets, t, in, rows, Store<bf16>{(bf16*)out});
    });
  }
};

struct Job {
  enum Kind { kStep, kProduct } kind = kStep;
  Step step{};
  Product product{};
  void run(Walk& walk) const { kind == kStep ? step.run(walk) : product.run(walk); }
};

Crew<Job>& crew() {
  static Crew<Job>* one = new Crew<Job>;  // its threads may outlive every destructor
  return *one;
}

template <class Put>
void each_weight(const Matrix& m, const Put& put) {
  for (int64_t panel = 0; panel < panels_of(m); ++panel)
    for (int64_t place = 0; place < kPanel; ++place) put(panel, place, output_at(m, panel, place));
}

}  // namespace
}  // namespace paceline

using namespace paceline;

extern "C" {

int64_t paceline_packed_bytes(const Matrix* m) { return panels_of(*m) * panel_bytes(m->format, m->inputs); }

// weight: [outputs, inputs]. to: paceline_packed_bytes, which m->data is to point to.
void paceline_pack_bf16(const Matrix* m, const bf16* weight, bf16* to) {
  each_weight(*m, [&](int64_t panel, int64_t place, int64_t output) {
    bf16* at = to + panel * m->inputs * kPanel + place * 2;
    for (int64_t k = 0; k < m->inputs; ++k)
      at[k / 2 * 2 * kPanel + k % 2] = output < 0 ? bf16(0) : weight[output * m->inputs + k];
  });
}

// scales, minima: float16 [outputs, inputs / 32]. quants: [outputs, inputs], 0 … 15.
void paceline_pack_q4(const Matrix* m, const uint16_t* scales, const uint16_t* minima, const uint8_t* quants,
                      uint8_t* to) {
  const int64_t blocks = m->inputs / kBlock;
  std::memset(to, 0, size_t(paceline_packed_bytes(m)));
  each_weight(*m, [&](int64_t panel, int64_t place, int64_t output) {
    if (output < 0) return;
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* block = to + (panel * blocks + b) * kQ4Block;
      std::memcpy(block + place * 2, scales + output * blocks + b, 2);
      std::memcpy(block + 64 + place * 2, minima + output * blocks + b, 2);
      for (int64_t k = 0; k < kBlock; ++k) {
        // A word holds four pairs' quants of one output and one of the two inputs.
        const int64_t pair = k / 2, word = place % kLanes * 2 + k % 2, shift = pair % 4 * 4;
        uint8_t* at = block + kQ4Header + place / kLanes * 256 + pair / 4 * 64 + word * 2 + shift / 8;
        *at = uint8_t(*at | quants[output * m->inputs + b * kBlock + k] << shift % 8);
      }
    }
  });
}

// scales: float16 [outputs, inputs / 32]. quants: [outputs, inputs].
void paceline_pack_q8(const Matrix* m, const uint16_t* scales, const int8_t* quants, uint8_t* to) {
  const int64_t blocks = m->inputs / kBlock;
  std::memset(to, 0, size_t(paceline_packed_bytes(m)));
  each_weight(*m, [&](int64_t panel, int64_t place, int64_t output) {
    if (output < 0) return;
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* block = to + (panel * blocks + b) * kQ8Block;
      std::memcpy(block + place * 2, scales + output * blocks + b, 2);
      for (int64_t k = 0; k < kBlock; ++k)
        block[kQ8Header + k / 2 * 64 + place / kLanes * 32 + k % 2 * 16 + place % kLanes] =
            uint8_t(quants[output * m->inputs + b * kBlock + k]);
    }
  });
}

void paceline_product(const Matrix* m, const bf16* x, void* out, float* sums, int64_t rows, int32_t wide,
                      int32_t threads) {
  Job job;
  job.kind = Job::kProduct;
  job.product = Product{*m, x, out, sums, rows, wide, tickets_of(*m, rows)};
  crew().run(job, threads);
}

void paceline_step(const Layer* layers, const Shape* shape, const Rows* rows, const Memory* memory) {
  Job job;
  const int64_t n = rows->rows;
  const bool sums = layers->qkv.format == kQ4 || layers->output.format == kQ4 || layers->gate_up.format == kQ4 ||
                    layers->down.format == kQ4;
  job.step = Step{layers,
                  *shape,
                  *rows,
                  *memory,
                  tickets_of(layers->qkv, n),
                  tickets_of(layers->output, n),
                  tickets_of(layers->gate_up, n),
                  tickets_of(layers->down, n),
                  sums};
  crew().run(job, shape->threads);
}
}
