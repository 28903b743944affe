#include "platform.h"

namespace linattn {
namespace {

struct Start {
    void (*run)(intptr_t);
    intptr_t argument;
};

void enter(void* given) {
    Start start = *static_cast<Start*>(given);
    free(given);
    start.run(start.argument);
}

#if defined(_WIN32)
DWORD WINAPI thread_main(void* given) {
    enter(given);
    return 0;
}
#else
void* thread_main(void* given) {
    enter(given);
    return nullptr;
}
#endif

}  // namespace

bool start_thread(void (*run)(intptr_t), intptr_t argument) {
    Start* start = static_cast<Start*>(malloc(sizeof(Start)));
    if (!start) return false;
    *start = {run, argument};
#if defined(_WIN32)
    HANDLE thread = CreateThread(nullptr, 0, thread_main, start, 0, nullptr);
    const bool started = thread != nullptr;
    if (started) CloseHandle(thread);
#else
    // Signals belong to the program's own threads: Python's handlers run in the main one.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool started = pthread_create(&thread, nullptr, thread_main, start) == 0;
    if (started) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    if (!started) free(start);
    return started;
}

}  // namespace linattn
