// Threadgroups on one CPU thread: a fiber a GPU thread, run until it waits for others.
//
// The scheduler is strict where Metal leaves things undefined. It fails the launch when
//   * a simdgroup function is reached by some lanes of a simdgroup only,
//   * a barrier is reached by some threads of the threadgroup only,
//   * threadgroup memory is read before it was written, or outside its bounds,
//   * two threads touch a cell, one of them writing, with no barrier between them,
//   * device memory is touched outside of a buffer (the buffers end and begin at guard pages).
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace shim {

enum class State { ready, simd, barrier, done };

constexpr int MOST = 1024;
constexpr size_t STACK = 64 << 10;

struct Fiber {
    jmp_buf at;
    State state;
    int line;   // of the call it waits in
    float sent; // what it brings to a simdgroup function
};

inline Fiber fibers[MOST];
inline float snapshots[MOST];  // a simdgroup's 32 values, when its lanes have all come
inline int current;            // the thread that runs
inline int epoch;              // barriers passed, over all launches: orders accesses
inline int generation;         // threadgroups started, over all launches
inline long barriers, reductions;
inline char reason[256];
inline jmp_buf scheduler, launcher;
inline ucontext_t first_entry, first_return;
inline char* stacks;
inline void (*entry)();

[[noreturn]] inline void fail(const char* what) {
    std::snprintf(reason, sizeof reason, "%s", what);
    _longjmp(launcher, 1);
}

inline const float* park(State state, int line, float sent) {
    Fiber& me = fibers[current];
    me.state = state;
    me.line = line;
    me.sent = sent;
    if (!_setjmp(me.at)) _longjmp(scheduler, 1);
    return snapshots + current / 32 * 32;
}

// Threadgroup memory: knows who touched each cell since which barrier.
template <typename T, int N>
class Shared {
  public:
    class Cell {
      public:
        Cell(Shared& owner, int index) : owner_(owner), index_(index) {}
        operator T() const { return owner_.read(index_); }
        void operator=(T value) { owner_.write(index_, value); }
        void operator=(const Cell& other) { owner_.write(index_, T(other)); }

      private:
        Shared& owner_;
        int index_;
    };

    // A threadgroup's first thread finds what the one before left: poison.
    void declare() {
        if (generation_ == generation) return;
        generation_ = generation;
        std::memset(values_, 0xFF, sizeof values_);
        for (Trace& trace : traces_) trace = Trace();
    }
    Cell operator[](long index) {
        if (index < 0 || index >= N) fail("threadgroup memory out of bounds");
        return Cell(*this, int(index));
    }

  private:
    struct Trace {
        int writer = -1, written = -1;   // thread, epoch
        int reader = -1, read = -1;      // reader -2: several
    };
    T read(int index) {
        Trace& trace = traces_[index];
        if (trace.writer < 0) fail("threadgroup memory read before it was written");
        if (trace.written == epoch && trace.writer != current)
            fail("race: a thread reads what another wrote since the last barrier");
        trace.reader = trace.read == epoch && trace.reader != current ? -2 : current;
        trace.read = epoch;
        return values_[index];
    }
    void write(int index, T value) {
        Trace& trace = traces_[index];
        if (trace.written == epoch && trace.writer != current)
            fail("race: two threads write a cell since the last barrier");
        if (trace.read == epoch && trace.reader != current)
            fail("race: a thread writes what another read since the last barrier");
        trace.writer = current;
        trace.written = epoch;
        values_[index] = value;
    }

    int generation_ = -1;
    T values_[N];
    Trace traces_[N];
};

inline void run_fiber() {
    // Contexts only open a fiber: each switch of theirs is a system call, a _longjmp is none.
    if (!_setjmp(fibers[current].at)) setcontext(&first_return);
    entry();
    fibers[current].state = State::done;
    _longjmp(scheduler, 1);
}

inline void make_fiber(int index) {
    if (!stacks) {
        void* room = mmap(nullptr, STACK * MOST, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) fail("no memory for stacks");
        stacks = static_cast<char*>(room);
    }
    current = index;
    fibers[index].state = State::ready;
    getcontext(&first_entry);
    first_entry.uc_stack.ss_sp = stacks + STACK * index;
    first_entry.uc_stack.ss_size = STACK;
    first_entry.uc_link = nullptr;
    makecontext(&first_entry, run_fiber, 0);
    swapcontext(&first_return, &first_entry);
}

inline void resume(int index) {
    current = index;
    if (!_setjmp(scheduler)) _longjmp(fibers[index].at, 1);
}

// Threads of a simdgroup, or of the threadgroup, must all wait in the same call.
inline bool together(int from, int to) {
    for (int i = from + 1; i < to; ++i)
        if (fibers[i].state != fibers[from].state || fibers[i].line != fibers[from].line) return false;
    return true;
}

// The order of threads: as numbered, backwards, or shuffled anew at each round.
inline void arrange(int* order, int count, int how, uint32_t& random) {
    for (int i = 0; i < count; ++i) order[i] = how == 1 ? count - 1 - i : i;
    for (int i = count - 1; how == 2 && i > 0; --i) {
        random = random * 1664525u + 1013904223u;
        const int j = int((uint64_t(random) * uint64_t(i + 1)) >> 32);
        const int kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

// What a simdgroup's lanes wait for, if they can go on without the rest of the threadgroup.
inline bool settle(int from) {
    const State state = fibers[from].state;
    if (!together(from, from + 32))
        fail(state == State::barrier ? "barrier not reached by all threads of the threadgroup"
                                     : "simdgroup function in divergent code");
    if (state != State::simd) return false;
    for (int i = from; i < from + 32; ++i) {
        snapshots[i] = fibers[i].sent;
        fibers[i].state = State::ready;
    }
    ++reductions;
    return true;
}

inline void run_threadgroup(int count, int how, uint32_t& random) {
    static int order[MOST];
    ++generation;
    ++epoch;
    for (int i = 0; i < count; ++i) make_fiber(i);
    while (true) {
        arrange(order, count, how, random);
        for (int i = 0; i < count; ++i)
            if (fibers[order[i]].state == State::ready) resume(order[i]);
        bool progress = false;
        for (int from = 0; from < count; from += 32) progress |= settle(from);
        if (progress) continue;
        if (!together(0, count)) fail("barrier not reached by all threads of the threadgroup");
        if (fibers[0].state == State::done) return;
        for (int i = 0; i < count; ++i) fibers[i].state = State::ready;
        ++epoch;
        ++barriers;
    }
}

inline void on_fault(int, siginfo_t* info, void*) {
    std::snprintf(reason, sizeof reason, "device memory out of bounds at %p", info->si_addr);
    _longjmp(launcher, 1);
}

// Memory faults end the launch instead of the process; the handlers before are put back.
class Faults {
  public:
    Faults() {
        stack_t stack{};
        stack.ss_sp = room_;
        stack.ss_size = sizeof room_;
        sigaltstack(&stack, &stack_);
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &segv_);
        sigaction(SIGBUS, &action, &bus_);
    }
    ~Faults() {
        sigaction(SIGSEGV, &segv_, nullptr);
        sigaction(SIGBUS, &bus_, nullptr);
        sigaltstack(&stack_, nullptr);
    }

  private:
    static inline char room_[64 << 10];
    stack_t stack_{};
    struct sigaction segv_ {}, bus_{};
};

// Runs `body` for every threadgroup; false, and a reason, if the kernel misbehaved. `at` is where
// the body finds its threadgroup's position.
template <typename Position>
inline bool launch(const unsigned* groups, int threads, int how, Position& at, void (*body)()) {
    Faults faults;
    uint32_t random = 12345;
    reason[0] = 0;
    barriers = reductions = 0;
    entry = body;
    if (_setjmp(launcher)) return false;
    if (threads > MOST || threads % 32) fail("threadgroup of another size than whole simdgroups");
    for (unsigned z = 0; z < groups[2]; ++z)
        for (unsigned y = 0; y < groups[1]; ++y)
            for (unsigned x = 0; x < groups[0]; ++x) {
                at = Position{x, y, z};
                run_threadgroup(threads, how, random);
            }
    return true;
}

}  // namespace shim

// `threadgroup T name[N];` in a kernel: one for all its threads.
#define SHIM_SHARED(T, name, N)         \
    static shim::Shared<T, (N)> name;   \
    name.declare()
