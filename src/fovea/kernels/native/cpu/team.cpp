// The team of threads. Between two calls a thread first looks for work, because the products of a decoder follow
// each other within microseconds, and then sleeps.
//
// A caller waits only for threads that have begun: when its own work is done, the call is closed, and a thread
// that wakes up later does nothing. So a thread without a core, because another process has it, delays no call that it has not begun.

#include "team.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace fovea {
namespace {

// How long a thread looks for work before it sleeps, and how long a caller waits for a team that is busy. More would
// take time from other processes.
constexpr std::chrono::microseconds PATIENCE(50), QUEUE(200);
constexpr int LOOKS = 32;  // between two looks at the clock
constexpr uint64_t CLOSED = 1ull << 31, ACTIVE = CLOSED - 1;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("isb");  // "yield" does nothing on most cores
#endif
}

// Tries until `done` returns true, for at most `patience`. Returns whether it did.
template <class Done>
bool within(std::chrono::microseconds patience, const Done& done) {
    const auto end = std::chrono::steady_clock::now() + patience;
    do {
        for (int look = 0; look < LOOKS; ++look) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// A thread, and the number of the last call that it is wanted for.
struct Helper {
    alignas(64) std::atomic<uint32_t> call{0};
    std::atomic<bool> asleep{false};
    std::mutex lock;
    std::condition_variable wake;
    pthread_t thread;

    void want(uint32_t number) {
        call.store(number, std::memory_order_seq_cst);
        if (!asleep.load(std::memory_order_seq_cst)) return;
        std::lock_guard<std::mutex> held(lock);
        wake.notify_one();
    }

    // Waits for another call than `seen`, and returns its number.
    uint32_t next(uint32_t seen) {
        const auto called = [&] { return call.load(std::memory_order_acquire) != seen; };
        if (within(PATIENCE, called)) return call.load(std::memory_order_acquire);
        std::unique_lock<std::mutex> held(lock);
        asleep.store(true, std::memory_order_seq_cst);
        wake.wait(held, [&] { return call.load(std::memory_order_seq_cst) != seen; });
        asleep.store(false, std::memory_order_relaxed);
        return call.load(std::memory_order_acquire);
    }
};

class Team {
  public:
    void run(int threads, void (*job)(void*), void* context) {
        std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
        if (threads < 2 || !within(QUEUE, [&] { return mine.try_lock(); })) return job(context);
        const size_t wanted = start(static_cast<size_t>(threads - 1));
        job_ = job, context_ = context;
        const uint32_t number = ++calls_;
        gate_.store(static_cast<uint64_t>(number) << 32, std::memory_order_release);
        for (size_t i = 0; i < wanted; ++i) helpers_[i]->want(number);
        job(context);
        gate_.fetch_or(CLOSED, std::memory_order_acq_rel);
        const auto finished = [&] { return !(gate_.load(std::memory_order_acquire) & ACTIVE); };
        if (within(PATIENCE, finished)) return;
        while (!finished()) std::this_thread::yield();  // a thread has lost its core: let it have this one
    }

    void pin(const int32_t* cpus, int count) {
        std::lock_guard<std::mutex> mine(busy_);
        cpus_.assign(cpus, cpus + count);
        for (size_t i = 0; i < helpers_.size(); ++i) bind(i);
    }

  private:
    // Starts threads until there are `wanted`. Returns how many may be used: fewer if the machine allows no more.
    size_t start(size_t wanted) {
        while (helpers_.size() < wanted) {
            auto helper = std::make_unique<Helper>();
            helper->call.store(calls_, std::memory_order_relaxed);
            try {
                std::thread thread([this, own = helper.get(), seen = calls_] { help(*own, seen); });
                helper->thread = thread.native_handle();
                thread.detach();
            } catch (const std::system_error&) {
                return helpers_.size();
            }
            helpers_.push_back(std::move(helper));
            bind(helpers_.size() - 1);
        }
        return wanted;
    }

    void help(Helper& self, uint32_t seen) {
        for (;;) {
            seen = self.next(seen);
            if (!enter(seen)) continue;
            job_(context_);
            gate_.fetch_sub(1, std::memory_order_release);
        }
    }

    // Joins call `number`, unless it is closed or over.
    bool enter(uint32_t number) {
        uint64_t gate = gate_.load(std::memory_order_acquire);
        do {
            if (gate >> 32 != number || gate & CLOSED) return false;
        } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel));
        return true;
    }

    // Binds thread `at` to its core. The caller's thread is not bound: threads that it starts would be, too.
    void bind(size_t at) {
#if defined(__linux__)
        if (cpus_.empty()) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus_[(at + 1) % cpus_.size()], &set);
        pthread_setaffinity_np(helpers_[at]->thread, sizeof(set), &set);
#else
        (void)at;
#endif
    }

    std::mutex busy_;
    std::vector<std::unique_ptr<Helper>> helpers_;
    std::vector<int32_t> cpus_;
    void (*job_)(void*) = nullptr;
    void* context_ = nullptr;
    uint32_t calls_ = 0;
    alignas(64) std::atomic<uint64_t> gate_{CLOSED};  // number of the call, CLOSED, threads that have begun
};

// Never freed: its threads may still wait when the process ends.
Team* team = nullptr;

// A child of fork has none of its parent's threads, so it gets a new team.
void renew() { team = new Team; }

Team& the_team() {
    static std::once_flag once;
    std::call_once(once, [] {
        renew();
        pthread_atfork(nullptr, nullptr, renew);
    });
    return *team;
}

}  // namespace

void on_threads(int threads, void (*job)(void*), void* context) { the_team().run(threads, job, context); }

}  // namespace fovea

extern "C" {

// Binds the helper threads, one after the other, to cores cpus[1], cpus[2], ..., cpus[0]. The caller's thread
// stays free. Does nothing on systems other than Linux.
void fovea_pin(const int32_t* cpus, int count) { fovea::the_team().pin(cpus, count); }
}
