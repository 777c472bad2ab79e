// The threads of the kernels. They are this library's own, so that no second OpenMP comes into the process
// beside torch's, and so that the wheel needs no library besides the C library.
#pragma once

#include <atomic>
#include <cstdint>

namespace fovea {

// The work that the threads of one call divide among themselves: numbers 0 to `count` - 1. A thread takes a run of
// them whenever it has finished one; runs become shorter towards the end. So a slower core simply does less, and
// neighbouring work, which is often neighbouring memory, mostly stays with one thread.
class Work {
  public:
    // step: the shortest run.
    Work(int64_t count, int64_t step, int threads) : count_(count), step_(step), parts_(2 * threads) {}

    // Takes a run [from, to). Returns false if none is left.
    bool take(int64_t& from, int64_t& to) {
        from = next_.load(std::memory_order_relaxed);
        do {
            if (from >= count_) return false;
            const int64_t part = (count_ - from) / parts_, left = count_ - from;
            const int64_t run = part > step_ ? part : step_;
            to = from + (run < left ? run : left);
        } while (!next_.compare_exchange_weak(from, to, std::memory_order_relaxed));
        return true;
    }

  private:
    std::atomic<int64_t> next_{0};
    const int64_t count_, step_, parts_;
};

// Calls job(context) on `threads` threads at once, the caller included, and returns when all of them are done.
// Results must not depend on how many threads there really are: another call that runs at the same time has the
// threads, and then the caller does all the work itself.
void on_threads(int threads, void (*job)(void*), void* context);

constexpr int64_t ALONE = 16384;  // values of a simple operation that one thread handles sooner than several

struct NoScope {
    NoScope() {}
};

// Calls body(i) for i from 0 to count - 1, on up to `threads` threads, at least `step` calls on each. Each thread has an
// object of the class Scope meanwhile.
template <class Scope = NoScope, class Body>
void parallel(int threads, int64_t count, int64_t step, const Body& body) {
    if (threads > (count + step - 1) / step) threads = static_cast<int>((count + step - 1) / step);
    if (threads <= 1) {
        const Scope scope;
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
    struct Context {
        const Body& body;
        Work work;
    } context{body, Work(count, step, threads)};
    on_threads(
        threads,
        [](void* at) {
            Context& all = *static_cast<Context*>(at);
            const Scope scope;
            for (int64_t from, to; all.work.take(from, to);)
                for (int64_t i = from; i < to; ++i) all.body(i);
        },
        &context);
}

// Calls body(row) for all rows, which have `width` values each. A few values are left to the caller: they are not worth
// waking a thread.
template <class Body>
void each_row(int threads, int64_t rows, int64_t width, const Body& body) {
    parallel(rows * width > ALONE ? threads : 1, rows, ALONE / (4 * width + 1) + 1, body);
}

}  // namespace fovea
