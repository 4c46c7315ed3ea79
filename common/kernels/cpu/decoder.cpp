// A decoder's layers over a batch of rows in one call, and what a draft head does, for bfloat16 activations on
// CPUs with AVX-512 BF16.

#include "growth.h"
#include "head.h"
#include "layer.h"

namespace paceline {
namespace {

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
  enum Kind { kStep, kProduct, kHeadLayer, kHeadRank, kHeadGrowth } kind = kStep;
  Step step{};
  Product product{};
  HeadLayer layer{};
  HeadRank rank{};
  HeadGrowth growth{};
  void run(Walk& walk) const {
    switch (kind) {
      case kStep: return step.run(walk);
      case kProduct: return product.run(walk);
      case kHeadLayer: return void(layer.run(walk));
      case kHeadRank: return void(rank.run(walk));
      case kHeadGrowth: return growth.run(walk);
    }
  }
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
  job.step = step_of(layers, *shape, *rows, *memory);
  crew().run(job, shape->threads);
}

void paceline_head_layer(const Head* head, const Shape* shape, const Rows* rows, const HeadRows* head_rows,
                         const Memory* memory) {
  Job job;
  job.kind = Job::kHeadLayer;
  job.layer = head_layer_of(head, *shape, *rows, *head_rows, *memory);
  crew().run(job, shape->threads);
}

void paceline_head_rank(const Head* head, const Shape* shape, const Ranked* ranked) {
  Job job;
  job.kind = Job::kHeadRank;
  job.rank = HeadRank{head, *shape, *ranked, tickets_of(head->lm_head, ranked->rows)};
  crew().run(job, shape->threads);
}

int64_t paceline_head_growth_bytes(const Head* head, const Shape* shape, const Growth* growth) {
  Scratch scratch{nullptr};
  memory_of(*head, *shape, *growth, scratch);
  return scratch.used;
}

// memory: as many bytes as paceline_head_growth_bytes says, at an address that 64 divides.
void paceline_head_grow(const Head* head, const Shape* shape, const Growth* growth, uint8_t* memory) {
  Scratch scratch{memory};
  Job job;
  job.kind = Job::kHeadGrowth;
  job.growth = HeadGrowth{*head, *shape, *growth, memory_of(*head, *shape, *growth, scratch)};
  crew().run(job, shape->threads);
}
}
