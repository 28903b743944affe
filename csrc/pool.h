// A pool of threads for short parallel tasks, and the memory they work in.
//
// Where torch's threads are in the process (libgomp), tasks run on them; else, and in a child after a fork, on threads of
// our own. One task runs at a time. A caller that finds it busy runs its task alone: several Python threads that
// each call the library then share the cores as their tasks, and nobody waits. Workers are started when they are first
// asked for. They look for work for some microseconds after a task (the next layer, the next token), then they sleep.
// After a fork the child begins with an empty pool.
#ifndef LINATTN_POOL_H
#define LINATTN_POOL_H

#include <stddef.h>

namespace linattn {

// index 0 … count - 1, each on a thread of its own, all at the same time: they may meet at barriers.
typedef void (*Task)(void* context, int index, int count);

// Runs task(context, i, count) for each i < count, with 1 <= count <= threads: fewer where the pool is busy or the
// system gives no more threads. The calling thread is index 0. Returns when all have ended.
void pool_run(int threads, Task task, void* context);

// Waits until all `count` threads of the running task are here; what they wrote before is then seen by all.
// With count == 1 it does nothing. About a microsecond where all of them are running.
void pool_barrier(int count);

// 64-byte aligned memory for one call, kept for the next one: fresh memory costs a page fault every 4 KB.
// Not cleared. NULL where there is no memory.
void* scratch_take(size_t bytes);
void scratch_give_back(void* memory);

}  // namespace linattn
#endif
