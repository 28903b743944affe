#include "pool.h"

#include <stdint.h>

#include "platform.h"

#if defined(__linux__)
// Torch's threads, where a process has them (libgomp). After each of torch's products they spin for milliseconds on the
// cores that a second pool would need, so its own threads take turns with ours: half the speed on two cores.
extern "C" {
void GOMP_parallel(void (*run)(void*), void* context, unsigned threads, unsigned flags) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
}
#endif

namespace linattn {
namespace {

constexpr int MOST_THREADS = 1024;
// A pause takes about 40 cycles on recent x86 processors: some 50 µs, as long as Python takes between two calls.
constexpr int SPINS = 4000;
constexpr int PATIENT = 200;  // spins before the first offer to give way, should there be more threads than cores

// All waiting is for a number to change: the ticket (there is work), `finished` (it is done), the barrier's phase.
struct Pool {
    uint64_t ticket;    // (turn << 16) | count: one number, so that a late worker never sees half of a new task
    uint64_t finished;  // the turn that has ended
    uint64_t phase;     // barriers passed
    Task task;
    void* context;
    int arrived;    // at the barrier
    int remaining;  // workers that have not ended
    int workers;    // started so far
    int busy;
    int sleepers;
    Mutex mutex;
    Condition changed;
};

bool forked = false;  // libgomp hangs in the child of a process that used it

Pool pool = {0, 0, 0, nullptr, nullptr, 0, 0, 0, 0, 0, LINATTN_MUTEX, LINATTN_CONDITION};

uint64_t read(const uint64_t* number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }

uint64_t wait_for_change(uint64_t* number, uint64_t old) {
    for (int i = 0; i < SPINS; i++) {
        const uint64_t now = read(number);
        if (now != old) return now;
        if (i >= PATIENT && i % PATIENT == 0) give_way();
        relax();
    }
    lock(&pool.mutex);
    __atomic_fetch_add(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    uint64_t now;
    while ((now = __atomic_load_n(number, __ATOMIC_SEQ_CST)) == old) wait(&pool.changed, &pool.mutex);
    __atomic_fetch_sub(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
    unlock(&pool.mutex);
    return now;
}

// Either the writer sees the sleeper here, or the sleeper sees the new number before it sleeps.
void change(uint64_t* number, uint64_t value) {
    __atomic_store_n(number, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST) == 0) return;
    lock(&pool.mutex);
    wake_all(&pool.changed);
    unlock(&pool.mutex);
}

void work(intptr_t index) {
    uint64_t seen = 0;
    for (;;) {
        seen = wait_for_change(&pool.ticket, seen);
        const int count = static_cast<int>(seen & 0xffff);
        if (index >= count) continue;
        pool.task(pool.context, static_cast<int>(index), count);
        if (__atomic_sub_fetch(&pool.remaining, 1, __ATOMIC_ACQ_REL) == 0) change(&pool.finished, seen >> 16);
    }
}

#if !defined(_WIN32)
void start_over_in_child() {
    forked = true;
    // Only the forking thread lives on: the workers are gone, and a lock may have been held by one that is gone too.
    pool = {0, 0, 0, nullptr, nullptr, 0, 0, 0, 0, 0, LINATTN_MUTEX, LINATTN_CONDITION};
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, start_over_in_child); }
#endif

struct Borrowed {
    Task task;
    void* context;
};

// Runs the task on torch's threads; false where there are none.
bool run_borrowed(int threads, Task task, void* context) {
#if defined(__linux__)
    if (forked || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return false;
    Borrowed borrowed = {task, context};
    const auto run = [](void* given) {
        const Borrowed& work = *static_cast<Borrowed*>(given);
        work.task(work.context, omp_get_thread_num(), omp_get_num_threads());
    };
    GOMP_parallel(run, &borrowed, static_cast<unsigned>(threads), 0);
    return true;
#else
    (void)threads, (void)task, (void)context;
    return false;
#endif
}

// Called with `busy` held.
int with_workers(int threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    while (pool.workers < threads - 1 && start_thread(work, pool.workers + 1)) pool.workers++;
    return pool.workers + 1 < threads ? pool.workers + 1 : threads;
}

// Called with `busy` held.
void run_own(int threads, Task task, void* context) {
    const int count = with_workers(threads);
    if (count == 1) return task(context, 0, 1);
    const uint64_t turn = (pool.ticket >> 16) + 1;
    pool.task = task;
    pool.context = context;
    __atomic_store_n(&pool.remaining, count - 1, __ATOMIC_RELAXED);
    change(&pool.ticket, turn << 16 | static_cast<uint64_t>(count));
    task(context, 0, count);
    uint64_t ended = read(&pool.finished);
    while (ended != turn) ended = wait_for_change(&pool.finished, ended);
}

}  // namespace

void pool_run(int threads, Task task, void* context) {
    if (threads <= 1 || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_ACQUIRE) != 0) {
        task(context, 0, 1);
        return;
    }
    __atomic_store_n(&pool.arrived, 0, __ATOMIC_RELAXED);
    if (!run_borrowed(threads, task, context)) run_own(threads, task, context);
    __atomic_store_n(&pool.busy, 0, __ATOMIC_RELEASE);
}

void pool_barrier(int count) {
    if (count <= 1) return;
    const uint64_t phase = read(&pool.phase);
    if (__atomic_add_fetch(&pool.arrived, 1, __ATOMIC_ACQ_REL) == count) {
        __atomic_store_n(&pool.arrived, 0, __ATOMIC_RELAXED);
        change(&pool.phase, phase + 1);
    } else {
        wait_for_change(&pool.phase, phase);
    }
}

namespace {

// Each block begins with its size. A slot holds a block that nobody uses, or NULL.
#if defined(__SANITIZE_ADDRESS__)
constexpr int SLOTS = 1;
constexpr bool KEEP = false;  // a block that is larger than asked for would hide what is read beyond its end
#else
constexpr int SLOTS = 8;
constexpr bool KEEP = true;
#endif
constexpr size_t HEADER = 64, LARGEST_KEPT = size_t(64) << 20;
void* slots[SLOTS];

size_t size_of(void* block) { return *static_cast<size_t*>(block); }

void keep_or_free(void* block) {
    for (int i = 0; KEEP && i < SLOTS && size_of(block) <= LARGEST_KEPT; i++) {
        void* empty = nullptr;
        if (__atomic_compare_exchange_n(&slots[i], &empty, block, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
    }
    free_aligned(block);
}

}  // namespace

void* scratch_take(size_t bytes) {
    for (int i = 0; i < SLOTS; i++) {
        void* block = __atomic_exchange_n(&slots[i], nullptr, __ATOMIC_ACQ_REL);
        if (!block) continue;
        if (size_of(block) >= bytes) return static_cast<char*>(block) + HEADER;
        free_aligned(block);  // it grows to what is needed now
    }
    void* block = aligned_memory(bytes + HEADER);
    if (!block) return nullptr;
    *static_cast<size_t*>(block) = bytes;
    return static_cast<char*>(block) + HEADER;
}

void scratch_give_back(void* memory) {
    if (memory) keep_or_free(static_cast<char*>(memory) - HEADER);
}

}  // namespace linattn
