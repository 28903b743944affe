#include "dispatch.h"

#include <string.h>

#include "linattn.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace linattn {

namespace scalar {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels table;
}
#endif

namespace {

#if defined(__x86_64__)
// The registers that the system saves when it switches between programs. Without it a processor's AVX is not usable.
uint64_t saved_registers() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t low, high;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

bool has_avx2() {
    unsigned a, b, c, d, leaf7;
    if ((saved_registers() & 0x6) != 0x6 || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    if (!(c & bit_AVX) || !(c & bit_FMA)) return false;
    return __get_cpuid_count(7, 0, &a, &leaf7, &c, &d) && (leaf7 & bit_AVX2);
}

bool has_avx512() {
    unsigned a, b, c, d;
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    return (b & needed) == needed;
}
#endif

constexpr int MOST = 3;

// Best first.
int available(const Kernels** tables) {
    int n = 0;
#if defined(__x86_64__)
    if (has_avx512()) tables[n++] = &avx512::table;
    if (has_avx2()) tables[n++] = &avx2::table;
#elif defined(__aarch64__)
    tables[n++] = &neon::table;
#endif
    tables[n++] = &scalar::table;
    return n;
}

const Kernels* chosen;

}  // namespace

const Kernels* kernels() {
    const Kernels* table = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
    if (table) return table;
    linattn_choose("");
    return __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
}

}  // namespace linattn

extern "C" {

int32_t linattn_abi_version(void) { return LINATTN_ABI_VERSION; }

const char* linattn_available(void) {
    static char names[64];
    const linattn::Kernels* tables[linattn::MOST];
    const int n = linattn::available(tables);
    char text[64] = "";
    for (int i = 0; i < n; i++) {
        if (i) strcat(text, " ");
        strcat(text, tables[i]->name);
    }
    memcpy(names, text, sizeof names);
    return names;
}

int32_t linattn_choose(const char* name) {
    const linattn::Kernels* tables[linattn::MOST];
    const int n = linattn::available(tables);
    for (int i = 0; i < n; i++) {
        if (*name && strcmp(name, tables[i]->name) != 0) continue;
        __atomic_store_n(&linattn::chosen, tables[i], __ATOMIC_RELEASE);
        return 0;
    }
    return -1;
}

const char* linattn_isa(void) { return linattn::kernels()->name; }

}  // extern "C"
