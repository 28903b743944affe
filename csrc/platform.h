// Threads, locks and aligned memory, by pthreads or Win32. Atomics are the compiler's own (__atomic_*).
#ifndef LINATTN_PLATFORM_H
#define LINATTN_PLATFORM_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <malloc.h>
#else
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif
#endif

namespace linattn {

#if defined(_WIN32)
using Mutex = SRWLOCK;
using Condition = CONDITION_VARIABLE;
#define LINATTN_MUTEX SRWLOCK_INIT
#define LINATTN_CONDITION CONDITION_VARIABLE_INIT
static inline void lock(Mutex* m) { AcquireSRWLockExclusive(m); }
static inline void unlock(Mutex* m) { ReleaseSRWLockExclusive(m); }
static inline void wait(Condition* c, Mutex* m) { SleepConditionVariableSRW(c, m, INFINITE, 0); }
static inline void wake_all(Condition* c) { WakeAllConditionVariable(c); }
static inline void give_way() { SwitchToThread(); }
static inline void* aligned_memory(size_t bytes) { return _aligned_malloc(bytes, 64); }
static inline void free_aligned(void* p) { _aligned_free(p); }
#else
using Mutex = pthread_mutex_t;
using Condition = pthread_cond_t;
#define LINATTN_MUTEX PTHREAD_MUTEX_INITIALIZER
#define LINATTN_CONDITION PTHREAD_COND_INITIALIZER
static inline void lock(Mutex* m) { pthread_mutex_lock(m); }
static inline void unlock(Mutex* m) { pthread_mutex_unlock(m); }
static inline void wait(Condition* c, Mutex* m) { pthread_cond_wait(c, m); }
static inline void wake_all(Condition* c) { pthread_cond_broadcast(c); }
static inline void give_way() { sched_yield(); }
static inline void* aligned_memory(size_t bytes) {
    void* p = nullptr;
    return posix_memalign(&p, 64, bytes) == 0 ? p : nullptr;
}
static inline void free_aligned(void* p) { free(p); }
#endif

// Asks for large pages under memory that is about to be written for the first time: page faults of 4 KB can take longer
// than what is computed. Smaller blocks come from memory that the process already has.
static inline void large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = uintptr_t(2) << 20;
    if (!memory || bytes < (int64_t(32) << 20)) return;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) & ~(PAGE - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(PAGE - 1);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: where it fails nothing changes
#else
    (void)memory, (void)bytes;
#endif
}

// Starts a thread that is never joined; false where the system refuses.
bool start_thread(void (*run)(intptr_t), intptr_t argument);

// Tells a core that it waits in a loop.
static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ __volatile__("yield");
#endif
}

}  // namespace linattn
#endif
