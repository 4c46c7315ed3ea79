// Threads that share the phases of a step.
//
// A phase is a number of tickets. Whoever has time takes the next one, and a phase is over when all of its
// tickets are done, not when all threads have arrived: a thread that the operating system keeps away costs
// nothing while it holds no ticket. Threads without work sleep.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// Both words are (step << 32) | count, so that a thread that comes late finds that its step is over.
struct alignas(128) Phase {
  std::atomic<uint64_t> taken{0};
  std::atomic<uint64_t> done{0};
};

// A thread's walk through the phases of one step.
class Walk {
 public:
  Walk(Phase* phases, uint32_t step, int worker) : phases_(phases), step_(step), worker_(worker) {}

  int worker() const { return worker_; }
  uint32_t step() const { return step_; }

  // Runs work(ticket) for the tickets 0 … count − 1 that this thread gets, and waits for the others. False
  // if the step has ended without this thread.
  template <class Work>
  bool phase(int64_t count, const Work& work) {
    Phase& phase = phases_[number_++];
    for (int64_t ticket; (ticket = take(phase.taken, count)) < count;) {
      if (ticket < 0) return false;
      work(ticket);
      add(phase.done);
    }
    for (int turns = 0;; ++turns) {
      const uint64_t done = phase.done.load(std::memory_order_acquire);
      if (uint32_t(done >> 32) > step_) return false;
      if (uint32_t(done >> 32) == step_ && int64_t(uint32_t(done)) == count) return true;
      if (count == 0) return true;
      if (turns < kTurnsBeforeYield) _mm_pause();
      else sched_yield();
    }
  }

 private:
  static constexpr int kTurnsBeforeYield = 4000;

  int64_t take(std::atomic<uint64_t>& word, int64_t count) const {
    uint64_t seen = word.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t step = uint32_t(seen >> 32);
      if (step > step_) return -1;
      const uint64_t ticket = step == step_ ? uint32_t(seen) : 0;
      if (int64_t(ticket) >= count) return count;
      if (word.compare_exchange_weak(seen, (uint64_t(step_) << 32) | (ticket + 1), std::memory_order_acq_rel))
        return int64_t(ticket);
    }
  }

  void add(std::atomic<uint64_t>& word) const {
    uint64_t seen = word.load(std::memory_order_relaxed);
    const auto next = [&] { return (uint32_t(seen >> 32) == step_ ? seen : uint64_t(step_) << 32) + 1; };
    while (!word.compare_exchange_weak(seen, next(), std::memory_order_acq_rel)) {
    }
  }

  Phase* phases_;
  uint32_t step_;
  int worker_;
  int number_ = 0;
};

// One per process. Job: a plain struct with `void run(Walk&) const`, copied by every thread that takes part.
template <class Job>
class Crew {
 public:
  static constexpr int kMostPhases = 4096;
  static constexpr int kMostThreads = 64;

  // Runs job on `threads` threads, this one included. Calls from several threads follow one another.
  void run(const Job& job, int threads) {
    const std::lock_guard<std::mutex> one(mutex_);
    if (threads > kMostThreads) threads = kMostThreads;
    while (int(helpers_.size()) < threads - 1) {
      const int worker = int(helpers_.size()) + 1;
      helpers_.emplace_back([this, worker] { help(worker); });
      helpers_.back().detach();
    }
    const uint32_t step = step_.load(std::memory_order_relaxed) + 1;
    writing_.store(step, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    job_ = job;
    threads_ = threads;
    step_.store(step, std::memory_order_seq_cst);
    if (threads > 1 && sleeping_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, &step_, FUTEX_WAKE_PRIVATE, kMostThreads, nullptr, nullptr, 0);
    Walk walk(phases_, step, 0);
    job.run(walk);
  }

 private:
  static constexpr int kTurnsBeforeSleep = 2000;

  void help(int worker) {
    uint32_t last = 0;
    for (;;) {
      uint32_t step;
      for (int turns = 0; (step = step_.load(std::memory_order_acquire)) == last; ++turns) {
        if (turns < kTurnsBeforeSleep) {
          _mm_pause();
          continue;
        }
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &step_, FUTEX_WAIT_PRIVATE, last, nullptr, nullptr, 0);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
      }
      last = step;
      const Job job = job_;
      const int threads = threads_;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      // The copy is whole if no later step began to be written meanwhile.
      if (writing_.load(std::memory_order_acquire) != step || worker >= threads) continue;
      Walk walk(phases_, step, worker);
      job.run(walk);
    }
  }

  Phase phases_[kMostPhases];
  std::atomic<uint32_t> step_{0};
  std::atomic<uint32_t> writing_{0};
  std::atomic<int> sleeping_{0};
  Job job_{};
  int threads_ = 1;
  std::mutex mutex_;
  std::vector<std::thread> helpers_;
};

}  // namespace paceline
